//! What this machine can do at this moment: the clock, the f32 FMA rate, and the rate at which DRAM is read.
//!
//! Plain loops, compiled for the instruction set in use, one thread per thread of the engine, all let go at once. Each
//! figure is the best of a few short repeats: a ceiling is what the silicon can do, not what it did under a neighbour.
//! Deliberately absent: intrinsics, pinning, and the bf16-dot unit (`cargo xtask bench cpu` measures it beside its peers).

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use rapt::Arch;

const REPEATS: usize = 3;

/// What was measured at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ceilings {
    /// Of one core.
    pub(crate) clock_hz: f64,
    /// All threads together.
    pub(crate) fma_flops: f64,
    /// All threads together, in bytes per second.
    pub(crate) dram_read: f64,
}

impl Ceilings {
    /// The better of two moments, figure by figure.
    pub(crate) fn max(self, other: Self) -> Self {
        Ceilings {
            clock_hz: self.clock_hz.max(other.clock_hz),
            fma_flops: self.fma_flops.max(other.fma_flops),
            dram_read: self.dram_read.max(other.dram_read),
        }
    }
}

/// Twelve independent sums: enough to hide an FMA of 4 cycles on two units.
const SUMS: usize = 12;

/// `SUMS` vectors of `LANES` numbers, each `a·x + y` a round.
#[inline(always)]
fn fma_rounds<const LANES: usize>(rounds: usize, x: f32, y: f32) -> f32 {
    let mut sums = [[x; LANES]; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for lane in sum {
                *lane = lane.mul_add(x, y);
            }
        }
    }
    sums.iter().flatten().sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_avx2(rounds: usize, x: f32, y: f32) -> f32 {
    fma_rounds::<8>(rounds, x, y)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma_avx512(rounds: usize, x: f32, y: f32) -> f32 {
    fma_rounds::<16>(rounds, x, y)
}

/// Numbers in a vector of this instruction set.
const fn lanes(arch: Arch) -> usize {
    match arch {
        Arch::Avx512 | Arch::Avx512Bf16 => 16,
        Arch::Avx2 => 8,
        Arch::Neon => 4,
        _ => 1,
    }
}

fn fma(arch: Arch, rounds: usize, x: f32, y: f32) -> f32 {
    match arch {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an engine runs on an instruction set that it found on this machine.
        Arch::Avx512 | Arch::Avx512Bf16 => unsafe { fma_avx512(rounds, x, y) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Arch::Avx2 => unsafe { fma_avx2(rounds, x, y) },
        Arch::Neon => fma_rounds::<4>(rounds, x, y),
        // Plain Rust has no fused instruction to rely on.
        _ => {
            let mut sums = [x; SUMS];
            for _ in 0..rounds {
                for sum in &mut sums {
                    *sum = *sum * x + y;
                }
            }
            sums.iter().sum()
        }
    }
}

/// The seconds that `threads` threads take for `work`, from the moment that all are ready.
fn together(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let ready = Barrier::new(threads);
    let longest = |a: f64, b: f64| a.max(b);
    let run = |n: usize| {
        ready.wait();
        let start = Instant::now();
        work(n);
        start.elapsed().as_secs_f64()
    };
    let run = &run;
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|n| scope.spawn(move || run(n))).collect();
        let own = run(0);
        others.into_iter().map(|thread| thread.join().unwrap_or(own)).fold(own, longest)
    })
}

fn best(mut seconds: impl FnMut() -> f64) -> f64 {
    (0..REPEATS).map(|_| seconds()).fold(f64::INFINITY, f64::min)
}

/// Measures ceilings again and again; owns the memory that is read.
pub(crate) struct Meter {
    arch: Arch,
    threads: usize,
    memory: Vec<u64>,
}

impl Meter {
    /// A meter for this instruction set and as many threads; it reads four last-level caches.
    pub(crate) fn new(arch: Arch, threads: usize) -> Self {
        let bytes = cache_bytes().saturating_mul(4).clamp(128 << 20, 1 << 30);
        // Not zero: pages that were never written are all one page.
        Meter { arch, threads, memory: vec![1; bytes / 8] }
    }

    /// The memory that is read.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.len() * 8
    }

    /// The ceilings of this moment, in about a tenth of a second.
    pub(crate) fn read(&self) -> Ceilings {
        let steps = 200_000;
        let chain = best(|| {
            let factor = black_box(0x9E37_79B9_7F4A_7C15_u64);
            let start = Instant::now();
            let mut x = factor;
            // A multiplication (3 cycles) and an exclusive or (1), each waiting for the other.
            for _ in 0..steps {
                x = (x ^ factor).wrapping_mul(factor);
            }
            black_box(x);
            start.elapsed().as_secs_f64()
        });
        let rounds = 200_000;
        let fma = best(|| {
            together(self.threads, |_| {
                black_box(fma(self.arch, rounds, black_box(0.99), black_box(0.01)));
            })
        });
        let share = self.memory.len() / self.threads;
        let read = best(|| {
            together(self.threads, |n| {
                let own = &self.memory[n * share..][..share];
                black_box(own.iter().fold(0u64, |sum, x| sum.wrapping_add(*x)));
            })
        });
        let flops = (2 * rounds * SUMS * lanes(self.arch) * self.threads) as f64;
        Ceilings {
            clock_hz: 4.0 * f64::from(steps) / chain,
            fma_flops: flops / fma,
            dram_read: (share * 8 * self.threads) as f64 / read,
        }
    }
}

/// The last-level cache, as Linux tells it; else 32 MiB.
fn cache_bytes() -> usize {
    let size = |index: usize| {
        let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size")).ok()?;
        let text = text.trim();
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let number: usize = number.parse().ok()?;
        match unit {
            "" => Some(number),
            "K" => number.checked_mul(1 << 10),
            "M" => number.checked_mul(1 << 20),
            _ => None,
        }
    };
    (0..8).filter_map(size).max().unwrap_or(32 << 20)
}
