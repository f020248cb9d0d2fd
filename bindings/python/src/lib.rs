//! The Python bindings: from tensors of numpy, torch and DLPack to [`rapt::View`] and back. No arithmetic.
//!
//! ```text
//! kind, errors (hints)   whose tensors; refusals as exceptions with the expression that corrects them
//! tensors                what a tensor declares ─► Operand ─► View; new tensors for results
//! engine (torch_pool, vulkan)   whose threads, and whose GPU
//! table                  what `attention` takes: a new option is a row there
//! api                    the functions and classes of the package
//! graph                  exported programs: arguments and results by their places in the call
//! torch                  who answers PyTorch's calls, and PyTorch's own op as Rapt serves it
//! ```
//! Deliberately absent: torch and numpy at link time, any import of them, and any copy of a tensor.

#[macro_use]
mod table;

mod api;
mod engine;
mod errors;
mod graph;
mod kind;
mod tensors;
mod torch;

use pyo3::prelude::*;
use rapt::{DType, Device};

use crate::api::attention::Request;
use crate::engine::Home;
use crate::errors::{Failure, Wording, raise};

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// A function with the signature of `rapt.attention`: its name, what begins the arguments that keywords alone give, what it says of
/// itself, what it calls and what that gives.
macro_rules! function {
    ($function:ident, [$($by_keyword:tt)*], $doc:literal, $run:path, $answer:ty; $($name:ident: $default:literal,)*) => {
        #[doc = concat!(stringify!($function), signature!("", $($name: $default,)*), "\n--\n\n", $doc)]
        #[pyfunction]
        #[pyo3(
            signature = (q, k, v, $($by_keyword)* $($name = None,)* out = None, out_dtype = None, return_lse = None, tolerance = None, device = None),
            text_signature = None
        )]
        #[allow(clippy::too_many_arguments, reason = "the public signature")]
        fn $function<'py>(
            py: Python<'py>,
            q: Any<'_, 'py>,
            k: Any<'_, 'py>,
            v: Any<'_, 'py>,
            $($name: Maybe<'_, 'py>,)*
            out: Maybe<'_, 'py>,
            out_dtype: Maybe<'_, 'py>,
            return_lse: Maybe<'_, 'py>,
            tolerance: Maybe<'_, 'py>,
            device: Maybe<'_, 'py>,
        ) -> PyResult<$answer> {
            let request = Request { q, k, v, $($name,)* out, out_dtype, return_lse, tolerance, device };
            $run(py, &Home::Default, &request)
        }
    };
}

/// `attention`, `explain` and `run_into`, whose arguments are those of the table.
macro_rules! functions {
    (
        all: [$($name:ident: $default:literal, $_stub:literal, $schema:literal;)*],
        tensors: $_tensors:tt,
        parts: $_parts:tt,
        options: $_options:tt
    ) => {
        // All by position too, which is how `rapt.attention` calls it: a keyword costs 250 instructions.
        function!(
            attention,
            [],
            "softmax(q·kᵀ · scale)·v on numpy arrays, torch tensors and DLPack producers; see `rapt.attention`.",
            api::attention::attend,
            Bound<'py, PyAny>;
            $($name: $default,)*
        );
        function!(
            explain,
            [*,],
            "What `attention` would run for the same arguments.",
            api::attention::explain,
            api::plan::PyPlan;
            $($name: $default,)*
        );

        function!(
            mlx_kernels,
            [*,],
            "A request on arrays of MLX as kernels for `mx.fast.metal_kernel`; see `rapt.mlx`.",
            api::mlx::kernels,
            Bound<'py, PyAny>;
            $($name: $default,)*
        );

        /// Fills `out` (and `lse`) of any strides and hands back None. The caller has seen to gradients. `dropout`: p, a draw, and the
        /// batch entries before the first.
        #[pyfunction]
        #[pyo3(signature = (q, k, v, out, lse = None, *, dropout = None, $($name = None,)*))]
        #[allow(clippy::too_many_arguments, reason = "the public signature")]
        fn run_into<'py>(
            py: Python<'py>,
            q: Any<'_, 'py>,
            k: Any<'_, 'py>,
            v: Any<'_, 'py>,
            out: Any<'_, 'py>,
            lse: Maybe<'_, 'py>,
            dropout: torch::dropout::Stated<'py>,
            $($name: Maybe<'_, 'py>,)*
        ) -> PyResult<()> {
            let out = Some(out);
            let (out_dtype, return_lse, tolerance, device) = (None, None, None, None);
            let request = Request { q, k, v, $($name,)* out, out_dtype, return_lse, tolerance, device };
            api::attention::fill(py, &Home::Default, &request, lse, dropout)
        }

        /// The gradients of a call by q, k, v, by the mask where `mask_grad` says so, and by sinks; see `rapt.attention_backward`.
        #[pyfunction]
        #[pyo3(signature = (d_o, q, k, v, out, lse, *, d_lse = None, mask_grad = None, $($name = None,)*))]
        #[allow(clippy::too_many_arguments, reason = "the public signature")]
        fn attention_backward<'py>(
            py: Python<'py>,
            d_o: Any<'_, 'py>,
            q: Any<'_, 'py>,
            k: Any<'_, 'py>,
            v: Any<'_, 'py>,
            out: Any<'_, 'py>,
            lse: Any<'_, 'py>,
            d_lse: Maybe<'_, 'py>,
            mask_grad: Maybe<'_, 'py>,
            $($name: Maybe<'_, 'py>,)*
        ) -> PyResult<Bound<'py, PyAny>> {
            let arriving = api::backward::Arriving { out, lse, d_o, d_lse };
            let (out, out_dtype, return_lse, tolerance, device) = (None, None, None, None, None);
            let request = Request { q, k, v, $($name,)* out, out_dtype, return_lse, tolerance, device };
            api::backward::make(py, &Home::Default, request, arriving, mask_grad)
        }

        /// Fills those gradients that are given, of any strides. The caller has seen to gradients of theirs. `dropout`: as of `run_into`.
        #[pyfunction]
        #[pyo3(signature = (d_o, q, k, v, out, lse, dq = None, dk = None, dv = None, *, d_lse = None, d_mask = None, d_sinks = None, dropout = None, $($name = None,)*))]
        #[allow(clippy::too_many_arguments, reason = "the public signature")]
        fn backward_into<'py>(
            py: Python<'py>,
            d_o: Any<'_, 'py>,
            q: Any<'_, 'py>,
            k: Any<'_, 'py>,
            v: Any<'_, 'py>,
            out: Any<'_, 'py>,
            lse: Any<'_, 'py>,
            dq: Maybe<'_, 'py>,
            dk: Maybe<'_, 'py>,
            dv: Maybe<'_, 'py>,
            d_lse: Maybe<'_, 'py>,
            d_mask: Maybe<'_, 'py>,
            d_sinks: Maybe<'_, 'py>,
            dropout: torch::dropout::Stated<'py>,
            $($name: Maybe<'_, 'py>,)*
        ) -> PyResult<()> {
            let arriving = api::backward::Arriving { out, lse, d_o, d_lse };
            let (out, out_dtype, return_lse, tolerance, device) = (None, None, None, None, None);
            let request = Request { q, k, v, $($name,)* out, out_dtype, return_lse, tolerance, device };
            api::backward::fill(py, &Home::Default, request, arriving, [dq, dk, dv, d_mask, d_sinks], dropout)
        }

        /// The options in the schemas of `torch.ops.rapt`.
        #[pyfunction]
        fn options_schema() -> String {
            [$($schema),*].join(", ")
        }
    };
}
attention_options!(functions);

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
    let given = torch::call::Given { query, key, value, attn_mask };
    api::sdpa::public(py, given, dropout_p, is_causal, scale, enable_gqa)
}

/// How often a call drops, and which weights.
fn stated<'py>(py: Python<'py>, dropout: torch::dropout::Stated<'py>) -> PyResult<(f64, Option<rapt::DropoutSeed>)> {
    let wording = Wording { names: &errors::hints::ATTENTION, kind: kind::Kind::Torch };
    torch::dropout::read(dropout).map_err(|failure| raise(py, failure, wording))
}

/// The calls for many sequences, for a purpose.
macro_rules! ragged_functions {
    ($varlen:ident, $with_kvcache:ident, $purpose:ident) => {
        #[doc = concat!("Sequences that lie one after another; see `rapt.", stringify!($varlen), "`.")]
        #[pyfunction]
        #[pyo3(signature = (q, k, v, cu_seqlens_q, cu_seqlens_kv, *, causal = None, window = None, softcap = None, scale = None, sinks = None, alibi_slopes = None, q_descale = None, k_descale = None, v_descale = None, q_zero_point = None, k_zero_point = None, v_zero_point = None, compute = None, out = None, out_dtype = None, return_lse = None, dropout = None))]
        #[allow(clippy::too_many_arguments, reason = "the public signature")]
        fn $varlen<'py>(
            py: Python<'py>,
            q: Any<'_, 'py>,
            k: Any<'_, 'py>,
            v: Any<'_, 'py>,
            cu_seqlens_q: Any<'_, 'py>,
            cu_seqlens_kv: Any<'_, 'py>,
            causal: Maybe<'_, 'py>,
            window: Maybe<'_, 'py>,
            softcap: Maybe<'_, 'py>,
            scale: Maybe<'_, 'py>,
            sinks: Maybe<'_, 'py>,
            alibi_slopes: Maybe<'_, 'py>,
            q_descale: Maybe<'_, 'py>,
            k_descale: Maybe<'_, 'py>,
            v_descale: Maybe<'_, 'py>,
            q_zero_point: Maybe<'_, 'py>,
            k_zero_point: Maybe<'_, 'py>,
            v_zero_point: Maybe<'_, 'py>,
            compute: Maybe<'_, 'py>,
            out: Maybe<'_, 'py>,
            out_dtype: Maybe<'_, 'py>,
            return_lse: Maybe<'_, 'py>,
            dropout: torch::dropout::Stated<'py>,
        ) -> PyResult<Bound<'py, PyAny>> {
            let q = api::varlen::Packed { tensor: q, descale: q_descale, zero_point: q_zero_point };
            let k = api::varlen::Packed { tensor: k, descale: k_descale, zero_point: k_zero_point };
            let v = api::varlen::Packed { tensor: v, descale: v_descale, zero_point: v_zero_point };
            let common = api::ragged::Common {
                causal,
                window,
                softcap,
                scale,
                sinks,
                alibi_slopes,
                compute,
                out,
                out_dtype,
                return_lse,
            };
            let request = api::varlen::Varlen { q, k, v, cu_seqlens_q, cu_seqlens_kv, common, dropout: stated(py, dropout)? };
            api::varlen::varlen(py, &Home::Default, &request, api::ragged::Purpose::$purpose)
        }

        #[doc = concat!("Attention to a cache, and new keys into it; see `rapt.", stringify!($with_kvcache), "`.")]
        #[pyfunction]
        #[pyo3(signature = (q, k_cache, v_cache, k = None, v = None, *, cache_seqlens = None, page_table = None, causal = None, window = None, softcap = None, scale = None, sinks = None, alibi_slopes = None, k_descale = None, v_descale = None, k_zero_point = None, v_zero_point = None, compute = None, out = None, out_dtype = None, return_lse = None))]
        #[allow(clippy::too_many_arguments, reason = "the public signature")]
        fn $with_kvcache<'py>(
            py: Python<'py>,
            q: Any<'_, 'py>,
            k_cache: Any<'_, 'py>,
            v_cache: Any<'_, 'py>,
            k: Maybe<'_, 'py>,
            v: Maybe<'_, 'py>,
            cache_seqlens: Maybe<'_, 'py>,
            page_table: Maybe<'_, 'py>,
            causal: Maybe<'_, 'py>,
            window: Maybe<'_, 'py>,
            softcap: Maybe<'_, 'py>,
            scale: Maybe<'_, 'py>,
            sinks: Maybe<'_, 'py>,
            alibi_slopes: Maybe<'_, 'py>,
            k_descale: Maybe<'_, 'py>,
            v_descale: Maybe<'_, 'py>,
            k_zero_point: Maybe<'_, 'py>,
            v_zero_point: Maybe<'_, 'py>,
            compute: Maybe<'_, 'py>,
            out: Maybe<'_, 'py>,
            out_dtype: Maybe<'_, 'py>,
            return_lse: Maybe<'_, 'py>,
        ) -> PyResult<Bound<'py, PyAny>> {
            let common = api::ragged::Common {
                causal,
                window,
                softcap,
                scale,
                sinks,
                alibi_slopes,
                compute,
                out,
                out_dtype,
                return_lse,
            };
            let k_part = api::ragged::CachePart { cache: k_cache, new: k, descale: k_descale, zero_point: k_zero_point };
            let v_part = api::ragged::CachePart { cache: v_cache, new: v, descale: v_descale, zero_point: v_zero_point };
            let request = api::ragged::Cached { q, k: k_part, v: v_part, cache_seqlens, page_table, common };
            api::ragged::with_kvcache(py, &Home::Default, &request, api::ragged::Purpose::$purpose)
        }
    };
}
ragged_functions!(varlen_attention, attention_with_kvcache, Run);
ragged_functions!(explain_varlen, explain_with_kvcache, Explain);

/// What the two functions for gradients of sequences take, and what each then gives.
macro_rules! varlen_backward_functions {
    ($($name:ident, [$($gradient:ident,)*], $doc:literal, $run:path, $answer:ty;)*) => {
        $(#[doc = $doc]
        #[pyfunction]
        #[pyo3(signature = (d_o, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, $($gradient = None,)* *, d_lse = None, causal = None, window = None, softcap = None, scale = None, sinks = None, alibi_slopes = None, compute = None, dropout = None))]
        #[allow(clippy::too_many_arguments, reason = "the public signature")]
        fn $name<'py>(
            py: Python<'py>,
            d_o: Any<'_, 'py>,
            q: Any<'_, 'py>,
            k: Any<'_, 'py>,
            v: Any<'_, 'py>,
            out: Any<'_, 'py>,
            lse: Any<'_, 'py>,
            cu_seqlens_q: Any<'_, 'py>,
            cu_seqlens_kv: Any<'_, 'py>,
            $($gradient: Maybe<'_, 'py>,)*
            d_lse: Maybe<'_, 'py>,
            causal: Maybe<'_, 'py>,
            window: Maybe<'_, 'py>,
            softcap: Maybe<'_, 'py>,
            scale: Maybe<'_, 'py>,
            sinks: Maybe<'_, 'py>,
            alibi_slopes: Maybe<'_, 'py>,
            compute: Maybe<'_, 'py>,
            dropout: torch::dropout::Stated<'py>,
        ) -> PyResult<$answer> {
            let (out_dtype, return_lse) = (None, None);
            let common = api::ragged::Common {
                causal,
                window,
                softcap,
                scale,
                sinks,
                alibi_slopes,
                compute,
                out: None,
                out_dtype,
                return_lse,
            };
            let arriving = api::backward::Arriving { out, lse, d_o, d_lse };
            let offsets = [cu_seqlens_q, cu_seqlens_kv];
            let request = api::varlen_backward::Request { inputs: [q, k, v], offsets, arriving, common, dropout: stated(py, dropout)? };
            $run(py, &Home::Default, &request, [$($gradient,)*])
        })*
    };
}
varlen_backward_functions! {
    varlen_attention_backward, [],
    "The gradients of `varlen_attention` by q, k, v and sinks; see `rapt.varlen_attention_backward`.",
    api::varlen_backward::make, Bound<'py, PyAny>;

    varlen_backward_into, [dq, dk, dv, d_sinks,],
    "Fills those gradients that are given, of any strides. The caller has seen to gradients of theirs.",
    api::varlen_backward::fill, ();
}

/// Whether attention runs on this kind of device here.
#[pyfunction]
fn is_available(py: Python<'_>, name: &str) -> bool {
    match name {
        "cpu" => true,
        "cuda" => py.detach(rapt::cuda::is_available),
        "vulkan" => engine::vulkan::home(py, Device::Vulkan(0)).is_ok(),
        "mps" => tensors::torch::has_metal(py),
        _ => false,
    }
}

/// What this thread has read and written of memory that processes share comes before what it reads and writes there from now on.
#[pyfunction]
fn memory_fence() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
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
    let wording = Wording { names: &errors::hints::ATTENTION, kind: kind::Kind::Numpy };
    let found = api::options::dtype("dtype", Some(dtype)).map_err(|failure| raise(py, failure, wording))?;
    match found {
        Some(dtype) if dtype.is_computed() => Ok(dtype.accumulation().name()),
        Some(got) => {
            let allowed = rapt::COMPUTED.to_vec();
            Err(raise(py, Failure::Rapt(rapt::Error::UnsupportedDtype { tensor: "dtype", got, allowed }), wording))
        }
        None => Err(raise(py, Failure::option("dtype", "None", "a dtype"), wording)),
    }
}

/// Whether torch's own pool serves torch tensors in this process.
#[pyfunction]
fn shares_torch_pool() -> bool {
    engine::torch_pool::is_shared()
}

/// Logs at level debug why a request was handed back to PyTorch.
#[pyfunction]
fn log_fallback(reason: &str) {
    tracing::debug!(target: "rapt", reason, "fallback");
}

/// maturin has MinGW's linker export the module by the whole of its name, with which Python asks for nothing: it is there, and is never called.
#[cfg(all(windows, target_env = "gnu"))]
#[unsafe(export_name = "PyInit_rapt._native")]
extern "C" fn never_called() -> *mut std::ffi::c_void {
    std::ptr::null_mut()
}

/// Words for that linker: what Python asks for is exported too.
#[cfg(all(windows, target_env = "gnu"))]
#[used]
#[unsafe(link_section = ".drectve")]
static EXPORTED: [u8; 23] = *b" -export:PyInit__native";

/// The native half of the package `rapt`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::register(module)?;
    let wording = Wording { names: &errors::hints::ATTENTION, kind: kind::Kind::Numpy };
    api::log::start().map_err(|failure| raise(module.py(), failure, wording))?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<api::context::Context>()?;
    module.add_class::<api::plan::PyPlan>()?;
    module.add_class::<api::plan::PyRaggedPlan>()?;
    module.add_class::<api::kv_cache::PyKvCache>()?;
    module.add_function(wrap_pyfunction!(attention, module)?)?;
    module.add_function(wrap_pyfunction!(explain, module)?)?;
    module.add_function(wrap_pyfunction!(varlen_attention, module)?)?;
    module.add_function(wrap_pyfunction!(attention_with_kvcache, module)?)?;
    module.add_function(wrap_pyfunction!(explain_varlen, module)?)?;
    module.add_function(wrap_pyfunction!(explain_with_kvcache, module)?)?;
    module.add_function(wrap_pyfunction!(run_into, module)?)?;
    module.add_function(wrap_pyfunction!(attention_backward, module)?)?;
    module.add_function(wrap_pyfunction!(backward_into, module)?)?;
    module.add_function(wrap_pyfunction!(varlen_attention_backward, module)?)?;
    module.add_function(wrap_pyfunction!(varlen_backward_into, module)?)?;
    module.add_function(wrap_pyfunction!(options_schema, module)?)?;
    module.add_function(wrap_pyfunction!(scaled_dot_product_attention, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_decide, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_order, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_sdpa, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_decide_jagged, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_jagged, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_jagged_backward, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_is_plain, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::torch_is_traced, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::fallback_reasons, module)?)?;
    module.add_function(wrap_pyfunction!(torch::python::refuse_gradients, module)?)?;
    module.add_function(wrap_pyfunction!(is_available, module)?)?;
    module.add_function(wrap_pyfunction!(engine::vulkan::vulkan_adapters, module)?)?;
    module.add_function(wrap_pyfunction!(engine::vulkan::vulkan_stats, module)?)?;
    module.add_function(wrap_pyfunction!(engine::vulkan::reset_vulkan_stats, module)?)?;
    module.add_function(wrap_pyfunction!(version, module)?)?;
    module.add_function(wrap_pyfunction!(memory_fence, module)?)?;
    module.add_function(wrap_pyfunction!(dtypes, module)?)?;
    module.add_function(wrap_pyfunction!(accumulation, module)?)?;
    module.add_function(wrap_pyfunction!(log_fallback, module)?)?;
    module.add_function(wrap_pyfunction!(shares_torch_pool, module)?)?;
    module.add_class::<torch::kernel::TorchKernel>()?;
    module.add_class::<torch::training::TorchFlash>()?;
    module.add_class::<torch::training::TorchFlashBackward>()?;
    module.add("TORCH_RECORDED", torch::training::RECORDED)?;
    module.add_function(wrap_pyfunction!(torch::training::torch_nodes, module)?)?;
    module.add_function(wrap_pyfunction!(torch::kernel::set_registered, module)?)?;
    module.add_function(wrap_pyfunction!(torch::stats::count_served, module)?)?;
    module.add_function(wrap_pyfunction!(torch::stats::served, module)?)?;
    module.add_function(wrap_pyfunction!(api::doctor::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(api::doctor::metal_report, module)?)?;
    module.add_function(wrap_pyfunction!(mlx_kernels, module)?)?;
    module.add_function(wrap_pyfunction!(api::cli::cli, module)?)?;
    module.add_class::<graph::PyProgram>()?;
    module.add_class::<graph::PyTemplate>()?;
    module.add_class::<graph::PySession>()?;
    module.add_function(wrap_pyfunction!(graph::program_check, module)?)?;
    module.add_function(wrap_pyfunction!(graph::program_missing, module)?)?;
    module.add_function(wrap_pyfunction!(api::quant::quantize, module)?)?;
    module.add_function(wrap_pyfunction!(api::quant::dequantize, module)?)?;
    module.add_function(wrap_pyfunction!(api::quant::quantized_check, module)?)?;
    module.add_function(wrap_pyfunction!(api::quant::quantized_analysis, module)?)?;
    module.add_class::<api::measured::PyErrors>()?;
    module.add_function(wrap_pyfunction!(api::measured::quantized_errors, module)?)?;
    module.add_function(wrap_pyfunction!(api::tolerance::tolerance_stats, module)?)?;
    module.add_function(wrap_pyfunction!(api::tolerance::reset_tolerance_stats, module)?)?;
    module.add_class::<api::layout::PyLayout>()?;
    module.add_function(wrap_pyfunction!(api::layout::layout_show, module)?)?;
    module.add_function(wrap_pyfunction!(api::layout::layout_atoms, module)?)?;
    module.add_function(wrap_pyfunction!(api::layout::layout_atom, module)?)?;
    module.add_function(wrap_pyfunction!(api::layout::layout_convert, module)?)?;
    module.add_function(wrap_pyfunction!(api::layout::layout_same, module)?)?;
    module.add_function(wrap_pyfunction!(api::layout::layout_check, module)?)?;
    module.add_function(wrap_pyfunction!(api::layout::layout_emulate, module)?)?;
    Ok(())
}
