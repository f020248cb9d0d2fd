//! One side of a check: where each logical element of a tile lies.
//!
//! ```text
//! stored:    place(r, c) = Sw(unit(layout(index(r, c / packed))) + offset) + (c mod packed)·bits
//! registers: place(r, c) = the (thread, value) that tv maps to r + rows·c; values fill registers from the low bits on
//! moved:     registers, carried by a tcgen05.ld or .st: register s of a thread ↔ the cell that the instruction names
//! ```
//! A [`Table`] holds all of a side's places as bit addresses. Deliberately absent: any knowledge of the other side.

use crate::atlas::{Atom, Map};
use crate::composed::ComposedLayout;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::int_tuple::{add, mul};
use crate::layout::Layout;
use crate::swizzle::Swizzle;
use crate::unit::{LANE_BITS, Place, Space, Unit};

/// The most elements of a tile: sixteen times tensor memory in 32-bit elements.
pub const MOST_ELEMENTS: i64 = 1 << 20;

/// No place.
pub(crate) const NOWHERE: i64 = i64::MIN;

/// How a pair of row and column becomes the index of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// row + rows·column, as CuTe counts.
    ColumnMajor,
    /// column + columns·row.
    RowMajor,
    /// The index that row-major numbering would turn into row + rows·column. No file asks for it: it is how a store
    /// looks that numbered a tile by rows where the memory numbers it by columns.
    UndoneRowMajor,
}

/// A layout in a memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Index ↦ number of `unit`.
    pub layout: ComposedLayout,
    /// What the numbers count.
    pub unit: Unit,
    /// Added to every number.
    pub offset: i64,
    /// What the offset counts.
    pub offset_unit: Unit,
    /// Elements of a row that share one number, from the low bits on.
    pub packed: i64,
    /// The span of shared memory's swizzle in bytes, 0 for none.
    pub span: i64,
    /// How row and column are numbered.
    pub order: Order,
}

impl Stored {
    /// `layout` in `unit`, nothing else.
    #[must_use]
    pub fn new(layout: impl Into<ComposedLayout>, unit: Unit) -> Self {
        Stored {
            layout: layout.into(),
            unit,
            offset: 0,
            offset_unit: unit,
            packed: 1,
            span: 0,
            order: Order::ColumnMajor,
        }
    }
}

/// Where a side's elements come from or go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A memory.
    Stored(Stored),
    /// Registers: (thread, value) ↦ row + rows·column.
    Registers {
        /// The map.
        tv: Layout,
    },
    /// Registers and the instruction between them and tensor memory.
    Moved {
        /// (thread, value) ↦ row + rows·column.
        tv: Layout,
        /// A `tcgen05.ld` or `tcgen05.st`.
        by: Atom,
        /// Where in tensor memory it starts, in cells.
        offset: i64,
        /// Values in a register.
        packed: i64,
    },
}

/// A producer or a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Side {
    /// In words.
    pub about: String,
    /// The elements.
    pub dtype: Dtype,
    /// Rows of the tile.
    pub rows: i64,
    /// Columns of the tile.
    pub cols: i64,
    /// Their places.
    pub source: Source,
    /// Whether hardware fixes the map, so that a repair must be on the other side.
    pub is_fixed: bool,
}

/// All places of a side.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) space: Space,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) bits: u32,
    /// Bit addresses, row + rows·column; [`NOWHERE`] where there is none.
    pub(crate) address: Vec<i64>,
    /// Values that a thread holds and that its instruction moves, where they differ.
    pub(crate) count: Option<(i64, i64)>,
}

impl Table {
    pub(crate) fn at(&self, row: usize, col: usize) -> i64 {
        if row < self.rows && col < self.cols { self.address[row + self.rows * col] } else { NOWHERE }
    }

    pub(crate) fn place(&self, address: i64) -> Place {
        Place::new(self.space, address, self.bits)
    }
}

impl Side {
    /// A side in a memory.
    #[must_use]
    pub fn stored(about: impl Into<String>, dtype: Dtype, [rows, cols]: [i64; 2], stored: Stored) -> Self {
        Side { about: about.into(), dtype, rows, cols, source: Source::Stored(stored), is_fixed: false }
    }

    /// A side that an atom of the atlas describes; `offset` is in the atom's unit. Register atoms repeat along the columns
    /// until the tile is full.
    ///
    /// # Errors
    /// [`Error::File`] where the atom does not fit the tile, or is no operand.
    pub fn of_atom(atom: &Atom, dtype: Dtype, [rows, cols]: [i64; 2], offset: i64) -> Result<Self> {
        let source = match &atom.map {
            Map::Storage { unit, layout } => {
                if (atom.rows, atom.cols) != (rows, cols) {
                    let what = format!("{} is {} × {}, the tile {rows} × {cols}", atom.name, atom.rows, atom.cols);
                    return Err(Error::File { what });
                }
                Source::Stored(Stored { offset, ..Stored::new(layout.clone(), *unit) })
            }
            Map::Registers { .. } => Source::Registers { tv: repeated(atom, rows, cols)? },
        };
        Ok(Side { about: atom.about.clone(), dtype, rows, cols, source, is_fixed: true })
    }

    /// The memory.
    #[must_use]
    pub fn space(&self) -> Space {
        match &self.source {
            Source::Stored(stored) => stored.unit.space(),
            Source::Registers { .. } => Space::Registers,
            Source::Moved { .. } => Space::Tmem,
        }
    }

    /// The layout with its unit and offset, in one line.
    #[must_use]
    pub fn notation(&self) -> String {
        match &self.source {
            Source::Stored(s) => {
                let mut text = format!("{} in {}", s.layout, s.unit);
                if s.offset != 0 {
                    text += &format!(", offset {}", s.offset);
                    if s.offset_unit != s.unit {
                        text += &format!(" {}", s.offset_unit);
                    }
                }
                if s.packed > 1 {
                    text += &format!(", {} to one", s.packed);
                }
                if s.span > 0 {
                    text += &format!(", {}-byte swizzle", s.span);
                }
                if s.order != Order::ColumnMajor {
                    text += ", rows first";
                }
                text
            }
            Source::Registers { tv } => format!("(thread,value) {tv}"),
            Source::Moved { tv, by, offset, .. } => {
                let column = if *offset == 0 { String::new() } else { format!(", offset {offset} tmem-cells") };
                format!("(thread,value) {tv} by {}{column}", by.name)
            }
        }
    }

    /// All places.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::Overflow`], and [`Error::NoSuchLayout`] where a map leaves the tile.
    pub(crate) fn table(&self) -> Result<Table> {
        let elements = mul(self.rows.max(0), self.cols.max(0), "the size of a tile")?;
        if !(1..=MOST_ELEMENTS).contains(&elements) {
            return Err(Error::TooLarge { what: "a tile's elements (from 1 up)", got: elements, most: MOST_ELEMENTS });
        }
        let size = |n: i64| usize::try_from(n).unwrap_or_default();
        let mut table = Table {
            space: self.space(),
            rows: size(self.rows),
            cols: size(self.cols),
            bits: self.dtype.bits(),
            address: vec![NOWHERE; size(elements)],
            count: None,
        };
        match &self.source {
            Source::Stored(stored) => self.fill_stored(stored, &mut table)?,
            Source::Registers { tv } => {
                for (element, thread, value) in self.held(tv)? {
                    let bit = value * i64::from(table.bits);
                    table.address[element] = (thread * LANE_BITS) + bit;
                }
            }
            Source::Moved { tv, by, offset, packed } => self.fill_moved(tv, by, *offset, *packed, &mut table)?,
        }
        Ok(table)
    }

    fn fill_stored(&self, stored: &Stored, table: &mut Table) -> Result<()> {
        let (rows, bits) = (self.rows, i64::from(table.bits));
        let packed = stored.packed;
        if packed < 1 || self.cols % packed != 0 || packed > 1 && packed * bits > i64::from(stored.unit.bits()) {
            let what = format!("packed = {packed}: {} elements of {bits} bits to one of {}", packed, stored.unit);
            return Err(Error::File { what });
        }
        let offset = mul(stored.offset, stored.offset_unit.bits().into(), "an offset")?;
        let (low, high) = stored.layout.layout().range();
        for number in [low, high] {
            let reach = add(number, stored.layout.offset(), "an address")?;
            add(stored.unit.bit_address(reach)?, offset, "an address")?;
        }
        let numbers = stored.layout.offsets()?;
        let swizzle = Swizzle::of_span(stored.span)?;
        // Per number, once: most layouts put several elements into a cell, and all columns share the arithmetic.
        let starts = numbers.into_iter().map(|number| Ok(stored.unit.bit_address(number)? + offset));
        let starts = starts.collect::<Result<Vec<i64>>>()?;
        for (col, addresses) in (0..self.cols).zip(table.address.chunks_mut(table.rows)) {
            let part = col % packed * bits;
            for (row, address) in (0..rows).zip(addresses) {
                let index = match stored.order {
                    Order::ColumnMajor if packed == 1 => row + rows * col,
                    _ => self.index(stored, row, col),
                };
                if let Some(start) = usize::try_from(index).ok().and_then(|index| starts.get(index)) {
                    *address = swizzled(swizzle, start + part);
                }
            }
        }
        // A smaller layout than the tile leaves elements without a place. A larger one is only used in part.
        let stores = stored.layout.layout().size() * packed;
        if stores < rows * self.cols {
            table.count = Some((self.cols, stores / rows));
        }
        Ok(())
    }

    /// The layout's index of an element.
    fn index(&self, stored: &Stored, row: i64, col: i64) -> i64 {
        let (cell, cells) = (col / stored.packed, self.cols / stored.packed);
        let index = row + self.rows * cell;
        match stored.order {
            Order::ColumnMajor => index,
            Order::RowMajor => cell + cells * row,
            Order::UndoneRowMajor => index / cells + self.rows * (index % cells),
        }
    }

    /// One entry of the table, without the table; nothing where the layout does not reach.
    pub(crate) fn stored_at(&self, stored: &Stored, row: usize, col: usize) -> Result<Option<i64>> {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        if stored.packed < 1 || self.cols % stored.packed != 0 {
            return Ok(None);
        }
        let index = self.index(stored, number(row), number(col));
        if index >= stored.layout.layout().size() {
            return Ok(None);
        }
        let offset = mul(stored.offset, stored.offset_unit.bits().into(), "an offset")?;
        let bit = add(stored.unit.bit_address(stored.layout.at(index)?)?, offset, "an address")?;
        let part = number(col) % stored.packed * i64::from(self.dtype.bits());
        Ok(Some(swizzled(Swizzle::of_span(stored.span)?, add(bit, part, "an address")?)))
    }

    /// (element, thread, value) of a register map.
    fn held(&self, tv: &Layout) -> Result<Vec<(usize, i64, i64)>> {
        let threads = tv.mode(0).map_or(1, |mode| mode.size());
        let elements = self.rows * self.cols;
        let offsets = tv.offsets()?;
        // A thread's values must not run into the next thread's addresses.
        let bits = i64::from(self.dtype.bits());
        if tv.size() / threads * bits > LANE_BITS {
            let most = LANE_BITS / bits;
            return Err(Error::TooLarge { what: "the number of values in a thread", got: tv.size() / threads, most });
        }
        let held = offsets.into_iter().enumerate().map(|(at, element)| {
            let at = i64::try_from(at).unwrap_or(i64::MAX);
            match usize::try_from(element) {
                Ok(index) if element < elements => Ok((index, at % threads, at / threads)),
                _ => Err(Error::NoSuchLayout {
                    operation: "tv",
                    layout: tv.to_string(),
                    why: format!("it reaches element {element} of a tile of {} × {}", self.rows, self.cols),
                }),
            }
        });
        held.collect()
    }

    fn fill_moved(&self, tv: &Layout, by: &Atom, offset: i64, packed: i64, table: &mut Table) -> Result<()> {
        let (Map::Registers { tv: moves }, true) = (&by.map, by.name.starts_with("tcgen05.")) else {
            return Err(Error::File { what: format!("by = {:?}: tcgen05.ld or tcgen05.st is asked", by.name) });
        };
        let bits = i64::from(table.bits);
        if packed < 1 || packed * bits > 32 {
            return Err(Error::File {
                what: format!("packed = {packed}: {packed} values of {bits} bits in a register"),
            });
        }
        let cells = moves.offsets()?;
        // Half columns of 16 bits where the instruction packs, whole ones of 32 where it does not.
        let (width, lanes) = (i64::from(by.bits), by.rows);
        let per_thread = i64::try_from(cells.len()).unwrap_or(i64::MAX) / 32;
        let offset = mul(offset, 32, "an offset")?;
        let mut most = 0;
        for (element, thread, value) in self.held(tv)? {
            most = most.max(value + 1);
            let in_register = value / packed * 32 + value % packed * bits;
            let (slot, bit) = (in_register / width, in_register % width);
            // 16 lanes at a time: the second half of the registers goes to the upper lanes.
            let (issue, slot) = (slot / per_thread, slot % per_thread);
            if (issue + 1) * lanes > 32 || thread >= 128 {
                continue;
            }
            let cell = cells[usize::try_from(thread % 32 + 32 * slot).unwrap_or_default()];
            let lane = 32 * (thread / 32) + lanes * issue + cell % lanes;
            table.address[element] = add(lane * LANE_BITS + cell / lanes * 32 + bit, offset, "an address")?;
        }
        let moved = per_thread * (32 / lanes) * width / 32 * packed;
        if moved != most {
            table.count = Some((most, moved));
        }
        Ok(())
    }
}

/// A bit address whose byte is swizzled.
fn swizzled(swizzle: Swizzle, bit: i64) -> i64 {
    if swizzle.is_identity() { bit } else { swizzle.apply(bit.div_euclid(8)) * 8 + bit.rem_euclid(8) }
}

/// An atom's registers over a tile of its rows and a multiple of its columns.
fn repeated(atom: &Atom, rows: i64, cols: i64) -> Result<Layout> {
    let Map::Registers { tv } = &atom.map else { return Layout::new(1, 0) };
    if atom.rows != rows || cols % atom.cols != 0 {
        let what = format!("{} is {} × {}: it does not tile {rows} × {cols}", atom.name, atom.rows, atom.cols);
        return Err(Error::File { what });
    }
    let (Some(threads), Some(values)) = (tv.mode(0), tv.mode(1)) else { return Ok(tv.clone()) };
    let copies = Layout::new(cols / atom.cols, atom.size())?;
    let values = Layout::from_modes(values.modes().into_iter().chain([copies]))?;
    Layout::from_modes([threads, values.coalesce()])
}
