//! A plan: what will run, owned, and able to say so.
//!
//! ```text
//! Plan = Spec + KernelKey + LaunchPlan       decided once by a backend's select; run launches it and derives nothing
//! ```
//! The [`LaunchPlan`] is a backend's own type. What a plan says of itself (its numbers, [`explain`](Plan::explain), the
//! certificate) is read from it, and so is what runs. Deliberately absent: a way to change a plan.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::{DType, Direction, Error, Kv, Result, Spec};

/// An instruction set or a language that a kernel is written for, or the architecture of an NVIDIA GPU that it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Arch {
    /// Plain Rust, any processor.
    Scalar,
    /// 128-bit vectors of aarch64.
    Neon,
    /// The same, with products of bf16 and of bytes formed by their dot instructions.
    NeonBf16,
    /// 256-bit vectors: AVX2, FMA and F16C.
    Avx2,
    /// 128-bit vectors of WebAssembly.
    Simd128,
    /// 512-bit vectors: AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same, with products of bytes formed by its dot instruction.
    Avx512Vnni,
    /// The same, with products of bf16 formed by its dot instruction.
    Avx512Bf16,
    /// 512-bit vectors, with products of bf16 formed tile by tile: Intel's AMX.
    Amx,
    /// NVIDIA A100.
    Sm80,
    /// GeForce RTX 30, A10, A40.
    Sm86,
    /// Jetson Orin.
    Sm87,
    /// GeForce RTX 40, L4, L40.
    Sm89,
    /// H100, H200, with the instructions that only they have.
    Sm90a,
    /// B200.
    Sm100,
    /// B300.
    Sm103,
    /// Jetson Thor.
    Sm110,
    /// GeForce RTX 50.
    Sm120,
    /// GB10.
    Sm121,
    /// Any GPU that WebGPU reaches: text that its driver compiles.
    Wgsl,
    /// Apple's GPUs: text in Metal's language that its driver compiles.
    Msl,
}

impl Arch {
    /// The name that `RAPT_ISA` takes and `doctor` prints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Scalar => "scalar",
            Arch::Neon => "neon",
            Arch::NeonBf16 => "neon_bf16",
            Arch::Simd128 => "simd128",
            Arch::Avx2 => "avx2",
            Arch::Avx512 => "avx512",
            Arch::Avx512Vnni => "avx512_vnni",
            Arch::Avx512Bf16 => "avx512_bf16",
            Arch::Amx => "amx",
            Arch::Sm80 => "sm_80",
            Arch::Sm86 => "sm_86",
            Arch::Sm87 => "sm_87",
            Arch::Sm89 => "sm_89",
            Arch::Sm90a => "sm_90a",
            Arch::Sm100 => "sm_100",
            Arch::Sm103 => "sm_103",
            Arch::Sm110 => "sm_110",
            Arch::Sm120 => "sm_120",
            Arch::Sm121 => "sm_121",
            Arch::Wgsl => "wgsl",
            Arch::Msl => "msl",
        }
    }

    /// The architecture to compile for on a GPU of this compute capability: its own, or the nearest below whose machine
    /// code it runs. `None` where there is none: before 8.0, and beyond what is known.
    #[must_use]
    pub const fn of_compute_capability(major: u32, minor: u32) -> Option<Arch> {
        match (major, minor) {
            (8, 0..=5) => Some(Arch::Sm80),
            (8, 6) => Some(Arch::Sm86),
            (8, 7 | 8) => Some(Arch::Sm87),
            (8, _) => Some(Arch::Sm89),
            (9, 0) => Some(Arch::Sm90a),
            (10, 0..=2) => Some(Arch::Sm100),
            (10, _) => Some(Arch::Sm103),
            (11, _) => Some(Arch::Sm110),
            (12, 0) => Some(Arch::Sm120),
            (12, _) => Some(Arch::Sm121),
            _ => None,
        }
    }
}

/// What the machine has, as far as a selection depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Caps {
    /// The instruction set to use.
    pub arch: Arch,
    /// Threads that a run may use.
    pub threads: usize,
    /// The clock in Hz where the system tells it: only for the floor in time.
    pub clock_hz: Option<f64>,
}

/// Masks as far as a kernel's code depends on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskClass {
    /// No mask tensor.
    None,
    /// True = attend.
    Bool,
    /// Added to the scores.
    Additive,
}

/// An enum without fields, and `ALL`, which cannot lack one of them.
macro_rules! listed {
    ($(#[$of_enum:meta])* pub enum $name:ident { $($(#[$of_variant:meta])* $variant:ident,)* }) => {
        $(#[$of_enum])*
        pub enum $name {
            $($(#[$of_variant])* $variant,)*
        }

        impl $name {
            /// Every one of them, in the order in which they are declared.
            pub const ALL: &'static [Self] = &[$($name::$variant,)*];
        }
    };
}

listed! {
    /// The algorithm of a plan.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum Kernel {
        /// Many queries: tiles of them along the vector lanes, or on the tensor cores.
        Forward,
        /// Many queries, products on the matrices of a device that Vulkan reaches.
        Matrices,
        /// Few queries: bound by how fast K and V arrive, keys split in fixed chunks.
        Decode,
        /// The one that serves the whole definition where no faster one does.
        Generic,
        /// [`Compute::Int8`](crate::Compute::Int8): products of integers, queries along the lanes, or on the tensor cores.
        ForwardInt8,
        /// Gradients: probabilities recomputed from lse, queries along the lanes.
        Backward,
        /// Nothing to attend: zeros and −inf.
        Empty,
    }
}

impl Kernel {
    /// The name that `explain` prints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Forward => "forward",
            Kernel::Matrices => "matrices",
            Kernel::Decode => "decode",
            Kernel::Generic => "generic",
            Kernel::ForwardInt8 => "forward_int8",
            Kernel::Backward => "backward",
            Kernel::Empty => "empty",
        }
    }
}

listed! {
    /// Where the probabilities are rounded between the two products.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum PRounding {
        /// Kept in the accumulation dtype.
        Accumulation,
        /// To the storage dtype, for the product with v; what divides is the sum before rounding.
        Storage,
        /// To the sum of two bfloat16, for the product with v: 16 bits.
        TwoBf16,
        /// To 24 bits in fixed point, for the product with v, each weight with the factor of its code: against the largest of a block of keys.
        Fixed,
        /// To 8 bits against the maximum of their block of [`INT8_BLOCK`](crate::INT8_BLOCK) keys, for the product with v; what divides is the
        /// sum before rounding.
        Block,
    }
}

/// What identifies a kernel's code: a spec without its lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelKey {
    /// What is computed.
    pub direction: Direction,
    /// The algorithm.
    pub kernel: Kernel,
    /// The dtype of q, k and v.
    pub storage: DType,
    /// The dtype of sums.
    pub accumulation: DType,
    /// Where p is rounded.
    pub p_rounding: PRounding,
    /// The mask.
    pub mask: MaskClass,
    /// How keys and values are stored.
    pub kv: Kv,
    /// The instruction set.
    pub arch: Arch,
}

/// What a run costs at least, and what it moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Multiplications and additions of both products, over the pairs that causal and window leave.
    pub flops: f64,
    /// One exponential per pair.
    pub exponentials: f64,
    /// Each input read once.
    pub bytes_read: f64,
    /// Each output written once.
    pub bytes_written: f64,
    /// Cycles of one core, if FMA and exponential units were never idle; memory not counted.
    pub floor_cycles: f64,
    /// The floor in seconds on the plan's threads at the system's clock, where it is known.
    pub floor_seconds: Option<f64>,
    /// Bytes of tensors copied: 0 where they are attended to where they lie, else those that go to an [`Offload`](crate::Offload) and back.
    pub bytes_copied: usize,
    /// Most bytes that lie packed in cache at one time, all threads together.
    pub bytes_packed: usize,
}

/// A GPU kernel as it is launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Thread blocks.
    pub blocks: usize,
    /// Threads per block.
    pub block_threads: usize,
    /// Shared memory per block.
    pub shared_bytes: usize,
    /// Multiprocessors of the device.
    pub multiprocessors: usize,
    /// What the compiler made of it; `None` until it was compiled.
    pub compiled: Option<Compiled>,
}

/// What a GPU compiler made of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// Registers per thread.
    pub registers: usize,
    /// Local memory per thread: spilled registers and stack.
    pub local_bytes: usize,
    /// Where the machine code came from, in words.
    pub source: String,
}

/// One of the launches of a plan over sequences whose lengths the device reads, and what it is for.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanPart {
    /// The algorithm; `None` where nothing is attended to.
    pub kernel: Option<Kernel>,
    /// The name of its machine code.
    pub variant: String,
    /// Which sequences it serves, or what it does for all of them, in words.
    pub serves: String,
    /// How it is launched.
    pub launch: Launch,
}

/// How a plan deals the rows of out to items: what a backend's `select` states, and a certificate checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Work {
    /// Groups of rows that share keys and nothing else.
    pub tasks: usize,
    /// Rows of one task: queries of its heads.
    pub rows: usize,
    /// Rows of one item: the n-th takes rows `n·r .. min((n + 1)·r, rows)`.
    pub rows_per_item: usize,
    /// Keys of one item, cut likewise.
    pub keys_per_item: usize,
}

/// A backend's whole decision for one request: what its `run` launches, and what [`Plan`] says of it.
///
/// One type of each backend implements it. Its `run` gets the very value back by [`Plan::launch_plan`], so nothing that it
/// launches can differ from what was explained.
pub trait LaunchPlan: Any + Debug + Send + Sync {
    /// Queries per tile.
    fn block_m(&self) -> usize;
    /// Keys per block: chunks of this length are summed on their own and combined in order, whatever the threads.
    fn block_n(&self) -> usize;
    /// Parts into which the keys are split among threads; 1 is unsplit. Depends on the lengths alone.
    fn num_splits(&self) -> usize;
    /// Independent pieces of work.
    fn items(&self) -> usize;
    /// Threads that the run will use.
    fn threads(&self) -> usize;
    /// Scratch memory that the run needs.
    fn workspace_bytes(&self) -> usize;
    /// Cost and floor.
    fn cost(&self) -> &Cost;
    /// Whether K and V are read where they lie (`true`), or in packed tiles.
    fn kv_in_place(&self) -> bool;
    /// How rows and keys are dealt to items; `None` where nothing is attended.
    fn work(&self) -> Option<Work>;
    /// How a GPU kernel is launched; `None` on the host.
    fn launch(&self) -> Option<Launch>;
    /// Every launch in order, where sequences have lengths that only the device knows; else none.
    fn parts(&self, _spec: &Spec) -> Vec<PlanPart> {
        Vec::new()
    }
    /// Why this kernel, in words.
    fn why(&self, spec: &Spec, key: &KernelKey) -> String;
    /// Why not a faster one, in words; empty if there is none.
    fn why_not_faster(&self, spec: &Spec, key: &KernelKey) -> String;
}

/// A [`LaunchPlan`] of any backend, comparable with another.
trait Payload: LaunchPlan {
    fn equals(&self, other: &dyn Any) -> bool;
}

impl<L: LaunchPlan + PartialEq> Payload for L {
    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<L>() == Some(self)
    }
}

/// What will run for a [`Spec`]. Made by a backend's `select`, never changed.
#[derive(Clone, Debug)]
pub struct Plan {
    spec: Spec,
    key: KernelKey,
    launch_plan: Arc<dyn Payload>,
}

impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        let launch_plan: &dyn Any = &*other.launch_plan;
        self.spec == other.spec && self.key == other.key && self.launch_plan.equals(launch_plan)
    }
}

impl Plan {
    /// A plan of `launch_plan`, which was decided for `spec`; backends only.
    #[must_use]
    pub fn new<L: LaunchPlan + PartialEq>(spec: Spec, key: KernelKey, launch_plan: L) -> Self {
        Plan { spec, key, launch_plan: Arc::new(launch_plan) }
    }

    /// The request.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// What identifies the kernel's code.
    #[must_use]
    pub fn key(&self) -> &KernelKey {
        &self.key
    }

    /// What the backend whose type `L` is will launch. Only a reference is given: a launch plan cannot be put under another spec.
    ///
    /// # Errors
    /// [`Error::NotAsPlanned`] for the plan of another backend.
    pub fn launch_plan<L: LaunchPlan>(&self) -> Result<&L> {
        let launch_plan: &dyn Any = &*self.launch_plan;
        launch_plan.downcast_ref().ok_or(Error::NotAsPlanned { tensor: "plan", what: "backend" })
    }

    /// Queries per tile.
    #[must_use]
    pub fn block_m(&self) -> usize {
        self.launch_plan.block_m()
    }

    /// Keys per block.
    #[must_use]
    pub fn block_n(&self) -> usize {
        self.launch_plan.block_n()
    }

    /// Parts into which the keys are split among threads; 1 is unsplit.
    #[must_use]
    pub fn num_splits(&self) -> usize {
        self.launch_plan.num_splits()
    }

    /// Independent pieces of work.
    #[must_use]
    pub fn items(&self) -> usize {
        self.launch_plan.items()
    }

    /// Threads that the run will use.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.launch_plan.threads()
    }

    /// Scratch memory that the run needs.
    #[inline]
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.launch_plan.workspace_bytes()
    }

    /// Cost and floor.
    #[must_use]
    pub fn cost(&self) -> &Cost {
        self.launch_plan.cost()
    }

    /// Whether K and V are read where they lie (`true`), or in packed tiles.
    #[must_use]
    pub fn kv_in_place(&self) -> bool {
        self.launch_plan.kv_in_place()
    }

    /// How rows and keys are dealt to items; `None` where nothing is attended.
    #[must_use]
    pub fn work(&self) -> Option<Work> {
        self.launch_plan.work()
    }

    /// How a GPU kernel is launched; `None` on the host.
    #[must_use]
    pub fn launch(&self) -> Option<Launch> {
        self.launch_plan.launch()
    }

    /// Every launch in order, where sequences have lengths that only the device knows; else none.
    #[must_use]
    pub fn parts(&self) -> Vec<PlanPart> {
        self.launch_plan.parts(&self.spec)
    }

    /// Why this kernel, in words.
    #[must_use]
    pub fn why(&self) -> String {
        self.launch_plan.why(&self.spec, &self.key)
    }

    /// Why not a faster one, in words; empty if there is none.
    #[must_use]
    pub fn why_not_faster(&self) -> String {
        self.launch_plan.why_not_faster(&self.spec, &self.key)
    }
}
