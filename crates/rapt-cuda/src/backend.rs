//! Devices, compiled kernels, and the run of a plan.
//!
//! A kernel is loaded when a plan first asks for it: [`Backend::plan`]. Its machine code is what the package ships, else
//! what the cache on disk keeps, else what NVRTC compiles. [`Backend::run`] launches; it loads another only where pointers
//! turn out less aligned than strides promised. Deliberately absent: memory, streams, synchronisation.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use rapt_core::{Compiled, Device, DeviceMemory, Error, Launch, Operands, Plan, Result as CoreResult, Spec};
use rustc_hash::FxHashMap;

use crate::cache::{Cache, Name};
use crate::code::{Body, Code};
use crate::error::{CudaError, Result};
use crate::params::{HopperMaps, HopperParams, Params};
use crate::result::driver::{Cuda, Driver, Facts, Function, Grid};
use crate::result::nvrtc::{Compiler, Nvrtc};
use crate::select::{Caps, CudaLaunch, Design, Loads, decide, design_with};
use crate::shipped::{self, ShippedFacts};
use crate::tensor_map::{Copied, CopyMap, OUT_BOX_ROWS};

/// What a device is, for reports.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceFacts {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: (u32, u32),
    /// What selection knows of it.
    pub caps: Caps,
}

/// A kernel ready to be launched.
#[derive(Clone, Debug)]
struct Loaded {
    function: Function,
    source: &'static str,
}

/// A driver, a compiler, and what they have made so far.
#[derive(Debug)]
pub struct Backend {
    driver: Box<dyn Driver>,
    compiler: OnceLock<Result<Box<dyn Compiler>>>,
    cache: Cache,
    /// Where a package ships kernels; `None` asks what [`crate::set_shipped_folder`] was told.
    shipped: Option<PathBuf>,
    facts: Mutex<FxHashMap<u32, Result<Arc<DeviceFacts>>>>,
    loaded: RwLock<FxHashMap<(u32, Code), Arc<Loaded>>>,
    /// One compilation at a time: two threads that ask for one kernel compile it once.
    building: Mutex<()>,
}

static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Folders of Python packages in which NVRTC may lie, before those that this crate knows of. No effect once it was found.
pub fn prepend_library_folders(folders: Vec<PathBuf>) {
    let mut known = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner);
    *known = folders;
}

impl Backend {
    /// The backend of this process.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`] and others of the driver's start. The answer does not change in the life of the process.
    pub fn get() -> std::result::Result<&'static Backend, CudaError> {
        static BACKEND: OnceLock<Result<Backend>> = OnceLock::new();
        let start = || Ok(Backend::with_parts(Box::new(Cuda::start()?), OnceLock::new(), Cache::from_environment()));
        BACKEND.get_or_init(start).as_ref().map_err(Clone::clone)
    }

    pub(crate) fn with_parts(
        driver: Box<dyn Driver>,
        compiler: OnceLock<Result<Box<dyn Compiler>>>,
        cache: Cache,
    ) -> Self {
        Backend {
            driver,
            compiler,
            cache,
            shipped: None,
            facts: Mutex::default(),
            loaded: RwLock::default(),
            building: Mutex::new(()),
        }
    }

    pub(crate) fn driver(&self) -> &dyn Driver {
        self.driver.as_ref()
    }

    #[cfg(test)]
    pub(crate) fn with_shipped(self, folder: PathBuf) -> Self {
        Backend { shipped: Some(folder), ..self }
    }

    fn shipped_folder(&self) -> Option<PathBuf> {
        self.shipped.clone().or_else(shipped::folder)
    }

    /// What the package ships for a device of this architecture.
    #[must_use]
    pub fn shipped(&self, arch: rapt_core::Arch) -> Option<ShippedFacts> {
        shipped::facts(&self.shipped_folder()?, arch)
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
        Ok(self.compiler()?.version())
    }

    /// Where machine code is kept, if it is.
    #[must_use]
    pub fn cache_folder(&self) -> Option<&std::path::Path> {
        self.cache.folder()
    }

    fn compiler(&self) -> Result<&dyn Compiler> {
        let find = || {
            let folders = FOLDERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
            Ok(Box::new(Nvrtc::find(&folders)?) as Box<dyn Compiler>)
        };
        match self.compiler.get_or_init(find) {
            Ok(compiler) => Ok(compiler.as_ref()),
            Err(error) => Err(error.clone()),
        }
    }

    /// What device `index` is.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`], [`CudaError::Architecture`], the driver's.
    pub fn device(&self, index: u32) -> std::result::Result<Arc<DeviceFacts>, CudaError> {
        let mut known = self.facts.lock().unwrap_or_else(PoisonError::into_inner);
        let ask = || {
            let Facts { name, capability, multiprocessors, shared_bytes, clock_hz, bandwidth } =
                self.driver.facts(index)?;
            let arch = rapt_core::Arch::of_compute_capability(capability.0, capability.1);
            let arch = arch.ok_or_else(|| CudaError::Architecture {
                name: name.clone(),
                major: capability.0,
                minor: capability.1,
            })?;
            let known = |x: f64| (x > 0.0).then_some(x);
            let (clock_hz, bandwidth) = (known(clock_hz), known(bandwidth));
            let caps = Caps { arch, multiprocessors, shared_bytes, clock_hz, bandwidth };
            Ok(Arc::new(DeviceFacts { index, name, capability, caps }))
        };
        known.entry(index).or_insert_with(ask).clone()
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
        let (key, mut launch_plan) = decide(spec, &device.caps)?;
        if let Some(design) = &launch_plan.design {
            let main = self.function(index, design.main).map_err(on)?;
            if let Some(combine) = design.combine {
                self.function(index, combine).map_err(on)?;
            }
            let compiled = Compiled {
                registers: main.function.registers,
                local_bytes: main.function.local_bytes,
                source: main.source.to_owned(),
            };
            launch_plan.launch = launch_plan.launch.map(|launch| Launch { compiled: Some(compiled), ..launch });
        }
        Ok(Plan::new(spec.clone(), key, launch_plan))
    }

    fn function(&self, device: u32, code: Code) -> Result<Arc<Loaded>> {
        let find = || self.loaded.read().unwrap_or_else(PoisonError::into_inner).get(&(device, code)).cloned();
        if let Some(loaded) = find() {
            return Ok(loaded);
        }
        let _building = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = find() {
            return Ok(loaded);
        }
        let loaded = Arc::new(self.build(device, code)?);
        self.loaded.write().unwrap_or_else(PoisonError::into_inner).insert((device, code), Arc::clone(&loaded));
        Ok(loaded)
    }

    fn build(&self, device: u32, code: Code) -> Result<Loaded> {
        let load = |cubin: &[u8]| self.driver.load(device, cubin, code.entry(), code.shared_bytes());
        // What the driver does not take is looked for further on, as what was cut short is.
        if let Some(folder) = self.shipped_folder()
            && let Some(cubin) = shipped::get(&folder, &code)
            && let Ok(function) = load(&cubin)
        {
            return Ok(Loaded { function, source: "shipped with the package" });
        }
        let compiler = self.compiler()?;
        let name = Name::new(&code, compiler.version(), "");
        if let Some(cubin) = self.cache.get(&name)
            && let Ok(function) = load(&cubin)
        {
            return Ok(Loaded { function, source: "cached on disk by an earlier compilation" });
        }
        let cubin = code.compile(compiler)?;
        let function = load(&cubin.bytes)?;
        tracing::debug!(target: "rapt", %code, registers = function.registers, local_bytes = function.local_bytes, "compiled");
        self.cache.put(&name, &cubin.bytes);
        Ok(Loaded { function, source: "compiled by NVRTC in this process" })
    }

    /// Enqueues `plan` on `stream` (`CUstream`; 0 is the default stream) of the plan's device. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for operands of another spec; [`Error::OutOfMemory`] if `workspace` is shorter than the plan
    /// asks; [`Error::DeviceUnavailable`] and [`Error::DeviceFailed`].
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
        let spec = plan.spec();
        let launch_plan: &CudaLaunch = plan.launch_plan()?;
        operands.expect(spec)?;
        let Device::Cuda(index) = spec.device else {
            return Err(Error::NotAsPlanned { tensor: "plan", what: "device" });
        };
        let Some(design) = launch_plan.design else { return Ok(()) };
        let on = |error: CudaError| error.on(spec.device);
        let device = self.device(index).map_err(on)?;
        let tensors = operands.tensors();
        let addresses = [&tensors.q, &tensors.k, &tensors.v].map(rapt_core::View::address);
        let is_hopper = design.main.body == Body::Hopper;
        let mut design = design.with_addresses(spec, addresses);
        let inputs = (is_hopper && design.main.vector).then(|| self.copy_maps(spec, &design, addresses)).flatten();
        // What the copy engine does not read is loaded element by element: the bits are the same.
        if is_hopper && inputs.is_none() {
            (design, _) = design_with(spec, &device.caps, Loads::Elements)?;
        }
        if workspace.len_bytes < design.workspace_bytes || !workspace.address.is_multiple_of(16) {
            return Err(Error::OutOfMemory { bytes: design.workspace_bytes });
        }
        let params = Params::new(spec, &design, operands, workspace.address);
        let hopper = is_hopper.then(|| {
            let maps = HopperMaps {
                inputs,
                out: self.out_map(spec, &design, operands.out_ptr() as usize),
                mask: self.mask_map(spec, &design, params.mask_address()),
            };
            HopperParams::new(spec, &design, params, maps, design.grid_blocks(&device.caps))
        });
        let main_params = hopper.as_ref().map_or(params.as_bytes(), HopperParams::as_bytes);
        let main = self.function(index, design.main).map_err(on)?;
        let combine = design
            .combine
            .map(|code| self.function(index, code).map(|loaded| (code, loaded)))
            .transpose()
            .map_err(on)?;
        let grid = |code: &Code, blocks: usize| Grid {
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            threads: code.threads(),
            shared_bytes: code.shared_bytes(),
            overlaps: code.overlaps(),
        };
        // SAFETY: the operands were proven against the spec that the parameters were made from; the caller vouches for how
        // long they live. The workspace holds what the design asks.
        unsafe {
            self.driver
                .launch(&main.function, grid(&design.main, design.grid_blocks(&device.caps)), stream, main_params)
                .map_err(on)?;
            if let Some((code, loaded)) = combine {
                let blocks = design.combine_blocks(spec);
                self.driver.launch(&loaded.function, grid(&code, blocks), stream, params.as_bytes()).map_err(on)?;
            }
        }
        Ok(())
    }

    /// How the copy engine is to read q, k and v, if it can; made anew for each launch, which costs less than a look-up.
    fn copy_maps(&self, spec: &Spec, design: &Design, addresses: [usize; 3]) -> Option<[CopyMap; 3]> {
        let mut maps = [CopyMap::default(); 3];
        let rows = [design.main.block_m, design.main.depth, design.main.depth];
        for (n, tensor) in [&spec.q, &spec.k, &spec.v].into_iter().enumerate() {
            maps[n] = self.copy_map(Copied::new(tensor, addresses[n], rows[n])?)?;
        }
        Some(maps)
    }

    /// How the copy engine is to write out, if it can: what is not of out's dtype, or rows of several heads, it cannot.
    fn out_map(&self, spec: &Spec, design: &Design, address: usize) -> Option<CopyMap> {
        let alike = spec.out.dtype == spec.numerics.storage && design.task_heads == 1;
        if !alike || !design.main.is_staged() {
            return None;
        }
        self.copy_map(Copied::new(&spec.out, address, OUT_BOX_ROWS)?)
    }

    /// How the copy engine is to read the mask, if it can: not rows of several heads, nor beside loads of one element.
    fn mask_map(&self, spec: &Spec, design: &Design, address: usize) -> Option<CopyMap> {
        let mask = spec.mask.as_ref().filter(|_| design.main.vector && design.task_heads == 1)?;
        self.copy_map(Copied::mask(mask, address, [design.main.block_m, design.main.depth])?)
    }

    fn copy_map(&self, copied: Copied) -> Option<CopyMap> {
        self.driver
            .copy_map(&copied)
            .inspect_err(|error| tracing::debug!(target: "rapt", %error, ?copied, "not for the copy engine"))
            .ok()
    }
}
