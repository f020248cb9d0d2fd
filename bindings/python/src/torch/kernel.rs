//! PyTorch's `aten::scaled_dot_product_attention` as Rapt serves it: the kernel that `rapt.torch` registers.
//!
//! A request like one that came before is found by what its tensors say of themselves (dtypes, sizes, strides) and its
//! options; the façade's [`CallCache`] holds its plan and the strides that PyTorch's own output would have. What is left of a call:
//! read the tensors, make the output, prove, run. Registered through `torch.library` as a callable: one that does nothing takes
//! 1.4 µs so and 0.6 µs through the C ABI, whose header says why it is not registered there (2026-11-21, EPYC at 2.6 GHz).
//! Deliberately absent: who answers what. That is [`decide`](super::decide)'s, whose answers to ordinary requests are kept;
//! everything out of the ordinary goes to the Python function given at the start, which asks it again with what is in force then.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use rapt::{Alignment, CallCache, DType, Options, Plan, Strides, TensorForm};

use super::call::{self, Given, Made, Place, Read};
use super::decide::{Modes, Verdict};
use super::dropout;
use super::frame::Frame;
use super::node::node;
use super::request::{self, Flags};
use super::{output, stats, training};
use crate::engine::Home;
use crate::errors::Failure;
use crate::kind::Kind;
use crate::tensors::{self, Operand, StreamContext, torch};

/// Requests that are kept, whichever kernel they came to.
const PLACES: usize = 1024;

static CALLS: LazyLock<CallCache<Key, Arc<Entry>>> = LazyLock::new(|| CallCache::new(PLACES));

/// Whether the kernels answer: those of a backend that nobody holds are idle, and hand every call to `cold`.
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

/// Lets the kernels answer, or makes them idle.
#[pyfunction]
pub(crate) fn set_registered(yes: bool) {
    IS_REGISTERED.store(yes, Ordering::Release);
}

/// What a request is, but for its pointers.
#[derive(PartialEq, Eq)]
struct Key {
    q: TensorForm,
    k: TensorForm,
    v: TensorForm,
    mask: Option<TensorForm>,
    is_causal: bool,
    scale: Option<u64>,
    enable_gqa: bool,
    dropout_p: u64,
    /// Of a call that keeps what its backward needs, whether the mask asks for a gradient: PyTorch's output has other strides then.
    training: Option<bool>,
    torch_threads: Option<usize>,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        call::hash_request(&self.q, &self.k, hasher);
    }
}

/// What is done for it.
struct Entry {
    plan: Arc<Plan>,
    /// The operands with four dimensions.
    q: TensorForm,
    k: TensorForm,
    v: TensorForm,
    mask: Option<TensorForm>,
    out: TensorForm,
    /// The output as PyTorch would have made it.
    given: TensorForm,
    /// Whether the operands had four dimensions, of which none broadcasts: PyTorch's flash op can make the node of such a call.
    is_recordable: bool,
    /// lse with three dimensions, and as it is made.
    lse: Option<(TensorForm, TensorForm)>,
}

/// A new entry, and the output of the call that made it.
type Entered<'py> = (Arc<Entry>, Made<'py>);

/// A call that was served.
struct Served<'py> {
    out: Bound<'py, PyAny>,
    /// Where it is kept.
    lse: Option<Bound<'py, PyAny>>,
    /// Of its dropout.
    draw: Option<Bound<'py, PyAny>>,
    /// Whether PyTorch's flash op can make its node.
    is_recordable: bool,
}

/// The arguments of a call, none of them checked.
struct Call<'a, 'py> {
    given: Given<'a, 'py>,
    is_causal: bool,
    scale: Option<f64>,
    enable_gqa: bool,
    dropout_p: f64,
}

/// What is in force around a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Force {
    /// [`Modes::ORDINARY`].
    Ordinary,
    /// The same but for a gradient that is needed; `mask`: by the mask; `whole`: by q, k and v, and by nothing else.
    Training { mask: bool, whole: bool },
    /// Something asks for the slower road.
    Else,
}

/// The kernel under one dispatch key.
#[pyclass(frozen, module = "rapt._native", name = "TorchKernel")]
pub(crate) struct TorchKernel {
    /// `(*args, **kwargs)`: whatever is not served here.
    cold: Py<PyAny>,
    /// Functions without arguments; one that says no sends the call to `cold`.
    allowed: Vec<Py<PyAny>>,
    /// Where tensors lie.
    device: Place,
    /// The op of PyTorch's flash kernel on the CPU, which makes nodes of autograd; none where its kernels are not Rapt's.
    record: Option<Py<PyAny>>,
    /// Whether the kernel is told the keys of a call. Under the keys `CPU`, `CUDA` and `MPS` it need not be: what reaches those is
    /// plain memory.
    with_keyset: bool,
}

#[pymethods]
impl TorchKernel {
    #[new]
    #[pyo3(signature = (cold, allowed, with_keyset, device="cpu", record=None))]
    fn new(
        cold: Py<PyAny>,
        allowed: Vec<Py<PyAny>>,
        with_keyset: bool,
        device: &str,
        record: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let device = Place::named(device)?;
        Ok(TorchKernel { cold, allowed, device, record, with_keyset })
    }

    /// `([keyset,] query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False)`.
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        call::hot_or_cold(
            || self.hot(py, args, kwargs),
            || {
                let first = usize::from(self.with_keyset);
                self.cold.bind(py).call(args.get_slice(first, args.len()), kwargs)
            },
        )
    }
}

impl TorchKernel {
    /// The answer to an ordinary request: dense tensors of one device, no gradient, nothing that traces, an answer with the leading
    /// sizes of q. What is not asked here either makes no difference to the answer or is refused by rapt-core.
    fn hot<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        if !IS_REGISTERED.load(Ordering::Acquire) {
            return Ok(None);
        }
        if self.with_keyset && !self.device.is_ordinary(&args.get_item(0)?, 0)? {
            return Ok(None);
        }
        let first = usize::from(self.with_keyset);
        let len = args.len();
        let given = |at: usize| if first + at < len { args.get_item(first + at).map(Some) } else { Ok(None) };
        let (Some(query), Some(key), Some(value)) = (given(0)?, given(1)?, given(2)?) else { return Ok(None) };
        let mask = given(3)?.filter(|mask| !mask.is_none());
        let dropout_p: f64 = given(4)?.map_or(Ok(0.0), |given| given.extract())?;
        let is_causal = given(5)?.map_or(Ok(false), |given| given.is_truthy())?;
        let (mut scale, mut enable_gqa) = (None, false);
        if let Some(kwargs) = kwargs {
            let mut known = 0;
            if let Some(given) = kwargs.get_item(intern!(py, "scale"))? {
                known += 1;
                let Ok(given) = given.extract::<Option<f64>>() else { return Ok(None) };
                scale = given;
            }
            if let Some(given) = kwargs.get_item(intern!(py, "enable_gqa"))? {
                known += 1;
                enable_gqa = given.is_truthy()?;
            }
            if known != kwargs.len() {
                return Ok(None);
            }
        }
        let given = Given { query: &query, key: &key, value: &value, attn_mask: mask.as_ref() };
        let call = Call { given, is_causal, scale, enable_gqa, dropout_p };
        let has_dropout = (0.0..=1.0).contains(&dropout_p) && self.device != Place::Mps;
        let drops_elsewhere = dropout_p != 0.0 && !has_dropout;
        if drops_elsewhere || scale.is_some_and(|scale: f64| !scale.is_finite()) {
            return Ok(None);
        }
        match self.force(py, &call)? {
            Force::Ordinary => Ok(self.serve(py, &call, None)?.map(|served| served.out)),
            Force::Training { mask, whole } if self.device != Place::Mps => {
                let Some(Served { out, lse: Some(lse), draw, is_recordable }) = self.serve(py, &call, Some(mask))?
                else {
                    return Ok(None);
                };
                if let Some(op) = self.record.as_ref().filter(|_| whole && is_recordable && draw.is_none()) {
                    return Ok(Some(training::record(op.bind(py), given, [out, lse], is_causal, scale)?));
                }
                let Given { query, key, value, attn_mask } = given;
                let arguments = (out, lse, query, key, value, attn_mask, is_causal, scale, enable_gqa, dropout_p, draw);
                Ok(Some(node(py, "recorded")?.call1(arguments)?))
            }
            _ => Ok(None),
        }
    }

    /// What is in force to this call.
    fn force(&self, py: Python<'_>, call: &Call<'_, '_>) -> PyResult<Force> {
        for allowed in &self.allowed {
            if !allowed.bind(py).call0()?.is_truthy()? {
                return Ok(Force::Else);
            }
        }
        if request::forward_ad(py)? {
            return Ok(Force::Else);
        }
        if torch::is_grad_enabled(py)? {
            let [q, k, v, mask] = request::requires_grad(call.given)?;
            if q || k || v || mask {
                return Ok(Force::Training { mask, whole: q && k && v && !mask });
            }
        }
        Ok(Force::Ordinary)
    }

    /// The output, and lse where the call is one of `training`.
    fn serve<'py>(
        &self,
        py: Python<'py>,
        call: &Call<'_, 'py>,
        training: Option<bool>,
    ) -> Result<Option<Served<'py>>, Failure> {
        let Given { query, key, value, attn_mask } = call.given;
        let inputs = Read {
            q: torch::read_plain("q", query)?,
            k: torch::read_plain("k", key)?,
            v: torch::read_plain("v", value)?,
            mask: attn_mask.map(|mask| torch::read_plain("mask", mask)).transpose()?,
        };
        let torch_threads = Home::Default.torch_threads(py, Kind::Torch)?;
        let key = Key {
            q: inputs.q.form(),
            k: inputs.k.form(),
            v: inputs.v.form(),
            mask: inputs.mask.as_ref().map(Operand::form),
            is_causal: call.is_causal,
            scale: call.scale.map(f64::to_bits),
            enable_gqa: call.enable_gqa,
            dropout_p: call.dropout_p.to_bits(),
            training,
            torch_threads,
        };
        let (entry, (object, out)) = match CALLS.get(&key) {
            Some(entry) => {
                let TensorForm { dtype, shape, strides, .. } = entry.given;
                let made = torch::empty_strided(query, "out", dtype, &shape, &strides)?;
                (entry, made)
            }
            None => match enter(py, call, &inputs, key)? {
                Some(entered) => entered,
                None => return Ok(None),
            },
        };
        let mut out = out.in_form(&entry.out);
        let (q, k, v) = (inputs.q.in_form(&entry.q), inputs.k.in_form(&entry.k), inputs.v.in_form(&entry.v));
        let mask = inputs.mask.zip(entry.mask).map(|(mask, form)| mask.in_form(&form));
        let made = entry.lse.map(|(_, given)| new_lse(query, &given)).transpose()?;
        let (lse_object, lse) = made.unzip();
        let mut lse = lse.zip(entry.lse).map(|(lse, (form, _))| lse.in_form(&form));
        let planned = Home::Default.resume(Arc::clone(&entry.plan), torch_threads)?;
        // After everything that could send the call to `cold`, which draws itself.
        let draw = (call.dropout_p != 0.0).then(|| dropout::draw(query)).transpose()?;
        let seed = draw.as_ref().map(dropout::seed_of).transpose()?;
        if let Some(enqueued) = call::run_piece(
            py,
            &planned,
            (&q, &k, &v, mask.as_ref()),
            (&mut out, lse.as_mut()),
            seed,
            &StreamContext::Torch,
        )? {
            torch::record_stream(py, enqueued, call.given.all())?;
        }
        // Before a node is made of it: a checkpoint's second forward ends there.
        stats::count_served();
        Ok(Some(Served { out: object, lse: lse_object, draw, is_recordable: entry.is_recordable }))
    }
}

/// A new lse.
fn new_lse<'py>(
    query: &Bound<'py, PyAny>,
    TensorForm { dtype, shape, strides, .. }: &TensorForm,
) -> Result<Made<'py>, Failure> {
    torch::empty_strided(query, "lse", *dtype, shape, strides)
}

/// lse with three dimensions, and as it is made: row-major, a number for each row of out.
fn lse_forms(out: &Operand, out4: &Operand) -> Result<(TensorForm, TensorForm), Failure> {
    let dtype = if out.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let form = |rows: &[usize]| -> Result<TensorForm, Failure> {
        let shape = tensors::shape("lse", rows)?;
        let overflow = rapt::Error::Overflow { tensor: "lse", shape, strides: Strides::from([]) };
        let strides = shape.contiguous().ok_or(overflow)?;
        let alignment = Alignment::assumed(out.device);
        Ok(TensorForm { device: out.device, dtype, shape, strides, alignment })
    };
    Ok((form(&out4.shape[..3])?, form(&out.shape[..out.shape.len() - 1])?))
}

/// Plans a request that is new, and makes its output; `None` if it is not ordinary.
fn enter<'py>(py: Python<'py>, call: &Call<'_, 'py>, inputs: &Read, key: Key) -> Result<Option<Entered<'py>>, Failure> {
    let Call { given, is_causal, scale, enable_gqa, dropout_p } = *call;
    let flags = Flags { dropout_p, is_causal, scale, enable_gqa };
    let asked = request::of_operands(inputs.inputs(), [false, false, false, key.training == Some(true)], flags);
    let Verdict::Serve(order) = request::decide_torch(py, &asked, Modes::ORDINARY, given)? else { return Ok(None) };
    // Empty tensors, and ranks that take more than one piece, are rare: they are served, and not remembered, by `cold`.
    let Read { q, k, v, .. } = inputs;
    let is_ordinary = [q, k, v].iter().all(|tensor| {
        let rank = tensor.shape.len();
        !tensor.shape.contains(&0) && (rank == 4 || !enable_gqa)
    });
    if !is_ordinary {
        return Ok(None);
    }
    let frame = Frame::new(inputs.inputs(), enable_gqa)?;
    let rank = frame.out_shape.len();
    if frame.outer_rank() > 0 || q.shape.len() != rank || q.shape[..rank - 1] != frame.out_shape[..rank - 1] {
        return Ok(None);
    }
    let (q4, k4, v4, mask4) = frame.piece(inputs.inputs(), &[]);
    let four = (&q4, &k4, &v4, mask4.as_ref());
    let options = Options { dropout_p, ..call::options(is_causal, scale) };
    // Whatever is refused is refused before memory is asked for.
    call::spec_of(four, (None, None), &options)?;
    let object = output::new(py, given.query, &frame.out_shape, order)?;
    let out = torch::read_plain("out", &object)?;
    let out4 = frame.out_piece(&out, &[])?;
    let lse = key.training.map(|_| lse_forms(&out, &out4)).transpose()?;
    let spec = call::spec_of(four, (Some(&out4), lse.map(|(form, _)| form)), &options)?;
    let plan = Home::Default.plan(py, Kind::Torch, &spec)?.plan;
    let is_whole = [(q, &q4), (k, &k4), (v, &v4)].into_iter().all(|(given, piece)| given.form() == piece.form());
    let entry = Arc::new(Entry {
        plan,
        is_recordable: is_whole && inputs.mask.as_ref().is_none_or(|mask| mask.shape.len() == 4),
        q: q4.form(),
        k: k4.form(),
        v: v4.form(),
        mask: mask4.as_ref().map(Operand::form),
        out: out4.form(),
        given: out.form(),
        lse,
    });
    CALLS.insert(key, Arc::clone(&entry));
    Ok(Some((entry, (object, out))))
}
