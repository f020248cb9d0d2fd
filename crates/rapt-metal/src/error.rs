//! Every way in which Metal fails: one variant per cause.

use rapt_core::{Device, Error};

/// Why an Apple GPU did not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MetalError {
    /// Nobody has said where PyTorch's functions are.
    #[error("its tensors are PyTorch's, which is not loaded")]
    NotLoaded,
    /// The loaded PyTorch lacks a function.
    #[error(
        "the PyTorch that is loaded has no {function}: it was built without MPS, or is older than {since}, the first to pass a kernel its parameters"
    )]
    Missing {
        /// The function.
        function: &'static str,
        /// The version that has all of them.
        since: &'static str,
    },
    /// PyTorch refused a call.
    #[error("{call}: {why}")]
    Failed {
        /// The function.
        call: &'static str,
        /// PyTorch's words.
        why: String,
    },
    /// A view whose storage nobody holds.
    #[error("{tensor} is in no storage that is held")]
    NotHeld {
        /// The tensor.
        tensor: &'static str,
    },
    /// More storages than there are numbers for.
    #[error("{held} storages are held at a time, which is the most")]
    TooMany {
        /// How many there are.
        held: usize,
    },
}

/// The result of the fallible functions of this crate that know no request.
pub(crate) type Result<T> = std::result::Result<T, MetalError>;

impl MetalError {
    /// This error in the words of rapt-core: what keeps a device from serving at all, or what failed on it.
    #[must_use]
    pub fn on(&self, device: Device) -> Error {
        let why = self.to_string();
        match self {
            MetalError::NotLoaded | MetalError::Missing { .. } => Error::DeviceUnavailable { device, why },
            _ => Error::DeviceFailed { device, why },
        }
    }
}
