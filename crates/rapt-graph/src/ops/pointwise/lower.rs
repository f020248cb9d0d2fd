//! Pointwise operations as code: what [`compute`](super::compute) does to whole tensors, said of one element.
//!
//! Whoever makes kernels implements [`Emitter`]; the rules of promotion and rounding stay here, beside their definition.

use rapt_core::DType;

use super::super::fill;
use super::compute::number;
use super::emit::{Emitter, arithmetic};
use super::formula::Recipe;
use super::{Binary, Formula, Operand, Pointwise, Unary, clamp_operands, common};
use crate::number::is_float;
use crate::{Cells, Number, OpError, Precision, Scalar, Shapes, ValueId};

impl Pointwise {
    /// The code of one element of the result, which is of dtype `result`.
    ///
    /// # Errors
    /// As [`Op::infer`](crate::Op::infer).
    pub fn emit<E: Emitter>(&self, shapes: &dyn Shapes, result: DType, emitter: &mut E) -> Result<E::Value, OpError> {
        let mut code = Lowering { shapes, emitter };
        match self {
            Pointwise::Unary { op, input, .. } => {
                let dtypes = op.dtypes(shapes.meta(*input)?.dtype)?;
                let x = code.tensor(*input, dtypes.0)?;
                let y = code.emitter.unary(*op, x, dtypes);
                Ok(code.convert(y, dtypes.1, result))
            }
            Pointwise::Binary { op, a, b, alpha, .. } => {
                let (y, dtype) = code.binary(*op, [*a, *b], *alpha)?;
                Ok(code.convert(y, dtype, result))
            }
            Pointwise::Clamp { input, min, max, .. } => {
                let dtype = common(shapes, &clamp_operands(*input, *min, *max))?;
                let y = code.clamp(*input, [*min, *max], dtype)?;
                Ok(code.convert(y, dtype, result))
            }
            Pointwise::Where { condition, a, b } => {
                let condition = code.emitter.tensor(*condition);
                let operands = [code.operand(*a, result)?, code.operand(*b, result)?];
                Ok(code.emitter.select(condition, operands, result))
            }
            Pointwise::MaskedFill { input, mask, value, .. } => {
                let mask = code.emitter.tensor(*mask);
                let filled = match value {
                    Operand::Tensor(_) => code.operand(*value, result)?,
                    Operand::Number(scalar) => {
                        let element = fill::element(result, shapes.number(*scalar)?)?;
                        code.element(result, &element)
                    }
                };
                let kept = code.tensor(*input, result)?;
                Ok(code.emitter.select(mask, [filled, kept], result))
            }
            Pointwise::Formula { op, operands, params, .. } => code.formula(*op, operands, params, result),
            Pointwise::Dropout { input } => code.tensor(*input, result),
        }
    }
}

/// One operation, on its way to code.
struct Lowering<'a, E> {
    shapes: &'a dyn Shapes,
    emitter: &'a mut E,
}

impl<E: Emitter> Lowering<'_, E> {
    fn convert(&mut self, x: E::Value, from: DType, to: DType) -> E::Value {
        if from == to { x } else { self.emitter.convert(x, from, to) }
    }

    /// A tensor's element in a dtype.
    fn tensor(&mut self, id: ValueId, dtype: DType) -> Result<E::Value, OpError> {
        let own = self.shapes.meta(id)?.dtype;
        let x = self.emitter.tensor(id);
        Ok(self.convert(x, own, dtype))
    }

    /// The one element of `cells`, rounded to the dtype.
    fn element(&mut self, dtype: DType, cells: &Cells) -> E::Value {
        match cells {
            Cells::Float(x) => self.emitter.float(dtype, crate::number::round(dtype, x[0])),
            Cells::Int(n) => self.emitter.int(dtype, n[0]),
        }
    }

    fn operand(&mut self, operand: Operand, dtype: DType) -> Result<E::Value, OpError> {
        match operand {
            Operand::Tensor(id) => self.tensor(id, dtype),
            Operand::Number(scalar) => {
                let cells = number(dtype, self.shapes.number(scalar)?, Precision::Rounded);
                Ok(self.element(dtype, &cells))
            }
        }
    }

    /// A formula's element in a dtype.
    fn formula(
        &mut self,
        op: Formula,
        operands: &[Operand],
        params: &[Option<Scalar>],
        result: DType,
    ) -> Result<E::Value, OpError> {
        let (compute, own) = op.dtypes(common(self.shapes, operands)?)?;
        let lane = self.emitter.lane(compute);
        let rank = match operands[0] {
            Operand::Tensor(id) => self.shapes.meta(id)?.rank(),
            Operand::Number(_) => 0,
        };
        let mut x = Vec::with_capacity(operands.len());
        for (n, &operand) in operands.iter().enumerate() {
            let element = match (operand, op.look(n, rank)) {
                (Operand::Tensor(id), Some(look)) => {
                    let dtype = self.shapes.meta(id)?.dtype;
                    let element = self.emitter.seen(id, look);
                    self.convert(element, dtype, compute)
                }
                _ => self.operand(operand, compute)?,
            };
            x.push(self.convert(element, compute, lane));
        }
        let number = |param: &Option<Scalar>| param.map(|scalar| self.shapes.number(scalar)).transpose();
        let params = params.iter().map(number).collect::<Result<Vec<_>, _>>()?;
        // PyTorch takes a power of 0.5 for a square root, which is NaN of −∞.
        if let (Formula::FloatPower, Some(Operand::Number(Scalar::Float(0.5)))) = (op, operands.get(1)) {
            let root = self.emitter.unary(Unary::Sqrt, x[0], (lane, lane));
            return Ok(self.convert(root, lane, result));
        }
        let y = Recipe { lane, dtype: compute, emitter: &mut *self.emitter }.formula(op, &x, &params);
        let own = if own == DType::Bool { own } else { lane };
        Ok(self.convert(y, own, result))
    }

    /// The element and its dtype.
    fn binary(
        &mut self,
        op: Binary,
        [a, b]: [Operand; 2],
        alpha: Option<Scalar>,
    ) -> Result<(E::Value, DType), OpError> {
        let alpha = alpha.map(|alpha| self.shapes.number(alpha)).transpose()?;
        let (compute, result) = op.dtypes(common(self.shapes, &[a, b])?, alpha)?;
        let is_one = match b {
            Operand::Number(_) => true,
            Operand::Tensor(id) => self.shapes.meta(id)?.rank() == 0,
        };
        let x = self.operand(a, compute)?;
        if let (Binary::Pow, Operand::Number(scalar)) = (op, b)
            && let Some(power) = self.power(x, self.shapes.number(scalar)?, compute)
        {
            return Ok((power, result));
        }
        // Numbers that keep float32's precision beside narrower floats are lanes of float32, as those are themselves.
        let of_b = if op.keeps_numbers() && is_one { arithmetic(compute) } else { compute };
        let y = self.operand(b, of_b)?;
        let factor = alpha.filter(|alpha| !is_one_exactly(*alpha));
        let Some(factor) = factor else { return Ok((self.emitter.binary(op, [x, y], (compute, result)), result)) };
        let cells = match number(compute, factor, Precision::Rounded) {
            Cells::Float(factor) => Cells::Float(vec![if op == Binary::Sub { -factor[0] } else { factor[0] }]),
            factor => factor,
        };
        let is_sum = matches!(cells, Cells::Float(_));
        let factor = self.element(compute, &cells);
        if is_sum {
            return Ok((self.emitter.mul_add([factor, y, x], compute), result));
        }
        let y = self.emitter.binary(Binary::Mul, [y, factor], (compute, compute));
        Ok((self.emitter.binary(op, [x, y], (compute, result)), result))
    }

    /// Powers that are products or a root. A cube is computed in f64: it is rounded once.
    fn power(&mut self, x: E::Value, exponent: Number, dtype: DType) -> Option<E::Value> {
        if !is_float(dtype) {
            return None;
        }
        let exponent = match exponent {
            Number::Int(n) => n as f64,
            Number::Float(x) => x,
            Number::Bool(_) => return None,
        };
        let wide = dtype != DType::F64;
        if exponent == 2.0 {
            Some(self.emitter.binary(Binary::Mul, [x, x], (dtype, dtype)))
        } else if exponent == 3.0 && wide {
            let x = self.convert(x, dtype, DType::F64);
            let square = self.emitter.binary(Binary::Mul, [x, x], (DType::F64, DType::F64));
            let cube = self.emitter.binary(Binary::Mul, [square, x], (DType::F64, DType::F64));
            Some(self.convert(cube, DType::F64, dtype))
        } else if exponent == 0.5 && dtype != DType::F16 {
            // PyTorch takes x**0.5 for a square root, which is NaN of −∞ where the power is ∞.
            Some(self.emitter.unary(Unary::Sqrt, x, (dtype, dtype)))
        } else {
            None
        }
    }

    fn clamp(&mut self, input: ValueId, bounds: [Option<Operand>; 2], dtype: DType) -> Result<E::Value, OpError> {
        let mut x = self.tensor(input, dtype)?;
        for (bound, op) in bounds.into_iter().zip([Binary::Maximum, Binary::Minimum]) {
            let Some(bound) = bound else { continue };
            // An integer bound is not wrapped to a narrower dtype: nothing lies beyond it.
            let unwrapped = matches!(bound, Operand::Number(_)) && !is_float(dtype);
            let bound = self.operand(bound, if unwrapped { DType::I64 } else { dtype })?;
            // The number second: one that equals its bound stays as it is, the sign of 0 too.
            x = self.emitter.binary(op, [bound, x], (dtype, dtype));
        }
        Ok(x)
    }
}

fn is_one_exactly(number: Number) -> bool {
    match number {
        Number::Int(n) => n == 1,
        Number::Float(x) => x == 1.0,
        Number::Bool(b) => b,
    }
}
