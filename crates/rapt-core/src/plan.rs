//! A plan: what will run, owned, and able to say so.

use std::fmt;

use crate::{Certificate, DType, Direction, Error, Kv, Spec, Work};

/// An instruction set that a kernel is written for, or the architecture of an NVIDIA GPU that it is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Arch {
    /// Plain Rust, any processor.
    Scalar,
    /// 128-bit vectors of aarch64.
    Neon,
    /// 256-bit vectors: AVX2, FMA and F16C.
    Avx2,
    /// 512-bit vectors: AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same, with products of bf16 formed by its dot instruction.
    Avx512Bf16,
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
}

impl Arch {
    /// The name that `RAPT_ISA` takes and `doctor` prints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Arch::Scalar => "scalar",
            Arch::Neon => "neon",
            Arch::Avx2 => "avx2",
            Arch::Avx512 => "avx512",
            Arch::Avx512Bf16 => "avx512_bf16",
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

/// The algorithm of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// Many queries: tiles of them along the vector lanes, or on the tensor cores.
    Forward,
    /// Few queries: bound by how fast K and V arrive, keys split in fixed chunks.
    Decode,
    /// The one that serves the whole law where no faster one does.
    Generic,
    /// Nothing to attend: zeros and −inf.
    Empty,
}

impl Kernel {
    /// The name that `explain` prints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Forward => "forward",
            Kernel::Decode => "decode",
            Kernel::Generic => "generic",
            Kernel::Empty => "empty",
        }
    }
}

/// Where the probabilities are rounded between the two products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PRounding {
    /// Kept in the accumulation dtype.
    Accumulation,
    /// To the storage dtype, for the product with v; what divides is the sum before rounding.
    Storage,
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
    /// Bytes of tensors materialised: always 0.
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

/// What will run for a [`Spec`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// The request.
    pub spec: Spec,
    /// The kernel's code.
    pub key: KernelKey,
    /// Queries per tile.
    pub block_m: usize,
    /// Keys per block: chunks of this length are summed on their own and combined in order, whatever the threads.
    pub block_n: usize,
    /// Parts into which the keys are split among threads; 1 is unsplit. Depends on the lengths alone.
    pub num_splits: usize,
    /// Independent pieces of work.
    pub items: usize,
    /// Threads that the run will use.
    pub threads: usize,
    /// Scratch memory that the run asks.
    pub workspace_bytes: usize,
    /// Cost and floor.
    pub cost: Cost,
    /// Whether K and V are read where they lie (`true`), or in packed tiles.
    pub kv_in_place: bool,
    /// How a GPU kernel is launched; `None` on the host.
    pub launch: Option<Launch>,
    /// Why this kernel.
    pub why: String,
    /// Why not a faster one; empty if there is none.
    pub why_not_faster: String,
    /// How rows and keys are dealt to items; `None` where nothing is attended.
    pub work: Option<Work>,
}

impl Plan {
    /// A plan from its parts; backends only.
    #[allow(clippy::too_many_arguments, reason = "one constructor for the non-exhaustive struct")]
    #[must_use]
    pub fn new(
        spec: Spec,
        key: KernelKey,
        (block_m, block_n, num_splits, items): (usize, usize, usize, usize),
        threads: usize,
        workspace_bytes: usize,
        cost: Cost,
        kv_in_place: bool,
        why: String,
        why_not_faster: String,
    ) -> Self {
        Plan {
            launch: None,
            spec,
            key,
            block_m,
            block_n,
            num_splits,
            items,
            threads,
            workspace_bytes,
            cost,
            kv_in_place,
            why,
            why_not_faster,
            work: None,
        }
    }

    /// This plan, with how its rows and keys are dealt to items: what a [`Certificate`] checks.
    #[must_use]
    pub fn with_work(self, work: Work) -> Self {
        Plan { work: Some(work), ..self }
    }

    /// This plan on a GPU.
    #[must_use]
    pub fn on_gpu(self, launch: Launch) -> Self {
        Plan { launch: Some(launch), ..self }
    }

    /// The plan in words and numbers.
    #[must_use]
    pub fn explain(&self) -> Explanation<'_> {
        Explanation { plan: self, certificate: None }
    }
}

/// A plan in rows of a name and a text. `Display` prints them as a table.
#[derive(Clone, Copy, Debug)]
pub struct Explanation<'a> {
    plan: &'a Plan,
    certificate: Option<&'a Certificate>,
}

fn thousands(n: f64) -> String {
    let digits = format!("{n:.0}");
    let mut out = String::new();
    for (at, c) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 && c != '-' {
            out.push(',');
        }
        out.push(c);
    }
    out
}

impl<'a> Explanation<'a> {
    /// With what was proven about the operands at hand.
    #[must_use]
    pub fn certified(self, certificate: &'a Certificate) -> Self {
        Explanation { certificate: Some(certificate), ..self }
    }

    /// The rows, in order.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let Plan { spec, key, cost, .. } = self.plan;
        let mask = match key.mask {
            MaskClass::None => "none".to_owned(),
            MaskClass::Bool => "bool, True = attend, read in place".to_owned(),
            MaskClass::Additive => {
                format!("additive {}, read in place", spec.mask.map_or(key.accumulation, |mask| mask.dtype))
            }
        };
        let positions = {
            let causal = spec.causal.map_or("no causal mask".to_owned(), |causal| {
                format!("causal {}, diagonal at j = i + {}", causal.name(), spec.block_range().diagonal)
            });
            let end = |end: Option<usize>| end.map_or("unbounded".to_owned(), |n| n.to_string());
            match (spec.window.left, spec.window.right) {
                (None, None) => causal,
                (left, right) => format!("{causal}; window left {}, right {}", end(left), end(right)),
            }
        };
        let rounding = match key.p_rounding {
            PRounding::Accumulation => format!("nowhere: p stays {}", key.accumulation),
            PRounding::Storage => {
                format!("to {} for the product with v; its sum stays {}", key.storage, key.accumulation)
            }
        };
        let launch = self.plan.launch.as_ref();
        let floor = match (cost.floor_seconds, launch) {
            (Some(seconds), Some(launch)) => {
                format!("{:.1} µs on {} multiprocessors", seconds * 1e6, launch.multiprocessors)
            }
            (Some(seconds), None) => {
                format!(
                    "{:.1} µs on {} threads ({} cycles of one core)",
                    seconds * 1e6,
                    self.plan.threads,
                    thousands(cost.floor_cycles)
                )
            }
            (None, _) => format!("{} cycles of one core", thousands(cost.floor_cycles)),
        };
        let mut rows = vec![
            ("kernel", format!("{} {} on {}", key.kernel.name(), key.storage, key.arch.name())),
            ("why", self.plan.why.clone()),
        ];
        if !self.plan.why_not_faster.is_empty() {
            rows.push(("why not faster", self.plan.why_not_faster.clone()));
        }
        rows.extend([
            (
                "problem",
                format!(
                    "batch {}, heads {} / {}, q_len {}, kv_len {}, head_dim {} / {}",
                    spec.batch(),
                    spec.num_q_heads(),
                    spec.num_kv_heads(),
                    spec.q_len(),
                    spec.kv_len(),
                    spec.head_dim(),
                    spec.head_dim_v()
                ),
            ),
            ("q strides", format!("{:?}", spec.q.strides)),
            ("k strides", format!("{:?}", spec.k.strides)),
            ("v strides", format!("{:?}", spec.v.strides)),
            ("out strides", format!("{:?}, {}", spec.out.strides, spec.out.dtype)),
            ("positions", positions),
            ("mask", mask),
            ("accumulation", key.accumulation.to_string()),
            ("p is rounded", rounding),
            (
                "tiles",
                format!(
                    "{} queries × {} keys, {} pieces of work, keys split in {}",
                    self.plan.block_m, self.plan.block_n, self.plan.items, self.plan.num_splits
                ),
            ),
        ]);
        match launch {
            None => rows.push(("threads", self.plan.threads.to_string())),
            Some(launch) => rows.extend(launch.rows()),
        }
        rows.extend([
            ("flops", thousands(cost.flops)),
            ("bytes read", thousands(cost.bytes_read)),
            ("bytes written", thousands(cost.bytes_written)),
            ("floor", floor),
            ("bytes_copied", format!("{} (no tensor is materialised)", cost.bytes_copied)),
            (
                "bytes_packed",
                format!(
                    "{} (cache tiles; K and V {})",
                    thousands(cost.bytes_packed as f64),
                    match (launch, self.plan.kv_in_place) {
                        (Some(_), _) => "pass through shared memory",
                        (None, true) => "are read where they lie",
                        (None, false) => "are packed block by block",
                    }
                ),
            ),
            ("workspace_bytes", thousands(self.plan.workspace_bytes as f64)),
        ]);
        rows.extend(self.certificate.into_iter().flat_map(Certificate::rows));
        rows
    }
}

impl Launch {
    fn rows(&self) -> Vec<(&'static str, String)> {
        let Launch { blocks, block_threads, shared_bytes, .. } = self;
        let mut rows = vec![(
            "launch",
            format!(
                "{blocks} blocks of {block_threads} threads, {} bytes of shared memory",
                thousands(*shared_bytes as f64)
            ),
        )];
        if let Some(compiled) = &self.compiled {
            rows.push(("registers", format!("{}, {} bytes of local memory", compiled.registers, compiled.local_bytes)));
            rows.push(("cubin", compiled.source.clone()));
        }
        rows
    }
}

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.rows();
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, text) in rows {
            writeln!(f, "{name:width$}  {text}")?;
        }
        Ok(())
    }
}

impl Error {
    /// A refusal of select.
    #[must_use]
    pub fn unsupported(what: impl Into<String>, why: impl Into<String>, instead: impl Into<String>) -> Self {
        Error::Unsupported { what: what.into(), why: why.into(), instead: instead.into() }
    }
}
