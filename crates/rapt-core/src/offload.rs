//! A device that tensors of the host are copied to: what an engine asks of it, whoever implements it.

use std::fmt::Debug;

use crate::{Device, Operands, Plan, Result, Spec};

/// Attends to tensors of the host on a device with memory of its own: elements are copied there, and those of the outputs back. The plan
/// counts the bytes (`bytes_copied` of its cost).
pub trait Offload: Debug + Send + Sync {
    /// The device that computes.
    fn device(&self) -> Device;

    /// What runs for `spec`, whose tensors lie in host memory, its kernel compiled.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) with what to do instead; [`Error::DeviceFailed`](crate::Error::DeviceFailed),
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    fn plan_host(&self, spec: &Spec) -> Result<Plan>;

    /// Whether `plan` is one that [`Offload::plan_host`] makes, rather than a backend of the host.
    fn is_planned_here(&self, plan: &Plan) -> bool;

    /// Runs such a plan; `out` and `lse` are written when it returns, and not touched where it fails.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`](crate::Error::NotAsPlanned) for another plan or operands of another spec; as [`Offload::plan_host`].
    fn run_host(&self, plan: &Plan, operands: &mut Operands<'_>) -> Result<()>;
}
