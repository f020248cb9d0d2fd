//! How a request is divided among thread blocks.
//!
//! ```text
//! task   the queries of task_heads heads of one batch entry: rows of one matrix
//! item   item_rows rows of a task, and of these one chunk of the keys where they are split
//! ```

/// Tasks, items and splits of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    /// Heads per task: one, or those of a group.
    pub(crate) task_heads: usize,
    pub(crate) tasks: usize,
    /// Rows of one task.
    pub(crate) rows: usize,
    /// Rows of one item, at most.
    pub(crate) item_rows: usize,
    /// Items at the beginning of a task that have 64 rows less (hopper.cu).
    pub(crate) short_items: usize,
    /// Whether a block works off a late item and an early one in turn (hopper.cu).
    pub(crate) paired: bool,
    /// Blocks of rows of a task.
    pub(crate) row_blocks: usize,
    /// Chunks of the keys.
    pub(crate) num_splits: usize,
    /// Keys per chunk; 0 where they are not split.
    pub(crate) chunk: usize,
    /// Parts into which the value columns are divided (generic.cu).
    pub(crate) dv_blocks: usize,
    /// Chunks of all rows; without a split, blocks of rows.
    pub(crate) items: usize,
    /// Whether a row's chunks are left to combine.cu.
    pub(crate) is_combined: bool,
}
