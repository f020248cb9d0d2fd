//! Integers of int8 beside the vectors of f32, and the entry points of its kernel.
//!
//! ```text
//! vpdpbusd      u8 · s8, four a lane, summed in 32 bits               AVX-512 VNNI
//! vpmaddwd      s16 · s16, two a lane: bytes are widened before       AVX-512 BW, AVX2
//! usdot         u8 · s8, four a lane, summed in 32 bits               NEON with i8mm
//! ```
//! `vpmaddubsw` is not used: it saturates. Without any of them arrays of integers are what the compiler makes of them.

use rapt_core::{Arch, DType};

use half::{bf16, f16};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::*;

use super::Entry;
#[cfg(target_arch = "aarch64")]
use super::neon::NeonF32;
use super::scalar::Scalar;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd128::Simd128F32;
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2F32, avx512::Avx512F32};
use crate::kernels::int8::{Quads, item};
use crate::kernels::simd::{Part, Simd};

/// The entry point for q of this dtype; `None` for one that is not served.
pub(super) fn entry(arch: Arch, storage: DType) -> Option<Entry> {
    fn of<S: Simd<Elem = f32>, Q: Quads<S>>(storage: DType) -> Option<Entry> {
        match storage {
            DType::F32 => Some(item::<S, f32, Q>),
            DType::F16 => Some(item::<S, f16, Q>),
            DType::BF16 => Some(item::<S, bf16, Q>),
            _ => None,
        }
    }
    match arch {
        Arch::Scalar => of::<Scalar<f32>, Arrays>(storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => of::<Avx2F32, Widened>(storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 => of::<Avx512F32, Widened>(storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => of::<Avx512F32, Vnni>(storage),
        #[cfg(target_arch = "aarch64")]
        Arch::Neon => of::<NeonF32, Arrays>(storage),
        #[cfg(target_arch = "aarch64")]
        Arch::NeonBf16 => of::<NeonF32, Mixed>(storage),
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Arch::Simd128 => of::<Simd128F32, Arrays>(storage),
        _ => None,
    }
}

/// Four integers as an array, for vectors of four lanes.
#[derive(Clone, Copy)]
struct Arrays;

/// 1.5 · 2^23: added to a small number, it leaves the nearest integer in the low bits.
const ROUND: f32 = 12_582_912.0;

impl<S: Simd<Elem = f32>> Quads<S> for Arrays {
    type I = [i32; 4];
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: i32) -> [i32; 4] {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(ptr: *const i32) -> [i32; 4] {
        // SAFETY: promised by the caller.
        unsafe { ptr.cast::<[i32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(ptr: *mut i32, x: [i32; 4]) {
        // SAFETY: promised by the caller.
        unsafe { ptr.cast::<[i32; 4]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn dot(unsigned: [i32; 4], signed: [i32; 4], acc: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|n| {
            let (a, b) = (unsigned[n].to_le_bytes(), signed[n].to_le_bytes());
            let products = a.iter().zip(b).map(|(&a, b)| i32::from(a) * i32::from(b.cast_signed()));
            acc[n].wrapping_add(products.sum())
        })
    }
    #[inline(always)]
    unsafe fn to_f32(x: [i32; 4]) -> S::V {
        const { assert!(S::LANES == 4) };
        // SAFETY: four lanes.
        unsafe { S::load(x.map(|x| x as f32).as_ptr()) }
    }
    #[inline(always)]
    unsafe fn round(x: S::V) -> [i32; 4] {
        let mut numbers = [0f32; 4];
        // SAFETY: four lanes.
        unsafe { S::store(numbers.as_mut_ptr(), x) };
        numbers.map(|x| (x + ROUND).to_bits().cast_signed().wrapping_sub(ROUND.to_bits().cast_signed()))
    }
    #[inline(always)]
    unsafe fn join([a, b, c, d]: [[i32; 4]; 4]) -> [i32; 4] {
        std::array::from_fn(|n| a[n] | b[n] << 8 | c[n] << 16 | d[n] << 24)
    }
    #[inline(always)]
    unsafe fn add_128(x: [i32; 4]) -> [i32; 4] {
        x.map(|x| x.wrapping_add(128))
    }
    #[inline(always)]
    unsafe fn apart<P: Part<S>>(part: P) -> P::Output {
        // SAFETY: promised by the caller.
        unsafe { S::apart(part) }
    }
}

/// Unsigned and signed bytes multiplied as they are.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy)]
struct Mixed;

#[cfg(target_arch = "aarch64")]
impl Quads<NeonF32> for Mixed {
    type I = int32x4_t;
    const ROWS: usize = 8;

    intrinsics! {
        fn splat(x: i32) -> int32x4_t { vdupq_n_s32(x) }
        fn load(ptr: *const i32) -> int32x4_t { vld1q_s32(ptr) }
        fn store(ptr: *mut i32, x: int32x4_t) { vst1q_s32(ptr, x) }
        fn dot(unsigned: int32x4_t, signed: int32x4_t, acc: int32x4_t) -> int32x4_t {
            let mut sums = acc;
            // An intrinsic of it is not stable.
            std::arch::asm!(
                "usdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
                sums = inout(vreg) sums, a = in(vreg) unsigned, b = in(vreg) signed,
                options(pure, nomem, nostack, preserves_flags)
            );
            sums
        }
        fn to_f32(x: int32x4_t) -> float32x4_t { vcvtq_f32_s32(x) }
        fn round(x: float32x4_t) -> int32x4_t { vcvtnq_s32_f32(x) }
        fn join(x: [int32x4_t; 4]) -> int32x4_t {
            let low = vsliq_n_s32::<8>(x[0], x[1]);
            let high = vsliq_n_s32::<8>(x[2], x[3]);
            vsliq_n_s32::<16>(low, high)
        }
        fn add_128(x: int32x4_t) -> int32x4_t { vaddq_s32(x, vdupq_n_s32(128)) }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<NeonF32>>(part: P) -> P::Output {
        #[target_feature(enable = "neon,i8mm")]
        #[inline(never)]
        unsafe fn compiled<P: Part<NeonF32>>(part: P) -> P::Output {
            // SAFETY: as of the caller.
            unsafe { part.run() }
        }
        // SAFETY: an entry point of this instruction set is called after its detection only.
        unsafe { compiled(part) }
    }
}

/// Bytes widened to 16 bits where they are multiplied.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Widened;

/// Bytes multiplied as they are.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Vnni;

#[cfg(target_arch = "x86_64")]
impl Quads<Avx2F32> for Widened {
    type I = __m256i;
    const ROWS: usize = 4;

    intrinsics! {
        fn splat(x: i32) -> __m256i { _mm256_set1_epi32(x) }
        fn load(ptr: *const i32) -> __m256i { _mm256_loadu_si256(ptr.cast()) }
        fn store(ptr: *mut i32, x: __m256i) { _mm256_storeu_si256(ptr.cast(), x) }
        fn dot(unsigned: __m256i, signed: __m256i, acc: __m256i) -> __m256i {
            let even = _mm256_and_si256(unsigned, _mm256_set1_epi16(0xFF));
            let odd = _mm256_srli_epi16::<8>(unsigned);
            let signed_even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(signed));
            let signed_odd = _mm256_srai_epi16::<8>(signed);
            let sum = _mm256_add_epi32(_mm256_madd_epi16(even, signed_even), _mm256_madd_epi16(odd, signed_odd));
            _mm256_add_epi32(acc, sum)
        }
        fn to_f32(x: __m256i) -> __m256 { _mm256_cvtepi32_ps(x) }
        fn round(x: __m256) -> __m256i { _mm256_cvtps_epi32(x) }
        fn join(x: [__m256i; 4]) -> __m256i {
            let low = _mm256_or_si256(x[0], _mm256_slli_epi32::<8>(x[1]));
            let high = _mm256_or_si256(_mm256_slli_epi32::<16>(x[2]), _mm256_slli_epi32::<24>(x[3]));
            _mm256_or_si256(low, high)
        }
        fn add_128(x: __m256i) -> __m256i { _mm256_add_epi32(x, _mm256_set1_epi32(128)) }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<Avx2F32>>(part: P) -> P::Output {
        // SAFETY: promised by the caller.
        unsafe { Avx2F32::apart(part) }
    }
}

/// What both ways with 512 bits have alike.
#[cfg(target_arch = "x86_64")]
macro_rules! integers_512 {
    () => {
        type I = __m512i;
        const ROWS: usize = 8;

        intrinsics! {
            fn splat(x: i32) -> __m512i { _mm512_set1_epi32(x) }
            fn load(ptr: *const i32) -> __m512i { _mm512_loadu_si512(ptr.cast()) }
            fn store(ptr: *mut i32, x: __m512i) { _mm512_storeu_si512(ptr.cast(), x) }
            fn to_f32(x: __m512i) -> __m512 { _mm512_cvtepi32_ps(x) }
            fn round(x: __m512) -> __m512i { _mm512_cvtps_epi32(x) }
            fn join(x: [__m512i; 4]) -> __m512i {
                let low = _mm512_or_si512(x[0], _mm512_slli_epi32::<8>(x[1]));
                let high = _mm512_slli_epi32::<24>(x[3]);
                _mm512_or_si512(_mm512_or_si512(low, high), _mm512_slli_epi32::<16>(x[2]))
            }
            fn add_128(x: __m512i) -> __m512i { _mm512_add_epi32(x, _mm512_set1_epi32(128)) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
impl Quads<Avx512F32> for Widened {
    integers_512!();
    intrinsics! {
        fn dot(unsigned: __m512i, signed: __m512i, acc: __m512i) -> __m512i {
            let even = _mm512_and_si512(unsigned, _mm512_set1_epi16(0xFF));
            let odd = _mm512_srli_epi16::<8>(unsigned);
            let signed_even = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(signed));
            let signed_odd = _mm512_srai_epi16::<8>(signed);
            let sum = _mm512_add_epi32(_mm512_madd_epi16(even, signed_even), _mm512_madd_epi16(odd, signed_odd));
            _mm512_add_epi32(acc, sum)
        }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<Avx512F32>>(part: P) -> P::Output {
        // SAFETY: promised by the caller.
        unsafe { Avx512F32::apart(part) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Quads<Avx512F32> for Vnni {
    integers_512!();
    intrinsics! {
        fn dot(unsigned: __m512i, signed: __m512i, acc: __m512i) -> __m512i { _mm512_dpbusd_epi32(acc, unsigned, signed) }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<Avx512F32>>(part: P) -> P::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        #[inline(never)]
        unsafe fn compiled<P: Part<Avx512F32>>(part: P) -> P::Output {
            // SAFETY: as of the caller.
            unsafe { part.run() }
        }
        // SAFETY: an entry point of this instruction set is called after its detection only.
        unsafe { compiled(part) }
    }
}
