//! `tolerance=` of `rapt.attention`: what a `rapt.Quantized` carries for it, the call, what `rapt.explain` says of it, and what is counted.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use rapt::cuda::Backend;
use rapt::{Backing, Compute, Device, Error, Errors, Judgement, Qkv, Tolerance};

use crate::api::codes::Opened;
use crate::api::measured::PyErrors;
use crate::api::options;
use crate::errors::Failure;
use crate::kind::Kind;
use crate::tensors::{self, Operand, torch};

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// What stands behind K or V of a call.
pub(crate) struct Behind<'py> {
    errors: Py<PyErrors>,
    /// The same on the GPU of the call, where it has one.
    on_gpu: Option<Operand>,
    original: Option<(Bound<'py, PyAny>, Operand)>,
}

impl Behind<'_> {
    fn backing(&self) -> Result<Backing<'_>, Failure> {
        let original = self.original.as_ref().map(|(_, operand)| operand.view()).transpose()?;
        let errors = match &self.on_gpu {
            Some(numbers) => Errors::Device(numbers.view()?),
            None => Errors::Host(&self.errors.get().measured),
        };
        Ok(Backing { errors, original })
    }
}

/// The tolerance of a call, with what stands behind its operands.
pub(crate) struct Asked<'py> {
    limit: f64,
    k: Option<Behind<'py>>,
    v: Option<Behind<'py>>,
}

impl<'py> Asked<'py> {
    /// `None` where no tolerance is given.
    pub(crate) fn read(
        given: Option<Any<'_, 'py>>,
        opened: &Qkv<Option<Opened<'py>>>,
        kind: Kind,
        q: Any<'_, 'py>,
    ) -> Result<Option<Self>, Failure> {
        let Some(limit) = options::real("tolerance", given)? else { return Ok(None) };
        let behind = |name: &'static str, opened: &Option<Opened<'py>>| -> Result<Option<Behind<'py>>, Failure> {
            let Some(opened) = opened else { return Ok(None) };
            let Some(errors) = opened.errors()? else { return Ok(None) };
            let original = opened.original()?;
            let operand = original.as_ref().map(|original| tensors::read(name, original, kind, q)).transpose()?;
            Ok(Some(Behind { errors, on_gpu: None, original: original.zip(operand) }))
        };
        Ok(Some(Asked { limit, k: behind("k", &opened.k)?, v: behind("v", &opened.v)? }))
    }

    /// Brings the measured errors to the GPU of a call whose first tensor is `q`. Not into a graph: nothing would be there to wait for.
    pub(crate) fn place(
        &mut self,
        py: Python<'py>,
        device: Device,
        kind: Kind,
        q: Any<'_, 'py>,
    ) -> Result<(), Failure> {
        let Device::Cuda(index) = device else { return Ok(()) };
        if kind != Kind::Torch {
            let why = "measured errors are brought to a GPU by torch";
            return Err(Error::unsupported(
                "tolerance on arrays of a GPU that are not torch's",
                why,
                "tensors of torch",
            )
            .into());
        }
        let backend = Backend::get().map_err(|error| error.on(device))?;
        backend.refuse_capture(index, torch::current_stream(py, index)?)?;
        for (name, behind) in [("k_errors", &mut self.k), ("v_errors", &mut self.v)] {
            let Some(behind) = behind else { continue };
            let numbers = behind.errors.get().on_gpu(py, index)?;
            behind.on_gpu = Some(tensors::read(name, &numbers, kind, q)?);
        }
        Ok(())
    }

    /// Refused before a kernel is planned for a device where nothing is judged.
    pub(crate) fn serves(&self, device: Device) -> Result<(), Failure> {
        Ok(Tolerance::serves(device)?)
    }

    pub(crate) fn tolerance(&self) -> Result<Tolerance<'_>, Failure> {
        Ok(Tolerance {
            limit: self.limit,
            k: self.k.as_ref().map(Behind::backing).transpose()?,
            v: self.v.as_ref().map(Behind::backing).transpose()?,
        })
    }

    /// The originals, as objects of the caller's.
    pub(crate) fn originals(&self) -> impl Iterator<Item = (&'static str, &Bound<'py, PyAny>)> {
        let of = [("k", &self.k), ("v", &self.v)];
        of.into_iter().filter_map(|(name, behind)| Some((name, &behind.as_ref()?.original.as_ref()?.0)))
    }
}

/// A judgement as Python sees it.
pub(crate) fn as_dict<'py>(py: Python<'py>, judgement: &Judgement) -> PyResult<Bound<'py, PyDict>> {
    let all = PyDict::new(py);
    all.set_item("limit", judgement.limit)?;
    all.set_item("quantized", judgement.quantized())?;
    all.set_item("fell_back", judgement.fell_back())?;
    all.set_item("worst_estimate", judgement.worst_estimate())?;
    all.set_item("worst_bound", judgement.worst_bound())?;
    all.set_item("worst_epsilon", judgement.worst_epsilon())?;
    let mut heads = Vec::with_capacity(judgement.heads.len());
    for head in &judgement.heads {
        let of = PyDict::new(py);
        of.set_item("batch", head.batch)?;
        of.set_item("head", head.head)?;
        of.set_item("quantized", head.is_quantized)?;
        of.set_item("estimate", head.estimate)?;
        of.set_item("bound", head.bound)?;
        of.set_item("epsilon", head.epsilon)?;
        heads.push(of);
    }
    all.set_item("heads", heads)?;
    Ok(all)
}

/// What calls with a tolerance came to in this process, and how many formed products of int8.
#[derive(Clone, Copy, Default)]
struct Counted {
    int8_calls: u64,
    calls: u64,
    refused: u64,
    quantized: u64,
    fell_back: u64,
    worst_estimate: f64,
    worst_bound: f64,
}

static COUNTED: Mutex<Counted> = Mutex::new(Counted {
    int8_calls: 0,
    calls: 0,
    refused: 0,
    quantized: 0,
    fell_back: 0,
    worst_estimate: 0.0,
    worst_bound: 0.0,
});

/// Counts a call that was served, if its products were of int8.
pub(crate) fn count_compute(compute: Compute) {
    if compute == Compute::Int8 {
        COUNTED.lock().unwrap_or_else(PoisonError::into_inner).int8_calls += 1;
    }
}

/// Counts what was served: the worst are those of heads that stood on the codes.
pub(crate) fn count(done: &rapt::Result<Judgement>) {
    let mut counted = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    match done {
        Ok(judgement) => {
            counted.calls += 1;
            counted.quantized += judgement.quantized() as u64;
            counted.fell_back += judgement.fell_back() as u64;
            for head in judgement.heads.iter().filter(|head| head.is_quantized) {
                counted.worst_estimate = counted.worst_estimate.max(head.estimate);
                counted.worst_bound = counted.worst_bound.max(head.bound);
            }
        }
        Err(Error::ToleranceExceeded { .. }) => counted.refused += 1,
        Err(_) => {}
    }
}

/// What calls with a tolerance came to; see `rapt.quant.stats`.
#[pyfunction]
pub(crate) fn tolerance_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let counted = *COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    let all = PyDict::new(py);
    all.set_item("calls", counted.calls)?;
    all.set_item("refused", counted.refused)?;
    all.set_item("quantized", counted.quantized)?;
    all.set_item("fell_back", counted.fell_back)?;
    all.set_item("worst_estimate", counted.worst_estimate)?;
    all.set_item("worst_bound", counted.worst_bound)?;
    all.set_item("int8_calls", counted.int8_calls)?;
    Ok(all)
}

/// Counts from 0 again.
#[pyfunction]
pub(crate) fn reset_tolerance_stats() {
    *COUNTED.lock().unwrap_or_else(PoisonError::into_inner) = Counted::default();
}
