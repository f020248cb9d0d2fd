//! The forms of tensors when every symbol is a number.

use rapt_core::DType;

use crate::{Int, OpError, ValueId};

/// The form of a tensor: all but its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The dtype of the elements.
    pub dtype: DType,
    /// The sizes.
    pub shape: Vec<i64>,
    /// The strides, in elements; 0 in an expanded dimension.
    pub strides: Vec<i64>,
    /// The first element's place in the storage, in elements.
    pub offset: i64,
}

impl Meta {
    /// Row-major, from the start of a storage of its own. A dimension of size 0 counts as 1 in the strides, as in PyTorch.
    #[must_use]
    pub fn contiguous(dtype: DType, shape: &[i64]) -> Meta {
        let mut strides = vec![1i64; shape.len()];
        for d in (1..shape.len()).rev() {
            strides[d - 1] = strides[d].saturating_mul(shape[d].max(1));
        }
        Meta { dtype, shape: shape.to_vec(), strides, offset: 0 }
    }

    /// The number of elements.
    #[must_use]
    pub fn numel(&self) -> i64 {
        self.shape.iter().product()
    }

    /// The number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The dimension that `dim` names, counted from the end when negative.
    ///
    /// # Errors
    /// [`OpError::DimOutOfRange`]. A tensor without dimensions takes 0 and −1, as PyTorch's does; the result is then 0.
    pub fn dim(&self, dim: i64) -> Result<usize, OpError> {
        let rank = i64::try_from(self.rank()).unwrap_or(i64::MAX).max(1);
        if dim < -rank || dim >= rank {
            return Err(OpError::DimOutOfRange { dim, rank: self.rank() });
        }
        Ok(usize::try_from(dim.rem_euclid(rank)).unwrap_or(0))
    }
}

/// A result of an operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Out {
    /// A tensor with a storage of its own.
    Fresh(Meta),
    /// A view of a tensor: its storage in another form.
    View {
        /// The tensor.
        of: ValueId,
        /// The form.
        meta: Meta,
    },
    /// A tensor itself: what an operation in place returns, or a conversion that has nothing to do.
    Same(ValueId),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
}

/// What is known of values while results' forms are inferred.
pub trait Shapes {
    /// The form of a tensor.
    ///
    /// # Errors
    /// [`OpError::NotATensor`].
    fn meta(&self, id: ValueId) -> Result<&Meta, OpError>;

    /// The value of an integer.
    ///
    /// # Errors
    /// [`OpError::NotAnInteger`].
    fn int(&self, int: Int) -> Result<i64, OpError>;

    /// The value of a symbolic float.
    ///
    /// # Errors
    /// [`OpError::NotAFloat`].
    fn float(&self, id: ValueId) -> Result<f64, OpError>;

    /// The values of a list of integers.
    ///
    /// # Errors
    /// As [`Shapes::int`].
    fn ints(&self, ints: &[Int]) -> Result<Vec<i64>, OpError> {
        ints.iter().map(|&i| self.int(i)).collect()
    }
}
