//! What the kernels do on an adapter, by the device's clock: `measure [adapter] [runs]`. Tiles of matrices beside those that `select` has; each is held
//! against `generic` before it is timed.
//!
//! Deliberately absent: peers (`rapt bench`).

use std::error::Error;
use std::time::Instant;

use half::f16;
use rapt_core::{Causal, DType, Kernel, Options, Plan, Spec};
use rapt_shader::{Algorithm, MatrixTiles};
use rapt_wgpu::wgpu::{self, BufferUsages};
use rapt_wgpu::{BufferTensor, BufferTensors, Gpu};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// An H100 that has waited runs at a sixth of its clock, and takes about a tenth of a second to be at the whole: decode took four times as long.
const WARM: f64 = 0.3;
/// A query set has two timestamps of each.
const MOST_RUNS: usize = 2000;

struct Random(u64);

impl Random {
    /// About normal: a sum of four.
    fn next(&mut self) -> f32 {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            sum += (self.0 >> 40) as f32 / (1 << 24) as f32 - 0.5;
        }
        sum * 1.732
    }
}

/// A request and its buffers.
struct Request<'a> {
    gpu: &'a Gpu,
    dtype: DType,
    /// Batch, query heads, key heads, queries, keys, head_dim.
    sizes: [usize; 6],
    options: Options,
    buffers: [wgpu::Buffer; 4],
}

impl<'a> Request<'a> {
    fn new(gpu: &'a Gpu, dtype: DType, sizes: [usize; 6], options: Options, growing: bool) -> Self {
        let [batch, heads, kv_heads, q_len, kv_len, dim] = sizes;
        let mut random = Random(88172645463325252);
        let (device, queue) = gpu.wgpu();
        let size = dtype.size_bytes();
        let mut buffer = |n: usize, filled: bool, rises: bool| {
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
            let bytes = (n * size).next_multiple_of(16) as u64;
            let buffer = device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: bytes,
                usage,
                mapped_at_creation: false,
            });
            if filled {
                let mut bytes = Vec::with_capacity(n * size);
                for at in 0..n {
                    let rise = if rises { 1.0 + (at / dim % kv_len) as f32 / kv_len as f32 * 40.0 } else { 1.0 };
                    let x = random.next() * rise;
                    match dtype {
                        DType::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
                        _ => bytes.extend(x.to_le_bytes()),
                    }
                }
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                queue.write_buffer(&buffer, 0, &bytes);
            }
            buffer
        };
        let (of_q, of_k) = (batch * heads * q_len * dim, batch * kv_heads * kv_len * dim);
        let buffers = [
            buffer(of_q, true, false),
            buffer(of_k, true, growing),
            buffer(of_k, true, false),
            buffer(of_q, false, false),
        ];
        Request { gpu, dtype, sizes, options, buffers }
    }

    fn tensors(&self) -> BufferTensors<'_> {
        let [batch, heads, kv_heads, q_len, kv_len, dim] = self.sizes;
        let [q, k, v, out] = &self.buffers;
        let of = |buffer, shape: [usize; 4]| {
            BufferTensor::contiguous("x", buffer, self.dtype, shape.into()).expect("sizes that fit")
        };
        let (of_q, of_k) = ([batch, heads, q_len, dim], [batch, kv_heads, kv_len, dim]);
        BufferTensors::new(of(q, of_q), of(k, of_k), of(v, of_k), of(out, of_q))
    }

    fn spec(&self) -> Outcome<Spec> {
        let tensors = self.tensors();
        let views = tensors.views(self.gpu.device())?;
        Ok(Spec::builder(&views.q, &views.k, &views.v, &self.options).out(&views.out).build()?)
    }

    fn out(&self) -> Outcome<Vec<f32>> {
        let (device, queue) = self.gpu.wgpu();
        let out = &self.buffers[3];
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        let staging = device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: out.size(),
            usage,
            mapped_at_creation: false,
        });
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(out, 0, &staging, 0, out.size());
        queue.submit([encoder.finish()]);
        staging.slice(..).map_async(wgpu::MapMode::Read, |answer| answer.expect("a mapped buffer"));
        device.poll(wgpu::PollType::wait_indefinitely())?;
        let bytes = staging.slice(..).get_mapped_range()?.to_vec();
        Ok(match self.dtype {
            DType::F16 => bytes.chunks_exact(2).map(|x| f16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
            _ => bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
        })
    }

    fn run(&self, plan: &Plan) -> Outcome<Vec<f32>> {
        self.gpu.run(plan, &self.tensors())?;
        self.out()
    }

    /// The best of these runs behind `WARM` seconds of them, and floating-point operations of it in a second.
    fn time(&self, plan: &Plan, runs: usize) -> Outcome<(f64, f64)> {
        let first = self.gpu.seconds(plan, &self.tensors(), 1, 1)?[0];
        let runs = runs.max((WARM / first.max(1e-6)) as usize).min(MOST_RUNS);
        let begin = Instant::now();
        let mut seconds = loop {
            let seconds = self.gpu.seconds(plan, &self.tensors(), runs, 1)?;
            if begin.elapsed().as_secs_f64() > WARM {
                break seconds;
            }
        };
        seconds.sort_by(f64::total_cmp);
        let best = seconds[0];
        Ok((best, plan.cost().flops / best))
    }
}

fn difference(got: &[f32], expected: &[f32]) -> f64 {
    let (mut of_difference, mut whole) = (0.0, 0.0);
    for (got, expected) in got.iter().zip(expected) {
        let (got, expected) = (f64::from(*got), f64::from(*expected));
        of_difference += (got - expected).powi(2);
        whole += expected.powi(2);
    }
    (of_difference / whole).sqrt()
}

/// The tiles that are measured: of 64 rows, or of fewer and a part of the keys.
fn candidates(gpu: &Gpu, dim: usize, rows: &[usize]) -> Vec<MatrixTiles> {
    let Some(units) = gpu.caps().matrices else { return Vec::new() };
    let mut all = Vec::new();
    for &block_m in rows {
        for threads in [64, 128, 256] {
            for row_tiles in [2, 1] {
                for block_n in [64, 32] {
                    // Whether loads are wide is chosen where k and v are bound.
                    let (numbers, depth, block_dv, wide) = (DType::F16, dim, dim, false);
                    let tiles =
                        MatrixTiles { units, numbers, threads, block_m, row_tiles, wide, block_n, depth, block_dv };
                    let fits = || tiles.shared_bytes() <= gpu.caps().max_shared_bytes;
                    if tiles.is_whole() && fits() {
                        all.push(tiles);
                    }
                }
            }
        }
    }
    all
}

fn check(gpu: &Gpu) -> Outcome {
    for (name, dim, options, growing, kv_len) in [
        ("plain", 128, Options::default(), false, 197),
        ("causal", 128, Options::default().with_causal(Causal::BottomRight), false, 256),
        ("growing", 64, Options::default(), true, 300),
        ("softcap", 72, Options::default().with_softcap(3.0), false, 131),
    ] {
        let request = Request::new(gpu, DType::F16, [2, 4, 2, 131, kv_len, dim], options, growing);
        let spec = request.spec()?;
        let expected = request.run(&gpu.plan_kernel(&spec, Kernel::Generic)?)?;
        for tiles in candidates(gpu, if dim <= 64 { 64 } else { 128 }, &[64]) {
            let answer = gpu
                .plan_algorithm(&spec, Algorithm::Matrices(tiles))
                .map_err(Into::into)
                .and_then(|plan| request.run(&plan));
            match answer {
                Ok(got) => {
                    let difference = difference(&got, &expected);
                    let verdict = if difference < 1e-3 { "" } else { "  WRONG" };
                    println!("{name:8} {tiles}: {difference:.1e}{verdict}");
                }
                Err(error) => println!("{name:8} {tiles}: {error}"),
            }
        }
    }
    Ok(())
}

fn main() -> Outcome {
    let arguments: Vec<usize> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let (adapter, runs) = (arguments.first().copied().unwrap_or(0), arguments.get(1).copied().unwrap_or(10));
    let (len, batch) = (arguments.get(2).copied().unwrap_or(4096), arguments.get(3).copied().unwrap_or(4));
    for facts in rapt_wgpu::adapters() {
        println!("{facts:?}");
    }
    let gpu = Gpu::open(adapter as u32)?;
    // Of the word `few`: decode alone.
    let few_alone = std::env::args().any(|argument| argument == "few");
    if !few_alone {
        check(&gpu)?;
    }
    let fma = gpu.multiply_adds_per_second(5)?;
    println!("multiply-adds of float32: {:.2} T/s, {:.2} TFLOP/s", fma * 1e-12, fma * 2e-12);
    for bytes in [64 << 20, 256 << 20] {
        if bytes as u64 <= gpu.caps().max_binding_bytes {
            println!("copy of {} MiB: {:.0} GB/s", bytes >> 20, gpu.copied_bytes_per_second(bytes, 10)? * 1e-9);
        }
    }
    if !few_alone {
        many(&gpu, [batch, len, runs], fma)?;
    }
    few(&gpu, len, runs)
}

/// Many queries.
fn many(gpu: &Gpu, [batch, len, runs]: [usize; 3], fma: f64) -> Outcome {
    for (dim, options, name) in [
        (128, Options::default(), ""),
        (128, Options::default().with_causal(Causal::TopLeft), " causal"),
        (64, Options::default(), ""),
    ] {
        let request = Request::new(gpu, DType::F16, [batch, 16, 16, len, len, dim], options, false);
        let spec = request.spec()?;
        println!("float16 {batch},16,{len}²,{dim}{name}");
        let forward = gpu.plan_kernel(&spec, Kernel::Forward)?;
        let expected = request.run(&forward)?;
        for kernel in [Kernel::Forward, Kernel::Generic] {
            let plan = gpu.plan_kernel(&spec, kernel)?;
            let (seconds, rate) = request.time(&plan, 3)?;
            println!("  {:.3} ms  {:.1} TFLOP/s  {}", seconds * 1e3, rate * 1e-12, kernel.name());
        }
        for tiles in candidates(gpu, dim, &[64]) {
            let plan = match gpu.plan_algorithm(&spec, Algorithm::Matrices(tiles)) {
                Ok(plan) => plan,
                Err(error) => {
                    println!("  {tiles}: {error}");
                    continue;
                }
            };
            let difference = difference(&request.run(&plan)?, &expected);
            let (seconds, rate) = request.time(&plan, runs)?;
            println!("  {:.3} ms  {:.1} TFLOP/s  {tiles}  ({difference:.1e})", seconds * 1e3, rate * 1e-12);
        }
    }
    for dim in [64, 128] {
        let request = Request::new(gpu, DType::F32, [batch, 16, 16, len, len, dim], Options::default(), false);
        let spec = request.spec()?;
        for kernel in [Kernel::Forward, Kernel::Generic] {
            let plan = gpu.plan_kernel(&spec, kernel)?;
            let (seconds, rate) = request.time(&plan, 3)?;
            let share = rate / (2.0 * fma);
            println!(
                "float32 {batch},16,{len}²,{dim}: {:.3} ms  {:.1} TFLOP/s, {share:.2} of multiply-adds  {}",
                seconds * 1e3,
                rate * 1e-12,
                kernel.name()
            );
        }
    }
    Ok(())
}

/// A query for each of 32 heads.
fn few(gpu: &Gpu, len: usize, runs: usize) -> Outcome {
    for (dtype, kv_len) in [
        (DType::F16, len * 16),
        (DType::F16, len * 4),
        (DType::F16, len),
        (DType::F16, len / 16),
        (DType::F32, len * 16),
        (DType::F32, len * 4),
        (DType::F32, len / 16),
    ] {
        let request = Request::new(gpu, dtype, [1, 32, 8, 1, kv_len, 128], Options::default(), false);
        let spec = request.spec()?;
        let expected = request.run(&gpu.plan_kernel(&spec, Kernel::Generic)?)?;
        let mut algorithms: Vec<Algorithm> = [4, 8].map(|rows| Algorithm::Decode { rows }).to_vec();
        if dtype == DType::F16 {
            algorithms.extend(candidates(gpu, 128, &[16, 32]).into_iter().map(Algorithm::Matrices));
        }
        for algorithm in algorithms {
            let plan = gpu.plan_algorithm(&spec, algorithm)?;
            let difference = difference(&request.run(&plan)?, &expected);
            let (seconds, _) = request.time(&plan, runs)?;
            let rate = plan.cost().bytes_read / seconds;
            println!(
                "{dtype} 1,32/8,1×{kv_len},128: {:.3} ms  {:.0} GB/s  {algorithm:?} ({difference:.1e})",
                seconds * 1e3,
                rate * 1e-9
            );
        }
    }
    Ok(())
}
