//! Rows read by index: embeddings, `index_select` of the first dimension.

use std::fmt;

use rapt_core::DType;

/// An index that names no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexOutOfRange {
    /// Where it stands among the indices.
    pub at: usize,
    /// The index.
    pub index: i64,
    /// How many rows there are.
    pub size: usize,
}

impl fmt::Display for IndexOutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "index {} of {} rows", self.index, self.size)
    }
}

impl std::error::Error for IndexOutOfRange {}

/// Where rows lie: `rows` of them, each of `row_bytes` that follow one another, `stride_bytes` apart.
#[derive(Clone, Copy, Debug)]
pub struct Rows<P> {
    /// The first row.
    pub ptr: P,
    /// How many.
    pub rows: usize,
    /// The bytes of a row.
    pub row_bytes: usize,
    /// Bytes from one row to the next.
    pub stride_bytes: isize,
}

/// Copies to row `i` of `out` the row of `table` that index `i` names. `indices` are int64 or int32, `index_stride` elements
/// apart. Negative indices are refused. All indices are looked at before anything is written.
///
/// # Errors
/// [`IndexOutOfRange`] for the first index that names no row.
///
/// # Safety
/// `table` and `out` have their rows, `indices` as many elements as `out` has rows; `out` shares no memory with the others.
///
/// # Panics
/// If `dtype` is neither int64 nor int32, or the rows of `table` and `out` are not equally long.
pub unsafe fn gather_rows(
    table: Rows<*const u8>,
    indices: *const u8,
    dtype: DType,
    index_stride: isize,
    out: Rows<*mut u8>,
) -> Result<(), IndexOutOfRange> {
    assert!(matches!(dtype, DType::I64 | DType::I32), "indices are int64 or int32");
    assert_eq!(table.row_bytes, out.row_bytes, "rows of one length");
    let index = |at: usize| {
        let at = at as isize * index_stride;
        // SAFETY: the caller vouches for as many indices as `out` has rows.
        unsafe {
            if dtype == DType::I64 {
                indices.cast::<i64>().offset(at).read_unaligned()
            } else {
                i64::from(indices.cast::<i32>().offset(at).read_unaligned())
            }
        }
    };
    let row = |at: usize| usize::try_from(index(at)).ok().filter(|&row| row < table.rows);
    if let Some(at) = (0..out.rows).find(|&at| row(at).is_none()) {
        return Err(IndexOutOfRange { at, index: index(at), size: table.rows });
    }
    for at in 0..out.rows {
        let Some(row) = row(at) else { continue };
        // SAFETY: both rows are there, and do not overlap.
        unsafe {
            let from = table.ptr.offset(row as isize * table.stride_bytes);
            let to = out.ptr.offset(at as isize * out.stride_bytes);
            std::ptr::copy_nonoverlapping(from, to, table.row_bytes);
        }
    }
    Ok(())
}
