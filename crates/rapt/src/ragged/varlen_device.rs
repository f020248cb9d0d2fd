//! Sequences that lie one after another on a GPU, which reads where they begin.
//!
//! Host memory has a plan for each sequence; here one plan serves all. The host knows how many rows there are together, and nothing else.

use std::sync::Arc;

use rapt_core::{
    BackwardOperands, BackwardPlan, BackwardSpec, BackwardTensors, DeviceMemory, Operands, Options, Plan, Queue,
    Result, Spec, TensorLayout, Tensors,
};

use super::packed::check_outputs;
use super::packed_backward::VarlenBackwardTensors;
use super::varlen::{VarlenTensors, check_totals};
use crate::Engine;
use crate::backward::spec_of;

impl VarlenTensors<'_> {
    fn spec(&self, options: &Options) -> Result<Spec> {
        check_totals([&self.q, &self.k, &self.v])?;
        check_outputs([&self.q, &self.k, &self.v], self.codes.v.as_deref(), &self.out, self.lse.as_ref())?;
        let options = Options { layout: TensorLayout::Bshd, ..*options };
        let mut builder = Spec::builder(&self.q, &self.k, &self.v, &options);
        builder
            .varlen(&self.cu_seqlens_q, &self.cu_seqlens_kv)
            .codes(self.codes.as_deref())
            .sinks(self.sinks.as_ref())
            .alibi_slopes(self.alibi_slopes.as_ref())
            .out(&self.out);
        if let Some(lse) = &self.lse {
            builder.lse(lse);
        }
        builder.build()
    }
}

impl Engine {
    /// What runs for sequences that lie one after another on a GPU: as [`varlen_attention`](Engine::varlen_attention), with offsets that lie
    /// on the device, which reads them when it runs.
    ///
    /// # Errors
    /// Any [`Error`](rapt_core::Error): everything that the host can know is proven here.
    pub fn plan_varlen(&self, tensors: &VarlenTensors<'_>, options: &Options) -> Result<Arc<Plan>> {
        self.plan(&tensors.spec(options)?)
    }

    /// Enqueues a plan of [`plan_varlen`](Engine::plan_varlen) on a stream and waits for nothing. Each sequence has the bits of a call alone.
    /// May be captured into a CUDA graph.
    ///
    /// A sequence counts if its queries lie in q and begin where those before it, and all that offsets say of them, have ended. Rows of no
    /// sequence become zeros, and −inf in lse. A sequence whose keys do not lie in k gets NaN, and no other memory is read for it.
    ///
    /// # Errors
    /// As [`run_async`](Engine::run_async).
    ///
    /// # Safety
    /// As [`run_async`](Engine::run_async).
    pub unsafe fn varlen_attention_async(
        &self,
        plan: &Plan,
        tensors: VarlenTensors<'_>,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> Result<()> {
        let VarlenTensors { q, k, v, codes, cu_seqlens_q, cu_seqlens_kv, sinks, alibi_slopes, dropout, .. } = tensors;
        let VarlenTensors { out, lse, .. } = tensors;
        let offsets = Some([cu_seqlens_q, cu_seqlens_kv]);
        let of_run = Tensors { codes, sinks, alibi_slopes, offsets, dropout, lse, ..Tensors::new(q, k, v, out) };
        let mut operands = Operands::check(of_run, plan.spec())?;
        // SAFETY: the caller vouches for memory and stream.
        unsafe { self.run_async(plan, &mut operands, workspace, queue) }
    }
}

impl VarlenBackwardTensors<'_> {
    fn spec(&self, options: &Options) -> Result<BackwardSpec> {
        let VarlenBackwardTensors { cu_seqlens_q, cu_seqlens_kv, tensors } = self;
        check_totals([&tensors.q, &tensors.k, &tensors.v])?;
        let options = Options { layout: TensorLayout::Bshd, ..*options };
        spec_of(tensors, &options, Some([cu_seqlens_q, cu_seqlens_kv]))
    }
}

impl Engine {
    /// What runs for the gradients of sequences that lie one after another on a GPU: as [`varlen_backward`](Engine::varlen_backward), with
    /// offsets that lie on the device, which reads them when it runs.
    ///
    /// # Errors
    /// Any [`Error`](rapt_core::Error): everything that the host can know is proven here.
    pub fn plan_varlen_backward(&self, tensors: &VarlenBackwardTensors<'_>, options: &Options) -> Result<BackwardPlan> {
        self.plan_backward(&tensors.spec(options)?)
    }

    /// Enqueues a plan of [`plan_varlen_backward`](Engine::plan_varlen_backward) on a stream and waits for nothing. Each sequence has the bits of
    /// a call alone, and rows of no sequence get zeros. May be captured into a CUDA graph.
    ///
    /// Offsets that decrease or leave their tensor make no call fail, and no other memory is read or written for them; gradients are
    /// unspecified then.
    ///
    /// # Errors
    /// As [`run_async`](Engine::run_async).
    ///
    /// # Safety
    /// As [`run_async`](Engine::run_async): the gradients are the outputs.
    pub unsafe fn varlen_backward_async(
        &self,
        plan: &BackwardPlan,
        tensors: VarlenBackwardTensors<'_>,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> Result<()> {
        let VarlenBackwardTensors { cu_seqlens_q, cu_seqlens_kv, tensors } = tensors;
        let tensors = BackwardTensors { offsets: Some([cu_seqlens_q, cu_seqlens_kv]), ..tensors };
        let mut operands = BackwardOperands::check(tensors, plan.spec())?;
        // SAFETY: the caller vouches for memory and stream.
        unsafe { self.run_backward_async(plan, &mut operands, workspace, queue) }
    }
}
