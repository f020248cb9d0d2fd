//! Variances, and logarithms of sums of exponentials: two reductions with a chain between them and one behind.
//!
//! ```text
//! variance    mean = Σ x / n;  s = Σ (x − mean)²;                out = s / (n − correction), or its root
//! logsumexp   m = max x, 0 where it is infinite;  s = Σ e^(x − m);  out = log s + m
//! ```
//! Between the reductions numbers are float32, of float64 float64.

use rapt_core::DType;
use rapt_cpu::pointwise::Register;
use rapt_cpu::strided::FoldFunction;
use rapt_graph::ops::{Binary, Emitter, Fold, Reduce, Unary};
use rapt_graph::{Node, OpError};

use super::super::ModelError;
use super::build::Builder;
use super::group::{Group, Writer};
use super::place::Place;
use super::strided::{is_float, wide};

impl Builder<'_> {
    /// `var`, `std`, `var_mean`, `std_mean` and `logsumexp` of floats.
    pub(super) fn moments(&mut self, n: usize, node: &Node, op: &Reduce) -> Result<bool, ModelError> {
        let (input, dims, how) = match op {
            Reduce::Fold { fold: fold @ (Fold::Variance { .. } | Fold::LogSumExp), input, dims, .. } => {
                (*input, dims, *fold)
            }
            Reduce::Moments { correction, root, input, dims, .. } => {
                (*input, dims, Fold::Variance { correction: *correction, root: *root })
            }
            _ => return Ok(false),
        };
        let x = self.place(input)?;
        let (Some(gone), Some(out)) = (self.dims(&x.meta, dims.as_deref()), self.output(n, node, 0)) else {
            return Ok(false);
        };
        if !is_float(x.meta.dtype) || x.meta.numel() == 0 {
            return Ok(false);
        }
        self.close_for(&node.inputs)?;
        let dtype = wide(x.meta.dtype);
        let x = if x.meta.dtype == dtype { x } else { self.copied(n, &x, dtype)? };
        let shape: Vec<i64> =
            x.meta.shape.iter().enumerate().map(|(d, &size)| if gone.contains(&d) { 1 } else { size }).collect();
        let count: i64 = gone.iter().map(|&d| x.meta.shape[d]).product();
        let [first, second] = [0, 1].map(|_| self.temporary(dtype, &shape));
        let function = if how == Fold::LogSumExp { FoldFunction::Max } else { FoldFunction::Mean };
        let made = match op {
            Reduce::Moments { .. } => self.running_mean(n, &x, &gone, &first)?,
            _ => self.fold_to(n, function, (&x, dtype), &gone, [Some(first.clone()), None])?,
        };
        if !made {
            return Ok(false);
        }
        let terms = self.temporary(dtype, &x.meta.shape);
        self.chain(n, &terms, |writer| {
            let (element, base) = (writer.place(&x), base(writer, how, &first, dtype));
            let apart = writer.binary(Binary::Sub, [element, base], (dtype, dtype));
            Ok(match how {
                Fold::LogSumExp => writer.unary(Unary::Exp, apart, (dtype, dtype)),
                _ => writer.binary(Binary::Mul, [apart, apart], (dtype, dtype)),
            })
        })?;
        if !self.fold_to(n, FoldFunction::Sum, (&terms, dtype), &gone, [Some(second.clone()), None])? {
            return Ok(false);
        }
        let divisor = match how {
            Fold::Variance { correction, .. } => self.float_of(correction).map(|by| (count as f64 - by).max(0.0)),
            _ => Some(1.0),
        };
        let placed = |place: &Place| place.reshaped(&out.meta.shape);
        let (Some(divisor), Some(first), Some(second)) = (divisor, placed(&first), placed(&second)) else {
            return Ok(false);
        };
        let result = out.meta.dtype;
        self.chain(n, &out, |writer| {
            let sum = writer.place(&second);
            let y = if let Fold::Variance { root, .. } = how {
                let divisor = writer.float(dtype, divisor);
                let variance = writer.binary(Binary::Div, [sum, divisor], (dtype, dtype));
                if root { writer.unary(Unary::Sqrt, variance, (dtype, dtype)) } else { variance }
            } else {
                let (log, base) = (writer.unary(Unary::Log, sum, (dtype, dtype)), base(writer, how, &first, dtype));
                writer.binary(Binary::Add, [log, base], (dtype, dtype))
            };
            Ok(if dtype == result { y } else { writer.convert(y, dtype, result) })
        })?;
        match self.output(n, node, 1) {
            Some(mean) => self.copy_to(n, &first, &mean).map(|()| true),
            None => Ok(true),
        }
    }

    /// The mean as `var_mean` gives it: NaN where a number other than the last is not finite. All but the last are one box of
    /// elements for each dimension that goes.
    fn running_mean(&mut self, n: usize, x: &Place, gone: &[usize], out: &Place) -> Result<bool, ModelError> {
        let dtype = out.meta.dtype;
        let (mut last, mut sums, mut count) = (x.clone(), Vec::new(), 1);
        for &d in gone {
            let size = last.meta.shape[d];
            count *= size;
            if size > 1 {
                let sum = self.temporary(DType::F64, &out.meta.shape);
                let before = last.narrowed(d, 0, size - 1);
                if !self.fold_to(n, FoldFunction::Sum, (&before, dtype), gone, [Some(sum.clone()), None])? {
                    return Ok(false);
                }
                sums.push(sum);
            }
            last = last.narrowed(d, size - 1, 1);
        }
        self.chain(n, out, |writer| {
            let both = (DType::F64, DType::F64);
            let mut sum = writer.float(DType::F64, 0.0);
            for part in &sums {
                let part = writer.place(part);
                sum = writer.binary(Binary::Add, [sum, part], both);
            }
            let last = writer.place(&last);
            let last = if dtype == DType::F64 { last } else { writer.convert(last, dtype, DType::F64) };
            let all = writer.binary(Binary::Add, [sum, last], both);
            let count = writer.float(DType::F64, count as f64);
            let mean = writer.binary(Binary::Div, [all, count], both);
            // 0, or NaN of what is not finite.
            let nothing = writer.binary(Binary::Sub, [sum, sum], both);
            let mean = writer.binary(Binary::Add, [mean, nothing], both);
            Ok(if dtype == DType::F64 { mean } else { writer.convert(mean, DType::F64, dtype) })
        })?;
        Ok(true)
    }

    /// A step that makes each element of a place.
    pub(super) fn chain(
        &mut self,
        n: usize,
        out: &Place,
        emit: impl Fn(&mut Writer<'_>) -> Result<Register, OpError>,
    ) -> Result<(), ModelError> {
        let shape = out.meta.shape.clone();
        let mut group = Group::new(shape.clone());
        let Some(register) = group.extend(&self.places, &shape, emit) else {
            return Err(ModelError::Plan { why: "a chain that does not fit its own group".into() });
        };
        self.store(n, &group, register, out)
    }
}

/// What elements are taken relative to: the mean, or the greatest where it is finite.
fn base(writer: &mut Writer<'_>, how: Fold, first: &Place, dtype: DType) -> Register {
    let first = writer.place(first);
    if how != Fold::LogSumExp {
        return first;
    }
    let zero = writer.float(dtype, 0.0);
    let is_infinite = writer.unary(Unary::IsInf, first, (dtype, DType::Bool));
    writer.select(is_infinite, [zero, first], dtype)
}
