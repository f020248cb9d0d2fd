//! A GPU to test on, and what its buffers hold.

use std::sync::OnceLock;

use rapt_wgpu::wgpu::{self, BufferUsages};
use rapt_wgpu::{Gpu, adapters};

/// The first adapter; `None` where there is none, which is printed, and a failure if `RAPT_REQUIRE` names `vulkan`.
pub(crate) fn gpu() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let open = || {
        let found = adapters();
        if found.is_empty() {
            let required = std::env::var("RAPT_REQUIRE").unwrap_or_default();
            assert!(
                !required.split(',').any(|name| name == "vulkan"),
                "RAPT_REQUIRE asks for vulkan: there is no adapter"
            );
            println!("no Vulkan adapter: nothing is tested");
            return None;
        }
        println!("{}, {}", found[0].name, found[0].driver);
        Some(Gpu::open(0).expect("the first adapter opens"))
    };
    GPU.get_or_init(open).as_ref()
}

/// The bytes of buffers, after all that was submitted.
pub(crate) fn read(gpu: &Gpu, buffers: &[&wgpu::Buffer]) -> Vec<Vec<u8>> {
    let (device, queue) = gpu.wgpu();
    let size: u64 = buffers.iter().map(|buffer| buffer.size()).sum();
    let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
    let staging = device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false });
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let mut at = 0;
    for buffer in buffers {
        encoder.copy_buffer_to_buffer(buffer, 0, &staging, at, buffer.size());
        at += buffer.size();
    }
    queue.submit([encoder.finish()]);
    staging.slice(..).map_async(wgpu::MapMode::Read, |answer| answer.expect("a mapped buffer"));
    device.poll(wgpu::PollType::wait_indefinitely()).expect("the device ends its work");
    let all = staging.slice(..).get_mapped_range().expect("a mapped buffer").to_vec();
    let mut rest = all.as_slice();
    let mut take = |buffer: &&wgpu::Buffer| {
        let (bytes, further) = rest.split_at(buffer.size() as usize);
        rest = further;
        bytes.to_vec()
    };
    buffers.iter().map(&mut take).collect()
}
