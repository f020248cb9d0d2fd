//! Devices, loaded kernels, and the run of a plan.
//!
//! [`Backend::plan`] selects, and loads each kernel that the plan launches; each is loaded once on a device. [`Backend::run`]
//! launches them. [`Backend::deviations`] alone waits for a stream: the host reads what it finds. Deliberately absent: memory, streams.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use rapt_core::{
    Arch, BackwardOperands, BackwardPlan, BackwardSpec, COMPUTED, Device, DeviceMemory, Error, HeadDeviation, Operands,
    Plan, Qkv, Result as CoreResult, Spec, View,
};
use rustc_hash::FxHashMap;

use crate::append::NewKeys;
use crate::artifacts::{Artifacts, Provenance, ShippedFacts};
use crate::driver::{Cuda, Driver, Facts};
use crate::error::{CudaError, Result};
use crate::launch::{BackwardLaunch, CudaLaunch, DeviationPlan, Loaded};
use crate::select::{Caps, backward, deviation, launch_plan, plan_of};
use crate::variant::KernelVariant;

/// What a device is, for reports.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFacts {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// What selection depends on.
    pub caps: Caps,
}

/// A driver, the sources of machine code, and what was loaded so far.
#[derive(Debug)]
pub struct Backend {
    driver: Box<dyn Driver>,
    artifacts: Artifacts,
    devices: Mutex<FxHashMap<u32, Result<Arc<DeviceFacts>>>>,
    loaded: RwLock<FxHashMap<(u32, KernelVariant), Loaded>>,
    /// One compilation at a time: two threads that ask for one kernel compile it once.
    building: Mutex<()>,
}

impl Backend {
    /// The backend of this process.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] and others of the driver's start. The answer does not change in the life of the process.
    pub fn get() -> std::result::Result<&'static Backend, CudaError> {
        static BACKEND: OnceLock<Result<Backend>> = OnceLock::new();
        let start = || Ok(Backend::with_parts(Box::new(Cuda::start()?), Artifacts::of_process()));
        BACKEND.get_or_init(start).as_ref().map_err(Clone::clone)
    }

    pub(crate) fn with_parts(driver: Box<dyn Driver>, artifacts: Artifacts) -> Self {
        Backend { driver, artifacts, devices: Mutex::default(), loaded: RwLock::default(), building: Mutex::new(()) }
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        self.driver.as_ref()
    }

    /// What the package ships for a device of this architecture.
    #[must_use]
    pub fn shipped(&self, arch: Arch) -> Option<ShippedFacts> {
        self.artifacts.bundled(arch)
    }

    /// How many devices there are.
    ///
    /// # Errors
    /// The driver's.
    pub fn count(&self) -> std::result::Result<u32, CudaError> {
        self.driver.count()
    }

    /// The compiler's version, major and minor.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`].
    pub fn compiler_version(&self) -> std::result::Result<(i32, i32), CudaError> {
        Ok(self.artifacts.compiler()?.version())
    }

    /// Where machine code is kept, if it is.
    #[must_use]
    pub fn cache_folder(&self) -> Option<&Path> {
        self.artifacts.cache_folder()
    }

    /// What device `index` is.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`], [`CudaError::Architecture`], the driver's.
    pub fn device(&self, index: u32) -> std::result::Result<Arc<DeviceFacts>, CudaError> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        let ask = || {
            let Facts { name, capability, multiprocessors, shared_bytes, clock_hz, bandwidth } =
                self.driver.facts(index)?;
            let arch = Arch::of_compute_capability(capability.0, capability.1);
            let arch = arch.ok_or_else(|| CudaError::Architecture {
                name: name.clone(),
                major: capability.0,
                minor: capability.1,
            })?;
            let positive = |x: f64| (x > 0.0).then_some(x);
            let (clock_hz, bandwidth) = (positive(clock_hz), positive(bandwidth));
            let caps = Caps { arch, multiprocessors, shared_bytes, clock_hz, bandwidth };
            Ok(Arc::new(DeviceFacts { index, name, capability, caps }))
        };
        devices.entry(index).or_insert_with(ask).clone()
    }

    /// What runs for `spec`, its kernels compiled and loaded.
    ///
    /// # Errors
    /// As [`select`](crate::select()); [`Error::DeviceUnavailable`] and [`Error::DeviceFailed`].
    pub fn plan(&self, spec: &Spec) -> CoreResult<Plan> {
        let Device::Cuda(index) = spec.device else {
            let why = "this backend serves the memory of NVIDIA GPUs".into();
            return Err(Error::DeviceUnavailable { device: spec.device, why });
        };
        let on = |error: CudaError| error.on(spec.device);
        let device = self.device(index).map_err(on)?;
        let launch_plan = launch_plan(spec, &device.caps)?.loaded(|variant| self.load(index, variant)).map_err(on)?;
        Ok(plan_of(spec, &device.caps, launch_plan))
    }

    /// What finds how far the heads of `spec` may be off, whose k or v are codes: its kernels compiled and loaded.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for float64, a quantized q, and caches or sequences one after another; as [`Backend::plan`].
    pub fn plan_deviations(&self, spec: &Spec) -> CoreResult<DeviationPlan> {
        let Device::Cuda(index) = spec.device else {
            let why = "this backend serves the memory of NVIDIA GPUs".into();
            return Err(Error::DeviceUnavailable { device: spec.device, why });
        };
        let on = |error: CudaError| error.on(spec.device);
        let device = self.device(index).map_err(on)?;
        deviation::plan(spec, &device.caps)?.loaded(|variant| self.load(index, variant)).map_err(on)
    }

    /// What runs for the gradients of `spec`, its kernels compiled and loaded.
    ///
    /// # Errors
    /// As [`select_backward`](crate::select_backward); [`Error::DeviceUnavailable`] and [`Error::DeviceFailed`].
    pub fn plan_backward(&self, spec: &BackwardSpec) -> CoreResult<BackwardPlan> {
        let device = spec.forward().device;
        let Device::Cuda(index) = device else {
            let why = "this backend serves the memory of NVIDIA GPUs".into();
            return Err(Error::DeviceUnavailable { device, why });
        };
        let on = |error: CudaError| error.on(device);
        let facts = self.device(index).map_err(on)?;
        let launch_plan = backward::launch_plan(spec, &facts.caps)?.loaded(|variant| self.load(index, variant));
        Ok(backward::plan_of(spec, &facts.caps, launch_plan.map_err(on)?))
    }

    fn load(&self, device: u32, variant: &KernelVariant) -> Result<Loaded> {
        let find = || self.loaded.read().unwrap_or_else(PoisonError::into_inner).get(&(device, *variant)).copied();
        if let Some(loaded) = find() {
            return Ok(loaded);
        }
        let _building = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = find() {
            return Ok(loaded);
        }
        let load = |cubin: &[u8]| self.driver.load(device, cubin, variant.entry(), variant.shared_bytes());
        let (function, provenance) = self.artifacts.load(variant, load)?;
        if provenance == Provenance::Compiled {
            let (registers, local_bytes) = (function.registers, function.local_bytes);
            tracing::debug!(target: "rapt", %variant, registers, local_bytes, "compiled");
        }
        let loaded = Loaded { function, provenance };
        self.loaded.write().unwrap_or_else(PoisonError::into_inner).insert((device, *variant), loaded);
        Ok(loaded)
    }

    /// Enqueues `plan` on `stream` (`CUstream`; 0 is the default stream) of the plan's device. Waits for nothing, compiles and loads
    /// nothing.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for operands of another spec and the plan of another backend; [`Error::OutOfMemory`] if `workspace` is
    /// shorter than planned; [`Error::DeviceUnavailable`] for a plan that [`Backend::plan`] did not make; [`Error::DeviceFailed`].
    ///
    /// # Safety
    /// The memory of the operands and of `workspace` is memory of the plan's device that stays valid, and that nobody else
    /// writes (or, for outputs and workspace, reads), until `stream` has passed this run. `stream` is a live stream of that
    /// device.
    pub unsafe fn run(
        &self,
        plan: &Plan,
        operands: &mut Operands<'_>,
        workspace: DeviceMemory,
        stream: usize,
    ) -> CoreResult<()> {
        let launch_plan = plan.launch_plan::<CudaLaunch>()?;
        operands.expect(plan.spec())?;
        // SAFETY: `expect` compared the spec that the operands were proven against with the plan's, whose launch plan this is; the
        // caller vouches for memory and stream.
        unsafe { launch_plan.enqueue(self.driver(), operands, None, workspace, stream) }
    }

    /// Enqueues `plan` on `stream` of the plan's device: every gradient that is asked for. Waits for nothing, compiles and loads nothing.
    ///
    /// # Errors
    /// As [`Backend::run`].
    ///
    /// # Safety
    /// As [`Backend::run`]: the gradients are the outputs.
    pub unsafe fn run_backward(
        &self,
        plan: &BackwardPlan,
        operands: &mut BackwardOperands<'_>,
        workspace: DeviceMemory,
        stream: usize,
    ) -> CoreResult<()> {
        let launch_plan = plan.launch_plan::<BackwardLaunch>()?;
        operands.expect(plan.spec())?;
        // SAFETY: `expect` compared the spec that the operands were proven against with the plan's, whose launch plan this is; the
        // caller vouches for memory and stream.
        unsafe { launch_plan.enqueue(self.driver(), operands, workspace, stream) }
    }

    /// Of each query head, `[batch, num_q_heads]`, how far a run of the kernel that [`Backend::plan`] takes for the same spec may be off:
    /// rounding of its weights included, that of its output not. Enqueues on `stream`, and waits until that has come so far. What lies in
    /// `out` and `lse` is left as it is.
    ///
    /// `errors`, of those of k and v that are codes and of no other: what was measured of each key head, `[batch, num_kv_heads]`, as
    /// [`MatrixErrors`](rapt_core::MatrixErrors) lie one after another in one flat tensor of float32: `error` of all, then `spread`, `mean`,
    /// `share`, `bias`, `coherence`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] while the stream is captured into a CUDA graph: nothing runs then that could be waited for.
    /// [`Error::NotAsPlanned`] for operands of another spec, and errors of other sizes; otherwise as [`Backend::run`].
    ///
    /// # Safety
    /// As [`Backend::run`], the memory of the errors included; until this returns.
    pub unsafe fn deviations(
        &self,
        plan: &DeviationPlan,
        operands: &mut Operands<'_>,
        errors: &Qkv<Option<View<'_>>>,
        workspace: DeviceMemory,
        stream: usize,
    ) -> CoreResult<Vec<HeadDeviation>> {
        let Device::Cuda(index) = plan.spec().device else {
            return Err(Error::NotAsPlanned { tensor: "operands", what: "device" });
        };
        operands.expect(plan.spec())?;
        let on = |error: CudaError| error.on(plan.spec().device);
        self.refuse_capture(index, stream)?;
        let mut bytes = vec![0; plan.figures_bytes()];
        // SAFETY: `expect` compared the spec that the operands were proven against with the plan's; `enqueue` compares the length of the
        // workspace, at whose begin the figures lie; the caller vouches for memory and stream.
        unsafe {
            plan.enqueue(self.driver(), operands, errors, workspace, stream)?;
            if !bytes.is_empty() {
                self.driver().read(index, workspace.address, &mut bytes, stream).map_err(on)?;
            }
        }
        Ok(plan.figures(&bytes))
    }

    /// Refuses what waits for a stream that is captured.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::DeviceUnavailable`] and [`Error::DeviceFailed`].
    pub fn refuse_capture(&self, device: u32, stream: usize) -> CoreResult<()> {
        let is_captured = self.driver().is_capturing(device, stream).map_err(|error| error.on(Device::Cuda(device)))?;
        if !is_captured {
            return Ok(());
        }
        let why =
            "the host reads how far each head may be off before it launches one, and what is captured does not run";
        let instead = "tolerance=None in what is captured, of heads that were judged before it";
        Err(Error::unsupported("tolerance while a CUDA graph is captured", why, instead))
    }

    /// As [`Backend::run`], for a plan whose sequences get new keys, which are written into the caches (k and v of `operands`) first.
    ///
    /// # Errors
    /// As [`Backend::run`]; [`Error::NotAsPlanned`] for new keys of other sizes or another dtype than the caches have; those of caches
    /// that are codes are numbers of any dtype that attention computes.
    ///
    /// # Safety
    /// As [`Backend::run`]. The caches may be written too, with factors of codes that each key has, name every address once, and share none
    /// with what is new.
    pub unsafe fn append_and_run(
        &self,
        plan: &Plan,
        operands: &mut Operands<'_>,
        new: &NewKeys<'_>,
        workspace: DeviceMemory,
        stream: usize,
    ) -> CoreResult<()> {
        let launch_plan = plan.launch_plan::<CudaLaunch>()?;
        operands.expect(plan.spec())?;
        let (spec, tensors) = (plan.spec(), operands.tensors());
        let added = spec.lengths.as_deref().map_or(0, |of| of.added);
        let codes = spec.codes.as_deref();
        for (tensor, new, cache, codes, dim) in [
            ("k", Some(&new.k), &tensors.k, codes.k, spec.head_dim()),
            ("v", new.v.as_ref(), &tensors.v, codes.v, spec.head_dim_v()),
        ] {
            let Some(new) = new else { continue };
            let is_planned = new.shape().len() == 4
                && cache.shape().len() == 4
                && new.shape()[..2] == [spec.batch(), added]
                && new.shape()[2..] == [cache.shape()[2], dim];
            let has_dtype =
                if codes.is_some() { COMPUTED.contains(&new.dtype()) } else { new.dtype() == cache.dtype() };
            if !is_planned || !has_dtype || new.device() != spec.device {
                return Err(Error::NotAsPlanned { tensor, what: "dtype, sizes or device of new keys" });
            }
        }
        // SAFETY: as `run`; the sizes and dtypes of what is new were compared, the caller vouches for the caches.
        unsafe { launch_plan.enqueue(self.driver(), operands, Some(new), workspace, stream) }
    }
}
