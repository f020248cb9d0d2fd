//! Attention on Apple's GPUs: the texts of rapt-shader in Metal's language, on PyTorch's tensors, encoded by PyTorch.
//!
//! ```text
//! Functions::find(symbol)        PyTorch's C functions for Metal, by name                         functions.rs
//! Backend::place(tensor, …)      a tensor's storage and offset as an address, while it is held     storages.rs
//! Backend::plan(&Spec)           rapt-shader's select with Caps::METAL, its kernels compiled       backend.rs
//! Backend::run(&Plan, Operands)  what is bound, and the dispatches, window by window               backend.rs
//! mlx(&Spec)                     a plan as kernels that MLX compiles and launches                  mlx.rs
//! ```
//! Nothing of Apple's or PyTorch's is linked: functions are found in what the process has loaded. **It was never run on Apple hardware.**
//! Deliberately absent: a device, a queue and memory, which are PyTorch's.

mod backend;
mod error;
mod functions;
mod mlx;
mod storages;

pub use backend::Backend;
pub use error::MetalError;
pub use functions::{Functions, TensorHandle};
pub use mlx::{Dimensions, MlxKernel, MlxLaunch, mlx};
pub use storages::Placed;

/// What `doctor` says of this backend.
pub const NEVER_RUN: &str = "never run on Apple hardware";
