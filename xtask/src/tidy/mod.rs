//! What the shape of the code promises, checked.
//!
//! A rule is a function from text to findings, so that each is shown to fire on a bad sample in its own tests.

mod dependencies;
mod environment;
mod generated;
mod sources;
mod words;

use std::fmt;

use crate::args::Args;
use crate::licenses;
use crate::metadata::{Workspace, root};
use crate::shell::{Failure, Outcome, step};
use crate::tune;

pub(crate) const HELP: &str = "\
cargo xtask tidy

Checks the rules of the house that no compiler knows.

- dependencies: rapt-core <- {reference, layout, quant, cpu, cuda, wgpu, graph} <- rapt-attention <- {bindings, cli};
  rapt-testkit only as a dev-dependency
- CPU intrinsics only in crates/rapt-cpu/src/arch; torch, numpy and pyo3 only in bindings
- no unfinished markers, no versioned names, no absolute machine paths, no source file over 900 lines
- every RAPT_* variable of the code stands in docs/reference/environment.md, and the reverse
- THIRD-PARTY-LICENSES.md, the generated blocks of docs/reference/support.md and the table of tiles are current";

/// One place that breaks a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// File below the root, with `:line` where there is one.
    place: String,
    what: String,
}

impl Finding {
    fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Finding { place: place.into(), what: what.into() }
    }

    fn at(file: &str, line: usize, what: impl Into<String>) -> Self {
        Finding { place: format!("{file}:{line}"), what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

pub(crate) fn run(args: Args) -> Outcome {
    args.finish(HELP)?;
    step("tidy", check)
}

/// All rules over the working tree.
pub(crate) fn check() -> Outcome {
    let workspace = Workspace::load()?;
    let files = sources::collect(&root())?;
    let mut findings = dependencies::check(&workspace);
    for file in &files {
        findings.extend(words::check(file));
    }
    findings.extend(environment::check(&files));
    findings.extend(generated::check()?);
    findings.extend(tune::check()?.into_iter().map(|what| Finding::new("tiles", what)));
    let licences = std::fs::read_to_string(root().join(licenses::FILE)).unwrap_or_default();
    if licences != licenses::generate(&workspace)? {
        findings.push(Finding::new(licenses::FILE, "is not current: run `cargo xtask licenses`"));
    }
    findings.sort();
    if findings.is_empty() {
        println!("{} files, {} members: tidy", files.len(), workspace.members().count());
        return Ok(());
    }
    let lines: Vec<String> = findings.iter().map(|finding| format!("  {finding}")).collect();
    Err(Failure::Check(format!("{} findings:\n{}", findings.len(), lines.join("\n"))))
}
