//! What the copy engine of compute capability 9.0 must know of a tensor: sizes, strides and the box that one copy moves.
//!
//! A tensor is read or written as `[batch, heads, rows, columns]`; a box is 64 columns (128 bytes) of some rows of one head,
//! and what of it lies outside the tensor comes as zeros, or is left out. Sizes of dimensions that are not stepped through are 1 (hopper.cu's
//! `along` says the same). Deliberately absent: any copy of data.

use rapt_core::{DType, TensorSpec};

use crate::params::moves_by;

/// Columns of a box: the 128 bytes of a swizzled row.
pub(crate) const BOX_COLUMNS: u32 = 64;
/// Rows of a box that a warp of hopper.cu writes.
pub(crate) const OUT_BOX_ROWS: u32 = 16;
/// Strides are below this, in bytes.
const MOST_STRIDE: i64 = 1 << 40;

/// A map as the driver encodes it and a kernel takes it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopyMap(pub(crate) [u64; 16]);

/// A tensor of 16-bit elements as the copy engine steps through it: columns, rows, heads, batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) storage: DType,
    pub(crate) address: usize,
    pub(crate) sizes: [u64; 4],
    /// Of rows, heads and batch.
    pub(crate) strides_bytes: [u64; 3],
    /// Rows of a box.
    pub(crate) box_rows: u32,
}

impl Copied {
    /// `tensor` at `address` in boxes of `box_rows` rows; `None` where the copy engine can neither read nor write it.
    pub(crate) fn new(tensor: &TensorSpec<4>, address: usize, box_rows: u32) -> Option<Self> {
        let [batch, heads, rows, columns] = tensor.shape;
        if !moves_by(tensor, address, 16) || tensor.dtype.size_bytes() != 2 || tensor.shape.contains(&0) {
            return None;
        }
        let stepped = |d: usize| tensor.shape[d] > 1 && tensor.strides[d] != 0;
        // A row that is repeated is not stepped through, and yet there are many.
        if rows > 1 && !stepped(2) {
            return None;
        }
        let in_reach = |d: usize| (0..MOST_STRIDE / 2).contains(&(tensor.strides[d] as i64));
        if (0..3).any(|d| stepped(d) && !in_reach(d)) {
            return None;
        }
        // Along a dimension of size 1 any stride that is allowed will do.
        let bytes = |d: usize| if stepped(d) { tensor.strides[d].unsigned_abs() as u64 * 2 } else { 16 };
        let size = |d: usize, n: usize| if stepped(d) { n as u64 } else { 1 };
        Some(Copied {
            storage: tensor.dtype,
            address,
            sizes: [columns as u64, rows as u64, size(1, heads), size(0, batch)],
            strides_bytes: [bytes(2), bytes(1), bytes(0)],
            box_rows,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: [usize; 4], strides: [isize; 4]) -> TensorSpec<4> {
        TensorSpec { dtype: DType::BF16, shape, strides }
    }

    #[test]
    fn a_permuted_tensor_is_read_in_place_and_a_repeated_head_once() {
        let permuted = tensor([2, 4, 100, 64], [25_600, 64, 256, 1]);
        let copied = Copied::new(&permuted, 1 << 20, 128).unwrap();
        assert_eq!((copied.sizes, copied.strides_bytes), ([64, 100, 4, 2], [512, 128, 51_200]));
        let repeated = tensor([1, 4, 100, 72], [0, 0, 72, 1]);
        let copied = Copied::new(&repeated, 16, 64).unwrap();
        assert_eq!((copied.sizes, copied.strides_bytes, copied.box_rows), ([72, 100, 1, 1], [144, 16, 16], 64));
    }

    #[test]
    fn what_the_engine_cannot_read_is_told_apart() {
        let ok = tensor([1, 2, 100, 64], [0, 6400, 64, 1]);
        assert!(Copied::new(&ok, 1 << 20, 64).is_some());
        assert!(Copied::new(&ok, (1 << 20) + 2, 64).is_none(), "alignment");
        for (strides, what) in [
            ([0, 6400, 65, 1], "row stride"),
            ([0, 6400, 64, 2], "inner stride"),
            ([0, 6400, -64, 1], "backwards"),
            ([0, -6400, 64, 1], "heads backwards"),
            ([0, 6400, 0, 1], "one row repeated"),
            ([0, 1 << 40, 64, 1], "too far"),
        ] {
            assert!(Copied::new(&tensor([1, 2, 100, 64], strides), 1 << 20, 64).is_none(), "{what}");
        }
        assert!(Copied::new(&tensor([1, 2, 100, 60], [0, 6400, 64, 1]), 1 << 20, 64).is_none(), "columns");
    }
}
