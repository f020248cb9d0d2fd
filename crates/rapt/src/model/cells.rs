//! Bytes and numbers: from tensors as they lie to the numbers of the interpreter, and back. Nothing is rounded on the way in;
//! on the way out every number is already one of its dtype.

use half::{bf16, f16};
use rapt_core::{DType, View, ViewMut, bf16_from_f64, f16_from_f64};
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

/// The address of each element in row-major order, in bytes from the first.
fn places(shape: &[usize], strides: &[isize], element_bytes: usize) -> Vec<isize> {
    if shape.contains(&0) {
        return Vec::new();
    }
    let mut places = vec![0isize];
    for (&n, &stride) in shape.iter().zip(strides) {
        let step = stride * element_bytes.cast_signed();
        places = places.iter().flat_map(|&at| (0..n.cast_signed()).map(move |i| at + i * step)).collect();
    }
    places
}

/// The elements of a view in row-major order, as bytes.
pub(super) fn gather(view: &View<'_>) -> Vec<u8> {
    let size = view.dtype().size_bytes();
    let places = places(view.shape(), view.strides(), size);
    let mut bytes = vec![0u8; places.len() * size];
    for (to, at) in bytes.chunks_exact_mut(size).zip(places) {
        // SAFETY: the view's constructor proved that every element of its shape and strides lies in its extent; `to` has the
        // size of one.
        unsafe { std::ptr::copy_nonoverlapping(view.as_ptr().offset(at), to.as_mut_ptr(), size) };
    }
    bytes
}

/// Writes numbers in row-major order to a view of the same shape.
pub(super) fn scatter(cells: &Cells, view: &mut ViewMut<'_>) {
    let (dtype, size) = (view.dtype(), view.dtype().size_bytes());
    let places = places(view.shape(), view.strides(), size);
    let base = view.as_mut_ptr();
    let put = |at: isize, bytes: &[u8]| {
        // SAFETY: as in `gather`; the view is the only way to this memory while it is borrowed.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), base.offset(at), size) };
    };
    match cells {
        Cells::Float(numbers) => {
            for (&x, at) in numbers.iter().zip(places) {
                let (bytes, size) = bytes_of_float(dtype, x);
                put(at, &bytes[..size]);
            }
        }
        // Little-endian: the low bytes of a number that fits are the number.
        Cells::Int(numbers) => {
            for (&x, at) in numbers.iter().zip(places) {
                put(at, &x.to_le_bytes()[..size]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rapt_core::{Shape, Strides};

    #[test]
    fn a_strided_view_is_read_and_written_element_by_element() {
        let data = [1i64, -2, 3, 1 << 40, 5, 6];
        let view = View::strided("x", &data, 0, Shape::from([3, 2]), Strides::from([1, 3])).unwrap();
        let bytes = gather(&view);
        assert_eq!(of_bytes(DType::I64, &bytes), Cells::Int(vec![1, 1 << 40, -2, 5, 3, 6]));
        let mut out = [0i64; 6];
        let mut place = ViewMut::strided("x", &mut out, 0, Shape::from([3, 2]), Strides::from([1, 3])).unwrap();
        scatter(&of_bytes(DType::I64, &bytes), &mut place);
        assert_eq!(out, data);
    }

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
            let back: Vec<u8> = match &cells {
                Cells::Float(x) => x.iter().flat_map(|&x| bytes_of_float(dtype, x).0[..size].to_vec()).collect(),
                Cells::Int(x) => x.iter().flat_map(|x| x.to_le_bytes()[..size].to_vec()).collect(),
            };
            assert_eq!(back, bytes, "{dtype}");
        }
    }
}
