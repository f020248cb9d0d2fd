//! The memories and the units themselves: names and widths, and nothing that can fail.

use std::fmt;

use serde::Serialize;

/// Where bits lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Space {
    /// Tensor memory of a Blackwell SM.
    Tmem,
    /// Shared memory.
    Shared,
    /// Registers of threads.
    Registers,
    /// Any linear memory.
    Memory,
}

impl Space {
    /// In words.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Space::Tmem => "tensor memory",
            Space::Shared => "shared memory",
            Space::Registers => "registers",
            Space::Memory => "memory",
        }
    }
}

/// What one step of a number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Cells of tensor memory: lane << 16 | column.
    TmemCells,
    /// Elements of so many bits in tensor memory, counted on from lane to lane: 16-bit ones are 2·(lane << 16 | column) + half.
    TmemElements(u32),
    /// Elements of a tile whose rows of `pitch` elements lie one in each lane of tensor memory. The numbers of such a
    /// tile are no addresses; this unit exists to be recognised.
    TileElements {
        /// The width of an element.
        bits: u32,
        /// Elements in a row.
        pitch: u32,
    },
    /// Bytes of shared memory.
    SharedBytes,
    /// Elements of so many bits in shared memory.
    SharedElements(u32),
    /// 32-bit registers: thread << 16 | slot.
    Registers,
    /// Bytes of any memory.
    Bytes,
    /// Elements of so many bits of any memory.
    Elements(u32),
}

impl Unit {
    /// The memory.
    #[must_use]
    pub fn space(self) -> Space {
        match self {
            Unit::TmemCells | Unit::TmemElements(_) | Unit::TileElements { .. } => Space::Tmem,
            Unit::SharedBytes | Unit::SharedElements(_) => Space::Shared,
            Unit::Registers => Space::Registers,
            Unit::Bytes | Unit::Elements(_) => Space::Memory,
        }
    }

    /// The width of one step, in bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        match self {
            Unit::TmemCells | Unit::Registers => 32,
            Unit::SharedBytes | Unit::Bytes => 8,
            Unit::TmemElements(bits)
            | Unit::SharedElements(bits)
            | Unit::Elements(bits)
            | Unit::TileElements { bits, .. } => bits,
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unit::TmemCells => f.write_str("tmem-cells"),
            Unit::TmemElements(bits) => write!(f, "tmem-elements:{bits}"),
            Unit::TileElements { bits, pitch } => write!(f, "tile-elements:{bits}x{pitch}"),
            Unit::SharedBytes => f.write_str("shared-bytes"),
            Unit::SharedElements(bits) => write!(f, "shared-elements:{bits}"),
            Unit::Registers => f.write_str("registers"),
            Unit::Bytes => f.write_str("bytes"),
            Unit::Elements(bits) => write!(f, "elements:{bits}"),
        }
    }
}

impl Serialize for Unit {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
