//! Windows of memory: which bytes of each tensor a launch binds, so that no binding is longer than the device allows.
//!
//! ```text
//! whole request ──fits──► one window
//!               └─else──► two halves of its tasks, or of the rows of its one task, each planned likewise
//! ```
//! A task is a head of k and v with its queries. A window holds all keys of its tasks: a row is computed whole in one launch, so its bits do not
//! depend on how memory is cut. Deliberately absent: addresses; the bytes are counted from element 0 of each tensor.

use std::ops;

use rapt_core::{Error, Result, Spec, TensorSpec};

use crate::caps::Caps;
use crate::partition::Partition;
use crate::variant::{BINDINGS, BLOCK_M};

/// Bytes from element 0 of a tensor, `lo..hi`; negative where strides are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first byte.
    pub lo: i64,
    /// The one behind the last.
    pub hi: i64,
}

impl Range {
    /// How many bytes there are.
    #[must_use]
    pub const fn len_bytes(&self) -> i64 {
        self.hi - self.lo
    }
}

/// What one launch computes, and the bytes that it reaches.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Tasks: batch · num_kv_heads + kv head.
    pub tasks: ops::Range<usize>,
    /// Blocks of 64 rows of each task.
    pub row_blocks: ops::Range<usize>,
    /// What is reached of each of [`BINDINGS`](crate::BINDINGS); `None` where the request has no such tensor.
    pub reach: [Option<Range>; 8],
}

/// Indices of a tensor's dimensions, `first..=last` each.
type Box<const N: usize> = [(usize, usize); N];

/// The bytes of `tensor` that these indices reach.
fn reach<const N: usize>(tensor: &TensorSpec<N>, indices: Box<N>) -> Range {
    let (mut lo, mut hi) = (0i64, 1i64);
    for ((&stride, &n), (first, last)) in tensor.strides.iter().zip(&tensor.shape).zip(indices) {
        let stride = if n > 1 { stride as i64 } else { 0 };
        let (at_first, at_last) = (first as i64 * stride, last as i64 * stride);
        lo += at_first.min(at_last);
        hi += at_first.max(at_last);
    }
    let size = tensor.dtype.size_bytes() as i64;
    Range { lo: lo * size, hi: hi * size }
}

/// The bytes from the first to the last of all.
fn hull(ranges: impl Iterator<Item = Range>) -> Range {
    let join = |a: Range, b: Range| Range { lo: a.lo.min(b.lo), hi: a.hi.max(b.hi) };
    ranges.reduce(join).unwrap_or(Range { lo: 0, hi: 0 })
}

impl Window {
    fn new(spec: &Spec, tasks: ops::Range<usize>, row_blocks: ops::Range<usize>) -> Self {
        let (heads, group) = (spec.num_kv_heads(), spec.group_size());
        let batch = (tasks.start / heads, (tasks.end - 1) / heads);
        let is_one_batch = batch.0 == batch.1;
        let kv_head = if is_one_batch { (tasks.start % heads, (tasks.end - 1) % heads) } else { (0, heads - 1) };
        // The rows of a task, head by head: the first head's from some query on, the last one's up to some, and all of those between.
        let rows = (row_blocks.start * BLOCK_M, (row_blocks.end * BLOCK_M).min(group * spec.q_len()) - 1);
        let ends = [rows.0, rows.1].map(|r| (kv_head.0 * group + r / spec.q_len(), r % spec.q_len()));
        let [(first_head, first_i), (last_head, last_i)] = ends;
        // Of several tasks every row is in the window.
        let last_head = last_head + (kv_head.1 - kv_head.0) * group;
        let last = spec.q_len() - 1;
        let boxes = match last_head - first_head {
            _ if tasks.len() > 1 => vec![((first_head, last_head), (0, last))],
            0 => vec![((first_head, first_head), (first_i, last_i))],
            1 => vec![((first_head, first_head), (first_i, last)), ((last_head, last_head), (0, last_i))],
            _ => vec![
                ((first_head, first_head), (first_i, last)),
                ((first_head + 1, last_head - 1), (0, last)),
                ((last_head, last_head), (0, last_i)),
            ],
        };
        let heads = (first_head, last_head);
        let all = |n: usize| (0, n.max(1) - 1);
        let (keys, dim, dim_v) = (all(spec.kv_len()), all(spec.head_dim()), all(spec.head_dim_v()));
        let has_keys = spec.kv_len() > 0;
        let of_vector = |vector: &Option<TensorSpec<1>>| vector.as_ref().map(|vector| reach(vector, [heads]));
        let of_rows = |tensor: &TensorSpec<4>, columns| {
            hull(boxes.iter().map(|&(head, query)| reach(tensor, [batch, head, query, columns])))
        };
        let reach = [
            Some(of_rows(&spec.q, dim)),
            has_keys.then(|| reach(&spec.k, [batch, kv_head, keys, dim])),
            has_keys.then(|| reach(&spec.v, [batch, kv_head, keys, dim_v])),
            spec.mask.as_ref().filter(|_| has_keys).map(|mask| of_rows(mask, keys)),
            of_vector(&spec.sinks),
            of_vector(&spec.alibi_slopes),
            Some(of_rows(&spec.out, dim_v)),
            spec.lse.as_ref().map(|lse| hull(boxes.iter().map(|&(head, query)| reach(lse, [batch, head, query])))),
        ];
        Window { tasks, row_blocks, reach }
    }

    /// Blocks of rows of all tasks.
    pub(crate) fn blocks(&self) -> usize {
        self.tasks.len() * self.row_blocks.len()
    }

    /// Whether a launch takes so many workgroups, with what is left of them in a binding.
    fn is_launched_at_once(&self, caps: &Caps, partition: &Partition) -> bool {
        let bytes = self.tasks.len().saturating_mul(partition.partial_bytes);
        let folded = if partition.partial_bytes == 0 { 0 } else { partition.row_fours * partition.combine_blocks };
        self.blocks().saturating_mul(partition.items_of_block()) <= caps.max_items
            && self.tasks.len().saturating_mul(folded) <= caps.max_items
            && bytes as u64 <= caps.max_binding_bytes
    }

    /// The tensor of which more is reached than a binding may hold, if there is one.
    fn beyond(&self, caps: &Caps) -> Option<(&'static str, i64)> {
        // A binding begins at a multiple of `offset_alignment` and ends at one of a word.
        let slack = i64::from(caps.offset_alignment) + 4;
        let most = i64::try_from(caps.max_binding_bytes).unwrap_or(i64::MAX).saturating_sub(slack);
        let mut reached =
            BINDINGS.iter().zip(&self.reach).filter_map(|(binding, range)| Some((binding.tensor, (*range)?)));
        reached.find(|(_, range)| range.len_bytes() > most).map(|(tensor, range)| (tensor, range.len_bytes()))
    }
}

/// Rows of a task in blocks.
fn row_blocks(spec: &Spec) -> usize {
    (spec.group_size() * spec.q_len()).div_ceil(BLOCK_M)
}

/// The windows of `spec`, which has rows, dealt to workgroups as `partition` says.
///
/// # Errors
/// [`Error::Unsupported`] where one block of rows reaches more of a tensor than a binding may hold.
pub(crate) fn windows(spec: &Spec, caps: &Caps, partition: &Partition) -> Result<Vec<Window>> {
    let mut windows = Vec::new();
    let mut open = vec![(0..spec.batch() * spec.num_kv_heads(), 0..row_blocks(spec))];
    while let Some((tasks, rows)) = open.pop() {
        let window = Window::new(spec, tasks, rows);
        let beyond = window.beyond(caps);
        let (tasks, rows) = (window.tasks.clone(), window.row_blocks.clone());
        let halves = |range: &ops::Range<usize>| {
            let middle = range.start.midpoint(range.end);
            [range.start..middle, middle..range.end]
        };
        match beyond {
            None if window.is_launched_at_once(caps, partition) => windows.push(window),
            // The first half is planned first.
            _ if tasks.len() > 1 => open.extend(halves(&tasks).into_iter().rev().map(|tasks| (tasks, rows.clone()))),
            _ if rows.len() > 1 => open.extend(halves(&rows).into_iter().rev().map(|rows| (tasks.clone(), rows))),
            Some((tensor, bytes)) => {
                return Err(Error::unsupported(
                    format!("{bytes} bytes of {tensor} for one head"),
                    format!("this device binds at most {} bytes at a time", caps.max_binding_bytes),
                    "bring the tensor's rows closer together, or attend to fewer keys",
                ));
            }
            None => windows.push(window),
        }
    }
    Ok(windows)
}
