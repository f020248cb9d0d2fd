//! What the shape of the code promises, checked.
//!
//! A rule is a function from text to findings, so that each is shown to fire on a bad sample in its own tests.

mod cycles;
mod dependencies;
mod environment;
mod generated;
mod invariants;
mod lengths;
mod names;
mod places;
mod references;
mod sources;
mod words;

use std::fmt;

use sources::Source;

use crate::args::Args;
use crate::licenses;
use crate::metadata::{Workspace, root};
use crate::shell::{Failure, Outcome, step};
use crate::tune;

pub(crate) const HELP: &str = "\
cargo xtask tidy [RULE]...

Checks the rules of the house that no compiler knows: all of them, or those named.

- dependencies: rapt-core <- {reference, layout, quant, cpu, cuda, wgpu, pt2 <- graph} <- rapt-attention <- {bindings, cli};
  rapt-testkit only as a dev-dependency
- places: CPU intrinsics only in crates/rapt-cpu/src/arch, CUDA's functions only in its driver layer, torch, numpy and pyo3
  only in bindings, and the like
- words: no unfinished markers, no versioned names, no absolute machine paths
- names: the field's names, not private ones
- references: a file or function that a comment names is there
- lengths: no file over 700 lines, no function over 100, no more than 7 arguments
- cycles: no module needs itself by way of another
- invariants: each invariant of ARCHITECTURE.md names a test or a rule that is there
- environment: every RAPT_* variable of the code stands in docs/reference/environment.md, and the reverse
- licences, generated, tiles: THIRD-PARTY-LICENSES.md, the generated blocks of pages and the table of tiles are current";

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
    let names = args.words();
    if let Some(unknown) = names.iter().find(|name| RULES.iter().all(|(rule, _)| rule != name)) {
        return Err(Failure::Usage(format!("there is no rule `{unknown}`\n\n{HELP}")));
    }
    step("tidy", || check_rules(|rule| names.is_empty() || names.iter().any(|name| name == rule)))
}

/// What rules look at.
struct Tree {
    workspace: Workspace,
    files: Vec<Source>,
    /// Of all files, below the root.
    paths: Vec<String>,
}

/// A rule: its name, and what it finds.
type Rule = (&'static str, fn(&Tree) -> Result<Vec<Finding>, Failure>);

const RULES: [Rule; 12] = [
    ("dependencies", |tree| Ok(dependencies::check(&tree.workspace))),
    ("places", |tree| Ok(places::check(&tree.files))),
    ("words", |tree| Ok(words::check(&tree.files))),
    ("names", |tree| Ok(names::check(&tree.files))),
    ("references", |tree| Ok(references::check(&tree.files, &tree.paths))),
    ("lengths", |tree| Ok(lengths::check(&tree.files))),
    ("cycles", |tree| Ok(cycles::check(&tree.files))),
    ("invariants", |tree| Ok(invariants::check(&tree.files, &RULES.map(|(name, _)| name)))),
    ("environment", |tree| Ok(environment::check(&tree.files))),
    ("licences", |tree| licences(&tree.workspace)),
    ("generated", |_| generated::check()),
    ("tiles", |_| Ok(tune::check()?.into_iter().map(|what| Finding::new("tiles", what)).collect())),
];

/// All rules over the working tree.
pub(crate) fn check() -> Outcome {
    check_rules(|_| true)
}

fn check_rules(is_wanted: impl Fn(&str) -> bool) -> Outcome {
    let (files, paths) = sources::collect(&root())?;
    let tree = Tree { workspace: Workspace::load()?, files, paths };
    let mut lines = Vec::new();
    for (name, rule) in RULES.into_iter().filter(|(name, _)| is_wanted(name)) {
        let mut findings = rule(&tree)?;
        findings.sort();
        lines.extend(findings.into_iter().map(|finding| format!("  {name}: {finding}")));
    }
    if lines.is_empty() {
        println!("{} files, {} members: tidy", tree.files.len(), tree.workspace.members().count());
        return Ok(());
    }
    Err(Failure::Check(format!("{} findings:\n{}", lines.len(), lines.join("\n"))))
}

fn licences(workspace: &Workspace) -> Result<Vec<Finding>, Failure> {
    let held = std::fs::read_to_string(root().join(licenses::FILE)).unwrap_or_default();
    let is_current = held == licenses::generate(workspace)?;
    Ok(if is_current {
        Vec::new()
    } else {
        vec![Finding::new(licenses::FILE, "is not current: run `cargo xtask licenses`")]
    })
}
