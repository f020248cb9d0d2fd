//! 128-bit vectors of WebAssembly. Engines keep values in 16 registers of x86-64 or 32 of aarch64: 4 rows × 2 vectors of accumulators leave
//! room on both. There is no fused multiply-add to rely on: a product and a sum are rounded each. binary16 is widened by integer operations;
//! rounding to 16 bits goes through the `half` crate; f64 takes the scalar path, whose arrays the compiler turns into these vectors.
//!
//! A module has these instructions or it does not, and an engine without them refuses all of it: so it is the build that decides.

use std::arch::wasm32::*;

use half::{bf16, f16};

use crate::kernels::codes::CodeVectors;
use crate::kernels::simd::Simd;

/// Four f32.
#[derive(Clone, Copy)]
pub(crate) struct Simd128F32;

impl Simd for Simd128F32 {
    type Elem = f32;
    type V = v128;
    type M = v128;
    type W = v128;
    const LANES: usize = 4;
    const ROWS: usize = 4;
    const FUSED: bool = false;

    apart!(apart);

    #[inline(always)]
    unsafe fn splat(x: f32) -> v128 {
        f32x4_splat(x)
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> v128 {
        // SAFETY: promised by the caller.
        unsafe { v128_load(ptr.cast()) }
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut f32, x: v128) {
        // SAFETY: promised by the caller.
        unsafe { v128_store(ptr.cast(), x) }
    }
    #[inline(always)]
    unsafe fn add(a: v128, b: v128) -> v128 {
        f32x4_add(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: v128, b: v128) -> v128 {
        f32x4_sub(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: v128, b: v128) -> v128 {
        f32x4_mul(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: v128, b: v128) -> v128 {
        f32x4_div(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: v128, b: v128, c: v128) -> v128 {
        f32x4_add(f32x4_mul(a, b), c)
    }
    #[inline(always)]
    unsafe fn max(a: v128, b: v128) -> v128 {
        // b < a ? a : b.
        f32x4_pmax(b, a)
    }
    #[inline(always)]
    unsafe fn abs(a: v128) -> v128 {
        f32x4_abs(a)
    }
    #[inline(always)]
    unsafe fn lt(a: v128, b: v128) -> v128 {
        f32x4_lt(a, b)
    }
    #[inline(always)]
    unsafe fn eq(a: v128, b: v128) -> v128 {
        f32x4_eq(a, b)
    }
    #[inline(always)]
    unsafe fn select(m: v128, a: v128, b: v128) -> v128 {
        v128_bitselect(a, b, m)
    }
    #[inline(always)]
    unsafe fn pow2(shifted: v128) -> v128 {
        i32x4_shl(shifted, 23)
    }
    #[inline(always)]
    unsafe fn words(ptr: *const u32) -> v128 {
        // SAFETY: promised by the caller.
        unsafe { v128_load(ptr.cast()) }
    }
    #[inline(always)]
    unsafe fn same_word(x: u32) -> v128 {
        u32x4_splat(x)
    }
    #[inline(always)]
    unsafe fn xor_words(a: v128, b: v128) -> v128 {
        v128_xor(a, b)
    }
    #[inline(always)]
    unsafe fn add_words(a: v128, b: v128) -> v128 {
        i32x4_add(a, b)
    }
    #[inline(always)]
    unsafe fn multiply_words(a: v128, b: u32) -> [v128; 2] {
        let b = u32x4_splat(b);
        let (low, high) = (u64x2_extmul_low_u32x4(a, b), u64x2_extmul_high_u32x4(a, b));
        [i32x4_shuffle::<1, 3, 5, 7>(low, high), i32x4_shuffle::<0, 2, 4, 6>(low, high)]
    }
    #[inline(always)]
    unsafe fn drop_lanes(p: v128, words: v128, last: u32) -> v128 {
        // All bits of a dropped weight but its sign.
        v128_andnot(p, v128_and(u32x4_le(words, u32x4_splat(last)), u32x4_splat(0x7FFF_FFFF)))
    }
    #[inline(always)]
    unsafe fn load_f16(ptr: *const f16) -> v128 {
        // SAFETY: promised by the caller.
        let bits = unsafe { u32x4_load_extend_u16x4(ptr.cast()) };
        let magnitude = u32x4_shl(v128_and(bits, u32x4_splat(0x7fff)), 13);
        // Exponents are 112 apart; the product is exact, of subnormal numbers too.
        let scaled = f32x4_mul(magnitude, u32x4_splat(0x7780_0000));
        let special = u32x4_ge(magnitude, u32x4_splat(0x0f80_0000));
        let sign = u32x4_shl(v128_and(bits, u32x4_splat(0x8000)), 16);
        v128_or(v128_or(scaled, v128_and(special, u32x4_splat(0x7f80_0000))), sign)
    }
    #[inline(always)]
    unsafe fn load_bf16(ptr: *const bf16) -> v128 {
        // SAFETY: promised by the caller.
        u32x4_shl(unsafe { u32x4_load_extend_u16x4(ptr.cast()) }, 16)
    }
    #[inline(always)]
    unsafe fn store_f16(ptr: *mut f16, x: v128) {
        // SAFETY: promised by the caller.
        unsafe { ptr.cast::<[f16; 4]>().write_unaligned(lanes(x).map(f16::from_f32)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(ptr: *mut bf16, x: v128) {
        // SAFETY: promised by the caller.
        unsafe { ptr.cast::<[bf16; 4]>().write_unaligned(lanes(x).map(bf16::from_f32)) }
    }
    #[inline(always)]
    unsafe fn reduce_add(x: v128) -> f32 {
        let [a, b, c, d] = lanes(x);
        (a + c) + (b + d)
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        // SAFETY: both squares are inside buffers of the caller.
        unsafe {
            let row = |n: usize| v128_load(src.add(n * src_stride).cast());
            let (r0, r1, r2, r3) = (row(0), row(1), row(2), row(3));
            let (a, b) = (i32x4_shuffle::<0, 4, 1, 5>(r0, r1), i32x4_shuffle::<2, 6, 3, 7>(r0, r1));
            let (c, d) = (i32x4_shuffle::<0, 4, 1, 5>(r2, r3), i32x4_shuffle::<2, 6, 3, 7>(r2, r3));
            let column = |n: usize, x: v128| v128_store(dst.add(n * dst_stride).cast(), x);
            column(0, i32x4_shuffle::<0, 1, 4, 5>(a, c));
            column(1, i32x4_shuffle::<2, 3, 6, 7>(a, c));
            column(2, i32x4_shuffle::<0, 1, 4, 5>(b, d));
            column(3, i32x4_shuffle::<2, 3, 6, 7>(b, d));
        }
    }
}

#[inline(always)]
fn lanes(x: v128) -> [f32; 4] {
    [f32x4_extract_lane::<0>(x), f32x4_extract_lane::<1>(x), f32x4_extract_lane::<2>(x), f32x4_extract_lane::<3>(x)]
}

impl CodeVectors for Simd128F32 {}
