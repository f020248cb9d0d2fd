//! A request for gradients as the kernels see it: pointers, strides and sizes, how it is cut, and its scratch memory.
//!
//! ```text
//! a task          a key head, and the queries of all heads of its group, one head after another
//! an item         a chunk of a task's keys: blocks of keys (outer), runs of tiles of queries (inner)
//! row state       [batch][num_q_heads][q_len]: what probabilities are recomputed from, and delta
//! partial dq      [tasks of a wave][chunks][tiles][head_dim, in whole tiles][queries]: sums over the keys of one chunk
//! shared sums     of a gradient that tasks share: the sum of theirs so far, and of dk and dv each task's own of the wave
//! ```

use std::sync::{Arc, OnceLock};

use rapt_core::{BackwardOperands, BackwardSpec, MaskClass, TensorSpec};

use crate::dropping::Dropping;
use crate::problem::{Input, Output, Scores};
use crate::task_rows::TaskRows;

/// What the products of an instruction set ask of memory, and of how work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Form {
    /// A block has a multiple of it of keys, or as many as there are and room for it; what is left out of one, too.
    pub(crate) key_run: usize,
    /// Keys whose products lie in a tile's scratch memory at a time, so that they stay in the nearest cache until they are weights: a multiple of the
    /// keys of a lane.
    pub(crate) keys_at_a_time: usize,
    /// Rows of sums along head_dim, and lanes of packed rows along it, are multiples of it.
    pub(crate) dim_run: usize,
    /// Tiles of queries of a run.
    pub(crate) tiles: usize,
    /// Whether K and V are read where they lie, if their rows are lanes.
    pub(crate) in_place: bool,
}

/// How a request for gradients is cut: by lengths, head dims and the instruction set, but for `wave`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardPartition {
    pub(crate) tasks: usize,
    /// Rows of a task.
    pub(crate) rows: usize,
    /// Queries of a tile.
    pub(crate) queries: usize,
    /// How the kernels cut it: the rows of a run of tiles are contracted at a time.
    pub(crate) form: Form,
    pub(crate) block_n: usize,
    /// A multiple of `block_n`.
    pub(crate) chunk_keys: usize,
    pub(crate) chunks: usize,
    /// Tasks whose partial sums of dq lie in memory at a time.
    pub(crate) wave: usize,
    /// Numbers of a lane of products, and lanes that a number is the sum of.
    pub(crate) steps: usize,
    pub(crate) parts: usize,
    /// Elements of the partial sums of dq of a tile.
    pub(crate) tile_of_dq: usize,
    /// Whether K and V are read where they lie.
    pub(crate) k_in_place: bool,
    pub(crate) v_in_place: bool,
}

impl BackwardPartition {
    /// Rows of a run.
    pub(crate) fn run_rows(&self) -> usize {
        self.queries * self.form.tiles
    }

    /// Lanes of a packed row of `dim` numbers of K or V.
    pub(crate) fn lanes(&self, dim: usize) -> usize {
        dim.div_ceil(self.steps).next_multiple_of(self.form.dim_run) * self.parts
    }

    /// The same work by lanes of one number, where tasks with numbers that lanes do not hold are computed so (`kernels/parts`).
    pub(crate) fn plain(&self) -> BackwardPartition {
        let form = Form { key_run: 1, keys_at_a_time: 64, dim_run: 1, in_place: false, ..self.form };
        BackwardPartition { form, steps: 1, parts: 1, k_in_place: false, v_in_place: false, ..*self }
    }

    /// Tiles of a task.
    pub(crate) fn task_tiles(&self) -> usize {
        self.rows.div_ceil(self.queries)
    }

    /// Blocks of keys of a task.
    pub(crate) fn blocks(&self, kv_len: usize) -> usize {
        kv_len.div_ceil(self.block_n)
    }

    /// Elements of the partial sums of dq of one task.
    pub(crate) fn partials_of_task(&self) -> usize {
        self.task_tiles().saturating_mul(self.tile_of_dq).saturating_mul(self.chunks)
    }
}

/// Where things lie in a thread's scratch memory: offsets in elements of the accumulation dtype, each a multiple of 16. `m` is the rows of a run,
/// `width` the queries of a tile, and dims are padded to whole vectors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackwardScratch {
    /// `[block_n][head_dim]`, `[block_n][head_dim_v]`, where packed, in lanes.
    pub(crate) k_panel: usize,
    pub(crate) v_panel: usize,
    /// `[block_n / steps][head_dim]`, where lanes hold several steps, as the next that speak of them; for whole tiles twice, the second one for
    /// what is finite of the first.
    pub(crate) k_along_keys: usize,
    /// Panels of columns, `[block_n][columns]` each: sums over queries.
    pub(crate) dk: usize,
    pub(crate) dv: usize,
    /// Panels of columns, `[m / steps][columns]` each.
    pub(crate) q: usize,
    pub(crate) d_o: usize,
    /// `[tiles][lanes of dim][width]`.
    pub(crate) q_t: usize,
    pub(crate) d_o_t: usize,
    /// `[block_n][width]`, of several steps a lane: scores, then probabilities.
    pub(crate) scores: usize,
    /// `[block_n][m / steps]`: probabilities, and scores where they are not apart.
    pub(crate) p: usize,
    /// `[block_n][m / steps]`.
    pub(crate) ds: usize,
    /// `[block_n / steps][width]`, of several steps a lane.
    pub(crate) ds_along_keys: usize,
    /// `[block_n][width]`: the product of v and d_o, then ds.
    pub(crate) dp: usize,
    /// `[tiles][block_n][width]`, with a mask.
    pub(crate) bias: usize,
    /// `[block_n][width]`, with dropout: what it multiplies each pair with.
    pub(crate) kept: usize,
    /// `[block_n][width]`, where the gradient of a mask is asked for.
    pub(crate) d_mask: usize,
    /// `[width][dim]`: rows on their way to or from a tensor.
    pub(crate) rows: usize,
    /// A panel of columns, of whole tiles: what is finite of one; in parts, sums of a run or a tile before they are added.
    pub(crate) clean: usize,
    pub(crate) len: usize,
}

impl BackwardScratch {
    /// What these sizes need, in vectors of `lanes`.
    pub(crate) fn new(spec: &BackwardSpec, partition: &BackwardPartition, lanes: usize) -> Self {
        let (forward, mut scratch) = (spec.forward(), BackwardScratch::default());
        let [dim, dim_v] = [forward.head_dim(), forward.head_dim_v()].map(|dim| dim.next_multiple_of(lanes));
        let BackwardPartition { queries: width, form, block_n, steps, parts, .. } = *partition;
        let Form { dim_run, tiles, .. } = form;
        let m = partition.run_rows();
        // Saturating: what cannot be counted cannot be allocated, and that is the error then.
        let mut part = |len: usize| {
            let at = scratch.len;
            scratch.len = at.saturating_add(len.checked_next_multiple_of(16).unwrap_or(usize::MAX));
            at
        };
        let product = |a: usize, b: usize| a.saturating_mul(b);
        let if_several = |len: usize| if steps > 1 { len } else { 0 };
        let of_parts = |len: usize| product(len, parts);
        let (mask, d_mask) = (forward.mask.is_some(), spec.d_mask().is_some());
        let if_tiled = |len: usize| if dim_run > 1 { len } else { 0 };
        let panel = |in_place: bool, dim: usize| if in_place { 0 } else { product(block_n, partition.lanes(dim)) };
        let k_panel = part(panel(partition.k_in_place, forward.head_dim()));
        let v_panel = part(panel(partition.v_in_place, forward.head_dim_v()));
        let along_keys = of_parts(product(block_n / steps, forward.head_dim().next_multiple_of(dim_run)));
        let k_along_keys = part(if_several(along_keys).saturating_add(if_tiled(along_keys)));
        let (dk, dv) = (part(product(block_n, dim)), part(product(block_n, dim_v)));
        let (q, d_o) = (part(of_parts(product(m / steps, dim))), part(of_parts(product(m / steps, dim_v))));
        let turned = [forward.head_dim(), forward.head_dim_v()].map(|dim| partition.lanes(dim).next_multiple_of(lanes));
        let (q_t, d_o_t) = (part(product(m, turned[0])), part(product(m, turned[1])));
        let scores = part(if_several(block_n * width));
        let (p, ds) = (part(of_parts(block_n * m / steps)), part(of_parts(block_n * m / steps)));
        let ds_along_keys = part(if_several(of_parts(block_n / steps * width)));
        let dp = part(block_n * width);
        let bias = part(if mask { tiles * block_n * width } else { 0 });
        let kept = part(if forward.dropout.is_some() { block_n * width } else { 0 });
        let d_mask = part(if d_mask { block_n * width } else { 0 });
        let rows = part(product(width, (2 * dim).max(2 * dim_v).max(turned[0]).max(turned[1])));
        let sums = if parts > 1 { block_n.max(forward.head_dim().next_multiple_of(dim_run)) } else { 0 };
        let clean = part(if_tiled(product((m / steps).max(sums), 2 * lanes)));
        let BackwardScratch { len, .. } = scratch;
        BackwardScratch {
            k_panel,
            v_panel,
            k_along_keys,
            dk,
            dv,
            q,
            d_o,
            q_t,
            d_o_t,
            scores,
            p,
            ds,
            ds_along_keys,
            dp,
            bias,
            kept,
            d_mask,
            rows,
            clean,
            len,
        }
    }
}

/// A gradient that tasks share, since its input is broadcast over batch entries or heads: the sum of theirs, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedSum {
    /// Its batch entries and heads: 1 where all share one.
    sizes: [usize; 2],
    /// Those of the tasks.
    of: [usize; 2],
    /// Elements of what a task adds.
    pub(crate) len: usize,
    /// `[sizes][len]`: the sums so far. An offset in elements, as the next.
    pub(crate) sums: usize,
    /// `[tasks of a wave][len]`, of dk and dv: what each task adds.
    pub(crate) parts: usize,
}

impl SharedSum {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.sizes[0] * self.sizes[1]
    }

    /// Which of them a task's batch entry and key head add to: its indices.
    pub(crate) fn target(&self, [batch, head]: [usize; 2]) -> [usize; 2] {
        [if self.sizes[0] == 1 { 0 } else { batch }, if self.sizes[1] == 1 { 0 } else { head }]
    }

    /// Whether a task is the first that adds to its target, and whether it is the last.
    pub(crate) fn ends(&self, at: [usize; 2]) -> [bool; 2] {
        let is_at =
            |last: bool| (0..2).all(|d| self.sizes[d] == self.of[d] || at[d] == if last { self.of[d] - 1 } else { 0 });
        [is_at(false), is_at(true)]
    }
}

/// Those of a request, and the memory that they need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SharedSums {
    pub(crate) dq: Option<SharedSum>,
    pub(crate) dk: Option<SharedSum>,
    pub(crate) dv: Option<SharedSum>,
    /// Elements.
    pub(crate) len: usize,
}

impl SharedSums {
    /// What `spec` has of them, in vectors of `lanes`.
    pub(crate) fn new(spec: &BackwardSpec, partition: &BackwardPartition, lanes: usize) -> Self {
        let (forward, mut len) = (spec.forward(), 0usize);
        let of = [forward.batch(), forward.num_kv_heads()];
        let mut shared = |gradient: Option<&TensorSpec<4>>, heads: usize, own: usize, parts: usize| {
            let [batch, given, ..] = gradient?.shape;
            // Of dq heads are either all those of q, or one that all key heads share.
            let sizes = [batch, if given == heads { of[1] } else { given }];
            let mut part = |many: usize| {
                let at = len;
                len = at.saturating_add(own.saturating_mul(many));
                at
            };
            (sizes != of).then(|| SharedSum {
                sizes,
                of,
                len: own,
                sums: part(sizes[0] * sizes[1]),
                parts: part(parts),
            })
        };
        let padded = |dim: usize| dim.next_multiple_of(lanes);
        let of_queries = (partition.task_tiles() * partition.queries).saturating_mul(padded(forward.head_dim()));
        let of_keys = |dim: usize| (partition.blocks(forward.kv_len()) * partition.block_n).saturating_mul(padded(dim));
        let (q_heads, kv_heads, wave) = (forward.num_q_heads(), forward.num_kv_heads(), partition.wave);
        let dq = shared(spec.dq(), q_heads, of_queries, 0);
        let dk = shared(spec.dk(), kv_heads, of_keys(forward.head_dim()), wave);
        let dv = shared(spec.dv(), kv_heads, of_keys(forward.head_dim_v()), wave);
        SharedSums { dq, dk, dv, len }
    }

    /// Whether there are any.
    pub(crate) fn is_any(&self) -> bool {
        self.len > 0
    }
}

/// What becomes of a product of q and k.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ScoreRule {
    pub(crate) softmax_scale: f64,
    pub(crate) softcap: Option<f64>,
    /// Whether something is added to scores, or they are capped.
    pub(crate) natural: bool,
}

impl ScoreRule {
    pub(crate) fn new(spec: &BackwardSpec) -> Self {
        let mask = match spec.forward().mask {
            Some(mask) if mask.dtype != rapt_core::DType::Bool => MaskClass::Additive,
            _ => MaskClass::None,
        };
        let Scores { softcap, natural, .. } = Scores::new(spec.forward(), mask);
        ScoreRule { softmax_scale: spec.forward().softmax_scale.get(), softcap, natural }
    }
}

/// What select decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardDecisions {
    pub(crate) partition: BackwardPartition,
    pub(crate) scratch: BackwardScratch,
    /// Of [`BackwardPartition::plain`], where numbers are sums of parts.
    pub(crate) plain_scratch: BackwardScratch,
    pub(crate) scores: ScoreRule,
    pub(crate) shared: SharedSums,
}

/// What is known of each row: three arrays of the accumulation dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowStates {
    /// What is subtracted of a score; −∞ where the row attends nothing.
    pub(crate) top: *mut u8,
    /// The binary logarithm of what its exponentials sum to.
    pub(crate) log2_sum: *mut u8,
    /// `Σ d_o · out − d_lse`.
    pub(crate) delta: *mut u8,
}

/// Which numbers of a task are sums of parts (`kernels/parts`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskNumbers {
    /// All.
    InParts,
    /// All but some of keys that no row attends.
    InPartsWhereAttended,
    /// Not all.
    Others,
}

/// A request for gradients as the kernels see it.
#[derive(Clone, Debug)]
pub(crate) struct BackwardProblem {
    pub(crate) q: Input<4>,
    pub(crate) k: Input<4>,
    pub(crate) v: Input<4>,
    pub(crate) mask: Option<Input<4>>,
    pub(crate) sinks: Option<Input<1>>,
    pub(crate) alibi_slopes: Option<Input<1>>,
    pub(crate) out: Input<4>,
    pub(crate) lse: Input<3>,
    pub(crate) d_o: Input<4>,
    pub(crate) d_lse: Option<Input<3>>,
    pub(crate) dq: Option<Output<4>>,
    pub(crate) dk: Option<Output<4>>,
    pub(crate) dv: Option<Output<4>>,
    pub(crate) d_mask: Option<Output<4>>,
    /// Its sizes: 1 where it is a sum.
    pub(crate) d_mask_shape: [usize; 4],
    pub(crate) d_sinks: Option<Output<1>>,
    pub(crate) batch: usize,
    pub(crate) num_q_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) group_size: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) rows: TaskRows,
    pub(crate) scores: ScoreRule,
    /// Of a run with dropout.
    pub(crate) dropping: Option<Dropping>,
    pub(crate) partition: BackwardPartition,
    pub(crate) scratch: BackwardScratch,
    pub(crate) plain_scratch: BackwardScratch,
    pub(crate) states: RowStates,
    pub(crate) shared: SharedSums,
    /// Their memory.
    pub(crate) shared_at: *mut u8,
    /// Those of the wave.
    pub(crate) partials: *mut u8,
    /// Where numbers are sums of parts: what those of a task are, once an item has asked.
    pub(crate) numbers_of_tasks: Arc<[OnceLock<TaskNumbers>]>,
    /// The first task of the wave, and how many there are.
    pub(crate) first_task: usize,
    pub(crate) wave_tasks: usize,
    /// How many threads take turns.
    pub(crate) threads: usize,
}

// SAFETY: inputs are only read, and items write disjoint parts of the gradients, the states and the partial sums.
unsafe impl Sync for BackwardProblem {}

impl BackwardProblem {
    pub(crate) fn new(
        spec: &BackwardSpec,
        decisions: &BackwardDecisions,
        operands: &mut BackwardOperands<'_>,
        states: RowStates,
        shared_at: *mut u8,
    ) -> Self {
        let [dq, dk, dv, d_mask, d_sinks] = operands.gradient_ptrs();
        let (forward, tensors) = (spec.forward(), operands.tensors());
        let output =
            |of: Option<&TensorSpec<4>>, ptr: Option<*mut u8>| of.zip(ptr).map(|(of, ptr)| Output::new(ptr, of));
        let BackwardDecisions { partition, scratch, plain_scratch, scores, shared } = *decisions;
        BackwardProblem {
            q: Input::new(tensors.q.as_ptr(), &forward.q),
            k: Input::new(tensors.k.as_ptr(), &forward.k),
            v: Input::new(tensors.v.as_ptr(), &forward.v),
            mask: forward.mask.as_ref().zip(tensors.mask).map(|(of, view)| Input::new(view.as_ptr(), of)),
            sinks: forward.sinks.as_ref().zip(tensors.sinks).map(|(of, view)| Input::new(view.as_ptr(), of)),
            alibi_slopes: forward
                .alibi_slopes
                .as_ref()
                .zip(tensors.alibi_slopes)
                .map(|(of, view)| Input::new(view.as_ptr(), of)),
            out: Input::new(tensors.out.as_ptr(), &forward.out),
            lse: Input::new(tensors.lse.as_ptr(), spec.lse()),
            d_o: Input::new(tensors.d_o.as_ptr(), spec.d_o()),
            d_lse: spec.d_lse().zip(tensors.d_lse).map(|(of, view)| Input::new(view.as_ptr(), of)),
            dq: output(spec.dq(), dq),
            dk: output(spec.dk(), dk),
            dv: output(spec.dv(), dv),
            d_mask: output(spec.d_mask(), d_mask),
            d_mask_shape: spec.d_mask().map_or([0; 4], |of| of.shape),
            d_sinks: spec.d_sinks().zip(d_sinks).map(|(of, ptr)| Output::new(ptr, of)),
            batch: forward.batch(),
            num_q_heads: forward.num_q_heads(),
            num_kv_heads: forward.num_kv_heads(),
            group_size: forward.group_size(),
            kv_len: forward.kv_len(),
            head_dim: forward.head_dim(),
            head_dim_v: forward.head_dim_v(),
            rows: TaskRows { q_len: forward.q_len(), range: forward.block_range() },
            scores,
            dropping: Dropping::new(forward, tensors.dropout),
            partition,
            scratch,
            plain_scratch,
            states,
            shared,
            shared_at,
            partials: std::ptr::null_mut(),
            numbers_of_tasks: (0..if partition.parts > 1 { partition.tasks } else { 0 })
                .map(|_| OnceLock::new())
                .collect(),
            first_task: 0,
            wave_tasks: 0,
            threads: 1,
        }
    }

    /// The tasks of the wave that add to target `n` of a gradient that they share, and their places in the wave.
    pub(crate) fn adding(&self, shared: SharedSum, n: usize) -> impl Iterator<Item = (usize, [usize; 2])> {
        let target = [n / shared.sizes[1], n % shared.sizes[1]];
        (0..self.wave_tasks).filter_map(move |in_wave| {
            let [batch, head, _] = self.origin(self.first_task + in_wave);
            (shared.target([batch, head]) == target).then_some((in_wave, [batch, head]))
        })
    }

    /// The batch index, the key head and the first query head of a task.
    #[inline(always)]
    pub(crate) fn origin(&self, task: usize) -> [usize; 3] {
        let kv_head = task % self.num_kv_heads;
        [task / self.num_kv_heads, kv_head, kv_head * self.group_size]
    }

    /// The same by lanes of one number.
    pub(crate) fn plain(&self) -> BackwardProblem {
        BackwardProblem { partition: self.partition.plain(), scratch: self.plain_scratch, ..self.clone() }
    }

    /// Whether what comes after the probabilities is asked for.
    pub(crate) fn needs_ds(&self) -> bool {
        self.dq.is_some() || self.dk.is_some()
    }
}
