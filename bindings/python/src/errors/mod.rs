//! The exception classes, and the one place where a refusal becomes one.
//!
//! Each family of [`rapt::ErrorKind`] is a class with two bases: `rapt.RaptError` and the built-in that Python programs
//! expect. Messages are rapt-core's, with the parameter names of the function that was called, followed by a hint: the
//! expression that corrects the request.

pub(crate) mod hints;

use pyo3::exceptions::{
    PyException, PyIndexError, PyNotImplementedError, PyRuntimeError, PyTypeError, PyValueError, PyZeroDivisionError,
};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use rapt::{Error, ErrorKind};

use self::hints::Names;
use crate::kind::Kind;

/// Why a call was refused.
pub(crate) enum Failure {
    /// By rapt-core.
    Rapt(Error),
    /// By these bindings, before rapt-core saw anything.
    Binding {
        /// The exception class.
        kind: ErrorKind,
        /// What was asked and got.
        message: String,
        /// The expression that corrects the request, or nothing.
        hint: String,
    },
    /// Python raised.
    Python(PyErr),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Rapt(error)
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Failure::Python(error)
    }
}

impl Failure {
    pub(crate) fn binding(kind: ErrorKind, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Failure::Binding { kind, message: message.into(), hint: hint.into() }
    }

    pub(crate) fn option(option: &'static str, got: impl Into<String>, allowed: impl Into<String>) -> Self {
        Failure::Rapt(Error::Option { option, got: got.into(), allowed: allowed.into() })
    }
}

/// How a failure is worded: the names of the parameters, and the library whose expressions the hint uses.
#[derive(Clone, Copy)]
pub(crate) struct Wording {
    pub(crate) names: &'static Names,
    pub(crate) kind: Kind,
}

struct Classes {
    rapt: Py<PyType>,
    families: Vec<(&'static str, Py<PyType>)>,
}

static CLASSES: PyOnceLock<Classes> = PyOnceLock::new();

const fn class_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::DtypeMismatch => "DtypeMismatchError",
        ErrorKind::UnsupportedDtype => "UnsupportedDtypeError",
        ErrorKind::Shape => "ShapeError",
        ErrorKind::Layout => "LayoutError",
        ErrorKind::Option => "OptionError",
        ErrorKind::Device => "DeviceError",
        ErrorKind::Kind => "KindError",
        ErrorKind::DtypeBoundary => "DtypeBoundaryError",
        ErrorKind::Program => "ProgramError",
        ErrorKind::Index => "IndexRangeError",
        ErrorKind::ZeroDivision => "DivisionError",
        ErrorKind::Number => "NumberError",
        _ => "UnsupportedError",
    }
}

fn classes(py: Python<'_>) -> PyResult<&Classes> {
    CLASSES.get_or_try_init(py, || {
        let class = |name: &'static str, doc: &str, bases: Bound<'_, PyTuple>| -> PyResult<Py<PyType>> {
            let dict = PyDict::new(py);
            dict.set_item("__module__", "rapt")?;
            dict.set_item("__doc__", doc)?;
            Ok(py.get_type::<PyType>().call1((name, bases, dict))?.cast_into::<PyType>()?.unbind())
        };
        let rapt = class("RaptError", "Any refusal of Rapt.", PyTuple::new(py, [py.get_type::<PyException>()])?)?;
        let type_error = || py.get_type::<PyTypeError>();
        let value_error = || py.get_type::<PyValueError>();
        let table = [
            ("DtypeMismatchError", "Tensors that must share a dtype do not.", type_error()),
            ("UnsupportedDtypeError", "A dtype that is recognised but not served in its place.", type_error()),
            ("ShapeError", "Shapes that do not fit one another.", value_error()),
            (
                "LayoutError",
                "Strides, extents, alignment, overlap, or an output that may not be written.",
                value_error(),
            ),
            ("OptionError", "An option outside its domain.", value_error()),
            (
                "DeviceError",
                "Tensors on different devices, or on one that is not served.",
                py.get_type::<PyRuntimeError>(),
            ),
            ("KindError", "Tensors of different kinds in one call, or something that is no tensor.", type_error()),
            ("DtypeBoundaryError", "An input of a program has another dtype than the program declares.", type_error()),
            ("ProgramError", "A program or its archive is damaged, altered, or contradicts itself.", value_error()),
            (
                "IndexRangeError",
                "An index among a program's inputs, a page, or a length or offset of a sequence lies outside what there is.",
                py.get_type::<PyIndexError>(),
            ),
            (
                "DivisionError",
                "The values of a program's inputs make it divide an integer by zero.",
                py.get_type::<PyZeroDivisionError>(),
            ),
            ("NumberError", "A number that the asked format does not hold, or a singular matrix.", value_error()),
            (
                "UnsupportedError",
                "A valid request that this build does not serve.",
                py.get_type::<PyNotImplementedError>(),
            ),
        ];
        let families = table
            .into_iter()
            .map(|(name, doc, built_in)| Ok((name, class(name, doc, PyTuple::new(py, [rapt.bind(py), &built_in])?)?)))
            .collect::<PyResult<_>>()?;
        Ok(Classes { rapt, families })
    })
}

/// Adds the classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let classes = classes(py)?;
    module.add("RaptError", classes.rapt.clone_ref(py))?;
    for (name, class) in &classes.families {
        module.add(*name, class.clone_ref(py))?;
    }
    Ok(())
}

fn new_error(py: Python<'_>, kind: Option<ErrorKind>, message: String) -> PyErr {
    let classes = match classes(py) {
        Ok(classes) => classes,
        Err(error) => return error,
    };
    let class = kind
        .and_then(|kind| classes.families.iter().find(|(name, _)| *name == class_name(kind)))
        .map_or(&classes.rapt, |(_, class)| class);
    PyErr::from_type(class.bind(py).clone(), message)
}

/// The exception for `failure`.
pub(crate) fn raise(py: Python<'_>, failure: Failure, wording: Wording) -> PyErr {
    let report = |message: String, hint: String| {
        let message = wording.names.rename(&message);
        if hint.is_empty() { message } else { format!("{message}. Mend: {}", wording.names.rename(&hint)) }
    };
    match failure {
        Failure::Python(error) => error,
        Failure::Rapt(
            error @ (Error::WorkerPanicked { .. } | Error::WorkLeftUndone { .. } | Error::OutOfMemory { .. }),
        ) => {
            let kind = matches!(error, Error::OutOfMemory { .. }).then(|| error.kind());
            new_error(py, kind, error.to_string())
        }
        Failure::Rapt(error) => {
            let hint = hints::expression(&error, wording.kind);
            new_error(py, Some(error.kind()), report(error.to_string(), hint))
        }
        Failure::Binding { kind, message, hint } => new_error(py, Some(kind), report(message, hint)),
    }
}

/// Runs `body`; a refusal becomes its exception and a panic a `RaptError`, so that nothing unwinds into Python.
pub(crate) fn guard<T>(
    py: Python<'_>,
    wording: &std::cell::Cell<Wording>,
    body: impl FnOnce() -> Result<T, Failure>,
) -> PyResult<T> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(done) => done.map_err(|failure| raise(py, failure, wording.get())),
        Err(payload) => Err(raise(py, Failure::Rapt(Error::worker_panicked(payload.as_ref())), wording.get())),
    }
}
