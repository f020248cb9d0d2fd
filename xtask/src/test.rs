//! Everything that must hold before a change is taken.

use std::process::Command;

use crate::args::Args;
use crate::cubins::{self, Kernels};
use crate::metadata::{Workspace, root};
use crate::python::{BINDING, BUILD_REQUIREMENTS, Venv};
use crate::shell::{Failure, Outcome, cargo, show, step};
use crate::{c, tidy, wheel};

pub(crate) const HELP: &str = "\
cargo xtask test [--torch VERSION]

Formatting, lints, tidy, the Rust tests, C programs against the C library, the wheel's check, and pytest from the
installed wheel.

  --torch VERSION   only pytest, against that torch (such as 2.6 or 2.6.0), in an environment of its own
                    (.venv-torch-VERSION)";

const NUMPY: &str = "demo/requirements-numpy.txt";
const TORCH: &str = "demo/requirements-torch.txt";
const TEST: &str = "xtask/requirements/test.txt";
/// What the suite needs beside an older torch: without pins, because the newest need not work with it.
const OLDER: &str = "xtask/requirements/test-older-torch.txt";

/// Processes of pytest: each holds a torch of its own.
const MOST_WORKERS: usize = 4;

pub(crate) fn run(mut args: Args) -> Outcome {
    let torch = args.value("--torch")?;
    args.finish(HELP)?;
    if let Some(torch) = torch {
        return pytest_with(&torch);
    }
    let step_of = |what: &str, mut command: Command| step(what, || show(command.current_dir(root())));
    step_of("cargo fmt --check", cargo(["fmt", "--all", "--check"]))?;
    step_of("cargo clippy", cargo(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    step("tidy", tidy::check)?;
    let (venv, target) = (Venv::at(".venv")?, Workspace::load()?.target);
    let mut rust = cargo(["test", "--workspace"]);
    // The wheel's kernels first: the compile test of rapt-cuda then finds most of its work done.
    if let Some(library) = cubins::ship(&venv, &target, Kernels::Core, false)? {
        rust.env("RAPT_NVRTC", library);
    }
    step_of("cargo test", rust)?;
    c::check()?;
    venv.require(&[BUILD_REQUIREMENTS, NUMPY, TORCH, TEST], None)?;
    pytest(&venv)
}

fn pytest_with(torch: &str) -> Outcome {
    let venv = Venv::at(&format!(".venv-torch-{torch}"))?;
    venv.require(&[BUILD_REQUIREMENTS, OLDER], Some(&requirement(torch)?))?;
    pytest(&venv)
}

/// `2.6` means any 2.6.x; `2.6.1` means that one.
fn requirement(torch: &str) -> Result<String, Failure> {
    let parts: Vec<&str> = torch.split('.').collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    match parts.as_slice() {
        [_, _] if parts.iter().all(is_number) => Ok(format!("torch=={torch}.*")),
        [_, _, _] if parts.iter().all(is_number) => Ok(format!("torch=={torch}")),
        _ => Err(Failure::Usage(format!("--torch takes a version such as 2.6 or 2.6.0, not `{torch}`"))),
    }
}

fn pytest(venv: &Venv) -> Outcome {
    let built = venv.build_wheel(&Workspace::load()?.target, Kernels::Core, false)?;
    wheel::check(venv, &built, Kernels::Core)?;
    venv.install(&built)?;
    step("pytest", || {
        // In the tests' own folder, so that no source tree shadows the installed wheel. A file's tests stay in one process:
        // some share what costs.
        let mut pytest = venv.python(["-m", "pytest", "-ra", "-p", "no:cacheprovider", "--dist", "loadfile"]);
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_WORKERS);
        pytest.args(["-n", &workers.to_string(), "."]);
        show(pytest.current_dir(root().join(BINDING).join("tests")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torch_version_becomes_a_requirement() {
        assert_eq!(requirement("2.6").unwrap(), "torch==2.6.*");
        assert_eq!(requirement("2.6.1").unwrap(), "torch==2.6.1");
        for wrong in ["", "2", "2.x", "2.6.", "../2.6", "2.6 numpy"] {
            assert!(requirement(wrong).is_err(), "{wrong}");
        }
    }
}
