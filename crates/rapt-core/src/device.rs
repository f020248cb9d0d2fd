//! Devices by name. Which of them are served, a backend's select says.

use std::fmt;

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// Host memory.
    Cpu,
    /// An NVIDIA GPU, by index.
    Cuda(u32),
    /// A GPU that Vulkan reaches, by the index of its adapter.
    Vulkan(u32),
    /// A device of another kind, by its DLPack code and index: known by name, not served.
    Other {
        /// DLPack's device type.
        dlpack_code: i32,
        /// Its index.
        index: i32,
    },
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            Device::Vulkan(index) => write!(f, "vulkan:{index}"),
            Device::Other { dlpack_code, index } => write!(f, "device type {dlpack_code}, index {index}"),
        }
    }
}
