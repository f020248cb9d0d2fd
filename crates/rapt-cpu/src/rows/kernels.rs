//! The bodies, row by row, in vectors.
//!
//! A row of float32 or float64 is read in place, one of a 16-bit dtype is widened to scratch memory once. A sum has four vectors of
//! partial sums, which are added in a fixed order; the last elements of a row go through a vector that is filled up with what
//! changes nothing.

use std::ops::Range;

use half::{bf16, f16};
use rapt_core::{Arch, DType, float64};

use super::{RowFunction, RowOperands};
use crate::arch::{self, Vectors};
use crate::kernels::simd::{Part, Real, Simd, Storage};
use crate::pointwise::kernels::math;

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
pub(super) fn run(arch: Arch, dtype: DType) -> Option<Run> {
    arch::with_vectors(arch, Find(dtype))
}

unsafe fn run_of<S: Simd<Elem: Exp + Storage<S>>, T: Storage<S>>(work: &Work) {
    let of = std::marker::PhantomData;
    // SAFETY: promised by the caller.
    unsafe {
        match work.function {
            RowFunction::LayerNorm { .. } | RowFunction::RmsNorm { .. } => S::apart(Norm::<T> { work, of }),
            RowFunction::Softmax | RowFunction::LogSoftmax => S::apart(Softmax::<T> { work, of }),
            RowFunction::Sum | RowFunction::Mean | RowFunction::Max => S::apart(Fold::<T> { work, of }),
        }
    }
}

/// Exponentials in loops that become vectors.
trait Exp: Real {
    fn exp_of(self, is_fused: bool) -> Self;
}

impl Exp for f32 {
    #[inline(always)]
    fn exp_of(self, is_fused: bool) -> f32 {
        math::f32::exp_of(self, is_fused)
    }
}

impl Exp for f64 {
    #[inline(always)]
    fn exp_of(self, _: bool) -> f64 {
        float64::exp(self)
    }
}

/// The most lanes that a vector has.
const MOST_LANES: usize = 16;

/// Elements of scratch memory between two arrays in it.
pub(super) const GAP: usize = 16;

/// `n` elements, fewer than a vector has, and `fill` in the lanes beyond.
#[inline(always)]
unsafe fn load_rest<S: Simd, T: Storage<S>>(ptr: *const T, n: usize, fill: S::Elem) -> S::V {
    let mut lanes = [fill; MOST_LANES];
    for (lane, to) in lanes.iter_mut().enumerate().take(n) {
        // SAFETY: the caller vouches for n elements.
        *to = unsafe { ptr.add(lane).read().widen() };
    }
    // SAFETY: the longest vector's lanes.
    unsafe { S::load(lanes.as_ptr()) }
}

/// The first `n` lanes, fewer than a vector has.
#[inline(always)]
unsafe fn store_rest<S: Simd, T: Storage<S>>(ptr: *mut T, n: usize, x: S::V) {
    let mut lanes = std::mem::MaybeUninit::<[T; MOST_LANES]>::uninit();
    // SAFETY: the longest vector's lanes; the caller vouches for n elements.
    unsafe {
        T::store(lanes.as_mut_ptr().cast(), x);
        std::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<T>(), ptr, n);
    }
}

/// A row in the dtype of sums: itself, or widened to scratch memory.
#[inline(always)]
unsafe fn widened<S: Simd, T: Storage<S>>(x: *const T, n: usize, scratch: *mut S::Elem) -> *const S::Elem {
    if matches!(T::DTYPE, DType::F32 | DType::F64) {
        return x.cast();
    }
    let whole = n / S::LANES * S::LANES;
    // SAFETY: the caller vouches for n elements of both.
    unsafe {
        for at in (0..whole).step_by(S::LANES) {
            S::store(scratch.add(at), T::load(x.add(at)));
        }
        for at in whole..n {
            scratch.add(at).write(x.add(at).read().widen());
        }
    }
    scratch
}

/// The sum of a row, or of the squares of what its elements are less `mean`.
#[inline(always)]
unsafe fn sum<S: Simd>(x: *const S::Elem, n: usize, mean: Option<S::Elem>) -> S::Elem
where
    S::Elem: Storage<S>,
{
    // SAFETY: the caller vouches for n elements.
    unsafe {
        let (fill, is_square) = (mean.unwrap_or(S::Elem::ZERO), mean.is_some());
        let center = S::splat(fill);
        let mut sums = [S::splat(S::Elem::ZERO); 4];
        let mut at = 0;
        while at + 4 * S::LANES <= n {
            for (k, sum) in sums.iter_mut().enumerate() {
                let x = S::load(x.add(at + k * S::LANES));
                *sum = if is_square { square::<S>(x, center, *sum) } else { S::add(*sum, x) };
            }
            at += 4 * S::LANES;
        }
        let mut k = 0;
        while at < n {
            let count = S::LANES.min(n - at);
            let x =
                if count == S::LANES { S::load(x.add(at)) } else { load_rest::<S, S::Elem>(x.add(at), count, fill) };
            sums[k] = if is_square { square::<S>(x, center, sums[k]) } else { S::add(sums[k], x) };
            (at, k) = (at + count, (k + 1) % 4);
        }
        S::reduce_add(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}

/// `(x − center)² + sum`.
#[inline(always)]
unsafe fn square<S: Simd>(x: S::V, center: S::V, sum: S::V) -> S::V {
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        let x = S::sub(x, center);
        S::fma(x, x, sum)
    }
}

/// The greatest number of a row, −∞ of none; and NaN where there is one, else 0.
#[inline(always)]
unsafe fn max<S: Simd>(x: *const S::Elem, n: usize) -> (S::Elem, S::Elem)
where
    S::Elem: Storage<S>,
{
    // SAFETY: the caller vouches for n elements.
    unsafe {
        let mut greatest = [S::splat(S::Elem::NEG_INFINITY); 4];
        // 0, or NaN where one was.
        let mut nan = S::splat(S::Elem::ZERO);
        let (mut at, mut k) = (0, 0);
        while at < n {
            let count = S::LANES.min(n - at);
            let x = if count == S::LANES {
                S::load(x.add(at))
            } else {
                load_rest::<S, S::Elem>(x.add(at), count, S::Elem::NEG_INFINITY)
            };
            // The second operand where one is NaN.
            greatest[k] = S::max(x, greatest[k]);
            nan = S::select(S::eq(x, x), nan, x);
            (at, k) = (at + count, (k + 1) % 4);
        }
        let mut lanes = [S::Elem::NEG_INFINITY; MOST_LANES];
        let pairs = [S::max(greatest[0], greatest[1]), S::max(greatest[2], greatest[3])];
        S::store(lanes.as_mut_ptr(), S::max(pairs[0], pairs[1]));
        let one = lanes.iter().fold(S::Elem::NEG_INFINITY, |max, &x| if x > max { x } else { max });
        (one, S::reduce_add(nan))
    }
}

/// The pointers of a row of x, and of its results.
#[inline(always)]
unsafe fn row_of<T>(operands: &RowOperands, row: usize) -> (*const T, *mut T) {
    // SAFETY: the caller vouches for the rows.
    unsafe {
        (
            operands.x.cast::<T>().offset(row as isize * operands.x_stride),
            operands.out.cast::<T>().offset(row as isize * operands.out_stride),
        )
    }
}

struct Fold<'w, T> {
    work: &'w Work,
    of: std::marker::PhantomData<T>,
}

impl<S: Simd<Elem: Storage<S>>, T: Storage<S>> Part<S> for Fold<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let n = self.work.columns;
        for row in self.work.rows.clone() {
            // SAFETY: the caller vouches for the rows and for the scratch memory.
            unsafe {
                let (x, out) = row_of::<T>(&self.work.operands, row);
                let x = widened::<S, T>(x, n, self.work.scratch.cast());
                let y = if self.work.function == RowFunction::Max {
                    let (max, nan) = max::<S>(x, n);
                    if nan.is_nan() { nan } else { max }
                } else {
                    let sum = sum::<S>(x, n, None);
                    if self.work.function == RowFunction::Mean { sum / S::Elem::from_i64(n as i64) } else { sum }
                };
                out.write(T::narrow(y));
            }
        }
    }
}

struct Softmax<'w, T> {
    work: &'w Work,
    of: std::marker::PhantomData<T>,
}

impl<S: Simd<Elem: Storage<S> + Exp>, T: Storage<S>> Part<S> for Softmax<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let n = self.work.columns;
        let scratch = self.work.scratch.cast::<S::Elem>();
        for row in self.work.rows.clone() {
            // SAFETY: the caller vouches for the rows and for the scratch memory: a row widened, a gap, a row of powers.
            unsafe {
                let (x, out) = row_of::<T>(&self.work.operands, row);
                let x = widened::<S, T>(x, n, scratch);
                // NaN passes by the maximum and enters the sum.
                let (max, _) = max::<S>(x, n);
                let powers = scratch.add(n + GAP);
                for i in 0..n {
                    powers.add(i).write((x.add(i).read() - max).exp_of(S::FUSED));
                }
                let total = sum::<S>(powers, n, None);
                let is_log = self.work.function == RowFunction::LogSoftmax;
                let (first, second) = if is_log {
                    (S::splat(max), S::splat(total.ln()))
                } else {
                    (S::splat(S::Elem::ONE / total), S::splat(S::Elem::ZERO))
                };
                let from = if is_log { x } else { powers.cast_const() };
                let mut at = 0;
                while at < n {
                    let count = S::LANES.min(n - at);
                    let whole = count == S::LANES;
                    let y = if whole {
                        S::load(from.add(at))
                    } else {
                        load_rest::<S, S::Elem>(from.add(at), count, S::Elem::ZERO)
                    };
                    let y = if is_log { S::sub(S::sub(y, first), second) } else { S::mul(y, first) };
                    if whole {
                        T::store(out.add(at), y);
                    } else {
                        store_rest::<S, T>(out.add(at), count, y);
                    }
                    at += count;
                }
            }
        }
    }
}

struct Norm<'w, T> {
    work: &'w Work,
    of: std::marker::PhantomData<T>,
}

/// A parameter in the dtype of sums; null where there is none.
#[inline(always)]
unsafe fn parameter<S: Simd<Elem: Storage<S>>, T: Storage<S>>(
    dtype: Option<DType>,
    ptr: *const u8,
    n: usize,
    scratch: *mut S::Elem,
) -> *const S::Elem {
    match dtype {
        // SAFETY: the caller vouches for n elements of both.
        Some(dtype) if dtype == T::DTYPE => unsafe { widened::<S, T>(ptr.cast(), n, scratch) },
        // float32 beside a 16-bit dtype.
        Some(_) => ptr.cast(),
        None => std::ptr::null(),
    }
}

impl<S: Simd<Elem: Storage<S>>, T: Storage<S>> Part<S> for Norm<'_, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Work { columns: n, params, operands, function, .. } = self.work;
        let (n, scratch) = (*n, self.work.scratch.cast::<S::Elem>());
        let (eps, is_rms) = match *function {
            RowFunction::RmsNorm { eps } => (eps, true),
            RowFunction::LayerNorm { eps } => (eps, false),
            _ => return,
        };
        let (eps, count) = (S::Elem::from_f64_clamped(eps), S::Elem::from_i64(n as i64));
        // SAFETY: the caller vouches for the parameters and for the scratch memory: three rows with gaps between them.
        let (weight, bias) = unsafe {
            (
                parameter::<S, T>(params[0], operands.weight, n, scratch.add(n + GAP)),
                parameter::<S, T>(params[1], operands.bias, n, scratch.add(2 * (n + GAP))),
            )
        };
        for row in self.work.rows.clone() {
            // SAFETY: the caller vouches for the rows.
            unsafe {
                let (x, out) = row_of::<T>(operands, row);
                let x = widened::<S, T>(x, n, scratch);
                let mean = if is_rms { S::Elem::ZERO } else { sum::<S>(x, n, None) / count };
                let rstd = S::Elem::ONE / (sum::<S>(x, n, Some(mean)) / count + eps).sqrt();
                let (center, factor) = (S::splat(mean), S::splat(rstd));
                let mut at = 0;
                while at + S::LANES <= n {
                    let mut y = S::mul(S::sub(S::load(x.add(at)), center), factor);
                    if !weight.is_null() {
                        let plus = if bias.is_null() { S::splat(S::Elem::ZERO) } else { S::load(bias.add(at)) };
                        y = S::fma(y, S::load(weight.add(at)), plus);
                    } else if !bias.is_null() {
                        y = S::add(y, S::load(bias.add(at)));
                    }
                    T::store(out.add(at), y);
                    at += S::LANES;
                }
                if at < n {
                    let (rest, zero) = (n - at, S::Elem::ZERO);
                    let mut y = S::mul(S::sub(load_rest::<S, S::Elem>(x.add(at), rest, zero), center), factor);
                    let mut plus = S::splat(zero);
                    if !bias.is_null() {
                        plus = load_rest::<S, S::Elem>(bias.add(at), rest, zero);
                    }
                    if !weight.is_null() {
                        y = S::fma(y, load_rest::<S, S::Elem>(weight.add(at), rest, zero), plus);
                    } else if !bias.is_null() {
                        y = S::add(y, plus);
                    }
                    store_rest::<S, T>(out.add(at), rest, y);
                }
                if !operands.mean.is_null() {
                    operands.mean.cast::<T>().add(row).write(T::narrow(mean));
                }
                if !operands.rstd.is_null() {
                    operands.rstd.cast::<T>().add(row).write(T::narrow(rstd));
                }
            }
        }
    }
}
