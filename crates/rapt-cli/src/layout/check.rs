//! `rapt layout check` and `rapt layout emulate`: the checks of a file, compared or run.

use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use rapt::layout::check::{self, Check};
use rapt::layout::draw::report_svg;
use rapt::layout::emulate::{Case, run};
use serde_json::json;

use super::output::JsonArgs;
use crate::{Outcome, exit, say};

/// The cosine from which on a flow works.
const WORKS: f64 = 0.99999;
/// The largest file of checks, in bytes.
const MOST_BYTES: u64 = 1 << 20;

#[derive(ClapArgs, Debug)]
pub(super) struct CheckArgs {
    /// A TOML file (docs/reference/layout.md); - reads standard input.
    file: PathBuf,
    /// Only the check of this name.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Also the map of all elements: . as written, x another element, ? poison.
    #[arg(long)]
    map: bool,
    /// Also write the map of the check, or of the first that is refuted, to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(ClapArgs, Debug)]
pub(super) struct EmulateArgs {
    /// A TOML file (docs/reference/layout.md); - reads standard input.
    file: PathBuf,
    /// Only the check of this name.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Where the random numbers start; may be given more than once.
    #[arg(long, value_name = "N", default_values_t = [1, 2, 3])]
    seed: Vec<u64>,
    /// P is the softmax of S, not S itself.
    #[arg(long)]
    softmax: bool,
    #[command(flatten)]
    json: JsonArgs,
}

pub(super) fn check(args: &CheckArgs) -> Outcome {
    let checks = read(&args.file, args.only.as_deref())?;
    let reports = checks.iter().map(Check::run).collect::<Result<Vec<_>, _>>()?;
    let proven = reports.iter().all(|report| report.proven);
    if let Some((path, report)) =
        args.svg.as_ref().zip(reports.iter().find(|report| !report.proven).or(reports.first()))
    {
        std::fs::write(path, report_svg(report)).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if args.json.json {
        let list: Vec<_> = reports.iter().map(|report| report.to_json(args.map)).collect();
        say(&format_args!("{:#}", json!({"proven": proven, "checks": list})))?;
    } else {
        for report in &reports {
            say(&report.to_string().trim_end_matches('\n'))?;
            if args.map {
                say(&report.map_lines().join("\n"))?;
            }
        }
    }
    Ok(if proven { exit::OK } else { exit::FAILED })
}

pub(super) fn emulate(args: &EmulateArgs) -> Outcome {
    let mut outcomes = Vec::new();
    for check in read(&args.file, args.only.as_deref())? {
        for seed in &args.seed {
            outcomes.push(run(&check, Case { seed: *seed, softmax: args.softmax })?);
        }
    }
    let works = outcomes.iter().all(|outcome| outcome.cosine.is_some_and(|cosine| cosine >= WORKS));
    if args.json.json {
        let list: Vec<_> = outcomes.iter().map(rapt::layout::emulate::Outcome::to_json).collect();
        say(&format_args!("{:#}", json!({"works": works, "flows": list})))?;
    } else {
        for outcome in &outcomes {
            say(outcome)?;
        }
    }
    Ok(if works { exit::OK } else { exit::FAILED })
}

fn read(path: &Path, only: Option<&str>) -> Result<Vec<Check>, Box<dyn std::error::Error>> {
    let in_file = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin()).map_err(|error| in_file(&error))?
    } else {
        let bytes = std::fs::metadata(path).map_err(|error| in_file(&error))?.len();
        if bytes > MOST_BYTES {
            return Err(in_file(&format!("{bytes} bytes; a file of checks has at most {MOST_BYTES}")).into());
        }
        std::fs::read_to_string(path).map_err(|error| in_file(&error))?
    };
    let mut checks = check::parse(&text).map_err(|error| in_file(&error))?;
    if let Some(name) = only {
        let names: Vec<String> = checks.iter().map(|check| format!("{:?}", check.name)).collect();
        checks.retain(|check| check.name == name);
        if checks.is_empty() {
            return Err(in_file(&format!("no check {name:?}; it has {}", names.join(", "))).into());
        }
    }
    Ok(checks)
}
