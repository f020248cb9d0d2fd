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
    /// An Apple GPU whose memory PyTorch has (MPS), by its index there.
    Mps(u32),
    /// The GPU of a page in a browser: WebGPU's.
    WebGpu,
    /// A device of another kind, by its DLPack code and index: known by name, not served.
    Other {
        /// DLPack's device type.
        dlpack_code: i32,
        /// Its index.
        index: i32,
    },
}

impl Device {
    /// The device of this name: `cpu`, or `cuda`, `vulkan` or `mps` with an index behind a colon, 0 without one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Device> {
        let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
        let is_index = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
        let index = index.parse().ok().filter(|_| is_index)?;
        match kind {
            "cpu" if name == kind => Some(Device::Cpu),
            "cuda" => Some(Device::Cuda(index)),
            "vulkan" => Some(Device::Vulkan(index)),
            "mps" => Some(Device::Mps(index)),
            _ => None,
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            Device::Vulkan(index) => write!(f, "vulkan:{index}"),
            Device::Mps(index) => write!(f, "mps:{index}"),
            Device::WebGpu => f.write_str("webgpu"),
            Device::Other { dlpack_code, index } => write!(f, "device type {dlpack_code}, index {index}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_one_device() {
        for device in [Device::Cpu, Device::Cuda(0), Device::Cuda(7), Device::Vulkan(12), Device::Mps(0)] {
            assert_eq!(Device::from_name(&device.to_string()), Some(device));
        }
        assert_eq!(Device::from_name("vulkan"), Some(Device::Vulkan(0)));
        assert_eq!(Device::from_name("mps"), Some(Device::Mps(0)));
        for wrong in
            ["", "cpu:0", "vulkan:", "vulkan:-1", "vulkan:+1", "vulkan:1:2", "vulkan:4294967296", "Vulkan:0", "metal"]
        {
            assert_eq!(Device::from_name(wrong), None, "{wrong}");
        }
    }
}
