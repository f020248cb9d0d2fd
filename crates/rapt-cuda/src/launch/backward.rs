//! What a backward pass launches, in order on one stream: rows first, then each gradient by itself.
//!
//! ```text
//! rows      delta of each row, and what its probabilities are recomputed from       into the workspace
//! keys      dk and dv        queries   dq        mask   d_mask, or where its tiles are few parts of it; then mask parts        sinks   d_sinks
//! together  in place of keys and queries: dk, dv and parts of dq; then parts (dq), begun beside it
//! again     keys and queries once more, of heads that were noted: behind together, and behind each of float32 on compute capability 9.0
//! ```
//! Each writes what no other does but for notes of heads, and reads what rows left. Deliberately absent: any choice, any allocation.

use rapt_core::{
    BackwardOperands, Compiled, Cost, Device, DeviceMemory, Error, KernelKey, Launch, LaunchPlan, PlanPart,
    Result as CoreResult, Spec, Work,
};

use super::{Loaded, Step};
use crate::backward::{BackwardHopperParams, BackwardParams, HopperItems, NotingWorkspace};
use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::tensor_map::{TensorMap, TmaTensor};
use crate::variant::{Algorithm, KernelVariant, Pass};

/// One launch of a backward pass, and how many blocks of own rows a head has in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassStep {
    pub(crate) step: Step,
    pub(crate) units: usize,
    /// Blocks of a launch of all, of one that computes noted heads again; else 0.
    pub(crate) again: usize,
}

/// What backward_hopper.cu takes besides.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HopperPass {
    pub(crate) items: HopperItems,
    /// q, k, v, d_o and the mask, those that TMA loads.
    pub(crate) loaded: [Option<TmaTensor>; 5],
    /// Bytes of a mask's row that a warp copies at a time, where TMA does not load it.
    pub(crate) mask_unit: usize,
}

/// In how many parts the tiles of a mask's gradient are summed, and where in the workspace the sums of these lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaskParts {
    pub(crate) parts: usize,
    pub(crate) at: usize,
}

/// The one parameter of a launch.
#[allow(clippy::large_enum_variant, reason = "they lie on the stack for the length of a run")]
enum Filled {
    Plain(BackwardParams),
    Hopper(BackwardHopperParams),
}

impl Filled {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Filled::Plain(params) => params.as_bytes(),
            Filled::Hopper(params) => params.as_bytes(),
        }
    }
}

/// Why the tensor cores do not serve a request for gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WhyNoTensorCores {
    Storage,
    /// What arrives is of another dtype than q.
    Arriving,
    HeadDim {
        most: usize,
    },
}

/// This backend's whole decision for the gradients of one request: what it says of itself is read from what is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct BackwardLaunch {
    /// Nothing where no gradient has an element.
    pub(crate) steps: Vec<PassStep>,
    pub(crate) params: BackwardParams,
    pub(crate) hopper: Option<Box<HopperPass>>,
    /// Where heads are noted that are computed again.
    pub(crate) noting: Option<NotingWorkspace>,
    pub(crate) mask_parts: MaskParts,
    pub(crate) workspace_bytes: usize,
    pub(crate) cost: Cost,
    pub(crate) multiprocessors: u32,
    pub(crate) why: Option<WhyNoTensorCores>,
}

impl HopperPass {
    /// The parameters of tensors that lie where `params` say.
    fn filled(&self, driver: &dyn Driver, params: BackwardParams) -> Result<Filled> {
        let mut maps = [TensorMap::default(); 5];
        for ((map, tensor), address) in maps.iter_mut().zip(&self.loaded).zip(params.loaded()) {
            if let Some(tensor) = tensor {
                *map = driver.encode(tensor, address)?;
            }
        }
        Ok(Filled::Hopper(BackwardHopperParams::new(params, self.items, self.mask_unit, maps)))
    }
}

impl BackwardLaunch {
    /// The kernels, in the order of their launches.
    pub fn variants(&self) -> impl Iterator<Item = &KernelVariant> {
        self.steps.iter().map(|of| &of.step.variant)
    }

    /// This plan with the functions that `load` finds.
    pub(crate) fn loaded(mut self, load: impl Fn(&KernelVariant) -> Result<Loaded>) -> Result<Self> {
        for PassStep { step, .. } in &mut self.steps {
            step.loaded = Some(load(&step.variant)?);
        }
        Ok(self)
    }

    /// Enqueues the launches on `stream`.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] for a plan without functions; [`Error::OutOfMemory`] if `workspace` is shorter than planned;
    /// [`Error::DeviceFailed`].
    ///
    /// # Safety
    /// `operands` are those of the spec that this was planned for. Their memory and the workspace are as
    /// [`Backend::run`](crate::Backend::run) says.
    pub(crate) unsafe fn enqueue(
        &self,
        driver: &dyn Driver,
        operands: &mut BackwardOperands<'_>,
        workspace: DeviceMemory,
        stream: usize,
    ) -> CoreResult<()> {
        let device: Device = operands.tensors().q.device();
        if workspace.len_bytes < self.workspace_bytes || !workspace.address.is_multiple_of(16) {
            return Err(Error::OutOfMemory { bytes: self.workspace_bytes });
        }
        let on = |error: CudaError| error.on(device);
        let mut params = self.params.at(operands, workspace.address);
        if let Some(noting) = &self.noting {
            params = params.with_notes(noting, workspace.address);
        }
        if let Some(hopper) = &self.hopper {
            params = params.with_items(&hopper.items);
        }
        let MaskParts { parts, at } = self.mask_parts;
        params = params.with_mask_parts(parts, workspace.address + at);
        let with_function = |of: &PassStep| {
            let PassStep { step, units, again } = *of;
            let params = params.with_units(units).with_again(again);
            let filled = match &self.hopper {
                Some(hopper) if step.variant.algorithm == Algorithm::BackwardHopper => {
                    hopper.filled(driver, params).map_err(on)?
                }
                _ => Filled::Plain(params),
            };
            step.function(device).copied().map(|function| (step, function, filled))
        };
        let steps = self.steps.iter().map(with_function).collect::<CoreResult<Vec<_>>>()?;
        // SAFETY: `loaded` gave each step the function of its own variant, and `select` made the parameters for that variant from the spec
        // that `BackwardOperands::check` proved the operands against: each address that a kernel reaches lies in its tensor's extent. The
        // comparison above proves the workspace as long as states of rows are; the caller vouches for how long memory lives.
        unsafe {
            for (step, function, filled) in &steps {
                driver.launch(function, step.grid(), stream, filled.as_bytes()).map_err(on)?;
            }
        }
        Ok(())
    }

    /// The step whose tiles stand for the plan: that of dk and dv, else that of dq, else the first.
    fn main(&self) -> Option<&Step> {
        let of = |wanted: Pass| {
            let is = |step: &&PassStep| step.step.variant.algorithm.pass() == Some(wanted);
            self.steps.iter().find(is).map(|of| &of.step)
        };
        of(Pass::Together)
            .or_else(|| of(Pass::Keys))
            .or_else(|| of(Pass::Queries))
            .or_else(|| self.steps.first().map(|of| &of.step))
    }

    fn launch_of(&self, step: &Step) -> Launch {
        let Step { variant, blocks, loaded } = *step;
        Launch {
            blocks,
            block_threads: variant.threads() as usize,
            shared_bytes: variant.shared_bytes() as usize,
            multiprocessors: self.multiprocessors as usize,
            compiled: loaded.map(|Loaded { function, provenance }| Compiled {
                registers: function.registers,
                local_bytes: function.local_bytes,
                source: provenance.text().to_owned(),
            }),
        }
    }
}

/// What a pass writes, in words.
const fn writes(pass: Pass) -> &'static str {
    match pass {
        Pass::Rows => "delta of each row, and what its probabilities are recomputed from",
        Pass::Keys => "dk and dv, over the queries of a group in their order",
        Pass::Queries => "dq, over keys in their order",
        Pass::Mask => "the gradient of the mask",
        Pass::MaskParts => "the gradient of the mask, of the sums of its parts",
        Pass::Sinks => "the gradients of the sinks",
        Pass::Together => "dk, dv, and what each tile of keys adds to dq, in one order of keys",
        Pass::Parts => "dq, of the sums of its parts",
        Pass::KeysAgain => "dk and dv of heads whose sums are not finite, or whose lse is large",
        Pass::QueriesAgain => "dq of those heads",
    }
}

impl LaunchPlan for BackwardLaunch {
    fn block_m(&self) -> usize {
        self.main().map_or(0, |step| step.variant.block_m as usize)
    }
    fn block_n(&self) -> usize {
        self.main().map_or(0, |step| step.variant.block_n as usize)
    }
    fn num_splits(&self) -> usize {
        1
    }
    fn items(&self) -> usize {
        self.main().map_or(0, |step| step.blocks)
    }
    fn threads(&self) -> usize {
        1
    }
    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        false
    }
    fn work(&self) -> Option<Work> {
        None
    }
    fn launch(&self) -> Option<Launch> {
        self.main().map(|step| self.launch_of(step))
    }
    fn parts(&self, _: &Spec) -> Vec<PlanPart> {
        let part = |of: &PassStep| PlanPart {
            kernel: None,
            variant: of.step.variant.to_string(),
            serves: of.step.variant.algorithm.pass().map_or("", writes).to_owned(),
            launch: self.launch_of(&of.step),
        };
        self.steps.iter().map(part).collect()
    }
    fn why(&self, _: &Spec, _: &KernelKey) -> String {
        let is_on_tensor_cores = |variant: &KernelVariant| {
            matches!(variant.algorithm, Algorithm::BackwardMma(_) | Algorithm::BackwardHalves(_))
        };
        if self.steps.is_empty() {
            "no gradient has an element: nothing is launched".to_owned()
        } else if self.hopper.is_some() {
            "probabilities are recomputed from lse; five products in one pass over scores on the tensor cores, dq handed over from block to block in \
             one order"
                .to_owned()
        } else if self.variants().any(is_on_tensor_cores) {
            "probabilities are recomputed from lse; products on the tensor cores, dq in a pass of its own over scores"
                .to_owned()
        } else {
            "probabilities are recomputed from lse, by kernels that serve every request".to_owned()
        }
    }
    fn why_not_faster(&self, spec: &Spec, _: &KernelKey) -> String {
        let storage = spec.numerics.storage;
        match self.why {
            None => String::new(),
            Some(WhyNoTensorCores::Storage) => format!("gradients of {storage} are not formed on the tensor cores"),
            Some(WhyNoTensorCores::Arriving) => {
                format!("the tensor cores take what arrives in the dtype of q, {storage}; it is {}", spec.out.dtype)
            }
            Some(WhyNoTensorCores::HeadDim { most }) => {
                format!("head_dim {} / {}: the tensor cores take up to {most}", spec.head_dim(), spec.head_dim_v())
            }
        }
    }
}
