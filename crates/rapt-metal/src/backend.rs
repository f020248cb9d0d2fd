//! PyTorch's tensors on Apple's GPUs: what is planned, and encoded on its stream.
//!
//! PyTorch has one stream on the GPU, and what it encodes there runs in turn. So nothing waits here: what PyTorch encodes later, to read `out` say,
//! comes after it; and memory that is given back is reused by what comes later.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rapt_core::{DType, Device, Error, Kernel as KernelName, Operands, Plan, Result as CoreResult, Spec};
use rapt_shader::{Caps, KernelVariant, ShaderLaunch, select, select_kernel};
use rustc_hash::FxHashMap;

use crate::error::{MetalError, Result};
use crate::functions::{Dispatch, Functions, Kernel, Tensor, TensorHandle};
use crate::launch::{self, Encoder};
use crate::storages::{Placed, Storages};

/// PyTorch as this backend knows it. Every method may be called from several threads at once.
pub struct Backend {
    functions: Functions,
    storages: Arc<Storages>,
    kernels: Mutex<FxHashMap<KernelVariant, Kernel>>,
}

static BACKEND: OnceLock<std::result::Result<Backend, MetalError>> = OnceLock::new();

impl Backend {
    /// PyTorch by these functions.
    #[must_use]
    pub fn new(functions: Functions) -> Self {
        Backend { functions, storages: Arc::default(), kernels: Mutex::default() }
    }

    /// PyTorch in this process, by what `find` finds when it is first asked.
    ///
    /// # Errors
    /// What `find` answered then.
    pub fn provide(
        find: impl FnOnce() -> std::result::Result<Functions, MetalError>,
    ) -> std::result::Result<&'static Backend, MetalError> {
        BACKEND.get_or_init(|| find().map(Backend::new)).as_ref().map_err(Clone::clone)
    }

    /// PyTorch in this process, which was provided before.
    ///
    /// # Errors
    /// [`MetalError::NotLoaded`], or what was found then.
    pub fn get() -> std::result::Result<&'static Backend, MetalError> {
        BACKEND.get().map_or(Err(MetalError::NotLoaded), |found| found.as_ref().map_err(Clone::clone))
    }

    /// Takes over `tensor`, whose element 0 lies `begin` bytes behind the begin of its storage of `len_bytes`, and gives that an address. `identity` is
    /// what PyTorch tells storages apart by.
    ///
    /// # Errors
    /// [`MetalError::TooMany`].
    ///
    /// # Safety
    /// PyTorch gave `tensor` out, and nobody else gives it back; the other facts are what it says of it.
    pub unsafe fn place(
        &self,
        tensor: TensorHandle,
        identity: usize,
        len_bytes: usize,
        begin: usize,
        dtype: DType,
    ) -> std::result::Result<Placed, MetalError> {
        // SAFETY: as the caller promises.
        let tensor = unsafe { self.functions.own(tensor) };
        self.storages.place(tensor, identity, len_bytes, begin, dtype.size_bytes())
    }

    /// What runs for `spec`, its kernels compiled.
    ///
    /// # Errors
    /// As [`select`]; [`Error::DeviceFailed`] where Metal's compiler refuses a text.
    pub fn plan(&self, spec: &Spec) -> CoreResult<Plan> {
        self.compiled(spec, select(spec, &Caps::METAL)?)
    }

    /// As [`Backend::plan`], but with this kernel, be it the fastest or not.
    ///
    /// # Errors
    /// As [`Backend::plan`], and as [`select_kernel`].
    pub fn plan_kernel(&self, spec: &Spec, kernel: KernelName) -> CoreResult<Plan> {
        self.compiled(spec, select_kernel(spec, &Caps::METAL, kernel)?)
    }

    fn compiled(&self, spec: &Spec, plan: Plan) -> CoreResult<Plan> {
        let launch = plan.launch_plan::<ShaderLaunch>()?;
        for variant in launch.variant.iter().chain(&launch.combine) {
            self.kernel(variant).map_err(|error| error.on(spec.device))?;
        }
        Ok(plan)
    }

    /// The kernel of `variant`, compiled once.
    fn kernel(&self, variant: &KernelVariant) -> Result<Kernel> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(variant) {
            return Ok(*kernel);
        }
        let kernel = self.functions.compile(&variant.msl(), variant.entry())?;
        tracing::debug!(target: "rapt", %variant, "compiled");
        kernels.insert(*variant, kernel);
        Ok(kernel)
    }

    /// Encodes `plan` on PyTorch's stream and waits for nothing.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`]; [`Error::DeviceFailed`], where out may have been written.
    pub fn run(&self, plan: &Plan, operands: &mut Operands<'_>) -> CoreResult<()> {
        let (launch, spec) = (plan.launch_plan::<ShaderLaunch>()?, plan.spec());
        operands.expect(spec)?;
        let Device::Mps(index) = spec.device else {
            return Err(Error::DeviceMismatch { tensor: "queue", expected: spec.device, got: Device::Mps(0) });
        };
        launch::encode(&mut Stream { backend: self, index }, launch, spec, operands)
            .map_err(|error| error.on(spec.device))
    }
}

/// PyTorch's stream on the GPU of this index.
struct Stream<'a> {
    backend: &'a Backend,
    index: u32,
}

impl Encoder for Stream<'_> {
    type Bound = Tensor;

    fn bind(&self, name: &'static str, address: usize, reach: (i64, i64), element_bytes: usize) -> Result<Tensor> {
        let place = self.backend.storages.find(name, address, reach, element_bytes)?;
        match place.step {
            0 => Ok(place.tensor),
            step => self.backend.functions.element(&place.tensor, step),
        }
    }

    fn workspace(&self, bytes: usize) -> Result<Tensor> {
        self.backend.functions.bytes(self.index, bytes)
    }

    fn dispatch(&mut self, dispatch: launch::Dispatch<'_, Tensor>) -> Result<()> {
        let launch::Dispatch { variant, params, bound, groups } = dispatch;
        let group = variant.threads() as u64;
        // Counted in threads: whole workgroups.
        let threads = [groups[0] as u64 * group, groups[1] as u64, 1];
        let dispatch = Dispatch { params, tensors: bound, threads, group: [group, 1, 1] };
        self.backend.functions.encode(self.backend.kernel(variant)?, &dispatch)
    }
}
