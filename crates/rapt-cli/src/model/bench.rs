//! `rapt model bench`: how fast an archive runs here, at sizes of the user's own.
//!
//! Inputs are made where none are given: floats of −1 to 1, integers of 1, which index everything that has two elements, and
//! true. One call is made before those that are timed, and is told apart: it makes the plan and packs the weights.
//! Deliberately absent: other engines.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args as ClapArgs;
use half::{bf16, f16};
use rapt::model::{Bound, Input, Model, OutputForm, Port, Session};
use rapt::pt2::{Archive, Argument, InputSpec, Program, SymInt, Symbols};
use rapt::{DType, Shape, Tensor, ViewMut};

use super::{Wrong, in_a_word, work};
use crate::bench::median;
use crate::npy::Array;
use crate::{Outcome, bench, exit, say, table};

/// Calls that are timed, at least.
const LEAST_CALLS: usize = 5;

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    /// An archive of an exported program.
    model: PathBuf,
    /// The inputs in the program's order, as `rapt model run` takes them [default: made].
    #[arg(allow_negative_numbers = true)]
    inputs: Vec<String>,
    /// The value of a symbol in the sizes; may be given several times, or several with commas [default: as exported].
    #[arg(long = "size", value_name = "SYMBOL=N", value_delimiter = ',', value_parser = size)]
    sizes: Vec<(String, i64)>,
    /// Seconds of calls.
    #[arg(long, value_name = "S", default_value = "1", allow_negative_numbers = true, value_parser = bench::seconds)]
    seconds: f64,
    /// Where every figure goes.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Threads [default: RAPT_NUM_THREADS, else what the system offers].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

fn size(text: &str) -> Result<(String, i64), String> {
    let wrong = || format!("{text:?} is no SYMBOL=N, such as s0=128");
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    Ok((name.trim().to_owned(), value.trim().parse().map_err(|_| wrong())?))
}

/// An input with memory of its own.
pub(super) enum Made {
    Array(Array),
    F64(Vec<f64>, Shape),
    F32(Vec<f32>, Shape),
    F16(Vec<f16>, Shape),
    BF16(Vec<bf16>, Shape),
    I64(Vec<i64>, Shape),
    I32(Vec<i32>, Shape),
    I16(Vec<i16>, Shape),
    I8(Vec<i8>, Shape),
    U8(Vec<u8>, Shape),
    Bool(Vec<bool>, Shape),
    Int(i64),
    Float(f64),
    Truth(bool),
    None,
}

impl Made {
    fn tensor(dtype: DType, shape: Shape) -> Result<Made, Wrong> {
        let count = shape.numel().filter(|count| *count <= isize::MAX as usize / 8);
        let count = count.ok_or_else(|| Wrong(format!("an input of shape {shape} is larger than memory can be")))?;
        let float = |n: usize| ((n * 37 % 201) as f64 - 100.0) / 100.0;
        Ok(match dtype {
            DType::F64 => Made::F64((0..count).map(float).collect(), shape),
            DType::F32 => Made::F32((0..count).map(|n| float(n) as f32).collect(), shape),
            DType::F16 => Made::F16((0..count).map(|n| f16::from_f64(float(n))).collect(), shape),
            DType::BF16 => Made::BF16((0..count).map(|n| bf16::from_f64(float(n))).collect(), shape),
            DType::I64 => Made::I64(vec![1; count], shape),
            DType::I32 => Made::I32(vec![1; count], shape),
            DType::I16 => Made::I16(vec![1; count], shape),
            DType::I8 => Made::I8(vec![1; count], shape),
            DType::U8 => Made::U8(vec![1; count], shape),
            _ => Made::Bool(vec![true; count], shape),
        })
    }

    fn input(&mut self) -> rapt::Result<Input<'_>> {
        fn view<T: rapt::Element>(elements: &mut [T], shape: Shape) -> rapt::Result<Input<'_>> {
            ViewMut::contiguous("input", elements, shape).map(Input::Write)
        }
        match self {
            Made::Array(array) => array.view_mut("input").map(Input::Write),
            Made::F64(elements, shape) => view(elements, *shape),
            Made::F32(elements, shape) => view(elements, *shape),
            Made::F16(elements, shape) => view(elements, *shape),
            Made::BF16(elements, shape) => view(elements, *shape),
            Made::I64(elements, shape) => view(elements, *shape),
            Made::I32(elements, shape) => view(elements, *shape),
            Made::I16(elements, shape) => view(elements, *shape),
            Made::I8(elements, shape) => view(elements, *shape),
            Made::U8(elements, shape) => view(elements, *shape),
            Made::Bool(elements, shape) => view(elements, *shape),
            Made::Int(n) => Ok(Input::Int(*n)),
            Made::Float(x) => Ok(Input::Float(*x)),
            Made::Truth(b) => Ok(Input::Bool(*b)),
            Made::None => Ok(Input::None),
        }
    }
}

/// The value of every symbol: as asked for, else as it was exported.
fn symbols(program: &Program, asked: &[(String, i64)]) -> Result<Symbols, Wrong> {
    let mut symbols: Symbols =
        program.symbols.iter().map(|symbol| (symbol.name.clone(), symbol.hint.unwrap_or(symbol.min.max(1)))).collect();
    for (name, value) in asked {
        let known = symbols.keys().cloned().collect::<Vec<_>>().join(", ");
        match symbols.get_mut(name) {
            Some(symbol) => *symbol = *value,
            None => return Err(Wrong(format!("the program has no symbol {name}: it has {known}"))),
        }
    }
    Ok(symbols)
}

/// Inputs for these symbols.
fn made(program: &Program, symbols: &Symbols) -> Result<Vec<Made>, Box<dyn std::error::Error>> {
    let mut inputs = Vec::new();
    for input in &program.signature.inputs {
        let value = match input {
            InputSpec::User(value) | InputSpec::Fixed { value, .. } => value,
            InputSpec::Parameter { .. } | InputSpec::Buffer { .. } | InputSpec::Constant { .. } => continue,
        };
        inputs.push(match value {
            Argument::Tensor(name) => {
                let missing = || Wrong(format!("the program says no form of its input {name}"));
                let meta = program.graph.tensors.get(name).ok_or_else(missing)?;
                let mut sizes = Vec::with_capacity(meta.sizes.len());
                for size in &meta.sizes {
                    let value = size.eval(symbols)?;
                    let wrong = |_| Wrong(format!("{name} has a size {size}, which is {value} here"));
                    sizes.push(usize::try_from(value).map_err(wrong)?);
                }
                let most =
                    || Wrong(format!("{name} has {} dimensions; at most {} are served", sizes.len(), rapt::MAX_RANK));
                Made::tensor(meta.dtype, Shape::new(&sizes).ok_or_else(most)?)?
            }
            Argument::Int(n) | Argument::SymInt(SymInt::Int(n)) => Made::Int(*n),
            Argument::SymInt(SymInt::Name(name)) => match program.graph.sym_ints.get(name) {
                Some(value) => Made::Int(value.eval(symbols)?),
                None => Made::Int(1),
            },
            Argument::Float(x) => Made::Float(*x),
            Argument::Bool(b) => Made::Truth(*b),
            _ => Made::None,
        });
    }
    Ok(inputs)
}

/// The inputs that the words give.
fn given(model: &Model, words: &[String]) -> Result<Vec<Made>, Box<dyn std::error::Error>> {
    if words.len() != model.inputs().len() {
        return Err(Wrong(format!("the program takes {} inputs, got {}", model.inputs().len(), words.len())).into());
    }
    let read = |(word, port): (&String, &Port)| -> Result<Made, Box<dyn std::error::Error>> {
        Ok(match in_a_word(word, port) {
            Some(Input::Int(n)) => Made::Int(n),
            Some(Input::Float(x)) => Made::Float(x),
            Some(Input::Bool(b)) => Made::Truth(b),
            Some(_) => Made::None,
            None => Made::Array(Array::read(word.as_ref())?),
        })
    };
    words.iter().zip(model.inputs()).map(read).collect()
}

/// One call into tensors that are there, and its seconds.
fn call(
    session: &mut Session,
    bound: &Bound,
    inputs: &mut [Made],
    outputs: &mut [Option<Tensor>],
) -> Result<f64, Box<dyn std::error::Error>> {
    let mut views = inputs.iter_mut().map(Made::input).collect::<rapt::Result<Vec<_>>>()?;
    let mut places = Vec::with_capacity(outputs.len());
    for output in outputs {
        places.push(output.as_mut().map(Tensor::view_mut).transpose()?);
    }
    let start = Instant::now();
    session.run_into(bound, &mut views, &mut places)?;
    Ok(start.elapsed().as_secs_f64())
}

/// What was measured.
struct Figures {
    load: f64,
    first: f64,
    /// Seconds of each call.
    calls: Vec<f64>,
    symbols: Vec<(String, i64)>,
    flops: f64,
    threads: usize,
    weights: Vec<(String, String)>,
    held_bytes: usize,
}

pub(super) fn run(args: &Args) -> Outcome {
    let start = Instant::now();
    let model = super::open(&args.model, args.threads)?;
    let load = start.elapsed().as_secs_f64();
    // Forms and symbols are the archive's; the model does not repeat them.
    let archive = Archive::open(&args.model)?;
    let program = archive.program();
    let mut inputs = if args.inputs.is_empty() {
        made(program, &symbols(program, &args.sizes)?)?
    } else {
        given(&model, &args.inputs)?
    };
    let forms =
        inputs.iter_mut().map(|input| input.input().map(|input| input.form())).collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let bound = model.bind(&forms)?;
    let mut outputs = Vec::new();
    for form in bound.outputs() {
        outputs.push(match form {
            OutputForm::Tensor { dtype, shape, .. } => {
                let most = || Wrong(format!("a result has {} dimensions", shape.len()));
                Some(Tensor::zeros(*dtype, Shape::new(shape).ok_or_else(most)?)?)
            }
            _ => None,
        });
    }
    let mut session = model.session();
    call(&mut session, &bound, &mut inputs, &mut outputs)?;
    let first = start.elapsed().as_secs_f64();
    let (start, mut calls) = (Instant::now(), Vec::new());
    while calls.len() < LEAST_CALLS || start.elapsed().as_secs_f64() < args.seconds {
        calls.push(call(&mut session, &bound, &mut inputs, &mut outputs)?);
    }
    let symbols: Vec<(String, i64)> = bound.symbols().map(|(name, value)| (name.to_owned(), value)).collect();
    let flops = work::flops(program, &symbols.iter().cloned().collect());
    let weights = bound.explain().rows().iter().filter(|(name, _)| name.starts_with("weights")).cloned().collect();
    let threads = bound.threads();
    let held_bytes = session.held_bytes();
    let figures = Figures { load, first, calls, symbols, flops, threads, weights, held_bytes };
    say(&table::framed(&rows(&figures)))?;
    if let Some(path) = &args.json {
        std::fs::write(path, format!("{:#}\n", json(&figures)))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(exit::OK)
}

fn spread(figures: &Figures) -> [f64; 3] {
    let mut calls = figures.calls.clone();
    let middle = median(&mut calls);
    let (least, most) = calls.iter().fold((f64::INFINITY, 0.0f64), |(least, most), x| (least.min(*x), most.max(*x)));
    [least, middle, most]
}

fn rows(figures: &Figures) -> Vec<(String, String)> {
    let ms = |seconds: f64| format!("{:.3} ms", seconds * 1e3);
    let [least, middle, most] = spread(figures);
    let sizes: Vec<String> = figures.symbols.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    let mut rows = vec![
        ("sizes".to_owned(), if sizes.is_empty() { "fixed".into() } else { sizes.join(", ") }),
        ("threads".into(), format!("at most {}", figures.threads)),
        ("load".into(), ms(figures.load)),
        ("bind and first call".into(), ms(figures.first)),
        ("call".into(), format!("median {} of {}, {} to {}", ms(middle), figures.calls.len(), ms(least), ms(most))),
    ];
    let (giga, rate) = (figures.flops / 1e9, figures.flops / 1e9 / middle);
    rows.push(("products".into(), format!("{giga:.3} GFLOP, {rate:.1} GFLOP/s")));
    rows.extend(figures.weights.iter().cloned());
    rows.push(("held by the session".into(), format!("{} bytes", figures.held_bytes)));
    rows
}

fn json(figures: &Figures) -> serde_json::Value {
    let [least, middle, most] = spread(figures);
    let pairs = |pairs: &[(String, String)]| -> serde_json::Map<String, serde_json::Value> {
        pairs.iter().map(|(name, text)| (name.clone(), text.clone().into())).collect()
    };
    serde_json::json!({
        "symbols": figures.symbols.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
        "threads": figures.threads,
        "load_seconds": figures.load,
        "first_call_seconds": figures.first,
        "calls": figures.calls.len(),
        "median_seconds": middle,
        "least_seconds": least,
        "most_seconds": most,
        "product_flops": figures.flops,
        "weights": pairs(&figures.weights),
        "held_bytes": figures.held_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(size("s0=128"), Ok(("s0".into(), 128)));
        for wrong in ["s0", "s0=", "s0=x", "=", ""] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
