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

/// How long chunks of keys are: the longer, the more keys a sequence has. Each a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkRule {
    /// Keys of a chunk of a short sequence, a long one, and a longer one.
    pub(crate) keys: [usize; 3],
    /// Keys from which on a sequence is long, and longer.
    pub(crate) long_from: [usize; 2],
}

impl ChunkRule {
    /// Chunks of `kv_len` keys, and keys of each.
    pub(crate) fn chunks(&self, kv_len: usize) -> (usize, usize) {
        let [long, longer] = self.long_from;
        let chunk = self.keys[usize::from(kv_len >= long) + usize::from(kv_len >= longer)];
        (kv_len.div_ceil(chunk).max(1), chunk)
    }

    /// Most chunks of `kv_len` keys or fewer.
    pub(crate) fn most_chunks(&self, kv_len: usize) -> usize {
        let lengths = self.long_from.iter().filter(|from| **from <= kv_len).map(|from| from - 1).chain([kv_len]);
        lengths.map(|kv_len| self.chunks(kv_len).0).max().unwrap_or(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_shorter_sequence_has_more_chunks() {
        for rule in [
            ChunkRule { keys: [512, 1024, 2048], long_from: [16 * 1024, 64 * 1024] },
            ChunkRule { keys: [512, 1024, 1024], long_from: [32 * 1024, 1 << 29] },
        ] {
            let mut most = 1;
            for kv_len in 0..80_000 {
                most = most.max(rule.chunks(kv_len).0);
                assert_eq!(rule.most_chunks(kv_len), most, "{rule:?} {kv_len}");
            }
        }
    }
}
