//! Sequences of different lengths in one call: lying one after another ([`VarlenTensors`]), or in a cache ([`KvCacheTensors`]).
//!
//! ```text
//! varlen    q, k, v [total, heads, head_dim], cut at cu_seqlens; packed: the rows of each wherever they lie
//! cache     k, v [batch, most keys, heads, head_dim], or pages in the order of a page table; lengths of their own
//! ```
//! Each sequence is a request of its own, planned as if it came alone, and the items of all are dealt to the threads together: so each
//! has the bits of a call alone. Deliberately absent: padding, and any copy of a sequence.

mod append;
mod cache;
mod cache_view;
mod device;
mod explain;
mod kv_cache;
mod lengths;
mod packed;
mod packed_backward;
mod rows;
mod varlen;
mod varlen_device;

use std::sync::Arc;

use rapt_core::{
    Codes, Device, DropoutSeed, Error, Operands, Options, Plan, Qkv, Queue, Result, Spec, Tensors, View, ViewMut,
    prove_disjoint,
};

use crate::Engine;

pub use cache::KvCacheTensors;
pub use cache_view::{CacheCodes, CacheView};
pub use explain::{RaggedPart, RaggedPlan};
pub use kv_cache::{KvCache, KvCacheForm, KvCacheQueries, SequenceId};
pub use packed::PackedTensors;
pub use packed_backward::VarlenBackwardTensors;
pub use rows::SequenceRows;
pub use varlen::VarlenTensors;

/// What one sequence attends with.
struct Sequence<'a> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    codes: Qkv<Option<Box<Codes<'a>>>>,
    sinks: Option<View<'a>>,
    alibi_slopes: Option<View<'a>>,
    dropout: Option<DropoutSeed>,
    /// Where k and v are pages: their table, and the keys of this sequence.
    pages: Option<(View<'a>, usize)>,
}

impl<'a> Sequence<'a> {
    fn spec(&self, out: &ViewMut<'_>, lse: Option<&ViewMut<'_>>, options: &Options) -> Result<Spec> {
        let mut builder = Spec::builder(&self.q, &self.k, &self.v, options);
        builder
            .codes(self.codes.as_deref())
            .sinks(self.sinks.as_ref())
            .alibi_slopes(self.alibi_slopes.as_ref())
            .out(out);
        if let Some(lse) = lse {
            builder.lse(lse);
        }
        if let Some((table, kv_len)) = &self.pages {
            builder.pages(table, *kv_len);
        }
        builder.build()
    }

    fn tensors(self, out: ViewMut<'a>, lse: Option<ViewMut<'a>>) -> Tensors<'a> {
        let Sequence { q, k, v, codes, sinks, alibi_slopes, dropout, pages } = self;
        let page_table = pages.map(|(table, _)| table);
        Tensors { codes, sinks, alibi_slopes, page_table, dropout, lse, ..Tensors::new(q, k, v, out) }
    }
}

/// Proves that an output of a whole batch shares no byte with what any of its sequences reads.
fn prove_apart<'v>(
    tensor: &'static str,
    out: &ViewMut<'_>,
    inputs: impl IntoIterator<Item = (&'static str, Option<&'v View<'v>>)>,
) -> Result<()> {
    let mut given = inputs.into_iter().filter_map(|(name, view)| Some((name, view?)));
    given.try_for_each(|(name, view)| prove_disjoint(tensor, out, name, view).map(drop))
}

/// Refuses sequences that do not lie in host memory: no kernel elsewhere reads where they begin.
fn in_host_memory(what: &'static str, device: Device) -> Result<()> {
    if device == Device::Cpu {
        return Ok(());
    }
    let instead = "move all tensors to host memory, or call `attention` for each sequence";
    Err(Error::unsupported(format!("{what} on {device}"), "its kernels read no offsets of sequences", instead))
}

impl Engine {
    /// The plan of each sequence on so many threads.
    fn plan_each(&self, specs: &[Spec], threads: usize) -> Result<Vec<Arc<Plan>>> {
        self.expect_host("sequences of lengths of their own")?;
        specs.iter().map(|spec| self.plan_for(spec, threads)).collect()
    }

    /// Runs every plan on its tensors.
    fn run_each(&self, plans: &[Arc<Plan>], tensors: Vec<Tensors<'_>>, queue: &Queue<'_>) -> Result<()> {
        let executor = host(queue)?;
        let checked = tensors.into_iter().zip(plans).map(|(tensors, plan)| Operands::check(tensors, plan.spec()));
        let mut operands = checked.collect::<Result<Vec<_>>>()?;
        let batch = rapt_cpu::Batch::new(plans, executor.threads())?;
        self.with_workspace(batch.workspace_bytes(), |workspace| batch.run(&mut operands, workspace, executor))
    }
}

fn host<'q>(queue: &Queue<'q>) -> Result<&'q dyn rapt_core::Executor> {
    match *queue {
        Queue::Host(executor) => Ok(executor),
        _ => Err(Error::unsupported("a ragged batch on this queue", "its run ends with the call", "use Queue::Host")),
    }
}
