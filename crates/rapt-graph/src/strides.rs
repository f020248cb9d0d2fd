//! Where elements lie: broadcasting, and the strides that PyTorch gives to results.
//!
//! A result of a pointwise operator lies as its operands do: TensorIterator sorts the dimensions by the operands' strides
//! (ATen/TensorIterator.cpp), the first operand that distinguishes two dimensions deciding, and lays
//! the result out densely in that order. Copies that preserve the format do the same with one operand.

use crate::{Meta, OpError};

/// The shape that all shapes broadcast to.
///
/// # Errors
/// [`OpError::Shape`] where two sizes differ and neither is 1.
pub(crate) fn broadcast<'a>(shapes: impl IntoIterator<Item = &'a [i64]>) -> Result<Vec<i64>, OpError> {
    let mut all: Vec<i64> = Vec::new();
    for shape in shapes {
        if shape.len() > all.len() {
            let lead = shape.len() - all.len();
            all.splice(0..0, std::iter::repeat_n(1, lead));
        }
        let lead = all.len() - shape.len();
        for (d, &size) in shape.iter().enumerate() {
            let whole = &mut all[lead + d];
            if *whole == 1 {
                *whole = size;
            } else if size != 1 && size != *whole {
                return Err(OpError::Shape(format!("size {size} does not broadcast with size {whole}")));
            }
        }
    }
    Ok(all)
}

/// That `shape` broadcasts to `whole` without making it larger.
///
/// # Errors
/// [`OpError::Shape`].
pub(crate) fn broadcasts_to(shape: &[i64], whole: &[i64]) -> Result<(), OpError> {
    if broadcast([shape, whole])? == whole {
        return Ok(());
    }
    Err(OpError::Shape(format!("shape {shape:?} does not broadcast to {whole:?}")))
}

/// The strides of a pointwise result of this shape.
pub(crate) fn of_pointwise(shape: &[i64], operands: &[&Meta]) -> Vec<i64> {
    let row_major = Meta::contiguous(rapt_core::DType::Bool, shape).strides;
    if operands.iter().all(|meta| meta.shape == shape && meta.is_contiguous()) {
        return row_major;
    }
    let stride = |meta: &Meta, d: usize| match (d + meta.rank()).checked_sub(shape.len()) {
        Some(own) if meta.shape[own] == shape[d] => meta.strides[own],
        _ => 0,
    };
    // Whether dimension a is to lie outside of b. `None`: the operands do not say.
    let outside = |a: usize, b: usize| -> Option<bool> {
        for meta in operands {
            let (of_a, of_b) = (stride(meta, a), stride(meta, b));
            if of_a == 0 || of_b == 0 {
                continue;
            }
            if of_a != of_b {
                return Some(of_a > of_b);
            }
            if shape[a] > shape[b] {
                return Some(true);
            }
        }
        None
    };
    // Fastest first. An insertion sort, since the comparison is no order: undecided pairs stay, and are passed over.
    let mut order: Vec<usize> = (0..shape.len()).rev().collect();
    for i in 1..order.len() {
        let mut moving = i;
        for other in (0..i).rev() {
            match outside(order[other], order[moving]) {
                Some(true) => {
                    order.swap(other, moving);
                    moving = other;
                }
                Some(false) => break,
                None => {}
            }
        }
    }
    if order.iter().rev().copied().eq(0..shape.len()) {
        return row_major;
    }
    let mut strides = vec![0; shape.len()];
    let mut next = 1i64;
    for d in order {
        strides[d] = next;
        next = next.saturating_mul(shape[d]);
    }
    strides
}

/// Whether the elements fill a block of memory, each once, in any order of dimensions.
pub(crate) fn is_dense(meta: &Meta) -> bool {
    if meta.shape.contains(&0) || meta.is_contiguous() {
        return true;
    }
    let mut dims: Vec<(i64, i64)> =
        meta.strides.iter().copied().zip(meta.shape.iter().copied()).filter(|&(_, size)| size != 1).collect();
    dims.sort_unstable();
    let mut expected = 1i64;
    dims.iter().all(|&(stride, size)| {
        let fits = stride == expected;
        expected = expected.saturating_mul(size);
        fits
    })
}

/// The strides of a copy that preserves the format: those of a dense tensor, else dense in the same order.
pub(crate) fn preserved(meta: &Meta) -> Vec<i64> {
    if is_dense(meta) { meta.strides.clone() } else { of_pointwise(&meta.shape, &[meta]) }
}

/// The strides of the order batch, height, width, channel.
///
/// # Errors
/// [`OpError::Shape`] unless there are 4 dimensions.
pub(crate) fn channels_last(shape: &[i64]) -> Result<Vec<i64>, OpError> {
    if shape.len() != 4 {
        return Err(OpError::Shape(format!("the format channels_last takes 4 dimensions, not {}", shape.len())));
    }
    Ok(channels_innermost(shape))
}

/// The strides of the order batch, places, channel, of a shape that names the channels second.
pub(crate) fn channels_innermost(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![0; shape.len()];
    let mut next = 1i64;
    for d in [1].into_iter().chain((2..shape.len()).rev()).chain([0]).filter(|&d| d < shape.len()) {
        strides[d] = next;
        next = next.saturating_mul(shape[d]);
    }
    strides
}

/// Whether two elements share one place: a stride of 0 in a dimension of size above 1. PyTorch refuses to write there.
pub(crate) fn overlaps_itself(meta: &Meta) -> bool {
    !meta.shape.contains(&0) && meta.shape.iter().zip(&meta.strides).any(|(&n, &stride)| n > 1 && stride == 0)
}

/// The strides of `shape` over the same storage, or `None` where only a copy gives it: torch's `computeStride`.
pub(crate) fn of_view(meta: &Meta, shape: &[i64]) -> Option<Vec<i64>> {
    let (old, old_strides) = (&meta.shape, &meta.strides);
    if old.is_empty() {
        return Some(vec![1; shape.len()]);
    }
    if old.contains(&0) {
        let row_major = || Meta::contiguous(meta.dtype, shape).strides;
        return Some(if old.as_slice() == shape { old_strides.clone() } else { row_major() });
    }
    let mut strides = vec![0; shape.len()];
    let mut left = shape.len();
    // Runs of old dimensions that lie as one, from the last; new dimensions must divide each run.
    let (mut run_stride, mut run_len, mut view_len) = (old_strides[old.len() - 1], 1i64, 1i64);
    for d in (0..old.len()).rev() {
        run_len *= old[d];
        let ends = d == 0 || (old[d - 1] != 1 && old_strides[d - 1] != run_len.saturating_mul(run_stride));
        if !ends {
            continue;
        }
        while left > 0 && (view_len < run_len || shape[left - 1] == 1) {
            strides[left - 1] = view_len.saturating_mul(run_stride);
            view_len = view_len.saturating_mul(shape[left - 1]);
            left -= 1;
        }
        if view_len != run_len {
            return None;
        }
        if d > 0 {
            (run_stride, run_len, view_len) = (old_strides[d - 1], 1, 1);
        }
    }
    (left == 0).then_some(strides)
}

impl Meta {
    /// The same elements, in row-major order, in another shape of as many; `None` where only a copy gives it.
    #[must_use]
    pub fn reshaped(&self, shape: &[i64]) -> Option<Meta> {
        let strides = of_view(self, shape)?;
        Some(Meta { dtype: self.dtype, shape: shape.to_vec(), strides, offset: self.offset })
    }
}

#[cfg(test)]
mod tests {
    use rapt_core::DType;

    use super::*;

    fn meta(shape: &[i64], strides: &[i64]) -> Meta {
        Meta { dtype: DType::F32, shape: shape.to_vec(), strides: strides.to_vec(), offset: 0 }
    }

    /// What torch 2.15 gives.
    #[test]
    fn pointwise_results_lie_as_their_operands() {
        let (permuted, row_major) = (meta(&[3, 4], &[1, 3]), meta(&[3, 4], &[4, 1]));
        assert_eq!(of_pointwise(&[3, 4], &[&permuted, &row_major]), [1, 3]);
        assert_eq!(of_pointwise(&[3, 4], &[&row_major, &permuted]), [4, 1]);
        assert_eq!(of_pointwise(&[3, 4], &[&permuted, &meta(&[], &[])]), [1, 3]);
        assert_eq!(of_pointwise(&[2, 3, 4], &[&meta(&[4], &[1]), &meta(&[2, 3, 1], &[1, 2, 1])]), [4, 8, 1]);
        assert_eq!(preserved(&meta(&[2, 4], &[2, 3])), [1, 2]);
        assert_eq!(preserved(&meta(&[3], &[0])), [1]);
        assert_eq!(channels_innermost(&[2, 3, 4, 5, 6]), [360, 1, 90, 18, 3]);
    }

    #[test]
    fn a_reshape_is_a_view_where_strides_reach() {
        assert_eq!(of_view(&meta(&[2, 3, 4], &[12, 4, 1]), &[6, 4]), Some(vec![4, 1]));
        assert_eq!(of_view(&meta(&[3, 4], &[1, 3]), &[12]), None);
        assert_eq!(of_view(&meta(&[3, 4], &[1, 3]), &[3, 2, 2]), Some(vec![1, 6, 3]));
        assert_eq!(of_view(&meta(&[0, 4], &[4, 1]), &[4, 0]), Some(vec![1, 1]));
        assert_eq!(of_view(&meta(&[], &[]), &[1, 1]), Some(vec![1, 1]));
        assert_eq!(of_view(&meta(&[2, 1, 3], &[3, 99, 1]), &[6]), Some(vec![1]));
    }
}
