//! Codes as pairs of bf16, for the dot of `pairs`: a code of at most 8 bits is exact in bf16, or half a step beside a number that is.
//!
//! ```text
//! one byte    e4m3fn, e5m2        low 7 bits look a positive number up, the sign is put before it
//!             int8   c            c + ½ = ±(m + ½) with m = c ≥ 0 ? c : −1 − c: 7 bits again, and 8 significant ones
//!             uint8  u            u − 127½, likewise
//! half byte   int4, e2m1          looked up
//! ```
//! A vector of code bytes is a span of a row: 64 elements of one byte, 128 of half a byte. Elements come out of it in the order in which
//! that costs least, and the other operand is brought to that order once:
//!
//! ```text
//!              key vector n, word w                 value vector m of unit u, lane l
//! one byte     16·(w / 8) + 8n + w % 8              16·(l / 4) + 4m + l % 4
//! half byte    4w + n                               32·(l / 4) + 16u + 4·(l % 4) + m
//! ```
//! A lane's elements lie in one aligned run of 16 in both, so a factor of 16 elements or more is one number to a lane. Values are woven
//! of two keys, the earlier one in the low half.

use rapt_core::codes::{E2M1_VALUES, E4M3FN_VALUES, E5M2_VALUES};

use super::codes::CodeVectors;
use super::pairs::Bf16Pairs;
use super::simd::Part;

/// Vectors that hold bits of codes, halves or words: each method says what.
pub(crate) trait CodePairs: CodeVectors + Bf16Pairs {
    /// Low and high bytes of what the low 7 bits of each byte mean: of `table` in 128 low, then 128 high bytes. The highest bit goes to
    /// the highest bit of the high byte.
    unsafe fn look_up_bytes(bytes: Self::V, table: &[Self::V; 4]) -> [Self::V; 2];
    /// What the low 5 bits of each word mean.
    unsafe fn look_up_words(words: Self::V, table: Self::V) -> Self::V;
    /// The four halves of bytes of each word, each in the low bits of a word whose other bits may be anything but the lowest of them.
    unsafe fn half_bytes(words: Self::V) -> [Self::V; 4];
    /// Bytes, or words, of two vectors in turn, from the lower and from the higher half of each 128 bits.
    unsafe fn interleave_bytes(a: Self::V, b: Self::V) -> [Self::V; 2];
    unsafe fn interleave_words(a: Self::V, b: Self::V) -> [Self::V; 2];
    /// In each byte the low 7 bits of `c ≥ 0 ? c : −1 − c` and the sign, of int8 and of uint8 less 128.
    unsafe fn fold_int8(bytes: Self::V) -> Self::V;
    unsafe fn fold_uint8(bytes: Self::V) -> Self::V;
    /// 64 consecutive words, or 128, in the order of key vectors.
    unsafe fn order_of_bytes(words: [Self::V; 2]) -> [Self::V; 2];
    unsafe fn order_of_halves(words: [Self::V; 4]) -> [Self::V; 4];
    /// Lane `i` of each 128 bits of vector `m` to lane `m` of vector `i`.
    unsafe fn transpose_quads(x: [Self::V; 4]) -> [Self::V; 4];
    /// Lanes of `x`, each the one that the low 4 bits of a lane of `at` name.
    unsafe fn pick(x: Self::V, at: Self::V) -> Self::V;
    /// As [`Simd::apart`](super::simd::Simd::apart), with all of these.
    unsafe fn apart_codes<P: Part<Self>>(part: P) -> P::Output;
}

/// Numbers of positive codes as bf16: low bytes, then high bytes.
#[repr(align(64))]
pub(crate) struct ByteTable([[u8; 128]; 2]);

/// Numbers of the codes of 4 bits as bf16, twice.
#[repr(align(64))]
pub(crate) struct HalfTable([u16; 32]);

/// A number that bf16 holds, or NaN, as its bits.
const fn bits(x: f32) -> u16 {
    assert!(x.to_bits().trailing_zeros() >= 16, "not a bf16");
    (x.to_bits() >> 16) as u16
}

const fn byte_table(numbers: &[f32; 256]) -> ByteTable {
    let mut table = [[0; 128]; 2];
    let mut at = 0;
    while at < 128 {
        [table[0][at], table[1][at]] = bits(numbers[at]).to_le_bytes();
        at += 1;
    }
    ByteTable(table)
}

const fn half_table(numbers: &[f32; 16]) -> HalfTable {
    let mut table = [0; 32];
    let mut at = 0;
    while at < 32 {
        table[at] = bits(numbers[at % 16]);
        at += 1;
    }
    HalfTable(table)
}

const fn halves_beside_integers() -> [f32; 256] {
    let mut numbers = [0.0; 256];
    let mut at = 0;
    while at < 256 {
        numbers[at] = at as f32 + 0.5;
        at += 1;
    }
    numbers
}

static OF_INTEGERS: ByteTable = byte_table(&halves_beside_integers());
static OF_E4M3FN: ByteTable = byte_table(&E4M3FN_VALUES);
static OF_E5M2: ByteTable = byte_table(&E5M2_VALUES);
static OF_INT4: HalfTable =
    half_table(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]);
static OF_E2M1: HalfTable = half_table(&E2M1_VALUES);

/// A kind of codes as pairs.
pub(crate) trait PairCode<S: CodePairs>: 'static {
    /// Elements of 64 bytes, and the key vectors that they are.
    const SPAN: usize;
    const VECTORS: usize = Self::SPAN / 32;
    /// Times four value vectors of 16 elements for as many bytes.
    const UNITS: usize = Self::SPAN / 64;
    /// What an element is less than its number.
    const SHIFT: f32 = 0.0;
    /// Whether a zero point is subtracted from numbers.
    const HAS_ZERO_POINT: bool = false;
    /// Whether a code may be infinite.
    const HAS_INFINITE: bool = false;
    /// What elements are looked up in.
    unsafe fn table() -> [S::V; 4];
    /// The elements of a span of one key, in [`PairCode::VECTORS`] vectors of pairs.
    unsafe fn keys(codes: S::V, table: &[S::V; 4]) -> [S::V; 4];
    /// 64 elements of a span of two keys, woven.
    unsafe fn values(a: S::V, b: S::V, unit: usize, table: &[S::V; 4]) -> [S::V; 4];
    /// Whether one of `n` code bytes is NaN or infinite.
    unsafe fn has_non_finite(ptr: *const u8, n: usize) -> bool;
}

#[inline(always)]
unsafe fn keys_of_bytes<S: CodePairs>(bytes: S::V, table: &[S::V; 4]) -> [S::V; 4] {
    // SAFETY: the caller vouches for the instruction set; so below.
    unsafe {
        let [low, high] = S::look_up_bytes(bytes, table);
        let [first, second] = S::interleave_bytes(low, high);
        [first, second, first, second]
    }
}

#[inline(always)]
unsafe fn values_of_bytes<S: CodePairs>([first, second]: [S::V; 2], table: &[S::V; 4]) -> [S::V; 4] {
    // SAFETY: as above.
    unsafe {
        let [low, high] = S::look_up_bytes(first, table);
        let [m0, m1] = S::interleave_bytes(low, high);
        let [low, high] = S::look_up_bytes(second, table);
        let [m2, m3] = S::interleave_bytes(low, high);
        [m0, m1, m2, m3]
    }
}

macro_rules! of_bytes {
    ($($code:ident $table:ident $shift:literal $points:literal $fold:ident $least:expr;)*) => {$(
        pub(crate) struct $code;
        impl<S: CodePairs> PairCode<S> for $code {
            const SPAN: usize = 64;
            const SHIFT: f32 = $shift;
            const HAS_ZERO_POINT: bool = $points;
            const HAS_INFINITE: bool = matches!($least, Some(0x7c));
            #[inline(always)]
            unsafe fn table() -> [S::V; 4] {
                let ptr = $table.0.as_ptr().cast::<f32>();
                // SAFETY: 256 bytes.
                unsafe { [S::load(ptr), S::load(ptr.add(16)), S::load(ptr.add(32)), S::load(ptr.add(48))] }
            }
            #[inline(always)]
            unsafe fn keys(codes: S::V, table: &[S::V; 4]) -> [S::V; 4] {
                // SAFETY: promised by the caller; so below.
                unsafe { keys_of_bytes::<S>(of_bytes!(@ $fold codes), table) }
            }
            #[inline(always)]
            unsafe fn values(a: S::V, b: S::V, _: usize, table: &[S::V; 4]) -> [S::V; 4] {
                // SAFETY: as above.
                unsafe { values_of_bytes::<S>(S::interleave_bytes(of_bytes!(@ $fold a), of_bytes!(@ $fold b)), table) }
            }
            #[inline(always)]
            unsafe fn has_non_finite(ptr: *const u8, n: usize) -> bool {
                const LEAST: Option<u8> = $least;
                // SAFETY: the caller vouches for n bytes.
                LEAST.is_some_and(|least| (0..n).fold(false, |any, n| any | (unsafe { *ptr.add(n) } & 0x7f >= least)))
            }
        }
    )*};
    (@ none $codes:expr) => { $codes };
    (@ $fold:ident $codes:expr) => { S::$fold($codes) };
}

of_bytes! {
    Int8Pairs OF_INTEGERS -0.5 false fold_int8 None;
    Uint8Pairs OF_INTEGERS 127.5 true fold_uint8 None;
    E4m3fnPairs OF_E4M3FN 0.0 false none Some(0x7f);
    E5m2Pairs OF_E5M2 0.0 false none Some(0x7c);
}

macro_rules! of_halves {
    ($($code:ident $table:ident;)*) => {$(
        pub(crate) struct $code;
        impl<S: CodePairs> PairCode<S> for $code {
            const SPAN: usize = 128;
            #[inline(always)]
            unsafe fn table() -> [S::V; 4] {
                // SAFETY: 64 bytes; the rest is not asked for.
                unsafe { [S::load($table.0.as_ptr().cast::<f32>()); 4] }
            }
            #[inline(always)]
            unsafe fn keys(codes: S::V, table: &[S::V; 4]) -> [S::V; 4] {
                // SAFETY: promised by the caller; so below.
                unsafe {
                    let [a, b, c, d] = S::half_bytes(codes);
                    let table = table[0];
                    [
                        S::look_up_words(a, table),
                        S::look_up_words(b, table),
                        S::look_up_words(c, table),
                        S::look_up_words(d, table),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn values(a: S::V, b: S::V, unit: usize, table: &[S::V; 4]) -> [S::V; 4] {
                // SAFETY: as above.
                unsafe { <$code as PairCode<S>>::keys(S::interleave_words(a, b)[unit], table) }
            }
            #[inline(always)]
            unsafe fn has_non_finite(_: *const u8, _: usize) -> bool {
                false
            }
        }
    )*};
}

of_halves! {
    Int4Pairs OF_INT4;
    E2m1Pairs OF_E2M1;
}
