//! Attention as text, in WGSL for GPUs that WebGPU reaches and in Metal's language.
//!
//! ```text
//! select(&Spec, &Caps) -> Plan       which variant, how rows and keys are dealt, in which windows of memory    select.rs, partition.rs, window.rs
//! KernelVariant::source() -> String  the text of a variant: parts that all share, and an algorithm           source.rs, wgsl/
//! KernelVariant::msl() -> String     the same text in Metal's language                                        msl.rs
//! Params                             a window's parameters, byte for byte as the text declares them          params.rs
//! ShaderLaunch::bound -> BoundWindow what a window binds of buffers, its parameters, its workgroups            bound.rs
//! ```
//!
//! Pure: no device, no pointer, no unsafe code; whoever has a device compiles the text and binds the windows. Deliberately absent: f64,
//! which neither language has, and any device.

#![forbid(unsafe_code)]

mod bound;
mod caps;
mod launch;
mod matrices;
mod msl;
mod params;
mod partition;
mod select;
mod source;
mod tiles;
mod variant;
mod window;

pub use bound::{BoundRange, BoundWindow, Place, Places, check_places};
pub use caps::Caps;
pub use launch::ShaderLaunch;
pub use matrices::{MatrixTiles, MatrixUnits};
pub use params::Params;
pub use select::{lane_variants, matrix_variants, select, select_algorithm, select_kernel, variants};
pub use variant::{Algorithm, BINDINGS, Binding, KernelVariant, PARTIALS, Stores};
pub use window::{Range, Window};
