//! What a plan of this backend launches: everything that `select` decided.

use rapt_core::{Arch, Cost, DType, Kernel, KernelKey, Launch, LaunchPlan, PRounding, Spec, Work};

use crate::arch::KernelVariant;
use crate::kernels::decode;
use crate::problem::Decisions;

/// The [`LaunchPlan`] of this backend: made by [`select`](crate::select()), launched by [`run`](crate::run()).
#[derive(Debug, PartialEq)]
pub struct CpuLaunch {
    /// `None` where nothing is attended: zeros and −inf are written.
    pub(crate) steps: Option<Steps>,
    pub(crate) threads: usize,
    pub(crate) workspace_bytes: usize,
    pub(crate) cost: Cost,
}

/// The kernels of a run, and how its work is dealt to them.
#[derive(Debug, PartialEq)]
pub(crate) struct Steps {
    pub(crate) main: KernelVariant,
    /// What puts the chunks of decode together, where there are several.
    pub(crate) combine: Option<KernelVariant>,
    pub(crate) block_m: usize,
    pub(crate) num_splits: usize,
    pub(crate) keys_per_item: usize,
    pub(crate) decisions: Decisions,
    /// Of one thread, a multiple of 64.
    pub(crate) scratch_bytes: usize,
    /// Of decode's partial results.
    pub(crate) partials_bytes: usize,
}

impl CpuLaunch {
    /// The kernels that run one after the other; none where nothing is attended.
    #[must_use]
    pub fn variants(&self) -> Vec<KernelVariant> {
        self.steps.iter().flat_map(|steps| [Some(steps.main), steps.combine]).flatten().collect()
    }
}

impl LaunchPlan for CpuLaunch {
    fn block_m(&self) -> usize {
        self.steps.as_ref().map_or(0, |steps| steps.block_m)
    }
    fn block_n(&self) -> usize {
        self.steps.as_ref().map_or(0, |steps| steps.decisions.partition.block_n)
    }
    fn num_splits(&self) -> usize {
        self.steps.as_ref().map_or(1, |steps| steps.num_splits)
    }
    fn items(&self) -> usize {
        self.steps.as_ref().map_or(0, |steps| steps.decisions.partition.items())
    }
    fn threads(&self) -> usize {
        self.threads
    }
    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }
    fn cost(&self) -> &Cost {
        &self.cost
    }
    fn kv_in_place(&self) -> bool {
        self.steps.as_ref().is_none_or(|Steps { decisions: Decisions { partition, .. }, .. }| {
            partition.k_in_place && partition.v_in_place
        })
    }
    fn work(&self) -> Option<Work> {
        self.steps.as_ref().map(|Steps { decisions: Decisions { partition, .. }, keys_per_item, .. }| Work {
            tasks: partition.tasks,
            rows: partition.rows,
            rows_per_item: partition.chunk_rows,
            keys_per_item: *keys_per_item,
        })
    }
    fn launch(&self) -> Option<Launch> {
        None
    }
    fn why(&self, _: &Spec, key: &KernelKey) -> String {
        match key.kernel {
            Kernel::Empty => "no keys, or no output: nothing is attended".to_owned(),
            Kernel::Decode => {
                let rows = self.block_m();
                let by = if key.arch == Arch::Avx512Vnni { "; codes are multiplied by the dot of bytes" } else { "" };
                format!("{rows} queries share each kv head: K and V are read once, head_dim along the lanes{by}")
            }
            Kernel::ForwardInt8 => {
                "compute=\"int8\" was asked for: products of int8 codes, queries along the lanes".to_owned()
            }
            _ => "many queries: they fill the lanes, K and V are broadcast".to_owned(),
        }
    }
    fn why_not_faster(&self, spec: &Spec, key: &KernelKey) -> String {
        let arch = key.arch;
        if key.kernel == Kernel::Empty
            || matches!(key.p_rounding, PRounding::Storage | PRounding::TwoBf16 | PRounding::Fixed)
        {
            String::new()
        } else if key.kernel == Kernel::ForwardInt8 {
            if spec.group_size().saturating_mul(spec.q_len()) <= decode::MAX_ROWS {
                "few queries leave most lanes empty: with compute=\"exact\" they are served by decode".to_owned()
            } else if matches!(arch, Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx | Arch::NeonBf16)
                || !cfg!(any(target_arch = "x86_64", target_arch = "aarch64"))
            {
                String::new()
            } else {
                format!("{} has no dot instruction of bytes, or RAPT_ISA holds to these", arch.name())
            }
        } else if arch == Arch::Avx512Vnni {
            "products with v are formed in float32: its numbers are no small integers, or have a factor for each group"
                .to_owned()
        } else if let Some((tensor, ..)) = spec.quantized().next() {
            format!("products are formed in float32: the numbers of {tensor} are not rounded further")
        } else if matches!(arch, Arch::Avx512 | Arch::Neon) && key.storage == DType::BF16 {
            "products are formed in float32: the bf16 dot instruction is missing or slower here, or RAPT_ISA holds to these"
                .to_owned()
        } else if !matches!(arch, Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx)
            && cfg!(target_arch = "x86_64")
        {
            format!("{} it is: no wider vectors are on this machine, or RAPT_ISA holds to these", arch.name())
        } else {
            String::new()
        }
    }
}
