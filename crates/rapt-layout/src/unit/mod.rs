//! Units: what the numbers of a layout count.
//!
//! ```text
//! tensor memory   128 lanes × 512 columns of 32-bit cells; cell address = lane << 16 | column
//!                 bit address = cell address · 32 + bit of the cell
//! shared memory   bytes;      registers   (thread, slot) of 32 bits;      memory   elements of a width, or bytes
//! ```
//! Two ways in: [`Address`] and [`Measured`] carry the unit in their type, so that comparing two units does not compile;
//! [`Quantity`] carries it as a value, for what comes from files, and comparing two units is an
//! [`Error::UnitMismatch`]. Source: PTX ISA, "Tensor Memory Addressing". Deliberately absent: any conversion that is not
//! asked for by name.

mod kind;

pub use kind::{Space, Unit};

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::int_tuple::{add, mul};
use crate::layout::Layout;
use crate::swizzle::Swizzle;

/// Lanes of tensor memory.
pub const TMEM_LANES: i64 = 128;
/// Columns of tensor memory.
pub const TMEM_COLUMNS: i64 = 512;
/// Bits from one lane to the next: 65536 cells of 32 bits.
pub(crate) const LANE_BITS: i64 = 1 << 21;

impl Unit {
    /// The bit address of a number in this unit.
    ///
    /// # Errors
    /// [`Error::Overflow`].
    pub fn bit_address(self, number: i64) -> Result<i64> {
        match self {
            Unit::TileElements { bits, pitch } => {
                let (row, rest) = (number.div_euclid(pitch.into()), number.rem_euclid(pitch.into()));
                add(mul(row, LANE_BITS, "an address")?, rest * i64::from(bits), "an address")
            }
            _ => mul(number, self.bits().into(), "an address"),
        }
    }
}

impl FromStr for Unit {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refused = || Error::Word {
            what: "unit",
            got: text.to_owned(),
            allowed: "tmem-cells, tmem-elements:BITS, tile-elements:BITSxPITCH, shared-bytes, shared-elements:BITS, \
                      registers, bytes, elements:BITS, with BITS 4, 8, 16, 32 or 64"
                .to_owned(),
        };
        let width = |bits: &str| match bits.parse::<u32>() {
            Ok(bits @ (4 | 8 | 16 | 32 | 64)) => Ok(bits),
            _ => Err(refused()),
        };
        match text.split_once(':') {
            None => match text {
                "tmem-cells" => Ok(Unit::TmemCells),
                "shared-bytes" => Ok(Unit::SharedBytes),
                "registers" => Ok(Unit::Registers),
                "bytes" => Ok(Unit::Bytes),
                _ => Err(refused()),
            },
            Some(("tmem-elements", bits)) => width(bits).map(Unit::TmemElements),
            Some(("shared-elements", bits)) => width(bits).map(Unit::SharedElements),
            Some(("elements", bits)) => width(bits).map(Unit::Elements),
            Some(("tile-elements", rest)) => {
                let (bits, pitch) = rest.split_once('x').ok_or_else(refused)?;
                let pitch =
                    pitch.parse::<u32>().ok().filter(|pitch| (1..=65536).contains(pitch)).ok_or_else(refused)?;
                Ok(Unit::TileElements { bits: width(bits)?, pitch })
            }
            Some(_) => Err(refused()),
        }
    }
}

/// A number with its unit as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantity {
    /// The number.
    pub number: i64,
    /// What it counts.
    pub unit: Unit,
}

impl Quantity {
    /// Whether both name the same place.
    ///
    /// # Errors
    /// [`Error::UnitMismatch`] for two units, whatever the numbers.
    pub fn same(self, other: Quantity) -> Result<bool> {
        if self.unit != other.unit {
            return Err(Error::UnitMismatch { left: self.unit, right: other.unit });
        }
        Ok(self.number == other.number)
    }

    /// The same place in another unit of the same memory.
    ///
    /// # Errors
    /// [`Error::UnitMismatch`] for another memory, and where `unit` cannot name the place exactly.
    pub fn to(self, unit: Unit) -> Result<Quantity> {
        let mismatch = Error::UnitMismatch { left: self.unit, right: unit };
        if unit.space() != self.unit.space() || matches!(unit, Unit::TileElements { .. }) {
            return Err(mismatch);
        }
        let address = self.unit.bit_address(self.number)?;
        let bits = i64::from(unit.bits());
        if address % bits != 0 { Err(mismatch) } else { Ok(Quantity { number: address / bits, unit }) }
    }
}

/// A unit as a type.
pub trait UnitType: Copy {
    /// The same as a value.
    const UNIT: Unit;
}

macro_rules! unit_types {
    ($($(#[$doc:meta])* $name:ident = $unit:expr;)+) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {}
        impl UnitType for $name {
            const UNIT: Unit = $unit;
        }
    )+ };
}

unit_types! {
    /// Cells of tensor memory.
    TmemCell = Unit::TmemCells;
    /// Bytes of shared memory.
    SharedByte = Unit::SharedBytes;
    /// 32-bit registers: thread << 16 | slot.
    Register = Unit::Registers;
    /// Bytes of any memory.
    Byte = Unit::Bytes;
}

/// Elements of `BITS` bits in any memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element<const BITS: u32> {}

impl<const BITS: u32> UnitType for Element<BITS> {
    const UNIT: Unit = Unit::Elements(BITS);
}

/// Elements of `BITS` bits in tensor memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TmemElement<const BITS: u32> {}

impl<const BITS: u32> UnitType for TmemElement<BITS> {
    const UNIT: Unit = Unit::TmemElements(BITS);
}

/// A number whose unit is part of its type.
///
/// ```
/// use rapt_layout::unit::{Address, TmemCell, TmemElement};
///
/// let cell = Address::<TmemCell>::tmem(3, 32)?;
/// assert_eq!(cell.number(), 3 << 16 | 32);
/// let half: Address<TmemElement<16>> = cell.to()?;
/// assert_eq!(half.number(), 2 * cell.number());
/// assert!(half.to::<TmemCell>()? == cell);
/// # Ok::<(), rapt_layout::Error>(())
/// ```
/// Two units do not compare:
/// ```compile_fail
/// use rapt_layout::unit::{Address, TmemCell, TmemElement};
///
/// let cell = Address::<TmemCell>::new(64);
/// let half = Address::<TmemElement<16>>::new(64);
/// assert!(cell == half);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address<U> {
    number: i64,
    unit: PhantomData<U>,
}

impl<U: UnitType> Address<U> {
    /// `number` in the unit `U`.
    #[must_use]
    pub fn new(number: i64) -> Self {
        Address { number, unit: PhantomData }
    }

    /// The bare number.
    #[must_use]
    pub fn number(self) -> i64 {
        self.number
    }

    /// With its unit as a value.
    #[must_use]
    pub fn quantity(self) -> Quantity {
        Quantity { number: self.number, unit: U::UNIT }
    }

    /// The same place in another unit.
    ///
    /// # Errors
    /// As [`Quantity::to`].
    pub fn to<V: UnitType>(self) -> Result<Address<V>> {
        self.quantity().to(V::UNIT).map(|quantity| Address::new(quantity.number))
    }
}

impl Address<TmemCell> {
    /// The cell of a lane and a column.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] beyond 128 lanes and 512 columns.
    pub fn tmem(lane: i64, column: i64) -> Result<Self> {
        if !(0..TMEM_LANES).contains(&lane) || !(0..TMEM_COLUMNS).contains(&column) {
            let what =
                format!("lane {lane}, column {column}: tensor memory has {TMEM_LANES} lanes × {TMEM_COLUMNS} columns");
            return Err(Error::OutOfMemory { what });
        }
        Ok(Address::new((lane << 16) | column))
    }
}

impl Address<Register> {
    /// The register in a slot of a thread.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] below 0 and beyond 256 slots.
    pub fn register(thread: i64, slot: i64) -> Result<Self> {
        if !(0..1 << 16).contains(&thread) || !(0..256).contains(&slot) {
            let what = format!("thread {thread}, slot {slot}: a thread has 256 registers");
            return Err(Error::OutOfMemory { what });
        }
        Ok(Address::new((thread << 16) | slot))
    }
}

impl Address<SharedByte> {
    /// Where a swizzle puts this byte.
    #[must_use]
    pub fn swizzled(self, swizzle: Swizzle) -> Self {
        Address::new(swizzle.apply(self.number))
    }
}

/// A layout whose numbers are in the unit `U`.
///
/// ```compile_fail
/// use rapt_layout::unit::{Measured, TmemCell, TmemElement};
///
/// let c: Measured<TmemCell> = Measured::new("(128,64):(65536,1)".parse().unwrap());
/// let a: Measured<TmemElement<16>> = Measured::new("(128,64):(64,1)".parse().unwrap());
/// let same = c.at(1).unwrap() == a.at(1).unwrap(); // cells and 16-bit elements
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured<U> {
    layout: Layout,
    unit: PhantomData<U>,
}

impl<U: UnitType> Measured<U> {
    /// `layout` in the unit `U`.
    #[must_use]
    pub fn new(layout: Layout) -> Self {
        Measured { layout, unit: PhantomData }
    }

    /// The layout without its unit.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The address at an index.
    ///
    /// # Errors
    /// As [`Layout::at`].
    pub fn at(&self, index: i64) -> Result<Address<U>> {
        self.layout.at(index).map(Address::new)
    }

    /// The same memory counted in another unit of the same space.
    ///
    /// # Errors
    /// [`Error::UnitMismatch`] for another memory; as [`Layout::recast`].
    pub fn recast<V: UnitType>(&self) -> Result<Measured<V>> {
        if U::UNIT.space() != V::UNIT.space() {
            return Err(Error::UnitMismatch { left: U::UNIT, right: V::UNIT });
        }
        self.layout.recast(U::UNIT.bits().into(), V::UNIT.bits().into()).map(Measured::new)
    }
}

/// Some bits of a memory, for people and for JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    space: Space,
    address: i64,
    bits: u32,
}

impl Place {
    /// `bits` bits from a bit address on.
    #[must_use]
    pub fn new(space: Space, address: i64, bits: u32) -> Self {
        Place { space, address, bits }
    }

    /// The memory.
    #[must_use]
    pub fn space(&self) -> Space {
        self.space
    }

    /// The bit address.
    #[must_use]
    pub fn address(&self) -> i64 {
        self.address
    }

    /// The width in bits.
    #[must_use]
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// (lane, column) in tensor memory, (thread, slot) in registers, (0, byte) elsewhere.
    #[must_use]
    pub fn row_and_column(&self) -> (i64, i64) {
        match self.space() {
            Space::Tmem | Space::Registers => (self.address >> 21, (self.address >> 5) & 0xffff),
            Space::Shared | Space::Memory => (0, self.address >> 3),
        }
    }

    /// The bits within the cell, the register or the byte: from, and to (exclusive).
    #[must_use]
    pub fn bit_range(&self) -> (i64, i64) {
        let first = match self.space() {
            Space::Tmem | Space::Registers => self.address & 31,
            Space::Shared | Space::Memory => self.address & 7,
        };
        (first, first + i64::from(self.bits))
    }

    /// Whether the memory has this place. Shared memory: the 227 KiB that a Hopper or Blackwell block may hold.
    #[must_use]
    pub fn exists(&self) -> bool {
        let (row, column) = self.row_and_column();
        match self.space() {
            Space::Tmem => (0..TMEM_LANES).contains(&row) && column < TMEM_COLUMNS,
            Space::Shared => self.address >= 0 && self.address + i64::from(self.bits) <= 227 * 1024 * 8,
            Space::Registers => self.address >= 0 && column < 256,
            Space::Memory => self.address >= 0,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((row, column), (from, to)) = (self.row_and_column(), self.bit_range());
        match self.space() {
            Space::Tmem => write!(f, "lane {row}, column {column}, bits {from}..{to}"),
            Space::Registers => write!(f, "thread {row}, register {column}, bits {from}..{to}"),
            Space::Shared => write!(f, "shared byte {column}, bits {from}..{to}"),
            Space::Memory => write!(f, "byte {column}, bits {from}..{to}"),
        }
    }
}

impl Serialize for Place {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeMap;
        let ((row, column), (from, to)) = (self.row_and_column(), self.bit_range());
        let names = match self.space() {
            Space::Tmem => ["lane", "column"],
            Space::Registers => ["thread", "register"],
            Space::Shared | Space::Memory => ["", "byte"],
        };
        let mut map = serializer.serialize_map(None)?;
        if !names[0].is_empty() {
            map.serialize_entry(names[0], &row)?;
        }
        map.serialize_entry(names[1], &column)?;
        map.serialize_entry("bits", &[from, to])?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_and_printed() {
        for text in [
            "tmem-cells",
            "tmem-elements:16",
            "tile-elements:16x64",
            "shared-bytes",
            "shared-elements:8",
            "registers",
            "bytes",
            "elements:32",
        ] {
            assert_eq!(text.parse::<Unit>().unwrap().to_string(), text);
        }
        for wrong in ["", "cells", "elements:3", "tile-elements:16", "tile-elements:16x0", "elements:16:2"] {
            assert!(matches!(wrong.parse::<Unit>(), Err(Error::Word { what: "unit", .. })), "{wrong}");
        }
    }

    #[test]
    fn two_units_do_not_compare() {
        let cell = Quantity { number: 64, unit: Unit::TmemCells };
        let half = Quantity { number: 64, unit: Unit::TmemElements(16) };
        assert_eq!(cell.same(half), Err(Error::UnitMismatch { left: Unit::TmemCells, right: Unit::TmemElements(16) }));
        assert_eq!(cell.to(Unit::TmemElements(16)).unwrap().number, 128);
        assert_eq!(half.to(Unit::TmemCells).unwrap().number, 32);
        let odd = Quantity { number: 65, ..half };
        assert!(odd.to(Unit::TmemCells).is_err() && cell.to(Unit::SharedBytes).is_err());
        assert_eq!(cell.same(Quantity { number: 64, ..cell }), Ok(true));
    }

    #[test]
    fn places_say_where() {
        let place = Place::new(Space::Tmem, (3 << 21) + 32 * 32 + 16, 16);
        assert_eq!(place.to_string(), "lane 3, column 32, bits 16..32");
        assert_eq!(serde_json::to_string(&place).unwrap(), r#"{"lane":3,"column":32,"bits":[16,32]}"#);
        assert!(place.exists() && !Place::new(Space::Tmem, 512 * 32, 32).exists());
        assert!(!Place::new(Space::Tmem, 128 << 21, 32).exists());
        assert!(Address::<TmemCell>::tmem(0, 512).is_err() && Address::<TmemCell>::tmem(128, 0).is_err());
    }

    #[test]
    fn registers_and_swizzled_bytes() {
        assert_eq!(Address::<Register>::register(5, 7).unwrap().number(), (5 << 16) + 7);
        assert!(Address::<Register>::register(0, 256).is_err() && Address::<Register>::register(-1, 0).is_err());
        let byte = Address::<SharedByte>::new(3 * 128 + 16);
        assert_eq!(byte.swizzled(Swizzle::of_span(128).unwrap()).number(), 3 * 128 + 32);
    }

    #[test]
    fn measured_layouts_recast() {
        let cells: Measured<TmemCell> = Measured::new("(128,64):(65536,1)".parse().unwrap());
        let halves = cells.recast::<TmemElement<16>>().unwrap();
        assert_eq!(halves.layout().to_string(), "(128,128):(131072,1)");
        assert!(cells.recast::<SharedByte>().is_err());
        assert_eq!(cells.at(1).unwrap().quantity().unit, Unit::TmemCells);
    }
}
