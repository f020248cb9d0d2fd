//! Bytes and numbers: from elements to the numbers of the interpreter, and back. Nothing is rounded on the way in; on the way out
//! every number is already one of its dtype.

use half::{bf16, f16};
use rapt_core::{DType, bf16_from_f64, f16_from_f64};
use rapt_graph::Cells;

/// The numbers of a storage.
pub(super) fn of_bytes(dtype: DType, bytes: &[u8]) -> Cells {
    fn read<const N: usize, T>(bytes: &[u8], number: impl Fn([u8; N]) -> T) -> Vec<T> {
        bytes.as_chunks::<N>().0.iter().map(|chunk| number(*chunk)).collect()
    }
    match dtype {
        DType::F64 => Cells::Float(read(bytes, f64::from_le_bytes)),
        DType::F32 => Cells::Float(read(bytes, |x| f64::from(f32::from_le_bytes(x)))),
        DType::F16 => Cells::Float(read(bytes, |x| f16::from_le_bytes(x).to_f64())),
        DType::BF16 => Cells::Float(read(bytes, |x| bf16::from_le_bytes(x).to_f64())),
        DType::I64 => Cells::Int(read(bytes, i64::from_le_bytes)),
        DType::I32 => Cells::Int(read(bytes, |x| i64::from(i32::from_le_bytes(x)))),
        DType::I16 => Cells::Int(read(bytes, |x| i64::from(i16::from_le_bytes(x)))),
        DType::I8 => Cells::Int(read(bytes, |x| i64::from(i8::from_le_bytes(x)))),
        DType::Bool => Cells::Int(read(bytes, |[x]: [u8; 1]| i64::from(x != 0))),
        // Of the dtypes that programs may have only this one is left.
        _ => Cells::Int(read(bytes, |[x]: [u8; 1]| i64::from(x))),
    }
}

/// The bytes of a number of this dtype, which the number is one of.
fn bytes_of_float(dtype: DType, x: f64) -> ([u8; 8], usize) {
    let mut bytes = [0; 8];
    match dtype {
        DType::F64 => bytes = x.to_le_bytes(),
        DType::F32 => bytes[..4].copy_from_slice(&(x as f32).to_le_bytes()),
        DType::F16 => bytes[..2].copy_from_slice(&f16_from_f64(x).to_le_bytes()),
        _ => bytes[..2].copy_from_slice(&bf16_from_f64(x).to_le_bytes()),
    }
    (bytes, dtype.size_bytes())
}

/// The bytes of numbers of this dtype, which each of them is one of.
pub(super) fn to_bytes(dtype: DType, cells: &Cells) -> Vec<u8> {
    match cells {
        Cells::Float(numbers) => numbers
            .iter()
            .flat_map(|&x| {
                let (bytes, size) = bytes_of_float(dtype, x);
                bytes.into_iter().take(size)
            })
            .collect(),
        // Little-endian: the low bytes of a number that fits are the number.
        Cells::Int(numbers) => {
            numbers.iter().flat_map(|x| x.to_le_bytes().into_iter().take(dtype.size_bytes())).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_comes_back_bit_for_bit() {
        for dtype in super::super::SERVED {
            let size = dtype.size_bytes();
            let bytes: Vec<u8> = match dtype {
                DType::Bool => vec![0, 1, 1],
                DType::F64 => [-0.0, f64::INFINITY, 1.0 + f64::EPSILON].iter().flat_map(|x| x.to_le_bytes()).collect(),
                DType::F32 => [-0.0f32, f32::MIN_POSITIVE / 2.0, 1.5].iter().flat_map(|x| x.to_le_bytes()).collect(),
                _ => (0..3 * size).map(|n| (n * 37 + 1) as u8).collect(),
            };
            let cells = of_bytes(dtype, &bytes);
            let back = to_bytes(dtype, &cells);
            assert_eq!(back, bytes, "{dtype}");
        }
    }
}
