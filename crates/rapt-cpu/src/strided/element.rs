//! The elements of each dtype, and the numbers that kernels compute with: those they compare, and those they add.

use half::{bf16, f16};
use rapt_core::{Arch, DType, bf16_from_f64, f16_from_f64};

use crate::arch::{self, Vectors};
use crate::kernels::simd::{Part, Simd};

/// What elements are compared as: float32, float64 or int64, exactly.
pub(super) trait Num: Copy + PartialOrd + Send + Sync + 'static {
    /// Below every other.
    const LEAST: Self;
    /// Above every other.
    const GREATEST: Self;
    const ZERO: Self;
    /// Whether it is NaN.
    fn is_nan(self) -> bool;
    /// Whether it is 0, of either sign.
    fn is_zero(self) -> bool;
    /// `self + a · b`.
    fn plus_product(self, a: Self, b: Self) -> Self;
}

macro_rules! float_num {
    ($($ty:ty)*) => {$(
        impl Num for $ty {
            const LEAST: Self = <$ty>::NEG_INFINITY;
            const GREATEST: Self = <$ty>::INFINITY;
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn is_nan(self) -> bool {
                <$ty>::is_nan(self)
            }
            #[inline(always)]
            fn is_zero(self) -> bool {
                self == 0.0
            }
            #[inline(always)]
            fn plus_product(self, a: $ty, b: $ty) -> $ty {
                self + a * b
            }
        }
    )*};
}

float_num!(f32 f64);

impl Num for i64 {
    const LEAST: Self = i64::MIN;
    const GREATEST: Self = i64::MAX;
    const ZERO: Self = 0;
    #[inline(always)]
    fn is_nan(self) -> bool {
        false
    }
    #[inline(always)]
    fn is_zero(self) -> bool {
        self == 0
    }
    #[inline(always)]
    fn plus_product(self, a: i64, b: i64) -> i64 {
        self.wrapping_add(a.wrapping_mul(b))
    }
}

/// What elements are added as: float64, or int64 that wraps around.
pub(super) trait Sum: Copy + Send + Sync + 'static {
    const ZERO: Self;
    const ONE: Self;
    /// What changes no sum, not even its sign.
    const NEUTRAL: Self;
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    /// The quotient, of integers cut.
    fn over(self, by: i64) -> Self;
    /// The square root of a float.
    fn root(self) -> Self;
    /// Writes the number as an element of `dtype`: floats rounded to nearest even, integers wrapped.
    ///
    /// # Safety
    /// `ptr` is valid for a write of one `dtype`.
    unsafe fn write(self, dtype: DType, ptr: *mut u8);
}

impl Sum for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEUTRAL: Self = -0.0;
    #[inline(always)]
    fn plus(self, other: f64) -> f64 {
        self + other
    }
    #[inline(always)]
    fn times(self, other: f64) -> f64 {
        self * other
    }
    #[inline(always)]
    fn over(self, by: i64) -> f64 {
        self / by as f64
    }
    #[inline(always)]
    fn root(self) -> f64 {
        self.sqrt()
    }
    #[inline(always)]
    unsafe fn write(self, dtype: DType, ptr: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe {
            match dtype {
                DType::F64 => ptr.cast::<f64>().write(self),
                DType::F32 => ptr.cast::<f32>().write(self as f32),
                DType::F16 => ptr.cast::<f16>().write(f16_from_f64(self)),
                DType::BF16 => ptr.cast::<bf16>().write(bf16_from_f64(self)),
                _ => {}
            }
        }
    }
}

impl Sum for i64 {
    const ZERO: Self = 0;
    const ONE: Self = 1;
    const NEUTRAL: Self = 0;
    #[inline(always)]
    fn plus(self, other: i64) -> i64 {
        self.wrapping_add(other)
    }
    #[inline(always)]
    fn times(self, other: i64) -> i64 {
        self.wrapping_mul(other)
    }
    #[inline(always)]
    fn over(self, by: i64) -> i64 {
        self.wrapping_div(by)
    }
    #[inline(always)]
    fn root(self) -> i64 {
        self
    }
    #[inline(always)]
    unsafe fn write(self, dtype: DType, ptr: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe {
            match dtype {
                DType::I64 => ptr.cast::<i64>().write(self),
                DType::I32 => ptr.cast::<i32>().write(self as i32),
                DType::I16 => ptr.cast::<i16>().write(self as i16),
                DType::I8 => ptr.cast::<i8>().write(self as i8),
                DType::U8 => ptr.write(self as u8),
                DType::Bool => ptr.write(u8::from(self != 0)),
                _ => {}
            }
        }
    }
}

/// An element in memory.
pub(super) trait Element: Copy + Send + Sync + 'static {
    const DTYPE: DType;
    type Num: Num;
    type Sum: Sum;
    fn num(self) -> Self::Num;
    /// The element whose number this is.
    fn of_num(num: Self::Num) -> Self;
    fn sum(self) -> Self::Sum;
    /// Its number in float64; of integers the nearest.
    fn float(self) -> f64;
    /// A number that orders elements as `sort` does: equal ones are equal, NaN is the greatest. Of elements of at most four
    /// bytes it is below 2³².
    fn rank(self) -> u64;
    /// The sum of two elements; integers wrap around, of booleans whether one is set.
    fn plus(self, other: Self) -> Self;
}

macro_rules! float_element {
    ($ty:ty, $dtype:ident, $num:ty, $bits:ty, $num_of:expr, $of_num:expr) => {
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            type Num = $num;
            type Sum = f64;
            #[inline(always)]
            fn num(self) -> $num {
                $num_of(self)
            }
            #[inline(always)]
            fn of_num(num: $num) -> Self {
                $of_num(num)
            }
            #[inline(always)]
            fn sum(self) -> f64 {
                self.num().into()
            }
            #[inline(always)]
            fn float(self) -> f64 {
                self.sum()
            }
            #[inline(always)]
            fn rank(self) -> u64 {
                let x = self.num();
                if x.is_nan() {
                    return <$bits>::MAX.into();
                }
                // The sign of 0 does not count.
                let bits = (x + 0.0).to_bits();
                let sign: $bits = 1 << (<$bits>::BITS - 1);
                (if bits & sign == 0 { bits | sign } else { !bits }).into()
            }
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                Self::of_num(self.num() + other.num())
            }
        }
    };
}

float_element!(f32, F32, f32, u32, std::convert::identity, std::convert::identity);
float_element!(f64, F64, f64, u64, std::convert::identity, std::convert::identity);
float_element!(f16, F16, f32, u32, f16::to_f32, f16::from_f32);
float_element!(bf16, BF16, f32, u32, bf16::to_f32, bf16::from_f32);

macro_rules! int_element {
    ($($ty:ty, $dtype:ident, $rank:expr;)*) => {$(
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            type Num = i64;
            type Sum = i64;
            #[inline(always)]
            fn num(self) -> i64 {
                i64::from(self)
            }
            #[inline(always)]
            fn of_num(num: i64) -> Self {
                num as $ty
            }
            #[inline(always)]
            fn sum(self) -> i64 {
                i64::from(self)
            }
            #[inline(always)]
            fn float(self) -> f64 {
                i64::from(self) as f64
            }
            #[inline(always)]
            fn rank(self) -> u64 {
                $rank(self)
            }
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
        }
    )*};
}

int_element! {
    i64, I64, |x: i64| x.cast_unsigned() ^ (1 << 63);
    i32, I32, |x: i32| u64::from(x.cast_unsigned() ^ (1 << 31));
    i16, I16, |x: i16| u64::from(i32::from(x).cast_unsigned() ^ (1 << 31));
    i8, I8, |x: i8| u64::from(i32::from(x).cast_unsigned() ^ (1 << 31));
    u8, U8, u64::from;
}

/// A boolean's byte; other than 0 is true.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Bool(u8);

impl Element for Bool {
    const DTYPE: DType = DType::Bool;
    type Num = i64;
    type Sum = i64;
    #[inline(always)]
    fn num(self) -> i64 {
        i64::from(self.0 != 0)
    }
    #[inline(always)]
    fn of_num(num: i64) -> Self {
        Bool(u8::from(num != 0))
    }
    #[inline(always)]
    fn sum(self) -> i64 {
        self.num()
    }
    #[inline(always)]
    fn float(self) -> f64 {
        self.num() as f64
    }
    #[inline(always)]
    fn rank(self) -> u64 {
        u64::from(self.0 != 0)
    }
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        Bool(u8::from(self.0 != 0 || other.0 != 0))
    }
}

/// What a kernel does with elements of one dtype.
pub(super) trait Typed {
    /// The kernel.
    type Kernel;
    /// Runs units; `#[inline(always)]` in every implementation, and so is all that it calls in loops.
    ///
    /// # Safety
    /// As [`Kernel::run_item`](super::Kernel::run_item).
    unsafe fn run<T: Element>(kernel: &Self::Kernel, call: &Call<'_>);
}

/// Units of one call.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) units: std::ops::Range<usize>,
    pub(super) pointers: &'a [*mut u8],
    pub(super) scratch: *mut u8,
}

/// An entry point.
pub(super) type Entry<K> = unsafe fn(&K, &Call<'_>);

struct Compiled<'a, R: Typed, T> {
    kernel: &'a R::Kernel,
    call: &'a Call<'a>,
    of: std::marker::PhantomData<T>,
}

impl<S: Simd, R: Typed, T: Element> Part<S> for Compiled<'_, R, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        // SAFETY: promised by the caller.
        unsafe { R::run::<T>(self.kernel, self.call) };
    }
}

struct Find<R>(DType, std::marker::PhantomData<R>);

impl<R: Typed> Vectors for Find<R> {
    type Output = Option<Entry<R::Kernel>>;
    fn visit<F: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Option<Entry<R::Kernel>> {
        unsafe fn of<S: Simd, R: Typed, T: Element>(kernel: &R::Kernel, call: &Call<'_>) {
            // SAFETY: promised by the caller.
            unsafe { S::apart(Compiled::<R, T> { kernel, call, of: std::marker::PhantomData }) };
        }
        Some(match self.0 {
            DType::F32 => of::<F, R, f32>,
            DType::F64 => of::<F, R, f64>,
            DType::F16 => of::<F, R, f16>,
            DType::BF16 => of::<F, R, bf16>,
            _ => return None,
        })
    }
}

/// The entry point of a kernel for elements of a dtype: floats with the vectors of an instruction set, all others with those
/// that every machine of the architecture has.
pub(super) fn entry<R: Typed>(arch: Arch, dtype: DType) -> Option<Entry<R::Kernel>> {
    float_entry::<R>(arch, dtype).or_else(|| plain_ints::<R>(dtype))
}

/// As [`entry`], of floats alone.
pub(super) fn float_entry<R: Typed>(arch: Arch, dtype: DType) -> Option<Entry<R::Kernel>> {
    arch::with_vectors(arch, Find::<R>(dtype, std::marker::PhantomData))
}

/// As [`entry`] without vectors of an instruction set: for what is bound by other things than arithmetic.
pub(super) fn plain_entry<R: Typed>(dtype: DType) -> Option<Entry<R::Kernel>> {
    plain_float_entry::<R>(dtype).or_else(|| plain_ints::<R>(dtype))
}

/// As [`plain_entry`], of floats alone.
pub(super) fn plain_float_entry<R: Typed>(dtype: DType) -> Option<Entry<R::Kernel>> {
    Some(match dtype {
        DType::F32 => plain::<R, f32>,
        DType::F64 => plain::<R, f64>,
        DType::F16 => plain::<R, f16>,
        DType::BF16 => plain::<R, bf16>,
        _ => return None,
    })
}

fn plain_ints<R: Typed>(dtype: DType) -> Option<Entry<R::Kernel>> {
    Some(match dtype {
        DType::I64 => plain::<R, i64>,
        DType::I32 => plain::<R, i32>,
        DType::I16 => plain::<R, i16>,
        DType::I8 => plain::<R, i8>,
        DType::U8 => plain::<R, u8>,
        DType::Bool => plain::<R, Bool>,
        _ => return None,
    })
}

unsafe fn plain<R: Typed, T: Element>(kernel: &R::Kernel, call: &Call<'_>) {
    // SAFETY: promised by the caller.
    unsafe { R::run::<T>(kernel, call) };
}
