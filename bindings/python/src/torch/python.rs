//! What the Python files of `rapt.torch` call.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rapt::Options;

use super::call::Given;
use super::decide::{self, Modes, Order, Reason, Verdict};
use super::dropout;
use super::request::{self, Flags};
use crate::api::backward::Arriving;
use crate::api::{jagged, sdpa};
use crate::errors::{Failure, Wording, guard, hints};
use crate::kind::Kind;
use crate::tensors;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

fn guarded<T>(py: Python<'_>, body: impl FnOnce() -> Result<T, Failure>) -> PyResult<T> {
    guard(py, &Cell::new(Wording { names: &hints::SDPA, kind: Kind::Torch }), body)
}

/// Who answers PyTorch's call: `(None, order)` where Rapt does, `(reason, None)` where PyTorch's own kernel must; and whether a
/// tensor of a trace is among them. Raises what nobody computes.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, debug_mask = false, /))]
#[allow(clippy::too_many_arguments, reason = "PyTorch's signature")]
pub(crate) fn torch_decide(
    py: Python<'_>,
    query: Any<'_, '_>,
    key: Any<'_, '_>,
    value: Any<'_, '_>,
    attn_mask: Maybe<'_, '_>,
    dropout_p: f64,
    is_causal: bool,
    scale: Maybe<'_, '_>,
    enable_gqa: bool,
    debug_mask: bool,
) -> PyResult<(Option<String>, Option<&'static str>, bool)> {
    guarded(py, || {
        let given = Given { query, key, value, attn_mask };
        // A scale that is no number here is a symbol of a trace, and finite.
        let scale = scale.and_then(|scale| scale.extract().ok());
        let (asked, traced) = request::of_tensors(given, Flags { dropout_p, is_causal, scale, enable_gqa })?;
        let modes = Modes { allowed: request::allowed(py)?, traced, ..request::modes(py)? };
        let mut verdict = request::decide_torch(py, &asked, modes, given)?;
        if debug_mask && matches!(verdict, Verdict::Serve(_)) {
            verdict = Verdict::Fallback(Reason::DebugMask);
        }
        match verdict {
            Verdict::Serve(order) => Ok((None, Some(order.name()), traced)),
            Verdict::Fallback(reason) => Ok((Some(reason.label().into_owned()), None, traced)),
            Verdict::Refuse(refusal) => Err(request::refused(refusal, &asked)),
        }
    })
}

/// The order of the answer to Rapt's own function on tensors of a trace; raises where it is not served.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p = 0.0, /))]
#[allow(clippy::too_many_arguments, reason = "PyTorch's signature")]
pub(crate) fn torch_order(
    py: Python<'_>,
    query: Any<'_, '_>,
    key: Any<'_, '_>,
    value: Any<'_, '_>,
    attn_mask: Maybe<'_, '_>,
    is_causal: bool,
    scale: Maybe<'_, '_>,
    enable_gqa: bool,
    dropout_p: f64,
) -> PyResult<&'static str> {
    guarded(py, || {
        let given = Given { query, key, value, attn_mask };
        let scale = scale.and_then(|scale| scale.extract().ok());
        let (asked, _) = request::of_tensors(given, Flags { dropout_p, is_causal, scale, enable_gqa })?;
        // Gradients are the business of the op above, which makes a node of it before its trace comes here.
        let verdict = request::decide_torch(py, &asked, Modes { traced: true, ..Modes::ORDINARY }, given)?;
        Ok(request::served(verdict, &asked, None)?.name())
    })
}

/// Computes a request on torch tensors whose memory is their value: decided before, with `order` as the answer, or (None) by
/// Rapt's own op in a graph, which is decided here and has its `draw` beside `dropout_p`. Counted as served.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask, is_causal, scale, enable_gqa, order, dropout_p = 0.0, draw = None, /))]
#[allow(clippy::too_many_arguments, reason = "PyTorch's signature")]
pub(crate) fn torch_sdpa<'py>(
    py: Python<'py>,
    query: Any<'_, 'py>,
    key: Any<'_, 'py>,
    value: Any<'_, 'py>,
    attn_mask: Maybe<'_, 'py>,
    is_causal: bool,
    scale: Option<f64>,
    enable_gqa: bool,
    order: Option<&str>,
    dropout_p: f64,
    draw: Maybe<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let given = Given { query, key, value, attn_mask };
    let flags = Flags { dropout_p, is_causal, scale, enable_gqa };
    let Some(order) = order else { return sdpa::of_graph(py, given, flags, draw) };
    let known = [Order::RowMajor, Order::Query, Order::Bshd].into_iter().find(|known| known.name() == order);
    let unknown = || Failure::option("order", order, "row_major, query, bshd");
    sdpa::decided(py, given, flags, guarded(py, || known.ok_or_else(unknown))?)
}

/// Who answers PyTorch's call where q, k or v is nested: (None, traced) where Rapt does, (reason, traced) where PyTorch must.
/// `refuses`: for Rapt's own function, which raises in place of a reason.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, refuses, /))]
#[allow(clippy::too_many_arguments, reason = "PyTorch's signature")]
pub(crate) fn torch_decide_jagged(
    py: Python<'_>,
    query: Any<'_, '_>,
    key: Any<'_, '_>,
    value: Any<'_, '_>,
    attn_mask: Maybe<'_, '_>,
    dropout_p: f64,
    is_causal: bool,
    scale: Maybe<'_, '_>,
    enable_gqa: bool,
    refuses: bool,
) -> PyResult<(Option<String>, bool)> {
    guarded(py, || {
        let scale = scale.and_then(|scale| scale.extract().ok());
        let flags = Flags { dropout_p, is_causal, scale, enable_gqa };
        let (asked, nests, traced) = request::of_nested(Given { query, key, value, attn_mask }, flags)?;
        let mut modes = Modes { traced, ..request::modes(py)? };
        if !refuses {
            modes.allowed = request::allowed(py)?;
        }
        let verdict = decide::decide_jagged(&asked, nests, modes, request::stock(py)?)?;
        if refuses {
            request::served(verdict, &asked, None)?;
            return Ok((None, traced));
        }
        match verdict {
            Verdict::Serve(_) => Ok((None, traced)),
            Verdict::Fallback(reason) => Ok((Some(reason.label().into_owned()), traced)),
            Verdict::Refuse(refusal) => Err(request::refused(refusal, &asked)),
        }
    })
}

/// Attention of the sequences of jagged tensors, given their values as `[rows, heads, head_dim]` and for each of q, k and v its
/// offsets and its lengths; `dropout`: p, a draw, and the batch entries before the first. With `return_lse` (out, lse). Counted as served.
#[pyfunction]
#[pyo3(signature = (query, key, value, q_sequences, k_sequences, v_sequences, is_causal, scale, enable_gqa, dropout = None, return_lse = false, /))]
#[allow(clippy::too_many_arguments, reason = "PyTorch's signature")]
pub(crate) fn torch_jagged<'py>(
    py: Python<'py>,
    query: Any<'_, 'py>,
    key: Any<'_, 'py>,
    value: Any<'_, 'py>,
    q_sequences: jagged::Sequences<'py>,
    k_sequences: jagged::Sequences<'py>,
    v_sequences: jagged::Sequences<'py>,
    is_causal: bool,
    scale: Option<f64>,
    enable_gqa: bool,
    dropout: dropout::Stated<'py>,
    return_lse: bool,
) -> PyResult<Bound<'py, PyAny>> {
    guarded(py, || {
        let sequences = [q_sequences, k_sequences, v_sequences];
        let (request, options) =
            jagged_request([query, key, value], sequences, (is_causal, scale, enable_gqa), dropout)?;
        jagged::run(py, &request, &options, return_lse)
    })
}

/// The gradients of that call by the values of q, k and v: fills those that are given. What its heads broadcast has been expanded.
#[pyfunction]
#[pyo3(signature = (d_o, d_lse, query, key, value, out, lse, q_sequences, k_sequences, v_sequences, dq, dk, dv, is_causal, scale, dropout = None, /))]
#[allow(clippy::too_many_arguments, reason = "PyTorch's signature")]
pub(crate) fn torch_jagged_backward<'py>(
    py: Python<'py>,
    d_o: Any<'_, 'py>,
    d_lse: Maybe<'_, 'py>,
    query: Any<'_, 'py>,
    key: Any<'_, 'py>,
    value: Any<'_, 'py>,
    out: Any<'_, 'py>,
    lse: Any<'_, 'py>,
    q_sequences: jagged::Sequences<'py>,
    k_sequences: jagged::Sequences<'py>,
    v_sequences: jagged::Sequences<'py>,
    dq: Maybe<'_, 'py>,
    dk: Maybe<'_, 'py>,
    dv: Maybe<'_, 'py>,
    is_causal: bool,
    scale: Option<f64>,
    dropout: dropout::Stated<'py>,
) -> PyResult<()> {
    guarded(py, || {
        let sequences = [q_sequences, k_sequences, v_sequences];
        let (request, options) = jagged_request([query, key, value], sequences, (is_causal, scale, true), dropout)?;
        jagged::backward(py, &request, Arriving { out, lse, d_o, d_lse }, [dq, dk, dv], &options)
    })
}

/// What both passes are given.
fn jagged_request<'a, 'py>(
    values: [Any<'a, 'py>; 3],
    sequences: [jagged::Sequences<'py>; 3],
    (is_causal, scale, enable_gqa): (bool, Option<f64>, bool),
    dropout: dropout::Stated<'_>,
) -> Result<(jagged::Jagged<'a, 'py>, Options), Failure> {
    let (dropout_p, dropout) = dropout::read(dropout)?;
    let options = Options { dropout_p, ..super::call::options(is_causal, scale) };
    Ok((jagged::Jagged { values, sequences, enable_gqa, dropout }, options))
}

/// Every reason of a fallback, as docs/reference/pytorch.md lists them but for those of transformers; `…` stands for a name.
#[pyfunction]
pub(crate) fn fallback_reasons() -> Vec<&'static str> {
    Reason::TEXTS.to_vec()
}

/// Whether this is an ordinary dense tensor on CPU or GPU, whose memory is its value.
#[pyfunction]
pub(crate) fn torch_is_plain(tensor: Any<'_, '_>) -> PyResult<bool> {
    tensors::torch::is_ordinary(tensor)
}

/// Whether something traces these: one of them is a fake or a functional tensor.
#[pyfunction]
#[pyo3(signature = (query, key, value, attn_mask = None, /))]
pub(crate) fn torch_is_traced(
    query: Any<'_, '_>,
    key: Any<'_, '_>,
    value: Any<'_, '_>,
    attn_mask: Maybe<'_, '_>,
) -> PyResult<bool> {
    for tensor in (Given { query, key, value, attn_mask }).all() {
        if request::is_traced(tensor)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Raises where grad mode is on and one of these requires grad.
#[pyfunction]
#[pyo3(signature = (*tensors))]
pub(crate) fn refuse_gradients<'py>(py: Python<'py>, tensors: &Bound<'py, PyTuple>) -> PyResult<()> {
    guard(py, &Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::Torch }), || {
        let inputs: Vec<_> = tensors.iter().collect();
        tensors::torch::refuse_gradients(py, inputs.iter().map(|tensor| ("an input", tensor)))
    })
}
