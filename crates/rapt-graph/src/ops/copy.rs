//! The operand's elements in another form, dtype or place: the tensor itself where nothing changes, a view where strides reach,
//! else a copy.

use rapt_core::DType;
use rapt_pt2::MemoryFormat;

use super::bits;
use super::shape::copy_in_place_of;
use super::view::complete;
use super::{Operand, Target, fill};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// An operation that moves elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Copy {
    /// `reshape`: a view where strides reach, else a copy.
    Reshape {
        /// The tensor.
        input: ValueId,
        /// The shape; one size may be −1.
        shape: Vec<Int>,
    },
    /// `reshape_as`: the same to the shape of another tensor.
    ReshapeAs {
        /// The tensor.
        input: ValueId,
        /// The tensor whose shape it gets.
        other: ValueId,
    },
    /// `flatten.using_ints`, `ravel`: dimensions made one; the tensor itself where they are one already.
    Flatten {
        /// The tensor.
        input: ValueId,
        /// The first and the last of them.
        dims: [i64; 2],
    },
    /// `to`, `type_as`: the tensor itself where it has the dtype and format, unless a copy is asked for.
    To {
        /// The tensor.
        input: ValueId,
        /// The dtype; its own if missing.
        dtype: Option<DType>,
        /// The tensor whose dtype is wanted.
        like: Option<ValueId>,
        /// Whether a copy is asked for. `_to_copy` always makes one.
        copy: bool,
        /// How the elements are to lie.
        format: MemoryFormat,
    },
    /// A conversion that ATen's promotion makes inside of an operator, as a node of its own. Strides stay as they are, zeros
    /// too, since the operator's result lies as its operands do.
    Promote {
        /// The tensor.
        input: ValueId,
        /// The dtype.
        dtype: DType,
    },
    /// `view.dtype`: the same bits as numbers of another dtype. PyTorch gives a view; here it is a copy, and what would show the
    /// difference, a write to the one or the other, is refused when the program is bound.
    Bits {
        /// The tensor.
        input: ValueId,
        /// The dtype.
        dtype: DType,
    },
    /// `clone`, `lift_fresh_copy`.
    Clone {
        /// The tensor.
        input: ValueId,
        /// How the elements are to lie.
        format: MemoryFormat,
    },
    /// `contiguous`: the tensor itself where it lies so.
    Contiguous {
        /// The tensor.
        input: ValueId,
        /// How the elements are to lie.
        format: MemoryFormat,
    },
    /// `copy_`, `copy`: the elements of another tensor, converted to the dtype of the first and broadcast to its shape.
    Onto {
        /// The tensor that is written, or whose form the result has.
        input: ValueId,
        /// The tensor that is read.
        source: ValueId,
        /// Where they go.
        target: Target,
    },
    /// `fill_`, `fill`, `zero_`: one number everywhere.
    Fill {
        /// The tensor that is written, or whose form the result has.
        input: ValueId,
        /// The number, or a tensor of one.
        value: Operand,
        /// Where it goes.
        target: Target,
    },
}

impl Copy {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Copy, OpError>> {
        let make = maker(target.strip_prefix("torch.ops.aten.")?)?;
        Some(make(args))
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        match self {
            Copy::Onto { input, target, .. } | Copy::Fill { input, target, .. } => target.mutates(*input),
            _ => None,
        }
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        Ok(vec![match self {
            Copy::Reshape { input, shape } => {
                let meta = shapes.meta(*input)?;
                reshaped(*input, meta, complete(&shapes.ints(shape)?, meta.numel())?)
            }
            Copy::ReshapeAs { input, other } => {
                let (meta, shape) = (shapes.meta(*input)?, &shapes.meta(*other)?.shape);
                reshaped(*input, meta, complete(shape, meta.numel())?)
            }
            Copy::Flatten { input, dims } => flattened(*input, shapes.meta(*input)?, *dims)?,
            Copy::To { input, dtype, like, copy, format } => {
                let meta = shapes.meta(*input)?;
                let wanted = match like {
                    Some(like) => shapes.meta(*like)?.dtype,
                    None => dtype.unwrap_or(meta.dtype),
                };
                if !copy && wanted == meta.dtype && lies(meta, *format) {
                    Out::Same(*input)
                } else {
                    Out::Fresh(laid_out(meta, wanted, *format)?)
                }
            }
            Copy::Promote { input, dtype } => {
                Out::Fresh(Meta { dtype: *dtype, offset: 0, ..shapes.meta(*input)?.clone() })
            }
            Copy::Bits { input, dtype } => {
                let meta = shapes.meta(*input)?;
                if meta.dtype == *dtype {
                    Out::View { of: *input, meta: meta.clone() }
                } else {
                    Out::Fresh(bits::form(meta, *dtype)?)
                }
            }
            Copy::Clone { input, format } => {
                let meta = shapes.meta(*input)?;
                Out::Fresh(laid_out(meta, meta.dtype, *format)?)
            }
            Copy::Contiguous { input, format } => {
                let meta = shapes.meta(*input)?;
                let already = match format {
                    MemoryFormat::ChannelsLast => meta.is_channels_last(),
                    _ => meta.is_contiguous(),
                };
                if already { Out::Same(*input) } else { Out::Fresh(laid_out(meta, meta.dtype, *format)?) }
            }
            Copy::Onto { input, source, target } => {
                let meta = shapes.meta(*input)?;
                strides::broadcasts_to(&shapes.meta(*source)?.shape, &meta.shape)?;
                target.out(*input, shapes, copy_in_place_of(meta))?
            }
            Copy::Fill { input, value, target } => {
                let meta = shapes.meta(*input)?;
                match value {
                    Operand::Number(scalar) => drop(fill::element(meta.dtype, shapes.number(*scalar)?)?),
                    Operand::Tensor(id) if shapes.meta(*id)?.rank() > 0 => {
                        return Err(OpError::Shape("fill takes a number or a tensor without dimensions".into()));
                    }
                    Operand::Tensor(_) => {}
                }
                target.out(*input, shapes, laid_out(meta, meta.dtype, MemoryFormat::Preserve)?)?
            }
        }])
    }

    /// The element that a tensor of this dtype is filled with; `None` where it is filled with no number.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn element(&self, shapes: &dyn Shapes, dtype: DType) -> Result<Option<Cells>, OpError> {
        match self {
            Copy::Fill { value: Operand::Number(scalar), .. } => {
                fill::rounded(dtype, shapes.number(*scalar)?).map(Some)
            }
            _ => Ok(None),
        }
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let out = &outs[0];
        let source = match self {
            Copy::Reshape { input, .. }
            | Copy::ReshapeAs { input, .. }
            | Copy::Flatten { input, .. }
            | Copy::To { input, .. }
            | Copy::Promote { input, .. }
            | Copy::Clone { input, .. }
            | Copy::Contiguous { input, .. } => {
                let tensor = eval.tensor(*input)?;
                if out.shares(tensor) {
                    return Ok(());
                }
                tensor.clone()
            }
            Copy::Bits { input, dtype } => {
                let input = eval.tensor(*input)?;
                if !out.shares(input) {
                    out.write(eval.precision(), bits::reinterpreted(input, *dtype));
                }
                return Ok(());
            }
            Copy::Onto { source, .. } => eval.tensor(*source)?.broadcast(&out.meta.shape),
            Copy::Fill { value: Operand::Tensor(id), .. } => eval.tensor(*id)?.broadcast(&out.meta.shape),
            Copy::Fill { value: Operand::Number(scalar), .. } => {
                let element = fill::element(out.meta.dtype, eval.number(*scalar)?)?;
                out.write(eval.precision(), fill::repeat(&element, out.places().len()));
                return Ok(());
            }
        };
        out.write(eval.precision(), source.cast(out.meta.dtype, eval.precision()));
        Ok(())
    }
}

type Make = fn(&Args<'_>) -> Result<Copy, OpError>;

fn maker(name: &str) -> Option<Make> {
    // How a copy between devices waits says nothing on one.
    let make: Make = match name {
        "reshape.default" => |args| Ok(Copy::Reshape { input: args.tensor("self")?, shape: args.ints("shape")? }),
        "reshape_as.default" => {
            |args| Ok(Copy::ReshapeAs { input: args.tensor("self")?, other: args.tensor("other")? })
        }
        "ravel.default" => |args| Ok(Copy::Flatten { input: args.tensor("self")?, dims: [0, -1] }),
        "flatten.using_ints" => |args| {
            let dims = [args.known_int_or("start_dim", 0)?, args.known_int_or("end_dim", -1)?];
            Ok(Copy::Flatten { input: args.tensor("self")?, dims })
        },
        "to.device" | "to.dtype" | "to.dtype_layout" => |args| to(args, None, args.bool_or("copy", false)?),
        "to.other" => |args| to(args, Some(args.tensor("other")?), args.bool_or("copy", false)?),
        "type_as.default" => |args| to(args, Some(args.tensor("other")?), false),
        "_to_copy.default" => |args| to(args, None, true),
        "clone.default" => |args| Ok(Copy::Clone { input: args.tensor("self")?, format: format(args)? }),
        // Row-major, as PyTorch's tracer has it.
        "lift_fresh_copy.default" => {
            |args| Ok(Copy::Clone { input: args.tensor("self")?, format: MemoryFormat::Contiguous })
        }
        "contiguous.default" => |args| {
            let format = args.opt_memory_format("memory_format")?.unwrap_or(MemoryFormat::Contiguous);
            if format == MemoryFormat::Preserve {
                return Err(refused(format, "contiguous names the format that it makes"));
            }
            Ok(Copy::Contiguous { input: args.tensor("self")?, format: served(format)? })
        },
        "view.dtype" => |args| {
            let dtype = args.opt_dtype("dtype")?.ok_or_else(|| OpError::MissingArgument("dtype".into()))?;
            Ok(Copy::Bits { input: args.tensor("self")?, dtype })
        },
        "copy_.default" => |args| onto(args, Target::Input),
        "copy.default" => |args| onto(args, Target::Fresh),
        "fill_.Scalar" | "fill_.Tensor" => |args| filled(args, Target::Input),
        "fill.Scalar" | "fill.Tensor" => |args| filled(args, Target::Fresh),
        "zero_.default" => |args| zeroed(args, Target::Input),
        "zero.default" => |args| zeroed(args, Target::Fresh),
        _ => return None,
    };
    Some(make)
}

fn zeroed(args: &Args<'_>, target: Target) -> Result<Copy, OpError> {
    let value = Operand::Number(crate::Scalar::Int(Int::Known(0)));
    Ok(Copy::Fill { input: args.tensor("self")?, value, target })
}

fn to(args: &Args<'_>, like: Option<ValueId>, copy: bool) -> Result<Copy, OpError> {
    args.place()?;
    args.bool_or("non_blocking", false)?;
    let dtype = if like.is_some() { None } else { args.opt_dtype("dtype")? };
    Ok(Copy::To { input: args.tensor("self")?, dtype, like, copy, format: format(args)? })
}

fn onto(args: &Args<'_>, target: Target) -> Result<Copy, OpError> {
    args.bool_or("non_blocking", false)?;
    Ok(Copy::Onto { input: args.tensor("self")?, source: args.tensor("src")?, target })
}

fn filled(args: &Args<'_>, target: Target) -> Result<Copy, OpError> {
    Ok(Copy::Fill { input: args.tensor("self")?, value: Operand::read(args, "value")?, target })
}

/// The memory format, preserved unless one is named.
pub(super) fn format(args: &Args<'_>) -> Result<MemoryFormat, OpError> {
    served(args.opt_memory_format("memory_format")?.unwrap_or(MemoryFormat::Preserve))
}

fn served(format: MemoryFormat) -> Result<MemoryFormat, OpError> {
    if format == MemoryFormat::ChannelsLast3d {
        return Err(refused(format, "tensors of 5 dimensions lie in row-major order"));
    }
    Ok(format)
}

fn refused(format: MemoryFormat, why: &'static str) -> OpError {
    OpError::ArgumentValue { name: "memory_format".into(), value: format!("{format:?}"), why }
}

/// Whether `to` takes a tensor to lie in a format: PyTorch asks only whether it suggests channels_last.
fn lies(meta: &Meta, format: MemoryFormat) -> bool {
    let suggests_channels_last = meta.is_channels_last() && !meta.is_contiguous();
    match format {
        MemoryFormat::Preserve => true,
        MemoryFormat::ChannelsLast => suggests_channels_last,
        MemoryFormat::Contiguous | MemoryFormat::ChannelsLast3d => !suggests_channels_last,
    }
}

/// A copy of these elements in a format.
pub(super) fn laid_out(meta: &Meta, dtype: DType, format: MemoryFormat) -> Result<Meta, OpError> {
    let strides = match format {
        MemoryFormat::Preserve => strides::preserved(meta),
        MemoryFormat::ChannelsLast => strides::channels_last(&meta.shape)?,
        MemoryFormat::Contiguous | MemoryFormat::ChannelsLast3d => return Ok(Meta::contiguous(dtype, &meta.shape)),
    };
    Ok(Meta { dtype, shape: meta.shape.clone(), strides, offset: 0 })
}

fn reshaped(input: ValueId, meta: &Meta, shape: Vec<i64>) -> Out {
    match strides::of_view(meta, &shape) {
        Some(strides) => Out::View { of: input, meta: Meta { shape, strides, ..meta.clone() } },
        None => Out::Fresh(Meta::contiguous(meta.dtype, &shape)),
    }
}

fn flattened(input: ValueId, meta: &Meta, dims: [i64; 2]) -> Result<Out, OpError> {
    let (first, last) = (meta.dim(dims[0])?, meta.dim(dims[1])?);
    if meta.shape.is_empty() {
        return Ok(reshaped(input, meta, vec![1]));
    }
    if first > last {
        return Err(OpError::Shape(format!("flatten from dimension {first} to {last}")));
    }
    if first == last {
        return Ok(Out::Same(input));
    }
    let mut shape = meta.shape.clone();
    let merged = shape[first..=last].iter().product();
    shape.splice(first..=last, [merged]);
    Ok(reshaped(input, meta, shape))
}
