//! Clocks, ceilings, and what machine this is.

use std::time::{Instant, SystemTime};

use rapt_cpu::ceiling::{ProductRounds, sum};

/// The mean time of a call over at least `seconds`, and at least three calls.
pub(crate) fn seconds_per_call(seconds: f64, call: &mut dyn FnMut()) -> f64 {
    let (start, mut calls) = (Instant::now(), 0u32);
    loop {
        call();
        calls += 1;
        let passed = start.elapsed().as_secs_f64();
        if passed >= seconds && calls >= 3 {
            return passed / f64::from(calls);
        }
    }
}

pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// What the core does at most: FMAs of the widest vectors, and reading of memory of this size.
pub(crate) struct Ceilings {
    fma: ProductRounds,
    memory: Vec<u64>,
}

impl Ceilings {
    pub(crate) fn new(bytes: usize) -> Ceilings {
        let widest = rapt_cpu::available().iter().map(|&arch| ProductRounds::of(arch)).max_by_key(ProductRounds::flops);
        Ceilings { fma: widest.expect("one at least"), memory: vec![1; bytes / 8] }
    }

    /// FLOP/s in f32.
    pub(crate) fn fma_rate(&self) -> f64 {
        const ROUNDS: usize = 1_000_000;
        let once = || _ = std::hint::black_box(self.fma.run(ROUNDS, std::hint::black_box(0.5), 0.25));
        (ROUNDS * self.fma.flops()) as f64 / seconds_per_call(0.01, &mut || once())
    }

    /// Bytes per second.
    pub(crate) fn read_rate(&self) -> f64 {
        let once = || _ = std::hint::black_box(sum(std::hint::black_box(&self.memory)));
        (self.memory.len() * 8) as f64 / seconds_per_call(0.02, &mut || once())
    }
}

fn cpu_field(name: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Its name, family and model.
pub(crate) fn machine() -> String {
    let field = |name| cpu_field(name).unwrap_or_else(|| "?".to_owned());
    format!("{} (family {} model {})", field("model name"), field("cpu family"), field("model"))
}

/// The day in UTC.
pub(crate) fn date() -> String {
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |passed| passed.as_secs());
    // Days to a date of the Gregorian calendar whose year begins in March.
    let days = seconds / 86_400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}
