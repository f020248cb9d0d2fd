//! `frexp`: a float as a mantissa from ½ to 1, or 0, and the power of two that it is multiplied with.
//!
//! Zeros, infinities and NaN are their own mantissa, with the exponent 0. Results lie as the operand does.

use rapt_core::DType;

use super::shape::need_float;
use crate::{Args, Eval, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// The parts of a tensor's floats.
#[derive(Clone, Debug, PartialEq)]
pub struct Frexp {
    input: ValueId,
}

impl Frexp {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Frexp, OpError>> {
        (target == "torch.ops.aten.frexp.Tensor").then(|| Ok(Frexp { input: args.tensor("self")? }))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        need_float("frexp", meta.dtype)?;
        let strides = strides::of_pointwise(&meta.shape, &[meta]);
        let out = |dtype| Out::Fresh(Meta { dtype, shape: meta.shape.clone(), strides: strides.clone(), offset: 0 });
        Ok(vec![out(meta.dtype), out(DType::I32)])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let parts = |x: f64| if x == 0.0 || !x.is_finite() { (x, 0) } else { libm::frexp(x) };
        let (mantissas, exponents): (Vec<f64>, Vec<i64>) = eval
            .tensor(self.input)?
            .floats()
            .into_iter()
            .map(|x| {
                let (mantissa, exponent) = parts(x);
                (mantissa, i64::from(exponent))
            })
            .unzip();
        outs[0].write_floats(eval.precision(), mantissas);
        outs[1].write_ints(exponents);
        Ok(())
    }
}
