//! The forms of tensors when every symbol is a number.

use rapt_core::DType;

use crate::{Int, OpError, Scalar, ValueId};

/// Gaps of how many times the elements are wide, of more elements than a few.
const WIDEST: i64 = 64;
const FEW: i64 = 1 << 16;

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

    /// The number of elements that a storage needs to hold the tensor; `None` where a size, stride or offset is negative, or
    /// the number does not fit.
    #[must_use]
    pub fn extent(&self) -> Option<i64> {
        let negative = |x: &i64| *x < 0;
        if self.offset < 0 || self.shape.iter().any(negative) || self.strides.iter().any(negative) {
            return None;
        }
        self.shape.iter().try_fold(1i64, |n, &size| n.checked_mul(size.max(1)))?;
        if self.shape.contains(&0) {
            return Some(self.offset);
        }
        let end = |at: i64, (&n, &stride): (&i64, &i64)| at.checked_add((n - 1).checked_mul(stride)?);
        self.shape.iter().zip(&self.strides).try_fold(self.offset, end)?.checked_add(1)
    }

    /// Whether the elements lie in row-major order without gaps. Strides of dimensions of size 1 say nothing, and every tensor
    /// without elements is contiguous, as in PyTorch.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        self.lies_in((0..self.rank()).rev())
    }

    /// Whether a tensor of 4 dimensions lies in the order batch, height, width, channel without gaps.
    #[must_use]
    pub fn is_channels_last(&self) -> bool {
        self.rank() == 4 && self.lies_in([1, 3, 2, 0].into_iter())
    }

    fn lies_in(&self, from_fastest: impl Iterator<Item = usize>) -> bool {
        let mut expected = 1i64;
        self.shape.contains(&0)
            || from_fastest.into_iter().all(|d| {
                let fits = self.shape[d] == 1 || self.strides[d] == expected;
                expected = expected.saturating_mul(self.shape[d]);
                fits
            })
    }

    /// Broadcast to a larger shape: a dimension of size 1, or none, gets the stride 0. The caller has checked that it fits.
    #[must_use]
    pub fn broadcast(&self, shape: &[i64]) -> Meta {
        let lead = shape.len().saturating_sub(self.rank());
        let stride = |d: usize| match d.checked_sub(lead) {
            Some(own) if self.shape[own] == shape[d] => self.strides[own],
            _ => 0,
        };
        let strides = (0..shape.len()).map(stride).collect();
        Meta { dtype: self.dtype, shape: shape.to_vec(), strides, offset: self.offset }
    }

    /// Whether a tensor of other numbers cannot be given this form, or only in much more memory than it has elements: two elements
    /// share a place, or may, or the gaps are wide.
    #[must_use]
    pub fn is_loose(&self) -> bool {
        let numel = self.numel();
        if numel <= 1 {
            return false;
        }
        // From the densest dimension on, each must step over all those before it.
        let mut dims: Vec<(i64, i64)> =
            self.shape.iter().zip(&self.strides).map(|(&n, &stride)| (stride, n)).filter(|&(_, n)| n > 1).collect();
        dims.sort_unstable();
        let mut covered = 1i64;
        for (stride, n) in dims {
            if stride < covered {
                return true;
            }
            covered = stride.saturating_mul(n - 1).saturating_add(covered);
        }
        covered > numel.saturating_mul(WIDEST).saturating_add(FEW)
    }

    /// Whether two forms are one, where PyTorch itself distinguishes them: the stride of a dimension of size 1 leads nowhere,
    /// and of a tensor without elements neither offset nor strides do.
    #[must_use]
    pub fn agrees(&self, other: &Meta) -> bool {
        let strides = || (0..self.rank()).all(|d| self.shape[d] <= 1 || self.strides[d] == other.strides[d]);
        self.dtype == other.dtype
            && self.shape == other.shape
            && (self.shape.contains(&0) || (self.offset == other.offset && strides()))
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

impl std::fmt::Display for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Meta { dtype, shape, strides, offset } = self;
        write!(f, "{dtype} {shape:?} strides {strides:?} offset {offset}")
    }
}

/// A number of one of Python's kinds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
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

    /// The value of a symbolic boolean.
    ///
    /// # Errors
    /// [`OpError::NotABool`].
    fn bool(&self, id: ValueId) -> Result<bool, OpError>;

    /// The value of a number of any kind.
    ///
    /// # Errors
    /// As [`Shapes::int`] and [`Shapes::float`].
    fn number(&self, scalar: Scalar) -> Result<Number, OpError> {
        Ok(match scalar {
            Scalar::Int(n) => Number::Int(self.int(n)?),
            Scalar::Float(x) => Number::Float(x),
            Scalar::FloatValue(id) => Number::Float(self.float(id)?),
            Scalar::Bool(b) => Number::Bool(b),
        })
    }

    /// The values of a list of integers.
    ///
    /// # Errors
    /// As [`Shapes::int`].
    fn ints(&self, ints: &[Int]) -> Result<Vec<i64>, OpError> {
        ints.iter().map(|&i| self.int(i)).collect()
    }
}
