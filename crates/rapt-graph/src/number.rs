//! Numbers of each dtype, held as f64 or i64, and what becomes of one that changes its dtype.
//!
//! Floats round to nearest, ties to even. Integers wrap around. Floats that an integer dtype does not hold become what
//! PyTorch gives on x86: the least number of int64 and int32 (the "integer indefinite" of `cvttsd2si`), and of the
//! narrower ones the low bits of that number. C++ leaves them undefined; other machines give others.

use rapt_core::{DType, bf16_from_f64, f16_from_f64};

/// Whether a dtype's numbers are floats.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// `x` rounded once to a float dtype.
pub(crate) fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16_from_f64(x).to_f64(),
        DType::BF16 => bf16_from_f64(x).to_f64(),
        _ => x,
    }
}

/// `x` in an integer dtype: wrapped around, or for booleans whether it is other than 0.
pub(crate) fn wrap(dtype: DType, x: i64) -> i64 {
    match dtype {
        DType::Bool => i64::from(x != 0),
        DType::U8 => i64::from(x as u8),
        DType::I8 => i64::from(x as i8),
        DType::I16 => i64::from(x as i16),
        DType::I32 => i64::from(x as i32),
        _ => x,
    }
}

/// An integer in a float dtype: rounded once to f64 and f32, and by way of f32 to the narrower ones, as PyTorch does.
pub(crate) fn int_to_float(dtype: DType, x: i64) -> f64 {
    match dtype {
        DType::F64 => x as f64,
        DType::F32 => f64::from(x as f32),
        _ => round(dtype, f64::from(x as f32)),
    }
}

/// A float in an integer dtype: truncated; outside the dtype see the head of this file.
pub(crate) fn float_to_int(dtype: DType, x: f64) -> i64 {
    let within = |bound: f64, least: i64| {
        let x = x.trunc();
        if x >= -bound && x < bound { x as i64 } else { least }
    };
    match dtype {
        DType::Bool => i64::from(x != 0.0),
        // PyTorch converts to uint8 by way of int64, to the other narrow ones by way of int32.
        DType::I64 | DType::U8 => wrap(dtype, within(9_223_372_036_854_775_808.0, i64::MIN)),
        _ => wrap(dtype, within(2_147_483_648.0, i64::from(i32::MIN))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What torch 2.15 gives on x86 for contiguous, strided and 0-dim tensors alike.
    #[test]
    fn floats_out_of_range_become_what_torch_gives_on_x86() {
        let cases = [
            (DType::I64, 1e19, i64::MIN),
            (DType::I64, f64::NAN, i64::MIN),
            (DType::I64, -1e19, i64::MIN),
            (DType::I32, 2f64.powi(40), i64::from(i32::MIN)),
            (DType::I32, 3e9, i64::from(i32::MIN)),
            (DType::I32, -300.7, -300),
            (DType::I16, 40000.0, -25536),
            (DType::I16, 3e9, 0),
            (DType::I8, 300.7, 44),
            (DType::U8, -1.0, 255),
            (DType::U8, -2_147_483_649.5, 255),
            (DType::U8, f64::INFINITY, 0),
            (DType::Bool, f64::NAN, 1),
            (DType::Bool, -0.0, 0),
        ];
        for (dtype, x, expected) in cases {
            assert_eq!(float_to_int(dtype, x), expected, "{x} to {dtype}");
        }
    }

    #[test]
    fn integers_wrap_and_round_as_torch_does() {
        assert_eq!(wrap(DType::I32, 1 << 40), 0);
        assert_eq!(wrap(DType::U8, -1), 255);
        assert_eq!(wrap(DType::Bool, -4), 1);
        assert_eq!(int_to_float(DType::F32, (1 << 24) + 1), 16_777_216.0);
        assert_eq!(int_to_float(DType::F16, 65520), f64::INFINITY);
        assert_eq!(int_to_float(DType::F16, 4099), 4100.0);
        assert_eq!(int_to_float(DType::BF16, 65793), 66048.0);
    }
}
