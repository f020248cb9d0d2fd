//! What pointwise operations compute: operands converted to the common dtype, each element once.

use rapt_core::{DType, float64};

use super::super::fill;
use super::columns::Columns;
use super::emit::arithmetic;
use super::{Binary, Operand, Pointwise, Unary, clamp_operands, common, math};
use crate::number::{int_to_float, is_float, round, wrap};
use crate::{Cells, Eval, Number, OpError, Precision, Scalar, Tensor, ValueId};

pub(super) fn run(op: &Pointwise, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
    let out = &outs[0];
    match op {
        Pointwise::Unary { op, input, .. } => unary(*op, eval.tensor(*input)?, eval, out),
        Pointwise::Binary { op, a, b, alpha, .. } => binary(*op, [*a, *b], *alpha, eval, out),
        Pointwise::Clamp { input, min, max, .. } => clamp(*input, *min, *max, eval, out),
        Pointwise::Where { condition, a, b } => choose(*condition, [*a, *b], eval, out),
        Pointwise::MaskedFill { input, mask, value, .. } => masked_fill([*input, *mask], *value, eval, out),
        Pointwise::Formula { operands, .. } => {
            if let (Some(second), Some(Operand::Tensor(x))) = (outs.get(1), operands.first()) {
                let x = eval.tensor(*x)?.floats();
                second.write_floats(eval.precision(), x.into_iter().map(|x| float64::exp(-x.abs())));
            }
            let mut columns = Columns::new(eval, &out.meta.shape);
            let value = op.emit(eval, out.meta.dtype, &mut columns)?;
            out.write(eval.precision(), columns.column(value)?);
            Ok(())
        }
        Pointwise::Dropout { .. } => Ok(()),
    }
}

fn unary(op: Unary, input: &Tensor, eval: &dyn Eval, out: &Tensor) -> Result<(), OpError> {
    let (compute, result) = op.dtypes(input.meta.dtype)?;
    let cells = match input.cast(compute, eval.precision()) {
        Cells::Float(x) if is_float(result) => Cells::Float(x.iter().map(|&x| math::unary_float(op, x)).collect()),
        Cells::Float(x) => Cells::Int(x.iter().map(|&x| math::unary_float(op, x) as i64).collect()),
        Cells::Int(x) => {
            let is_bool = compute == DType::Bool;
            Cells::Int(x.iter().map(|&x| wrap(result, math::unary_int(op, x, is_bool))).collect())
        }
    };
    out.write(eval.precision(), cells);
    Ok(())
}

/// An operand's numbers in a dtype, broadcast to a shape.
fn cells(operand: Operand, dtype: DType, eval: &dyn Eval, shape: &[i64]) -> Result<Cells, OpError> {
    match operand {
        Operand::Tensor(id) => Ok(eval.tensor(id)?.broadcast(shape).cast(dtype, eval.precision())),
        Operand::Number(scalar) => {
            let count = shape.iter().product::<i64>();
            let one = number(dtype, eval.number(scalar)?, eval.precision());
            Ok(fill::repeat(&one, usize::try_from(count).unwrap_or(0)))
        }
    }
}

/// A number in the dtype of a computation: rounded, or wrapped around.
pub(super) fn number(dtype: DType, number: Number, precision: Precision) -> Cells {
    let wide = precision == Precision::Wide;
    match number {
        Number::Int(n) if is_float(dtype) => Cells::Float(vec![if wide { n as f64 } else { int_to_float(dtype, n) }]),
        Number::Int(n) => Cells::Int(vec![wrap(dtype, n)]),
        Number::Bool(b) if is_float(dtype) => Cells::Float(vec![f64::from(u8::from(b))]),
        Number::Bool(b) => Cells::Int(vec![i64::from(b)]),
        // The common dtype of a float is a float.
        Number::Float(x) => Cells::Float(vec![if wide { x } else { round(dtype, x) }]),
    }
}

fn binary(
    op: Binary,
    [a, b]: [Operand; 2],
    alpha: Option<Scalar>,
    eval: &dyn Eval,
    out: &Tensor,
) -> Result<(), OpError> {
    let alpha = alpha.map(|alpha| eval.number(alpha)).transpose()?;
    let (compute, result) = op.dtypes(common(eval, &[a, b])?, alpha)?;
    let precision = eval.precision();
    let is_one = match b {
        Operand::Number(_) => true,
        Operand::Tensor(id) => eval.meta(id)?.rank() == 0,
    };
    // PyTorch takes x**0.5 for a square root, which is NaN of −∞ where the power is ∞; of float16 it computes the power.
    let is_root = op == Binary::Pow && compute != DType::F16 && matches!(b, Operand::Number(Scalar::Float(0.5)));
    let of_b = if op.keeps_numbers() && is_one { arithmetic(compute) } else { compute };
    let shape = &out.meta.shape;
    let (a, b) = (cells(a, compute, eval, shape)?, cells(b, of_b, eval, shape)?);
    let cells = match (a, b) {
        (Cells::Float(a), Cells::Float(_)) if is_root => {
            Cells::Float(a.iter().map(|&a| math::unary_float(Unary::Sqrt, a)).collect())
        }
        (Cells::Float(a), Cells::Float(mut b)) => {
            // alpha·b is exact where a is added: the sum is rounded once.
            if let Some(Cells::Float(alpha)) = alpha.map(|alpha| number(compute, alpha, precision)) {
                let alpha = if op == Binary::Sub { -alpha[0] } else { alpha[0] };
                b.iter_mut().zip(&a).for_each(|(b, &a)| *b = float64::fma(alpha, *b, a));
                out.write(precision, Cells::Float(b));
                return Ok(());
            }
            let wide = precision == Precision::Wide;
            let quotient = |x: f64| if wide { x } else { round(arithmetic(compute), x) };
            let values = a.iter().zip(&b).map(|(&a, &b)| math::binary_float(op, a, b, quotient));
            if is_float(result) {
                Cells::Float(values.collect())
            } else {
                Cells::Int(values.map(|x| x as i64).collect())
            }
        }
        (Cells::Int(a), Cells::Int(mut b)) => {
            if let Some(Cells::Int(alpha)) = alpha.map(|alpha| number(compute, alpha, precision)) {
                b.iter_mut().for_each(|b| *b = b.wrapping_mul(alpha[0]));
            }
            let values = a.iter().zip(&b).map(|(&a, &b)| Ok(wrap(result, math::binary_int(op, a, b)?)));
            Cells::Int(values.collect::<Result<_, OpError>>()?)
        }
        // Both were converted to one dtype.
        _ => return Err(OpError::Refused("operands of two kinds")),
    };
    out.write(precision, cells);
    Ok(())
}

fn clamp(
    input: ValueId,
    min: Option<Operand>,
    max: Option<Operand>,
    eval: &dyn Eval,
    out: &Tensor,
) -> Result<(), OpError> {
    let dtype = common(eval, &clamp_operands(input, min, max))?;
    let shape = &out.meta.shape;
    // An integer bound is not wrapped to a narrower dtype: nothing lies beyond it.
    let bound = |bound: Option<Operand>| match bound {
        Some(Operand::Number(_)) if !is_float(dtype) => {
            bound.map(|bound| cells(bound, DType::I64, eval, shape)).transpose()
        }
        bound => bound.map(|bound| cells(bound, dtype, eval, shape)).transpose(),
    };
    let mut x = cells(Operand::Tensor(input), dtype, eval, shape)?;
    for (limit, op) in [(bound(min)?, Binary::Maximum), (bound(max)?, Binary::Minimum)] {
        match (&mut x, limit) {
            (Cells::Float(x), Some(Cells::Float(limit))) => {
                // The number second: one that equals its bound stays as it is, the sign of 0 too.
                x.iter_mut().zip(limit).for_each(|(x, limit)| *x = math::binary_float(op, limit, *x, |x| x));
            }
            (Cells::Int(x), Some(Cells::Int(limit))) => {
                for (x, limit) in x.iter_mut().zip(limit) {
                    *x = math::binary_int(op, *x, limit)?;
                }
            }
            _ => {}
        }
    }
    out.write(eval.precision(), x);
    Ok(())
}

fn choose(condition: ValueId, [a, b]: [Operand; 2], eval: &dyn Eval, out: &Tensor) -> Result<(), OpError> {
    let (dtype, shape) = (out.meta.dtype, &out.meta.shape);
    let (a, b) = (cells(a, dtype, eval, shape)?, cells(b, dtype, eval, shape)?);
    select(&eval.tensor(condition)?.broadcast(shape).ints(), [a, b], eval, out);
    Ok(())
}

fn masked_fill([input, mask]: [ValueId; 2], value: Operand, eval: &dyn Eval, out: &Tensor) -> Result<(), OpError> {
    let (dtype, shape) = (out.meta.dtype, &out.meta.shape);
    let mask = eval.tensor(mask)?.broadcast(shape).ints();
    let filled = match value {
        Operand::Tensor(_) => cells(value, dtype, eval, shape)?,
        Operand::Number(scalar) => fill::repeat(&fill::element(dtype, eval.number(scalar)?)?, mask.len()),
    };
    select(&mask, [filled, cells(Operand::Tensor(input), dtype, eval, shape)?], eval, out);
    Ok(())
}

/// Writes the first where the condition is true, else the second. Both are of one kind.
fn select(condition: &[i64], [a, b]: [Cells; 2], eval: &dyn Eval, out: &Tensor) {
    fn pick<T>(condition: &[i64], a: Vec<T>, b: Vec<T>) -> Vec<T> {
        condition.iter().zip(a.into_iter().zip(b)).map(|(&c, (a, b))| if c == 0 { b } else { a }).collect()
    }
    match (a, b) {
        (Cells::Float(a), Cells::Float(b)) => out.write(eval.precision(), Cells::Float(pick(condition, a, b))),
        (Cells::Int(a), Cells::Int(b)) => out.write(eval.precision(), Cells::Int(pick(condition, a, b))),
        _ => {}
    }
}
