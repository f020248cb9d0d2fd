//! Every way in which CUDA fails: one variant per cause.

use rapt_core::{Device, Error};

/// Why a GPU did not serve.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not on this machine.
    #[error("no NVIDIA driver: libcuda is not found")]
    NoDriver,
    /// A call of the driver failed.
    #[error("{call} answered {name} ({code}): {text}")]
    Driver {
        /// The function.
        call: &'static str,
        /// Its answer.
        code: u32,
        /// The answer's name.
        name: String,
        /// The driver's words.
        text: String,
    },
    /// There is no device of this index.
    #[error("there is no CUDA device {index}: the driver sees {count}")]
    NoDevice {
        /// The index.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// The device is older than any kernel here, or newer than any architecture known here.
    #[error("{name} has compute capability {major}.{minor}; served are 8.0 to 12.x")]
    Architecture {
        /// The device's name.
        name: String,
        /// Its compute capability.
        major: u32,
        /// As above.
        minor: u32,
    },
    /// The process was forked after CUDA had started; CUDA does not work in the child.
    #[error("this process was forked after CUDA had started, and CUDA does not work in it: start it with spawn")]
    Forked,
    /// No NVRTC was found.
    #[error(
        "no CUDA compiler for a kernel that is neither shipped nor kept: NVRTC is in none of {}; `pip install nvidia-cuda-nvrtc`, or set RAPT_NVRTC to it",
        searched.join(", ")
    )]
    NoCompiler {
        /// Where it was looked for.
        searched: Vec<String>,
    },
    /// A call of the compiler failed.
    #[error("{call} answered {code}: {text}")]
    Compiler {
        /// The function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// The compiler's words.
        text: String,
    },
    /// A kernel did not compile: a defect of Rapt, or a compiler that does not know the architecture.
    #[error("the kernel {kernel} did not compile for {arch}: {log}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// The architecture.
        arch: &'static str,
        /// The compiler's log.
        log: String,
    },
    /// The archive of shipped kernels could not be made.
    #[error("the kernels to ship could not be written into {folder}: {text}")]
    Archive {
        /// Where to.
        folder: String,
        /// Why.
        text: String,
    },
}

/// The result of the fallible functions of this crate that know no device.
pub(crate) type Result<T> = std::result::Result<T, CudaError>;

impl CudaError {
    /// This error in the words of rapt-core: what keeps a device from serving at all, or what failed on it.
    #[must_use]
    pub fn on(&self, device: Device) -> Error {
        let why = self.to_string();
        match self {
            CudaError::Driver { .. } | CudaError::Compiler { .. } | CudaError::Compile { .. } => {
                Error::DeviceFailed { device, why }
            }
            _ => Error::DeviceUnavailable { device, why },
        }
    }
}
