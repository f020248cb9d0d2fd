//! A call as [`decide`](super::decide) needs it, read off operands or probed from torch's objects, and a refusal as a typed error.

use std::convert::Infallible;
use std::fmt;

use pyo3::basic::CompareOp;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyInt, PyTuple};
use rapt::{COMPUTED, DType, Device, Error, ErrorKind};

use super::call::{self, Given};
use super::decide::{
    self, Allowed, Invalid, Kernel, Modes, Nest, Order, Reason, Refusal, Request, Size, Stock, Tensor, Verdict,
};
use super::frame::{Frame, Inputs};
use crate::errors::Failure;
use crate::tensors::Operand;
use crate::tensors::torch::{self, Obstacle};

/// The options of PyTorch's signature.
#[derive(Clone, Copy)]
pub(crate) struct Flags {
    pub(crate) dropout_p: f64,
    pub(crate) is_causal: bool,
    pub(crate) scale: Option<f64>,
    pub(crate) enable_gqa: bool,
}

impl From<Infallible> for Failure {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

// --- from operands -----------------------------------------------------------------------------------------------------------

/// The request of operands, whose memory is their value; `requires_grad` of q, k, v and the mask.
pub(crate) fn of_operands((q, k, v, mask): Inputs<'_>, requires_grad: [bool; 4], flags: Flags) -> Request<usize> {
    let tensor = |operand: &Operand, requires_grad: bool| Tensor {
        device: operand.device,
        dtype: Ok(operand.dtype),
        sizes: operand.shape.to_vec(),
        // Only ever compared with 1.
        inner_stride: operand.strides.last().map_or(1, |stride| stride.cast_unsigned()),
        requires_grad,
        obstacle: None,
    };
    let [q_grad, k_grad, v_grad, mask_grad] = requires_grad;
    let Flags { dropout_p, is_causal, scale, enable_gqa } = flags;
    Request {
        q: tensor(q, q_grad),
        k: tensor(k, k_grad),
        v: tensor(v, v_grad),
        mask: mask.map(|mask| tensor(mask, mask_grad)),
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
    }
}

/// Which of these torch tensors ask for a gradient.
pub(crate) fn requires_grad(given: Given<'_, '_>) -> PyResult<[bool; 4]> {
    let of = |tensor: &Bound<'_, PyAny>| torch::requires_grad(tensor);
    let mask = given.attn_mask.map_or(Ok(false), of)?;
    Ok([of(given.query)?, of(given.key)?, of(given.value)?, mask])
}

/// Decides for numpy arrays and other producers: as the newest PyTorch would, were they its tensors.
pub(crate) fn decide_newest(asked: &Request<usize>) -> Verdict {
    let math = || Ok::<_, Infallible>(Some(Kernel::Math));
    let Ok(verdict) = decide::decide(asked, Modes::ORDINARY, Stock::NEWEST, math);
    verdict
}

/// Decides for torch tensors.
pub(crate) fn decide_torch<S: Size>(
    py: Python<'_>,
    asked: &Request<S>,
    modes: Modes,
    given: Given<'_, '_>,
) -> Result<Verdict, Failure>
where
    Failure: From<S::Fault>,
{
    decide::decide(asked, modes, stock(py)?, || choose(py, given, asked))
}

/// PyTorch's own choice among its kernels on the GPU.
fn choose<S>(py: Python<'_>, given: Given<'_, '_>, asked: &Request<S>) -> Result<Option<Kernel>, Failure> {
    let options = PyDict::new(py);
    options.set_item(intern!(py, "scale"), asked.scale)?;
    if asked.enable_gqa {
        options.set_item(intern!(py, "enable_gqa"), true)?;
    }
    let torch = py.import(intern!(py, "torch"))?;
    let arguments = (given.query, given.key, given.value, given.attn_mask, asked.dropout_p, asked.is_causal);
    let choice: i64 = torch.getattr(intern!(py, "_fused_sdp_choice"))?.call(arguments, Some(&options))?.extract()?;
    Ok(match choice {
        1 => Some(Kernel::Flash),
        2 => Some(Kernel::Efficient),
        3 => Some(Kernel::Cudnn),
        below if below < 0 => None,
        _ => Some(Kernel::Math),
    })
}

// --- what is in force --------------------------------------------------------------------------------------------------------

/// What the installed torch does, asked of it once and before anything of it is replaced.
pub(crate) fn stock(py: Python<'_>) -> PyResult<Stock> {
    static STOCK: PyOnceLock<Stock> = PyOnceLock::new();
    let ask = || -> PyResult<Stock> {
        let found = py.import("rapt.torch._stock")?.getattr("ask")?.call0()?;
        let is = |name| found.getattr(name)?.is_truthy();
        Ok(Stock {
            follows_query: is("follows_query")?,
            rank3: is("rank3")?,
            shortcut: is("shortcut")?,
            gqa: is("gqa")?,
            one_head: is("one_head")?,
        })
    };
    STOCK.get_or_try_init(py, ask).copied()
}

/// Whether a forward-mode AD level is open.
pub(crate) fn forward_ad(py: Python<'_>) -> PyResult<bool> {
    static MODULE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let import = || -> PyResult<_> { Ok(py.import("torch.autograd.forward_ad")?.into_any().unbind()) };
    let level: i64 = MODULE.get_or_try_init(py, import)?.bind(py).getattr(intern!(py, "_current_level"))?.extract()?;
    Ok(level >= 0)
}

/// The modes around a call of Rapt's own functions, which `sdpa_kernel` does not concern.
pub(crate) fn modes(py: Python<'_>) -> PyResult<Modes> {
    let allowed = Modes::ORDINARY.allowed;
    Ok(Modes { grad: torch::is_grad_enabled(py)?, forward_ad: forward_ad(py)?, allowed, ..Modes::ORDINARY })
}

/// The flags behind `sdpa_kernel`. The overrideable backend is another device's: torch 2.6 leaves it on whatever is said.
pub(crate) fn allowed(py: Python<'_>) -> PyResult<Allowed> {
    static FLAGS: PyOnceLock<(Vec<Py<PyAny>>, Py<PyAny>)> = PyOnceLock::new();
    let find = || -> PyResult<_> {
        let torch = py.import("torch._C")?;
        let names = ["_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled"];
        let fused = names.into_iter().filter_map(|name| Some(torch.getattr(name).ok()?.unbind())).collect();
        Ok((fused, torch.getattr("_get_math_sdp_enabled")?.unbind()))
    };
    let (fused, math) = FLAGS.get_or_try_init(py, find)?;
    let mut any = false;
    for flag in fused {
        any = any || flag.bind(py).call0()?.is_truthy()?;
    }
    Ok(Allowed { fused: any, math: math.bind(py).call0()?.is_truthy()? })
}

// --- from torch's objects ----------------------------------------------------------------------------------------------------

/// A size of a tensor that may be one of a trace.
#[derive(Clone)]
pub(crate) enum Sized<'py> {
    /// A number.
    Number(usize),
    /// A symbol; comparing it records a guard.
    Symbol(Bound<'py, PyAny>),
}

impl<'py> Sized<'py> {
    fn of(object: Bound<'py, PyAny>) -> Self {
        // A symbol that is asked for its number becomes that number, in the whole trace.
        if !object.is_instance_of::<PyInt>() {
            return Sized::Symbol(object);
        }
        match object.extract::<isize>() {
            Ok(number) => Sized::Number(number.cast_unsigned()),
            Err(_) => Sized::Symbol(object),
        }
    }

    fn object(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(match self {
            Sized::Number(number) => number.into_pyobject(py)?.into_any(),
            Sized::Symbol(symbol) => symbol.clone(),
        })
    }

    fn compare(&self, symbol: &Bound<'py, PyAny>, how: CompareOp) -> PyResult<bool> {
        self.object(symbol.py())?.rich_compare(symbol, how)?.is_truthy()
    }
}

impl Size for Sized<'_> {
    type Fault = PyErr;
    fn equals(&self, other: &Self) -> PyResult<bool> {
        match (self, other) {
            (Sized::Number(a), Sized::Number(b)) => Ok(a == b),
            (one, Sized::Symbol(symbol)) | (Sized::Symbol(symbol), one) => one.compare(symbol, CompareOp::Eq),
        }
    }
    fn is(&self, number: usize) -> PyResult<bool> {
        self.equals(&Sized::Number(number))
    }
    fn is_at_most(&self, number: usize) -> PyResult<bool> {
        match self {
            Sized::Number(size) => Ok(*size <= number),
            Sized::Symbol(symbol) => Sized::Number(number).compare(symbol, CompareOp::Ge),
        }
    }
    fn is_multiple_of(&self, divisor: &Self) -> PyResult<bool> {
        match (self, divisor) {
            (Sized::Number(size), Sized::Number(divisor)) => Ok(usize::is_multiple_of(*size, *divisor)),
            (_, Sized::Symbol(symbol)) | (Sized::Symbol(symbol), _) => {
                let py = symbol.py();
                self.object(py)?.rem(divisor.object(py)?)?.eq(0)
            }
        }
    }
    fn from_number(number: usize) -> Self {
        Sized::Number(number)
    }
    fn number(&self) -> Option<usize> {
        match self {
            Sized::Number(number) => Some(*number),
            Sized::Symbol(_) => None,
        }
    }
}

impl fmt::Display for Sized<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sized::Number(number) => number.fmt(f),
            Sized::Symbol(symbol) => symbol.fmt(f),
        }
    }
}

impl From<Obstacle> for Reason {
    fn from(obstacle: Obstacle) -> Self {
        match obstacle {
            Obstacle::Device(kind) => Reason::Device(kind),
            Obstacle::Layout(layout) => Reason::Layout(layout),
            Obstacle::Quantized => Reason::Quantized,
            Obstacle::LazyNegation => Reason::LazyNegation,
            Obstacle::Subclass(class) => Reason::Subclass(class),
            Obstacle::Functorch => Reason::Functorch,
        }
    }
}

/// Whether this is a tensor of a trace, fake or functional: then nothing is computed and nothing counted.
pub(crate) fn is_traced(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    static CLASSES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if torch::is_exactly_tensor(tensor) {
        return Ok(false);
    }
    let py = tensor.py();
    let find = || -> PyResult<_> {
        let fake = py.import("torch._subclasses.fake_tensor")?.getattr("FakeTensor")?;
        let functional = py.import("torch._subclasses.functional_tensor")?.getattr("FunctionalTensor")?;
        Ok(PyTuple::new(py, [fake, functional])?.into_any().unbind())
    };
    tensor.is_instance(CLASSES.get_or_try_init(py, find)?.bind(py))
}

fn probe<'py>(tensor: &Bound<'py, PyAny>, traced: &mut bool) -> PyResult<Tensor<Sized<'py>>> {
    let py = tensor.py();
    let is_traced = is_traced(tensor)?;
    *traced |= is_traced;
    // Plain constants may stand beside fake tensors; any other subclass has its own idea of an op.
    let obstacle = if is_traced { None } else { torch::obstacle(tensor)? };
    let dtype_object = tensor.getattr(intern!(py, "dtype"))?;
    let dtype = torch::dtype_of(&dtype_object).ok_or_else(|| dtype_object.to_string().replace("torch.", ""));
    if obstacle.is_some() {
        // Such a tensor may have neither sizes nor strides.
        let (sizes, inner_stride) = (Vec::new(), Sized::Number(1));
        let obstacle = obstacle.map(Reason::from);
        return Ok(Tensor { device: Device::Cpu, dtype, sizes, inner_stride, requires_grad: false, obstacle });
    }
    let device = tensor.getattr(intern!(py, "device"))?;
    let device = match device.getattr(intern!(py, "type"))?.extract::<&str>()? {
        "cpu" => Device::Cpu,
        "mps" => Device::Mps(device.getattr(intern!(py, "index"))?.extract::<Option<u32>>()?.unwrap_or(0)),
        "cuda" => Device::Cuda(device.getattr(intern!(py, "index"))?.extract::<Option<u32>>()?.unwrap_or(0)),
        _ => Device::Other { dlpack_code: 0, index: 0 },
    };
    let sizes: Vec<Sized<'py>> =
        tensor.getattr(intern!(py, "shape"))?.try_iter()?.map(|size| Ok(Sized::of(size?))).collect::<PyResult<_>>()?;
    let inner_stride = match sizes.len() {
        0 => Sized::Number(1),
        _ => Sized::of(tensor.call_method1(intern!(py, "stride"), (-1,))?),
    };
    Ok(Tensor { device, dtype, sizes, inner_stride, requires_grad: torch::requires_grad(tensor)?, obstacle: None })
}

/// The request of tensors as torch describes them, of a trace among them or not, and whether one is.
pub(crate) fn of_tensors<'py>(given: Given<'_, 'py>, flags: Flags) -> PyResult<(Request<Sized<'py>>, bool)> {
    let mut traced = false;
    let mut of = |tensor: &Bound<'py, PyAny>| probe(tensor, &mut traced);
    let (q, k, v) = (of(given.query)?, of(given.key)?, of(given.value)?);
    let mask = given.attn_mask.map(of).transpose()?;
    let Flags { dropout_p, is_causal, scale, enable_gqa } = flags;
    Ok((Request { q, k, v, mask, dropout_p, is_causal, scale, enable_gqa }, traced))
}

/// A nested tensor of layout `torch.jagged`, whose values are `[heads, rows of all sequences, head_dim]`, as `[batch, heads, 1,
/// head_dim]`: how long its sequences are is told by its offsets.
fn probe_nested<'py>(tensor: &Bound<'py, PyAny>, traced: &mut bool) -> PyResult<(Tensor<Sized<'py>>, Nest)> {
    let py = tensor.py();
    let bare = |nest| {
        let (sizes, inner_stride, dtype) = (Vec::new(), Sized::Number(1), Err(String::new()));
        let tensor = Tensor { device: Device::Cpu, dtype, sizes, inner_stride, requires_grad: false, obstacle: None };
        Ok((tensor, nest))
    };
    if !tensor.getattr(intern!(py, "is_nested"))?.is_truthy()? {
        return bare(Nest::Not);
    }
    // A nested tensor of strided layout has neither of these.
    let ragged = tensor.getattr_opt(intern!(py, "_ragged_idx"))?.map(|at| at.extract::<usize>()).transpose()?;
    let Some((values, 2)) = tensor.getattr_opt(intern!(py, "_values"))?.zip(ragged) else {
        return bare(Nest::Otherwise);
    };
    let mut inner = probe(&values, traced)?;
    inner.requires_grad = torch::requires_grad(tensor)?;
    if inner.obstacle.is_none() {
        let [heads, _, head_dim] = &*inner.sizes else { return bare(Nest::Otherwise) };
        let batch = Sized::of(tensor.call_method1(intern!(py, "size"), (0,))?);
        inner.sizes = vec![batch, heads.clone(), Sized::Number(1), head_dim.clone()];
    }
    Ok((inner, Nest::Sequences))
}

/// The request of tensors of which one is nested at least, how each is, and whether one is of a trace.
pub(crate) fn of_nested<'py>(given: Given<'_, 'py>, flags: Flags) -> PyResult<(Request<Sized<'py>>, [Nest; 3], bool)> {
    let mut traced = false;
    let mut of = |tensor: &Bound<'py, PyAny>| probe_nested(tensor, &mut traced);
    let ((q, of_q), (k, of_k), (v, of_v)) = (of(given.query)?, of(given.key)?, of(given.value)?);
    let mask = given.attn_mask.map(|mask| Ok::<_, PyErr>(of(mask)?.0)).transpose()?;
    let Flags { dropout_p, is_causal, scale, enable_gqa } = flags;
    Ok((Request { q, k, v, mask, dropout_p, is_causal, scale, enable_gqa }, [of_q, of_k, of_v], traced))
}

// --- refusals ----------------------------------------------------------------------------------------------------------------

fn tuple<S: Size>(tensor: &Tensor<S>) -> String {
    format!("({})", tensor.sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
}

/// K and V of different length, on every route.
fn kv_len<S: Size>(asked: &Request<S>) -> Failure {
    let (k, v) = (&asked.k, &asked.v);
    let shorter = |tensor: &Tensor<S>| tensor.sizes[tensor.sizes.len() - 2].number();
    let message = format!("k and v must have one kv_len, got k {} and v {}", tuple(k), tuple(v));
    let hint = shorter(k).zip(shorter(v)).map_or(String::new(), |(a, b)| {
        let len = a.min(b);
        format!("`k[..., :{len}, :]` and `v[..., :{len}, :]`")
    });
    Failure::binding(ErrorKind::Shape, message, hint)
}

/// What nobody computes, as its error.
pub(crate) fn refused<S: Size>(refusal: Refusal, asked: &Request<S>) -> Failure {
    match refusal {
        Refusal::KvLen => kv_len(asked),
    }
}

/// The order of an answer, or the typed error of Rapt's own functions, which have nobody to hand a request to. `inputs`: the
/// operands, where there are any, of which rapt-core says more exactly what does not fit.
pub(crate) fn served<S: Size>(
    verdict: Verdict,
    asked: &Request<S>,
    inputs: Option<Inputs<'_>>,
) -> Result<Order, Failure> {
    let reason = match verdict {
        Verdict::Serve(order) => return Ok(order),
        Verdict::Refuse(refusal) => return Err(refused(refusal, asked)),
        Verdict::Fallback(reason) => reason,
    };
    let unsupported = |message: String, hint: String| Failure::binding(ErrorKind::Unsupported, message, hint);
    Err(match reason {
        Reason::RequiresGrad(name) => torch::needs_gradient(name),
        Reason::Dropout if (0.0..=1.0).contains(&asked.dropout_p) => unsupported(
            format!("dropout_p={} is served of torch tensors on CPUs and NVIDIA GPUs alone", asked.dropout_p),
            "`dropout_p=0.0`".into(),
        ),
        Reason::Dropout => {
            Failure::option("dropout_p", asked.dropout_p.to_string(), "a probability: 0 to 1, both included")
        }
        Reason::ForwardAd => unsupported(
            "a forward-mode AD level is open, and tangents are not computed".into(),
            "call it outside `torch.autograd.forward_ad.dual_level()`".into(),
        ),
        Reason::Invalid(invalid) => invalid_request(invalid, asked, inputs),
        Reason::Dtype(name) => match asked.q.dtype {
            Ok(got) => Error::UnsupportedDtype { tensor: "q", got, allowed: COMPUTED.to_vec() }.into(),
            Err(_) => Error::UnknownDtype { tensor: "q", got: format!("torch.{name}") }.into(),
        },
        Reason::ScaleNotFinite => {
            let got = asked.scale.map_or_else(String::new, |scale| scale.to_string());
            Failure::option("scale", got, "any finite number")
        }
        Reason::ZeroHeadDim | Reason::EmptyInput | Reason::TooManyDimensions => shape_error(
            "q, k and v do not fit one another, or an empty one gives the answer other leading sizes than those of q",
            asked,
            inputs,
        ),
        other => unsupported(format!("the request is not served ({})", other.label()), String::new()),
    })
}

fn invalid_request<S: Size>(invalid: Invalid, asked: &Request<S>, inputs: Option<Inputs<'_>>) -> Failure {
    let find = |name: &str| match name {
        "k" => &asked.k,
        "v" => &asked.v,
        "mask" => asked.mask.as_ref().unwrap_or(&asked.q),
        _ => &asked.q,
    };
    match invalid {
        Invalid::Dtype(name) => match (&asked.q.dtype, &find(name).dtype) {
            (Ok(expected), Ok(got)) => Error::DtypeMismatch { tensor: name, expected: *expected, got: *got }.into(),
            _ => Failure::binding(ErrorKind::DtypeMismatch, format!("{name} has another dtype than q"), ""),
        },
        Invalid::MaskAndCausal => Failure::option(
            "is_causal",
            "True together with attn_mask",
            "is_causal=False with attn_mask, or attn_mask=None (PyTorch forbids both; rapt.attention takes both)",
        ),
        Invalid::MaskDtype => {
            let mut allowed = vec![DType::Bool, DType::F32];
            allowed.extend(asked.q.dtype.clone().ok().filter(|dtype| *dtype != DType::F32));
            match find("mask").dtype {
                Ok(got) => Error::UnsupportedDtype { tensor: "mask", got, allowed }.into(),
                Err(ref name) => Error::UnknownDtype { tensor: "mask", got: format!("torch.{name}") }.into(),
            }
        }
        Invalid::Device(name) => {
            let (expected, got) = (asked.q.device, find(name).device);
            Error::DeviceMismatch { tensor: name, expected, got }.into()
        }
        Invalid::Rank(name) => {
            let least = if asked.enable_gqa { "3 ([heads, len, head_dim])" } else { "2 ([len, head_dim])" };
            let message = format!("{name} has shape {}; at least {least} dimensions are asked", tuple(find(name)));
            Failure::binding(ErrorKind::Shape, message, format!("`{name}[None]`"))
        }
        Invalid::HeadDim => shape_error("q and k have rows of different length", asked, inputs),
        Invalid::Groups => shape_error("the heads of k and v do not divide those of q", asked, inputs),
        Invalid::Broadcast { heads: true } => {
            let message = format!(
                "q {}, k {} and v {}: without enable_gqa the numbers of heads must be equal or 1",
                tuple(&asked.q),
                tuple(&asked.k),
                tuple(&asked.v)
            );
            Failure::binding(ErrorKind::Shape, message, "`enable_gqa=True`")
        }
        Invalid::Broadcast { heads: false } => {
            shape_error("the leading dimensions of q, k and v do not broadcast", asked, inputs)
        }
        Invalid::NotNested(name) => {
            let message = format!("{name} is not nested, as the others are");
            Failure::binding(ErrorKind::Kind, message, "`torch.nested.nested_tensor(list, layout=torch.jagged)`")
        }
        Invalid::NestedMask => Failure::option("attn_mask", "a tensor", "None beside nested tensors"),
        Invalid::MaskShape => shape_error("mask does not broadcast to [..., q_len, kv_len] of q and k", asked, inputs),
    }
}

/// A [`ErrorKind::Shape`], in the words of rapt-core where it has any for this.
fn shape_error<S: Size>(what: &str, asked: &Request<S>, inputs: Option<Inputs<'_>>) -> Failure {
    let by_core = inputs.and_then(|inputs| {
        let frame = match Frame::new(inputs, asked.enable_gqa) {
            Ok(frame) => frame,
            Err(failure) => return Some(failure),
        };
        let (q, k, v, mask) = frame.piece(inputs, &[0; rapt::MAX_RANK][..frame.outer_rank()]);
        call::spec_of((&q, &k, &v, mask.as_ref()), (None, None), &call::options(asked.is_causal, None)).err()
    });
    match by_core {
        Some(Failure::Rapt(error)) if error.kind() == ErrorKind::Shape => Failure::Rapt(error),
        Some(failure @ Failure::Binding { kind: ErrorKind::Shape, .. }) => failure,
        _ => {
            let mask = asked.mask.as_ref().map_or(String::new(), |mask| format!(", mask {}", tuple(mask)));
            let (q, k, v) = (tuple(&asked.q), tuple(&asked.k), tuple(&asked.v));
            Failure::binding(ErrorKind::Shape, format!("{what}: q {q}, k {k}, v {v}{mask}"), "")
        }
    }
}
