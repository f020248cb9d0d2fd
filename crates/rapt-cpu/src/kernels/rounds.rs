//! Rounds of products that wait for nothing but themselves: what a core can do at most (see `ceiling`).

#[cfg(target_arch = "x86_64")]
use super::pairs::Bf16Pairs;
use super::simd::{Part, Simd};

/// Independent sums: enough to hide an FMA of 4 cycles on two units.
pub(crate) const SUMS: usize = 12;

/// The sum of all lanes.
///
/// # Safety
/// The instruction set is there.
#[inline(always)]
unsafe fn total<S: Simd<Elem = f32>>(sums: [S::V; SUMS]) -> f32 {
    let mut total = 0.0;
    for sum in sums {
        // SAFETY: promised by the caller.
        total += unsafe { S::reduce_add(sum) };
    }
    total
}

struct Rounds {
    rounds: usize,
    x: f32,
    y: f32,
}

impl<S: Simd<Elem = f32>> Part<S> for Rounds {
    type Output = f32;

    #[inline(always)]
    unsafe fn run(self) -> f32 {
        // SAFETY: the caller vouches for the instruction set; no memory is touched.
        unsafe {
            let (x, y) = (S::splat(self.x), S::splat(self.y));
            let mut sums = [x; SUMS];
            for _ in 0..self.rounds {
                for sum in &mut sums {
                    *sum = S::fma(*sum, x, y);
                }
            }
            total::<S>(sums)
        }
    }
}

/// The rounds in the vectors of `S`, as a function.
///
/// # Safety
/// The instruction set is there.
pub(crate) unsafe fn rounds_of<S: Simd<Elem = f32>>(rounds: usize, x: f32, y: f32) -> f32 {
    // SAFETY: promised by the caller.
    unsafe { S::apart(Rounds { rounds, x, y }) }
}

/// The same of pairs of bfloat16.
#[cfg(target_arch = "x86_64")]
struct PairRounds {
    rounds: usize,
    x: f32,
    y: f32,
}

#[cfg(target_arch = "x86_64")]
impl<S: Bf16Pairs> Part<S> for PairRounds {
    type Output = f32;

    #[inline(always)]
    unsafe fn run(self) -> f32 {
        // SAFETY: the caller vouches for the instruction set; no memory is touched.
        unsafe {
            let (x, y) = (S::splat(self.x), S::splat(self.y));
            let (x, y) = (S::pair(x, x), S::pair(y, y));
            let mut sums = [S::splat(0.0); SUMS];
            for _ in 0..self.rounds {
                for sum in &mut sums {
                    *sum = S::dot(x, y, *sum);
                }
            }
            total::<S>(sums)
        }
    }
}

/// The rounds of pairs in the vectors of `S`, as a function.
///
/// # Safety
/// The instruction set is there, and its dot of pairs.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn pair_rounds_of<S: Bf16Pairs>(rounds: usize, x: f32, y: f32) -> f32 {
    // SAFETY: promised by the caller.
    unsafe { S::apart_paired(PairRounds { rounds, x, y }) }
}

/// The rounds without vectors. Plain Rust has no fused instruction to rely on.
pub(crate) fn plain_rounds(rounds: usize, x: f32, y: f32) -> f32 {
    let mut sums = [x; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = *sum * x + y;
        }
    }
    sums.iter().sum()
}
