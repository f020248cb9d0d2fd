//! How every backend of Rapt is tested: one suite, one reference, one tolerance.
//!
//! ```text
//! Case (seed) ──► Values ──► TensorBuf (any strides, guarded) ──► Tensors ──► engine
//!                                                │                              │
//!                                 reference(&Spec, &Tensors) in f64  ──► tolerance ◄── out, lse
//! ```
//!
//! [`conformance()`] tests any `FnMut(&Spec, Tensors) -> Result<(), Error>`; [`proof()`] tests it on many more, enumerated, small
//! problems. The parts serve tests of their own: [`TensorBuf`] for guarded memory, [`zoo()`] for strides, [`reference()`] for the
//! truth and [`check`], [`check_lse`] for the verdict. Deliberately absent: engines, and speed.

mod buffer;
mod case;
mod conformance;
mod figures;
mod gather;
mod gradient_terms;
mod gradients;
mod memory;
#[cfg(any(unix, windows))]
mod pages;
mod proof;
mod quantized;
mod rng;
mod rounding;
mod run;
mod scalar;
#[cfg(unix)]
mod sparse;
mod tolerance;
mod torch_emulation;
mod zoo;

pub use buffer::{Damage, TensorBuf};
pub use case::{Case, Data, MaskCase, Placements, Places, Values};
pub use conformance::{Config, Failure, Tally, conformance, replay};
pub use figures::{Figures, figures};
pub use gather::{Gathered, gather, int8_reference, reference, scatter, store};
pub use gradients::{BackwardEngine, GRADIENTS, GradientCase, backward_spec_of, judge_gradients};
pub use memory::{Guard, Memory, PATTERN};
pub use proof::{Proof, proof};
pub use quantized::{CodesCase, ScaleValues, random_codes};
pub use rng::Rng;
pub use rounding::LogitRounding;
pub use run::Engine;
pub use scalar::{decode, encode, lowest, round};
#[cfg(unix)]
pub use sparse::Sparse;
pub use tolerance::{Class, Entry, Mismatch, check, check_between, check_lse, check_within, entry, floor};
pub use torch_emulation::emulations;
pub use zoo::{Placement, output_zoo, zoo};
