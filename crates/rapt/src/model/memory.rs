//! Elements in memory: copies between forms, and the interpreter's tensors from bytes and back.

use rapt_core::DType;
use rapt_graph::{Meta, Precision, Tensor};

use super::cells;
use super::plan::Place;

/// The elements at a place as the interpreter's tensor, row-major.
///
/// # Safety
/// `base` is the address of the place's buffer, and every element of its form is readable.
pub(super) unsafe fn tensor(base: *const u8, place: &Place) -> Tensor {
    let (shape, size) = (place.shape(), place.size());
    let mut bytes = vec![0u8; shape.iter().product::<usize>() * size];
    let from = Strided { ptr: base.wrapping_offset(place.offset_bytes()).cast_mut(), strides: &strides(place) };
    let to = Strided { ptr: bytes.as_mut_ptr(), strides: &row_major(&shape) };
    // SAFETY: promised by the caller; `bytes` has an element for each.
    unsafe { copy(&shape, size, from, to) };
    Tensor::new(Meta::contiguous(place.meta.dtype, &place.meta.shape), cells::of_bytes(place.meta.dtype, &bytes))
}

/// Writes a tensor of the interpreter, whose numbers are of the place's dtype, to a place of its shape.
///
/// # Safety
/// `base` is the address of the place's buffer, and every element of its form is writable.
pub(super) unsafe fn put(tensor: &Tensor, base: *mut u8, place: &Place) {
    let bytes = cells::to_bytes(place.meta.dtype, &tensor.cast(place.meta.dtype, Precision::Rounded));
    let shape = place.shape();
    let from = Strided { ptr: bytes.as_ptr().cast_mut(), strides: &row_major(&shape) };
    let to = Strided { ptr: base.wrapping_offset(place.offset_bytes()), strides: &strides(place) };
    // SAFETY: promised by the caller; `bytes` has an element for each.
    unsafe { copy(&shape, place.size(), from, to) };
}

/// Which scores a mask lets count, in row-major order of its last two dimensions; `None` where an additive mask adds anything
/// but 0 and −∞.
///
/// # Safety
/// As [`tensor`].
pub(super) unsafe fn seen(base: *const u8, mask: &Place) -> Option<Vec<bool>> {
    // SAFETY: promised by the caller.
    let tensor = unsafe { tensor(base, mask) };
    if mask.meta.dtype == DType::Bool {
        return Some(tensor.ints().iter().map(|&x| x != 0).collect());
    }
    let seen = |x: &f64| match *x {
        0.0 => Some(true),
        f64::NEG_INFINITY => Some(false),
        _ => None,
    };
    tensor.floats().iter().map(seen).collect()
}

/// Strides in elements, as given.
pub(super) fn strides(place: &Place) -> Vec<isize> {
    place.meta.strides.iter().map(|&stride| stride as isize).collect()
}

/// The row-major strides of a shape.
pub(super) fn row_major(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1isize; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1).cast_signed();
    }
    strides
}

/// The element with index 0, and strides in elements.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a> {
    /// The address.
    pub(super) ptr: *mut u8,
    /// Of each dimension.
    pub(super) strides: &'a [isize],
}

/// Copies every element of a shape.
///
/// # Safety
/// The elements of `from` are readable and those of `to` writable; where they overlap, they are the same.
pub(super) unsafe fn copy(shape: &[usize], size: usize, from: Strided<'_>, to: Strided<'_>) {
    let Some((&n, rest)) = shape.split_first() else {
        // SAFETY: one element each.
        unsafe { std::ptr::copy(from.ptr, to.ptr, size) };
        return;
    };
    let (step, other) = (from.strides[0] * size.cast_signed(), to.strides[0] * size.cast_signed());
    let whole = |strides: &[isize]| {
        let mut expected = 1;
        shape.iter().zip(strides).rev().all(|(&n, &stride)| {
            let fits = n == 1 || stride == expected;
            expected *= n.cast_signed();
            fits
        })
    };
    // What lies without gaps on both sides is one run.
    if whole(from.strides) && whole(to.strides) {
        // SAFETY: as many elements on both sides, one after another.
        unsafe { std::ptr::copy(from.ptr, to.ptr, shape.iter().product::<usize>() * size) };
        return;
    }
    for i in 0..n.cast_signed() {
        let from = Strided { ptr: from.ptr.wrapping_offset(i * step), strides: &from.strides[1..] };
        let to = Strided { ptr: to.ptr.wrapping_offset(i * other), strides: &to.strides[1..] };
        // SAFETY: a part of what the caller vouches for.
        unsafe { copy(rest, size, from, to) };
    }
}
