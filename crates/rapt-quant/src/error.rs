//! Why a tensor was not quantized, or parts are no quantized tensor: one variant per cause.

use rapt_core::{DType, Error, ErrorKind, Shape};

use crate::Format;

/// The result of every fallible function of this crate.
pub type Result<T, E = QuantError> = std::result::Result<T, E>;

/// Why a request was refused. Nothing was written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// An error of the vocabulary: a shape, a dtype, an option.
    #[error(transparent)]
    Core(#[from] Error),
    /// An element for which the format has no code.
    #[error("x{index} is {what}, for which {format} has no code")]
    NoCode {
        /// Where it stands in `x`.
        index: Shape,
        /// What it is: `NaN`, `inf` or `-inf`.
        what: &'static str,
        /// The format.
        format: Format,
    },
    /// An element that is no number, where figures of all elements are asked.
    #[error("x{index} is {what}: the figures of such a tensor are no numbers")]
    NotFinite {
        /// Where it stands in `x`.
        index: Shape,
        /// What it is: `NaN`, `inf` or `-inf`.
        what: &'static str,
    },
    /// A scale beyond what its dtype holds.
    #[error("x reaches {reach:e}, whose scale in {format} is beyond the largest {dtype}")]
    ScaleOverflow {
        /// The largest absolute value, or the range, that the scale is computed from.
        reach: f64,
        /// The format.
        format: Format,
        /// The dtype of its scales.
        dtype: DType,
    },
    /// A given scale that divides nothing.
    #[error("scale{index} is {got}: a scale to quantize by is finite and greater than 0")]
    BadScale {
        /// Where it stands in `scale`.
        index: Shape,
        /// Its value.
        got: f32,
    },
    /// A part without which codes are no numbers.
    #[error("{format} needs {part}, and none was given: nothing is assumed in its place")]
    Missing {
        /// Which part.
        part: &'static str,
        /// The format.
        format: Format,
    },
    /// A part that the format does not have.
    #[error("{format} has no {part}, and one was given")]
    Unexpected {
        /// Which part.
        part: &'static str,
        /// The format.
        format: Format,
    },
}

impl QuantError {
    /// The family of this error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            QuantError::Core(error) => error.kind(),
            QuantError::NoCode { .. }
            | QuantError::NotFinite { .. }
            | QuantError::ScaleOverflow { .. }
            | QuantError::BadScale { .. } => ErrorKind::Number,
            QuantError::Missing { .. } | QuantError::Unexpected { .. } => ErrorKind::Option,
        }
    }
}
