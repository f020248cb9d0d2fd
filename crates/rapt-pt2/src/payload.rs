//! Weights and constants: which bytes of the archive each name stands for.
//!
//! A payload is the bytes of a whole storage; a name gives dtype, sizes, strides and an offset in it. Several names may
//! share a payload: tied weights, and the views of a static cache. torch starts payloads at multiples of 64 bytes, which is
//! noted but not needed: who reads a payload that starts elsewhere copies it.

use std::collections::BTreeMap;
use std::ops::Range;

use rapt_core::DType;

use crate::read;
use crate::schema::{PayloadConfig, PayloadMeta};
use crate::zip::Entries;
use crate::{Device, Error, Symbols};

/// A storage of an archive. Names with equal storages share bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StorageId(pub(crate) u32);

impl StorageId {
    /// The n-th storage of weights that lie in no archive.
    #[must_use]
    pub const fn new(index: u32) -> StorageId {
        StorageId(index)
    }

    /// The place in [`Archive::storages`](crate::Archive::storages).
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A weight or constant: a tensor in a storage. Its elements lie within the storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// The dtype of the elements.
    pub dtype: DType,
    /// The sizes, in elements.
    pub sizes: Vec<usize>,
    /// The strides, in elements; none is negative.
    pub strides: Vec<usize>,
    /// The first element's place in the storage, in elements.
    pub storage_offset: usize,
    /// The storage.
    pub storage: StorageId,
    /// Whether it is a parameter; otherwise a buffer or constant.
    pub is_parameter: bool,
    /// The device it was saved on.
    pub device: Device,
}

impl Payload {
    /// The number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.sizes.iter().product()
    }
}

/// The storages of an archive, each once.
#[derive(Default)]
pub(crate) struct Storages {
    ids: BTreeMap<String, StorageId>,
    pub(crate) ranges: Vec<(String, Range<usize>)>,
}

impl Storages {
    /// The payloads that `config` names, whose entries lie in `folder`.
    pub(crate) fn payloads(
        &mut self,
        config: PayloadConfig,
        folder: &str,
        entries: &Entries,
    ) -> Result<BTreeMap<String, Payload>, Error> {
        let mut payloads = BTreeMap::new();
        for (name, meta) in config.config.0 {
            if meta.use_pickle {
                return Err(Error::Pickled { name });
            }
            let storage = self.storage(&format!("{folder}{}", meta.path_name), entries)?;
            let payload = self.payload(&name, meta, storage)?;
            payloads.insert(name, payload);
        }
        Ok(payloads)
    }

    fn storage(&mut self, entry: &str, entries: &Entries) -> Result<StorageId, Error> {
        if let Some(id) = self.ids.get(entry) {
            return Ok(*id);
        }
        let place = entries.get(entry).ok_or_else(|| Error::MissingEntry { name: entry.to_owned() })?;
        // An archive has at most 2^18 entries.
        let id = StorageId(self.ranges.len() as u32);
        self.ranges.push((entry.to_owned(), place.range.clone()));
        self.ids.insert(entry.to_owned(), id);
        Ok(id)
    }

    fn payload(&self, name: &str, meta: PayloadMeta, storage: StorageId) -> Result<Payload, Error> {
        let wrong = |reason| Error::TensorMeta { name: name.to_owned(), reason };
        let meta_json = meta.tensor_meta.ok_or_else(|| Error::Pickled { name: name.to_owned() })?;
        let tensor = read::tensor(name, meta_json)?;
        let number = |expr: &crate::Expr| {
            let value = expr.eval(&Symbols::new()).map_err(|cause| Error::Value { name: name.to_owned(), cause })?;
            usize::try_from(value).map_err(|_| wrong("a size, stride or offset is negative"))
        };
        let numbers = |exprs: &[crate::Expr]| exprs.iter().map(number).collect::<Result<Vec<usize>, Error>>();
        let (sizes, strides) = (numbers(&tensor.sizes)?, numbers(&tensor.strides)?);
        let storage_offset = number(&tensor.storage_offset)?;
        let needs = extent_bytes(tensor.dtype, &sizes, &strides, storage_offset);
        let needs = needs.ok_or_else(|| wrong("its extent does not fit 64 bits"))?;
        let (entry, range) = &self.ranges[storage.index()];
        if needs > range.len() as u64 {
            let (entry, has) = (entry.clone(), range.len() as u64);
            return Err(Error::PayloadSize { name: name.to_owned(), entry, needs, has });
        }
        let is_parameter = meta.is_param;
        Ok(Payload {
            dtype: tensor.dtype,
            sizes,
            strides,
            storage_offset,
            storage,
            is_parameter,
            device: tensor.device,
        })
    }
}

/// The end of the last element in bytes, 0 for a tensor without elements; `None` where 64 bits do not hold it or the
/// number of elements.
fn extent_bytes(dtype: DType, sizes: &[usize], strides: &[usize], offset: usize) -> Option<u64> {
    let mut elements = 1usize;
    let mut last = offset;
    for (size, stride) in sizes.iter().zip(strides) {
        elements = elements.checked_mul(*size)?;
        last = last.checked_add(size.saturating_sub(1).checked_mul(*stride)?)?;
    }
    if elements == 0 {
        return Some(0);
    }
    elements.checked_mul(dtype.size_bytes())?;
    u64::try_from(last.checked_add(1)?.checked_mul(dtype.size_bytes())?).ok()
}
