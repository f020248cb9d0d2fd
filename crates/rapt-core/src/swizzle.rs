//! The order in which Blackwell's tensor cores read the scales of blocks.
//!
//! A matrix of scales `[rows, columns]` is padded with 0 to multiples of 128×4 and cut into tiles of that size, which follow
//! one another row-major. Within a tile of 512 bytes the scale at `(r, c)` stands at `(r % 32)·16 + (r / 32)·4 + c`.
//! Source: cuBLAS documentation, "1D Block Scaling Factors Layout".

/// Rows of a tile.
pub const ROWS: usize = 128;
/// Columns of a tile.
pub const COLUMNS: usize = 4;

/// Where the scale at (`row`, `column`) of a matrix with this many `columns` stands.
#[must_use]
#[inline]
pub const fn swizzled(row: usize, column: usize, columns: usize) -> usize {
    let tiles = row / ROWS * columns.div_ceil(COLUMNS);
    let row = row % ROWS;
    tiles * ROWS * COLUMNS + row % 32 * 16 + row / 32 * 4 + along_row(column)
}

/// How far the scale of a `column` stands behind the first one of its row.
#[must_use]
#[inline]
pub const fn along_row(column: usize) -> usize {
    column / COLUMNS * (ROWS * COLUMNS) + column % COLUMNS
}

/// The scales of a padded matrix, or `None` on overflow.
#[must_use]
pub fn padded_numel(rows: usize, columns: usize) -> Option<usize> {
    rows.checked_next_multiple_of(ROWS)?.checked_mul(columns.checked_next_multiple_of(COLUMNS)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_taken_once() {
        for (rows, columns) in [(1, 1), (128, 4), (129, 5), (256, 8), (300, 3)] {
            let numel = padded_numel(rows, columns).unwrap();
            let mut taken = vec![false; numel];
            for row in 0..rows.next_multiple_of(ROWS) {
                for column in 0..columns.next_multiple_of(COLUMNS) {
                    let place = swizzled(row, column, columns);
                    assert!(!std::mem::replace(&mut taken[place], true), "({row}, {column}) of {rows}x{columns}");
                }
            }
            assert!(taken.into_iter().all(|it| it));
        }
        assert_eq!([(0, 0), (1, 0), (32, 0), (0, 4), (128, 0)].map(|(r, c)| swizzled(r, c, 8)), [0, 16, 4, 512, 1024]);
        assert_eq!(padded_numel(usize::MAX, 4), None);
    }
}
