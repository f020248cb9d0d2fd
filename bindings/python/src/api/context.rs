//! `rapt.Context`: threads and caches of one's own.

use std::sync::Arc;

use pyo3::prelude::*;
use rapt::Threads;

use crate::api::attention::{self, Request};
use crate::api::plan::PyPlan;
use crate::api::ragged::{self, CachePart, Cached, Common, Purpose};
use crate::api::varlen::{self, Packed, Varlen};
use crate::engine::Owned;
use crate::errors::hints;
use crate::errors::{Failure, Wording, raise};

/// Owns threads and caches; the module functions use a default one. As a context manager it gives both back at the end.
#[pyclass(frozen, module = "rapt", name = "Context")]
pub(crate) struct Context {
    pub(crate) owned: Arc<Owned>,
}

fn reported(py: Python<'_>, failure: Failure) -> PyErr {
    raise(py, failure, Wording { names: &hints::ATTENTION, kind: crate::kind::Kind::Numpy })
}

/// The methods; those of the options are written from the table, those of many sequences for both of their purposes.
macro_rules! methods {
    ($($table:tt)*) => {
        methods_of! {
            ragged: [varlen_attention attention_with_kvcache Run; explain_varlen explain_with_kvcache Explain;],
            $($table)*
        }
    };
}

macro_rules! methods_of {
    (
        ragged: [$($varlen:ident $with_kvcache:ident $purpose:ident;)*],
        all: [$($name:ident: $default:literal, $_stub:literal, $_schema:literal;)*],
        tensors: $_tensors:tt,
        parts: $_parts:tt,
        options: $_options:tt
    ) => {
        #[pymethods]
        impl Context {
            #[new]
            #[pyo3(signature = (threads = None))]
            fn new(py: Python<'_>, threads: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
                let refuse = |given: &Bound<'_, PyAny>| {
                    let got = given.repr().map_or_else(|_| String::new(), |text| text.to_string());
                    reported(py, Failure::option("threads", got, "None, or an int from 1 up"))
                };
                let threads = match threads {
                    None => None,
                    Some(given) if given.is_instance_of::<pyo3::types::PyBool>() => return Err(refuse(given)),
                    // A thread costs memory before it does anything: more than this is an accident.
                    Some(given) => match given.extract::<usize>() {
                        Ok(threads) if (1..=4096).contains(&threads) => Some(threads),
                        _ => return Err(refuse(given)),
                    },
                };
                Ok(Context { owned: Arc::new(Owned::new(threads).map_err(|failure| reported(py, failure))?) })
            }

            fn __enter__(this: Py<Self>) -> Py<Self> {
                this
            }

            fn __exit__(
                &self,
                _class: Option<&Bound<'_, PyAny>>,
                _error: Option<&Bound<'_, PyAny>>,
                _traceback: Option<&Bound<'_, PyAny>>,
            ) -> bool {
                self.owned.give_back();
                false
            }

            /// The number of threads for numpy and DLPack; torch tensors use it too if it was asked for.
            #[getter]
            fn threads(&self, py: Python<'_>) -> PyResult<usize> {
                let home = self.owned.home().map_err(|failure| reported(py, failure))?;
                Ok(home.threads().map_err(|failure| reported(py, failure))?.get())
            }

            fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
                let home = self.owned.home().map_err(|failure| reported(py, failure))?;
                let threads = home.threads().map_err(|failure| reported(py, failure))?;
                Ok(match threads {
                    Threads::Asked(threads) => format!("rapt.Context(threads={threads})"),
                    other => format!("rapt.Context() on {} threads", other.get()),
                })
            }

            /// `rapt.load`, and the program's calls run on these threads.
            fn load<'py>(this: &Bound<'py, Self>, path: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
                this.py().import("rapt._model")?.call_method1("load_on", (this, path))
            }

            #[doc = concat!("attention", signature!("$self, ", $($name: $default,)*), "\n--\n")]
            /// `rapt.attention` on these threads.
            #[pyo3(
                signature = (q, k, v, *, $($name = None,)* out = None, out_dtype = None, return_lse = None, tolerance = None, device = None),
                text_signature = None
            )]
            #[allow(clippy::too_many_arguments, reason = "the public signature")]
            fn attention<'py>(
                &self,
                py: Python<'py>,
                q: &Bound<'py, PyAny>,
                k: &Bound<'py, PyAny>,
                v: &Bound<'py, PyAny>,
                $($name: Option<&Bound<'py, PyAny>>,)*
                out: Option<&Bound<'py, PyAny>>,
                out_dtype: Option<&Bound<'py, PyAny>>,
                return_lse: Option<&Bound<'py, PyAny>>,
                tolerance: Option<&Bound<'py, PyAny>>,
                device: Option<&Bound<'py, PyAny>>,
            ) -> PyResult<Bound<'py, PyAny>> {
                let home = self.owned.home().map_err(|failure| reported(py, failure))?;
                let request = Request { q, k, v, $($name,)* out, out_dtype, return_lse, tolerance, device };
                attention::attend(py, &home, &request)
            }

            $(#[doc = concat!("`rapt.", stringify!($varlen), "` on these threads.")]
            #[pyo3(signature = (
                q, k, v, cu_seqlens_q, cu_seqlens_kv, *, causal = None, window = None, softcap = None, scale = None, sinks = None,
                alibi_slopes = None, q_descale = None, k_descale = None, v_descale = None, q_zero_point = None, k_zero_point = None,
                v_zero_point = None, compute = None, out = None, out_dtype = None, return_lse = None
            ))]
            #[allow(clippy::too_many_arguments, reason = "the public signature")]
            fn $varlen<'py>(
                &self,
                py: Python<'py>,
                q: &Bound<'py, PyAny>,
                k: &Bound<'py, PyAny>,
                v: &Bound<'py, PyAny>,
                cu_seqlens_q: &Bound<'py, PyAny>,
                cu_seqlens_kv: &Bound<'py, PyAny>,
                causal: Option<&Bound<'py, PyAny>>,
                window: Option<&Bound<'py, PyAny>>,
                softcap: Option<&Bound<'py, PyAny>>,
                scale: Option<&Bound<'py, PyAny>>,
                sinks: Option<&Bound<'py, PyAny>>,
                alibi_slopes: Option<&Bound<'py, PyAny>>,
                q_descale: Option<&Bound<'py, PyAny>>,
                k_descale: Option<&Bound<'py, PyAny>>,
                v_descale: Option<&Bound<'py, PyAny>>,
                q_zero_point: Option<&Bound<'py, PyAny>>,
                k_zero_point: Option<&Bound<'py, PyAny>>,
                v_zero_point: Option<&Bound<'py, PyAny>>,
                compute: Option<&Bound<'py, PyAny>>,
                out: Option<&Bound<'py, PyAny>>,
                out_dtype: Option<&Bound<'py, PyAny>>,
                return_lse: Option<&Bound<'py, PyAny>>,
            ) -> PyResult<Bound<'py, PyAny>> {
                let home = self.owned.home().map_err(|failure| reported(py, failure))?;
                let common = Common { causal, window, softcap, scale, sinks, alibi_slopes, compute, out, out_dtype, return_lse };
                let q = Packed { tensor: q, descale: q_descale, zero_point: q_zero_point };
                let k = Packed { tensor: k, descale: k_descale, zero_point: k_zero_point };
                let v = Packed { tensor: v, descale: v_descale, zero_point: v_zero_point };
                varlen::varlen(py, &home, &Varlen { q, k, v, cu_seqlens_q, cu_seqlens_kv, common, dropout: (0.0, None) }, Purpose::$purpose)
            }

            #[doc = concat!("`rapt.", stringify!($with_kvcache), "` on these threads.")]
            #[pyo3(signature = (
                q, k_cache, v_cache, k = None, v = None, *, cache_seqlens = None, page_table = None, causal = None, window = None,
                softcap = None, scale = None, sinks = None, alibi_slopes = None, k_descale = None, v_descale = None,
                k_zero_point = None, v_zero_point = None, compute = None, out = None, out_dtype = None, return_lse = None
            ))]
            #[allow(clippy::too_many_arguments, reason = "the public signature")]
            fn $with_kvcache<'py>(
                &self,
                py: Python<'py>,
                q: &Bound<'py, PyAny>,
                k_cache: &Bound<'py, PyAny>,
                v_cache: &Bound<'py, PyAny>,
                k: Option<&Bound<'py, PyAny>>,
                v: Option<&Bound<'py, PyAny>>,
                cache_seqlens: Option<&Bound<'py, PyAny>>,
                page_table: Option<&Bound<'py, PyAny>>,
                causal: Option<&Bound<'py, PyAny>>,
                window: Option<&Bound<'py, PyAny>>,
                softcap: Option<&Bound<'py, PyAny>>,
                scale: Option<&Bound<'py, PyAny>>,
                sinks: Option<&Bound<'py, PyAny>>,
                alibi_slopes: Option<&Bound<'py, PyAny>>,
                k_descale: Option<&Bound<'py, PyAny>>,
                v_descale: Option<&Bound<'py, PyAny>>,
                k_zero_point: Option<&Bound<'py, PyAny>>,
                v_zero_point: Option<&Bound<'py, PyAny>>,
                compute: Option<&Bound<'py, PyAny>>,
                out: Option<&Bound<'py, PyAny>>,
                out_dtype: Option<&Bound<'py, PyAny>>,
                return_lse: Option<&Bound<'py, PyAny>>,
            ) -> PyResult<Bound<'py, PyAny>> {
                let home = self.owned.home().map_err(|failure| reported(py, failure))?;
                let common = Common { causal, window, softcap, scale, sinks, alibi_slopes, compute, out, out_dtype, return_lse };
                let k = CachePart { cache: k_cache, new: k, descale: k_descale, zero_point: k_zero_point };
                let v = CachePart { cache: v_cache, new: v, descale: v_descale, zero_point: v_zero_point };
                ragged::with_kvcache(py, &home, &Cached { q, k, v, cache_seqlens, page_table, common }, Purpose::$purpose)
            })*

            #[doc = concat!("explain", signature!("$self, ", $($name: $default,)*), "\n--\n")]
            /// `rapt.explain` on these threads.
            #[pyo3(
                signature = (q, k, v, *, $($name = None,)* out = None, out_dtype = None, return_lse = None, tolerance = None, device = None),
                text_signature = None
            )]
            #[allow(clippy::too_many_arguments, reason = "the public signature")]
            fn explain<'py>(
                &self,
                py: Python<'py>,
                q: &Bound<'py, PyAny>,
                k: &Bound<'py, PyAny>,
                v: &Bound<'py, PyAny>,
                $($name: Option<&Bound<'py, PyAny>>,)*
                out: Option<&Bound<'py, PyAny>>,
                out_dtype: Option<&Bound<'py, PyAny>>,
                return_lse: Option<&Bound<'py, PyAny>>,
                tolerance: Option<&Bound<'py, PyAny>>,
                device: Option<&Bound<'py, PyAny>>,
            ) -> PyResult<PyPlan> {
                let home = self.owned.home().map_err(|failure| reported(py, failure))?;
                let request = Request { q, k, v, $($name,)* out, out_dtype, return_lse, tolerance, device };
                attention::explain(py, &home, &request)
            }
        }
    };
}
attention_options!(methods);
