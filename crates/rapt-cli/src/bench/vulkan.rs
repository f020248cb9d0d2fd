//! `rapt bench --device vulkan:N`: rows on a GPU that Vulkan reaches, in its buffers, by its own clock.
//!
//! Each kernel that serves a row is a row here, the one that would run first: checked (a smaller problem of its kind, against
//! `rapt::reference`), then timed between measurements of what the device copies and multiplies at most. Deliberately absent: time on the host,
//! copies there and back, masks and codes.

use std::time::{Duration, Instant};

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use half::{bf16, f16};
use rapt::vulkan::{BufferTensor, BufferTensors, Gpu, wgpu};
use rapt::{DType, Element, Engine, Kernel, Plan, Spec};
use serde_json::{Value, json};

use super::Args;
use super::printout::time;
use super::row::{Row, median};
use crate::explain::MaskName;
use crate::{Outcome, exit, say};

/// Rounds of runs.
const ROUNDS: usize = 5;
/// For how long a device is kept busy before: one that has waited has its clock low.
const WARM: Duration = Duration::from_millis(500);
/// Bytes that are copied for a ceiling, if the device binds so many.
const COPIED_BYTES: usize = 256 << 20;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What was found of a kernel.
struct Timing {
    kernel: Kernel,
    /// Whether it is what would run.
    is_selected: bool,
    error: f64,
    limit: f64,
    flops: f64,
    bytes: f64,
    /// The median of each round; empty where the kernel is wrong.
    seconds: Vec<f64>,
}

/// What the device does at most: the best of all rounds.
#[derive(Clone, Copy, Default)]
struct Ceilings {
    fma_flops: f64,
    copied_bytes: f64,
}

/// The tensors of a row in buffers.
struct Placed {
    row: Row,
    q: wgpu::Buffer,
    k: wgpu::Buffer,
    v: wgpu::Buffer,
    out: wgpu::Buffer,
}

impl Placed {
    fn new(gpu: &Gpu, row: Row, [q, k, v]: [&[u8]; 3]) -> Result<Self> {
        let out = row.batch * row.heads * row.q_len * row.head_dim_v * row.dtype.size_bytes();
        Ok(Placed { row, q: gpu.upload(q)?, k: gpu.upload(k)?, v: gpu.upload(v)?, out: gpu.upload(&vec![0; out])? })
    }

    fn tensors(&self) -> Result<BufferTensors<'_>> {
        let Row { heads, kv_heads, q_len, kv_len, head_dim, head_dim_v, dtype, .. } = self.row;
        let of = |name, buffer, heads, len, dim| {
            BufferTensor::contiguous(name, buffer, dtype, self.row.shape_of(heads, len, dim))
        };
        Ok(BufferTensors::new(
            of("q", &self.q, heads, q_len, head_dim)?,
            of("k", &self.k, kv_heads, kv_len, head_dim)?,
            of("v", &self.v, kv_heads, kv_len, head_dim_v)?,
            of("out", &self.out, heads, q_len, head_dim_v)?,
        ))
    }

    fn spec(&self, gpu: &Gpu) -> Result<Spec> {
        let tensors = self.tensors()?;
        let views = tensors.views(gpu.device())?;
        Ok(Spec::builder(&views.q, &views.k, &views.v, &self.row.options).out(&views.out).build()?)
    }
}

fn bytes_of<T: Element>(numbers: &[T], bytes: fn(T) -> Vec<u8>) -> Vec<u8> {
    numbers.iter().flat_map(|x| bytes(*x)).collect()
}

/// To an element, back, and its bytes.
struct Casts<T> {
    narrow: fn(f64) -> T,
    widen: fn(T) -> f64,
    bytes: fn(T) -> Vec<u8>,
    element: fn(&[u8]) -> T,
}

/// The kernels that serve `spec`, what would run first; of `chosen` that alone.
fn plans(gpu: &Gpu, spec: &Spec, chosen: bool) -> Result<Vec<Plan>> {
    let selected = gpu.plan(spec)?;
    let of_selected = selected.key().kernel;
    let others = [Kernel::Matrices, Kernel::Forward, Kernel::Decode, Kernel::Generic];
    let others = others.into_iter().filter(|kernel| !chosen && *kernel != of_selected);
    let others = others.filter_map(|kernel| gpu.plan_kernel(spec, kernel).ok());
    Ok(std::iter::once(selected).chain(others).collect())
}

fn measure<T: Element>(
    gpu: &Gpu,
    row: Row,
    args: &Args,
    ceilings: &mut Ceilings,
    casts: &Casts<T>,
) -> Result<Vec<Timing>> {
    let placed = |row: Row| -> Result<Placed> {
        let bytes = row.numbers(casts.narrow)?.map(|numbers| bytes_of(&numbers, casts.bytes));
        Placed::new(gpu, row, bytes.each_ref().map(Vec::as_slice))
    };
    let smaller = row.smaller();
    let (checked, timed) = (placed(smaller)?, placed(row)?);
    let mut timings = Vec::new();
    let mut all = Vec::new();
    for plan in plans(gpu, &timed.spec(gpu)?, args.chosen)? {
        let kernel = plan.key().kernel;
        gpu.run(&gpu.plan_kernel(&checked.spec(gpu)?, kernel)?, &checked.tensors()?)?;
        let out = gpu.download(&checked.out)?;
        let got: Vec<f64> =
            out.chunks_exact(row.dtype.size_bytes()).map(|x| (casts.widen)((casts.element)(x))).collect();
        let got = &got[..smaller.heads * smaller.q_len * smaller.head_dim_v];
        let cost = plan.cost();
        timings.push(Timing {
            kernel,
            is_selected: timings.is_empty(),
            error: smaller.error_of(got, (casts.narrow, casts.widen))?,
            limit: row.limit(),
            flops: cost.flops,
            bytes: cost.bytes_read + cost.bytes_written,
            seconds: Vec::new(),
        });
        all.push(plan);
    }
    let calls = usize::from(args.calls);
    let began = Instant::now();
    while began.elapsed() < WARM {
        gpu.seconds(&all[0], &timed.tensors()?, 1, calls)?;
    }
    let copied = COPIED_BYTES.min(gpu.caps().max_binding_bytes as usize / 2);
    for round in 0..ROUNDS {
        // Before the first and the last round: each compiles what it times.
        if round == 0 || round == ROUNDS - 1 {
            ceilings.fma_flops = ceilings.fma_flops.max(2.0 * gpu.multiply_adds_per_second(2)?);
            ceilings.copied_bytes = ceilings.copied_bytes.max(gpu.copied_bytes_per_second(copied, 5)?);
        }
        for (timing, plan) in timings.iter_mut().zip(&all).filter(|(timing, _)| timing.error <= timing.limit) {
            let tensors = timed.tensors()?;
            let first = gpu.seconds(plan, &tensors, 1, calls)?[0].max(1e-7);
            let runs = (args.seconds / ROUNDS as f64 / first / calls as f64).clamp(1.0, 1000.0) as usize;
            timing.seconds.push(median(&mut gpu.seconds(plan, &tensors, runs, calls)?));
        }
    }
    Ok(timings)
}

/// What runs if no shape is given: [B, H, Sq, Skv, D], heads of k and v, dtype; of a processor smaller ones.
fn usual(is_processor: bool) -> Vec<([usize; 5], usize, DType)> {
    if is_processor {
        return vec![
            ([1, 4, 256, 256, 64], 4, DType::F32),
            ([1, 4, 256, 256, 64], 4, DType::F16),
            ([1, 8, 1, 4096, 128], 2, DType::F16),
        ];
    }
    vec![
        ([4, 16, 4096, 4096, 128], 16, DType::F16),
        ([4, 16, 4096, 4096, 64], 16, DType::F16),
        ([4, 16, 4096, 4096, 128], 16, DType::F32),
        ([1, 32, 1, 65_536, 128], 8, DType::F16),
        ([1, 32, 1, 16_384, 128], 8, DType::F32),
    ]
}

pub(super) fn run(args: &Args, adapter: u32, rows: Vec<Row>) -> Outcome {
    let engine = Engine::gpu(adapter)?;
    let Some(gpu) = engine.vulkan() else { return Err("the engine has no GPU".into()) };
    let facts = gpu.facts().cloned();
    let rows = if args.shapes.is_empty() {
        let of_row = |([batch, heads, q_len, kv_len, head_dim], kv_heads, dtype): ([usize; 5], usize, DType)| {
            let head_dim_v = head_dim;
            Row { batch, heads, kv_heads, q_len, kv_len, head_dim, head_dim_v, dtype, ..rows[0] }
        };
        let is_processor = facts.as_ref().is_some_and(|facts| facts.kind == "cpu");
        usual(is_processor).into_iter().map(of_row).collect()
    } else {
        rows
    };
    let mut ceilings = Ceilings::default();
    let mut timed: Vec<(Row, Vec<Timing>)> = Vec::new();
    for row in rows {
        if row.mask != MaskName::None || row.codes.named().iter().any(|(_, scheme)| scheme.is_some()) {
            return Err("rows on a device are without masks and codes: leave --mask and the codes out".into());
        }
        let best = &mut ceilings;
        let timings = match row.dtype {
            DType::F16 => {
                let (narrow, widen) = (f16::from_f64 as fn(f64) -> f16, f64::from as fn(f16) -> f64);
                let element = |x: &[u8]| f16::from_le_bytes([x[0], x[1]]);
                measure(gpu, row, args, best, &Casts { narrow, widen, bytes: |x| x.to_le_bytes().to_vec(), element })
            }
            DType::BF16 => {
                let (narrow, widen) = (bf16::from_f64 as fn(f64) -> bf16, f64::from as fn(bf16) -> f64);
                let element = |x: &[u8]| bf16::from_le_bytes([x[0], x[1]]);
                measure(gpu, row, args, best, &Casts { narrow, widen, bytes: |x| x.to_le_bytes().to_vec(), element })
            }
            DType::F32 => {
                let (narrow, widen) = (|x: f64| x as f32, f64::from as fn(f32) -> f64);
                let element = |x: &[u8]| f32::from_le_bytes([x[0], x[1], x[2], x[3]]);
                measure(gpu, row, args, best, &Casts { narrow, widen, bytes: |x| x.to_le_bytes().to_vec(), element })
            }
            got => {
                return Err(format!("{got} is not computed on this device: give float32, float16 or bfloat16").into());
            }
        };
        timed.push((row, timings?));
    }
    let device = facts.map_or_else(String::new, |facts| format!("{}, {}", facts.name, facts.driver));
    say(&table(&device, ceilings, &timed))?;
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{:#}\n", report(&device, ceilings, &timed)))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    let is_sound = timed.iter().flat_map(|(_, timings)| timings).all(|timing| timing.error <= timing.limit);
    Ok(if is_sound { exit::OK } else { exit::FAILED })
}

/// The median, and half of the spread beside it.
fn of_rounds(seconds: &[f64]) -> Option<(f64, f64)> {
    let mut rounds = seconds.to_vec();
    let median = median(&mut rounds);
    (!rounds.is_empty()).then(|| (median, 0.5 * (rounds[rounds.len() - 1] - rounds[0]) / median))
}

fn table(device: &str, ceilings: Ceilings, rows: &[(Row, Vec<Timing>)]) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header(["B,H,Sq,Skv,D", "dtype", "kernel", "time", "± %", "GFLOP/s", "% FMA", "GB/s", "% copy", "error"]);
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for (row, timings) in rows {
        for timing in timings {
            let name = if timing.is_selected { row.name() } else { String::new() };
            let mut cells = vec![name, row.dtype.name().to_owned(), timing.kernel.name().to_owned()];
            match of_rounds(&timing.seconds) {
                Some((seconds, spread)) => cells.extend([
                    time(seconds),
                    format!("{:.0}", 100.0 * spread),
                    format!("{:.1}", timing.flops / seconds * 1e-9),
                    format!("{:.0}", 100.0 * timing.flops / seconds / ceilings.fma_flops),
                    format!("{:.1}", timing.bytes / seconds * 1e-9),
                    format!("{:.0}", 100.0 * timing.bytes / seconds / ceilings.copied_bytes),
                    format!("{:.1e}", timing.error),
                ]),
                None => {
                    cells.push("WRONG".to_owned());
                    cells.extend(std::iter::repeat_n(String::new(), 5));
                    cells.push(format!("{:.1e} > {:.0e}", timing.error, timing.limit));
                }
            }
            table.add_row(cells);
        }
    }
    let (flops, copied) = (ceilings.fma_flops * 1e-9, ceilings.copied_bytes * 1e-9);
    format!(
        "{table}\n{device}: f32 FMA {flops:.1} GFLOP/s, copy {copied:.1} GB/s (read and written), by the device's clock"
    )
}

fn report(device: &str, ceilings: Ceilings, rows: &[(Row, Vec<Timing>)]) -> Value {
    let row = |(row, timing): (&Row, &Timing)| {
        let timed = of_rounds(&timing.seconds).map(|(seconds, _)| {
            json!({
                "seconds": seconds,
                "rounds_seconds": timing.seconds,
                "flops_per_second": timing.flops / seconds,
                "share_of_fma": timing.flops / seconds / ceilings.fma_flops,
                "bytes_per_second": timing.bytes / seconds,
                "share_of_copy": timing.bytes / seconds / ceilings.copied_bytes,
            })
        });
        json!({
            "name": row.name(),
            "shape": [row.batch, row.heads, row.q_len, row.kv_len, row.head_dim],
            "kv_heads": row.kv_heads,
            "head_dim_v": row.head_dim_v,
            "dtype": row.dtype.name(),
            "causal": row.options.causal.map(rapt::Causal::name),
            "kernel": timing.kernel.name(),
            "is_selected": timing.is_selected,
            "flops": timing.flops,
            "bytes": timing.bytes,
            "correct": timing.error <= timing.limit,
            "error": timing.error,
            "error_limit": timing.limit,
            "timing": timed,
        })
    };
    let each = rows.iter().flat_map(|(of, timings)| timings.iter().map(move |timing| (of, timing)));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "device": device,
        "fma_flops_per_second": ceilings.fma_flops,
        "copied_bytes_per_second": ceilings.copied_bytes,
        "rows": each.map(row).collect::<Vec<_>>(),
    })
}
