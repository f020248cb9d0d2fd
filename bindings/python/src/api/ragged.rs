//! `attention_with_kvcache`: sequences of different lengths in a cache; and what calls for many sequences share.

use std::cell::Cell;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyTuple};
use rapt::quant::QuantError;
use rapt::{
    CacheCodes, CacheView, Causal, DType, Device, DeviceMemory, Engine, Format, KvCacheTensors, Options, Plan, Queue,
    RaggedPlan, Shape, TensorLayout, View, ViewMut,
};

use crate::api::codes::Opened;
use crate::api::plan::PyRaggedPlan;
use crate::api::{options, quant, tolerance};
use crate::engine::{Home, pass_folders};
use crate::errors::hints;
use crate::errors::{Failure, Wording, guard};
use crate::kind::Kind;
use crate::tensors::{self, Enqueued, Operand, Product, StreamContext, torch};

type Object<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// What a call for many sequences is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To compute.
    Run,
    /// To say what would run: a `rapt.RaggedPlan`.
    Explain,
}

/// What calls for many sequences take beside their tensors.
#[derive(Clone, Copy)]
pub(crate) struct Common<'a, 'py> {
    pub(crate) causal: Maybe<'a, 'py>,
    pub(crate) window: Maybe<'a, 'py>,
    pub(crate) softcap: Maybe<'a, 'py>,
    pub(crate) scale: Maybe<'a, 'py>,
    pub(crate) sinks: Maybe<'a, 'py>,
    pub(crate) alibi_slopes: Maybe<'a, 'py>,
    pub(crate) compute: Maybe<'a, 'py>,
    pub(crate) out: Maybe<'a, 'py>,
    pub(crate) out_dtype: Maybe<'a, 'py>,
    pub(crate) return_lse: Maybe<'a, 'py>,
}

/// The keys or the values of a cache: those that it holds, the new ones, and what makes numbers of codes.
#[derive(Clone, Copy)]
pub(crate) struct CachePart<'a, 'py> {
    pub(crate) cache: Object<'a, 'py>,
    pub(crate) new: Maybe<'a, 'py>,
    pub(crate) descale: Maybe<'a, 'py>,
    pub(crate) zero_point: Maybe<'a, 'py>,
}

/// The arguments of `rapt.attention_with_kvcache`.
pub(crate) struct Cached<'a, 'py> {
    pub(crate) q: Object<'a, 'py>,
    pub(crate) k: CachePart<'a, 'py>,
    pub(crate) v: CachePart<'a, 'py>,
    pub(crate) cache_seqlens: Maybe<'a, 'py>,
    pub(crate) page_table: Maybe<'a, 'py>,
    pub(crate) common: Common<'a, 'py>,
}

impl<'a, 'py> Cached<'a, 'py> {
    /// Every tensor of the call; of a cache that is a `rapt.Quantized`, those that it holds.
    fn tensors<'o>(&self, opened: [Option<&'o Opened<'py>>; 2]) -> impl Iterator<Item = &'o Bound<'py, PyAny>>
    where
        'a: 'o,
    {
        let Cached { q, k, v, cache_seqlens, page_table, common } = self;
        let part = |part: &CachePart<'a, 'py>, opened: Option<&Opened<'py>>| {
            [opened.is_none().then_some(part.cache), part.new, part.descale, part.zero_point]
        };
        let parts = part(k, opened[0]).into_iter().chain(part(v, opened[1]));
        let others = [Some(*q), *cache_seqlens, *page_table, common.sinks, common.alibi_slopes, common.out];
        let is_tensor = |object: &Object<'_, '_>| !object.is_instance_of::<PyInt>();
        parts.chain(others).flatten().filter(is_tensor).chain(opened.into_iter().flatten().flat_map(Opened::tensors))
    }
}

impl Common<'_, '_> {
    pub(super) fn options(&self) -> Result<(Options, bool), Failure> {
        let options = Options {
            softmax_scale: options::real("scale", self.scale)?,
            softcap: options::real("softcap", self.softcap)?,
            causal: options::causal("causal", self.causal)?,
            window: options::window("window", self.window)?,
            layout: TensorLayout::Bshd,
            out_dtype: options::dtype("out_dtype", self.out_dtype)?,
            compute: options::compute("compute", self.compute)?,
            dropout_p: 0.0,
        };
        Ok((options, self.return_lse.map_or(Ok(false), |given| options::flag("return_lse", given))?))
    }
}

/// Reads tensors of one call, which are of the kind of `q`.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a, 'py> {
    kind: Kind,
    q: Object<'a, 'py>,
}

impl<'a, 'py> Reader<'a, 'py> {
    pub(super) fn new(wording: &Cell<Wording>, q: Object<'a, 'py>) -> Result<Self, Failure> {
        let kind = tensors::source_kind(q)?;
        wording.set(Wording { kind, ..wording.get() });
        Ok(Reader { kind, q })
    }

    /// Whose tensors they are.
    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn read(&self, name: &'static str, object: Object<'_, '_>) -> Result<Operand, Failure> {
        tensors::read(name, object, self.kind, self.q)
    }

    pub(super) fn maybe(&self, name: &'static str, object: Maybe<'_, '_>) -> Result<Option<Operand>, Failure> {
        object.map(|object| self.read(name, object)).transpose()
    }

    /// The given output, or a new one.
    fn output(
        &self,
        name: &'static str,
        given: Maybe<'_, 'py>,
        device: Device,
        (dtype, shape): (DType, Shape),
    ) -> Result<(Option<Product<'py>>, Operand), Failure> {
        match given {
            Some(given) => {
                let out = self.read(name, given)?;
                if out.writable { Ok((None, out)) } else { Err(rapt::Error::ReadOnly { tensor: name }.into()) }
            }
            None => {
                let (product, out) = tensors::allocate(name, self.kind, self.q, device, dtype, shape)?;
                Ok((Some(product), out))
            }
        }
    }
}

/// The outputs of a call: what is written, and what is handed back.
pub(super) struct Outputs<'py> {
    out: Operand,
    product: Option<Product<'py>>,
    lse: Option<(Option<Product<'py>>, Operand)>,
}

impl<'py> Outputs<'py> {
    /// # Errors
    /// Those of the shapes: ranks that are wrong are told by the engine, to which outputs without elements are given then.
    pub(super) fn new(
        reader: Reader<'_, 'py>,
        common: &Common<'_, 'py>,
        (options, return_lse): (&Options, bool),
        [out, lse]: [Shape; 2],
    ) -> Result<Self, Failure> {
        let q = reader.read("q", reader.q)?;
        // What is computed in no dtype is refused by the engine, which looks at q first.
        let plain = if q.dtype.is_computed() { q.dtype } else { DType::F32 };
        let dtype = options.out_dtype.filter(|dtype| dtype.is_computed()).unwrap_or(plain);
        let (product, out) = reader.output("out", common.out, q.device, (dtype, out))?;
        let lse = return_lse.then(|| reader.output("lse", None, q.device, (plain.accumulation(), lse))).transpose()?;
        Ok(Outputs { out, product, lse })
    }

    pub(super) fn views(&mut self) -> Result<(ViewMut<'_>, Option<ViewMut<'_>>), Failure> {
        Ok((self.out.view_mut()?, self.lse.as_mut().map(|(_, lse)| lse.view_mut()).transpose()?))
    }

    pub(super) fn finish(self, py: Python<'py>, given: Maybe<'_, 'py>) -> Result<Bound<'py, PyAny>, Failure> {
        let Outputs { out, product, lse } = self;
        drop(out);
        let out = match (product, given) {
            (Some(product), _) => product.finish(py)?,
            (None, Some(given)) => given.clone(),
            (None, None) => return Err(Failure::binding(rapt::ErrorKind::Unsupported, "no output was made", "")),
        };
        match lse {
            Some((Some(product), operand)) => {
                drop(operand);
                Ok(PyTuple::new(py, [out, product.finish(py)?])?.into_any())
            }
            _ => Ok(out),
        }
    }
}

/// Runs `call` on the threads of a call of this kind, with the GIL released.
pub(super) fn on_threads<E: Send>(
    py: Python<'_>,
    home: &Home,
    kind: Kind,
    call: impl FnOnce(&Engine, &Queue<'_>) -> Result<(), E> + Send,
) -> Result<Result<(), E>, Failure> {
    let pool = home.torch_pool(py, kind)?;
    let (engine, executor) = (home.engine()?, home.executor(pool.as_ref())?);
    Ok(py.detach(|| call(engine, &Queue::Host(executor))))
}

/// What `call` says of tensors of this kind on `device`, on as many threads as would run them.
pub(super) fn explained<'py, E: Send>(
    py: Python<'py>,
    home: &Home,
    (kind, device): (Kind, Device),
    call: impl FnOnce(&Engine, usize) -> Result<RaggedPlan, E> + Send,
) -> Result<Result<Bound<'py, PyAny>, E>, Failure> {
    if let Device::Cuda(_) = device {
        pass_folders(py)?;
    }
    let engine = home.engine()?;
    let threads = home.torch_threads(py, kind)?.unwrap_or_else(|| engine.threads().get());
    Ok(match py.detach(|| call(engine, threads)) {
        Ok(plan) => Ok(Bound::new(py, PyRaggedPlan::new(plan))?.into_any()),
        Err(error) => Err(error),
    })
}

/// A size of a tensor; 0 where it has no such dimension, which the engine refuses by name.
pub(super) fn size(operand: &Operand, dim: usize) -> usize {
    operand.shape.get(dim).copied().unwrap_or(0)
}

/// The keys or the values of a cache, as they were read.
struct Part {
    cache: Operand,
    new: Option<Operand>,
    descale: Option<Operand>,
    zero_point: Option<Operand>,
}

impl Part {
    fn operands(self) -> impl Iterator<Item = Operand> {
        let Part { cache, new, descale, zero_point } = self;
        [Some(cache), new, descale, zero_point].into_iter().flatten()
    }
}

/// What the tensors of a part are called.
struct PartNames {
    cache: &'static str,
    new: &'static str,
    descale: &'static str,
    zero_point: &'static str,
}

const K: PartNames = PartNames { cache: "k_cache", new: "k", descale: "k_descale", zero_point: "k_zero_point" };
const V: PartNames = PartNames { cache: "v_cache", new: "v", descale: "v_descale", zero_point: "v_zero_point" };

impl Part {
    fn read(
        reader: Reader<'_, '_>,
        given: &CachePart<'_, '_>,
        names: &PartNames,
        opened: Option<&Opened<'_>>,
    ) -> Result<Self, Failure> {
        let (cache, descale, zero_point) = match opened {
            Some(opened) => (&opened.codes, Some(&opened.scale), opened.zero_point.as_ref()),
            None => (given.cache, given.descale, given.zero_point),
        };
        Ok(Part {
            cache: reader.read(names.cache, cache)?,
            new: reader.maybe(names.new, given.new)?,
            descale: reader.maybe(names.descale, descale)?,
            zero_point: reader.maybe(names.zero_point, zero_point)?,
        })
    }

    /// Its views, the cache and its scales to be written where there are new keys.
    fn views(
        &mut self,
        names: &PartNames,
        opened: Option<&Opened<'_>>,
    ) -> Result<(CacheView<'_>, Option<CacheCodes<'_>>, Option<View<'_>>), Failure> {
        let Part { cache, new, descale, zero_point } = self;
        let format = opened.map(Opened::format).or_else(|| Format::of_dtype(cache.dtype));
        let is_written = new.is_some();
        let dtype = cache.dtype;
        let codes = match (format, descale) {
            (Some(format), Some(descale)) => Some(CacheCodes {
                format,
                descale: seen(descale, is_written)?,
                zero_point: zero_point.as_mut().map(|points| seen(points, is_written)).transpose()?,
                global_scale: opened.and_then(Opened::global_scale),
                granularity: opened.map(Opened::granularity),
                head_dim: opened.and_then(Opened::head_dim),
            }),
            (Some(format), None) => {
                let codes = if opened.is_some() { format.name() } else { dtype.name() };
                return Err(rapt::Error::MissingPart { tensor: names.cache, codes, part: names.descale }.into());
            }
            (None, Some(_)) => {
                return Err(rapt::Error::UnexpectedPart {
                    tensor: names.cache,
                    codes: dtype.name(),
                    part: names.descale,
                }
                .into());
            }
            (None, None) => None,
        };
        Ok((seen(cache, is_written)?, codes, new.as_ref().map(Operand::view).transpose()?))
    }
}

/// A tensor of a cache, to be written if it is to be and may.
fn seen(operand: &mut Operand, is_written: bool) -> Result<CacheView<'_>, Failure> {
    Ok(if is_written && operand.writable {
        CacheView::Write(operand.view_mut()?)
    } else {
        CacheView::Read(operand.view()?)
    })
}

/// Lengths that were given: a tensor, or one number for all sequences.
enum Lengths {
    Tensor(Operand),
    Same(Vec<i32>),
}

impl Lengths {
    fn read(reader: Reader<'_, '_>, given: Maybe<'_, '_>, batch: usize) -> Result<Option<Self>, Failure> {
        let Some(given) = given else { return Ok(None) };
        if given.is_instance_of::<PyInt>() && !given.is_instance_of::<PyBool>() {
            let refuse = || Failure::option("cache_seqlens", given.to_string(), "int32 [batch], or an int from 0 up");
            let length: i32 = given.extract().map_err(|_| refuse())?;
            return Ok(Some(Lengths::Same(vec![length; batch])));
        }
        Ok(Some(Lengths::Tensor(reader.read("cache_seqlens", given)?)))
    }

    fn operand(self) -> Option<Operand> {
        match self {
            Lengths::Tensor(operand) => Some(operand),
            Lengths::Same(_) => None,
        }
    }

    fn view(&self) -> Result<View<'_>, Failure> {
        Ok(match self {
            Lengths::Tensor(operand) => operand.view()?,
            Lengths::Same(lengths) => View::contiguous("cache_seqlens", lengths, [lengths.len()].into())?,
        })
    }
}

/// A call for many sequences on a GPU.
pub(super) trait OnDevice: Sync {
    type Plan: Send;
    fn plan(&self, engine: &Engine) -> rapt::Result<Self::Plan>;
    fn workspace_bytes(plan: &Self::Plan) -> usize;
    /// # Safety
    /// As [`Engine::run_async`].
    unsafe fn run(
        self,
        engine: &Engine,
        plan: &Self::Plan,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> rapt::Result<()>;
}

struct CachedOnDevice<'a> {
    tensors: KvCacheTensors<'a>,
    options: &'a Options,
}

impl OnDevice for CachedOnDevice<'_> {
    type Plan = Arc<Plan>;
    fn plan(&self, engine: &Engine) -> rapt::Result<Arc<Plan>> {
        engine.plan_with_kvcache(&self.tensors, self.options)
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
        unsafe { engine.attention_with_kvcache_async(plan, self.tensors, workspace, queue) }
    }
}

/// Enqueues a call on the stream of `context`, with its memory for scratch.
pub(super) fn enqueue<'py, Call: OnDevice>(
    py: Python<'py>,
    home: &Home,
    device: u32,
    context: &StreamContext<'py>,
    call: Call,
) -> Result<Enqueued, Failure> {
    pass_folders(py)?;
    let engine = home.engine()?;
    // A kernel that is not kept yet is compiled here, for seconds.
    let plan = py.detach(|| call.plan(engine))?;
    let stream = context.stream(py, device)?;
    let workspace = context.workspace(py, device, Call::workspace_bytes(&plan), stream)?;
    let queue = Queue::Cuda { device, stream };
    // SAFETY: the tensors lie on this device (each was read there, and the plan compares devices), and the workspace is reused only by
    // what this stream runs later. That the tensors' memory is not reused before, `StreamContext::hold` says, which the caller calls next.
    unsafe { call.run(engine, &plan, workspace.memory, &queue) }?;
    Ok(Enqueued { device, stream })
}

/// `rapt.attention_with_kvcache` on `home`, or what it would run.
pub(crate) fn with_kvcache<'py>(
    py: Python<'py>,
    home: &Home,
    request: &Cached<'_, 'py>,
    purpose: Purpose,
) -> PyResult<Bound<'py, PyAny>> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy });
    guard(py, &wording, || {
        let Cached { q, k, v, cache_seqlens, page_table, common } = request;
        let opened_k = Opened::of(k.cache, [(K.descale, k.descale), (K.zero_point, k.zero_point)])?;
        let opened_v = Opened::of(v.cache, [(V.descale, v.descale), (V.zero_point, v.zero_point)])?;
        opened_k.iter().chain(&opened_v).try_for_each(Opened::in_rows)?;
        let reader = Reader::new(&wording, q)?;
        let (mut options, return_lse) = common.options()?;
        // The last query is at the last key of a cache: `True` is what flash-attention means by it.
        if common.causal.is_some_and(PyAnyMethods::is_instance_of::<PyBool>) {
            options.causal = options.causal.map(|_| Causal::BottomRight);
        }
        let q_read = reader.read("q", q)?;
        let mut of_k = Part::read(reader, k, &K, opened_k.as_ref())?;
        let mut of_v = Part::read(reader, v, &V, opened_v.as_ref())?;
        let lengths = Lengths::read(reader, *cache_seqlens, size(&q_read, 0))?;
        let table = reader.maybe("page_table", *page_table)?;
        let sinks = reader.maybe("sinks", common.sinks)?;
        let slopes = reader.maybe("alibi_slopes", common.alibi_slopes)?;
        if reader.kind == Kind::Torch {
            let caches = opened_k.is_none().then_some(k.cache).into_iter().chain(opened_v.is_none().then_some(v.cache));
            let given = [("q", Some(*q)), ("k", k.new), ("v", v.new), ("sinks", common.sinks)];
            let given = given.into_iter().filter_map(|(name, tensor)| Some((name, tensor?)));
            torch::refuse_gradients(py, given.chain(caches.map(|cache| ("k_cache", cache))))?;
        }
        let (batch, q_len, heads) = (size(&q_read, 0), size(&q_read, 1), size(&q_read, 2));
        let dim_v = match &opened_v {
            Some(opened) => opened.head_dim().unwrap_or(0),
            None => size(&of_v.cache, 3),
        };
        let shapes = [[batch, q_len, heads, dim_v].into(), [batch, heads, q_len].into()];
        let mut outputs = Outputs::new(reader, common, (&options, return_lse), shapes)?;
        let (out, lse) = outputs.views()?;
        let (k_cache, k_codes, k) = of_k.views(&K, opened_k.as_ref())?;
        let (v_cache, v_codes, v) = of_v.views(&V, opened_v.as_ref())?;
        let tensors = KvCacheTensors {
            q: q_read.view()?,
            k_cache,
            v_cache,
            k_codes,
            v_codes,
            k,
            v,
            cache_seqlens: lengths.as_ref().map(Lengths::view).transpose()?,
            page_table: table.as_ref().map(Operand::view).transpose()?,
            sinks: sinks.as_ref().map(Operand::view).transpose()?,
            alibi_slopes: slopes.as_ref().map(Operand::view).transpose()?,
            out,
            lse,
        };
        let refused = |error: QuantError| match error {
            QuantError::Core(error) => error.into(),
            other => quant::refusal(&other, reader.kind),
        };
        if purpose == Purpose::Explain {
            let at = (reader.kind, q_read.device);
            let plan =
                explained(py, home, at, |engine, threads| engine.explain_with_kvcache(tensors, &options, threads))?;
            return plan.map_err(refused);
        }
        if let Device::Cuda(device) = q_read.device {
            let context = StreamContext::of(reader.kind, q)?;
            let enqueued = enqueue(py, home, device, &context, CachedOnDevice { tensors, options: &options })?;
            let on_device = !matches!(&lengths, Some(Lengths::Tensor(operand)) if operand.device == Device::Cpu);
            let request = Cached { cache_seqlens: cache_seqlens.filter(|_| on_device), ..*request };
            let parts = [of_k, of_v].into_iter().flat_map(Part::operands);
            let others = [lengths.and_then(Lengths::operand), table, sinks, slopes].into_iter().flatten();
            let exports = parts.chain(others).chain([q_read]).filter_map(|operand| operand._hold);
            let tensors = request.tensors([opened_k.as_ref(), opened_v.as_ref()]);
            context.hold(py, Some(enqueued), tensors, exports)?;
            return outputs.finish(py, common.out);
        }
        let done =
            on_threads(py, home, reader.kind, |engine, queue| engine.attention_with_kvcache(tensors, &options, queue))?;
        done.map_err(refused)?;
        tolerance::count_compute(options.compute);
        outputs.finish(py, common.out)
    })
}
