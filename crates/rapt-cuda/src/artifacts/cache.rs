//! Machine code kept on disk, so that a kernel is compiled once per machine.
//!
//! An entry is named by the SHA-256 of its source, options and compiler version, and holds its own digest: what was cut
//! short or changed is not used, and is compiled anew. It is written beside its place and renamed into it, so that two
//! processes may write at once. Where nothing can be written, kernels are compiled in every process, and that is all.
//!
//! The folder is that of [`rapt_core::cache_folder`].

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::variant::KernelVariant;

/// The first bytes of an entry; the number counts changes of the format.
const MAGIC: &[u8; 8] = b"raptcub1";
pub(crate) const DIGEST: usize = 32;

/// A folder of entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cache {
    folder: Option<PathBuf>,
}

/// The SHA-256 of source, options and `more`: what distinguishes one machine code from another.
pub(crate) fn digest(variant: &KernelVariant, more: &[&str]) -> [u8; DIGEST] {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    add(&variant.source());
    variant.options().iter().for_each(|option| add(option));
    more.iter().for_each(|text| add(text));
    hash.finalize().into()
}

/// The name of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name(String);

impl Name {
    /// Of the machine code that this compiler makes of `variant`, kept `with` something or (empty) alone.
    pub(crate) fn new(variant: &KernelVariant, compiler: (i32, i32), with: &str) -> Self {
        let compiler = format!("nvrtc {}.{}", compiler.0, compiler.1);
        let more = [compiler.as_str(), with];
        let more = if with.is_empty() { &more[..1] } else { &more };
        Name(digest(variant, more).iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

#[cfg(test)]
impl Name {
    /// A name as a file bears it.
    pub(crate) fn of_file(name: String) -> Self {
        Name(name)
    }
}

impl Cache {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Cache { folder }
    }

    /// Where the environment says.
    pub(crate) fn from_environment() -> Self {
        Cache::new(rapt_core::cache_folder())
    }

    pub(crate) fn folder(&self) -> Option<&std::path::Path> {
        self.folder.as_deref()
    }

    fn path(&self, name: &Name) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{}.cubin", name.0)))
    }

    /// The machine code of this name, if it is there and whole.
    pub(crate) fn get(&self, name: &Name) -> Option<Vec<u8>> {
        let entry = std::fs::read(self.path(name)?).ok()?;
        let rest = entry.strip_prefix(MAGIC)?;
        let (digest, cubin) = rest.split_at_checked(DIGEST)?;
        if Sha256::digest(cubin).as_slice() != digest || cubin.is_empty() {
            tracing::debug!(target: "rapt", name = name.0, "a corrupted cubin is compiled anew");
            return None;
        }
        Some(cubin.to_vec())
    }

    /// Keeps machine code; failures are logged, and nothing else comes of them.
    pub(crate) fn put(&self, name: &Name, cubin: &[u8]) {
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let (Some(folder), Some(path)) = (&self.folder, self.path(name)) else { return };
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(folder)?;
            let unique = format!(".{}-{}-{}", name.0, std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
            let beside = folder.join(unique);
            let entry = [MAGIC.as_slice(), Sha256::digest(cubin).as_slice(), cubin].concat();
            let written = std::fs::write(&beside, entry).and_then(|()| std::fs::rename(&beside, &path));
            if written.is_err() {
                let _ = std::fs::remove_file(&beside);
            }
            written
        };
        if let Err(error) = write() {
            tracing::debug!(target: "rapt", folder = %folder.display(), %error, "cubins are not kept");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("rapt-cache-test-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn an_entry_comes_back_whole_or_not_at_all() {
        let folder = folder("whole");
        let (cache, name) = (Cache::new(Some(folder.clone())), Name("a".into()));
        assert_eq!(cache.get(&name), None);
        cache.put(&name, b"machine code");
        assert_eq!(cache.get(&name).as_deref(), Some(b"machine code".as_slice()));
        let path = cache.path(&name).unwrap();
        let entry = std::fs::read(&path).unwrap();
        for broken in [&entry[..entry.len() - 1], &entry[..10], &[], b"raptcub0"] {
            std::fs::write(&path, broken).unwrap();
            assert_eq!(cache.get(&name), None);
        }
        for at in 0..entry.len() {
            let mut flipped = entry.clone();
            flipped[at] ^= 0x40;
            std::fs::write(&path, flipped).unwrap();
            assert_eq!(cache.get(&name), None, "byte {at}");
        }
        cache.put(&name, b"machine code");
        assert_eq!(cache.get(&name).as_deref(), Some(b"machine code".as_slice()));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside the entry");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_failure() {
        let file = folder("file");
        std::fs::write(&file, "in the way").unwrap();
        let cache = Cache::new(Some(file.clone()));
        cache.put(&Name("a".into()), b"machine code");
        assert_eq!(cache.get(&Name("a".into())), None);
        std::fs::remove_file(file).unwrap();
        assert_eq!(Cache::new(None).get(&Name("a".into())), None);
    }
}
