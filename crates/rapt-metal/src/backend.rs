//! A launch plan on PyTorch's tensors: what is bound, and the dispatches, window by window.
//!
//! PyTorch has one stream on the GPU, and what it encodes there runs in turn. So nothing waits here: what PyTorch encodes later, to read `out` say,
//! comes after it; and memory that is given back is reused by what comes later.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rapt_core::{DType, Device, Error, Kernel as KernelName, Operands, Plan, Result as CoreResult, Spec};
use rapt_shader::{BINDINGS, Caps, KernelVariant, PARTIALS, Params, ShaderLaunch, Window, select, select_kernel};
use rustc_hash::FxHashMap;

use crate::error::{MetalError, Result};
use crate::functions::{Dispatch, Functions, Kernel, Tensor, TensorHandle};
use crate::storages::{Placed, Storages};

/// Most workgroups of a dimension.
const MOST_GROUPS: usize = 65_535;

/// PyTorch as this backend knows it. Every method may be called from several threads at once.
pub struct Backend {
    functions: Functions,
    storages: Arc<Storages>,
    kernels: Mutex<FxHashMap<KernelVariant, Kernel>>,
}

static BACKEND: OnceLock<std::result::Result<Backend, MetalError>> = OnceLock::new();

/// The address of element 0 and the size of an element of each of [`BINDINGS`].
type Operand = Option<(usize, usize)>;

/// A tensor and the slot that it is bound to.
type Bound = (u32, Tensor);

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
        self.encode(launch, spec, &addresses(operands), index).map_err(|error| error.on(spec.device))
    }

    fn encode(&self, launch: &ShaderLaunch, spec: &Spec, operands: &[Operand; 8], index: u32) -> Result<()> {
        let Some(variant) = &launch.variant else { return Ok(()) };
        let kernels: Vec<(&KernelVariant, Kernel)> = std::iter::once(variant)
            .chain(&launch.combine)
            .map(|variant| Ok((variant, self.kernel(variant)?)))
            .collect::<Result<_>>()?;
        for window in &launch.windows {
            let (mut tensors, first) = self.bound(window, operands)?;
            // What a request does not have is bound to any buffer and not read.
            let any = tensors.first().map(|(_, tensor)| tensor.clone());
            for binding in &BINDINGS {
                let is_bound = tensors.iter().any(|(slot, _)| *slot == binding.index);
                tensors.extend(any.clone().filter(|_| !is_bound).map(|any| (binding.index, any)));
            }
            let partial_bytes = launch.partial_bytes_of(window);
            if partial_bytes > 0 {
                tensors.push((PARTIALS, self.functions.bytes(index, partial_bytes)?));
            }
            let params = Params::new(spec, launch, window, first).bytes();
            let items = [launch.items_of(window), launch.combine_items_of(window)];
            for ((variant, kernel), items) in kernels.iter().zip(items) {
                let is_of = |(slot, _): &&Bound| variant.bindings().iter().any(|binding| binding.index == *slot);
                let tensors: Vec<Bound> = tensors.iter().filter(is_of).cloned().collect();
                let group = variant.threads() as u64;
                let groups = [items.min(MOST_GROUPS) as u64, items.div_ceil(MOST_GROUPS) as u64];
                // Counted in threads: whole workgroups.
                let threads = [groups[0] * group, groups[1], 1];
                let dispatch = Dispatch { params: &params, tensors: &tensors, threads, group: [group, 1, 1] };
                self.functions.encode(*kernel, &dispatch)?;
            }
        }
        Ok(())
    }

    /// What of each tensor a window binds, from the first byte that it reaches on, and where element 0 lies from there.
    fn bound(&self, window: &Window, operands: &[Operand; 8]) -> Result<(Vec<Bound>, [i64; 8])> {
        let (mut tensors, mut first) = (Vec::with_capacity(BINDINGS.len() + 1), [0; 8]);
        for (at, binding) in BINDINGS.iter().enumerate() {
            let Some(((address, size), reach)) = operands[at].zip(window.reach[at]) else { continue };
            let place = self.storages.find(binding.tensor, address, (reach.lo, reach.hi), size)?;
            let tensor = match place.step {
                0 => place.tensor,
                step => self.functions.element(&place.tensor, step)?,
            };
            tensors.push((binding.index, tensor));
            first[at] = -reach.lo / size as i64;
        }
        Ok((tensors, first))
    }
}

/// Where the tensors of a request lie, in the order of [`BINDINGS`].
fn addresses(operands: &mut Operands<'_>) -> [Operand; 8] {
    let (out, lse) = (operands.out_ptr().addr(), operands.lse_ptr().map(<*mut u8>::addr));
    let tensors = operands.tensors();
    let view = |view: &rapt_core::View<'_>| (view.address(), view.dtype().size_bytes());
    let lse = lse.zip(tensors.lse.as_ref()).map(|(at, lse)| (at, lse.dtype().size_bytes()));
    [
        Some(view(&tensors.q)),
        Some(view(&tensors.k)),
        Some(view(&tensors.v)),
        tensors.mask.as_ref().map(view),
        tensors.sinks.as_ref().map(view),
        tensors.alibi_slopes.as_ref().map(view),
        Some((out, tensors.out.dtype().size_bytes())),
        lse,
    ]
}
