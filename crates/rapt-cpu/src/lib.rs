//! Kernels on CPUs: AVX-512, AVX2, NEON, WebAssembly's simd128 and plain Rust from one generic body. Attention:
//!
//! ```text
//! select(&Spec, &Caps) -> Plan      pure                                    select/
//!   tiles: how large pieces are     measured by `cargo xtask tune`          select/tiles/
//! run(&Plan, Operands, …)           deals items to threads                  run.rs
//!   forward: many queries           queries along the lanes                 kernels/forward.rs
//!   decode:  few queries            head_dim along the lanes                kernels/decode/
//! select_backward(&BackwardSpec, …), run_backward(…)                        backward.rs
//!   backward: gradients             products of both forms                  kernels/backward/
//! ```
//! and what exported programs are made of besides: products with packed weights ([`gemm`]), chains of pointwise functions
//! ([`pointwise`]), what runs along rows ([`rows`]), and what takes strided tensors as they lie ([`strided`]): reductions, order,
//! elements by index, windows over images.
//!
//! Deliberately absent: allocation (but for packed weights and the list of a batch), threads of its own, and any access outside the operands.

#![cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, unused_imports, reason = "only x86-64 multiplies codes as they are loaded, and tiles")
)]

mod arch;
mod backward;
mod backward_batch;
mod backward_problem;
mod backward_steps;
mod caps;
pub mod ceiling;
mod deviation;
mod dropping;
mod fill;
pub mod gemm;
mod kernels;
mod launch;
mod partition;
pub mod pointwise;
mod problem;
pub mod rows;
mod run;
mod scratch;
mod select;
pub mod strided;
mod task_rows;
pub mod tune;

pub use arch::{KernelVariant, Step};
pub use backward::{BackwardLaunch, run_backward, select_backward};
pub use backward_batch::BackwardBatch;
pub use caps::{available, detect};
#[doc(hidden)]
pub use caps::{model_tiles, tile_every_request};
pub use deviation::deviations;
pub use fill::fill;
pub use launch::CpuLaunch;
pub use run::{Batch, heads_together, run, run_heads};
pub use select::{select, tiles};
