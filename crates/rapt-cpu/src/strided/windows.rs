//! Windows over images: which elements a result is made of, tile by tile.

use super::element::Call;
use super::{Dim, Dims, TILE};

/// Windows along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// The elements of the image.
    pub input: usize,
    /// The windows.
    pub output: usize,
    /// The elements of a window.
    pub kernel: usize,
    /// From one window to the next.
    pub stride: usize,
    /// The elements before the image.
    pub padding: usize,
    /// From one element of a window to the next.
    pub dilation: usize,
}

impl Steps {
    /// Where element `k` of window `o` lies, if in the image.
    #[inline(always)]
    pub(super) fn at(&self, o: usize, k: usize) -> Option<usize> {
        (o * self.stride + k * self.dilation).checked_sub(self.padding).filter(|&at| at < self.input)
    }

    /// The windows whose element `k` lies in the image.
    pub(super) fn windows(&self, k: usize) -> std::ops::Range<usize> {
        let shift = k * self.dilation;
        let first = self.padding.saturating_sub(shift).div_ceil(self.stride);
        let end = (self.input + self.padding).saturating_sub(shift).div_ceil(self.stride);
        first.min(self.output)..end.min(self.output)
    }

    /// The elements of window `o` that lie in the image.
    pub(super) fn count(&self, o: usize) -> usize {
        (0..self.kernel).filter(|&k| self.at(o, k).is_some()).count()
    }

    /// The extent of window `o`, which ends where the padding does.
    pub(super) fn extent(&self, o: usize) -> usize {
        (o * self.stride + self.kernel).min(self.input + 2 * self.padding).saturating_sub(o * self.stride)
    }
}

/// Windows over the last two dimensions of operands: the first is read, the second written.
#[derive(Clone, Debug)]
pub(super) struct Over<const N: usize> {
    pub(super) steps: [Steps; 2],
    /// What comes before the rows, without the channels that are the columns of a tile.
    lead: Dims<N>,
    row: Dim<N>,
    column: Dim<N>,
    /// The channels, where they are the columns of a tile.
    pub(super) channels: Option<Dim<N>>,
}

/// One tile: results of a row, from column `first` on; or of one column of it, channels from `first` on.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) row: usize,
    column: usize,
    pub(super) first: usize,
    pub(super) width: usize,
}

/// Results of a tile that one element of their windows belongs to.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    /// How many of the tile come before them.
    pub(super) skipped: usize,
    pub(super) count: usize,
    /// Where the first's element lies, less the lead, and how far the next one's is.
    pub(super) at: isize,
    pub(super) step: isize,
    /// The first's element in its plane.
    pub(super) plane: usize,
}

impl<const N: usize> Over<N> {
    /// Windows over dimensions of the results, the last two rows and columns, of the operands' strides: those of the image are
    /// from element to element. Where `is_last`, the dimension before them are channels that lie closest.
    pub(super) fn new(steps: [Steps; 2], mut dims: Vec<Dim<N>>, is_last: bool) -> Option<Over<N>> {
        let (column, row) = (dims.pop()?, dims.pop()?);
        let channels = if is_last { dims.pop() } else { None };
        Some(Over { steps, lead: Dims::new(dims), row, column, channels })
    }

    pub(super) fn units(&self) -> usize {
        self.lead.count() * self.row.size
    }

    /// The elements of all windows of a unit.
    pub(super) fn unit_work(&self) -> usize {
        let (columns, each) = self.tiles();
        columns.size * each * self.steps[0].kernel * self.steps[1].kernel
    }

    /// The columns of a row's tiles, and how often they occur.
    fn tiles(&self) -> (Dim<N>, usize) {
        match self.channels {
            Some(channels) => (channels, self.column.size),
            None => (self.column, 1),
        }
    }

    /// Goes through the tiles of units: each with the offsets of its row in the operands; the image's are those of the lead.
    #[inline(always)]
    pub(super) fn each_tile(&self, call: &Call<'_>, mut run: impl FnMut(Tile, [isize; N])) {
        let (columns, each) = self.tiles();
        for unit in call.units.clone() {
            let row = unit % self.row.size;
            let mut offsets = self.lead.at(unit / self.row.size);
            for (offset, stride) in offsets.iter_mut().zip(&self.row.strides).skip(1) {
                *offset += row.cast_signed() * stride;
            }
            for column in 0..each {
                for first in (0..columns.size).step_by(TILE) {
                    let width = TILE.min(columns.size - first);
                    run(Tile { row, column, first, width }, offsets);
                }
            }
        }
    }

    /// Goes through the elements of windows, row by row: each with the results of a tile that it belongs to.
    #[inline(always)]
    pub(super) fn each_tap(&self, tile: Tile, mut run: impl FnMut([usize; 2], Reach)) {
        for i in 0..self.steps[0].kernel {
            for j in 0..self.steps[1].kernel {
                if let Some(reach) = self.reach(tile, [i, j]) {
                    run([i, j], reach);
                }
            }
        }
    }

    /// The results of a tile that element `[i, j]` of their windows belongs to, where it lies in the image.
    #[inline(always)]
    fn reach(&self, tile: Tile, [i, j]: [usize; 2]) -> Option<Reach> {
        let [rows, columns] = &self.steps;
        let row = rows.at(tile.row, i)?;
        let [down, right] = [self.row.strides[0], self.column.strides[0]];
        let plane = |column: usize| row * columns.input + column;
        let at = |column: usize| row.cast_signed() * down + column.cast_signed() * right;
        if let Some(channels) = self.channels {
            let (column, step) = (columns.at(tile.column, j)?, channels.strides[0]);
            let at = at(column) + tile.first.cast_signed() * step;
            return Some(Reach { skipped: 0, count: tile.width, at, step, plane: plane(column) });
        }
        let windows = columns.windows(j);
        let (first, end) = (windows.start.max(tile.first), windows.end.min(tile.first + tile.width));
        if first >= end {
            return None;
        }
        let column = columns.at(first, j)?;
        let step = columns.stride.cast_signed() * right;
        Some(Reach { skipped: first - tile.first, count: end - first, at: at(column), step, plane: plane(column) })
    }

    /// Where result `k` of a tile lies in an operand other than the image, from its row's beginning.
    #[inline(always)]
    pub(super) fn result(&self, tile: Tile, k: usize, operand: usize) -> isize {
        let k = (tile.first + k).cast_signed();
        match self.channels {
            Some(channels) => tile.column.cast_signed() * self.column.strides[operand] + k * channels.strides[operand],
            None => k * self.column.strides[operand],
        }
    }

    /// The column of results that result `k` of a tile is in.
    #[inline(always)]
    pub(super) fn column(&self, tile: Tile, k: usize) -> usize {
        if self.channels.is_some() { tile.column } else { tile.first + k }
    }

    /// How far the windows of two results of a tile lie apart in the plane.
    #[inline(always)]
    pub(super) fn plane_step(&self) -> usize {
        if self.channels.is_some() { 0 } else { self.steps[1].stride }
    }
}
