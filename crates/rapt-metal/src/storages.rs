//! Storages of PyTorch's on a GPU, as a space of addresses: the boundary that host memory has.
//!
//! ```text
//! address = (1 + number of the storage) · 2^48 + byte in the storage
//! ```
//! What PyTorch calls the data pointer of an MPS tensor is the address of an object plus an offset: it names a storage and is no address of memory.
//! Here a view that leaves its storage is refused, and what overlaps is found, by the checks of rapt-core. No address is ever read.
//! A storage has its number while one of its tensors is held.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{MetalError, Result};
use crate::functions::Tensor;

/// The bits of an address that count bytes of a storage.
const OFFSET_BITS: u32 = 48;

/// Addresses are positive as signed integers.
const MOST: usize = (1 << (usize::BITS - 1 - OFFSET_BITS)) - 1;

/// A tensor that is held, and what its element 0 is in the storage.
struct Member {
    id: u64,
    tensor: Tensor,
    /// Where element 0 lies, in bytes.
    begin: usize,
    element_bytes: usize,
}

struct Storage {
    /// What PyTorch tells storages apart by.
    identity: usize,
    len_bytes: usize,
    members: Vec<Member>,
}

#[derive(Default)]
struct Held {
    storages: Vec<Option<Storage>>,
    last_id: u64,
}

/// The storages of all tensors that are held.
#[derive(Default)]
pub(crate) struct Storages {
    held: Mutex<Held>,
}

/// A tensor that is held: its storage has an address until this is dropped.
pub struct Placed {
    storages: Arc<Storages>,
    number: usize,
    id: u64,
    address: usize,
}

impl Placed {
    /// The address of element 0.
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// The address of the storage's first byte.
    #[must_use]
    pub fn storage_address(&self) -> usize {
        (self.number + 1) << OFFSET_BITS
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let gone = {
            let mut held = self.storages.held.lock().unwrap_or_else(PoisonError::into_inner);
            let place = &mut held.storages[self.number];
            let member = place.as_mut().and_then(|storage| {
                let at = storage.members.iter().position(|member| member.id == self.id)?;
                Some(storage.members.swap_remove(at))
            });
            if place.as_ref().is_some_and(|storage| storage.members.is_empty()) {
                *place = None;
            }
            member
        };
        // Given back without the lock.
        drop(gone);
    }
}

/// Where a range of bytes lies.
pub(crate) struct Place {
    /// A tensor in its storage.
    pub(crate) tensor: Tensor,
    /// Steps of an element from the tensor's first to the range's first byte.
    pub(crate) step: i64,
}

impl Storages {
    /// Holds `tensor`, whose element 0 lies `begin` bytes behind the begin of a storage of `len_bytes`.
    pub(crate) fn place(
        self: &Arc<Self>,
        tensor: Tensor,
        identity: usize,
        len_bytes: usize,
        begin: usize,
        element_bytes: usize,
    ) -> Result<Placed> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.last_id += 1;
        let id = held.last_id;
        let is_of = |storage: &Option<Storage>| storage.as_ref().is_some_and(|of| of.identity == identity);
        let known = held.storages.iter().position(is_of);
        let number = known.or_else(|| held.storages.iter().position(Option::is_none)).unwrap_or(held.storages.len());
        if number >= MOST || len_bytes >> OFFSET_BITS != 0 || begin >> OFFSET_BITS != 0 {
            return Err(MetalError::TooMany { held: number });
        }
        if number == held.storages.len() {
            held.storages.push(None);
        }
        let storage = held.storages[number].get_or_insert(Storage { identity, len_bytes, members: Vec::new() });
        storage.len_bytes = storage.len_bytes.max(len_bytes);
        storage.members.push(Member { id, tensor, begin, element_bytes });
        Ok(Placed { storages: Arc::clone(self), number, id, address: ((number + 1) << OFFSET_BITS) + begin })
    }

    /// Where the bytes from `address + lo` to `address + hi` lie, of elements of `element_bytes`.
    pub(crate) fn find(
        &self,
        name: &'static str,
        address: usize,
        (lo, hi): (i64, i64),
        element_bytes: usize,
    ) -> Result<Place> {
        let not_held = || MetalError::NotHeld { tensor: name };
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let number = (address >> OFFSET_BITS).checked_sub(1).ok_or_else(not_held)?;
        let storage = held.storages.get(number).and_then(Option::as_ref).ok_or_else(not_held)?;
        let origin = (address & ((1 << OFFSET_BITS) - 1)) as i64;
        let (lo, hi) = (origin + lo, origin + hi);
        if lo < 0 || hi < lo || hi > storage.len_bytes as i64 {
            return Err(not_held());
        }
        // The tensor that begins there, which is bound as it is, or else one of the same elements.
        let fits = |member: &&Member| {
            member.element_bytes == element_bytes && (lo - member.begin as i64) % element_bytes as i64 == 0
        };
        let exact = storage.members.iter().filter(fits).find(|member| member.begin as i64 == lo);
        let member = exact.or_else(|| storage.members.iter().find(fits)).ok_or_else(not_held)?;
        Ok(Place { tensor: member.tensor.clone(), step: (lo - member.begin as i64) / element_bytes as i64 })
    }
}
