// Numbers as bits. A shader may be compiled as if NaN and infinities did not exist, so none is ever compared or added here: what
// is not finite is told by its bits, kept out of all sums, and followed as a `kind`. Rounding is integer code: that of a driver is its own.
// Deliberately absent: literals of NaN and infinity, which WGSL forbids.

const NAN_BITS: u32 = 0x7fc00000u;
const INFINITY_BITS: u32 = 0x7f800000u;
const SIGN_BIT: u32 = 0x80000000u;

// Kinds, and sets of kinds: 0 is finite.
const IS_NAN: u32 = 1u;
const IS_POSITIVE_INFINITY: u32 = 2u;
const IS_NEGATIVE_INFINITY: u32 = 4u;

fn kind_of(bits: u32) -> u32 {
    let size = bits & ~SIGN_BIT;
    if size < INFINITY_BITS { return 0u; }
    if size > INFINITY_BITS { return IS_NAN; }
    return select(IS_POSITIVE_INFINITY, IS_NEGATIVE_INFINITY, bits != size);
}

// Of a sum of terms whose kinds `kinds` are.
fn kind_of_sum(kinds: u32) -> u32 {
    let has_both = (kinds & 6u) == 6u;
    return select(kinds, IS_NAN, has_both || (kinds & IS_NAN) != 0u);
}

// Of a product.
fn kind_of_product(a: u32, b: u32) -> u32 {
    let kinds = kind_of(a) | kind_of(b);
    if kinds == 0u { return 0u; }
    let is_nan = (kinds & IS_NAN) != 0u || (a & ~SIGN_BIT) == 0u || (b & ~SIGN_BIT) == 0u;
    return select(select(IS_POSITIVE_INFINITY, IS_NEGATIVE_INFINITY, ((a ^ b) & SIGN_BIT) != 0u), IS_NAN, is_nan);
}

// The bits of a number of this kind.
fn bits_of_kind(kind: u32) -> u32 {
    switch kind {
        case IS_POSITIVE_INFINITY: { return INFINITY_BITS; }
        case IS_NEGATIVE_INFINITY: { return INFINITY_BITS | SIGN_BIT; }
        default: { return NAN_BITS; }
    }
}

fn is_finite(bits: u32) -> bool { return (bits & INFINITY_BITS) != INFINITY_BITS; }
fn are_finite(bits: vec4<u32>) -> bool { return all((bits & vec4<u32>(INFINITY_BITS)) != vec4<u32>(INFINITY_BITS)); }

// The number of these bits, 0 where it is not finite.
fn finite(bits: u32) -> f32 { return bitcast<f32>(select(0u, bits, is_finite(bits))); }

// Two 16-bit elements lie in a word, four bytes.
fn half_of(word: u32, at: u32) -> u32 { return (word >> ((at & 1u) * 16u)) & 0xffffu; }
fn byte_of(word: u32, at: u32) -> u32 { return (word >> ((at & 3u) * 8u)) & 0xffu; }

fn f32_bits_of_bf16(half: u32) -> u32 { return half << 16u; }

fn f32_bits_of_f16(half: u32) -> u32 {
    let sign = (half & 0x8000u) << 16u;
    let exponent = (half >> 10u) & 31u;
    let mantissa = half & 1023u;
    // 2^-24 is the least number: below 2^-14 the mantissa counts it.
    let small = bitcast<u32>(f32(mantissa) * 5.9604644775390625e-8);
    let normal = ((exponent + select(112u, 224u, exponent == 31u)) << 23u) | (mantissa << 13u);
    return sign | select(normal, small, exponent == 0u);
}

// To nearest, even at ties.
fn bf16_of_f32_bits(bits: u32) -> u32 {
    if kind_of(bits) == IS_NAN { return (bits >> 16u) | 0x40u; }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn f16_of_f32_bits(bits: u32) -> u32 {
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & ~SIGN_BIT;
    if size > INFINITY_BITS { return sign | 0x7e00u; }
    // From 65520 on infinity is nearer.
    if size >= 0x477ff000u { return sign | 0x7c00u; }
    if size >= 0x38800000u {
        let rebiased = size - 0x38000000u;
        return sign | ((rebiased + 0xfffu + ((rebiased >> 13u) & 1u)) >> 13u);
    }
    // Below half of the least number nothing is left.
    if size < 0x33000000u { return sign; }
    let mantissa = (size & 0x7fffffu) | 0x800000u;
    let shift = 126u - (size >> 23u);
    return sign | ((mantissa + (1u << (shift - 1u)) - 1u + ((mantissa >> shift) & 1u)) >> shift);
}
