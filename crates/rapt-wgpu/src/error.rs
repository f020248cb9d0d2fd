//! Every way in which a GPU fails: one variant per cause.

use rapt_core::{Device, Error};

/// Why a GPU did not serve.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no adapter of this index.
    #[error("there is no Vulkan adapter {index}: libvulkan and its drivers show {count}")]
    NoAdapter {
        /// The index.
        index: u32,
        /// How many there are.
        count: usize,
    },
    /// The adapter has less than the kernels need.
    #[error("{adapter} lacks {what}, which the kernels need")]
    Missing {
        /// The adapter's name.
        adapter: String,
        /// What it lacks.
        what: String,
    },
    /// The driver gives no device.
    #[error("{adapter} gives no device: {why}")]
    NoDevice {
        /// The adapter's name.
        adapter: String,
        /// The driver's words.
        why: String,
    },
    /// The device is lost; what is asked of the engine next opens it again.
    #[error("the device is lost: {why}")]
    Lost {
        /// The driver's words.
        why: String,
    },
    /// The device does not have that much memory.
    #[error("the device has no {bytes} bytes of memory left")]
    OutOfMemory {
        /// What was asked for.
        bytes: usize,
    },
    /// The device refused a call.
    #[error("{call}: {why}")]
    Failed {
        /// What was asked.
        call: &'static str,
        /// wgpu's words.
        why: String,
    },
}

/// The result of the fallible functions of this crate that know no request.
pub(crate) type Result<T> = std::result::Result<T, GpuError>;

impl GpuError {
    /// This error in the words of rapt-core: what keeps a device from serving at all, or what failed on it.
    #[must_use]
    pub fn on(&self, device: Device) -> Error {
        let why = self.to_string();
        match self {
            GpuError::OutOfMemory { bytes } => Error::OutOfMemory { bytes: *bytes },
            GpuError::Lost { .. } | GpuError::Failed { .. } => Error::DeviceFailed { device, why },
            _ => Error::DeviceUnavailable { device, why },
        }
    }
}
