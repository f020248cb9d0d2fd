//! Every command of `rapt` in a `sh` block of the README and of docs runs, in a folder with what the commands read.
//!
//! Blocks that do not run have a title that says why; bindings/python/tests/test_docs.py counts them.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|end| end == "md") {
            found.push(path);
        }
    }
}

/// The lines of `sh` blocks without a title, comments left out.
fn commands(text: &str) -> Vec<String> {
    let (mut is_open, mut found) = (false, Vec::new());
    for line in text.lines() {
        if line.starts_with("```") {
            is_open = line == "```sh";
        } else if is_open {
            let command = line.split(" #").next().unwrap_or_default().trim();
            if !command.is_empty() && !command.starts_with('#') {
                found.push(command.to_owned());
            }
        }
    }
    found
}

/// A .npy file in row-major order: a magic number, a header that ends at a multiple of 64 bytes, the elements.
fn npy(descr: &str, shape: &[usize], element: impl Fn(usize) -> Vec<u8>) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    while (10 + header.len() + 1) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut file = vec![0x93, b'N', b'U', b'M', b'P', b'Y', 1, 0];
    file.extend(u16::try_from(header.len()).expect("a short header").to_le_bytes());
    file.extend(header.bytes());
    file.extend((0..shape.iter().product()).flat_map(element));
    file
}

#[test]
fn the_commands_of_the_documentation_run() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("docs-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("examples/layout")).expect("a folder");
    for entry in std::fs::read_dir(root().join("examples/layout")).expect("examples").flatten() {
        std::fs::copy(entry.path(), folder.join("examples/layout").join(entry.file_name())).expect("a copy");
    }
    let archive = root().join("crates/rapt-pt2/tests/fixtures/torch-2.15/state.pt2");
    std::fs::copy(archive, folder.join("model.pt2")).expect("a copy");
    let number = |at: usize| (at as f32 * 0.37).sin().to_le_bytes().to_vec();
    let files = [("q", 3), ("k", 5), ("v", 5)].map(|(name, len)| (name, npy("<f4", &[1, 2, len, 8], number)));
    let of_codes = [
        ("k_int8", npy("|i1", &[1, 2, 5, 8], |at| vec![at as u8])),
        ("k_descale", npy("<f4", &[1, 2, 5], number)),
        ("v_nvfp4", npy("|u1", &[1, 2, 5, 4], |at| vec![at as u8])),
        ("v_descale", npy("|u1", &[1, 2, 5, 1], |_| vec![0x38])),
    ];
    for (name, bytes) in files.into_iter().chain(of_codes) {
        std::fs::write(folder.join(format!("{name}.npy")), bytes).expect("written");
    }
    let mut found = vec![root().join("README.md")];
    pages(&root().join("docs"), &mut found);
    let mut ran = 0;
    for page in found {
        for command in commands(&std::fs::read_to_string(&page).expect("a page")) {
            let place = format!("{}: {command}", page.display());
            let words = command.strip_prefix("rapt ").unwrap_or_else(|| panic!("{place}: no command of rapt"));
            let output = Command::new(env!("CARGO_BIN_EXE_rapt"))
                .args(words.split_whitespace())
                .current_dir(&folder)
                .output()
                .expect("starts");
            assert!(output.status.success(), "{place}\n{}", String::from_utf8_lossy(&output.stderr));
            ran += 1;
        }
    }
    assert!(folder.join("out.npy").exists() && folder.join("lse.npy").exists());
    std::fs::remove_dir_all(&folder).expect("gone");
    assert!(ran > 10, "{ran} commands");
}
