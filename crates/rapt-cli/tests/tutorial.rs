//! docs/guides/layout-checker.md is what the commands in it print, and its pictures are what they draw.
//!
//! `RAPT_UPDATE_SNAPSHOTS=1` writes both anew.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Words of a command line; quotes are single ones.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (at, part) in line.split('\'').enumerate() {
        if at % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

/// What a command prints, and the picture it draws, with the path that the tutorial gives it.
fn run(line: &str, folder: &Path) -> (String, Option<(String, String)>) {
    let mut words = words(line.strip_prefix("$ rapt ").expect("a command of rapt"));
    let mut picture = None;
    if let Some(at) = words.iter().position(|word| word == "--svg") {
        let drawn = folder.join("picture.svg");
        let named = std::mem::replace(&mut words[at + 1], drawn.to_str().expect("a path of text").to_owned());
        picture = Some((named, drawn));
    }
    let output = Command::new(env!("CARGO_BIN_EXE_rapt")).args(&words).current_dir(root()).output().expect("starts");
    let printed = [output.stdout, output.stderr].concat();
    let picture = picture.map(|(named, drawn)| (named, std::fs::read_to_string(drawn).expect("a picture")));
    (String::from_utf8(printed).expect("text"), picture)
}

#[test]
fn the_tutorial_is_what_its_commands_print() {
    let is_update = std::env::var_os("RAPT_UPDATE_SNAPSHOTS").is_some_and(|value| value == "1");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("tutorial-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = root().join("docs/guides/layout-checker.md");
    let text = std::fs::read_to_string(&path).expect("the tutorial");
    let mut written = String::new();
    let (mut is_console, mut commands) = (false, 0);
    for line in text.lines() {
        if line.starts_with("```") {
            is_console = line == "```console";
            written += &format!("{line}\n");
        } else if !is_console {
            written += &format!("{line}\n");
        } else if line.starts_with("$ ") {
            commands += 1;
            let (printed, picture) = run(line, &folder);
            written += &format!("{line}\n{printed}");
            if let Some((named, drawn)) = picture {
                let there = root().join(&named);
                if is_update {
                    std::fs::write(&there, drawn).expect("a picture");
                } else {
                    assert!(std::fs::read_to_string(&there).expect(&named) == drawn, "{named} is not current");
                }
                assert!(
                    text.contains(&format!("]({})", named.strip_prefix("docs/guides/").expect("in docs"))),
                    "{named}"
                );
            }
        }
    }
    std::fs::remove_dir_all(&folder).expect("gone");
    assert!(commands > 10);
    if is_update {
        std::fs::write(&path, &written).expect("the tutorial");
    } else {
        assert_eq!(text, written, "docs/guides/layout-checker.md is not current");
    }
}
