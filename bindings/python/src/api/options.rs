//! Options as Python gives them: parsed strictly, so that a misspelling or an accident never runs as something else.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyString, PyTuple};
use rapt::{Causal, Compute, DType, Device, TensorLayout, Window};

use crate::errors::Failure;
use crate::tensors::{numpy, torch};

type Any<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

fn repr(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| "something without a repr".to_owned(), |text| text.to_string())
}

/// `None | False | True | "top_left" | "bottom_right"`.
pub(crate) fn causal(option: &'static str, given: Any<'_, '_>) -> Result<Option<Causal>, Failure> {
    const ALLOWED: &str = "None, False, True, 'top_left' (PyTorch's is_causal, what True means), 'bottom_right' \
                           (flash-attention's)";
    let Some(given) = given else { return Ok(None) };
    if let Ok(yes) = given.cast_exact::<PyBool>() {
        return Ok(yes.is_true().then_some(Causal::TopLeft));
    }
    if let Ok(text) = given.cast::<PyString>() {
        match &*text.to_cow()? {
            "top_left" => return Ok(Some(Causal::TopLeft)),
            "bottom_right" => return Ok(Some(Causal::BottomRight)),
            _ => {}
        }
    }
    Err(Failure::option(option, repr(given), ALLOWED))
}

/// `(left, right)`, each None or a count from 0 up.
pub(crate) fn window(option: &'static str, given: Any<'_, '_>) -> Result<Window, Failure> {
    const ALLOWED: &str = "None, or (left, right) with each None (unbounded) or an int from 0 up";
    let Some(given) = given else { return Ok(Window::default()) };
    let refuse = || Failure::option(option, repr(given), ALLOWED);
    if !(given.is_instance_of::<PyTuple>() || given.is_instance_of::<PyList>()) || given.len()? != 2 {
        return Err(refuse());
    }
    let end = |at: usize| {
        let end = given.get_item(at)?;
        if end.is_none() {
            return Ok(None);
        }
        if end.is_instance_of::<PyBool>() {
            return Err(refuse());
        }
        let end: i64 = end.extract().map_err(|_| refuse())?;
        // Beyond 2^62 no tensor reaches: such a window is unbounded in fact, and stays exact as a number.
        usize::try_from(end).ok().filter(|n| *n <= 1 << 62).map(Some).ok_or_else(refuse)
    };
    Ok(Window { left: end(0)?, right: end(1)? })
}

/// A real number (no bool, no string, no tensor); whether it is finite is rapt-core's to check.
pub(crate) fn real(option: &'static str, given: Any<'_, '_>) -> Result<Option<f64>, Failure> {
    let Some(given) = given else { return Ok(None) };
    if let Ok(number) = given.cast_exact::<PyFloat>() {
        return Ok(Some(number.value()));
    }
    let allowed = if option == "softcap" { "None, or a finite number greater than 0" } else { "any finite number" };
    let refuse = || Failure::option(option, repr(given), allowed);
    if given.is_instance_of::<PyBool>() {
        return Err(refuse());
    }
    if !given.is_instance_of::<PyFloat>() && !given.is_instance_of::<PyInt>() {
        let real = given.py().import("numbers")?.getattr("Real")?;
        if !given.is_instance(&real)? {
            return Err(refuse());
        }
    }
    given.extract::<f64>().map(Some).map_err(|_| refuse())
}

/// `"bhsd" | "bshd"`.
pub(crate) fn layout(option: &'static str, given: Any<'_, '_>) -> Result<TensorLayout, Failure> {
    let Some(given) = given else { return Ok(TensorLayout::Bhsd) };
    if let Ok(text) = given.cast::<PyString>() {
        match &*text.to_cow()? {
            "bhsd" => return Ok(TensorLayout::Bhsd),
            "bshd" => return Ok(TensorLayout::Bshd),
            _ => {}
        }
    }
    Err(Failure::option(
        option,
        repr(given),
        "'bhsd' ([batch, heads, len, head_dim]), 'bshd' ([batch, len, heads, head_dim])",
    ))
}

/// `"exact" | "int8" | "fp8"`; what is not served of them is rapt-core's to refuse.
pub(crate) fn compute(option: &'static str, given: Any<'_, '_>) -> Result<Compute, Failure> {
    let Some(given) = given else { return Ok(Compute::Exact) };
    let named = match given.cast::<PyString>() {
        Ok(text) => Compute::from_name(&text.to_cow()?),
        Err(_) => None,
    };
    named.ok_or_else(|| {
        Failure::option(
            option,
            repr(given),
            "'exact', 'int8' (an approximation, on int8 codes of k and v), 'fp8' (not served)",
        )
    })
}

/// A dtype of torch, of numpy, or a name.
pub(crate) fn dtype(option: &'static str, given: Any<'_, '_>) -> Result<Option<DType>, Failure> {
    let Some(given) = given else { return Ok(None) };
    let found = if let Ok(text) = given.cast::<PyString>() {
        DType::from_name(&text.to_cow()?)
    } else if let Some(dtype) = torch::dtype_of(given) {
        Some(dtype)
    } else {
        numpy::dtype_like(given)
    };
    let names = || rapt::COMPUTED.iter().map(|d| format!("{:?}", d.name())).collect::<Vec<_>>().join(", ");
    found.filter(|dtype| *dtype != DType::Unknown).map(Some).ok_or_else(|| {
        Failure::option(option, repr(given), format!("None, {}, or such a dtype of torch or numpy", names()))
    })
}

/// Where tensors of the host are computed: `"cpu"`, `"vulkan"` or `"vulkan:N"`.
pub(crate) fn device(option: &'static str, given: Any<'_, '_>) -> Result<Option<Device>, Failure> {
    let Some(given) = given else { return Ok(None) };
    let named = match given.cast::<PyString>() {
        Ok(text) => Device::from_name(&text.to_cow()?),
        Err(_) => None,
    };
    match named {
        Some(device @ (Device::Cpu | Device::Vulkan(_))) => Ok(Some(device)),
        _ => {
            let allowed =
                "None (where the tensors lie), 'cpu', 'vulkan', 'vulkan:N' (the adapters of `rapt.vulkan.adapters()`)";
            Err(Failure::option(option, repr(given), allowed))
        }
    }
}

/// A bool and nothing else.
pub(crate) fn flag(option: &'static str, given: &Bound<'_, PyAny>) -> Result<bool, Failure> {
    match given.cast_exact::<PyBool>() {
        Ok(yes) => Ok(yes.is_true()),
        Err(_) => Err(Failure::option(option, repr(given), "True, False")),
    }
}
