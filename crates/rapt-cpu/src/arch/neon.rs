//! 128-bit vectors of aarch64. 32 registers: 8 rows × 2 vectors of accumulators. binary16, and rounding to bfloat16, go through
//! the `half` crate; f64 takes the scalar path. It passes the kernels' conformance test under an emulator (docs/lab/cpu.md has the
//! command) and has not been run on a processor by the authors, so nothing is known of its speed.

use std::arch::aarch64::*;

use half::{bf16, f16};

use crate::kernels::codes::CodeVectors;
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
        fn pow2(shifted: float32x4_t) -> float32x4_t {
            vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted)))
        }
        fn load_f16(ptr: *const f16) -> float32x4_t {
            let lanes = ptr.cast::<[f16; 4]>().read_unaligned().map(f16::to_f32);
            vld1q_f32(lanes.as_ptr())
        }
        fn load_bf16(ptr: *const bf16) -> float32x4_t {
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(ptr.cast())))
        }
        fn store_f16(ptr: *mut f16, x: float32x4_t) {
            let mut lanes = [0f32; 4];
            vst1q_f32(lanes.as_mut_ptr(), x);
            ptr.cast::<[f16; 4]>().write_unaligned(lanes.map(f16::from_f32));
        }
        fn store_bf16(ptr: *mut bf16, x: float32x4_t) {
            let mut lanes = [0f32; 4];
            vst1q_f32(lanes.as_mut_ptr(), x);
            ptr.cast::<[bf16; 4]>().write_unaligned(lanes.map(bf16::from_f32));
        }
        fn reduce_add(x: float32x4_t) -> f32 { vaddvq_f32(x) }
        fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
            for r in 0..4 {
                for c in 0..4 {
                    *dst.add(c * dst_stride + r) = *src.add(r * src_stride + c);
                }
            }
        }
    }
}

impl CodeVectors for NeonF32 {}
