//! What can be wrong with a layout, an atom or a file. One variant per cause, each with the offender.

use crate::unit::Unit;

/// Why something was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Text that is not the notation.
    #[error("{text:?}, character {position}: expected {expected}, found {found}")]
    Notation {
        /// The whole text.
        text: String,
        /// Where, in characters from 0.
        position: usize,
        /// What could stand there.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
    /// Shape and stride of different profile.
    #[error("shape {shape} and stride {stride} have different profiles")]
    NotCongruent {
        /// The shape.
        shape: String,
        /// The stride.
        stride: String,
    },
    /// An extent below 1.
    #[error("extent {extent} in shape {shape}: an extent is at least 1")]
    Extent {
        /// The extent.
        extent: i64,
        /// The shape that holds it.
        shape: String,
    },
    /// A number beyond 62 bits.
    #[error("{what} overflows 62 bits")]
    Overflow {
        /// The quantity.
        what: &'static str,
    },
    /// Something valid but larger than this program enumerates.
    #[error("{what} is {got}; at most {most} is served")]
    TooLarge {
        /// The quantity.
        what: &'static str,
        /// Its value.
        got: i64,
        /// The limit.
        most: i64,
    },
    /// A coordinate that does not fit its shape.
    #[error("coordinate {coord} does not fit shape {shape}")]
    Coordinate {
        /// The coordinate.
        coord: String,
        /// The shape.
        shape: String,
    },
    /// An operation by mode with more modes than the layout has.
    #[error("{operation}: {layout} has {rank} modes, {asked} are asked")]
    Rank {
        /// The operation.
        operation: &'static str,
        /// The layout.
        layout: String,
        /// Its modes.
        rank: usize,
        /// The modes asked.
        asked: usize,
    },
    /// A layout that the operation does not take, because its law would not hold.
    #[error("{operation} of {layout}: {why}")]
    NoSuchLayout {
        /// The operation.
        operation: &'static str,
        /// The layout.
        layout: String,
        /// What stands in the way.
        why: String,
    },
    /// A swizzle whose bits overlap or leave the word.
    #[error("Sw<{bits},{base},{shift}>: bits and base are at least 0, |shift| ≥ bits, and all fits 62 bits")]
    Swizzle {
        /// Bits to move.
        bits: i64,
        /// Bits below that stay.
        base: i64,
        /// The distance.
        shift: i64,
    },
    /// Two numbers of different units.
    #[error("{left} and {right} are different units: convert one, do not compare their numbers")]
    UnitMismatch {
        /// The unit of the left side.
        left: Unit,
        /// The unit of the right side.
        right: Unit,
    },
    /// Places in different memories.
    #[error("the producer writes {producer}, the consumer reads {consumer}: nothing carries one to the other")]
    SpaceMismatch {
        /// Where the producer writes.
        producer: &'static str,
        /// Where the consumer reads.
        consumer: &'static str,
    },
    /// A place that a memory does not have.
    #[error("{what}")]
    OutOfMemory {
        /// The place and the memory.
        what: String,
    },
    /// A word out of a closed list.
    #[error("{what} {got:?}: allowed are {allowed}")]
    Word {
        /// What the word names.
        what: &'static str,
        /// The word.
        got: String,
        /// The list, or its pattern.
        allowed: String,
    },
    /// A file that is not the documented TOML, or leaves a needed key out.
    #[error("{what}")]
    File {
        /// What and where.
        what: String,
    },
}

/// The result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
