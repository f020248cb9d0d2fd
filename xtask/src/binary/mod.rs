//! What a library asks of the system that loads it, in each of the three formats.
//!
//! Deliberately absent: everything else that a file says of itself.

mod bytes;
mod elf;
mod macho;
mod pe;

use std::collections::BTreeSet;

/// What a library needs at load.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// As rustc's names of platforms begin: `x86_64`, `aarch64`.
    pub(crate) machine: &'static str,
    /// Names of libraries, such as `libc.so.6`, on Windows in small letters.
    pub(crate) libraries: BTreeSet<String>,
    /// The name under which programs that link it look for it.
    pub(crate) soname: Option<String>,
    /// Names of symbol versions, such as `GLIBC_2.28`; of a library for macOS the system's, such as `macos_11.0`.
    pub(crate) versions: BTreeSet<String>,
    /// What it takes from whoever has it, by name; on Windows nothing is without a library.
    pub(crate) open: BTreeSet<String>,
    /// What others may take from it, of a library for Windows.
    pub(crate) offered: BTreeSet<String>,
}

impl Needs {
    /// The newest `PREFIXx.y` asked for.
    fn newest(&self, prefix: &str) -> Option<(u32, u32)> {
        let numbers = self.versions.iter().filter_map(|version| {
            let mut parts = version.strip_prefix(prefix)?.split('.');
            Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
        });
        numbers.max()
    }

    /// The newest `GLIBC_x.y` asked for.
    pub(crate) fn glibc(&self) -> Option<(u32, u32)> {
        self.newest("GLIBC_")
    }

    /// The oldest macOS that loads it.
    pub(crate) fn macos(&self) -> Option<(u32, u32)> {
        self.newest("macos_")
    }
}

/// The needs of a library; `None` if it is none, or a broken one.
pub(crate) fn needs(file: &[u8]) -> Option<Needs> {
    elf::needs(file).or_else(|| macho::needs(file)).or_else(|| pe::needs(file))
}
