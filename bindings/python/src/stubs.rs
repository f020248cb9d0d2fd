//! What stands in Python files as the table says it: `RAPT_UPDATE_SNAPSHOTS=1 cargo test -p rapt-python --test stubs` writes it anew.
//!
//! A block begins with a line `# table.rs: KIND` and ends with the next line `# end`; it has a line for each row.

#![allow(missing_docs, reason = "a test")]

#[macro_use]
mod table;

use std::path::Path;

/// A row of the table, as far as Python is concerned.
struct Row {
    name: &'static str,
    default: String,
    /// Its type in the stubs.
    stub: String,
}

macro_rules! rows {
    (
        all: [$($name:ident: $default:literal, $stub:literal, $_schema:literal;)*],
        tensors: $_tensors:tt,
        parts: $_parts:tt,
        options: [$($_option:ident: $_field:ident by $_parse:ident,)*]
    ) => {
        fn rows() -> Vec<Row> {
            // `inspect` shows strings with one kind of quotes, and the files are written with the other.
            let python = |text: &str| text.replace('\'', "\"");
            vec![$(Row {
                name: stringify!($name),
                default: python($default),
                stub: python($stub),
            },)*]
        }

        #[test]
        fn what_python_shows_is_the_table() {
            let shown = rows().iter().map(|row| format!("{}={}, ", row.name, row.default.replace('"', "'"))).collect::<String>();
            let shown = format!("($self, q, k, v, *, {shown}out=None, out_dtype=None, return_lse=False, tolerance=None, device=None)");
            assert_eq!(signature!("$self, ", $($name: $default,)*), shown);
        }
    };
}
attention_options!(rows);

/// The line of a row in a block of this kind.
fn line(kind: &str, Row { name, default, stub, .. }: &Row) -> String {
    match kind {
        "parameters" => format!("{name}={default},"),
        "typed parameters" => format!("{name}: {stub} = {default},"),
        "arguments" => format!("{name}={name},"),
        "positions" => format!("{name},"),
        "fields" => format!("{name}: {stub}"),
        _ => panic!("no block is of the kind {kind:?}"),
    }
}

/// `text` with every block written anew, and how many there are.
fn written(text: &str) -> (String, usize) {
    let (mut out, mut blocks) = (String::new(), 0);
    let mut lines = text.lines();
    while let Some(begin) = lines.next() {
        out += begin;
        out += "\n";
        let Some(kind) = begin.trim_start().strip_prefix("# table.rs: ") else { continue };
        blocks += 1;
        let indent = &begin[..begin.len() - begin.trim_start().len()];
        for row in rows() {
            out += &format!("{indent}{}\n", line(kind, &row));
        }
        let end = lines.find(|line| line.trim_start() == "# end");
        out += end.unwrap_or_else(|| panic!("the block of {kind} has no end"));
        out += "\n";
    }
    (out, blocks)
}

#[test]
fn signatures_and_stubs_are_those_of_the_table() {
    for (file, count) in [("__init__.py", 5), ("__init__.pyi", 3)] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/rapt").join(file);
        let held = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (wanted, blocks) = written(&held);
        assert_eq!(blocks, count, "blocks of {file}");
        if std::env::var("RAPT_UPDATE_SNAPSHOTS").is_ok_and(|value| value == "1") {
            if held != wanted {
                std::fs::write(&path, wanted).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            }
        } else {
            assert!(held == wanted, "{file} differs from src/table.rs; RAPT_UPDATE_SNAPSHOTS=1 writes it anew");
        }
    }
}

#[test]
fn a_block_that_lacks_a_row_is_written_anew() {
    let (text, _) = written("def f(\n    # table.rs: parameters\n    mask=1,\n    # end\n):\n");
    assert!(text.starts_with("def f(\n    # table.rs: parameters\n    mask=None,\n    causal=None,\n"), "{text}");
    assert!(text.ends_with("    compute=\"exact\",\n    # end\n):\n"), "{text}");
    assert_eq!(written(&text), (text.clone(), 1));
}
