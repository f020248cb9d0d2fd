//! What this machine can do at this moment: the clock, the rates of products in f32 and bfloat16, and that at which DRAM is read.
//!
//! The loops of `rapt::ceiling`, one thread per thread of the engine, all let go at once. Each figure is the best of a few short
//! repeats: a ceiling is what the silicon can do, not what it did under a neighbour. Deliberately absent: pinning.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use rapt::Arch;
use rapt::ceiling::{self, ProductRounds};

const REPEATS: usize = 3;

/// What was measured at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ceilings {
    /// Of one core.
    pub(crate) clock_hz: f64,
    /// All threads together.
    pub(crate) fma_flops: f64,
    /// The same of products of bfloat16 in the unit that forward uses for them; 0 where there is none.
    pub(crate) bf16_flops: f64,
    /// All threads together, in bytes per second.
    pub(crate) dram_read: f64,
}

impl Ceilings {
    /// The better of two moments, figure by figure.
    pub(crate) fn max(self, other: Self) -> Self {
        Ceilings {
            clock_hz: self.clock_hz.max(other.clock_hz),
            fma_flops: self.fma_flops.max(other.fma_flops),
            bf16_flops: self.bf16_flops.max(other.bf16_flops),
            dram_read: self.dram_read.max(other.dram_read),
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
    fma: ProductRounds,
    bf16: Option<ProductRounds>,
    threads: usize,
    memory: Vec<u64>,
}

impl Meter {
    /// A meter for this instruction set and as many threads; it reads four last-level caches.
    pub(crate) fn new(arch: Arch, threads: usize) -> Self {
        let bytes = cache_bytes().saturating_mul(4).clamp(128 << 20, 1 << 30);
        // Not zero: pages that were never written are all one page.
        let (fma, bf16) = (ProductRounds::of(arch), ProductRounds::of_bf16(arch));
        Meter { fma, bf16, threads, memory: vec![1; bytes / 8] }
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
            black_box(ceiling::chain(steps, factor));
            start.elapsed().as_secs_f64()
        });
        let rounds = 200_000;
        let flops = |products: &ProductRounds| {
            let seconds = best(|| {
                together(self.threads, |_| {
                    black_box(products.run(rounds, black_box(0.99), black_box(0.01)));
                })
            });
            (rounds * products.flops() * self.threads) as f64 / seconds
        };
        let share = self.memory.len() / self.threads;
        let read = best(|| {
            together(self.threads, |n| {
                let own = &self.memory[n * share..][..share];
                black_box(ceiling::sum(own));
            })
        });
        Ceilings {
            clock_hz: 4.0 * f64::from(steps) / chain,
            fma_flops: flops(&self.fma),
            bf16_flops: self.bf16.as_ref().map_or(0.0, flops),
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
