//! Does an accumulator feed the next product from the registers it lies in?
//!
//! ```text
//! S = Q·Kᵀ lies in registers as D of one product; P = softmax(S) is wanted as A of the next, P·V.
//! as is:      thread t holds what A wants of it, value for value                         (f16 and bf16 on Hopper)
//! permuted:   P·V = Σ_k P[:, k]·V[k, :] does not care for the order of k. If thread t holds (row, π(k)) wherever A wants
//!             (row, k), for one π and all threads, then no value leaves its thread: V's rows are taken in the order π
//! shuffled:   values move between threads                                                  (what fp8 needs otherwise)
//! ```
//! π exists exactly if the columns of both fragments fall into the same classes by who holds which row of them. The classes
//! are made from every element and matched whole, so that the match is the proof; the shuffle names a source for every
//! element of A.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::fault::Repair;
use super::side::{NOWHERE, Side, Source, Table};
use crate::error::{Error, Result};
use crate::unit::Space;

/// Moves between threads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shuffle {
    /// Values that change their thread.
    pub values_moved: usize,
    /// Values that stay in it.
    pub values_kept: usize,
    /// Whether all moves stay within four neighbouring threads, as `shfl.sync` within a quad.
    pub within_quads: bool,
    /// For thread 0: (value of A, thread and value of D that it comes from).
    pub first_thread: Vec<(i64, i64, i64)>,
}

/// What an accumulator needs to be the next product's A operand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Feed {
    /// As it is: nothing moves.
    pub as_is: bool,
    /// Whether every thread holds what it needs, once V's rows are taken in the order of `v_permutation`.
    pub stays_in_thread: bool,
    /// π: row k of the operand V′ is row π(k) of V. Empty where none exists; the identity where `as_is`.
    pub v_permutation: Vec<usize>,
    /// For each value of A, the value of D in the same thread that becomes it. Empty where threads differ.
    pub value_order: Vec<i64>,
    /// The moves, where V keeps its order.
    pub shuffle: Option<Shuffle>,
}

/// Whether registers that `producer` leaves feed what `consumer` wants in them.
///
/// # Errors
/// [`Error::SpaceMismatch`] unless both are registers; what is wrong with a side.
pub fn feed(producer: &Side, consumer: &Side) -> Result<Feed> {
    for side in [producer, consumer] {
        if side.space() != Space::Registers {
            return Err(Error::SpaceMismatch { producer: producer.space().name(), consumer: consumer.space().name() });
        }
    }
    Ok(feed_tables(&producer.table()?, &consumer.table()?))
}

/// (thread, value) of a place in registers.
fn holder(table: &Table, address: i64) -> (i64, i64) {
    (address >> 21, (address & ((1 << 21) - 1)) / i64::from(table.bits))
}

/// For each column: which thread holds which row of it.
fn classes(table: &Table) -> Option<BTreeMap<Vec<i64>, Vec<usize>>> {
    let mut classes: BTreeMap<Vec<i64>, Vec<usize>> = BTreeMap::new();
    for col in 0..table.cols {
        let column = &table.address[table.rows * col..][..table.rows];
        if column.contains(&NOWHERE) {
            return None;
        }
        let threads = column.iter().map(|address| holder(table, *address).0).collect();
        classes.entry(threads).or_default().push(col);
    }
    Some(classes)
}

/// π, class by class in rising order.
fn permutation(wrote: &Table, reads: &Table) -> Option<Vec<usize>> {
    let (have, want) = (classes(wrote)?, classes(reads)?);
    let mut permutation = vec![0; reads.cols];
    for (threads, columns) in &want {
        let there = have.get(threads).filter(|there| there.len() == columns.len())?;
        for (to, from) in columns.iter().zip(there) {
            permutation[*to] = *from;
        }
    }
    Some(permutation)
}

/// For each value of A the value of D that becomes it, if it is the same in all threads and stays in its thread.
fn value_order(wrote: &Table, reads: &Table, permutation: &[usize]) -> Option<Vec<i64>> {
    let mut order: BTreeMap<i64, i64> = BTreeMap::new();
    for (col, from) in permutation.iter().enumerate() {
        for row in 0..reads.rows {
            let (thread, value) = holder(reads, reads.at(row, col));
            let (source_thread, source) = holder(wrote, wrote.at(row, *from));
            if thread != source_thread || *order.entry(value).or_insert(source) != source {
                return None;
            }
        }
    }
    Some(order.into_values().collect())
}

pub(super) fn feed_tables(wrote: &Table, reads: &Table) -> Feed {
    let is_same_size = (wrote.rows, wrote.cols) == (reads.rows, reads.cols);
    let as_is = super::agree(wrote, reads);
    let permutation = permutation(wrote, reads).filter(|_| is_same_size).unwrap_or_default();
    let value_order = value_order(wrote, reads, &permutation).filter(|_| !permutation.is_empty()).unwrap_or_default();
    let shuffle = (!as_is && is_same_size).then(|| shuffle(wrote, reads)).flatten();
    Feed { as_is, stays_in_thread: !permutation.is_empty(), v_permutation: permutation, value_order, shuffle }
}

fn shuffle(wrote: &Table, reads: &Table) -> Option<Shuffle> {
    let mut plan = Shuffle { values_moved: 0, values_kept: 0, within_quads: true, first_thread: Vec::new() };
    for (write, read) in wrote.address.iter().zip(&reads.address) {
        if *write == NOWHERE || *read == NOWHERE {
            return None;
        }
        let ((from, source), (to, value)) = (holder(wrote, *write), holder(reads, *read));
        if from == to {
            plan.values_kept += 1;
        } else {
            plan.values_moved += 1;
        }
        plan.within_quads &= from / 4 == to / 4;
        if to == 0 {
            plan.first_thread.push((value, from, source));
        }
    }
    plan.first_thread.sort_unstable();
    Some(plan)
}

impl Feed {
    /// The plans as repairs. Both were made from all elements: π matches the holders of every column, and the shuffle
    /// names for every place of A the place of D with the same element.
    pub(super) fn repairs(&self, consumer: &Side) -> Vec<Repair> {
        let Source::Registers { tv } = &consumer.source else { return Vec::new() };
        let elements = usize::try_from(consumer.rows * consumer.cols).unwrap_or_default();
        let repair = |how: String, notation: String| Repair {
            change: "registers",
            how,
            notation,
            proven_elements: elements,
            side: None,
        };
        let mut repairs = Vec::new();
        if !self.as_is && self.stays_in_thread {
            let (period, text) = self.period();
            let order: Vec<String> = self.value_order.iter().take(16).map(ToString::to_string).collect();
            let how = format!(
                "no value leaves its thread: take V's rows in the order [{text}] in every {period} (row k of V' is row π(k) of V)"
            );
            let more = if self.value_order.len() > 16 { ", …" } else { "" };
            let notation = if order.is_empty() {
                "the values of each thread in their own order".to_owned()
            } else {
                format!("values of a thread in the order {}{more}", order.join(", "))
            };
            repairs.push(repair(how, notation));
        }
        if let Some(shuffle) = &self.shuffle {
            let within = if shuffle.within_quads { ", all within quads of four threads" } else { "" };
            let how = format!(
                "or keep V and shuffle: {} values change their thread, {} stay{within}",
                shuffle.values_moved, shuffle.values_kept
            );
            repairs.push(repair(how, format!("as A wants it: (thread,value) {tv}")));
        }
        repairs
    }

    /// The shortest block in which π repeats, and π within it.
    fn period(&self) -> (usize, String) {
        let all = self.v_permutation.len();
        let repeats = |p: &usize| {
            all.is_multiple_of(*p)
                && self.v_permutation.iter().enumerate().all(|(k, to)| *to == self.v_permutation[k % p] + k / p * p)
        };
        let period = (1..=all).find(repeats).unwrap_or(all);
        let texts: Vec<String> = self.v_permutation.iter().take(period).map(ToString::to_string).collect();
        (period, texts.join(" "))
    }
}

impl fmt::Display for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.as_is {
            f.write_str("the accumulator feeds the next product from its registers as it is")
        } else if self.stays_in_thread {
            f.write_str("not as it is; a permutation of V's rows keeps every value in its thread")
        } else {
            f.write_str("not as it is, and no permutation of V's rows keeps every value in its thread")
        }
    }
}
