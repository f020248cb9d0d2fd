//! Where the weights of a program lie: in its archive, or in memory that the caller lends.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use rapt_core::{DType, Workspace};
use rapt_pt2::{Archive, Device, InputSpec, Payload, StorageId};

use super::ModelError;

/// Where storages begin: no element is larger.
const ALIGN: usize = 8;

/// A parameter, buffer or constant in memory that the caller lends: a tensor in a storage.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Its name in the program.
    pub name: String,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The sizes.
    pub shape: Vec<usize>,
    /// The strides, in elements.
    pub strides: Vec<usize>,
    /// The first element's place in the storage, in elements.
    pub offset: usize,
    /// The first byte of the storage. Weights whose storages begin at the same address share it.
    pub storage: *const u8,
    /// The length of the storage.
    pub storage_bytes: usize,
}

/// The weights of a program.
pub(super) enum Weights {
    /// A program that has none.
    None,
    /// In an archive, with copies of the storages that do not begin where their elements may be read.
    Archive { archive: Box<Archive>, aligned: BTreeMap<StorageId, Workspace> },
    /// In memory of the caller's, kept by what he gave for it.
    Lent { payloads: BTreeMap<String, Payload>, storages: Vec<Storage>, _keep: Arc<dyn Any + Send + Sync> },
}

/// A storage in memory of the caller's.
pub(super) struct Storage {
    ptr: *const u8,
    len: usize,
}

// SAFETY: the memory is only read.
unsafe impl Send for Storage {}
// SAFETY: as above.
unsafe impl Sync for Storage {}

impl Weights {
    /// The weights in an archive.
    pub(super) fn of_archive(archive: Archive) -> Result<Weights, ModelError> {
        let mut aligned = BTreeMap::new();
        for payload in archive.weights().values().chain(archive.constants().values()) {
            let bytes = archive.storage(payload.storage);
            // A file that is mapped always begins there.
            if !(bytes.as_ptr() as usize).is_multiple_of(ALIGN) && !aligned.contains_key(&payload.storage) {
                let mut copy = Workspace::new();
                copy.ensure(bytes.len().max(1))?;
                // SAFETY: the copy is at least as long, and its own.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), copy.as_mut_ptr(), bytes.len()) };
                aligned.insert(payload.storage, copy);
            }
        }
        Ok(Weights::Archive { archive: Box::new(archive), aligned })
    }

    /// Weights in memory of the caller's.
    ///
    /// # Safety
    /// As `Template::with_weights`.
    pub(super) unsafe fn lent(weights: Vec<Weight>, keep: Arc<dyn Any + Send + Sync>) -> Result<Weights, ModelError> {
        let (mut payloads, mut storages) = (BTreeMap::new(), Vec::<Storage>::new());
        for weight in weights {
            let wrong = |why: &str| ModelError::WeightForm { name: weight.name.clone(), why: why.to_owned() };
            if !(weight.storage as usize).is_multiple_of(ALIGN) {
                return Err(wrong("its storage does not begin at a multiple of 8 bytes"));
            }
            if weight.shape.len() != weight.strides.len() {
                return Err(wrong("it has not as many strides as sizes"));
            }
            if extent_bytes(&weight).is_none_or(|bytes| bytes > weight.storage_bytes) {
                return Err(wrong("its elements do not lie in its storage"));
            }
            let same = |storage: &Storage| storage.ptr == weight.storage && storage.len == weight.storage_bytes;
            let place = storages.iter().position(same).unwrap_or_else(|| {
                storages.push(Storage { ptr: weight.storage, len: weight.storage_bytes });
                storages.len() - 1
            });
            let storage = StorageId::new(u32::try_from(place).map_err(|_| wrong("there are too many"))?);
            let payload = Payload {
                dtype: weight.dtype,
                sizes: weight.shape,
                strides: weight.strides,
                storage_offset: weight.offset,
                storage,
                is_parameter: true,
                device: Device { kind: "cpu".into(), index: None },
            };
            payloads.insert(weight.name, payload);
        }
        Ok(Weights::Lent { payloads, storages, _keep: keep })
    }

    /// What an input of the graph is, where it is a weight that is there.
    pub(super) fn payload(&self, input: &InputSpec) -> Option<&Payload> {
        match (self, input) {
            (Weights::Archive { archive, .. }, _) => archive.payload(input),
            (
                Weights::Lent { payloads, .. },
                InputSpec::Parameter { name, .. } | InputSpec::Buffer { name, .. } | InputSpec::Constant { name, .. },
            ) => payloads.get(name),
            _ => None,
        }
    }

    /// The bytes of a storage, which begin at a multiple of [`ALIGN`].
    pub(super) fn storage(&self, id: StorageId) -> &[u8] {
        match self {
            Weights::None => &[],
            Weights::Archive { archive, aligned } => {
                let bytes = archive.storage(id);
                match aligned.get(&id) {
                    // SAFETY: the copy has the storage's length, and is never written again.
                    Some(copy) => unsafe { std::slice::from_raw_parts(copy.as_ptr(), bytes.len()) },
                    None => bytes,
                }
            }
            Weights::Lent { storages, .. } => match &storages[id.index()] {
                Storage { len: 0, .. } => &[],
                // SAFETY: promised by the caller of `lent`, for as long as `self` keeps what he gave for it.
                Storage { ptr, len } => unsafe { std::slice::from_raw_parts(*ptr, *len) },
            },
        }
    }

    /// How they are there, in words.
    pub(super) fn how(&self) -> &'static str {
        match self {
            Weights::None => "none of its own",
            Weights::Archive { .. } => "mapped",
            Weights::Lent { .. } => "held constant where they lie",
        }
    }
}

/// The end of the last element in bytes, 0 for a tensor without elements.
fn extent_bytes(weight: &Weight) -> Option<usize> {
    if weight.shape.contains(&0) {
        return Some(0);
    }
    let mut last = weight.offset;
    for (size, stride) in weight.shape.iter().zip(&weight.strides) {
        last = last.checked_add((size - 1).checked_mul(*stride)?)?;
    }
    last.checked_add(1)?.checked_mul(weight.dtype.size_bytes())
}
