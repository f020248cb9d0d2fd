//! Attention on NVIDIA GPUs, sm_80 and later.
//!
//! ```text
//! select(&Spec, &Caps) -> Plan      pure: variant, partition, parameters, tensor maps   select/, launch.rs
//! Backend::plan(&Spec)              the same, its machine code loaded                   backend.rs, artifacts/
//! Backend::run(&Plan, Operands, …)  one launch, or two where keys are split             launch.rs
//! Backend::run_backward(…)          gradients: rows, then dk and dv, dq, …                  launch/backward.rs
//! Backend::deviations(…)            how far heads on codes may be off, read back        launch/deviation.rs
//! kernels/*.cu                      the algorithms
//! ship(folder, kept)                the common kernels, compiled for a package          prebuild.rs
//! ```
//!
//! Nothing of CUDA is linked: the driver and the compiler (NVRTC) are opened where they are found, and their absence is a
//! typed error. Deliberately absent: streams of its own, synchronisation, and memory but for bindings that ask ([`Memory`]).
//!
//! A module uses those before it in this order, and none after it (`modules.rs` of the tests compares):
//!
//! ```text
//! error  access  codes  tensor_map  partition  params  append  backward  deviation  varlen  driver  source  variant  artifacts  launch  select  backend  memory  prebuild
//! ```

mod access;
mod append;
mod artifacts;
mod backend;
mod backward;
mod codes;
mod deviation;
mod driver;
mod error;
mod launch;
mod memory;
mod params;
mod partition;
mod prebuild;
mod select;
mod source;
mod tensor_map;
mod variant;
mod varlen;

pub use append::NewKeys;
pub use artifacts::{CompiledFacts, Provenance, ShippedFacts, prepend_library_folders, set_shipped_folder};
pub use backend::{Backend, DeviceFacts};
pub use codes::{CodeKind, Codes, TileCodes, TileScales};
pub use error::CudaError;
pub use launch::{BackwardLaunch, CudaLaunch, DeviationPlan};
pub use memory::{Mark, Memory};
pub use prebuild::{Assortment, Built, Wrote, build_all, common_variants, ship};
pub use select::{Caps, backward_variants, deviation_variants, select, select_backward, variants};
pub use variant::{Algorithm, KernelVariant, Loads, Pass, Sequences};

#[cfg(test)]
mod recorded;
