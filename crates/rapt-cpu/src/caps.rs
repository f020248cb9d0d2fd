//! What this machine has.

use std::sync::OnceLock;

use rapt_core::{Arch, Caps, Error, Result};

use crate::arch;

/// The instruction sets of this machine that this build has kernels for, best last.
#[must_use]
pub fn available() -> &'static [Arch] {
    static FOUND: OnceLock<Vec<Arch>> = OnceLock::new();
    FOUND.get_or_init(arch::detected)
}

/// This machine with `threads` threads. The instruction set is the best one, or that of `RAPT_ISA`.
///
/// # Errors
/// [`Error::Option`] if `RAPT_ISA` names an instruction set that is not there.
pub fn detect(threads: usize) -> Result<Caps> {
    let found = available();
    let best = *found.last().expect("the scalar path is always there");
    let arch = match std::env::var("RAPT_ISA") {
        Ok(name) if !name.is_empty() => found.iter().copied().find(|arch| arch.name() == name).ok_or_else(|| {
            let allowed = found.iter().map(|arch| arch.name()).collect::<Vec<_>>().join(", ");
            Error::Option { option: "RAPT_ISA", got: format!("{name:?}"), allowed }
        })?,
        _ => best,
    };
    Ok(Caps { arch, threads, clock_hz: clock_hz() })
}

/// The clock as Linux tells it.
fn clock_hz() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("cpu MHz"))?;
    Some(line.split(':').nth(1)?.trim().parse::<f64>().ok()? * 1e6)
}

/// For tests: whether tiles are multiplied by a model in plain Rust from now on, in place of the processor's unit; answers whether there is
/// such a unit. Where it is asked for before the instruction sets of this machine are, [`Arch::Amx`] is among them on every machine with
/// AVX-512 and its bf16.
#[doc(hidden)]
pub fn model_tiles(is_modelled: bool) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        arch::amx::model(is_modelled);
        arch::amx::is_usable()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = is_modelled;
        false
    }
}

/// For tests: from now on products are formed tile by tile, where there is AMX, however few queries a request has.
#[doc(hidden)]
pub fn tile_every_request() {
    arch::EVERY_REQUEST_IS_TILED.store(true, std::sync::atomic::Ordering::Relaxed);
}
