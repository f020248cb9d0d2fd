//! What a workgroup takes. Deliberately absent: which algorithm takes what (variant.rs, matrices.rs).

/// Rows of a block of `generic`, `forward` and `matrices`; in these the rows of windows are counted.
pub(crate) const BLOCK_M: usize = 64;

/// What a workgroup takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Rows.
    pub(crate) block_m: usize,
    /// Keys of a block.
    pub(crate) block_n: usize,
    /// Columns of values.
    pub(crate) block_dv: usize,
    /// Threads.
    pub(crate) threads: usize,
    /// Bytes of workgroup memory.
    pub(crate) shared_bytes: usize,
}

impl Tiles {
    /// Those of what launches nothing.
    pub(crate) const NONE: Tiles = Tiles { block_m: 1, block_n: 1, block_dv: 1, threads: 1, shared_bytes: 0 };
}
