//! What a run launches: decided when a request is planned, and enqueued as it is.
//!
//! ```text
//! CudaLaunch = steps (variant, blocks, loaded function) + parameters without addresses + tensors that TMA moves
//! run        = addresses filled in, tensor maps encoded, one launch, or two where a row's chunks are put together
//! ```
//! Deliberately absent: any choice, any look-up, any allocation.

pub(crate) mod backward;
mod deviation;
mod parts;

pub use backward::BackwardLaunch;
pub(crate) use deviation::DeviationLaunches;
pub use deviation::DeviationPlan;

use rapt_core::{
    Arch, Compiled, Cost, DType, Device, DeviceMemory, Error, Kernel, KernelKey, Launch, LaunchPlan, Operands,
    PlanPart, Result as CoreResult, Spec, Work,
};

use crate::append::{AppendParams, NewKeys};
use crate::artifacts::Provenance;
use crate::codes::Codes;
use crate::driver::{Driver, Function, Grid};
use crate::error::{CudaError, Result};
use crate::params::{
    CacheTiles, DroppedParams, DroppingParams, HopperCacheParams, HopperItems, HopperParams, LaunchParams, Params,
};
use crate::partition::Partition;
use crate::tensor_map::{BOX_ROWS, TensorMap, TmaTensor};
use crate::variant::{Algorithm, KernelVariant, Loads};
use crate::varlen::{Takes, VarlenParams};

/// A kernel on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Loaded {
    pub(crate) function: Function,
    pub(crate) provenance: Provenance,
}

/// One launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) variant: KernelVariant,
    pub(crate) blocks: usize,
    /// `None` until the plan is made on a device.
    pub(crate) loaded: Option<Loaded>,
}

impl Step {
    pub(crate) const fn new(variant: KernelVariant, blocks: usize) -> Self {
        Step { variant, blocks, loaded: None }
    }

    pub(crate) fn grid(&self) -> Grid {
        Grid {
            blocks: u32::try_from(self.blocks).unwrap_or(u32::MAX),
            threads: self.variant.threads(),
            shared_bytes: self.variant.shared_bytes(),
            overlaps: self.variant.overlaps(),
        }
    }

    fn function(&self, device: Device) -> CoreResult<&Function> {
        let why = || "the plan was selected without a device: Backend::plan loads its kernels".to_owned();
        self.loaded
            .as_ref()
            .map(|loaded| &loaded.function)
            .ok_or_else(|| Error::DeviceUnavailable { device, why: why() })
    }
}

/// What hopper.cu takes besides.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hopper {
    pub(crate) items: HopperItems,
    /// Where it reads lengths of sequences.
    pub(crate) tiles: Option<CacheTiles>,
    /// q, k, v, out and the mask, those that TMA moves.
    pub(crate) moved: [Option<TmaTensor>; 5],
}

/// A launch that attends, and what it takes but for addresses.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Attend {
    pub(crate) step: Step,
    pub(crate) params: Params,
    pub(crate) hopper: Option<Box<Hopper>>,
    /// Of variants that read codes, or lengths of sequences.
    pub(crate) beside: Option<Box<LaunchParams>>,
    /// Of variants that drop weights, which have none of those.
    pub(crate) dropping: Option<DroppingParams>,
}

/// The one parameter of a launch, with addresses.
#[allow(clippy::large_enum_variant, reason = "one lies on the stack for the length of a launch")]
enum Filled {
    Plain(Params),
    Dropped(DroppedParams),
    /// Its first bytes.
    Beside(LaunchParams, usize),
    Hopper(HopperParams),
    HopperCache(HopperCacheParams),
}

impl Filled {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Filled::Plain(params) => params.as_bytes(),
            Filled::Dropped(params) => params.as_bytes(),
            Filled::Beside(all, bytes) => all.as_bytes(*bytes),
            Filled::Hopper(params) => params.as_bytes(),
            Filled::HopperCache(params) => params.as_bytes(),
        }
    }
}

impl Attend {
    /// What it takes of `operands`, with partial rows at `partials`.
    fn filled(&self, driver: &dyn Driver, operands: &mut Operands<'_>, partials: usize) -> Result<Filled> {
        let params = self.params.at(operands, partials);
        if let Some(dropping) = self.dropping {
            let dropping = dropping.of(operands.tensors().dropout);
            return Ok(Filled::Dropped(DroppedParams { params, dropping }));
        }
        let beside = self.beside.as_ref().map(|beside| beside.at(&params, operands));
        Ok(match (&self.hopper, beside) {
            (Some(hopper), beside) => hopper.filled(driver, &params, beside.as_ref())?,
            (None, Some(all)) => Filled::Beside(all, self.step.variant.params_bytes()),
            (None, None) => Filled::Plain(params),
        })
    }
}

/// A launch over those of the sequences that lie one after another which `takes` says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VarlenLaunch {
    pub(crate) attend: Attend,
    pub(crate) takes: Takes,
}

/// What serves sequences that lie one after another.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Varlen {
    /// What finds the sequences, and deals them to `launches`.
    pub(crate) deal: Step,
    /// Without addresses.
    pub(crate) params: VarlenParams,
    pub(crate) launches: Vec<VarlenLaunch>,
}

impl Varlen {
    /// In the order in which they are launched.
    pub(crate) fn steps(&self) -> impl Iterator<Item = &Step> {
        std::iter::once(&self.deal).chain(self.launches.iter().map(|launch| &launch.attend.step))
    }

    fn steps_mut(&mut self) -> impl Iterator<Item = &mut Step> {
        std::iter::once(&mut self.deal).chain(self.launches.iter_mut().map(|launch| &mut launch.attend.step))
    }

    /// Enqueues all of them.
    ///
    /// # Safety
    /// As [`CudaLaunch::enqueue`], and the workspace is as long as planned.
    unsafe fn enqueue(
        &self,
        driver: &dyn Driver,
        operands: &mut Operands<'_>,
        workspace: usize,
        stream: usize,
    ) -> CoreResult<()> {
        let device = operands.tensors().q.device();
        let on = |error: CudaError| error.on(device);
        let mut of_each = Vec::with_capacity(self.launches.len());
        for VarlenLaunch { attend, takes } in &self.launches {
            let filled = attend.filled(driver, operands, workspace + takes.table).map_err(on)?;
            of_each.push((&attend.step, attend.step.function(device)?, filled));
        }
        let dealt = self.params.at(operands, workspace);
        let deal = self.deal.function(device)?;
        // SAFETY: `CudaLaunch::loaded` gave each step the function of its own variant, and `select` made the parameters for that variant
        // from the spec that `Operands::check` proved the operands against. varlen.cu deals no row that does not lie in q, or lies in two
        // sequences, and no key that does not lie in k, so that the tables that `select` has room for hold what it deals, and each address
        // that a kernel reaches lies in its tensor's extent. The caller vouches for how long memory lives.
        unsafe {
            driver.launch(deal, self.deal.grid(), stream, dealt.as_bytes()).map_err(on)?;
            for (step, function, filled) in &of_each {
                driver.launch(function, step.grid(), stream, filled.as_bytes()).map_err(on)?;
            }
        }
        Ok(())
    }
}

/// What writes new keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Append {
    pub(crate) step: Step,
    /// Whether those of keys, and of values, that become codes get factors of their own.
    pub(crate) writes_factors: [bool; 2],
}

/// Why the tensor cores do not serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WhyGeneric {
    FewQueriesOfF32,
    QueriesAreCodes,
    /// Over codes.
    ManyQueriesOfF32,
    /// K or V is codes that decode_codes.cu does not take.
    CodesInPlace,
    /// K or V is codes that mma.cu does not take.
    CodesAsNumbers,
    Storage,
    HeadDim {
        most: usize,
    },
    NoKeys,
    SharedMemory {
        needed: u32,
        has: u32,
    },
    /// Weights are dropped, and the kernel that would serve the request without drops none.
    Dropout,
}

/// The launches of a request that has an output.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Launches {
    pub(crate) main: Attend,
    /// What attends to those sequences of a cache that have few keys, where these have tiles of their own.
    pub(crate) short: Option<Box<Attend>>,
    /// What puts the chunks of a row together, where no block sees all of them.
    pub(crate) combine: Option<Step>,
    /// What writes new keys first, where sequences get some.
    pub(crate) append: Option<Append>,
    /// Of `main`.
    pub(crate) partition: Partition,
    /// Where sequences lie one after another: what is launched in place of all that. `main` is the last of it, for reports.
    pub(crate) varlen: Option<Box<Varlen>>,
    pub(crate) workspace_bytes: usize,
    pub(crate) why_generic: Option<WhyGeneric>,
}

/// This backend's whole decision for one request: what it says of itself is read from what
/// is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaLaunch {
    /// `None` where there is no output.
    launches: Option<Launches>,
    cost: Cost,
    multiprocessors: u32,
    work: Option<Work>,
}

impl CudaLaunch {
    pub(crate) fn new(spec: &Spec, launches: Option<Launches>, cost: Cost, multiprocessors: u32) -> Self {
        // Without keys nothing is attended: there is no partition of them to state.
        let attending = launches.as_ref().filter(|_| spec.kv_len() > 0);
        let work = attending.map(
            |Launches { partition: Partition { tasks, rows, item_rows, num_splits, chunk, .. }, .. }| {
                let keys_per_item = if *num_splits > 1 { *chunk } else { spec.kv_len() };
                Work { tasks: *tasks, rows: *rows, rows_per_item: *item_rows, keys_per_item }
            },
        );
        CudaLaunch { launches, cost, multiprocessors, work }
    }

    /// The kernel that attends; `None` where nothing is launched.
    #[must_use]
    pub fn variant(&self) -> Option<&KernelVariant> {
        self.launches.as_ref().map(|launches| &launches.main.step.variant)
    }

    /// The kernel that puts the chunks of a row together, if one is launched.
    #[must_use]
    pub fn combine(&self) -> Option<&KernelVariant> {
        self.launches.as_ref()?.combine.as_ref().map(|step| &step.variant)
    }

    /// Where the machine code of the kernel that attends came from; `None` until it is loaded.
    #[must_use]
    pub fn provenance(&self) -> Option<Provenance> {
        Some(self.launches.as_ref()?.main.step.loaded?.provenance)
    }

    /// Rows that one item has at most.
    #[must_use]
    pub fn item_rows(&self) -> Option<usize> {
        self.launches.as_ref().map(|launches| launches.partition.item_rows)
    }

    pub(crate) fn kernel(&self) -> Kernel {
        self.variant().map_or(Kernel::Empty, |variant| variant.algorithm.kernel())
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

    /// This plan with the functions that `load` finds.
    pub(crate) fn loaded(mut self, load: impl Fn(&KernelVariant) -> Result<Loaded>) -> Result<Self> {
        if let Some(launches) = &mut self.launches {
            let short = launches.short.as_mut().map(|short| &mut short.step);
            let append = launches.append.as_mut().map(|append| &mut append.step);
            let own = [Some(&mut launches.main.step), short, launches.combine.as_mut(), append];
            let of_sequences = launches.varlen.iter_mut().flat_map(|varlen| varlen.steps_mut());
            for step in own.into_iter().flatten().chain(of_sequences) {
                step.loaded = Some(load(&step.variant)?);
            }
        }
        Ok(self)
    }

    /// Enqueues this plan's launches on `stream`.
    ///
    /// # Errors
    /// [`Error::DeviceUnavailable`] for a plan without functions; [`Error::OutOfMemory`] if `workspace` is shorter than planned;
    /// [`Error::DeviceFailed`].
    ///
    /// # Safety
    /// `operands` are those of the spec that this was planned for; where there are `new` keys, they are as many as the spec adds, of the
    /// caches' dtype and sizes, and the caches may be written. Their memory and the workspace are as
    /// [`Backend::run`](crate::Backend::run) says.
    pub(crate) unsafe fn enqueue(
        &self,
        driver: &dyn Driver,
        operands: &mut Operands<'_>,
        new: Option<&NewKeys<'_>>,
        workspace: DeviceMemory,
        stream: usize,
    ) -> CoreResult<()> {
        let Some(launches) = &self.launches else { return Ok(()) };
        if new.is_some() != launches.append.is_some() {
            return Err(Error::NotAsPlanned { tensor: "k", what: "presence of new keys" });
        }
        let device = operands.tensors().q.device();
        let on = |error: CudaError| error.on(device);
        if workspace.len_bytes < launches.workspace_bytes || !workspace.address.is_multiple_of(16) {
            return Err(Error::OutOfMemory { bytes: launches.workspace_bytes });
        }
        if let Some(varlen) = &launches.varlen {
            // SAFETY: the comparison above proves the workspace long enough; for the rest as the caller vouches.
            return unsafe { varlen.enqueue(driver, operands, workspace.address, stream) };
        }
        let with_function = |step| Step::function(step, device).map(|function| (step, function));
        let combine = launches.combine.as_ref().map(with_function).transpose()?;
        let mut attending = [None, None];
        for (filled, attend) in attending.iter_mut().zip([launches.short.as_deref(), Some(&launches.main)]) {
            let Some(attend) = attend else { continue };
            let params = attend.filled(driver, operands, workspace.address).map_err(on)?;
            *filled = Some((with_function(&attend.step)?, params));
        }
        let params = launches.main.params.at(operands, workspace.address);
        let beside = launches.main.beside.as_ref().map(|beside| beside.at(&params, operands));
        let append = match (&launches.append, new, &beside) {
            (Some(Append { step, writes_factors }), Some(new), Some(all)) => {
                Some((with_function(step)?, AppendParams::new(all, *writes_factors, new, operands)))
            }
            _ => None,
        };
        let params_of =
            |step: &Step| beside.as_ref().map_or(params.as_bytes(), |all| all.as_bytes(step.variant.params_bytes()));
        // SAFETY: `CudaLaunch::loaded` gave each step the function of its own variant, and `select` made the parameters for that variant
        // from the spec that `Operands::check` proved the operands against: each address that a kernel reaches lies in its tensor's
        // extent. The comparison above proves the workspace as long as partial rows are; the caller vouches for how long memory lives.
        unsafe {
            if let Some(((step, function), params)) = &append {
                driver
                    .launch(function, step.grid(), stream, params.as_bytes(step.variant.codes != Codes::None))
                    .map_err(on)?;
            }
            for ((step, function), params) in attending.iter().flatten() {
                driver.launch(function, step.grid(), stream, params.as_bytes()).map_err(on)?;
            }
            if let Some((step, function)) = combine {
                driver.launch(function, step.grid(), stream, params_of(step)).map_err(on)?;
            }
        }
        Ok(())
    }
}

impl LaunchPlan for CudaLaunch {
    fn block_m(&self) -> usize {
        self.variant().map_or(0, |variant| variant.block_m as usize)
    }

    fn block_n(&self) -> usize {
        self.variant().map_or(0, |variant| variant.block_n as usize)
    }

    fn num_splits(&self) -> usize {
        self.launches.as_ref().map_or(1, |launches| launches.partition.num_splits)
    }

    fn items(&self) -> usize {
        self.launches.as_ref().map_or(0, |launches| launches.partition.items)
    }

    fn threads(&self) -> usize {
        1
    }

    fn workspace_bytes(&self) -> usize {
        self.launches.as_ref().map_or(0, |launches| launches.workspace_bytes)
    }

    fn cost(&self) -> &Cost {
        &self.cost
    }

    fn kv_in_place(&self) -> bool {
        false
    }

    fn work(&self) -> Option<Work> {
        self.work
    }

    fn launch(&self) -> Option<Launch> {
        self.launches.as_ref().map(|launches| self.launch_of(&launches.main.step))
    }

    fn parts(&self, spec: &Spec) -> Vec<PlanPart> {
        self.parts_of(spec)
    }

    fn why(&self, spec: &Spec, _: &KernelKey) -> String {
        let Some(Launches { main, short, partition, varlen, .. }) = &self.launches else {
            return "no output: nothing is launched".to_owned();
        };
        let variant = &main.step.variant;
        let of_kernel = match variant.algorithm {
            Algorithm::Decode | Algorithm::DecodeCodes => format!(
                "{} queries share each head of K and V: bound by reading them, {} chunks of keys; {}",
                spec.group_size() * spec.q_len(),
                partition.num_splits,
                variant.loads.text()
            ),
            Algorithm::Latent => format!(
                "{} queries share each head of K and V: {} chunks of keys, in tiles that serve V too where values lie in the keys; {}",
                spec.group_size() * spec.q_len(),
                partition.num_splits,
                variant.loads.text()
            ),
            Algorithm::Hopper => {
                let whole = partition.rows.div_ceil(variant.block_m as usize);
                let pieces = if partition.row_blocks > whole {
                    let rows = partition.item_rows;
                    format!("; pieces of {rows} queries, since whole ones would leave multiprocessors idle")
                } else {
                    String::new()
                };
                let pages = match spec.pages.as_deref() {
                    Some(pages) if variant.gathers() && !pages.page_size.is_multiple_of(BOX_ROWS) => {
                        format!(" (pages of {} keys: TMA loads those of multiples of {BOX_ROWS})", pages.page_size)
                    }
                    _ => String::new(),
                };
                format!(
                    "many queries: both products on the tensor cores by wgmma; {}{pages}{pieces}",
                    variant.loads.text()
                )
            }
            Algorithm::HopperF32 => format!(
                "many queries: both products on the tensor cores, each float32 as two float16 under a power of two (22 bits), three \
                 products for one, sums in float32; {}",
                variant.loads.text()
            ),
            Algorithm::Wide => {
                let products = match spec.numerics.storage {
                    DType::F32 => ", each float32 as two of TF32 (22 bits), three products for one, sums in float32",
                    _ => "",
                };
                let chunks = match partition.num_splits {
                    1 => String::new(),
                    n => format!("; {n} chunks of keys, since the queries alone would leave multiprocessors idle"),
                };
                let loads = variant.loads.text();
                format!("many queries of wide heads: both products on the tensor cores{products}; {loads}{chunks}")
            }
            Algorithm::Mma if variant.codes != Codes::None => format!(
                "many queries: codes become numbers of 16 bits in shared memory, both products on the tensor cores; {}",
                variant.loads.text()
            ),
            Algorithm::Mma if variant.dropout => format!(
                "dropout: both products on the tensor cores by mma.sync, whose lanes find which of their weights are dropped; {}",
                variant.loads.text()
            ),
            Algorithm::Mma => format!("many queries: both products on the tensor cores; {}", variant.loads.text()),
            Algorithm::Int8 => format!(
                "compute=\"int8\": both products of integers on the tensor cores, in the blocks of the definition; {}",
                variant.loads.text()
            ),
            Algorithm::Generic
            | Algorithm::Combine
            | Algorithm::Append
            | Algorithm::Varlen
            | Algorithm::Deviation
            | Algorithm::DeviationEnd
            | Algorithm::Backward(_)
            | Algorithm::BackwardMma(_)
            | Algorithm::BackwardHalves(_)
            | Algorithm::BackwardHopper => "it serves every request".to_owned(),
        };
        let others = varlen.iter().flat_map(|varlen| &varlen.launches).map(|launch| launch.attend.step.variant);
        let others = short.iter().map(|short| short.step.variant).chain(others);
        let others: Vec<_> = others.filter(|other| other != variant).map(|other| other.to_string()).collect();
        match &others[..] {
            [] => of_kernel,
            others => format!("{of_kernel}; sequences of other lengths by {}", others.join(" and ")),
        }
    }

    fn why_not_faster(&self, spec: &Spec, _: &KernelKey) -> String {
        let Some(launches) = &self.launches else { return String::new() };
        let Some(why) = launches.why_generic else {
            let variant = &launches.main.step.variant;
            let others = if variant.arch == Arch::Sm90a { " by wgmma, and those" } else { "" };
            return match variant.dropout {
                true => format!("the kernels{others} of few queries drop no weights"),
                false => String::new(),
            };
        };
        let storage = spec.numerics.storage;
        match why {
            WhyGeneric::FewQueriesOfF32 => "the tensor cores are used for more than 16 queries of float32".to_owned(),
            WhyGeneric::QueriesAreCodes => "the tensor cores take codes of K and V, and q as numbers".to_owned(),
            WhyGeneric::ManyQueriesOfF32 => {
                "over codes the tensor cores are used for at most 16 queries of float32, and for any of float16 and bfloat16".to_owned()
            }
            WhyGeneric::CodesInPlace => {
                "the tensor cores take K and V as codes, with factors of blocks of 16 or more that divide a head_dim which is a multiple of \
                 16, and zero points of tensors, heads or tokens"
                    .to_owned()
            }
            WhyGeneric::CodesAsNumbers => {
                let of_float16 = match storage {
                    DType::F16 => "; with float16 queries no mx formats, no channels of K and no float32 factors of blocks",
                    _ => "",
                };
                format!(
                    "the tensor cores take K and V as codes, with factors of blocks of 8 or more that divide a head_dim which is a multiple of \
                     16, and zero points of tensors, heads or tokens{of_float16}"
                )
            }
            WhyGeneric::Storage => {
                format!("the tensor cores are not used for {storage} on {}", launches.main.step.variant.arch.name())
            }
            WhyGeneric::HeadDim { most } => format!(
                "head_dim {} / {}: the tensor-core kernels take up to {most} of {storage}",
                spec.head_dim(),
                spec.head_dim_v()
            ),
            WhyGeneric::NoKeys => "there are no keys".to_owned(),
            WhyGeneric::SharedMemory { needed, has } => {
                format!("its tiles need {needed} bytes of shared memory, a block has {has}")
            }
            WhyGeneric::Dropout => {
                "dropout: on the tensor cores weights of float16 and bfloat16 are dropped, of heads up to 256".to_owned()
            }
        }
    }
}

impl Hopper {
    /// The parameters of tensors that lie where `params` say; `all`: of variants that read lengths of sequences.
    fn filled(&self, driver: &dyn Driver, params: &Params, all: Option<&LaunchParams>) -> Result<Filled> {
        let mut maps = [TensorMap::default(); 5];
        for ((map, tensor), address) in maps.iter_mut().zip(&self.moved).zip(params.mapped()) {
            if let Some(tensor) = tensor {
                *map = driver.encode(tensor, address)?;
            }
        }
        Ok(match (&self.tiles, all) {
            (Some(tiles), Some(all)) => Filled::HopperCache(HopperCacheParams::new(all, &self.items, tiles, maps)),
            _ => Filled::Hopper(HopperParams::new(params, &self.items, maps)),
        })
    }
}

impl Loads {
    /// In words, for `explain`.
    const fn text(self) -> &'static str {
        match self {
            Loads::Tma | Loads::TmaButMask => "K and V by TMA",
            Loads::By16Bytes => "K and V by loads of 16 bytes",
            Loads::ByElement => "K and V element by element: their strides or alignment allow no more",
        }
    }
}
