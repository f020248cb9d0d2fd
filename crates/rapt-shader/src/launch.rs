//! What a run launches, and what a plan says of it. Decided by `select`.

use rapt_core::{Cost, Kernel, KernelKey, Launch, LaunchPlan, Spec, Work};

use crate::variant::{BLOCK_M, KernelVariant, Tiles};
use crate::window::Window;

/// What a run launches: one kernel, window by window.
#[derive(Clone, Debug, PartialEq)]
pub struct ShaderLaunch {
    /// The kernel; `None` where nothing is written.
    pub variant: Option<KernelVariant>,
    /// The windows, in order.
    pub windows: Vec<Window>,
    /// Blocks of columns of values.
    pub(crate) dv_blocks: usize,
    pub(crate) cost: Cost,
    pub(crate) work: Option<Work>,
    /// Why not a faster kernel; empty if there is none.
    pub(crate) why_not_faster: String,
}

impl ShaderLaunch {
    /// Workgroups of the launch of `window`.
    #[must_use]
    pub fn items_of(&self, window: &Window) -> usize {
        window.items(self.dv_blocks)
    }

    fn tiles(&self) -> Tiles {
        self.variant.map_or(Tiles::NONE, |variant| variant.algorithm.tiles())
    }
}

impl LaunchPlan for ShaderLaunch {
    fn block_m(&self) -> usize {
        BLOCK_M
    }
    fn block_n(&self) -> usize {
        self.tiles().block_n
    }
    fn num_splits(&self) -> usize {
        1
    }
    fn items(&self) -> usize {
        self.windows.iter().map(|window| self.items_of(window)).sum()
    }
    fn threads(&self) -> usize {
        self.tiles().threads
    }
    fn workspace_bytes(&self) -> usize {
        0
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
        let Tiles { threads, shared_bytes, .. } = self.tiles();
        Some(Launch { blocks: self.items(), block_threads: threads, shared_bytes, multiprocessors: 1, compiled: None })
    }
    fn why(&self, spec: &Spec, key: &KernelKey) -> String {
        let why = match key.kernel {
            Kernel::Empty => return "nothing is written".to_owned(),
            Kernel::Forward => {
                let rows = spec.group_size() * spec.q_len();
                format!("{rows} query rows for a key head: products on registers, of tiles in workgroup memory")
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
