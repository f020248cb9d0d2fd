//! ATen's overloads as formulas.

use super::super::Target;
use super::{Formula, Operand, Pointwise};
use crate::{Args, Int, OpError, Scalar};

type Params = Vec<Option<Scalar>>;

/// A formula by its overload; the name is without the underscore of the form in place.
pub(super) fn read(base: &str, overload: &str, args: &Args<'_>, target: Target) -> Option<Result<Pointwise, OpError>> {
    if overload == "default"
        && let Some((op, names)) = of_one(base)
    {
        return Some(of(op, &["self"], args, target, named(args, names)));
    }
    let float = |x: f64| Ok(Some(Scalar::Float(x)));
    let [zero, six] = [0, 6].map(|n| Some(Scalar::Int(Int::Known(n))));
    let one = || Ok(Some(Scalar::Int(Int::Known(1))));
    Some(match (base, overload) {
        ("relu6", "default") => of(Formula::Hardtanh, &["self"], args, target, Ok(vec![zero, six])),
        ("elu", "default") => {
            of(Formula::Elu, &["self"], args, target, named(args, &["alpha", "scale", "input_scale"]))
        }
        // ATen's constants (ATen/native/Activation.cpp).
        ("selu", "default") => {
            let params = [float(1.673_263_242_354_377_2), float(1.050_700_987_355_480_5), float(1.0)];
            of(Formula::Elu, &["self"], args, target, params.into_iter().collect())
        }
        ("rrelu", "default") => rrelu(args, target),
        ("celu", "default") => celu(args, target),
        ("prelu", "default") => of(Formula::PreluOfChannels, &["self", "weight"], args, target, Ok(Vec::new())),
        ("_prelu_kernel", "default") => of(Formula::Prelu, &["self", "weight"], args, target, Ok(Vec::new())),
        ("glu", "default") => args
            .known_int_or("dim", -1)
            .and_then(|dim| of(Formula::Glu(dim), &["self", "self"], args, target, Ok(Vec::new()))),
        ("outer" | "ger", "default") => of(Formula::Outer, &["self", "vec2"], args, target, Ok(Vec::new())),
        ("logaddexp", "default") => of(Formula::LogAddExp, &["self", "other"], args, target, Ok(Vec::new())),
        ("logaddexp2", "default") => of(Formula::LogAddExp2, &["self", "other"], args, target, Ok(Vec::new())),
        ("fmax", "default") => of(Formula::Fmax, &["self", "other"], args, target, Ok(Vec::new())),
        ("heaviside", "default") => of(Formula::Heaviside, &["self", "values"], args, target, Ok(Vec::new())),
        ("fmin", "default") => of(Formula::Fmin, &["self", "other"], args, target, Ok(Vec::new())),
        (
            "xlogy" | "special_xlogy",
            "Tensor" | "Scalar_Self" | "Scalar_Other" | "default" | "self_scalar" | "other_scalar",
        ) => of(Formula::Xlogy, &["self", "other"], args, target, Ok(Vec::new())),
        ("lerp", "Scalar") => of(Formula::Lerp, &["self", "end"], args, target, named(args, &["weight"])),
        ("lerp", "Tensor") => of(Formula::Lerp, &["self", "end", "weight"], args, target, Ok(Vec::new())),
        ("addcmul", "default") => {
            let value = args.opt_scalar("value").and_then(|value| value.map_or_else(one, |v| Ok(Some(v))));
            of(Formula::AddCmul, &["self", "tensor1", "tensor2"], args, target, value.map(|value| vec![value]))
        }
        ("addcdiv", "default") => {
            let value = args.opt_scalar("value").and_then(|value| value.map_or_else(one, |v| Ok(Some(v))));
            of(Formula::AddCdiv, &["self", "tensor1", "tensor2"], args, target, value.map(|value| vec![value]))
        }
        ("float_power", "Tensor_Scalar" | "Tensor_Tensor" | "Scalar" | "Tensor") => {
            of(Formula::FloatPower, &["self", "exponent"], args, target, Ok(Vec::new()))
        }
        _ => return None,
    })
}

/// Formulas of one tensor and numbers, by the numbers' names.
fn of_one(base: &str) -> Option<(Formula, &'static [&'static str])> {
    Some(match base {
        "hardtanh" => (Formula::Hardtanh, &["min_val", "max_val"]),
        "hardswish" => (Formula::Hardswish, &[]),
        "hardsigmoid" => (Formula::Hardsigmoid, &[]),
        "leaky_relu" => (Formula::LeakyRelu, &["negative_slope"]),
        "softplus" => (Formula::Softplus, &["beta", "threshold"]),
        "mish" => (Formula::Mish, &[]),
        "logit" | "special_logit" => (Formula::Logit, &["eps"]),
        "log_sigmoid" => (Formula::LogSigmoid, &[]),
        "log_sigmoid_forward" => (Formula::LogSigmoidForward, &[]),
        "threshold" => (Formula::Threshold, &["threshold", "value"]),
        "hardshrink" => (Formula::Hardshrink, &["lambd"]),
        "softshrink" => (Formula::Softshrink, &["lambd"]),
        "frac" => (Formula::Frac, &[]),
        "nan_to_num" => (Formula::NanToNum, &["nan", "posinf", "neginf"]),
        "isfinite" => (Formula::IsFinite, &[]),
        "isposinf" => (Formula::IsPosInf, &[]),
        "isneginf" => (Formula::IsNegInf, &[]),
        "signbit" => (Formula::Signbit, &[]),
        "deg2rad" => (Formula::Deg2Rad, &[]),
        "rad2deg" => (Formula::Rad2Deg, &[]),
        _ => return None,
    })
}

fn named(args: &Args<'_>, names: &[&str]) -> Result<Params, OpError> {
    names.iter().map(|name| args.opt_scalar(name)).collect()
}

fn of(
    op: Formula,
    names: &[&str],
    args: &Args<'_>,
    target: Target,
    params: Result<Params, OpError>,
) -> Result<Pointwise, OpError> {
    let operands = names.iter().map(|name| Operand::read(args, name)).collect::<Result<_, _>>()?;
    Ok(Pointwise::Formula { op, operands, params: params?, target })
}

/// Outside of training a `leaky_relu` by the mean of the bounds.
fn rrelu(args: &Args<'_>, target: Target) -> Result<Pointwise, OpError> {
    if args.bool_or("training", false)? {
        let why = "rrelu in training is random: export the model in eval mode";
        return Err(OpError::ArgumentValue { name: "training".into(), value: "true".into(), why });
    }
    let (lower, upper) = (args.opt_float("lower")?.unwrap_or(0.125), args.opt_float("upper")?.unwrap_or(1.0 / 3.0));
    // No generator of random numbers is asked.
    let _ = args.raw("generator");
    let slope = Some(Scalar::Float(f64::midpoint(lower, upper)));
    of(Formula::LeakyRelu, &["self"], args, target, Ok(vec![slope]))
}

/// An `elu` whose input is divided by alpha.
fn celu(args: &Args<'_>, target: Target) -> Result<Pointwise, OpError> {
    let alpha = args.opt_float("alpha")?.unwrap_or(1.0);
    if alpha == 0.0 {
        return Err(OpError::Refused("celu divides by alpha, which is 0"));
    }
    let params = [alpha, 1.0, 1.0 / alpha].map(|x| Some(Scalar::Float(x)));
    of(Formula::Elu, &["self"], args, target, Ok(params.to_vec()))
}
