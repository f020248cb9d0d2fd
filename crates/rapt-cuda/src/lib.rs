//! Attention on NVIDIA GPUs, sm_80 and later.
//!
//! ```text
//! select(&Spec, &Caps) -> Plan      pure                                              select.rs
//! Backend::plan(&Spec)              machine code: shipped, kept on disk, or compiled  shipped.rs, cache.rs, code.rs
//! Backend::run(&Plan, Operands, …)  one launch, or two where keys are split           backend.rs, params.rs
//! sys -> result                     foreign functions -> checked and typed            sys/, result/
//! kernels/*.cu                      the algorithms
//! ship(folder, kept)                the common kernels, compiled for a package        prebuild.rs
//! ```
//!
//! Nothing of CUDA is linked: the driver and the compiler (NVRTC) are opened where they are found, and their absence is a
//! typed error. Deliberately absent: streams of its own, synchronisation, and memory but for doors that ask ([`Memory`]).

mod backend;
mod cache;
mod code;
mod error;
mod memory;
mod params;
mod prebuild;
mod result;
mod select;
mod shipped;
mod source;
mod sys;
mod tensor_map;

pub use backend::{Backend, DeviceFacts, prepend_library_folders};
pub use code::{Code, Report};
pub use error::CudaError;
pub use memory::{Mark, Memory};
pub use prebuild::{Assortment, Built, Wrote, build_all, common_codes, ship};
pub use select::{Caps, CudaLaunch, codes, select};
pub use shipped::{ShippedFacts, set_shipped_folder};

#[cfg(test)]
mod recorded;
