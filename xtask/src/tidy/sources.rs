//! The files of the working tree that rules look at.

use std::path::Path;

use crate::rust_text::without_comments;
use crate::shell::{Failure, read};

/// Ends of the names of text files that people write.
const KINDS: [&str; 12] = ["rs", "py", "pyi", "toml", "md", "sh", "cu", "cuh", "wgsl", "h", "c", "cpp"];

/// A file of the tree.
pub(super) struct Source {
    /// Below the root, with `/`.
    pub(super) path: String,
    pub(super) text: String,
    /// The text without comments, for Rust; other files as they are.
    pub(super) code: String,
}

impl Source {
    pub(super) fn new(path: &str, text: &str) -> Self {
        let code = if path.ends_with(".rs") { without_comments(text) } else { text.to_owned() };
        Source { path: path.to_owned(), text: text.to_owned(), code }
    }

    pub(super) fn is(&self, kind: &str) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, end)| end == kind)
    }
}

/// Every source file below `root`, whether git knows it yet or not: a rule should fire before the commit.
pub(super) fn collect(root: &Path) -> Result<Vec<Source>, Failure> {
    let mut files = Vec::new();
    walk(root, "", &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn walk(folder: &Path, below: &str, files: &mut Vec<Source>) -> Result<(), Failure> {
    let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        // A link leads to a file that is met where it lies.
        if path.is_symlink() {
            continue;
        }
        let place = format!("{below}{name}");
        if path.is_dir() {
            let is_hidden = name.starts_with('.') && ![".ci", ".cargo", ".github"].contains(&name.as_str());
            if !is_hidden && !["target", "__pycache__", "wheels"].contains(&name.as_str()) {
                walk(&path, &format!("{place}/"), files)?;
            }
        } else if KINDS.iter().any(|kind| name.ends_with(&format!(".{kind}"))) || place == ".ci/run" {
            files.push(Source::new(&place, &read(&path)?));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::root;

    #[test]
    fn the_tree_is_seen_and_build_output_is_not() {
        let files = collect(&root()).unwrap();
        let has = |path: &str| files.iter().any(|file| file.path == path);
        assert!(has("xtask/src/tidy/sources.rs") && has("Cargo.toml") && has(".ci/run"));
        assert!(!files.iter().any(|file| file.path.starts_with("target/") || file.path.starts_with(".venv")));
    }
}
