//! An archive: the file, the program in it, and the bytes of its weights where they lie.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use crate::payload::Storages;
use crate::schema::PayloadConfig;
use crate::zip::{self, Entries, Entry};
use crate::{Argument, Error, InputSpec, Payload, Program, StorageId, TensorMeta, read};

/// The name of the program that `torch.export.save` writes.
const MODEL: &str = "model";

/// The bytes of an archive.
enum Bytes {
    Mapped(Mmap),
    Held(Arc<[u8]>),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Held(bytes) => bytes,
        }
    }
}

/// An archive of `torch.export.save`, read and checked.
///
/// The program and the tables are copies; the bytes of weights and constants are those of the file.
pub struct Archive {
    bytes: Bytes,
    program: Program,
    weights: BTreeMap<String, Payload>,
    constants: BTreeMap<String, Payload>,
    storages: Vec<Stored>,
}

/// A storage's entry.
struct Stored {
    entry: String,
    range: Range<usize>,
    crc32: u32,
}

impl Archive {
    /// Opens the archive at `path` by mapping it.
    ///
    /// The file is not copied: while the archive is open, nothing may change it. Where something does, the tensors that
    /// are read afterwards have the changed bytes, and where the file was cut, reading past its end ends the process
    /// (SIGBUS on Unix). Program and tables cannot change. Who cannot rule this out reads the file and uses
    /// [`Archive::from_bytes`].
    ///
    /// # Errors
    /// [`Error::Open`], and all that [`Archive::from_bytes`] gives.
    pub fn open(path: impl AsRef<Path>) -> Result<Archive, Error> {
        Archive::open_named(path, MODEL)
    }

    /// Opens the archive at `path` and reads the program `name` of it: `torch.export.pt2_archive.package_pt2` can
    /// put several into one.
    ///
    /// # Errors
    /// As [`Archive::open`]; [`Error::ModelName`] if there is none of this name.
    pub fn open_named(path: impl AsRef<Path>, name: &str) -> Result<Archive, Error> {
        let path = path.as_ref();
        let open = |cause| Error::Open { path: path.to_owned(), cause };
        let file = File::open(path).map_err(open)?;
        if file.metadata().is_ok_and(|found| found.is_dir()) {
            return Err(open(std::io::ErrorKind::IsADirectory.into()));
        }
        // SAFETY: the map is read-only and private, and `Archive` hands out its bytes as `&[u8]` only. That nothing changes
        // the file is the caller's duty, which the documentation states with what happens otherwise; no check in this
        // crate is relied on for soundness after the bytes were read a second time: program and tables are copies, and
        // the ranges of storages are checked against the length of the map, which does not change.
        let map = unsafe { Mmap::map(&file) }.map_err(open)?;
        Archive::read(Bytes::Mapped(map), name)
    }

    /// Reads an archive in memory.
    ///
    /// # Errors
    /// [`Error`] for bytes that are no archive of a served version, are damaged, or hold what is not served.
    pub fn from_bytes(bytes: Arc<[u8]>) -> Result<Archive, Error> {
        Archive::read(Bytes::Held(bytes), MODEL)
    }

    fn read(bytes: Bytes, name: &str) -> Result<Archive, Error> {
        let all = bytes.get();
        let entries = zip::read(all)?;
        // torch 2.7 and older wrote these, without a folder.
        if entries.contains_key("serialized_exported_program.json") {
            let version = text(all, &entries, "version")?;
            let major = version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
            return Err(Error::OldArchive { written_by: "2.7 or older", major });
        }
        let entries = strip_root(entries)?;
        check_format(all, &entries)?;
        let models = model_names(&entries);
        if models.is_empty() {
            let compiled = entries.keys().any(|entry| entry.starts_with("data/aotinductor/"));
            return Err(if compiled { Error::AotInductor } else { Error::NoModel });
        }
        if !models.iter().any(|model| model == name) {
            return Err(Error::ModelName { asked: name.to_owned(), found: models });
        }
        let model = format!("models/{name}.json");
        let program = Program::from_entry(&model, content(all, &entries, &model)?)?;
        let mut storages = Storages::default();
        let mut payloads = |folder: &str, config: String| {
            if !entries.contains_key(&config) && entries.contains_key(&format!("{folder}{name}.pt")) {
                return Err(Error::OldArchive { written_by: "2.8", major: 8 });
            }
            let config: PayloadConfig = read::json(&config, content(all, &entries, &config)?)?;
            storages.payloads(config, folder, &entries)
        };
        let weights = payloads("data/weights/", format!("data/weights/{name}_weights_config.json"))?;
        let constants = payloads("data/constants/", format!("data/constants/{name}_constants_config.json"))?;
        let stored = |(entry, range): (String, Range<usize>)| {
            let crc32 = entries.get(&entry).map_or(0, |entry| entry.crc32);
            Stored { entry, range, crc32 }
        };
        let storages = storages.ranges.into_iter().map(stored).collect();
        let archive = Archive { program, weights, constants, storages, bytes };
        archive.check_state()?;
        Ok(archive)
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Parameters and persistent buffers by their names in the model.
    #[must_use]
    pub fn weights(&self) -> &BTreeMap<String, Payload> {
        &self.weights
    }

    /// Constants and buffers that are not persistent, by their names in the model.
    #[must_use]
    pub fn constants(&self) -> &BTreeMap<String, Payload> {
        &self.constants
    }

    /// The weight or constant that an input of the graph is; `None` for inputs of the user.
    #[must_use]
    pub fn payload(&self, input: &InputSpec) -> Option<&Payload> {
        match input {
            InputSpec::Parameter { name, .. } => self.weights.get(name),
            InputSpec::Buffer { name, persistent: true, .. } => self.weights.get(name),
            InputSpec::Buffer { name, .. } | InputSpec::Constant { name, .. } => self.constants.get(name),
            InputSpec::User(_) | InputSpec::Fixed { .. } => None,
        }
    }

    /// The number of storages. Their ids count from 0.
    #[must_use]
    pub fn storages(&self) -> usize {
        self.storages.len()
    }

    /// The bytes of a storage, little-endian.
    ///
    /// # Panics
    /// If `id` is of an archive with more storages.
    #[must_use]
    pub fn storage(&self, id: StorageId) -> &[u8] {
        &self.bytes.get()[self.storages[id.index()].range.clone()]
    }

    /// The bytes of the whole archive.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.bytes.get().len()
    }

    /// Compares the checksums of all storages with their bytes. Opening an archive does so for its JSON only, because
    /// this reads every byte of the file.
    ///
    /// # Errors
    /// [`Error::Damaged`] for the first storage that was altered.
    pub fn check_storages(&self) -> Result<(), Error> {
        for stored in &self.storages {
            check_crc(&stored.entry, &self.bytes.get()[stored.range.clone()], stored.crc32)?;
        }
        Ok(())
    }

    /// Fails unless each parameter, buffer and constant of the signature is there, with the graph's dtype and sizes.
    fn check_state(&self) -> Result<(), Error> {
        for (spec, input) in self.program.signature.inputs.iter().zip(&self.program.graph.inputs) {
            let (kind, value, name) = match spec {
                InputSpec::Parameter { value, name } => ("parameter", value, name),
                InputSpec::Buffer { value, name, .. } => ("buffer", value, name),
                InputSpec::Constant { value, name } => ("constant", value, name),
                InputSpec::User(_) | InputSpec::Fixed { .. } => continue,
            };
            let missing = || Error::NoPayload { value: value.clone(), kind, name: name.clone() };
            let payload = self.payload(spec).ok_or_else(missing)?;
            let meta = match input {
                Argument::Tensor(value) => self.program.graph.tensors.get(value).ok_or_else(missing)?,
                _ => return Err(missing()),
            };
            check_form(meta, payload, value, name)?;
        }
        Ok(())
    }
}

/// Fails unless `payload` has the dtype and sizes that the graph says of `value`.
fn check_form(meta: &TensorMeta, payload: &Payload, value: &str, name: &str) -> Result<(), Error> {
    let sizes = meta.sizes.iter().map(|size| size.constant().and_then(|size| usize::try_from(size).ok()));
    if meta.dtype == payload.dtype && sizes.eq(payload.sizes.iter().copied().map(Some)) {
        return Ok(());
    }
    let sizes: Vec<String> = meta.sizes.iter().map(ToString::to_string).collect();
    Err(Error::PayloadForm {
        value: value.to_owned(),
        graph: format!("{} [{}]", meta.dtype, sizes.join(", ")),
        name: name.to_owned(),
        payload: format!("{} {:?}", payload.dtype, payload.sizes),
    })
}

/// The entries by their names within the archive's one folder.
fn strip_root(entries: Entries) -> Result<Entries, Error> {
    let mut root: Option<String> = None;
    let mut stripped = Entries::new();
    for (name, entry) in entries {
        let (folder, rest) = name.split_once('/').unwrap_or((&name, ""));
        match &root {
            Some(root) if root != folder => {
                return Err(Error::SecondRoot { first: root.clone(), second: folder.to_owned() });
            }
            Some(_) => {}
            None => root = Some(folder.to_owned()),
        }
        stripped.insert(rest.to_owned(), entry);
    }
    Ok(stripped)
}

/// The names of the programs.
fn model_names(entries: &Entries) -> Vec<String> {
    let name = |entry: &String| Some(entry.strip_prefix("models/")?.strip_suffix(".json")?.to_owned());
    entries.keys().filter_map(name).collect()
}

/// The bytes of the entry `name`, whose checksum is right.
fn content<'a>(archive: &'a [u8], entries: &Entries, name: &str) -> Result<&'a [u8], Error> {
    let entry: &Entry = entries.get(name).ok_or_else(|| Error::MissingEntry { name: name.to_owned() })?;
    let bytes = &archive[entry.range.clone()];
    check_crc(name, bytes, entry.crc32)?;
    Ok(bytes)
}

fn check_crc(name: &str, bytes: &[u8], expected: u32) -> Result<(), Error> {
    match crc32fast::hash(bytes) {
        found if found == expected => Ok(()),
        found => Err(Error::Damaged { name: name.to_owned(), found, expected }),
    }
}

/// The start of a small entry, as text; more would only make a message long.
fn text(archive: &[u8], entries: &Entries, name: &str) -> Result<String, Error> {
    let bytes = content(archive, entries, name)?;
    Ok(String::from_utf8_lossy(&bytes[..bytes.len().min(64)]).trim().to_owned())
}

/// Fails unless the archive is of format `pt2`, version 0, in little-endian bytes.
fn check_format(archive: &[u8], entries: &Entries) -> Result<(), Error> {
    let found = text(archive, entries, "archive_format")?;
    if found != "pt2" {
        return Err(Error::ArchiveFormat { found });
    }
    let found = text(archive, entries, "archive_version")?;
    if found != "0" {
        return Err(Error::ArchiveVersion { found });
    }
    let found = text(archive, entries, "byteorder")?;
    if found != "little" {
        return Err(Error::ByteOrder { found });
    }
    Ok(())
}
