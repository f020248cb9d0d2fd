//! Kernels over strided tensors: reductions, running sums, order; and the copies that others need before or after them.

use rapt_core::DType;
use rapt_cpu::strided::{self, Fold as FoldKernel, FoldFunction, Form, Histogram, Order, RunningSum};
use rapt_graph::ops::{Emitter, Fold, Reduce, Scan, Sort};
use rapt_graph::{Meta, Node, Number, Out, Scalar, Shapes, ValueId};

use super::super::ModelError;
use super::build::Builder;
use super::group::Group;
use super::place::Place;
use super::{Kernel, Step};

/// Whether a dtype's numbers are floats.
pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// The dtype that sums and products of a float dtype are kept in.
pub(super) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A place as kernels take it.
pub(super) fn form(place: &Place) -> Form {
    Form { dtype: place.meta.dtype, shape: place.shape(), strides: place.strides() }
}

/// The same elements with the dimensions in another order.
pub(super) fn permuted(place: &Place, order: &[usize]) -> Place {
    let mut other = place.clone();
    other.meta.shape = order.iter().map(|&d| place.meta.shape[d]).collect();
    other.meta.strides = order.iter().map(|&d| place.meta.strides[d]).collect();
    other
}

impl Builder<'_> {
    /// A step of a kernel over strided tensors. What it reads is in memory when it begins.
    pub(super) fn strided(
        &mut self,
        n: usize,
        kernel: impl strided::Kernel + 'static,
        operands: Vec<Place>,
        may_fail: bool,
        keeps: Vec<Place>,
    ) {
        let uses = operands.iter().map(|place| place.buffer).collect();
        let kernel = Kernel::Strided { kernel: Box::new(kernel), operands };
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps, may_fail });
    }

    /// A step that copies a place to another of its shape, converted to its dtype.
    pub(super) fn copy_to(&mut self, n: usize, from: &Place, to: &Place) -> Result<(), ModelError> {
        if to.meta.numel() == 0 {
            return Ok(());
        }
        let mut group = Group::new(from.meta.shape.clone());
        let (own, wanted) = (from.meta.dtype, to.meta.dtype);
        let register = group.extend(&self.places, &from.meta.shape, |writer| {
            let x = writer.place(from);
            Ok(if own == wanted { x } else { writer.convert(x, own, wanted) })
        });
        let Some(register) = register else {
            return Err(ModelError::Plan { why: format!("a copy of {own} to {wanted}") });
        };
        self.store(n, &group, register, to)
    }

    /// A row-major copy in the arena, in a dtype.
    pub(super) fn copied(&mut self, n: usize, from: &Place, dtype: DType) -> Result<Place, ModelError> {
        let copy = self.temporary(dtype, &from.meta.shape);
        self.copy_to(n, from, &copy)?;
        Ok(copy)
    }

    /// Room in the arena for a row-major tensor.
    pub(super) fn temporary(&mut self, dtype: DType, shape: &[i64]) -> Place {
        let meta = Meta::contiguous(dtype, shape);
        Place { buffer: self.places.scratch(&meta), meta }
    }

    /// Where result `k` of a node goes; room that nobody reads where the program does not name it.
    pub(super) fn output(&mut self, n: usize, node: &Node, k: usize) -> Option<Place> {
        match (self.binding.outs[n].get(k)?, node.outputs.get(k).copied().flatten()) {
            (Out::Fresh(_), Some(id)) => self.places.of(id),
            (Out::Fresh(meta), None) => {
                let meta = meta.clone();
                Some(Place { buffer: self.places.scratch(&meta), meta })
            }
            _ => None,
        }
    }

    /// The dimensions that a list names, in ascending order; all where there is none.
    pub(super) fn dims(&self, meta: &Meta, dims: Option<&[rapt_graph::Int]>) -> Option<Vec<usize>> {
        let Some(dims) = dims else { return Some((0..meta.rank()).collect()) };
        let one = |&dim: &rapt_graph::Int| meta.dim(self.binding.int(dim).ok()?).ok();
        let mut dims: Vec<usize> = dims.iter().map(one).collect::<Option<_>>()?;
        dims.retain(|&d| d < meta.rank());
        dims.sort_unstable();
        dims.dedup();
        Some(dims)
    }

    /// A reduction over any dimensions.
    pub(super) fn reduce(&mut self, n: usize, node: &Node, op: &Reduce) -> Result<bool, ModelError> {
        let (Reduce::Fold { input, .. } | Reduce::Extremum { input, .. } | Reduce::Place { input, .. }) = op else {
            return Ok(false);
        };
        let x = self.place(*input)?;
        let one = |dim: i64| x.meta.dim(dim).ok().map(|d| if d < x.meta.rank() { vec![d] } else { Vec::new() });
        let (function, gone, operand) = match op {
            Reduce::Fold { fold, dims, dtype, .. } => {
                let Some(function) = self.fold_function(*fold) else { return Ok(false) };
                let ints = matches!(fold, Fold::Sum | Fold::Product) && !is_float(x.meta.dtype);
                // Kernels add integers of any dtype up in int64.
                let operand = dtype.filter(|&dtype| !(ints && dtype == DType::I64)).unwrap_or(x.meta.dtype);
                (function, self.dims(&x.meta, dims.as_deref()), operand)
            }
            Reduce::Extremum { largest, dim, .. } => (extremum(*largest), one(*dim), x.meta.dtype),
            Reduce::Place { largest, dim: Some(dim), .. } => (extremum(*largest), one(*dim), x.meta.dtype),
            Reduce::Place { largest, dim: None, .. } => (extremum(*largest), self.dims(&x.meta, None), x.meta.dtype),
            Reduce::Moments { .. } | Reduce::Extremes { .. } => return Ok(false),
        };
        let Some(gone) = gone else { return Ok(false) };
        let (result, places) = match op {
            Reduce::Fold { .. } => (self.output(n, node, 0), None),
            Reduce::Extremum { .. } => (self.output(n, node, 0), self.output(n, node, 1)),
            _ => (None, self.output(n, node, 0)),
        };
        self.close_for(&node.inputs)?;
        self.fold_to(n, function, (&x, operand), &gone, [result, places])
    }

    /// A step that reduces a place over dimensions, to a result and its place, whose dimensions are those that stay.
    pub(super) fn fold_to(
        &mut self,
        n: usize,
        function: FoldFunction,
        (x, operand): (&Place, DType),
        gone: &[usize],
        [result, places]: [Option<Place>; 2],
    ) -> Result<bool, ModelError> {
        let of_result = |place: &Place| aligned(place, &x.meta.shape, gone);
        let [out, at] = [&result, &places].map(|place| place.as_ref().map(of_result));
        let own = Form { dtype: operand, ..form(x) };
        if FoldKernel::new(self.arch, function, &own, gone, out.as_ref(), at.as_ref()).is_none() {
            return Ok(false);
        }
        let x = if operand == x.meta.dtype { x.clone() } else { self.copied(n, x, operand)? };
        let Some(kernel) = FoldKernel::new(self.arch, function, &form(&x), gone, out.as_ref(), at.as_ref()) else {
            return Ok(false);
        };
        let operands = [Some(x), result, places].into_iter().flatten().collect();
        self.strided(n, kernel, operands, false, Vec::new());
        Ok(true)
    }

    fn fold_function(&self, fold: Fold) -> Option<FoldFunction> {
        Some(match fold {
            Fold::Sum => FoldFunction::Sum,
            Fold::Product => FoldFunction::Product,
            Fold::Mean => FoldFunction::Mean,
            Fold::Any => FoldFunction::Any,
            Fold::All => FoldFunction::All,
            Fold::Max => FoldFunction::Max,
            Fold::Min => FoldFunction::Min,
            Fold::Norm(order) => FoldFunction::Norm(self.float_of(order)?),
            Fold::Variance { .. } | Fold::LogSumExp | Fold::Count | Fold::NanSum | Fold::NanMean => return None,
        })
    }

    /// A number as a float.
    pub(super) fn float_of(&self, scalar: Scalar) -> Option<f64> {
        Some(match self.binding.number(scalar).ok()? {
            Number::Int(n) => n as f64,
            Number::Float(x) => x,
            Number::Bool(b) => f64::from(u8::from(b)),
        })
    }

    /// Running sums, differences and histograms.
    pub(super) fn scan(&mut self, n: usize, node: &Node, op: &Scan) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        match op {
            Scan::Cumsum { input, dim, .. } => {
                let x = self.place(*input)?;
                let Ok(dim) = x.meta.dim(*dim) else { return Ok(false) };
                self.close_for(&node.inputs)?;
                // Integers are added up in int64, and then cut to the dtype: the same as cut before.
                let fits = is_float(x.meta.dtype) == is_float(out.meta.dtype)
                    && (x.meta.dtype == out.meta.dtype || out.meta.dtype == DType::I64);
                let x = if fits { x } else { self.copied(n, &x, out.meta.dtype)? };
                let Some(kernel) = RunningSum::new(&form(&x), dim, &form(&out)) else { return Ok(false) };
                self.strided(n, kernel, vec![x, out], false, Vec::new());
                Ok(true)
            }
            Scan::Histc { input, bins, min, max } => {
                let (Ok(bins), Some(min), Some(max)) =
                    (self.binding.int(*bins), self.float_of(*min), self.float_of(*max))
                else {
                    return Ok(false);
                };
                let x = self.place(*input)?;
                let bins = usize::try_from(bins).unwrap_or(0);
                let Some(kernel) = Histogram::new(&form(&x), bins, [min, max]) else { return Ok(false) };
                self.close_for(&node.inputs)?;
                self.strided(n, kernel, vec![x, out], true, Vec::new());
                Ok(true)
            }
            Scan::Diff { input, n: times, dim, prepend, append } => {
                let parts: Vec<ValueId> = [*prepend, Some(*input), *append].into_iter().flatten().collect();
                let (Ok(times), Ok(dim)) = (self.binding.int(*times), self.place(*input)?.meta.dim(*dim)) else {
                    return Ok(false);
                };
                self.close_for(&node.inputs)?;
                self.diff(n, &parts, dim, times, &out)
            }
            Scan::Softmax { .. } => Ok(false),
        }
    }

    /// Each number less the one before it, some times over.
    fn diff(&mut self, n: usize, parts: &[ValueId], dim: usize, times: i64, out: &Place) -> Result<bool, ModelError> {
        let dtype = out.meta.dtype;
        if dtype == DType::Bool || times < 1 {
            return Ok(false);
        }
        let places = parts.iter().map(|&id| self.place(id)).collect::<Result<Vec<_>, _>>()?;
        let mut x = places[0].clone();
        if places.len() > 1 {
            let mut shape = x.meta.shape.clone();
            shape[dim] = places.iter().map(|place| place.meta.shape[dim]).sum();
            x = self.temporary(dtype, &shape);
            let mut start = 0;
            for place in &places {
                let size = place.meta.shape[dim];
                self.copy_to(n, place, &x.narrowed(dim, start, size))?;
                start += size;
            }
        }
        for left in (0..times).rev() {
            let size = x.meta.shape[dim];
            if size <= 1 {
                break;
            }
            let (before, after) = (x.narrowed(dim, 0, size - 1), x.narrowed(dim, 1, size - 1));
            let to = if left == 0 { out.clone() } else { self.temporary(dtype, &before.meta.shape) };
            let mut group = Group::new(before.meta.shape.clone());
            let register = group.extend(&self.places, &before.meta.shape, |writer| {
                let [before, after] = [&before, &after].map(|place| writer.place(place));
                Ok(writer.binary(rapt_graph::ops::Binary::Sub, [after, before], (dtype, dtype)))
            });
            let Some(register) = register else { return Ok(false) };
            if to.meta.numel() > 0 {
                self.store(n, &group, register, &to)?;
            }
            x = to;
        }
        Ok(true)
    }

    /// `sort`, `argsort` and `topk`.
    pub(super) fn sort(&mut self, n: usize, node: &Node, op: &Sort) -> Result<bool, ModelError> {
        let (input, dim, descending, keep) = match *op {
            Sort::Sort { input, dim, descending, .. } => (input, dim, descending, None),
            Sort::TopK { input, k, dim, largest } => (input, dim, largest, self.binding.int(k).ok()),
        };
        let x = self.place(input)?;
        let Ok(dim) = x.meta.dim(dim) else { return Ok(false) };
        let has_values = !matches!(op, Sort::Sort { values: false, .. });
        let values = if has_values { self.output(n, node, 0) } else { None };
        let places = self.output(n, node, usize::from(has_values));
        let size = x.shape().get(dim).copied().unwrap_or(1);
        let keep = keep.map_or(size, |k| usize::try_from(k).unwrap_or(0));
        let (of_values, of_places) = (values.as_ref().map(form), places.as_ref().map(form));
        let kernel = Order::new(&form(&x), dim, keep, descending, of_values.as_ref(), of_places.as_ref());
        let Some(kernel) = kernel else { return Ok(false) };
        self.close_for(&node.inputs)?;
        self.strided(n, kernel, [Some(x), values, places].into_iter().flatten().collect(), false, Vec::new());
        Ok(true)
    }
}

fn extremum(largest: bool) -> FoldFunction {
    if largest { FoldFunction::Max } else { FoldFunction::Min }
}

/// The form of a reduction's result with the dimensions of what is reduced, those that go with size 1.
fn aligned(result: &Place, shape: &[i64], gone: &[usize]) -> Form {
    let keeps = result.meta.rank() == shape.len();
    let mut own = form(result);
    if !keeps {
        for &d in gone {
            own.shape.insert(d, 1);
            own.strides.insert(d, 0);
        }
    }
    own
}
