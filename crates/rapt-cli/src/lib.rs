//! The command line `rapt`: what this machine has, what would run and why, how fast it is, attention and exported programs on
//! files.
//!
//! One program for two installers: `src/main.rs` is cargo's binary, the Python package calls [`run`] in its process. What
//! differs between them is a [`Host`]: how Python is reached (`audit` and `bench cuda` are Python code), where other devices are, and what
//! `doctor` adds. One file or folder per subcommand; `options` and `codes` hold what they read alike, `npy` the files that `run` reads and
//! writes. Everything goes through the façade. Deliberately absent: arithmetic, policy, `process::exit`, and any subcommand
//! whose code does not exist yet.

mod bench;
mod codes;
pub mod doctor;
mod explain;
mod layout;
mod model;
mod npy;
mod options;
mod python;
mod run;
mod support;
mod table;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use clap::{CommandFactory, Parser, Subcommand};
use rapt::{Device, Offload};

pub use python::PythonCommand;

/// Exit codes.
pub mod exit {
    /// Done.
    pub const OK: u8 = 0;
    /// Refused, or what was asked about does not hold.
    pub const FAILED: u8 = 1;
    /// The words of the command line are wrong.
    pub const USAGE: u8 = 2;
    /// A fault of Rapt itself; what Rust's own programs end with after a panic.
    pub const PANICKED: u8 = 101;
    /// Interrupted from the keyboard.
    pub const INTERRUPTED: u8 = 130;
}

/// What a subcommand answers: an exit code, or an error whose text goes to stderr, with exit code 1.
pub type Outcome = Result<u8, Box<dyn std::error::Error>>;

/// The program that this command line is part of.
pub trait Host {
    /// What `doctor` shows beside what Rust finds out.
    fn facts(&self) -> Result<doctor::HostFacts, Box<dyn std::error::Error>>;
    /// Runs a subcommand whose code is Python; the exit code is Python's.
    fn python(&self, command: &PythonCommand) -> Outcome;
    /// The device that the tensors of `run` are copied to.
    fn offload(&self, device: Device) -> Result<Arc<dyn Offload>, Box<dyn std::error::Error>>;
}

/// Attention with an exact tensor boundary.
#[derive(Parser)]
#[command(name = "rapt", bin_name = "rapt", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What this machine and build are, and whether they compute the reference; exit code 1 if they do not.
    Doctor(doctor::Args),
    /// What would run for a problem, and why; or the table of what is served.
    Explain(explain::Args),
    /// Attention on .npy files.
    Run(run::Args),
    /// How fast it is here, on shapes of your own, beside what this machine can do; exit code 1 if a row is wrong.
    Bench(bench::Args),
    /// Check an attention for boundary bugs: strides, masks, NaN, dtypes, memory (needs Python).
    Audit(python::AuditArgs),
    /// Exported programs: whether one is served, what is in it, a run on .npy files, and its time.
    Model(model::Args),
    /// Layout algebra, fragments of tensor-core instructions, and the check that a store is what is read.
    Layout(layout::Args),
}

/// Runs the command line `args`, the first of which is the program's name, and gives its exit code. Never panics.
pub fn run(args: impl IntoIterator<Item = OsString>, host: &dyn Host) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let outcome = catch_unwind(AssertUnwindSafe(|| answer(&args, host)));
    let code = match outcome {
        Ok(Ok(code)) => code,
        // Whoever reads the output has seen enough, as in `rapt explain … | head`.
        Ok(Err(error)) if is_broken_pipe(error.as_ref()) => exit::OK,
        Ok(Err(error)) => {
            complain(&error);
            exit::FAILED
        }
        // The panic hook has printed message and place.
        Err(_) => exit::PANICKED,
    };
    // In Python's process nothing else empties the buffer of Rust's stdout. A reader that is gone misses nothing.
    let _ = io::stdout().flush();
    code
}

fn answer(args: &[OsString], host: &dyn Host) -> Outcome {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(text) => {
            // Help and version are "errors" of clap with exit code 0.
            text.print()?;
            return Ok(if text.use_stderr() { exit::USAGE } else { exit::OK });
        }
    };
    let words = args.get(1..).unwrap_or_default();
    match cli.command {
        Command::Doctor(args) => doctor::run(&args, host),
        Command::Explain(args) => explain::run(&args),
        Command::Run(args) => run::run(&args, host),
        Command::Bench(args) => bench::run(&args, words, host),
        Command::Audit(args) => host.python(&PythonCommand::new("audit", &args, words)?),
        Command::Model(args) => model::run(&args),
        Command::Layout(args) => layout::run(&args),
    }
}

/// Every page of help, `rapt --help` first: the command's words and its text.
#[must_use]
pub fn help() -> Vec<(String, String)> {
    fn collect(words: &str, command: &clap::Command, all: &mut Vec<String>) {
        all.push(format!("{words} --help"));
        for inner in command.get_subcommands().filter(|inner| inner.get_name() != "help") {
            collect(&format!("{words} {}", inner.get_name()), inner, all);
        }
    }
    let mut all = Vec::new();
    collect("rapt", &Cli::command(), &mut all);
    // Parsed as they are typed: clap chooses between its short and its long form where it prints a page.
    let page = |words: String| {
        let text = Cli::command()
            .try_get_matches_from(words.split(' '))
            .map_or_else(|page| page.to_string(), |_| String::new());
        (words, text)
    };
    all.into_iter().map(page).collect()
}

/// A text and a line's end to stdout. An error, not a panic, where nothing reads it.
fn say(text: &dyn Display) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

/// An error's text to stderr, as every subcommand tells it.
fn complain(error: &dyn Display) {
    // There is no other place to tell it.
    let _ = writeln!(io::stderr().lock(), "rapt: {error}");
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
