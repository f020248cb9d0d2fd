//! Rows that a thread reads or writes soon, asked for a few cache lines at a time while products are formed.
//!
//! ```text
//! micro-tile   ask   micro-tile   ask   micro-tile   ask          a micro-tile is some hundred cycles
//! ```
//! Rows that nobody asked for are waited for: the processor's own prefetchers stop at a page and between rows that lie apart. A few at a time, since a
//! core leaves out what is asked for beyond what it can wait for: a loop of prefetches alone is over in half the time of reading the same lines (Zen 5,
//! 2026-11, docs/lab/cpu.md). Nothing is read here, and no bit of a result depends on it.

use super::simd::Simd;
use crate::problem::{Input, Output};

/// Bytes that arrive at once.
const LINE: usize = 64;

/// The most runs that are held; what does not fit is not asked for.
const MOST_RUNS: usize = 12;

/// Rows `step` bytes apart.
#[derive(Clone, Copy)]
struct Run {
    first: *const u8,
    step: isize,
    rows: usize,
    /// Of a row.
    bytes: usize,
}

/// See the module.
pub(crate) struct NextRows {
    runs: [Run; MOST_RUNS],
    count: usize,
    /// Lines of all of them, and of an ask.
    lines: usize,
    share: usize,
    /// The run at hand, how many of its rows were begun, and the next line of the last of these.
    run: usize,
    row: usize,
    line: *const u8,
    end: *const u8,
}

impl NextRows {
    /// None.
    pub(crate) fn new() -> Self {
        let none = Run { first: std::ptr::null(), step: 0, rows: 0, bytes: 0 };
        let (line, end) = (std::ptr::null(), std::ptr::null());
        NextRows { runs: [none; MOST_RUNS], count: 0, lines: 0, share: 0, run: 0, row: 0, line, end }
    }

    /// Adds `rows` rows of `dim` elements from `index` on, but for rows in pages and elements that lie apart.
    pub(crate) fn add(&mut self, input: &Input<4>, index: [usize; 4], rows: usize, dim: usize) {
        if input.pages.is_none() {
            self.push(input.at(index), [input.size, input.strides[2], input.strides[3]], rows, dim);
        }
    }

    /// The same of rows that are written.
    pub(crate) fn add_output(&mut self, output: &Output<4>, index: [usize; 4], rows: usize, dim: usize) {
        let strides = [output.size, output.strides[2], output.strides[3]];
        self.push(output.at(index).cast_const(), strides, rows, dim);
    }

    fn push(&mut self, first: *const u8, [size, row, element]: [isize; 3], rows: usize, dim: usize) {
        let bytes = dim * size.unsigned_abs();
        if element != 1 || rows == 0 || bytes == 0 || self.count == MOST_RUNS {
            return;
        }
        let step = row.wrapping_mul(size);
        // Rows that touch are one.
        let (rows, bytes) = if step == bytes as isize { (1, rows * bytes) } else { (rows, bytes) };
        let is_even = rows == 1 || step.unsigned_abs().is_multiple_of(LINE);
        // Rows that begin anywhere in a line may end in one more.
        let before = if is_even { first.addr() % LINE } else { LINE - 1 };
        self.lines += rows * (before + bytes).div_ceil(LINE);
        self.runs[self.count] = Run { first, step, rows, bytes };
        self.count += 1;
    }

    /// Spreads all of it over `asks`.
    pub(crate) fn spread(&mut self, asks: usize) {
        self.share = self.lines.div_ceil(asks.max(1));
    }

    /// Asks for the next share.
    #[inline(always)]
    pub(crate) unsafe fn ask<S: Simd>(&mut self) {
        if !S::PREFETCHES {
            return;
        }
        for _ in 0..self.share {
            if self.line >= self.end && !self.begin_row() {
                self.share = 0;
                return;
            }
            // SAFETY: a prefetch reads nothing.
            unsafe { S::prefetch(self.line) };
            self.line = self.line.wrapping_add(LINE);
        }
    }

    /// Goes to the next row; false where there is none.
    #[inline(always)]
    fn begin_row(&mut self) -> bool {
        while self.run < self.count {
            let Run { first, step, rows, bytes } = self.runs[self.run];
            if self.row < rows {
                let from = first.wrapping_offset(step.wrapping_mul(self.row as isize));
                self.row += 1;
                self.line = from.wrapping_sub(from.addr() % LINE);
                self.end = from.wrapping_add(bytes);
                return true;
            }
            (self.run, self.row) = (self.run + 1, 0);
        }
        false
    }
}
