//! Names that are not used here, because the field has one of its own: in code, comments and prose.
//!
//! A new one is a line of [`NAMES`]; what is honest use is said by rule there, not by a list of places. This file names what it
//! forbids, so it alone is exempt.

use super::Finding;
use super::sources::Source;

const SELF: &str = "xtask/src/tidy/names.rs";

/// How a name is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// A part of any word, plural and past too: `door`, `DOORS`, `FrontDoor`, `next_door`.
    Part,
    /// These letters, in any case.
    Phrase,
    /// An identifier of Rust below crates/ or bindings/, code and comments.
    Type,
    /// A function of CUDA C++.
    Call,
    /// A file of this name, whatever its ending.
    File,
}

/// A name, and the one to use.
struct Name {
    name: &'static str,
    form: Form,
    instead: &'static str,
    /// Below these paths it is the right word.
    honest: &'static [&'static str],
    /// Texts that hold it and stay: what error messages say, names of files of an honest place.
    within: &'static [&'static str],
}

const fn name(name: &'static str, form: Form, instead: &'static str) -> Name {
    Name { name, form, instead, honest: &[], within: &[] }
}

const NAMES: [Name; 24] = [
    name("door", Form::Part, "interface, or bindings"),
    // An algebra has laws.
    Name {
        honest: &["crates/rapt-layout/", "docs/guides/layout", "docs/reference/layout.md"],
        within: &["crates/rapt-layout/tests/laws.rs"],
        ..name("law", Form::Part, "reference, or definition")
    },
    // What error messages say before a hint.
    Name { within: &["Mend: "], ..name("mend", Form::Part, "hint") },
    name("hunt", Form::Part, "checks"),
    name("the account", Form::Phrase, "stats"),
    name("an account of", Form::Phrase, "stats"),
    name("copy engine", Form::Phrase, "TMA"),
    name("CopyMap", Form::Type, "TensorMap"),
    name("Design", Form::Type, "LaunchPlan"),
    name("Cut", Form::Type, "Partition"),
    name("Code", Form::Type, "KernelVariant"),
    name("Body", Form::Type, "KernelVariant"),
    name("give_registers", Form::Call, "setmaxnreg"),
    name("take_registers", Form::Call, "setmaxnreg"),
    name("meet", Form::Call, "bar_sync"),
    name("tell", Form::Call, "bar_arrive"),
    name("bring", Form::Call, "the name of the load"),
    name("fall", Form::Call, "rescale"),
    name("mend", Form::File, "hints"),
    name("lender", Form::File, "stream_context"),
    name("known", Form::File, "call_cache"),
    name("sketch", Form::File, "arbitrary"),
    name("stand_in", Form::File, "torch_emulation"),
    name("feed", Form::File, "register_reuse"),
];

/// Types of Rust that name one thing each.
const ONCE: [&str; 3] = ["Layout", "Threads", "Report"];

pub(super) fn check(files: &[Source]) -> Vec<Finding> {
    files.iter().flat_map(|file| check_file(file, &NAMES)).chain(defined_twice(files)).collect()
}

/// Every definition of a type of [`ONCE`], where there are two of it and more.
fn defined_twice(files: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for name in ONCE {
        let mut places = Vec::new();
        for file in files.iter().filter(|file| file.is("rs") && file.path != SELF) {
            let lines = file.code.lines().enumerate().filter(|(_, line)| defines(line, name));
            places.extend(lines.map(|(at, _)| (&file.path, at + 1)));
        }
        if places.len() > 1 {
            let what = format!("`{name}` names {} things: it is to name one", places.len());
            findings.extend(places.into_iter().map(|(path, line)| Finding::at(path, line, what.clone())));
        }
    }
    findings
}

fn defines(line: &str, name: &str) -> bool {
    let mut words = words(line).skip_while(|word| !["struct", "enum", "trait", "type"].contains(word));
    words.next().is_some() && words.next() == Some(name)
}

fn check_file(file: &Source, names: &[Name]) -> Vec<Finding> {
    // Third-party texts are not ours to word; a log of changes and records of measurements name what was.
    let is_exempt = [SELF, crate::licenses::FILE, "CHANGELOG.md"].contains(&&*file.path)
        || file.path.starts_with("benches/record/");
    let mut findings = Vec::new();
    if is_exempt {
        return findings;
    }
    // Few files hold any of the names: only those are taken apart, line by line and word by word.
    let text = file.text.to_lowercase();
    for name in names.iter().filter(|name| name.form == Form::File || text.contains(&name.name.to_lowercase())) {
        if name.honest.iter().any(|place| file.path.starts_with(place)) {
            continue;
        }
        let what = || format!("`{}`: say {}", name.name, name.instead);
        match name.form {
            Form::File => {
                if file.path.rsplit('/').next().and_then(|file| file.split('.').next()) == Some(name.name) {
                    findings.push(Finding::new(&*file.path, what()));
                }
            }
            form => {
                let is_said = |line: &str| {
                    let rest = name.within.iter().fold(line.to_owned(), |line, text| line.replace(text, ""));
                    has(&rest, &file.path, name.name, form)
                };
                let lines = file.text.lines().enumerate().filter(|(_, line)| is_said(line));
                findings.extend(lines.map(|(at, _)| Finding::at(&file.path, at + 1, what())));
            }
        }
    }
    findings
}

fn has(line: &str, path: &str, name: &str, form: Form) -> bool {
    let is_cuda = path.ends_with(".cu") || path.ends_with(".cuh");
    match form {
        Form::Part => words(line).flat_map(parts).any(|part| is_form_of(part, name)),
        Form::Phrase => line.to_lowercase().contains(name),
        Form::Type => {
            let is_ours = path.ends_with(".rs") && (path.starts_with("crates/") || path.starts_with("bindings/"));
            is_ours && words(line).any(|word| word == name)
        }
        Form::Call => is_cuda && line.match_indices(name).any(|(at, _)| is_call(line, at, name)),
        Form::File => false,
    }
}

fn is_call(line: &str, at: usize, name: &str) -> bool {
    let follows_word = line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    !follows_word && line[at + name.len()..].starts_with(['(', '<'])
}

/// Runs of letters, digits and underscores.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The parts of a word: `next_door`, `FrontDoor` and `DOORS` have `door`.
fn parts(word: &str) -> impl Iterator<Item = &str> {
    word.split('_').flat_map(|part| {
        let starts: Vec<usize> = part
            .char_indices()
            .scan(false, |was_lower, (at, c)| {
                let begins = at == 0 || (c.is_uppercase() && *was_lower);
                *was_lower = c.is_lowercase();
                Some(begins.then_some(at))
            })
            .flatten()
            .collect();
        let ends = starts.iter().skip(1).copied().chain([part.len()]).collect::<Vec<_>>();
        starts.into_iter().zip(ends).map(|(start, end)| &part[start..end]).collect::<Vec<_>>()
    })
}

/// `mend`, `Mends`, `mended`, `mending`.
fn is_form_of(part: &str, name: &str) -> bool {
    let part = part.to_lowercase();
    part.strip_prefix(name).is_some_and(|end| ["", "s", "ed", "ing"].contains(&end))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file that holds the name as its form says.
    fn bad_sample(name: &Name) -> Source {
        let text = name.name;
        match name.form {
            Form::Part | Form::Phrase => Source::new("docs/reference/page.md", &format!("as {text} says")),
            Form::Type => Source::new("crates/rapt-cuda/src/lib.rs", &format!("/// See [`{text}`].\nfn f() {{}}")),
            Form::Call => Source::new("crates/rapt-cuda/kernels/a.cu", &format!("    {text}(1);")),
            Form::File => Source::new(&format!("crates/rapt/src/{text}.rs"), ""),
        }
    }

    #[test]
    fn every_name_fires_on_its_sample() {
        for name in &NAMES {
            let found = check_file(&bad_sample(name), std::slice::from_ref(name));
            assert_eq!(found.len(), 1, "{}", name.name);
            assert!(found[0].what.contains(name.instead));
        }
    }

    #[test]
    fn a_type_that_is_defined_twice_fires() {
        let file = |name: &str, text: &str| Source::new(&format!("crates/rapt/src/{name}.rs"), text);
        let one = file("a", "pub struct Layout {\n}\npub(crate) enum Threads { A }");
        let other = file("b", "type Layout = u8;\nstruct ThreadsOf;\nfn layout(layout: Layout) {}");
        let places: Vec<String> = defined_twice(&[one, other]).into_iter().map(|finding| finding.place).collect();
        assert_eq!(places, ["crates/rapt/src/a.rs:1", "crates/rapt/src/b.rs:1"]);
    }

    #[test]
    fn parts_of_words_fire_and_other_words_do_not() {
        let has = |line: &str, name: &str| has(line, "a.md", name, Form::Part);
        for line in ["doors", "test_door_torch", "DOORS", "FrontDoor", "a door.", "next-door"] {
            assert!(has(line, "door"), "{line}");
        }
        for (line, name) in [("recommended", "mend"), ("outdoor", "door"), ("flaw", "law"), ("amend", "mend")] {
            assert!(!has(line, name), "{line}");
        }
        assert!(has("what mends it", "mend") && has("mended", "mend"));
    }

    #[test]
    fn honest_uses_pass() {
        for (path, text) in [
            ("crates/rapt-layout/src/algebra.rs", "// the law of composition"),
            ("ARCHITECTURE.md", "`crates/rapt-layout/tests/laws.rs::complements`"),
            ("bindings/python/python/rapt/errors.py", "f\"{what}. Mend: {hint}\""),
            ("crates/rapt-core/src/spec.rs", "// known sizes: what the Codec meets"),
            ("crates/rapt-cuda/src/lib.rs", "let body = code(cut);"),
            ("crates/rapt-cuda/kernels/a.cu", "// they meet here; meeting(1); x.bringer(2);"),
            ("CHANGELOG.md", "- The doors"),
        ] {
            assert!(check_file(&Source::new(path, text), &NAMES).is_empty(), "{path}");
        }
    }
}
