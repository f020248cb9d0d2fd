//! `rapt model` on archives that torch wrote.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn archive(name: &str) -> String {
    format!("{}/../rapt-pt2/tests/fixtures/torch-2.15/{name}.pt2", env!("CARGO_MANIFEST_DIR"))
}

/// A path of this test alone.
fn scratch(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("model-{}-{name}", std::process::id()))
}

fn rapt(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rapt"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("RAPT_")) {
        command.env_remove(name);
    }
    command.args(args).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

fn prints(args: &[&str]) -> String {
    let output = rapt(args);
    assert!(output.status.success(), "{args:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Standard error of a call that must be refused.
fn refuses(args: &[&str], code: i32) -> String {
    let output = rapt(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("JSON")
}

/// Where the bytes of an entry begin, by its local header.
fn entry(bytes: &[u8], name: &str) -> usize {
    let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).expect("an entry of this name");
    let start = bytes[..at].windows(4).rposition(|window| window == b"PK\x03\x04").expect("a local header");
    let number = |at: usize| usize::from(u16::from_le_bytes([bytes[start + at], bytes[start + at + 1]]));
    start + 30 + number(26) + number(28)
}

#[test]
fn check_says_what_is_served_and_that_every_storage_is_whole() {
    let table = prints(&["model", "check", &archive("shared")]);
    for word in ["served", "input ids", "int64 [1, 2]", "storages", "checksums", "right"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let report = json(&prints(&["model", "check", &archive("shared"), "--json"]));
    assert_eq!((&report["served"], &report["storages"]["damage"]), (&true.into(), &serde_json::Value::Null));
    let (count, bytes) = (report["storages"]["count"].as_u64(), report["storages"]["bytes"].as_u64());
    assert!(count.is_some_and(|count| count > 0) && bytes.is_some_and(|bytes| bytes > 0), "{report}");
}

#[test]
fn check_finds_a_weight_that_was_altered() {
    let mut bytes = std::fs::read(archive("shared")).expect("a fixture");
    let at = entry(&bytes, "data/weights/weight_0");
    bytes[at] ^= 1;
    let path = scratch("altered.pt2");
    std::fs::write(&path, bytes).expect("written");
    let path = path.to_str().expect("text");
    let output = rapt(&["model", "check", path]);
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{table}");
    assert!(table.contains("not served: entry") && table.contains("weight_0") && table.contains("CRC-32"), "{table}");
    let output = rapt(&["model", "check", path, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(json(&text(&output.stdout))["storages"]["damage"].is_string());
    std::fs::remove_file(path).expect("gone");
}

#[test]
fn show_draws_the_graph_of_archives_that_are_served_and_of_those_that_are_not() {
    for (name, node, missing) in [("state", "aten.linear.default", 0), ("symbols", "aten.nonzero.default", 1)] {
        let path = scratch(&format!("{name}.html"));
        let said = prints(&["model", "show", &archive(name), "--html", path.to_str().expect("text")]);
        assert!(said.contains("12 nodes"), "{said}");
        let page = std::fs::read_to_string(&path).expect("a page");
        assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
        assert!(page.contains(node) && page.contains("type=\"search\""), "{name}");
        assert_eq!(page.matches("class=\"row missing\"").count(), missing, "{name}");
        assert!(!page.contains("://"), "nothing is fetched");
        std::fs::remove_file(&path).expect("gone");
    }
    let page = scratch("no/such/folder.html");
    let error = refuses(&["model", "show", &archive("state"), "--html", page.to_str().expect("text")], 1);
    assert!(error.contains("folder.html"), "{error}");
}

#[test]
fn bench_times_a_model_at_sizes_of_the_users_own() {
    let file = scratch("bench.json");
    let args =
        ["--size", "s31=3,s27=5", "--size", "s24=6", "--seconds", "0.01", "--json", file.to_str().expect("text")];
    let table = prints(&[&["model", "bench", &archive("state")], &args[..]].concat());
    for word in ["s31 = 3", "s27 = 5", "threads", "load", "median", "GFLOP", "weights", "held by the session"] {
        assert!(table.contains(word), "{word}: {table}");
    }
    let report = json(&std::fs::read_to_string(&file).expect("a report"));
    // linear: 3 × 5 rows of 4 by [3, 4].
    assert_eq!(report["product_flops"], 2.0 * 15.0 * 4.0 * 3.0, "{report}");
    assert!(
        report["median_seconds"].as_f64().is_some_and(|x| x > 0.0) && report["calls"].as_u64() >= Some(5),
        "{report}"
    );
    assert_eq!(report["symbols"]["s24"], 6);
    std::fs::remove_file(&file).expect("gone");
    let plain = prints(&["model", "bench", &archive("shared"), "--seconds", "0.01", "--threads", "3"]);
    assert!(plain.contains("fixed") && plain.contains("at most 3"), "{plain}");
    assert!(refuses(&["model", "bench", &archive("shared"), "--threads", "0"], 1).contains("threads"));
}

#[test]
fn bench_refuses_what_it_cannot_make() {
    let state = archive("state");
    let error = refuses(&["model", "bench", &state, "--size", "zz=3"], 1);
    assert!(error.contains("no symbol zz") && error.contains("s31"), "{error}");
    let error = refuses(&["model", "bench", &state, "--size", "s31=-4"], 1);
    assert!(error.contains("s31") && error.contains("-4"), "{error}");
    let error = refuses(&["model", "bench", &state, "--size", "s31=4000"], 1);
    assert!(error.contains("s31"), "{error}");
    assert!(refuses(&["model", "bench", &state, "--size", "s31"], 2).contains("SYMBOL=N"));
    let error = refuses(&["model", "bench", &state, "one.npy"], 1);
    assert!(error.contains("takes 3 inputs, got 1"), "{error}");
    assert!(refuses(&["model", "bench", &archive("symbols")], 1).contains("nonzero"));
    assert!(!Path::new("one.npy").exists());
}
