//! What a program keeps from one call to the next: the storages of buffers that it writes.

use std::collections::BTreeMap;

use rapt_core::Workspace;
use rapt_pt2::StorageId;

use super::{Inner, ModelError};

/// The storages that the program writes, as the last run left them.
#[derive(Debug, Default)]
pub(super) struct State {
    held: BTreeMap<StorageId, Workspace>,
}

impl State {
    /// The number of bytes held.
    pub(super) fn held_bytes(&self) -> usize {
        self.held.values().map(Workspace::len_bytes).sum()
    }

    /// What a storage holds: as the last run left it, or as the archive has it.
    pub(super) fn bytes<'a>(&'a self, inner: &'a Inner, id: StorageId) -> &'a [u8] {
        let bytes = inner.storage(id);
        match self.held.get(&id) {
            // SAFETY: the memory is at least as long as the storage that it is a copy of.
            Some(memory) => unsafe { std::slice::from_raw_parts(memory.as_ptr(), bytes.len()) },
            None => bytes,
        }
    }

    /// A storage that the program writes; at first it is as the archive has it.
    ///
    /// # Errors
    /// [`ModelError::Core`] where memory does not suffice.
    pub(super) fn storage(&mut self, inner: &Inner, id: StorageId) -> Result<*mut u8, ModelError> {
        if let Some(memory) = self.held.get_mut(&id) {
            return Ok(memory.as_mut_ptr());
        }
        let bytes = inner.storage(id);
        let mut memory = Workspace::new();
        memory.ensure(bytes.len().max(1))?;
        // SAFETY: the memory is at least as long, and its own.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_mut_ptr(), bytes.len()) };
        Ok(self.held.entry(id).or_insert(memory).as_mut_ptr())
    }
}
