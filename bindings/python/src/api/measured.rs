//! `rapt.quant.Errors`: what was measured of a `rapt.Quantized` against what it was made of.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyDict};
use rapt::quant::{Measured, measure};

use crate::api::quant::{PartsArguments, SchemeArguments, checked, guarded, in_host_memory, read, refusal};
use crate::errors::hints;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

/// How far the numbers of a `Quantized` lie from those that it was made of.
#[pyclass(frozen, module = "rapt.quant", name = "Errors")]
pub(crate) struct PyErrors {
    pub(crate) measured: Measured,
    /// The same numbers as a tensor of torch on a GPU, once for each that judged by them.
    on_gpus: Mutex<HashMap<u32, Py<PyAny>>>,
}

impl PyErrors {
    fn new(measured: Measured) -> Self {
        PyErrors { measured, on_gpus: Mutex::default() }
    }

    /// All numbers as one flat tensor of torch on a GPU, to which they are copied once.
    pub(crate) fn on_gpu<'py>(&self, py: Python<'py>, device: u32) -> PyResult<Bound<'py, PyAny>> {
        let found = |errors: &Self| {
            let on_gpus = errors.on_gpus.lock().unwrap_or_else(PoisonError::into_inner);
            on_gpus.get(&device).map(|tensor| tensor.clone_ref(py))
        };
        if let Some(tensor) = found(self) {
            return Ok(tensor.into_bound(py));
        }
        let torch = py.import(intern!(py, "torch"))?;
        let of = PyDict::new(py);
        of.set_item(intern!(py, "dtype"), torch.getattr(intern!(py, "float32"))?)?;
        let numbers = self.numbers_as_bytes();
        let host = match numbers.is_empty() {
            true => torch.call_method(intern!(py, "empty"), (0,), Some(&of))?,
            false => torch.call_method(intern!(py, "frombuffer"), (PyByteArray::new(py, &numbers),), Some(&of))?,
        };
        // Out of memory that is not pinned: whatever stream reads it later, it is there.
        let tensor = host.call_method1(intern!(py, "to"), (format!("cuda:{device}"),))?;
        // Not held while Python runs: two threads may both copy, and one copy stays.
        self.on_gpus.lock().unwrap_or_else(PoisonError::into_inner).insert(device, tensor.clone().unbind());
        Ok(tensor)
    }

    fn numbers_as_bytes(&self) -> Vec<u8> {
        self.measured.numbers().iter().flat_map(|x| x.to_le_bytes()).collect()
    }
}

/// What pickle calls, and with what.
type Reduced<'py> = (Bound<'py, PyAny>, ([usize; 3], Bound<'py, PyBytes>));

#[pymethods]
impl PyErrors {
    /// (matrices, rows of each, columns).
    #[getter]
    fn shape(&self) -> (usize, usize, usize) {
        self.measured.shape().into()
    }

    /// Bytes: 8 for each row, 8 for each column and 8 for each matrix.
    #[getter]
    fn nbytes(&self) -> usize {
        self.measured.nbytes()
    }

    /// Of one matrix: `error` and `spread` of its rows, `mean` and `share` of its columns, `bias` and `coherence`.
    fn matrix<'py>(&self, py: Python<'py>, at: usize) -> PyResult<Bound<'py, PyDict>> {
        let [matrices, ..] = self.measured.shape();
        if at >= matrices {
            return Err(pyo3::exceptions::PyIndexError::new_err(format!("matrix {at} of {matrices}")));
        }
        let of = self.measured.matrix(at);
        let all = PyDict::new(py);
        for (name, numbers) in [("error", of.error), ("spread", of.spread), ("mean", of.mean), ("share", of.share)] {
            all.set_item(name, numbers)?;
        }
        all.set_item("bias", of.bias)?;
        all.set_item("coherence", of.coherence)?;
        Ok(all)
    }

    fn __repr__(&self) -> String {
        let [matrices, rows, columns] = self.measured.shape();
        format!("<rapt.quant.Errors of {matrices} matrices [{rows}, {columns}], nbytes={}>", self.measured.nbytes())
    }

    /// What pickle makes it of again.
    #[staticmethod]
    fn _of(shape: [usize; 3], numbers: &[u8]) -> PyResult<Self> {
        let numbers = numbers.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect();
        let measured = Measured::from_numbers(shape, numbers);
        let refuse = || pyo3::exceptions::PyValueError::new_err("numbers of another shape");
        Ok(PyErrors::new(measured.ok_or_else(refuse)?))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let bytes = self.numbers_as_bytes();
        let of = py.get_type::<PyErrors>().getattr("_of")?;
        Ok((of, (self.measured.shape(), PyBytes::new(py, &bytes))))
    }
}

/// The errors of a quantized tensor against what it was made of; see `rapt.Quantized`.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "what is made of a Python object is owned")]
pub(crate) fn quantized_errors<'py>(
    py: Python<'py>,
    scheme: SchemeArguments<'py>,
    parts: PartsArguments<'py>,
    original: Any<'_, 'py>,
) -> PyResult<PyErrors> {
    guarded(py, &hints::DEQUANTIZE, |wording| {
        checked(wording, &scheme, &parts, |kind, codes, view| {
            in_host_memory(codes)?;
            let original = read("original", original, kind, original)?;
            let x = original.view()?;
            let measured = py.detach(|| measure(&x, view)).map_err(|error| refusal(&error, kind))?;
            Ok(PyErrors::new(measured))
        })
    })
}
