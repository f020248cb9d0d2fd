//! A new tensor with the strides that PyTorch's own answer would have.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use rapt::Shape;

use super::decide::Order;

/// An uninitialised tensor of this shape, like `query` but for its strides.
pub(crate) fn new<'py>(
    py: Python<'py>,
    query: &Bound<'py, PyAny>,
    shape: &Shape,
    order: Order,
) -> PyResult<Bound<'py, PyAny>> {
    static NEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let make =
        NEW.get_or_try_init(py, || -> PyResult<_> { Ok(py.import("rapt.torch._outputs")?.getattr("new")?.unbind()) })?;
    make.bind(py).call1((query, PyTuple::new(py, shape.iter())?, order.name()))
}
