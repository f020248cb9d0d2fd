//! What a check answers, for people and for JSON.

use std::fmt;

use rustc_hash::FxHashMap;
use serde::Serialize;
use serde_json::{Value, json};

use super::Check;
use super::fault::{Finding, Repair};
use super::register_reuse::Feed;
use super::side::{NOWHERE, Side, Table};
use crate::unit::Place;

/// What a consumer finds where it reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "what")]
pub enum Found {
    /// Another element of the tile, whole.
    Element {
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
    },
    /// Bits of another element, of another width or shifted.
    Part {
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
    },
    /// Nothing that the producer wrote: poison.
    Nothing,
    /// No memory: the address lies outside it.
    Outside,
    /// The consumer's map has no place for the element.
    NoPlace,
}

/// One element that is read elsewhere than it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Disagreement {
    /// The element's row.
    pub row: usize,
    /// The element's column.
    pub col: usize,
    /// Where the producer wrote it, if it did.
    pub wrote: Option<Place>,
    /// Where the consumer reads it, if it does.
    pub reads: Option<Place>,
    /// What lies there.
    pub found: Found,
}

/// What became of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Read where it was written.
    Right,
    /// Another element is read.
    Other,
    /// What is read was never written, or lies outside the memory.
    Poison,
}

impl Status {
    /// As in the map: `.`, `x`, `?`.
    #[must_use]
    pub fn mark(self) -> char {
        match self {
            Status::Right => '.',
            Status::Other => 'x',
            Status::Poison => '?',
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct SideReport {
    about: String,
    notation: String,
    dtype: &'static str,
    rows: i64,
    cols: i64,
    elements_per_row: i64,
    bits_per_row: i64,
}

/// The answer of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The check's name.
    pub name: String,
    /// Whether the consumer reads everything as written.
    pub proven: bool,
    /// Elements compared.
    pub elements: usize,
    /// Elements that are read elsewhere than written.
    pub disagreements: usize,
    /// Of those, elements whose reading is poison.
    pub poisoned: usize,
    producer: SideReport,
    consumer: SideReport,
    /// The first disagreement, by rows.
    pub first: Option<Disagreement>,
    /// The first reading of something that was never written, by rows.
    pub first_poison: Option<Disagreement>,
    /// Classes of the fault, the root first.
    pub faults: Vec<Finding>,
    /// What makes it right.
    pub repairs: Vec<Repair>,
    /// For registers: what the accumulator needs to feed the next product.
    pub feed: Option<Feed>,
    #[serde(skip)]
    pub(super) map: Vec<Status>,
    #[serde(skip)]
    pub(super) map_rows: usize,
}

impl Report {
    pub(super) fn new(check: &Check, reads: &Table) -> Self {
        let side = |side: &Side| SideReport {
            about: side.about.clone(),
            notation: side.notation(),
            dtype: side.dtype.name(),
            rows: side.rows,
            cols: side.cols,
            elements_per_row: side.cols,
            bits_per_row: side.cols * i64::from(side.dtype.bits()),
        };
        Report {
            name: check.name.clone(),
            proven: true,
            elements: reads.address.len(),
            disagreements: 0,
            poisoned: 0,
            producer: side(&check.producer),
            consumer: side(&check.consumer),
            first: None,
            first_poison: None,
            faults: Vec::new(),
            repairs: Vec::new(),
            feed: None,
            map: vec![Status::Right; reads.address.len()],
            map_rows: reads.rows,
        }
    }

    /// Every element, by rows.
    pub(super) fn compare(&mut self, wrote: &Table, reads: &Table, there: &FxHashMap<i64, u32>) {
        self.proven = false;
        let width = i64::from(wrote.bits);
        let is_aligned = wrote.address.iter().all(|address| *address == NOWHERE || address % width == 0);
        let step = if is_aligned { width } else { width.min(8) };
        // Column by column, as the tables lie; what comes first by rows is kept as (row, column).
        let (mut first, mut first_poison) = (None, None);
        for (element, read) in reads.address.iter().copied().enumerate() {
            let (row, col) = (element % reads.rows, element / reads.rows);
            let write = wrote.at(row, col);
            if write == read && write != NOWHERE && wrote.bits == reads.bits {
                continue;
            }
            let found = find(wrote, reads, (there, step), read);
            let is_poison = matches!(found, Found::Nothing | Found::Outside | Found::NoPlace);
            self.map[element] = if is_poison { Status::Poison } else { Status::Other };
            self.disagreements += 1;
            self.poisoned += usize::from(is_poison);
            let here = Some((row, col));
            first = first.min(here).or(here);
            if is_poison {
                first_poison = first_poison.min(here).or(here);
            }
        }
        let place = |table: &Table, address| (address != NOWHERE).then(|| table.place(address));
        let describe = |(row, col)| {
            let (write, read) = (wrote.at(row, col), reads.at(row, col));
            let found = find(wrote, reads, (there, step), read);
            Disagreement { row, col, wrote: place(wrote, write), reads: place(reads, read), found }
        };
        (self.first, self.first_poison) = (first.map(describe), first_poison.map(describe));
    }

    /// What became of each element: rows of the consumer's tile, one character an element.
    #[must_use]
    pub fn map_lines(&self) -> Vec<String> {
        let line = |row: usize| self.map.iter().skip(row).step_by(self.map_rows.max(1)).map(|s| s.mark()).collect();
        (0..self.map_rows).map(line).collect()
    }

    /// What became of the element in a row and a column.
    #[must_use]
    pub fn status(&self, row: usize, col: usize) -> Option<Status> {
        if row < self.map_rows { self.map.get(row + self.map_rows * col).copied() } else { None }
    }

    /// Rows and columns of the map.
    #[must_use]
    pub fn map_size(&self) -> (usize, usize) {
        (self.map_rows, self.map.len() / self.map_rows.max(1))
    }

    /// As docs/reference/layout.md describes it; `with_map` adds one string for each row.
    #[must_use]
    pub fn to_json(&self, with_map: bool) -> Value {
        // Strings, numbers and lists of them: nothing that JSON cannot hold.
        let mut value = serde_json::to_value(self).unwrap_or(Value::Null);
        if with_map {
            value["map"] = json!(self.map_lines());
        }
        value
    }
}

/// What lies where the consumer reads. Elements begin at multiples of `step`.
fn find(wrote: &Table, reads: &Table, (there, step): (&FxHashMap<i64, u32>, i64), read: i64) -> Found {
    if read == NOWHERE {
        return Found::NoPlace;
    }
    if !reads.place(read).exists() {
        return Found::Outside;
    }
    let element = |index: &u32| (*index as usize % wrote.rows, *index as usize / wrote.rows);
    if wrote.bits == reads.bits
        && let Some((row, col)) = there.get(&read).map(element)
    {
        return Found::Element { row, col };
    }
    // Any element whose bits meet those that are read.
    let from = read - i64::from(wrote.bits) + 1;
    let mut starts =
        (from + (-from).rem_euclid(step)..read + i64::from(reads.bits)).step_by(usize::try_from(step).unwrap_or(1));
    match starts.find_map(|start| there.get(&start)).map(element) {
        Some((row, col)) => Found::Part { row, col },
        None => Found::Nothing,
    }
}

impl fmt::Display for Disagreement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = |place: &Option<Place>| place.map_or("nowhere".to_owned(), |place| place.to_string());
        write!(
            f,
            "element ({}, {}): written to {}; read from {}, ",
            self.row,
            self.col,
            place(&self.wrote),
            place(&self.reads)
        )?;
        match &self.found {
            Found::Element { row, col } => write!(f, "where element ({row}, {col}) lies"),
            Found::Part { row, col } => write!(f, "which holds bits of element ({row}, {col})"),
            Found::Nothing => f.write_str("which the producer never wrote"),
            Found::Outside => f.write_str("which lies outside the memory"),
            Found::NoPlace => f.write_str("for the consumer's map has no place for it"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.proven { "proven" } else { "REFUTED" };
        writeln!(f, "{}: {verdict}", self.name)?;
        for (who, side) in [("producer", &self.producer), ("consumer", &self.consumer)] {
            let about = if side.about.is_empty() { String::new() } else { format!("{}\n             ", side.about) };
            writeln!(f, "  {who}   {about}{}", side.notation)?;
            writeln!(
                f,
                "             {} × {} {}: {} values, {} bits in a row",
                side.rows, side.cols, side.dtype, side.elements_per_row, side.bits_per_row
            )?;
        }
        if self.proven {
            return writeln!(f, "  all {} elements are read where they were written", self.elements);
        }
        writeln!(
            f,
            "  {} of {} elements are read elsewhere than written, {} of them from where nothing was written",
            self.disagreements, self.elements, self.poisoned
        )?;
        if let Some(first) = &self.first {
            writeln!(f, "  first      {first}")?;
        }
        if let Some(poison) = self.first_poison.as_ref().filter(|poison| Some(*poison) != self.first.as_ref()) {
            writeln!(f, "  poison     {poison}")?;
        }
        for finding in &self.faults {
            writeln!(f, "  fault      {}: {}", finding.class, finding.why)?;
        }
        if let Some(feed) = &self.feed {
            writeln!(f, "  feed       {feed}")?;
        }
        for repair in &self.repairs {
            writeln!(f, "  repair     {}: {}", repair.change, repair.how)?;
            writeln!(f, "             {}", repair.notation)?;
            writeln!(f, "             proven on {} elements", repair.proven_elements)?;
        }
        if self.repairs.is_empty() {
            writeln!(f, "  repair     none found")?;
        }
        Ok(())
    }
}
