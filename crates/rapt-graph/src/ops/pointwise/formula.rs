//! Functions that are formulas of others: computed without rounding in between, rounded once.
//!
//! ATen computes float16 and bfloat16 in float32 and rounds once; so do kernels here, and the interpreter computes every
//! formula in f64. Each formula is written once, as code ([`Emitter`]), for both.

use rapt_core::DType;

use super::emit::{Emitter, Look, arithmetic};
use super::{Binary, Operand, Unary, fill};
use crate::number::{is_float, round};
use crate::promote::DEFAULT_FLOAT;
use crate::{Number, OpError, Scalar, Shapes};

/// A formula. `x` is the first operand, `p` are the parameters in ATen's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Formula {
    /// `hardtanh`, `relu6`: between two numbers.
    Hardtanh,
    /// `x · clamp(x + 3, 0, 6) / 6`.
    Hardswish,
    /// `clamp(x + 3, 0, 6) / 6`.
    Hardsigmoid,
    /// `x` where it is positive, else `x · p`.
    LeakyRelu,
    /// `elu`, `selu`, `celu`: `x · p1` where it is positive, else `(e^(x · p2) − 1) · p0 · p1`.
    Elu,
    /// `log(1 + e^(x · p0)) / p0`, or `x` where `x · p0` is above `p1`.
    Softplus,
    /// `x · tanh(log(1 + e^x))`.
    Mish,
    /// `x` where it is positive, else `x` times the second operand.
    Prelu,
    /// The same with one weight for each element of dimension 1.
    PreluOfChannels,
    /// The first half of a dimension times the sigmoid of the second.
    Glu(i64),
    /// `log(x / (1 − x))`, of `x` clamped between `p` and `1 − p` where there is a `p`.
    Logit,
    /// `log(sigmoid(x))`.
    LogSigmoid,
    /// The same with a second result, `e^−|x|`, which the gradient needs.
    LogSigmoidForward,
    /// `x` where it is above `p0`, else `p1`.
    Threshold,
    /// 0 between `−p` and `p`, else `x`.
    Hardshrink,
    /// `x` nearer to 0 by `p`, and 0 between `−p` and `p`.
    Softshrink,
    /// What is behind the point, with the sign of `x`.
    Frac,
    /// `log(e^a + e^b)`.
    LogAddExp,
    /// `log2(2^a + 2^b)`.
    LogAddExp2,
    /// `a · log(b)`, 0 where `a` is.
    Xlogy,
    /// `a + w · (b − a)`.
    Lerp,
    /// `x + p · a · b`.
    AddCmul,
    /// `x + p · a / b`.
    AddCdiv,
    /// Numbers in place of NaN, ∞ and −∞.
    NanToNum,
    /// Whether a number is neither infinite nor NaN.
    IsFinite,
    /// Whether a number is ∞.
    IsPosInf,
    /// Whether a number is −∞.
    IsNegInf,
    /// `x · π / 180`.
    Deg2Rad,
    /// `x · 180 / π`.
    Rad2Deg,
    /// Each element of a vector times each of another.
    Outer,
    /// A power in float64.
    FloatPower,
    /// The greater number; one that is NaN does not count.
    Fmax,
    /// The smaller number; one that is NaN does not count.
    Fmin,
    /// Whether the sign is set, that of a zero or NaN too.
    Signbit,
    /// 0 below 0, 1 above, the second operand at 0.
    Heaviside,
}

impl Formula {
    /// How operand number `n` is seen, where the first has this rank.
    pub(super) fn look(self, n: usize, rank: usize) -> Option<Look> {
        match self {
            Formula::Glu(dim) => Some(Look::Half { dim, second: n == 1 }),
            Formula::PreluOfChannels if n == 1 => Some(Look::Channels(rank)),
            Formula::Outer if n == 0 => Some(Look::Column),
            Formula::Outer => Some(Look::Vector),
            _ => None,
        }
    }

    /// The dtype of its operands, and that of its result.
    pub(super) fn dtypes(self, common: DType) -> Result<(DType, DType), OpError> {
        use Formula::{
            AddCmul, Deg2Rad, FloatPower, Fmax, Fmin, Hardtanh, Heaviside, IsFinite, IsNegInf, IsPosInf, Logit,
            NanToNum, Outer, Rad2Deg, Signbit, Threshold, Xlogy,
        };
        let float = if is_float(common) { common } else { DEFAULT_FLOAT };
        match self {
            FloatPower => Ok((DType::F64, DType::F64)),
            IsFinite | IsPosInf | IsNegInf | Signbit => Ok((common, DType::Bool)),
            Logit | Xlogy | Deg2Rad | Rad2Deg => Ok((float, float)),
            NanToNum | Fmax | Fmin | Outer | Heaviside => Ok((common, common)),
            Hardtanh | Threshold | AddCmul if common != DType::Bool => Ok((common, common)),
            _ if is_float(common) => Ok((common, common)),
            _ => Err(OpError::Dtype { what: self.name(), dtype: common }),
        }
    }

    /// Whether tensors of several dtypes are promoted; the others take one dtype.
    pub(super) fn promotes(self) -> bool {
        use Formula::{AddCdiv, AddCmul, FloatPower, Fmax, Fmin, LogAddExp, LogAddExp2, Outer, Xlogy};
        matches!(self, AddCdiv | AddCmul | FloatPower | Fmax | Fmin | LogAddExp | LogAddExp2 | Outer | Xlogy)
    }

    /// What ATen refuses beside dtypes.
    pub(super) fn refuse(
        self,
        shapes: &dyn Shapes,
        operands: &[Operand],
        params: &[Option<Scalar>],
    ) -> Result<(), OpError> {
        let common = super::common(shapes, operands)?;
        let number = |n: usize| params.get(n).copied().flatten().map(|scalar| shapes.number(scalar)).transpose();
        match self {
            Formula::Hardtanh if common == DType::U8 => {
                for n in 0..2 {
                    if number(n)?.is_some_and(|bound| float_of(bound).trunc() < 0.0) {
                        return Err(OpError::Refused("hardtanh of uint8 with a negative bound"));
                    }
                }
            }
            Formula::AddCmul if !is_float(common) && matches!(number(0)?, Some(Number::Float(_))) => {
                return Err(OpError::Refused("value is a float, and the operands are integers"));
            }
            Formula::PreluOfChannels => {
                let (Operand::Tensor(x), Operand::Tensor(w)) = (operands[0], operands[1]) else { return Ok(()) };
                let (x, w) = (shapes.meta(x)?, shapes.meta(w)?);
                let channels = x.shape.get(1).copied().unwrap_or(1);
                if w.numel() != 1 && w.numel() != channels {
                    let text = format!("{} weights for an input of shape {:?}", w.numel(), x.shape);
                    return Err(OpError::Shape(text));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// What it is called where it is refused.
    fn name(self) -> &'static str {
        match self {
            Formula::AddCmul | Formula::AddCdiv => "addcmul or addcdiv",
            Formula::Lerp => "lerp",
            Formula::LogAddExp | Formula::LogAddExp2 => "logaddexp",
            Formula::Frac => "frac",
            _ => "an activation",
        }
    }
}

fn float_of(number: Number) -> f64 {
    match number {
        Number::Int(n) => n as f64,
        Number::Float(x) => x,
        Number::Bool(b) => f64::from(u8::from(b)),
    }
}

/// What a formula is written with: the dtype that it computes in, and who makes the code.
pub(super) struct Recipe<'e, E> {
    pub(super) lane: DType,
    /// The dtype of the operands.
    pub(super) dtype: DType,
    pub(super) emitter: &'e mut E,
}

impl<E: Emitter> Recipe<'_, E> {
    fn c(&mut self, x: f64) -> E::Value {
        if is_float(self.lane) {
            // ATen computes with numbers in the dtype of its arithmetic.
            let x = if self.emitter.rounds() { round(arithmetic(self.dtype), x) } else { x };
            self.emitter.float(self.lane, x)
        } else {
            self.emitter.int(self.lane, x as i64)
        }
    }

    /// A parameter, or what it is where none is given.
    fn number(&mut self, number: Option<Number>, default: f64) -> E::Value {
        match number {
            Some(Number::Int(n)) if !is_float(self.lane) => self.emitter.int(self.lane, n),
            number => self.c(number.map_or(default, float_of)),
        }
    }

    fn one(&mut self, op: Unary, x: E::Value) -> E::Value {
        self.emitter.unary(op, x, (self.lane, self.lane))
    }

    fn both(&mut self, op: Binary, a: E::Value, b: E::Value) -> E::Value {
        self.emitter.binary(op, [a, b], (self.lane, self.lane))
    }

    /// A comparison.
    fn is(&mut self, op: Binary, a: E::Value, b: E::Value) -> E::Value {
        self.emitter.binary(op, [a, b], (self.lane, DType::Bool))
    }

    fn choose(&mut self, condition: E::Value, a: E::Value, b: E::Value) -> E::Value {
        self.emitter.select(condition, [a, b], self.lane)
    }

    fn is_nan(&mut self, x: E::Value) -> E::Value {
        self.emitter.unary(Unary::IsNan, x, (self.lane, DType::Bool))
    }

    /// Between two bounds; NaN stays.
    fn between(&mut self, x: E::Value, low: E::Value, high: E::Value) -> E::Value {
        let x = self.both(Binary::Maximum, low, x);
        self.both(Binary::Minimum, high, x)
    }

    /// `log(1 + e^x)`.
    fn softplus(&mut self, x: E::Value) -> E::Value {
        let e = self.one(Unary::Exp, x);
        self.one(Unary::Log1p, e)
    }

    /// The code of a formula. Parameters that may be missing are `None`.
    pub(super) fn formula(&mut self, op: Formula, x: &[E::Value], p: &[Option<Number>]) -> E::Value {
        let (first, second) = (x[0], x.get(1).copied().unwrap_or(x[0]));
        let p = |n: usize| p.get(n).copied().flatten();
        match op {
            Formula::Hardtanh => {
                let (low, high) = (self.number(p(0), -1.0), self.number(p(1), 1.0));
                self.between(first, low, high)
            }
            Formula::Hardswish | Formula::Hardsigmoid => self.hard(op, first),
            Formula::LeakyRelu => {
                let slope = self.number(p(0), 0.01);
                self.leaky(first, slope)
            }
            Formula::Prelu | Formula::PreluOfChannels => self.leaky(first, second),
            Formula::Elu => self.elu(first, [0, 1, 2].map(|n| p(n).map_or(1.0, float_of))),
            Formula::Softplus => {
                let (beta, threshold) = (self.number(p(0), 1.0), self.number(p(1), 20.0));
                let scaled = self.both(Binary::Mul, first, beta);
                let soft = self.softplus(scaled);
                let soft = self.both(Binary::Div, soft, beta);
                let is_linear = self.is(Binary::Gt, scaled, threshold);
                self.choose(is_linear, first, soft)
            }
            Formula::Mish => {
                let soft = self.softplus(first);
                let tanh = self.one(Unary::Tanh, soft);
                self.both(Binary::Mul, first, tanh)
            }
            Formula::Glu(_) => {
                let gate = self.one(Unary::Sigmoid, second);
                self.both(Binary::Mul, first, gate)
            }
            Formula::Logit => self.logit(first, p(0).map(float_of)),
            Formula::LogSigmoid | Formula::LogSigmoidForward => {
                let zero = self.c(0.0);
                let low = self.both(Binary::Minimum, zero, first);
                let size = self.one(Unary::Abs, first);
                let size = self.one(Unary::Neg, size);
                let rest = self.softplus(size);
                self.both(Binary::Sub, low, rest)
            }
            Formula::Threshold => {
                let (threshold, value) = (self.number(p(0), 0.0), self.number(p(1), 0.0));
                let is_below = self.is(Binary::Le, first, threshold);
                self.choose(is_below, value, first)
            }
            Formula::Hardshrink | Formula::Softshrink => self.shrink(op, first, p(0).map_or(0.5, float_of)),
            Formula::Frac => {
                let whole = self.one(Unary::Trunc, first);
                self.both(Binary::Sub, first, whole)
            }
            Formula::LogAddExp | Formula::LogAddExp2 => self.log_add_exp(op, first, second),
            Formula::Xlogy => {
                let log = self.one(Unary::Log, second);
                let product = self.both(Binary::Mul, first, log);
                let zero = self.c(0.0);
                let is_zero = self.is(Binary::Eq, first, zero);
                let product = self.choose(is_zero, zero, product);
                let is_nan = self.is_nan(second);
                self.choose(is_nan, second, product)
            }
            Formula::Lerp => {
                let weight = x.get(2).copied();
                let weight = weight.unwrap_or_else(|| self.number(p(0), 0.0));
                self.lerp(first, second, weight)
            }
            Formula::AddCmul | Formula::AddCdiv => {
                let factor = self.number(p(0), 1.0);
                let scaled = self.both(Binary::Mul, factor, second);
                let how = if op == Formula::AddCmul { Binary::Mul } else { Binary::Div };
                let more = self.both(how, scaled, x[2]);
                self.both(Binary::Add, first, more)
            }
            Formula::NanToNum => self.nan_to_num(first, [0, 1, 2].map(|n| p(n).map(float_of))),
            Formula::IsFinite | Formula::IsPosInf | Formula::IsNegInf => self.is_finite(op, first),
            Formula::Deg2Rad => {
                let factor = self.c(std::f64::consts::PI / 180.0);
                self.both(Binary::Mul, first, factor)
            }
            Formula::Rad2Deg => {
                let factor = self.c(180.0 / std::f64::consts::PI);
                self.both(Binary::Mul, first, factor)
            }
            Formula::Outer => self.both(Binary::Mul, first, second),
            Formula::FloatPower => self.both(Binary::Pow, first, second),
            Formula::Fmax | Formula::Fmin => self.extreme(op, first, second),
            Formula::Signbit => self.signbit(first),
            Formula::Heaviside => self.heaviside(first, second),
        }
    }

    fn signbit(&mut self, x: E::Value) -> E::Value {
        let zero = self.c(0.0);
        let mut sign = x;
        if is_float(self.lane) {
            let one = self.c(1.0);
            sign = self.both(Binary::Copysign, one, x);
        }
        self.is(Binary::Lt, sign, zero)
    }

    fn heaviside(&mut self, x: E::Value, at_zero: E::Value) -> E::Value {
        let [zero, one] = [0.0, 1.0].map(|x| self.c(x));
        let is_above = self.is(Binary::Gt, x, zero);
        let step = self.choose(is_above, one, zero);
        let is_zero = self.is(Binary::Eq, x, zero);
        self.choose(is_zero, at_zero, step)
    }

    fn hard(&mut self, op: Formula, x: E::Value) -> E::Value {
        let [zero, three, six] = [0.0, 3.0, 6.0].map(|x| self.c(x));
        let moved = self.both(Binary::Add, x, three);
        let gate = self.between(moved, zero, six);
        let gate = if op == Formula::Hardswish { self.both(Binary::Mul, x, gate) } else { gate };
        self.both(Binary::Div, gate, six)
    }

    fn leaky(&mut self, x: E::Value, slope: E::Value) -> E::Value {
        let zero = self.c(0.0);
        let below = self.both(Binary::Mul, x, slope);
        let is_above = self.is(Binary::Gt, x, zero);
        self.choose(is_above, x, below)
    }

    fn elu(&mut self, x: E::Value, [alpha, scale, input_scale]: [f64; 3]) -> E::Value {
        let (factor, scale_of_x) = (self.c(alpha * scale), self.c(input_scale));
        let (scale, zero) = (self.c(scale), self.c(0.0));
        let below = self.both(Binary::Mul, x, scale_of_x);
        let below = self.one(Unary::Expm1, below);
        let below = self.both(Binary::Mul, below, factor);
        let above = self.both(Binary::Mul, x, scale);
        let is_below = self.is(Binary::Le, x, zero);
        self.choose(is_below, below, above)
    }

    fn logit(&mut self, x: E::Value, eps: Option<f64>) -> E::Value {
        let x = match eps {
            None => x,
            Some(eps) => {
                let low = self.c(eps);
                let one = self.c(1.0);
                let high = self.both(Binary::Sub, one, low);
                // The upper bound first, as ATen compares: a bound that is greater than the other decides as there.
                let is_high = self.is(Binary::Gt, x, high);
                let below = self.choose(is_high, high, x);
                let is_low = self.is(Binary::Lt, x, low);
                self.choose(is_low, low, below)
            }
        };
        let one = self.c(1.0);
        let rest = self.both(Binary::Sub, one, x);
        let odds = self.both(Binary::Div, x, rest);
        self.one(Unary::Log, odds)
    }

    fn shrink(&mut self, op: Formula, x: E::Value, lambda: f64) -> E::Value {
        let [zero, low, high] = [0.0, -lambda, lambda].map(|x| self.c(x));
        let (above, below) = if op == Formula::Hardshrink {
            (x, x)
        } else {
            (self.both(Binary::Sub, x, high), self.both(Binary::Add, x, high))
        };
        // NaN is neither, and stays.
        let is_nan = self.is_nan(x);
        let middle = self.choose(is_nan, x, zero);
        let is_below = self.is(Binary::Lt, x, low);
        let rest = self.choose(is_below, below, middle);
        let is_above = self.is(Binary::Gt, x, high);
        self.choose(is_above, above, rest)
    }

    fn log_add_exp(&mut self, op: Formula, a: E::Value, b: E::Value) -> E::Value {
        let greater = self.both(Binary::Maximum, a, b);
        let apart = self.both(Binary::Sub, a, b);
        let apart = self.one(Unary::Abs, apart);
        let apart = self.one(Unary::Neg, apart);
        let rest = if op == Formula::LogAddExp {
            self.softplus(apart)
        } else {
            let e = self.one(Unary::Exp2, apart);
            let log = self.one(Unary::Log1p, e);
            let factor = self.c(std::f64::consts::LOG2_E);
            self.both(Binary::Mul, log, factor)
        };
        let sum = self.both(Binary::Add, greater, rest);
        // Of two equal infinities there is no difference.
        let is_infinite = self.emitter.unary(Unary::IsInf, a, (self.lane, DType::Bool));
        let of_infinite = self.choose(is_infinite, a, sum);
        let is_equal = self.is(Binary::Eq, a, b);
        self.choose(is_equal, of_infinite, sum)
    }

    fn lerp(&mut self, a: E::Value, b: E::Value, w: E::Value) -> E::Value {
        let [half, one] = [0.5, 1.0].map(|x| self.c(x));
        let apart = self.both(Binary::Sub, b, a);
        let step = self.both(Binary::Mul, w, apart);
        let near = self.both(Binary::Add, a, step);
        let rest = self.both(Binary::Sub, one, w);
        let back = self.both(Binary::Mul, apart, rest);
        let far = self.both(Binary::Sub, b, back);
        let size = self.one(Unary::Abs, w);
        let is_near = self.is(Binary::Lt, size, half);
        self.choose(is_near, near, far)
    }

    fn nan_to_num(&mut self, x: E::Value, [nan, high, low]: [Option<f64>; 3]) -> E::Value {
        if !is_float(self.lane) {
            return x;
        }
        // Without a number, the dtype's greatest and least.
        let most = fill::greatest(self.dtype);
        let [nan, high, low] = [nan.unwrap_or(0.0), high.unwrap_or(most), low.unwrap_or(-most)].map(|x| self.c(x));
        let [above, below] = [f64::INFINITY, f64::NEG_INFINITY].map(|x| self.c(x));
        let is_below = self.is(Binary::Eq, x, below);
        let x = self.choose(is_below, low, x);
        let is_above = self.is(Binary::Eq, x, above);
        let x = self.choose(is_above, high, x);
        let is_nan = self.is_nan(x);
        self.choose(is_nan, nan, x)
    }

    fn is_finite(&mut self, op: Formula, x: E::Value) -> E::Value {
        if !is_float(self.lane) {
            return self.emitter.int(DType::Bool, i64::from(op == Formula::IsFinite));
        }
        let infinity = self.c(f64::INFINITY);
        match op {
            Formula::IsFinite => {
                let size = self.one(Unary::Abs, x);
                self.is(Binary::Lt, size, infinity)
            }
            Formula::IsPosInf => self.is(Binary::Eq, x, infinity),
            _ => {
                let infinity = self.one(Unary::Neg, infinity);
                self.is(Binary::Eq, x, infinity)
            }
        }
    }

    fn extreme(&mut self, op: Formula, a: E::Value, b: E::Value) -> E::Value {
        let how = if op == Formula::Fmax { Binary::Maximum } else { Binary::Minimum };
        let extreme = self.both(how, a, b);
        if !is_float(self.lane) {
            return extreme;
        }
        let of_b = self.is_nan(b);
        let rest = self.choose(of_b, a, extreme);
        let of_a = self.is_nan(a);
        self.choose(of_a, b, rest)
    }
}
