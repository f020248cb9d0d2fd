//! 128-bit vectors of aarch64. Compiled only there; unverified on hardware (see the platform table of the README).
//! 32 registers: 8 rows × 2 vectors of accumulators. Half precision goes through the `half` crate.

use std::arch::aarch64::*;

use half::{bf16, f16};

use crate::kernels::simd::Simd;

/// Four f32.
#[derive(Clone, Copy)]
pub(crate) struct NeonF32;

impl Simd for NeonF32 {
    type Elem = f32;
    type V = float32x4_t;
    type M = uint32x4_t;
    const LANES: usize = 4;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(ptr: *const f32) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection; the caller vouches for the memory.
        unsafe { vld1q_f32(ptr) }
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut f32, x: float32x4_t) {
        // SAFETY: an entry point has NEON on, after detection; the caller vouches for the memory.
        unsafe { vst1q_f32(ptr, x) }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vabsq_f32(a) }
    }
    #[inline(always)]
    unsafe fn lt(a: float32x4_t, b: float32x4_t) -> uint32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vcltq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn eq(a: float32x4_t, b: float32x4_t) -> uint32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vceqq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn select(m: uint32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vbslq_f32(m, a, b) }
    }
    #[inline(always)]
    unsafe fn pow2(shifted: float32x4_t) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted))) }
    }
    #[inline(always)]
    unsafe fn load_f16(ptr: *const f16) -> float32x4_t {
        // SAFETY: the caller vouches for four elements from ptr on; an unaligned read needs no alignment.
        let x = unsafe { ptr.cast::<[f16; 4]>().read_unaligned() }.map(f16::to_f32);
        // SAFETY: an entry point has NEON on, after detection; the caller vouches for the memory.
        unsafe { vld1q_f32(x.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(ptr: *const bf16) -> float32x4_t {
        // SAFETY: an entry point has NEON on, after detection; the caller vouches for the memory.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(ptr.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_f16(ptr: *mut f16, x: float32x4_t) {
        let mut lanes = [0f32; 4];
        // SAFETY: an entry point has NEON on, after detection; the caller vouches for the memory.
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), x);
            ptr.cast::<[f16; 4]>().write_unaligned(lanes.map(f16::from_f32));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(ptr: *mut bf16, x: float32x4_t) {
        let mut lanes = [0f32; 4];
        // SAFETY: an entry point has NEON on, after detection; the caller vouches for the memory.
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), x);
            ptr.cast::<[bf16; 4]>().write_unaligned(lanes.map(bf16::from_f32));
        }
    }
    #[inline(always)]
    unsafe fn reduce_add(x: float32x4_t) -> f32 {
        // SAFETY: an entry point has NEON on, after detection.
        unsafe { vaddvq_f32(x) }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        for r in 0..4 {
            for c in 0..4 {
                // SAFETY: an entry point has NEON on, after detection; the caller vouches for the memory.
                unsafe { *dst.add(c * dst_stride + r) = *src.add(r * src_stride + c) };
            }
        }
    }
}
