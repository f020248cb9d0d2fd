//! Machine code for GPUs inside the wheel: NVRTC from PyPI, and the kernels that it compiles. No GPU is needed.
//!
//! NVRTC lies in `target/nvrtc`, apart from every environment: torch pins one of its own, and wheels must not differ by it.
//! What was compiled once is kept in `target/tmp/cubins` by its hash, and crates/rapt-cuda's compile test reads it there.
//! Where NVRTC cannot be had this says so, and the wheel is built without: kernels are then compiled where they are needed.

use std::path::{Path, PathBuf};

use crate::built;
use crate::metadata::root;
use crate::python::{SHIPPED, Venv};
use crate::shell::{Failure, command, read, say, show, step, write};

/// The pinned compiler.
const REQUIREMENT: &str = "xtask/requirements/nvrtc.txt";

/// How many kernels a wheel ships: rapt-cuda's `Assortment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernels {
    /// What each change is compiled for.
    Core,
    /// What a wheel for others ships.
    Whole,
}

impl Kernels {
    const fn word(self) -> &'static str {
        match self {
            Kernels::Core => "core",
            Kernels::Whole => "whole",
        }
    }

    const fn archs(self) -> &'static [&'static str] {
        match self {
            Kernels::Core => &["sm_80", "sm_90a", "sm_120"],
            Kernels::Whole => &["sm_80", "sm_90a", "sm_100", "sm_120"],
        }
    }
}

/// The folder of the pinned NVRTC, fetched by the environment's pip if it is not there; `None`, with a notice, where it cannot be had.
pub(crate) fn nvrtc(venv: &Venv, target: &Path, offline: bool) -> Result<Option<PathBuf>, Failure> {
    let folder = target.join("nvrtc");
    let library = folder.join("nvidia/cu13/lib");
    let (stamp, wanted) = (folder.join("installed.txt"), read(&root().join(REQUIREMENT))?);
    if library.is_dir() && std::fs::read_to_string(&stamp).is_ok_and(|was| was == wanted) {
        return Ok(Some(library));
    }
    let why = if !cfg!(target_os = "linux") {
        "NVIDIA publishes it for Linux alone"
    } else if offline {
        "--offline fetches nothing"
    } else {
        let fetched = step(&format!("pip install {REQUIREMENT}"), || {
            if folder.exists() {
                std::fs::remove_dir_all(&folder).map_err(Failure::file(&folder))?;
            }
            // No bytecode: the cache of a Python that may be gone tomorrow.
            let mut pip = venv.pip();
            pip.args(["--no-deps", "--no-compile", "--retries", "1", "--target"]).arg(&folder);
            show(pip.arg("-r").arg(root().join(REQUIREMENT)))
        });
        match fetched {
            Ok(()) if library.is_dir() => {
                write(&stamp, &wanted)?;
                return Ok(Some(library));
            }
            _ => "pip could not fetch it",
        }
    };
    say(format_args!(
        "── NOTE: no NVRTC ({why}): the wheel ships no GPU kernels; each is compiled when it is first needed"
    ));
    Ok(None)
}

/// Builds the program that compiles kernels, and gives its file.
pub(crate) fn compiler() -> Result<PathBuf, Failure> {
    Ok(built::debug(&[])?.join("examples").join(built::program("ship")))
}

/// Compiles the kernels that the wheel ships into [`SHIPPED`], with the program that `compiler` gives; without
/// NVRTC there are none in it. Gives the folder of NVRTC.
pub(crate) fn ship(
    venv: &Venv,
    target: &Path,
    kernels: Kernels,
    offline: bool,
    compiler: impl FnOnce() -> Result<PathBuf, Failure>,
) -> Result<Option<PathBuf>, Failure> {
    let shipped = target.join(SHIPPED);
    if shipped.exists() {
        std::fs::remove_dir_all(&shipped).map_err(Failure::file(&shipped))?;
    }
    std::fs::create_dir_all(&shipped).map_err(Failure::file(&shipped))?;
    let Some(library) = nvrtc(venv, target, offline)? else { return Ok(None) };
    step("compile the GPU kernels of the wheel", || {
        let mut ship = command(compiler()?, [kernels.word()]);
        show(ship.arg(&shipped).arg(target.join("tmp/cubins")).env("RAPT_NVRTC", &library).current_dir(root()))
    })?;
    Ok(Some(library))
}

/// What is wrong with the names in a wheel: all or none of the architectures, and all where NVRTC is there.
pub(crate) fn wrong(names: &[String], target: &Path, kernels: Kernels) -> Vec<String> {
    let shipped = names.iter().filter(|name| name.ends_with(".cubins")).count();
    if shipped == 0 && !target.join("nvrtc").exists() {
        return Vec::new();
    }
    let is_missing = |arch: &&&str| !names.iter().any(|name| name.ends_with(&format!("rapt/cubins/{arch}.cubins")));
    kernels.archs().iter().filter(is_missing).map(|arch| format!("holds no GPU kernels for {arch}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_compiler_that_may_be_fetched_there_is_a_notice_and_no_failure() {
        let venv = Venv::named("no-such-environment").unwrap();
        assert!(matches!(nvrtc(&venv, Path::new("no-such-folder"), true), Ok(None)));
    }

    #[test]
    fn an_architecture_that_is_missing_is_named() {
        let target = Path::new("no-such-folder");
        assert!(wrong(&[], target, Kernels::Whole).is_empty());
        let names = ["rapt/cubins/sm_80.cubins".to_owned(), "rapt/cubins/sm_90a.cubins".to_owned()];
        let found = wrong(&names, target, Kernels::Whole);
        assert_eq!(found, ["holds no GPU kernels for sm_100", "holds no GPU kernels for sm_120"]);
        assert_eq!(wrong(&names, target, Kernels::Core), ["holds no GPU kernels for sm_120"]);
    }
}
