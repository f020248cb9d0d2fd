//! 512-bit vectors: AVX-512 F, BW, DQ, VL (with AVX2, FMA and F16C). 32 registers: 8 rows × 2 vectors of accumulators
//! leave half of them for operands and the exponential. Pairs of bf16 need avx512bf16 besides, and those of codes avx512vbmi and gfni.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::{bf16, f16};

use super::avx2::{transpose_4x4, transpose_8x8_bytes};
use crate::kernels::code_pairs::CodePairs;
use crate::kernels::code_quads::CodeQuads;
use crate::kernels::codes::CodeVectors;
use crate::kernels::pairs::Bf16Pairs;
use crate::kernels::simd::Simd;

/// Sixteen f32.
#[derive(Clone, Copy)]
pub(crate) struct Avx512F32;
/// Eight f64.
#[derive(Clone, Copy)]
pub(crate) struct Avx512F64;

/// The matrix of `gf2p8affine` whose rows add the highest bit to each of the lower ones and leave it as it is.
const SIGN_ONTO_ALL: i64 = i64::from_ne_bytes(0x8182_8488_90A0_C080_u64.to_ne_bytes());

/// The same bits.
#[inline(always)]
fn integers(x: __m512) -> __m512i {
    // SAFETY: both are 512 bits of which any value is one.
    unsafe { transmute::<__m512, __m512i>(x) }
}

intrinsics! {
    /// Sixteen codes of 4 bits, the lower half of each byte first, in the low bits of lanes whose other bits may be anything.
    fn half_bytes(ptr: *const u8) -> __m512i {
        let both = _mm512_castsi128_si512(_mm_loadl_epi64(ptr.cast()));
        let four_bytes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        let shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
        _mm512_srlv_epi32(_mm512_permutexvar_epi32(four_bytes, both), shifts)
    }
    /// Words of even lanes and of odd ones as lanes.
    fn in_order(words: [__m512i; 2]) -> __m512i {
        integers(_mm512_mask_moveldup_ps(_mm512_castsi512_ps(words[0]), 0xAAAA, _mm512_castsi512_ps(words[1])))
    }
    /// The high halves of 64 bits, as low ones: moved, not shifted, as shifts keep the unit busy that multiplies.
    fn high_words(x: __m512i) -> __m512i { integers(_mm512_movehdup_ps(_mm512_castsi512_ps(x))) }
    fn sum_interleaved(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
    }
}

impl Simd for Avx512F32 {
    type Elem = f32;
    type V = __m512;
    type M = __mmask16;
    /// Those of even lanes and those of odd ones, in the low halves of 64 bits; the high halves may be anything.
    type W = [__m512i; 2];
    const LANES: usize = 16;
    const ROWS: usize = 8;

    apart!(apart, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");

    plain_methods! {
        f32, __m512:
        _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_sub_ps,
        _mm512_mul_ps, _mm512_div_ps, _mm512_fmadd_ps, _mm512_max_ps
    }
    intrinsics! {
        fn abs(a: __m512) -> __m512 { _mm512_abs_ps(a) }
        fn lt(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
        fn eq(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
        fn select(m: __mmask16, a: __m512, b: __m512) -> __m512 { _mm512_mask_blend_ps(m, b, a) }
        fn pow2(shifted: __m512) -> __m512 {
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(shifted)))
        }
        fn words(ptr: *const u32) -> [__m512i; 2] {
            let words = _mm512_loadu_si512(ptr.cast());
            [words, _mm512_srli_epi64::<32>(words)]
        }
        fn same_word(x: u32) -> [__m512i; 2] { [_mm512_set1_epi32(x.cast_signed()); 2] }
        fn xor_words(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
            [_mm512_xor_si512(a[0], b[0]), _mm512_xor_si512(a[1], b[1])]
        }
        fn add_words(a: [__m512i; 2], b: [__m512i; 2]) -> [__m512i; 2] {
            [_mm512_add_epi32(a[0], b[0]), _mm512_add_epi32(a[1], b[1])]
        }
        fn multiply_words(a: [__m512i; 2], b: u32) -> [[__m512i; 2]; 2] {
            let b = _mm512_set1_epi32(b.cast_signed());
            let low = [_mm512_mul_epu32(a[0], b), _mm512_mul_epu32(a[1], b)];
            [[high_words(low[0]), high_words(low[1])], low]
        }
        fn drop_lanes(p: __m512, words: [__m512i; 2], last: u32) -> __m512 {
            let dropped = _mm512_cmple_epu32_mask(in_order(words), _mm512_set1_epi32(last.cast_signed()));
            _mm512_mask_and_ps(p, dropped, p, _mm512_set1_ps(-0.0))
        }
        fn load_f16(ptr: *const f16) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(ptr.cast())) }
        fn load_bf16(ptr: *const bf16) -> __m512 {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(ptr.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
        fn store_f16(ptr: *mut f16, x: __m512) {
            _mm256_storeu_si256(ptr.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x))
        }
        fn store_bf16(ptr: *mut bf16, x: __m512) {
            // To nearest even; NaN becomes a quiet NaN of its sign.
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let chosen = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet));
            _mm256_storeu_si256(ptr.cast(), _mm512_cvtepi32_epi16(chosen));
        }
        fn reduce_add(x: __m512) -> f32 { Self::reduce_add_4([x; 4])[0] }
        fn reduce_add_4(x: [__m512; 4]) -> [f32; 4] {
            // Within 128 bits elements 0 + 2 and 1 + 3, then those two; then the four parts in the same way.
            let (ab, cd) = (sum_interleaved(x[0], x[1]), sum_interleaved(x[2], x[3]));
            let sum = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(ab, cd), _mm512_shuffle_ps::<0xEE>(ab, cd));
            let sum = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum));
            let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
            let mut four = [0.0; 4];
            _mm_storeu_ps(four.as_mut_ptr(), sum);
            four
        }
        fn falses(ptr: *const u8) -> __mmask16 {
            // Two loads: one of sixteen bytes would wait until two stores of eight have left the store buffer.
            let bytes = _mm_unpacklo_epi64(_mm_loadl_epi64(ptr.cast()), _mm_loadl_epi64(ptr.add(8).cast()));
            _mm_testn_epi8_mask(bytes, bytes)
        }
        fn transpose_bytes(rows: [*const u8; 8], dst: *mut u8, dst_stride: usize) {
            transpose_8x8_bytes(rows, dst, dst_stride)
        }
        fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
            let mut pairs = [_mm512_setzero_ps(); 16];
            for n in (0..16).step_by(2) {
                let (a, b) = (_mm512_loadu_ps(src.add(n * src_stride)), _mm512_loadu_ps(src.add((n + 1) * src_stride)));
                (pairs[n], pairs[n + 1]) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            // fours[4 · g + c], part l of 128 bits: rows 4 · g .. 4 · g + 4 of column 4 · l + c.
            let mut fours = [_mm512_setzero_pd(); 16];
            for n in (0..16).step_by(4) {
                let (a, b) = (_mm512_castps_pd(pairs[n]), _mm512_castps_pd(pairs[n + 2]));
                let (c, d) = (_mm512_castps_pd(pairs[n + 1]), _mm512_castps_pd(pairs[n + 3]));
                (fours[n], fours[n + 1]) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                (fours[n + 2], fours[n + 3]) = (_mm512_unpacklo_pd(c, d), _mm512_unpackhi_pd(c, d));
            }
            for c in 0..4 {
                let (a, b) = (_mm512_castpd_ps(fours[c]), _mm512_castpd_ps(fours[4 + c]));
                let (x, y) = (_mm512_castpd_ps(fours[8 + c]), _mm512_castpd_ps(fours[12 + c]));
                let (low, high) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
                let (low_2, high_2) = (_mm512_shuffle_f32x4::<0x44>(x, y), _mm512_shuffle_f32x4::<0xEE>(x, y));
                _mm512_storeu_ps(dst.add(c * dst_stride), _mm512_shuffle_f32x4::<0x88>(low, low_2));
                _mm512_storeu_ps(dst.add((4 + c) * dst_stride), _mm512_shuffle_f32x4::<0xDD>(low, low_2));
                _mm512_storeu_ps(dst.add((8 + c) * dst_stride), _mm512_shuffle_f32x4::<0x88>(high, high_2));
                _mm512_storeu_ps(dst.add((12 + c) * dst_stride), _mm512_shuffle_f32x4::<0xDD>(high, high_2));
            }
        }
    }
}

impl Bf16Pairs for Avx512F32 {
    apart!(apart_paired, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c");
    intrinsics! {
        fn dot(a: __m512, b: __m512, acc: __m512) -> __m512 {
            _mm512_dpbf16_ps(acc, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b))
        }
        fn pair(low: __m512, high: __m512) -> __m512 {
            // The low half of the answer of vcvtne2ps2bf16 holds its second operand: lane n and n + 16 become a pair.
            let halves = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
            let order = _mm512_set_epi16(
                31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                17, 1, 16, 0,
            );
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves))
        }
        fn narrow(first: __m512, second: __m512) -> __m512 {
            transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first))
        }
        fn keep_attended(a: __m512, x: __m512) -> __m512 {
            let attended = _mm512_cmpneq_epi16_mask(_mm512_castps_si512(x), _mm512_set1_epi16(i16::MIN));
            _mm512_castsi512_ps(_mm512_maskz_mov_epi16(attended, _mm512_castps_si512(a)))
        }
        fn drop_halves(p: __m512, words: [[__m512i; 2]; 2], last: u32) -> __m512 {
            let last = _mm512_set1_epi32(last.cast_signed());
            let low = _mm512_cmple_epu32_mask(in_order(words[0]), last);
            let high = _mm512_cmple_epu32_mask(in_order(words[1]), last);
            // All bits of a dropped half but its sign.
            let bits = _mm512_maskz_set1_epi32(low, 0x7FFF);
            let bits = _mm512_mask_or_epi32(bits, high, bits, _mm512_set1_epi32(0x7FFF_0000));
            _mm512_castsi512_ps(_mm512_andnot_si512(bits, _mm512_castps_si512(p)))
        }
        fn join(low: __m512, high: __m512) -> __m512 {
            let low = _mm512_srli_epi32::<16>(_mm512_castps_si512(low));
            _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(high)))
        }
        fn split(pairs: __m512) -> [__m512; 2] {
            let pairs = _mm512_castps_si512(pairs);
            let high = _mm512_and_si512(pairs, _mm512_set1_epi32(i32::from_ne_bytes(0xFFFF_0000_u32.to_ne_bytes())));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(high)]
        }
    }
}

impl CodeVectors for Avx512F32 {
    const E4M3FN_SHORT: f32 = 256.0;
    intrinsics! {
        fn load_int8(ptr: *const u8) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(ptr.cast())))
        }
        fn load_uint8(ptr: *const u8) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(ptr.cast())))
        }
        fn load_int4(ptr: *const u8) -> __m512 {
            let numbers = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0,
            );
            _mm512_permutexvar_ps(half_bytes(ptr), numbers)
        }
        fn load_e4m3fn(ptr: *const u8) -> __m512 {
            // What would be 480 is NaN.
            let x = _mm512_mul_ps(Self::load_e4m3fn_short(ptr), _mm512_set1_ps(256.0));
            let nan = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(_mm512_abs_ps(x), _mm512_set1_ps(480.0));
            _mm512_mask_blend_ps(nan, x, _mm512_set1_ps(f32::NAN))
        }
        fn load_e4m3fn_short(ptr: *const u8) -> __m512 {
            // Exponent and mantissa where binary16 has its own, 8 powers of two lower.
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(ptr.cast())));
            _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(0xBF80_u16.cast_signed())))
        }
        fn has_e4m3fn_nan(ptr: *const u8, n: usize) -> bool {
            let (mut largest, whole) = (_mm512_setzero_si512(), n / 64 * 64);
            for at in (0..whole).step_by(64) {
                let codes = _mm512_loadu_si512(ptr.add(at).cast());
                // Doubled, a code loses its sign: NaN is the largest then.
                largest = _mm512_max_epu8(largest, _mm512_add_epi8(codes, codes));
            }
            let codes = _mm512_maskz_loadu_epi8((1 << (n - whole)) - 1, ptr.wrapping_add(whole).cast());
            largest = _mm512_max_epu8(largest, _mm512_add_epi8(codes, codes));
            _mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(-2)) != 0
        }
        fn load_e5m2(ptr: *const u8) -> __m512 {
            // The upper half of a binary16.
            let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(ptr.cast()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(wide))
        }
        fn load_e8m0(ptr: *const u8) -> __m512 {
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(ptr.cast()));
            // The exponent of a float; 2^-127 is no normal number, and 255 would be an infinity.
            let power = _mm512_max_epu32(_mm512_slli_epi32::<23>(codes), _mm512_set1_epi32(1 << 22));
            let nan = _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255));
            _mm512_castsi512_ps(_mm512_mask_blend_epi32(nan, power, _mm512_set1_epi32(0x7FC0_0000)))
        }
        fn load_e2m1(ptr: *const u8) -> __m512 {
            let numbers = _mm512_setr_ps(
                0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
            );
            _mm512_permutexvar_ps(half_bytes(ptr), numbers)
        }
    }
}

impl CodePairs for Avx512F32 {
    apart!(apart_codes, "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,gfni,avx2,fma,f16c");
    intrinsics! {
        fn look_up_bytes(bytes: __m512, table: &[__m512; 4]) -> [__m512; 2] {
            let [low, more_low, high, more_high] = table.map(integers);
            let bytes = _mm512_castps_si512(bytes);
            let (low, high) = (
                _mm512_permutex2var_epi8(low, bytes, more_low),
                _mm512_permutex2var_epi8(high, bytes, more_high),
            );
            // high | bytes & 0x80
            let high = _mm512_ternarylogic_epi32::<0xF8>(high, bytes, _mm512_set1_epi8(i8::MIN));
            [_mm512_castsi512_ps(low), _mm512_castsi512_ps(high)]
        }
        fn look_up_words(words: __m512, table: __m512) -> __m512 {
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_castps_si512(words), _mm512_castps_si512(table)))
        }
        fn half_bytes(words: __m512) -> [__m512; 4] {
            let x = _mm512_castps_si512(words);
            let [b, c, d] = [_mm512_srli_epi16::<4>(x), _mm512_srli_epi16::<8>(x), _mm512_srli_epi16::<12>(x)];
            [words, _mm512_castsi512_ps(b), _mm512_castsi512_ps(c), _mm512_castsi512_ps(d)]
        }
        fn interleave_bytes(a: __m512, b: __m512) -> [__m512; 2] {
            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            [_mm512_castsi512_ps(_mm512_unpacklo_epi8(a, b)), _mm512_castsi512_ps(_mm512_unpackhi_epi8(a, b))]
        }
        fn interleave_words(a: __m512, b: __m512) -> [__m512; 2] {
            let (a, b) = (_mm512_castps_si512(a), _mm512_castps_si512(b));
            [_mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b)), _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b))]
        }
        fn fold_int8(bytes: __m512) -> __m512 {
            let folded = _mm512_gf2p8affine_epi64_epi8::<0>(_mm512_castps_si512(bytes), _mm512_set1_epi64(SIGN_ONTO_ALL));
            _mm512_castsi512_ps(folded)
        }
        fn fold_uint8(bytes: __m512) -> __m512 {
            let folded =
                _mm512_gf2p8affine_epi64_epi8::<0xFF>(_mm512_castps_si512(bytes), _mm512_set1_epi64(SIGN_ONTO_ALL));
            _mm512_castsi512_ps(folded)
        }
        fn order_of_bytes(words: [__m512; 2]) -> [__m512; 2] {
            let [a, b] = words;
            [_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b)]
        }
        fn order_of_halves(words: [__m512; 4]) -> [__m512; 4] {
            // Words 4w, then words 4w + 1, of two vectors; words 4w + 2, then words 4w + 3.
            let first = _mm512_set_epi16(
                61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1, 60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16,
                12, 8, 4, 0,
            );
            let second = _mm512_add_epi16(first, _mm512_set1_epi16(2));
            let [a, b, c, d] = words.map(integers);
            let [n01, n23] = [_mm512_permutex2var_epi16(a, first, b), _mm512_permutex2var_epi16(a, second, b)];
            let [m01, m23] = [_mm512_permutex2var_epi16(c, first, d), _mm512_permutex2var_epi16(c, second, d)];
            [
                _mm512_castsi512_ps(_mm512_shuffle_i64x2::<0x44>(n01, m01)),
                _mm512_castsi512_ps(_mm512_shuffle_i64x2::<0xEE>(n01, m01)),
                _mm512_castsi512_ps(_mm512_shuffle_i64x2::<0x44>(n23, m23)),
                _mm512_castsi512_ps(_mm512_shuffle_i64x2::<0xEE>(n23, m23)),
            ]
        }
        fn transpose_quads(x: [__m512; 4]) -> [__m512; 4] {
            let (a, b) = (_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpacklo_ps(x[2], x[3]));
            let (c, d) = (_mm512_unpackhi_ps(x[0], x[1]), _mm512_unpackhi_ps(x[2], x[3]));
            [
                _mm512_shuffle_ps::<0x44>(a, b),
                _mm512_shuffle_ps::<0xEE>(a, b),
                _mm512_shuffle_ps::<0x44>(c, d),
                _mm512_shuffle_ps::<0xEE>(c, d),
            ]
        }
        fn pick(x: __m512, at: __m512) -> __m512 { _mm512_permutexvar_ps(_mm512_castps_si512(at), x) }
    }
}

impl CodeQuads for Avx512F32 {
    type I = __m512i;
    apart!(apart_quads, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c");
    intrinsics! {
        fn splat_byte(x: u8) -> __m512i { _mm512_set1_epi8(x.cast_signed()) }
        fn splat_i32(x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn splat_quad(ptr: *const u8) -> __m512i { _mm512_set1_epi32(ptr.cast::<i32>().read_unaligned()) }
        fn load_bytes(ptr: *const u8) -> __m512i { _mm512_loadu_si512(ptr.cast()) }
        fn store_bytes(ptr: *mut u8, x: __m512i) { _mm512_storeu_si512(ptr.cast(), x) }
        fn dot_quads(unsigned: __m512i, signed: __m512i, acc: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(acc, unsigned, signed)
        }
        fn negate(x: __m512i) -> __m512i { _mm512_sub_epi32(_mm512_setzero_si512(), x) }
        fn to_f32(x: __m512i) -> __m512 { _mm512_cvtepi32_ps(x) }
        fn round(x: __m512) -> __m512i { _mm512_cvtps_epi32(x) }
        fn flip(x: __m512i) -> __m512i { _mm512_xor_si512(x, _mm512_set1_epi8(i8::MIN)) }
        fn halves(x: __m512i) -> [__m512i; 2] {
            let low = _mm512_set1_epi8(15);
            [_mm512_and_si512(x, low), _mm512_and_si512(_mm512_srli_epi16::<4>(x), low)]
        }
        fn halves_plus_8(x: __m512i) -> [__m512i; 2] {
            // (x ^ 8) & 15
            let (eight, low) = (_mm512_set1_epi8(8), _mm512_set1_epi8(15));
            let high = _mm512_srli_epi16::<4>(x);
            [_mm512_ternarylogic_epi32::<0x28>(x, eight, low), _mm512_ternarylogic_epi32::<0x28>(high, eight, low)]
        }
        fn look_up_halves(x: __m512i, table: &[u8; 64]) -> __m512i {
            _mm512_shuffle_epi8(_mm512_loadu_si512(table.as_ptr().cast()), x)
        }
        fn transpose_words(x: [__m512i; 4]) -> [__m512i; 4] {
            let (a, b) = (_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpacklo_epi32(x[2], x[3]));
            let (c, d) = (_mm512_unpackhi_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[2], x[3]));
            [
                _mm512_unpacklo_epi64(a, b),
                _mm512_unpackhi_epi64(a, b),
                _mm512_unpacklo_epi64(c, d),
                _mm512_unpackhi_epi64(c, d),
            ]
        }
        fn weave(x: [__m512i; 4]) -> [__m512i; 4] {
            let (a, b) = (_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3]));
            let (c, d) = (_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3]));
            [
                _mm512_unpacklo_epi16(a, b),
                _mm512_unpackhi_epi16(a, b),
                _mm512_unpacklo_epi16(c, d),
                _mm512_unpackhi_epi16(c, d),
            ]
        }
        fn digits(x: __m512i) -> __m512i {
            // Half of each digit's range is added, so that bytes borrow from the next one, and taken back.
            let halves = _mm512_set1_epi32(0x8080);
            _mm512_xor_si512(_mm512_add_epi32(x, halves), halves)
        }
        fn keep_byte(x: __m512i, n: usize) -> __m512i { _mm512_and_si512(x, _mm512_set1_epi32(0xFF << (8 * n))) }
        fn sum_i32(x: __m512i) -> i32 { _mm512_reduce_add_epi32(x) }
        fn largest(x: __m512) -> f32 { _mm512_reduce_max_ps(x) }
        fn store_byte_of_lanes(ptr: *mut u8, x: __m512i, n: usize) {
            let x = match n {
                0 => x,
                1 => _mm512_srli_epi32::<8>(x),
                2 => _mm512_srli_epi32::<16>(x),
                _ => _mm512_srli_epi32::<24>(x),
            };
            _mm_storeu_si128(ptr.cast(), _mm512_cvtepi32_epi8(x));
        }
        fn splat_word(x: __m512i, n: usize) -> __m512i {
            match n {
                0 => _mm512_shuffle_epi32::<0x00>(x),
                1 => _mm512_shuffle_epi32::<0x55>(x),
                2 => _mm512_shuffle_epi32::<0xAA>(x),
                _ => _mm512_shuffle_epi32::<0xFF>(x),
            }
        }
        fn even_and_odd(a: __m512i, b: __m512i) -> [__m512i; 2] {
            let (odd_a, odd_b) = (_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
            let even = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(a));
            let odd = _mm512_castsi256_si512(_mm512_cvtepi16_epi8(odd_a));
            [
                _mm512_inserti64x4::<1>(even, _mm512_cvtepi16_epi8(b)),
                _mm512_inserti64x4::<1>(odd, _mm512_cvtepi16_epi8(odd_b)),
            ]
        }
        fn sum_of_quarters(x: [__m512; 4]) -> __m512 {
            let a = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(x[0], x[1]), _mm512_shuffle_f32x4::<0xEE>(x[0], x[1]));
            let b = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(x[2], x[3]), _mm512_shuffle_f32x4::<0xEE>(x[2], x[3]));
            _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xDD>(a, b))
        }
        fn load_halves(a: *const f32, b: *const f32) -> __m512 {
            _mm512_insertf32x8::<1>(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b))
        }
        fn pick_of_two(a: __m512, b: __m512, at: __m512i) -> __m512 { _mm512_permutex2var_ps(a, at, b) }
    }
}

impl Simd for Avx512F64 {
    type Elem = f64;
    type V = __m512d;
    type M = __mmask8;
    /// In the low halves of 64 bits; the high halves may be anything.
    type W = __m512i;
    const LANES: usize = 8;
    const ROWS: usize = 8;

    apart!(apart, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");

    plain_methods! {
        f64, __m512d:
        _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_sub_pd,
        _mm512_mul_pd, _mm512_div_pd, _mm512_fmadd_pd, _mm512_max_pd
    }
    intrinsics! {
        fn abs(a: __m512d) -> __m512d { _mm512_abs_pd(a) }
        fn lt(a: __m512d, b: __m512d) -> __mmask8 { _mm512_cmp_pd_mask::<_CMP_LT_OQ>(a, b) }
        fn eq(a: __m512d, b: __m512d) -> __mmask8 { _mm512_cmp_pd_mask::<_CMP_EQ_OQ>(a, b) }
        fn select(m: __mmask8, a: __m512d, b: __m512d) -> __m512d { _mm512_mask_blend_pd(m, b, a) }
        fn pow2(shifted: __m512d) -> __m512d {
            _mm512_castsi512_pd(_mm512_slli_epi64::<52>(_mm512_castpd_si512(shifted)))
        }
        fn words(ptr: *const u32) -> __m512i { _mm512_cvtepu32_epi64(_mm256_loadu_si256(ptr.cast())) }
        fn same_word(x: u32) -> __m512i { _mm512_set1_epi64(i64::from(x)) }
        fn xor_words(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn add_words(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn multiply_words(a: __m512i, b: u32) -> [__m512i; 2] {
            let low = _mm512_mul_epu32(a, _mm512_set1_epi64(i64::from(b)));
            [_mm512_srli_epi64::<32>(low), low]
        }
        fn drop_lanes(p: __m512d, words: __m512i, last: u32) -> __m512d {
            let words = _mm512_and_si512(words, _mm512_set1_epi64(i64::from(u32::MAX)));
            let dropped = _mm512_cmple_epu64_mask(words, _mm512_set1_epi64(i64::from(last)));
            _mm512_mask_and_pd(p, dropped, p, _mm512_set1_pd(-0.0))
        }
        fn reduce_add(x: __m512d) -> f64 { _mm512_reduce_add_pd(x) }
        fn transpose(src: *const f64, src_stride: usize, dst: *mut f64, dst_stride: usize) {
            for (r, c) in [(0, 0), (0, 4), (4, 0), (4, 4)] {
                transpose_4x4(src.add(r * src_stride + c), src_stride, dst.add(c * dst_stride + r), dst_stride);
            }
        }
    }
    no_halves!(__m512d);
}
