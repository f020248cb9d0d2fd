//! Rust's libraries for other platforms.

use std::path::Path;

use crate::shell::{Failure, Outcome, capture, command};

/// Whether rustc has the library of a platform.
pub(crate) fn has(triple: &str) -> Result<bool, Failure> {
    let sysroot = capture(&mut command("rustc", ["--print", "sysroot"]))?;
    Ok(Path::new(sysroot.trim()).join("lib/rustlib").join(triple).is_dir())
}

/// Refuses, with what to run, where the library of one of these is missing.
pub(crate) fn require(triples: &[&str]) -> Outcome {
    let mut missing = Vec::new();
    for triple in triples {
        if !has(triple)? {
            missing.push(*triple);
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    let missing = missing.join(" ");
    Err(Failure::Check(format!("Rust's library for {missing} is missing: `rustup target add {missing}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_brings_it() {
        let Err(Failure::Check(text)) = require(&["rapt-no-such-platform"]) else { panic!("must be refused") };
        assert!(text.contains("rustup target add rapt-no-such-platform"), "{text}");
    }
}
