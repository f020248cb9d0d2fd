//! Arithmetic on sizes, in Python's rules and in 64 bits, and what programs assert.

use rapt_core::{DType, float64};
use rapt_pt2::Argument;

use crate::{Args, Eval, Int, Meta, Number, OpError, Out, Scalar, Shapes, Tensor, ValueId};

/// An operation on sizes, or a check.
#[derive(Clone, Debug, PartialEq)]
pub enum Sym {
    /// `sym_size.int`: the size of a dimension.
    Size(ValueId, i64),
    /// `sym_stride.int`: the stride of a dimension.
    Stride(ValueId, i64),
    /// `sym_numel`: the number of elements.
    Numel(ValueId),
    /// `sym_storage_offset`: the first element's place.
    Offset(ValueId),
    /// An operator of Python on numbers; the second operand is missing where there is one.
    Op(SymOp, SymArg, Option<SymArg>),
    /// `torch.sym_ite`: one of two numbers.
    Select(SymArg, SymArg, SymArg),
    /// `_assert_scalar`: that a condition holds.
    Assert(SymArg, String),
    /// `_assert_async`: that a tensor of one element is not 0.
    AssertTensor(ValueId, String),
    /// `sym_constrain_range`, `sym_constrain_range_for_size`: that a number lies between these.
    Range(Int, Option<i64>, Option<i64>),
    /// `_assert_tensor_metadata`: that a tensor has this form, where one is named.
    Form {
        /// The tensor.
        input: ValueId,
        /// Its sizes.
        size: Option<Vec<Int>>,
        /// Its strides.
        stride: Option<Vec<Int>>,
        /// Its dtype.
        dtype: Option<DType>,
    },
}

/// A number, or a symbolic boolean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SymArg {
    /// A number.
    Number(Scalar),
    /// A symbolic boolean.
    Bool(ValueId),
}

/// An operator of Python on numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SymOp {
    /// `+`.
    Add,
    /// `-`.
    Sub,
    /// `*`.
    Mul,
    /// `//`, rounded down.
    FloorDiv,
    /// `/`, a float.
    TrueDiv,
    /// `%`, with the divisor's sign.
    Mod,
    /// `**`.
    Pow,
    /// The less.
    Min,
    /// The greater.
    Max,
    /// `-` of one.
    Neg,
    /// `+` of one.
    Pos,
    /// `==`.
    Eq,
    /// `!=`.
    Ne,
    /// `<`.
    Lt,
    /// `<=`.
    Le,
    /// `>`.
    Gt,
    /// `>=`.
    Ge,
    /// `&`.
    And,
    /// `|`.
    Or,
    /// `torch.sym_not`.
    Not,
    /// `torch.sym_float`.
    Float,
    /// `torch.sym_int`, `math.trunc`: towards 0.
    Int,
    /// `torch.sym_sqrt`.
    Sqrt,
}

impl Sym {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Sym, OpError>> {
        let tensor = || args.tensor("self");
        Some(match target {
            "torch.ops.aten.sym_size.int" => tensor().and_then(|x| Ok(Sym::Size(x, args.known_int("dim")?))),
            "torch.ops.aten.sym_stride.int" => tensor().and_then(|x| Ok(Sym::Stride(x, args.known_int("dim")?))),
            "torch.ops.aten.sym_numel.default" => tensor().map(Sym::Numel),
            "torch.ops.aten.sym_storage_offset.default" => tensor().map(Sym::Offset),
            "torch.ops.aten._assert_scalar.default" => {
                SymArg::read(args, "self").and_then(|condition| Ok(Sym::Assert(condition, text(args)?)))
            }
            "torch.ops.aten._assert_async.msg" => tensor().and_then(|x| Ok(Sym::AssertTensor(x, text(args)?))),
            "torch.ops.aten.sym_constrain_range_for_size.default" | "torch.ops.aten.sym_constrain_range.default" => {
                range(args, target.ends_with("for_size.default"))
            }
            "torch.ops.aten._assert_tensor_metadata.default" => asserted_form(args),
            "torch.sym_ite" => SymArg::read(args, "b")
                .and_then(|condition| Ok(Sym::Select(condition, SymArg::read(args, "t")?, SymArg::read(args, "f")?))),
            _ => return SymOp::named(target).map(|op| operator(op, args)),
        })
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let at = |meta: &Meta, of: &[i64], dim: i64| match meta.shape.len() {
            0 => Err(OpError::DimOutOfRange { dim, rank: 0 }),
            _ => Ok(vec![Out::Int(of[meta.dim(dim)?])]),
        };
        match self {
            Sym::Size(id, dim) => shapes.meta(*id).and_then(|meta| at(meta, &meta.shape, *dim)),
            Sym::Stride(id, dim) => shapes.meta(*id).and_then(|meta| at(meta, &meta.strides, *dim)),
            Sym::Numel(id) => Ok(vec![Out::Int(shapes.meta(*id)?.numel())]),
            Sym::Offset(id) => Ok(vec![Out::Int(shapes.meta(*id)?.offset)]),
            Sym::Op(op, a, b) => {
                let b = b.map(|b| b.number(shapes)).transpose()?;
                Ok(vec![out(op.of(a.number(shapes)?, b)?)])
            }
            Sym::Select(condition, then, other) => {
                let taken = if truth(condition.number(shapes)?) { then } else { other };
                Ok(vec![out(taken.number(shapes)?)])
            }
            Sym::Assert(condition, message) => {
                holds(truth(condition.number(shapes)?), "false", || message.clone())?;
                Ok(Vec::new())
            }
            Sym::AssertTensor(id, _) => match shapes.meta(*id)?.numel() {
                1 => Ok(Vec::new()),
                n => Err(OpError::Shape(format!("a tensor of {n} elements is no condition"))),
            },
            Sym::Range(int, min, max) => {
                let n = shapes.int(*int)?;
                let inside = min.is_none_or(|min| n >= min) && max.is_none_or(|max| n <= max);
                holds(inside, &n.to_string(), || format!("from {min:?} to {max:?}"))?;
                Ok(Vec::new())
            }
            Sym::Form { input, size, stride, dtype } => {
                let meta = shapes.meta(*input)?;
                let list = |ints: &Option<Vec<Int>>| ints.as_ref().map(|ints| shapes.ints(ints)).transpose();
                let stated = Meta {
                    dtype: dtype.unwrap_or(meta.dtype),
                    shape: list(size)?.unwrap_or_else(|| meta.shape.clone()),
                    strides: list(stride)?.unwrap_or_else(|| meta.strides.clone()),
                    offset: meta.offset,
                };
                let same = stated.strides.len() == meta.rank() && meta.agrees(&stated);
                holds(same, &meta.to_string(), || stated.to_string())?;
                Ok(Vec::new())
            }
        }
    }

    pub(super) fn eval(&self, eval: &dyn Eval, _: &[Tensor]) -> Result<(), OpError> {
        if let Sym::AssertTensor(id, message) = self {
            let holds_now = eval.tensor(*id)?.floats().iter().all(|&x| x != 0.0);
            return holds(holds_now, "0", || message.clone());
        }
        Ok(())
    }
}

fn text(args: &Args<'_>) -> Result<String, OpError> {
    Ok(args.opt_str("assert_msg")?.unwrap_or("the condition").to_owned())
}

fn holds(condition: bool, got: &str, asserted: impl FnOnce() -> String) -> Result<(), OpError> {
    if condition { Ok(()) } else { Err(OpError::Assertion { asserted: asserted(), got: got.into() }) }
}

fn out(number: Number) -> Out {
    match number {
        Number::Int(n) => Out::Int(n),
        Number::Float(x) => Out::Float(x),
        Number::Bool(b) => Out::Bool(b),
    }
}

fn truth(number: Number) -> bool {
    match number {
        Number::Int(n) => n != 0,
        Number::Float(x) => x != 0.0,
        Number::Bool(b) => b,
    }
}

fn range(args: &Args<'_>, of_size: bool) -> Result<Sym, OpError> {
    let bound = |name: &str| match args.opt_int(name)? {
        None => Ok(None),
        Some(Int::Known(n)) => Ok(Some(n)),
        Some(Int::Value(_)) => {
            Err(OpError::ArgumentValue { name: name.into(), value: "symbolic".into(), why: "bounds are numbers" })
        }
    };
    let min = bound("min")?.or(of_size.then_some(0));
    Ok(Sym::Range(args.int("size")?, min, bound("max")?))
}

fn asserted_form(args: &Args<'_>) -> Result<Sym, OpError> {
    args.place()?;
    Ok(Sym::Form {
        input: args.tensor("a")?,
        size: args.opt_ints("size")?,
        stride: args.opt_ints("stride")?,
        dtype: args.opt_dtype("dtype")?,
    })
}

fn operator(op: SymOp, args: &Args<'_>) -> Result<Sym, OpError> {
    // `math.trunc` calls its operand x.
    let first = if args.raw("x").is_some() { "x" } else { "a" };
    let a = SymArg::read(args, first)?;
    let unary = matches!(op, SymOp::Neg | SymOp::Pos | SymOp::Not | SymOp::Float | SymOp::Int | SymOp::Sqrt);
    Ok(Sym::Op(op, a, if unary { None } else { Some(SymArg::read(args, "b")?) }))
}

impl SymArg {
    fn read(args: &Args<'_>, name: &str) -> Result<SymArg, OpError> {
        match args.raw(name) {
            Some(Argument::SymBool(_)) => {
                let id = args.sym_bool(name)?.ok_or_else(|| OpError::MissingArgument(name.into()))?;
                Ok(SymArg::Bool(id))
            }
            _ => args.scalar(name).map(SymArg::Number),
        }
    }

    fn number(self, shapes: &dyn Shapes) -> Result<Number, OpError> {
        match self {
            SymArg::Number(scalar) => shapes.number(scalar),
            SymArg::Bool(id) => shapes.bool(id).map(Number::Bool),
        }
    }
}

impl SymOp {
    fn named(target: &str) -> Option<SymOp> {
        Some(match target {
            "_operator.add" => SymOp::Add,
            "_operator.sub" => SymOp::Sub,
            "_operator.mul" => SymOp::Mul,
            "_operator.floordiv" => SymOp::FloorDiv,
            "_operator.truediv" => SymOp::TrueDiv,
            "_operator.mod" => SymOp::Mod,
            "_operator.pow" => SymOp::Pow,
            "_operator.neg" => SymOp::Neg,
            "_operator.pos" => SymOp::Pos,
            "_operator.eq" => SymOp::Eq,
            "_operator.ne" => SymOp::Ne,
            "_operator.lt" => SymOp::Lt,
            "_operator.le" => SymOp::Le,
            "_operator.gt" => SymOp::Gt,
            "_operator.ge" => SymOp::Ge,
            "_operator.and_" => SymOp::And,
            "_operator.or_" => SymOp::Or,
            "torch.sym_min" => SymOp::Min,
            "torch.sym_max" => SymOp::Max,
            "torch.sym_not" => SymOp::Not,
            "torch.sym_float" => SymOp::Float,
            "torch.sym_int" | "math.trunc" => SymOp::Int,
            "torch.sym_sqrt" => SymOp::Sqrt,
            _ => return None,
        })
    }

    /// The operator on numbers: integers stay exact, or are an error.
    fn of(self, a: Number, b: Option<Number>) -> Result<Number, OpError> {
        let int = |number: Number| match number {
            Number::Int(n) => Some(n),
            Number::Bool(flag) => Some(i64::from(flag)),
            Number::Float(_) => None,
        };
        let float = |number: Number| match number {
            Number::Float(x) => x,
            number => int(number).unwrap_or(0) as f64,
        };
        let Some(b) = b else { return self.of_one(int(a), float(a)) };
        match self {
            // Booleans with booleans give booleans.
            SymOp::And | SymOp::Or if matches!((a, b), (Number::Bool(_), Number::Bool(_))) => {
                let (a, b) = (truth(a), truth(b));
                return Ok(Number::Bool(if self == SymOp::And { a && b } else { a || b }));
            }
            SymOp::TrueDiv => {
                if float(b) == 0.0 {
                    return Err(OpError::ZeroDivision);
                }
                return Ok(Number::Float(float(a) / float(b)));
            }
            _ => {}
        }
        match (int(a), int(b)) {
            (Some(a), Some(b)) => self.of_ints(a, b),
            _ => self.of_floats(float(a), float(b)),
        }
    }

    fn of_one(self, int: Option<i64>, float: f64) -> Result<Number, OpError> {
        let overflow = |x: f64| OpError::Overflow { value: x.to_string(), dtype: DType::I64 };
        Ok(match (self, int) {
            (SymOp::Neg, Some(n)) => Number::Int(n.checked_neg().ok_or_else(|| overflow(float))?),
            (SymOp::Neg, None) => Number::Float(-float),
            (SymOp::Pos | SymOp::Int, Some(n)) => Number::Int(n),
            (SymOp::Int, None) if float.abs() < 9.2e18 => Number::Int(float as i64),
            (SymOp::Int, None) => return Err(overflow(float)),
            (SymOp::Not, _) => Number::Bool(float == 0.0),
            (SymOp::Sqrt, _) => Number::Float(float.sqrt()),
            _ => Number::Float(float),
        })
    }

    fn of_ints(self, a: i64, b: i64) -> Result<Number, OpError> {
        let whole = |result: Option<i64>| {
            let overflow = || OpError::Overflow { value: format!("{self:?} of {a} and {b}"), dtype: DType::I64 };
            result.map(Number::Int).ok_or_else(overflow)
        };
        match self {
            SymOp::Add => whole(a.checked_add(b)),
            SymOp::Sub => whole(a.checked_sub(b)),
            SymOp::Mul => whole(a.checked_mul(b)),
            SymOp::FloorDiv | SymOp::Mod if b == 0 => Err(OpError::ZeroDivision),
            SymOp::FloorDiv => {
                let rounds_down = a.wrapping_rem(b) != 0 && (a < 0) != (b < 0);
                whole(a.checked_div(b).map(|quotient| quotient - i64::from(rounds_down)))
            }
            SymOp::Mod => {
                let rest = a.wrapping_rem(b);
                Ok(Number::Int(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }))
            }
            SymOp::Pow if b < 0 => self.of_floats(a as f64, b as f64),
            SymOp::Pow => whole(u32::try_from(b).ok().and_then(|b| a.checked_pow(b))),
            SymOp::Min => Ok(Number::Int(a.min(b))),
            SymOp::Max => Ok(Number::Int(a.max(b))),
            SymOp::And => Ok(Number::Int(a & b)),
            SymOp::Or => Ok(Number::Int(a | b)),
            _ => Ok(Number::Bool(self.compares(a.cmp(&b)))),
        }
    }

    fn of_floats(self, a: f64, b: f64) -> Result<Number, OpError> {
        let compared = |op: SymOp| a.partial_cmp(&b).map_or(op == SymOp::Ne, |order| op.compares(order));
        Ok(Number::Float(match self {
            SymOp::Add => a + b,
            SymOp::Sub => a - b,
            SymOp::Mul => a * b,
            SymOp::FloorDiv | SymOp::Mod if b == 0.0 => return Err(OpError::ZeroDivision),
            SymOp::FloorDiv => (a / b).floor(),
            SymOp::Mod => {
                let rest = a % b;
                if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
            }
            SymOp::Pow => float64::pow(a, b),
            SymOp::Min => a.min(b),
            SymOp::Max => a.max(b),
            SymOp::And | SymOp::Or => return Err(OpError::Refused("bits of a float")),
            _ => return Ok(Number::Bool(compared(self))),
        }))
    }

    fn compares(self, order: std::cmp::Ordering) -> bool {
        match self {
            SymOp::Eq => order.is_eq(),
            SymOp::Ne => order.is_ne(),
            SymOp::Lt => order.is_lt(),
            SymOp::Le => order.is_le(),
            SymOp::Gt => order.is_gt(),
            _ => order.is_ge(),
        }
    }
}
