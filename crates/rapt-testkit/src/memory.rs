//! Memory that notices who touches its surroundings.
//!
//! Heap: guard bands of a known pattern lie on both sides, so a stray write is found afterwards and a stray read gives
//! NaN (the pattern is NaN in every float dtype). Pages (Unix and Windows): the bytes lie flush against a page that may not be
//! touched, so the stray access itself is the crash. Deliberately absent: dtypes and strides.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

#[cfg(any(unix, windows))]
use crate::pages;

/// The byte that fills guard bands and padding: NaN in f64, f32, f16 and bf16.
pub const PATTERN: u8 = 0xff;

const BAND_BYTES: usize = 512;
/// A guard that nobody touched, to compare with at once.
const WHOLE: [u8; 512] = [PATTERN; 512];
const ALIGN: usize = 64;

/// What lies around the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Guard {
    /// Bands of [`PATTERN`]; the first byte is `shift` bytes past a multiple of 64.
    Heap {
        /// Bytes past the alignment; below 512.
        shift: usize,
    },
    /// The byte before the first may not be touched (Unix and Windows; elsewhere a heap).
    FrontPage,
    /// The byte after the last may not be touched (Unix and Windows; elsewhere a heap).
    BackPage,
}

impl Guard {
    /// The page on the other side, where there is a page.
    #[must_use]
    pub fn other_page(self) -> Option<Guard> {
        match self {
            Guard::Heap { .. } => None,
            Guard::FrontPage => Some(Guard::BackPage),
            Guard::BackPage => Some(Guard::FrontPage),
        }
    }
}

/// Owned bytes with their guards.
#[derive(Debug)]
pub struct Memory {
    /// The accessible allocation, bands included.
    base: *mut u8,
    total: usize,
    at: usize,
    len: usize,
    paged: bool,
}

impl Memory {
    /// `len` bytes of [`PATTERN`]. With a guard page at the back, `len` must be a multiple of the element size for the
    /// first byte to be aligned.
    ///
    /// # Panics
    /// If memory or pages cannot be had.
    #[must_use]
    pub fn new(len: usize, guard: Guard) -> Self {
        let memory = match guard {
            Guard::Heap { shift } => Memory::heap(len, shift),
            Guard::FrontPage | Guard::BackPage => Memory::paged(len, guard),
        };
        // SAFETY: base..base+total was just allocated, writable, and is owned by nobody else.
        unsafe { memory.base.write_bytes(PATTERN, memory.total) };
        memory
    }

    fn heap(len: usize, shift: usize) -> Self {
        assert!(shift < BAND_BYTES);
        let (at, total) = (BAND_BYTES + shift, 3 * BAND_BYTES + len);
        let layout = Layout::from_size_align(total, ALIGN).expect("a test's size");
        // SAFETY: total is at least three bands, not zero.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Memory { base, total, at, len, paged: false }
    }

    #[cfg(any(unix, windows))]
    fn paged(len: usize, guard: Guard) -> Self {
        let page = pages::size();
        let total = len.max(1).next_multiple_of(page);
        let at = if guard == Guard::BackPage { total - len } else { 0 };
        let spare = if total == page { spare::take() } else { None };
        let base = spare.unwrap_or_else(|| pages::between_guards(total));
        Memory { base, total, at, len, paged: true }
    }

    #[cfg(not(any(unix, windows)))]
    fn paged(len: usize, _: Guard) -> Self {
        Memory::heap(len, 0)
    }

    /// The first byte inside the guards.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.wrapping_add(self.at)
    }

    /// The bytes inside the guards.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes inside the guards.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.all()[self.at..self.at + self.len]
    }

    /// The bytes inside the guards.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: base..base+total is initialised, owned memory, borrowed mutably here.
        let all = unsafe { std::slice::from_raw_parts_mut(self.base, self.total) };
        &mut all[self.at..self.at + self.len]
    }

    /// The first byte outside that no longer holds the pattern, relative to the first byte inside.
    #[must_use]
    pub fn broken_guard(&self) -> Option<isize> {
        let (all, after) = (self.all(), self.at + self.len);
        let whole = |bytes: &[u8]| bytes.chunks(WHOLE.len()).all(|chunk| *chunk == WHOLE[..chunk.len()]);
        if whole(&all[..self.at]) && whole(&all[after..]) {
            return None;
        }
        let broken = |&(n, &byte): &(usize, &u8)| !(self.at..after).contains(&n) && byte != PATTERN;
        all.iter().enumerate().find(broken).map(|(n, _)| n as isize - self.at as isize)
    }

    fn all(&self) -> &[u8] {
        // SAFETY: base..base+total is initialised, owned memory; a mutable borrow needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.base, self.total) }
    }
}

/// Single pages between two that may not be touched, kept for the next buffer of this thread: mapping one costs more than a
/// small problem.
#[cfg(any(unix, windows))]
mod spare {
    use std::cell::RefCell;

    const MOST: usize = 64;

    thread_local! {
        static PAGES: RefCell<Vec<*mut u8>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn take() -> Option<*mut u8> {
        PAGES.try_with(|pages| pages.borrow_mut().pop()).ok().flatten()
    }

    /// Whether the page was kept; otherwise it is its owner's to unmap.
    pub(super) fn keep(base: *mut u8) -> bool {
        let keep = |pages: &RefCell<Vec<*mut u8>>| {
            let mut pages = pages.borrow_mut();
            let has_room = pages.len() < MOST;
            if has_room {
                pages.push(base);
            }
            has_room
        };
        PAGES.try_with(keep).unwrap_or(false)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.paged {
            #[cfg(any(unix, windows))]
            {
                if self.total == pages::size() && spare::keep(self.base) {
                    return;
                }
                // SAFETY: made in `paged` with this length.
                unsafe { pages::give_back(self.base, self.total) };
            }
        } else {
            let layout = Layout::from_size_align(self.total, ALIGN).expect("the layout it was allocated with");
            // SAFETY: allocated in `heap` with this layout.
            unsafe { dealloc(self.base, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_notice_a_stray_write_on_either_side() {
        for stray in [-1isize, 10] {
            let memory = Memory::new(10, Guard::Heap { shift: 6 });
            assert_eq!(memory.as_ptr() as usize % 64, 6);
            assert_eq!(memory.broken_guard(), None);
            // SAFETY: one byte into a band, inside the allocation.
            unsafe { memory.as_ptr().offset(stray).write(0) };
            assert_eq!(memory.broken_guard(), Some(stray));
        }
    }

    #[cfg(any(unix, windows))]
    #[test]
    fn pages_lie_flush() {
        let page = pages::size();
        assert_eq!(Memory::new(24, Guard::FrontPage).as_ptr() as usize % page, 0);
        let back = Memory::new(24, Guard::BackPage);
        assert_eq!((back.as_ptr() as usize + back.len()) % page, 0);
        assert_eq!(back.bytes(), [PATTERN; 24]);
    }
}
