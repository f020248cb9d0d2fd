//! `rapt`: what this machine has, what would run and why, how fast it is, and attention on files.
//!
//! One file or folder per subcommand; `options` holds what they ask alike, `npy` the files that `run` reads and writes,
//! `formula` what `bench` holds a kernel against. Everything goes through the façade. Deliberately absent:
//! arithmetic (that formula excepted), policy, and any subcommand whose code does not exist yet.

mod bench;
mod doctor;
mod explain;
mod formula;
mod layout;
mod layout_check;
mod npy;
mod options;
mod run;
mod support;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Attention with an exact tensor boundary.
#[derive(Parser)]
#[command(name = "rapt", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What this machine and build are, and whether they compute the law; exit code 1 if they do not.
    Doctor(doctor::Args),
    /// What would run for a problem, and why; or the table of what is served.
    Explain(explain::Args),
    /// How fast it is here, on shapes of your own, beside what this machine can do; exit code 1 if a row is wrong.
    Bench(bench::Args),
    /// Layout algebra, fragments of tensor-core instructions, and the check that a store is what is read.
    Layout(layout::Args),
    /// Attention on .npy files.
    Run(run::Args),
}

/// What a subcommand answers: an error's text goes to stderr, with exit code 1.
type Outcome = Result<ExitCode, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Doctor(args) => doctor::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Layout(args) => layout::run(&args),
        Command::Run(args) => run::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("rapt: {error}");
        ExitCode::FAILURE
    })
}
