//! Each invariant of ARCHITECTURE.md names what checks it, and that is there: `` `path/of/file.rs::test` `` or `` `tidy: rule` ``.
//! And no test stands where nothing runs it: in the sources of a library whose manifest says `test = false`.

use super::Finding;
use super::sources::Source;

const FILE: &str = "ARCHITECTURE.md";
const INVARIANT: &str = "**Invariant:**";
const CHECKED_BY: &str = "Checked by";

pub(super) fn check(files: &[Source], rules: &[&str]) -> Vec<Finding> {
    let Some(page) = files.iter().find(|file| file.path == FILE) else {
        return vec![Finding::new(FILE, "is not there")];
    };
    let mut findings = Vec::new();
    for (at, _) in page.text.match_indices(INVARIANT) {
        let line = page.text[..at].matches('\n').count() + 1;
        let mut wrong = |what: String| findings.push(Finding::at(FILE, line, what));
        let text = &page.text[at + INVARIANT.len()..];
        let end = text.find(INVARIANT).into_iter().chain(text.find("\n\n")).min().unwrap_or(text.len());
        let Some((_, checks)) = text[..end].split_once(CHECKED_BY) else {
            wrong("an invariant that nothing checks: name the check or take it out".to_owned());
            continue;
        };
        let mut named = checks.split('`').skip(1).step_by(2).peekable();
        if named.peek().is_none() {
            wrong("`Checked by` names nothing".to_owned());
        }
        for name in named {
            if let Some(why) = absent(name, files, rules) {
                wrong(format!("`{name}`: {why}"));
            }
        }
    }
    findings.extend(never_run(files));
    findings
}

/// Tests among the sources of a library that is not built for tests, unless a test target of its own has the file.
fn never_run(files: &[Source]) -> Vec<Finding> {
    let manifests = files.iter().filter_map(|file| Some((file.path.strip_suffix("Cargo.toml")?, &file.code)));
    let untested = manifests.filter_map(|(folder, code)| {
        let library = code.split("\n[").find(|section| section.starts_with("lib]"))?;
        library.lines().any(|line| line.trim() == "test = false").then_some((folder, code))
    });
    let tests = |(folder, manifest): (&str, &String)| {
        let below = format!("{folder}src/");
        let is_lost = |file: &&Source| {
            let own = file.path.strip_prefix(folder).unwrap_or_default();
            file.path.starts_with(&below)
                && file.code.contains("#[test]")
                && !manifest.contains(&format!("path = \"{own}\""))
        };
        let lost = files.iter().filter(is_lost);
        lost.map(|file| Finding::new(&*file.path, "has a test that nothing runs: the library says `test = false`"))
            .collect::<Vec<_>>()
    };
    untested.flat_map(tests).collect()
}

/// Why a check is none.
fn absent(name: &str, files: &[Source], rules: &[&str]) -> Option<&'static str> {
    if let Some(rule) = name.strip_prefix("tidy: ") {
        return (!rules.contains(&rule)).then_some("tidy has no such rule");
    }
    let Some((path, test)) = name.split_once("::") else {
        return Some("neither `file::test` nor `tidy: rule`");
    };
    let Some(file) = files.iter().find(|file| file.path == path) else { return Some("there is no such file") };
    let is_there = ["fn", "def"].iter().any(|word| file.code.contains(&format!("{word} {test}(")));
    (!is_there).then_some("the file has no such test")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(text: &str) -> Vec<String> {
        let files = [
            Source::new(FILE, text),
            Source::new("crates/rapt/tests/a.rs", "#[test]\nfn it_holds() {}"),
            Source::new("bindings/python/tests/test_a.py", "def test_it(call):"),
        ];
        check(&files, &["places"]).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn a_test_that_nothing_runs_fires() {
        let manifest = "[package]\nname = \"a\"\n\n[lib]\n# why\ntest = false\n\n[[test]]\npath = \"src/own.rs\"\n";
        let code = "#[test]\nfn it_holds() {}";
        let named = |paths: &[&str], manifest: &str| {
            let mut files = vec![Source::new("a/Cargo.toml", manifest)];
            files.extend(paths.iter().map(|path| Source::new(path, code)));
            never_run(&files).len()
        };
        assert_eq!(
            named(&["a/src/lib.rs", "a/src/deep/b.rs", "a/src/own.rs", "a/tests/c.rs", "b/src/lib.rs"], manifest),
            2
        );
        assert_eq!(named(&["a/src/lib.rs"], "[lib]\nname = \"a\"\n\n[[bin]]\ntest = false\n"), 0);
    }

    #[test]
    fn an_invariant_without_a_check_fires() {
        assert_eq!(whats("**Invariant:** all is well.\n\nChecked by `tidy: places`.").len(), 1);
        assert_eq!(whats("**Invariant:** one. **Invariant:** two. Checked by `tidy: places`.").len(), 1);
        assert_eq!(whats("**Invariant:** one. Checked by eye.").len(), 1);
    }

    #[test]
    fn a_check_that_is_not_there_fires() {
        for check in ["tidy: magic", "crates/rapt/tests/a.rs::it_fails", "crates/rapt/tests/b.rs::it_holds", "eyes"] {
            assert_eq!(whats(&format!("**Invariant:** one. Checked by `{check}`.")).len(), 1, "{check}");
        }
    }

    #[test]
    fn checks_that_are_there_pass() {
        let checks =
            "`tidy: places`,\n`crates/rapt/tests/a.rs::it_holds` and `bindings/python/tests/test_a.py::test_it`";
        assert!(whats(&format!("**Invariant:** one. Checked by {checks}.\n\n`other`")).is_empty());
    }
}
