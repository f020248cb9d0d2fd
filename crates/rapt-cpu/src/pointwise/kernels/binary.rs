//! Functions of two registers and of three.

use super::{Kernel, each, math};
use crate::kernels::simd::{Part, Simd};
use crate::pointwise::{Binary, Lane};
use rapt_core::float64;

pub(super) fn kernel<S: Simd<Elem = f32>>(op: Binary, lane: Lane) -> Option<Kernel> {
    match lane {
        Lane::F32 => of_f32::<S>(op),
        Lane::F64 => of_f64::<S>(op),
        Lane::Int => of_int::<S>(op),
        Lane::Bool => of_bool::<S>(op),
    }
}

pub(super) fn select<S: Simd<Elem = f32>>(lane: Lane) -> Kernel {
    match lane {
        Lane::F32 => each!(u8, f32, |c, a, b| if c != 0 { a } else { b }),
        Lane::F64 => each!(u8, f64, |c, a, b| if c != 0 { a } else { b }),
        Lane::Int => each!(u8, i64, |c, a, b| if c != 0 { a } else { b }),
        Lane::Bool => each!(u8, u8, |c, a, b| if c != 0 { a } else { b }),
    }
}

pub(super) fn mul_add<S: Simd<Elem = f32>>(lane: Lane) -> Option<Kernel> {
    Some(match lane {
        Lane::F32 => each!(f32, f32, |a, b, c| math::f32::mul_add::<S>(a, b, c)),
        Lane::F64 => each!(f64, f64, |a, b, c| if S::FUSED { a.mul_add(b, c) } else { float64::fma(a, b, c) }),
        Lane::Int => each!(i64, i64, |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        Lane::Bool => return None,
    })
}

/// What is the same of either float. A maximum or minimum with NaN is NaN, and of zeros of two signs the second.
macro_rules! of_float {
    ($op:expr, $float:ty) => {
        match $op {
            Binary::Add => each!($float => $float, |a, b| a + b),
            Binary::Sub => each!($float => $float, |a, b| a - b),
            Binary::Mul => each!($float => $float, |a, b| a * b),
            Binary::Div => each!($float => $float, |a, b| a / b),
            Binary::DivTrunc => each!($float => $float, |a, b| (a / b).trunc()),
            Binary::Fmod => each!($float => $float, |a, b| a % b),
            Binary::Remainder => each!($float => $float, |a, b| {
                let rest = a % b;
                if rest != 0.0 && (b < 0.0) != (rest < 0.0) { rest + b } else { rest }
            }),
            Binary::Maximum => each!($float => $float, |a, b| if a.is_nan() || a > b { a } else { b }),
            Binary::Minimum => each!($float => $float, |a, b| if a.is_nan() || a < b { a } else { b }),
            Binary::Copysign => each!($float => $float, |a, b| a.copysign(b)),
            Binary::Eq => each!($float => u8, |a, b| u8::from(a == b)),
            Binary::Ne => each!($float => u8, |a, b| u8::from(a != b)),
            Binary::Lt => each!($float => u8, |a, b| u8::from(a < b)),
            Binary::Le => each!($float => u8, |a, b| u8::from(a <= b)),
            Binary::Gt => each!($float => u8, |a, b| u8::from(a > b)),
            Binary::Ge => each!($float => u8, |a, b| u8::from(a >= b)),
            Binary::LogicalAnd => each!($float => u8, |a, b| u8::from(a != 0.0) & u8::from(b != 0.0)),
            Binary::LogicalOr => each!($float => u8, |a, b| u8::from(a != 0.0) | u8::from(b != 0.0)),
            Binary::LogicalXor => each!($float => u8, |a, b| u8::from(a != 0.0) ^ u8::from(b != 0.0)),
            _ => return None,
        }
    };
}

fn of_f32<S: Simd<Elem = f32>>(op: Binary) -> Option<Kernel> {
    Some(match op {
        // By way of float64, as the interpreter computes it: a difference and a quotient are then exact enough.
        Binary::DivFloor => each!(f32 => f32, |a, b| math::f64::floor_quotient(f64::from(a), f64::from(b)) as f32),
        Binary::Pow => each!(f32 => f32, |a, b| float64::pow(f64::from(a), f64::from(b)) as f32),
        Binary::Atan2 => each!(f32 => f32, |a, b| float64::atan2(f64::from(a), f64::from(b)) as f32),
        Binary::Hypot => each!(f32 => f32, |a, b| float64::hypot(f64::from(a), f64::from(b)) as f32),
        op => of_float!(op, f32),
    })
}

fn of_f64<S: Simd<Elem = f32>>(op: Binary) -> Option<Kernel> {
    Some(match op {
        Binary::DivFloor => each!(f64 => f64, |a, b| math::f64::floor_quotient(a, b)),
        Binary::Pow => each!(f64 => f64, |a, b| float64::pow(a, b)),
        Binary::Atan2 => each!(f64 => f64, |a, b| float64::atan2(a, b)),
        Binary::Hypot => each!(f64 => f64, |a, b| float64::hypot(a, b)),
        op => of_float!(op, f64),
    })
}

fn of_int<S: Simd<Elem = f32>>(op: Binary) -> Option<Kernel> {
    Some(match op {
        Binary::Add => each!(i64 => i64, |a, b| a.wrapping_add(b)),
        Binary::Sub => each!(i64 => i64, |a, b| a.wrapping_sub(b)),
        Binary::Mul => each!(i64 => i64, |a, b| a.wrapping_mul(b)),
        Binary::DivFloor => divide::<S, Floor>,
        Binary::DivTrunc => divide::<S, Trunc>,
        Binary::Remainder => divide::<S, Remainder>,
        Binary::Fmod => divide::<S, Fmod>,
        Binary::Pow => each!(i64 => i64, |a, b| math::power(a, b)),
        Binary::Maximum => each!(i64 => i64, |a, b| a.max(b)),
        Binary::Minimum => each!(i64 => i64, |a, b| a.min(b)),
        Binary::Eq => each!(i64 => u8, |a, b| u8::from(a == b)),
        Binary::Ne => each!(i64 => u8, |a, b| u8::from(a != b)),
        Binary::Lt => each!(i64 => u8, |a, b| u8::from(a < b)),
        Binary::Le => each!(i64 => u8, |a, b| u8::from(a <= b)),
        Binary::Gt => each!(i64 => u8, |a, b| u8::from(a > b)),
        Binary::Ge => each!(i64 => u8, |a, b| u8::from(a >= b)),
        Binary::BitwiseAnd => each!(i64 => i64, |a, b| a & b),
        Binary::BitwiseOr => each!(i64 => i64, |a, b| a | b),
        Binary::BitwiseXor => each!(i64 => i64, |a, b| a ^ b),
        Binary::LogicalAnd => each!(i64 => u8, |a, b| u8::from(a != 0) & u8::from(b != 0)),
        Binary::LogicalOr => each!(i64 => u8, |a, b| u8::from(a != 0) | u8::from(b != 0)),
        Binary::LogicalXor => each!(i64 => u8, |a, b| u8::from(a != 0) ^ u8::from(b != 0)),
        Binary::ShiftLeft => each!(i64 => i64, |a, b| if (0..64).contains(&b) { a << b } else { 0 }),
        Binary::ShiftRight => each!(i64 => i64, |a, b| a >> if (0..63).contains(&b) { b } else { 63 }),
        Binary::Div | Binary::Atan2 | Binary::Hypot | Binary::Copysign => return None,
    })
}

fn of_bool<S: Simd<Elem = f32>>(op: Binary) -> Option<Kernel> {
    Some(match op {
        Binary::Add | Binary::Maximum | Binary::BitwiseOr | Binary::LogicalOr => each!(u8 => u8, |a, b| a | b),
        Binary::Mul | Binary::Minimum | Binary::BitwiseAnd | Binary::LogicalAnd => each!(u8 => u8, |a, b| a & b),
        Binary::Ne | Binary::BitwiseXor | Binary::LogicalXor => each!(u8 => u8, |a, b| a ^ b),
        Binary::Eq => each!(u8 => u8, |a, b| a ^ b ^ 1),
        Binary::Lt => each!(u8 => u8, |a, b| (a ^ 1) & b),
        Binary::Le => each!(u8 => u8, |a, b| (a ^ 1) | b),
        Binary::Gt => each!(u8 => u8, |a, b| a & (b ^ 1)),
        // Nothing to the power of nothing is 1.
        Binary::Ge | Binary::Pow => each!(u8 => u8, |a, b| a | (b ^ 1)),
        _ => return None,
    })
}

/// A quotient or remainder of integers, by a divisor other than 0.
trait Division {
    fn of(a: i64, b: i64) -> i64;
}

struct Floor;
struct Trunc;
struct Remainder;
struct Fmod;

impl Division for Floor {
    #[inline(always)]
    fn of(a: i64, b: i64) -> i64 {
        let rounds_down = (a < 0) != (b < 0) && a.wrapping_rem(b) != 0;
        a.wrapping_div(b) - i64::from(rounds_down)
    }
}

impl Division for Trunc {
    #[inline(always)]
    fn of(a: i64, b: i64) -> i64 {
        a.wrapping_div(b)
    }
}

impl Division for Remainder {
    #[inline(always)]
    fn of(a: i64, b: i64) -> i64 {
        let rest = a.wrapping_rem(b);
        if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
    }
}

impl Division for Fmod {
    #[inline(always)]
    fn of(a: i64, b: i64) -> i64 {
        a.wrapping_rem(b)
    }
}

struct Divide<F> {
    dst: *mut u8,
    sources: [*const u8; 2],
    n: usize,
    of: std::marker::PhantomData<F>,
}

impl<S: Simd<Elem = f32>, F: Division> Part<S> for Divide<F> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let (dst, a, b) = (self.dst.cast::<i64>(), self.sources[0].cast::<i64>(), self.sources[1].cast::<i64>());
        for i in 0..self.n {
            // SAFETY: the caller vouches for n elements of each array.
            unsafe {
                if b.add(i).read() == 0 {
                    return true;
                }
                dst.add(i).write(F::of(a.add(i).read(), b.add(i).read()));
            }
        }
        false
    }
}

unsafe fn divide<S: Simd<Elem = f32>, F: Division>(
    dst: *mut u8,
    a: *const u8,
    b: *const u8,
    _: *const u8,
    n: usize,
) -> bool {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Divide::<F> { dst, sources: [a, b], n, of: std::marker::PhantomData }) }
}
