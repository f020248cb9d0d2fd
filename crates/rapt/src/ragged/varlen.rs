//! Sequences that lie one after another.

use rapt_core::{Codes, DropoutSeed, Error, Options, Qkv, Queue, Result, View, ViewMut};

use super::in_host_memory;
use super::lengths;
use super::packed::{PackedTensors, Requests, ranks};
use super::rows::SequenceRows;
use crate::Engine;

/// The tensors of [`Engine::varlen_attention`].
#[derive(Debug)]
pub struct VarlenTensors<'a> {
    /// Queries of all sequences, `[total_q, num_q_heads, head_dim]`.
    pub q: View<'a>,
    /// Keys, `[total_kv, num_kv_heads, head_dim]`.
    pub k: View<'a>,
    /// Values, `[total_kv, num_kv_heads, head_dim_v]`.
    pub v: View<'a>,
    /// What makes numbers of those of q, k and v that are codes. A factor has a row for each of theirs, `[total, heads]` (token) or
    /// `[total, heads, blocks]`, or is of all sequences: `[]` (tensor), `[heads]` (head), `[1, heads, head_dim]` (channel).
    pub codes: Qkv<Option<Box<Codes<'a>>>>,
    /// Where queries of each sequence begin and the last ends: int32 `[sequences + 1]`, within 0 to total_q.
    pub cu_seqlens_q: View<'a>,
    /// Where its keys begin: int32 `[sequences + 1]`, within 0 to total_kv.
    pub cu_seqlens_kv: View<'a>,
    /// One more logit per head, `[num_q_heads]`.
    pub sinks: Option<View<'a>>,
    /// ALiBi slopes, `[num_q_heads]`.
    pub alibi_slopes: Option<View<'a>>,
    /// Which weights are dropped, where the options drop some: sequence `n` is batch entry `n`.
    pub dropout: Option<DropoutSeed>,
    /// Where the result goes, `[total_q, num_q_heads, head_dim_v]`.
    pub out: ViewMut<'a>,
    /// Where the log of the sum of exponentials goes, `[num_q_heads, total_q]`.
    pub lse: Option<ViewMut<'a>>,
}

/// That q, k and v have three dimensions, and k and v one number of rows.
pub(super) fn check_totals(of: [&View<'_>; 3]) -> Result<()> {
    let [_, [expected, ..], [got, ..]] = ranks(of)?;
    if got == expected {
        return Ok(());
    }
    Err(Error::SizeMismatch { tensor: "v", size: "total_kv", got, other: "k", expected })
}

/// The rows of each sequence that lies between two offsets.
pub(super) fn rows_of(
    [cu_seqlens_q, cu_seqlens_kv]: [&View<'_>; 2],
    [of_q, of_kv]: [usize; 2],
) -> Result<SequenceRows> {
    let q = lengths::ranges("cu_seqlens_q", cu_seqlens_q, of_q)?;
    let k = lengths::ranges("cu_seqlens_kv", cu_seqlens_kv, of_kv)?;
    if q.len() != k.len() {
        let (got, expected) = (k.len(), q.len());
        let (tensor, other) = ("cu_seqlens_kv", "cu_seqlens_q");
        return Err(Error::SizeMismatch { tensor, size: "sequences", got, other, expected });
    }
    Ok(SequenceRows { v: k.clone(), q, k })
}

impl Engine {
    /// Attention of each sequence to its own keys: what [`attention_into`](Engine::attention_into) gives for each alone, bit for bit.
    ///
    /// A sequence without keys, and rows of no sequence, get zeros, and −inf in lse. `options.layout` is not read: the layout is that of
    /// the tensors. Codes are served as in each call alone, with [`Compute::Int8`](rapt_core::Compute::Int8) too.
    ///
    /// # Errors
    /// Any [`Error`]; nothing is written before everything is proven. [`Error::Length`] for offsets that begin below 0, fall, or pass
    /// the last row; [`Error::Unsupported`] outside host memory, where
    /// [`varlen_attention_async`](Engine::varlen_attention_async) runs.
    pub fn varlen_attention(&self, tensors: VarlenTensors<'_>, options: &Options, queue: &Queue<'_>) -> Result<()> {
        self.run_requests(tensors.cut(options)?, queue)
    }
}

impl<'a> VarlenTensors<'a> {
    /// The request of each sequence of host memory, and its tensors.
    ///
    /// # Errors
    /// As [`Engine::varlen_attention`].
    pub(super) fn cut(self, options: &Options) -> Result<Requests<'a>> {
        let (cu_seqlens_q, cu_seqlens_kv) = (self.cu_seqlens_q, self.cu_seqlens_kv);
        let packed = self.packed()?;
        in_host_memory("a call of varlen_attention", packed.q.device())?;
        let totals = [packed.q.shape()[0], packed.k.shape()[0]];
        let rows = rows_of([&cu_seqlens_q, &cu_seqlens_kv], totals)?;
        packed.cut(&rows, options, &[("cu_seqlens_q", &cu_seqlens_q), ("cu_seqlens_kv", &cu_seqlens_kv)])
    }

    /// The same without offsets, of which the sizes are checked.
    pub(super) fn packed(self) -> Result<PackedTensors<'a>> {
        check_totals([&self.q, &self.k, &self.v])?;
        let VarlenTensors { q, k, v, codes, sinks, alibi_slopes, dropout, out, lse, .. } = self;
        let packed = PackedTensors { q, k, v, codes, sinks, alibi_slopes, dropout, out, lse };
        packed.check()?;
        Ok(packed)
    }
}
