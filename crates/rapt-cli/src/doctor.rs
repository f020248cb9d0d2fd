//! `rapt doctor`: what this machine and build are, and whether they compute the law.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use rapt::doctor::{SelfTest, VARIABLES, cpu_name, platform, self_test, variables};
use rapt::{Arch, Engine, Threads};
use serde_json::json;

use crate::{Outcome, table};

#[derive(ClapArgs, Debug)]
pub(crate) struct Args {
    /// The report as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let engine = Engine::new(None)?;
    let cases = self_test(&engine);
    let healthy = cases.iter().all(SelfTest::passed);
    if args.json {
        println!("{:#}", as_json(&engine, &cases, healthy));
    } else {
        println!("{}", table::framed(&rows(&engine, &cases)));
    }
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn rows(engine: &Engine, cases: &[SelfTest]) -> Vec<(String, String)> {
    let row = |name: &str, text: String| (name.to_owned(), text);
    let isas: Vec<&str> = rapt::available_isas().iter().map(|arch| arch.name()).collect();
    let threads = engine.threads();
    let mut rows = vec![
        row("rapt", env!("CARGO_PKG_VERSION").to_owned()),
        row("cpu", format!("{} ({})", cpu_name(), platform())),
        row("isa", format!("{} (available: {})", engine.caps().arch.name(), isas.join(", "))),
        row("threads", format!("{} (from {})", threads.get(), threads_from(threads))),
    ];
    rows.extend(rapt::cuda::report());
    for (name, value) in variables() {
        let note = if VARIABLES.contains(&name.as_str()) { "" } else { " (no variable of Rapt)" };
        rows.push((name, value.map_or("not set".to_owned(), |value| format!("{value:?}{note}"))));
    }
    for case in cases {
        let verdict = if case.passed() { "ok" } else { "FAILED" };
        let error = match &case.error {
            Ok(error) => format!("relative error {error:.1e}, limit {:.0e}", case.limit),
            Err(error) => error.to_string(),
        };
        rows.push((format!("self-test {} {}", case.dtype, case.kernel), format!("{verdict}, {error}")));
    }
    rows
}

fn as_json(engine: &Engine, cases: &[SelfTest], healthy: bool) -> serde_json::Value {
    let isas: Vec<&str> = rapt::available_isas().iter().copied().map(Arch::name).collect();
    let threads = engine.threads();
    let tests: Vec<serde_json::Value> = cases
        .iter()
        .map(|case| {
            let (error, refusal) = match &case.error {
                Ok(error) => (Some(error), None),
                Err(refusal) => (None, Some(refusal.to_string())),
            };
            json!({
                "dtype": case.dtype.name(), "kernel": case.kernel, "passed": case.passed(),
                "error": error, "refusal": refusal, "limit": case.limit,
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "cpu": cpu_name(),
        "platform": platform(),
        "isa": engine.caps().arch.name(),
        "isa_available": isas,
        "threads": threads.get(),
        "threads_from": threads_from(threads),
        "cuda": rapt::cuda::report().into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "environment": variables().into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "self_test": tests,
        "ok": healthy,
    })
}

fn threads_from(threads: Threads) -> &'static str {
    match threads {
        Threads::Asked(_) => "the caller",
        Threads::Environment(_) => "RAPT_NUM_THREADS",
        Threads::Available(_) => "available_parallelism",
    }
}
