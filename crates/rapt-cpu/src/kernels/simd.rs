//! The thin layer between the generic bodies and an instruction set: one trait, one impl per ISA and accumulation dtype.
//!
//! Every method is `unsafe`: the instruction set must be present. The one place that makes this true is the table of entry
//! points in `arch`, which are reached only after detection. A kernel is made of [`Part`]s: [`Simd::apart`] compiles each as a
//! function of its own that has the target features on, and every function that calls a vector method is `#[inline(always)]`, so
//! that it is compiled inside a part. A closure cannot be: compiled on its own, it lacks the features, and every intrinsic in it
//! becomes a call. So closures here hold scalars and pointers, and `if let` stands where `map` would call a vector method;
//! tests/inlined.rs looks for intrinsics that are functions of their own.

use std::convert::identity;
use std::fmt::Debug;

use half::{bf16, f16};
use rapt_core::{DType, bf16_from_f64, f16_from_f64};

/// The scalar type of accumulation: f32 or f64.
pub(crate) trait Real:
    Copy
    + Debug
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + 'static
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    /// The most negative finite number.
    const LOWEST: Self;
    /// `1.5 · 2^(mantissa bits) + exponent bias`: adding it to `t` leaves `round(t) + bias` in the low bits.
    const ROUND: Self;
    /// One less than the exponent of the smallest normal number: `2^t` is 0 where `t` rounds to this, or lies below.
    const UNDERFLOW: Self;
    /// The weight of a masked key: a zero in every sum, told from a weight that underflowed only where NaN or an infinity
    /// waits behind one of them.
    const MASKED: Self;
    /// `2^f` for `|f| ≤ 1/2`, highest power first.
    const EXP2: &'static [Self];
    /// The same to within 3e-6 of itself, for what is rounded to bf16 then: to 2e-3.
    const SHORT_EXP2: &'static [Self];
    /// Numerator and denominator of `(tanh(y) − y) / y³` in `y²` for `|y| < 0.625`, highest power first.
    const TANH: (&'static [Self], &'static [Self]);
    /// From f64, rounded to nearest and clamped to finite numbers.
    fn from_f64_clamped(x: f64) -> Self;
    fn from_i64(x: i64) -> Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn sqrt(self) -> Self;
    fn is_nan(self) -> bool;
    /// Whether this weight is [`Real::MASKED`].
    fn is_masked(self) -> bool;
    /// This number in the storage dtype of an output.
    ///
    /// # Safety
    /// `ptr` is valid for a write of one `dtype`.
    unsafe fn store_as(self, dtype: DType, ptr: *mut u8);
    /// One element of `dtype`, exactly.
    ///
    /// # Safety
    /// `ptr` is valid for a read of one `dtype`, which is a float not wider than `Self`.
    unsafe fn load_as(dtype: DType, ptr: *const u8) -> Self;
}

macro_rules! real {
    ($real:ty, $round:expr, $underflow:expr, [$exp2:expr, $short_exp2:expr], $tanh:expr, $to_f16:path, $to_bf16:path) => {
        impl Real for $real {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = <$real>::NEG_INFINITY;
            const LOWEST: Self = <$real>::MIN;
            const ROUND: Self = $round;
            const UNDERFLOW: Self = $underflow;
            const MASKED: Self = -0.0;
            const EXP2: &'static [Self] = &$exp2;
            const SHORT_EXP2: &'static [Self] = &$short_exp2;
            const TANH: (&'static [Self], &'static [Self]) = $tanh;
            fn from_f64_clamped(x: f64) -> Self {
                (x as $real).clamp(<$real>::MIN, <$real>::MAX)
            }
            fn from_i64(x: i64) -> Self {
                x as $real
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn ln(self) -> Self {
                self.ln()
            }
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            fn is_nan(self) -> bool {
                self.is_nan()
            }
            fn is_masked(self) -> bool {
                self.to_bits() == Self::MASKED.to_bits()
            }
            unsafe fn store_as(self, dtype: DType, ptr: *mut u8) {
                // SAFETY: promised by the caller.
                unsafe {
                    match dtype {
                        DType::F64 => ptr.cast::<f64>().write(self as f64),
                        DType::F32 => ptr.cast::<f32>().write(self as f32),
                        DType::F16 => ptr.cast::<f16>().write($to_f16(self)),
                        DType::BF16 => ptr.cast::<bf16>().write($to_bf16(self)),
                        other => unreachable!("select refuses an output of {other}"),
                    }
                }
            }
            unsafe fn load_as(dtype: DType, ptr: *const u8) -> Self {
                // SAFETY: promised by the caller.
                unsafe {
                    match dtype {
                        DType::F64 => ptr.cast::<f64>().read() as $real,
                        DType::F32 => ptr.cast::<f32>().read() as $real,
                        DType::F16 => ptr.cast::<f16>().read().to_f32() as $real,
                        DType::BF16 => ptr.cast::<bf16>().read().to_f32() as $real,
                        other => unreachable!("a spec refuses a bias of {other}"),
                    }
                }
            }
        }
    };
}

// 2^f: near-minimax of degree 6 with p(0) = 1 exactly: relative error 1.6e-8 with these coefficients in f32 (degree 5: 1.1e-7); of degree 4, 2.9e-6
// (degree 3: 1.0e-4, which a row's lse would show).
// tanh: the polynomials of Cephes (Moshier), 2 ulp.
real!(
    f32,
    12_583_039.0,
    -127.0,
    [
        [1.535_336_2e-4, 0.001_339_887_5, 0.009_618_437, 0.055_503_324, 0.240_226_48, std::f32::consts::LN_2, 1.0],
        [0.009_582_856, 0.055_906_43, 0.240_240_99, 0.693_124_2, 1.0]
    ],
    (&[-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1], &[1.0]),
    f16::from_f32,
    bf16::from_f32
);

const fn exp2_taylor() -> [f64; 14] {
    // ln2^k / k!: the remainder at |f| = 1/2 is 4e-18.
    let mut at = [0.0; 14];
    let mut k = 0;
    let mut term = 1.0;
    while k < 14 {
        at[13 - k] = term;
        k += 1;
        term = term * std::f64::consts::LN_2 / k as f64;
    }
    at
}

real!(
    f64,
    6_755_399_441_056_767.0,
    -1023.0,
    [exp2_taylor(), exp2_taylor()],
    (
        &[-9.643_991_794_250_522e-1, -9.928_772_310_019_185e1, -1.614_687_684_417_084_5e3],
        &[1.0, 1.128_116_784_916_329_3e2, 2.235_488_390_601_004_5e3, 4.844_063_053_251_255e3]
    ),
    f16_from_f64,
    bf16_from_f64
);

/// Vectors of one instruction set.
pub(crate) trait Simd: Copy + 'static {
    /// The scalar type of a lane.
    type Elem: Real;
    /// A vector.
    type V: Copy;
    /// A truth value per lane.
    type M: Copy;
    /// An integer of 32 bits per lane.
    type W: Copy;
    /// Lanes per vector.
    const LANES: usize;
    /// Vectors of queries in a forward tile.
    const Q_VECS: usize = 2;
    /// Broadcast operands per micro-tile: times [`Simd::Q_VECS`] as many accumulators as leave registers for the rest.
    const ROWS: usize;
    /// Whether [`Simd::prefetch`] asks for anything.
    const PREFETCHES: bool = false;
    /// Whether a product and a sum are one instruction, rounded once.
    const FUSED: bool = true;

    /// The same pointer, of which the compiler no longer knows how it was made: it keeps it in a register instead of
    /// computing it again for each use.
    #[inline(always)]
    fn hide(ptr: *const Self::Elem) -> *const Self::Elem {
        ptr
    }
    unsafe fn splat(x: Self::Elem) -> Self::V;
    unsafe fn load(ptr: *const Self::Elem) -> Self::V;
    unsafe fn store(ptr: *mut Self::Elem, x: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`: `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn abs(a: Self::V) -> Self::V;
    /// `a < b`; false where either is NaN.
    unsafe fn lt(a: Self::V, b: Self::V) -> Self::M;
    /// `a == b`; false where either is NaN.
    unsafe fn eq(a: Self::V, b: Self::V) -> Self::M;
    /// `m ? a : b`.
    unsafe fn select(m: Self::M, a: Self::V, b: Self::V) -> Self::V;
    /// `2^n` from `n + ROUND`: its low bits shifted into the exponent. Any bits may come out where that is NaN.
    unsafe fn pow2(shifted: Self::V) -> Self::V;
    /// An integer for each lane, of [`Simd::LANES`] at `ptr`.
    unsafe fn words(ptr: *const u32) -> Self::W;
    unsafe fn same_word(x: u32) -> Self::W;
    unsafe fn xor_words(a: Self::W, b: Self::W) -> Self::W;
    unsafe fn add_words(a: Self::W, b: Self::W) -> Self::W;
    /// The high and the low half of each lane's product.
    unsafe fn multiply_words(a: Self::W, b: u32) -> [Self::W; 2];
    /// `p`, and a zero of its sign where the word is at most `last`.
    unsafe fn drop_lanes(p: Self::V, words: Self::W, last: u32) -> Self::V;
    /// Lanes of binary16; only where `Elem` is f32.
    unsafe fn load_f16(ptr: *const f16) -> Self::V;
    /// Lanes of bfloat16; only where `Elem` is f32.
    unsafe fn load_bf16(ptr: *const bf16) -> Self::V;
    /// Lanes to binary16, to nearest even; only where `Elem` is f32.
    unsafe fn store_f16(ptr: *mut f16, x: Self::V);
    /// Lanes to bfloat16, to nearest even; only where `Elem` is f32.
    unsafe fn store_bf16(ptr: *mut bf16, x: Self::V);
    /// The sum of all lanes, in an order fixed per instruction set.
    unsafe fn reduce_add(x: Self::V) -> Self::Elem;
    /// [`Simd::reduce_add`] of four vectors, to the same bits.
    #[inline(always)]
    unsafe fn reduce_add_4(x: [Self::V; 4]) -> [Self::Elem; 4] {
        // SAFETY: promised by the caller.
        unsafe { [Self::reduce_add(x[0]), Self::reduce_add(x[1]), Self::reduce_add(x[2]), Self::reduce_add(x[3])] }
    }
    /// Asks for the cache line of `ptr`, which need not be an address at all: nothing is read.
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    /// Which of [`Simd::LANES`] bytes are 0; written eight at a time by [`Simd::transpose_bytes`].
    #[inline(always)]
    unsafe fn falses(ptr: *const u8) -> Self::M {
        let mut x = [Self::Elem::ZERO; 16];
        for (lane, x) in x.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller vouches for LANES bytes.
            *x = if unsafe { *ptr.add(lane) } == 0 { Self::Elem::ONE } else { Self::Elem::ZERO };
        }
        // SAFETY: as many elements as the longest vector has.
        unsafe { Self::eq(Self::load(x.as_ptr()), Self::splat(Self::Elem::ONE)) }
    }
    /// `dst[c · dst_stride + r]` = byte `c` of `rows[r]`, for eight rows of eight bytes.
    #[inline(always)]
    unsafe fn transpose_bytes(rows: [*const u8; 8], dst: *mut u8, dst_stride: usize) {
        for (r, row) in rows.into_iter().enumerate() {
            for c in 0..8 {
                // SAFETY: the caller vouches for both squares.
                unsafe { *dst.add(c * dst_stride + r) = *row.add(c) };
            }
        }
    }
    /// `dst[c · dst_stride + r] = src[r · src_stride + c]` for a square of [`Simd::LANES`].
    unsafe fn transpose(src: *const Self::Elem, src_stride: usize, dst: *mut Self::Elem, dst_stride: usize);
    /// Runs a part in a function of its own, which has this instruction set's features on.
    unsafe fn apart<P: Part<Self>>(part: P) -> P::Output;
}

/// A part of a kernel that is compiled once, as a function of its own, by [`Simd::apart`].
///
/// What the storage dtype has no say in is compiled once for all of them; and a kernel that is one function, with all its
/// loops inside one another, takes the compiler several times as long.
pub(crate) trait Part<S: Simd> {
    /// What it computes.
    type Output;
    /// Does the part's work; `#[inline(always)]` in every part.
    ///
    /// # Safety
    /// The instruction set is present, and what the part's fields speak of is there.
    unsafe fn run(self) -> Self::Output;
}

/// A storage dtype, as far as the vectors of `S` read and write it.
pub(crate) trait Storage<S: Simd>: Copy + 'static {
    const DTYPE: DType;
    unsafe fn load(ptr: *const Self) -> S::V;
    unsafe fn store(ptr: *mut Self, x: S::V);
    fn widen(self) -> S::Elem;
    fn narrow(x: S::Elem) -> Self;
}

macro_rules! storage {
    ($ty:ty, $dtype:ident, $elem:ty, $load:ident, $store:ident, $widen:path, $narrow:path) => {
        impl<S: Simd<Elem = $elem>> Storage<S> for $ty {
            const DTYPE: DType = DType::$dtype;
            #[inline(always)]
            unsafe fn load(ptr: *const $ty) -> S::V {
                // SAFETY: promised by the caller.
                unsafe { S::$load(ptr) }
            }
            #[inline(always)]
            unsafe fn store(ptr: *mut $ty, x: S::V) {
                // SAFETY: promised by the caller.
                unsafe { S::$store(ptr, x) }
            }
            #[inline(always)]
            fn widen(self) -> $elem {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: $elem) -> $ty {
                $narrow(x)
            }
        }
    };
}

storage!(f64, F64, f64, load, store, identity, identity);
storage!(f32, F32, f32, load, store, identity, identity);
storage!(f16, F16, f32, load_f16, store_f16, f16::to_f32, f16::from_f32);
storage!(bf16, BF16, f32, load_bf16, store_bf16, bf16::to_f32, bf16::from_f32);
