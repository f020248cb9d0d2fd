//! Attention on NVIDIA GPUs, sm_80 and later.
//!
//! ```text
//! select(&Spec, &Caps) -> Plan      pure                                              select.rs
//! Backend::prepare(&mut Plan)       CUDA C++ -> machine code, kept on disk            code.rs, cache.rs
//! Backend::run(&Plan, Operands, …)  one launch, or two where keys are split           backend.rs, params.rs
//! sys -> result                     foreign functions -> checked and typed            sys/, result/
//! kernels/*.cu                      the algorithms
//! ```
//!
//! Nothing of CUDA is linked: the driver and the compiler (NVRTC) are opened where they are found, and their absence is a
//! typed error. Deliberately absent: allocation of device memory, streams of its own, synchronisation.

mod backend;
mod cache;
mod code;
mod error;
mod params;
mod result;
mod select;
mod sys;
mod tensor_map;

pub use backend::{Backend, DeviceFacts, prepend_library_folders};
pub use code::{Code, Report, compile_all};
pub use error::CudaError;
pub use select::{Caps, codes, select};

#[cfg(test)]
mod recorded;
