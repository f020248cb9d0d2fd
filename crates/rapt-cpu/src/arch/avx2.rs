//! 256-bit vectors: AVX2, FMA, F16C. 16 registers: 6 rows × 2 vectors of accumulators leave 4 for operands.

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::kernels::codes::CodeVectors;
use crate::kernels::simd::Simd;

/// Eight f32.
#[derive(Clone, Copy)]
pub(crate) struct Avx2F32;
/// Four f64.
#[derive(Clone, Copy)]
pub(crate) struct Avx2F64;

intrinsics! {
    /// Transposes 8×8 floats.
    pub(super) fn transpose_8x8(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        let mut rows = [_mm256_setzero_ps(); 8];
        for (n, row) in rows.iter_mut().enumerate() {
            *row = _mm256_loadu_ps(src.add(n * src_stride));
        }
        let [r0, r1, r2, r3, r4, r5, r6, r7] = rows;
        let ((a0, a1), (a2, a3)) = (interleave(r0, r1), interleave(r2, r3));
        let ((a4, a5), (a6, a7)) = (interleave(r4, r5), interleave(r6, r7));
        let ((b0, b1), (b2, b3)) = (interleave_pairs(a0, a2), interleave_pairs(a1, a3));
        let ((b4, b5), (b6, b7)) = (interleave_pairs(a4, a6), interleave_pairs(a5, a7));
        for (n, (low, high)) in [(b0, b4), (b1, b5), (b2, b6), (b3, b7)].into_iter().enumerate() {
            _mm256_storeu_ps(dst.add(n * dst_stride), _mm256_permute2f128_ps::<0x20>(low, high));
            _mm256_storeu_ps(dst.add((n + 4) * dst_stride), _mm256_permute2f128_ps::<0x31>(low, high));
        }
    }
    fn interleave(a: __m256, b: __m256) -> (__m256, __m256) {
        (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))
    }
    fn interleave_pairs(a: __m256, b: __m256) -> (__m256, __m256) {
        (_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b))
    }
    /// Transposes 4×4 doubles. Shared with AVX-512.
    pub(super) fn transpose_4x4(src: *const f64, src_stride: usize, dst: *mut f64, dst_stride: usize) {
        let (r0, r1) = (_mm256_loadu_pd(src), _mm256_loadu_pd(src.add(src_stride)));
        let (r2, r3) = (_mm256_loadu_pd(src.add(2 * src_stride)), _mm256_loadu_pd(src.add(3 * src_stride)));
        let (a0, a1) = (_mm256_unpacklo_pd(r0, r1), _mm256_unpackhi_pd(r0, r1));
        let (a2, a3) = (_mm256_unpacklo_pd(r2, r3), _mm256_unpackhi_pd(r2, r3));
        _mm256_storeu_pd(dst, _mm256_permute2f128_pd::<0x20>(a0, a2));
        _mm256_storeu_pd(dst.add(dst_stride), _mm256_permute2f128_pd::<0x20>(a1, a3));
        _mm256_storeu_pd(dst.add(2 * dst_stride), _mm256_permute2f128_pd::<0x31>(a0, a2));
        _mm256_storeu_pd(dst.add(3 * dst_stride), _mm256_permute2f128_pd::<0x31>(a1, a3));
    }
    /// Transposes 8×8 bytes. Shared with AVX-512.
    pub(super) fn transpose_8x8_bytes(rows: [*const u8; 8], dst: *mut u8, dst_stride: usize) {
        let (a, b) = (interleave_bytes(rows[0], rows[1]), interleave_bytes(rows[2], rows[3]));
        let (c, d) = (interleave_bytes(rows[4], rows[5]), interleave_bytes(rows[6], rows[7]));
        let (ab_low, ab_high) = (_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b));
        let (cd_low, cd_high) = (_mm_unpacklo_epi16(c, d), _mm_unpackhi_epi16(c, d));
        let columns = [
            _mm_unpacklo_epi32(ab_low, cd_low),
            _mm_unpackhi_epi32(ab_low, cd_low),
            _mm_unpacklo_epi32(ab_high, cd_high),
            _mm_unpackhi_epi32(ab_high, cd_high),
        ];
        for (n, columns) in columns.into_iter().enumerate() {
            _mm_storel_pd(dst.add(2 * n * dst_stride).cast(), _mm_castsi128_pd(columns));
            _mm_storeh_pd(dst.add((2 * n + 1) * dst_stride).cast(), _mm_castsi128_pd(columns));
        }
    }
    /// Eight codes of 4 bits, the lower half of each byte first, in the low bits of lanes whose other bits may be anything.
    fn half_bytes(ptr: *const u8) -> __m256i {
        let all = _mm256_set1_epi32(ptr.cast::<i32>().read_unaligned());
        _mm256_srlv_epi32(all, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28))
    }
    fn interleave_bytes(a: *const u8, b: *const u8) -> __m128i {
        _mm_unpacklo_epi8(_mm_loadl_epi64(a.cast()), _mm_loadl_epi64(b.cast()))
    }
    /// Sums each of four vectors within 128 bits, as elements `0 + 2` and `1 + 3` and then those two: element `n` of a
    /// 128-bit part of the answer is of vector `n`.
    fn sum_quarters(x: [__m256; 4]) -> __m256 {
        let (ab, cd) = (sum_interleaved(x[0], x[1]), sum_interleaved(x[2], x[3]));
        _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xEE>(ab, cd))
    }
    fn sum_interleaved(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))
    }
    /// Eight f32 to bfloat16 in the low half of each lane, to nearest even; NaN becomes a quiet NaN of its sign.
    fn bf16_bits(x: __m256) -> __m256i {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan))
    }
}

impl Simd for Avx2F32 {
    type Elem = f32;
    type V = __m256;
    type M = __m256;
    /// Those of even lanes and those of odd ones, in the low halves of 64 bits; the high halves may be anything.
    type W = [__m256i; 2];
    const LANES: usize = 8;
    const ROWS: usize = 6;

    apart!(apart, "avx2,fma,f16c");

    plain_methods! {
        f32, __m256:
        _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps,
        _mm256_mul_ps, _mm256_div_ps, _mm256_fmadd_ps, _mm256_max_ps
    }
    intrinsics! {
        fn abs(a: __m256) -> __m256 { _mm256_andnot_ps(_mm256_set1_ps(-0.0), a) }
        fn lt(a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) }
        fn eq(a: __m256, b: __m256) -> __m256 { _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b) }
        fn select(m: __m256, a: __m256, b: __m256) -> __m256 { _mm256_blendv_ps(b, a, m) }
        fn pow2(shifted: __m256) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(shifted)))
        }
        fn words(ptr: *const u32) -> [__m256i; 2] {
            let words = _mm256_loadu_si256(ptr.cast());
            [words, _mm256_srli_epi64::<32>(words)]
        }
        fn same_word(x: u32) -> [__m256i; 2] { [_mm256_set1_epi32(x.cast_signed()); 2] }
        fn xor_words(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])]
        }
        fn add_words(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
            [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])]
        }
        fn multiply_words(a: [__m256i; 2], b: u32) -> [[__m256i; 2]; 2] {
            let b = _mm256_set1_epi32(b.cast_signed());
            let low = [_mm256_mul_epu32(a[0], b), _mm256_mul_epu32(a[1], b)];
            [[_mm256_srli_epi64::<32>(low[0]), _mm256_srli_epi64::<32>(low[1])], low]
        }
        fn drop_lanes(p: __m256, words: [__m256i; 2], last: u32) -> __m256 {
            let words = _mm256_blend_epi32::<0xAA>(words[0], _mm256_slli_epi64::<32>(words[1]));
            let least = _mm256_min_epu32(words, _mm256_set1_epi32(last.cast_signed()));
            let dropped = _mm256_castsi256_ps(_mm256_cmpeq_epi32(least, words));
            // All bits of a dropped weight but its sign.
            _mm256_andnot_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0), dropped), p)
        }
        fn load_f16(ptr: *const f16) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(ptr.cast())) }
        fn load_bf16(ptr: *const bf16) -> __m256 {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(ptr.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
        fn store_f16(ptr: *mut f16, x: __m256) {
            _mm_storeu_si128(ptr.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x))
        }
        fn store_bf16(ptr: *mut bf16, x: __m256) {
            let bits = bf16_bits(x);
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(bits, bits));
            _mm_storeu_si128(ptr.cast(), _mm256_castsi256_si128(packed));
        }
        fn reduce_add(x: __m256) -> f32 { Self::reduce_add_4([x; 4])[0] }
        fn reduce_add_4(x: [__m256; 4]) -> [f32; 4] {
            let sum = sum_quarters(x);
            let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
            let mut four = [0.0; 4];
            _mm_storeu_ps(four.as_mut_ptr(), sum);
            four
        }
        fn falses(ptr: *const u8) -> __m256 {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(ptr.cast()));
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(bytes, _mm256_setzero_si256()))
        }
        fn transpose_bytes(rows: [*const u8; 8], dst: *mut u8, dst_stride: usize) {
            transpose_8x8_bytes(rows, dst, dst_stride)
        }
        fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
            transpose_8x8(src, src_stride, dst, dst_stride)
        }
    }
}

impl CodeVectors for Avx2F32 {
    const E4M3FN_SHORT: f32 = 256.0;
    intrinsics! {
        fn load_int8(ptr: *const u8) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(ptr.cast())))
        }
        fn load_uint8(ptr: *const u8) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(ptr.cast())))
        }
        fn load_int4(ptr: *const u8) -> __m256 {
            let high = _mm256_slli_epi32::<28>(half_bytes(ptr));
            _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(high))
        }
        fn load_e4m3fn(ptr: *const u8) -> __m256 {
            // What would be 480 is NaN.
            let x = _mm256_mul_ps(Self::load_e4m3fn_short(ptr), _mm256_set1_ps(256.0));
            let nan = <Self as Simd>::eq(<Self as Simd>::abs(x), _mm256_set1_ps(480.0));
            _mm256_blendv_ps(x, _mm256_set1_ps(f32::NAN), nan)
        }
        fn load_e4m3fn_short(ptr: *const u8) -> __m256 {
            // Exponent and mantissa where binary16 has its own, 8 powers of two lower.
            let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(ptr.cast())));
            _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(0xBF80_u16.cast_signed())))
        }
        fn has_e4m3fn_nan(ptr: *const u8, n: usize) -> bool {
            let (mut found, mut at) = (_mm256_setzero_si256(), 0);
            while at + 32 <= n {
                let codes = _mm256_loadu_si256(ptr.add(at).cast());
                // Doubled, a code loses its sign.
                let doubled = _mm256_add_epi8(codes, codes);
                found = _mm256_or_si256(found, _mm256_cmpeq_epi8(doubled, _mm256_set1_epi8(-2)));
                at += 32;
            }
            let mut rest = false;
            while at < n {
                rest |= *ptr.add(at) & 0x7f == 0x7f;
                at += 1;
            }
            rest || _mm256_movemask_epi8(found) != 0
        }
        fn load_e5m2(ptr: *const u8) -> __m256 {
            // The upper half of a binary16.
            _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(ptr.cast())))
        }
        fn load_e8m0(ptr: *const u8) -> __m256 {
            let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(ptr.cast()));
            // The exponent of a float; 2^-127 is no normal number, and 255 would be an infinity.
            let power = _mm256_max_epu32(_mm256_slli_epi32::<23>(codes), _mm256_set1_epi32(1 << 22));
            let nan = _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255));
            _mm256_castsi256_ps(_mm256_blendv_epi8(power, _mm256_set1_epi32(0x7FC0_0000), nan))
        }
        fn load_e2m1(ptr: *const u8) -> __m256 {
            let code = half_bytes(ptr);
            let sizes = _mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0);
            // A permutation looks at 3 bits; the fourth is the sign.
            let sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<28>(code)), _mm256_set1_ps(-0.0));
            _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, code), sign)
        }
    }
}

impl Simd for Avx2F64 {
    type Elem = f64;
    type V = __m256d;
    type M = __m256d;
    /// In the low halves of 64 bits; the high halves may be anything.
    type W = __m256i;
    const LANES: usize = 4;
    const ROWS: usize = 6;

    apart!(apart, "avx2,fma,f16c");

    plain_methods! {
        f64, __m256d:
        _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_sub_pd,
        _mm256_mul_pd, _mm256_div_pd, _mm256_fmadd_pd, _mm256_max_pd
    }
    intrinsics! {
        fn abs(a: __m256d) -> __m256d { _mm256_andnot_pd(_mm256_set1_pd(-0.0), a) }
        fn lt(a: __m256d, b: __m256d) -> __m256d { _mm256_cmp_pd::<_CMP_LT_OQ>(a, b) }
        fn eq(a: __m256d, b: __m256d) -> __m256d { _mm256_cmp_pd::<_CMP_EQ_OQ>(a, b) }
        fn select(m: __m256d, a: __m256d, b: __m256d) -> __m256d { _mm256_blendv_pd(b, a, m) }
        fn pow2(shifted: __m256d) -> __m256d {
            _mm256_castsi256_pd(_mm256_slli_epi64::<52>(_mm256_castpd_si256(shifted)))
        }
        fn words(ptr: *const u32) -> __m256i { _mm256_cvtepu32_epi64(_mm_loadu_si128(ptr.cast())) }
        fn same_word(x: u32) -> __m256i { _mm256_set1_epi64x(i64::from(x)) }
        fn xor_words(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        fn add_words(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn multiply_words(a: __m256i, b: u32) -> [__m256i; 2] {
            let low = _mm256_mul_epu32(a, _mm256_set1_epi64x(i64::from(b)));
            [_mm256_srli_epi64::<32>(low), low]
        }
        fn drop_lanes(p: __m256d, words: __m256i, last: u32) -> __m256d {
            let least = _mm256_min_epu32(words, _mm256_set1_epi32(last.cast_signed()));
            // Of each 64 bits what the low half says.
            let dropped = _mm256_shuffle_epi32::<0xA0>(_mm256_cmpeq_epi32(least, words));
            _mm256_andnot_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), _mm256_castsi256_pd(dropped)), p)
        }
        fn reduce_add(x: __m256d) -> f64 {
            let x = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd::<1>(x));
            _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)))
        }
        fn transpose(src: *const f64, src_stride: usize, dst: *mut f64, dst_stride: usize) {
            transpose_4x4(src, src_stride, dst, dst_stride)
        }
    }
    no_halves!(__m256d);
}
