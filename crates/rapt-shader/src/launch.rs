//! What a run launches, and what a plan says of it. Decided by `select`.

use rapt_core::{Cost, DType, Kernel, KernelKey, Launch, LaunchPlan, Spec, Work};

use crate::partition::Partition;
use crate::variant::{Algorithm, KernelVariant, Tiles};
use crate::window::Window;

/// What a run launches: one kernel or two, window by window.
#[derive(Clone, Debug, PartialEq)]
pub struct ShaderLaunch {
    /// The kernel; `None` where nothing is written.
    pub variant: Option<KernelVariant>,
    /// The kernel that folds what that one leaves, if it leaves something.
    pub combine: Option<KernelVariant>,
    /// The windows, in order.
    pub windows: Vec<Window>,
    pub(crate) partition: Partition,
    pub(crate) cost: Cost,
    pub(crate) work: Option<Work>,
    /// Why not a faster kernel; empty if there is none.
    pub(crate) why_not_faster: String,
}

impl ShaderLaunch {
    /// Workgroups of the launch of `window`.
    #[must_use]
    pub fn items_of(&self, window: &Window) -> usize {
        window.blocks() * self.partition.items_of_block()
    }

    /// Workgroups of `combine` for `window`.
    #[must_use]
    pub fn combine_items_of(&self, window: &Window) -> usize {
        window.tasks.len() * self.partition.row_fours * self.partition.combine_blocks
    }

    /// Bytes that `window` leaves to `combine`.
    #[must_use]
    pub fn partial_bytes_of(&self, window: &Window) -> usize {
        window.tasks.len() * self.partition.partial_bytes
    }

    fn tiles(&self) -> Tiles {
        self.variant.map_or(Tiles::NONE, |variant| variant.algorithm.tiles())
    }
}

impl LaunchPlan for ShaderLaunch {
    fn block_m(&self) -> usize {
        self.tiles().block_m
    }
    fn block_n(&self) -> usize {
        self.tiles().block_n
    }
    fn num_splits(&self) -> usize {
        self.partition.num_splits
    }
    fn items(&self) -> usize {
        self.windows.iter().map(|window| self.items_of(window)).sum()
    }
    fn threads(&self) -> usize {
        self.tiles().threads
    }
    fn workspace_bytes(&self) -> usize {
        self.windows.iter().map(|window| self.partial_bytes_of(window)).max().unwrap_or(0)
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        self.variant.is_some_and(|variant| variant.algorithm.is_split())
    }
    fn work(&self) -> Option<Work> {
        self.work
    }
    fn launch(&self) -> Option<Launch> {
        let Tiles { threads, shared_bytes, .. } = self.tiles();
        Some(Launch { blocks: self.items(), block_threads: threads, shared_bytes, multiprocessors: 1, compiled: None })
    }
    fn why(&self, spec: &Spec, key: &KernelKey) -> String {
        let rows = spec.group_size() * spec.q_len();
        let why = match key.kernel {
            Kernel::Empty => return "nothing is written".to_owned(),
            Kernel::Forward if self.variant.is_some_and(|variant| variant.algorithm == Algorithm::Lanes) => {
                format!("{rows} query rows for a key head, on a processor: four a thread, k and v from lane to lane")
            }
            Kernel::Forward => {
                format!("{rows} query rows for a key head: products on registers, of tiles in workgroup memory")
            }
            Kernel::Matrices => {
                let numbers = if key.storage == DType::F16 { "float16 summed in float32" } else { "float32" };
                format!("{rows} query rows for a key head: products on cooperative matrices, {numbers}")
            }
            Kernel::Decode => {
                let Partition { num_splits, split_keys, .. } = self.partition;
                let split = format!("keys in {num_splits} of {split_keys}, folded by a second launch");
                let has_matrices = |variant: KernelVariant| matches!(variant.algorithm, Algorithm::Matrices(_));
                let on = if self.variant.is_some_and(has_matrices) { ", on cooperative matrices" } else { "" };
                let at_once = self.block_m();
                format!("{rows} query rows for a key head: k and v are read once for {at_once} of them{on}; {split}")
            }
            _ => "it serves every size and device: any strides, on the ordinary units".to_owned(),
        };
        match self.windows.len() {
            1 => why,
            n => format!("{why}; {n} launches, each over tensors no longer than the device binds"),
        }
    }
    fn why_not_faster(&self, _: &Spec, _: &KernelKey) -> String {
        self.why_not_faster.clone()
    }
}
