//! Places and membership: `bucketize`, `searchsorted`, `isin`, `one_hot`, `meshgrid`, `broadcast_tensors`, `eye`, `linspace`.

use std::cmp::Ordering;

use rapt_core::DType;
use rustc_hash::FxHashSet;

use super::Operand;
use super::pointwise::promoted;
use super::shape::{Lanes, bounded, cells, count, expand_strides, fresh, like, misfit, need_plain, pick, refuse};
use crate::number::{int_to_float, is_float, round, wrap};
use crate::promote::DEFAULT_FLOAT;
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Scalar, Shapes, Tensor, ValueId, strides};

/// An operation of places.
#[derive(Clone, Debug, PartialEq)]
pub enum Search {
    /// `bucketize`, `searchsorted`: before how many of the ascending numbers a value belongs.
    Sorted {
        /// The ascending numbers, along the last dimension.
        sorted: ValueId,
        /// The values; without dimensions or in the numbers' other dimensions.
        values: Operand,
        /// The place of each of the numbers in ascending order, where they are in another; int64.
        sorter: Option<ValueId>,
        /// Whether a value belongs behind its equals.
        right: bool,
        /// Whether the places are int32.
        narrow: bool,
        /// Whether the values lie as they do in `bucketize`: in any shape, of one row of numbers.
        any_shape: bool,
    },
    /// `isin`: whether an element is among others.
    IsIn {
        /// The elements.
        elements: Operand,
        /// The others.
        among: Operand,
        /// Whether the answer is the contrary.
        invert: bool,
    },
    /// `one_hot`: 1 at the place of a class and 0 at the others, along a new last dimension.
    OneHot {
        /// The classes, int64.
        input: ValueId,
        /// How many there are.
        classes: Int,
    },
    /// `meshgrid`: each vector in a dimension of its own, expanded to all.
    Meshgrid {
        /// The vectors.
        tensors: Vec<ValueId>,
        /// Whether the first two dimensions change places.
        xy: bool,
    },
    /// `broadcast_tensors`: each expanded to the shape that all have then.
    Broadcast {
        /// The tensors.
        tensors: Vec<ValueId>,
    },
    /// `eye`: ones on the diagonal.
    Eye {
        /// The rows and columns.
        size: [Int; 2],
        /// The dtype.
        dtype: DType,
    },
    /// `linspace`: numbers in equal steps from a start to an end.
    Linspace {
        /// The first number and the last.
        ends: [Scalar; 2],
        /// How many.
        steps: Int,
        /// The dtype.
        dtype: DType,
    },
}

impl Search {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Search, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "bucketize.Tensor" | "bucketize.Scalar" => sorted(args, "boundaries", "self", true),
            "searchsorted.Tensor" | "searchsorted.Scalar" => sorted(args, "sorted_sequence", "self", false),
            "isin.Tensor_Tensor" => is_in(args, ["elements", "test_elements"]),
            "isin.Tensor_Scalar" => is_in(args, ["elements", "test_element"]),
            "isin.Scalar_Tensor" => is_in(args, ["element", "test_elements"]),
            "one_hot.default" => one_hot(args),
            "meshgrid.default" | "meshgrid.indexing" => meshgrid(args),
            "broadcast_tensors.default" => args.tensors("tensors").map(|tensors| Search::Broadcast { tensors }),
            "eye.default" => eye(args, ["n", "n"]),
            "eye.m" => eye(args, ["n", "m"]),
            "linspace.default" => linspace(args),
            _ => return None,
        })
    }

    /// Replaces tensors that ATen would promote, as [`Pointwise::promote`](super::Pointwise) does.
    pub(crate) fn promote(
        &mut self,
        form: &dyn Fn(ValueId) -> Option<(DType, usize)>,
        cast: &mut dyn FnMut(ValueId, DType) -> ValueId,
    ) {
        let (a, b) = match self {
            Search::Sorted { sorted, values: Operand::Tensor(values), .. } => (sorted, values),
            Search::IsIn { elements: Operand::Tensor(elements), among: Operand::Tensor(among), .. } => {
                (elements, among)
            }
            _ => return,
        };
        let Some((dtype, _)) = promoted([*a, *b].into_iter(), &[], form) else { return };
        for id in [a, b] {
            if form(*id).is_some_and(|(own, _)| own != dtype) {
                *id = cast(*id, dtype);
            }
        }
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        match self {
            Search::Sorted { sorted, sorter, values, narrow, any_shape, .. } => {
                let sorted = shapes.meta(*sorted)?;
                need_plain("a search", sorted.dtype)?;
                if let Some(sorter) = sorter {
                    let sorter = shapes.meta(*sorter)?;
                    if sorter.dtype != DType::I64 {
                        return Err(OpError::Dtype { what: "a sorter", dtype: sorter.dtype });
                    }
                    if sorter.shape != sorted.shape {
                        return misfit(format!("a sorter of shape {:?} for shape {:?}", sorter.shape, sorted.shape));
                    }
                }
                let own: &[i64] = match values {
                    Operand::Tensor(id) => {
                        let values = shapes.meta(*id)?;
                        if values.dtype != sorted.dtype {
                            return Err(OpError::DtypesDiffer(sorted.dtype, values.dtype));
                        }
                        &values.shape
                    }
                    Operand::Number(_) => &[],
                };
                let one_row = sorted.rank() == 1;
                let rows_fit = sorted.rank() == own.len()
                    && sorted.rank() > 0
                    && sorted.shape[..sorted.rank() - 1] == own[..own.len() - 1];
                if !one_row && (*any_shape || !rows_fit) {
                    return misfit(format!("values of shape {own:?} among numbers of shape {:?}", sorted.shape));
                }
                Ok(vec![fresh(if *narrow { DType::I32 } else { DType::I64 }, own)?])
            }
            Search::IsIn { elements, among, .. } => {
                let mut dtypes = Vec::new();
                for operand in [elements, among] {
                    if let Operand::Tensor(id) = operand {
                        dtypes.push(shapes.meta(*id)?.dtype);
                    }
                }
                if let [a, b] = dtypes[..]
                    && a != b
                {
                    return Err(OpError::DtypesDiffer(a, b));
                }
                match elements {
                    Operand::Tensor(id) => Ok(vec![Out::Fresh(like(shapes.meta(*id)?, DType::Bool))]),
                    Operand::Number(_) => Ok(vec![fresh(DType::Bool, &[])?]),
                }
            }
            Search::OneHot { input, classes } => {
                let meta = shapes.meta(*input)?;
                if meta.dtype != DType::I64 {
                    return Err(OpError::Dtype { what: "one_hot", dtype: meta.dtype });
                }
                let classes = shapes.int(*classes)?;
                if classes < 1 {
                    return refuse("num_classes", classes.to_string(), "how many classes there are must be said");
                }
                // It lies as the comparison of each class with all of them.
                let shape = [&meta.shape[..], &[classes]].concat();
                bounded(&shape)?;
                let mut one = meta.clone();
                one.shape.push(1);
                one.strides.push(1);
                let all = Meta::contiguous(DType::I64, &[classes]);
                let strides = strides::of_pointwise(&shape, &[&one, &all]);
                Ok(vec![Out::Fresh(Meta { dtype: DType::I64, shape, strides, offset: 0 })])
            }
            Search::Meshgrid { tensors, xy } => grid(shapes, tensors, *xy),
            Search::Broadcast { tensors } => expanded(shapes, tensors),
            Search::Eye { size, dtype } => Ok(vec![fresh(*dtype, &shapes.ints(size)?)?]),
            Search::Linspace { steps, dtype, .. } => {
                let steps = shapes.int(*steps)?;
                bounded(&[steps])?;
                Ok(vec![fresh(*dtype, &[steps])?])
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        match self {
            Search::Sorted { sorted, sorter, values, right, .. } => {
                let sorted = eval.tensor(*sorted)?;
                let row = sorted.meta.shape.last().map_or(0, |&n| count(n));
                let (x, dtype) = beside(eval, sorted, *values)?;
                let x = match sorter {
                    Some(sorter) => in_order(&x, &eval.tensor(*sorter)?.ints(), row)?,
                    None => x,
                };
                let values = match numbers(eval, *values, dtype)? {
                    Cells::Float(values) if !is_float(sorted.meta.dtype) => {
                        Cells::Float(values.into_iter().map(|x| round(DEFAULT_FLOAT, x)).collect())
                    }
                    Cells::Int(values) => Cells::Int(values.into_iter().map(|n| wrap(sorted.meta.dtype, n)).collect()),
                    values => values,
                };
                let lanes = Lanes::of(&outs[0].meta.shape, outs[0].meta.rank().saturating_sub(1));
                let start = |i: usize| if sorted.meta.rank() > 1 { i / lanes.size.max(1) * row } else { 0 };
                let place = |i: usize| {
                    let before = |k: usize| goes_before(&x, start(i) + k, &values, i, *right);
                    let (mut low, mut high) = (0, row);
                    while low < high {
                        let middle = low + (high - low) / 2;
                        (low, high) = if before(middle) { (middle + 1, high) } else { (low, middle) };
                    }
                    i64::try_from(low).unwrap_or(i64::MAX)
                };
                outs[0].write_ints((0..len(&values)).map(place).collect::<Vec<_>>());
            }
            Search::IsIn { elements, among, invert } => {
                let (x, y) = match (*elements, *among) {
                    (elements @ Operand::Number(_), Operand::Tensor(id)) => {
                        let (y, dtype) = beside(eval, eval.tensor(id)?, elements)?;
                        (numbers(eval, elements, dtype)?, y)
                    }
                    (Operand::Tensor(id), among) => {
                        let (x, dtype) = beside(eval, eval.tensor(id)?, among)?;
                        (x, numbers(eval, among, dtype)?)
                    }
                    _ => return Err(OpError::Refused("two numbers")),
                };
                let found: Vec<i64> = match (x, y) {
                    (Cells::Float(x), Cells::Float(y)) => {
                        // NaN equals nothing, and −0 equals 0.
                        let bits = |x: &f64| if *x == 0.0 { 0 } else { x.to_bits() };
                        let y: FxHashSet<u64> = y.iter().filter(|y| !y.is_nan()).map(bits).collect();
                        x.iter().map(|x| i64::from((!x.is_nan() && y.contains(&bits(x))) != *invert)).collect()
                    }
                    (Cells::Int(x), Cells::Int(y)) => {
                        let y: FxHashSet<i64> = y.into_iter().collect();
                        x.iter().map(|x| i64::from(y.contains(x) != *invert)).collect()
                    }
                    _ => return Err(OpError::Refused("operands of two kinds")),
                };
                outs[0].write_ints(found);
            }
            Search::OneHot { input, classes } => {
                let classes = eval.int(*classes)?;
                let input = eval.tensor(*input)?.ints();
                if let Some(&index) = input.iter().find(|&&class| class < 0 || class >= classes) {
                    return Err(OpError::IndexOutOfRange { index, dim: 0, size: classes });
                }
                let row = |class: i64| (0..classes).map(move |k| i64::from(k == class));
                outs[0].write_ints(input.into_iter().flat_map(row).collect::<Vec<_>>());
            }
            Search::Meshgrid { .. } | Search::Broadcast { .. } => {}
            Search::Eye { .. } => {
                let [rows, columns] = [0, 1].map(|d| outs[0].meta.shape[d]);
                let all = (0..rows).flat_map(|row| (0..columns).map(move |column| i64::from(row == column)));
                outs[0].write(eval.precision(), Cells::Int(all.collect()));
            }
            Search::Linspace { ends, steps, .. } => {
                let [start, end] = [ends[0], ends[1]].map(|end| super::shape::scalar_float(eval, end));
                outs[0].write_floats(eval.precision(), in_steps(start?, end?, eval.int(*steps)?));
            }
        }
        Ok(())
    }
}

/// The numbers of each row in the order of their places.
fn in_order(x: &Cells, sorter: &[i64], row: usize) -> Result<Cells, OpError> {
    let place = |(n, &index): (usize, &i64)| {
        let size = i64::try_from(row).unwrap_or(i64::MAX);
        let in_row = usize::try_from(index).ok().filter(|&k| k < row);
        in_row.map(|k| n / row * row + k).ok_or(OpError::IndexOutOfRange { index, dim: 0, size })
    };
    let places: Vec<usize> = sorter.iter().enumerate().map(place).collect::<Result<_, _>>()?;
    Ok(pick(x, places))
}

/// From both ends to the middle, as ATen computes it.
fn in_steps(start: f64, end: f64, steps: i64) -> Vec<f64> {
    let step = (end - start) / (steps - 1) as f64;
    let one = |i: i64| match i {
        _ if steps == 1 => start,
        i if i < steps / 2 => start + step * i as f64,
        i => end - step * (steps - 1 - i) as f64,
    };
    (0..steps).map(one).collect()
}

fn len(cells: &Cells) -> usize {
    match cells {
        Cells::Float(x) => x.len(),
        Cells::Int(x) => x.len(),
    }
}

/// A tensor's numbers, and the dtype in which they are compared with an operand: integers beside a float of Python become floats
/// first, as ATen promotes them.
fn beside(eval: &dyn Eval, tensor: &Tensor, other: Operand) -> Result<(Cells, DType), OpError> {
    let is_float = match other {
        Operand::Tensor(_) => false,
        Operand::Number(number) => matches!(eval.number(number)?, crate::Number::Float(_)),
    };
    Ok(match cells(tensor) {
        Cells::Int(x) if is_float => {
            (Cells::Float(x.into_iter().map(|n| int_to_float(DEFAULT_FLOAT, n)).collect()), DEFAULT_FLOAT)
        }
        x => (x, tensor.meta.dtype),
    })
}

/// An operand's numbers; a number of Python takes the dtype of what it is compared with.
fn numbers(eval: &dyn Eval, operand: Operand, dtype: DType) -> Result<Cells, OpError> {
    match operand {
        Operand::Tensor(id) => Ok(cells(eval.tensor(id)?)),
        Operand::Number(number) => match eval.number(number)? {
            _ if is_float(dtype) => Ok(Cells::Float(vec![round(dtype, super::shape::scalar_float(eval, number)?)])),
            // It wraps around in what is narrower, but not among truth values, beside which it stays an integer.
            crate::Number::Int(n) if dtype == DType::Bool => Ok(Cells::Int(vec![n])),
            crate::Number::Int(n) => Ok(Cells::Int(vec![wrap(dtype, n)])),
            crate::Number::Bool(b) => Ok(Cells::Int(vec![i64::from(b)])),
            crate::Number::Float(_) => Err(OpError::Refused("a float among integers")),
        },
    }
}

/// Whether the number at `p` stands before value `i`: unless it is greater, or not less, which no NaN is.
fn goes_before(x: &Cells, p: usize, values: &Cells, i: usize, right: bool) -> bool {
    match (x, values) {
        (Cells::Float(x), Cells::Float(values)) if right => x[p].partial_cmp(&values[i]) != Some(Ordering::Greater),
        (Cells::Float(x), Cells::Float(values)) => {
            !matches!(x[p].partial_cmp(&values[i]), Some(Ordering::Greater | Ordering::Equal))
        }
        (Cells::Int(x), Cells::Int(values)) if right => x[p] <= values[i],
        (Cells::Int(x), Cells::Int(values)) => x[p] < values[i],
        _ => false,
    }
}

fn grid(shapes: &dyn Shapes, tensors: &[ValueId], xy: bool) -> Result<Vec<Out>, OpError> {
    let mut metas = Vec::with_capacity(tensors.len());
    for &id in tensors {
        let meta = shapes.meta(id)?;
        if meta.rank() > 1 {
            return misfit(format!("meshgrid of a tensor of shape {:?}", meta.shape));
        }
        metas.push((id, meta));
    }
    if let Some(other) = metas.iter().find(|(_, meta)| meta.dtype != metas[0].1.dtype) {
        return Err(OpError::DtypesDiffer(metas[0].1.dtype, other.1.dtype));
    }
    let mut order: Vec<usize> = (0..metas.len()).collect();
    if xy && order.len() > 1 {
        order.swap(0, 1);
    }
    let shape: Vec<i64> = order.iter().map(|&n| metas[n].1.numel()).collect();
    bounded(&shape)?;
    let one = |n: usize| {
        let (of, meta) = metas[n];
        let strides = order.iter().map(|&m| if m == n { meta.strides.first().copied().unwrap_or(0) } else { 0 });
        Out::View { of, meta: Meta { strides: strides.collect(), shape: shape.clone(), ..meta.clone() } }
    };
    Ok((0..metas.len()).map(one).collect())
}

fn expanded(shapes: &dyn Shapes, tensors: &[ValueId]) -> Result<Vec<Out>, OpError> {
    let metas: Vec<&Meta> = tensors.iter().map(|&id| shapes.meta(id)).collect::<Result<_, _>>()?;
    let shape = strides::broadcast(metas.iter().map(|meta| &meta.shape[..]))?;
    bounded(&shape)?;
    let one = |(&of, meta): (&ValueId, &&Meta)| {
        let strides = expand_strides(&meta.shape, &meta.strides, &shape)?;
        Ok(Out::View { of, meta: Meta { shape: shape.clone(), strides, ..(*meta).clone() } })
    };
    tensors.iter().zip(&metas).map(one).collect()
}

fn sorted(args: &Args<'_>, sorted: &str, values: &str, any_shape: bool) -> Result<Search, OpError> {
    let mut right = args.bool_or("right", false)?;
    match args.opt_str("side")? {
        None => {}
        Some("left") if !right => {}
        Some("right") => right = true,
        Some(other) => return refuse("side", other, "it is left or right"),
    }
    Ok(Search::Sorted {
        sorted: args.tensor(sorted)?,
        sorter: args.opt_tensor("sorter")?,
        values: Operand::read(args, values)?,
        right,
        narrow: args.bool_or("out_int32", false)?,
        any_shape,
    })
}

fn is_in(args: &Args<'_>, [elements, among]: [&str; 2]) -> Result<Search, OpError> {
    args.bool_or("assume_unique", false)?;
    Ok(Search::IsIn {
        elements: Operand::read(args, elements)?,
        among: Operand::read(args, among)?,
        invert: args.bool_or("invert", false)?,
    })
}

fn one_hot(args: &Args<'_>) -> Result<Search, OpError> {
    Ok(Search::OneHot { input: args.tensor("self")?, classes: args.int_or("num_classes", -1)? })
}

fn meshgrid(args: &Args<'_>) -> Result<Search, OpError> {
    let xy = match args.opt_str("indexing")?.unwrap_or("ij") {
        "ij" => false,
        "xy" => true,
        other => return refuse("indexing", other, "it is ij or xy"),
    };
    Ok(Search::Meshgrid { tensors: args.tensors("tensors")?, xy })
}

fn eye(args: &Args<'_>, [rows, columns]: [&str; 2]) -> Result<Search, OpError> {
    args.place()?;
    let size = [args.int(rows)?, args.int(columns)?];
    Ok(Search::Eye { size, dtype: args.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT) })
}

fn linspace(args: &Args<'_>) -> Result<Search, OpError> {
    args.place()?;
    let dtype = args.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT);
    if !is_float(dtype) {
        return Err(OpError::Dtype { what: "linspace", dtype });
    }
    Ok(Search::Linspace { ends: [args.scalar("start")?, args.scalar("end")?], steps: args.int("steps")?, dtype })
}
