//! 64-bit little-endian libraries for macOS: a header of 32 bytes, then load commands, each with its kind and length.
//!
//! Deliberately absent: files of several architectures; symbols.

use super::Needs;
use super::bytes::{text_at, u32_at};

const MAGIC: u32 = 0xfeed_facf;

/// The needs of a library for macOS; `None` if it is none, or a broken one.
pub(super) fn needs(file: &[u8]) -> Option<Needs> {
    const LOAD: [u32; 4] = [0xc, 0x8000_0018, 0x8000_001f, 0x20];
    const OWN_NAME: u32 = 0xd;
    const BUILT_FOR: u32 = 0x32;
    const LEAST: u32 = 0x24;
    if u32_at(file, 0)? != MAGIC {
        return None;
    }
    let machine = match u32_at(file, 4)? {
        0x0100_000c => "aarch64",
        0x0100_0007 => "x86_64",
        _ => return None,
    };
    let mut needs = Needs { machine, ..Needs::default() };
    let mut at = 32usize;
    for _ in 0..u32_at(file, 16)? {
        let (kind, len) = (u32_at(file, at)?, u32_at(file, at.checked_add(4)?)? as usize);
        let command = file.get(at..at.checked_add(len)?)?;
        let name = || text_at(command, u32_at(command, 8)? as usize);
        if LOAD.contains(&kind) {
            needs.libraries.insert(name()?);
        } else if kind == OWN_NAME {
            needs.soname = Some(name()?);
        } else if kind == BUILT_FOR || kind == LEAST {
            let version = u32_at(command, if kind == LEAST { 8 } else { 12 })?;
            needs.versions.insert(format!("macos_{}.{}", version >> 16, version >> 8 & 0xff));
        }
        at += len.max(8);
    }
    Some(needs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(kind: u32, words: &[u32], text: &str) -> Vec<u8> {
        let mut body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        body.extend(text.bytes());
        body.resize(body.len().next_multiple_of(8) + 8, 0);
        let len = body.len() as u32 + 8;
        [kind.to_le_bytes(), len.to_le_bytes()].concat().into_iter().chain(body).collect()
    }

    #[test]
    fn libraries_name_and_least_system_are_read_and_a_cut_file_is_refused() {
        let commands = [
            command(0xc, &[24, 0, 0, 0], "/usr/lib/libSystem.B.dylib"),
            command(0xd, &[24, 0, 0, 0], "@rpath/librapt.0.1.dylib"),
            command(0x32, &[1, 11 << 16, 14 << 16, 0], ""),
        ];
        let header = [MAGIC, 0x0100_000c, 0, 6, commands.len() as u32, 0, 0, 0];
        let mut file: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        file.extend(commands.concat());
        let found = needs(&file).unwrap();
        assert_eq!(found.machine, "aarch64");
        assert_eq!(found.libraries, ["/usr/lib/libSystem.B.dylib".to_owned()].into());
        assert_eq!(found.soname.as_deref(), Some("@rpath/librapt.0.1.dylib"));
        assert_eq!(found.macos(), Some((11, 0)));
        for len in 0..file.len() {
            assert_eq!(needs(&file[..len]), None, "{len}");
        }
    }
}
