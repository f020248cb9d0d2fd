//! Which engine and which threads serve a call.
//!
//! `device=` says where tensors of the host are computed: on the host, or on a GPU of `vulkan`. Threads: `Context(threads)`, else torch's own number and pool for torch tensors, else `RAPT_NUM_THREADS`, else what the
//! system offers.

pub(crate) mod torch_pool;
pub(crate) mod vulkan;

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use rapt::{
    BackwardOperands, BackwardPlan, BackwardSpec, BackwardTensors, Device, DeviceMemory, Engine, Executor, Judgement,
    Model, Operands, Options, Plan, Queue, Spec, Tensors, Threads, Tolerance,
};

use self::torch_pool::TorchPool;
use crate::errors::Failure;
use crate::kind::Kind;
use crate::tensors::torch;
use crate::tensors::{Enqueued, StreamContext};

/// An engine as a call holds it.
#[derive(Clone)]
pub(crate) enum Home {
    /// The engine of the module functions.
    Default,
    /// The engine of a `Context`.
    Own(Arc<Engine>),
}

impl Home {
    /// The engine itself.
    pub(crate) fn engine(&self) -> Result<&Engine, Failure> {
        Ok(match self {
            Home::Default => rapt::default_engine()?,
            Home::Own(engine) => engine,
        })
    }

    /// Where a call on tensors that lie on `lie` runs that asks for `device`.
    pub(crate) fn on(&self, py: Python<'_>, device: Option<Device>, lie: Device) -> Result<Home, Failure> {
        match device {
            None => Ok(self.clone()),
            Some(asked) if lie != Device::Cpu => {
                let allowed = format!("None for tensors on {lie}, which are attended to where they lie");
                Err(Failure::option("device", format!("{:?}", asked.to_string()), allowed))
            }
            Some(Device::Cpu) => Ok(self.clone()),
            Some(device) => vulkan::home(py, device),
        }
    }

    /// torch's threads, if this call runs on them.
    pub(crate) fn torch_threads(&self, py: Python<'_>, kind: Kind) -> Result<Option<usize>, Failure> {
        let engine = self.engine()?;
        if kind != Kind::Torch || matches!(engine.threads(), Threads::Asked(_)) {
            return Ok(None);
        }
        Ok(match torch_pool::num_threads() {
            Some(threads) => Some(threads),
            None => torch::num_threads(py)?,
        })
    }

    /// A program on the engine of this home.
    pub(crate) fn model(&self, model: &Model) -> Model {
        match self {
            Home::Default => model.clone(),
            Home::Own(engine) => model.on(Arc::clone(engine)),
        }
    }

    /// torch's pool, if a call of this kind runs on it.
    pub(crate) fn torch_pool(&self, py: Python<'_>, kind: Kind) -> Result<Option<TorchPool>, Failure> {
        Ok(self.torch_threads(py, kind)?.map(|threads| TorchPool { threads }))
    }

    /// The threads of a call: torch's pool where it runs on that, else the engine's own.
    pub(crate) fn executor<'a>(&'a self, torch: Option<&'a TorchPool>) -> Result<&'a dyn Executor, Failure> {
        Ok(match torch {
            Some(pool) => pool,
            None => self.engine()?.executor(),
        })
    }

    /// What will run for `spec`, and on whose threads.
    pub(crate) fn plan(&self, py: Python<'_>, kind: Kind, spec: &Spec) -> Result<Planned<'_>, Failure> {
        let engine = self.engine()?;
        if let Device::Cuda(_) = spec.device {
            pass_folders(py)?;
            // A kernel that is not kept yet is compiled here, for seconds.
            let plan = py.detach(|| engine.plan(spec))?;
            return Ok(Planned { engine, plan, torch_threads: None });
        }
        if let Device::Mps(_) = spec.device {
            // Metal's compiler runs here.
            let plan = py.detach(|| engine.plan(spec))?;
            return Ok(Planned { engine, plan, torch_threads: None });
        }
        let torch_threads = self.torch_threads(py, kind)?;
        let plan = match (engine.offload(), torch_threads) {
            // A kernel is compiled there.
            (Some(_), _) => py.detach(|| engine.plan(spec)).map_err(|error| vulkan::refused(error, spec, kind))?,
            (None, Some(threads)) => engine.plan_for(spec, threads)?,
            (None, None) => engine.plan(spec)?,
        };
        Ok(Planned { engine, plan, torch_threads })
    }

    /// What will run for the gradients of `spec`, and on whose threads.
    pub(crate) fn plan_backward(
        &self,
        py: Python<'_>,
        kind: Kind,
        spec: &BackwardSpec,
    ) -> Result<PlannedBackward<'_>, Failure> {
        let engine = self.engine()?;
        if let Device::Cuda(_) = spec.forward().device {
            pass_folders(py)?;
            // A kernel that is not kept yet is compiled here, for seconds.
            let plan = Arc::new(py.detach(|| engine.plan_backward(spec))?);
            return Ok(PlannedBackward { engine, plan, torch_threads: None });
        }
        let torch_threads = self.torch_threads(py, kind)?;
        let plan = match torch_threads {
            Some(threads) => engine.plan_backward_for(spec, threads)?,
            None => engine.plan_backward(spec)?,
        };
        Ok(PlannedBackward { engine, plan: Arc::new(plan), torch_threads })
    }

    /// A plan for gradients made before for as many threads.
    pub(crate) fn resume_backward(
        &self,
        plan: Arc<BackwardPlan>,
        torch_threads: Option<usize>,
    ) -> Result<PlannedBackward<'_>, Failure> {
        Ok(PlannedBackward { engine: self.engine()?, plan, torch_threads })
    }

    /// A plan made before for as many threads.
    pub(crate) fn resume(&self, plan: Arc<Plan>, torch_threads: Option<usize>) -> Result<Planned<'_>, Failure> {
        Ok(Planned { engine: self.engine()?, plan, torch_threads })
    }

    /// Threads for numpy and DLPack, and where the number comes from.
    pub(crate) fn threads(&self) -> Result<Threads, Failure> {
        Ok(self.engine()?.threads())
    }
}

/// Tells once where Python's packages lie: the compiler may be among them, and the kernels that this one ships.
pub(crate) fn pass_folders(py: Python<'_>) -> Result<(), Failure> {
    static TOLD: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    if !TOLD.swap(true, std::sync::atomic::Ordering::Relaxed) {
        let path: Vec<String> = py.import("sys")?.getattr("path")?.extract()?;
        rapt::cuda::prepend_library_folders(path.into_iter().map(Into::into).collect());
        let file: Option<std::path::PathBuf> = py.import("rapt._native")?.getattr("__file__")?.extract()?;
        if let Some(package) = file.as_deref().and_then(std::path::Path::parent) {
            rapt::cuda::set_shipped_folder(package.join("cubins"));
        }
    }
    Ok(())
}

/// A plan and where it runs.
pub(crate) struct Planned<'a> {
    engine: &'a Engine,
    pub(crate) plan: Arc<Plan>,
    torch_threads: Option<usize>,
}

impl Planned<'_> {
    /// Proves and runs: on the host with the GIL released, on a GPU with the stream and the memory of `context`. What was
    /// enqueued there may read its tensors after this returns: [`StreamContext::hold`].
    pub(crate) fn run<'py>(
        &self,
        py: Python<'py>,
        tensors: Tensors<'_>,
        context: &StreamContext<'py>,
    ) -> Result<Option<Enqueued>, Failure> {
        let Planned { engine, plan, torch_threads } = self;
        let mut operands = Operands::check(tensors, plan.spec())?;
        if let Device::Cuda(device) = plan.spec().device {
            let stream = context.stream(py, device)?;
            let workspace = context.workspace(py, device, plan.workspace_bytes(), stream)?;
            // SAFETY: the tensors lie on this device (`convert` read them there), and the workspace is reused only by what this
            // stream runs later. That the tensors' memory is not reused before, `StreamContext::hold` says, which the caller calls next.
            unsafe { engine.run_async(plan, &mut operands, workspace.memory, &Queue::Cuda { device, stream }) }?;
            return Ok(Some(Enqueued { device, stream }));
        }
        if let Device::Mps(device) = plan.spec().device {
            let queue = Queue::Mps { device };
            // SAFETY: the storages are held by the operands that the views are of (`convert` read them there), and torch's stream keeps what it
            // encodes until it has passed. Without the GIL: whoever encodes at the same time may wait for it.
            py.detach(|| unsafe { engine.run_async(plan, &mut operands, DeviceMemory::default(), &queue) })?;
            return Ok(None);
        }
        py.detach(|| match *torch_threads {
            Some(threads) => engine.run_on(plan, &mut operands, &Queue::Host(&TorchPool { threads })),
            None => engine.run(plan, &mut operands),
        })?;
        if engine.offload().is_some() {
            vulkan::count(plan);
        }
        Ok(None)
    }
}

/// A plan for gradients and where it runs.
pub(crate) struct PlannedBackward<'a> {
    engine: &'a Engine,
    pub(crate) plan: Arc<BackwardPlan>,
    torch_threads: Option<usize>,
}

impl PlannedBackward<'_> {
    /// Proves and runs: on the host with the GIL released, on a GPU as [`Planned::run`].
    pub(crate) fn run<'py>(
        &self,
        py: Python<'py>,
        tensors: BackwardTensors<'_>,
        context: &StreamContext<'py>,
    ) -> Result<Option<Enqueued>, Failure> {
        let PlannedBackward { engine, plan, torch_threads } = self;
        let mut operands = BackwardOperands::check(tensors, plan.spec())?;
        if let Device::Cuda(device) = plan.spec().forward().device {
            let stream = context.stream(py, device)?;
            let workspace = context.workspace(py, device, plan.workspace_bytes(), stream)?;
            let queue = Queue::Cuda { device, stream };
            // SAFETY: as of `Planned::run`; what was enqueued may read its tensors after this returns, and the caller calls `hold` next.
            unsafe { engine.run_backward_async(plan, &mut operands, workspace.memory, &queue) }?;
            return Ok(Some(Enqueued { device, stream }));
        }
        py.detach(|| match *torch_threads {
            Some(threads) => engine.run_backward_on(plan, &mut operands, &Queue::Host(&TorchPool { threads })),
            None => engine.run_backward(plan, &mut operands),
        })?;
        Ok(None)
    }
}

/// Memory that torch lends a call on a GPU while others may have the GIL.
#[derive(Default)]
struct Lent {
    tensors: Vec<Py<PyAny>>,
    failed: Option<Failure>,
}

impl Lent {
    fn lend(&mut self, device: u32, bytes: usize) -> rapt::Result<DeviceMemory> {
        Python::attach(|py| {
            let workspace = torch::workspace(py, device, bytes).map_err(|failure| {
                self.failed = Some(failure);
                rapt::Error::OutOfMemory { bytes }
            })?;
            let (memory, tensor) = workspace.into_parts();
            self.tensors.extend(tensor.map(Bound::unbind));
            Ok(memory)
        })
    }

    /// What torch said, if it lent nothing.
    fn checked(self) -> Result<(), Failure> {
        self.failed.map_or(Ok(()), Err)
    }
}

impl Planned<'_> {
    /// Runs heads whose error is within the tolerance, and the others on their originals. On a GPU it waits for the stream of `context` until
    /// heads are judged, with the GIL released, and what it enqueued then may run on.
    pub(crate) fn run_within<'py>(
        &self,
        py: Python<'py>,
        tensors: Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        context: &StreamContext<'py>,
    ) -> Result<(rapt::Result<Judgement>, Option<Enqueued>), Failure> {
        let Planned { engine, plan, torch_threads } = self;
        if let Device::Cuda(device) = plan.spec().device {
            let stream = context.stream(py, device)?;
            let (mut lent, queue) = (Lent::default(), Queue::Cuda { device, stream });
            let done = py.detach(|| {
                let mut lend = |bytes| lent.lend(device, bytes);
                // SAFETY: as of `run`; the errors and originals are held by the operands that the views are of, and recorded with the others.
                unsafe { engine.attention_within_on_stream(tensors, options, tolerance, &mut lend, &queue) }
            });
            lent.checked()?;
            return Ok((done, Some(Enqueued { device, stream })));
        }
        let done = py.detach(|| match *torch_threads {
            Some(threads) => engine.attention_within_on(tensors, options, tolerance, &TorchPool { threads }),
            None => engine.attention_within(tensors, options, tolerance),
        });
        Ok((done, None))
    }

    /// Judges every head, and writes nothing.
    pub(crate) fn judge<'py>(
        &self,
        py: Python<'py>,
        tensors: Tensors<'_>,
        options: &Options,
        tolerance: &Tolerance<'_>,
        context: &StreamContext<'py>,
    ) -> Result<Judgement, Failure> {
        let Planned { engine, plan, torch_threads } = self;
        if let Device::Cuda(device) = plan.spec().device {
            let stream = context.stream(py, device)?;
            let (mut lent, queue) = (Lent::default(), Queue::Cuda { device, stream });
            let done = py.detach(|| {
                let mut lend = |bytes| lent.lend(device, bytes);
                // SAFETY: as of `run_within`; the call returns when the stream has passed what it enqueued.
                unsafe { engine.judge_on_stream(tensors, options, tolerance, &mut lend, &queue) }
            });
            lent.checked()?;
            return Ok(done?);
        }
        Ok(py.detach(|| match *torch_threads {
            Some(threads) => engine.judge_on(tensors, options, tolerance, &TorchPool { threads }),
            None => engine.judge(tensors, options, tolerance),
        })?)
    }
}

/// The engine of one `Context`: made when it is needed, given back when the `with` block ends.
pub(crate) struct Owned {
    threads: Option<usize>,
    engine: Mutex<Option<Arc<Engine>>>,
}

impl Owned {
    /// An engine of `threads` threads; refused at once if that is no number of threads.
    pub(crate) fn new(threads: Option<usize>) -> Result<Self, Failure> {
        let engine = Engine::new(threads)?;
        Ok(Owned { threads, engine: Mutex::new(Some(Arc::new(engine))) })
    }

    /// The engine, made anew if it was given back.
    pub(crate) fn home(&self) -> Result<Home, Failure> {
        let mut engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = engine.as_ref() {
            return Ok(Home::Own(Arc::clone(engine)));
        }
        let made = Arc::new(Engine::new(self.threads)?);
        *engine = Some(Arc::clone(&made));
        Ok(Home::Own(made))
    }

    /// Ends threads and caches once no call uses them.
    pub(crate) fn give_back(&self) {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
