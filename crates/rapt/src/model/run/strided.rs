//! Kernels over strided tensors: the values are looked at first, then items are dealt to threads.

use rapt_cpu::strided::{Fault, Kernel};
use rapt_graph::OpError;

use super::super::ModelError;
use super::super::plan::Place;
use super::{Frame, SharedPointers};

/// The most operands of a kernel.
const MOST_OPERANDS: usize = 4;

impl Frame<'_> {
    /// # Safety
    /// As [`Frame::run`].
    pub(super) unsafe fn strided(
        &self,
        kernel: &dyn Kernel,
        operands: &[Place],
    ) -> Result<Result<(), OpError>, ModelError> {
        let mut pointers = [std::ptr::null_mut(); MOST_OPERANDS];
        for (pointer, place) in pointers.iter_mut().zip(operands) {
            *pointer = self.at(place);
        }
        let pointers = &pointers[..operands.len().min(MOST_OPERANDS)];
        // SAFETY: promised by the caller: the pointers are those of the kernel's operands.
        if let Err(fault) = unsafe { kernel.check(pointers) } {
            return Ok(Err(refused(fault)));
        }
        let (items, pointers) = (kernel.items(self.plan.threads), SharedPointers(pointers));
        self.items(items, &|item, scratch| {
            let pointers = &pointers;
            // SAFETY: as above; items write apart, and nothing is refused any more.
            unsafe { kernel.run_item(item, items, pointers.0, scratch) };
        })?;
        Ok(Ok(()))
    }
}

fn refused(fault: Fault) -> OpError {
    match fault {
        Fault::Index { index, dim, size } => {
            OpError::IndexOutOfRange { index, dim, size: i64::try_from(size).unwrap_or(i64::MAX) }
        }
        range @ Fault::Range { .. } => OpError::Shape(range.to_string()),
    }
}
