//! The table of tiles: measured by `rapt-cpu`'s example `tune`, kept in tiles.json, written out as Rust.
//!
//! ```text
//! examples/tune ──lines of JSON──► tiles.json (what was measured, where, when) ──► src/select/tiles/table.rs
//! ```
//! Deliberately absent: figures without a machine, and entries that the rule does not give for the figures beside them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::args::Args;
use crate::metadata::root;
use crate::shell::{Failure, Outcome, capture, cargo, read, step, write};

pub(crate) const HELP: &str = "\
cargo xtask tune [--arch LIST] [--rounds N] [--threads N] [--rotate-mb N] [--from FILE] | --check

Measures the tiles of the CPU kernels on this machine, and writes their table.

Every candidate that the kernels are compiled for first agrees with the reference on small problems; then candidates are timed in turn,
and another than the one held is taken if its median is 2 % lower. Takes a minute or two on an idle machine. The figures go to
crates/rapt-cpu/tiles.json, the choice to crates/rapt-cpu/src/select/tiles/table.rs; instruction sets that this machine lacks keep
what they have.

  --arch LIST      only these (avx2, avx512, avx512_bf16, amx); all that the machine has otherwise
  --rounds N       turns of each candidate; 7 otherwise
  --threads N      threads of the classes that decode; 2 otherwise
  --rotate-mb N    K and V of decode go through this many MiB: more than the last cache; 160 otherwise
  --from FILE      takes what the example `tune` printed on another machine, and measures nothing
  --check          measures nothing: whether the table is what tiles.json gives, and each entry what its figures give";

const DATA: &str = "crates/rapt-cpu/tiles.json";
const TABLE: &str = "crates/rapt-cpu/src/select/tiles/table.rs";

/// The table's order, as in `tiles/mod.rs`.
const ARCHES: [(&str, &str); 4] =
    [("avx2", "AVX2"), ("avx512", "AVX512"), ("avx512_bf16", "AVX512_BF16"), ("amx", "AMX")];
const DTYPES: [&str; 4] = ["float64", "float32", "float16", "bfloat16"];
const HEAD_DIMS: [&str; 3] = ["64", "128", "more"];
const Q_LENS: [&str; 3] = ["255", "1023", "more"];
const ROWS: [&str; 2] = ["1", "more"];

/// The axes of a kernel's tile, in the order in which they are measured.
fn axes(kernel: &str) -> &'static [&'static str] {
    if kernel == "forward" {
        &["block_n", "rows", "narrow"]
    } else {
        &["block_n", "pv_keys", "ahead_bytes", "ahead_bytes_apart"]
    }
}

pub(crate) fn run(mut args: Args) -> Outcome {
    if args.flag("--check") {
        args.finish(HELP)?;
        let findings = check()?;
        if findings.is_empty() {
            println!("{DATA} and {TABLE} agree");
            return Ok(());
        }
        return Err(Failure::Check(findings.join("\n")));
    }
    let from = args.value("--from")?;
    let mut words = Vec::new();
    for name in ["--arch", "--rounds", "--threads", "--rotate-mb"] {
        if let Some(value) = args.value(name)? {
            words.extend([name.to_owned(), value]);
        }
    }
    args.finish(HELP)?;
    let lines = match from {
        Some(file) if words.is_empty() => read(&PathBuf::from(file))?,
        Some(_) => return Err(Failure::Usage("--from measures nothing: it takes no other option".to_owned())),
        None => step("measure the tiles", || {
            let build = ["run", "--release", "--quiet", "--package", "rapt-cpu", "--example", "tune", "--"];
            capture(cargo(build).args(&words).current_dir(root()))
        })?,
    };
    let mut data = if root().join(DATA).exists() { parse(&read(&root().join(DATA))?)? } else { Data::default() };
    data.take(&lines)?;
    write(&root().join(DATA), &data.text())?;
    write(&root().join(TABLE), &data.table())?;
    println!("{DATA}: {} entries", data.entries.len());
    match check()? {
        findings if findings.is_empty() => Ok(()),
        findings => Err(Failure::Check(findings.join("\n"))),
    }
}

/// What keeps the table from being what its figures give.
pub(crate) fn check() -> Result<Vec<String>, Failure> {
    let data = parse(&read(&root().join(DATA))?)?;
    let mut findings = data.findings();
    if read(&root().join(TABLE))? != data.table() {
        findings.push(format!("{TABLE} is not what {DATA} gives: run `cargo xtask tune`, or edit neither by hand"));
    }
    Ok(findings)
}

/// An entry's place: arch, dtype, kernel, head_dim, and q_len or rows.
type Class = [String; 5];

/// tiles.json.
#[derive(Default)]
struct Data {
    /// By arch: machine, date, command, how it was measured.
    runs: BTreeMap<String, Value>,
    entries: BTreeMap<Class, Value>,
}

fn class(entry: &Value) -> Option<Class> {
    let text = |name: &str| entry[name].as_str().map(str::to_owned);
    let kernel = text("kernel")?;
    let last = if kernel == "forward" { "q_len" } else { "rows" };
    Some([text("arch")?, text("dtype")?, kernel, text("head_dim")?, text(last)?])
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().map(|list| list.iter().filter_map(Value::as_u64).collect()).unwrap_or_default()
}

fn broken(what: &str) -> Failure {
    Failure::Check(format!("{DATA}: {what}"))
}

fn parse(text: &str) -> Result<Data, Failure> {
    let json: Value = serde_json::from_str(text).map_err(|error| broken(&error.to_string()))?;
    let mut data = Data::default();
    for (arch, run) in json["runs"].as_object().ok_or_else(|| broken("there are no `runs`"))? {
        data.runs.insert(arch.clone(), run.clone());
    }
    for entry in json["entries"].as_array().ok_or_else(|| broken("there are no `entries`"))? {
        let class = class(entry).ok_or_else(|| broken(&format!("an entry has no class: {entry}")))?;
        if data.entries.insert(class, entry.clone()).is_some() {
            return Err(broken(&format!("an entry occurs twice: {entry}")));
        }
    }
    Ok(data)
}

impl Data {
    /// Takes what the example printed: entries, then the line that says where they are from.
    fn take(&mut self, lines: &str) -> Outcome {
        let mut entries = Vec::new();
        let mut run = None;
        for line in lines.lines().filter(|line| line.starts_with('{')) {
            let json: Value = serde_json::from_str(line).map_err(|error| broken(&format!("{error}: {line}")))?;
            match class(&json) {
                Some(class) => entries.push((class, json)),
                None => run = Some(json),
            }
        }
        let Some(run) = run else {
            return Err(Failure::Check(
                "what was printed does not say where it was measured: was it cut off?".to_owned(),
            ));
        };
        let date = date(run["unix_seconds"].as_u64().unwrap_or(0));
        let command = format!("cargo xtask tune {}", run["words"].as_str().unwrap_or(""));
        let run = json!({
            "machine": run["machine"], "date": date, "command": command.trim(), "threads": run["threads"],
            "rounds": run["rounds"], "margin": run["margin"],
        });
        for (class, entry) in entries {
            self.runs.insert(class[0].clone(), run.clone());
            self.entries.insert(class, entry);
        }
        Ok(())
    }

    /// The file: a line per run, a line per entry.
    fn text(&self) -> String {
        let runs: Vec<String> = self.runs.iter().map(|(arch, run)| format!("    \"{arch}\": {run}")).collect();
        let entries: Vec<String> = self.entries.values().map(|entry| format!("    {entry}")).collect();
        format!("{{\n  \"runs\": {{\n{}\n  }},\n  \"entries\": [\n{}\n  ]\n}}\n", runs.join(",\n"), entries.join(",\n"))
    }

    fn entry(&self, class: [&str; 5]) -> Option<&Value> {
        self.entries.get(&class.map(str::to_owned))
    }

    /// The constructor call of one entry of the table.
    fn call(&self, class: [&str; 5]) -> String {
        let kernel = class[2];
        let Some(entry) = self.entry(class) else {
            return format!("Tiles::DEFAULT.{kernel}");
        };
        let mut words: Vec<String> = numbers(&entry["tile"]).iter().map(u64::to_string).collect();
        if kernel == "forward" {
            words[2] = (words[2] == "1").to_string();
        }
        format!("{kernel}({})", words.join(", "))
    }

    /// table.rs.
    fn table(&self) -> String {
        let mut text =
            "//! Written by `cargo xtask tune` from tiles.json, which has the figures. Not edited by hand.\n\n"
                .to_owned();
        text.push_str("use super::{ArchTiles, Tiles, decode, forward};\n");
        for (arch, name) in ARCHES {
            let from = self.runs.get(arch).map_or("Not measured".to_owned(), |run| {
                let word = |name: &str| run[name].as_str().unwrap_or("?").to_owned();
                format!("{}, {}, `{}`", word("machine"), word("date"), word("command"))
            });
            let _ = write!(
                text,
                "\n/// {from}.\n#[rustfmt::skip]\npub(super) const {name}: ArchTiles = ArchTiles {{\n    forward: [\n"
            );
            for dtype in DTYPES {
                let _ = writeln!(text, "        // {dtype}: head_dim to 64, to 128, more; q_len to 255, to 1023, more");
                let rows =
                    HEAD_DIMS.map(|dim| Q_LENS.map(|q_len| self.call([arch, dtype, "forward", dim, q_len])).join(", "));
                let _ = writeln!(text, "        [[{}],\n         [{}],\n         [{}]],", rows[0], rows[1], rows[2]);
            }
            text.push_str("    ],\n    // One row per group, more; the dtypes as above.\n    decode: [\n");
            for dtype in DTYPES {
                let _ = writeln!(
                    text,
                    "        [{}],",
                    ROWS.map(|rows| self.call([arch, dtype, "decode", "any", rows])).join(", ")
                );
            }
            text.push_str("    ],\n};\n");
        }
        text
    }

    /// What the entries say against the rule.
    fn findings(&self) -> Vec<String> {
        let mut findings = Vec::new();
        for (class, entry) in &self.entries {
            let [arch, dtype, kernel, head_dim, last] = class.each_ref().map(String::as_str);
            let known = ARCHES.iter().any(|(name, _)| *name == arch)
                && DTYPES.contains(&dtype)
                && match kernel {
                    "forward" => HEAD_DIMS.contains(&head_dim) && Q_LENS.contains(&last),
                    "decode" => head_dim == "any" && ROWS.contains(&last),
                    _ => false,
                };
            if !known {
                findings.push(format!("{DATA}: the table has no place for {class:?}"));
                continue;
            }
            let Some(run) = self.runs.get(arch) else {
                findings.push(format!("{DATA}: {arch} does not say where it was measured"));
                continue;
            };
            let held = numbers(&entry["held"]);
            // The block of keys is that of the longest queries.
            let longest =
                self.entry([arch, dtype, kernel, head_dim, "more"]).filter(|_| kernel == "forward" && last != "more");
            if longest.is_some_and(|longest| numbers(&longest["tile"]).first() != held.first()) {
                findings.push(format!("{DATA}: {class:?} has another block_n than the longest queries"));
            }
            if held.len() != axes(kernel).len() {
                findings.push(format!("{DATA}: {class:?} does not say what was held before"));
                continue;
            }
            match follow(kernel, held, &entry["measured_us"], run["margin"].as_f64().unwrap_or(0.0)) {
                Ok(tile) if tile == numbers(&entry["tile"]) => {}
                Ok(tile) => {
                    findings.push(format!("{DATA}: {class:?} has {}, its figures give {tile:?}", entry["tile"]));
                }
                Err(what) => findings.push(format!("{DATA}: {class:?}: {what}")),
            }
        }
        findings
    }
}

/// The rule: along the axes in order, another number than the one held is taken if it is faster by more than the margin.
fn follow(kernel: &str, mut held: Vec<u64>, measured: &Value, margin: f64) -> Result<Vec<u64>, String> {
    for (at, axis) in axes(kernel).iter().enumerate() {
        let Some(figures) = measured[*axis].as_array() else { continue };
        let figures: Vec<(u64, f64)> =
            figures.iter().filter_map(|one| Some((one[0].as_u64()?, one[1].as_f64()?))).collect();
        let us = |number: u64| figures.iter().find(|(one, _)| *one == number).map(|(_, us)| *us);
        let of_held = us(held[at]).ok_or_else(|| format!("{axis} {} has no figure", held[at]))?;
        let best = figures.iter().min_by(|a, b| a.1.total_cmp(&b.1)).ok_or_else(|| format!("{axis} has no figures"))?;
        if best.1 < of_held * (1.0 - margin) {
            held[at] = best.0;
        }
    }
    Ok(held)
}

/// The day of a time in seconds since 1970, in UTC. (Hinnant, "chrono-compatible low-level date algorithms".)
fn date(unix_seconds: u64) -> String {
    let days = unix_seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, year + era * 400) } else { (month - 9, year + era * 400 + 1) };
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"noise
{"arch":"avx2","dtype":"float32","kernel":"forward","head_dim":"64","q_len":"more","shape":[1],"held":[128,128,1],"tile":[64,256,1],"measured_us":{"block_n":[[64,90.0],[128,100.0]],"rows":[[128,80.0],[256,78.0]],"narrow":[[0,79.5],[1,80.0]]}}
{"arch":"avx2","dtype":"float32","kernel":"forward","head_dim":"64","q_len":"255","shape":[1],"held":[64,128,1],"tile":[64,128,1],"measured_us":{"rows":[[128,80.0],[256,79.9]]}}
{"machine":"a machine","threads":2,"rounds":7,"margin":0.015,"unix_seconds":1795258800,"words":"--arch avx2"}
"#;

    fn taken() -> Data {
        let mut data = Data::default();
        data.take(LINES).unwrap();
        data
    }

    #[test]
    fn lines_become_a_table_with_provenance() {
        let data = taken();
        assert_eq!(data.findings(), Vec::<String>::new());
        let table = data.table();
        assert!(table.contains("/// a machine, 2026-11-21, `cargo xtask tune --arch avx2`."), "{table}");
        assert!(
            table.contains("[[forward(64, 128, true), Tiles::DEFAULT.forward, forward(64, 256, true)],"),
            "{table}"
        );
        assert!(table.contains("/// Not measured.\n#[rustfmt::skip]\npub(super) const AVX512:"), "{table}");
        assert_eq!(parse(&data.text()).unwrap().text(), data.text(), "the file reads as it was written");
    }

    #[test]
    fn an_entry_that_its_figures_do_not_give_is_found() {
        let text = taken().text();
        let changed = |from: &str, to: &str| parse(&text.replace(from, to)).unwrap().findings();
        assert!(changed("[64,256,1]", "[64,256,0]")[0].contains("its figures give [64, 256, 1]"));
        assert!(changed("[[64,90.0]", "[[64,99.0]")[0].contains("its figures give [128, 256, 1]"));
        assert!(changed("\"head_dim\":\"64\"", "\"head_dim\":\"65\"")[0].contains("no place"));
    }

    #[test]
    fn output_that_was_cut_off_is_refused() {
        let cut = LINES.rsplit_once("{\"machine\"").unwrap().0;
        assert!(Data::default().take(cut).is_err());
    }

    #[test]
    fn days_have_their_dates() {
        let of = |days: u64| date(days * 86_400 + 5);
        assert_eq!([of(0), of(59), of(11_016), of(20_778)], ["1970-01-01", "1970-03-01", "2000-02-29", "2026-11-21"]);
    }
}
