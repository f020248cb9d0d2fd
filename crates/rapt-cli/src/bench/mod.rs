//! `rapt bench`: how fast attention runs here, on shapes of the user's own, held against what this machine can do.
//!
//! A row is checked first (a smaller problem of its kind, against `rapt::reference`) and then timed: rounds of ceilings
//! and calls, interleaved, so that both see the same clock. `row` makes and runs a problem, `ceilings` measures the
//! machine, `printout` writes the table, the JSON and the plot; `vulkan` does all of that for a GPU. Deliberately absent: other engines, which
//! `cargo xtask bench cpu` measures in the same run.

mod ceilings;
mod printout;
mod row;
#[cfg(feature = "vulkan")]
mod vulkan;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand};
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use rapt::quant::{QuantError, Scheme};
use rapt::{Causal, DType, Engine, Format, Options, Qkv};

use crate::codes::{CodesArgs, hinted};
use crate::explain::{MaskName, dtype, shape};
use crate::options::{LayoutName, ProblemArgs};
use crate::python::{CudaArgs, PythonCommand};
use crate::{Host, Outcome, exit, say};
use ceilings::Meter;
use printout::Printout;
use row::Row;

pub(crate) use row::median;

#[derive(ClapArgs, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    device: Option<Device>,
    /// batch, query heads, q_len, kv_len, head_dim; may be given several times [default: eight usual ones].
    #[arg(long = "shape", value_name = "B,H,Sq,Skv,D", value_parser = shape)]
    shapes: Vec<[usize; 5]>,
    /// Heads of k and v [default: as many as of q].
    #[arg(long, value_name = "N", requires = "shapes")]
    kv_heads: Option<usize>,
    /// The size of a value [default: head_dim].
    #[arg(long, value_name = "N", requires = "shapes")]
    head_dim_v: Option<usize>,
    /// The dtype of out, and of those of q, k and v that are no codes; may be given several times, or several with commas.
    #[arg(long = "dtype", value_delimiter = ',', default_value = "float32", value_parser = dtype)]
    dtypes: Vec<DType>,
    /// A mask of shape [batch, 1, q_len, kv_len]; bool: 7 of 8 keys are attended.
    #[arg(long, value_enum, default_value = "none")]
    mask: MaskName,
    #[command(flatten)]
    problem: ProblemArgs,
    /// Seconds of calls per row.
    #[arg(long, value_name = "S", default_value = "1", allow_negative_numbers = true, value_parser = seconds)]
    seconds: f64,
    /// What is measured: cpu, or vulkan:N (vulkan is vulkan:0), an adapter of `rapt doctor`: every kernel that serves a row, by the adapter's clock.
    #[arg(long = "device", value_name = "NAME", default_value = "cpu", value_parser = crate::run::device)]
    on: rapt::Device,
    /// Calls that a device has at once, one behind another, and of which the time of one is printed: 1 counts the start and the end of a submission too.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..))]
    calls: u16,
    /// Of a device: the kernel that would run, and no other.
    #[arg(long)]
    chosen: bool,
    /// Where every figure goes.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the plot goes.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    // Last: what follows would stand under its heading.
    #[command(flatten)]
    codes: CodesArgs,
}

/// A device that is measured by rows of its own.
#[derive(Subcommand, Debug)]
enum Device {
    /// Rapt and its peers on an NVIDIA GPU, interleaved in one run (needs Python with torch).
    Cuda(CudaArgs),
}

/// What runs if no shape is given: B, H, Sq, Skv, D, heads of k and v, and whether it is causal.
const USUAL: [([usize; 5], usize, bool); 8] = [
    ([1, 1, 16, 16, 64], 1, false),
    ([1, 12, 77, 77, 64], 12, false),
    ([8, 16, 128, 128, 64], 16, false),
    ([2, 8, 512, 512, 64], 8, false),
    ([1, 24, 1024, 1024, 128], 24, false),
    ([1, 24, 1024, 1024, 128], 24, true),
    ([1, 32, 1, 4096, 128], 32, false),
    ([1, 32, 1, 8192, 128], 8, false),
];

pub(crate) fn run(args: &Args, words: &[OsString], host: &dyn Host) -> Outcome {
    if let Some(Device::Cuda(args)) = &args.device {
        return host.python(&PythonCommand::new("bench cuda", args, words)?);
    }
    let rows = rows(args, args.codes.schemes()?);
    match args.on {
        rapt::Device::Cpu if args.calls > 1 || args.chosen => {
            return Err("--calls and --chosen are of a device: give --device vulkan:N, or leave them out".into());
        }
        rapt::Device::Cpu => {}
        #[cfg(feature = "vulkan")]
        rapt::Device::Vulkan(adapter) => return vulkan::run(args, adapter, rows),
        // It has no backend, and says so.
        device => drop(Engine::on(device, args.problem.threads)?),
    }
    let engine = Engine::new(args.problem.threads)?;
    let meter = Meter::new(engine.caps().arch, engine.threads().get());
    let mut printout = Printout::new(&engine);

    let bar = ProgressBar::new(rows.len() as u64);
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}")?);
    for row in rows {
        bar.set_message(row.name());
        let (engine, meter, seconds) = (&engine, &meter, args.seconds);
        let timing = match row.dtype {
            DType::F64 => row.measure::<f64>(engine, meter, seconds, (|x| x, |x| x)),
            DType::F32 => row.measure::<f32>(engine, meter, seconds, (|x| x as f32, f64::from)),
            DType::F16 => row.measure::<f16>(engine, meter, seconds, (f16::from_f64, f64::from)),
            DType::BF16 => row.measure::<bf16>(engine, meter, seconds, (bf16::from_f64, f64::from)),
            got => Err(unsupported(got).into()),
        };
        let timing = timing.map_err(|error| match error {
            QuantError::Core(error) => hinted(error, true),
            error => error.into(),
        })?;
        printout.push(row, timing);
        bar.inc(1);
    }
    bar.finish_and_clear();

    say(&printout.table())?;
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{:#}\n", printout.json()))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, printout.svg()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(if printout.is_sound() { exit::OK } else { exit::FAILED })
}

/// What attention says of a dtype that it does not compute.
fn unsupported(got: DType) -> rapt::Error {
    match Format::of_dtype(got) {
        Some(_) => rapt::Error::MissingPart { tensor: "q", codes: got.name(), part: "q_descale" },
        None => rapt::Error::UnsupportedDtype { tensor: "q", got, allowed: rapt::COMPUTED.to_vec() },
    }
}

/// Every shape in every dtype.
fn rows(args: &Args, codes: Qkv<Option<Scheme>>) -> Vec<Row> {
    let options = args.problem.options();
    let is_bshd = args.problem.layout == LayoutName::Bshd;
    let problems: Vec<([usize; 5], usize, Options)> = if args.shapes.is_empty() {
        let causal = |yes| if yes { Some(options.causal.unwrap_or(Causal::TopLeft)) } else { options.causal };
        USUAL.map(|(shape, kv_heads, yes)| (shape, kv_heads, Options { causal: causal(yes), ..options })).to_vec()
    } else {
        args.shapes.iter().map(|shape| (*shape, args.kv_heads.unwrap_or(shape[1]), options)).collect()
    };
    let of = |dtype: DType| {
        problems.iter().map(move |&([batch, heads, q_len, kv_len, head_dim], kv_heads, options)| Row {
            batch,
            heads,
            kv_heads,
            q_len,
            kv_len,
            head_dim,
            head_dim_v: args.head_dim_v.unwrap_or(head_dim),
            dtype,
            mask: args.mask,
            codes,
            options: Options { out_dtype: codes.q.map(|_| dtype), ..options },
            is_bshd,
        })
    };
    args.dtypes.iter().flat_map(|&dtype| of(dtype)).collect()
}

pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let wrong = || format!("{text:?} is no number of seconds from 0.01 to 3600");
    text.parse().ok().filter(|seconds| (0.01..=3600.0).contains(seconds)).ok_or_else(wrong)
}
