//! Speed, with peers in the same run.

use crate::args::Args;
use crate::cubins::Kernels;
use crate::metadata::{Workspace, root};
use crate::python::{BUILD_REQUIREMENTS, Venv};
use crate::shell::{Outcome, show, step};
use crate::wheel;

pub(crate) const HELP: &str = "\
cargo xtask bench cpu [options of benches/run.py]

Times attention against its peers, interleaved in one run, and writes a record.

Makes .venv, installs what demo/ and benches/requirements.txt pin, builds and installs the wheel, runs benches/run.py with the
words that follow; `cargo xtask bench cpu --list` prints the rows. docs/reference/benchmarks.md explains the method.";

const FILES: [&str; 4] =
    [BUILD_REQUIREMENTS, "demo/requirements-numpy.txt", "demo/requirements-torch.txt", "benches/requirements.txt"];

pub(crate) fn run(args: Args) -> Outcome {
    let words = args.rest(HELP)?;
    let venv = Venv::at(".venv")?;
    venv.require(&FILES, None)?;
    let built = wheel::build(&venv, &Workspace::load()?.target, Kernels::Core, false)?;
    venv.install(&built)?;
    step("run benches/run.py", || {
        let mut bench = venv.python([]);
        show(bench.arg(root().join("benches/run.py")).args(&words))
    })
}
