//! The engine: threads, scratch memory, a cache of plans, and the one place where a backend is chosen.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use rapt_core::{
    Caps, Device, DeviceMemory, Error, Executor, Offload, Operands, Options, Plan, Qkv, Queue, Result, Spec, Tensors,
    View, Workspace,
};

use rustc_hash::FxHashMap;

use crate::{Pool, Tensor};

/// Where the number of threads comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// Asked for by the caller.
    Asked(usize),
    /// `RAPT_NUM_THREADS`.
    Environment(usize),
    /// What the system offers.
    Available(usize),
}

impl Threads {
    /// `asked`, else `RAPT_NUM_THREADS`, else what the system offers.
    ///
    /// # Errors
    /// [`Error::Option`] if `asked` is 0 or the variable holds no number above 0.
    pub fn resolve(asked: Option<usize>) -> Result<Self> {
        let refuse = |option, got: String| Err(Error::Option { option, got, allowed: "a number from 1 up".into() });
        if let Some(threads) = asked {
            return if threads > 0 { Ok(Threads::Asked(threads)) } else { refuse("threads", "0".into()) };
        }
        if let Ok(text) = std::env::var("RAPT_NUM_THREADS") {
            return match text.trim().parse() {
                Ok(threads) if threads > 0 => Ok(Threads::Environment(threads)),
                _ => refuse("RAPT_NUM_THREADS", format!("{text:?}")),
            };
        }
        Ok(Threads::Available(std::thread::available_parallelism().map_or(1, usize::from)))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> usize {
        let (Threads::Asked(threads) | Threads::Environment(threads) | Threads::Available(threads)) = self;
        threads
    }
}

/// Plans kept before the cache starts anew.
const PLANS: usize = 1024;

/// Plans by spec, then by number of threads.
type Plans = FxHashMap<Spec, Vec<(usize, Arc<Plan>)>>;

/// Owns threads, scratch memory and plans. Every method may be called from several threads at once.
#[derive(Debug)]
pub struct Engine {
    threads: Threads,
    caps: Caps,
    pool: Pool,
    plans: RwLock<Plans>,
    workspaces: Mutex<Vec<Workspace>>,
    /// Where tensors of the host are copied to; `None` attends to them on the host.
    pub(crate) offload: Option<Arc<dyn Offload>>,
    /// The same device, where this build has its backend: for tensors in its buffers.
    #[cfg(feature = "vulkan")]
    pub(crate) gpu: Option<Arc<rapt_wgpu::Gpu>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // What lies behind each lock is whole at every moment: a panic elsewhere spoils nothing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// An engine with `threads` threads; `None` asks `RAPT_NUM_THREADS`, then the system.
    ///
    /// # Errors
    /// [`Error::Option`] for a bad number of threads or a bad `RAPT_ISA`.
    pub fn new(threads: Option<usize>) -> Result<Self> {
        let threads = Threads::resolve(threads)?;
        let caps = rapt_cpu::detect(threads.get())?;
        Ok(Engine {
            threads,
            caps,
            pool: Pool::new(threads.get()),
            plans: RwLock::new(Plans::default()),
            workspaces: Mutex::new(Vec::new()),
            offload: None,
            #[cfg(feature = "vulkan")]
            gpu: None,
        })
    }

    /// An engine that attends to tensors of the host on `device`: on the host itself, or on a GPU that Vulkan reaches, to which they are copied.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] for a device that is not there, that such tensors are not copied to, or for which this build has no
    /// backend; as [`Engine::new`].
    pub fn on(device: Device, threads: Option<usize>) -> Result<Self> {
        match device {
            Device::Cpu => Engine::new(threads),
            #[cfg(feature = "vulkan")]
            Device::Vulkan(adapter) => Engine::on_adapter(adapter, threads),
            _ => Engine::with_offload(crate::offload(device)?, threads),
        }
    }

    /// An engine whose tensors of the host are copied to `offload` and attended to there: [`offload`](crate::offload()) opens one that this
    /// build has a backend for, [`rapt::bridge`](crate::bridge) one that another library has.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_offload(offload: Arc<dyn Offload>, threads: Option<usize>) -> Result<Self> {
        let mut engine = Engine::new(threads)?;
        engine.offload = Some(offload);
        Ok(engine)
    }

    /// Where this engine's tensors of the host are copied to; `None` attends to them on the host.
    #[must_use]
    pub fn offload(&self) -> Option<&dyn Offload> {
        self.offload.as_deref()
    }

    /// The number of threads, and where it comes from.
    #[must_use]
    pub fn threads(&self) -> Threads {
        self.threads
    }

    /// What the machine offers.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// What will run for `spec` on this engine's own threads.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with what to do instead.
    pub fn plan(&self, spec: &Spec) -> Result<Arc<Plan>> {
        self.plan_for(spec, self.threads.get())
    }

    /// What will run for `spec` on `threads` threads of somebody else's pool.
    ///
    /// # Errors
    /// As [`Engine::plan`].
    pub fn plan_for(&self, spec: &Spec, threads: usize) -> Result<Arc<Plan>> {
        let cached = |plans: &Plans| {
            let of_spec = plans.get(spec)?;
            of_spec.iter().find(|(n, _)| *n == threads).map(|(_, plan)| Arc::clone(plan))
        };
        if let Some(plan) = cached(&self.plans.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(plan);
        }
        let caps = Caps { threads, ..self.caps.clone() };
        let plan = Arc::new(self.select(spec, &caps)?);
        tracing::debug!(target: "rapt", plan = %plan.explain(), "plan");
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= PLANS {
            plans.clear();
        }
        plans.entry(spec.clone()).or_default().push((threads, Arc::clone(&plan)));
        Ok(plan)
    }

    /// What runs for `spec` on the host, whatever GPU this engine has: for what has other steps there too.
    pub(crate) fn plan_on_host(&self, spec: &Spec, threads: usize) -> Result<Arc<Plan>> {
        if self.offload.is_some() {
            return rapt_cpu::select(spec, &Caps { threads, ..self.caps.clone() }).map(Arc::new);
        }
        self.plan_for(spec, threads)
    }

    /// That this engine attends on the host: `what` has no kernel on a GPU of Vulkan's.
    pub(crate) fn expect_host(&self, what: &'static str) -> Result<()> {
        if let Some(offload) = &self.offload {
            let what = format!("{what} on {}", offload.device());
            return Err(Error::unsupported(
                what,
                "no kernel in WGSL reads it",
                "use an engine of the host: Engine::new",
            ));
        }
        Ok(())
    }

    /// The one choice of a backend.
    fn select(&self, spec: &Spec, caps: &Caps) -> Result<Plan> {
        #[cfg(feature = "vulkan")]
        if let (Device::Vulkan(_), Some(gpu)) = (spec.device, &self.gpu) {
            return gpu.plan(spec);
        }
        match spec.device {
            Device::Cpu => match &self.offload {
                Some(offload) => offload.plan_host(spec),
                None => rapt_cpu::select(spec, caps),
            },
            Device::Cuda(_) => Engine::cuda(spec.device)?.plan(spec),
            Device::Mps(_) => Engine::metal(spec.device)?.plan(spec),
            device => {
                let why = "this engine serves host memory, NVIDIA GPUs and Apple GPUs".into();
                Err(Error::DeviceUnavailable { device, why })
            }
        }
    }

    /// Runs `plan` on this engine's threads; `out` and `lse` are written when it returns.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] before anything is written; [`Error::WorkerPanicked`].
    #[inline]
    pub fn run(&self, plan: &Plan, operands: &mut Operands<'_>) -> Result<()> {
        self.run_on(plan, operands, &Queue::Host(&self.pool))
    }

    /// Runs `plan` on somebody else's threads.
    ///
    /// # Errors
    /// As [`Engine::run`]; [`Error::DeviceMismatch`] for the plan of a GPU, whose memory no thread of the host may touch.
    pub fn run_on(&self, plan: &Plan, operands: &mut Operands<'_>, queue: &Queue<'_>) -> Result<()> {
        if plan.spec().device != Device::Cpu {
            return Err(Error::DeviceMismatch { tensor: "queue", expected: plan.spec().device, got: Device::Cpu });
        }
        if let Some(offload) = &self.offload
            && offload.is_planned_here(plan)
        {
            return offload.run_host(plan, operands);
        }
        self.with_workspace(plan.workspace_bytes(), |workspace| match queue {
            Queue::Host(executor) => rapt_cpu::run(plan, operands, workspace, *executor),
            _ => Err(Error::unsupported("this queue", "its run outlives the call", "use Engine::run_async")),
        })
    }

    /// Gives `run` at least `bytes` of scratch memory.
    pub(crate) fn with_workspace<E: From<Error>>(
        &self,
        bytes: usize,
        run: impl FnOnce(&mut Workspace) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut workspace = lock(&self.workspaces).pop().unwrap_or_default();
        let done = workspace.ensure(bytes).map_err(E::from).and_then(|()| run(&mut workspace));
        lock(&self.workspaces).push(workspace);
        done
    }

    /// Enqueues `plan` on a stream and waits for nothing. `workspace` is memory of the device, of at least the plan's
    /// `workspace_bytes`, from whatever allocator the caller has. May be captured into a CUDA graph.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`], [`Error::OutOfMemory`] for a short workspace, [`Error::DeviceUnavailable`],
    /// [`Error::DeviceFailed`]; [`Error::Unsupported`] for a queue of the host.
    ///
    /// # Safety
    /// The memory of the operands and of `workspace` is memory of the plan's device that stays valid, and that nobody else
    /// writes (or, for outputs and workspace, reads), until the stream has passed this run. The stream is a live one of
    /// that device.
    pub unsafe fn run_async(
        &self,
        plan: &Plan,
        operands: &mut Operands<'_>,
        workspace: DeviceMemory,
        queue: &Queue<'_>,
    ) -> Result<()> {
        match *queue {
            Queue::Cuda { device, stream } if plan.spec().device == Device::Cuda(device) => {
                // SAFETY: as the caller promises.
                unsafe { Engine::cuda(plan.spec().device)?.run(plan, operands, workspace, stream) }
            }
            // Its operands are held, and its workspace is PyTorch's own.
            Queue::Mps { device } if plan.spec().device == Device::Mps(device) => {
                Engine::metal(plan.spec().device)?.run(plan, operands)
            }
            Queue::Mps { device } => {
                let (expected, got) = (plan.spec().device, Device::Mps(device));
                Err(Error::DeviceMismatch { tensor: "queue", expected, got })
            }
            Queue::Cuda { device, .. } => {
                let (expected, got) = (plan.spec().device, Device::Cuda(device));
                Err(Error::DeviceMismatch { tensor: "queue", expected, got })
            }
            _ => Err(Error::unsupported("this queue", "its run ends with the call", "use Engine::run_on")),
        }
    }

    pub(crate) fn cuda(device: Device) -> Result<&'static rapt_cuda::Backend> {
        rapt_cuda::Backend::get().map_err(|error| error.on(device))
    }

    fn metal(device: Device) -> Result<&'static rapt_metal::Backend> {
        rapt_metal::Backend::get().map_err(|error| error.on(device))
    }

    /// Plans, proves and runs one request into `tensors.out` (and `tensors.lse`).
    ///
    /// # Errors
    /// Any [`Error`]; nothing is written before everything is proven.
    pub fn attention_into(&self, tensors: Tensors<'_>, options: &Options) -> Result<()> {
        let spec = spec_of(&tensors, options)?;
        let plan = self.plan(&spec)?;
        self.run(&plan, &mut Operands::check(tensors, plan.spec())?)
    }

    /// The threads of this engine.
    #[must_use]
    pub fn executor(&self) -> &dyn Executor {
        &self.pool
    }
}

/// What `tensors` and `options` ask, without the pointers.
///
/// # Errors
/// Any [`Error`] of kind dtype, shape, option or device.
pub fn spec_of(tensors: &Tensors<'_>, options: &Options) -> Result<Spec> {
    let mut builder = Spec::builder(&tensors.q, &tensors.k, &tensors.v, options);
    builder
        .codes(tensors.codes.as_deref())
        .mask(tensors.mask.as_ref())
        .sinks(tensors.sinks.as_ref())
        .alibi_slopes(tensors.alibi_slopes.as_ref())
        .out(&tensors.out);
    if let Some(lse) = &tensors.lse {
        builder.lse(lse);
    }
    builder.build()
}

/// The engine that the free functions use.
///
/// # Errors
/// [`Error::Option`] if an environment variable holds nonsense.
pub fn default_engine() -> Result<&'static Engine> {
    static ENGINE: OnceLock<Result<Engine>> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::new(None)).as_ref().map_err(Clone::clone)
}

/// `softmax(q·kᵀ · scale)·v`, row-major in the layout of `options`, with the dtype of `q` unless asked otherwise.
///
/// `q` is `[batch, num_q_heads, q_len, head_dim]` or less its leading dimensions, `k` and `v` are
/// `[batch, num_kv_heads, kv_len, head_dim(_v)]`. Masks, sinks, ALiBi, lse and outputs of your own:
/// [`Engine::attention_into`].
///
/// # Errors
/// Any [`Error`].
pub fn attention(q: &View<'_>, k: &View<'_>, v: &View<'_>, options: &Options) -> Result<Tensor> {
    let rank = q.shape().len();
    let spec = Spec::builder(q, k, v, options).build()?;
    let mut out = Tensor::zeros(spec.out.dtype, spec.out_shape(rank))?;
    let tensors = Tensors::new(*q, *k, *v, out.view_mut()?);
    default_engine()?.attention_into(tensors, options)?;
    Ok(out)
}

/// [`attention`] on quantized k and v: their numbers are formed where they are loaded, never as a tensor.
///
/// # Errors
/// Any [`Error`].
pub fn attention_quantized(
    q: &View<'_>,
    k: &rapt_quant::QuantizedView<'_>,
    v: &rapt_quant::QuantizedView<'_>,
    options: &Options,
) -> Result<Tensor> {
    let (of_k, of_v) = (k.codes(), v.codes());
    let codes = Qkv { q: None, k: Some(Box::new(of_k)), v: Some(Box::new(of_v)) };
    let spec = Spec::builder(q, &k.tensor(), &v.tensor(), options).codes(codes.as_deref()).build()?;
    let mut out = Tensor::zeros(spec.out.dtype, spec.out_shape(q.shape().len()))?;
    let tensors = Tensors { codes, ..Tensors::new(*q, k.tensor(), v.tensor(), out.view_mut()?) };
    default_engine()?.attention_into(tensors, options)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_that_a_panic_poisoned_still_serve() {
        let engine = Engine::new(Some(2)).unwrap();
        let data = [0.5f32; 64];
        let view = View::contiguous("q", &data, [1, 1, 16, 4].into()).unwrap();
        let spec = Spec::builder(&view, &view, &view, &Options::default()).build().unwrap();
        let planned = engine.plan(&spec).unwrap();
        std::thread::scope(|scope| {
            let poison = scope.spawn(|| {
                let _plans = engine.plans.write().unwrap();
                let _workspaces = engine.workspaces.lock().unwrap();
                panic!("while both are held");
            });
            assert!(poison.join().is_err());
        });
        assert!(engine.plans.is_poisoned() && engine.workspaces.is_poisoned());
        assert_eq!(*engine.plan(&spec).unwrap(), *planned, "what was cached is whole");
        let mut out = [f32::NAN; 64];
        let tensors = Tensors::new(
            view,
            view,
            view,
            rapt_core::ViewMut::contiguous("out", &mut out, [1, 1, 16, 4].into()).unwrap(),
        );
        engine.attention_into(tensors, &Options::default().with_softcap(2.0)).unwrap();
        assert_eq!(out, [0.5; 64], "equal values: their mean");
    }
}
