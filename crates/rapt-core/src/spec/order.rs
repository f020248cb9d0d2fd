//! How tensors of rank 2 to 4 come to the canonical order of dimensions, and back.

use super::TensorSpec;
use crate::{Error, Result, Shape, TensorForm, TensorLayout};

/// Dimensions in which q, k, v, out (rank 4) come to canonical order: where each canonical dimension is found.
fn canonical_order(rank: usize, layout: TensorLayout) -> Option<[Option<usize>; 4]> {
    match (rank, layout) {
        (2, _) => Some([None, None, Some(0), Some(1)]),
        (3, TensorLayout::Bhsd) => Some([None, Some(0), Some(1), Some(2)]),
        (3, TensorLayout::Bshd) => Some([None, Some(1), Some(0), Some(2)]),
        (4, TensorLayout::Bhsd) => Some([Some(0), Some(1), Some(2), Some(3)]),
        (4, TensorLayout::Bshd) => Some([Some(0), Some(2), Some(1), Some(3)]),
        _ => None,
    }
}

const RANKS: &str = "2 ([len, head_dim]), 3 ([heads, len, head_dim]) and 4 ([batch, heads, len, head_dim]) are served";

pub(crate) fn canonical(tensor: &'static str, form: &TensorForm, layout: TensorLayout) -> Result<TensorSpec<4>> {
    let TensorForm { dtype, shape, strides, alignment, .. } = form;
    let order = canonical_order(shape.len(), layout).ok_or(Error::Rank {
        tensor,
        got: shape.len(),
        shape: *shape,
        allowed: RANKS,
    })?;
    Ok(TensorSpec {
        dtype: *dtype,
        shape: order.map(|d| d.map_or(1, |d| shape[d])),
        strides: order.map(|d| d.map_or(0, |d| strides[d])),
        alignment: *alignment,
    })
}

/// The canonical `[batch, heads, len, x]` sizes as the caller orders them, dropping the dimensions that `rank` lacks.
pub(super) fn as_given(sizes: [usize; 4], rank: usize, layout: TensorLayout) -> Shape {
    let mut given = [0; 4];
    for (size, d) in sizes.iter().zip(canonical_order(rank, layout).expect("the rank of q was accepted")) {
        if let Some(d) = d {
            given[d] = *size;
        }
    }
    Shape::new(&given[..rank]).expect("at most four dimensions")
}
