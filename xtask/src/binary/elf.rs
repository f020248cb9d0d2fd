//! What a Linux library asks of the system that loads it: the libraries it needs and the versions of their symbols.
//!
//! Reads two sections of a 64-bit little-endian ELF file: `.dynamic` (type 6: tag and value, 8 bytes each; tag 1 is a
//! needed library's name, tag 14 its own) and `.gnu.version_r` (type 0x6ffffffe: chains of 16-byte records). Each refers to its
//! string table by the section's link. Deliberately absent: everything else.

use std::collections::BTreeSet;

use super::Needs;
use super::bytes::{text_at, u16_at, u32_at, u64_at};

struct Section {
    kind: u32,
    offset: usize,
    size: usize,
    link: usize,
}

/// The needs of an ELF file; `None` if it is none, or a broken one.
pub(super) fn needs(file: &[u8]) -> Option<Needs> {
    const MAGIC_64_LITTLE: &[u8] = b"\x7fELF\x02\x01";
    const DYNAMIC: u32 = 6;
    const VERSION_NEEDS: u32 = 0x6fff_fffe;
    const SYMBOLS: u32 = 11;
    if !file.starts_with(MAGIC_64_LITTLE) {
        return None;
    }
    let (start, size, count) = (u64_at(file, 0x28)?, u16_at(file, 0x3a)?, u16_at(file, 0x3c)?);
    let sections: Vec<Section> = (0..count)
        .map(|i| {
            let at = start.checked_add(i.checked_mul(size)?)?;
            Some(Section {
                kind: u32_at(file, at.checked_add(4)?)?,
                offset: u64_at(file, at.checked_add(0x18)?)?,
                size: u64_at(file, at.checked_add(0x20)?)?,
                link: u32_at(file, at.checked_add(0x28)?)? as usize,
            })
        })
        .collect::<Option<_>>()?;
    let machine = match u16_at(file, 0x12)? {
        62 => "x86_64",
        183 => "aarch64",
        _ => return None,
    };
    let mut needs = Needs { machine, ..Needs::default() };
    for section in sections.iter().filter(|section| [DYNAMIC, VERSION_NEEDS, SYMBOLS].contains(&section.kind)) {
        let data = file.get(section.offset..section.offset.checked_add(section.size)?)?;
        let table = sections.get(section.link)?;
        let names = file.get(table.offset..table.offset.checked_add(table.size)?)?;
        if section.kind == SYMBOLS {
            // Name, kind and binding, visibility, section (0: of another library), value and size; the first is none.
            for symbol in data.chunks_exact(24).skip(1) {
                if u16_at(symbol, 6)? == 0 {
                    needs.open.insert(text_at(names, u32_at(symbol, 0)? as usize)?);
                }
            }
        } else if section.kind == DYNAMIC {
            for entry in data.chunks_exact(16) {
                match u64_at(entry, 0)? {
                    1 => drop(needs.libraries.insert(text_at(names, u64_at(entry, 8)?)?)),
                    14 => needs.soname = Some(text_at(names, u64_at(entry, 8)?)?),
                    _ => {}
                }
            }
        } else {
            read_versions(data, names, &mut needs.versions)?;
        }
    }
    Some(needs)
}

/// Follows the chain of libraries and, for each, its chain of versions.
fn read_versions(data: &[u8], names: &[u8], versions: &mut BTreeSet<String>) -> Option<()> {
    let mut library = 0usize;
    loop {
        let count = u16_at(data, library + 2)?;
        let mut version = library.checked_add(u32_at(data, library + 8)? as usize)?;
        for _ in 0..count {
            versions.insert(text_at(names, u32_at(data, version + 8)? as usize)?);
            version = version.checked_add(u32_at(data, version + 12)? as usize)?;
        }
        match u32_at(data, library + 12)? {
            0 => return Some(()),
            next => library = library.checked_add(next as usize)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test program itself is an ELF file whose needs are known.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn the_needs_of_this_program() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let needs = needs(&file).unwrap();
        assert!(needs.libraries.contains("libc.so.6"), "{needs:?}");
        assert!(needs.glibc().unwrap() >= (2, 2), "{needs:?}");
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn a_broken_file_is_refused_and_never_panics() {
        let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(needs(b"MZ"), None);
        assert_eq!(needs(&file[..100]), None);
        let mut broken = file[..64].to_vec();
        broken[0x28..0x30].fill(0xff);
        assert_eq!(needs(&broken), None);
    }

    #[test]
    fn versions_compare_as_numbers() {
        let versions = ["GLIBC_2.4", "GLIBC_2.28", "GLIBC_2.9", "GLIBC_PRIVATE", "GCC_3.0"].map(str::to_owned);
        assert_eq!(Needs { versions: versions.into(), ..Needs::default() }.glibc(), Some((2, 28)));
    }
}
