//! One element to f64 and back, by dtype. To f64 is exact; from f64 rounds once, to nearest, ties to even.

use half::{bf16, f16};
use rapt_core::{DType, bf16_from_f64, f16_from_f64};

/// Writes `value` as the bytes of `dtype`, in memory order.
///
/// # Panics
/// If `dtype` is neither computed by attention nor bool, or `bytes` is not one element long.
pub fn encode(dtype: DType, value: f64, bytes: &mut [u8]) {
    match dtype {
        DType::F64 => bytes.copy_from_slice(&value.to_ne_bytes()),
        DType::F32 => bytes.copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F16 => bytes.copy_from_slice(&f16_from_f64(value).to_ne_bytes()),
        DType::BF16 => bytes.copy_from_slice(&bf16_from_f64(value).to_ne_bytes()),
        DType::Bool => bytes.copy_from_slice(&[u8::from(value != 0.0)]),
        dtype if is_byte(dtype) => bytes.copy_from_slice(&[value as u8]),
        other => panic!("{other} has no element here"),
    }
}

/// Whether elements are taken as they lie: bytes of codes and of scales of 8 bits.
fn is_byte(dtype: DType) -> bool {
    matches!(dtype, DType::U8 | DType::I8 | DType::F8E4M3FN | DType::F8E5M2 | DType::F8E8M0FNU)
}

/// The number in `bytes`; a bool is 0 or 1.
///
/// # Panics
/// As [`encode`], or if `bytes` is not one element long.
#[must_use]
pub fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    let two = || bytes.try_into().expect("two bytes");
    match dtype {
        DType::F64 => f64::from_ne_bytes(bytes.try_into().expect("eight bytes")),
        DType::F32 => f64::from(f32::from_ne_bytes(bytes.try_into().expect("four bytes"))),
        DType::F16 => f16::from_ne_bytes(two()).to_f64(),
        DType::BF16 => bf16::from_ne_bytes(two()).to_f64(),
        DType::Bool => f64::from(u8::from(bytes[0] != 0)),
        dtype if is_byte(dtype) => f64::from(bytes[0]),
        other => panic!("{other} has no element here"),
    }
}

/// The number of `dtype` nearest to `value`.
///
/// # Panics
/// If `dtype` is neither computed by attention nor bool.
#[must_use]
pub fn round(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F64 => value,
        DType::F32 => f64::from(value as f32),
        DType::F16 => f16_from_f64(value).to_f64(),
        DType::BF16 => bf16_from_f64(value).to_f64(),
        DType::Bool => f64::from(u8::from(value != 0.0)),
        other => panic!("{other} has no element here"),
    }
}

/// The lowest finite number of a float dtype.
#[must_use]
pub fn lowest(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(f32::MIN),
        DType::F16 => f16::MIN.to_f64(),
        DType::BF16 => bf16::MIN.to_f64(),
        _ => f64::MIN,
    }
}
