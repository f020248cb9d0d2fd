//! q, k or v of `rapt.attention` as codes of a quantized format: raw ones with their factors beside them, or a `rapt.Quantized`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use rapt::quant::Scheme;
use rapt::{Codes, ErrorKind, Format, ScaleLayout};

use crate::api::measured::PyErrors;
use crate::api::quant;
use crate::errors::Failure;
use crate::tensors::{self, Operand, numpy, torch};

type Maybe<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// What a `rapt.Quantized` holds. Its parts were checked against each other when it was made, and its tensors are checked again as
/// those of any call are.
pub(crate) struct Opened<'py> {
    /// Bytes where two codes share one.
    pub(crate) codes: Bound<'py, PyAny>,
    pub(crate) scale: Bound<'py, PyAny>,
    pub(crate) zero_point: Option<Bound<'py, PyAny>>,
    global_scale: Option<f32>,
    scheme: Scheme,
    /// The last size of the numbers.
    head_dim: Option<usize>,
    object: Bound<'py, PyAny>,
}

fn is_quantized(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if torch::is_exactly_tensor(object) || numpy::is_exactly_array(object) {
        return Ok(false);
    }
    object.is_instance(CLASS.import(object.py(), "rapt.quant", "Quantized")?)
}

impl<'py> Opened<'py> {
    /// What `object` holds if it is a `rapt.Quantized`, beside which none of these `parts` may stand.
    pub(crate) fn of(
        object: &Bound<'py, PyAny>,
        parts: [(&'static str, Maybe<'_, 'py>); 2],
    ) -> Result<Option<Self>, Failure> {
        if !is_quantized(object)? {
            return Ok(None);
        }
        if let Some((part, given)) = parts.into_iter().find_map(|(part, given)| Some((part, given?))) {
            let allowed = "None: what it belongs to is a rapt.Quantized, which holds its own";
            return Err(Failure::option(part, format!("a {}", tensors::type_name(given)), allowed));
        }
        let scheme = quant::scheme_of(object)?;
        let part = |name| object.getattr(name).map(|part| (!part.is_none()).then_some(part));
        let codes = object.getattr("codes")?;
        Ok(Some(Opened {
            codes: if scheme.format().codes_per_byte() > 1 { torch::as_bytes(codes)? } else { codes },
            scale: object.getattr("scale")?,
            zero_point: part("zero_point")?,
            global_scale: part("global_scale")?.as_ref().map(quant::global_scale).transpose()?,
            scheme,
            head_dim: object.getattr("shape")?.extract::<Vec<usize>>()?.last().copied(),
            object: object.clone(),
        }))
    }
}

impl<'py> Opened<'py> {
    /// The format of its codes.
    pub(crate) fn format(&self) -> Format {
        self.scheme.format()
    }

    /// Which elements share a scale.
    pub(crate) fn granularity(&self) -> rapt::Granularity {
        self.scheme.granularity()
    }

    /// Refuses scales that do not lie as the rows of a cache do.
    pub(crate) fn in_rows(&self) -> Result<(), Failure> {
        if self.scheme.scale_layout() == ScaleLayout::Plain {
            return Ok(());
        }
        let got = format!("'{}'", self.scheme.scale_layout().name());
        Err(Failure::option("scale_layout", got, "'plain': in a cache the scales of a key lie where the key does"))
    }

    /// One more factor for the whole tensor.
    pub(crate) fn global_scale(&self) -> Option<f32> {
        self.global_scale
    }

    /// What was measured of its errors, where something was.
    pub(crate) fn errors(&self) -> Result<Option<Py<PyErrors>>, Failure> {
        let errors = self.object.getattr("errors")?;
        if errors.is_none() {
            return Ok(None);
        }
        let refuse = || Failure::option("errors", tensors::type_name(&errors), "None, or rapt.quant.Errors");
        errors.cast::<PyErrors>().map(|errors| Some(errors.clone().unbind())).map_err(|_| refuse())
    }

    /// What it was made of, where that is at hand.
    pub(crate) fn original(&self) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        Ok(Some(self.object.getattr("original")?).filter(|original| !original.is_none()))
    }

    /// Its tensors.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Bound<'py, PyAny>> {
        [Some(&self.codes), Some(&self.scale), self.zero_point.as_ref()].into_iter().flatten()
    }

    /// The last size of its numbers.
    pub(crate) fn head_dim(&self) -> Option<usize> {
        self.head_dim
    }
}

/// What makes numbers of `tensor`; `None` where it is no codes, or where rapt-core says what is missing.
pub(crate) fn codes_of<'a>(
    tensor: &'a Operand,
    descale: Option<&'a Operand>,
    zero_point: Option<&'a Operand>,
    opened: Option<&Opened<'_>>,
) -> Result<Option<Box<Codes<'a>>>, Failure> {
    let found = opened.map(|opened| opened.scheme.format()).or_else(|| Format::of_dtype(tensor.dtype));
    let (format, descale) = match (found, descale) {
        (Some(format), Some(descale)) => (format, descale),
        // A zero point alone makes no numbers.
        (Some(_), None) => return Ok(None),
        (None, _) => {
            let given = descale.or(zero_point).filter(|_| tensor.dtype.is_computed());
            return given.map_or(Ok(None), |part| Err(beside_numbers(tensor, part)));
        }
    };
    let mut codes = Codes::new(format, descale.view()?);
    codes.zero_point = zero_point.map(Operand::view).transpose()?;
    if let Some(Opened { global_scale, scheme, head_dim, .. }) = opened {
        codes.global_scale = *global_scale;
        codes.granularity = Some(scheme.granularity());
        codes.scale_layout = scheme.scale_layout();
        codes.head_dim = *head_dim;
    }
    Ok(Some(Box::new(codes)))
}

/// The refusal of a factor beside a tensor whose elements are what they are.
fn beside_numbers(tensor: &Operand, part: &Operand) -> Failure {
    let (tensor, dtype, part) = (tensor.name, tensor.dtype, part.name);
    let message = format!("{part} was given, and {tensor} has dtype {dtype}, whose elements are numbers and no codes");
    Failure::binding(ErrorKind::Option, message, format!("`{part}=None`, or `rapt.quantize({tensor}, …)` as {tensor}"))
}
