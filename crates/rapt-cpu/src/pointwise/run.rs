//! Loops: a program over a shape, and the tiles that one thread runs.

use std::fmt;
use std::sync::Arc;

use rapt_core::Arch;

use super::kernels::{self, Ask, Copy, Rectangle};
use super::nest::{Lies, Nest};
use super::program::{Program, ProgramError};
use super::steps::{Step, Steps};
use super::{Instruction, Number};
use crate::available;

/// A program over a shape, for operands of given strides, on one instruction set.
#[derive(Clone, Debug)]
pub struct Loop {
    program: Arc<Program>,
    nest: Nest,
    /// Where no store reaches what a load reads, and where one may.
    apart: Steps,
    together: Steps,
    /// What copies, and its operands, where the program does nothing else.
    copy: Option<(Copy, usize, usize)>,
    /// Elements of a slot.
    most: usize,
    weight: usize,
    /// What asks for elements ahead, of the epilogue of a product.
    ask: Option<Ask>,
    /// The bytes of an element of each operand.
    sizes: Vec<isize>,
    loads: Vec<Reach>,
    stores: Vec<Reach>,
}

/// The bytes from which to which an operand is reached, relative to its pointer.
#[derive(Clone, Copy, Debug)]
struct Reach {
    operand: usize,
    first: isize,
    end: isize,
}

/// An integer was divided by 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroDivision;

impl fmt::Display for ZeroDivision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer was divided by 0")
    }
}

impl std::error::Error for ZeroDivision {}

/// Bytes of all slots together: with the operands' tiles they stay in an L1 of 32 KiB.
const SLOT_BYTES: usize = 12 * 1024;

/// Bytes between one slot and the next, so that tiles do not lie a multiple of 4096 bytes apart.
const GAP_BYTES: usize = 192;

/// Rows of an epilogue's operands that are asked for before they are read.
const AHEAD: usize = 4;

/// Additions that are worth a thread's while.
const ITEM_WORK: usize = 32 * 1024;

/// Where a run of tiles stands: pointers of operands and slots, and the indices of the outer dimensions.
struct Position {
    places: *mut *mut u8,
    outer: *mut usize,
}

impl Loop {
    /// The loop of a program over `shape`; `strides[operand][dimension]` in elements, 0 where an operand is broadcast, negative
    /// ones too. Dimensions are merged and ordered by how the operands lie. Allocates; running does not.
    ///
    /// # Errors
    /// [`ProgramError::Strides`], [`ProgramError::TooLarge`]; [`ProgramError::Missing`] unless `arch` is one of
    /// [`available`].
    pub fn new(
        arch: Arch,
        program: Arc<Program>,
        shape: &[usize],
        strides: &[Vec<isize>],
    ) -> Result<Loop, ProgramError> {
        check(arch, &program, strides)?;
        let nest = Nest::new(shape, strides, &stores(&program))?;
        Ok(Loop::of(arch, program, nest, Nest::tile))
    }

    /// As [`Loop::new`] for the epilogue of a matrix product: over at most `rows` × `columns`, whose dimensions are left as they
    /// are, for [`Loop::run_rectangle`].
    ///
    /// # Errors
    /// As [`Loop::new`].
    pub fn rectangle(
        arch: Arch,
        program: Arc<Program>,
        rows: usize,
        columns: usize,
        strides: &[Vec<isize>],
    ) -> Result<Loop, ProgramError> {
        check(arch, &program, strides)?;
        let nest = Nest::rectangle([rows, columns], strides)?;
        let mut each = Loop::of(arch, program, nest, Nest::tile_by_rows);
        (each.copy, each.ask) = (None, Some(kernels::ask(arch)));
        Ok(each)
    }

    fn of(arch: Arch, program: Arc<Program>, mut nest: Nest, tile: fn(&mut Nest, usize, usize)) -> Loop {
        // What is dense depends on the tiles, which depend on the slots: the most slots decide.
        let slots = Steps::new(&program, arch, &|_| Lies::default(), false).element_bytes().max(1);
        let most = (SLOT_BYTES / slots).clamp(64, 1024) / 64 * 64;
        let smallest = program.operands().iter().map(|dtype| dtype.bits() / 8).min().unwrap_or(1);
        tile(&mut nest, most, smallest);
        let lies = |operand: usize| nest.lies(operand);
        let apart = Steps::new(&program, arch, &lies, true);
        let together = Steps::new(&program, arch, &lies, false);
        let copy = program.copy().map(|(from, to)| (kernels::copy(arch, program.operands()[to].bits() / 8), from, to));
        let costly = |instruction: &Instruction| match instruction {
            Instruction::Unary(op, _) if kernels::is_costly(*op) => 16,
            _ => 1,
        };
        let sizes: Vec<isize> = program.operands().iter().map(|dtype| dtype.bits() as isize / 8).collect();
        let reach = |operand: usize| {
            let [low, high] = nest.reach(operand).unwrap_or([0, -1]);
            Reach { operand, first: low * sizes[operand], end: (high + 1) * sizes[operand] }
        };
        let [loads, stores] = [loads(&program), stores(&program)].map(|all| all.into_iter().map(reach).collect());
        let weight = program.code().iter().map(costly).sum::<usize>().max(1);
        Loop { program, nest, apart, together, copy, most, weight, ask: None, sizes, loads, stores }
    }

    /// The program.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Into how many items of equal work the loop is best divided among `threads`; 0 where there are no elements.
    #[must_use]
    pub fn items(&self, threads: usize) -> usize {
        let work = self.nest.elements().saturating_mul(self.weight);
        work.div_ceil(ITEM_WORK).min(threads).min(self.nest.tiles())
    }

    /// The bytes of scratch memory that [`run_item`](Loop::run_item) and [`run_rectangle`](Loop::run_rectangle) need, one of
    /// their own for each thread; a multiple of 64.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        let slots = |steps: &Steps| steps.slots.iter().map(|bytes| bytes * self.most + GAP_BYTES).sum::<usize>();
        self.table_bytes() + slots(&self.apart).max(slots(&self.together))
    }

    /// The bytes of the table of places and of the outer indices, before the slots.
    fn table_bytes(&self) -> usize {
        let slots = self.apart.slots.len().max(self.together.slots.len());
        (8 * (self.program.operands().len() + slots + self.nest.outer.len())).next_multiple_of(64)
    }

    /// Runs the tiles of `item`, of `items` that share them: each of `0..items` once, in any order, on any threads.
    /// `pointers` are the operands' elements with all indices 0.
    ///
    /// # Errors
    /// [`ZeroDivision`] of integers; some results may then have been written.
    ///
    /// # Safety
    /// There are as many pointers as operands, each aligned to its dtype, and every element that shape and strides reach is
    /// there, to be written where the program stores. An operand that is stored to may share memory with one that is loaded only
    /// if each element is that which is loaded for the same index. `scratch` is aligned to 8, has
    /// [`scratch_bytes`](Loop::scratch_bytes) and is nobody else's meanwhile.
    pub unsafe fn run_item(
        &self,
        item: usize,
        items: usize,
        pointers: &[*mut u8],
        scratch: *mut u8,
    ) -> Result<(), ZeroDivision> {
        let tiles = self.nest.tiles();
        let range = if items == 1 { 0..tiles } else { share(tiles, item, items) };
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: promised by the caller.
        unsafe { self.run_tiles(range, [self.nest.rows.size, self.nest.columns.size], pointers, scratch) }
    }

    /// Runs a rectangle from the pointers on, of a loop made by [`Loop::rectangle`] and not larger than it.
    ///
    /// # Errors
    /// As [`run_item`](Loop::run_item).
    ///
    /// # Safety
    /// As [`run_item`](Loop::run_item), of the rectangle's elements.
    ///
    /// # Panics
    /// If the rectangle is larger than the loop, or the loop was not made by [`Loop::rectangle`].
    pub unsafe fn run_rectangle(
        &self,
        rows: usize,
        columns: usize,
        pointers: &[*mut u8],
        scratch: *mut u8,
    ) -> Result<(), ZeroDivision> {
        let fits = rows <= self.nest.rows.size && columns <= self.nest.columns.size;
        assert!(fits && self.ask.is_some(), "a rectangle within the loop's");
        let tiles = rows * columns.div_ceil(self.nest.tile_columns);
        if tiles == 0 {
            return Ok(());
        }
        // SAFETY: promised by the caller.
        unsafe { self.run_tiles(0..tiles, [rows, columns], pointers, scratch) }
    }

    unsafe fn run_tiles(
        &self,
        range: std::ops::Range<usize>,
        [rows, columns]: [usize; 2],
        pointers: &[*mut u8],
        scratch: *mut u8,
    ) -> Result<(), ZeroDivision> {
        assert_eq!(pointers.len(), self.program.operands().len(), "as many pointers as operands");
        let steps = if self.are_apart(pointers) { &self.apart } else { &self.together };
        let places = scratch.cast::<*mut u8>();
        let count = pointers.len();
        // SAFETY: the caller vouches for scratch memory of `scratch_bytes`: the table, then the slots.
        let position = unsafe {
            let mut slot = scratch.add(self.table_bytes());
            for (n, bytes) in steps.slots.iter().enumerate() {
                places.add(count + n).write(slot);
                slot = slot.add(bytes * self.most + GAP_BYTES);
            }
            let tile = self.nest.tile_rows * self.nest.tile_columns;
            for &(place, number) in &steps.numbers {
                fill(places.add(usize::from(place)).read(), number, tile);
            }
            let slots = self.apart.slots.len().max(self.together.slots.len());
            Position { places, outer: places.add(count + slots).cast() }
        };
        let across = columns.div_ceil(self.nest.tile_columns);
        let down = rows.div_ceil(self.nest.tile_rows);
        let (mut block, rest) = split(range.start, across);
        let (mut row_block, mut outer) = split(rest, down);
        // SAFETY: as above; indices stay within the dimensions.
        unsafe {
            for (n, dimension) in self.nest.outer.iter().enumerate() {
                let index;
                (index, outer) = split(outer, dimension.size);
                position.outer.add(n).write(index);
            }
            let mut is_loaded = false;
            for _ in range {
                let (row, column) = (row_block * self.nest.tile_rows, block * self.nest.tile_columns);
                let tile = [self.nest.tile_rows.min(rows - row), self.nest.tile_columns.min(columns - column)];
                self.place_operands(&position, [row, column], pointers);
                if !is_loaded {
                    self.run_steps(&steps.same, &position, tile)?;
                    is_loaded = across == 1;
                }
                if let Some(ask) = self.ask
                    && row + AHEAD < rows
                {
                    self.ask_ahead(ask, &position, tile[1]);
                }
                self.run_tile(steps, &position, tile)?;
                block += 1;
                if block == across {
                    (block, row_block) = (0, row_block + 1);
                    if row_block == down {
                        row_block = 0;
                        self.advance(&position);
                    }
                }
            }
        }
        Ok(())
    }

    /// The next index of the outer dimensions.
    unsafe fn advance(&self, position: &Position) {
        for (n, dimension) in self.nest.outer.iter().enumerate() {
            // SAFETY: the table has an index for each outer dimension.
            unsafe {
                let index = position.outer.add(n);
                *index += 1;
                if *index < dimension.size {
                    return;
                }
                *index = 0;
            }
        }
    }

    /// Writes where the operands' elements of a tile begin.
    unsafe fn place_operands(&self, position: &Position, [row, column]: [usize; 2], pointers: &[*mut u8]) {
        for (operand, pointer) in pointers.iter().enumerate() {
            let mut offset =
                row as isize * self.nest.rows.strides[operand] + column as isize * self.nest.columns.strides[operand];
            for (n, dimension) in self.nest.outer.iter().enumerate() {
                // SAFETY: the table has an index for each outer dimension.
                offset += unsafe { *position.outer.add(n) } as isize * dimension.strides[operand];
            }
            // SAFETY: the caller vouches for the elements; the table has a place for each operand.
            unsafe { position.places.add(operand).write(pointer.offset(offset * self.sizes[operand])) };
        }
    }

    /// Asks for the elements that a tile some rows ahead loads: the processor's own prefetchers do not follow rows that are
    /// short parts of longer ones.
    unsafe fn ask_ahead(&self, ask: Ask, position: &Position, columns: usize) {
        for reach in &self.loads {
            let operand = reach.operand;
            let [row, column] = [self.nest.rows.strides[operand], self.nest.columns.strides[operand]];
            if operand > 0 && row != 0 && column == 1 {
                // SAFETY: the table has a place for each operand; nothing is read.
                unsafe {
                    let at = position.places.add(operand).read();
                    let size = self.sizes[operand];
                    ask(at.wrapping_offset(AHEAD as isize * row * size), columns * size.unsigned_abs());
                }
            }
        }
    }

    unsafe fn run_tile(&self, steps: &Steps, position: &Position, tile: [usize; 2]) -> Result<(), ZeroDivision> {
        // SAFETY: promised by the caller.
        unsafe {
            if let Some((copy, from, to)) = self.copy {
                let at = |operand: usize| position.places.add(operand).read();
                copy(at(to), at(from), &self.rectangle_of(to, tile), &self.rectangle_of(from, tile));
                return Ok(());
            }
            self.run_steps(&steps.steps, position, tile)
        }
    }

    /// A tile of an operand.
    fn rectangle_of(&self, operand: usize, [rows, columns]: [usize; 2]) -> Rectangle {
        let [row_stride, column_stride] = [self.nest.rows.strides[operand], self.nest.columns.strides[operand]];
        Rectangle { rows, columns, row_stride, column_stride }
    }

    unsafe fn run_steps(&self, steps: &[Step], position: &Position, tile: [usize; 2]) -> Result<(), ZeroDivision> {
        let rectangle = |operand: u16| self.rectangle_of(usize::from(operand), tile);
        // SAFETY: the places are those of operands and slots; each slot has room for a tile.
        unsafe {
            let at = |place: u16| position.places.add(usize::from(place)).read();
            for step in steps {
                match *step {
                    Step::Compute { kernel, to, from: [a, b, c] } => {
                        if kernel(at(to), at(a), at(b), at(c), tile[0] * tile[1]) {
                            return Err(ZeroDivision);
                        }
                    }
                    Step::Load { kernel, to, operand } => kernel(at(to), at(operand), &rectangle(operand)),
                    Step::Store { kernel, from, operand } => kernel(at(from), at(operand), &rectangle(operand)),
                }
            }
        }
        Ok(())
    }

    /// Whether no operand that is stored to shares memory with one that is loaded.
    fn are_apart(&self, pointers: &[*mut u8]) -> bool {
        let span = |reach: &Reach| {
            let at = pointers[reach.operand] as isize;
            (at.wrapping_add(reach.first), at.wrapping_add(reach.end))
        };
        self.stores.iter().map(span).all(|(first, end)| {
            self.loads.iter().map(span).all(|(load_first, load_end)| load_end <= first || end <= load_first)
        })
    }
}

/// The part of `all` that `item` of `items` has.
pub(crate) fn share(all: usize, item: usize, items: usize) -> std::ops::Range<usize> {
    let (each, rest) = (all / items.max(1), all % items.max(1));
    let bound = |item: usize| item * each + item.min(rest);
    bound(item)..bound(item + 1)
}

/// Remainder and quotient; the division, which takes as long as an addition of a hundred elements, mostly has nothing to do.
fn split(n: usize, by: usize) -> (usize, usize) {
    if n == 0 { (0, 0) } else { (n % by, n / by) }
}

/// Fills a slot with a constant.
unsafe fn fill(slot: *mut u8, number: Number, n: usize) {
    // SAFETY: the caller vouches for n elements.
    unsafe {
        match number {
            Number::F32(x) => (0..n).for_each(|i| slot.cast::<f32>().add(i).write(x)),
            Number::F64(x) => (0..n).for_each(|i| slot.cast::<f64>().add(i).write(x)),
            Number::Int(x) => (0..n).for_each(|i| slot.cast::<i64>().add(i).write(x)),
            Number::Bool(x) => slot.write_bytes(u8::from(x), n),
        }
    }
}

/// The operands that a program loads.
fn loads(program: &Program) -> Vec<usize> {
    let load = |instruction: &Instruction| match instruction {
        Instruction::Load(from) => Some(*from),
        _ => None,
    };
    program.code().iter().filter_map(load).collect()
}

/// The operands that a program stores to.
fn stores(program: &Program) -> Vec<usize> {
    let store = |instruction: &Instruction| match instruction {
        Instruction::Store(to, _) => Some(*to),
        _ => None,
    };
    program.code().iter().filter_map(store).collect()
}

fn check(arch: Arch, program: &Program, strides: &[Vec<isize>]) -> Result<(), ProgramError> {
    if !available().contains(&arch) {
        return Err(ProgramError::Missing { arch });
    }
    if strides.len() != program.operands().len() {
        return Err(ProgramError::Strides { expected: program.operands().len(), got: strides.len() });
    }
    Ok(())
}
