//! What xtask runs of the workspace itself, built as `cargo test --workspace` builds it.
//!
//! Cargo resolves features for what it is asked for: by `cargo run --package rapt-cli` rapt-cpu meets another thiserror than by
//! the tests, and is compiled once more, which takes minutes. Asked for beside an example, which may use dev-dependencies, the
//! workspace is resolved as it is for its tests, and nothing is compiled twice.

use std::path::PathBuf;

use crate::metadata::{Workspace, root};
use crate::shell::{Failure, cargo, show};

/// Builds these targets of the workspace (such as `--bin rapt` or `--lib`), and gives the folder in which they lie.
pub(crate) fn debug(targets: &[&str]) -> Result<PathBuf, Failure> {
    show(cargo(["build", "--quiet", "--workspace", "--example", "ship"]).args(targets).current_dir(root()))?;
    Ok(Workspace::load()?.target.join("debug"))
}

/// The file of a program.
pub(crate) fn program(name: &str) -> String {
    format!("{name}{}", std::env::consts::EXE_SUFFIX)
}
