//! ATen's overloads as pointwise operations.

use super::super::Target;
use super::{Binary, Operand, Pointwise, Unary, names};
use crate::{Args, OpError};

pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Pointwise, OpError>> {
    let (name, overload) = target.strip_prefix("torch.ops.aten.")?.split_once('.')?;
    let (base, place) = Target::of(name);
    if overload == "default"
        && let Some(op) = unary(base)
    {
        return Some(args.tensor("self").map(|input| Pointwise::Unary { op, input, target: place }));
    }
    if let Some(formula) = names::read(base, overload, args, place) {
        return Some(formula);
    }
    let number_or_tensor = matches!(overload, "Tensor" | "Scalar");
    Some(match (base, overload) {
        ("gelu", "default") => gelu(args, place),
        ("clamp" | "clip", "default" | "Tensor") => clamp(args, "min", "max", place),
        ("clamp_min", "default" | "Tensor") => clamp(args, "min", "", place),
        ("clamp_max", "default" | "Tensor") => clamp(args, "", "max", place),
        ("where", "self" | "ScalarOther" | "ScalarSelf" | "Scalar") if place == Target::Fresh => choose(args),
        ("masked_fill", "Scalar" | "Tensor") => masked_fill(args, place),
        ("dropout" | "feature_dropout" | "alpha_dropout" | "feature_alpha_dropout", "default") => dropout(args),
        ("rsub", "Tensor" | "Scalar") if place == Target::Fresh => reversed(args),
        ("add" | "sub" | "subtract", "Tensor" | "Scalar") => with_alpha(base, args, place),
        ("div" | "divide" | "true_divide", "Tensor" | "Scalar") => binary(Binary::Div, ["self", "other"], args, place),
        ("div" | "divide", "Tensor_mode" | "Scalar_mode") => rounded_quotient(args, place),
        ("pow", "Tensor_Scalar" | "Tensor_Tensor" | "Scalar") => binary(Binary::Pow, ["self", "exponent"], args, place),
        // In place both overloads are named after the exponent alone.
        ("pow", "Tensor") if place == Target::Input => binary(Binary::Pow, ["self", "exponent"], args, place),
        ("max", "other") => binary(Binary::Maximum, ["self", "other"], args, place),
        ("min", "other") => binary(Binary::Minimum, ["self", "other"], args, place),
        ("floor_divide", "default") => binary(Binary::DivFloor, ["self", "other"], args, place),
        ("maximum", "default") => binary(Binary::Maximum, ["self", "other"], args, place),
        ("minimum", "default") => binary(Binary::Minimum, ["self", "other"], args, place),
        ("atan2" | "arctan2", "default") => binary(Binary::Atan2, ["self", "other"], args, place),
        ("hypot", "default") => binary(Binary::Hypot, ["self", "other"], args, place),
        ("logical_and", "default") => binary(Binary::LogicalAnd, ["self", "other"], args, place),
        ("logical_or", "default") => binary(Binary::LogicalOr, ["self", "other"], args, place),
        ("logical_xor", "default") => binary(Binary::LogicalXor, ["self", "other"], args, place),
        ("bitwise_left_shift", "Tensor_Scalar" | "Scalar_Tensor") => {
            binary(Binary::ShiftLeft, ["self", "other"], args, place)
        }
        ("bitwise_right_shift", "Tensor_Scalar" | "Scalar_Tensor") => {
            binary(Binary::ShiftRight, ["self", "other"], args, place)
        }
        ("bitwise_and" | "bitwise_or" | "bitwise_xor", "Scalar_Tensor") => {
            binary(plain(base)?, ["self", "other"], args, place)
        }
        ("remainder", "Scalar_Tensor") => binary(Binary::Remainder, ["self", "other"], args, place),
        (base, _) if number_or_tensor => binary(plain(base)?, ["self", "other"], args, place),
        _ => return None,
    })
}

fn unary(base: &str) -> Option<Unary> {
    Some(match base {
        "neg" | "negative" => Unary::Neg,
        "abs" | "absolute" => Unary::Abs,
        "sign" | "sgn" => Unary::Sign,
        "square" => Unary::Square,
        "relu" => Unary::Relu,
        "floor" => Unary::Floor,
        "ceil" => Unary::Ceil,
        "trunc" | "fix" => Unary::Trunc,
        "round" => Unary::Round,
        "exp" => Unary::Exp,
        "exp2" | "special_exp2" => Unary::Exp2,
        "expm1" | "special_expm1" => Unary::Expm1,
        "log" => Unary::Log,
        "log2" => Unary::Log2,
        "log10" => Unary::Log10,
        "log1p" | "special_log1p" => Unary::Log1p,
        "sin" => Unary::Sin,
        "cos" => Unary::Cos,
        "tan" => Unary::Tan,
        "tanh" => Unary::Tanh,
        "sinh" => Unary::Sinh,
        "cosh" => Unary::Cosh,
        "asin" | "arcsin" => Unary::Asin,
        "acos" | "arccos" => Unary::Acos,
        "atan" | "arctan" => Unary::Atan,
        "asinh" | "arcsinh" => Unary::Asinh,
        "acosh" | "arccosh" => Unary::Acosh,
        "atanh" | "arctanh" => Unary::Atanh,
        "erf" | "special_erf" => Unary::Erf,
        "erfc" | "special_erfc" => Unary::Erfc,
        "sigmoid" | "special_expit" => Unary::Sigmoid,
        "sqrt" => Unary::Sqrt,
        "rsqrt" => Unary::Rsqrt,
        "reciprocal" => Unary::Reciprocal,
        "silu" => Unary::Silu,
        "logical_not" => Unary::LogicalNot,
        "bitwise_not" => Unary::BitwiseNot,
        "isnan" => Unary::IsNan,
        "isinf" => Unary::IsInf,
        _ => return None,
    })
}

/// Functions with the overloads `Tensor` and `Scalar` and no more arguments.
fn plain(base: &str) -> Option<Binary> {
    Some(match base {
        "mul" | "multiply" => Binary::Mul,
        "floor_divide" => Binary::DivFloor,
        "remainder" => Binary::Remainder,
        "fmod" => Binary::Fmod,
        "eq" => Binary::Eq,
        "ne" | "not_equal" => Binary::Ne,
        "lt" | "less" => Binary::Lt,
        "le" | "less_equal" => Binary::Le,
        "gt" | "greater" => Binary::Gt,
        "ge" | "greater_equal" => Binary::Ge,
        "__and__" | "bitwise_and" => Binary::BitwiseAnd,
        "__or__" | "bitwise_or" => Binary::BitwiseOr,
        "__xor__" | "bitwise_xor" => Binary::BitwiseXor,
        "__lshift__" | "bitwise_left_shift" => Binary::ShiftLeft,
        "__rshift__" | "bitwise_right_shift" => Binary::ShiftRight,
        "copysign" => Binary::Copysign,
        _ => return None,
    })
}

fn binary(op: Binary, names: [&str; 2], args: &Args<'_>, target: Target) -> Result<Pointwise, OpError> {
    let [a, b] = [Operand::read(args, names[0])?, Operand::read(args, names[1])?];
    Ok(Pointwise::Binary { op, a, b, alpha: None, target })
}

fn with_alpha(base: &str, args: &Args<'_>, target: Target) -> Result<Pointwise, OpError> {
    let op = if base == "add" { Binary::Add } else { Binary::Sub };
    let [a, b] = [Operand::read(args, "self")?, Operand::read(args, "other")?];
    Ok(Pointwise::Binary { op, a, b, alpha: args.opt_scalar("alpha")?, target })
}

/// `rsub`: other − alpha·self.
fn reversed(args: &Args<'_>) -> Result<Pointwise, OpError> {
    let [a, b] = [Operand::read(args, "other")?, Operand::read(args, "self")?];
    Ok(Pointwise::Binary { op: Binary::Sub, a, b, alpha: args.opt_scalar("alpha")?, target: Target::Fresh })
}

fn rounded_quotient(args: &Args<'_>, target: Target) -> Result<Pointwise, OpError> {
    let op = match args.opt_str("rounding_mode")? {
        None => Binary::Div,
        Some("floor") => Binary::DivFloor,
        Some("trunc") => Binary::DivTrunc,
        Some(other) => {
            return Err(OpError::ArgumentValue {
                name: "rounding_mode".into(),
                value: other.into(),
                why: "the modes are floor and trunc",
            });
        }
    };
    binary(op, ["self", "other"], args, target)
}

fn gelu(args: &Args<'_>, target: Target) -> Result<Pointwise, OpError> {
    let op = match args.opt_str("approximate")? {
        None | Some("none") => Unary::Gelu,
        Some("tanh") => Unary::GeluTanh,
        Some(other) => {
            return Err(OpError::ArgumentValue {
                name: "approximate".into(),
                value: other.into(),
                why: "the approximations are none and tanh",
            });
        }
    };
    Ok(Pointwise::Unary { op, input: args.tensor("self")?, target })
}

fn clamp(args: &Args<'_>, min: &str, max: &str, target: Target) -> Result<Pointwise, OpError> {
    let bound = |name: &str| match args.raw(name) {
        None | Some(rapt_pt2::Argument::None) => Ok(None),
        Some(_) => Operand::read(args, name).map(Some),
    };
    let (min, max) = (bound(min)?, bound(max)?);
    if min.is_none() && max.is_none() {
        return Err(OpError::MissingArgument("min or max".into()));
    }
    Ok(Pointwise::Clamp { input: args.tensor("self")?, min, max, target })
}

fn choose(args: &Args<'_>) -> Result<Pointwise, OpError> {
    let condition = args.tensor("condition")?;
    Ok(Pointwise::Where { condition, a: Operand::read(args, "self")?, b: Operand::read(args, "other")? })
}

fn masked_fill(args: &Args<'_>, target: Target) -> Result<Pointwise, OpError> {
    let (input, mask) = (args.tensor("self")?, args.tensor("mask")?);
    Ok(Pointwise::MaskedFill { input, mask, value: Operand::read(args, "value")?, target })
}

fn dropout(args: &Args<'_>) -> Result<Pointwise, OpError> {
    // In place it is named otherwise.
    let input = args.opt_tensor("input")?.map_or_else(|| args.tensor("self"), Ok)?;
    let rate = args.opt_float("p")?.ok_or_else(|| OpError::MissingArgument("p".into()))?;
    // A rate of 0 drops nothing in training either.
    if args.bool_or("train", false)? && rate != 0.0 {
        let why = "dropout in training is random: export the model in eval mode";
        return Err(OpError::ArgumentValue { name: "train".into(), value: "true".into(), why });
    }
    Ok(Pointwise::Dropout { input })
}
