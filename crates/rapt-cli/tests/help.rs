//! tests/help.txt is every page of help, as this program prints it; the Python package's tests compare theirs with the same
//! file (bindings/python/tests/test_cli.py).
//!
//! `RAPT_UPDATE_SNAPSHOTS=1` writes it anew.
#![allow(missing_docs)]

use std::path::Path;
use std::process::Command;

fn printed(words: &str) -> String {
    let words = words.split(' ').skip(1);
    let output = Command::new(env!("CARGO_BIN_EXE_rapt")).args(words).output().expect("the binary starts");
    assert!(output.status.success() && output.stderr.is_empty());
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn every_page_of_help_is_the_recorded_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help.txt");
    let mut all = String::new();
    for (words, text) in rapt_cli::help() {
        assert_eq!(printed(&words), text, "{words}");
        all += &format!("$ {words}\n{text}\n");
    }
    if std::env::var_os("RAPT_UPDATE_SNAPSHOTS").is_some_and(|value| value == "1") {
        std::fs::write(&path, &all).expect("the file of help");
    }
    assert_eq!(std::fs::read_to_string(&path).expect("tests/help.txt"), all, "tests/help.txt is not current");
    for command in ["doctor", "explain", "run", "bench", "bench cuda", "audit", "layout", "layout check"] {
        assert!(all.contains(&format!("\n$ rapt {command} --help\n")), "{command}");
    }
}
