//! `rapt model`: exported programs on the command line: whether one is served, what is in it, a run on .npy files, and its time.
//!
//! `view` draws the graph, `bench` times a model, `work` counts its products.

mod bench;
mod view;
mod work;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args as ClapArgs, Subcommand};
use rapt::Engine;
use rapt::model::{Check, Input, Model, Output, Port};
use rapt::pt2::Archive;

use crate::npy::{self, Array};
use crate::{Outcome, exit, say, table};

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Whether an archive is served, everything that is missing, and whether its weights are whole; exit code 1 if not.
    Check(CheckArgs),
    /// What runs: inputs, results, symbols, guards, bytes, operators.
    Show(ShowArgs),
    /// Run an archive on .npy files.
    Run(RunArgs),
    /// How fast an archive runs here: load, first call, the median of calls, operations of its products, bytes of weights.
    Bench(bench::Args),
}

#[derive(ClapArgs, Debug)]
struct CheckArgs {
    /// An archive of an exported program.
    model: PathBuf,
    /// Print JSON in place of the table.
    #[arg(long)]
    json: bool,
}

#[derive(ClapArgs, Debug)]
struct ShowArgs {
    /// An archive of an exported program.
    model: PathBuf,
    /// Write a view of the graph here, one file that needs nothing else, in place of the table.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(ClapArgs, Debug)]
struct RunArgs {
    /// An archive of an exported program.
    model: PathBuf,
    /// The inputs in the program's order: .npy files; where the program takes no tensor a number, `true`, `false`, `none`, or
    /// the text of the export.
    #[arg(allow_negative_numbers = true)]
    inputs: Vec<String>,
    /// Where a result goes; once for each tensor among the results, in their order.
    #[arg(long, value_name = "FILE", required = true)]
    out: Vec<PathBuf>,
    /// Threads [default: RAPT_NUM_THREADS, else what the system offers].
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

/// The program of an archive, on an engine of so many threads.
fn open(path: &Path, threads: Option<usize>) -> Result<Model, rapt::ModelError> {
    let engine = Engine::new(threads)?;
    Ok(Model::open(path)?.on(Arc::new(engine)))
}

pub(crate) fn run(args: &Args) -> Outcome {
    match &args.command {
        Command::Check(args) => check(args),
        Command::Bench(args) => bench::run(args),
        Command::Show(ShowArgs { model, html: Some(html) }) => draw(model, html),
        Command::Show(args) => {
            let explanation = Model::open(&args.model)?.explain();
            say(&table::framed(explanation.rows()))?;
            Ok(exit::OK)
        }
        Command::Run(args) => compute(args),
    }
}

fn form(port: &Port) -> String {
    match port.dtype {
        Some(dtype) => format!("{dtype} [{}]", port.sizes.join(", ")),
        None => "no tensor".into(),
    }
}

/// Draws the graph, also of an archive that is not served: what is missing is marked.
fn draw(model: &Path, html: &Path) -> Outcome {
    let (archive, check) = (Archive::open(model)?, Model::check(model)?);
    let missing = check.missing.iter().map(|(name, ..)| name.as_str()).collect();
    let title = model.file_name().unwrap_or(model.as_os_str()).to_string_lossy();
    let page = view::page(&title, archive.program(), missing);
    std::fs::write(html, &page).map_err(|error| format!("{}: {error}", html.display()))?;
    say(&format_args!("{}: {} nodes, {} bytes", html.display(), archive.program().graph.nodes.len(), page.len()))?;
    Ok(exit::OK)
}

/// The storages of an archive, and the first whose bytes are not those that were written.
struct Storages {
    count: usize,
    bytes: usize,
    damage: Option<rapt::pt2::Error>,
}

impl Storages {
    fn of(model: &Path) -> Result<Storages, rapt::pt2::Error> {
        let archive = Archive::open(model)?;
        let ids: std::collections::BTreeSet<_> =
            archive.weights().values().chain(archive.constants().values()).map(|payload| payload.storage).collect();
        let bytes = ids.iter().map(|id| archive.storage(*id).len()).sum();
        Ok(Storages { count: archive.storages(), bytes, damage: archive.check_storages().err() })
    }
}

fn check(args: &CheckArgs) -> Outcome {
    let (check, storages) = (Model::check(&args.model)?, Storages::of(&args.model)?);
    if args.json {
        say(&serde_json::to_string_pretty(&json(&check, &storages))?)?;
    } else {
        let mut rows: Vec<(String, String)> = Vec::new();
        let answer = match &check.refusal {
            None => "served".to_owned(),
            Some(_) if !check.missing.is_empty() => {
                format!("not served: {} operators are missing", check.missing.len())
            }
            Some(error) => format!("not served: {error}"),
        };
        rows.push(("answer".into(), answer));
        rows.push(("written by".into(), check.written_by.clone()));
        rows.extend(check.inputs.iter().map(|port| (format!("input {}", port.name), form(port))));
        rows.extend(check.outputs.iter().map(|port| (port.name.clone(), form(port))));
        rows.push(("storages".into(), format!("{}, {} bytes", storages.count, storages.bytes)));
        let checksums = storages.damage.as_ref().map_or("right".into(), ToString::to_string);
        rows.push(("checksums".into(), checksums));
        rows.push(("nodes".into(), check.ops.values().sum::<usize>().to_string()));
        let missing = |(name, count, first): &(String, usize, String)| {
            (format!("missing {name}"), format!("{count} nodes, first {first}"))
        };
        rows.extend(check.missing.iter().map(missing));
        say(&table::framed(&rows))?;
    }
    Ok(if check.is_served() { exit::OK } else { exit::FAILED })
}

fn json(check: &Check, storages: &Storages) -> serde_json::Value {
    let port = |port: &Port| serde_json::json!({"name": port.name, "dtype": port.dtype.map(rapt::DType::name), "sizes": port.sizes});
    let missing = |(name, count, first): &(String, usize, String)| serde_json::json!({"op": name, "nodes": count, "first": first});
    serde_json::json!({
        "served": check.is_served(),
        "written_by": check.written_by,
        "refusal": check.refusal.as_ref().map(ToString::to_string),
        "storages": {
            "count": storages.count,
            "bytes": storages.bytes,
            "damage": storages.damage.as_ref().map(ToString::to_string),
        },
        "missing": check.missing.iter().map(missing).collect::<Vec<_>>(),
        "inputs": check.inputs.iter().map(port).collect::<Vec<_>>(),
        "outputs": check.outputs.iter().map(port).collect::<Vec<_>>(),
        "ops": check.ops,
    })
}

/// The input that a word is, where the program takes no tensor; else the word is the name of a file.
fn in_a_word(word: &str, port: &Port) -> Option<Input<'static>> {
    match (port.dtype, &port.text) {
        (Some(_), _) => None,
        (None, Some(text)) => (word == text).then_some(Input::None),
        (None, None) if word == "none" => Some(Input::None),
        (None, None) => (word.parse().map(Input::Int).ok())
            .or_else(|| word.parse().map(Input::Bool).ok())
            .or_else(|| word.parse().map(Input::Float).ok()),
    }
}

/// What is wrong with the words of a command.
#[derive(Debug)]
struct Wrong(String);

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

fn compute(args: &RunArgs) -> Outcome {
    let model = open(&args.model, args.threads)?;
    let names = || model.inputs().iter().map(|port| format!("{} ({})", port.name, form(port))).collect::<Vec<_>>();
    if args.inputs.len() != model.inputs().len() {
        let (takes, got) = (model.inputs().len(), args.inputs.len());
        let text = format!("the program takes {takes} inputs, got {got}: {}", names().join(", "));
        return Err(Wrong(text).into());
    }
    let tensors = model.outputs().iter().filter(|port| port.dtype.is_some()).count();
    if args.out.len() != tensors {
        return Err(
            Wrong(format!("the program gives {tensors} tensors, and --out stands {} times", args.out.len())).into()
        );
    }
    let mut arrays = Vec::with_capacity(args.inputs.len());
    for (word, port) in args.inputs.iter().zip(model.inputs()) {
        arrays.push(match in_a_word(word, port) {
            Some(input) => Err(Some(input)),
            None => Ok(Array::read(word.as_ref())?),
        });
    }
    let mut inputs = Vec::with_capacity(arrays.len());
    for array in &mut arrays {
        inputs.push(match array {
            // A program may write its inputs: the file stays as it is.
            Ok(array) => Input::from(array.view_mut("input")?),
            Err(input) => input.take().unwrap_or(Input::None),
        });
    }
    let outputs = model.run(&mut inputs)?;
    let mut files = args.out.iter();
    for (output, port) in outputs.iter().zip(model.outputs()) {
        match output {
            Output::Tensor(tensor) => {
                let Some(path) = files.next() else { continue };
                npy::write(path, tensor)?;
                say(&format_args!("{}: {} = {} {}", path.display(), port.name, tensor.dtype(), tensor.shape()))?;
            }
            Output::Int(n) => say(&format_args!("{} = {n}", port.name))?,
            Output::Float(x) => say(&format_args!("{} = {x}", port.name))?,
            Output::Bool(b) => say(&format_args!("{} = {b}", port.name))?,
            Output::None => say(&format_args!("{} = None", port.name))?,
        }
    }
    Ok(exit::OK)
}
