//! What a core can do, in plain loops: `rapt bench` times them and holds kernels against them.
//!
//! They are here because their speed must not depend on how the program around them is optimised: they are made of the kernels' own
//! vectors. Deliberately absent: clocks, threads, and the bf16-dot unit (`cargo xtask bench cpu` measures it beside its peers).

use rapt_core::Arch;

use crate::arch;
use crate::available;
use crate::kernels::fma_rounds::SUMS;

/// Rounds of f32 FMAs in the vectors of an instruction set.
pub struct FmaRounds {
    arch: Arch,
    body: unsafe fn(usize, f32, f32) -> f32,
    lanes: usize,
}

impl FmaRounds {
    /// Those of `arch`; plain Rust's for one that this machine lacks.
    #[must_use]
    pub fn of(arch: Arch) -> FmaRounds {
        let arch = if available().contains(&arch) { arch } else { Arch::Scalar };
        let (body, lanes) = arch::fma_rounds(arch);
        FmaRounds { arch, body, lanes }
    }

    /// The instruction set.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The FLOPs of one round.
    #[must_use]
    pub fn flops(&self) -> usize {
        2 * SUMS * self.lanes
    }

    /// Twelve independent vectors of `x`, each `v·x + y` in every round; the sum of all.
    #[must_use]
    pub fn run(&self, rounds: usize, x: f32, y: f32) -> f32 {
        // SAFETY: `of` found the instruction set on this machine.
        unsafe { (self.body)(rounds, x, y) }
    }
}

/// `steps` times a multiplication (3 cycles) and an exclusive or (1), each of which waits for the other: `4 · steps` cycles.
#[must_use]
pub fn chain(steps: u32, factor: u64) -> u64 {
    (0..steps).fold(factor, |x, _| (x ^ factor).wrapping_mul(factor))
}

/// The sum, wrapping around, as fast as memory is read.
#[must_use]
pub fn sum(memory: &[u64]) -> u64 {
    memory.iter().fold(0, |sum, x| sum.wrapping_add(*x))
}
