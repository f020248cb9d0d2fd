//! How long the device takes, by its own clock, and what it can do at most: a copy and multiply-adds through wgpu.
//!
//! ```text
//! submission r:  timestamp 2r │ launches, one behind another │ timestamp 2r + 1            wgpu::Features::TIMESTAMP_QUERY
//! ```
//! Deliberately absent: time on the host, and attention.

use rapt_core::{Operands, Plan, Result as CoreResult};
use rapt_shader::ShaderLaunch;

use crate::buffers::BufferTensors;
use crate::device::Open;
use crate::error::{GpuError, Result};
use crate::gpu::Gpu;
use crate::launch::{Timer, submit};
use crate::staging::download;

/// Multiply-adds of 8 chains of four numbers, 8 in a turn.
const FMA: &str = "
@group(0) @binding(0) var<storage, read_write> sums: array<vec4<f32>>;
@compute @workgroup_size(256)
fn run(@builtin(global_invocation_id) id: vec3<u32>) {
    let x = vec4<f32>(0.999 - f32(id.x & 7u) * 1e-4);
    let y = vec4<f32>(1e-3);
    CHAINS
    for (var turn = 0u; turn < TURNSu; turn++) {
        STEPS
    }
    sums[id.x] = SUM;
}
";
/// One vector of four words a thread.
const COPY: &str = "
@group(0) @binding(0) var<storage, read_write> to: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> source: array<vec4<u32>>;
@compute @workgroup_size(256)
fn run(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let at = (group.y * groups.x + group.x) * 256u + thread;
    if at < arrayLength(&source) { to[at] = source[at]; }
}
";

const CHAINS: usize = 8;
const STEPS: usize = 8;
const TURNS: usize = 512;
/// Workgroups of a first run, of which follows how many take some hundredths of a second.
const FEW_GROUPS: usize = 64;
const MOST_GROUPS: usize = 1 << 13;

fn fma_text() -> String {
    let each = |line: &dyn Fn(usize) -> String| (0..CHAINS).map(line).collect::<String>();
    let steps: String = (0..STEPS).map(|_| each(&|n| format!("a{n} = fma(a{n}, x, y); "))).collect();
    FMA.replace("CHAINS", &each(&|n| format!("var a{n} = vec4<f32>(f32(id.x) * 1e-9 + {n}.0); ")))
        .replace("TURNS", &TURNS.to_string())
        .replace("STEPS", &steps)
        .replace("SUM", &(0..CHAINS).map(|n| format!("a{n}")).collect::<Vec<_>>().join(" + "))
}

/// Timestamps of some submissions, two each.
struct Clock {
    set: wgpu::QuerySet,
    runs: usize,
}

impl Clock {
    fn new(open: &Open, runs: usize) -> Result<Self> {
        if !open.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            let why = "the device was opened without timestamps".to_owned();
            return Err(GpuError::Failed { call: "create_query_set", why });
        }
        let descriptor =
            wgpu::QuerySetDescriptor { label: Some("rapt"), ty: wgpu::QueryType::Timestamp, count: runs as u32 * 2 };
        let set = open.guarded("create_query_set", runs * 16, || open.device.create_query_set(&descriptor))?;
        Ok(Clock { set, runs })
    }

    fn timer(&self, run: usize, launches: usize) -> Timer<'_> {
        Timer { set: &self.set, first: run as u32 * 2, launches }
    }

    /// Seconds of each run, when all of them have ended.
    fn seconds(&self, open: &Open) -> Result<Vec<f64>> {
        let bytes = self.runs * 16;
        let resolved = open.buffer(bytes, wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC)?;
        open.guarded("resolve_query_set", bytes, || {
            let mut encoder = open.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            encoder.resolve_query_set(&self.set, 0..self.runs as u32 * 2, &resolved, 0);
            open.queue.submit([encoder.finish()]);
        })?;
        let ticks: Vec<u64> = download(open, &[(&resolved, bytes)], |bytes| {
            let tick = |x: &[u8]| x.iter().rev().fold(0, |ticks, byte| ticks << 8 | u64::from(*byte));
            bytes[0].chunks_exact(8).map(tick).collect()
        })?;
        let period = f64::from(open.queue.get_timestamp_period()) * 1e-9;
        Ok(ticks.chunks_exact(2).map(|x| x[1].wrapping_sub(x[0]) as f64 * period).collect())
    }
}

/// Runs a text on buffers, so often, and says how long each took.
fn seconds_of(open: &Open, text: &str, buffers: &[&wgpu::Buffer], groups: (u32, u32), runs: usize) -> Result<Vec<f64>> {
    let clock = Clock::new(open, runs)?;
    open.guarded("dispatch", 0, || {
        // As kernels are: what checks cost would be counted as the device's.
        let module = open.module(text.to_owned());
        let pipeline = open.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("rapt"),
            layout: None,
            module: &module,
            entry_point: Some("run"),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        });
        let entries: Vec<_> = (0..)
            .zip(buffers)
            .map(|(binding, buffer)| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let layout = pipeline.get_bind_group_layout(0);
        let group = open.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("rapt"),
            layout: &layout,
            entries: &entries,
        });
        for run in 0..runs {
            let mut encoder = open.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            {
                let timer = clock.timer(run, 1);
                let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                    label: Some("rapt"),
                    timestamp_writes: Some(timer.writes()),
                });
                pass.set_pipeline(&pipeline);
                pass.set_bind_group(0, &group, &[]);
                pass.dispatch_workgroups(groups.0, groups.1, 1);
            }
            open.queue.submit([encoder.finish()]);
        }
    })?;
    clock.seconds(open)
}

fn least(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::INFINITY, f64::min)
}

impl Gpu {
    /// Submits `plan` in `runs` submissions of so many launches (at least one), one behind another, and says how long a launch of each run took by the device's clock, when
    /// all have ended.
    ///
    /// # Errors
    /// As [`Gpu::run`]; [`Error::DeviceFailed`](rapt_core::Error::DeviceFailed) where the device has no timestamps.
    pub fn seconds(
        &self,
        plan: &Plan,
        tensors: &BufferTensors<'_>,
        runs: usize,
        launches: usize,
    ) -> CoreResult<Vec<f64>> {
        let launch = plan.launch_plan::<ShaderLaunch>()?;
        let operands = Operands::check(tensors.views(self.device())?, plan.spec())?;
        let open = self.opened()?;
        let on = |error: GpuError| error.on(self.device());
        let (clock, launches) = (Clock::new(&open, runs).map_err(on)?, launches.max(1));
        for run in 0..runs {
            submit(&open, launch, &operands, plan.spec(), tensors, Some(&clock.timer(run, launches)))?;
        }
        let seconds = clock.seconds(&open).map_err(on)?;
        Ok(seconds.into_iter().map(|of_run| of_run / launches as f64).collect())
    }

    /// Multiply-adds of float32 that the device does in a second: the best of `runs`.
    ///
    /// # Errors
    /// Those of [`Gpu::seconds`].
    pub fn multiply_adds_per_second(&self, runs: usize) -> CoreResult<f64> {
        let open = self.opened()?;
        let rate = || {
            let sums = open.buffer(MOST_GROUPS * 256 * 16, wgpu::BufferUsages::STORAGE)?;
            let best = |groups: usize, runs| {
                Ok::<_, GpuError>(least(&seconds_of(&open, &fma_text(), &[&sums], (groups as u32, 1), runs)?))
            };
            let groups = (FEW_GROUPS as f64 * 0.03 / best(FEW_GROUPS, 1)?) as usize;
            let groups = groups.clamp(FEW_GROUPS, MOST_GROUPS);
            Ok::<_, GpuError>((groups * 256 * 4 * CHAINS * STEPS * TURNS) as f64 / best(groups, runs)?)
        };
        rate().map_err(|error| error.on(self.device()))
    }

    /// Bytes that the device reads and writes in a second, together, when it copies `bytes` from one buffer to another: the best of `runs`.
    ///
    /// # Errors
    /// Those of [`Gpu::seconds`], and [`Error::OutOfMemory`](rapt_core::Error::OutOfMemory).
    pub fn copied_bytes_per_second(&self, bytes: usize, runs: usize) -> CoreResult<f64> {
        let open = self.opened()?;
        let rate = || {
            let [to, source] = [(); 2].map(|()| open.buffer(bytes, wgpu::BufferUsages::STORAGE));
            let groups = bytes.div_ceil(16 * 256).max(1);
            let most = open.device.limits().max_compute_workgroups_per_dimension as usize;
            let groups = (groups.min(most) as u32, groups.div_ceil(most) as u32);
            let seconds = seconds_of(&open, COPY, &[&to?, &source?], groups, runs)?;
            Ok::<_, GpuError>(2.0 * bytes as f64 / least(&seconds))
        };
        rate().map_err(|error| error.on(self.device()))
    }
}
