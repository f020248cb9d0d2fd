//! 512-bit vectors: AVX-512 F, BW, DQ, VL (with AVX2, FMA and F16C). 32 registers: 8 rows × 2 vectors of accumulators
//! leave half of them for operands and the exponential.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::{transpose_4x4, transpose_8x8};
use crate::generic::simd::Simd;

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(crate) struct Avx512F32;
/// Eight f64.
#[derive(Clone, Copy)]
pub(crate) struct Avx512F64;

impl Simd for Avx512F32 {
    type Elem = f32;
    type V = __m512;
    type M = __mmask16;
    const LANES: usize = 16;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(ptr) }
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut f32, x: __m512) {
        unsafe { _mm512_storeu_ps(ptr, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    unsafe fn lt(a: __m512, b: __m512) -> __mmask16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn eq(a: __m512, b: __m512) -> __mmask16 {
        unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn select(m: __mmask16, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(m, b, a) }
    }
    #[inline(always)]
    unsafe fn any(m: __mmask16) -> bool {
        m != 0
    }
    #[inline(always)]
    unsafe fn pow2(shifted: __m512) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(shifted))) }
    }
    #[inline(always)]
    unsafe fn load_f16(ptr: *const f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(ptr.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(ptr: *const bf16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(ptr.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(ptr: *mut f16, x: __m512) {
        unsafe { _mm256_storeu_si256(ptr.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn store_bf16(ptr: *mut bf16, x: __m512) {
        unsafe {
            // To nearest even; NaN becomes a quiet NaN of its sign.
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let chosen = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(ptr.cast(), _mm512_cvtepi32_epi16(chosen));
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(x: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(x) }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        for (r, c) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            unsafe { transpose_8x8(src.add(r * src_stride + c), src_stride, dst.add(c * dst_stride + r), dst_stride) }
        }
    }
}

impl Simd for Avx512F64 {
    type Elem = f64;
    type V = __m512d;
    type M = __mmask8;
    const LANES: usize = 8;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f64) -> __m512d {
        unsafe { _mm512_set1_pd(x) }
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f64) -> __m512d {
        unsafe { _mm512_loadu_pd(ptr) }
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut f64, x: __m512d) {
        unsafe { _mm512_storeu_pd(ptr, x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512d, b: __m512d) -> __m512d {
        unsafe { _mm512_add_pd(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512d, b: __m512d) -> __m512d {
        unsafe { _mm512_sub_pd(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512d, b: __m512d) -> __m512d {
        unsafe { _mm512_mul_pd(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512d, b: __m512d) -> __m512d {
        unsafe { _mm512_div_pd(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512d, b: __m512d, c: __m512d) -> __m512d {
        unsafe { _mm512_fmadd_pd(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512d, b: __m512d) -> __m512d {
        unsafe { _mm512_max_pd(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: __m512d) -> __m512d {
        unsafe { _mm512_abs_pd(a) }
    }
    #[inline(always)]
    unsafe fn lt(a: __m512d, b: __m512d) -> __mmask8 {
        unsafe { _mm512_cmp_pd_mask::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn eq(a: __m512d, b: __m512d) -> __mmask8 {
        unsafe { _mm512_cmp_pd_mask::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn select(m: __mmask8, a: __m512d, b: __m512d) -> __m512d {
        unsafe { _mm512_mask_blend_pd(m, b, a) }
    }
    #[inline(always)]
    unsafe fn any(m: __mmask8) -> bool {
        m != 0
    }
    #[inline(always)]
    unsafe fn pow2(shifted: __m512d) -> __m512d {
        unsafe { _mm512_castsi512_pd(_mm512_slli_epi64::<52>(_mm512_castpd_si512(shifted))) }
    }
    no_halves!(__m512d);
    #[inline(always)]
    unsafe fn reduce_add(x: __m512d) -> f64 {
        unsafe { _mm512_reduce_add_pd(x) }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f64, src_stride: usize, dst: *mut f64, dst_stride: usize) {
        for (r, c) in [(0, 0), (0, 4), (4, 0), (4, 4)] {
            unsafe { transpose_4x4(src.add(r * src_stride + c), src_stride, dst.add(c * dst_stride + r), dst_stride) }
        }
    }
}
