//! PyTorch's `aten::scaled_dot_product_attention` as Rapt serves it: the kernel that `rapt.torch` registers.
//!
//! A request like one that came before is found by what its tensors say of themselves (dtypes, sizes, strides) and its
//! options; the table holds its plan and the strides that PyTorch's own output would have. What is left of a call: read the
//! tensors, make the output, prove, run. Registered through `torch.library` as a callable: one that does nothing takes
//! 1.4 µs so and 0.6 µs through the C ABI, whose header says why it is not registered there (2026-11-21, EPYC at 2.6 GHz).
//! Deliberately absent: who answers what. Everything out of the ordinary goes to the Python function given at the start.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use rapt::{Alignment, DType, Device, Plan, Shape, Strides, TensorForm};
use rustc_hash::FxHashMap;

use crate::convert::{Kind, Operand, torch};
use crate::engine::Home;
use crate::errors::Failure;
use crate::sdpa::{self, Frame};

/// Requests kept before the table starts anew.
const ENTRIES: usize = 1024;

/// Calls on torch tensors that Rapt served.
static SERVED: AtomicU64 = AtomicU64::new(0);

/// Counts one call on torch tensors as served.
#[pyfunction]
pub(crate) fn count_served() {
    SERVED.fetch_add(1, Ordering::Relaxed);
}

/// The number of calls on torch tensors that were served since the module was loaded.
#[pyfunction]
pub(crate) fn served() -> u64 {
    SERVED.load(Ordering::Relaxed)
}

/// What a tensor says of itself, but for its pointer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    device: Device,
    dtype: DType,
    shape: Shape,
    strides: Strides,
    alignment: Alignment,
}

impl Form {
    fn of(operand: &Operand) -> Self {
        let TensorForm { dtype, shape, strides, device, alignment } = operand.form();
        Form { device, dtype, shape, strides, alignment }
    }

    /// `operand` in this form.
    fn dress(self, operand: Operand) -> Operand {
        Operand { shape: self.shape, strides: self.strides, ..operand }
    }
}

/// What a request is, but for its pointers.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    q: Form,
    k: Form,
    v: Form,
    mask: Option<Form>,
    is_causal: bool,
    scale: Option<u64>,
    enable_gqa: bool,
    torch_threads: Option<usize>,
}

/// What is done for it.
struct Entry {
    plan: Arc<Plan>,
    /// The operands with four dimensions.
    q: Form,
    k: Form,
    v: Form,
    mask: Option<Form>,
    out: Form,
    /// The output as PyTorch would have made it.
    given: Form,
}

/// A new entry, and the output of the call that made it.
type Entered<'py> = (Arc<Entry>, (Bound<'py, PyAny>, Operand));

/// The tensors of a call.
struct Inputs {
    q: Operand,
    k: Operand,
    v: Operand,
    mask: Option<Operand>,
}

impl Inputs {
    fn all(&self) -> (&Operand, &Operand, &Operand, Option<&Operand>) {
        (&self.q, &self.k, &self.v, self.mask.as_ref())
    }
}

/// The arguments of a call, none of them checked.
struct Call<'a, 'py> {
    query: &'a Bound<'py, PyAny>,
    key: &'a Bound<'py, PyAny>,
    value: &'a Bound<'py, PyAny>,
    mask: Option<&'a Bound<'py, PyAny>>,
    is_causal: bool,
    scale: Option<f64>,
    enable_gqa: bool,
}

impl<'a, 'py> Call<'a, 'py> {
    fn tensors(&self) -> impl Iterator<Item = &'a Bound<'py, PyAny>> + use<'a, 'py> {
        [self.query, self.key, self.value].into_iter().chain(self.mask)
    }
}

/// The kernel under one dispatch key.
#[pyclass(frozen, module = "rapt._native", name = "TorchKernel")]
pub(crate) struct TorchKernel {
    /// `(*args, **kwargs)`: whatever is not served here.
    cold: Py<PyAny>,
    /// `(query, key, value, mask, enable_gqa)`, on a GPU `(query, key, value, mask, is_causal, scale, enable_gqa)`: an output
    /// with the strides of PyTorch's own.
    empty_out: Py<PyAny>,
    /// Functions without arguments; one that says no sends the call to `cold`.
    allowed: Vec<Py<PyAny>>,
    /// The module whose `_current_level` is below 0 while no forward-mode AD is on.
    forward_ad: Py<PyAny>,
    /// Whether tensors lie on a GPU: what an ordinary one's keys are is known only when CUDA has started.
    on_gpu: bool,
    /// Whether the kernel is told the keys of a call. Under the keys `CPU` and `CUDA` it need not be: what reaches those is
    /// plain memory.
    with_keyset: bool,
    entries: RwLock<FxHashMap<Key, Arc<Entry>>>,
}

#[pymethods]
impl TorchKernel {
    #[new]
    #[pyo3(signature = (cold, empty_out, allowed, forward_ad, with_keyset, on_gpu=false))]
    fn new(
        cold: Py<PyAny>,
        empty_out: Py<PyAny>,
        allowed: Vec<Py<PyAny>>,
        forward_ad: Py<PyAny>,
        with_keyset: bool,
        on_gpu: bool,
    ) -> Self {
        TorchKernel { cold, empty_out, allowed, forward_ad, on_gpu, with_keyset, entries: RwLock::default() }
    }

    /// `([keyset,] query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False)`.
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // A panic is met again, and told, by the slower road.
        let hot = catch_unwind(AssertUnwindSafe(|| self.hot(py, args, kwargs)));
        match hot {
            Ok(Ok(Some(out))) => {
                count_served();
                Ok(out)
            }
            Ok(Err(Failure::Python(error))) => Err(error),
            // A refusal has written nothing; whose error it is to be is decided there.
            _ => {
                let first = usize::from(self.with_keyset);
                self.cold.bind(py).call(args.get_slice(first, args.len()), kwargs)
            }
        }
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
        // The union over the tensors and the modes in force: one look for what would take ten questions.
        if self.with_keyset {
            let plain = if self.on_gpu { torch::plain_cuda(py)? } else { Some(torch::plain(py)?) };
            let Some([outside, inside]) = plain else { return Ok(None) };
            let keys: u64 = args.get_borrowed_item(0)?.call_method0(intern!(py, "raw_repr"))?.extract()?;
            if keys & !(outside | inside) != 0 {
                return Ok(None);
            }
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
        let call = Call { query: &query, key: &key, value: &value, mask: mask.as_ref(), is_causal, scale, enable_gqa };
        if dropout_p != 0.0 || scale.is_some_and(|scale: f64| !scale.is_finite()) || !self.is_allowed(py, &call)? {
            return Ok(None);
        }
        self.serve(py, &call)
    }

    /// Whether neither a mode nor a gradient asks for PyTorch's own.
    fn is_allowed(&self, py: Python<'_>, call: &Call<'_, '_>) -> PyResult<bool> {
        for allowed in &self.allowed {
            if !allowed.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        let level: i64 = self.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?.extract()?;
        if level >= 0 {
            return Ok(false);
        }
        if torch::is_grad_enabled(py)? {
            for tensor in call.tensors() {
                if torch::requires_grad(tensor)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn serve<'py>(&self, py: Python<'py>, call: &Call<'_, 'py>) -> Result<Option<Bound<'py, PyAny>>, Failure> {
        let inputs = Inputs {
            q: torch::read_plain("q", call.query)?,
            k: torch::read_plain("k", call.key)?,
            v: torch::read_plain("v", call.value)?,
            mask: call.mask.map(|mask| torch::read_plain("mask", mask)).transpose()?,
        };
        let torch_threads = Home::Default.torch_threads(py, Kind::Torch)?;
        let key = Key {
            q: Form::of(&inputs.q),
            k: Form::of(&inputs.k),
            v: Form::of(&inputs.v),
            mask: inputs.mask.as_ref().map(Form::of),
            is_causal: call.is_causal,
            scale: call.scale.map(f64::to_bits),
            enable_gqa: call.enable_gqa,
            torch_threads,
        };
        let known = self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&key).map(Arc::clone);
        let (entry, (object, out)) = match known {
            Some(entry) => {
                let Form { dtype, shape, strides, .. } = entry.given;
                let made = torch::empty_strided(call.query, "out", dtype, &shape, &strides)?;
                (entry, made)
            }
            None => match self.enter(py, call, &inputs, key)? {
                Some(entered) => entered,
                None => return Ok(None),
            },
        };
        let mut out = entry.out.dress(out);
        let (q, k, v) = (entry.q.dress(inputs.q), entry.k.dress(inputs.k), entry.v.dress(inputs.v));
        let mask = inputs.mask.zip(entry.mask).map(|(mask, form)| form.dress(mask));
        let planned = Home::Default.resume(Arc::clone(&entry.plan), torch_threads)?;
        if let Some(enqueued) = sdpa::run_piece(py, &planned, (&q, &k, &v, mask.as_ref()), &mut out)? {
            torch::record_stream(py, enqueued, call.tensors())?;
        }
        Ok(Some(object))
    }

    /// Plans a request that is new, and makes its output; `None` if it is not ordinary.
    fn enter<'py>(
        &self,
        py: Python<'py>,
        call: &Call<'_, 'py>,
        inputs: &Inputs,
        key: Key,
    ) -> Result<Option<Entered<'py>>, Failure> {
        let Inputs { q, k, v, mask } = inputs;
        let is_ordinary = [q, k, v].iter().all(|tensor| {
            let rank = tensor.shape.len();
            !tensor.shape.contains(&0) && (rank == 4 || !call.enable_gqa)
        }) && mask.as_ref().is_none_or(|mask| {
            // As PyTorch has it: rapt-core would take more.
            !call.is_causal && mask.shape.len() >= 2 && [DType::Bool, q.dtype, DType::F32].contains(&mask.dtype)
        });
        if !is_ordinary {
            return Ok(None);
        }
        let frame = Frame::new(inputs.all(), call.enable_gqa)?;
        let rank = frame.out_shape.len();
        if frame.outer_rank() > 0 || q.shape.len() != rank || q.shape[..rank - 1] != frame.out_shape[..rank - 1] {
            return Ok(None);
        }
        let (q4, k4, v4, mask4) = frame.piece(inputs.all(), &[]);
        let four = (&q4, &k4, &v4, mask4.as_ref());
        let options = sdpa::options(call.is_causal, call.scale);
        // Whatever is refused is refused before memory is asked for.
        sdpa::spec_of(four, None, &options)?;
        let empty_out = self.empty_out.bind(py);
        let object = if self.on_gpu {
            empty_out.call1((
                call.query,
                call.key,
                call.value,
                call.mask,
                call.is_causal,
                call.scale,
                call.enable_gqa,
            ))?
        } else {
            empty_out.call1((call.query, call.key, call.value, call.mask, call.enable_gqa))?
        };
        let out = torch::read_plain("out", &object)?;
        if out.shape != frame.out_shape {
            return Ok(None);
        }
        let out4 = frame.out_piece(&out, &[])?;
        let spec = sdpa::spec_of(four, Some(&out4), &options)?;
        let plan = Home::Default.plan(py, Kind::Torch, &spec)?.plan;
        let entry = Arc::new(Entry {
            plan,
            q: Form::of(&q4),
            k: Form::of(&k4),
            v: Form::of(&v4),
            mask: mask4.as_ref().map(Form::of),
            out: Form::of(&out4),
            given: Form::of(&out),
        });
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if entries.len() >= ENTRIES {
            entries.clear();
        }
        entries.insert(key, Arc::clone(&entry));
        Ok(Some((entry, (object, out))))
    }
}
