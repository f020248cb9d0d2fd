//! The algorithms, each written once over [`simd::Simd`] and compiled per instruction set by `arch`.
//!
//! **Invariant:** every function that calls a vector method is `#[inline(always)]`, and so compiled inside a
//! [`Part`](simd::Part), which has the target features on; no closure calls one. tests/inlined.rs finds an intrinsic that became a call.

pub(crate) mod backward;
#[cfg(target_arch = "x86_64")]
pub(crate) mod beside;
pub(crate) mod blocks;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod code_pairs;
#[cfg(target_arch = "x86_64")]
pub(crate) mod code_quads;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod coded;
pub(crate) mod codes;
pub(crate) mod combine;
pub(crate) mod decode;
pub(crate) mod dropout;
pub(crate) mod forward;
pub(crate) mod gemm;
pub(crate) mod int8;
pub(crate) mod mask;
pub(crate) mod math;
pub(crate) mod matmul;
pub(crate) mod next_rows;
pub(crate) mod pack;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod pairs;
#[cfg(target_arch = "x86_64")]
pub(crate) mod parts;
pub(crate) mod products;
pub(crate) mod rounds;
pub(crate) mod simd;
pub(crate) mod softmax;
#[cfg(target_arch = "x86_64")]
pub(crate) mod tiled;
pub(crate) mod weigh;
