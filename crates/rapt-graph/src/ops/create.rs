//! Tensors of known numbers: filled, counted, or empty. Where PyTorch leaves the content to chance, it is zeros here.

use rapt_core::DType;
use rapt_pt2::MemoryFormat;

use super::copy::{format, laid_out};
use super::fill;
use crate::promote::{DEFAULT_FLOAT, of_number};
use crate::{Args, Cells, Eval, Int, Meta, Number, OpError, Out, Scalar, Shapes, Tensor, ValueId};

/// An operation that makes a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Create {
    /// `arange`: from start to end, without it, by step.
    Arange {
        /// The first number.
        start: Scalar,
        /// The number before which it ends.
        end: Scalar,
        /// The distance of two numbers.
        step: Scalar,
        /// The dtype; int64 where all three are integers, else float32, if missing.
        dtype: Option<DType>,
    },
    /// `zeros`, `ones`, `full`, `empty`, their forms `_like` and `new_`, `scalar_tensor`: one number everywhere.
    Full {
        /// The sizes.
        sizes: Sizes,
        /// The dtype.
        dtype: DtypeOf,
        /// The number.
        value: Scalar,
        /// How the elements lie.
        order: Order,
    },
}

/// The sizes of a new tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Sizes {
    /// These.
    Given(Vec<Int>),
    /// Those of a tensor.
    Like(ValueId),
}

/// The dtype of a new tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DtypeOf {
    /// This.
    Is(DType),
    /// That of a tensor.
    Like(ValueId),
    /// That of the number: bool, int64 or float32.
    Number,
}

/// How the elements of a new tensor lie.
#[derive(Clone, Debug, PartialEq)]
pub enum Order {
    /// In a memory format; preserved means that of the tensor whose sizes are taken.
    Format(MemoryFormat),
    /// The dimensions from the outermost to the innermost.
    Permuted(Vec<Int>),
}

const ZERO: Scalar = Scalar::Int(Int::Known(0));
const ONE: Scalar = Scalar::Int(Int::Known(1));

impl Create {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Create, OpError>> {
        let (name, overload) = target.strip_prefix("torch.ops.aten.")?.split_once('.')?;
        Some(match (name, overload) {
            ("arange", "default" | "start" | "start_step") => arange(args),
            ("zeros", "default") => full(args, Some(ZERO), DtypeOf::Is(DEFAULT_FLOAT)),
            ("ones", "default") => full(args, Some(ONE), DtypeOf::Is(DEFAULT_FLOAT)),
            ("empty", "memory_format") => full(args, Some(ZERO), DtypeOf::Is(DEFAULT_FLOAT)),
            ("full", "default") => full(args, None, DtypeOf::Number),
            ("empty_permuted", "default") => permuted(args),
            ("scalar_tensor", "default") => scalar_tensor(args),
            ("zeros_like" | "empty_like", "default") => like(args, Some(ZERO)),
            ("ones_like", "default") => like(args, Some(ONE)),
            ("full_like", "default") => like(args, None),
            ("new_zeros" | "new_empty", "default") => new(args, Some(ZERO)),
            ("new_ones", "default") => new(args, Some(ONE)),
            ("new_full", "default") => new(args, None),
            _ => return None,
        })
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = match self {
            Create::Arange { start, end, step, dtype } => {
                let [start, end, step] = [shapes.number(*start)?, shapes.number(*end)?, shapes.number(*step)?];
                let all_ints = [start, end, step].iter().all(|n| of_number(*n) != DEFAULT_FLOAT);
                let dtype = dtype.unwrap_or(if all_ints { DType::I64 } else { DEFAULT_FLOAT });
                Meta::contiguous(dtype, &[arange_len(start, end, step)?])
            }
            Create::Full { sizes, dtype, value, order } => {
                let number = shapes.number(*value)?;
                let dtype = match dtype {
                    DtypeOf::Is(dtype) => *dtype,
                    DtypeOf::Like(id) => shapes.meta(*id)?.dtype,
                    DtypeOf::Number => of_number(number),
                };
                fill::element(dtype, number)?;
                form(shapes, sizes, dtype, order)?
            }
        };
        Ok(vec![Out::Fresh(meta)])
    }

    /// The element that a tensor of this dtype has everywhere; `None` where elements differ.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn element(&self, shapes: &dyn Shapes, dtype: DType) -> Result<Option<Cells>, OpError> {
        match self {
            Create::Arange { .. } => Ok(None),
            Create::Full { value, .. } => fill::rounded(dtype, shapes.number(*value)?).map(Some),
        }
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let out = &outs[0];
        let dtype = out.meta.dtype;
        match self {
            Create::Arange { start, step, .. } => {
                let cells = arange_cells(eval.number(*start)?, eval.number(*step)?, &out.meta);
                out.write(eval.precision(), cells);
            }
            Create::Full { value, .. } => {
                let element = fill::element(dtype, eval.number(*value)?)?;
                out.write(eval.precision(), fill::repeat(&element, out.places().len()));
            }
        }
        Ok(())
    }
}

fn arange(args: &Args<'_>) -> Result<Create, OpError> {
    args.place()?;
    Ok(Create::Arange {
        start: args.opt_scalar("start")?.unwrap_or(ZERO),
        end: args.scalar("end")?,
        step: args.opt_scalar("step")?.unwrap_or(ONE),
        dtype: args.opt_dtype("dtype")?,
    })
}

/// The value that an operator brings, or that its argument `fill_value` names.
fn value(args: &Args<'_>, own: Option<Scalar>) -> Result<Scalar, OpError> {
    own.map_or_else(|| args.scalar("fill_value"), Ok)
}

fn full(args: &Args<'_>, own: Option<Scalar>, default: DtypeOf) -> Result<Create, OpError> {
    args.place()?;
    Ok(Create::Full {
        sizes: Sizes::Given(args.ints("size")?),
        dtype: args.opt_dtype("dtype")?.map_or(default, DtypeOf::Is),
        value: value(args, own)?,
        order: Order::Format(match format(args)? {
            MemoryFormat::Preserve => MemoryFormat::Contiguous,
            format => format,
        }),
    })
}

fn permuted(args: &Args<'_>) -> Result<Create, OpError> {
    args.place()?;
    Ok(Create::Full {
        sizes: Sizes::Given(args.ints("size")?),
        dtype: DtypeOf::Is(args.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT)),
        value: ZERO,
        order: Order::Permuted(args.ints("physical_layout")?),
    })
}

fn scalar_tensor(args: &Args<'_>) -> Result<Create, OpError> {
    args.place()?;
    Ok(Create::Full {
        sizes: Sizes::Given(Vec::new()),
        // float32 even of an integer.
        dtype: DtypeOf::Is(args.opt_dtype("dtype")?.unwrap_or(DEFAULT_FLOAT)),
        value: args.scalar("s")?,
        order: Order::Format(MemoryFormat::Contiguous),
    })
}

fn like(args: &Args<'_>, own: Option<Scalar>) -> Result<Create, OpError> {
    args.place()?;
    let input = args.tensor("self")?;
    Ok(Create::Full {
        sizes: Sizes::Like(input),
        dtype: args.opt_dtype("dtype")?.map_or(DtypeOf::Like(input), DtypeOf::Is),
        value: value(args, own)?,
        order: Order::Format(format(args)?),
    })
}

fn new(args: &Args<'_>, own: Option<Scalar>) -> Result<Create, OpError> {
    args.place()?;
    let input = args.tensor("self")?;
    Ok(Create::Full {
        sizes: Sizes::Given(args.ints("size")?),
        dtype: args.opt_dtype("dtype")?.map_or(DtypeOf::Like(input), DtypeOf::Is),
        value: value(args, own)?,
        order: Order::Format(MemoryFormat::Contiguous),
    })
}

fn form(shapes: &dyn Shapes, sizes: &Sizes, dtype: DType, order: &Order) -> Result<Meta, OpError> {
    let like = match sizes {
        Sizes::Given(sizes) => Meta::contiguous(dtype, &shapes.ints(sizes)?),
        Sizes::Like(id) => shapes.meta(*id)?.clone(),
    };
    match order {
        Order::Format(format) => laid_out(&like, dtype, *format),
        Order::Permuted(order) => {
            let order = shapes.ints(order)?;
            let fail = || OpError::Shape(format!("{order:?} is no order of {} dimensions", like.rank()));
            let dims: Vec<usize> = order.iter().filter_map(|&d| usize::try_from(d).ok()).collect();
            if order.len() != like.rank() || (0..like.rank()).any(|d| !dims.contains(&d)) {
                return Err(fail());
            }
            let physical: Vec<i64> = dims.iter().map(|&d| like.shape[d]).collect();
            let physical = Meta::contiguous(dtype, &physical).strides;
            let mut strides = vec![0; like.rank()];
            for (&d, stride) in dims.iter().zip(physical) {
                strides[d] = stride;
            }
            Ok(Meta { dtype, strides, ..like })
        }
    }
}

/// The elements of an `arange`: exact where all are integers, else by way of f64.
fn arange_len(start: Number, end: Number, step: Number) -> Result<i64, OpError> {
    let fail = || OpError::Shape(format!("arange from {start:?} to {end:?} by {step:?}"));
    if let (Some(start), Some(end), Some(step)) = (int_of(start), int_of(end), int_of(step)) {
        let span = i128::from(end) - i128::from(start);
        let step = i128::from(step);
        if step == 0 || (span != 0 && (span > 0) != (step > 0)) {
            return Err(fail());
        }
        let len = span / step + i128::from(span % step != 0);
        return i64::try_from(len).map_err(|_| fail());
    }
    let (start, end, step) = (float_of(start), float_of(end), float_of(step));
    let len = ((end - start) / step).ceil();
    // A step of 0, a NaN, or the wrong direction gives no length.
    if len.is_finite() && (0.0..9e15).contains(&len) { Ok(len as i64) } else { Err(fail()) }
}

fn int_of(number: Number) -> Option<i64> {
    match number {
        Number::Int(n) => Some(n),
        Number::Bool(b) => Some(i64::from(b)),
        Number::Float(_) => None,
    }
}

fn float_of(number: Number) -> f64 {
    match number {
        Number::Int(n) => n as f64,
        Number::Bool(b) => f64::from(u8::from(b)),
        Number::Float(x) => x,
    }
}

fn arange_cells(start: Number, step: Number, meta: &Meta) -> Cells {
    let count = meta.shape[0];
    if crate::number::is_float(meta.dtype) {
        let (start, step) = (float_of(start), float_of(step));
        return Cells::Float((0..count).map(|i| start + step * i as f64).collect());
    }
    // Floats lose their fraction before they count.
    let whole = |number: Number| int_of(number).unwrap_or(float_of(number) as i64);
    let (start, step) = (whole(start), whole(step));
    Cells::Int((0..count).map(|i| start.wrapping_add(step.wrapping_mul(i))).collect())
}
