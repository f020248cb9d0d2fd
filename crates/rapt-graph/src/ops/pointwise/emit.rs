//! Who makes code of pointwise operations, and what the code speaks of.

use rapt_core::DType;

use super::{Binary, Unary};
use crate::{Meta, OpError, ValueId};

/// Who makes code of pointwise operations. A value is one element of a dtype; what a function gives is rounded, or wrapped
/// around, to the dtype of its result.
pub trait Emitter {
    /// An element.
    type Value: Copy;
    /// The element of a tensor, in the tensor's dtype.
    fn tensor(&mut self, id: ValueId) -> Self::Value;
    /// The element of another view of a tensor, in the tensor's dtype.
    fn seen(&mut self, id: ValueId, look: Look) -> Self::Value;
    /// The dtype in which formulas of this dtype are computed: one that rounds less.
    fn lane(&self, dtype: DType) -> DType {
        arithmetic(dtype)
    }
    /// Whether numbers of Python are rounded to the dtype that a formula is computed in.
    fn rounds(&self) -> bool {
        true
    }
    /// A float, which is one of the dtype's.
    fn float(&mut self, dtype: DType, x: f64) -> Self::Value;
    /// An integer of the dtype, or a boolean as 0 or 1.
    fn int(&mut self, dtype: DType, n: i64) -> Self::Value;
    /// The element in another dtype, as PyTorch converts it.
    fn convert(&mut self, x: Self::Value, from: DType, to: DType) -> Self::Value;
    /// A function of an element of the first dtype, which gives one of the second.
    fn unary(&mut self, op: Unary, x: Self::Value, dtypes: (DType, DType)) -> Self::Value;
    /// A function of two elements of the first dtype, which gives one of the second.
    fn binary(&mut self, op: Binary, operands: [Self::Value; 2], dtypes: (DType, DType)) -> Self::Value;
    /// `a · b + c` of floats, rounded once.
    fn mul_add(&mut self, operands: [Self::Value; 3], dtype: DType) -> Self::Value;
    /// The first element where the condition is true, else the second; both are of the dtype.
    fn select(&mut self, condition: Self::Value, operands: [Self::Value; 2], dtype: DType) -> Self::Value;
}

/// Another view of an operand's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// A half of a dimension.
    Half {
        /// The dimension.
        dim: i64,
        /// Whether it is the second half.
        second: bool,
    },
    /// One element for each index of dimension 1 of a tensor of this rank.
    Channels(usize),
    /// A vector as a matrix of one column.
    Column,
    /// A vector, and nothing else.
    Vector,
}

impl Look {
    /// The form of the view.
    ///
    /// # Errors
    /// [`OpError::Shape`] where the tensor has no such view.
    pub fn of(self, meta: &Meta) -> Result<Meta, OpError> {
        match self {
            Look::Half { dim, second } => {
                let d = meta.dim(dim)?;
                let Some(&size) = meta.shape.get(d).filter(|&&size| size % 2 == 0) else {
                    return Err(OpError::Shape(format!("dimension {dim} of shape {:?} has no halves", meta.shape)));
                };
                let mut half = meta.clone();
                half.shape[d] = size / 2;
                half.offset += if second { size / 2 * meta.strides[d] } else { 0 };
                Ok(half)
            }
            Look::Column | Look::Vector => {
                let (&[size], &[stride]) = (&meta.shape[..], &meta.strides[..]) else {
                    return Err(OpError::Shape(format!("a tensor of shape {:?} is no vector", meta.shape)));
                };
                let column = Meta { shape: vec![size, 1], strides: vec![stride, 1], ..meta.clone() };
                Ok(if self == Look::Column { column } else { meta.clone() })
            }
            Look::Channels(rank) => {
                if meta.rank() > 1 {
                    return Err(OpError::Shape(format!(
                        "weights of shape {:?}: one dimension is expected",
                        meta.shape
                    )));
                }
                let (size, stride) = (meta.numel(), meta.strides.first().copied().unwrap_or(1));
                let mut shape = vec![1; rank];
                let mut strides = vec![size; rank];
                if let (Some(n), Some(s)) = (shape.get_mut(1), strides.get_mut(1)) {
                    (*n, *s) = (size, stride);
                } else if size != 1 {
                    return Err(OpError::Shape(format!("{size} weights for a tensor of {rank} dimensions")));
                }
                strides.iter_mut().skip(2).for_each(|s| *s = 1);
                Ok(Meta { shape, strides, ..meta.clone() })
            }
        }
    }
}

/// The dtype of arithmetic on float16 and bfloat16 in PyTorch: float32.
pub(super) fn arithmetic(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}
