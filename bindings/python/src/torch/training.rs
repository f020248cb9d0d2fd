//! Gradients of ordinary calls on the CPU and on NVIDIA's GPUs: the node of PyTorch's own flash op of the CPU, both passes Rapt's.
//!
//! ```text
//! kernel     computes (out, lse), leaves them here and calls the op of PyTorch's flash kernel with a mark
//! autograd   PyTorch's: makes the node of that op, and asks its kernel for the answer
//! Flash      takes what was left here
//! …          the node's backward op, with what the node kept and the same mark
//! FlashBackward   computes dq, dk and dv, by a plan that is kept as the kernel's are
//! ```
//! Such a node costs what a node of PyTorch's costs: one that is written in Python takes as long as all of the attention of 16² does. It has gradients
//! by all of query, key and value and by nothing else, and no dropout; for whatever else is asked `rapt.torch._autograd` makes one. Its `metadata` has "rapt".
//! Of PyTorch's ops this is the one whose node keeps nothing but what Rapt's backward reads; on a GPU PyTorch has no kernel for it.

use std::cell::RefCell;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};
use rapt::{BackwardPlan, BackwardSpec, BackwardTensors, CallCache, GradientForms, TensorForm};

use super::call::{self, Given, Made, Place, Read};
use crate::engine::Home;
use crate::errors::Failure;
use crate::kind::Kind;
use crate::tensors::{Enqueued, Operand, StreamContext, torch};

/// The mark: a `dropout_p` that nobody asks for, which the node keeps and hands to its backward op.
pub(crate) const RECORDED: f64 = -3.0;

/// Requests that are kept.
const PLACES: usize = 512;

static CALLS: LazyLock<CallCache<Key, Arc<Entry>>> = LazyLock::new(|| CallCache::new(PLACES));

/// Nodes that live: their backward op must stay Rapt's, as PyTorch's kernel knows neither boolean masks nor groups nor values of another head dim.
static NODES: AtomicUsize = AtomicUsize::new(0);

/// What each of them holds.
#[pyclass(frozen, module = "rapt._native", name = "TorchNode")]
struct Alive(());

impl Alive {
    fn new() -> Self {
        NODES.fetch_add(1, Ordering::Relaxed);
        Alive(())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        NODES.fetch_sub(1, Ordering::Relaxed);
    }
}

thread_local! {
    /// What calls have computed whose nodes are being made: the last is the innermost, since whoever packs a tensor for a node may call again.
    static COMPUTED: RefCell<Vec<[Py<PyAny>; 2]>> = const { RefCell::new(Vec::new()) };
}

/// Nodes that live in this process.
#[pyfunction]
pub(crate) fn torch_nodes() -> usize {
    NODES.load(Ordering::Relaxed)
}

/// The output of a call that has computed (out, lse), with PyTorch's node, which `op` makes.
pub(super) fn record<'py>(
    op: &Bound<'py, PyAny>,
    given: Given<'_, 'py>,
    computed: [Bound<'py, PyAny>; 2],
    is_causal: bool,
    scale: Option<f64>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = op.py();
    let Given { query, key, value, attn_mask } = given;
    let options = PyDict::new(py);
    if let Some(mask) = attn_mask {
        options.set_item(intern!(py, "attn_mask"), mask)?;
    }
    if let Some(scale) = scale {
        options.set_item(intern!(py, "scale"), scale)?;
    }
    let depth = COMPUTED.with_borrow_mut(|all| {
        all.push(computed.map(Bound::unbind));
        all.len()
    });
    let made = op.call((query, key, value, RECORDED, is_causal), Some(&options));
    // Nobody took it where somebody before the kernel raised. Dropped when nothing is borrowed: whoever watches a tensor end may call again.
    drop(COMPUTED.with_borrow_mut(|all| all.split_off(depth - 1)));
    let out = made?.get_item(0)?;
    let kept = out.getattr(intern!(py, "grad_fn"))?.getattr(intern!(py, "metadata"))?;
    kept.set_item(intern!(py, "rapt"), Alive::new())?;
    Ok(out)
}

/// The kernel of `_scaled_dot_product_flash_attention_for_cpu`.
#[pyclass(frozen, module = "rapt._native", name = "TorchFlash")]
pub(crate) struct TorchFlash {
    /// `(*args, **kwargs)`: whatever no call left an answer for.
    cold: Py<PyAny>,
}

#[pymethods]
impl TorchFlash {
    #[new]
    fn new(cold: Py<PyAny>) -> Self {
        TorchFlash { cold }
    }

    /// `(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None)`.
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if is_recorded(args, 3)
            && let Some([out, lse]) = COMPUTED.with_borrow_mut(Vec::pop)
        {
            return Ok(PyTuple::new(py, [out, lse])?.into_any());
        }
        self.cold.bind(py).call(args, kwargs)
    }
}

/// Whether the argument `at` is the mark.
fn is_recorded(args: &Bound<'_, PyTuple>, at: usize) -> bool {
    args.get_item(at).and_then(|p| p.extract::<f64>()).is_ok_and(|p| p == RECORDED)
}

/// What a request is, but for its pointers.
#[derive(PartialEq, Eq)]
struct Key {
    d_o: TensorForm,
    q: TensorForm,
    k: TensorForm,
    v: TensorForm,
    mask: Option<TensorForm>,
    out: TensorForm,
    lse: TensorForm,
    is_causal: bool,
    scale: Option<u64>,
    torch_threads: Option<usize>,
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        call::hash_request(&self.q, &self.k, hasher);
    }
}

/// What is done for it.
struct Entry {
    plan: Arc<BackwardPlan>,
    /// By q, k and v, as `torch.empty_like` makes them.
    gradients: [TensorForm; 3],
}

/// The tensors of a call.
struct Tensors {
    d_o: Operand,
    inputs: Read,
    out: Operand,
    lse: Operand,
}

/// The kernel of `_scaled_dot_product_flash_attention_for_cpu_backward`, where autograd would record it.
#[pyclass(frozen, module = "rapt._native", name = "TorchFlashBackward")]
pub(crate) struct TorchFlashBackward {
    /// `(*args, **kwargs)`: whatever is not served here.
    cold: Py<PyAny>,
    /// Where its tensors lie.
    device: Place,
}

#[pymethods]
impl TorchFlashBackward {
    #[new]
    fn new(cold: Py<PyAny>, device: &str) -> PyResult<Self> {
        Ok(TorchFlashBackward { cold, device: Place::named(device)? })
    }

    /// `(keyset, grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None)`.
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        call::hot_or_cold(|| hot(py, self.device, args, kwargs), || self.cold.bind(py).call(args, kwargs))
    }
}

/// The gradients of a call that was recorded here: plain tensors, nothing that traces, and not to be differentiated again.
fn hot<'py>(
    py: Python<'py>,
    device: Place,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> Result<Option<Bound<'py, PyAny>>, Failure> {
    let is_whole = args.len() == 9 && !args.get_borrowed_item(1)?.is_none();
    if !is_whole || !is_recorded(args, 7) || torch::is_grad_enabled(py)? {
        return Ok(None);
    }
    if !device.is_ordinary(&args.get_item(0)?, undefined(py)?)? {
        return Ok(None);
    }
    let named = |name| kwargs.map_or(Ok(None), |kwargs| kwargs.get_item(name));
    let mask = named(intern!(py, "attn_mask"))?.filter(|mask| !mask.is_none());
    let scale: Option<f64> = named(intern!(py, "scale"))?.map_or(Ok(None), |scale| scale.extract())?;
    let is_causal = args.get_borrowed_item(8)?.is_truthy()?;
    let given = |at: usize| args.get_item(at);
    let (d_o, q, k, v, out, lse) = (given(1)?, given(2)?, given(3)?, given(4)?, given(5)?, given(6)?);
    let tensors = Tensors {
        d_o: torch::read_plain("d_o", &d_o)?,
        inputs: Read {
            q: torch::read_plain("q", &q)?,
            k: torch::read_plain("k", &k)?,
            v: torch::read_plain("v", &v)?,
            mask: mask.as_ref().map(|mask| torch::read_plain("mask", mask)).transpose()?,
        },
        out: torch::read_plain("out", &out)?,
        lse: torch::read_plain("lse", &lse)?,
    };
    let inputs = &tensors.inputs;
    let torch_threads = Home::Default.torch_threads(py, Kind::Torch)?;
    let key = Key {
        d_o: tensors.d_o.form(),
        q: inputs.q.form(),
        k: inputs.k.form(),
        v: inputs.v.form(),
        mask: inputs.mask.as_ref().map(Operand::form),
        out: tensors.out.form(),
        lse: tensors.lse.form(),
        is_causal,
        scale: scale.map(f64::to_bits),
        torch_threads,
    };
    let (entry, made) = match CALLS.get(&key) {
        Some(entry) => {
            let make = |like, name, form: &TensorForm| {
                torch::empty_strided(like, name, form.dtype, &form.shape, &form.strides)
            };
            let [dq, dk, dv] = &entry.gradients;
            let made = [make(&q, "dq", dq)?, make(&k, "dk", dk)?, make(&v, "dv", dv)?];
            (entry, made)
        }
        None => enter(py, [&q, &k, &v], &tensors, key)?,
    };
    let (gradients, enqueued) = run(py, &entry, &tensors, made, torch_threads)?;
    if let Some(enqueued) = enqueued {
        torch::record_stream(py, enqueued, [&d_o, &q, &k, &v, &out, &lse].into_iter().chain(&mask))?;
    }
    Ok(Some(gradients))
}

/// What a tensor that is not there adds to the keys of a call: a node hands its mask on so.
fn undefined(py: Python<'_>) -> PyResult<u64> {
    static KEYS: PyOnceLock<u64> = PyOnceLock::new();
    let ask = || -> PyResult<u64> {
        let torch = py.import("torch")?.getattr("_C")?;
        let other = torch.getattr("DispatchKey")?.getattr("AutogradOther")?;
        torch.getattr("DispatchKeySet")?.call1((other,))?.call_method0("raw_repr")?.extract()
    };
    KEYS.get_or_try_init(py, ask).copied()
}

/// Plans a request that is new, and makes its gradients.
fn enter<'py>(
    py: Python<'py>,
    qkv: [&Bound<'py, PyAny>; 3],
    tensors: &Tensors,
    key: Key,
) -> Result<(Arc<Entry>, [Made<'py>; 3]), Failure> {
    let Tensors { d_o, inputs, out, lse } = tensors;
    let options =
        rapt::Options { out_dtype: Some(out.dtype), ..call::options(key.is_causal, key.scale.map(f64::from_bits)) };
    let spec = call::spec_of(inputs.inputs(), (Some(out), Some(lse.form())), &options)?;
    let [dq, dk, dv] = qkv;
    let made = [torch::empty_like("dq", dq)?, torch::empty_like("dk", dk)?, torch::empty_like("dv", dv)?];
    let gradients = [made[0].1.form(), made[1].1.form(), made[2].1.form()];
    let [dq, dk, dv] = gradients.map(Some);
    let forms = GradientForms { dq, dk, dv, ..GradientForms::new(d_o.form()) };
    let plan = Home::Default.plan_backward(py, Kind::Torch, &BackwardSpec::new(spec, &forms)?)?.plan;
    let entry = Arc::new(Entry { plan, gradients });
    CALLS.insert(key, Arc::clone(&entry));
    Ok((entry, made))
}

/// Proves and runs: the three gradients, and where they are enqueued.
fn run<'py>(
    py: Python<'py>,
    entry: &Entry,
    tensors: &Tensors,
    made: [Made<'py>; 3],
    torch_threads: Option<usize>,
) -> Result<(Bound<'py, PyAny>, Option<Enqueued>), Failure> {
    let Tensors { d_o, inputs: Read { q, k, v, mask }, out, lse } = tensors;
    let [(dq_object, mut dq), (dk_object, mut dk), (dv_object, mut dv)] = made;
    let operands = BackwardTensors {
        mask: mask.as_ref().map(Operand::view).transpose()?,
        dq: Some(dq.view_mut()?),
        dk: Some(dk.view_mut()?),
        dv: Some(dv.view_mut()?),
        ..BackwardTensors::new([q.view()?, k.view()?, v.view()?], out.view()?, lse.view()?, d_o.view()?)
    };
    let planned = Home::Default.resume_backward(Arc::clone(&entry.plan), torch_threads)?;
    let enqueued = planned.run(py, operands, &StreamContext::Torch)?;
    Ok((PyTuple::new(py, [dq_object, dk_object, dv_object])?.into_any(), enqueued))
}
