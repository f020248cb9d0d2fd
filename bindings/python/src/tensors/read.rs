//! Which kind of tensor an object is, and what it says of itself.

use pyo3::prelude::*;
use rapt::ErrorKind;

use super::stream_context::StreamContext;
use super::{Operand, dlpack, numpy, torch};
use crate::errors::Failure;
use crate::kind::Kind;

/// Whose tensor `object` is, or `None` if it is no tensor.
pub(crate) fn kind_of(object: &Bound<'_, PyAny>) -> PyResult<Option<Kind>> {
    if torch::is_exactly_tensor(object) {
        return Ok(Some(Kind::Torch));
    }
    if numpy::is_exactly_array(object) {
        return Ok(Some(Kind::Numpy));
    }
    if torch::is_tensor(object)? {
        return Ok(Some(Kind::Torch));
    }
    if numpy::is_array(object)? {
        return Ok(Some(Kind::Numpy));
    }
    Ok(dlpack::is_producer(object)?.then_some(Kind::DlPack))
}

/// What errors call the type of `object`.
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    match kind_of(object) {
        Ok(Some(Kind::Torch)) => "torch tensor".to_owned(),
        Ok(Some(Kind::Numpy)) => "numpy array".to_owned(),
        _ => object.get_type().fully_qualified_name().map_or_else(|_| "unknown".to_owned(), |name| name.to_string()),
    }
}

/// The kind of `q`, which is that of the call.
pub(crate) fn source_kind(q: &Bound<'_, PyAny>) -> Result<Kind, Failure> {
    kind_of(q)?.ok_or_else(|| {
        let message =
            format!("q is a {}: allowed are numpy arrays, torch tensors and objects with __dlpack__", type_name(q));
        let is_quantized = type_name(q).ends_with(".Quantized");
        let hint = if is_quantized { "`q.dequantize()`" } else { "`numpy.asarray(q)`, or `torch.as_tensor(q)`" };
        Failure::binding(ErrorKind::Kind, message, hint)
    })
}

/// Reads what `object` says of itself; it must be of the kind of `q`.
pub(crate) fn read(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    kind: Kind,
    q: &Bound<'_, PyAny>,
) -> Result<Operand, Failure> {
    let same = match kind {
        Kind::Torch => torch::is_tensor(object)?,
        Kind::Numpy => numpy::is_array(object)?,
        Kind::DlPack => object.get_type().is(q.get_type()),
    };
    if !same {
        return Err(rapt::Error::KindMismatch { tensor: name, expected: type_name(q), got: type_name(object) }.into());
    }
    match kind {
        Kind::Torch => torch::read(name, object),
        Kind::Numpy => numpy::read(name, object),
        Kind::DlPack => dlpack::read(name, object, &StreamContext::of(kind, q)?),
    }
}
