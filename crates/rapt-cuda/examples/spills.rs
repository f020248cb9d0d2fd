//! Compiles every form of the Hopper kernels (head dims in steps of 16 with values as wide, masks, softcap, loads element by
//! element, caches, gradients) and says what each spills; fails if any does. Some minutes; needs NVRTC. The registers in `src/variant/options.rs` were chosen by its answers.
//!
//! ```text
//! cargo run --release -p rapt-cuda --example spills           # all
//! cargo run --release -p rapt-cuda --example spills hopper_f32   # those whose name holds a word
//! ```

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::HashSet;
use std::error::Error;
use std::num::NonZero;

use common::{backward_spec, backward_spec_of_varlen, caps, spec, spec_of_cache};
use rapt_core::{Arch, Causal, DType, Options};
use rapt_cuda::{KernelVariant, backward_variants, build_all, variants};

fn forms() -> Result<Vec<KernelVariant>, Box<dyn Error>> {
    let plain = Options::default();
    let capped = plain.with_softcap(30.0).with_causal(Causal::TopLeft);
    let mut all: Vec<KernelVariant> = Vec::new();
    for padded in (16..=256).step_by(16) {
        // Rows of one column less are no multiple of 16 bytes: they come element by element.
        for head_dim in [padded, padded - 1] {
            for mask in [None, Some(DType::Bool), Some(DType::BF16), Some(DType::F32)] {
                for (options, dtype, len) in [&plain, &capped].into_iter().flat_map(|options| {
                    [(options, DType::BF16, 1024), (options, DType::BF16, 4096), (options, DType::F32, 4096)]
                }) {
                    all.extend(variants(&spec(dtype, [8, len, len, head_dim], mask, options), &caps(Arch::Sm90a))?);
                    if dtype == DType::F32 || len == 1024 {
                        let spec = backward_spec(dtype, [8, len, len, head_dim], mask, options);
                        all.extend(backward_variants(&spec, &caps(Arch::Sm90a))?);
                    }
                }
            }
            for options in [&plain, &capped] {
                let spec = backward_spec_of_varlen(DType::BF16, [8, 2, 9000, 9000], head_dim, options);
                all.extend(backward_variants(&spec, &caps(Arch::Sm90a))?);
            }
            // Caches without softcap and slopes: pages that TMA loads, pages whose rows are gathered, and none.
            let dtypes: &[DType] = if head_dim == padded { &[DType::BF16, DType::F32] } else { &[DType::BF16] };
            for (dtype, page_size) in dtypes.iter().flat_map(|dtype| [0, 1, 16].map(|page_size| (*dtype, page_size))) {
                let spec = spec_of_cache(dtype, [2, 8, 2, 512, 4096], [head_dim, page_size], None, &plain);
                all.extend(variants(&spec, &caps(Arch::Sm90a))?);
            }
        }
    }
    let mut seen = HashSet::new();
    all.retain(|variant| seen.insert(*variant));
    Ok(all)
}

fn main() -> Result<(), Box<dyn Error>> {
    let word = std::env::args().nth(1).unwrap_or_default();
    let (mut count, mut spilled) = (0, 0);
    let mut forms = forms()?;
    forms.retain(|variant| variant.to_string().contains(&word));
    // Some at a time, so that there is something to read.
    for some in forms.chunks(4 * std::thread::available_parallelism().map_or(1, NonZero::get)) {
        for built in build_all(some, None)? {
            let facts = built.facts;
            let serial = if facts.has_serial_products { ", products one by one" } else { "" };
            println!("{}: {} registers, {} bytes spilled{serial}", facts.variant, facts.registers, facts.spilled_bytes);
            count += 1;
            spilled += usize::from(facts.spilled_bytes > 0);
        }
    }
    println!("{count} kernels, of which {spilled} spill");
    if spilled > 0 { Err("a kernel spills".into()) } else { Ok(()) }
}
