//! Operators that compute each element from those at its place, under PyTorch's rules of broadcasting and promotion.
//!
//! Two tensors with dimensions have one dtype. Where a program gives two, ATen promotes one inside of the operator; the graph
//! says so by a node ([`Copy::Promote`](super::Copy::Promote)), and what reaches the kernel is of one dtype. Tensors without
//! dimensions and Python's numbers take part in promotion as in PyTorch ([`crate::promote`]).

mod columns;
mod compute;
mod emit;
mod formula;
mod lower;
mod math;
mod names;
mod read;

use rapt_core::DType;

pub use emit::{Emitter, Look};
pub use formula::Formula;

use super::shape::need_same;
use super::{Target, fill};
use crate::number::is_float;
use crate::promote::{DEFAULT_FLOAT, Promotion};
use crate::{Args, Eval, Meta, Number, OpError, Out, Scalar, Shapes, Tensor, ValueId, strides};

/// A tensor or a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// A tensor.
    Tensor(ValueId),
    /// A number of Python.
    Number(Scalar),
}

/// A pointwise operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Pointwise {
    /// A function of one operand.
    Unary {
        /// The function.
        op: Unary,
        /// The tensor.
        input: ValueId,
        /// Where the result goes.
        target: Target,
    },
    /// A function of two operands.
    Binary {
        /// The function.
        op: Binary,
        /// The first; a tensor where the result goes into it.
        a: Operand,
        /// The second.
        b: Operand,
        /// What multiplies the second in sums and differences.
        alpha: Option<Scalar>,
        /// Where the result goes.
        target: Target,
    },
    /// `clamp` and its halves: between two bounds, the upper one deciding. NaN stays NaN, and a bound that is NaN gives NaN.
    Clamp {
        /// The tensor.
        input: ValueId,
        /// The lower bound.
        min: Option<Operand>,
        /// The upper bound.
        max: Option<Operand>,
        /// Where the result goes.
        target: Target,
    },
    /// `where`: the first operand where the condition is true, else the second.
    Where {
        /// Booleans.
        condition: ValueId,
        /// The first operand.
        a: Operand,
        /// The second operand.
        b: Operand,
    },
    /// `masked_fill`: a number where the mask is true.
    MaskedFill {
        /// The tensor.
        input: ValueId,
        /// Booleans.
        mask: ValueId,
        /// A number, or a tensor of one.
        value: Operand,
        /// Where the result goes.
        target: Target,
    },
    /// A function that is a formula of others.
    Formula {
        /// The formula.
        op: Formula,
        /// What it is a formula of; the first is a tensor where the result goes into it.
        operands: Vec<Operand>,
        /// Its numbers, which take no part in promotion.
        params: Vec<Option<Scalar>>,
        /// Where the result goes.
        target: Target,
    },
    /// `dropout` outside of training: the tensor itself.
    Dropout {
        /// The tensor.
        input: ValueId,
    },
}

/// A function of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "ATen's names, which ATen documents")]
pub enum Unary {
    Neg,
    Abs,
    Sign,
    Square,
    Relu,
    Floor,
    Ceil,
    Trunc,
    Round,
    Exp,
    Exp2,
    Expm1,
    Log,
    Log2,
    Log10,
    Log1p,
    Sin,
    Cos,
    Tan,
    Tanh,
    Sinh,
    Cosh,
    Asin,
    Acos,
    Atan,
    Asinh,
    Acosh,
    Atanh,
    Erf,
    Erfc,
    Sigmoid,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Silu,
    /// `gelu` with `approximate` none.
    Gelu,
    /// `gelu` with `approximate` tanh.
    GeluTanh,
    LogicalNot,
    BitwiseNot,
    IsNan,
    IsInf,
}

/// A function of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "ATen's names, which ATen documents")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    /// The true quotient, a float.
    Div,
    /// `div` with `rounding_mode` floor, `floor_divide`.
    DivFloor,
    /// `div` with `rounding_mode` trunc.
    DivTrunc,
    /// With the divisor's sign.
    Remainder,
    /// With the dividend's sign.
    Fmod,
    Pow,
    Maximum,
    Minimum,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    BitwiseAnd,
    BitwiseOr,
    BitwiseXor,
    LogicalAnd,
    LogicalOr,
    LogicalXor,
    /// The angle of the point (second, first).
    Atan2,
    /// `√(a² + b²)`.
    Hypot,
    /// The first with the sign of the second.
    Copysign,
    /// By as many bits as the second says; beyond the dtype's 0.
    ShiftLeft,
    /// The same to the right; the sign fills.
    ShiftRight,
}

impl Operand {
    /// A tensor or a number, by the argument's name.
    ///
    /// # Errors
    /// [`OpError`] where it is missing or neither.
    pub(super) fn read(args: &Args<'_>, name: &str) -> Result<Operand, OpError> {
        match args.raw(name) {
            Some(rapt_pt2::Argument::Tensor(_)) => args.tensor(name).map(Operand::Tensor),
            _ => args.scalar(name).map(Operand::Number),
        }
    }

    fn meta<'a>(&self, shapes: &'a dyn Shapes) -> Result<Option<&'a Meta>, OpError> {
        match self {
            Operand::Tensor(id) => shapes.meta(*id).map(Some),
            Operand::Number(_) => Ok(None),
        }
    }
}

impl Pointwise {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Pointwise, OpError>> {
        read::read(target, args)
    }

    /// Replaces operands that ATen would promote: tensors with dimensions whose dtypes differ. `form` gives dtype and rank,
    /// `cast` the promoted tensor. The tensor that an operation in place writes is not replaced: it is converted where it is read and
    /// where it is written.
    pub(crate) fn promote(
        &mut self,
        form: &dyn Fn(ValueId) -> Option<(DType, usize)>,
        cast: &mut dyn FnMut(ValueId, DType) -> ValueId,
    ) {
        let mut numbers = Vec::new();
        let (mut tensors, written): (Vec<&mut ValueId>, bool) = match self {
            Pointwise::Binary { a, b, target, .. } => (tensors_of([a, b], &mut numbers), *target == Target::Input),
            Pointwise::Where { a, b, .. } => (tensors_of([a, b], &mut numbers), false),
            Pointwise::Clamp { input, min, max, target } => {
                let bounds = tensors_of([min.as_mut(), max.as_mut()].into_iter().flatten(), &mut numbers);
                (std::iter::once(input).chain(bounds).collect(), *target == Target::Input)
            }
            Pointwise::Formula { op, operands, target, .. } if op.promotes() => {
                (tensors_of(operands.iter_mut(), &mut numbers), *target == Target::Input)
            }
            _ => return,
        };
        let Some((dtype, true)) = promoted(tensors.iter().map(|id| **id), &numbers, form) else { return };
        for id in tensors.iter_mut().skip(usize::from(written)) {
            if form(**id).is_some_and(|(own, _)| own != dtype) {
                **id = cast(**id, dtype);
            }
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        match self {
            Pointwise::Unary { input, target, .. }
            | Pointwise::Clamp { input, target, .. }
            | Pointwise::MaskedFill { input, target, .. } => target.mutates(*input),
            Pointwise::Binary { a: Operand::Tensor(input), target, .. } => target.mutates(*input),
            Pointwise::Formula { operands, target, .. } => match operands.first() {
                Some(Operand::Tensor(input)) => target.mutates(*input),
                _ => None,
            },
            Pointwise::Binary { .. } | Pointwise::Where { .. } | Pointwise::Dropout { .. } => None,
        }
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let out = match self {
            Pointwise::Unary { op, input, target } => {
                let meta = shapes.meta(*input)?;
                let form = result(op.dtypes(meta.dtype)?.1, &[meta])?;
                place(*target, *input, shapes, form)?
            }
            Pointwise::Binary { op, a, b, alpha, target } => {
                need_one_dtype(shapes, &[*a, *b], *target == Target::Input)?;
                let common = common(shapes, &[*a, *b])?;
                let alpha = alpha.map(|alpha| shapes.number(alpha)).transpose()?;
                if *op == Binary::Pow {
                    refuse_power(common, b, shapes)?;
                }
                let dtype = op.dtypes(common, alpha)?.1;
                // Of floats rounded down, and of signs that are copied, PyTorch's tracer lets the second tensor alone decide how
                // the result lies; eager PyTorch both. The program goes on from what its tracer says.
                let by_second = *op == Binary::Copysign || (*op == Binary::DivFloor && is_float(common));
                let order = match (b, by_second) {
                    (Operand::Tensor(_), true) => vec![*b],
                    _ => vec![*a, *b],
                };
                let shape = strides::broadcast(metas(shapes, &[*a, *b])?.iter().map(|meta| meta.shape.as_slice()))?;
                // It broadcasts numbers and makes booleans of them, before it joins these.
                let is_logical = matches!(op, Binary::LogicalAnd | Binary::LogicalOr | Binary::LogicalXor);
                let joined = |meta: &Meta| match is_logical && meta.dtype != DType::Bool {
                    true => result(DType::Bool, &[&meta.broadcast(&shape)]),
                    false => Ok(meta.clone()),
                };
                let lies = metas(shapes, &order)?.into_iter().map(joined).collect::<Result<Vec<Meta>, _>>()?;
                let lies: Vec<&Meta> = lies.iter().collect();
                let form = Meta { dtype, strides: strides::of_pointwise(&shape, &lies), shape, offset: 0 };
                match a {
                    Operand::Tensor(input) => place(*target, *input, shapes, form)?,
                    Operand::Number(_) => Out::Fresh(form),
                }
            }
            Pointwise::Clamp { input, min, max, target } => {
                let operands = clamp_operands(*input, *min, *max);
                need_one_dtype(shapes, &operands, *target == Target::Input)?;
                let common = common(shapes, &operands)?;
                // Between two bounds, or a number, PyTorch has no kernel for booleans.
                let one_tensor =
                    matches!((min, max), (Some(Operand::Tensor(_)), None) | (None, Some(Operand::Tensor(_))));
                if common == DType::Bool && !one_tensor {
                    return Err(OpError::Dtype { what: "clamp", dtype: common });
                }
                for bound in [min, max].into_iter().flatten() {
                    if let (Operand::Number(scalar), true) = (bound, is_float(common)) {
                        fill::element(common, shapes.number(*scalar)?)?;
                    }
                }
                place(*target, *input, shapes, result(common, &metas(shapes, &operands)?)?)?
            }
            Pointwise::Where { condition, a, b } => {
                let condition = shapes.meta(*condition)?;
                refuse_unless_bool("where", condition)?;
                need_one_dtype(shapes, &[*a, *b], false)?;
                let mut all = vec![condition];
                all.extend(metas(shapes, &[*a, *b])?);
                Out::Fresh(result(common(shapes, &[*a, *b])?, &all)?)
            }
            Pointwise::MaskedFill { input, mask, value, target } => {
                let (meta, mask) = (shapes.meta(*input)?, shapes.meta(*mask)?);
                refuse_unless_bool("masked_fill", mask)?;
                match value {
                    Operand::Number(scalar) => drop(fill::element(meta.dtype, shapes.number(*scalar)?)?),
                    Operand::Tensor(id) if shapes.meta(*id)?.rank() > 0 => {
                        return Err(OpError::Shape("masked_fill takes a number or a tensor without dimensions".into()));
                    }
                    Operand::Tensor(_) => {}
                }
                // Row-major whatever the operands: PyTorch clones the tensor so before it fills.
                let shape = strides::broadcast([meta.shape.as_slice(), &mask.shape])?;
                target.out(*input, shapes, Meta::contiguous(meta.dtype, &shape))?
            }
            Pointwise::Formula { op, operands, params, target } => {
                need_one_dtype(shapes, operands, op.promotes() && *target == Target::Input)?;
                let dtype = op.dtypes(common(shapes, operands)?)?.1;
                op.refuse(shapes, operands, params)?;
                let seen = seen(*op, shapes, operands)?;
                let form = result(dtype, &seen.iter().collect::<Vec<_>>())?;
                if *op == Formula::LogSigmoidForward {
                    return Ok(vec![Out::Fresh(form.clone()), Out::Fresh(form)]);
                }
                match operands.first() {
                    Some(Operand::Tensor(input)) => place(*target, *input, shapes, form)?,
                    _ => Out::Fresh(form),
                }
            }
            Pointwise::Dropout { input } => {
                shapes.meta(*input)?;
                Out::Same(*input)
            }
        };
        Ok(vec![out])
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        compute::run(self, eval, outs)
    }
}

/// The tensors among operands; the numbers are put aside.
fn tensors_of<'a>(
    operands: impl IntoIterator<Item = &'a mut Operand>,
    numbers: &mut Vec<Scalar>,
) -> Vec<&'a mut ValueId> {
    let one = |operand: &'a mut Operand| match operand {
        Operand::Tensor(id) => Some(id),
        Operand::Number(number) => {
            numbers.push(*number);
            None
        }
    };
    operands.into_iter().filter_map(one).collect()
}

/// The dtype to which ATen promotes tensors, and whether those with dimensions differ in theirs.
pub(super) fn promoted(
    tensors: impl Iterator<Item = ValueId>,
    numbers: &[Scalar],
    form: &dyn Fn(ValueId) -> Option<(DType, usize)>,
) -> Option<(DType, bool)> {
    let mut promotion = Promotion::default();
    for number in numbers {
        promotion = promotion.number(match number {
            Scalar::Int(_) => Number::Int(0),
            Scalar::Bool(_) => Number::Bool(false),
            _ => Number::Float(0.0),
        });
    }
    let mut dtypes = Vec::new();
    for id in tensors {
        let (dtype, rank) = form(id)?;
        promotion = promotion.tensor(&Meta::contiguous(dtype, &vec![1; rank]));
        dtypes.extend((rank > 0).then_some(dtype));
    }
    Some((promotion.result(), dtypes.windows(2).any(|pair| pair[0] != pair[1])))
}

fn clamp_operands(input: ValueId, min: Option<Operand>, max: Option<Operand>) -> Vec<Operand> {
    [Some(Operand::Tensor(input)), min, max].into_iter().flatten().collect()
}

fn metas<'a>(shapes: &'a dyn Shapes, operands: &[Operand]) -> Result<Vec<&'a Meta>, OpError> {
    operands.iter().filter_map(|operand| operand.meta(shapes).transpose()).collect()
}

/// The tensors among a formula's operands, as it sees them.
fn seen(op: Formula, shapes: &dyn Shapes, operands: &[Operand]) -> Result<Vec<Meta>, OpError> {
    let rank = operands[0].meta(shapes)?.map_or(0, Meta::rank);
    let one = |(n, operand): (usize, &Operand)| {
        let meta = operand.meta(shapes).transpose()?;
        Some(meta.and_then(|meta| op.look(n, rank).map_or_else(|| Ok(meta.clone()), |look| look.of(meta))))
    };
    operands.iter().enumerate().filter_map(one).collect()
}

/// The dtype that promotion gives.
fn common(shapes: &dyn Shapes, operands: &[Operand]) -> Result<DType, OpError> {
    let mut promotion = Promotion::default();
    for operand in operands {
        promotion = match operand {
            Operand::Number(scalar) => promotion.number(shapes.number(*scalar)?),
            Operand::Tensor(id) => promotion.tensor(shapes.meta(*id)?),
        };
    }
    Ok(promotion.result())
}

/// That tensors with dimensions have one dtype, but for one that is written: that it is converted is part of the operation.
fn need_one_dtype(shapes: &dyn Shapes, operands: &[Operand], written: bool) -> Result<(), OpError> {
    let mut first = None;
    for meta in metas(shapes, &operands[usize::from(written)..])? {
        if meta.rank() > 0 {
            need_same(*first.get_or_insert(meta.dtype), meta.dtype)?;
        }
    }
    Ok(())
}

fn result(dtype: DType, operands: &[&Meta]) -> Result<Meta, OpError> {
    let shape = strides::broadcast(operands.iter().map(|meta| meta.shape.as_slice()))?;
    let strides = strides::of_pointwise(&shape, operands);
    Ok(Meta { dtype, shape, strides, offset: 0 })
}

/// The result at its place. In place, a dtype of a higher category is refused, as in PyTorch.
fn place(target: Target, input: ValueId, shapes: &dyn Shapes, form: Meta) -> Result<Out, OpError> {
    if target == Target::Input {
        let own = shapes.meta(input)?.dtype;
        let loses = (is_float(form.dtype) && !is_float(own)) || (form.dtype != DType::Bool && own == DType::Bool);
        if loses {
            return Err(OpError::DtypesDiffer(form.dtype, own));
        }
    }
    target.out(input, shapes, form)
}

fn refuse_unless_bool(what: &'static str, condition: &Meta) -> Result<(), OpError> {
    if condition.dtype == DType::Bool { Ok(()) } else { Err(OpError::Dtype { what, dtype: condition.dtype }) }
}

/// Powers that PyTorch refuses: of integers by a negative number, of booleans by a tensor.
fn refuse_power(common: DType, exponent: &Operand, shapes: &dyn Shapes) -> Result<(), OpError> {
    let number = match exponent {
        Operand::Number(scalar) => Some(shapes.number(*scalar)?),
        Operand::Tensor(_) => None,
    };
    match number {
        Some(Number::Int(n)) if n < 0 && !is_float(common) => {
            Err(OpError::Refused("integers to negative integer powers are not allowed"))
        }
        None if common == DType::Bool => Err(OpError::Dtype { what: "pow", dtype: common }),
        _ => Ok(()),
    }
}

impl Unary {
    /// The dtype in which it computes, and that of its result.
    fn dtypes(self, input: DType) -> Result<(DType, DType), OpError> {
        let refused = |what| Err(OpError::Dtype { what, dtype: input });
        let float = if is_float(input) { input } else { DEFAULT_FLOAT };
        match self {
            Unary::Neg if input == DType::Bool => refused("neg"),
            Unary::Abs if input == DType::Bool => refused("abs"),
            Unary::Relu if input == DType::Bool => refused("relu"),
            Unary::Floor | Unary::Ceil | Unary::Trunc | Unary::Round if input == DType::Bool => refused("rounding"),
            Unary::Silu if !is_float(input) => refused("silu"),
            Unary::Gelu | Unary::GeluTanh if !is_float(input) => refused("gelu"),
            Unary::BitwiseNot if is_float(input) => refused("bitwise_not"),
            // A square is a power, and the power of a boolean by an integer is an integer.
            Unary::Square if input == DType::Bool => Ok((DType::I64, DType::I64)),
            Unary::LogicalNot | Unary::IsNan | Unary::IsInf => Ok((input, DType::Bool)),
            _ if self.is_of_floats() => Ok((float, float)),
            _ => Ok((input, input)),
        }
    }

    /// Whether integers become floats before it.
    fn is_of_floats(self) -> bool {
        use Unary::{
            Acos, Acosh, Asin, Asinh, Atan, Atanh, Cos, Cosh, Erf, Erfc, Exp, Exp2, Expm1, Gelu, GeluTanh, Log, Log1p,
            Log2, Log10, Reciprocal, Rsqrt, Sigmoid, Silu, Sin, Sinh, Sqrt, Tan, Tanh,
        };
        matches!(
            self,
            Acos | Acosh
                | Asin
                | Asinh
                | Atan
                | Atanh
                | Cosh
                | Sinh
                | Erfc
                | Exp
                | Exp2
                | Expm1
                | Log
                | Log2
                | Log10
                | Log1p
                | Sin
                | Cos
                | Tan
                | Tanh
                | Erf
                | Sigmoid
                | Sqrt
                | Rsqrt
                | Reciprocal
                | Silu
                | Gelu
                | GeluTanh
        )
    }
}

impl Binary {
    /// The dtype in which it computes, and that of its result.
    fn dtypes(self, common: DType, alpha: Option<Number>) -> Result<(DType, DType), OpError> {
        let refused = |what| Err(OpError::Dtype { what, dtype: common });
        match alpha {
            Some(Number::Float(_)) if !is_float(common) => {
                return Err(OpError::Refused("alpha is a float, and the operands are integers"));
            }
            Some(Number::Bool(_)) if common != DType::Bool => {
                return Err(OpError::Refused("alpha is a boolean, and the operands are not"));
            }
            _ => {}
        }
        let is_bool = common == DType::Bool;
        match self {
            Binary::Sub if is_bool => refused("sub"),
            Binary::DivFloor | Binary::DivTrunc if is_bool => refused("division"),
            Binary::Remainder | Binary::Fmod if is_bool => refused("remainder"),
            Binary::BitwiseAnd | Binary::BitwiseOr | Binary::BitwiseXor if is_float(common) => {
                refused("a bitwise operator")
            }
            Binary::ShiftLeft | Binary::ShiftRight if is_float(common) || is_bool => refused("a shift"),
            Binary::Hypot if !is_float(common) => refused("hypot"),
            Binary::Div | Binary::Atan2 | Binary::Copysign if !is_float(common) => Ok((DEFAULT_FLOAT, DEFAULT_FLOAT)),
            Binary::Eq
            | Binary::Ne
            | Binary::Lt
            | Binary::Le
            | Binary::Gt
            | Binary::Ge
            | Binary::LogicalAnd
            | Binary::LogicalOr
            | Binary::LogicalXor => Ok((common, DType::Bool)),
            _ => Ok((common, common)),
        }
    }

    /// Whether a number keeps float32's precision beside float16 and bfloat16, as in ATen's kernels of products and quotients.
    fn keeps_numbers(self) -> bool {
        matches!(self, Binary::Mul | Binary::Div | Binary::DivFloor | Binary::DivTrunc)
    }
}
