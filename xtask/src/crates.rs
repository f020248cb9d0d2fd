//! The crates that go to a registry, as packages: what `cargo publish` would upload, in the order in which they need each other.

use crate::args::Args;
use crate::metadata::{Workspace, root};
use crate::shell::{Outcome, cargo, show, step};

pub(crate) const HELP: &str = "\
cargo xtask crates [--verify]

Packages every crate that is published, into target/package: what each needs must have a version that goes with it.

  --verify   also compiles each from its package: as long as the workspace takes";

pub(crate) fn run(mut args: Args) -> Outcome {
    let is_verified = args.flag("--verify");
    args.finish(HELP)?;
    step("package the crates", || {
        let workspace = Workspace::load()?;
        let mut package = cargo(["package", "--quiet", "--allow-dirty", "--workspace"]);
        if !is_verified {
            package.arg("--no-verify");
        }
        let others = workspace.members().filter(|package| !package.is_published);
        package.args(others.flat_map(|package| ["--exclude", &package.name]));
        show(package.current_dir(root()))
    })
}
