//! One GPU: opened, planned for, run on, and opened again where it was lost.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use rapt_core::{Device, Error, Kernel, Operands, Plan, Result as CoreResult, Spec};
use rapt_shader::{Algorithm, Caps, ShaderLaunch};

use crate::adapter::{AdapterFacts, adapter, caps, features_used};
use crate::buffers::BufferTensors;
use crate::device::{Checks, Open};
use crate::error::{GpuError, Result};
use crate::launch;

/// Where a device comes from.
#[derive(Debug)]
enum Source {
    /// An adapter, which gives another where one is lost.
    Adapter(wgpu::Adapter),
    /// The caller: what is lost is the caller's to replace.
    Caller,
}

/// How a GPU is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// What keeps kernels inside the memory that is bound.
    pub checks: Checks,
    /// The folder that compiled kernels are kept in; `None` for none.
    pub cache: Option<PathBuf>,
}

impl Default for OpenOptions {
    /// Proofs, and the folder of [`cache_folder`](rapt_core::cache_folder()).
    fn default() -> Self {
        OpenOptions { checks: Checks::Proven, cache: rapt_core::cache_folder() }
    }
}

/// A GPU that is open. Every method may be called from several threads at once.
#[derive(Debug)]
pub struct Gpu {
    source: Source,
    facts: Option<AdapterFacts>,
    index: u32,
    caps: Caps,
    options: OpenOptions,
    open: RwLock<Arc<Open>>,
}

fn open(adapter: &wgpu::Adapter, name: &str, options: &OpenOptions) -> Result<Open> {
    let descriptor = wgpu::DeviceDescriptor {
        label: Some("rapt"),
        required_features: features_used(adapter),
        required_limits: adapter.limits(),
        experimental_features: crate::device::experimental_features(),
        ..wgpu::DeviceDescriptor::default()
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor))
        .map_err(|error| GpuError::NoDevice { adapter: name.to_owned(), why: error.to_string() })?;
    Ok(Open::new(device, queue, options.checks, options.cache.clone()))
}

impl Gpu {
    /// Opens the adapter of this index of [`adapters`](crate::adapters()).
    ///
    /// # Errors
    /// [`GpuError::NoAdapter`], [`GpuError::Missing`], [`GpuError::NoDevice`].
    pub fn open(index: u32) -> Result<Self> {
        Gpu::open_with(index, OpenOptions::default())
    }

    /// As [`Gpu::open`], with these options.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn open_with(index: u32, options: OpenOptions) -> Result<Self> {
        let (adapter, facts) = adapter(index)?;
        let open = open(&adapter, &facts.name, &options)?;
        let caps = facts.caps;
        Ok(Gpu {
            source: Source::Adapter(adapter),
            facts: Some(facts),
            index,
            caps,
            options,
            open: RwLock::new(Arc::new(open)),
        })
    }

    /// A GPU on the caller's device and queue, whose views are of `vulkan:{index}`. 16-bit stores are used where the device was opened with
    /// `SHADER_I16`, and compiled kernels are kept where it was with `PIPELINE_CACHE`. The device's callbacks for errors and for its loss are replaced.
    #[must_use]
    pub fn with_device(device: wgpu::Device, queue: wgpu::Queue, index: u32) -> Self {
        let caps = caps(device.features(), &device.limits(), &device.adapter_info());
        let options = OpenOptions::default();
        let open = RwLock::new(Arc::new(Open::new(device, queue, options.checks, options.cache.clone())));
        Gpu { source: Source::Caller, facts: None, index, caps, options, open }
    }

    /// What the adapter is, where it was opened here.
    #[must_use]
    pub fn facts(&self) -> Option<&AdapterFacts> {
        self.facts.as_ref()
    }

    /// What selection depends on.
    #[must_use]
    pub fn caps(&self) -> &Caps {
        &self.caps
    }

    /// The device of this GPU's tensors.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::Vulkan(self.index)
    }

    /// The device and the queue that runs are submitted to: buffers of [`Gpu::run`] are made there. After a loss others.
    #[must_use]
    pub fn wgpu(&self) -> (wgpu::Device, wgpu::Queue) {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        (open.device.clone(), open.queue.clone())
    }

    /// The open device; a lost one is replaced by another of its adapter.
    pub(crate) fn opened(&self) -> CoreResult<Arc<Open>> {
        let current = || Arc::clone(&self.open.read().unwrap_or_else(PoisonError::into_inner));
        let now = current();
        let Some(lost) = now.lost() else { return Ok(now) };
        let Source::Adapter(adapter) = &self.source else { return Err(lost.on(self.device())) };
        let mut place = self.open.write().unwrap_or_else(PoisonError::into_inner);
        if place.lost().is_some() {
            let name = self.facts.as_ref().map_or("the adapter", |facts| facts.name.as_str());
            *place = Arc::new(open(adapter, name, &self.options).map_err(|error| error.on(self.device()))?);
        }
        Ok(Arc::clone(&place))
    }

    /// What runs for `spec`, whose tensors lie in buffers of this GPU, its kernel compiled.
    ///
    /// # Errors
    /// As [`select`](rapt_shader::select()); [`Error::DeviceUnavailable`] for another device, [`Error::DeviceFailed`].
    pub fn plan(&self, spec: &Spec) -> CoreResult<Plan> {
        self.compiled(spec, rapt_shader::select)
    }

    /// As [`Gpu::plan`], but with this kernel, be it the fastest or not.
    ///
    /// # Errors
    /// As [`Gpu::plan`], and as [`select_kernel`](rapt_shader::select_kernel()).
    pub fn plan_kernel(&self, spec: &Spec, kernel: Kernel) -> CoreResult<Plan> {
        self.compiled(spec, |spec, caps| rapt_shader::select_kernel(spec, caps, kernel))
    }

    /// As [`Gpu::plan`], but with this algorithm, whose tiles may be others than [`select`](rapt_shader::select()) has: to measure them.
    ///
    /// # Errors
    /// As [`Gpu::plan`].
    pub fn plan_algorithm(&self, spec: &Spec, algorithm: Algorithm) -> CoreResult<Plan> {
        self.compiled(spec, |spec, caps| rapt_shader::select_algorithm(spec, caps, algorithm))
    }

    fn compiled(&self, spec: &Spec, select: impl FnOnce(&Spec, &Caps) -> CoreResult<Plan>) -> CoreResult<Plan> {
        if spec.device != self.device() {
            let why = format!("this engine serves the buffers of {}", self.device());
            return Err(Error::DeviceUnavailable { device: spec.device, why });
        }
        let plan = select(spec, &self.caps)?;
        let launch = plan.launch_plan::<ShaderLaunch>()?;
        for variant in launch.variant.iter().chain(&launch.combine) {
            self.opened()?.pipeline(variant).map_err(|error| error.on(self.device()))?;
        }
        Ok(plan)
    }

    /// Submits `plan` on `tensors` and waits for nothing: what is submitted later, to read `out` say, comes after it. wgpu keeps the
    /// buffers until then.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] and others of [`Operands::check`]; [`Error::Unsupported`] for buffers that cannot be bound, and for outputs that
    /// share a buffer with another tensor; [`Error::DeviceFailed`], [`Error::OutOfMemory`]. After a loss, buffers of the lost device are
    /// refused.
    pub fn run(&self, plan: &Plan, tensors: &BufferTensors<'_>) -> CoreResult<()> {
        let launch = plan.launch_plan::<ShaderLaunch>()?;
        let operands = Operands::check(tensors.views(self.device())?, plan.spec())?;
        launch::submit(&*self.opened()?, launch, &operands, plan.spec(), tensors, None)
    }
}
