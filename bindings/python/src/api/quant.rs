//! `rapt.quantize`, `rapt.dequantize` and `rapt.quant.analyze` on numpy arrays and torch tensors: conversion of arguments, no
//! arithmetic.
//!
//! Codes and scales are new tensors of the kind of `x`. Two 4-bit codes share a byte of a uint8 tensor here; `rapt.quant` shows
//! torch's float4_e2m1fn_x2 in its place.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyInt, PyString};
use rapt::quant::{self, Form, Format, Given, Granularity, Parts, QuantError, QuantizedView, ScaleLayout, Scheme};
use rapt::{DType, Device, Error, ErrorKind, Shape, ViewMut};

use crate::api::options;
use crate::errors::{Failure, Wording, guard, hints};
use crate::kind::Kind;
use crate::tensors::{self, Operand, torch};

type Any<'a, 'py> = &'a Bound<'py, PyAny>;
type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

const GRANULARITIES: &str = "None, 'tensor', 'head', 'token', 'channel', 'block'";

fn repr(object: &Bound<'_, PyAny>) -> String {
    object.repr().map_or_else(|_| "something without a repr".to_owned(), |text| text.to_string())
}

/// The refusal of rapt-quant, with the expression that corrects it.
pub(crate) fn refusal(error: &QuantError, kind: Kind) -> Failure {
    let hint = match error {
        QuantError::Core(Error::UnsupportedDtype { tensor, .. }) => hints::cast(tensor, DType::F32, kind),
        QuantError::Core(Error::OtherDtype { tensor, expected, .. }) => {
            format!("{tensor} of dtype {}, as `rapt.quantize` makes it", hints::dtype_expression(*expected, kind))
        }
        QuantError::Core(Error::ShapeMismatch { tensor, expected, .. }) => {
            format!("`{tensor}.reshape({})`, if its numbers stand in that order", tuple(expected))
        }
        QuantError::NoCode { what, .. } => {
            let library = if kind == Kind::Torch { "torch" } else { "numpy" };
            let number = if *what == "NaN" { "a number" } else { "finite numbers" };
            format!("`{library}.nan_to_num(x)` if {number} may stand in its place, or format 'e5m2', which holds it")
        }
        QuantError::Missing { part, .. } => format!("`{part}=`, the tensor that the codes were made with"),
        QuantError::Unexpected { part, .. } => format!("`{part}=None`"),
        _ => String::new(),
    };
    Failure::binding(error.kind(), error.to_string(), hint)
}

fn tuple(shape: &Shape) -> String {
    let sizes: Vec<_> = shape.iter().map(ToString::to_string).collect();
    if sizes.len() == 1 { format!("({},)", sizes[0]) } else { format!("({})", sizes.join(", ")) }
}

fn text(given: Any<'_, '_>) -> Result<Option<String>, Failure> {
    Ok(given.cast::<PyString>().ok().map(|text| text.to_cow().map(std::borrow::Cow::into_owned)).transpose()?)
}

fn format_of(given: Any<'_, '_>) -> Result<Format, Failure> {
    let found = text(given)?.and_then(|name| Format::from_name(&name));
    found.ok_or_else(|| {
        let names: Vec<_> = Format::ALL.iter().map(|format| format!("'{format}'")).collect();
        Failure::option("format", repr(given), names.join(", "))
    })
}

fn block_size_of(given: Any<'_, '_>) -> Result<usize, Failure> {
    let refuse = || Failure::option("block_size", repr(given), "None, or an int from 1 up");
    if given.is_instance_of::<PyBool>() || !given.is_instance_of::<PyInt>() {
        return Err(refuse());
    }
    given.extract::<usize>().map_err(|_| refuse())
}

/// What a `rapt.Quantized` says of its parts.
pub(crate) fn scheme_of(quantized: Any<'_, '_>) -> Result<Scheme, Failure> {
    let given = |name| quantized.getattr(name).map(|it| (!it.is_none()).then_some(it));
    let (format, scale_layout) = (quantized.getattr("format")?, quantized.getattr("scale_layout")?);
    SchemeArguments { format, granularity: given("granularity")?, block_size: given("block_size")?, scale_layout }
        .scheme()
}

/// A scheme of scales that lie plain.
pub(crate) fn scheme_from(
    format: Any<'_, '_>,
    granularity: Option<Any<'_, '_>>,
    block_size: Option<Any<'_, '_>>,
) -> Result<Scheme, Failure> {
    let scale_layout = PyString::new(format.py(), "plain").into_any();
    let (granularity, block_size) = (granularity.cloned(), block_size.cloned());
    SchemeArguments { format: format.clone(), granularity, block_size, scale_layout }.scheme()
}

/// What `rapt.quantize` takes beside the tensor.
#[derive(FromPyObject)]
pub(crate) struct SchemeArguments<'py> {
    #[pyo3(item)]
    format: Bound<'py, PyAny>,
    #[pyo3(item)]
    granularity: Option<Bound<'py, PyAny>>,
    #[pyo3(item)]
    block_size: Option<Bound<'py, PyAny>>,
    #[pyo3(item)]
    scale_layout: Bound<'py, PyAny>,
}

impl SchemeArguments<'_> {
    fn scheme(&self) -> Result<Scheme, Failure> {
        let format = format_of(&self.format)?;
        let block_size = self.block_size.as_ref().map(block_size_of).transpose()?;
        let name =
            self.granularity.as_ref().map(|given| Ok::<_, Failure>(text(given)?.unwrap_or_default())).transpose()?;
        let granularity = match (name.as_deref(), block_size) {
            (None, None) => None,
            (Some("tensor"), None) => Some(Granularity::Tensor),
            (Some("head"), None) => Some(Granularity::Head),
            (Some("token"), None) => Some(Granularity::Token),
            (Some("channel"), None) => Some(Granularity::Channel),
            (Some("block"), Some(size)) => Some(Granularity::Block(size)),
            (None, Some(size)) if format.own_block_size().is_some() => Some(Granularity::Block(size)),
            (Some("block"), None) => match format.own_block_size() {
                Some(size) => Some(Granularity::Block(size)),
                None => return Err(Failure::option("block_size", "None", "an int from 1 up with granularity='block'")),
            },
            (None | Some("tensor" | "head" | "token" | "channel"), Some(size)) => {
                return Err(Failure::option("block_size", size.to_string(), "None, but with granularity='block'"));
            }
            (Some(_), _) => {
                let given = self.granularity.as_ref().map_or_else(String::new, repr);
                return Err(Failure::option("granularity", given, GRANULARITIES));
            }
        };
        let layout = match text(&self.scale_layout)?.as_deref() {
            Some("plain") => ScaleLayout::Plain,
            Some("swizzle_32_4_4") => ScaleLayout::Swizzle32x4x4,
            _ => {
                let got = repr(&self.scale_layout);
                return Err(Failure::option("scale_layout", got, "'plain', 'swizzle_32_4_4'"));
            }
        };
        Scheme::new(format, granularity, layout).map_err(|error| refusal(&error, Kind::Numpy))
    }
}

/// numpy or torch: the kind of the first tensor of the call, which errors call `name`.
fn kind_of(wording: &Cell<Wording>, name: &str, object: Any<'_, '_>) -> Result<Kind, Failure> {
    match tensors::kind_of(object)? {
        Some(kind @ (Kind::Numpy | Kind::Torch)) => {
            wording.set(Wording { kind, ..wording.get() });
            Ok(kind)
        }
        _ => {
            let message =
                format!("{name} is a {}: allowed are numpy arrays and torch tensors", tensors::type_name(object));
            Err(Failure::binding(ErrorKind::Kind, message, format!("`numpy.asarray({name})`")))
        }
    }
}

/// A tensor in host memory.
pub(crate) fn read(
    name: &'static str,
    object: Any<'_, '_>,
    kind: Kind,
    first: Any<'_, '_>,
) -> Result<Operand, Failure> {
    let operand = tensors::read(name, object, kind, first)?;
    in_host_memory(&operand)?;
    Ok(operand)
}

pub(crate) fn in_host_memory(operand: &Operand) -> Result<(), Failure> {
    let Operand { name, device, .. } = operand;
    if *device == Device::Cpu {
        return Ok(());
    }
    let message = format!("{name} is on {device}: tensors are quantized in host memory");
    Err(Failure::binding(ErrorKind::Device, message, format!("`{name}.cpu()`")))
}

pub(crate) fn guarded<T>(
    py: Python<'_>,
    names: &'static hints::Names,
    body: impl FnOnce(&Cell<Wording>) -> Result<T, Failure>,
) -> PyResult<T> {
    let wording = Cell::new(Wording { names, kind: Kind::Numpy });
    guard(py, &wording, || body(&wording))
}

/// A new tensor of the kind of `like`, filled by `fill` through a view of it.
fn made<'py>(
    name: &'static str,
    kind: Kind,
    like: Any<'_, 'py>,
    (dtype, shape): (DType, Shape),
    fill: impl FnOnce(&mut ViewMut<'_>) -> Result<(), Failure>,
) -> Result<Bound<'py, PyAny>, Failure> {
    let (product, mut operand) = tensors::allocate(name, kind, like, Device::Cpu, dtype, shape)?;
    fill(&mut operand.view_mut()?)?;
    drop(operand);
    product.finish(like.py())
}

/// The bytes of a tensor whose elements have one.
fn of_bytes<'py>(
    name: &'static str,
    kind: Kind,
    like: Any<'_, 'py>,
    (dtype, shape): (DType, Shape),
    bytes: &[u8],
) -> Result<Bound<'py, PyAny>, Failure> {
    made(name, kind, like, (dtype, shape), |view| {
        let mut view = view.reinterpreted(name, DType::U8)?;
        let line_len = shape.last().copied().unwrap_or(1).max(1);
        for (line, row) in bytes.chunks_exact(line_len).enumerate() {
            view.write_line(name, line, row.iter().copied())?;
        }
        Ok(())
    })
}

/// Codes, scales, zero points, the global scale, the granularity and the block size: the parts of `rapt.Quantized`.
pub(crate) type PyParts<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>, Option<f64>, &'static str, Option<usize>);

/// Codes and scales of `x`; see `rapt.quantize`.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "what is made of a Python object is owned")]
#[pyo3(signature = (x, scheme, scale = None, zero_point = None))]
pub(crate) fn quantize<'py>(
    py: Python<'py>,
    x: Any<'_, 'py>,
    scheme: SchemeArguments<'py>,
    scale: Maybe<'_, 'py>,
    zero_point: Maybe<'_, 'py>,
) -> PyResult<PyParts<'py>> {
    guarded(py, &hints::QUANTIZE, |wording| {
        let kind = kind_of(wording, "x", x)?;
        let scheme = scheme.scheme()?;
        let operand = read("x", x, kind, x)?;
        if kind == Kind::Torch {
            torch::refuse_gradients(py, [("x", x)])?;
        }
        let scale = scale.map(|scale| read("scale", scale, kind, x)).transpose()?;
        let zero_point = zero_point.map(|zero_point| read("zero_point", zero_point, kind, x)).transpose()?;
        let given = match (&scale, &zero_point) {
            (Some(scale), zero_point) => {
                let zero_point = zero_point.as_ref().map(Operand::view).transpose()?;
                Some(Given { scale: scale.view()?, zero_point })
            }
            (None, Some(_)) => {
                let format = scheme.format();
                let error = match format.has_zero_point() {
                    true => QuantError::Missing { part: "scale", format },
                    false => QuantError::Unexpected { part: "zero_point", format },
                };
                return Err(refusal(&error, kind));
            }
            (None, None) => None,
        };
        let view = operand.view()?;
        let quantized = py.detach(|| quant::quantize(&view, scheme, given.as_ref()));
        let quantized = quantized.map_err(|error| refusal(&error, kind))?;
        let (form, format) = (*quantized.form(), quantized.form().format());
        let codes = of_bytes("codes", kind, x, (format.code_dtype(), *form.codes_shape()), quantized.codes())?;
        let scale_form = (format.scale_dtype(), *form.scale_shape());
        let scale = match (quantized.scale_f32(), quantized.scale_bytes()) {
            (Some(scale), _) => made("scale", kind, x, scale_form, |view| {
                let line_len = form.scale_shape().last().copied().unwrap_or(1).max(1);
                for (line, row) in scale.chunks_exact(line_len).enumerate() {
                    view.write_line("scale", line, row.iter().copied())?;
                }
                Ok(())
            })?,
            (_, bytes) => of_bytes("scale", kind, x, scale_form, bytes.unwrap_or(&[]))?,
        };
        let zero_point = quantized.zero_point();
        let zero_point = zero_point
            .map(|bytes| of_bytes("zero_point", kind, x, (DType::U8, *form.scale_shape()), bytes))
            .transpose()?;
        let granularity = scheme.granularity();
        let global_scale = quantized.global_scale().map(f64::from);
        Ok((codes, scale, zero_point, global_scale, granularity.name(), granularity.block_size()))
    })
}

/// The parts of a quantized tensor as `rapt.Quantized` holds them.
#[derive(FromPyObject)]
pub(crate) struct PartsArguments<'py> {
    #[pyo3(item)]
    codes: Bound<'py, PyAny>,
    #[pyo3(item)]
    scale: Option<Bound<'py, PyAny>>,
    #[pyo3(item)]
    zero_point: Option<Bound<'py, PyAny>>,
    #[pyo3(item)]
    global_scale: Option<Bound<'py, PyAny>>,
    #[pyo3(item)]
    shape: Bound<'py, PyAny>,
}

/// The parts, checked against each other and on one device; `then` gets them with the kind of the codes.
pub(crate) fn checked<T>(
    wording: &Cell<Wording>,
    scheme: &SchemeArguments<'_>,
    parts: &PartsArguments<'_>,
    then: impl FnOnce(Kind, &Operand, &QuantizedView<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let kind = kind_of(wording, "codes", &parts.codes)?;
    let scheme = scheme.scheme()?;
    let sizes: Vec<usize> = parts.shape.extract().map_err(|_| {
        Failure::option("shape", repr(&parts.shape), "a tuple of sizes, those of the numbers that the codes stand for")
    })?;
    let form = Form::new(scheme, tensors::shape("codes", &sizes)?).map_err(|error| refusal(&error, kind))?;
    let codes = tensors::read("codes", &parts.codes, kind, &parts.codes)?;
    let tensor = |name, object: &Bound<'_, PyAny>| {
        let part = tensors::read(name, object, kind, &parts.codes)?;
        if part.device == codes.device {
            return Ok::<_, Failure>(part);
        }
        let message = format!(
            "{name} is on {}, codes on {}: the parts of a quantized tensor lie together",
            part.device, codes.device
        );
        Err(Failure::binding(ErrorKind::Device, message, format!("`{name}.to(codes.device)`")))
    };
    let scale = parts.scale.as_ref().map(|it| tensor("scale", it)).transpose()?;
    let zero_point = parts.zero_point.as_ref().map(|it| tensor("zero_point", it)).transpose()?;
    let global_scale = parts.global_scale.as_ref().map(global_scale).transpose()?;
    let parts = Parts {
        codes: codes.view()?,
        scale: scale.as_ref().map(Operand::view).transpose()?,
        zero_point: zero_point.as_ref().map(Operand::view).transpose()?,
        global_scale,
    };
    let view = QuantizedView::new(form, parts).map_err(|error| refusal(&error, kind))?;
    then(kind, &codes, &view)
}

/// A number that float32 holds.
pub(crate) fn global_scale(given: &Bound<'_, PyAny>) -> Result<f32, Failure> {
    let allowed = "a float that float32 holds exactly";
    let number = options::real("global_scale", Some(given))?.unwrap_or(f64::NAN);
    let single = number as f32;
    if f64::from(single) == number { Ok(single) } else { Err(Failure::option("global_scale", repr(given), allowed)) }
}

/// Whether these parts are a quantized tensor, and how many bytes; see `rapt.Quantized`.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "what is made of a Python object is owned")]
pub(crate) fn quantized_check<'py>(
    py: Python<'py>,
    scheme: SchemeArguments<'py>,
    parts: PartsArguments<'py>,
) -> PyResult<(usize, &'static str, Option<usize>)> {
    guarded(py, &hints::DEQUANTIZE, |wording| {
        checked(wording, &scheme, &parts, |_, _, view| {
            let granularity = view.form().scheme().granularity();
            Ok((view.form().nbytes(), granularity.name(), granularity.block_size()))
        })
    })
}

/// The numbers of a quantized tensor; see `rapt.dequantize`.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "what is made of a Python object is owned")]
#[pyo3(signature = (scheme, parts, dtype = None))]
pub(crate) fn dequantize<'py>(
    py: Python<'py>,
    scheme: SchemeArguments<'py>,
    parts: PartsArguments<'py>,
    dtype: Maybe<'_, 'py>,
) -> PyResult<Bound<'py, PyAny>> {
    guarded(py, &hints::DEQUANTIZE, |wording| {
        let dtype = options::dtype("dtype", dtype)?.unwrap_or(DType::F32);
        checked(wording, &scheme, &parts, |kind, codes, view| {
            in_host_memory(codes)?;
            if !dtype.is_computed() {
                let allowed = rapt::COMPUTED.to_vec();
                return Err(Error::UnsupportedDtype { tensor: "out", got: dtype, allowed }.into());
            }
            made("out", kind, &parts.codes, (dtype, *view.form().shape()), |out| {
                py.detach(|| view.dequantize_into(out)).map_err(|error| refusal(&error, kind))
            })
        })
    })
}

/// Figures of `x` and of each way to quantize it; see `rapt.quant.analyze`.
#[pyfunction]
#[allow(clippy::needless_pass_by_value, reason = "what is made of a Python object is owned")]
pub(crate) fn quantized_analysis<'py>(
    py: Python<'py>,
    x: Any<'_, 'py>,
    formats: Vec<Bound<'py, PyAny>>,
    block_size: Any<'_, 'py>,
) -> PyResult<Bound<'py, PyDict>> {
    guarded(py, &hints::QUANTIZE, |wording| {
        let kind = kind_of(wording, "x", x)?;
        let operand = read("x", x, kind, x)?;
        let formats = formats.iter().map(format_of).collect::<Result<Vec<_>, _>>()?;
        let block_size = block_size_of(block_size)?;
        let view = operand.view()?;
        let analysis = py.detach(|| quant::analyze(&view, &formats, block_size));
        let analysis = analysis.map_err(|error| refusal(&error, kind))?;
        let figures = PyDict::new(py);
        for (name, value) in [
            ("min", analysis.min),
            ("max", analysis.max),
            ("range", analysis.range()),
            ("variance", analysis.variance),
            ("mean_abs", analysis.mean_abs),
            ("sparsity", analysis.sparsity),
            ("outlier_share", analysis.outlier_share),
        ] {
            figures.set_item(name, value)?;
        }
        figures.set_item("outliers", analysis.outliers)?;
        figures.set_item("quartiles", analysis.quartiles)?;
        let candidates: Vec<_> = analysis
            .candidates
            .iter()
            .map(|it| {
                let granularity = it.granularity;
                let scheme = (it.format.name(), granularity.name(), granularity.block_size());
                (scheme, it.mse, it.relative_l2, it.nbytes, it.is_recommended)
            })
            .collect();
        figures.set_item("candidates", candidates)?;
        Ok(figures)
    })
}
