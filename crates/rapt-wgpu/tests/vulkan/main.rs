//! The kernels on a GPU (in `cargo xtask vulkan` on Mesa's lavapipe): the reference, memory, strides, poison.

#[path = "../common/mod.rs"]
mod common;
mod placed;

use rapt_core::{DType, Kernel, Window};
use rapt_testkit::{Case, Config, Engine, Tally, conformance, replay};
use rapt_wgpu::{Gpu, wgpu};

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
    let tally = check(Box::new(placed::engine(gpu, None)), &config(20, false));
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

/// Each kernel, chosen by `select` or not, on what it serves: tails of every length up to 70, strides and poison in float32, and problems of every
/// dtype.
#[test]
fn every_kernel_conforms() {
    let Some(gpu) = common::gpu() else { return };
    for kernel in [Kernel::Decode, Kernel::Matrices, Kernel::Forward, Kernel::Generic] {
        if kernel == Kernel::Matrices && gpu.caps().matrices.is_none() {
            println!("no matrices: they are not tried");
            continue;
        }
        println!("{}", kernel.name());
        let mut engine = placed::engine(gpu, Some(kernel));
        let mut conforms = |config: &Config| {
            conformance(&mut [Box::new(&mut engine)], config).unwrap_or_else(|failure| panic!("{failure}"))
        };
        // Of the one dtype that matrices have.
        let dtype = if kernel == Kernel::Matrices { DType::F16 } else { DType::F32 };
        let mut tally = conforms(&Config { dtypes: vec![dtype], ..config(0, true) });
        tally.merge(&conforms(&Config { seed: 0x6e6e, ..config(5, false) }));
        println!("{tally}");
        let unserved = tally.count("unsupported");
        let serves_all = matches!(kernel, Kernel::Forward | Kernel::Generic);
        assert!(tally.count("problems") > 150 && (unserved == 0 || !serves_all), "{unserved} refused");
    }
}

/// Few queries of every option, on keys that end in the middle of a block, of a split, and of neither.
#[test]
fn few_queries_conform() {
    let Some(gpu) = common::gpu() else { return };
    let mut engine = placed::engine(gpu, Some(Kernel::Decode));
    for (seed, kv_len) in (0..).zip([1, 63, 64, 65, 255, 256, 257, 300, 511, 512, 513, 600]) {
        let case = Case::random(seed, &DTYPES, 100_000);
        let [batch, _, _, head_dim] = case.q;
        let (heads, q_len) = ([1, 2, 3, 4, 8, 16][seed as usize % 6], 1 + seed as usize % 2);
        let (heads, q_len) = if case.rank == 2 { (1, 5) } else { (heads, q_len.min(16 / heads)) };
        let window = Window { left: case.window.left.map(|n| n.saturating_mul(8)), ..case.window };
        let q = [batch, heads, q_len, head_dim];
        let case = Case { q, num_kv_heads: 1, kv_len, window, ..case };
        replay(&mut engine, &case).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn tensors_of_the_host_conform() {
    let Some(gpu) = common::gpu() else { return };
    check(Box::new(placed::host_engine(gpu)), &config(8, false));
}

/// A caller's device, opened without 16-bit stores: two elements of a word are stored by atomic operations.
#[test]
fn sixteen_bits_are_stored_on_a_device_without_such_stores() {
    if common::gpu().is_none() {
        return;
    }
    let vulkan = wgpu::Backends::VULKAN;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: vulkan,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let adapter = pollster::block_on(instance.enumerate_adapters(vulkan)).swap_remove(0);
    let descriptor = wgpu::DeviceDescriptor { required_limits: adapter.limits(), ..wgpu::DeviceDescriptor::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).expect("a device");
    let gpu = Gpu::with_device(device, queue, 0);
    assert!(!gpu.caps().has_16_bit_stores);
    let config = Config { dtypes: vec![DType::F16, DType::BF16], ..config(6, false) };
    check(Box::new(placed::engine(&gpu, None)), &config);
}

/// `cargo xtask vulkan --whole`.
#[test]
#[ignore = "takes minutes on a processor"]
fn many_problems_conform() {
    let Some(gpu) = common::gpu() else { return };
    check(Box::new(placed::engine(gpu, None)), &Config { seed: 0x60d, ..config(1500, true) });
    check(Box::new(placed::host_engine(gpu)), &Config { seed: 0x40571, ..config(400, true) });
}
