//! `rapt.KVCache`: pages of keys and values that many sequences take, share and give back.

use std::cell::Cell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyList, PyTuple};
use rapt::quant::QuantError;
use rapt::{
    Causal, DType, Device, Granularity, KvCache, KvCacheForm, KvCacheQueries, SequenceId, TensorLayout, View, quant,
};

use crate::api::ragged::{Common, Outputs, Purpose, Reader, explained, on_threads, size};
use crate::api::{options, quant as api_quant, tolerance};
use crate::engine::Home;
use crate::errors::hints;
use crate::errors::{Failure, Wording, guard};
use crate::kind::Kind;
use crate::tensors::{Operand, torch};

type Object<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// Keys and values of many sequences, in pages of host memory that it owns.
///
/// dtype: of keys and values that are not codes. format: that of codes, by token, or by block with a block_size; a pair is of keys and of
/// values, None of which is numbers. global_scale: of nvfp4, one more factor of all keys and of all values, or a pair.
#[pyclass(frozen, module = "rapt", name = "KVCache")]
pub(crate) struct PyKvCache {
    cache: RwLock<KvCache>,
}

fn wording() -> Cell<Wording> {
    Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Numpy })
}

/// A refusal of the cache; one about a number without a code has the words of `rapt.quantize`.
fn refused(error: QuantError, kind: Kind) -> Failure {
    match error {
        QuantError::Core(error) => error.into(),
        other => api_quant::refusal(&other, kind),
    }
}

fn count(option: &'static str, given: Object<'_, '_>) -> Result<usize, Failure> {
    let refuse = || Failure::option(option, repr(given), "an int from 1 up");
    if given.is_instance_of::<PyBool>() || !given.is_instance_of::<PyInt>() {
        return Err(refuse());
    }
    given.extract().map_err(|_| refuse())
}

fn repr(object: Object<'_, '_>) -> String {
    object.repr().map_or_else(|_| "something without a repr".to_owned(), |text| text.to_string())
}

fn id_of(given: Object<'_, '_>) -> Result<SequenceId, Failure> {
    let number: Option<u64> = (!given.is_instance_of::<PyBool>()).then(|| given.extract().ok()).flatten();
    let number =
        number.ok_or_else(|| Failure::option("id", repr(given), "an int that `new_sequence` or `fork` gave"))?;
    Ok(SequenceId::from_number(number))
}

fn ids_of(given: Object<'_, '_>) -> Result<Vec<SequenceId>, Failure> {
    if !(given.is_instance_of::<PyList>() || given.is_instance_of::<PyTuple>()) {
        return Err(Failure::option("ids", repr(given), "a list of ints that `new_sequence` or `fork` gave"));
    }
    given.try_iter()?.map(|id| id_of(&id?)).collect()
}

/// Something of keys, and of values.
type Pair<'py> = (Option<Bound<'py, PyAny>>, Option<Bound<'py, PyAny>>);

/// What is given of keys and of values: one for both, or a pair of which each may be None.
fn pair<'py>(option: &'static str, given: Maybe<'_, 'py>, allowed: &'static str) -> Result<Pair<'py>, Failure> {
    match given {
        Some(both) if both.is_instance_of::<PyTuple>() => {
            both.extract().map_err(|_| Failure::option(option, repr(both), allowed))
        }
        given => Ok((given.cloned(), given.cloned())),
    }
}

/// The codes of keys, or of values.
fn scheme(
    format: Maybe<'_, '_>,
    granularity: Maybe<'_, '_>,
    block_size: Maybe<'_, '_>,
) -> Result<Option<quant::Scheme>, Failure> {
    let Some(format) = format else { return Ok(None) };
    let scheme = api_quant::scheme_from(format, granularity, block_size)?;
    if granularity.is_some() || scheme.format().own_block_size().is_some() {
        return Ok(Some(scheme));
    }
    let by_token = quant::Scheme::new(scheme.format(), Some(Granularity::Token), scheme.scale_layout());
    by_token.map(Some).map_err(|error| refused(error, Kind::Numpy))
}

impl PyKvCache {
    fn read(&self) -> RwLockReadGuard<'_, KvCache> {
        // An append is whole or did nothing.
        self.cache.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, KvCache> {
        self.cache.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `change` with the cache to itself, and without the GIL, which whoever has the cache may wait for.
    fn change<T: Send>(
        &self,
        py: Python<'_>,
        kind: Kind,
        change: impl FnOnce(&mut KvCache) -> Result<T, QuantError> + Send,
    ) -> Result<T, Failure> {
        py.detach(|| change(&mut self.write())).map_err(|error| refused(error, kind))
    }

    fn look<T: Send>(
        &self,
        py: Python<'_>,
        look: impl FnOnce(&KvCache) -> rapt::Result<T> + Send,
    ) -> Result<T, Failure> {
        Ok(py.detach(|| look(&self.read()))?)
    }

    /// Attention to the keys of the sequences `ids`, or what would run for it.
    fn serve<'py>(
        &self,
        py: Python<'py>,
        q: Object<'_, 'py>,
        ids: Object<'_, 'py>,
        common: &Common<'_, 'py>,
        purpose: Purpose,
    ) -> PyResult<Bound<'py, PyAny>> {
        let wording = wording();
        guard(py, &wording, || {
            let reader = Reader::new(&wording, q)?;
            let ids = ids_of(ids)?;
            let (mut options, return_lse) = common.options()?;
            if common.causal.is_some_and(PyAnyMethods::is_instance_of::<PyBool>) {
                options.causal = options.causal.map(|_| Causal::BottomRight);
            }
            options.layout = TensorLayout::Bshd;
            let q_read = reader.read("q", q)?;
            if q_read.device != Device::Cpu {
                return Err(
                    rapt::Error::DeviceMismatch { tensor: "q", expected: Device::Cpu, got: q_read.device }.into()
                );
            }
            let sinks = reader.maybe("sinks", common.sinks)?;
            let slopes = reader.maybe("alibi_slopes", common.alibi_slopes)?;
            if reader.kind() == Kind::Torch {
                let given = [("q", Some(q)), ("sinks", common.sinks), ("alibi_slopes", common.alibi_slopes)];
                torch::refuse_gradients(py, given.into_iter().filter_map(|(name, it)| Some((name, it?))))?;
            }
            let dim_v = self.look(py, |cache| Ok(cache.form().head_dim_v))?;
            let (batch, q_len, heads) = (size(&q_read, 0), size(&q_read, 1), size(&q_read, 2));
            let shapes = [[batch, q_len, heads, dim_v].into(), [batch, heads, q_len].into()];
            let mut outputs = Outputs::new(reader, common, (&options, return_lse), shapes)?;
            let (out, lse) = outputs.views()?;
            let queries = KvCacheQueries {
                sinks: sinks.as_ref().map(Operand::view).transpose()?,
                alibi_slopes: slopes.as_ref().map(Operand::view).transpose()?,
                lse,
                ..KvCacheQueries::new(q_read.view()?, &ids, out)
            };
            if purpose == Purpose::Explain {
                let at = (reader.kind(), q_read.device);
                let plan = explained(py, &Home::Default, at, |engine, threads| {
                    self.read().explain(engine, queries, &options, threads)
                })?;
                return plan.map_err(|error| refused(error, reader.kind()));
            }
            let done = on_threads(py, &Home::Default, reader.kind(), |engine, queue| {
                self.read().attention(engine, queries, &options, queue)
            })?;
            done.map_err(|error| refused(error, reader.kind()))?;
            tolerance::count_compute(options.compute);
            if reader.kind() == Kind::Torch {
                crate::torch::stats::count_served();
            }
            outputs.finish(py, common.out)
        })
    }
}

#[pymethods]
impl PyKvCache {
    #[new]
    #[pyo3(signature = (
        num_pages, page_size, num_kv_heads, head_dim, *, head_dim_v = None, dtype = None, format = None, granularity = None,
        block_size = None, global_scale = None, device = None
    ), text_signature = "(num_pages, page_size, num_kv_heads, head_dim, *, head_dim_v=None, dtype='float32', format=None, granularity=None, block_size=None, global_scale=None, device='cpu')")]
    #[allow(clippy::too_many_arguments, reason = "the public signature")]
    fn new(
        py: Python<'_>,
        num_pages: Object<'_, '_>,
        page_size: Object<'_, '_>,
        num_kv_heads: Object<'_, '_>,
        head_dim: Object<'_, '_>,
        head_dim_v: Maybe<'_, '_>,
        dtype: Maybe<'_, '_>,
        format: Maybe<'_, '_>,
        granularity: Maybe<'_, '_>,
        block_size: Maybe<'_, '_>,
        global_scale: Maybe<'_, '_>,
        device: Maybe<'_, '_>,
    ) -> PyResult<Self> {
        guard(py, &wording(), || {
            if let Some(device) = device
                && device.str()?.to_cow()? != "cpu"
            {
                return Err(Failure::option("device", repr(device), "'cpu': a cache owns host memory"));
            }
            let head_dim = count("head_dim", head_dim)?;
            let dtype = options::dtype("dtype", dtype)?.unwrap_or(DType::F32);
            let form = KvCacheForm::new(
                count("num_pages", num_pages)?,
                count("page_size", page_size)?,
                count("num_kv_heads", num_kv_heads)?,
                head_dim,
                dtype,
            );
            let formats = "None, a format, or a pair of formats of keys and of values";
            let (of_k, of_v) = pair("format", format, formats)?;
            let (global_k, global_v) =
                pair("global_scale", global_scale, "None, a float, or a pair of keys' and values'")?;
            let global = |given: &Option<Bound<'_, PyAny>>| given.as_ref().map(api_quant::global_scale).transpose();
            let form = KvCacheForm {
                head_dim_v: head_dim_v.map_or(Ok(head_dim), |given| count("head_dim_v", given))?,
                k_codes: scheme(of_k.as_ref(), granularity, block_size)?,
                v_codes: scheme(of_v.as_ref(), granularity, block_size)?,
                k_global_scale: global(&global_k)?,
                v_global_scale: global(&global_v)?,
                ..form
            };
            let cache = py.detach(|| KvCache::new(form)).map_err(|error| refused(error, Kind::Numpy))?;
            Ok(PyKvCache { cache: RwLock::new(cache) })
        })
    }

    /// A sequence without keys, by the int that names it; no other sequence of this process has it, also after it is freed.
    fn new_sequence(&self, py: Python<'_>) -> PyResult<u64> {
        guard(py, &wording(), || self.change(py, Kind::Numpy, |cache| Ok(cache.new_sequence().number())))
    }

    /// Another sequence with the same keys. Their pages are shared; a last page that has room is copied when one of the two writes into it.
    fn fork(&self, py: Python<'_>, id: Object<'_, '_>) -> PyResult<u64> {
        guard(py, &wording(), || {
            let id = id_of(id)?;
            self.change(py, Kind::Numpy, |cache| Ok(cache.fork(id)?.number()))
        })
    }

    /// Keeps the first `length` keys of a sequence.
    fn truncate(&self, py: Python<'_>, id: Object<'_, '_>, length: Object<'_, '_>) -> PyResult<()> {
        guard(py, &wording(), || {
            let refuse = || Failure::option("length", repr(length), "an int from 0 to the keys of the sequence");
            let (id, length) = (id_of(id)?, length.extract().map_err(|_| refuse())?);
            self.change(py, Kind::Numpy, |cache| Ok(cache.truncate(id, length)?))
        })
    }

    /// Ends a sequence. Pages that no other sequence has are free.
    fn free(&self, py: Python<'_>, id: Object<'_, '_>) -> PyResult<()> {
        guard(py, &wording(), || {
            let id = id_of(id)?;
            self.change(py, Kind::Numpy, |cache| Ok(cache.free(id)?))
        })
    }

    /// The keys of a sequence.
    fn length(&self, py: Python<'_>, id: Object<'_, '_>) -> PyResult<usize> {
        guard(py, &wording(), || {
            let id = id_of(id)?;
            self.look(py, |cache| cache.length(id))
        })
    }

    /// Appends k [new, num_kv_heads, head_dim] and v [new, num_kv_heads, head_dim_v] to a sequence; of a list of ids [batch, new, …] to all of
    /// them or to none.
    fn append<'py>(
        &self,
        py: Python<'py>,
        id: Object<'_, 'py>,
        k: Object<'_, 'py>,
        v: Object<'_, 'py>,
    ) -> PyResult<()> {
        let wording = wording();
        guard(py, &wording, || {
            let reader = Reader::new(&wording, k)?;
            let (of_k, of_v) = (reader.read("k", k)?, reader.read("v", v)?);
            if reader.kind() == Kind::Torch {
                torch::refuse_gradients(py, [("k", k), ("v", v)])?;
            }
            let (of_k, of_v): (View<'_>, View<'_>) = (of_k.view()?, of_v.view()?);
            if id.is_instance_of::<PyList>() || id.is_instance_of::<PyTuple>() {
                let ids = ids_of(id)?;
                return self.change(py, reader.kind(), |cache| cache.append_batch(&ids, &of_k, &of_v));
            }
            let id = id_of(id)?;
            self.change(py, reader.kind(), |cache| cache.append(id, &of_k, &of_v))
        })
    }

    /// The pages of each sequence in the order of its keys, as a list of lists of one length: rows shorter than the longest end with -1.
    fn page_table(&self, py: Python<'_>, ids: Object<'_, '_>) -> PyResult<Vec<Vec<i32>>> {
        guard(py, &wording(), || {
            let ids = ids_of(ids)?;
            self.look(py, |cache| {
                let table = cache.page_table(&ids)?;
                let entries = table.shape()[1];
                if entries == 0 {
                    return Ok(vec![Vec::new(); ids.len()]);
                }
                Ok(table.to_vec::<i32>()?.chunks(entries).map(<[i32]>::to_vec).collect())
            })
        })
    }

    /// Attention of q [batch, q_len, num_q_heads, head_dim] to all keys of the sequences `ids`. The other arguments are those of
    /// `rapt.attention_with_kvcache`. compute: "int8" asks for values by head, channel or tensor, and those of a cache that grows are by token
    /// or block, so it is refused by name.
    #[pyo3(signature = (
        q, ids, *, causal = None, window = None, softcap = None, scale = None, sinks = None, alibi_slopes = None, compute = None,
        out = None, out_dtype = None, return_lse = None
    ), text_signature = "($self, q, ids, *, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None, compute='exact', out=None, out_dtype=None, return_lse=False)")]
    #[allow(clippy::too_many_arguments, reason = "the public signature")]
    fn attention<'py>(
        &self,
        py: Python<'py>,
        q: Object<'_, 'py>,
        ids: Object<'_, 'py>,
        causal: Maybe<'_, 'py>,
        window: Maybe<'_, 'py>,
        softcap: Maybe<'_, 'py>,
        scale: Maybe<'_, 'py>,
        sinks: Maybe<'_, 'py>,
        alibi_slopes: Maybe<'_, 'py>,
        compute: Maybe<'_, 'py>,
        out: Maybe<'_, 'py>,
        out_dtype: Maybe<'_, 'py>,
        return_lse: Maybe<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let common =
            Common { causal, window, softcap, scale, sinks, alibi_slopes, compute, out, out_dtype, return_lse };
        self.serve(py, q, ids, &common, Purpose::Run)
    }

    /// What `attention` would run for the same arguments, as a `RaggedPlan`.
    #[pyo3(signature = (
        q, ids, *, causal = None, window = None, softcap = None, scale = None, sinks = None, alibi_slopes = None, compute = None,
        out = None, out_dtype = None, return_lse = None
    ), text_signature = "($self, q, ids, *, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None, compute='exact', out=None, out_dtype=None, return_lse=False)")]
    #[allow(clippy::too_many_arguments, reason = "the public signature")]
    fn explain<'py>(
        &self,
        py: Python<'py>,
        q: Object<'_, 'py>,
        ids: Object<'_, 'py>,
        causal: Maybe<'_, 'py>,
        window: Maybe<'_, 'py>,
        softcap: Maybe<'_, 'py>,
        scale: Maybe<'_, 'py>,
        sinks: Maybe<'_, 'py>,
        alibi_slopes: Maybe<'_, 'py>,
        compute: Maybe<'_, 'py>,
        out: Maybe<'_, 'py>,
        out_dtype: Maybe<'_, 'py>,
        return_lse: Maybe<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let common =
            Common { causal, window, softcap, scale, sinks, alibi_slopes, compute, out, out_dtype, return_lse };
        self.serve(py, q, ids, &common, Purpose::Explain)
    }

    /// Pages that no sequence has.
    #[getter]
    fn free_pages(&self, py: Python<'_>) -> PyResult<usize> {
        guard(py, &wording(), || self.look(py, |cache| Ok(cache.free_pages())))
    }

    /// Pages of all sequences together.
    #[getter]
    fn num_pages(&self, py: Python<'_>) -> PyResult<usize> {
        guard(py, &wording(), || self.look(py, |cache| Ok(cache.form().num_pages)))
    }

    /// Keys of a page.
    #[getter]
    fn page_size(&self, py: Python<'_>) -> PyResult<usize> {
        guard(py, &wording(), || self.look(py, |cache| Ok(cache.form().page_size)))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        guard(py, &wording(), || {
            self.look(py, |cache| {
                let KvCacheForm { num_pages, page_size, num_kv_heads, head_dim, head_dim_v, dtype, .. } = *cache.form();
                let codes = |scheme: Option<quant::Scheme>| scheme.map_or(dtype.to_string(), |it| it.format().to_string());
                let (k, v) = (codes(cache.form().k_codes), codes(cache.form().v_codes));
                Ok(format!(
                    "rapt.KVCache of {num_pages} pages of {page_size} keys, {} free: k {k} [{num_kv_heads}, {head_dim}], v {v} \
                     [{num_kv_heads}, {head_dim_v}]",
                    cache.free_pages()
                ))
            })
        })
    }
}
