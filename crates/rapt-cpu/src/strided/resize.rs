//! Images in another size: each element of the result is a mixture of up to four of the image.
//!
//! ```text
//! y[i, j] = mix(mix(x[top, left], x[top, right]), mix(x[bottom, left], x[bottom, right]))      mix(a, b) = a (1 − w) + b w
//! ```
//! in float64, rounded once. A weight of 0 counts, as in PyTorch: 0 times an infinity is NaN. Where there is none, a is the result.

use rapt_core::{Arch, DType};

use super::element::{Call, Element, Entry, Sum, Typed, entry};
use super::{Dim, Dims, Form, Kernel};

/// Of each position of the result along one dimension: two positions of the image, and the weight of the second, if it counts.
pub type Weights = Vec<(usize, usize, Option<f64>)>;

/// Resizing for operands of given forms: x, and the result.
#[derive(Clone, Debug)]
pub struct Resize {
    rows: Weights,
    columns: Weights,
    /// Whether every element of the result is one of the image.
    is_nearest: bool,
    lead: Dims<2>,
    row: Dim<2>,
    column: Dim<2>,
    /// The channels where they lie closest, else one.
    channels: Dim<2>,
    run: Entry<Resize>,
}

impl Resize {
    /// The resizing of `x`, whose last two dimensions are rows and columns, of floats. `None` for other dtypes, and where a weight
    /// names no position of the image.
    #[must_use]
    pub fn new(arch: Arch, [rows, columns]: [Weights; 2], x: &Form, out: &Form) -> Option<Resize> {
        let rank = x.shape.len();
        let is_float = matches!(x.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        if rank < 2 || !is_float || x.dtype != out.dtype {
            return None;
        }
        let stays = |weights: &Weights, d: usize| {
            weights.len() == out.shape[d] && weights.iter().all(|&(a, b, _)| a < x.shape[d] && b < x.shape[d])
        };
        if !stays(&rows, rank - 2) || !stays(&columns, rank - 1) {
            return None;
        }
        let dim = |d: usize| Dim { size: out.shape[d], strides: [x.strides[d], out.strides[d]] };
        let is_last = rank > 2 && x.strides[rank - 3] == 1 && x.strides[rank - 1] != 1;
        let channels = if is_last { dim(rank - 3) } else { Dim { size: 1, strides: [0; 2] } };
        let is_nearest = rows.iter().chain(&columns).all(|(_, _, weight)| weight.is_none());
        Some(Resize {
            lead: Dims::new((0..rank - 2 - usize::from(is_last)).map(dim)),
            row: dim(rank - 2),
            column: dim(rank - 1),
            channels,
            is_nearest,
            rows,
            columns,
            run: entry::<Run>(arch, x.dtype)?,
        })
    }
}

impl Kernel for Resize {
    fn name(&self) -> &'static str {
        if self.is_nearest { "resize, nearest" } else { "resize, bilinear" }
    }

    fn units(&self) -> usize {
        self.lead.count() * self.rows.len()
    }

    fn unit_work(&self) -> usize {
        self.columns.len() * self.channels.size * if self.is_nearest { 1 } else { 4 }
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        // SAFETY: promised by the caller; the instruction set is that of `new`.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

/// `a (1 − w) + b w`, or `a` where there is no weight.
#[inline(always)]
fn mix(a: f64, b: f64, weight: Option<f64>) -> f64 {
    match weight {
        Some(weight) => a * (1.0 - weight) + b * weight,
        None => a,
    }
}

struct Run;

impl Typed for Run {
    type Kernel = Resize;
    #[inline(always)]
    unsafe fn run<T: Element>(resize: &Resize, call: &Call<'_>) {
        let (x, out) = (call.pointers[0].cast_const().cast::<T>(), call.pointers[1].cast::<T>());
        let [step, out_step] = resize.channels.strides;
        for unit in call.units.clone() {
            let row = unit % resize.rows.len();
            let (top, bottom, down) = resize.rows[row];
            let [from, to] = resize.lead.at(unit / resize.rows.len());
            let to = to + row.cast_signed() * resize.row.strides[1];
            let line = |row: usize| from + row.cast_signed() * resize.row.strides[0];
            // SAFETY: the caller vouches for every element; `new` has seen that positions lie in the image.
            unsafe {
                let [top, bottom] = [x.offset(line(top)), x.offset(line(bottom))];
                for (column, &(left, right, over)) in resize.columns.iter().enumerate() {
                    let [left, right] = [left, right].map(|at| at.cast_signed() * resize.column.strides[0]);
                    let out = out.offset(to + column.cast_signed() * resize.column.strides[1]);
                    for c in 0..resize.channels.size.cast_signed() {
                        let (from, out) = (c * step, out.offset(c * out_step));
                        if resize.is_nearest {
                            out.write(top.offset(left + from).read());
                            continue;
                        }
                        let at = |line: *const T, column: isize| line.offset(column + from).read().float();
                        let above = mix(at(top, left), at(top, right), over);
                        let below = mix(at(bottom, left), at(bottom, right), over);
                        mix(above, below, down).write(T::DTYPE, out.cast());
                    }
                }
            }
        }
    }
}
