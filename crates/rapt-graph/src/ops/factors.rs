//! Factors of matrices, row by row in f64, and what is solved with them.
//!
//! ```text
//! P A = L U       L has ones on its diagonal; of each column the largest number that is left becomes the pivot, the first of equals
//! A   = L Lᵀ      Cholesky: the lower triangle of A is read
//! ```

/// `P A = L U` of a square matrix.
pub(super) struct Lu {
    size: usize,
    /// L below the diagonal, without its ones, and U, row by row.
    cells: Vec<f64>,
    /// The row that each row was exchanged with.
    pivots: Vec<usize>,
    /// The first diagonal element of U that is 0, counted from 1; 0 where there is none.
    pub(super) singular_at: usize,
}

impl Lu {
    // for each column: exchange, divide what is below the pivot, subtract its products from the rest
    pub(super) fn of(matrix: &[f64], size: usize) -> Lu {
        let mut lu = Lu { size, cells: matrix.to_vec(), pivots: Vec::with_capacity(size), singular_at: 0 };
        for k in 0..size {
            let size_at = |row: usize, cells: &[f64]| cells[row * size + k].abs();
            let largest = |best, row| if size_at(row, &lu.cells) > size_at(best, &lu.cells) { row } else { best };
            let pivot = (k + 1..size).fold(k, largest);
            lu.pivots.push(pivot);
            if pivot != k {
                let (above, below) = lu.cells.split_at_mut(pivot * size);
                above[k * size..][..size].swap_with_slice(&mut below[..size]);
            }
            let (above, below) = lu.cells.split_at_mut((k + 1) * size);
            let lead = &above[k * size..];
            if lead[k] == 0.0 {
                lu.singular_at = if lu.singular_at == 0 { k + 1 } else { lu.singular_at };
                continue;
            }
            for row in below.chunks_mut(size) {
                row[k] /= lead[k];
                let factor = -row[k];
                for (x, &u) in row[k + 1..].iter_mut().zip(&lead[k + 1..]) {
                    *x = factor.mul_add(u, *x);
                }
            }
        }
        lu
    }

    /// The diagonal of U, and −1 for each exchange of rows.
    pub(super) fn parts_of_determinant(&self) -> impl Iterator<Item = f64> {
        let diagonal = (0..self.size).map(|k| self.cells[k * self.size + k]);
        let exchanges = self.pivots.iter().enumerate().filter(|(row, pivot)| row != *pivot).map(|_| -1.0);
        exchanges.chain(diagonal)
    }

    /// `x` of `A x = b`, in place.
    pub(super) fn solve(&self, b: &mut [f64]) {
        for (row, &pivot) in self.pivots.iter().enumerate() {
            b.swap(row, pivot);
        }
        let triangle = Triangle { cells: &self.cells, size: self.size, upper: false, transposed: false, unit: true };
        triangle.solve(b);
        Triangle { upper: true, unit: false, ..triangle }.solve(b);
    }
}

/// The lower factor of Cholesky, row by row with zeros above its diagonal; or the order of the first leading part that is not
/// positive definite.
pub(super) fn cholesky(matrix: &[f64], size: usize) -> Result<Vec<f64>, usize> {
    let mut l = vec![0.0; size * size];
    for row in 0..size {
        for column in 0..=row {
            let (of_row, of_column) = (&l[row * size..][..column], &l[column * size..][..column]);
            let rest =
                of_row.iter().zip(of_column).fold(matrix[row * size + column], |s, (a, b)| f64::mul_add(-a, *b, s));
            l[row * size + column] = if row == column { rest.sqrt() } else { rest / l[column * size + column] };
            // NaN is not greater than 0 either.
            if row == column && (rest <= 0.0 || rest.is_nan()) {
                return Err(row + 1);
            }
        }
    }
    Ok(l)
}

/// A triangle of a square matrix; the rest of the matrix is not read.
#[derive(Clone, Copy)]
pub(super) struct Triangle<'a> {
    /// Row by row.
    pub(super) cells: &'a [f64],
    pub(super) size: usize,
    /// Whether it is the upper one.
    pub(super) upper: bool,
    /// Whether its transpose is meant.
    pub(super) transposed: bool,
    /// Whether its diagonal counts as ones.
    pub(super) unit: bool,
}

impl Triangle<'_> {
    /// `x` of `T x = b`, in place, with zeros on the diagonal dividing as IEEE does.
    pub(super) fn solve(&self, b: &mut [f64]) {
        let n = self.size;
        let at = |row: usize, column: usize| match self.transposed {
            false => self.cells[row * n + column],
            true => self.cells[column * n + row],
        };
        let backwards = self.upper != self.transposed;
        for step in 0..n {
            let row = if backwards { n - 1 - step } else { step };
            let known = if backwards { row + 1..n } else { 0..row };
            let rest = known.fold(b[row], |rest, column| (-at(row, column)).mul_add(b[column], rest));
            b[row] = if self.unit { rest } else { rest / at(row, row) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Lu, Triangle, cholesky};

    #[test]
    fn a_system_is_solved_and_what_is_singular_is_found() {
        let lu = Lu::of(&[0.0, 2.0, 1.0, 1.0, 1.0, 0.0, 4.0, 0.0, 2.0], 3);
        let mut x = [7.0, 3.0, 10.0];
        lu.solve(&mut x);
        assert_eq!((x, lu.singular_at), ([1.0, 2.0, 3.0], 0));
        assert_eq!(lu.parts_of_determinant().product::<f64>(), -8.0);
        assert_eq!(Lu::of(&[1.0, 2.0, 2.0, 4.0], 2).singular_at, 2);
        assert_eq!(Lu::of(&[0.0; 9], 3).singular_at, 1);
        assert_eq!(Lu::of(&[], 0).parts_of_determinant().product::<f64>(), 1.0);
    }

    #[test]
    fn cholesky_reads_the_lower_triangle_and_says_where_it_ends() {
        let nan = f64::NAN;
        assert_eq!(cholesky(&[4.0, nan, 2.0, 5.0], 2), Ok(vec![2.0, 0.0, 1.0, 2.0]));
        assert_eq!(cholesky(&[4.0, 0.0, 2.0, 1.0], 2), Err(2));
        assert_eq!(cholesky(&[nan], 1), Err(1));
    }

    #[test]
    fn each_triangle_is_read_alone() {
        let nan = f64::NAN;
        let solved = |cells: &[f64], upper, transposed, unit| {
            let mut b = [4.0, 8.0];
            Triangle { cells, size: 2, upper, transposed, unit }.solve(&mut b);
            b
        };
        assert_eq!(solved(&[2.0, 1.0, nan, 4.0], true, false, false), [1.0, 2.0]);
        assert_eq!(solved(&[2.0, nan, 1.0, 4.0], false, false, false), [2.0, 1.5]);
        assert_eq!(solved(&[2.0, nan, 1.0, 4.0], false, true, false), [1.0, 2.0]);
        assert_eq!(solved(&[nan, 1.0, nan, nan], true, false, true), [-4.0, 8.0]);
    }
}
