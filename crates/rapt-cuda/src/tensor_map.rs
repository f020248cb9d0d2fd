//! Which tensors TMA (compute capability 9.0) can read and write, and what a tensor map is encoded from.
//!
//! A tensor is read or written as `[batch, heads, rows, columns]`; a box is 64 columns (128 bytes) of some rows of one head, of a
//! mask as hopper/mask_ring.cuh has it, and what of it lies outside the tensor comes as zeros, or is left out. Sizes of dimensions that are not
//! stepped through are 1 (`tma_coordinate` of hopper/tma.cuh says the same). Deliberately absent: addresses, and any copy of data.

use rapt_core::{DType, TensorSpec};

use crate::access::{is_wide, moves_by};

/// Columns of a box: the 128 bytes of a swizzled row.
pub(crate) const BOX_COLUMNS: u32 = 64;
/// Rows of a box that a warp of hopper.cu writes.
pub(crate) const OUT_BOX_ROWS: u32 = 16;
/// Rows of a box that is a part of a tile are a multiple of this: so many lines of 128 bytes are swizzled together.
pub(crate) const BOX_ROWS: usize = 8;
/// Strides are below this, in bytes.
const MOST_STRIDE: u64 = 1 << 40;
/// Sizes are at most this.
const MOST_SIZE: u64 = 1 << 32;
/// Sides of a box are at most this, in elements.
const MOST_BOX: u32 = 256;
/// What addresses, strides and rows of a box are multiples of, in bytes.
const UNIT: usize = 16;

/// A map as the driver encodes it and a kernel takes it.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

/// A tensor as TMA steps through it: columns, rows, heads, batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TmaTensor {
    pub(crate) dtype: DType,
    pub(crate) sizes: [u64; 4],
    /// Of rows, heads and batch.
    pub(crate) strides_bytes: [u64; 3],
    /// Columns and rows of a box.
    pub(crate) box_columns: u32,
    pub(crate) box_rows: u32,
    /// Bytes of the rows within which units of 16 bytes are swizzled: 128, 64 or 32; 0 where they stay.
    pub(crate) swizzled_bytes: u32,
}

impl TmaTensor {
    /// `tensor` in boxes of `box_rows` rows; `None` where TMA can neither read nor write it so.
    pub(crate) fn new(tensor: &TensorSpec<4>, box_rows: u32) -> Option<Self> {
        if !moves_by(tensor, UNIT) || tensor.dtype.size_bytes() != 2 {
            return None;
        }
        // A row that is repeated is not stepped through, and yet there are many.
        if tensor.shape[2] > 1 && tensor.strides[2] == 0 {
            return None;
        }
        Self::in_boxes(tensor, [BOX_COLUMNS, box_rows], 2 * BOX_COLUMNS)
    }

    /// A mask in tiles of so many rows and keys, as hopper/mask_ring.cuh takes them out of the ring: booleans as they lie, biases in boxes of 128, 64
    /// or 32 bytes of each row, whichever divides a tile's. A row that all queries share is read once. Float64 is not read so.
    pub(crate) fn mask(mask: &TensorSpec<4>, tile: [u32; 2]) -> Option<Self> {
        if !is_wide(mask) || mask.dtype == DType::F64 {
            return None;
        }
        let [rows, keys] = tile;
        let rows = Self::rows_of_mask(mask, rows);
        if mask.dtype == DType::Bool {
            return Self::in_boxes(mask, [keys, rows], 0);
        }
        let size = mask.dtype.size_bytes() as u32;
        let bytes = [128, 64, 32].into_iter().find(|bytes| (keys * size).is_multiple_of(*bytes))?;
        Self::in_boxes(mask, [bytes / size, rows], bytes)
    }

    /// A mask as backward/hopper_mask.cuh takes it out of shared memory: boxes of 128 bytes of so many rows, swizzled; of a row that all queries share, it
    /// alone.
    pub(crate) fn mask_of_keys(mask: &TensorSpec<4>, rows: u32) -> Option<Self> {
        if !is_wide(mask) {
            return None;
        }
        let rows = Self::rows_of_mask(mask, rows);
        Self::in_boxes(mask, [2 * BOX_COLUMNS / mask.dtype.size_bytes() as u32, rows], 2 * BOX_COLUMNS)
    }

    /// Of `rows` of a tile, how many there are to read: one that all queries share is read once.
    fn rows_of_mask(mask: &TensorSpec<4>, rows: u32) -> u32 {
        if mask.shape[2] > 1 && mask.strides[2] != 0 { rows } else { 1 }
    }

    fn in_boxes(tensor: &TensorSpec<4>, columns_and_rows: [u32; 2], swizzled_bytes: u32) -> Option<Self> {
        let size_bytes = tensor.dtype.size_bytes() as u64;
        let is_stepped = |d: usize| tensor.shape[d] > 1 && tensor.strides[d] != 0;
        // Along a dimension that is not stepped through, any stride that is legal will do. None leads backwards.
        let stride = |d: usize| {
            if is_stepped(d) {
                u64::try_from(tensor.strides[d]).ok()?.checked_mul(size_bytes)
            } else {
                Some(UNIT as u64)
            }
        };
        // Without elements there is nothing to step through, and no size is 0.
        let size = |d: usize| if is_stepped(d) || tensor.shape[d] == 0 { tensor.shape[d] as u64 } else { 1 };
        let tma = TmaTensor {
            dtype: tensor.dtype,
            sizes: [tensor.shape[3] as u64, size(2), size(1), size(0)],
            strides_bytes: [stride(2)?, stride(1)?, stride(0)?],
            box_columns: columns_and_rows[0],
            box_rows: columns_and_rows[1],
            swizzled_bytes,
        };
        tma.is_legal(tensor.alignment.bytes()).then_some(tma)
    }

    /// What `cuTensorMapEncodeTiled` asks of a map of rank 4 that is not interleaved and takes every element: its documentation
    /// (CUDA 13, Tensor Map Object Management), which the driver compares with each call. A plan relies on it: a run takes no other path where the driver disagrees.
    fn is_legal(&self, alignment: usize) -> bool {
        let box_row_bytes = self.box_columns as usize * self.dtype.size_bytes();
        alignment.is_multiple_of(UNIT)
            && self.sizes.iter().all(|size| (1..=MOST_SIZE).contains(size))
            && self.strides_bytes.iter().all(|stride| *stride < MOST_STRIDE && stride.is_multiple_of(UNIT as u64))
            && [self.box_columns, self.box_rows].iter().all(|side| (1..=MOST_BOX).contains(side))
            && box_row_bytes.is_multiple_of(UNIT)
            && (self.swizzled_bytes == 0 || box_row_bytes <= self.swizzled_bytes as usize)
    }
}

/// What the documentation of `cuTensorMapEncodeTiled` says against a map of `tensor` at `address`, written rule by rule and apart from
/// [`TmaTensor::is_legal`]: rank 4, `CU_TENSOR_MAP_INTERLEAVE_NONE`, element strides of 1.
#[cfg(test)]
pub(crate) fn documented_refusal(tensor: &TmaTensor, address: usize) -> Option<&'static str> {
    let element = tensor.dtype.size_bytes() as u64;
    let inner = u64::from(tensor.box_columns) * element;
    let swizzles: &[u32] = &[0, 32, 64, 128];
    [
        (!address.is_multiple_of(16), "globalAddress must be aligned to 16 bytes"),
        (tensor.sizes.contains(&0), "each globalDim must be non-zero"),
        (tensor.sizes.iter().any(|size| *size > 1 << 32), "each globalDim must be at most 2^32"),
        (tensor.strides_bytes.iter().any(|stride| stride % 16 != 0), "each globalStrides must be a multiple of 16"),
        (tensor.strides_bytes.iter().any(|stride| *stride >= 1 << 40), "each globalStrides must be less than 2^40"),
        (tensor.box_columns == 0 || tensor.box_rows == 0, "each boxDim must be non-zero"),
        (tensor.box_columns > 256 || tensor.box_rows > 256, "each boxDim must be at most 256"),
        (!inner.is_multiple_of(16), "the inner boxDim in bytes must be a multiple of 16"),
        (!swizzles.contains(&tensor.swizzled_bytes), "CU_TENSOR_MAP_SWIZZLE_32B, _64B, _128B or _NONE"),
        (
            tensor.swizzled_bytes > 0 && inner > u64::from(tensor.swizzled_bytes),
            "the inner boxDim is at most the swizzle",
        ),
    ]
    .into_iter()
    .find_map(|(is_broken, rule)| is_broken.then_some(rule))
}

#[cfg(test)]
mod tests {
    use rapt_core::{Alignment, Device};

    use super::*;

    fn tensor(shape: [usize; 4], strides: [isize; 4]) -> TensorSpec<4> {
        TensorSpec { dtype: DType::BF16, shape, strides, alignment: Alignment::MOST }
    }

    /// `tensor` so many bytes from an aligned address.
    fn moved(tensor: &TensorSpec<4>, offset: usize) -> TensorSpec<4> {
        TensorSpec { alignment: Alignment::of(Device::Cuda(0), (1 << 20) + offset), ..*tensor }
    }

    #[test]
    fn a_permuted_tensor_is_read_in_place_and_a_repeated_head_once() {
        let permuted = tensor([2, 4, 100, 64], [25_600, 64, 256, 1]);
        let tma = TmaTensor::new(&permuted, 128).unwrap();
        assert_eq!((tma.sizes, tma.strides_bytes), ([64, 100, 4, 2], [512, 128, 51_200]));
        let repeated = tensor([1, 4, 100, 72], [0, 0, 72, 1]);
        let tma = TmaTensor::new(&repeated, 64).unwrap();
        assert_eq!((tma.sizes, tma.strides_bytes, tma.box_rows), ([72, 100, 1, 1], [144, 16, 16], 64));
    }

    #[test]
    fn a_mask_is_read_in_the_boxes_of_its_tile() {
        let of = |dtype, shape, strides, tile| {
            let tma = TmaTensor::mask(&TensorSpec { dtype, ..tensor(shape, strides) }, tile)?;
            Some(([tma.box_columns, tma.box_rows, tma.swizzled_bytes], tma.sizes, tma.strides_bytes))
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
        assert!(TmaTensor::mask(&moved(&tensor(shape, strides), 8), [128, 96]).is_none(), "alignment");
    }

    #[test]
    fn what_tma_cannot_read_is_not_given_to_it() {
        let ok = tensor([1, 2, 100, 64], [0, 6400, 64, 1]);
        assert!(TmaTensor::new(&ok, 64).is_some());
        assert!(TmaTensor::new(&moved(&ok, 2), 64).is_none(), "alignment");
        for (strides, what) in [
            ([0, 6400, 65, 1], "row stride"),
            ([0, 6400, 64, 2], "inner stride"),
            ([0, 6400, -64, 1], "backwards"),
            ([0, -6400, 64, 1], "heads backwards"),
            ([0, 6400, 0, 1], "one row repeated"),
            ([0, 1 << 40, 64, 1], "too far"),
        ] {
            assert!(TmaTensor::new(&tensor([1, 2, 100, 64], strides), 64).is_none(), "{what}");
        }
        assert!(TmaTensor::new(&tensor([1, 2, 100, 60], [0, 6400, 64, 1]), 64).is_none(), "columns");
    }

    /// The map of `tensor` as its sizes and strides say, legal or not; `None` where a stride is no number of the map.
    fn plain_map(tensor: &TensorSpec<4>, box_rows: u32) -> Option<TmaTensor> {
        let is_stepped = |d: usize| tensor.shape[d] != 1 && tensor.strides[d] != 0;
        let stride = |d: usize| {
            let bytes = if is_stepped(d) { tensor.strides[d] as i128 * tensor.dtype.size_bytes() as i128 } else { 16 };
            u64::try_from(bytes).ok()
        };
        let size = |d: usize| if is_stepped(d) { tensor.shape[d] as u64 } else { 1 };
        Some(TmaTensor {
            dtype: tensor.dtype,
            sizes: [tensor.shape[3] as u64, size(2), size(1), size(0)],
            strides_bytes: [stride(2)?, stride(1)?, stride(0)?],
            box_columns: BOX_COLUMNS,
            box_rows,
            swizzled_bytes: 128,
        })
    }

    #[test]
    fn a_tensor_is_mapped_exactly_where_the_encode_call_and_the_kernels_take_it() {
        const STEPS: [isize; 12] =
            [0, 1, 8, 64, 72, 4096, -64, 65, (1 << 39) - 8, 1 << 39, (1 << 39) + 8, isize::MAX - 7];
        let (mut mapped, mut refused) = (0, 0);
        for (rows, heads, columns) in [(1, 1, 64), (100, 4, 64), (100, 1, 8), ((1 << 32) + 1, 1, 64), (100, 4, 60)] {
            for (row, head, offset, box_rows) in STEPS.into_iter().flat_map(|row| {
                STEPS.into_iter().flat_map(move |head| {
                    [0, 2, 8, 16].into_iter().flat_map(move |offset| {
                        [0, 16, 192, 256, 257].into_iter().map(move |box_rows| (row, head, offset, box_rows))
                    })
                })
            }) {
                let tensor = moved(&tensor([1, heads, rows, columns], [1 << 62, head, row, 1]), offset);
                // What the kernels ask: whole rows in units of 16 bytes, and rows that are stepped through.
                let whole = columns % 8 == 0 && (heads == 1 || head % 8 == 0);
                let stepped = rows == 1 || (row % 8 == 0 && row != 0);
                let legal =
                    plain_map(&tensor, box_rows).filter(|map| documented_refusal(map, (1 << 20) + offset).is_none());
                let expected = legal.filter(|_| whole && stepped);
                assert_eq!(TmaTensor::new(&tensor, box_rows), expected, "{tensor:?} {box_rows}");
                if expected.is_some() { mapped += 1 } else { refused += 1 }
            }
        }
        assert!(mapped > 100 && refused > 1000, "{mapped} {refused}");
        for keys in [48, 64, 80, 96, 112, 128] {
            for dtype in [DType::Bool, DType::F16, DType::BF16, DType::F32] {
                for rows in [128, 192] {
                    let mask = TensorSpec { dtype, ..tensor([2, 8, 300, 512], [153_600, 0, 512, 1]) };
                    let map = TmaTensor::mask(&mask, [rows, keys]).unwrap();
                    assert_eq!(documented_refusal(&map, 1 << 20), None, "{keys} {dtype}");
                }
            }
        }
    }
}
