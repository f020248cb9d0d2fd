//! The side that asks: a device of another library as an [`Offload`].

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use rapt_core::{
    Arch, Cost, DType, Device, Error, Kernel, KernelKey, Kv, Launch, LaunchPlan, MaskClass, Offload, Operands,
    PRounding, Plan, Result, Spec, View, Work,
};

use crate::abi::{Addresses, Facts, Interface, VERSION, text};
use crate::refusal::{OK, Said};
use crate::request::request_of;

/// Why a library's devices are not to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BridgeError {
    /// The version of its interface.
    pub got: u32,
}

impl fmt::Display for BridgeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BridgeError { got } = self;
        write!(f, "its interface has version {got}, this one asks for {VERSION}: the two were installed apart")
    }
}

impl std::error::Error for BridgeError {}

/// The devices of another library.
#[derive(Clone, Copy)]
pub struct Bridge(&'static Interface);

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bridge").field(&self.0.version).finish()
    }
}

impl Bridge {
    /// The devices behind `interface`.
    ///
    /// # Errors
    /// [`BridgeError`] where it has another version.
    ///
    /// # Safety
    /// `interface` leads to a version number that stays there as long as this process runs, and behind it, where it is [`VERSION`], to an
    /// [`Interface`] that a library of Rapt made.
    pub unsafe fn new(interface: *const Interface) -> std::result::Result<Self, BridgeError> {
        // SAFETY: the version is its first field, of whatever version it is; the rest is the caller's word.
        let got = unsafe { interface.cast::<u32>().read() };
        if got != VERSION {
            return Err(BridgeError { got });
        }
        // SAFETY: the caller's word.
        Ok(Bridge(unsafe { &*interface }))
    }

    /// What there is, a row each, in the words of the other library.
    #[must_use]
    pub fn report(self) -> Vec<(String, String)> {
        let mut said = Said::default();
        // SAFETY: a function of the interface, and a taker of this call's.
        unsafe { (self.0.report)(said.taker()) };
        let of = |kind: u32| said.0.iter().filter(move |(of, _)| *of == kind).map(|(_, text)| text.clone());
        of(text::NAME).zip(of(text::ROW)).collect()
    }

    /// The adapter of this index, opened.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] and others, as the other library answers.
    pub fn open(self, adapter: u32) -> Result<Loaded> {
        let (device, mut said, mut held) = (Device::Vulkan(adapter), Said::default(), std::ptr::null_mut());
        // SAFETY: a function of the interface, a place for a pointer, and a taker of this call's.
        let code = unsafe { (self.0.open)(adapter, &raw mut held, said.taker()) };
        if code != OK {
            return Err(said.error(code, device));
        }
        Ok(Loaded { handle: Arc::new(Handle { interface: self.0, held }), device })
    }
}

/// An open device of another library.
struct Handle {
    interface: &'static Interface,
    held: *mut c_void,
}

// SAFETY: what is held is an `Arc<dyn Offload>` of the other library, and an `Offload` is both.
unsafe impl Send for Handle {}
// SAFETY: the same.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: `open` made it, and it is given back here alone.
        unsafe { (self.interface.close)(self.held) }
    }
}

/// A device of another library: tensors of the host are attended to there.
pub struct Loaded {
    handle: Arc<Handle>,
    device: Device,
}

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").field("device", &self.device).finish_non_exhaustive()
    }
}

/// A plan that the other library keeps.
struct Kept {
    interface: &'static Interface,
    plan: *mut c_void,
    /// The device that it was made by.
    of: usize,
}

// SAFETY: what is kept is a `Plan` of the other library, which is both.
unsafe impl Send for Kept {}
// SAFETY: the same.
unsafe impl Sync for Kept {}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: `plan` made it, and it is given back here alone.
        unsafe { (self.interface.forget)(self.plan) }
    }
}

/// What a run launches: a plan of the other library, and what it said of it.
#[derive(Clone)]
struct LoadedLaunch {
    kept: Arc<Kept>,
    facts: Facts,
    cost: Cost,
    why: String,
    why_not_faster: String,
}

impl fmt::Debug for LoadedLaunch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedLaunch").field("facts", &self.facts).field("why", &self.why).finish_non_exhaustive()
    }
}

impl PartialEq for LoadedLaunch {
    /// Of two that were made of one request the one runs what the other does.
    fn eq(&self, other: &Self) -> bool {
        let texts = |of: &Self| (of.why.clone(), of.why_not_faster.clone());
        self.kept.of == other.kept.of && self.cost == other.cost && texts(self) == texts(other)
    }
}

/// A number of the other library, which counts as this one does.
fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

impl Loaded {
    /// What tells this device from another.
    fn id(&self) -> usize {
        self.handle.held.addr()
    }
}

impl Offload for Loaded {
    fn device(&self) -> Device {
        self.device
    }

    fn plan_host(&self, spec: &Spec) -> Result<Plan> {
        let request = request_of(spec, self.device)?;
        let Handle { interface, held } = *self.handle;
        let (mut plan, mut facts, mut said) = (std::ptr::null_mut(), Facts::default(), Said::default());
        // SAFETY: a function of the interface on its own device; places of this call's.
        let code = unsafe { (interface.plan)(held, &raw const request, &raw mut plan, &raw mut facts, said.taker()) };
        if code != OK {
            return Err(said.error(code, self.device));
        }
        let kept = Arc::new(Kept { interface, plan, of: self.id() });
        let unknown =
            || Error::DeviceFailed { device: self.device, why: "its library knows another kernel".to_owned() };
        let key = KernelKey {
            direction: spec.direction,
            kernel: *Kernel::ALL.get(facts.kernel as usize).ok_or_else(unknown)?,
            storage: spec.numerics.storage,
            accumulation: spec.numerics.accumulation,
            p_rounding: *PRounding::ALL.get(facts.p_rounding as usize).ok_or_else(unknown)?,
            mask: match &spec.mask {
                None => MaskClass::None,
                Some(mask) if mask.dtype == DType::Bool => MaskClass::Bool,
                Some(_) => MaskClass::Additive,
            },
            kv: Kv::Dense,
            arch: Arch::Wgsl,
        };
        let cost = Cost {
            flops: facts.flops,
            exponentials: facts.exponentials,
            bytes_read: facts.bytes_read,
            bytes_written: facts.bytes_written,
            floor_cycles: facts.floor_cycles,
            floor_seconds: Some(facts.floor_seconds).filter(|seconds| !seconds.is_nan()),
            bytes_copied: count(facts.bytes_copied),
            bytes_packed: count(facts.bytes_packed),
        };
        let (why, why_not_faster) = (said.text(text::WHY), said.text(text::WHY_NOT_FASTER));
        Ok(Plan::new(spec.clone(), key, LoadedLaunch { kept, facts, cost, why, why_not_faster }))
    }

    fn is_planned_here(&self, plan: &Plan) -> bool {
        plan.launch_plan::<LoadedLaunch>().is_ok_and(|launch| launch.kept.of == self.id())
    }

    fn run_host(&self, plan: &Plan, operands: &mut Operands<'_>) -> Result<()> {
        let launch = plan.launch_plan::<LoadedLaunch>()?;
        operands.expect(plan.spec())?;
        if !self.is_planned_here(plan) {
            return Err(Error::NotAsPlanned { tensor: "plan", what: "device" });
        }
        let tensors = operands.tensors();
        let of = |view: Option<&View<'_>>| view.map_or(std::ptr::null(), View::as_ptr);
        let inputs = [Some(&tensors.q), Some(&tensors.k), Some(&tensors.v)].map(of);
        let optional = [&tensors.mask, &tensors.sinks, &tensors.alibi_slopes].map(|view| of(view.as_ref()));
        let ([q, k, v], [mask, sinks, alibi_slopes]) = (inputs, optional);
        let (out, lse) = (operands.out_ptr(), operands.lse_ptr().unwrap_or(std::ptr::null_mut()));
        let addresses = Addresses { q, k, v, mask, sinks, alibi_slopes, out, lse };
        let (Handle { interface, held }, mut said) = (&*self.handle, Said::default());
        // SAFETY: a plan of this device; the operands were proven against its spec, of which the other library has its own copy, and they
        // are borrowed for the call, the outputs from nobody else.
        let code = unsafe { (interface.run)(*held, launch.kept.plan, &raw const addresses, said.taker()) };
        if code == OK { Ok(()) } else { Err(said.error(code, self.device)) }
    }
}

impl LaunchPlan for LoadedLaunch {
    fn block_m(&self) -> usize {
        count(self.facts.block_m)
    }
    fn block_n(&self) -> usize {
        count(self.facts.block_n)
    }
    fn num_splits(&self) -> usize {
        count(self.facts.num_splits)
    }
    fn items(&self) -> usize {
        count(self.facts.items)
    }
    fn threads(&self) -> usize {
        count(self.facts.threads)
    }
    fn workspace_bytes(&self) -> usize {
        count(self.facts.workspace_bytes)
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        self.facts.kv_in_place != 0
    }
    fn work(&self) -> Option<Work> {
        let [tasks, rows, rows_per_item, keys_per_item] = self.facts.work.map(count);
        (self.facts.has_work != 0).then_some(Work { tasks, rows, rows_per_item, keys_per_item })
    }
    fn launch(&self) -> Option<Launch> {
        let [blocks, block_threads, shared_bytes, multiprocessors] = self.facts.launch.map(count);
        (multiprocessors != 0).then_some(Launch {
            blocks,
            block_threads,
            shared_bytes,
            multiprocessors,
            compiled: None,
        })
    }
    fn why(&self, _: &Spec, _: &KernelKey) -> String {
        self.why.clone()
    }
    fn why_not_faster(&self, _: &Spec, _: &KernelKey) -> String {
        self.why_not_faster.clone()
    }
}
