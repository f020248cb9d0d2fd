//! Running sums along a dimension, and histograms.

use rapt_core::DType;

use super::element::{Call, Element, Entry, Sum, Typed, plain_entry};
use super::{Dim, Dims, Fault, Form, Kernel, TILE, dims_of};

/// `cumsum`: each number plus all before it, in float64 and each rounded once, or in int64. Operands: x, and the sums.
#[derive(Clone, Debug)]
pub struct RunningSum {
    out: DType,
    /// The other dimensions, but for the columns.
    kept: Dims<2>,
    columns: Dim<2>,
    along: Dim<2>,
    run: Entry<RunningSum>,
}

impl RunningSum {
    /// The running sums of `x` along `dim`, of x's dtype or of integers in another integer dtype. `None` for dtypes that are not
    /// served.
    #[must_use]
    pub fn new(x: &Form, dim: usize, out: &Form) -> Option<RunningSum> {
        let is_float = |dtype: DType| matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        if is_float(x.dtype) != is_float(out.dtype) {
            return None;
        }
        let mut dims = dims_of(&x.shape, [&x.strides, &out.strides]);
        let along = if dims.is_empty() { Dim { size: 1, strides: [0; 2] } } else { dims.remove(dim) };
        let (kept, columns) = Dims::new(dims).split_last();
        let run = plain_entry::<Run>(x.dtype)?;
        Some(RunningSum { out: out.dtype, kept, columns, along, run })
    }

    fn tiles(&self) -> usize {
        self.columns.size.div_ceil(TILE)
    }
}

impl Kernel for RunningSum {
    fn name(&self) -> &'static str {
        "running sum"
    }

    fn units(&self) -> usize {
        self.kept.count() * self.tiles()
    }

    fn unit_work(&self) -> usize {
        self.along.size * self.columns.size.min(TILE)
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

struct Run;

impl Typed for Run {
    type Kernel = RunningSum;
    #[inline(always)]
    unsafe fn run<T: Element>(kernel: &RunningSum, call: &Call<'_>) {
        let (x, out) = (call.pointers[0].cast_const().cast::<T>(), call.pointers[1]);
        let bytes = (kernel.out.bits() / 8).cast_signed();
        let tiles = kernel.tiles();
        let [step, out_step] = kernel.columns.strides;
        let [down, out_down] = kernel.along.strides;
        for unit in call.units.clone() {
            let [from, to] = kernel.kept.at(unit / tiles);
            let first = unit % tiles * TILE;
            let width = TILE.min(kernel.columns.size - first);
            let (from, to) = (from + first.cast_signed() * step, to + first.cast_signed() * out_step);
            let mut sums = [T::Sum::ZERO; TILE];
            for i in 0..kernel.along.size.cast_signed() {
                let (from, to) = (from + i * down, to + i * out_down);
                for (k, sum) in sums.iter_mut().enumerate().take(width) {
                    let k = k.cast_signed();
                    // SAFETY: the caller vouches for every element that sizes and strides reach.
                    unsafe {
                        *sum = sum.plus(x.offset(from + k * step).read().sum());
                        sum.write(kernel.out, out.offset((to + k * out_step) * bytes));
                    }
                }
            }
        }
    }
}

/// `histc`: how many floats lie in each of equal parts of a range; the last part has its end, and a range without length is that
/// of the numbers. Each step is rounded to the dtype, as PyTorch's kernel does: the borders depend on it. Operands: x, and the
/// counts, which lie one after another.
#[derive(Clone, Debug)]
pub struct Histogram {
    dtype: DType,
    dims: Dims<1>,
    bins: usize,
    range: [f64; 2],
    run: Entry<Histogram>,
}

impl Histogram {
    /// The histogram of `x` in `bins` parts of `range`. `None` for dtypes that are not served.
    #[must_use]
    pub fn new(x: &Form, bins: usize, range: [f64; 2]) -> Option<Histogram> {
        if !matches!(x.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16) || bins == 0 {
            return None;
        }
        let dims = Dims::new(dims_of(&x.shape, [&x.strides]));
        let range = range.map(|bound| rounded(x.dtype, bound));
        Some(Histogram { dtype: x.dtype, dims, bins, range, run: plain_entry::<Count>(x.dtype)? })
    }

    /// The range, which may be the numbers' own.
    unsafe fn bounds<T: Element>(&self, x: *const T) -> [f64; 2] {
        let [mut min, mut max] = self.range;
        let count = self.dims.count();
        if min == max && count > 0 {
            (min, max) = (f64::INFINITY, f64::NEG_INFINITY);
            for n in 0..count {
                let [at] = self.dims.at(n);
                // SAFETY: promised by the caller.
                let x = unsafe { x.offset(at).read() }.float();
                min = if x.is_nan() || x < min { x } else { min };
                max = if x.is_nan() || x > max { x } else { max };
            }
        }
        if min == max { [min - 1.0, max + 1.0].map(|bound| rounded(self.dtype, bound)) } else { [min, max] }
    }
}

/// A number rounded to a float dtype.
fn rounded(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::F16 => rapt_core::f16_from_f64(x).to_f64(),
        DType::BF16 => rapt_core::bf16_from_f64(x).to_f64(),
        _ => x,
    }
}

impl Kernel for Histogram {
    fn name(&self) -> &'static str {
        "histogram"
    }

    fn units(&self) -> usize {
        1
    }

    fn unit_work(&self) -> usize {
        self.dims.count()
    }

    fn scratch_bytes(&self) -> usize {
        (self.bins * 8).next_multiple_of(64)
    }

    unsafe fn check(&self, pointers: &[*mut u8]) -> Result<(), Fault> {
        // SAFETY: promised by the caller.
        let [min, max] = unsafe {
            match self.dtype {
                DType::F64 => self.bounds::<f64>(pointers[0].cast()),
                DType::F32 => self.bounds::<f32>(pointers[0].cast()),
                DType::F16 => self.bounds::<half::f16>(pointers[0].cast()),
                _ => self.bounds::<half::bf16>(pointers[0].cast()),
            }
        };
        if !min.is_finite() || !max.is_finite() || min > max { Err(Fault::Range { min, max }) } else { Ok(()) }
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        // SAFETY: promised by the caller.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

struct Count;

impl Typed for Count {
    type Kernel = Histogram;
    unsafe fn run<T: Element>(kernel: &Histogram, call: &Call<'_>) {
        let (x, out) = (call.pointers[0].cast_const().cast::<T>(), call.pointers[1]);
        let counts = call.scratch.cast::<u64>();
        let in_dtype = |x: f64| rounded(T::DTYPE, x);
        // SAFETY: the caller vouches for every element, and for scratch memory of a count for each part.
        unsafe {
            let [min, max] = kernel.bounds(x);
            counts.write_bytes(0, kernel.bins);
            for n in 0..kernel.dims.count() {
                let [at] = kernel.dims.at(n);
                let x = x.offset(at).read().float();
                if x >= min && x <= max {
                    let scaled = in_dtype(in_dtype(x - min) * kernel.bins as f64);
                    let part = in_dtype(scaled / in_dtype(max - min)) as usize;
                    *counts.add(part.min(kernel.bins - 1)) += 1;
                }
            }
            for part in 0..kernel.bins {
                let count = counts.add(part).read() as f64;
                count.write(T::DTYPE, out.add(part * T::DTYPE.bits() / 8));
            }
        }
    }
}
