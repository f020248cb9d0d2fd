//! No module of a crate needs itself by way of another: the graph of `crate::` and `super::` paths has no cycle.
//!
//! A node is a file. A module's own children do not count as what it needs: `mod child;` and `pub use child::Item;` are how it is
//! put together; an item that a module re-exports stands for the file that holds it. Tests at a file's end are not looked at.
//! Deliberately absent: macros, and what methods reach without a path.

use std::collections::{BTreeMap, BTreeSet};

use super::Finding;
use super::sources::Source;

/// A path of modules below the crate's root.
type Module = Vec<String>;

pub(super) fn check(files: &[Source]) -> Vec<Finding> {
    let mut crates: BTreeMap<&str, Vec<&Source>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.is("rs")) {
        if let Some((home, _)) = file.path.split_once("/src/") {
            crates.entry(home).or_default().push(file);
        }
    }
    crates.into_iter().flat_map(|(home, files)| check_crate(home, &files)).collect()
}

fn check_crate(home: &str, files: &[&Source]) -> Vec<Finding> {
    let modules: BTreeMap<Module, &Source> = files.iter().map(|file| (module(home, &file.path), *file)).collect();
    let uses: BTreeMap<&Module, Vec<Module>> =
        modules.iter().map(|(at, file)| (at, paths(at, without_tests(&file.code)))).collect();
    let mut graph: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
    for (at, paths) in &uses {
        let needs = paths.iter().filter_map(|path| resolve(path, &modules, &uses, 0));
        // What lies below a module is part of it.
        graph.insert(at, needs.filter(|to| !to.starts_with(at)).collect());
    }
    cycles(&graph).into_iter().map(|cycle| Finding::new(home, format!("modules in a cycle: {cycle}"))).collect()
}

/// `src/a/mod.rs` and `src/a.rs` are `a`; `src/lib.rs` and `src/main.rs` are the root.
fn module(home: &str, path: &str) -> Module {
    let below = path.trim_start_matches(home).trim_start_matches("/src/").trim_end_matches(".rs");
    let mut parts: Module = below.split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        parts.pop();
    }
    parts
}

fn without_tests(code: &str) -> &str {
    code.split("#[cfg(test)]\nmod tests {").next().unwrap_or(code)
}

/// Every path of `code`, from the crate's root: those after `crate::`, `super::` and `self::`, groups taken apart.
fn paths(at: &Module, code: &str) -> Vec<Module> {
    let mut found = Vec::new();
    for (start, word) in ["crate::", "super::", "self::"].iter().flat_map(|word| code.match_indices(word)) {
        let before = code[..start].chars().next_back().unwrap_or(' ');
        if before.is_alphanumeric() || "_:$".contains(before) {
            continue;
        }
        let mut base = if word == "crate::" { Vec::new() } else { at.clone() };
        let mut rest = &code[start + word.len()..];
        if word == "super::" {
            base.pop();
            while let Some(further) = rest.strip_prefix("super::") {
                base.pop();
                rest = further;
            }
        }
        tree(&base, rest, &mut found);
    }
    // The re-exports of a module name its children without a prefix.
    for (start, _) in code.match_indices("use ") {
        let rest = &code[start + 4..];
        if !["crate", "super", "self", "std", "core"].iter().any(|first| rest.starts_with(first)) {
            tree(at, rest, &mut found);
        }
    }
    found
}

/// Takes `a::{b, c::d}` apart; gives what follows it.
fn tree<'c>(base: &Module, text: &'c str, found: &mut Vec<Module>) -> &'c str {
    let mut path = base.clone();
    let mut rest = text.trim_start();
    loop {
        if let Some(mut group) = rest.strip_prefix('{') {
            loop {
                group = tree(&path, group, found).trim_start();
                match group.strip_prefix(',') {
                    Some(further) if !further.trim_start().starts_with('}') => group = further,
                    Some(further) => return further.trim_start().strip_prefix('}').unwrap_or(further),
                    None => return group.strip_prefix('}').unwrap_or(group),
                }
            }
        }
        let length = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        if length > 0 {
            path.push(rest[..length].to_owned());
        }
        rest = &rest[length..];
        match rest.strip_prefix("::") {
            Some(further) if length > 0 => rest = further,
            _ => break,
        }
    }
    found.push(path);
    rest.strip_prefix(" as ")
        .map_or(rest, |renamed| renamed.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_'))
}

/// The file that holds what `path` names: the longest prefix that is a module, or what that module re-exports under the name.
fn resolve<'m>(
    path: &Module,
    modules: &'m BTreeMap<Module, &Source>,
    uses: &BTreeMap<&Module, Vec<Module>>,
    depth: usize,
) -> Option<&'m Module> {
    let length = (0..=path.len()).rev().find(|length| modules.contains_key(&path[..*length]))?;
    let (holder, _) = modules.get_key_value(&path[..length])?;
    let Some(item) = path.get(length).filter(|_| depth < 4) else { return Some(holder) };
    let is_of_child = |used: &&Module| used.last() == Some(item) && used.len() > length + 1 && used.starts_with(holder);
    match uses.get(holder).into_iter().flatten().find(is_of_child) {
        Some(used) => resolve(used, modules, uses, depth + 1),
        None => Some(holder),
    }
}

/// Each set of modules that reach each other, as its names.
fn cycles(graph: &BTreeMap<&Module, BTreeSet<&Module>>) -> Vec<String> {
    let reach = |from: &Module| {
        let mut seen: BTreeSet<&Module> = BTreeSet::new();
        let mut open: Vec<&Module> = graph.get(from).into_iter().flatten().copied().collect();
        while let Some(next) = open.pop() {
            if seen.insert(next) {
                open.extend(graph.get(next).into_iter().flatten().copied());
            }
        }
        seen
    };
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = graph.keys().map(|at| (*at, reach(at))).collect();
    let name = |module: &Module| if module.is_empty() { "the root".to_owned() } else { module.join("::") };
    let together = |at: &Module| {
        let others = reached[at].iter().filter(|other| reached.get(**other).is_some_and(|back| back.contains(at)));
        others.map(|other| name(other)).collect::<Vec<_>>().join(", ")
    };
    let all: BTreeSet<String> = graph.keys().map(|at| together(at)).filter(|names| !names.is_empty()).collect();
    all.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<Source> =
            files.iter().map(|(at, text)| Source::new(&format!("crates/a/src/{at}"), text)).collect();
        check(&files).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn modules_that_need_each_other_fire() {
        assert_eq!(
            whats(&[("lib.rs", "mod a; mod b;"), ("a.rs", "use crate::b::B;"), ("b.rs", "fn f() { crate::a::g() }")]),
            ["modules in a cycle: a, b"]
        );
        let files =
            [("lib.rs", ""), ("a/mod.rs", ""), ("a/b.rs", "use super::c::{D, E as F};"), ("a/c.rs", "use super::b;")];
        assert_eq!(whats(&files), ["modules in a cycle: a::b, a::c"]);
        let through =
            [("lib.rs", ""), ("a.rs", "use crate::{b::X, d};"), ("b.rs", "use crate::c;"), ("c.rs", "use crate::a;")];
        assert_eq!(whats(&through), ["modules in a cycle: a, b, c"]);
    }

    #[test]
    fn what_a_module_exports_of_its_children_stands_for_them() {
        let root = ("lib.rs", "mod a; mod b; pub use a::A; pub use b::{B, Other};");
        assert_eq!(whats(&[root, ("a.rs", "use crate::B;"), ("b.rs", "use crate::A;")]).len(), 1);
        assert!(whats(&[root, ("a.rs", "use crate::B;"), ("b.rs", "fn f() {}")]).is_empty());
        let parent = ("a/mod.rs", "mod c; use c::C; struct Shared; fn f(c: C) {}");
        assert!(
            whats(&[("lib.rs", ""), parent, ("a/c.rs", "use super::Shared;")]).is_empty(),
            "a child and its module"
        );
    }

    #[test]
    fn tests_and_comments_are_not_looked_at() {
        let a = ("a.rs", "use crate::b;\n");
        let b = ("b.rs", "// crate::a\n#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n");
        assert!(whats(&[("lib.rs", ""), a, b]).is_empty());
    }
}
