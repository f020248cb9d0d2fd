//! Subcommands that are Python code, as cargo's program starts them.
#![allow(missing_docs)]
#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

/// `rapt` with a PATH on which `python3` is this script, or is not at all.
fn rapt(name: &str, python: Option<&str>, args: &[&str]) -> Output {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    if let Some(script) = python {
        let path = folder.join("python3");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("may be run");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_rapt")).args(args).env("PATH", &folder).output();
    std::fs::remove_dir_all(&folder).expect("gone");
    output.expect("the binary starts")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

#[test]
fn without_the_package_the_message_gives_the_command_that_installs_it() {
    const COMMAND: &str = "python3 -m pip install \"rapt-attention[numpy]\"";
    for (name, python, why) in [("absent", None, "not on PATH"), ("bare", Some("exit 1"), "no package rapt")] {
        for (args, what) in [(&["audit", "torch"][..], "rapt audit"), (&["bench", "cuda"], "rapt bench cuda")] {
            let output = rapt(name, python, args);
            assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
            let said = format!(
                "rapt: `{what}` is part of Rapt's Python package, and python3 has none ({why}). Install it: {COMMAND}\n"
            );
            assert_eq!(stderr(&output), said);
        }
    }
}

#[test]
fn the_words_reach_python_as_they_were_typed_and_its_exit_code_comes_back() {
    let script = "[ \"$1\" = -c ] && exit 0\necho \"$@\"\nexit 3";
    let output = rapt("found", Some(script), &["audit", "a b:f", "--dtypes", "float32", "--json=-"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "-m rapt audit a b:f --dtypes float32 --json=-\n");
}

#[test]
fn words_that_no_option_takes_start_nothing() {
    for args in [&["audit", "--fail-on", "sometimes"][..], &["bench", "cuda", "--check", "all"], &["bench", "cpu"]] {
        let output = rapt("usage", Some("exit 9"), args);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    }
}
