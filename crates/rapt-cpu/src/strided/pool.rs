//! Windows over images: the maximum or the mean of each.
//!
//! ```text
//! for each row of results, for 32 of its columns (or of its channels, where these lie closest):
//!     for each row of the window, for each of its columns:          those outside the image are left out
//!         acc[k] = max(acc[k], x[..])                               or a sum in float64
//! ```
//! Maxima keep the first of equal numbers and the last NaN, as PyTorch's kernel does; means are rounded once, those of integers
//! cut.

use rapt_core::{Arch, DType};

use super::element::{Call, Element, Entry, Num, Sum, Typed, entry};
use super::windows::{Over, Reach, Steps};
use super::{Form, Kernel, TILE, dims_of};

/// What becomes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolFunction {
    /// The maximum.
    Max,
    /// The sum over the number of elements.
    Mean {
        /// Whether the padding counts in that number.
        with_padding: bool,
        /// The number instead.
        divisor: Option<i64>,
    },
}

/// Pooling for operands of given forms: x, the results, and the places of maxima in their planes (int64), where they are wanted.
#[derive(Clone, Debug)]
pub struct Pool {
    function: PoolFunction,
    over: Over<3>,
    has_places: bool,
    run: Entry<Pool>,
}

impl Pool {
    /// Pooling of `x`, whose last two dimensions are rows and columns of an image. `None` for dtypes that are not served.
    #[must_use]
    pub fn new(
        arch: Arch,
        function: PoolFunction,
        steps: [Steps; 2],
        x: &Form,
        out: &Form,
        places: Option<&Form>,
    ) -> Option<Pool> {
        let rank = x.shape.len();
        if rank < 2 || x.dtype != out.dtype || x.dtype == DType::Bool {
            return None;
        }
        let none = vec![0; rank];
        let places_strides = places.map_or(&none, |places| &places.strides);
        let dims = dims_of(&out.shape, [&x.strides, &out.strides, places_strides]);
        let is_last = rank > 2 && x.strides[rank - 3] == 1 && x.strides[rank - 1] != 1 && x.shape[rank - 3] > 1;
        let over = Over::new(steps, dims, is_last)?;
        let run = match function {
            PoolFunction::Max => entry::<Maxima>(arch, x.dtype)?,
            PoolFunction::Mean { .. } => entry::<Means>(arch, x.dtype)?,
        };
        Some(Pool { function, over, has_places: places.is_some(), run })
    }
}

impl Kernel for Pool {
    fn name(&self) -> &'static str {
        match self.function {
            PoolFunction::Max => "max of windows",
            PoolFunction::Mean { .. } => "mean of windows",
        }
    }

    fn units(&self) -> usize {
        self.over.units()
    }

    fn unit_work(&self) -> usize {
        self.over.unit_work()
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        // SAFETY: promised by the caller; the instruction set is that of `new`.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

struct Maxima;

impl Typed for Maxima {
    type Kernel = Pool;
    #[inline(always)]
    unsafe fn run<T: Element>(pool: &Pool, call: &Call<'_>) {
        let over = &pool.over;
        let (x, out) = (call.pointers[0].cast_const().cast::<T>(), call.pointers[1].cast::<T>());
        let places = call.pointers.last().copied().unwrap_or(std::ptr::null_mut()).cast::<i64>();
        over.each_tile(call, |tile, [from, to, to_place]| {
            let mut max = [T::Num::LEAST; TILE];
            // Where the maximum lies in its plane; before any is met, none.
            let mut found = [i64::MIN; TILE];
            over.each_tap(tile, |_, Reach { skipped, count, at, step, plane }| {
                // SAFETY: the caller vouches for the image, and `reach` stays inside it.
                unsafe {
                    let x = x.offset(from + at);
                    let max = &mut max[skipped..skipped + count];
                    if pool.has_places {
                        let (found, apart) = (&mut found[skipped..skipped + count], over.plane_step());
                        take_places(max, found, x, step, [plane, apart]);
                    } else if step == 1 {
                        take(max, x, |k| k);
                    } else if step == 2 {
                        take(max, x, |k| 2 * k);
                    } else {
                        take(max, x, |k| (k.cast_signed() * step).cast_unsigned());
                    }
                }
            });
            for k in 0..tile.width {
                let is_met = (0..over.steps[0].kernel).any(|i| over.steps[0].at(tile.row, i).is_some())
                    && (0..over.steps[1].kernel).any(|j| over.steps[1].at(over.column(tile, k), j).is_some());
                // SAFETY: the caller vouches for the results, and for the first element of every plane.
                unsafe {
                    let own = over.channels.map_or(0, |c| (tile.first + k).cast_signed() * c.strides[0]);
                    let value = if is_met { T::of_num(max[k]) } else { x.offset(from + own).read() };
                    out.offset(to + over.result(tile, k, 1)).write(value);
                    if pool.has_places {
                        places.offset(to_place + over.result(tile, k, 2)).write(found[k].max(0));
                    }
                }
            }
        });
    }
}

/// The greater of two, or the later NaN.
#[inline(always)]
unsafe fn take<T: Element>(max: &mut [T::Num], x: *const T, place: impl Fn(usize) -> usize) {
    for (k, max) in max.iter_mut().enumerate() {
        // SAFETY: promised by the caller.
        let x = unsafe { x.offset(place(k).cast_signed()).read() }.num();
        *max = if (x > *max) | x.is_nan() { x } else { *max };
    }
}

/// As [`take`], with the places.
#[inline(always)]
unsafe fn take_places<T: Element>(
    max: &mut [T::Num],
    found: &mut [i64],
    x: *const T,
    step: isize,
    [plane, apart]: [usize; 2],
) {
    for (k, (max, found)) in max.iter_mut().zip(found).enumerate() {
        // SAFETY: promised by the caller.
        let x = unsafe { x.offset(k.cast_signed() * step).read() }.num();
        if x > *max || x.is_nan() || *found < 0 {
            (*max, *found) = (x, (plane + k * apart) as i64);
        }
    }
}

struct Means;

impl Typed for Means {
    type Kernel = Pool;
    #[inline(always)]
    unsafe fn run<T: Element>(pool: &Pool, call: &Call<'_>) {
        let over = &pool.over;
        let (x, out) = (call.pointers[0].cast_const().cast::<T>(), call.pointers[1]);
        let PoolFunction::Mean { with_padding, divisor } = pool.function else { return };
        over.each_tile(call, |tile, [from, to, _]| {
            let mut sums = [T::Sum::ZERO; TILE];
            over.each_tap(tile, |_, Reach { skipped, count, at, step, .. }| {
                for (k, sum) in sums[skipped..skipped + count].iter_mut().enumerate() {
                    // SAFETY: the caller vouches for the image, and `reach` stays inside it.
                    *sum = sum.plus(unsafe { x.offset(from + at + k.cast_signed() * step).read() }.sum());
                }
            });
            for (k, &sum) in sums.iter().enumerate().take(tile.width) {
                let ([rows, columns], column) = (&over.steps, over.column(tile, k));
                let met = rows.count(tile.row) * columns.count(column);
                let area = rows.extent(tile.row) * columns.extent(column);
                let by = divisor.unwrap_or(if with_padding { area } else { met } as i64);
                let mean = if met == 0 { T::Sum::ZERO } else { sum.over(by) };
                let at = (to + over.result(tile, k, 1)) * (T::DTYPE.bits() / 8).cast_signed();
                // SAFETY: the caller vouches for the results.
                unsafe { mean.write(T::DTYPE, out.offset(at)) };
            }
        });
    }
}
