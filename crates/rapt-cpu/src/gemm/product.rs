//! What a product reads and writes, as its caller and the kernels see it. Strides in elements.

use std::ops::Range;

/// The left operand `x`: row `i` begins `i · row_stride` elements after `ptr`, its elements follow one another.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Element (0, 0).
    pub ptr: *const u8,
    /// From one row to the next, in elements; any number, 0 and negative ones too.
    pub row_stride: isize,
}

/// The right operand `w` before it is packed: element `(k, n)` lies `k · k_stride + n · n_stride` elements after `ptr`.
///
/// The weight of a linear layer, `[out, in]` row by row, has `k_stride` 1 and `n_stride` `in`.
#[derive(Clone, Copy, Debug)]
pub struct Strided {
    /// Element (0, 0).
    pub ptr: *const u8,
    /// From one step of the contraction to the next.
    pub k_stride: isize,
    /// From one column of the output to the next.
    pub n_stride: isize,
}

/// What is done with a finished tile of sums, while it is in the cache.
///
/// The tiles of all items cover every element of the output once. Threads call it at the same time for different tiles.
pub trait Epilogue: Sync {
    /// `sums` holds `columns.len()` sums of each of `rows`, in f32 (f64 for f64), not rounded to the storage dtype: the sum of
    /// `(rows.start + i, columns.start + j)` is element `i · row_stride + j`. They may be overwritten.
    ///
    /// # Safety
    /// Those elements are readable and writable during the call and nobody else's; `rows` and `columns` lie inside the
    /// product; `sums` is aligned to 64 bytes.
    unsafe fn tile(&self, rows: Range<usize>, columns: Range<usize>, sums: *mut u8, row_stride: usize);
}

/// Where the sums go.
#[derive(Clone, Copy)]
pub enum Output<'a> {
    /// Rounded once to the storage dtype: row `i` begins `i · row_stride` elements after `ptr`, its elements follow one another.
    Rows {
        /// Element (0, 0).
        ptr: *mut u8,
        /// From one row to the next, in elements.
        row_stride: isize,
    },
    /// To whoever makes something of them.
    Epilogue(&'a dyn Epilogue),
}

/// An item of a product as the kernels see it.
pub(crate) struct Job<'a> {
    pub(crate) rows: Range<usize>,
    /// From a multiple of the panel's columns on.
    pub(crate) columns: Range<usize>,
    pub(crate) k: usize,
    pub(crate) x: Rows,
    /// The first panel of all.
    pub(crate) w: *const u8,
    pub(crate) panel_bytes: usize,
    pub(crate) out: Output<'a>,
    pub(crate) scratch: *mut u8,
}

/// Panels to be packed, as the kernels see it.
pub(crate) struct PackJob {
    pub(crate) panels: Range<usize>,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) w: Strided,
    /// The first panel of all.
    pub(crate) to: *mut u8,
    pub(crate) panel_bytes: usize,
}
