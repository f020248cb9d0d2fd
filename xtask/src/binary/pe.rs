//! 64-bit libraries for Windows: which others they load, and what they offer. Deliberately absent: what is loaded late.

use std::collections::BTreeSet;

use super::Needs;
use super::bytes::{text_at, u16_at, u32_at};

/// Addresses of the loaded library, as places of the file.
struct Sections<'a> {
    file: &'a [u8],
    /// First address, length, place.
    ranges: Vec<(u32, u32, u32)>,
}

impl Sections<'_> {
    fn place(&self, address: u32) -> Option<usize> {
        let within = |(first, len, _): &&(u32, u32, u32)| address.checked_sub(*first).is_some_and(|at| at < *len);
        let (first, _, place) = self.ranges.iter().find(within)?;
        place.checked_add(address - first).map(|at| at as usize)
    }

    fn text(&self, address: u32) -> Option<String> {
        text_at(self.file, self.place(address)?)
    }
}

/// The needs of a library for Windows; `None` if it is none, or a broken one.
pub(super) fn needs(file: &[u8]) -> Option<Needs> {
    const PE32_PLUS: usize = 0x20b;
    if !file.starts_with(b"MZ") {
        return None;
    }
    let header = u32_at(file, 0x3c)? as usize;
    if file.get(header..header.checked_add(4)?)? != b"PE\0\0" {
        return None;
    }
    let machine = match u16_at(file, header + 4)? {
        0x8664 => "x86_64",
        0xaa64 => "aarch64",
        _ => return None,
    };
    let (count, optional, len) = (u16_at(file, header + 6)?, header + 24, u16_at(file, header + 20)?);
    if u16_at(file, optional)? != PE32_PLUS {
        return None;
    }
    let section = |n: usize| {
        let at = optional + len + n * 40;
        let sizes = u32_at(file, at + 8)?.max(u32_at(file, at + 16)?);
        Some((u32_at(file, at + 12)?, sizes, u32_at(file, at + 20)?))
    };
    let sections = Sections { file, ranges: (0..count).map(section).collect::<Option<_>>()? };
    let directory = |n: usize| u32_at(file, optional + 112 + n * 8);
    let mut needs = Needs { machine, ..Needs::default() };
    if let Some(offered) = directory(0).filter(|address| *address != 0) {
        needs.offered = names(&sections, sections.place(offered)?)?;
    }
    if let Some(taken) = directory(1).filter(|address| *address != 0) {
        let mut at = sections.place(taken)?;
        loop {
            match u32_at(file, at + 12)? {
                0 => break,
                name => drop(needs.libraries.insert(sections.text(name)?.to_lowercase())),
            }
            at += 20;
        }
    }
    Some(needs)
}

/// The names of a table of what is offered.
fn names(sections: &Sections<'_>, table: usize) -> Option<BTreeSet<String>> {
    let (count, first) = (u32_at(sections.file, table + 24)?, sections.place(u32_at(sections.file, table + 32)?)?);
    (0..count as usize).map(|n| sections.text(u32_at(sections.file, first.checked_add(4 * n)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One section at address 0x1000, place 0x200, with both tables.
    fn sample() -> Vec<u8> {
        let mut file = vec![0; 0x400];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        let mut word = |at: usize, number: u32| put(at, &number.to_le_bytes());
        word(0x3c, 0x40);
        word(0x40 + 112 + 24, 0x1000);
        word(0x40 + 112 + 24 + 8, 0x1080);
        let section = 0x40 + 24 + 240;
        for (at, number) in [(8, 0x200), (12, 0x1000), (16, 0x200), (20, 0x200)] {
            word(section + at, number);
        }
        for (at, number) in [(24, 1), (32, 0x1040), (0x40, 0x1050), (0x80 + 12, 0x1060)] {
            word(0x200 + at, number);
        }
        put(0, b"MZ");
        put(0x40, b"PE\0\0");
        put(0x44, &0x8664u16.to_le_bytes());
        put(0x46, &1u16.to_le_bytes());
        put(0x54, &240u16.to_le_bytes());
        put(0x58, &0x20bu16.to_le_bytes());
        put(0x250, b"rapt_version\0");
        put(0x260, b"KERNEL32.dll\0");
        file
    }

    #[test]
    fn what_is_offered_and_what_is_taken_are_read_and_a_cut_file_never_panics() {
        let file = sample();
        let found = needs(&file).unwrap();
        assert_eq!(found.machine, "x86_64");
        assert_eq!(found.offered, ["rapt_version".to_owned()].into());
        assert_eq!(found.libraries, ["kernel32.dll".to_owned()].into());
        for len in 0..0x2a0 {
            let _ = needs(&file[..len]);
        }
        assert_eq!(needs(&file[..0x210]), None);
    }
}
