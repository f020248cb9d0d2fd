//! Operators that write their result into a tensor, of those that have no way of their own to do so: `cumsum_`, `tril_`, `add.out`.
//!
//! The operator without the underscore, or the overload without `out`, is computed whole before anything is written.

use rapt_core::DType;

use super::Op;
use super::shape::misfit;
use crate::number::is_float;
use crate::{Args, Eval, OpError, Out, Precision, Shapes, Tensor, ValueId};

/// An operator whose result goes into a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// What is computed.
    pub(crate) op: Box<Op>,
    /// The tensor that is written.
    into: ValueId,
}

/// What an overload `out` has the arguments of, in the order in which they are tried.
const OVERLOADS: [&str; 3] = ["default", "Tensor", "self"];

impl Written {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Written, OpError>> {
        let (name, overload) = target.strip_prefix("torch.ops.aten.")?.split_once('.')?;
        let of = |name: &str, overload: &str| Op::read(&format!("torch.ops.aten.{name}.{overload}"), args);
        let (op, into) = if overload == "out" {
            let into = args.tensor("out");
            (OVERLOADS.iter().find_map(|overload| of(name, overload))?, into)
        } else {
            let base = name.strip_suffix('_').filter(|base| !base.ends_with('_'))?;
            (of(base, overload)?, args.tensor("self"))
        };
        Some(op.and_then(|op| Ok(Written { op: Box::new(op), into: into? })))
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let own = shapes.meta(self.into)?;
        let outs = self.op.infer(shapes)?;
        let form = match &outs[..] {
            [Out::Fresh(form) | Out::View { meta: form, .. }] => form,
            [Out::Same(id)] => shapes.meta(*id)?,
            _ => return misfit("one result is written, and not several"),
        };
        if form.shape != own.shape {
            return misfit(format!("a result of shape {:?} is not written to shape {:?}", form.shape, own.shape));
        }
        let loses =
            (is_float(form.dtype) && !is_float(own.dtype)) || (form.dtype != DType::Bool && own.dtype == DType::Bool);
        if loses {
            return Err(OpError::DtypesDiffer(form.dtype, own.dtype));
        }
        Ok(vec![Out::Same(self.into)])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        Some(self.into)
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let result = match &self.op.infer(eval)?[..] {
            [Out::Fresh(form)] => {
                let result = Tensor::zeros(form.clone());
                self.op.eval(eval, std::slice::from_ref(&result))?;
                result
            }
            [Out::View { of, meta }] => eval.tensor(*of)?.view(meta.clone()),
            [Out::Same(id)] => eval.tensor(*id)?.clone(),
            _ => return misfit("one result is written, and not several"),
        };
        let precision = if is_float(outs[0].meta.dtype) { eval.precision() } else { Precision::Rounded };
        outs[0].write(precision, result.cast(outs[0].meta.dtype, precision));
        Ok(())
    }
}
