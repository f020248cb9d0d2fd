//! `rapt.mlx.attention`: a request on arrays of MLX as kernels for `mx.fast.metal_kernel`.
//!
//! An array says its sizes and its dtype; its strides are told to the kernel, when MLX computes it. So a request is planned as if its arrays lay row by row.
//! Deliberately absent: MLX, which Python has.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use rapt::metal::{Dimensions, MlxKernel, mlx};
use rapt::{DType, Device, Error, ErrorKind, Spec, TensorForm, TensorLayout};

use crate::api::attention::{self, Request};
use crate::engine::Home;
use crate::errors::{Failure, Wording, guard, hints};
use crate::kind::Kind;
use crate::tensors;

type Object<'a, 'py> = &'a Bound<'py, PyAny>;

/// An array's form, as if it lay row by row.
fn form(name: &'static str, array: Object<'_, '_>) -> Result<TensorForm, Failure> {
    let class: String = array.get_type().getattr("__module__")?.extract()?;
    if !class.starts_with("mlx") {
        let expected = "mlx array".to_owned();
        return Err(Error::KindMismatch { tensor: name, expected, got: tensors::type_name(array) }.into());
    }
    let sizes: Vec<usize> = array.getattr("shape")?.extract()?;
    let shape = tensors::shape(name, &sizes)?;
    let dtype = array.getattr("dtype")?.str()?.to_string();
    // MLX says bool_.
    let dtype = dtype.rsplit('.').next().unwrap_or_default().trim_end_matches('_');
    let dtype = DType::from_name(dtype).ok_or_else(|| Error::UnknownDtype { tensor: name, got: dtype.to_owned() })?;
    let overflow = Error::Overflow { tensor: name, shape, strides: [].into() };
    let strides = shape.contiguous().ok_or(overflow)?;
    Ok(TensorForm::new(dtype, shape, strides, Device::Mps(0)))
}

/// What of `rapt.attention` these arrays do not take.
fn refuse(request: &Request<'_, '_>) -> Result<(), Failure> {
    let Request { out, tolerance, device, .. } = request;
    let given = [("out", out), ("tolerance", tolerance), ("device", device)];
    if let Some((name, _)) = given.into_iter().find(|(_, given)| given.is_some()) {
        let allowed = "None: MLX's kernels write new arrays, where it computes";
        return Err(Failure::option(name, "a value", allowed));
    }
    if request.has_parts() {
        return Err(Failure::binding(
            ErrorKind::Unsupported,
            "codes are not read in Metal's language",
            "`q.dequantize()`",
        ));
    }
    Ok(())
}

/// The kernels of a request and what they take, as a dict.
pub(crate) fn kernels<'py>(py: Python<'py>, _: &Home, request: &Request<'_, 'py>) -> PyResult<Bound<'py, PyAny>> {
    let wording = Cell::new(Wording { names: &hints::ATTENTION, kind: Kind::DlPack });
    guard(py, &wording, || {
        refuse(request)?;
        let (options, return_lse) = attention::parse(request)?;
        let maybe = |name, array: Option<Object<'_, '_>>| array.map(|array| form(name, array)).transpose();
        let (q, k, v) = (form("q", request.q)?, form("k", request.k)?, form("v", request.v)?);
        let (mask, sinks) = (maybe("mask", request.mask)?, maybe("sinks", request.sinks)?);
        let slopes = maybe("alibi_slopes", request.alibi_slopes)?;
        let rank = q.shape.len();
        let mut builder = Spec::builder(q, k, v, &options);
        builder.mask(mask).sinks(sinks).alibi_slopes(slopes).return_lse(return_lse);
        let spec = builder.build()?;
        if spec.kv_len() == 0 {
            let message = "k and v have no keys, and MLX binds no array without elements";
            return Err(Failure::binding(ErrorKind::Unsupported, message, "`mx.zeros(...)` where there is no key"));
        }
        let bshd = options.layout == TensorLayout::Bshd;
        let of = |form: &TensorForm| Dimensions { rank: form.shape.len(), bshd };
        let of_mask = Dimensions { rank: mask.map_or(0, |mask| mask.shape.len()), bshd: false };
        let launch = mlx(&spec, [of(&q), of(&k), of(&v), of_mask])?;
        let answer = PyDict::new(py);
        let kernels = launch.kernels.iter().map(|kernel| kernel_of(py, kernel)).collect::<PyResult<Vec<_>>>()?;
        answer.set_item("kernels", PyList::new(py, kernels)?)?;
        answer.set_item("params", PyBytes::new(py, &launch.params))?;
        answer.set_item("partials", launch.partials)?;
        let tuple = |shape: &rapt::Shape| PyTuple::new(py, shape.iter());
        answer.set_item("out", (tuple(&spec.out_shape(rank))?, spec.out.dtype.name()))?;
        answer.set_item("lse", spec.lse.map(|_| tuple(&spec.lse_shape(rank))).transpose()?)?;
        Ok(answer.into_any())
    })
}

fn kernel_of<'py>(py: Python<'py>, kernel: &MlxKernel) -> PyResult<Bound<'py, PyDict>> {
    let of = PyDict::new(py);
    of.set_item("name", &kernel.name)?;
    of.set_item("input_names", &kernel.inputs)?;
    of.set_item("output_names", &kernel.outputs)?;
    of.set_item("header", &kernel.header)?;
    of.set_item("source", &kernel.source)?;
    of.set_item("grid", PyTuple::new(py, kernel.grid)?)?;
    of.set_item("threadgroup", PyTuple::new(py, kernel.threadgroup)?)?;
    Ok(of)
}
