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
    /// The text with its comments blanked; prose is as it is.
    pub(super) code: String,
}

impl Source {
    pub(super) fn new(path: &str, text: &str) -> Self {
        let end = path.rsplit_once('.').map_or("", |(_, end)| end);
        let code = match end {
            // What begins a comment and a string is the same in C.
            "rs" | "cu" | "cuh" | "h" | "c" | "cpp" => without_comments(text),
            "py" | "pyi" | "toml" | "sh" => without_hash_comments(text),
            _ => text.to_owned(),
        };
        Source { path: path.to_owned(), text: text.to_owned(), code }
    }

    /// The comments alone, with the lines that they stand in; prose is comment throughout.
    pub(super) fn comments(&self) -> String {
        if self.is("md") {
            return self.text.clone();
        }
        let bytes = self.text.bytes().zip(self.code.bytes());
        let kept = bytes.map(|(text, code)| if text == code && text != b'\n' { b' ' } else { text });
        String::from_utf8_lossy(&kept.collect::<Vec<u8>>()).into_owned()
    }

    pub(super) fn is(&self, kind: &str) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, end)| end == kind)
    }
}

/// Blanks what follows a `#` outside of quotes. Deliberately absent: strings of several lines.
fn without_hash_comments(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let mut starts = line.match_indices('#').map(|(at, _)| at);
        let is_outside = |at: &usize| ['"', '\''].iter().all(|quote| line[..*at].matches(*quote).count() % 2 == 0);
        let start = starts.find(is_outside).unwrap_or(line.len());
        code.push_str(&line[..start]);
        code.extend(line[start..].bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
    }
    code
}

/// Every source file below `root`, and the paths of all files, whether git knows them yet or not: a rule should fire before the
/// commit.
pub(super) fn collect(root: &Path) -> Result<(Vec<Source>, Vec<String>), Failure> {
    let (mut files, mut paths) = (Vec::new(), Vec::new());
    walk(root, "", &mut files, &mut paths)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok((files, paths))
}

fn walk(folder: &Path, below: &str, files: &mut Vec<Source>, paths: &mut Vec<String>) -> Result<(), Failure> {
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
                walk(&path, &format!("{place}/"), files, paths)?;
            }
        } else {
            if KINDS.iter().any(|kind| name.ends_with(&format!(".{kind}"))) || place == ".ci/run" {
                files.push(Source::new(&place, &read(&path)?));
            }
            paths.push(place);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::root;

    #[test]
    fn comments_and_code_are_told_apart() {
        let rust = Source::new("a.rs", "let a = \"// b\"; // ünd c\n");
        assert_eq!((rust.code.trim_end(), rust.comments().trim()), ("let a = \"// b\";", "// ünd c"));
        let python = Source::new("a.py", "a = '#b'  # c\nd = 1\n");
        assert_eq!(python.code.lines().map(str::trim_end).collect::<Vec<_>>(), ["a = '#b'", "d = 1"]);
        assert_eq!(python.comments().lines().map(str::trim).collect::<Vec<_>>(), ["# c", ""]);
        assert_eq!(Source::new("a.md", "all of it").comments(), "all of it");
    }

    #[test]
    fn the_tree_is_seen_and_build_output_is_not() {
        let (files, paths) = collect(&root()).unwrap();
        let has = |path: &str| files.iter().any(|file| file.path == path);
        assert!(has("xtask/src/tidy/sources.rs") && has("Cargo.toml") && has(".ci/run"));
        assert!(paths.iter().any(|path| path == "LICENSE-MIT"));
        assert!(!files.iter().any(|file| file.path.starts_with("target/") || file.path.starts_with(".venv")));
    }
}
