//! Programs whose weights are tensors of PyTorch: what `torch.compile` with `freeze` makes.

use std::any::Any;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyList;
use rapt::model::{Template, Weight};
use rapt::{ErrorKind, Extent};

use super::{Owner, PyProgram, guarded, refusal, renamed};
use crate::errors::Failure;
use crate::kind::Kind;
use crate::tensors::torch;

/// What rapt-core calls the tensor that is read; messages get the weight's own name.
const WEIGHT: &str = "INPUT";

/// A program that is loaded and verified, and has no weights yet.
#[pyclass(frozen, module = "rapt._native", name = "ProgramTemplate")]
pub(crate) struct PyTemplate {
    template: Template,
}

#[pymethods]
impl PyTemplate {
    /// A program whose weights are given later, from the JSON of its schema.
    #[staticmethod]
    fn from_json(py: Python<'_>, json: &[u8]) -> PyResult<Self> {
        guarded(py, |_| {
            let template = py.detach(|| Template::from_json(json)).map_err(|error| refusal(&error, Kind::Torch))?;
            Ok(PyTemplate { template })
        })
    }

    /// Of each input of a call, whether the call writes it.
    fn written(&self) -> Vec<bool> {
        self.template.inputs().iter().map(|port| port.is_written).collect()
    }

    /// The program with these tensors, by name, as its weights. They are constants from here on: read where they lie, or packed
    /// once. Their memory is kept, and nothing may write to it while the program is used.
    fn with_weights(&self, py: Python<'_>, weights: &Bound<'_, PyList>) -> PyResult<PyProgram> {
        guarded(py, |_| {
            let mut lent = Vec::with_capacity(weights.len());
            let mut tensors = Vec::with_capacity(weights.len());
            for pair in weights {
                let (name, tensor): (String, Bound<'_, PyAny>) = pair.extract()?;
                lent.push(weight(&name, &tensor)?);
                tensors.push(tensor.unbind());
            }
            let keep: Arc<dyn Any + Send + Sync> = Arc::new(tensors);
            // SAFETY: torch says of each storage where it lies and how long it is, and `keep` holds the tensors. As with every
            // library, a program that writes its weights while a call reads them has a race of its own; that it must not write
            // them in between is stated.
            let model = unsafe { self.template.with_weights(lent, keep) };
            let model = model.map_err(|error| refusal(&error, Kind::Torch))?;
            Ok(PyProgram { model, owner: Owner(None) })
        })
    }
}

/// What a tensor says of itself.
fn weight(name: &str, tensor: &Bound<'_, PyAny>) -> Result<Weight, Failure> {
    let operand = torch::read(WEIGHT, tensor).map_err(|failure| renamed(failure, name, Kind::Torch))?;
    let refused = |message: &str| Failure::binding(ErrorKind::Layout, format!("{name} {message}"), "");
    let Extent::Proven { address, len_bytes } = operand.extent else {
        return Err(refused("does not say how long its storage is"));
    };
    if operand.device != rapt::Device::Cpu {
        return Err(refused("is not in host memory"));
    }
    let strides = operand.strides.iter().map(|&stride| usize::try_from(stride)).collect::<Result<Vec<_>, _>>();
    let offset = (operand.ptr as usize).wrapping_sub(address);
    Ok(Weight {
        name: name.to_owned(),
        dtype: operand.dtype,
        shape: operand.shape.to_vec(),
        strides: strides.map_err(|_| refused("has a negative stride"))?,
        offset: offset / operand.dtype.size_bytes().max(1),
        storage: operand.ptr.wrapping_sub(offset).cast_const(),
        storage_bytes: len_bytes,
    })
}
