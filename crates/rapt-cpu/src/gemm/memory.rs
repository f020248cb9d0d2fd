//! Memory for packed matrices, on large pages where the system has them.
//!
//! A product of few rows reads its matrix once, from memory: with pages of 4 KiB an address is looked up, and in a virtual machine both
//! its tables, every 64 cache lines, and the processor's own prefetchers end at each page: a decoder that reads 233 MB a token takes a
//! tenth longer (one core of Zen 4 in a virtual machine, 2026-11). Matrices lie one after another in regions that ask for pages of
//! 2 MiB. What a matrix had goes back to the system and is not used again; a region ends when none of its matrices is left. Small
//! matrices, which a cache holds, have memory of the allocator.

use std::sync::{Arc, Mutex, TryLockError, Weak};

use memmap2::{MmapMut, MmapRaw};
use rapt_core::{Result, Workspace};

/// A matrix of fewer bytes lies in no region: the first one would take a large page.
const SMALL_BYTES: usize = 256 << 10;
/// A large page of x86-64, and of AArch64 with pages of 4 KiB.
const PAGE_BYTES: usize = 2 << 20;
/// A region, unless a matrix is larger. Of what is not written yet nothing but addresses is taken.
const REGION_BYTES: usize = 16 << 20;
/// A multiple of every page that a system may have: what goes back goes in these.
#[cfg(target_os = "linux")]
const GIVEN_BACK_BYTES: usize = 64 << 10;
/// Matrices begin at multiples of it.
const ALIGN: usize = 128;

/// Memory for one matrix, all bytes 0 until they are written.
#[derive(Debug)]
pub(super) enum Memory {
    Own(Workspace),
    Part(Part),
}

/// A matrix's bytes of a region.
#[derive(Debug)]
pub(super) struct Part {
    region: Arc<MmapRaw>,
    at: usize,
    len: usize,
}

impl Drop for Part {
    /// Gives the pages that lie wholly inside back to the system: other matrices keep the region.
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        {
            let start = self.region.as_ptr() as usize;
            let first = (start + self.at).next_multiple_of(GIVEN_BACK_BYTES) - start;
            let end = (start + self.at + self.len) / GIVEN_BACK_BYTES * GIVEN_BACK_BYTES;
            if let Some(len) = end.checked_sub(start + first).filter(|len| *len > 0) {
                // SAFETY: only this part reads the bytes from `first` on, which lie inside it, and it is gone.
                let _ = unsafe { self.region.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, first, len) };
            }
        }
    }
}

/// A region that has room, as long as a matrix is there, and where the rest of it begins.
struct Current {
    region: Weak<MmapRaw>,
    taken: usize,
    len: usize,
}

static CURRENT: Mutex<Option<Current>> = Mutex::new(None);

impl Memory {
    /// Memory of `bytes`, aligned to 64.
    pub(super) fn new(bytes: usize) -> Result<Memory> {
        if bytes >= SMALL_BYTES
            && let Some(part) = Memory::part(bytes)
        {
            return Ok(part);
        }
        let mut own = Workspace::new();
        own.ensure(bytes)?;
        Ok(Memory::Own(own))
    }

    /// A part of a region; `None` where the system gives none.
    fn part(bytes: usize) -> Option<Memory> {
        // Not waited for: who holds it may be a thread that a forked child does not have.
        let mut current = match CURRENT.try_lock() {
            Ok(current) => current,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        if let Some(Current { region, taken, len }) = &mut *current
            && *len - *taken >= bytes
            && let Some(region) = region.upgrade()
        {
            let at = *taken;
            *taken = (at + bytes).next_multiple_of(ALIGN).min(*len);
            return Some(Memory::Part(Part { region, at, len: bytes }));
        }
        // From the first multiple of a large page on.
        let room = bytes.checked_next_multiple_of(PAGE_BYTES)?.max(REGION_BYTES);
        let region = MmapMut::map_anon(room.checked_add(PAGE_BYTES)?).ok()?;
        // A system without large pages refuses; the region is as good as any memory then.
        #[cfg(target_os = "linux")]
        let _ = region.advise(memmap2::Advice::HugePage);
        let region = Arc::new(MmapRaw::from(region));
        let start = region.as_ptr() as usize;
        let at = start.next_multiple_of(PAGE_BYTES) - start;
        let (taken, len) = ((at + bytes).next_multiple_of(ALIGN), at + room);
        // The one with more room is gone on with.
        if current.as_ref().is_none_or(|old| old.region.strong_count() == 0 || old.len - old.taken < len - taken) {
            *current = Some(Current { region: Arc::downgrade(&region), taken, len });
        }
        Some(Memory::Part(Part { region, at, len: bytes }))
    }

    pub(super) fn len_bytes(&self) -> usize {
        match self {
            Memory::Own(own) => own.len_bytes(),
            Memory::Part(part) => part.len,
        }
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        match self {
            Memory::Own(own) => own.as_ptr(),
            Memory::Part(Part { region, at, .. }) => region.as_ptr().wrapping_add(*at),
        }
    }

    /// For whoever has the only reference.
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Memory::Own(own) => own.as_mut_ptr(),
            Memory::Part(Part { region, at, .. }) => region.as_mut_ptr().wrapping_add(*at),
        }
    }
}
