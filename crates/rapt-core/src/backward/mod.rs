//! The gradients of a request: what arrives, what leaves, and what runs for them.
//!
//! ```text
//!               BackwardSpec ──select──► BackwardPlan
//! Views ──► BackwardOperands ──checked──► run ──► dq, dk, dv (+ d_mask, d_sinks)
//! ```
//! A [`BackwardSpec`] is a forward [`Spec`](crate::Spec), whose `out` and `lse` are read here, with the forms of the gradients. Any subset of the
//! gradients may be asked for; each has the dtype and the sizes of its input. With dropout the run says again which weights were dropped.
//! Deliberately absent: gradients of ALiBi's slopes, of scales and of softcap.

mod operands;
mod plan;
mod spec;

pub use operands::{BackwardOperands, BackwardTensors};
pub use plan::BackwardPlan;
pub use spec::{BackwardSpec, GradientForms};
