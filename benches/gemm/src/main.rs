//! Products with packed weights beside the crates `gemm` and `matrixmultiply`, on one thread.
//!
//! ```text
//! for each row (sizes and dtype): every engine's numbers are checked against sums in f64, or the run ends
//!     rounds × (ceilings and engines in turn, a batch of calls each); the median of the rounds counts
//! ```
//! Rapt's weights are packed before; a peer packs what it packs in each call. Sizes whose weights lie beyond the last cache rotate
//! through copies of them. Many rows are held against the rate of FMAs (`rapt_cpu::ceiling`), one row against that of reading.
//! Usage: `rapt-bench-gemm [--rounds N] [--seconds S] [--only TEXT] [--record FILE]`.

mod engines;
mod measure;

use std::fmt::Write;
use std::process::ExitCode;

use engines::{Engine, Numbers};
use measure::{Ceilings, median, seconds_per_call};
use rapt_core::DType;

/// m, k, n; whether weights rotate.
struct Shape {
    sizes: [usize; 3],
    cold: bool,
}

const SHAPES: [Shape; 6] = [
    Shape { sizes: [128, 384, 384], cold: false },
    Shape { sizes: [128, 384, 1536], cold: false },
    Shape { sizes: [128, 1536, 384], cold: false },
    Shape { sizes: [2048, 384, 1536], cold: false },
    Shape { sizes: [1, 2048, 5632], cold: true },
    Shape { sizes: [1, 288, 768], cold: false },
];
const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];
/// Bytes that no cache of the machine holds.
const BEYOND_CACHES: usize = 256 << 20;

struct Options {
    rounds: usize,
    seconds: f64,
    only: String,
    record: Option<String>,
}

fn options() -> Result<Options, String> {
    let mut options = Options { rounds: 7, seconds: 0.05, only: String::new(), record: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--rounds" => options.rounds = value()?.parse().map_err(|_| "--rounds is a number".to_owned())?,
            "--seconds" => options.seconds = value()?.parse().map_err(|_| "--seconds is a number".to_owned())?,
            "--only" => options.only = value()?,
            "--record" => options.record = Some(value()?),
            _ => return Err(format!("{word} is no option: --rounds, --seconds, --only, --record")),
        }
    }
    if options.rounds == 0 {
        return Err("--rounds is 1 at least".to_owned());
    }
    Ok(options)
}

fn main() -> ExitCode {
    let ran = options().and_then(|options| run(&options));
    let Err(error) = ran else { return ExitCode::SUCCESS };
    eprintln!("{error}");
    ExitCode::FAILURE
}

fn run(options: &Options) -> Result<(), String> {
    let mut text = head();
    print!("{text}");
    for shape in SHAPES {
        for dtype in DTYPES {
            let [m, k, n] = shape.sizes;
            let name = format!("{m}×{k}×{n} {dtype}");
            if name.contains(&options.only) {
                let line = row(&name, &shape, dtype, options)?;
                print!("{line}");
                text.push_str(&line);
            }
        }
    }
    if "packing".contains(&options.only) {
        let lines = packing(options)?;
        print!("{lines}");
        text.push_str(&lines);
    }
    if let Some(file) = &options.record {
        std::fs::write(file, &text).map_err(|error| format!("{file}: {error}"))?;
    }
    Ok(())
}

/// How fast weights are packed: where the steps of a column follow one another (linear), and where the columns of a step do.
fn packing(options: &Options) -> Result<String, String> {
    const SIZES: [usize; 2] = [2048, 5632];
    let mut text = "\n| packing 2048×5632 | linear GB/s | row by row GB/s |\n| --- | ---: | ---: |\n".to_owned();
    let best = *rapt_cpu::available().last().ok_or("no instruction set")?;
    for dtype in DTYPES {
        let mut rates = Vec::new();
        for linear in [true, false] {
            let (bytes, mut pack) = engines::packing(best, dtype, SIZES, linear)?;
            let rounds = (0..options.rounds).map(|_| bytes / seconds_per_call(options.seconds, &mut pack));
            rates.push(median(&rounds.collect::<Vec<_>>()) / 1e9);
        }
        let _ = writeln!(text, "| {dtype} {} | {:.1} | {:.1} |", best.name(), rates[0], rates[1]);
    }
    Ok(text)
}

fn head() -> String {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut text = format!("# Products on {}\n\n", measure::machine());
    let _ = writeln!(text, "- {}, one thread, `cargo xtask bench gemm {}`", measure::date(), words.join(" "));
    let _ = writeln!(text, "- instruction sets: {}", engines::arch_names());
    text.push_str("- m×k×n; GFLOP/s, medians, with half the spread of the rounds; for one row GB/s of weights\n");
    text.push_str("- ceiling: f32 FMAs of the widest vectors (f64: half of it); for one row the rate of reading\n\n");
    text.push_str("| row | ceiling | engine | rate | spread | % ceiling | error |\n");
    text.push_str("| --- | ---: | --- | ---: | ---: | ---: | ---: |\n");
    text
}

/// The lines of one row: an engine each.
fn row(name: &str, shape: &Shape, dtype: DType, options: &Options) -> Result<String, String> {
    let [m, k, n] = shape.sizes;
    let weight_bytes = k * n * dtype.size_bytes();
    let copies = if shape.cold { BEYOND_CACHES.div_ceil(weight_bytes) } else { 1 };
    let numbers = Numbers::new(dtype, [m, n, k]);
    let mut engines: Vec<Box<dyn Engine>> = engines::all(&numbers, copies)?;
    let mut errors = Vec::new();
    for engine in &mut engines {
        engine.call();
        let error = numbers.error_of(engine.output());
        if error > numbers.allowed() {
            return Err(format!("{name}: {} is {error:.1e} away from the sums in f64", engine.name()));
        }
        errors.push(error);
    }
    let ceilings = Ceilings::new(if m == 1 && shape.cold { BEYOND_CACHES } else { weight_bytes.max(1 << 20) });
    let mut rates = vec![Vec::new(); engines.len()];
    let mut tops = Vec::new();
    let work = if m == 1 { weight_bytes as f64 } else { 2.0 * (m * n * k) as f64 };
    for _ in 0..options.rounds {
        let fma = ceilings.fma_rate() / if dtype == DType::F64 { 2.0 } else { 1.0 };
        tops.push(if m == 1 { ceilings.read_rate() } else { fma });
        for (engine, rates) in engines.iter_mut().zip(&mut rates) {
            rates.push(work / seconds_per_call(options.seconds, &mut || engine.call()));
        }
    }
    let top = median(&tops);
    let mut text = String::new();
    for ((engine, rates), error) in engines.iter().zip(&rates).zip(errors) {
        let rate = median(rates);
        let (low, high) = rates.iter().fold((f64::MAX, 0f64), |(low, high), &rate| (low.min(rate), high.max(rate)));
        let _ = writeln!(
            text,
            "| {name} | {:.1} | {} | {:.1} | {:.0}% | {:.0}% | {error:.1e} |",
            top / 1e9,
            engine.name(),
            rate / 1e9,
            50.0 * (high - low) / rate,
            100.0 * rate / top
        );
    }
    Ok(text)
}
