//! `varlen_attention_backward` and `varlen_backward_into`: the gradients of sequences that lie one after another.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rapt::{
    BackwardPlan, BackwardTensors, Device, DeviceMemory, DropoutSeed, Engine, ErrorKind, Options, Queue,
    VarlenBackwardTensors, View,
};

use crate::api::backward::{self, Arriving, written};
use crate::api::codes::Opened;
use crate::api::ragged::{Common, OnDevice, Reader, enqueue, on_threads};
use crate::engine::Home;
use crate::errors::{Failure, Wording, guard, hints};
use crate::kind::Kind;
use crate::tensors::{self, Enqueued, Export, Operand, StreamContext, torch};

type Object<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<Object<'a, 'py>>;

/// The arguments of both functions.
pub(crate) struct Request<'a, 'py> {
    /// q, k and v.
    pub(crate) inputs: [Object<'a, 'py>; 3],
    /// Of queries and of keys.
    pub(crate) offsets: [Object<'a, 'py>; 2],
    pub(crate) arriving: Arriving<'a, 'py>,
    pub(crate) common: Common<'a, 'py>,
    /// How often the forward call dropped, and which weights.
    pub(crate) dropout: (f64, Option<DropoutSeed>),
}

const NAMES: [&str; 4] = ["dq", "dk", "dv", "d_sinks"];

pub(super) struct BackwardOnDevice<'a> {
    pub(super) tensors: VarlenBackwardTensors<'a>,
    pub(super) options: &'a Options,
}

impl OnDevice for BackwardOnDevice<'_> {
    type Plan = BackwardPlan;
    fn plan(&self, engine: &Engine) -> rapt::Result<BackwardPlan> {
        engine.plan_varlen_backward(&self.tensors, self.options)
    }
    fn workspace_bytes(plan: &BackwardPlan) -> usize {
        plan.workspace_bytes()
    }
    unsafe fn run(
        self,
        engine: &Engine,
        plan: &BackwardPlan,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> rapt::Result<()> {
        // SAFETY: as the caller promises.
        unsafe { engine.varlen_backward_async(plan, self.tensors, workspace, queue) }
    }
}

/// What was given, as it was read.
struct Call<'py> {
    kind: Kind,
    options: Options,
    inputs: [Operand; 3],
    offsets: [Operand; 2],
    arrived: backward::Read,
    sinks: Option<Operand>,
    alibi_slopes: Option<Operand>,
    dropout: Option<DropoutSeed>,
    /// Whose stream and memory serve it on a GPU.
    context: StreamContext<'py>,
}

impl<'py> Call<'py> {
    fn read(py: Python<'py>, wording: &Cell<Wording>, request: &Request<'_, 'py>) -> Result<Self, Failure> {
        let Request { inputs: [q, k, v], offsets: [of_q, of_kv], arriving, common, dropout } = request;
        for (name, given) in [("q", q), ("k", k), ("v", v)] {
            if Opened::of(given, [("", None), ("", None)])?.is_some() {
                let message = format!("{name} is a rapt.Quantized: codes have no gradient");
                return Err(Failure::binding(ErrorKind::Unsupported, message, format!("`{name}.dequantize()`")));
            }
        }
        let reader = Reader::new(wording, q)?;
        let kind = reader.kind();
        let (options, _) = common.options()?;
        let (dropout_p, dropout) = *dropout;
        let inputs = [reader.read("q", q)?, reader.read("k", k)?, reader.read("v", v)?];
        let offsets = [reader.read("cu_seqlens_q", of_q)?, reader.read("cu_seqlens_kv", of_kv)?];
        let arrived = arriving.read(kind, q)?;
        if kind == Kind::Torch {
            let given = [("q", Some(*q)), ("k", Some(*k)), ("v", Some(*v)), ("sinks", common.sinks)];
            torch::refuse_gradients(py, given.into_iter().filter_map(|(name, tensor)| Some((name, tensor?))))?;
            torch::refuse_gradients(py, arriving.named())?;
        }
        // The caller chose the dtype of out: it need not be that of q.
        let out_dtype = Some(arrived.out.dtype);
        Ok(Call {
            kind,
            options: Options { out_dtype, dropout_p, ..options },
            inputs,
            offsets,
            arrived,
            sinks: reader.maybe("sinks", common.sinks)?,
            alibi_slopes: reader.maybe("alibi_slopes", common.alibi_slopes)?,
            dropout,
            context: StreamContext::of(kind, q)?,
        })
    }

    /// Writes the gradients that are there; on a GPU it enqueues that.
    fn run(
        &self,
        py: Python<'py>,
        home: &Home,
        gradients: &mut [Option<Operand>; 4],
    ) -> Result<Option<Enqueued>, Failure> {
        let Call { kind, options, inputs: [q, k, v], offsets: [of_q, of_kv], arrived, sinks, alibi_slopes, .. } = self;
        let [dq, dk, dv, d_sinks] = gradients;
        let (out, lse, d_o) = (arrived.out.view()?, arrived.lse.view()?, arrived.d_o.view()?);
        let tensors = BackwardTensors {
            sinks: given(sinks.as_ref())?,
            alibi_slopes: given(alibi_slopes.as_ref())?,
            dropout: self.dropout,
            d_lse: given(arrived.d_lse.as_ref())?,
            dq: written(dq)?,
            dk: written(dk)?,
            dv: written(dv)?,
            d_sinks: written(d_sinks)?,
            ..BackwardTensors::new([q.view()?, k.view()?, v.view()?], out, lse, d_o)
        };
        let tensors = VarlenBackwardTensors { cu_seqlens_q: of_q.view()?, cu_seqlens_kv: of_kv.view()?, tensors };
        if let Device::Cuda(device) = q.device {
            return enqueue(py, home, device, &self.context, BackwardOnDevice { tensors, options }).map(Some);
        }
        on_threads(py, home, *kind, |engine, queue| engine.varlen_backward(tensors, options, queue))??;
        Ok(None)
    }

    /// Sees to it that no memory is reused before what was enqueued has passed: that of what it read, and of `written`.
    fn hold(
        self,
        py: Python<'py>,
        enqueued: Option<Enqueued>,
        request: &Request<'_, 'py>,
        written: [Maybe<'_, 'py>; 4],
        exports: impl Iterator<Item = Export>,
    ) -> Result<(), Failure> {
        let Call { inputs, offsets, arrived, sinks, alibi_slopes, context, .. } = self;
        let backward::Read { out, lse, d_o, d_lse } = arrived;
        let read = inputs.into_iter().chain(offsets).chain([out, lse, d_o]);
        let read = read.chain([d_lse, sinks, alibi_slopes].into_iter().flatten());
        let Request { inputs, offsets, arriving, common, .. } = request;
        let given =
            inputs.iter().chain(offsets).copied().chain([common.sinks, common.alibi_slopes].into_iter().flatten());
        let given = given.chain(arriving.named().map(|(_, tensor)| tensor)).chain(written.into_iter().flatten());
        context.hold(py, enqueued, given, read.filter_map(|operand| operand._hold).chain(exports))
    }
}

fn given(operand: Option<&Operand>) -> rapt::Result<Option<View<'_>>> {
    operand.map(Operand::view).transpose()
}

/// `_native.varlen_attention_backward` on `home`: new tensors for the gradients by q, k, v and sinks.
pub(crate) fn make<'py>(
    py: Python<'py>,
    home: &Home,
    request: &Request<'_, 'py>,
    _: [Maybe<'_, 'py>; 0],
) -> PyResult<Bound<'py, PyAny>> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let call = Call::read(py, &wording, request)?;
        let [q, k, v] = &call.inputs;
        let (mut products, mut gradients) = (Vec::new(), [const { None }; 4]);
        for ((gradient, name), wanted) in
            gradients.iter_mut().zip(NAMES).zip([Some(q), Some(k), Some(v), call.sinks.as_ref()])
        {
            let Some(like) = wanted else { continue };
            let made = tensors::allocate(name, call.kind, request.inputs[0], like.device, like.dtype, like.shape)?;
            products.push(made.0);
            *gradient = Some(made.1);
        }
        let enqueued = call.run(py, home, &mut gradients)?;
        let exports = gradients.into_iter().flatten().filter_map(|gradient| gradient._hold);
        call.hold(py, enqueued, request, [None; 4], exports)?;
        let made = products.into_iter().map(|product| product.finish(py)).collect::<Result<Vec<_>, _>>()?;
        Ok(PyTuple::new(py, made)?.into_any())
    })
}

/// `_native.varlen_backward_into` on `home`: fills those of the gradients by q, k, v and the sinks that are given.
pub(crate) fn fill<'py>(
    py: Python<'py>,
    home: &Home,
    request: &Request<'_, 'py>,
    gradients: [Maybe<'_, 'py>; 4],
) -> PyResult<()> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let call = Call::read(py, &wording, request)?;
        let mut written = [const { None }; 4];
        for ((written, name), given) in written.iter_mut().zip(NAMES).zip(gradients) {
            let Some(given) = given else { continue };
            let operand = tensors::read(name, given, call.kind, request.inputs[0])?;
            if !operand.writable {
                return Err(rapt::Error::ReadOnly { tensor: name }.into());
            }
            *written = Some(operand);
        }
        let enqueued = call.run(py, home, &mut written)?;
        let exports = written.into_iter().flatten().filter_map(|gradient| gradient._hold);
        call.hold(py, enqueued, request, gradients, exports)
    })
}
