//! What may stand only in some places, and what must stand in one: the boundaries that ARCHITECTURE.md promises, in code.

use super::Finding;
use super::sources::Source;

/// It names what it forbids, so it alone is exempt.
const SELF: &str = "xtask/src/tidy/places.rs";

/// Something that code does not hold, but in some places.
struct Rule {
    /// What is looked at: the begin of a path.
    under: &'static str,
    /// Any of these, in code; letters in any case where they are all small.
    holds: &'static [&'static str],
    /// Where it may stand all the same: begins of paths.
    but_in: &'static [&'static str],
    why: &'static str,
}

const RULES: [Rule; 15] = [
    Rule {
        under: "",
        holds: &["std::arch", "core::arch"],
        but_in: &["crates/rapt-cpu/src/arch"],
        why: "CPU intrinsics stand in crates/rapt-cpu/src/arch",
    },
    Rule {
        under: "",
        holds: &["torch", "numpy", "pyo3"],
        but_in: &[
            "bindings/",
            // What builds.
            "xtask/",
            // The limits that were measured of torch.
            "crates/rapt-testkit/",
            // The table of dtype names.
            "crates/rapt-core/src/dtype.rs",
            // The command line is linked into the Python package too: `doctor` shows what Python's host reports, `audit` and
            // `bench cuda` are Python code, and the binary says how to install it.
            "crates/rapt-cli/src/doctor.rs",
            "crates/rapt-cli/src/python.rs",
            "crates/rapt-cli/src/main.rs",
            "crates/rapt-cli/tests/python.rs",
            // Operators and versions of exported programs are called by their names in PyTorch: text, and no Python.
            "crates/rapt-pt2/",
            "crates/rapt-graph/",
            "crates/rapt/src/model/report.rs",
            "crates/rapt/tests/model.rs",
            "crates/rapt/tests/model_threads.rs",
            "crates/rapt-cli/src/model/view.rs",
            "crates/rapt-cli/tests/docs.rs",
            "crates/rapt-cli/tests/model.rs",
            // PyTorch's functions for Metal are called by their names.
            "crates/rapt-metal/",
        ],
        why: "of Python in code outside bindings",
    },
    Rule {
        under: "crates/rapt-core/src/",
        holds: &["extern \"", "Default for DType", "libloading", "std::thread"],
        but_in: &[],
        why: "core has no foreign functions, no threads and no default dtype",
    },
    Rule { under: "crates/rapt-core/src/dtype.rs", holds: &["Default"], but_in: &[], why: "there is no default dtype" },
    Rule {
        under: "crates/rapt-cpu/src/",
        holds: &["std::thread", "rayon::"],
        but_in: &[],
        why: "kernels run on the threads of an Executor",
    },
    Rule {
        under: "crates/rapt-reference/src/",
        holds: &["unsafe ", "std::thread", "half::", "strides"],
        but_in: &[],
        why: "the reference has no unsafe code, no threads, no storage dtypes and no strides",
    },
    Rule {
        under: "crates/rapt-pt2/src/",
        holds: &["unsafe "],
        but_in: &["crates/rapt-pt2/src/archive.rs"],
        why: "an archive is mapped in one place, and nothing else of the reader is unsafe",
    },
    Rule {
        under: "crates/rapt-cuda/src/",
        holds: &["cudarc::", "libloading::", "extern \""],
        // A test that runs a kernel on the processor.
        but_in: &["crates/rapt-cuda/src/driver", "crates/rapt-cuda/src/recorded/host.rs"],
        why: "CUDA's foreign functions stand in its driver layer",
    },
    Rule {
        under: "crates/rapt-shader/src/",
        holds: &["wgpu::", "std::thread", "std::fs"],
        but_in: &[],
        why: "texts of kernels know no device",
    },
    Rule {
        under: "crates/rapt-wgpu/src/",
        holds: &["unsafe "],
        but_in: &["crates/rapt-wgpu/src/buffers.rs", "crates/rapt-wgpu/src/device.rs"],
        why: "views are made of buffers in one place, and kernels compiled without checks in another",
    },
    Rule {
        under: "crates/rapt-metal/src/",
        holds: &["unsafe ", "extern \""],
        but_in: &[
            "crates/rapt-metal/src/functions.rs",
            "crates/rapt-metal/src/backend.rs",
            "crates/rapt-metal/src/buffers.rs",
            "crates/rapt-metal/src/objc.rs",
        ],
        why: "PyTorch's functions, Metal's objects and views of buffers stand in a place each, and tensors are taken over in one",
    },
    Rule {
        under: "",
        holds: &["#[link(", "cargo::rustc-link-lib", "cargo:rustc-link-lib"],
        but_in: &[],
        why: "nothing foreign is linked: libraries are opened where they are found",
    },
    Rule {
        under: "crates/rapt-testkit/src/",
        holds: &["rapt_cpu", "rapt_cuda", "rapt::"],
        but_in: &[],
        why: "the testkit judges engines and has none",
    },
    Rule {
        under: "bindings/python/src/",
        holds: &[".sqrt()", ".exp()", ".exp2()", ".tanh()", ".ln()", ".log2()", ".mul_add(", ".powi(", ".powf("],
        but_in: &[],
        why: "bindings compute nothing of the definition",
    },
    Rule {
        under: "bindings/python/python/rapt/bench/rows.py",
        holds: &["import torch", "from torch", "import rapt", "from rapt"],
        but_in: &[],
        why: "declarations of rows import neither torch nor Rapt",
    },
];

/// Lines that a file has.
const REQUIRED: [(&str, &str); 5] = [
    ("crates/rapt-graph/src/lib.rs", "#![forbid(unsafe_code)]"),
    ("crates/rapt-layout/src/lib.rs", "#![forbid(unsafe_code)]"),
    ("crates/rapt-quant/src/lib.rs", "#![forbid(unsafe_code)]"),
    ("crates/rapt-reference/src/lib.rs", "#![forbid(unsafe_code)]"),
    ("crates/rapt-shader/src/lib.rs", "#![forbid(unsafe_code)]"),
];

/// Detection is a macro at the root of std and names no instruction.
const DETECTION: [&str; 2] = ["arch::is_x86_feature_detected", "arch::is_aarch64_feature_detected"];

pub(super) fn check(files: &[Source]) -> Vec<Finding> {
    files.iter().flat_map(check_file).chain(missing(files)).collect()
}

fn missing(files: &[Source]) -> Vec<Finding> {
    let lacks = |(path, line): &&(&str, &str)| {
        files.iter().any(|file| file.path == *path && !file.code.lines().any(|own| own.trim() == *line))
    };
    REQUIRED.iter().filter(lacks).map(|(path, line)| Finding::new(*path, format!("must say `{line}`"))).collect()
}

fn check_file(file: &Source) -> Vec<Finding> {
    let mut findings = Vec::new();
    if file.path == SELF {
        return findings;
    }
    for rule in &RULES {
        let is_meant = file.is("rs") || file.path == rule.under;
        let is_free = rule.but_in.iter().any(|place| file.path.starts_with(place));
        if !is_meant || is_free || !file.path.starts_with(rule.under) {
            continue;
        }
        for (at, line) in file.code.lines().enumerate() {
            let line = DETECTION.iter().fold(line.to_owned(), |line, name| line.replace(name, ""));
            let found = rule.holds.iter().filter(|word| holds(&line, word));
            findings.extend(found.map(|word| Finding::at(&file.path, at + 1, format!("`{word}`: {}", rule.why))));
        }
    }
    findings
}

/// A plain word anywhere and in any case, as in `from_numpy`; a path or a call as it is written, from its first letter.
fn holds(line: &str, word: &str) -> bool {
    if word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()) {
        return line.to_lowercase().contains(word);
    }
    let is_start = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    line.match_indices(word).any(|(at, _)| word.starts_with('.') || is_start(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(path: &str, text: &str) -> Vec<String> {
        check(&[Source::new(path, text)]).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn every_rule_fires_on_each_of_its_words_and_nowhere_else() {
        for rule in &RULES {
            let path =
                if rule.under.ends_with(".py") { rule.under.to_owned() } else { format!("{}crates/x.rs", rule.under) };
            for word in rule.holds {
                let found = whats(&path, &format!("a {word} b"));
                assert!(found.iter().any(|what| what.contains(rule.why)), "{word} in {path}: {found:?}");
            }
            for place in rule.but_in.iter().filter(|place| !place.ends_with(".rs")) {
                let found = whats(&format!("{}/x.rs", place.trim_end_matches('/')), rule.holds[0]);
                assert!(!found.iter().any(|what| what.contains(rule.why)), "{place}: {found:?}");
            }
        }
    }

    #[test]
    fn detection_and_comments_pass() {
        assert!(whats("crates/rapt-cpu/src/select.rs", "std::arch::is_x86_feature_detected!(\"avx2\")").is_empty());
        assert!(whats("crates/rapt-core/src/error.rs", "// PyTorch raises here").is_empty());
        assert!(whats("crates/rapt-cuda/src/backend.rs", "use rapt_core::arch::Arch;").is_empty());
        assert!(whats("crates/rapt-core/src/dtype.rs", "\"torch.bfloat16\"").is_empty());
        assert_eq!(whats("crates/rapt-core/src/error.rs", "\"key.to(torch.bfloat16)\"").len(), 1);
        assert_eq!(whats("crates/rapt/src/lib.rs", "use pyo3::prelude::*;").len(), 1);
        assert!(whats("crates/rapt-cli/src/doctor.rs", "torch_threads: Option<String>,").is_empty());
        assert_eq!(whats("crates/rapt-cli/src/run.rs", "\"torch.bfloat16\"").len(), 1);
    }

    #[test]
    fn a_line_that_is_missing_fires() {
        assert_eq!(whats("crates/rapt-layout/src/lib.rs", "//! #![forbid(unsafe_code)]").len(), 1);
        assert!(whats("crates/rapt-layout/src/lib.rs", "#![forbid(unsafe_code)]").is_empty());
    }
}
