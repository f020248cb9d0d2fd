//! The site: MkDocs' pages with rustdoc beside them, in `target/site`.
//!
//! ```text
//! docs/*.md, docstrings ──mkdocs --strict──► target/site          an unknown page, anchor or file is an error
//! the crates            ──cargo doc───────► target/site/rust      a warning of rustdoc is an error
//! target/web/package    ──copied───────────► target/site/web     where `cargo xtask web` has built it; else a page says that it is missing
//! target/site           ──check.py────────► every link leads somewhere, nothing comes from the network
//! target/site           ──screenshot.py───► pages render in Chromium, where there is one
//! ```
//! Blocks of code are run by the tests of their language; those of C by `cargo xtask c --check`, which takes them from here.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::args::Args;
use crate::built::program;
use crate::metadata::{Workspace, root};
use crate::python::Venv;
use crate::shell::{Failure, Outcome, capture, cargo, copy, read, say, show, step};

pub(crate) const HELP: &str = "\
cargo xtask docs [--check]

Builds the documentation: pages, Python reference and rustdoc, into target/site.

  --check   also renders pages in headless Chromium, where it is installed; a step of `cargo xtask test`

Broken links, unknown anchors, warnings of rustdoc and resources from the network are errors.";

const ENVIRONMENT: &str = ".venv-docs";
/// What an environment needs for it.
pub(crate) const REQUIREMENTS: &str = "xtask/requirements/docs.txt";
const SITE: &str = "site";

pub(crate) fn run(mut args: Args) -> Outcome {
    let is_check = args.flag("--check");
    args.finish(HELP)?;
    let venv = Venv::at(ENVIRONMENT)?;
    venv.require(&[REQUIREMENTS], None)?;
    if is_check { check(&venv, Metadata::Own) } else { build(&venv, Metadata::Own) }
}

/// Whose metadata of the workspace's crates rustdoc reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metadata {
    /// Cargo has rustc write it.
    Own,
    /// What [`LINT`] left: asked for as clippy asks, cargo finds all of it.
    Clippy,
}

/// The lints of the workspace, as arguments of cargo.
pub(crate) const LINT: [&str; 6] = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];

/// The same, as `cargo clippy` hands what follows `--` on to its driver.
const LINT_ARGS: &str = "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__";

/// Has cargo start the driver that `cargo clippy` starts, in rustc's place.
fn as_clippy(command: &mut Command) -> Outcome {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let sysroot = capture(Command::new(rustc).args(["--print", "sysroot"]).current_dir(root()))?;
    let driver = Path::new(sysroot.trim()).join("bin").join(program("clippy-driver"));
    // Another installation's lies elsewhere: then rustc writes the metadata.
    if driver.exists() {
        command.env("RUSTC_WORKSPACE_WRAPPER", driver).env("CLIPPY_ARGS", LINT_ARGS);
    }
    Ok(())
}

/// Builds the site, with an environment that has [`REQUIREMENTS`], and looks at it in a browser.
pub(crate) fn check(venv: &Venv, metadata: Metadata) -> Outcome {
    build(venv, metadata)?;
    step("render pages", || script(venv, "screenshot.py", &Workspace::load()?.target))
}

fn build(venv: &Venv, metadata: Metadata) -> Outcome {
    let target = Workspace::load()?.target;
    let site = target.join(SITE);
    step("cargo doc", || {
        let mut doc = cargo(["doc", "--workspace", "--no-deps", "--quiet"]);
        if metadata == Metadata::Clippy {
            as_clippy(&mut doc)?;
        }
        show(doc.env("RUSTDOCFLAGS", "-D warnings").current_dir(root()))
    })?;
    step("mkdocs build", || {
        let mut mkdocs = venv.python(["-m", "mkdocs", "build", "--strict", "--site-dir"]);
        // Not --quiet, under which warnings do not count. Without the variable the theme advertises its successor.
        mkdocs.env("NO_MKDOCS_2_WARNING", "1");
        show(mkdocs.arg(&site).current_dir(root()))
    })?;
    // After mkdocs, which empties its folder.
    step("copy rustdoc", || copy(&target.join("doc"), &site.join("rust")))?;
    let package = target.join("web/package");
    if package.is_dir() {
        step("copy the package for browsers", || copy(&package, &site.join("web")))?;
    }
    step("check links", || script(venv, "check.py", &target))?;
    say(site.join("index.html").display());
    Ok(())
}

/// Runs a script of xtask/docs on the site.
fn script(venv: &Venv, name: &str, target: &Path) -> Outcome {
    let mut python: Command = venv.python([]);
    show(python.arg(root().join("xtask/docs").join(name)).arg(target.join(SITE)))
}

/// Every block of C in the README and in docs, each a whole program, under its page and line.
pub(crate) fn c_programs() -> Result<Vec<(String, String)>, Failure> {
    let mut pages = vec![root().join("README.md")];
    collect(&root().join("docs"), &mut pages)?;
    let mut programs = Vec::new();
    for page in pages {
        let name = page.strip_prefix(root()).unwrap_or(&page).display().to_string();
        let text = read(&page)?;
        programs.extend(blocks(&text, "```c").into_iter().map(|(line, source)| (format!("{name}:{line}"), source)));
    }
    Ok(programs)
}

/// The Markdown files below `folder`, in the order of their names.
fn collect(folder: &Path, pages: &mut Vec<PathBuf>) -> Outcome {
    let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            collect(&path, pages)?;
        } else if path.extension().is_some_and(|end| end == "md") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Blocks whose opening line is `fence` alone, with that line's number. One that is not run has a title, and so another line.
fn blocks(text: &str, fence: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((at, line)) = lines.next() {
        if line == fence {
            let body = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```");
            found.push((at + 1, body.map(|line| format!("{line}\n")).collect()));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_those_of_one_fence() {
        let text = "a\n```c\nint x;\n```\n```c title=\"no\"\nint y;\n```\n```cpp\nint z;\n```\n";
        assert_eq!(blocks(text, "```c"), [(2, "int x;\n".to_owned())]);
    }

    #[test]
    fn the_pages_have_programs_of_c() {
        let programs = c_programs().unwrap();
        assert!(programs.len() >= 2 && programs.iter().all(|(_, source)| source.contains("int main(")), "{programs:?}");
    }
}
