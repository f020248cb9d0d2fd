//! Tensor-core instructions on plain memory, with poison.
//!
//! ```text
//! copy(from, to):         the bits of each element, from its place in one side to its place in the other
//!                         (tcgen05.ld and .st, ldmatrix, stmatrix, element-wise stores)
//! multiply(A, B, D):      D = A·B, A and B read and D written through their sides   (mma.sync, wgmma, tcgen05.mma)
//! ```
//! Every bit of a memory knows whether it was written. Reading one that was not is poison, and poison is counted and named,
//! never a value. Sums are in f32, in the order of k. Deliberately absent: time, asynchrony, descriptors, and fp8 values
//! (the checker moves their places; no value is needed for that).

mod flow;
mod machine;

pub use flow::{Case, Outcome, run};
pub use machine::{Machine, Poison, Reading};
