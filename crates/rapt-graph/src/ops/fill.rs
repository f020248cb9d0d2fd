//! A number as an element: refused where the dtype does not hold it, as PyTorch refuses it.

use rapt_core::DType;

use crate::number::{float_to_int, int_to_float, is_float, round, wrap};
use crate::{Cells, Number, OpError};

/// The greatest finite number of a float dtype.
pub(super) fn greatest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        DType::BF16 => f64::from(half::bf16::MAX),
        DType::F32 => f64::from(f32::MAX),
        _ => f64::MAX,
    }
}

/// The least and greatest number of an integer dtype. Of uint8 the negatives count, and wrap around.
fn bounds(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::U8 => (-255, 255),
        DType::I8 => (-128, 127),
        DType::I16 => (i64::from(i16::MIN), i64::from(i16::MAX)),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        _ => (i64::MIN, i64::MAX),
    }
}

/// One element of this dtype; floats are not rounded yet.
///
/// # Errors
/// [`OpError::Overflow`].
pub(super) fn element(dtype: DType, number: Number) -> Result<Cells, OpError> {
    let overflow = |value: String| Err(OpError::Overflow { value, dtype });
    Ok(match number {
        Number::Bool(b) if is_float(dtype) => Cells::Float(vec![f64::from(u8::from(b))]),
        Number::Bool(b) => Cells::Int(vec![i64::from(b)]),
        Number::Int(n) if is_float(dtype) => {
            // Overflow is judged before rounding: 65505 is too large for float16, though it rounds to 65504.
            if (n as f64).abs() > greatest(dtype) {
                return overflow(n.to_string());
            }
            Cells::Float(vec![int_to_float(dtype, n)])
        }
        Number::Int(n) => {
            let (least, most) = bounds(dtype);
            if dtype != DType::Bool && !(least..=most).contains(&n) {
                return overflow(n.to_string());
            }
            Cells::Int(vec![wrap(dtype, n)])
        }
        Number::Float(x) if is_float(dtype) => {
            if x.is_finite() && x.abs() > greatest(dtype) {
                return overflow(x.to_string());
            }
            Cells::Float(vec![x])
        }
        Number::Float(x) => {
            let (least, most) = bounds(dtype);
            // 2⁶³ as a float is above every int64; the other bounds are floats themselves.
            let inside = x >= least as f64 && if most == i64::MAX { x < most as f64 } else { x <= most as f64 };
            if dtype != DType::Bool && !inside {
                return overflow(x.to_string());
            }
            Cells::Int(vec![float_to_int(dtype, x)])
        }
    })
}

/// One element of this dtype, floats rounded to it.
///
/// # Errors
/// [`OpError::Overflow`].
pub(super) fn rounded(dtype: DType, number: Number) -> Result<Cells, OpError> {
    Ok(match element(dtype, number)? {
        Cells::Float(x) => Cells::Float(x.into_iter().map(|x| round(dtype, x)).collect()),
        ints @ Cells::Int(_) => ints,
    })
}

/// Many of one element.
pub(super) fn repeat(element: &Cells, count: usize) -> Cells {
    match element {
        Cells::Float(x) => Cells::Float(vec![x[0]; count]),
        Cells::Int(x) => Cells::Int(vec![x[0]; count]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `torch.full` of torch 2.15 gives or refuses.
    #[test]
    fn numbers_that_a_dtype_does_not_hold_are_refused() {
        let int = |dtype, number| match element(dtype, number) {
            Ok(Cells::Int(x)) => Some(x[0]),
            _ => None,
        };
        assert_eq!(int(DType::I32, Number::Int(1 << 40)), None);
        assert_eq!(int(DType::I32, Number::Float(1.7)), Some(1));
        assert_eq!(int(DType::I64, Number::Float(f64::NAN)), None);
        assert_eq!(int(DType::I64, Number::Float(9_223_372_036_854_775_808.0)), None);
        assert_eq!(int(DType::Bool, Number::Int(2)), Some(1));
        assert_eq!(int(DType::U8, Number::Int(-1)), Some(255));
        assert!(element(DType::F16, Number::Float(1e10)).is_err());
        assert!(element(DType::F16, Number::Int(65505)).is_err());
        assert_eq!(element(DType::F16, Number::Float(f64::INFINITY)), Ok(Cells::Float(vec![f64::INFINITY])));
    }
}
