//! An open device: its pipelines, and its calls with their errors typed.
//!
//! wgpu answers errors by scopes and callbacks; `guarded` makes results of them. Deliberately absent: requests.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rapt_shader::{Binding, KernelVariant, Params};
use rustc_hash::FxHashMap;

use crate::cache::Cache;
use crate::chunks::Staging;
use crate::error::{GpuError, Result};

/// What keeps a kernel inside the memory that is bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Checks {
    /// The proofs before each run: kernels are compiled without checks of their own.
    #[default]
    Proven,
    /// Those and checks that are compiled into each access and each loop. The same results, slower.
    Compiled,
}

/// Parameters are storage: Mesa's lavapipe compiles a kernel anew for each value of a uniform that a loop's bound is made of (22.3).
const PARAMS: wgpu::BufferBindingType = wgpu::BufferBindingType::Storage { read_only: true };

/// A compiled kernel, and the layout of the buffers that it binds.
#[derive(Clone, Debug)]
pub(crate) struct Pipeline {
    pub(crate) pipeline: wgpu::ComputePipeline,
    pub(crate) layout: wgpu::BindGroupLayout,
}

/// A device, and what was compiled for it.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    /// What is bound where a request has no such tensor: one to read, two to write.
    pub(crate) unused: [wgpu::Buffer; 3],
    checks: Checks,
    /// Where compiled kernels are kept, if the device says what it compiled.
    cache: Option<Cache>,
    pipelines: Mutex<FxHashMap<KernelVariant, Pipeline>>,
    /// What a kernel leaves to the next of its launch: runs are submitted in turn, so one buffer serves all.
    workspace: Mutex<Option<wgpu::Buffer>>,
    staging: Mutex<Staging>,
    lost: Arc<Mutex<Option<String>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What lies behind each lock is whole at every moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn entry(binding: u32, ty: wgpu::BufferBindingType) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
        count: None,
    }
}

impl Open {
    pub(crate) fn new(device: wgpu::Device, queue: wgpu::Queue, checks: Checks, folder: Option<PathBuf>) -> Self {
        let lost = Arc::new(Mutex::new(None));
        let told = Arc::clone(&lost);
        device.set_device_lost_callback(move |_, why| *lock(&told) = Some(why));
        // What no scope sees is logged, where wgpu would panic.
        device.on_uncaptured_error(Arc::new(|error| tracing::warn!(target: "rapt", %error, "wgpu")));
        let label = Some("rapt");
        let usage = wgpu::BufferUsages::STORAGE;
        let unused = [(); 3].map(|()| {
            device.create_buffer(&wgpu::BufferDescriptor { label, size: 16, usage, mapped_at_creation: false })
        });
        let (pipelines, workspace, staging) = (Mutex::default(), Mutex::default(), Mutex::default());
        let says = device.features().contains(wgpu::Features::PIPELINE_CACHE);
        let cache = Cache::new(folder.filter(|_| says), &device.adapter_info());
        Open { device, queue, unused, checks, cache, pipelines, workspace, staging, lost }
    }

    /// Why the device is lost, if it is.
    pub(crate) fn lost(&self) -> Option<GpuError> {
        lock(&self.lost).clone().map(|why| GpuError::Lost { why })
    }

    /// Runs `calls`, of which wgpu tells errors by scopes; `bytes` is what an allocation among them asks for.
    pub(crate) fn guarded<T>(&self, call: &'static str, bytes: usize, calls: impl FnOnce() -> T) -> Result<T> {
        let filters = [wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::Validation];
        let [memory, internal, validation] = filters.map(|filter| self.device.push_error_scope(filter));
        let done = calls();
        // In the reverse order of their beginning.
        let errors = [validation.pop(), internal.pop()].map(pollster::block_on);
        let memory = pollster::block_on(memory.pop());
        let error = errors.into_iter().flatten().next();
        if memory.is_some() || error.is_some() {
            // A loss is told when the device is asked how far it is.
            let _ = self.device.poll(wgpu::PollType::Poll);
        }
        if let Some(lost) = self.lost() {
            return Err(lost);
        }
        match (memory, error) {
            (Some(_), _) => Err(GpuError::OutOfMemory { bytes }),
            (None, Some(error)) => Err(GpuError::Failed { call, why: error.to_string() }),
            (None, None) => Ok(done),
        }
    }

    /// A buffer of `bytes`, which are made a multiple of 4.
    pub(crate) fn buffer(&self, bytes: usize, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer> {
        let size = (bytes.max(4) as u64).next_multiple_of(4);
        if size > self.device.limits().max_buffer_size {
            return Err(GpuError::OutOfMemory { bytes });
        }
        let descriptor = wgpu::BufferDescriptor { label: Some("rapt"), size, usage, mapped_at_creation: false };
        self.guarded("create_buffer", bytes, || self.device.create_buffer(&descriptor))
    }

    /// A buffer of at least so many bytes, which a launch may overwrite and the next one too.
    pub(crate) fn workspace(&self, bytes: usize) -> Result<wgpu::Buffer> {
        let mut workspace = lock(&self.workspace);
        match &*workspace {
            Some(buffer) if buffer.size() >= bytes as u64 => Ok(buffer.clone()),
            _ => Ok(workspace.insert(self.buffer(bytes, wgpu::BufferUsages::STORAGE)?).clone()),
        }
    }

    /// What copies between host and device keep; one at a time has it.
    pub(crate) fn staging(&self) -> MutexGuard<'_, Staging> {
        lock(&self.staging)
    }

    /// The pipeline of `variant`, compiled once.
    pub(crate) fn pipeline(&self, variant: &KernelVariant) -> Result<Pipeline> {
        let mut pipelines = lock(&self.pipelines);
        if let Some(pipeline) = pipelines.get(variant) {
            return Ok(pipeline.clone());
        }
        let text = variant.source();
        let name = self.cache.as_ref().map(|cache| (cache, cache.name(&text, &format!("{:?}", self.checks))));
        let kept = name.as_ref().and_then(|(cache, name)| cache.get(name));
        // A cache that cannot be made is as good as none.
        let compiled = name.as_ref().and_then(|_| self.compiled(kept.as_deref()).ok());
        let compile = || self.compile(variant, text, compiled.as_ref());
        let pipeline = self.guarded("create_compute_pipeline", 0, compile)?;
        if let (Some((cache, name)), Some(data)) = (&name, compiled.and_then(|compiled| compiled.get_data()))
            && kept.as_ref() != Some(&data)
        {
            cache.put(name, &data);
        }
        tracing::debug!(target: "rapt", %variant, "compiled");
        pipelines.insert(*variant, pipeline.clone());
        Ok(pipeline)
    }

    /// wgpu's cache of one pipeline, with what was kept of it.
    fn compiled(&self, kept: Option<&[u8]>) -> Result<wgpu::PipelineCache> {
        let descriptor = wgpu::PipelineCacheDescriptor { label: Some("rapt"), data: kept, fallback: true };
        // SAFETY: the data is what such a cache of this adapter and driver gave: `Cache` holds its digest with the name that says so, and wgpu asks the
        // driver whether it is its own.
        self.guarded("create_pipeline_cache", 0, || unsafe { self.device.create_pipeline_cache(&descriptor) })
    }

    fn compile(&self, variant: &KernelVariant, text: String, cache: Option<&wgpu::PipelineCache>) -> Pipeline {
        let label = Some("rapt");
        let buffer = |of: &Binding| entry(of.index, wgpu::BufferBindingType::Storage { read_only: !of.is_output });
        let entries: Vec<_> = std::iter::once(entry(0, PARAMS)).chain(variant.bindings().iter().map(buffer)).collect();
        let layout =
            self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries });
        let whole = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label,
            layout: Some(&whole),
            module: &self.module(text),
            entry_point: Some(variant.entry()),
            // The kernel writes workgroup memory before it reads it.
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..wgpu::PipelineCompilationOptions::default()
            },
            cache,
        });
        Pipeline { pipeline, layout }
    }

    pub(crate) fn module(&self, text: String) -> wgpu::ShaderModule {
        let source = wgpu::ShaderSource::Wgsl(text.into());
        let descriptor = wgpu::ShaderModuleDescriptor { label: Some("rapt"), source };
        match self.checks {
            Checks::Compiled => self.device.create_shader_module(descriptor),
            Checks::Proven => {
                let checks = wgpu::ShaderRuntimeChecks::unchecked();
                // SAFETY: the texts are those of rapt-shader, whose loops count up to a bound or end after one turn, and the two of `meter`, which do too and write a place a
                // thread of buffers that have as many. Their indices into buffers are addresses of
                // elements, which lie inside the window that `launch` binds: the operands were proven against the spec that the windows
                // are computed of.
                unsafe { self.device.create_shader_module_trusted(descriptor, checks) }
            }
        }
    }
}

/// Leave to use cooperative matrices.
pub(crate) fn experimental_features() -> wgpu::ExperimentalFeatures {
    // SAFETY: of what wgpu calls experimental only cooperative matrices are used, in texts that load and store whole tiles of workgroup memory.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// Bytes of one launch's parameters, at which those of the next may begin.
pub(crate) fn params_stride(device: &wgpu::Device) -> usize {
    Params::BYTES.next_multiple_of(device.limits().min_storage_buffer_offset_alignment as usize)
}
