//! The loops over a shape: dimensions merged where all operands allow it and ordered by how the outputs lie, and the tiles that
//! the two innermost are cut into.

use super::ProgramError;

/// A dimension: its size, and each operand's stride in elements.
#[derive(Clone, Debug)]
pub(super) struct Dimension {
    pub(super) size: usize,
    pub(super) strides: Vec<isize>,
}

/// Dimensions, and tiles of the two innermost.
#[derive(Clone, Debug)]
pub(super) struct Nest {
    /// All but the two innermost, the innermost of them first.
    pub(super) outer: Vec<Dimension>,
    /// The rows of tiles.
    pub(super) rows: Dimension,
    /// The columns of tiles.
    pub(super) columns: Dimension,
    /// Rows of a tile.
    pub(super) tile_rows: usize,
    /// Columns of a tile.
    pub(super) tile_columns: usize,
}

/// How an operand lies in the tiles.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lies {
    /// Its elements of any tile follow one another as the tile's do.
    pub(super) dense: bool,
    /// Tiles are rows, and each reads the same elements.
    pub(super) same: bool,
}

/// Rows that are tiles of their own from this many columns on; shorter ones share a tile.
const LONG_ROW: usize = 64;

/// The bytes of a cache line: where operands lie across each other, a tile has as many rows as a line has elements.
pub(super) const LINE_BYTES: usize = 64;

impl Nest {
    /// The loops over `shape` for operands of these strides. `stores`: the operands that are written decide the order.
    pub(super) fn new(shape: &[usize], strides: &[Vec<isize>], stores: &[usize]) -> Result<Nest, ProgramError> {
        check(shape, strides)?;
        let mut dimensions: Vec<Dimension> = (0..shape.len())
            .filter(|&d| shape[d] != 1)
            .map(|d| Dimension { size: shape[d], strides: strides.iter().map(|strides| strides[d]).collect() })
            .collect();
        // Innermost first; equals keep the shape's order.
        dimensions.reverse();
        let loads: Vec<usize> = (0..strides.len()).filter(|operand| !stores.contains(operand)).collect();
        dimensions.sort_by_key(|dimension| {
            let sum = |operands: &[usize]| {
                operands.iter().map(|&operand| dimension.strides[operand].unsigned_abs()).fold(0, usize::saturating_add)
            };
            (sum(stores), sum(&loads))
        });
        let mut merged: Vec<Dimension> = Vec::new();
        for dimension in dimensions {
            match merged.last_mut() {
                Some(inner) if follows(inner, &dimension) => inner.size *= dimension.size,
                _ => merged.push(dimension),
            }
        }
        let none = || Dimension { size: 1, strides: vec![1; strides.len()] };
        let mut left = merged.into_iter();
        let columns = left.next().unwrap_or_else(none);
        let mut outer: Vec<Dimension> = left.collect();
        let rows = match crossing(&columns, &outer) {
            Some(at) => outer.remove(at),
            None if outer.is_empty() => none(),
            None => outer.remove(0),
        };
        Ok(Nest { outer, rows, columns, tile_rows: 1, tile_columns: 1 })
    }

    /// The loops over a rectangle, neither merged nor ordered.
    pub(super) fn rectangle(shape: [usize; 2], strides: &[Vec<isize>]) -> Result<Nest, ProgramError> {
        check(&shape, strides)?;
        let [rows, columns] = [0, 1].map(|d| {
            let strides = strides.iter().map(|strides| strides[d]).collect();
            Dimension { size: shape[d], strides }
        });
        Ok(Nest { outer: Vec::new(), rows, columns, tile_rows: 1, tile_columns: 1 })
    }

    /// Chooses tiles of at most `most` elements; the smallest have `bytes`.
    pub(super) fn tile(&mut self, most: usize, bytes: usize) {
        let columns = self.columns.size.max(1);
        (self.tile_rows, self.tile_columns) = if self.is_crossed() {
            let rows = (LINE_BYTES / bytes).min(most / 4).min(self.rows.size.max(1));
            (rows, even(columns, most / rows))
        } else if columns >= LONG_ROW {
            (1, even(columns, most))
        } else {
            ((most / columns).clamp(1, self.rows.size.max(1)), columns)
        };
    }

    /// Chooses tiles of one row with at most `most` elements.
    pub(super) fn tile_by_rows(&mut self, most: usize, _: usize) {
        (self.tile_rows, self.tile_columns) = (1, even(self.columns.size.max(1), most));
    }

    /// Whether an operand lies along the rows where another lies along the columns.
    pub(super) fn is_crossed(&self) -> bool {
        crossing(&self.columns, std::slice::from_ref(&self.rows)).is_some()
    }

    /// Tiles in a row of tiles, and rows of tiles in the two innermost dimensions.
    pub(super) fn blocks(&self) -> [usize; 2] {
        [self.columns.size.div_ceil(self.tile_columns), self.rows.size.div_ceil(self.tile_rows)]
    }

    /// All tiles.
    pub(super) fn tiles(&self) -> usize {
        let [across, down] = self.blocks();
        across * down * self.outer.iter().map(|dimension| dimension.size).product::<usize>()
    }

    /// All elements.
    pub(super) fn elements(&self) -> usize {
        self.columns.size * self.rows.size * self.outer.iter().map(|dimension| dimension.size).product::<usize>()
    }

    /// How an operand lies in any tile.
    pub(super) fn lies(&self, operand: usize) -> Lies {
        let [row, column] = [self.rows.strides[operand], self.columns.strides[operand]];
        let is_whole = self.tile_columns == self.columns.size && usize::try_from(row) == Ok(self.columns.size);
        let mut down = std::iter::once(&self.rows).chain(&self.outer);
        Lies {
            dense: column == 1 && (self.tile_rows == 1 || is_whole),
            same: self.tile_rows == 1 && down.all(|dimension| dimension.strides[operand] == 0),
        }
    }

    /// The least and the greatest offset in elements that an operand is reached at; `None` where there are no elements.
    pub(super) fn reach(&self, operand: usize) -> Option<[isize; 2]> {
        let mut reach = [0, 0];
        for dimension in self.outer.iter().chain([&self.rows, &self.columns]) {
            let last = isize::try_from(dimension.size).ok()?.checked_sub(1)?;
            let span = last * dimension.strides[operand];
            reach[usize::from(span > 0)] += span;
            if dimension.size == 0 {
                return None;
            }
        }
        Some(reach)
    }
}

/// Whether `outer` goes on where `inner` ends, for all operands.
fn follows(inner: &Dimension, outer: &Dimension) -> bool {
    let size = inner.size as isize;
    inner.strides.iter().zip(&outer.strides).all(|(inner, outer)| inner * size == *outer)
}

/// The first of these dimensions along which an operand lies that the columns step over.
fn crossing(columns: &Dimension, outer: &[Dimension]) -> Option<usize> {
    let steps = |operand: usize| columns.strides[operand].unsigned_abs();
    outer.iter().position(|dimension| {
        let lies = |(operand, stride): (usize, &isize)| stride.unsigned_abs() == 1 && steps(operand) > 1;
        dimension.size > 1 && dimension.strides.iter().enumerate().any(lies)
    })
}

/// A size cut into equal pieces of at most `most`, the pieces' size a multiple of 16 where there are several.
fn even(size: usize, most: usize) -> usize {
    if size <= most { size } else { size.div_ceil(size.div_ceil(most)).next_multiple_of(16).min(most) }
}

/// That there is a stride for every dimension, and that elements and offsets can be counted.
fn check(shape: &[usize], strides: &[Vec<isize>]) -> Result<(), ProgramError> {
    if let Some(strides) = strides.iter().find(|strides| strides.len() != shape.len()) {
        return Err(ProgramError::Strides { expected: shape.len(), got: strides.len() });
    }
    let limit = isize::MAX as usize / 8;
    let elements = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size).filter(|&n| n <= limit));
    // Sizes other than 0 must have a product, too: a size of 0 anywhere hides what the others come to.
    let sizes =
        shape.iter().filter(|&&n| n > 0).try_fold(1usize, |n, &size| n.checked_mul(size).filter(|&n| n <= limit));
    let spans = strides.iter().all(|strides| {
        let mut offsets =
            shape.iter().zip(strides).map(|(&n, stride)| n.saturating_sub(1).checked_mul(stride.unsigned_abs()));
        offsets.try_fold(0usize, |sum, span| sum.checked_add(span?).filter(|&sum| sum <= limit)).is_some()
    });
    if elements.is_some() && sizes.is_some() && spans { Ok(()) } else { Err(ProgramError::TooLarge) }
}
