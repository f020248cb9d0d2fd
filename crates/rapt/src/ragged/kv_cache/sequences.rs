//! Which sequence has which pages: page tables, how many sequences have each page, and which pages are free.
//!
//! ```text
//! key j of a sequence   row j % page_size of page pages[j / page_size]
//! holders[page]         sequences that have the page; 0: it is free
//! ```
//! A page takes new keys where one sequence has it. Where several have the last page of a sequence, the sequence gets a copy of it first
//! (copy-on-write, as in vLLM: Kwon et al., 2023, arXiv 2309.06180). What an append takes is computed before anything is changed
//! ([`Growth`]). Deliberately absent: the memory of the pages.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use rapt_core::{Error, Result};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::ragged::cache_view::Run;

/// A sequence of a [`KvCache`](crate::KvCache). No two sequences of a process have the same, also after one was freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl SequenceId {
    fn next() -> SequenceId {
        // 64 bits do not come round: a sequence each nanosecond would take 584 years.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        SequenceId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// As a number, for a language that has no other name for it.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    /// Of a number. One that no cache gave is refused by each.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        SequenceId(number)
    }
}

#[derive(Clone, Debug, Default)]
struct Sequence {
    /// As many as its keys take.
    pages: Vec<i32>,
    length: usize,
}

/// All sequences of a cache.
#[derive(Debug)]
pub(super) struct Sequences {
    page_size: usize,
    /// The one that is taken next is the last.
    free: Vec<i32>,
    /// How many sequences have each page.
    holders: Vec<usize>,
    sequences: FxHashMap<SequenceId, Sequence>,
}

/// A page of one sequence that becomes another, which holds its first rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageCopy {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) rows: usize,
}

/// The new page table of a sequence that grows.
#[derive(Debug)]
struct Grown {
    id: SequenceId,
    /// The page that it leaves to others, for a copy.
    left: Option<i32>,
    pages: Vec<i32>,
    length: usize,
}

/// What an append changes: first pages are copied, then rows written, then it holds.
#[derive(Debug)]
pub(super) struct Growth {
    grown: Vec<Grown>,
    /// Free pages that it takes.
    taken: usize,
    pub(super) copies: Vec<PageCopy>,
    pub(super) runs: Vec<Run>,
}

impl Sequences {
    /// No sequences; every page is free. `num_pages` fits an `i32`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn new(num_pages: usize, page_size: usize) -> Result<Self> {
        let (mut free, mut holders) = (Vec::new(), Vec::new());
        let bytes = num_pages.saturating_mul(size_of::<i32>() + size_of::<usize>());
        let out_of_memory = |_| Error::OutOfMemory { bytes };
        free.try_reserve_exact(num_pages).map_err(out_of_memory)?;
        holders.try_reserve_exact(num_pages).map_err(out_of_memory)?;
        free.extend((0..num_pages).rev().map(|page| page as i32));
        holders.resize(num_pages, 0);
        Ok(Sequences { page_size, free, holders, sequences: FxHashMap::default() })
    }

    fn get(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(unknown(id))
    }

    pub(super) fn length(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get(id)?.length)
    }

    pub(super) fn pages(&self, id: SequenceId) -> Result<&[i32]> {
        Ok(&self.get(id)?.pages)
    }

    pub(super) fn free_pages(&self) -> usize {
        self.free.len()
    }

    pub(super) fn len(&self) -> usize {
        self.sequences.len()
    }

    pub(super) fn add(&mut self) -> SequenceId {
        let id = SequenceId::next();
        self.sequences.insert(id, Sequence::default());
        id
    }

    /// Another sequence with the keys of `id`, in the same pages.
    pub(super) fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let sequence = self.get(id)?.clone();
        for &page in &sequence.pages {
            self.holders[page as usize] += 1;
        }
        let fork = SequenceId::next();
        self.sequences.insert(fork, sequence);
        Ok(fork)
    }

    /// Keeps the first `length` keys.
    pub(super) fn truncate(&mut self, id: SequenceId, length: usize) -> Result<()> {
        let sequence = self.sequences.get_mut(&id).ok_or(unknown(id))?;
        if length > sequence.length {
            let allowed = format!("0 to {}, the keys of the sequence", sequence.length);
            return Err(Error::Option { option: "length", got: length.to_string(), allowed });
        }
        sequence.length = length;
        let dropped = sequence.pages.split_off(length.div_ceil(self.page_size));
        self.release(&dropped);
        Ok(())
    }

    pub(super) fn free(&mut self, id: SequenceId) -> Result<()> {
        let sequence = self.sequences.remove(&id).ok_or(unknown(id))?;
        self.release(&sequence.pages);
        Ok(())
    }

    fn release(&mut self, pages: &[i32]) {
        for &page in pages.iter().rev() {
            let holders = &mut self.holders[page as usize];
            *holders -= 1;
            if *holders == 0 {
                self.free.push(page);
            }
        }
    }

    /// What `new` more keys of each sequence take.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::Option`] for a sequence that is given twice, [`Error::OutOfPages`].
    pub(super) fn growth(&self, ids: &[SequenceId], new: usize) -> Result<Growth> {
        let (mut grown, mut copies, mut runs) = (Vec::with_capacity(ids.len()), Vec::new(), Vec::new());
        let (mut seen, mut taken) = (FxHashSet::default(), 0);
        // Of each shared page, how many sequences of this append leave it for a copy.
        let mut leavers: FxHashMap<i32, usize> = FxHashMap::default();
        for (n, &id) in ids.iter().enumerate() {
            let sequence = self.get(id)?;
            if !seen.insert(id) {
                let (got, allowed) = (format!("sequence {} twice", id.number()), "each sequence once".to_owned());
                return Err(Error::Option { option: "ids", got, allowed });
            }
            let (mut pages, rows) = (sequence.pages.clone(), sequence.length % self.page_size);
            let mut left = None;
            if let Some(last) = pages.last_mut().filter(|_| rows > 0 && new > 0) {
                let leavers = leavers.entry(*last).or_default();
                if self.holders[*last as usize] - *leavers > 1 {
                    *leavers += 1;
                    left = Some(*last);
                    if let &[page] = self.next_free(&mut taken, 1) {
                        copies.push(PageCopy { from: *last as usize, to: page as usize, rows });
                        *last = page;
                    }
                }
            }
            let length = sequence.length.saturating_add(new);
            let more = self.next_free(&mut taken, length.div_ceil(self.page_size) - pages.len());
            pages.extend(more.iter().rev());
            // Where pages ran out the answer is an error, at the end: it says how many are needed in all.
            if taken <= self.free.len() {
                runs.extend(self.runs(n, &pages, sequence.length..length));
                grown.push(Grown { id, left, pages, length });
            }
        }
        if taken > self.free.len() {
            return Err(Error::OutOfPages { needed: taken, free: self.free.len() });
        }
        Ok(Growth { grown, taken, copies, runs })
    }

    /// The `count` free pages behind the first `taken`, which grows by them; none where there are fewer.
    fn next_free(&self, taken: &mut usize, count: usize) -> &[i32] {
        let before = *taken;
        *taken = before.saturating_add(count);
        let free = self.free.len();
        if *taken > free { &[] } else { &self.free[free - *taken..free - before] }
    }

    /// Where keys `new` of sequence `n` lie.
    fn runs(&self, n: usize, pages: &[i32], new: Range<usize>) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut at = new.start;
        while at < new.end {
            let (block, row) = (pages[at / self.page_size] as usize, at % self.page_size);
            let len = (self.page_size - row).min(new.end - at);
            let done = at - new.start;
            runs.push(Run { sequence: n, block, rows: row..row + len, new: done..done + len });
            at += len;
        }
        runs
    }

    /// Makes a growth hold, which these sequences answered and nothing has changed since.
    pub(super) fn grow(&mut self, growth: Growth) {
        let taken = self.free.split_off(self.free.len() - growth.taken);
        for page in taken {
            self.holders[page as usize] = 1;
        }
        for Grown { id, left, pages, length } in growth.grown {
            if let Some(left) = left {
                // Another sequence has it too.
                self.holders[left as usize] -= 1;
            }
            self.sequences.insert(id, Sequence { pages, length });
        }
    }
}

fn unknown(id: SequenceId) -> Error {
    Error::UnknownSequence { sequence: id.number() }
}
