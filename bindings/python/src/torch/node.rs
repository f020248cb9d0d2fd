//! Calls whose inputs require grad, which `rapt.torch._autograd` makes nodes of autograd of.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The function of this name that makes a node of autograd.
pub(crate) fn node<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let import = || -> PyResult<_> { Ok(py.import("rapt.torch._autograd")?.into_any().unbind()) };
    MODULE.get_or_try_init(py, import)?.bind(py).getattr(name)
}
