//! Attention on GPUs that Vulkan reaches, over wgpu.
//!
//! ```text
//! adapters()                      what there is, and what each lacks                               adapter.rs
//! Gpu::plan(&Spec)                rapt-shader's select, its kernel compiled                        gpu.rs, device.rs, cache.rs
//! Gpu::run(&Plan, &BufferTensors) tensors in the caller's wgpu::Buffers, where they lie            buffers.rs, launch.rs
//! Gpu::run_host(&Plan, Operands)  tensors of the host: copied there and back, counted by the plan  host.rs
//! ```
//! Gpu::seconds(&Plan, …)          how long runs take, by the device's clock; and what it copies and multiplies at most       meter.rs
//!
//! libvulkan is opened where it is found; its absence is a typed error. Deliberately absent: a swap chain, images, and any other API
//! that wgpu has.

mod adapter;
mod buffers;
mod cache;
mod chunks;
mod device;
mod error;
mod gpu;
mod host;
mod launch;
mod meter;
mod staging;

pub use adapter::{AdapterFacts, adapters};
pub use buffers::{BufferTensor, BufferTensors};
pub use device::Checks;
pub use error::GpuError;
pub use gpu::{Gpu, OpenOptions};
pub use wgpu;
