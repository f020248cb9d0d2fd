//! The checker: for every logical element, does the consumer read what the producer wrote?
//!
//! ```text
//! for each (row, column) of the consumer:   consumer.place(row, column) = producer.place(row, column), same width?
//! ```
//! All elements are compared, so that agreement is a proof for the tile and not a sample. Where they disagree, the report
//! holds the first disagreement, the whole map, the class of the fault and repairs; a repair is listed only after the same
//! comparison has proven it. Deliberately absent: values. `emulate` moves those.

mod diagnose;
mod fault;
mod file;
mod register_reuse;
mod report;
mod side;

pub use fault::{Fault, Finding, Repair};
pub use file::parse;
pub use register_reuse::{Feed, Shuffle, feed};
pub use report::{Disagreement, Found, Report, Status};
pub use side::{MOST_ELEMENTS, Order, Side, Source, Stored};

use rustc_hash::FxHashMap;

use crate::error::{Error, Result};
use side::{NOWHERE, Table};

/// A producer, a consumer, and a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// The name of the check.
    pub name: String,
    /// Who writes.
    pub producer: Side,
    /// Who reads.
    pub consumer: Side,
}

impl Check {
    /// Compares every element.
    ///
    /// # Errors
    /// [`Error::SpaceMismatch`], and whatever is wrong with a side's description. Disagreement is no error: it is a report.
    pub fn run(&self) -> Result<Report> {
        let (producer, consumer) = (self.producer.space(), self.consumer.space());
        if producer != consumer {
            return Err(Error::SpaceMismatch { producer: producer.name(), consumer: consumer.name() });
        }
        let (wrote, reads) = (self.producer.table()?, self.consumer.table()?);
        let mut report = Report::new(self, &reads);
        if !agree(&wrote, &reads) || overlap(&wrote).is_some() {
            let there = there(&wrote);
            report.compare(&wrote, &reads, &there);
            let diagnosis = diagnose::diagnose(self, &wrote, &reads, &report)?;
            (report.faults, report.repairs, report.feed) = (diagnosis.faults, diagnosis.repairs, diagnosis.feed);
        }
        Ok(report)
    }
}

/// Whether every element that is read was written there, in that width.
fn agree(wrote: &Table, reads: &Table) -> bool {
    wrote.bits == reads.bits && delta(wrote, reads) == Some(0)
}

/// The one distance from where elements were written to where they are read, if it is one.
fn delta(wrote: &Table, reads: &Table) -> Option<i64> {
    if wrote.bits != reads.bits || wrote.rows < reads.rows || wrote.cols < reads.cols {
        return None;
    }
    let distance = |row: usize, col: usize| {
        let (write, read) = (wrote.at(row, col), reads.at(row, col));
        (write != NOWHERE && read != NOWHERE).then(|| read - write)
    };
    let first = distance(0, 0)?;
    let mut all = (0..reads.cols).flat_map(|col| (0..reads.rows).map(move |row| (row, col)));
    all.all(|(row, col)| distance(row, col) == Some(first)).then_some(first)
}

/// Who lies at an address.
fn there(table: &Table) -> FxHashMap<i64, u32> {
    let mut there = FxHashMap::default();
    there.reserve(table.address.len());
    // At most `MOST_ELEMENTS`, so that an index fits.
    for (element, address) in (0u32..).zip(&table.address).filter(|(_, address)| **address != NOWHERE) {
        there.entry(*address).or_insert(element);
    }
    there
}

/// Two elements that share bits.
fn overlap(table: &Table) -> Option<(usize, usize)> {
    let mut places: Vec<i64> = table.address.iter().copied().filter(|address| *address != NOWHERE).collect();
    places.sort_unstable();
    let bits = i64::from(table.bits);
    let pair = places.windows(2).find(|pair| pair[1] - pair[0] < bits)?;
    let mut owners = (0..table.address.len()).filter(|at| pair.contains(&table.address[*at]));
    owners.next().zip(owners.next())
}
