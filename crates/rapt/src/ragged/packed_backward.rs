//! Gradients of sequences that lie in packed tensors.
//!
//! Each sequence is a backward request of its own, planned as if it came alone, and the items of all are dealt to the threads together: so each
//! has the bits of [`backward_into`](Engine::backward_into). What all of them read, the sinks, has the sum of their gradients.

use rapt_core::{
    BackwardOperands, BackwardTensors, Error, Options, Queue, Result, TensorLayout, View, ViewMut, prove_disjoint,
    prove_injective,
};

use super::packed::ranks;
use super::rows::{Parts, SequenceRows};
use super::varlen::{check_totals, rows_of};
use super::{host, in_host_memory};
use crate::{Engine, backward_spec_of};

/// The tensors of [`Engine::varlen_backward`].
#[derive(Debug)]
pub struct VarlenBackwardTensors<'a> {
    /// Where queries of each sequence begin and the last ends: int32 `[sequences + 1]`, within 0 to total_q.
    pub cu_seqlens_q: View<'a>,
    /// Where its keys begin: int32 `[sequences + 1]`, within 0 to total_kv.
    pub cu_seqlens_kv: View<'a>,
    /// Those of all sequences: `[total, heads, head_dim]`, and lse and d_lse `[num_q_heads, total_q]`. They have no mask.
    pub tensors: BackwardTensors<'a>,
}

impl Engine {
    /// The gradients of [`varlen_attention`](Engine::varlen_attention) that `tensors` has places for: of each sequence what
    /// [`backward_into`](Engine::backward_into) gives for it alone, bit for bit, and of sinks the sum over the sequences in their order.
    ///
    /// Rows of no sequence get zeros. `out` and `lse` are what the forward call wrote with the same options; `options.layout` is not read.
    /// Memory beyond the gradients does not grow with the product of the lengths.
    ///
    /// # Errors
    /// Any [`Error`]; nothing is written before everything is proven. [`Error::Length`] as of the forward call; [`Error::Unsupported`]
    /// for a mask, and outside host memory: on an NVIDIA GPU [`varlen_backward_async`](Engine::varlen_backward_async) is called.
    pub fn varlen_backward(
        &self,
        tensors: VarlenBackwardTensors<'_>,
        options: &Options,
        queue: &Queue<'_>,
    ) -> Result<()> {
        let VarlenBackwardTensors { cu_seqlens_q, cu_seqlens_kv, tensors } = tensors;
        check_totals([&tensors.q, &tensors.k, &tensors.v])?;
        in_host_memory("a call of varlen_backward", tensors.q.device())?;
        let totals = [tensors.q.shape()[0], tensors.k.shape()[0]];
        let rows = rows_of([&cu_seqlens_q, &cu_seqlens_kv], totals)?;
        let offsets = [("cu_seqlens_q", &cu_seqlens_q), ("cu_seqlens_kv", &cu_seqlens_kv)];
        self.run_backwards(Backward::new(tensors, &rows, options, &offsets)?, queue)
    }

    /// The gradients of [`packed_attention`](Engine::packed_attention), as [`varlen_backward`](Engine::varlen_backward) gives them.
    ///
    /// # Errors
    /// As [`varlen_backward`](Engine::varlen_backward); [`Error::Unsupported`] for gradients by keys or values that sequences share.
    pub fn packed_backward(
        &self,
        tensors: BackwardTensors<'_>,
        rows: &SequenceRows,
        options: &Options,
        queue: &Queue<'_>,
    ) -> Result<()> {
        ranks([&tensors.q, &tensors.k, &tensors.v])?;
        in_host_memory("a call of packed_backward", tensors.q.device())?;
        self.run_backwards(Backward::new(tensors, rows, options, &[])?, queue)
    }

    fn run_backwards(&self, backward: Backward<'_>, queue: &Queue<'_>) -> Result<()> {
        let Backward { sequences, options, gaps, d_sinks } = backward;
        let executor = host(queue)?;
        self.expect_host("sequences of lengths of their own")?;
        let plan = |tensors: &BackwardTensors<'_>| {
            self.plan_backward_for(&backward_spec_of(tensors, &options)?, executor.threads())
        };
        let plans = sequences.iter().map(plan).collect::<Result<Vec<_>>>()?;
        let checked =
            sequences.into_iter().zip(&plans).map(|(tensors, plan)| BackwardOperands::check(tensors, plan.spec()));
        let mut operands = checked.collect::<Result<Vec<_>>>()?;
        let batch = rapt_cpu::BackwardBatch::new(&plans, executor.threads())?;
        self.with_workspace(batch.workspace_bytes(), |workspace| {
            batch.run(&mut operands, d_sinks, workspace, executor)
        })?;
        gaps.into_iter().try_for_each(|(tensor, gap)| rapt_cpu::fill(tensor, gap, 0.0))
    }
}

/// The gradients of packed tensors, cut into those of sequences.
struct Backward<'a> {
    sequences: Vec<BackwardTensors<'a>>,
    options: Options,
    /// Rows of no sequence.
    gaps: Vec<(&'static str, ViewMut<'a>)>,
    d_sinks: Option<ViewMut<'a>>,
}

impl<'a> Backward<'a> {
    /// # Errors
    /// Those of the whole tensors are told of these, before they are cut. `others` are what else the call reads.
    fn new(
        tensors: BackwardTensors<'a>,
        rows: &SequenceRows,
        options: &Options,
        others: &[(&'static str, &View<'_>)],
    ) -> Result<Self> {
        if tensors.mask.is_some() || tensors.d_mask.is_some() {
            let why = "its last dimension is one length";
            let instead = "call backward_into for each sequence, with a mask of its own";
            return Err(Error::unsupported("a mask with sequences of different lengths", why, instead));
        }
        let options = Options { layout: TensorLayout::Bshd, ..*options };
        let totals = [&tensors.q, &tensors.k, &tensors.v].map(|view| view.shape()[0]);
        let tensors = check_whole(tensors, totals, &options)?;
        rows.check(totals)?;
        if let Some(seed) = &tensors.dropout {
            seed.check(rows.sequences(), tensors.q.device())?;
        }
        prove_apart(&tensors, others)?;
        let BackwardTensors {
            q, k, v, sinks, alibi_slopes, dropout, out, lse, d_o, d_lse, dq, dk, dv, d_sinks, ..
        } = tensors;
        let mut gaps = Vec::new();
        let mut cut = |tensor, view: Option<ViewMut<'a>>, ranges| -> Result<_> {
            let Some(view) = view else { return Ok(None) };
            let parts = Parts::of(tensor, view, 0, ranges)?;
            gaps.extend(parts.gaps.into_iter().map(|gap| (tensor, gap)));
            Ok(Some(parts.own.into_iter()))
        };
        let (mut dqs, mut dks, mut dvs) = (cut("dq", dq, &rows.q)?, cut("dk", dk, &rows.k)?, cut("dv", dv, &rows.v)?);
        let mut next = || [&mut dqs, &mut dks, &mut dvs].map(|parts| parts.as_mut().and_then(Iterator::next));
        let sequence = |n: usize| {
            let (of_q, of_k, of_v) = (&rows.q[n], &rows.k[n], &rows.v[n]);
            let inputs = [q.narrow(0, of_q), k.narrow(0, of_k), v.narrow(0, of_v)];
            let [dq, dk, dv] = next();
            BackwardTensors {
                sinks,
                alibi_slopes,
                dropout: dropout.map(|seed| seed.after(n)),
                d_lse: d_lse.map(|d_lse| d_lse.narrow(1, of_q)),
                dq,
                dk,
                dv,
                ..BackwardTensors::new(inputs, out.narrow(0, of_q), lse.narrow(1, of_q), d_o.narrow(0, of_q))
            }
        };
        let sequences = (0..rows.sequences()).map(sequence).collect();
        Ok(Backward { sequences, options, gaps, d_sinks })
    }
}

/// That `tensors` are those of one request, as if all rows were one sequence's.
fn check_whole<'a>(
    mut tensors: BackwardTensors<'a>,
    [_, of_k, of_v]: [usize; 3],
    options: &Options,
) -> Result<BackwardTensors<'a>> {
    if of_k == of_v {
        backward_spec_of(&tensors, options)?;
        return Ok(tensors);
    }
    // Keys and values of nested tensors may have rows of their own, and are one request as far as both go.
    for (tensor, gradient, of) in [("dk", &tensors.dk, &tensors.k), ("dv", &tensors.dv, &tensors.v)] {
        if let Some(gradient) = gradient.as_ref().filter(|gradient| gradient.shape() != of.shape()) {
            return Err(Error::ShapeMismatch { tensor, got: *gradient.shape(), expected: *of.shape() });
        }
    }
    let (k, v, dk, dv) = (tensors.k, tensors.v, tensors.dk.take(), tensors.dv.take());
    let both = 0..of_k.min(of_v);
    (tensors.k, tensors.v) = (k.narrow(0, &both), v.narrow(0, &both));
    backward_spec_of(&tensors, options)?;
    Ok(BackwardTensors { k, v, dk, dv, ..tensors })
}

/// That gradients name every address once, and share no byte with what is read, nor with one another.
fn prove_apart(tensors: &BackwardTensors<'_>, others: &[(&'static str, &View<'_>)]) -> Result<()> {
    let outputs: Vec<_> = tensors.outputs().collect();
    for (n, (tensor, out)) in outputs.iter().enumerate() {
        prove_injective(tensor, out)?;
        let inputs =
            tensors.inputs().map(|(name, view)| (name, *view)).chain(others.iter().map(|(name, view)| (*name, **view)));
        for (other, view) in inputs {
            prove_disjoint(tensor, out, other, &view)?;
        }
        for (other, earlier) in &outputs[..n] {
            prove_disjoint(tensor, out, other, &earlier.as_view())?;
        }
    }
    Ok(())
}
