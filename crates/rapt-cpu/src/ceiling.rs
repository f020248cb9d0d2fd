//! What a core can do, in plain loops: `rapt bench` times them and holds kernels against them.
//!
//! They are here because their speed must not depend on how the program around them is optimised: they are made of the kernels' own
//! vectors and tiles. Deliberately absent: clocks, threads, and products of int8.

use rapt_core::{Arch, DType};

use crate::arch;
use crate::available;

/// Rounds of products in what an instruction set has for them: f32 FMAs in its vectors; of bfloat16 the dot of pairs, or tiles.
pub struct ProductRounds {
    arch: Arch,
    body: unsafe fn(usize, f32, f32) -> f32,
    flops: usize,
}

impl ProductRounds {
    /// Rounds of f32 FMAs; plain Rust's for an instruction set that this machine lacks.
    #[must_use]
    pub fn of(arch: Arch) -> ProductRounds {
        let arch = if available().contains(&arch) { arch } else { Arch::Scalar };
        let (body, flops) = arch::fma_rounds(arch);
        ProductRounds { arch, body, flops }
    }

    /// Rounds of products of bfloat16, where forward of `arch` forms them of bfloat16.
    #[must_use]
    pub fn of_bf16(arch: Arch) -> Option<ProductRounds> {
        if !available().contains(&arch) || !arch::is_paired(arch, DType::BF16) {
            return None;
        }
        let (body, flops) = arch::bf16_rounds(arch)?;
        Some(ProductRounds { arch, body, flops })
    }

    /// The instruction set.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The FLOPs of one round.
    #[must_use]
    pub fn flops(&self) -> usize {
        self.flops
    }

    /// FMAs: twelve independent vectors of `x`, each `v·x + y` in every round. Of bfloat16: independent sums, from 0 on, each `v + x·y` as
    /// often as it has steps. The sum of all.
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
