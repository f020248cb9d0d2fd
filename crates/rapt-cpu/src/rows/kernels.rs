//! The bodies: a row is widened to scratch memory, and plain loops over it become vectors.

use std::ops::Range;

use half::{bf16, f16};
use rapt_core::{Arch, DType};

use super::{RowFunction, RowOperands};
use crate::arch::{self, Vectors};
use crate::kernels::simd::{Part, Real, Simd, Storage};

/// What an item is asked for.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) function: RowFunction,
    pub(super) columns: usize,
    pub(super) params: [Option<DType>; 2],
    pub(super) rows: Range<usize>,
    pub(super) operands: RowOperands,
    pub(super) scratch: *mut u8,
}

/// An entry point.
pub(super) type Run = unsafe fn(&Work);

struct Find(DType);

impl Vectors for Find {
    type Output = Option<Run>;
    fn visit<F: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Option<Run> {
        Some(match self.0 {
            DType::F32 => run_of::<F, f32>,
            DType::F16 => run_of::<F, f16>,
            DType::BF16 => run_of::<F, bf16>,
            DType::F64 => run_of::<D, f64>,
            _ => return None,
        })
    }
}

/// The entry point for a dtype.
pub(super) fn run(arch: Arch, _function: RowFunction, dtype: DType) -> Option<Run> {
    arch::with_vectors(arch, Find(dtype))
}

unsafe fn run_of<S: Simd, T: Storage<S>>(work: &Work) {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Rows::<T> { work, of: std::marker::PhantomData }) };
}

struct Rows<'w, T> {
    work: &'w Work,
    of: std::marker::PhantomData<T>,
}

impl<S: Simd, T: Storage<S>> Part<S> for Rows<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Work { columns, operands, .. } = self.work;
        for row in self.work.rows.clone() {
            // SAFETY: the caller vouches for the rows and for the scratch memory.
            unsafe {
                let x = operands.x.cast::<T>().offset(row as isize * operands.x_stride);
                let wide = std::slice::from_raw_parts_mut(self.work.scratch.cast::<S::Elem>(), *columns);
                for (i, wide) in wide.iter_mut().enumerate() {
                    *wide = x.add(i).read().widen();
                }
                let out = operands.out.cast::<T>().offset(row as isize * operands.out_stride);
                row_of::<S, T>(self.work, row, wide, out);
            }
        }
    }
}

/// The element of a parameter.
#[inline(always)]
unsafe fn param<S: Simd>(dtype: Option<DType>, ptr: *const u8, i: usize, missing: S::Elem) -> S::Elem {
    match dtype {
        // SAFETY: the caller vouches for the parameter's elements.
        Some(dtype) => unsafe { S::Elem::load_as(dtype, ptr.add(i * dtype.bits() / 8)) },
        None => missing,
    }
}

#[inline(always)]
unsafe fn row_of<S: Simd, T: Storage<S>>(work: &Work, row: usize, x: &mut [S::Elem], out: *mut T) {
    let n = S::Elem::from_i64(x.len() as i64);
    let sum = |x: &[S::Elem]| x.iter().fold(S::Elem::ZERO, |sum, &x| sum + x);
    let max =
        |x: &[S::Elem]| x.iter().fold(S::Elem::NEG_INFINITY, |max, &x| if x.is_nan() || x > max { x } else { max });
    // SAFETY: the caller vouches for the row of results.
    unsafe {
        match work.function {
            RowFunction::Sum => out.write(T::narrow(sum(x))),
            RowFunction::Mean => out.write(T::narrow(sum(x) / n)),
            RowFunction::Max => out.write(T::narrow(max(x))),
            RowFunction::Softmax | RowFunction::LogSoftmax => {
                let max = x.iter().fold(S::Elem::NEG_INFINITY, |max, &x| if x > max { x } else { max });
                let total = x.iter().fold(S::Elem::ZERO, |sum, &x| sum + (x - max).exp());
                for (i, &x) in x.iter().enumerate() {
                    let log = work.function == RowFunction::LogSoftmax;
                    let y = if log { x - max - total.ln() } else { (x - max).exp() / total };
                    out.add(i).write(T::narrow(y));
                }
            }
            RowFunction::LayerNorm { eps } | RowFunction::RmsNorm { eps } => {
                let rms = matches!(work.function, RowFunction::RmsNorm { .. });
                let mean = if rms { S::Elem::ZERO } else { sum(x) / n };
                for x in x.iter_mut() {
                    *x = *x - mean;
                }
                let var = x.iter().fold(S::Elem::ZERO, |sum, &x| sum + x * x) / n;
                let rstd = S::Elem::ONE / (var + S::Elem::from_f64_clamped(eps)).sqrt();
                let RowOperands { weight, bias, .. } = work.operands;
                for (i, &x) in x.iter().enumerate() {
                    let factor = param::<S>(work.params[0], weight, i, S::Elem::ONE);
                    let plus = param::<S>(work.params[1], bias, i, S::Elem::ZERO);
                    out.add(i).write(T::narrow(x * rstd * factor + plus));
                }
                if !work.operands.mean.is_null() {
                    work.operands.mean.cast::<T>().add(row).write(T::narrow(mean));
                }
                if !work.operands.rstd.is_null() {
                    work.operands.rstd.cast::<T>().add(row).write(T::narrow(rstd));
                }
            }
        }
    }
}
