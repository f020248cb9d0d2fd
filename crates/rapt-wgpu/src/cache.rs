//! Compiled kernels kept on disk, so that a driver compiles a kernel once per machine.
//!
//! ```text
//! name  = SHA-256(adapter and driver, version of Rapt, checks, text)
//! entry = magic, SHA-256(name, data), data                            data: what wgpu's pipeline cache holds after a compilation
//! ```
//! What was cut short, changed or given another entry's name is not used, and its kernel is compiled anew; data of another version of the driver
//! is refused by wgpu, which asks the driver. An entry is written beside its place and renamed into it, so that two processes may write at
//! once. Where nothing can be written, kernels are compiled in every process, and that is all.
//! Deliberately absent: which folder (rapt-core), and the calls of the device.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

/// The first bytes of an entry; the number counts changes of the format.
const MAGIC: &[u8; 8] = b"raptpip1";
const DIGEST: usize = 32;

/// A folder of entries for one adapter.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    folder: PathBuf,
    /// The adapter, its driver and the version of Rapt.
    owner: String,
}

/// The name of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name(String);

fn digest(parts: &[&[u8]]) -> [u8; DIGEST] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

impl Cache {
    /// The entries of `adapter` in `folder`; `None` where there is no folder, or wgpu has no such caches of the adapter's backend.
    pub(crate) fn new(folder: Option<PathBuf>, adapter: &wgpu::AdapterInfo) -> Option<Self> {
        let key = wgpu::util::pipeline_cache_key(adapter)?;
        let wgpu::AdapterInfo { name, driver, driver_info, .. } = adapter;
        let owner = format!("{key} {name} {driver} {driver_info} rapt {}", env!("CARGO_PKG_VERSION"));
        Some(Cache { folder: folder?, owner })
    }

    /// Of the kernel of this text, compiled with these checks.
    pub(crate) fn name(&self, text: &str, checks: &str) -> Name {
        let digest = digest(&[self.owner.as_bytes(), checks.as_bytes(), text.as_bytes()]);
        Name(digest.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn path(&self, name: &Name) -> PathBuf {
        self.folder.join(format!("{}.pipeline", name.0))
    }

    /// The data of this name, if it is there and whole.
    pub(crate) fn get(&self, name: &Name) -> Option<Vec<u8>> {
        let entry = std::fs::read(self.path(name)).ok()?;
        let whole = || {
            let (of_name, data) = entry.strip_prefix(MAGIC)?.split_at_checked(DIGEST)?;
            (digest(&[name.0.as_bytes(), data]) == of_name).then(|| data.to_vec())
        };
        let data = whole();
        if data.is_none() {
            tracing::debug!(target: "rapt", name = name.0, "an entry that is not whole: its kernel is compiled anew");
        }
        data
    }

    /// Keeps data; failures are logged, and nothing else comes of them.
    pub(crate) fn put(&self, name: &Name, data: &[u8]) {
        static WRITES: AtomicU64 = AtomicU64::new(0);
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(&self.folder)?;
            let unique = format!(".{}-{}-{}", name.0, std::process::id(), WRITES.fetch_add(1, Ordering::Relaxed));
            let beside = self.folder.join(unique);
            let entry = [MAGIC.as_slice(), &digest(&[name.0.as_bytes(), data]), data].concat();
            let written = std::fs::write(&beside, entry).and_then(|()| std::fs::rename(&beside, self.path(name)));
            if written.is_err() {
                let _ = std::fs::remove_file(&beside);
            }
            written
        };
        if let Err(error) = write() {
            tracing::debug!(target: "rapt", folder = %self.folder.display(), %error, "compiled kernels are not kept");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("rapt-pipelines-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        folder
    }

    fn cache(folder: &std::path::Path, owner: &str) -> Cache {
        Cache { folder: folder.to_owned(), owner: owner.to_owned() }
    }

    #[test]
    fn an_entry_comes_back_whole_or_not_at_all() {
        let folder = folder("whole");
        let cache = cache(&folder, "one");
        let name = cache.name("text", "proven");
        assert_eq!(cache.get(&name), None);
        cache.put(&name, b"machine code");
        assert_eq!(cache.get(&name).as_deref(), Some(b"machine code".as_slice()));
        let entry = std::fs::read(cache.path(&name)).unwrap();
        for broken in [&entry[..entry.len() - 1], &entry[..10], &[], b"raptpip0"] {
            std::fs::write(cache.path(&name), broken).unwrap();
            assert_eq!(cache.get(&name), None);
        }
        for at in 0..entry.len() {
            let mut flipped = entry.clone();
            flipped[at] ^= 0x40;
            std::fs::write(cache.path(&name), flipped).unwrap();
            assert_eq!(cache.get(&name), None, "byte {at}");
        }
        // Whole, but of another kernel.
        let other = cache.name("other text", "proven");
        std::fs::write(cache.path(&other), &entry).unwrap();
        assert_eq!(cache.get(&other), None);
        std::fs::remove_file(cache.path(&other)).unwrap();
        cache.put(&name, b"newer");
        assert_eq!(cache.get(&name).as_deref(), Some(b"newer".as_slice()));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left beside the entry");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_name_tells_adapters_checks_and_texts_apart() {
        let (one, other) = (cache(&folder("names"), "one"), cache(&folder("names"), "other"));
        let names = [
            one.name("text", "proven"),
            one.name("text", "compiled"),
            one.name("texts", "proven"),
            other.name("text", "proven"),
        ];
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{at}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_failure() {
        let file = folder("file");
        std::fs::write(&file, "in the way").unwrap();
        let cache = cache(&file, "one");
        let name = cache.name("text", "proven");
        cache.put(&name, b"machine code");
        assert_eq!(cache.get(&name), None);
        std::fs::remove_file(file).unwrap();
    }
}
