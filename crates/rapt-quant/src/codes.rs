//! The number formats, code by code: decoding is exact, encoding rounds once, to nearest even, and saturates.
//!
//! ```text
//! e4m3fn  s eeee mmm   bias 7    largest 448      no infinity; NaN is s1111111     OCP OFP8, revision 1.0
//! e5m2    s eeeee mm   bias 15   largest 57344    infinities and NaN as IEEE 754    OCP OFP8, revision 1.0
//! e2m1    s ee m       bias 1    largest 6        neither                           OCP Microscaling (MX), version 1.0
//! e8m0      eeeeeeee   bias 127  2^-127 to 2^127  no zero, no sign; NaN is 255      OCP Microscaling (MX), version 1.0
//! int8    two's complement, −127 to 127;  int4 the same, −7 to 7
//! ```
//!
//! Finite numbers beyond the largest become the largest. ±inf is itself in e5m2, NaN in e4m3fn, which has no other word for
//! it; integers and e2m1 have none for either, and their encoders are not to be asked.

pub use rapt_core::codes::{E2M1_VALUES, E4M3FN_VALUES, E5M2_VALUES, from_e8m0, from_int4};

/// A float of at most 8 bits with a sign, subnormals, and the given bits of mantissa.
#[derive(Clone, Copy, Debug)]
struct Minifloat {
    mantissa_bits: u32,
    bias: i32,
    /// The code of the largest finite number.
    largest: u8,
    sign: u8,
}

const E4M3FN: Minifloat = Minifloat { mantissa_bits: 3, bias: 7, largest: 0x7e, sign: 0x80 };
const E5M2: Minifloat = Minifloat { mantissa_bits: 2, bias: 15, largest: 0x7b, sign: 0x80 };
const E2M1: Minifloat = Minifloat { mantissa_bits: 1, bias: 1, largest: 0x7, sign: 0x8 };

/// 1.5 · 2^52: adding it leaves no bits behind the point, rounded to nearest even, for numbers up to 2^51.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// 2^`n` for the exponents of normal numbers.
const fn exp2(n: i32) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// The integer nearest to `x`, ties to even. `x` is at most 2^51 in size.
#[inline]
pub(crate) fn nearest(x: f64) -> f64 {
    (x + ROUND) - ROUND
}

impl Minifloat {
    /// The code of a finite number, rounded to nearest even and saturated.
    #[inline]
    fn encode(self, x: f64) -> u8 {
        let size = x.abs();
        let sign = if x.is_sign_negative() { self.sign } else { 0 };
        let least_normal = exp2(1 - self.bias);
        let code = if size < least_normal {
            // Steps of the subnormals; one that rounds up to the least normal number carries into the exponent.
            nearest(size * exp2(self.mantissa_bits as i32 - 1 + self.bias)) as u64
        } else {
            let dropped = 52 - self.mantissa_bits;
            let bits = size.to_bits();
            let half_less_one = (1 << (dropped - 1)) - 1;
            let rounded = (bits + half_less_one + (bits >> dropped & 1)) >> dropped;
            rounded - (((1023 - self.bias) as u64) << self.mantissa_bits)
        };
        sign | code.min(u64::from(self.largest)) as u8
    }
}

/// The e4m3fn code of `x`: finite numbers saturate at ±448, NaN and ±inf are NaN (0x7f or 0xff, by their sign).
#[inline]
#[must_use]
pub fn to_e4m3fn(x: f64) -> u8 {
    if x.is_finite() { E4M3FN.encode(x) } else { 0x7f | if x.is_sign_negative() { 0x80 } else { 0 } }
}

/// The e5m2 code of `x`: finite numbers saturate at ±57344, ±inf is itself, NaN is 0x7e or 0xfe, by its sign.
#[inline]
#[must_use]
pub fn to_e5m2(x: f64) -> u8 {
    if x.is_finite() {
        return E5M2.encode(x);
    }
    let size = if x.is_nan() { 0x7e } else { 0x7c };
    size | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// The e2m1 code (4 bits) of a finite `x`, saturated at ±6.
#[inline]
#[must_use]
pub fn to_e2m1(x: f64) -> u8 {
    E2M1.encode(x)
}

/// The int8 code of a finite `x`, saturated at ±127, as a byte.
#[inline]
#[must_use]
pub fn to_int8(x: f64) -> u8 {
    (nearest(x.clamp(-127.0, 127.0)) as i8).cast_unsigned()
}

/// The int4 code (4 bits) of a finite `x`, saturated at ±7.
#[inline]
#[must_use]
pub fn to_int4(x: f64) -> u8 {
    (nearest(x.clamp(-7.0, 7.0)) as i8).cast_unsigned() & 0xf
}

/// The uint8 code of a finite `x` with this zero point, saturated at 0 and 255.
#[inline]
#[must_use]
pub fn to_uint8(x: f64, zero_point: u8) -> u8 {
    // Rounded before the zero point is added, so that ties do not depend on it.
    (nearest(x.clamp(-512.0, 512.0)) + f64::from(zero_point)).clamp(0.0, 255.0) as u8
}

/// The largest power of two that is at most `x`, as its exponent. `x` is finite and greater than 0.
pub(crate) fn floor_log2(x: f64) -> i32 {
    let exponent = (x.to_bits() >> 52 & 0x7ff) as i32;
    if exponent == 0 {
        // A subnormal number of f64.
        return floor_log2(x * exp2(64)) - 64;
    }
    exponent - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, by search: the nearest of all finite values, at a tie the one with the even code.
    fn nearest_code(x: f64, values: &[f32], sign: u8) -> u8 {
        let finite = values[..usize::from(sign)].iter().enumerate().filter(|(_, value)| value.is_finite());
        let distance = |value: f32| (f64::from(value) - x.abs()).abs();
        let best = finite.min_by(|a, b| {
            let order = distance(*a.1).total_cmp(&distance(*b.1));
            order.then((a.0 & 1).cmp(&(b.0 & 1)))
        });
        best.map_or(0, |(code, _)| code as u8) | if x.is_sign_negative() { sign } else { 0 }
    }

    /// Every value, every midpoint of two, and what lies a little beside each.
    fn probes(values: &[f32]) -> Vec<f64> {
        let mut sorted: Vec<f64> = values.iter().filter(|value| value.is_finite()).map(|&v| f64::from(v)).collect();
        sorted.sort_by(f64::total_cmp);
        let mut probes = vec![0.0, -0.0, 1e6, -1e6, 5e-324, -5e-324];
        for pair in sorted.windows(2) {
            for x in [pair[0], (pair[0] + pair[1]) / 2.0, pair[1]] {
                probes.extend([x, x * (1.0 + 2f64.powi(-50)), x * (1.0 - 2f64.powi(-50))]);
            }
        }
        probes
    }

    #[test]
    fn encoding_is_the_nearest_value_and_even_at_ties() {
        for x in probes(&E4M3FN_VALUES) {
            assert_eq!(to_e4m3fn(x), nearest_code(x, &E4M3FN_VALUES, 0x80), "e4m3fn of {x:e}");
        }
        for x in probes(&E5M2_VALUES) {
            assert_eq!(to_e5m2(x), nearest_code(x, &E5M2_VALUES, 0x80), "e5m2 of {x:e}");
        }
        assert_eq!((to_e4m3fn(1e300), to_e5m2(-1e300), to_e2m1(f64::MAX)), (0x7e, 0xfb, 7));
        for x in probes(&E2M1_VALUES) {
            assert_eq!(to_e2m1(x), nearest_code(x, &E2M1_VALUES, 0x8), "e2m1 of {x:e}");
        }
    }

    #[test]
    fn every_code_decodes_to_a_number_that_encodes_to_it() {
        for code in 0..=255u8 {
            let (e4m3fn, e5m2) = (E4M3FN_VALUES[usize::from(code)], E5M2_VALUES[usize::from(code)]);
            assert_eq!(e4m3fn.is_nan(), code & 0x7f == 0x7f);
            assert_eq!(e5m2.is_nan(), code & 0x7f > 0x7c);
            if !e4m3fn.is_nan() {
                assert_eq!(to_e4m3fn(f64::from(e4m3fn)), code);
            }
            if !e5m2.is_nan() {
                assert_eq!(to_e5m2(f64::from(e5m2)), code);
            }
            if code < 255 {
                assert_eq!(from_e8m0(code).log2(), f64::from(code) - 127.0);
            }
        }
        assert_eq!(E4M3FN_VALUES[0x7e], 448.0);
        assert_eq!(E5M2_VALUES[0x7b], 57344.0);
        assert_eq!(E2M1_VALUES[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert!(E2M1_VALUES[8] == 0.0 && E2M1_VALUES[8].is_sign_negative());
        assert!(from_e8m0(255).is_nan());
        assert_eq!(
            (0..16).map(from_int4).collect::<Vec<_>>(),
            [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]
        );
    }

    #[test]
    fn integers_round_to_even_and_saturate() {
        for (x, code) in [(0.5, 0), (1.5, 2), (-0.5, 0), (-1.5, -2), (126.5, 126), (127.5, 127), (-1e9, -127)] {
            assert_eq!(to_int8(x).cast_signed(), code, "{x}");
        }
        for (x, code) in [(0.5, 0), (-2.5, -2), (6.5, 6), (7.5, 7), (-1e9, -7)] {
            assert_eq!(from_int4(to_int4(x)), code, "{x}");
        }
        for (x, zero_point, code) in [(0.5, 3, 3), (1.5, 3, 5), (-9.0, 3, 0), (1e300, 3, 255), (-0.5, 0, 0)] {
            assert_eq!(to_uint8(x, zero_point), code, "{x}");
        }
    }

    #[test]
    fn what_is_not_finite_is_what_the_format_says() {
        assert_eq!([f64::NAN, f64::INFINITY].map(to_e4m3fn), [0x7f, 0x7f]);
        assert_eq!([-f64::NAN, f64::NEG_INFINITY].map(to_e4m3fn), [0xff, 0xff]);
        assert_eq!([f64::NAN, f64::INFINITY, f64::NEG_INFINITY].map(to_e5m2), [0x7e, 0x7c, 0xfc]);
    }

    #[test]
    fn floor_of_the_logarithm() {
        for (x, log) in [(1.0, 0), (1.999, 0), (2.0, 1), (0.75, -1), (5e-324, -1074), (f64::MAX, 1023)] {
            assert_eq!(floor_log2(x), log, "{x:e}");
        }
    }
}
