//! 128-bit vectors of aarch64. 32 registers: 8 rows × 2 vectors of accumulators. f64 takes the scalar path. Pairs of bf16 need the feature bf16 besides.
//!
//! ```text
//! bfdot       two bf16 a lane, exact products, rounded to odd: the sum of two, then that onto the accumulator
//! bfcvtn      four f32 to bf16, to nearest even
//! fcvtl/n     four binary16 to f32 and back
//! ```
//! `bfmmla` is not used: it sums 2 × 4 by 4 × 2 numbers, for which Q, K and V would have to lie woven in fours, and does twice the work of `bfdot`. The
//! kernels pass their conformance test and the proof under an emulator (`cargo xtask test --target aarch64-unknown-linux-gnu`) and have not been run
//! on a processor by the authors, so nothing is known of their speed.

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use crate::kernels::codes::CodeVectors;
use crate::kernels::pairs::Bf16Pairs;
use crate::kernels::simd::Simd;

/// Four f32.
#[derive(Clone, Copy)]
pub(crate) struct NeonF32;

intrinsics! {
    fn bits(x: float32x4_t) -> uint32x4_t { vreinterpretq_u32_f32(x) }
    fn numbers(x: uint32x4_t) -> float32x4_t { vreinterpretq_f32_u32(x) }
}

impl Simd for NeonF32 {
    type Elem = f32;
    type V = float32x4_t;
    type M = uint32x4_t;
    type W = uint32x4_t;
    const LANES: usize = 4;
    const ROWS: usize = 8;

    apart!(apart, "neon");

    intrinsics! {
        fn splat(x: f32) -> float32x4_t { vdupq_n_f32(x) }
        fn load(ptr: *const f32) -> float32x4_t { vld1q_f32(ptr) }
        fn store(ptr: *mut f32, x: float32x4_t) { vst1q_f32(ptr, x) }
        fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t { vaddq_f32(a, b) }
        fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t { vsubq_f32(a, b) }
        fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
        fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t { vdivq_f32(a, b) }
        fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t { vfmaq_f32(c, a, b) }
        fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(vcgtq_f32(a, b), a, b) }
        fn abs(a: float32x4_t) -> float32x4_t { vabsq_f32(a) }
        fn lt(a: float32x4_t, b: float32x4_t) -> uint32x4_t { vcltq_f32(a, b) }
        fn eq(a: float32x4_t, b: float32x4_t) -> uint32x4_t { vceqq_f32(a, b) }
        fn select(m: uint32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t { vbslq_f32(m, a, b) }
        fn pow2(shifted: float32x4_t) -> float32x4_t { numbers(vshlq_n_u32::<23>(bits(shifted))) }
        fn words(ptr: *const u32) -> uint32x4_t { vld1q_u32(ptr) }
        fn same_word(x: u32) -> uint32x4_t { vdupq_n_u32(x) }
        fn xor_words(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { veorq_u32(a, b) }
        fn add_words(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t { vaddq_u32(a, b) }
        fn multiply_words(a: uint32x4_t, b: u32) -> [uint32x4_t; 2] {
            let low = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vdup_n_u32(b)));
            let high = vreinterpretq_u32_u64(vmull_high_u32(a, vdupq_n_u32(b)));
            [vuzp2q_u32(low, high), vuzp1q_u32(low, high)]
        }
        fn drop_lanes(p: float32x4_t, words: uint32x4_t, last: u32) -> float32x4_t {
            // All bits of a dropped weight but its sign.
            let dropped = vandq_u32(vcleq_u32(words, vdupq_n_u32(last)), vdupq_n_u32(0x7FFF_FFFF));
            numbers(vbicq_u32(bits(p), dropped))
        }
        fn load_f16(ptr: *const f16) -> float32x4_t {
            let halves = vld1_u16(ptr.cast());
            let x: float32x4_t;
            // binary16 has no type of vectors on a stable compiler.
            asm!("fcvtl {x:v}.4s, {halves:v}.4h", x = lateout(vreg) x, halves = in(vreg) halves,
                options(pure, nomem, nostack, preserves_flags));
            x
        }
        fn load_bf16(ptr: *const bf16) -> float32x4_t { numbers(vshll_n_u16::<16>(vld1_u16(ptr.cast()))) }
        fn store_f16(ptr: *mut f16, x: float32x4_t) {
            let halves: uint16x4_t;
            asm!("fcvtn {halves:v}.4h, {x:v}.4s", halves = lateout(vreg) halves, x = in(vreg) x,
                options(pure, nomem, nostack, preserves_flags));
            vst1_u16(ptr.cast(), halves);
        }
        fn store_bf16(ptr: *mut bf16, x: float32x4_t) {
            // To nearest even; NaN becomes a quiet NaN of its sign.
            let odd = vandq_u32(vshrq_n_u32::<16>(bits(x)), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits(x), vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
            let quiet = vorrq_u32(bits(x), vdupq_n_u32(0x0040_0000));
            vst1_u16(ptr.cast(), vshrn_n_u32::<16>(vbslq_u32(vceqq_f32(x, x), rounded, quiet)));
        }
        fn reduce_add(x: float32x4_t) -> f32 { vaddvq_f32(x) }
        fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
            let [a, b] = [vld1q_f32(src), vld1q_f32(src.add(src_stride))];
            let [c, d] = [vld1q_f32(src.add(2 * src_stride)), vld1q_f32(src.add(3 * src_stride))];
            let [even, odd] = [[vtrn1q_f32(a, b), vtrn1q_f32(c, d)], [vtrn2q_f32(a, b), vtrn2q_f32(c, d)]];
            vst1q_f32(dst, vcombine_f32(vget_low_f32(even[0]), vget_low_f32(even[1])));
            vst1q_f32(dst.add(dst_stride), vcombine_f32(vget_low_f32(odd[0]), vget_low_f32(odd[1])));
            vst1q_f32(dst.add(2 * dst_stride), vcombine_f32(vget_high_f32(even[0]), vget_high_f32(even[1])));
            vst1q_f32(dst.add(3 * dst_stride), vcombine_f32(vget_high_f32(odd[0]), vget_high_f32(odd[1])));
        }
    }
}

intrinsics! {
    /// Four numbers rounded to bf16, to nearest even.
    fn rounded(x: float32x4_t) -> uint16x8_t {
        let halves: uint16x8_t;
        asm!("bfcvtn {halves:v}.4h, {x:v}.4s", halves = lateout(vreg) halves, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
        halves
    }
}

impl Bf16Pairs for NeonF32 {
    apart!(apart_paired, "neon,bf16");
    intrinsics! {
        fn dot(a: float32x4_t, b: float32x4_t, acc: float32x4_t) -> float32x4_t {
            let mut sums = acc;
            asm!("bfdot {sums:v}.4s, {a:v}.8h, {b:v}.8h", sums = inout(vreg) sums, a = in(vreg) a, b = in(vreg) b,
                options(pure, nomem, nostack, preserves_flags));
            sums
        }
        fn pair(low: float32x4_t, high: float32x4_t) -> float32x4_t {
            vreinterpretq_f32_u16(vzip1q_u16(rounded(low), rounded(high)))
        }
        fn narrow(first: float32x4_t, second: float32x4_t) -> float32x4_t {
            let [first, second] = [rounded(first), rounded(second)];
            vreinterpretq_f32_u16(vcombine_u16(vget_low_u16(first), vget_low_u16(second)))
        }
        fn keep_attended(a: float32x4_t, x: float32x4_t) -> float32x4_t {
            let masked = vceqq_u16(vreinterpretq_u16_f32(x), vdupq_n_u16(0x8000));
            vreinterpretq_f32_u16(vbicq_u16(vreinterpretq_u16_f32(a), masked))
        }
        fn drop_halves(p: float32x4_t, words: [uint32x4_t; 2], last: u32) -> float32x4_t {
            let last = vdupq_n_u32(last);
            let low = vandq_u32(vcleq_u32(words[0], last), vdupq_n_u32(0x7FFF));
            let high = vandq_u32(vcleq_u32(words[1], last), vdupq_n_u32(0x7FFF_0000));
            numbers(vbicq_u32(bits(p), vorrq_u32(low, high)))
        }
        fn join(low: float32x4_t, high: float32x4_t) -> float32x4_t { numbers(vsriq_n_u32::<16>(bits(high), bits(low))) }
        fn split(pairs: float32x4_t) -> [float32x4_t; 2] {
            let high = vandq_u32(bits(pairs), vdupq_n_u32(0xFFFF_0000));
            [numbers(vshlq_n_u32::<16>(bits(pairs))), numbers(high)]
        }
    }
}

impl CodeVectors for NeonF32 {}
