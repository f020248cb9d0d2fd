//! The kernels' source: the files of `kernels/` as they are, and the one text that NVRTC takes for a kernel.
//!
//! `#include "common/ptx.cuh"` names a file from the folder `kernels/`. A file is taken at its first include, once; `#line`
//! directives make the compiler's messages name file and line. Deliberately absent: files of CUDA (NVRTC bundles none), and
//! includes under a condition, which are taken like others.

use thiserror::Error;

macro_rules! files {
    ($($name:literal),* $(,)?) => { &[$(($name, include_str!(concat!("../kernels/", $name)))),*] };
}

/// Every file of `kernels/` by its name there.
pub(crate) const FILES: &[(&str, &str)] = files![
    "append.cu",
    "backward.cu",
    "backward/hopper_exponents.cuh",
    "backward/hopper_items.cuh",
    "backward/hopper_load.cuh",
    "backward/hopper_mask.cuh",
    "backward/hopper_weigh.cuh",
    "backward/key_tile.cuh",
    "backward/mask_tile.cuh",
    "backward/pairs.cuh",
    "backward/products.cuh",
    "backward/request.cuh",
    "backward/sequences.cuh",
    "backward_halves.cu",
    "backward_hopper.cu",
    "backward_hopper_wide.cu",
    "backward_mask.cu",
    "backward_mma.cu",
    "backward_parts.cu",
    "backward_rows.cu",
    "combine.cu",
    "common/code_scales.cuh",
    "common/codes.cuh",
    "common/dropout.cuh",
    "common/dtype.cuh",
    "common/encode.cuh",
    "common/epilogue.cuh",
    "common/fragment.cuh",
    "common/gather.cuh",
    "common/mask.cuh",
    "common/mask_bits.cuh",
    "common/math.cuh",
    "common/online_softmax.cuh",
    "common/pages.cuh",
    "common/params.cuh",
    "common/ptx.cuh",
    "common/scores.cuh",
    "common/softmax.cuh",
    "common/swizzle.cuh",
    "common/tile.cuh",
    "common/types.cuh",
    "decode.cu",
    "decode/code_factors.cuh",
    "decode/codes.cuh",
    "decode/columns.cuh",
    "decode/deal.cuh",
    "decode/hand_over.cuh",
    "decode/items.cuh",
    "decode/load_codes.cuh",
    "decode/pages.cuh",
    "decode_codes.cu",
    "deviation.cu",
    "deviation/row.cuh",
    "deviation_end.cu",
    "generic.cu",
    "hopper.cu",
    "hopper/careful.cuh",
    "hopper/consumer.cuh",
    "hopper/halves.cuh",
    "hopper/load.cuh",
    "hopper/mask_ring.cuh",
    "hopper/softmax.cuh",
    "hopper/store.cuh",
    "hopper/tma.cuh",
    "hopper/wgmma.cuh",
    "hopper/work.cuh",
    "hopper_f32.cu",
    "int8.cu",
    "int8/products.cuh",
    "int8/queries.cuh",
    "int8/tiles.cuh",
    "latent.cu",
    "mma.cu",
    "mma/coded_tiles.cuh",
    "mma/numbers.cuh",
    "mma/weighed_softmax.cuh",
    "varlen.cu",
    "wide.cu",
    "wide/boxes.cuh",
    "wide/half.cuh",
    "wide/pieces.cuh",
    "wide/rows.cuh",
    "wide/tf32.cuh",
];

/// An include that cannot be resolved. None is in [`FILES`]: a test resolves each.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum IncludeError {
    /// No file has this name.
    #[error("{file}:{line}: there is no file {name:?} in kernels/")]
    Unknown { file: String, line: usize, name: String },
    /// The file is being included already.
    #[error("{file}:{line}: {name:?} includes itself, through {file:?}")]
    Cyclic { file: String, line: usize, name: String },
    /// What follows `#include` is no name in quotation marks.
    #[error("{file}:{line}: {text:?} is not #include \"file\"")]
    Malformed { file: String, line: usize, text: String },
}

/// The text of one kernel while it is put together.
struct Resolver<'a> {
    files: &'a [(&'a str, &'a str)],
    /// Files taken so far, and whether each is complete.
    taken: Vec<(&'a str, bool)>,
    text: String,
}

impl<'a> Resolver<'a> {
    fn add(&mut self, name: &'a str, contents: &'a str) -> Result<(), IncludeError> {
        let place = self.taken.len();
        self.taken.push((name, false));
        self.text.push_str(&format!("#line 1 \"{name}\"\n"));
        for (at, text) in contents.lines().enumerate() {
            let line = at + 1;
            let Some(rest) = text.trim_start().strip_prefix("#include") else {
                // Each file comes once: the pragma is for editors and host compilers, and NVRTC warns of it in the main file.
                self.text.push_str(if text.trim() == "#pragma once" { "" } else { text });
                self.text.push('\n');
                continue;
            };
            let file = || name.to_owned();
            let Some(included) = rest.trim().strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else {
                return Err(IncludeError::Malformed { file: file(), line, text: text.to_owned() });
            };
            match self.taken.iter().find(|(taken, _)| *taken == included) {
                Some((_, true)) => self.text.push('\n'),
                Some((_, false)) => {
                    return Err(IncludeError::Cyclic { file: file(), line, name: included.to_owned() });
                }
                None => {
                    let Some((included, contents)) = self.files.iter().find(|(known, _)| *known == included) else {
                        return Err(IncludeError::Unknown { file: file(), line, name: included.to_owned() });
                    };
                    self.add(included, contents)?;
                    self.text.push_str(&format!("#line {} \"{name}\"\n", line + 1));
                }
            }
        }
        self.taken[place].1 = true;
        Ok(())
    }
}

/// The text of file `root` with what it includes, each file once and before what includes it.
///
/// # Errors
/// [`IncludeError`].
fn resolve(files: &[(&str, &str)], root: &str) -> Result<String, IncludeError> {
    let mut resolver = Resolver { files, taken: Vec::new(), text: String::new() };
    let Some((name, contents)) = files.iter().find(|(name, _)| *name == root) else {
        return Err(IncludeError::Unknown { file: "variant/mod.rs".to_owned(), line: 0, name: root.to_owned() });
    };
    resolver.add(name, contents)?;
    Ok(resolver.text)
}

/// The whole text of a file of `kernels/`, for NVRTC. Where an include cannot be resolved, a text that the compiler refuses with the
/// reason.
pub(crate) fn text(root: &str) -> String {
    resolve(FILES, root).unwrap_or_else(|error| format!("#error {error}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::{Compiler, Nvrtc};

    const A: (&str, &str) = ("a.cu", "// a\n#include \"x/b.cuh\"\n#include \"x/c.cuh\"\nint a;\n");
    const B: (&str, &str) = ("x/b.cuh", "#pragma once\n#include \"x/c.cuh\"\nint b;\n");
    const C: (&str, &str) = ("x/c.cuh", "#pragma once\nint c;\n");

    #[test]
    fn a_file_comes_once_before_what_includes_it_and_lines_keep_their_names() {
        let expected = "#line 1 \"a.cu\"\n// a\n#line 1 \"x/b.cuh\"\n\n#line 1 \"x/c.cuh\"\n\nint c;\n#line 3 \"x/b.cuh\"\nint b;\n\
                        #line 3 \"a.cu\"\n\nint a;\n";
        assert_eq!(resolve(&[A, B, C], "a.cu").unwrap(), expected);
    }

    #[test]
    fn what_cannot_be_included_is_named_with_its_place() {
        let (file, line) = ("a.cu".to_owned(), 3);
        let name = "x/c.cuh".to_owned();
        let no_c = [A, ("x/b.cuh", "int b;\n")];
        assert_eq!(resolve(&no_c, "a.cu"), Err(IncludeError::Unknown { file, line, name }));
        let cycle = [A, B, ("x/c.cuh", "int c;\n\n#include \"x/b.cuh\"\n")];
        let (file, name) = ("x/c.cuh".to_owned(), "x/b.cuh".to_owned());
        assert_eq!(resolve(&cycle, "a.cu"), Err(IncludeError::Cyclic { file, line: 3, name }));
        let itself = resolve(&[("a.cu", "#include \"a.cu\"\n")], "a.cu").unwrap_err();
        assert_eq!(itself.to_string(), "a.cu:1: \"a.cu\" includes itself, through \"a.cu\"");
        let angled = resolve(&[("a.cu", "#include <cuda.h>\n")], "a.cu").unwrap_err();
        assert_eq!(angled.to_string(), "a.cu:1: \"#include <cuda.h>\" is not #include \"file\"");
        assert!(matches!(resolve(&[A], "b.cu"), Err(IncludeError::Unknown { .. })));
    }

    #[test]
    fn every_file_of_the_folder_is_known_and_resolves() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut names = Vec::new();
        for part in ["", "backward", "common", "decode", "deviation", "hopper", "int8", "mma", "wide"] {
            for entry in std::fs::read_dir(folder.join(part)).unwrap() {
                let path = entry.unwrap().path();
                if path.is_file() {
                    let name = path.strip_prefix(&folder).unwrap().to_str().unwrap().replace('\\', "/");
                    names.push(name);
                }
            }
        }
        names.sort_unstable();
        assert_eq!(names, FILES.iter().map(|(name, _)| *name).collect::<Vec<_>>());
        for name in names {
            assert!(resolve(FILES, &name).unwrap().starts_with(&format!("#line 1 \"{name}\"\n")));
        }
    }

    #[test]
    fn messages_name_file_and_line() {
        let Ok(compiler) = Nvrtc::find(&[]) else { return };
        let files =
            [("a.cu", "#include \"x/b.cuh\"\nint a;\nint b = c;\n"), ("x/b.cuh", "int b(int x) { return y; }\n")];
        let text = resolve(&files, "a.cu").unwrap();
        let log = compiler.compile("kernel.cu", &text, &["-arch=sm_90a".to_owned()]).unwrap().unwrap_err();
        assert!(log.contains("x/b.cuh(1): error") && log.contains("a.cu(3): error"), "{log}");
    }
}
