//! Numbers of one lane in a dtype. The rules are those of rapt-graph's `number`.

use half::{bf16, f16};
use rapt_core::{DType, bf16_from_f64, f16_from_f64};

use super::{Kernel, each};
use crate::kernels::simd::{Part, Simd, Storage};
use crate::pointwise::Lane;

/// The loop that converts a lane to a dtype; `None` where nothing changes.
pub(super) fn kernel<S: Simd<Elem = f32>>(lane: Lane, dtype: DType) -> Option<Kernel> {
    match lane {
        Lane::F32 => of_f32::<S>(dtype),
        Lane::F64 => of_f64::<S>(dtype),
        Lane::Int => of_int::<S>(dtype),
        Lane::Bool => of_bool::<S>(dtype),
    }
}

/// A float truncated to int64; what int64 does not hold becomes its least number, as of x86's `cvttsd2si`.
#[inline(always)]
fn to_i64(x: f64) -> i64 {
    if (-9_223_372_036_854_775_808.0..9_223_372_036_854_775_808.0).contains(&x) { x as i64 } else { i64::MIN }
}

/// A float truncated to int32; what int32 does not hold becomes its least number.
#[inline(always)]
fn to_i32(x: f64) -> i32 {
    let x = x.trunc();
    if (-2_147_483_648.0..2_147_483_648.0).contains(&x) { x as i32 } else { i32::MIN }
}

/// PyTorch converts to uint8 by way of int64, to the other narrow integers by way of int32.
macro_rules! float_to_int {
    ($dtype:expr, $float:ty) => {
        match $dtype {
            DType::I64 => each!($float => i64, |x| to_i64(x as f64)),
            DType::U8 => each!($float => i64, |x| i64::from(to_i64(x as f64) as u8)),
            DType::I32 => each!($float => i64, |x| i64::from(to_i32(x as f64))),
            DType::I16 => each!($float => i64, |x| i64::from(to_i32(x as f64) as i16)),
            DType::I8 => each!($float => i64, |x| i64::from(to_i32(x as f64) as i8)),
            DType::Bool => each!($float => u8, |x| u8::from(x != 0.0)),
            _ => return None,
        }
    };
}

fn of_f32<S: Simd<Elem = f32>>(dtype: DType) -> Option<Kernel> {
    Some(match dtype {
        DType::F64 => each!(f32 => f64, |x| f64::from(x)),
        DType::F16 => round::<S, f16, false>,
        DType::BF16 => round::<S, bf16, false>,
        dtype => float_to_int!(dtype, f32),
    })
}

fn of_f64<S: Simd<Elem = f32>>(dtype: DType) -> Option<Kernel> {
    Some(match dtype {
        DType::F32 => each!(f64 => f32, |x| x as f32),
        DType::F16 => each!(f64 => f32, |x| f16_from_f64(x).to_f32()),
        DType::BF16 => each!(f64 => f32, |x| bf16_from_f64(x).to_f32()),
        dtype => float_to_int!(dtype, f64),
    })
}

/// By way of float32 to the narrower floats, as PyTorch does.
fn of_int<S: Simd<Elem = f32>>(dtype: DType) -> Option<Kernel> {
    Some(match dtype {
        DType::F64 => each!(i64 => f64, |x| x as f64),
        DType::F32 => each!(i64 => f32, |x| x as f32),
        DType::F16 => round::<S, f16, true>,
        DType::BF16 => round::<S, bf16, true>,
        DType::I32 => each!(i64 => i64, |x| i64::from(x as i32)),
        DType::I16 => each!(i64 => i64, |x| i64::from(x as i16)),
        DType::I8 => each!(i64 => i64, |x| i64::from(x as i8)),
        DType::U8 => each!(i64 => i64, |x| i64::from(x as u8)),
        DType::Bool => each!(i64 => u8, |x| u8::from(x != 0)),
        _ => return None,
    })
}

fn of_bool<S: Simd<Elem = f32>>(dtype: DType) -> Option<Kernel> {
    Some(match Lane::of(dtype)? {
        Lane::F32 => each!(u8 => f32, |x| f32::from(x)),
        Lane::F64 => each!(u8 => f64, |x| f64::from(x)),
        Lane::Int => each!(u8 => i64, |x| i64::from(x)),
        Lane::Bool => return None,
    })
}

/// Elements of one lane through vectors of a 16-bit dtype and back.
struct Round<T, const INTS: bool> {
    dst: *mut f32,
    source: *const u8,
    n: usize,
    to: std::marker::PhantomData<T>,
}

/// The most lanes of f32 that a vector has.
const MOST_LANES: usize = 16;

impl<T, const INTS: bool> Round<T, INTS> {
    /// `count` elements from `at` on, at most a vector's. A length that is known becomes the vectors' own loads and stores.
    #[inline(always)]
    unsafe fn vector<S: Simd<Elem = f32>>(&self, at: usize, count: usize)
    where
        T: Storage<S>,
    {
        let (mut wide, mut narrow) = ([0f32; MOST_LANES], std::mem::MaybeUninit::<[T; MOST_LANES]>::uninit());
        let narrow = narrow.as_mut_ptr().cast::<T>();
        // SAFETY: the caller vouches for the elements; the arrays hold the longest vector.
        unsafe {
            if INTS {
                for (lane, wide) in wide.iter_mut().enumerate().take(count) {
                    *wide = self.source.cast::<i64>().add(at + lane).read() as f32;
                }
            } else {
                std::ptr::copy_nonoverlapping(self.source.cast::<f32>().add(at), wide.as_mut_ptr(), count);
            }
            T::store(narrow, S::load(wide.as_ptr()));
            S::store(wide.as_mut_ptr(), T::load(narrow));
            std::ptr::copy_nonoverlapping(wide.as_ptr(), self.dst.add(at), count);
        }
    }
}

impl<S: Simd<Elem = f32>, T: Storage<S>, const INTS: bool> Part<S> for Round<T, INTS> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let whole = self.n / S::LANES * S::LANES;
        // SAFETY: the caller vouches for n elements.
        unsafe {
            for at in (0..whole).step_by(S::LANES) {
                self.vector::<S>(at, S::LANES);
            }
            if whole < self.n {
                self.vector::<S>(whole, self.n - whole);
            }
        }
    }
}

unsafe fn round<S: Simd<Elem = f32>, T: Storage<S>, const INTS: bool>(
    dst: *mut u8,
    source: *const u8,
    _: *const u8,
    _: *const u8,
    n: usize,
) -> bool {
    let part = Round::<T, INTS> { dst: dst.cast(), source, n, to: std::marker::PhantomData };
    // SAFETY: promised by the caller.
    unsafe { S::apart(part) };
    false
}
