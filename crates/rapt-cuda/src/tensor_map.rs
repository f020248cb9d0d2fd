//! What the copy engine of compute capability 9.0 must know of a tensor: sizes, strides and the box that one copy moves.
//!
//! A tensor is read or written as `[batch, heads, rows, columns]`; a box is 64 columns (128 bytes) of some rows of one head, of a
//! mask as masks.cu has it, and what of it lies outside the tensor comes as zeros, or is left out. Sizes of dimensions that are not
//! stepped through are 1 (`along` of wgmma.cu says the same). Deliberately absent: any copy of data.

use rapt_core::{DType, TensorSpec};

use crate::params::{is_wide, moves_by};

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

/// A tensor as the copy engine steps through it: columns, rows, heads, batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) dtype: DType,
    pub(crate) address: usize,
    pub(crate) sizes: [u64; 4],
    /// Of rows, heads and batch.
    pub(crate) strides_bytes: [u64; 3],
    /// Columns and rows of a box.
    pub(crate) box_columns: u32,
    pub(crate) box_rows: u32,
    /// Bytes of the rows within which units of 16 bytes are swizzled: 128, 64 or 32; 0 where they stay.
    pub(crate) swizzled_bytes: u32,
}

impl Copied {
    /// `tensor` at `address` in boxes of `box_rows` rows; `None` where the copy engine can neither read nor write it.
    pub(crate) fn new(tensor: &TensorSpec<4>, address: usize, box_rows: u32) -> Option<Self> {
        if !moves_by(tensor, address, 16) || tensor.dtype.size_bytes() != 2 || tensor.shape.contains(&0) {
            return None;
        }
        // A row that is repeated is not stepped through, and yet there are many.
        if tensor.shape[2] > 1 && tensor.strides[2] == 0 {
            return None;
        }
        Self::in_boxes(tensor, address, [BOX_COLUMNS, box_rows], 2 * BOX_COLUMNS)
    }

    /// A mask in tiles of so many rows and keys, as masks.cu takes them out of the ring: booleans as they lie, biases in boxes of 128, 64
    /// or 32 bytes of each row, whichever divides a tile's. A row that all queries share is read once. Float64 is not read so.
    pub(crate) fn mask(mask: &TensorSpec<4>, address: usize, tile: [u32; 2]) -> Option<Self> {
        if !is_wide(mask, address) || mask.dtype == DType::F64 || mask.shape.contains(&0) {
            return None;
        }
        let [rows, keys] = tile;
        let rows = if mask.shape[2] > 1 && mask.strides[2] != 0 { rows } else { 1 };
        if mask.dtype == DType::Bool {
            return Self::in_boxes(mask, address, [keys, rows], 0);
        }
        let size = mask.dtype.size_bytes() as u32;
        let bytes = [128, 64, 32].into_iter().find(|bytes| (keys * size).is_multiple_of(*bytes))?;
        Self::in_boxes(mask, address, [bytes / size, rows], bytes)
    }

    fn in_boxes(
        tensor: &TensorSpec<4>,
        address: usize,
        columns_and_rows: [u32; 2],
        swizzled_bytes: u32,
    ) -> Option<Self> {
        let [batch, heads, rows, columns] = tensor.shape;
        let size_bytes = tensor.dtype.size_bytes();
        let stepped = |d: usize| tensor.shape[d] > 1 && tensor.strides[d] != 0;
        let in_reach = |d: usize| (0..MOST_STRIDE / size_bytes as i64).contains(&(tensor.strides[d] as i64));
        if (0..3).any(|d| stepped(d) && !in_reach(d)) {
            return None;
        }
        // Along a dimension of size 1 any stride that is allowed will do.
        let bytes = |d: usize| if stepped(d) { (tensor.strides[d].unsigned_abs() * size_bytes) as u64 } else { 16 };
        let size = |d: usize, n: usize| if stepped(d) { n as u64 } else { 1 };
        Some(Copied {
            dtype: tensor.dtype,
            address,
            sizes: [columns as u64, size(2, rows), size(1, heads), size(0, batch)],
            strides_bytes: [bytes(2), bytes(1), bytes(0)],
            box_columns: columns_and_rows[0],
            box_rows: columns_and_rows[1],
            swizzled_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rapt_core::Alignment;

    fn tensor(shape: [usize; 4], strides: [isize; 4]) -> TensorSpec<4> {
        TensorSpec { dtype: DType::BF16, shape, strides, alignment: Alignment::MOST }
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
    fn a_mask_is_read_in_the_boxes_of_its_tile() {
        let of = |dtype, shape, strides, tile| {
            let copied =
                Copied::mask(&TensorSpec { dtype, shape, strides, alignment: Alignment::MOST }, 1 << 20, tile)?;
            Some(([copied.box_columns, copied.box_rows, copied.swizzled_bytes], copied.sizes, copied.strides_bytes))
        };
        let (shape, strides) = ([2, 8, 300, 512], [153_600, 0, 512, 1]);
        let sizes = [512, 300, 1, 2];
        for (dtype, keys, of_box, size) in [
            (DType::BF16, 128, [64, 128, 128], 2),
            (DType::F16, 96, [32, 128, 64], 2),
            (DType::BF16, 48, [16, 128, 32], 2),
            (DType::F32, 64, [32, 128, 128], 4),
            (DType::F32, 48, [16, 128, 64], 4),
            (DType::Bool, 96, [96, 128, 0], 1),
        ] {
            let strides_bytes = [512 * size, 16, 153_600 * size];
            assert_eq!(of(dtype, shape, strides, [128, keys]), Some((of_box, sizes, strides_bytes)), "{dtype} {keys}");
        }
        // One row for all queries.
        let padding = of(DType::BF16, shape, [512, 0, 0, 1], [128, 96]).unwrap();
        assert_eq!(padding, ([32, 1, 64], [512, 1, 1, 2], [16, 16, 1024]));
        for (dtype, strides, what) in [
            (DType::F64, [153_600, 0, 512, 1], "float64"),
            (DType::BF16, [153_600, 0, 516, 1], "row stride"),
            (DType::Bool, [153_600, 0, 520, 1], "row stride of bytes"),
            (DType::BF16, [153_600, 0, 1, 512], "keys apart"),
            (DType::BF16, [153_600, 0, -512, 1], "backwards"),
            (DType::BF16, [153_600, 0, 512, 0], "one key repeated"),
        ] {
            assert_eq!(of(dtype, shape, strides, [128, 96]), None, "{what}");
        }
        assert!(
            Copied::mask(
                &TensorSpec { dtype: DType::BF16, shape, strides, alignment: Alignment::MOST },
                (1 << 20) + 8,
                [128, 96]
            )
            .is_none()
        );
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
