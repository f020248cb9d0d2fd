//! Speed, with peers in the same run.

use crate::args::Args;
use crate::cubins::Kernels;
use crate::metadata::{Workspace, root};
use crate::python::{BUILD_REQUIREMENTS, Venv};
use crate::shell::{Outcome, cargo, show, step};
use crate::wheel;

pub(crate) const HELP: &str = "\
cargo xtask bench cpu [options of benches/run.py]
cargo xtask bench model [options of benches/model.py]
cargo xtask bench gemm [--rounds N] [--seconds S] [--only TEXT] [--record FILE]

Times attention (cpu) or exported programs (model) against their peers, interleaved in one run, and writes a record.

Makes .venv, installs what demo/ and benches/requirements.txt pin, builds and installs the wheel, runs the script with the
words that follow; `cargo xtask bench cpu --list` prints the rows. docs/reference/benchmarks.md explains the method.

gemm: products with packed weights beside other crates, built in a workspace of their own (benches/gemm).";

const FILES: [&str; 4] =
    [BUILD_REQUIREMENTS, "demo/requirements-numpy.txt", "demo/requirements-torch.txt", "benches/requirements.txt"];

pub(crate) fn run(args: Args) -> Outcome {
    let mut words = args.rest(HELP)?;
    if let Some(("gemm", options)) = words.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return gemm(options);
    }
    let script = if words.first().is_some_and(|word| word == "model") {
        words.remove(0);
        "benches/model.py"
    } else {
        "benches/run.py"
    };
    let venv = Venv::at(".venv")?;
    venv.require(&FILES, None)?;
    let built = wheel::build(&venv, &Workspace::load()?.target, Kernels::Core, false)?;
    venv.install(&built)?;
    step(&format!("run {script}"), || {
        let mut bench = venv.python([]);
        show(bench.arg(root().join(script)).args(&words))
    })
}

fn gemm(options: &[String]) -> Outcome {
    let (manifest, target) = (root().join("benches/gemm/Cargo.toml"), root().join("target/bench-gemm"));
    step("run benches/gemm", || {
        let mut bench = cargo(["run", "--release", "--quiet"]);
        show(bench.arg("--manifest-path").arg(manifest).arg("--target-dir").arg(target).arg("--").args(options))
    })
}
