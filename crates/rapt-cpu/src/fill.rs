//! One number in every element of a tensor: what rows get that belong to no sequence.

use rapt_core::{Device, Error, Result, ViewMut};

use crate::kernels::simd::Real;

/// Writes `number` into every element of `out`, a tensor of a computed dtype in host memory.
///
/// # Errors
/// [`Error::UnsupportedDtype`], [`Error::DeviceMismatch`].
pub fn fill(tensor: &'static str, mut out: ViewMut<'_>, number: f64) -> Result<()> {
    let (dtype, got) = (out.dtype(), out.device());
    if got != Device::Cpu {
        return Err(Error::DeviceMismatch { tensor, expected: Device::Cpu, got });
    }
    if !dtype.is_computed() {
        return Err(Error::UnsupportedDtype { tensor, got: dtype, allowed: rapt_core::COMPUTED.to_vec() });
    }
    let (shape, strides, ptr) = (*out.shape(), *out.strides(), out.as_mut_ptr());
    if shape.contains(&0) {
        return Ok(());
    }
    let mut index = vec![0usize; shape.len()];
    loop {
        let offset = index.iter().zip(strides.iter()).fold(0isize, |sum, (&i, stride)| sum + i as isize * stride);
        // SAFETY: an element of the tensor, whose reach was checked when the view was made; f64 narrows to its dtype.
        unsafe { number.store_as(dtype, ptr.wrapping_offset(offset * dtype.size_bytes() as isize)) };
        let Some(dim) = (0..index.len()).rev().find(|&dim| index[dim] + 1 < shape[dim]) else { return Ok(()) };
        index[dim] += 1;
        index[dim + 1..].fill(0);
    }
}
