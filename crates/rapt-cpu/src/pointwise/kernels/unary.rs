//! Functions of one register.

use super::{Kernel, Map, each, math, one};
use crate::kernels::simd::Simd;
use crate::pointwise::{Lane, Unary};
use rapt_core::float64;

pub(super) fn kernel<S: Simd<Elem = f32>>(op: Unary, lane: Lane) -> Option<Kernel> {
    match lane {
        Lane::F32 => of_f32::<S>(op),
        Lane::F64 => of_f64::<S>(op),
        Lane::Int => of_int::<S>(op),
        Lane::Bool => of_bool::<S>(op),
    }
}

/// Functions of float32 that cost less where their result is rounded to 16 bits at once.
pub(super) fn short<S: Simd<Elem = f32>>(op: Unary) -> Option<Kernel> {
    use math::f32 as math;
    Some(match op {
        Unary::Silu => each!(f32 => f32, |x| math::short_silu::<S>(x)),
        Unary::Gelu => each!(f32 => f32, |x| math::short_gelu::<S>(x)),
        Unary::GeluTanh => each!(f32 => f32, |x| math::short_gelu_tanh::<S>(x)),
        _ => return None,
    })
}

/// The functions that are exact or rounded once, of either float.
macro_rules! exact {
    ($op:expr, $float:ty) => {
        match $op {
            Unary::Neg => each!($float => $float, |x| -x),
            Unary::Abs => each!($float => $float, |x| x.abs()),
            // NaN has no sign: 0.
            Unary::Sign => each!($float => $float, |x| if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 }),
            Unary::Square => each!($float => $float, |x| x * x),
            // NaN stays, and so does −0.
            Unary::Relu => each!($float => $float, |x| if x < 0.0 { 0.0 } else { x }),
            Unary::Floor => each!($float => $float, |x| x.floor()),
            Unary::Ceil => each!($float => $float, |x| x.ceil()),
            Unary::Trunc => each!($float => $float, |x| x.trunc()),
            Unary::Round => each!($float => $float, |x| x.round_ties_even()),
            Unary::Sqrt => each!($float => $float, |x| x.sqrt()),
            Unary::Rsqrt => each!($float => $float, |x| 1.0 / x.sqrt()),
            Unary::Reciprocal => each!($float => $float, |x| 1.0 / x),
            Unary::LogicalNot => each!($float => u8, |x| u8::from(x == 0.0)),
            Unary::IsNan => each!($float => u8, |x| u8::from(x.is_nan())),
            Unary::IsInf => each!($float => u8, |x| u8::from(x.is_infinite())),
            _ => return None,
        }
    };
}

/// That of libm gives a number for a great negative one.
fn acosh(x: f64) -> f64 {
    if x < 1.0 { f64::NAN } else { libm::acosh(x) }
}

fn of_f32<S: Simd<Elem = f32>>(op: Unary) -> Option<Kernel> {
    use math::f32 as math;
    Some(match op {
        Unary::Exp => each!(f32 => f32, |x| math::exp::<S>(x)),
        Unary::Exp2 => each!(f32 => f32, |x| math::exp2::<S>(x)),
        Unary::Expm1 => each!(f32 => f32, |x| math::expm1::<S>(x)),
        Unary::Log => each!(f32 => f32, |x| math::log::<S>(x)),
        Unary::Log2 => each!(f32 => f32, |x| math::log2::<S>(x)),
        Unary::Log10 => each!(f32 => f32, |x| math::log10::<S>(x)),
        Unary::Log1p => each!(f32 => f32, |x| math::log1p::<S>(x)),
        Unary::Sin => periodic::<S, Sin>,
        Unary::Cos => periodic::<S, Cos>,
        Unary::Tan => periodic::<S, Tan>,
        Unary::Tanh => each!(f32 => f32, |x| math::tanh::<S>(x)),
        // By way of float64: each is rounded once.
        Unary::Sinh => each!(f32 => f32, |x| float64::sinh(f64::from(x)) as f32),
        Unary::Cosh => each!(f32 => f32, |x| float64::cosh(f64::from(x)) as f32),
        Unary::Asin => each!(f32 => f32, |x| float64::asin(f64::from(x)) as f32),
        Unary::Acos => each!(f32 => f32, |x| float64::acos(f64::from(x)) as f32),
        Unary::Atan => each!(f32 => f32, |x| float64::atan(f64::from(x)) as f32),
        Unary::Asinh => each!(f32 => f32, |x| libm::asinh(f64::from(x)) as f32),
        Unary::Acosh => each!(f32 => f32, |x| acosh(f64::from(x)) as f32),
        Unary::Atanh => each!(f32 => f32, |x| libm::atanh(f64::from(x)) as f32),
        Unary::Erfc => each!(f32 => f32, |x| libm::erfc(f64::from(x)) as f32),
        Unary::Erf => each!(f32 => f32, |x| math::erf::<S>(x)),
        Unary::Sigmoid => each!(f32 => f32, |x| math::sigmoid::<S>(x)),
        Unary::Silu => each!(f32 => f32, |x| math::silu::<S>(x)),
        Unary::Gelu => each!(f32 => f32, |x| math::gelu::<S>(x)),
        Unary::GeluTanh => each!(f32 => f32, |x| math::gelu_tanh::<S>(x)),
        op => exact!(op, f32),
    })
}

fn of_f64<S: Simd<Elem = f32>>(op: Unary) -> Option<Kernel> {
    use math::f64 as math;
    Some(match op {
        Unary::Exp => each!(f64 => f64, |x| float64::exp(x)),
        Unary::Exp2 => each!(f64 => f64, |x| float64::exp2(x)),
        Unary::Expm1 => each!(f64 => f64, |x| float64::expm1(x)),
        Unary::Log => each!(f64 => f64, |x| float64::log(x)),
        Unary::Log2 => each!(f64 => f64, |x| float64::log2(x)),
        Unary::Log10 => each!(f64 => f64, |x| float64::log10(x)),
        Unary::Log1p => each!(f64 => f64, |x| float64::log1p(x)),
        Unary::Sin => each!(f64 => f64, |x| float64::sin(x)),
        Unary::Cos => each!(f64 => f64, |x| float64::cos(x)),
        Unary::Tan => each!(f64 => f64, |x| float64::tan(x)),
        Unary::Tanh => each!(f64 => f64, |x| float64::tanh(x)),
        Unary::Sinh => each!(f64 => f64, |x| float64::sinh(x)),
        Unary::Cosh => each!(f64 => f64, |x| float64::cosh(x)),
        Unary::Asin => each!(f64 => f64, |x| float64::asin(x)),
        Unary::Acos => each!(f64 => f64, |x| float64::acos(x)),
        Unary::Atan => each!(f64 => f64, |x| float64::atan(x)),
        Unary::Asinh => each!(f64 => f64, |x| libm::asinh(x)),
        Unary::Acosh => each!(f64 => f64, |x| acosh(x)),
        Unary::Atanh => each!(f64 => f64, |x| libm::atanh(x)),
        Unary::Erf => each!(f64 => f64, |x| libm::erf(x)),
        Unary::Erfc => each!(f64 => f64, |x| libm::erfc(x)),
        Unary::Sigmoid => each!(f64 => f64, |x| math::sigmoid(x)),
        Unary::Silu => each!(f64 => f64, |x| math::silu(x)),
        Unary::Gelu => each!(f64 => f64, |x| math::gelu(x)),
        Unary::GeluTanh => each!(f64 => f64, |x| math::gelu_tanh(x)),
        op => exact!(op, f64),
    })
}

fn of_int<S: Simd<Elem = f32>>(op: Unary) -> Option<Kernel> {
    Some(match op {
        Unary::Neg => each!(i64 => i64, |x| x.wrapping_neg()),
        Unary::Abs => each!(i64 => i64, |x| x.wrapping_abs()),
        Unary::Sign => each!(i64 => i64, |x| x.signum()),
        Unary::Square => each!(i64 => i64, |x| x.wrapping_mul(x)),
        Unary::Relu => each!(i64 => i64, |x| x.max(0)),
        Unary::BitwiseNot => each!(i64 => i64, |x| !x),
        Unary::LogicalNot => each!(i64 => u8, |x| u8::from(x == 0)),
        Unary::Floor | Unary::Ceil | Unary::Trunc | Unary::Round => each!(i64 => i64, |x| x),
        Unary::IsNan | Unary::IsInf => each!(i64 => u8, |_x| 0),
        _ => return None,
    })
}

fn of_bool<S: Simd<Elem = f32>>(op: Unary) -> Option<Kernel> {
    Some(match op {
        Unary::Sign | Unary::Square => each!(u8 => u8, |x| x),
        Unary::LogicalNot | Unary::BitwiseNot => each!(u8 => u8, |x| x ^ 1),
        Unary::IsNan | Unary::IsInf => each!(u8 => u8, |_x| 0),
        _ => return None,
    })
}

/// A periodic function of float32: in vectors up to [`math::f32::FAR`], by way of float64 beyond.
trait Periodic: Map<In = f32, Out = f32> {
    fn far(x: f64) -> f64;
}

macro_rules! periodic {
    ($($name:ident, $near:ident, $far:path;)*) => {$(
        struct $name;
        impl Map for $name {
            type In = f32;
            type Out = f32;
            #[inline(always)]
            fn of<S: Simd<Elem = f32>>(x: f32) -> f32 {
                math::f32::$near::<S>(x)
            }
        }
        impl Periodic for $name {
            fn far(x: f64) -> f64 {
                $far(x)
            }
        }
    )*};
}

periodic! {
    Sin, sin, float64::sin;
    Cos, cos, float64::cos;
    Tan, tan, float64::tan;
}

unsafe fn periodic<S: Simd<Elem = f32>, F: Periodic>(
    dst: *mut u8,
    x: *const u8,
    b: *const u8,
    c: *const u8,
    n: usize,
) -> bool {
    // SAFETY: the caller vouches for n elements of each array, which are not the same.
    unsafe {
        one::<S, F>(dst, x, b, c, n);
        let dst = std::slice::from_raw_parts_mut(dst.cast::<f32>(), n);
        let x = std::slice::from_raw_parts(x.cast::<f32>(), n);
        if x.iter().fold(false, |any, x| any | (x.abs() >= math::f32::FAR)) {
            for (dst, &x) in dst.iter_mut().zip(x) {
                if x.abs() >= math::f32::FAR {
                    *dst = F::far(f64::from(x)) as f32;
                }
            }
        }
    }
    false
}
