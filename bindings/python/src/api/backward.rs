//! `attention_backward` and `backward_into`: the gradients of a call from what it wrote and what arrives.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rapt::{BackwardSpec, BackwardTensors, DropoutSeed, GradientForms, Options, Qkv, ViewMut};

use crate::api::attention::{self, Inputs, Lse, Request};
use crate::api::codes::Opened;
use crate::api::options;
use crate::engine::Home;
use crate::errors::{Failure, Wording, guard, hints};
use crate::kind::Kind;
use crate::tensors::{self, Enqueued, Export, Operand, StreamContext, torch};
use crate::torch::dropout;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<Object<'a, 'py>>;

/// What arrives beside the call's own tensors and options.
#[derive(Clone, Copy)]
pub(crate) struct Arriving<'a, 'py> {
    pub(crate) out: Object<'a, 'py>,
    pub(crate) lse: Object<'a, 'py>,
    pub(crate) d_o: Object<'a, 'py>,
    pub(crate) d_lse: Maybe<'a, 'py>,
}

/// By q, k, v, the mask and the sinks.
const NAMES: [&str; 5] = ["dq", "dk", "dv", "d_mask", "d_sinks"];

/// The same as operands.
pub(super) struct Read {
    pub(super) out: Operand,
    pub(super) lse: Operand,
    pub(super) d_o: Operand,
    pub(super) d_lse: Option<Operand>,
}

impl<'a, 'py> Arriving<'a, 'py> {
    pub(super) fn named(self) -> impl Iterator<Item = (&'static str, Object<'a, 'py>)> {
        let three = [("out", self.out), ("lse", self.lse), ("d_o", self.d_o)];
        three.into_iter().chain(self.d_lse.map(|d_lse| ("d_lse", d_lse)))
    }

    pub(super) fn read(self, kind: Kind, q: Object<'_, 'py>) -> Result<Read, Failure> {
        let read = |name, object| tensors::read(name, object, kind, q);
        Ok(Read {
            out: read("out", self.out)?,
            lse: read("lse", self.lse)?,
            d_o: read("d_o", self.d_o)?,
            d_lse: self.d_lse.map(|d_lse| read("d_lse", d_lse)).transpose()?,
        })
    }
}

/// A call whose gradients are asked for.
struct Call<'a, 'py> {
    kind: Kind,
    request: Request<'a, 'py>,
    opened: &'a Qkv<Option<Opened<'py>>>,
    arriving: Arriving<'a, 'py>,
    inputs: Inputs,
    read: Read,
    /// How often the forward call dropped, and which weights.
    dropout: (f64, Option<DropoutSeed>),
    /// Whose stream and memory serve it on a GPU.
    context: StreamContext<'py>,
}

impl<'a, 'py> Call<'a, 'py> {
    fn new(
        py: Python<'py>,
        wording: &Cell<Wording>,
        request: Request<'a, 'py>,
        opened: &'a Qkv<Option<Opened<'py>>>,
        arriving: Arriving<'a, 'py>,
    ) -> Result<Self, Failure> {
        let request = request.on(opened);
        let kind = attention::kind_for(wording, request.q)?;
        let (inputs, read) = (Inputs::read(&request, kind)?, arriving.read(kind, request.q)?);
        if kind == Kind::Torch {
            torch::refuse_gradients(py, request.named())?;
            torch::refuse_gradients(py, arriving.named())?;
        }
        let context = StreamContext::of(kind, request.q)?;
        Ok(Call { kind, request, opened, arriving, inputs, read, dropout: (0.0, None), context })
    }

    /// Writes the gradients that are there; on a GPU it enqueues that.
    fn run(
        &self,
        py: Python<'py>,
        home: &Home,
        gradients: &mut [Option<Operand>; 5],
    ) -> Result<Option<Enqueued>, Failure> {
        let Call { kind, request, opened, inputs, read, dropout: (dropout_p, dropout), context, .. } = self;
        // The caller chose the dtype of out: it need not be that of q.
        let options = Options { out_dtype: Some(read.out.dtype), dropout_p: *dropout_p, ..request.options()? };
        let views = inputs.views(opened)?;
        let forward = views.spec(&options, Some(&read.out), Lse::Given(&read.lse))?;
        let [dq, dk, dv, d_mask, d_sinks] = gradients.each_ref().map(|gradient| gradient.as_ref().map(Operand::form));
        let d_lse = read.d_lse.as_ref().map(Operand::form);
        let forms = GradientForms { d_lse, dq, dk, dv, d_mask, d_sinks, ..GradientForms::new(read.d_o.form()) };
        let planned = home.plan_backward(py, *kind, &BackwardSpec::new(forward, &forms)?)?;
        let [dq, dk, dv, d_mask, d_sinks] = gradients;
        let tensors = BackwardTensors {
            mask: views.mask,
            sinks: views.sinks,
            alibi_slopes: views.alibi_slopes,
            dropout: *dropout,
            d_lse: read.d_lse.as_ref().map(Operand::view).transpose()?,
            dq: written(dq)?,
            dk: written(dk)?,
            dv: written(dv)?,
            d_mask: written(d_mask)?,
            d_sinks: written(d_sinks)?,
            ..BackwardTensors::new([views.q, views.k, views.v], read.out.view()?, read.lse.view()?, read.d_o.view()?)
        };
        planned.run(py, tensors, context)
    }

    /// Sees to it that no memory is reused before what was enqueued has passed: that of what it read, and of `written`.
    fn hold(
        self,
        py: Python<'py>,
        enqueued: Option<Enqueued>,
        written: [Maybe<'_, 'py>; 5],
        exports: impl Iterator<Item = Export>,
    ) -> Result<(), Failure> {
        let Call { request, arriving, inputs, read: Read { out, lse, d_o, d_lse }, context, .. } = self;
        let of_read =
            [Some(out), Some(lse), Some(d_o), d_lse].into_iter().flatten().filter_map(|operand| operand._hold);
        let used =
            request.named().chain(arriving.named()).map(|(_, tensor)| tensor).chain(written.into_iter().flatten());
        context.hold(py, enqueued, used, inputs.exports().chain(of_read).chain(exports))
    }
}

/// A gradient to be written.
pub(super) fn written(gradient: &mut Option<Operand>) -> rapt::Result<Option<ViewMut<'_>>> {
    gradient.as_mut().map(Operand::view_mut).transpose()
}

/// `_native.attention_backward` on `home`: new tensors for the gradients by q, k and v, by the mask where `mask_grad` says so, and by sinks.
pub(crate) fn make<'py>(
    py: Python<'py>,
    home: &Home,
    request: Request<'_, 'py>,
    arriving: Arriving<'_, 'py>,
    mask_grad: Maybe<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let mask_grad = mask_grad.map_or(Ok(false), |given| options::flag("mask_grad", given))?;
        let opened = request.opened()?;
        let call = Call::new(py, &wording, request, &opened, arriving)?;
        let Inputs { q, k, v, mask, sinks, .. } = &call.inputs;
        if mask_grad && mask.is_none() {
            return Err(Failure::option("mask_grad", "True without a mask", "False"));
        }
        let wanted = [Some(q), Some(k), Some(v), mask.as_ref().filter(|_| mask_grad), sinks.as_ref()];
        let (mut products, mut gradients) = (Vec::new(), [const { None }; 5]);
        for ((gradient, name), wanted) in gradients.iter_mut().zip(NAMES).zip(wanted) {
            let Some(like) = wanted else { continue };
            let made = tensors::allocate(name, call.kind, call.request.q, like.device, like.dtype, like.shape)?;
            products.push(made.0);
            *gradient = Some(made.1);
        }
        let enqueued = call.run(py, home, &mut gradients)?;
        let exports = gradients.into_iter().flatten().filter_map(|gradient| gradient._hold);
        call.hold(py, enqueued, [None; 5], exports)?;
        let made = products.into_iter().map(|product| product.finish(py)).collect::<Result<Vec<_>, _>>()?;
        Ok(PyTuple::new(py, made)?.into_any())
    })
}

/// `_native.backward_into` on `home`: fills those of the gradients by q, k, v, the mask and the sinks that are given.
pub(crate) fn fill<'py>(
    py: Python<'py>,
    home: &Home,
    request: Request<'_, 'py>,
    arriving: Arriving<'_, 'py>,
    gradients: [Maybe<'_, 'py>; 5],
    dropout: dropout::Stated<'py>,
) -> PyResult<()> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let opened = request.opened()?;
        let call = Call::new(py, &wording, request, &opened, arriving)?;
        let call = Call { dropout: dropout::read(dropout)?, ..call };
        let mut operands = [const { None }; 5];
        for ((written, name), given) in operands.iter_mut().zip(NAMES).zip(gradients) {
            let Some(given) = given else { continue };
            let operand = tensors::read(name, given, call.kind, call.request.q)?;
            if !operand.writable {
                return Err(rapt::Error::ReadOnly { tensor: name }.into());
            }
            *written = Some(operand);
        }
        let enqueued = call.run(py, home, &mut operands)?;
        let exports = operands.into_iter().flatten().filter_map(|operand| operand._hold);
        call.hold(py, enqueued, gradients, exports)
    })
}
