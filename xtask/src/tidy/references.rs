//! What a comment or a page names is there: files of the repository, and functions in backticks.
//!
//! Deliberately absent: links between pages, which the build of the site checks, and names with one part (`select`), which are words
//! too.

use std::collections::{BTreeSet, HashSet};

use super::Finding;
use super::sources::Source;

/// Endings of files that a text may name.
const ENDINGS: [&str; 11] = ["md", "rs", "py", "pyi", "cu", "cuh", "toml", "tsv", "yml", "sh", "supp"];

/// Where names that are not there are told as such: what was, and what this rule is shown with.
fn is_exempt(path: &str) -> bool {
    ["CHANGELOG.md", "xtask/src/tidy/", "benches/record/", crate::licenses::FILE].iter().any(|at| path.starts_with(at))
}

/// Pages whose backticks name what Rapt itself has. Others compare Rapt with other libraries.
fn names_ours(path: &str) -> bool {
    !path.ends_with(".md") || path == "ARCHITECTURE.md" || path.starts_with("docs/internals/")
}

/// `paths` are those of all files, of those too that no rule reads.
pub(super) fn check(files: &[Source], paths: &[String]) -> Vec<Finding> {
    let ends = paths.iter().flat_map(|path| ends_of(path)).collect();
    let mut words: HashSet<&str> = HashSet::new();
    for file in files.iter().filter(|file| !file.is("md")) {
        words.extend(file.code.split(|c: char| !(c.is_alphanumeric() || c == '_')));
    }
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| !is_exempt(&file.path)) {
        for (at, line) in file.comments().lines().enumerate().filter(|(_, line)| !line.contains("```")) {
            let absent = named_files(line).into_iter().filter(|name| !is_there(name, &ends));
            findings.extend(absent.map(|name| Finding::at(&file.path, at + 1, format!("there is no file `{name}`"))));
            if names_ours(&file.path) {
                let unknown = named_functions(line).filter(|name| !words.contains(name));
                findings.extend(
                    unknown.map(|name| Finding::at(&file.path, at + 1, format!("`{name}` is nowhere in code"))),
                );
            }
        }
    }
    findings
}

/// `a/b/c.rs` is named by `c.rs`, `b/c.rs` and `a/b/c.rs`.
fn ends_of(path: &str) -> impl Iterator<Item = &str> {
    let starts = std::iter::once(0).chain(path.match_indices('/').map(|(at, _)| at + 1));
    starts.map(|start| &path[start..])
}

/// Whether the end of some file's path is `name`, relative parts aside.
fn is_there(name: &str, ends: &BTreeSet<&str>) -> bool {
    ends.contains(name.trim_start_matches("./").trim_start_matches("../"))
}

/// Names of files in a line: letters, digits and `._-/`, with an ending of a file, not inside a longer path or address.
fn named_files(line: &str) -> Vec<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = line[at..].find(is_part).map(|start| at + start) {
        let end = line[start..].find(|c| !is_part(c)).map_or(line.len(), |length| start + length);
        at = end;
        let before = line[..start].chars().next_back().unwrap_or(' ');
        let after = line[end..].chars().next().unwrap_or(' ');
        let name = line[start..end].trim_end_matches('.');
        // A glob, a variable, a placeholder, an address, an option's value, an absolute path: not a name of ours.
        if "*<{$~:\\@=#%".contains(before) || "*{(<:".contains(after) || name.starts_with('/') || name.contains("//") {
            continue;
        }
        let Some((stem, ending)) = name.rsplit_once('.') else { continue };
        if ENDINGS.contains(&ending) && stem.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
            found.push(name);
        }
    }
    found
}

/// Names of two parts and more in backticks, with or without a path before and parentheses behind: `` `module::rows_of()` ``.
fn named_functions(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.filter_map(|text| {
        let name = text.trim_end_matches("()").rsplit("::").next()?;
        let is_name = name.contains('_')
            && name.starts_with(|c: char| c.is_ascii_lowercase())
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            && !name.ends_with('_')
            && !name.contains("__");
        is_name.then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(path: &str, text: &str) -> Vec<String> {
        let there = Source::new("crates/rapt-core/src/view.rs", "pub fn rows_of() {}");
        let files = [there, Source::new(path, text)];
        let paths: Vec<String> = files.iter().map(|file| file.path.clone()).collect();
        check(&files, &paths).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn a_file_that_is_not_there_fires() {
        for (path, text) in [
            ("crates/rapt/src/lib.rs", "// as design.md says"),
            ("crates/rapt/src/lib.rs", "/// See `docs/gone.md`."),
            ("docs/index.md", "the file src/gone.rs"),
            ("benches/shapes.toml", "# of anchors.md"),
            ("bindings/python/tests/test_a.py", "x = 1  # as in gone.py"),
            ("crates/rapt-cuda/kernels/a.cu", "int a; // gone.cuh"),
        ] {
            assert_eq!(whats(path, text).len(), 1, "{text}");
        }
    }

    #[test]
    fn files_that_are_there_and_what_is_no_file_pass() {
        for text in [
            "// view.rs, src/view.rs and crates/rapt-core/src/view.rs",
            "// https://x.org/a/b.md, *.rs, FOLDER/<name>.py, $OUT/a.py, {a}.md, e.g. 1.5",
            "let a = \"gone.md\";",
        ] {
            assert!(whats("crates/rapt/src/lib.rs", text).is_empty(), "{text}");
        }
    }

    #[test]
    fn a_function_that_is_nowhere_fires() {
        assert_eq!(whats("crates/rapt/src/lib.rs", "// as `mask_scores` does"), ["`mask_scores` is nowhere in code"]);
        assert_eq!(whats("ARCHITECTURE.md", "`view::no_such_name()`").len(), 1);
        for text in ["// `view::rows_of()`", "// `select`, `a + b_c`, `Some_Type`, `__init__`"] {
            assert!(whats("crates/rapt/src/lib.rs", text).is_empty(), "{text}");
        }
        assert!(whats("docs/reference/c.md", "| `dnnl_version` |").is_empty(), "other libraries");
    }
}
