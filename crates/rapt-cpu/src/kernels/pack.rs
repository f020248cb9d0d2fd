//! Rows in and out of the kernels' own order. The storage dtype is seen here, in `pairs` and where decode loads K and V.
//!
//! `Qᵀ` is `[head_dim][queries]`, `Oᵀ` is `[head_dim_v][queries]`; a K or V panel is `[keys][dim]` in the accumulation
//! dtype. Packing a tile is no copy of a tensor: a panel holds one block of keys.

use rapt_core::DType;

use super::simd::{Real, Simd, Storage};
use crate::problem::{Input, Output};

/// `n` elements at `src`, `stride` apart, to consecutive `dst`.
#[inline(always)]
pub(crate) unsafe fn load_row<S: Simd, T: Storage<S>>(src: *const T, stride: isize, n: usize, dst: *mut S::Elem) {
    // SAFETY: the caller vouches for n elements on both sides.
    unsafe {
        let mut d = 0;
        if stride == 1 {
            while d + S::LANES <= n {
                S::store(dst.add(d), T::load(src.add(d)));
                d += S::LANES;
            }
        }
        while d < n {
            *dst.add(d) = (*src.wrapping_offset(d as isize * stride)).widen();
            d += 1;
        }
    }
}

/// `n` elements of any dtype, `stride` apart, to consecutive ones: in vectors where it is `T`.
#[inline(always)]
pub(crate) unsafe fn load_row_of<S: Simd, T: Storage<S>>(
    from: *const u8,
    dtype: DType,
    stride: isize,
    n: usize,
    to: *mut S::Elem,
) {
    // SAFETY: the caller vouches for n elements on both sides.
    unsafe {
        if dtype == T::DTYPE {
            return load_row::<S, T>(from.cast(), stride, n, to);
        }
        let step = stride * dtype.size_bytes() as isize;
        for d in 0..n {
            *to.add(d) = S::Elem::load_as(dtype, from.wrapping_offset(d as isize * step));
        }
    }
}

/// `n` keys from `j0` on of a K or V tensor, to rows of `dim` elements.
#[inline(always)]
pub(crate) unsafe fn pack_panel<S: Simd, T: Storage<S>>(
    input: &Input<4>,
    (batch, head, j0): (usize, usize, usize),
    n: usize,
    dim: usize,
    panel: *mut S::Elem,
) {
    for j in 0..n {
        let row = input.at_key([batch, head, j0 + j, 0]).cast::<T>();
        // SAFETY: keys j0..j0 + n are inside the tensor; the panel has n rows of dim.
        unsafe { load_row::<S, T>(row, input.strides[3], dim, panel.add(j * dim)) };
    }
}

/// Transposes `width` rows of `from` (each `from_stride` long, whole vectors readable) to `[dim][width]`.
#[inline(always)]
pub(crate) unsafe fn transpose_in<S: Simd>(
    from: *const S::Elem,
    from_stride: usize,
    dim: usize,
    to: *mut S::Elem,
    width: usize,
) {
    // SAFETY: both are buffers of the caller, padded to whole vectors.
    unsafe {
        for r in (0..width).step_by(S::LANES) {
            for d in (0..dim).step_by(S::LANES) {
                S::transpose(from.add(r * from_stride + d), from_stride, to.add(d * width + r), width);
            }
        }
    }
}

/// Writes one row of `n` elements of `out`: `factor` times those of `src`, converted.
#[inline(always)]
pub(crate) unsafe fn store_row<S: Simd, T: Storage<S>>(
    src: *const S::Elem,
    factor: S::Elem,
    n: usize,
    out: &Output<4>,
    index: [usize; 4],
) {
    let stride = out.strides[3];
    let ptr = out.at(index);
    // SAFETY: the row lies inside `out`, whose elements are written by this item alone.
    unsafe {
        if out.dtype != T::DTYPE {
            let step = stride * out.size;
            for d in 0..n {
                (*src.add(d) * factor).store_as(out.dtype, ptr.wrapping_offset(d as isize * step));
            }
            return;
        }
        let ptr = ptr.cast::<T>();
        let mut d = 0;
        if stride == 1 {
            let factor = S::splat(factor);
            while d + S::LANES <= n {
                T::store(ptr.add(d), S::mul(S::load(src.add(d)), factor));
                d += S::LANES;
            }
        }
        while d < n {
            *ptr.wrapping_offset(d as isize * stride) = T::narrow(*src.add(d) * factor);
            d += 1;
        }
    }
}
