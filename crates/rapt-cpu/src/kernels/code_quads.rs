//! Codes as quads of bytes, for the dot of an instruction set that sums four products of bytes a lane: what is a small integer, or twice one.
//!
//! ```text
//! byte        int8   c + 128       uint8  c                     half byte   int4   c + 8       e2m1   2c + 12
//! ```
//! Each is an unsigned byte; the other operand is signed digits of numbers in fixed point, and what a byte is more than its code times the sum
//! of those digits goes into the sums before the first product. Numbers become digits so:
//!
//! ```text
//! x = (65536 · d2 + 256 · d1 + d0) · unit      each digit in −128..=127; of two digits d1 and d0 alone
//! ```
//! A vector of code bytes is a span of a row: 64 elements of one byte, or 128 of half a byte, in one plane or two (the lower halves are the
//! even elements). Bytes stay in their order within 128 bits:
//!
//! ```text
//! keys      vector i, lane 4L + k     bytes 16L + 4i .. + 4 of key k                      (four keys, transposed as words of 32 bits)
//! values    vector m, lane 4L + t     byte 16L + 4m + t of four keys                      (four keys, woven)
//! ```
//! Deliberately absent: codes that are no integers of so few bits (e4m3fn, e5m2).

use super::codes::CodeVectors;
use super::simd::Part;

/// The largest number in fixed point, of 24 bits less what three digits do not reach.
pub(crate) const MOST_FIXED: f32 = 8_355_000.0;

/// Vectors that hold bytes or 32-bit integers, beside those of f32.
pub(crate) trait CodeQuads: CodeVectors {
    /// 64 bytes, or 16 integers.
    type I: Copy;
    unsafe fn splat_byte(x: u8) -> Self::I;
    unsafe fn splat_i32(x: i32) -> Self::I;
    /// The four bytes at `ptr` in every lane.
    unsafe fn splat_quad(ptr: *const u8) -> Self::I;
    unsafe fn load_bytes(ptr: *const u8) -> Self::I;
    unsafe fn store_bytes(ptr: *mut u8, x: Self::I);
    /// `acc + Σ unsigned · signed` over the four bytes of each lane.
    unsafe fn dot_quads(unsigned: Self::I, signed: Self::I, acc: Self::I) -> Self::I;
    unsafe fn negate(x: Self::I) -> Self::I;
    unsafe fn to_f32(x: Self::I) -> Self::V;
    /// Nearest integers, even at ties, of numbers below 2³¹; any integer for others.
    unsafe fn round(x: Self::V) -> Self::I;
    /// The highest bit of each byte turned round.
    unsafe fn flip(x: Self::I) -> Self::I;
    /// The lower and the higher half of each byte.
    unsafe fn halves(x: Self::I) -> [Self::I; 2];
    /// Both, each plus 8 modulo 16.
    unsafe fn halves_plus_8(x: Self::I) -> [Self::I; 2];
    /// Of each byte below 16 the byte of `table` there.
    unsafe fn look_up_halves(x: Self::I, table: &[u8; 64]) -> Self::I;
    /// Lane `k` of each 128 bits of vector `i` is lane `i` of key `k`.
    unsafe fn transpose_words(x: [Self::I; 4]) -> [Self::I; 4];
    /// Byte `k` of lane `t` of each 128 bits of vector `m` is byte `4m + t` of key `k`.
    unsafe fn weave(x: [Self::I; 4]) -> [Self::I; 4];
    /// Of each integer its three digits as the low three bytes, the least first.
    unsafe fn digits(x: Self::I) -> Self::I;
    /// Byte `n` of each lane where it is, and nothing beside it.
    unsafe fn keep_byte(x: Self::I, n: usize) -> Self::I;
    /// The sum of all lanes, which fits.
    unsafe fn sum_i32(x: Self::I) -> i32;
    /// The largest of all lanes, none of which is NaN.
    unsafe fn largest(x: Self::V) -> f32;
    /// Byte `n` of each of 16 lanes, `n` below 4, to `ptr`.
    unsafe fn store_byte_of_lanes(ptr: *mut u8, x: Self::I, n: usize);
    /// Lane `n` of each 128 bits in all four lanes of those.
    unsafe fn splat_word(x: Self::I, n: usize) -> Self::I;
    /// Even and odd bytes of two vectors.
    unsafe fn even_and_odd(a: Self::I, b: Self::I) -> [Self::I; 2];
    /// Lane `4f + k` is the sum of lanes `k` of the four 128 bits of vector `f`.
    unsafe fn sum_of_quarters(x: [Self::V; 4]) -> Self::V;
    /// Eight numbers from each.
    unsafe fn load_halves(a: *const f32, b: *const f32) -> Self::V;
    /// Lanes of two vectors that follow one another, each the one that the low 5 bits of a lane of `at` name.
    unsafe fn pick_of_two(a: Self::V, b: Self::V, at: Self::I) -> Self::V;
    /// As [`Simd::apart`](super::simd::Simd::apart), with all of these.
    unsafe fn apart_quads<P: Part<Self>>(part: P) -> P::Output;
}

/// A kind of codes as quads.
pub(crate) trait QuadCode<S: CodeQuads>: 'static {
    /// Planes of a span of 64 bytes, each of 64 elements.
    const PLANES: usize;
    /// What a byte is more than its code times [`QuadCode::TIMES`], where that is the same for all; of uint8 128, which is what is subtracted first.
    const BIAS: u8;
    /// How many times the code a byte is.
    const TIMES: f32 = 1.0;
    /// What an element is less than its code then.
    const SHIFT: f32 = 0.0;
    /// The planes of 64 code bytes; of one plane twice the same.
    unsafe fn planes(codes: S::I) -> [S::I; 2];
}

/// Twice the numbers of e2m1, and 12, four times over.
const OF_E2M1: [u8; 64] = {
    let of = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
    let mut table = [0; 64];
    let mut at = 0;
    while at < 64 {
        table[at] = of[at % 16];
        at += 1;
    }
    table
};

macro_rules! quads {
    ($($code:ident { $($constant:ident: $ty:ty = $value:expr),* } |$codes:ident| $planes:expr;)*) => {$(
        pub(crate) struct $code;
        impl<S: CodeQuads> QuadCode<S> for $code {
            $(const $constant: $ty = $value;)*
            #[inline(always)]
            #[allow(unused_unsafe, reason = "bytes that are planes as they are")]
            unsafe fn planes($codes: S::I) -> [S::I; 2] {
                // SAFETY: the caller vouches for the instruction set.
                unsafe { $planes }
            }
        }
    )*};
}

quads! {
    Int8Quads { PLANES: usize = 1, BIAS: u8 = 128 } |codes| [S::flip(codes); 2];
    Uint8Quads { PLANES: usize = 1, BIAS: u8 = 128, SHIFT: f32 = 128.0 } |codes| [codes; 2];
    Int4Quads { PLANES: usize = 2, BIAS: u8 = 8 } |codes| S::halves_plus_8(codes);
    E2m1Quads { PLANES: usize = 2, BIAS: u8 = 12, TIMES: f32 = 2.0 } |codes| {
        let [low, high] = S::halves(codes);
        [S::look_up_halves(low, &OF_E2M1), S::look_up_halves(high, &OF_E2M1)]
    };
}
