//! `varlen_attention`: sequences of different lengths that lie one after another.

use std::cell::Cell;
use std::sync::Arc;

use pyo3::prelude::*;
use rapt::{Codes, Device, DeviceMemory, DropoutSeed, Engine, Options, Plan, Qkv, Queue, VarlenTensors};

use crate::api::codes::{Opened, codes_of};
use crate::api::ragged::{Common, OnDevice, Outputs, Purpose, Reader, enqueue, explained, on_threads, size};
use crate::api::tolerance;
use crate::engine::Home;
use crate::errors::hints;
use crate::errors::{Failure, Wording, guard};
use crate::kind::Kind;
use crate::tensors::{Operand, StreamContext, torch};

type Object<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// One of q, k and v of sequences that lie one after another, and what makes numbers of codes.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a, 'py> {
    pub(crate) tensor: Object<'a, 'py>,
    pub(crate) descale: Maybe<'a, 'py>,
    pub(crate) zero_point: Maybe<'a, 'py>,
}

/// The arguments of `rapt.varlen_attention`.
pub(crate) struct Varlen<'a, 'py> {
    pub(crate) q: Packed<'a, 'py>,
    pub(crate) k: Packed<'a, 'py>,
    pub(crate) v: Packed<'a, 'py>,
    pub(crate) cu_seqlens_q: Object<'a, 'py>,
    pub(crate) cu_seqlens_kv: Object<'a, 'py>,
    pub(crate) common: Common<'a, 'py>,
    /// How often weights are dropped, and which.
    pub(crate) dropout: (f64, Option<DropoutSeed>),
}

/// What one of q, k and v of sequences that lie one after another is called, with its parts.
struct Names {
    tensor: &'static str,
    descale: &'static str,
    zero_point: &'static str,
}

const Q: Names = Names { tensor: "q", descale: "q_descale", zero_point: "q_zero_point" };
const K: Names = Names { tensor: "k", descale: "k_descale", zero_point: "k_zero_point" };
const V: Names = Names { tensor: "v", descale: "v_descale", zero_point: "v_zero_point" };

impl<'a, 'py> Packed<'a, 'py> {
    /// What stands here as a `rapt.Quantized`.
    fn opened(&self, names: &Names) -> Result<Option<Opened<'py>>, Failure> {
        Opened::of(self.tensor, [(names.descale, self.descale), (names.zero_point, self.zero_point)])
    }

    /// The same operand on the tensors of what was opened.
    fn on<'b>(self, opened: Option<&'b Opened<'py>>) -> Packed<'b, 'py>
    where
        'a: 'b,
    {
        let Some(opened) = opened else { return self };
        Packed { tensor: &opened.codes, descale: Some(&opened.scale), zero_point: opened.zero_point.as_ref() }
    }

    /// Its tensors.
    fn tensors(&self) -> impl Iterator<Item = Object<'a, 'py>> + use<'a, 'py> {
        [Some(self.tensor), self.descale, self.zero_point].into_iter().flatten()
    }
}

/// One of q, k and v of sequences that lie one after another, as it was read.
struct PackedRead {
    tensor: Operand,
    descale: Option<Operand>,
    zero_point: Option<Operand>,
}

impl PackedRead {
    fn read(reader: Reader<'_, '_>, given: &Packed<'_, '_>, names: &Names) -> Result<Self, Failure> {
        Ok(PackedRead {
            tensor: reader.read(names.tensor, given.tensor)?,
            descale: reader.maybe(names.descale, given.descale)?,
            zero_point: reader.maybe(names.zero_point, given.zero_point)?,
        })
    }

    fn codes(&self, opened: Option<&Opened<'_>>) -> Result<Option<Box<Codes<'_>>>, Failure> {
        codes_of(&self.tensor, self.descale.as_ref(), self.zero_point.as_ref(), opened)
    }

    fn operands(self) -> impl Iterator<Item = Operand> {
        let PackedRead { tensor, descale, zero_point } = self;
        [Some(tensor), descale, zero_point].into_iter().flatten()
    }
}

pub(super) struct VarlenOnDevice<'a> {
    pub(super) tensors: VarlenTensors<'a>,
    pub(super) options: &'a Options,
}

impl OnDevice for VarlenOnDevice<'_> {
    type Plan = Arc<Plan>;
    fn plan(&self, engine: &Engine) -> rapt::Result<Arc<Plan>> {
        engine.plan_varlen(&self.tensors, self.options)
    }
    fn workspace_bytes(plan: &Arc<Plan>) -> usize {
        plan.workspace_bytes()
    }
    unsafe fn run(
        self,
        engine: &Engine,
        plan: &Arc<Plan>,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> rapt::Result<()> {
        // SAFETY: as the caller promises.
        unsafe { engine.varlen_attention_async(plan, self.tensors, workspace, queue) }
    }
}

/// `rapt.varlen_attention` on `home`, or what it would run.
pub(crate) fn varlen<'py>(
    py: Python<'py>,
    home: &Home,
    request: &Varlen<'_, 'py>,
    purpose: Purpose,
) -> PyResult<Bound<'py, PyAny>> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let Varlen { cu_seqlens_q, cu_seqlens_kv, common, .. } = request;
        let opened = Qkv { q: request.q.opened(&Q)?, k: request.k.opened(&K)?, v: request.v.opened(&V)? };
        let q = request.q.on(opened.q.as_ref());
        let (k, v) = (request.k.on(opened.k.as_ref()), request.v.on(opened.v.as_ref()));
        let reader = Reader::new(&wording, q.tensor)?;
        let (options, return_lse) = common.options()?;
        let (dropout_p, dropout) = request.dropout;
        let options = Options { dropout_p, ..options };
        let (of_q, of_k, of_v) =
            (PackedRead::read(reader, &q, &Q)?, PackedRead::read(reader, &k, &K)?, PackedRead::read(reader, &v, &V)?);
        let q_begins = reader.read("cu_seqlens_q", cu_seqlens_q)?;
        let kv_begins = reader.read("cu_seqlens_kv", cu_seqlens_kv)?;
        let sinks = reader.maybe("sinks", common.sinks)?;
        let slopes = reader.maybe("alibi_slopes", common.alibi_slopes)?;
        if reader.kind() == Kind::Torch {
            let given = [("q", Some(q.tensor)), ("k", Some(k.tensor)), ("v", Some(v.tensor)), ("sinks", common.sinks)];
            torch::refuse_gradients(py, given.into_iter().filter_map(|(name, tensor)| Some((name, tensor?))))?;
        }
        let (total, heads) = (size(&of_q.tensor, 0), size(&of_q.tensor, 1));
        let dim_v = match &opened.v {
            Some(opened) => opened.head_dim().unwrap_or(0),
            None => size(&of_v.tensor, 2),
        };
        let shapes = [[total, heads, dim_v].into(), [heads, total].into()];
        let mut outputs = Outputs::new(reader, common, (&options, return_lse), shapes)?;
        let (out, lse) = outputs.views()?;
        let codes = Qkv {
            q: of_q.codes(opened.q.as_ref())?,
            k: of_k.codes(opened.k.as_ref())?,
            v: of_v.codes(opened.v.as_ref())?,
        };
        let tensors = VarlenTensors {
            q: of_q.tensor.view()?,
            k: of_k.tensor.view()?,
            v: of_v.tensor.view()?,
            codes,
            cu_seqlens_q: q_begins.view()?,
            cu_seqlens_kv: kv_begins.view()?,
            sinks: sinks.as_ref().map(Operand::view).transpose()?,
            alibi_slopes: slopes.as_ref().map(Operand::view).transpose()?,
            dropout,
            out,
            lse,
        };
        if purpose == Purpose::Explain {
            let at = (reader.kind(), of_q.tensor.device);
            let plan = explained(py, home, at, |engine, threads| engine.explain_varlen(tensors, &options, threads))?;
            return Ok(plan?);
        }
        if let Device::Cuda(device) = of_q.tensor.device {
            let context = StreamContext::of(reader.kind(), q.tensor)?;
            let enqueued = enqueue(py, home, device, &context, VarlenOnDevice { tensors, options: &options })?;
            let others = [sinks, slopes].into_iter().flatten().chain([q_begins, kv_begins]);
            let operands = [of_q, of_k, of_v].into_iter().flat_map(PackedRead::operands).chain(others);
            let exports = operands.filter_map(|operand| operand._hold);
            let optional = [common.sinks, common.alibi_slopes, common.out].into_iter().flatten();
            let packed = [&q, &k, &v].into_iter().flat_map(Packed::tensors);
            let given = packed.chain([*cu_seqlens_q, *cu_seqlens_kv]).chain(optional);
            context.hold(py, Some(enqueued), given, exports)?;
            return outputs.finish(py, common.out);
        }
        on_threads(py, home, reader.kind(), |engine, queue| engine.varlen_attention(tensors, &options, queue))??;
        tolerance::count_compute(options.compute);
        outputs.finish(py, common.out)
    })
}
