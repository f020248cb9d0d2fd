//! Every `RAPT_*` variable of the code stands in one table, and the table names no other.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::sources::Source;

const TABLE: &str = "docs/reference/environment.md";
const PREFIX: &str = "RAPT_";

pub(super) fn check(files: &[Source]) -> Vec<Finding> {
    let mut read: BTreeMap<String, String> = BTreeMap::new();
    // xtask's own tests name variables that do not exist.
    for file in files.iter().filter(|file| !file.path.starts_with("xtask/src/tidy/")) {
        if ["rs", "py", "pyi"].iter().any(|kind| file.is(kind)) {
            let is_test = file.path.contains("/tests/");
            for (at, line) in file.code.lines().enumerate() {
                // Tests also set names that must not exist, to see them refused: there only reading counts.
                if is_test && !["env::var", "environ.get", "getenv"].iter().any(|reader| line.contains(reader)) {
                    continue;
                }
                for name in quoted(line) {
                    read.entry(name).or_insert_with(|| format!("{}:{}", file.path, at + 1));
                }
            }
        }
    }
    let table = files.iter().find(|file| file.path == TABLE).map_or("", |file| &file.text);
    let listed: BTreeSet<String> = table.lines().filter_map(row).collect();
    let unlisted = read.iter().filter(|(name, _)| !listed.contains(*name));
    let mut findings: Vec<Finding> =
        unlisted.map(|(name, place)| Finding::new(place, format!("{name} stands in no row of {TABLE}"))).collect();
    let unread = listed.iter().filter(|name| !read.contains_key(*name));
    findings.extend(unread.map(|name| Finding::new(TABLE, format!("{name} is read nowhere"))));
    findings
}

/// Names that are the whole of a string literal: `"RAPT_ISA"`, not a sentence that speaks of it.
fn quoted(line: &str) -> Vec<String> {
    let starts = line.match_indices(PREFIX).filter(|(at, _)| *at > 0);
    let names = starts.filter_map(|(at, _)| {
        let quote = line.as_bytes()[at - 1];
        let name: String = name_at(&line[at..]);
        let is_whole = [b'"', b'\''].contains(&quote) && line.as_bytes().get(at + name.len()) == Some(&quote);
        (is_whole && name.len() > PREFIX.len()).then_some(name)
    });
    names.collect()
}

/// The variable of a row: `| `RAPT_ISA` | … |`.
fn row(line: &str) -> Option<String> {
    let cell = line.trim_start().strip_prefix('|')?.trim_start().trim_start_matches('`');
    cell.starts_with(PREFIX).then(|| name_at(cell))
}

fn name_at(text: &str) -> String {
    text.chars().take_while(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || *c == '_').collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_with(code: &str, table: &str) -> Vec<String> {
        let files = [Source::new("crates/rapt/src/lib.rs", code), Source::new(TABLE, table)];
        check(&files).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn a_variable_without_a_row_fires() {
        assert_eq!(check_with("env::var(\"RAPT_ISA\")", "").len(), 1);
        assert_eq!(check(&[Source::new("a.py", "os.environ['RAPT_ISA']")]).len(), 1, "without a table at all");
        assert!(check_with("env::var(\"RAPT_ISA\")", "| `RAPT_ISA` | the instruction set |").is_empty());
    }

    #[test]
    fn tests_count_where_they_read() {
        let whats = |code: &str| check(&[Source::new("crates/rapt-cli/tests/cli.rs", code)]).len();
        assert_eq!(whats("command.env(\"RAPT_MISSPELT\", \"1\")"), 0);
        assert_eq!(whats("std::env::var(\"RAPT_ISA\")"), 1);
    }

    #[test]
    fn a_row_without_a_reader_fires() {
        assert_eq!(check_with("", "| `RAPT_GONE` | no more |").len(), 1);
    }

    #[test]
    fn sentences_and_prefixes_are_not_variables() {
        assert!(check_with("\"set RAPT_ISA=avx2\"; starts_with(\"RAPT_\"); // \"RAPT_ISA\"", "RAPT_ISA").is_empty());
    }
}
