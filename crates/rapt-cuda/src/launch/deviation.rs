//! What judges the heads of a request on codes: two launches, and the figures that the host reads.
//!
//! ```text
//! deviation.cu       each query: its sums, and what follows of them     or its chunks, where keys are split
//! deviation_end.cu   each head: what its queries come to                behind it on the stream
//! ```
//! Deliberately absent: any choice, any allocation, and who waits for the figures.

use rapt_core::{DeviceMemory, Error, HeadDeviation, Operands, Qkv, Result as CoreResult, Spec, View};

use super::{Loaded, Step};
use crate::deviation::{DeviationParams, FIGURES, FIGURES_BYTES};
use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::params::Params;
use crate::variant::KernelVariant;

/// The launches of a request whose queries attend some key.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DeviationLaunches {
    pub(crate) rows: Step,
    pub(crate) heads: Step,
    pub(crate) params: Params,
    pub(crate) beside: DeviationParams,
    pub(crate) workspace_bytes: usize,
}

/// What [`Backend::plan_deviations`](crate::Backend::plan_deviations) decided.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviationPlan {
    spec: Spec,
    /// `None` where nothing is attended: nothing is off.
    launches: Option<DeviationLaunches>,
}

impl DeviationPlan {
    pub(crate) fn new(spec: &Spec, launches: Option<DeviationLaunches>) -> Self {
        DeviationPlan { spec: spec.clone(), launches }
    }

    /// The request.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Memory of the device that a run needs.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.launches.as_ref().map_or(0, |launches| launches.workspace_bytes)
    }

    /// The kernels, in the order of their launches.
    #[must_use]
    pub fn variants(&self) -> Vec<KernelVariant> {
        self.launches.iter().flat_map(|launches| [launches.rows.variant, launches.heads.variant]).collect()
    }

    /// With the functions that `load` finds.
    pub(crate) fn loaded(mut self, load: impl Fn(&KernelVariant) -> Result<Loaded>) -> Result<Self> {
        if let Some(launches) = &mut self.launches {
            for step in [&mut launches.rows, &mut launches.heads] {
                step.loaded = Some(load(&step.variant)?);
            }
        }
        Ok(self)
    }

    /// Bytes that the host reads from the begin of the workspace.
    pub(crate) fn figures_bytes(&self) -> usize {
        if self.launches.is_some() { self.heads() * FIGURES_BYTES } else { 0 }
    }

    fn heads(&self) -> usize {
        self.spec.batch() * self.spec.num_q_heads()
    }

    /// What was read.
    pub(crate) fn figures(&self, bytes: &[u8]) -> Vec<HeadDeviation> {
        let number = |at: usize| f64::from_le_bytes(bytes[8 * at..][..8].try_into().unwrap_or_default());
        let of = |head: usize| {
            let [epsilon, estimate, before, after, norm] = std::array::from_fn(|n| number(head * FIGURES + n));
            HeadDeviation { epsilon, estimate, before, after, norm }
        };
        let heads = self.heads();
        if self.launches.is_some() { (0..heads).map(of).collect() } else { vec![HeadDeviation::default(); heads] }
    }

    /// Enqueues the launches on `stream`.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] for a plan without functions; [`Error::OutOfMemory`] if `workspace` is shorter than planned;
    /// [`Error::NotAsPlanned`] for errors that are not those of the request; [`Error::DeviceFailed`].
    ///
    /// # Safety
    /// `operands` are those of the spec that this was planned for. Their memory, that of the errors and the workspace are as
    /// [`Backend::run`](crate::Backend::run) says.
    pub(crate) unsafe fn enqueue(
        &self,
        driver: &dyn Driver,
        operands: &mut Operands<'_>,
        errors: &Qkv<Option<View<'_>>>,
        workspace: DeviceMemory,
        stream: usize,
    ) -> CoreResult<()> {
        let Some(launches) = &self.launches else { return Ok(()) };
        let device = self.spec.device;
        let on = |error: CudaError| error.on(device);
        if workspace.len_bytes < launches.workspace_bytes || !workspace.address.is_multiple_of(16) {
            return Err(Error::OutOfMemory { bytes: launches.workspace_bytes });
        }
        let params = launches.beside.at(operands, errors, &launches.params, &self.spec, workspace.address)?;
        let with_function = |step| Step::function(step, device).map(|function| (step, function));
        let steps = [with_function(&launches.rows)?, with_function(&launches.heads)?];
        // SAFETY: `loaded` gave each step the function of its own variant, and `select` made the parameters for that variant from the spec
        // that `Operands::check` proved the operands against; `DeviationParams::at` compared the sizes of the errors. The comparison above
        // proves the workspace as long as figures are; the caller vouches for how long memory lives.
        unsafe {
            for (step, function) in steps {
                driver.launch(function, step.grid(), stream, params.as_bytes()).map_err(on)?;
            }
        }
        Ok(())
    }
}
