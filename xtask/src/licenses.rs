//! The licences of what is linked into the wheel, with their texts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::args::Args;
use crate::metadata::{PLATFORM, Package, Workspace, root};
use crate::shell::{Failure, Outcome, read, write};

pub(crate) const HELP: &str = "\
cargo xtask licenses

Writes THIRD-PARTY-LICENSES.md: name, version, licence, source and licence texts of every crate in the wheel.";

/// The file that wheel and crates carry.
pub(crate) const FILE: &str = "THIRD-PARTY-LICENSES.md";

/// The wheel whose list is checked in.
const WHEEL: &str = "rapt-attention";

pub(crate) fn run(args: Args) -> Outcome {
    args.finish(HELP)?;
    let path = root().join(FILE);
    write(&path, &generate(&Workspace::load()?)?)?;
    println!("{}", path.display());
    Ok(())
}

/// The file's text.
pub(crate) fn generate(workspace: &Workspace) -> Result<String, Failure> {
    of_wheel(workspace, "rapt-python", WHEEL)
}

/// The text for the wheel of this name, which is made of this package. A workspace without it is an error, not an empty list.
pub(crate) fn of_wheel(workspace: &Workspace, package: &str, wheel: &str) -> Result<String, Failure> {
    let Some(packages) = workspace.linked_into(package) else {
        return Err(Failure::Check(format!("the workspace has no member {package}: nothing to list licences of")));
    };
    let mut texts = Texts::default();
    for package in &packages {
        for path in licence_files(&package.folder)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            texts.add(&read(&path)?, format!("{} {} ({name})", package.name, package.version));
        }
    }
    Ok(render(wheel, &packages, &texts))
}

/// Distinct texts in the order of their first appearance, each with its users.
#[derive(Default)]
struct Texts {
    /// A text without its spacing, and where it stands in `list`: crates wrap the same licence differently.
    known: BTreeMap<String, usize>,
    list: Vec<(String, Vec<String>)>,
}

impl Texts {
    fn add(&mut self, text: &str, user: String) {
        let key = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let at = *self.known.entry(key).or_insert(self.list.len());
        if at == self.list.len() {
            let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
            self.list.push((lines.join("\n").trim_matches('\n').to_owned(), Vec::new()));
        }
        self.list[at].1.push(user);
    }
}

fn render(wheel: &str, packages: &[&Package], texts: &Texts) -> String {
    let written = match wheel {
        WHEEL => "Written by `cargo xtask licenses`; `cargo xtask tidy` checks that it is current.",
        _ => "Written when the wheel was built.",
    };
    let mut out = format!(
        "# Third-party licences\n\n\
         What the wheel `{wheel}` links in besides Rapt itself. {written}\nListed for {PLATFORM}.\n\n\
         | crate | version | licence | source |\n|---|---|---|---|\n"
    );
    for package in packages {
        let license = package.license.as_deref().unwrap_or("see its text");
        let source = package.repository.as_deref().unwrap_or("https://crates.io");
        out.push_str(&format!("| {} | {} | {license} | {source} |\n", package.name, package.version));
    }
    out.push_str(
        "| the Rust standard library | of the toolchain | MIT OR Apache-2.0 | https://github.com/rust-lang/rust |\n\n\
         The standard library's own parts are listed in `COPYRIGHT-library.html` of every Rust toolchain.\n",
    );
    for (text, users) in &texts.list {
        // Indented, so that no text can end the block that holds it.
        out.push_str(&format!("\n## {}\n\n", users.join(", ")));
        for line in text.lines() {
            out.push_str(format!("    {line}").trim_end());
            out.push('\n');
        }
    }
    out
}

/// Files of a crate's root that hold a licence or what one asks to be passed on.
fn licence_files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file() && holds_licence(path)).collect();
    files.sort();
    Ok(files)
}

fn holds_licence(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
    let is_text = path.extension().is_none_or(|end| ["md", "txt"].iter().any(|text| end.eq_ignore_ascii_case(text)))
        || name.starts_with("LICENSE-")
        || name.starts_with("LICENSE.");
    is_text && ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"].iter().any(|s| name.starts_with(s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_files_are_known_by_name() {
        for name in ["LICENSE", "LICENSE-MIT", "LICENSE-APACHE", "license.txt", "COPYRIGHT", "NOTICE", "UNLICENSE"] {
            assert!(holds_licence(Path::new(name)), "{name}");
        }
        for name in ["README.md", "Cargo.toml", "copying.rs", "src"] {
            assert!(!holds_licence(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn one_text_stands_once_however_it_is_wrapped() {
        let mut texts = Texts::default();
        texts.add("Permission is\nhereby granted", "a 1".to_owned());
        texts.add("Permission is hereby\n  granted\n", "b 1".to_owned());
        texts.add("Another", "c 1".to_owned());
        assert_eq!(texts.list.len(), 2);
        assert_eq!(texts.list[0].1, ["a 1", "b 1"]);
        let text = render("x", &[], &texts);
        assert!(text.contains("## a 1, b 1\n\n    Permission is\n    hereby granted\n"), "{text}");
    }
}
