//! What strides and alignment allow: how many elements of a row can be moved at once.
//!
//! Of an address a spec keeps what it is a multiple of, 16 bytes at most: no more is asked here. Deliberately absent: what only TMA
//! asks ([`tensor_map`](crate::tensor_map)).

use rapt_core::{PagesSpec, TensorSpec};

/// K or V, or what belongs to each of its keys, as it lies in memory: pages in place of batch entries, where there are some.
pub(crate) fn as_it_lies(tensor: &TensorSpec<4>, pages: Option<&PagesSpec>) -> TensorSpec<4> {
    let [_, heads, _, width] = tensor.shape;
    match pages {
        Some(pages) => TensorSpec { shape: [pages.num_pages, heads, pages.page_size, width], ..*tensor },
        None => *tensor,
    }
}

/// The tensor's strides as kernels take them: one along a single element is never taken.
pub(crate) fn strides<const N: usize>(tensor: &TensorSpec<N>) -> [i64; N] {
    std::array::from_fn(|d| if tensor.shape[d] > 1 { tensor.strides[d] as i64 } else { 0 })
}

/// Whether every row of the tensor can be moved `bytes` at a time; a multiple of its element.
pub(crate) fn moves_by(tensor: &TensorSpec<4>, bytes: usize) -> bool {
    let unit = bytes / tensor.dtype.size_bytes();
    let step = strides(tensor);
    let inner = tensor.shape[3] == 1 || step[3] == 1;
    let rows = step[..3].iter().all(|stride| stride % unit as i64 == 0);
    inner && rows && tensor.alignment.bytes().is_multiple_of(bytes) && tensor.shape[3].is_multiple_of(unit)
}

/// Whether every row of the mask can be read `bytes` at a time, as far as there are so many; a multiple of a key.
fn is_read_by(mask: &TensorSpec<4>, bytes: usize) -> bool {
    let (step, unit) = (strides(mask), (bytes / mask.dtype.size_bytes()) as i64);
    step[3] == 1 && step[..3].iter().all(|stride| stride % unit == 0) && mask.alignment.bytes().is_multiple_of(bytes)
}

/// Whether every row of the mask can be read two keys at a time, as far as there are two.
pub(crate) fn is_in_pairs(mask: &TensorSpec<4>) -> bool {
    is_read_by(mask, 2 * mask.dtype.size_bytes())
}

/// Whether every row of the mask can be read 16 bytes at a time, as far as there are 16.
pub(crate) fn is_wide(mask: &TensorSpec<4>) -> bool {
    is_read_by(mask, 16)
}

/// Bytes of a mask's row that a thread copies at a time: 8 where all rows begin at a multiple of it, 4 wherever they begin; or 1, where keys do not lie side
/// by side.
pub(crate) fn copied_at_a_time(mask: &TensorSpec<4>) -> usize {
    if is_read_by(mask, 8) {
        8
    } else if strides(mask)[3] == 1 {
        4
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use rapt_core::{Alignment, DType, Device};

    use super::*;

    #[test]
    fn a_mask_is_read_16_bytes_at_a_time_where_every_row_allows_it() {
        let mask = |dtype, strides, address| {
            let alignment = Alignment::of(Device::Cuda(0), address);
            TensorSpec { dtype, shape: [2, 1, 300, 512], strides, alignment }
        };
        for (dtype, strides, address, wide) in [
            (DType::Bool, [153_600, 0, 512, 1], 64, true),
            (DType::Bool, [512, 0, 0, 1], 64, true),
            (DType::Bool, [153_600, 0, 512, 1], 65, false),
            (DType::Bool, [153_600, 0, 520, 1], 64, false),
            (DType::Bool, [153_600, 0, 1, 300], 64, false),
            (DType::BF16, [153_600, 0, 520, 1], 64, true),
            (DType::BF16, [153_600, 0, 516, 1], 64, false),
            (DType::F32, [153_600, 0, 516, 1], 64, true),
        ] {
            assert_eq!(is_wide(&mask(dtype, strides, address)), wide, "{dtype} {strides:?} {address}");
        }
    }

    #[test]
    fn a_warp_copies_as_many_bytes_of_a_mask_at_a_time_as_every_row_allows() {
        for (dtype, strides, address, bytes) in [
            (DType::BF16, [153_600, 0, 516, 1], 64, 8),
            (DType::BF16, [153_600, 0, 514, 1], 64, 4),
            (DType::BF16, [153_600, 0, 516, 1], 68, 4),
            (DType::F16, [153_600, 0, 513, 1], 64, 4),
            (DType::F16, [153_600, 0, 516, 2], 64, 1),
            (DType::F16, [153_600, 0, 516, 1], 66, 4),
            (DType::Bool, [153_600, 0, 520, 1], 72, 8),
            (DType::Bool, [153_600, 0, -516, 1], 64, 4),
            (DType::Bool, [153_601, 0, 512, 1], 64, 4),
        ] {
            let alignment = Alignment::of(Device::Cuda(0), address);
            let mask = TensorSpec { dtype, shape: [2, 1, 300, 512], strides, alignment };
            assert_eq!(copied_at_a_time(&mask), bytes, "{dtype} {strides:?} {address}");
        }
    }
}
