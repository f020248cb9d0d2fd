//! The tree of a call as Python values: `(kind, details…, children)`; a leaf is None.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use rapt::model::{CallKey, CallKind, CallTree, ModelCall};

/// (positional, keyword, output): lists of (name, tree), and the tree of the result.
pub(super) fn of_call<'py>(py: Python<'py>, call: &ModelCall) -> PyResult<Bound<'py, PyAny>> {
    let positional = PyList::empty(py);
    for (name, tree) in &call.positional {
        positional.append((name.as_deref(), of_tree(py, tree)?))?;
    }
    let keyword = PyList::empty(py);
    for (name, tree) in &call.keyword {
        keyword.append((name.as_str(), of_tree(py, tree)?))?;
    }
    Ok((positional, keyword, of_tree(py, &call.output)?).into_pyobject(py)?.into_any())
}

fn of_tree<'py>(py: Python<'py>, tree: &CallTree) -> PyResult<Bound<'py, PyAny>> {
    let CallTree::Node(kind, children) = tree else { return Ok(py.None().into_bound(py)) };
    let children: Vec<Bound<'py, PyAny>> = children.iter().map(|child| of_tree(py, child)).collect::<PyResult<_>>()?;
    let children = PyTuple::new(py, children)?;
    let node = match kind {
        CallKind::Tuple => ("tuple", children).into_pyobject(py)?,
        CallKind::List => ("list", children).into_pyobject(py)?,
        CallKind::Deque(most) => ("deque", *most, children).into_pyobject(py)?,
        CallKind::Dict(name, keys) => {
            let keys: Vec<Bound<'py, PyAny>> = keys
                .iter()
                .map(|key| match key {
                    CallKey::Text(text) => Ok(text.into_pyobject(py)?.into_any()),
                    CallKey::Int(number) => Ok(number.into_pyobject(py)?.into_any()),
                })
                .collect::<PyResult<_>>()?;
            ("dict", *name, keys, children).into_pyobject(py)?
        }
        CallKind::NamedTuple { type_name, fields } => {
            ("namedtuple", type_name.as_str(), fields.clone(), children).into_pyobject(py)?
        }
        CallKind::Object { type_name, fields, absent } => {
            ("object", type_name.as_str(), fields.clone(), absent.clone(), children).into_pyobject(py)?
        }
        CallKind::Opaque { type_name } => ("opaque", type_name.as_str(), children).into_pyobject(py)?,
    };
    Ok(node.into_any())
}
