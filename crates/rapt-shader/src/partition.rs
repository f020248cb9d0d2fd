//! How a request is dealt to workgroups.

use rapt_core::Spec;

use crate::variant::{Algorithm, BLOCK_M, LEAST_SPLIT, MOST_SPLITS, Tiles};

/// Workgroups of a task, and what they leave to `combine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Partition {
    /// Blocks of columns of values.
    pub(crate) dv_blocks: usize,
    /// Tiles of rows of a block of rows.
    pub(crate) row_tiles: usize,
    /// Fours of rows of a task.
    pub(crate) row_fours: usize,
    /// Blocks of columns of `combine`.
    pub(crate) combine_blocks: usize,
    /// Parts of the keys: a function of their number.
    pub(crate) num_splits: usize,
    /// Keys of a part.
    pub(crate) split_keys: usize,
    /// Bytes that the workgroups of a task leave.
    pub(crate) partial_bytes: usize,
}

impl Partition {
    pub(crate) fn new(spec: &Spec, algorithm: Algorithm) -> Self {
        let (Tiles { block_m, block_n, block_dv, .. }, rows) = (algorithm.tiles(), spec.group_size() * spec.q_len());
        let is_split = algorithm.is_split();
        let split_keys = match is_split {
            true => spec.kv_len().div_ceil(MOST_SPLITS).next_multiple_of(block_n).max(LEAST_SPLIT),
            false => spec.kv_len().max(1),
        };
        let num_splits = spec.kv_len().div_ceil(split_keys).max(1);
        let row_fours = rows.div_ceil(4);
        // A record of four rows: three vectors, and one for each column.
        let record_bytes = spec.head_dim_v().saturating_add(3).saturating_mul(16);
        Partition {
            dv_blocks: spec.head_dim_v().div_ceil(block_dv),
            row_tiles: rows.min(BLOCK_M).div_ceil(block_m),
            row_fours,
            combine_blocks: spec.head_dim_v().div_ceil(Algorithm::Combine.tiles().block_dv),
            num_splits,
            split_keys,
            partial_bytes: if is_split { record_bytes.saturating_mul(row_fours * num_splits) } else { 0 },
        }
    }

    /// Workgroups of a block of rows.
    pub(crate) const fn items_of_block(&self) -> usize {
        self.dv_blocks * self.row_tiles * self.num_splits
    }
}
