//! Blocks of a page that a program writes: `<!-- generated:NAME -->` … `<!-- end -->`.

use super::Finding;
use crate::built;
use crate::metadata::root;
use crate::shell::{Failure, capture, command, read};

const FILE: &str = "docs/reference/support.md";
const END: &str = "<!-- end -->";

/// A block's name, and the words after `rapt` that print it.
struct Generator {
    name: &'static str,
    command: &'static [&'static str],
}

const GENERATORS: &[Generator] = &[Generator { name: "support-table", command: &["explain", "--support-table"] }];

pub(super) fn check() -> Result<Vec<Finding>, Failure> {
    let path = root().join(FILE);
    let text = if path.exists() { read(&path)? } else { String::new() };
    let mut findings = unknown(&text);
    for generator in GENERATORS {
        match block(&text, generator.name) {
            Block::Absent => println!("note: {FILE} has no block {}: not compared", generator.name),
            Block::Open => findings.push(Finding::new(FILE, format!("the block {} has no {END}", generator.name))),
            Block::Holds(held) => {
                let rapt = built::debug(&["--bin", "rapt"])?.join(built::program("rapt"));
                let printed = capture(command(rapt, generator.command).current_dir(root()))?;
                if held.trim() != printed.trim() {
                    let command = format!("cargo run -p rapt-cli -- {}", generator.command.join(" "));
                    findings.push(Finding::new(FILE, format!("{} differs from `{command}`", generator.name)));
                }
            }
        }
    }
    Ok(findings)
}

#[derive(Debug, PartialEq, Eq)]
enum Block<'a> {
    Absent,
    Open,
    Holds(&'a str),
}

fn marker(name: &str) -> String {
    format!("<!-- generated:{name} -->")
}

fn block<'a>(text: &'a str, name: &str) -> Block<'a> {
    let Some((_, after)) = text.split_once(&marker(name)) else { return Block::Absent };
    after.split_once(END).map_or(Block::Open, |(held, _)| Block::Holds(held))
}

/// Blocks that say they are generated, by nothing known here.
fn unknown(text: &str) -> Vec<Finding> {
    let names = text.split("<!-- generated:").skip(1).filter_map(|rest| rest.split_once(" -->"));
    let foreign = names.filter(|(name, _)| GENERATORS.iter().all(|generator| generator.name != *name));
    foreign.map(|(name, _)| Finding::new(FILE, format!("no generator writes the block {name}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found() {
        let text = format!("a\n{}\n| x |\n{END}\nb", marker("support-table"));
        assert_eq!(block(&text, "support-table"), Block::Holds("\n| x |\n"));
        assert_eq!(block(&text, "other"), Block::Absent);
        assert_eq!(block(&marker("support-table"), "support-table"), Block::Open);
    }

    #[test]
    fn a_block_of_no_generator_fires() {
        assert_eq!(unknown(&marker("weather")).len(), 1);
        assert!(unknown(&marker("support-table")).is_empty());
    }
}
