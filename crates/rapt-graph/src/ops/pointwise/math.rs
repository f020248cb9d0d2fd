//! The functions on one element: f64 for floats, i64 with wrap-around for integers.

use super::{Binary, Unary};
use crate::OpError;
use rapt_core::float64;

/// A function of a float. What tests a float gives 0 or 1.
pub(super) fn unary_float(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        // NaN has no sign: 0.
        Unary::Sign if x == 0.0 || x.is_nan() => 0.0,
        Unary::Sign => x.signum(),
        Unary::Square => x * x,
        // NaN stays.
        Unary::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Trunc => x.trunc(),
        Unary::Round => x.round_ties_even(),
        Unary::Exp => float64::exp(x),
        Unary::Exp2 => float64::exp2(x),
        Unary::Expm1 => float64::expm1(x),
        Unary::Log => float64::log(x),
        Unary::Log2 => float64::log2(x),
        Unary::Log10 => float64::log10(x),
        Unary::Log1p => float64::log1p(x),
        Unary::Sin => float64::sin(x),
        Unary::Cos => float64::cos(x),
        Unary::Tan => float64::tan(x),
        Unary::Tanh => float64::tanh(x),
        Unary::Sinh => float64::sinh(x),
        Unary::Cosh => float64::cosh(x),
        Unary::Asin => float64::asin(x),
        Unary::Acos => float64::acos(x),
        Unary::Atan => float64::atan(x),
        // Those of std lose digits near the ends of their range; libm gives a number for the acosh of a great negative one.
        Unary::Asinh => libm::asinh(x),
        Unary::Acosh if x < 1.0 => f64::NAN,
        Unary::Acosh => libm::acosh(x),
        Unary::Atanh => libm::atanh(x),
        Unary::Erf => libm::erf(x),
        Unary::Erfc => libm::erfc(x),
        Unary::Sigmoid => 1.0 / (1.0 + float64::exp(-x)),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Silu => x / (1.0 + float64::exp(-x)),
        // erfc keeps its digits where 1 + erf loses them.
        Unary::Gelu => 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
        Unary::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + float64::tanh(inner))
        }
        Unary::LogicalNot => f64::from(u8::from(x == 0.0)),
        Unary::IsNan => f64::from(u8::from(x.is_nan())),
        Unary::IsInf => f64::from(u8::from(x.is_infinite())),
        // Refused of floats when forms are inferred.
        Unary::BitwiseNot => f64::NAN,
    }
}

/// A function of an integer, before it wraps to its dtype. `is_bool`: the integer stands for a boolean.
pub(super) fn unary_int(op: Unary, x: i64, is_bool: bool) -> i64 {
    match op {
        Unary::Neg => x.wrapping_neg(),
        Unary::Abs => x.wrapping_abs(),
        Unary::Sign => x.signum(),
        Unary::Square => x.wrapping_mul(x),
        Unary::Relu => x.max(0),
        Unary::LogicalNot => i64::from(x == 0),
        Unary::BitwiseNot if is_bool => i64::from(x == 0),
        Unary::BitwiseNot => !x,
        Unary::IsNan | Unary::IsInf => 0,
        // Rounding an integer changes nothing; the others compute in floats.
        _ => x,
    }
}

/// A function of two floats. `round_quotient` rounds a quotient before it is truncated, as PyTorch's float32 quotient is.
pub(super) fn binary_float(op: Binary, a: f64, b: f64, round_quotient: impl Fn(f64) -> f64) -> f64 {
    let flag = |condition: bool| f64::from(u8::from(condition));
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::DivFloor => floor_quotient(a, b),
        Binary::DivTrunc => round_quotient(a / b).trunc(),
        Binary::Remainder => {
            let rest = a % b;
            if rest != 0.0 && (b < 0.0) != (rest < 0.0) { rest + b } else { rest }
        }
        Binary::Fmod => a % b,
        Binary::Pow => float64::pow(a, b),
        Binary::Maximum if a.is_nan() || b.is_nan() => f64::NAN,
        // Of zeros of two signs the second, as in PyTorch's vectors.
        Binary::Maximum if a > b => a,
        Binary::Minimum if a.is_nan() || b.is_nan() => f64::NAN,
        Binary::Minimum if a < b => a,
        Binary::Maximum | Binary::Minimum => b,
        Binary::Eq => flag(a == b),
        Binary::Ne => flag(a != b),
        Binary::Lt => flag(a < b),
        Binary::Le => flag(a <= b),
        Binary::Gt => flag(a > b),
        Binary::Ge => flag(a >= b),
        Binary::LogicalAnd => flag(a != 0.0 && b != 0.0),
        Binary::LogicalOr => flag(a != 0.0 || b != 0.0),
        Binary::LogicalXor => flag((a != 0.0) != (b != 0.0)),
        Binary::Atan2 => float64::atan2(a, b),
        Binary::Hypot => float64::hypot(a, b),
        Binary::Copysign => a.copysign(b),
        // Refused of floats when forms are inferred.
        Binary::BitwiseAnd | Binary::BitwiseOr | Binary::BitwiseXor | Binary::ShiftLeft | Binary::ShiftRight => {
            f64::NAN
        }
    }
}

/// Python's `//` of floats as ATen computes it: by way of the remainder, which is exact.
fn floor_quotient(a: f64, b: f64) -> f64 {
    if b == 0.0 {
        return a / b;
    }
    let rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest != 0.0 && (b < 0.0) != (rest < 0.0) {
        quotient -= 1.0;
    }
    if quotient == 0.0 {
        return 0f64.copysign(a / b);
    }
    let floor = quotient.floor();
    if quotient - floor > 0.5 { floor + 1.0 } else { floor }
}

/// A function of two integers, before it wraps to its dtype.
///
/// # Errors
/// [`OpError::ZeroDivision`].
pub(super) fn binary_int(op: Binary, a: i64, b: i64) -> Result<i64, OpError> {
    let divides = matches!(op, Binary::DivFloor | Binary::DivTrunc | Binary::Remainder | Binary::Fmod);
    if divides && b == 0 {
        return Err(OpError::ZeroDivision);
    }
    let signs_differ = (a < 0) != (b < 0);
    Ok(match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::DivFloor => {
            let rounds_down = signs_differ && a.wrapping_rem(b) != 0;
            a.wrapping_div(b) - i64::from(rounds_down)
        }
        Binary::DivTrunc => a.wrapping_div(b),
        // Of integers these are functions of floats.
        Binary::Div | Binary::Atan2 | Binary::Hypot | Binary::Copysign => a,
        Binary::Remainder => {
            let rest = a.wrapping_rem(b);
            if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
        }
        Binary::Fmod => a.wrapping_rem(b),
        Binary::Pow => power(a, b),
        Binary::Maximum => a.max(b),
        Binary::Minimum => a.min(b),
        Binary::Eq => i64::from(a == b),
        Binary::Ne => i64::from(a != b),
        Binary::Lt => i64::from(a < b),
        Binary::Le => i64::from(a <= b),
        Binary::Gt => i64::from(a > b),
        Binary::Ge => i64::from(a >= b),
        Binary::BitwiseAnd => a & b,
        Binary::BitwiseOr => a | b,
        Binary::BitwiseXor => a ^ b,
        Binary::LogicalAnd => i64::from(a != 0 && b != 0),
        Binary::LogicalOr => i64::from(a != 0 || b != 0),
        Binary::LogicalXor => i64::from((a != 0) != (b != 0)),
        Binary::ShiftLeft => {
            if (0..64).contains(&b) {
                a << b
            } else {
                0
            }
        }
        Binary::ShiftRight => a >> if (0..63).contains(&b) { b } else { 63 },
    })
}

/// Integers to integer powers. A negative exponent, which only a tensor may have, gives 0 but for bases of 1 and −1.
fn power(base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 if exponent % 2 != 0 => -1,
            -1 => 1,
            _ => 0,
        };
    }
    let (mut result, mut square, mut left) = (1i64, base, exponent);
    while left > 0 {
        if left % 2 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        left /= 2;
    }
    result
}
