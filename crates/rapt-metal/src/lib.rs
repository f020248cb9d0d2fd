//! Attention on Apple's GPUs: the texts of rapt-shader in Metal's language, on PyTorch's tensors, arrays of MLX and buffers.
//!
//! ```text
//! Functions::find(symbol)        PyTorch's C functions for Metal, by name                         functions.rs
//! Backend::place(tensor, …)      a tensor's storage and offset as an address, while it is held     storages.rs
//! Backend::plan(&Spec)           rapt-shader's select with Caps::METAL, its kernels compiled       backend.rs
//! Backend::run(&Plan, Operands)  what is bound, and the dispatches, window by window               launch.rs, backend.rs
//! Buffers::run(&Plan, tensors)   the same on tensors in the caller's MTLBuffers, by the caller's queue       buffers.rs, objc.rs
//! mlx(&Spec)                     a plan as kernels that MLX compiles and launches                  mlx.rs
//! ```
//! Nothing of PyTorch's is linked, and of Apple's Metal alone by the feature `objc` on macOS: functions are found in what the process has loaded. **It was never run on Apple hardware.**
//! Deliberately absent: a device, a queue and memory, which are PyTorch's, MLX's or the caller's.

mod backend;
mod buffers;
mod error;
mod functions;
mod launch;
mod mlx;
#[cfg(all(target_os = "macos", feature = "objc"))]
mod objc;
mod storages;

pub use backend::Backend;
pub use buffers::{Buffer, BufferDispatch, BufferTensor, BufferTensors, Buffers, Metal};
pub use error::MetalError;
pub use functions::{Functions, TensorHandle};
pub use mlx::{Dimensions, MlxKernel, MlxLaunch, mlx};
#[cfg(all(target_os = "macos", feature = "objc"))]
pub use objc::{MetalBuffer, MetalQueue};
pub use storages::Placed;

/// What `doctor` says of this backend.
pub const NEVER_RUN: &str = "never run on Apple hardware";
