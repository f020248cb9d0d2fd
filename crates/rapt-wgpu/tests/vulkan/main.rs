//! The kernels on a GPU (in `cargo xtask vulkan` on Mesa's lavapipe): the reference, memory, strides, poison.

#[path = "../common/mod.rs"]
mod common;
mod placed;

use rapt_core::{DType, Kernel};
use rapt_testkit::{Config, Engine, Tally, conformance};
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
    let tally = check(Box::new(placed::engine(gpu, None)), &config(60, true));
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

/// Each kernel on all that is asked, chosen by `select` or not: tails of every length up to 70, strides and poison in float32, and problems of every
/// dtype.
#[test]
fn every_kernel_conforms() {
    let Some(gpu) = common::gpu() else { return };
    for kernel in [Kernel::Generic, Kernel::Forward] {
        println!("{}", kernel.name());
        let mut engine = placed::engine(gpu, Some(kernel));
        check(Box::new(&mut engine), &Config { dtypes: vec![DType::F32], ..config(0, true) });
        check(Box::new(&mut engine), &Config { seed: 0x6e6e, ..config(12, false) });
    }
}

#[test]
fn tensors_of_the_host_conform() {
    let Some(gpu) = common::gpu() else { return };
    check(Box::new(placed::host_engine(gpu)), &config(40, false));
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
    let config = Config { dtypes: vec![DType::F16, DType::BF16], ..config(16, false) };
    check(Box::new(placed::engine(&gpu, None)), &config);
}

/// `cargo xtask vulkan --whole`.
#[test]
#[ignore = "takes minutes on a processor"]
fn many_problems_conform() {
    let Some(gpu) = common::gpu() else { return };
    check(Box::new(placed::engine(gpu, None)), &Config { seed: 0x60d, ..config(1500, false) });
    check(Box::new(placed::host_engine(gpu)), &Config { seed: 0x40571, ..config(400, true) });
}
