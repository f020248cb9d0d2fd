//! The main job: a real model's attention is Rapt's, and the stats of it. Beside it, a language model on caches of codes, and its training.

use std::ffi::OsStr;
use std::path::Path;

use crate::args::Args;
use crate::cubins::Kernels;
use crate::metadata::{Workspace, root};
use crate::python::{BUILD_REQUIREMENTS, Venv};
use crate::shell::{Failure, Outcome, cargo, show, step};
use crate::wheel;

pub(crate) const HELP: &str = "\
cargo xtask demo [kv | train] [--offline] [--no-torch]

Embeds real sentences with a real model, stock PyTorch against Rapt, and prints the stats.

Makes .venv, installs what demo/requirements*.txt pins, builds and installs the wheel, runs demo/demo.py. Then the same model is
exported, and examples/rust/sentences runs it on the same sentences in a process without Python.
  kv           another run, of some minutes: demo/kv.py trains a small language model and lets it write 4096 tokens from a rapt.KVCache in
               bf16, int8, fp8, int4 and nvfp4; error, memory and speed of each as a table and a plot, demo/kv.svg of the target folder
  train        another run, of some minutes: demo/train.py trains that model from three seeds, by stock PyTorch and with Rapt's attention; losses,
               steps a second and memory as a table, the curves as a plot, demo/train.svg of the target folder
  --offline    reuse the .venv that is there; nothing is fetched
  --no-torch   show the numpy interface alone; torch is not installed
Ends with the demo's exit code: non-zero if Rapt is less exact than stock or did not serve every call.";

const NUMPY: &str = "demo/requirements-numpy.txt";
const TORCH: &str = "demo/requirements-torch.txt";

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Demo {
    /// Sentences on numpy's interface alone.
    Numpy,
    /// A sentence model, by PyTorch and by Rust alone.
    Sentences,
    /// A language model on caches of several formats.
    KvCache,
    /// The training of that model.
    Train,
}

impl Demo {
    /// Which one a command line asks for, and whether nothing may be fetched for it.
    fn asked(mut args: Args) -> Result<(Demo, bool), Failure> {
        let (offline, no_torch) = (args.flag("--offline"), args.flag("--no-torch"));
        match (args.words(), no_torch) {
            (words, true) if words.is_empty() => Ok((Demo::Numpy, offline)),
            (words, false) if words.is_empty() => Ok((Demo::Sentences, offline)),
            (words, false) if words == ["kv"] => Ok((Demo::KvCache, offline)),
            (words, false) if words == ["train"] => Ok((Demo::Train, offline)),
            (words, true) if words == ["kv"] || words == ["train"] => {
                Err(Failure::Usage(format!("`{}` needs torch\n\n{HELP}", words[0])))
            }
            (words, _) => Err(Failure::Usage(format!("unexpected `{}`\n\n{HELP}", words.join(" ")))),
        }
    }

    /// What pins the packages that it needs.
    fn requirements(self) -> &'static [&'static str] {
        if self == Demo::Numpy { &[BUILD_REQUIREMENTS, NUMPY] } else { &[BUILD_REQUIREMENTS, NUMPY, TORCH] }
    }
}

pub(crate) fn run(args: Args) -> Outcome {
    let (demo, offline) = Demo::asked(args)?;
    let target = Workspace::load()?.target;
    let venv = if offline { Venv::existing(".venv")? } else { Venv::at(".venv")? };
    if offline {
        venv.assume(demo.requirements())?;
    } else {
        venv.require(demo.requirements(), None)?;
    }
    let built = wheel::build(&venv, &target, Kernels::Core, offline)?;
    venv.install(&built)?;
    match demo {
        Demo::Numpy => script(&venv, "demo/demo.py", ["--no-torch"]),
        Demo::Sentences => {
            script::<&str, 0>(&venv, "demo/demo.py", [])?;
            by_rust_alone(&venv, &target.join("demo"))
        }
        Demo::KvCache => script(&venv, "demo/kv.py", [OsStr::new("--svg"), target.join("demo/kv.svg").as_os_str()]),
        Demo::Train => script(&venv, "demo/train.py", [OsStr::new("--svg"), target.join("demo/train.svg").as_os_str()]),
    }
}

/// Runs a script of the folder demo.
fn script<S: AsRef<OsStr>, const N: usize>(venv: &Venv, file: &str, args: [S; N]) -> Outcome {
    step(&format!("run {file}"), || show(venv.python([]).arg(root().join(file)).args(args)))
}

/// Exports the model, and lets Rust alone embed the sentences: it fails unless they are as near to the truth as PyTorch's.
fn by_rust_alone(venv: &Venv, folder: &Path) -> Outcome {
    step("export the model", || {
        let mut export = venv.python([]);
        show(export.arg(root().join("demo/export_sentences.py")).arg(folder))
    })?;
    step("the same sentences by Rust alone", || {
        let mut run = cargo(["run", "--quiet", "--release", "--package", "rapt-sentences", "--"]);
        run.args(["model.pt2", "tokenizer.json", "sentences.txt", "reference.f64"].map(|file| folder.join(file)));
        show(run.current_dir(root()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(line: &str) -> Result<(Demo, bool), Failure> {
        Demo::asked(Args::new(line.split_whitespace().map(str::to_owned).collect()))
    }

    #[test]
    fn the_command_line_says_which_demo_runs() {
        assert_eq!(asked("").unwrap(), (Demo::Sentences, false));
        assert_eq!(asked("--offline").unwrap(), (Demo::Sentences, true));
        assert_eq!(asked("--no-torch").unwrap(), (Demo::Numpy, false));
        assert_eq!(asked("kv --offline").unwrap(), (Demo::KvCache, true));
        assert_eq!(asked("train").unwrap(), (Demo::Train, false));
        assert!(asked("kv --no-torch").is_err() && asked("train --no-torch").is_err());
        assert!(asked("kv kv").is_err());
        assert!(asked("cache").is_err());
        assert!(!Demo::Numpy.requirements().contains(&TORCH) && Demo::KvCache.requirements().contains(&TORCH));
    }
}
