//! The kernels on a GPU (in `cargo xtask vulkan` on Mesa's lavapipe): the reference, memory, strides, poison.

#[path = "../common/mod.rs"]
mod common;
mod placed;

use rapt_core::DType;
use rapt_testkit::{Config, Engine, Tally, conformance};

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn config(problems: usize, fixed: bool) -> Config {
    Config { problems, max_work: 300_000, dtypes: DTYPES.to_vec(), fixed, ..Config::default() }
}

fn check(engine: Box<Engine<'_>>, config: &Config) -> Tally {
    let tally = conformance(&mut [engine], config).unwrap_or_else(|failure| panic!("{failure}"));
    println!("{tally}");
    assert_eq!(tally.count("unsupported"), 0, "all that is asked is served");
    tally
}

#[test]
fn tensors_in_buffers_conform() {
    let Some(gpu) = common::gpu() else { return };
    let tally = check(Box::new(placed::engine(gpu)), &config(120, true));
    for kind in [
        "mask bool",
        "mask additive",
        "causal",
        "window",
        "softcap",
        "sinks",
        "alibi",
        "gqa",
        "empty",
        "head_dim_v",
        "poison",
    ] {
        assert!(tally.count(kind) > 0, "{kind} was asked");
    }
}

#[test]
fn tensors_of_the_host_conform() {
    let Some(gpu) = common::gpu() else { return };
    check(Box::new(placed::host_engine(gpu)), &config(60, false));
}

/// `cargo xtask vulkan --whole`.
#[test]
#[ignore = "takes minutes on a processor"]
fn many_problems_conform() {
    let Some(gpu) = common::gpu() else { return };
    check(Box::new(placed::engine(gpu)), &Config { seed: 0x60d, ..config(1500, false) });
    check(Box::new(placed::host_engine(gpu)), &Config { seed: 0x40571, ..config(400, true) });
}
