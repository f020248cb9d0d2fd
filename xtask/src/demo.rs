//! The main job: a real model's attention is Rapt's, and the stats of it.

use crate::args::Args;
use crate::cubins::Kernels;
use crate::metadata::{Workspace, root};
use crate::python::{BUILD_REQUIREMENTS, Venv};
use crate::shell::{Outcome, cargo, show, step};
use crate::wheel;

pub(crate) const HELP: &str = "\
cargo xtask demo [--offline] [--no-torch]

Embeds real sentences with a real model, stock PyTorch against Rapt, and prints the stats.

Makes .venv, installs what demo/requirements*.txt pins, builds and installs the wheel, runs demo/demo.py. Then the same model is
exported, and examples/rust/sentences runs it on the same sentences in a process without Python.
  --offline    reuse the .venv that is there; nothing is fetched
  --no-torch   show the numpy interface alone; torch is not installed
Ends with the demo's exit code: non-zero if Rapt is less exact than stock or did not serve every call.";

const NUMPY: &str = "demo/requirements-numpy.txt";
const TORCH: &str = "demo/requirements-torch.txt";

pub(crate) fn run(mut args: Args) -> Outcome {
    let (offline, no_torch) = (args.flag("--offline"), args.flag("--no-torch"));
    args.finish(HELP)?;
    let mut files = vec![BUILD_REQUIREMENTS, NUMPY];
    if !no_torch {
        files.push(TORCH);
    }
    let venv = if offline { Venv::existing(".venv")? } else { Venv::at(".venv")? };
    if offline {
        venv.assume(&files)?;
    } else {
        venv.require(&files, None)?;
    }
    let built = wheel::build(&venv, &Workspace::load()?.target, Kernels::Core, offline)?;
    venv.install(&built)?;
    step("run demo/demo.py", || {
        let mut demo = venv.python([]);
        demo.arg(root().join("demo/demo.py"));
        if no_torch {
            demo.arg("--no-torch");
        }
        show(&mut demo)
    })?;
    if no_torch {
        return Ok(());
    }
    by_rust_alone(&venv)
}

/// Exports the model, and lets Rust alone embed the sentences: it fails unless they are as near to the truth as PyTorch's.
fn by_rust_alone(venv: &Venv) -> Outcome {
    let folder = Workspace::load()?.target.join("demo");
    step("export the model", || {
        let mut export = venv.python([]);
        show(export.arg(root().join("demo/export_sentences.py")).arg(&folder))
    })?;
    step("the same sentences by Rust alone", || {
        let mut run = cargo(["run", "--quiet", "--release", "--package", "rapt-sentences", "--"]);
        run.args(["model.pt2", "tokenizer.json", "sentences.txt", "reference.f64"].map(|file| folder.join(file)));
        show(run.current_dir(root()))
    })
}
