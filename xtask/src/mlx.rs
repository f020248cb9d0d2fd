//! The headers of MLX, out of its wheel: kernels that run on Apple's GPUs, for the host of rapt-shader's tests. Nothing of the wheel is run.
//!
//! Where it cannot be had this says so, and the test that needs it is skipped.

use std::path::{Path, PathBuf};

use crate::metadata::root;
use crate::python::Venv;
use crate::shell::{Failure, read, say, show, step, write};

/// The pinned wheel.
const REQUIREMENT: &str = "xtask/requirements/mlx.txt";
/// The one that has the headers and is fetched wherever this runs.
const PLATFORM: [&str; 2] = ["--platform", "manylinux_2_35_x86_64"];

/// The folder of the headers, fetched by the environment's pip if it is not there; `None`, with a notice, where it cannot be had.
pub(crate) fn headers(venv: &Venv, target: &Path) -> Result<Option<PathBuf>, Failure> {
    let folder = target.join("mlx");
    let headers = folder.join("mlx/include");
    let (stamp, wanted) = (folder.join("installed.txt"), read(&root().join(REQUIREMENT))?);
    if headers.is_dir() && std::fs::read_to_string(&stamp).is_ok_and(|was| was == wanted) {
        return Ok(Some(headers));
    }
    let fetched = step(&format!("pip install {REQUIREMENT}"), || {
        if folder.exists() {
            std::fs::remove_dir_all(&folder).map_err(Failure::file(&folder))?;
        }
        let mut pip = venv.pip();
        pip.args(["--no-deps", "--no-compile", "--retries", "1", "--only-binary", ":all:"]).args(PLATFORM);
        show(pip.arg("--target").arg(&folder).arg("-r").arg(root().join(REQUIREMENT)))
    });
    if fetched.is_ok() && headers.is_dir() {
        write(&stamp, &wanted)?;
        return Ok(Some(headers));
    }
    say(format_args!(
        "── NOTE: pip could not fetch the headers of MLX: its kernels are not run beside those for Metal"
    ));
    Ok(None)
}
