//! Compiles every form of the Hopper kernels (head dims in steps of 16, masks, softcap, loads element by element) and says what
//! each spills; fails if any does. Some minutes; needs NVRTC. What it answers is what `Code::registers` was chosen by.
//!
//! ```text
//! cargo run --release -p rapt-cuda --example spills
//! ```

#[path = "../tests/common/mod.rs"]
mod common;

use std::error::Error;
use std::num::NonZero;

use common::{caps, spec};
use rapt_core::{Arch, Causal, DType, Options};
use rapt_cuda::{Code, build_all, codes};

fn forms() -> Result<Vec<Code>, Box<dyn Error>> {
    let plain = Options::default();
    let capped = plain.with_softcap(30.0).with_causal(Causal::TopLeft);
    let mut all: Vec<Code> = Vec::new();
    for padded in (16..=256).step_by(16) {
        // Rows of one column less are no multiple of 16 bytes: they come element by element.
        for head_dim in [padded, padded - 1] {
            for mask in [None, Some(DType::Bool), Some(DType::BF16), Some(DType::F32)] {
                for options in [&plain, &capped] {
                    for dtype in [DType::BF16, DType::F32] {
                        let of_lengths =
                            |len| codes(&spec(dtype, [8, len, len, head_dim], mask, options), &caps(Arch::Sm90a));
                        all.extend(of_lengths(1024)?);
                        all.extend(of_lengths(4096)?);
                    }
                }
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|code| seen.insert(*code));
    Ok(all)
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut count, mut spilled) = (0, 0);
    let forms = forms()?;
    // Some at a time, so that there is something to read.
    for some in forms.chunks(4 * std::thread::available_parallelism().map_or(1, NonZero::get)) {
        for built in build_all(some, None)? {
            let report = built.report;
            println!("{}: {} registers, {} bytes spilled", report.code, report.registers, report.spilled_bytes);
            count += 1;
            spilled += usize::from(report.spilled_bytes > 0);
        }
    }
    println!("{count} kernels, of which {spilled} spill");
    if spilled > 0 { Err("a kernel spills".into()) } else { Ok(()) }
}
