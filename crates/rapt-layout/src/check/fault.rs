//! The classes of faults, and what a diagnosis says of one: its class in words, and a change that repairs it.
//!
//! Deliberately absent: how a fault is found; see `diagnose`.

use std::fmt;

use serde::Serialize;

use super::side::Side;

/// The class of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// Numbers of one unit taken as another.
    UnitMixUp,
    /// All lies at one distance.
    MissingColumnOffset,
    /// Another number of elements in a cell, or another width.
    Packing,
    /// Rows and columns change places.
    Transposed,
    /// Another swizzle.
    WrongSwizzle,
    /// Something is read that was never written.
    Uncovered,
    /// Two elements share bits.
    Overlapped,
    /// A thread, or a row, stores another number of values than it has.
    CountPerThread,
    /// All is there, in another order.
    Permuted,
}

impl Fault {
    /// As in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Fault::UnitMixUp => "unit_mix_up",
            Fault::MissingColumnOffset => "missing_column_offset",
            Fault::Packing => "packing",
            Fault::Transposed => "transposed",
            Fault::WrongSwizzle => "wrong_swizzle",
            Fault::Uncovered => "uncovered",
            Fault::Overlapped => "overlapped",
            Fault::CountPerThread => "count_per_thread",
            Fault::Permuted => "permuted",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name().replace('_', " "))
    }
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its class.
    pub class: Fault,
    /// In words, with numbers.
    pub why: String,
}

/// A change after which the check holds; it has been proven.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Repair {
    /// Which side changes: `store` or `read`; `registers` for a permutation or shuffles.
    pub change: &'static str,
    /// In words.
    pub how: String,
    /// The changed side in notation.
    pub notation: String,
    /// Elements that were compared to prove it.
    pub proven_elements: usize,
    /// The changed side itself.
    #[serde(skip)]
    pub side: Option<Side>,
}
