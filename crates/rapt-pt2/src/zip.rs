//! The directory of a stored zip archive, read from memory.
//!
//! ```text
//! local header · name · extra · bytes of the entry · [descriptor]   once per entry
//! central directory: one record per entry                          offset, size, CRC-32, name
//! [zip64 end record · its locator] · end record                    the archive's last bytes
//! ```
//!
//! The crate `zip` (9.8, read 2026-11) was not taken: for archives that are damaged or have bytes before them it searches the file for
//! another directory and falls back to earlier end records, so that one file can be read in more than one way, and
//! it allocates some 300 bytes per record before a caller can set a bound. `torch.export.save` writes one form only, and this
//! reader accepts that form only: no archive comment, no bytes before or after, a directory that ends where the end
//! records begin. Sizes come from the directory, because torch's local headers leave them to data descriptors.
//!
//! Deliberately absent: decompression, encryption, several disks, and any write.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::Error;

/// The most entries that are read. A program has one for each storage of its weights.
const MAX_ENTRIES: u64 = 1 << 18;
/// The longest name of an entry, in bytes.
const MAX_NAME_BYTES: usize = 1024;

const LOCAL_HEADER: u32 = 0x0403_4b50;
const CENTRAL_RECORD: u32 = 0x0201_4b50;
const END_RECORD: u32 = 0x0605_4b50;
const ZIP64_END_RECORD: u32 = 0x0606_4b50;
const ZIP64_LOCATOR: u32 = 0x0706_4b50;
const LOCAL_HEADER_BYTES: usize = 30;
const CENTRAL_RECORD_BYTES: usize = 46;
const END_RECORD_BYTES: usize = 22;
const ZIP64_END_RECORD_BYTES: usize = 56;
const ZIP64_LOCATOR_BYTES: usize = 20;
/// The identifier of the extra field that holds sizes and offsets of 64 bits.
const ZIP64_EXTRA: u16 = 1;
/// Flag bits: encrypted, strongly encrypted, directory encrypted.
const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;

/// An entry: where its bytes lie, and their checksum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The bytes' place in the archive.
    pub(crate) range: Range<usize>,
    /// The CRC-32 that the directory gives.
    pub(crate) crc32: u32,
}

/// The entries of an archive by name.
pub(crate) type Entries = BTreeMap<String, Entry>;

/// Where the central directory lies, and how many records it has.
struct Directory {
    range: Range<usize>,
    records: u64,
}

/// A record of the central directory.
struct Record<'a> {
    name: &'a str,
    flags: u16,
    method: u16,
    crc32: u32,
    stored_bytes: u64,
    header: u64,
}

/// Reads the directory of `archive` and checks where each entry lies.
///
/// Memory is at most eight times the directory's bytes; no byte of a payload is touched.
pub(crate) fn read(archive: &[u8]) -> Result<Entries, Error> {
    let directory = find_directory(archive)?;
    let mut rest = &archive[directory.range.clone()];
    let mut entries = Entries::new();
    let mut places: Vec<(Range<usize>, &str)> = Vec::new();
    for _ in 0..directory.records {
        let record = take_record(&mut rest)?;
        let (range, header) = place(archive, &record, directory.range.start)?;
        places.push((header..range.end, record.name));
        let entry = Entry { range, crc32: record.crc32 };
        if entries.insert(record.name.to_owned(), entry).is_some() {
            return Err(Error::DuplicateEntry { name: record.name.to_owned() });
        }
    }
    if !rest.is_empty() {
        return Err(Error::NotZip { reason: "the directory has more bytes than its records" });
    }
    places.sort_by_key(|(range, _)| range.start);
    for pair in places.windows(2) {
        if pair[1].0.start < pair[0].0.end {
            return Err(Error::Overlap { first: pair[0].1.to_owned(), second: pair[1].1.to_owned() });
        }
    }
    Ok(entries)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// The first `count` bytes, which `bytes` then no longer has.
fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (head, tail) = bytes.split_at_checked(count)?;
    *bytes = tail;
    Some(head)
}

fn find_directory(archive: &[u8]) -> Result<Directory, Error> {
    let not_zip = |reason| Error::NotZip { reason };
    let end_at =
        archive.len().checked_sub(END_RECORD_BYTES).ok_or_else(|| not_zip("it is shorter than an end record"))?;
    let end = &archive[end_at..];
    if u32_at(end, 0) != END_RECORD {
        return Err(not_zip("its last 22 bytes are no end record: it is cut off, or something follows it"));
    }
    if u16_at(end, 20) != 0 {
        return Err(not_zip("its end record announces a comment that is not there"));
    }
    if u16_at(end, 4) != 0 || u16_at(end, 6) != 0 || u16_at(end, 8) != u16_at(end, 10) {
        return Err(not_zip("it is one of several disks"));
    }
    let (mut records, mut bytes, mut offset) =
        (u64::from(u16_at(end, 10)), u64::from(u32_at(end, 12)), u64::from(u32_at(end, 16)));
    let mut limit = end_at;
    let locator = end_at.checked_sub(ZIP64_LOCATOR_BYTES).map(|at| (at, &archive[at..end_at]));
    if let Some((locator_at, locator)) = locator.filter(|(_, locator)| u32_at(locator, 0) == ZIP64_LOCATOR) {
        let at = usize::try_from(u64_at(locator, 8))
            .ok()
            .filter(|at| at.checked_add(ZIP64_END_RECORD_BYTES).is_some_and(|end| end <= locator_at));
        let at = at.ok_or_else(|| not_zip("its zip64 end record is not where the locator says"))?;
        let wide = &archive[at..locator_at];
        if u32_at(wide, 0) != ZIP64_END_RECORD || u64_at(wide, 4) != (wide.len() - 12) as u64 {
            return Err(not_zip("its zip64 end record is not where the locator says"));
        }
        let read = (u64_at(wide, 32), u64_at(wide, 40), u64_at(wide, 48));
        let agree = |narrow: u64, saturated: u64, wide: u64| narrow == saturated || narrow == wide;
        if u64_at(wide, 24) != read.0
            || !agree(records, 0xffff, read.0)
            || !agree(bytes, 0xffff_ffff, read.1)
            || !agree(offset, 0xffff_ffff, read.2)
        {
            return Err(not_zip("its two end records disagree"));
        }
        (records, bytes, offset) = read;
        limit = at;
    }
    if records > MAX_ENTRIES {
        return Err(Error::Limit { what: "the number of entries".to_owned(), found: records, limit: MAX_ENTRIES });
    }
    let place = (usize::try_from(offset).ok(), usize::try_from(bytes).ok());
    let (Some(start), Some(bytes)) = place else { return Err(not_zip("its directory lies outside it")) };
    if start.checked_add(bytes) != Some(limit) {
        return Err(not_zip("its directory does not end where its end records begin"));
    }
    Ok(Directory { range: start..limit, records })
}

fn take_record<'a>(rest: &mut &'a [u8]) -> Result<Record<'a>, Error> {
    let cut = || Error::NotZip { reason: "a record of its directory is cut off" };
    let fixed = take(rest, CENTRAL_RECORD_BYTES).ok_or_else(cut)?;
    if u32_at(fixed, 0) != CENTRAL_RECORD {
        return Err(Error::NotZip { reason: "a record of its directory has no signature" });
    }
    let name = take(rest, u16_at(fixed, 28).into()).ok_or_else(cut)?;
    let extra = take(rest, u16_at(fixed, 30).into()).ok_or_else(cut)?;
    take(rest, u16_at(fixed, 32).into()).ok_or_else(cut)?;
    let name = plain_path(name)?;
    let (mut stored_bytes, mut header) = (u64::from(u32_at(fixed, 20)), u64::from(u32_at(fixed, 42)));
    let mut full_bytes = u64::from(u32_at(fixed, 24));
    // The zip64 field holds those of the three that are saturated, in this order.
    let mut wide = zip64_extra(extra);
    for value in [&mut full_bytes, &mut stored_bytes, &mut header] {
        if *value == 0xffff_ffff {
            let field = take(&mut wide, 8);
            let reason = "its size or offset takes 64 bits, which its record does not have";
            let field = field.ok_or_else(|| Error::EntryPlace { name: name.to_owned(), reason })?;
            *value = u64_at(field, 0);
        }
    }
    let (flags, method) = (u16_at(fixed, 8), u16_at(fixed, 10));
    if flags & ENCRYPTED != 0 {
        return Err(Error::Encrypted { name: name.to_owned() });
    }
    if method != 0 {
        return Err(Error::Compressed { name: name.to_owned(), method });
    }
    if full_bytes != stored_bytes {
        return Err(Error::EntryPlace { name: name.to_owned(), reason: "it is stored, but its two sizes differ" });
    }
    Ok(Record { name, flags, method, crc32: u32_at(fixed, 16), stored_bytes, header })
}

/// The content of the zip64 field among the extra fields, empty where there is none.
fn zip64_extra(mut extra: &[u8]) -> &[u8] {
    while let Some(head) = take(&mut extra, 4) {
        let Some(content) = take(&mut extra, u16_at(head, 2).into()) else { break };
        if u16_at(head, 0) == ZIP64_EXTRA {
            return content;
        }
    }
    &[]
}

/// `name` as text, where it is a relative path without empty, `.` or `..` components, backslashes and NUL.
fn plain_path(name: &[u8]) -> Result<&str, Error> {
    if name.len() > MAX_NAME_BYTES {
        let what = "the length of an entry's name in bytes".to_owned();
        return Err(Error::Limit { what, found: name.len() as u64, limit: MAX_NAME_BYTES as u64 });
    }
    let plain =
        |name: &&str| !name.contains(['\\', '\0']) && name.split('/').all(|part| !matches!(part, "" | "." | ".."));
    let text = std::str::from_utf8(name).ok().filter(plain);
    text.ok_or_else(|| Error::EntryName { name: String::from_utf8_lossy(name).into_owned() })
}

/// Where the bytes of a record's entry lie, and where its local header starts. `end` is where the directory begins.
fn place(archive: &[u8], record: &Record<'_>, end: usize) -> Result<(Range<usize>, usize), Error> {
    let wrong = |reason| Error::EntryPlace { name: record.name.to_owned(), reason };
    let outside = || wrong("it reaches into the directory or past the end of the archive");
    let at = usize::try_from(record.header).ok().filter(|at| *at <= end).ok_or_else(outside)?;
    let mut rest = &archive[at..end];
    let fixed = take(&mut rest, LOCAL_HEADER_BYTES).ok_or_else(outside)?;
    if u32_at(fixed, 0) != LOCAL_HEADER {
        return Err(wrong("its local header has no signature"));
    }
    let name = take(&mut rest, u16_at(fixed, 26).into()).ok_or_else(outside)?;
    let extra = take(&mut rest, u16_at(fixed, 28).into()).ok_or_else(outside)?;
    if name != record.name.as_bytes()
        || u16_at(fixed, 8) != record.method
        || u16_at(fixed, 6) & ENCRYPTED != record.flags & ENCRYPTED
    {
        return Err(wrong("its local header and the directory disagree"));
    }
    let start = at + LOCAL_HEADER_BYTES + name.len() + extra.len();
    let bytes = usize::try_from(record.stored_bytes).ok().filter(|bytes| *bytes <= rest.len());
    let bytes = bytes.ok_or_else(outside)?;
    Ok((start..start + bytes, at))
}
