//! Which module of this crate uses which: those before it in the order that lib.rs states, and none after it.

use std::path::{Path, PathBuf};

/// The order that the documentation of lib.rs states.
fn order() -> Vec<&'static str> {
    let text = include_str!("../src/lib.rs");
    let stated = text.lines().filter_map(|line| line.strip_prefix("//! ")).find(|line| line.starts_with("error  "));
    stated.expect("lib.rs states an order").split_whitespace().collect()
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// What a line of code names behind `crate::`, if it is a module.
fn used(line: &str) -> impl Iterator<Item = &str> {
    line.split("crate::").skip(1).filter_map(|rest| {
        let name = rest.split(|c: char| !c.is_ascii_lowercase() && c != '_').next()?;
        (!name.is_empty()).then_some(name)
    })
}

#[test]
fn no_module_uses_one_that_comes_after_it() {
    let (order, folder) = (order(), Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let mut files = Vec::new();
    sources(&folder, &mut files);
    let (mut modules, mut uses) = (std::collections::BTreeSet::new(), 0);
    for path in files {
        let name = path.strip_prefix(&folder).unwrap().to_str().unwrap().replace(std::path::MAIN_SEPARATOR, "/");
        let module = name.split(['/', '.']).next().unwrap().to_owned();
        // The crate's root, and its tests.
        if module == "lib" || module == "recorded" {
            continue;
        }
        let place = |module: &str| {
            order
                .iter()
                .position(|known| *known == module)
                .unwrap_or_else(|| panic!("{name}: {module} is not in the order"))
        };
        let own = place(&module);
        let text = std::fs::read_to_string(&path).unwrap();
        for (line, used) in text
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .flat_map(|line| used(line).map(move |used| (line, used)))
        {
            assert!(place(used) <= own, "{name} comes before {used}: {line}");
            uses += 1;
        }
        modules.insert(module);
    }
    assert_eq!(modules.len(), order.len(), "every module has one place: {modules:?}");
    assert!(uses > 40, "{uses} uses were found");
}
