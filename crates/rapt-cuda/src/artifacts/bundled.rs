//! Machine code that comes with a package, so that a common request is served without a compiler.
//!
//! One file per architecture, `<arch>.cubins`, little-endian:
//!
//! ```text
//! magic [8] | compiler major, minor, number of entries: u32 each
//! per entry, by name:  name [32] | SHA-256 of the cubin [32] | its block's offset and packed bytes, its start in the block, bytes: u32 each
//! the blocks: cubins one after another, up to 2 MiB, packed by LZMA2
//! ```
//!
//! Variants of one kernel share most of their code, so cubins lie in the order of their variants and a block is packed as one:
//! the assortment takes a third of what cubins packed one by one do. What it costs is paid once a kernel: up to 2 MiB are unpacked.
//!
//! An entry is named by source and options, not by the compiler: which NVRTC this machine has, or whether it has one, is no
//! matter. What is cut short, changed or refused by the driver is not used, and the next source is asked: the cache on disk,
//! then the compiler. Machine code of x.0 runs on x.y too, so that one file serves a family. Deliberately absent: any
//! knowledge of where packages lie; a binding passes the folder, and a Rust program has the cache.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use lzma_rust2::{Lzma2Options, Lzma2Reader, Lzma2Writer};
use rapt_core::Arch;
use sha2::{Digest, Sha256};

use crate::variant::KernelVariant;

use super::cache::{DIGEST, digest};

const MAGIC: &[u8; 8] = b"raptshp2";
const HEAD: usize = MAGIC.len() + 3 * 4;
const ENTRY: usize = 2 * DIGEST + 4 * 4;
/// Bytes of cubins that are packed together, and how far back a match may lie.
const BLOCK_BYTES: u32 = 2 << 20;
/// More entries and bytes than any file has: a size beyond is a damaged one.
const MOST_ENTRIES: u32 = 1 << 16;
const MOST_BYTES: u32 = 1 << 28;

static FOLDER: Mutex<Option<PathBuf>> = Mutex::new(None);

/// The folder of a package in which `<arch>.cubins` lie. No effect on kernels that were loaded already.
pub fn set_shipped_folder(folder: PathBuf) {
    *FOLDER.lock().unwrap_or_else(PoisonError::into_inner) = Some(folder);
}

/// The folder that [`set_shipped_folder`] named.
pub(crate) fn folder() -> Option<PathBuf> {
    FOLDER.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The architecture whose shipped machine code a device of `arch` runs.
pub(crate) const fn family(arch: Arch) -> Arch {
    match arch {
        Arch::Sm86 | Arch::Sm87 | Arch::Sm89 => Arch::Sm80,
        Arch::Sm103 => Arch::Sm100,
        Arch::Sm121 => Arch::Sm120,
        own => own,
    }
}

/// `variant` as its family has it.
pub(crate) fn of_family(variant: &KernelVariant) -> KernelVariant {
    KernelVariant { arch: family(variant.arch), ..*variant }
}

/// The file of an architecture.
pub(crate) fn path(folder: &Path, arch: Arch) -> PathBuf {
    folder.join(format!("{}.cubins", family(arch).name()))
}

/// What a file says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShippedFacts {
    /// The architecture that it was compiled for.
    pub arch: Arch,
    /// Number of kernels.
    pub kernels: usize,
    /// The NVRTC that compiled them, major and minor.
    pub compiler: (u32, u32),
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_exactly(file: &mut std::fs::File, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    file.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

fn open(folder: &Path, arch: Arch) -> Option<(std::fs::File, ShippedFacts)> {
    let mut file = std::fs::File::open(path(folder, arch)).ok()?;
    let head = read_exactly(&mut file, HEAD)?;
    let [major, minor, kernels] = [8, 12, 16].map(|at| number(&head, at));
    let kernels = kernels.filter(|kernels| head.starts_with(MAGIC) && *kernels <= MOST_ENTRIES)?;
    Some((file, ShippedFacts { arch: family(arch), kernels: kernels as usize, compiler: (major?, minor?) }))
}

/// What is shipped in `folder` for a device of `arch`.
pub(crate) fn facts(folder: &Path, arch: Arch) -> Option<ShippedFacts> {
    open(folder, arch).map(|(_, facts)| facts)
}

/// The machine code of `variant` that is shipped in `folder`, if it is there and whole.
pub(crate) fn get(folder: &Path, variant: &KernelVariant) -> Option<Vec<u8>> {
    let (mut file, facts) = open(folder, variant.arch)?;
    let index = read_exactly(&mut file, facts.kernels * ENTRY)?;
    let name = digest(&of_family(variant), &[]);
    let entry = index.chunks_exact(ENTRY).find(|entry| entry.starts_with(&name))?;
    let [offset, packed, start, len] = [0, 4, 8, 12].map(|at| number(entry, 2 * DIGEST + at));
    let bytes = |n: Option<u32>| n.filter(|n| *n <= MOST_BYTES);
    let (offset, packed, start, len) = (offset?, bytes(packed)?, bytes(start)?, bytes(len)?);
    file.seek(SeekFrom::Start(u64::from(offset))).ok()?;
    let packed = read_exactly(&mut file, packed as usize)?;
    let cubin = unpack(&packed, start, len).ok();
    let whole =
        |cubin: &Vec<u8>| cubin.len() == len as usize && Sha256::digest(cubin).as_slice() == &entry[DIGEST..2 * DIGEST];
    let cubin = cubin.filter(whole);
    if cubin.is_none() {
        tracing::debug!(target: "rapt", %variant, folder = %folder.display(), "a shipped cubin is damaged");
    }
    cubin
}

/// `len` bytes from `start` on of what was packed.
fn unpack(packed: &[u8], start: u32, len: u32) -> std::io::Result<Vec<u8>> {
    let mut reader = Lzma2Reader::new(packed, BLOCK_BYTES, None);
    std::io::copy(&mut reader.by_ref().take(u64::from(start)), &mut std::io::sink())?;
    let mut bytes = Vec::new();
    reader.take(u64::from(len)).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn pack(cubins: &[&[u8]]) -> std::io::Result<Vec<u8>> {
    let mut options = Lzma2Options::with_preset(9);
    options.lzma_options.dict_size = BLOCK_BYTES;
    let mut writer = Lzma2Writer::new(Vec::new(), options);
    for cubin in cubins {
        writer.write_all(cubin)?;
    }
    writer.finish()
}

/// Writes the file of `arch` with these kernels, compiled by `compiler`; the same bytes for the same kernels.
///
/// # Errors
/// What writing answers; a file beyond 4 GiB.
pub(crate) fn write<'a>(
    folder: &Path,
    arch: Arch,
    compiler: (i32, i32),
    kernels: &[(KernelVariant, &'a [u8])],
) -> std::io::Result<u64> {
    let entry_of = |(variant, cubin): &(KernelVariant, &'a [u8])| {
        let variant = of_family(variant);
        (variant.to_string(), digest(&variant, &[]), *cubin)
    };
    let mut cubins: Vec<_> = kernels.iter().map(entry_of).collect();
    cubins.sort_unstable();
    cubins.dedup();
    let too_long = || std::io::Error::other("an archive of cubins beyond 4 GiB");
    let small = |n: usize| u32::try_from(n).map_err(|_| too_long());
    let (mut entries, mut packed) = (Vec::new(), Vec::new());
    let mut rest = cubins.as_slice();
    while !rest.is_empty() {
        let mut bytes = 0;
        let fits = |(_, _, cubin): &&(String, [u8; DIGEST], &[u8])| {
            bytes += cubin.len();
            bytes <= BLOCK_BYTES as usize
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let (block, others) = rest.split_at(count);
        let block_packed = pack(&block.iter().map(|(.., cubin)| *cubin).collect::<Vec<_>>())?;
        let offset = small(HEAD + cubins.len() * ENTRY + packed.len())?;
        let mut start = 0;
        for (_, name, cubin) in block {
            let places = [offset, small(block_packed.len())?, start, small(cubin.len())?];
            entries.push((*name, Sha256::digest(cubin), places));
            start += small(cubin.len())?;
        }
        packed.extend_from_slice(&block_packed);
        rest = others;
    }
    entries.sort_unstable();
    let mut index = Vec::new();
    for (name, content, places) in &entries {
        index.extend_from_slice(name);
        index.extend_from_slice(content);
        places.iter().for_each(|n| index.extend_from_slice(&n.to_le_bytes()));
    }
    let mut file = MAGIC.to_vec();
    for n in [compiler.0, compiler.1] {
        file.extend_from_slice(&n.to_le_bytes());
    }
    file.extend_from_slice(&small(entries.len())?.to_le_bytes());
    file.extend_from_slice(&index);
    file.extend_from_slice(&packed);
    std::fs::create_dir_all(folder)?;
    std::fs::write(path(folder, arch), &file)?;
    Ok(file.len() as u64)
}
