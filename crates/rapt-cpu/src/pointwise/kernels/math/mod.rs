//! Functions of one element, from which loops are made.

pub(crate) mod f32;
pub(super) mod f64;

use crate::pointwise::Unary;

/// Whether a function costs many times an addition.
pub(in crate::pointwise) fn is_costly(op: Unary) -> bool {
    use Unary::{
        Acos, Acosh, Asin, Asinh, Atan, Atanh, Cos, Cosh, Erf, Erfc, Exp, Exp2, Expm1, Gelu, GeluTanh, Log, Log1p,
        Log2, Log10, Sigmoid, Silu, Sin, Sinh, Tan, Tanh,
    };
    matches!(
        op,
        Acos | Acosh
            | Asin
            | Asinh
            | Atan
            | Atanh
            | Cosh
            | Sinh
            | Erfc
            | Exp
            | Exp2
            | Expm1
            | Log
            | Log2
            | Log10
            | Log1p
            | Sin
            | Cos
            | Tan
            | Tanh
            | Erf
            | Sigmoid
            | Silu
            | Gelu
            | GeluTanh
    )
}

/// Integers to integer powers, wrapping. A negative exponent gives 0 but for bases of 1 and −1.
pub(super) fn power(base: i64, exponent: i64) -> i64 {
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
