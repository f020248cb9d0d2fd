//! Rapt's own build scripts. `cargo xtask <command> --help` says what a command does.
//!
//! One file per command; `python` holds what they share of virtual environments and wheels, `shell` how a program is
//! run. Deliberately absent: anything that needs more than cargo, rustc and a python3 to start from.

mod archives;
mod args;
mod bench;
mod binary;
mod built;
mod c;
mod crates;
mod cross;
mod cubins;
mod debian;
mod demo;
mod dist;
mod docs;
mod licenses;
mod metadata;
mod mlx;
mod platforms;
mod python;
mod rust_text;
mod shell;
mod targets;
mod test;
mod tidy;
mod tune;
mod vulkan;
mod web;
mod wheel;

use std::process::ExitCode;

use args::Args;
use shell::{Failure, Outcome};

/// A command of xtask: its name, its help, what runs.
struct Command {
    name: &'static str,
    help: &'static str,
    run: fn(Args) -> Outcome,
}

const COMMANDS: &[Command] = &[
    Command { name: "demo", help: demo::HELP, run: demo::run },
    Command { name: "test", help: test::HELP, run: test::run },
    Command { name: "bench", help: bench::HELP, run: bench::run },
    Command { name: "tune", help: tune::HELP, run: tune::run },
    Command { name: "wheel", help: dist::HELP, run: dist::run },
    Command { name: "c", help: c::HELP, run: archives::run },
    Command { name: "crates", help: crates::HELP, run: crates::run },
    Command { name: "vulkan", help: vulkan::HELP, run: vulkan::run },
    Command { name: "web", help: web::HELP, run: web::run },
    Command { name: "docs", help: docs::HELP, run: docs::run },
    Command { name: "tidy", help: tidy::HELP, run: tidy::run },
    Command { name: "licenses", help: licenses::HELP, run: licenses::run },
];

fn usage() -> String {
    let mut text = "cargo xtask <command> [options]\n\n".to_owned();
    for command in COMMANDS {
        let summary = command.help.lines().nth(2).unwrap_or_default();
        text.push_str(&format!("  {:<10} {summary}\n", command.name));
    }
    text.push_str("\nEach command takes --help.");
    text
}

fn dispatch() -> Outcome {
    let mut words = std::env::args().skip(1);
    let Some(name) = words.next() else {
        return Err(Failure::Usage(usage()));
    };
    if ["--help", "-h", "help"].contains(&name.as_str()) {
        println!("{}", usage());
        return Ok(());
    }
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        return Err(Failure::Usage(format!("there is no command `{name}`\n\n{}", usage())));
    };
    let words: Vec<String> = words.collect();
    if words.iter().any(|word| word == "--help" || word == "-h") {
        println!("{}", command.help);
        return Ok(());
    }
    (command.run)(Args::new(words))
}

fn main() -> ExitCode {
    match dispatch() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}
