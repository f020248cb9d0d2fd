//! The numbers that codes of at most 8 bits stand for: exact, each in one table or one expression.
//!
//! ```text
//! e4m3fn  s eeee mmm   bias 7    largest 448      no infinity; NaN is s1111111     OCP OFP8, revision 1.0
//! e5m2    s eeeee mm   bias 15   largest 57344    infinities and NaN as IEEE 754    OCP OFP8, revision 1.0
//! e2m1    s ee m       bias 1    largest 6        neither                           OCP Microscaling (MX), version 1.0
//! e8m0      eeeeeeee   bias 127  2^-127 to 2^127  no zero, no sign; NaN is 255      OCP Microscaling (MX), version 1.0
//! int4    two's complement in 4 bits
//! ```
//! Deliberately absent: the way back, which rounds; `rapt-quant` has it.

/// 2^`n` for the exponents of normal numbers.
const fn exp2(n: i32) -> f64 {
    f64::from_bits(((n + 1023) as u64) << 52)
}

/// The number of a finite code of a float with a sign, subnormals, and this many bits of mantissa below its exponent.
const fn minifloat(code: u8, mantissa_bits: u32, bias: i32, sign: u8) -> f32 {
    let size = (code & (sign - 1)) as u64;
    let exponent = (size >> mantissa_bits) as i32;
    let mantissa = size & ((1 << mantissa_bits) - 1);
    let steps = if exponent == 0 { mantissa } else { mantissa | 1 << mantissa_bits };
    let least = if exponent == 0 { 1 } else { exponent } - bias - mantissa_bits as i32;
    // At most 4 bits times a power of two that f32 has as a normal number: exact.
    let value = steps as f32 * exp2(least) as f32;
    if code & sign != 0 { -value } else { value }
}

/// The number of each e4m3fn code.
pub static E4M3FN_VALUES: [f32; 256] = {
    let mut values = [f32::NAN; 256];
    let mut code = 0;
    while code < 256 {
        if code & 0x7f != 0x7f {
            values[code] = minifloat(code as u8, 3, 7, 0x80);
        }
        code += 1;
    }
    values
};

/// The number of each e5m2 code.
pub static E5M2_VALUES: [f32; 256] = {
    let mut values = [f32::NAN; 256];
    let mut code = 0;
    while code < 256 {
        if code & 0x7f == 0x7c {
            values[code] = if code & 0x80 != 0 { f32::NEG_INFINITY } else { f32::INFINITY };
        } else if code & 0x7f < 0x7c {
            values[code] = minifloat(code as u8, 2, 15, 0x80);
        }
        code += 1;
    }
    values
};

/// The number of each e2m1 code.
pub static E2M1_VALUES: [f32; 16] = {
    let mut values = [0.0; 16];
    let mut code = 0;
    while code < 16 {
        values[code] = minifloat(code as u8, 1, 1, 0x8);
        code += 1;
    }
    values
};

/// The number of an int4 code: two's complement of its lower 4 bits.
#[inline]
#[must_use]
pub const fn from_int4(code: u8) -> i8 {
    (code << 4).cast_signed() >> 4
}

/// The power of two of an e8m0 code; NaN for 255.
#[inline]
#[must_use]
pub fn from_e8m0(code: u8) -> f64 {
    if code == 255 { f64::NAN } else { exp2(i32::from(code) - 127) }
}
