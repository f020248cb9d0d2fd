//! The tensors of a call of PyTorch's signature, and one piece of four dimensions of it, proven and run; what the native kernels share.

use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use rapt::{Causal, DropoutSeed, Options, Spec, TensorForm, Tensors};

use super::frame::Inputs;
use crate::engine::Planned;
use crate::errors::Failure;
use crate::kind::Kind;
use crate::tensors::{self, Enqueued, Operand, StreamContext, torch};

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// A tensor that was made.
pub(super) type Made<'py> = (Bound<'py, PyAny>, Operand);

/// Where the tensors of a kernel lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Cpu,
    Cuda,
    Mps,
}

impl Place {
    /// By PyTorch's name.
    pub(super) fn named(device: &str) -> PyResult<Self> {
        match device {
            "cpu" => Ok(Place::Cpu),
            "cuda" => Ok(Place::Cuda),
            "mps" => Ok(Place::Mps),
            _ => Err(PyValueError::new_err(format!("device {device:?}: allowed are cpu, cuda and mps"))),
        }
    }

    /// Whether a call of these keys is one of ordinary tensors here, with nothing in force around it: the union over the tensors and the modes,
    /// one look for what would take ten questions. What an ordinary tensor's keys are is known on a GPU only when its backend has started.
    /// `besides` are keys that make no difference.
    pub(super) fn is_ordinary(self, keyset: Object<'_, '_>, besides: u64) -> PyResult<bool> {
        let py = keyset.py();
        let plain = match self {
            Place::Cpu => Some(torch::plain(py)?),
            Place::Cuda => torch::plain_cuda(py)?,
            Place::Mps => torch::plain_mps(py)?,
        };
        let Some([outside, inside]) = plain else { return Ok(false) };
        let keys: u64 = keyset.call_method0(intern!(py, "raw_repr"))?.extract()?;
        Ok(keys & !(outside | inside | besides) == 0)
    }
}

/// What `hot` answers, or `cold` where that has no answer, refuses or panics: a refusal has written nothing, and it or the panic happens again and is
/// reported there.
pub(super) fn hot_or_cold<'py>(
    hot: impl FnOnce() -> Result<Option<Bound<'py, PyAny>>, Failure>,
    cold: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    match catch_unwind(AssertUnwindSafe(hot)) {
        Ok(Ok(Some(answer))) => Ok(answer),
        Ok(Err(Failure::Python(error))) => Err(error),
        _ => cold(),
    }
}

/// Hashes a request by q and k, in which the requests of one program differ most.
pub(super) fn hash_request<H: Hasher>(q: &TensorForm, k: &TensorForm, hasher: &mut H) {
    for TensorForm { shape, strides, .. } in [q, k] {
        shape[..].hash(hasher);
        strides[..].hash(hasher);
    }
}

/// The tensors of a call, as they were given.
#[derive(Clone, Copy)]
pub(crate) struct Given<'a, 'py> {
    pub(crate) query: Object<'a, 'py>,
    pub(crate) key: Object<'a, 'py>,
    pub(crate) value: Object<'a, 'py>,
    pub(crate) attn_mask: Option<Object<'a, 'py>>,
}

impl<'a, 'py> Given<'a, 'py> {
    /// Each of them.
    pub(crate) fn all(self) -> impl Iterator<Item = Object<'a, 'py>> + use<'a, 'py> {
        [self.query, self.key, self.value].into_iter().chain(self.attn_mask)
    }

    /// Reads what each says of itself.
    pub(crate) fn read(self, kind: Kind) -> Result<Read, Failure> {
        let read = |name, object| tensors::read(name, object, kind, self.query);
        Ok(Read {
            q: read("q", self.query)?,
            k: read("k", self.key)?,
            v: read("v", self.value)?,
            mask: self.attn_mask.map(|mask| read("mask", mask)).transpose()?,
        })
    }
}

/// What they say of themselves.
pub(crate) struct Read {
    pub(crate) q: Operand,
    pub(crate) k: Operand,
    pub(crate) v: Operand,
    pub(crate) mask: Option<Operand>,
}

impl Read {
    /// Each of them.
    pub(crate) fn inputs(&self) -> Inputs<'_> {
        (&self.q, &self.k, &self.v, self.mask.as_ref())
    }
}

/// The options of PyTorch's signature, as rapt-core has them.
pub(crate) fn options(is_causal: bool, scale: Option<f64>) -> Options {
    Options { softmax_scale: scale, causal: is_causal.then_some(Causal::TopLeft), ..Options::default() }
}

/// The spec of one piece; of out and lse the forms that are known, and lse only where it is written.
pub(crate) fn spec_of(
    (q, k, v, mask): Inputs<'_>,
    (out, lse): (Option<&Operand>, Option<TensorForm>),
    options: &Options,
) -> Result<Spec, Failure> {
    let mask = mask.map(Operand::view).transpose()?;
    let mut builder = Spec::builder(&q.view()?, &k.view()?, &v.view()?, options);
    builder.mask(mask.as_ref());
    if let Some(out) = out {
        builder.out(out.form());
    }
    if let Some(lse) = lse {
        builder.lse(lse);
    }
    Ok(builder.build()?)
}

/// Proves and runs one piece, on a GPU with the stream and the memory of `context`.
pub(crate) fn run_piece<'py>(
    py: Python<'py>,
    planned: &Planned<'_>,
    (q, k, v, mask): Inputs<'_>,
    (out, lse): (&mut Operand, Option<&mut Operand>),
    dropout: Option<DropoutSeed>,
    context: &StreamContext<'py>,
) -> Result<Option<Enqueued>, Failure> {
    let tensors = Tensors {
        lse: lse.map(Operand::view_mut).transpose()?,
        dropout,
        mask: mask.map(Operand::view).transpose()?,
        ..Tensors::new(q.view()?, k.view()?, v.view()?, out.view_mut()?)
    };
    planned.run(py, tensors, context)
}
