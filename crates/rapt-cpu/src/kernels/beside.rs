//! Products of tiles formed beside other work: the processor has a unit of its own for them, which works on while vectors are computed.
//!
//! ```text
//! other work   ▒▒▒▒ ▒▒▒▒ ▒▒▒▒ ▒▒▒▒        a few dozens of instructions at a time
//! products       ■    ■    ■    ■         one step along the contraction of two rows by two columns of tiles after each
//! ```
//! A step of bf16 is eight instructions and keeps the unit busy for 64 cycles: what reorders instructions sees two of them, and the work
//! between, at a time. One of float32 is 38 instructions and 384 cycles. Deliberately absent: the model, and other forms than two by two;
//! they are multiplied at once.

use std::marker::PhantomData;

use super::blocks::Beside;
use super::next_rows::NextRows;
use super::simd::Simd;
use crate::arch::amx::{InMemory, Operands, Parts, SIDE, Unit, begin, end, multiply, step, unit};

/// `rows` rows of tiles times one or two columns.
pub(super) unsafe fn rows_of_tiles(rows: usize, queries: usize, all: Operands) {
    let unit = unit();
    for row in (0..rows).step_by(2) {
        let operands = all.rows_from(row);
        // SAFETY: promised by the caller.
        unsafe {
            match (rows - row, queries / SIDE) {
                (1, 1) => multiply::<1, 1>(unit, &operands),
                (1, _) => multiply::<1, 2>(unit, &operands),
                (_, 1) => multiply::<2, 1>(unit, &operands),
                _ => multiply::<2, 2>(unit, &operands),
            }
        }
    }
}

/// Products that are not formed yet, the sums of each of its own.
pub(crate) struct Queue<S> {
    /// Pairs of rows of tiles, each to be multiplied as the operands say of the first.
    products: [(usize, Operands); 2],
    /// Those that were not begun.
    waiting: usize,
    /// The pair of rows at hand, and how many steps of it are done.
    now: Operands,
    at: usize,
    /// Pairs of rows after it.
    pairs: usize,
    /// Steps of all, and those that are left.
    steps: usize,
    left: usize,
    due: usize,
    /// What is asked for at each step.
    next: *mut NextRows,
    vectors: PhantomData<S>,
}

const NONE: Operands = {
    let at = InMemory { ptr: std::ptr::null(), next: 0, along: 0, part: 0, row: 0 };
    let c = InMemory { ptr: std::ptr::null_mut(), next: 0, along: 0, part: 0, row: 0 };
    Operands { a: at, b: at, c, steps: 0, parts: Parts::Whole, from_zero: true }
};

impl<S: Simd> Queue<S> {
    /// Of none, while what follows is asked for.
    pub(crate) fn new(next: *mut NextRows) -> Self {
        Queue {
            products: [(0, NONE); 2],
            waiting: 0,
            now: NONE,
            at: 0,
            pairs: 0,
            steps: 0,
            left: 0,
            due: 0,
            next,
            vectors: PhantomData,
        }
    }

    /// Adds a product of `rows` rows of tiles and `queries` columns, the last of two that is added being the first that is formed.
    ///
    /// # Safety
    /// As of [`multiply`](crate::arch::amx::multiply), until all is formed; nobody else touches the sums meanwhile.
    pub(crate) unsafe fn add(&mut self, queries: usize, (rows, operands): (usize, Operands)) {
        let pairs = if unit() == Unit::Amx && queries == 2 * SIDE { rows / 2 } else { 0 };
        let rest = operands.rows_from(2 * pairs);
        // SAFETY: promised by the caller.
        unsafe { rows_of_tiles(rows - 2 * pairs, queries, rest) };
        if pairs > 0 {
            self.products[self.waiting] = (pairs, operands);
            self.waiting += 1;
            self.steps += pairs * operands.steps;
            self.left = self.steps;
        }
    }

    /// The next step.
    #[inline(always)]
    unsafe fn step(&mut self) {
        if self.at == 0 {
            if self.pairs == 0 {
                self.waiting -= 1;
                (self.pairs, self.now) = self.products[self.waiting];
            }
            // SAFETY: of the caller of `add`.
            unsafe { begin::<2, 2>(&self.now) };
        }
        // SAFETY: as above.
        unsafe {
            (*self.next).ask::<S>();
            step::<2, 2>(&self.now, self.at);
        }
        self.left -= 1;
        self.at += 1;
        if self.at == self.now.steps {
            // SAFETY: as above.
            unsafe { end::<2, 2>(&self.now) };
            self.at = 0;
            self.pairs -= 1;
            self.now = self.now.rows_from(2);
        }
    }
}

impl<S: Simd> Beside for Queue<S> {
    #[inline(always)]
    unsafe fn go_on(&mut self, parts: usize, all: usize) {
        self.due += parts * self.steps;
        while self.due >= all && self.left > 0 {
            self.due -= all;
            // SAFETY: of the caller of `add`.
            unsafe { self.step() };
        }
    }

    #[inline(always)]
    unsafe fn finish(mut self) {
        while self.left > 0 {
            // SAFETY: as above.
            unsafe { self.step() };
        }
    }
}
