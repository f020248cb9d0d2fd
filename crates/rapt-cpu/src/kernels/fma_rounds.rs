//! Rounds of f32 FMAs that wait for nothing but themselves: what a core can do at most (see `ceiling`).

use super::simd::{Part, Simd};

/// Independent sums: enough to hide an FMA of 4 cycles on two units.
pub(crate) const SUMS: usize = 12;

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
            let mut total = 0.0;
            for sum in sums {
                total += S::reduce_add(sum);
            }
            total
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
