//! The Python door: from tensors of numpy, torch and DLPack to [`rapt::View`] and back. No arithmetic, no policy.
//!
//! ```text
//! convert/{torch,numpy,dlpack}  what a tensor says of itself ─► Operand ─► View
//! options, mend, errors         strict options; refusals as exceptions with the expression that mends them
//! forward, sdpa                 the two signatures
//! engine, context, torch_pool   whose threads
//! torch_kernel, torch_abi       PyTorch's own op as Rapt serves it; libtorch's C ABI
//! plan, doctor, log             explain(), doctor(), RAPT_LOG
//! layout                        rapt.layout: the layout algebra and the fragment checker
//! ```
//! Deliberately absent: torch and numpy at link time, any import of them, any copy of a tensor, and gradients.

mod context;
mod convert;
mod doctor;
mod engine;
mod errors;
mod forward;
mod layout;
mod log;
mod mend;
mod options;
mod plan;
mod sdpa;
mod torch_abi;
mod torch_kernel;
mod torch_pool;

use pyo3::prelude::*;
use rapt::DType;

use crate::engine::Home;
use crate::errors::{Failure, Telling, raise};
use crate::forward::Request;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// softmax(q·kᵀ · scale)·v on numpy arrays, torch tensors and DLPack producers; see `rapt.attention`.
#[pyfunction]
#[pyo3(signature = (q, k, v, *, mask = None, causal = None, window = None, softcap = None, scale = None, sinks = None, alibi_slopes = None, layout = None, out = None, out_dtype = None, return_lse = None), text_signature = "(q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None, layout='bhsd', out=None, out_dtype=None, return_lse=False)")]
#[allow(clippy::too_many_arguments, reason = "the signature of design.md")]
fn attention<'py>(
    py: Python<'py>,
    q: Any<'_, 'py>,
    k: Any<'_, 'py>,
    v: Any<'_, 'py>,
    mask: Maybe<'_, 'py>,
    causal: Maybe<'_, 'py>,
    window: Maybe<'_, 'py>,
    softcap: Maybe<'_, 'py>,
    scale: Maybe<'_, 'py>,
    sinks: Maybe<'_, 'py>,
    alibi_slopes: Maybe<'_, 'py>,
    layout: Maybe<'_, 'py>,
    out: Maybe<'_, 'py>,
    out_dtype: Maybe<'_, 'py>,
    return_lse: Maybe<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let request = Request {
        q,
        k,
        v,
        mask,
        causal,
        window,
        softcap,
        scale,
        sinks,
        alibi_slopes,
        layout,
        out,
        out_dtype,
        return_lse,
    };
    forward::attend(py, &Home::Default, &request)
}

/// What `attention` would run for the same arguments.
#[pyfunction]
#[pyo3(signature = (q, k, v, *, mask = None, causal = None, window = None, softcap = None, scale = None, sinks = None, alibi_slopes = None, layout = None, out = None, out_dtype = None, return_lse = None), text_signature = "(q, k, v, *, mask=None, causal=None, window=None, softcap=None, scale=None, sinks=None, alibi_slopes=None, layout='bhsd', out=None, out_dtype=None, return_lse=False)")]
#[allow(clippy::too_many_arguments, reason = "the signature of design.md")]
fn explain<'py>(
    py: Python<'py>,
    q: Any<'_, 'py>,
    k: Any<'_, 'py>,
    v: Any<'_, 'py>,
    mask: Maybe<'_, 'py>,
    causal: Maybe<'_, 'py>,
    window: Maybe<'_, 'py>,
    softcap: Maybe<'_, 'py>,
    scale: Maybe<'_, 'py>,
    sinks: Maybe<'_, 'py>,
    alibi_slopes: Maybe<'_, 'py>,
    layout: Maybe<'_, 'py>,
    out: Maybe<'_, 'py>,
    out_dtype: Maybe<'_, 'py>,
    return_lse: Maybe<'_, 'py>,
) -> PyResult<plan::PyPlan> {
    let request = Request {
        q,
        k,
        v,
        mask,
        causal,
        window,
        softcap,
        scale,
        sinks,
        alibi_slopes,
        layout,
        out,
        out_dtype,
        return_lse,
    };
    forward::explain(py, &Home::Default, &request)
}

/// Fills `out` (and `lse`) of any strides and hands back None. The caller has seen to gradients.
#[pyfunction]
#[pyo3(signature = (q, k, v, mask, sinks, alibi_slopes, out, lse, causal = None, window = None, softcap = None, scale = None, layout = None, /))]
#[allow(clippy::too_many_arguments, reason = "a positional call is the fast one")]
fn run_into<'py>(
    py: Python<'py>,
    q: Any<'_, 'py>,
    k: Any<'_, 'py>,
    v: Any<'_, 'py>,
    mask: Maybe<'_, 'py>,
    sinks: Maybe<'_, 'py>,
    alibi_slopes: Maybe<'_, 'py>,
    out: Any<'_, 'py>,
    lse: Maybe<'_, 'py>,
    causal: Maybe<'_, 'py>,
    window: Maybe<'_, 'py>,
    softcap: Maybe<'_, 'py>,
    scale: Maybe<'_, 'py>,
    layout: Maybe<'_, 'py>,
) -> PyResult<()> {
    let out = Some(out);
    let request = Request {
        q,
        k,
        v,
        mask,
        causal,
        window,
        softcap,
        scale,
        sinks,
        alibi_slopes,
        layout,
        out,
        out_dtype: None,
        return_lse: None,
    };
    forward::fill(py, &Home::Default, &request, lse)
}

/// PyTorch's signature on numpy arrays, DLPack producers and torch tensors; see `rapt.scaled_dot_product_attention`.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask = None, dropout_p = None, is_causal = None, scale = None, enable_gqa = None), text_signature = "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)")]
#[allow(clippy::too_many_arguments, reason = "PyTorch's signature")]
fn scaled_dot_product_attention<'py>(
    py: Python<'py>,
    query: Any<'_, 'py>,
    key: Any<'_, 'py>,
    value: Any<'_, 'py>,
    attn_mask: Maybe<'_, 'py>,
    dropout_p: Maybe<'_, 'py>,
    is_causal: Maybe<'_, 'py>,
    scale: Maybe<'_, 'py>,
    enable_gqa: Maybe<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    sdpa::public(py, (query, key, value, attn_mask), dropout_p, is_causal, scale, enable_gqa)
}

/// PyTorch's signature on torch tensors into `out` of any strides, or into a new tensor. The caller has seen to gradients.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask = None, is_causal = false, scale = None, enable_gqa = false, out = None, /))]
#[allow(clippy::too_many_arguments, reason = "a positional call is the fast one")]
fn torch_sdpa<'py>(
    py: Python<'py>,
    query: Any<'_, 'py>,
    key: Any<'_, 'py>,
    value: Any<'_, 'py>,
    attn_mask: Maybe<'_, 'py>,
    is_causal: bool,
    scale: Option<f64>,
    enable_gqa: bool,
    out: Maybe<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let request = sdpa::Request { query, key, value, attn_mask, is_causal, scale, enable_gqa, out };
    sdpa::torch_sdpa(py, &request)
}

/// Whether attention runs on this kind of device here.
#[pyfunction]
fn is_available(py: Python<'_>, name: &str) -> bool {
    match name {
        "cpu" => true,
        "cuda" => py.detach(rapt::cuda::is_available),
        _ => false,
    }
}

/// (major, minor, patch).
#[pyfunction]
fn version() -> (u32, u32, u32) {
    rapt::version()
}

/// Every dtype that rapt knows: (name, name in PyTorch's export schema, code there, bits, whether attention computes it).
#[pyfunction]
fn dtypes() -> Vec<(&'static str, &'static str, u8, usize, bool)> {
    DType::ALL.iter().map(|d| (d.name(), d.schema_name(), d.code(), d.bits(), d.is_computed())).collect()
}

/// The dtype in which products and sums of `dtype` are accumulated, by name.
#[pyfunction]
fn accumulation(py: Python<'_>, dtype: Any<'_, '_>) -> PyResult<&'static str> {
    let telling = Telling { names: &mend::ATTENTION, kind: convert::Kind::Numpy };
    let found = options::dtype("dtype", Some(dtype)).map_err(|failure| raise(py, failure, telling))?;
    match found {
        Some(dtype) if dtype.is_computed() => Ok(dtype.accumulation().name()),
        Some(got) => {
            let allowed = rapt::COMPUTED.to_vec();
            Err(raise(py, Failure::Rapt(rapt::Error::UnsupportedDtype { tensor: "dtype", got, allowed }), telling))
        }
        None => Err(raise(py, Failure::option("dtype", "None", "a dtype"), telling)),
    }
}

/// Whether torch's own pool serves torch tensors in this process.
#[pyfunction]
fn shares_torch_pool() -> bool {
    torch_pool::is_shared()
}

/// Refuses (with its exception) a torch tensor whose memory is not its value. None, and what is no tensor, passes.
#[pyfunction]
fn refuse_torch(py: Python<'_>, name: &str, tensor: Maybe<'_, '_>) -> PyResult<()> {
    let Some(tensor) = tensor else { return Ok(()) };
    let telling = Telling { names: &mend::ATTENTION, kind: convert::Kind::Torch };
    if convert::torch::is_tensor(tensor)? {
        convert::torch::refuse(name, tensor).map_err(|failure| raise(py, failure, telling))?;
    }
    Ok(())
}

/// The dispatch keys of an ordinary dense CPU tensor of torch, outside and inside inference mode.
#[pyfunction]
fn torch_plain_keys(py: Python<'_>) -> PyResult<[u64; 2]> {
    convert::torch::plain(py)
}

/// Whether torch's `tensor` with these dispatch keys is an ordinary dense tensor on a GPU.
#[pyfunction]
fn torch_is_plain_cuda(tensor: Any<'_, '_>, keys: u64) -> PyResult<bool> {
    convert::torch::is_ordinary_cuda(tensor, keys)
}

/// Logs at level debug why a request was handed back to PyTorch.
#[pyfunction]
fn log_fallback(reason: &str) {
    tracing::debug!(target: "rapt", reason, "fallback");
}

/// The native half of the package `rapt`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::register(module)?;
    let telling = Telling { names: &mend::ATTENTION, kind: convert::Kind::Numpy };
    log::start().map_err(|failure| raise(module.py(), failure, telling))?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<context::Context>()?;
    module.add_class::<plan::PyPlan>()?;
    module.add_function(wrap_pyfunction!(attention, module)?)?;
    module.add_function(wrap_pyfunction!(explain, module)?)?;
    module.add_function(wrap_pyfunction!(run_into, module)?)?;
    module.add_function(wrap_pyfunction!(scaled_dot_product_attention, module)?)?;
    module.add_function(wrap_pyfunction!(torch_sdpa, module)?)?;
    module.add_function(wrap_pyfunction!(is_available, module)?)?;
    module.add_function(wrap_pyfunction!(version, module)?)?;
    module.add_function(wrap_pyfunction!(dtypes, module)?)?;
    module.add_function(wrap_pyfunction!(accumulation, module)?)?;
    module.add_function(wrap_pyfunction!(log_fallback, module)?)?;
    module.add_function(wrap_pyfunction!(shares_torch_pool, module)?)?;
    module.add_function(wrap_pyfunction!(refuse_torch, module)?)?;
    module.add_function(wrap_pyfunction!(torch_plain_keys, module)?)?;
    module.add_function(wrap_pyfunction!(torch_is_plain_cuda, module)?)?;
    module.add_class::<torch_kernel::TorchKernel>()?;
    module.add_function(wrap_pyfunction!(torch_kernel::count_served, module)?)?;
    module.add_function(wrap_pyfunction!(torch_kernel::served, module)?)?;
    module.add_function(wrap_pyfunction!(doctor::doctor, module)?)?;
    module.add_class::<layout::PyLayout>()?;
    module.add_function(wrap_pyfunction!(layout::layout_show, module)?)?;
    module.add_function(wrap_pyfunction!(layout::layout_atoms, module)?)?;
    module.add_function(wrap_pyfunction!(layout::layout_atom, module)?)?;
    module.add_function(wrap_pyfunction!(layout::layout_convert, module)?)?;
    module.add_function(wrap_pyfunction!(layout::layout_same, module)?)?;
    module.add_function(wrap_pyfunction!(layout::layout_check, module)?)?;
    module.add_function(wrap_pyfunction!(layout::layout_emulate, module)?)?;
    Ok(())
}
