//! How far the numbers of codes lie from those that they were made of: what an estimate of attention's error rests on.
//!
//! ```text
//! e_j = x_j − x̂_j                      of each row j of a matrix [S, D], computed in f64; x̂ are the codes' numbers in f32
//! error[j]  = ‖e_j‖                     rounded up to f32; infinite where x_j or x̂_j is not finite
//! mean      = Σ_j x_j / S               rounded to f32
//! spread[j] = ‖x_j − mean‖              rounded up to f32, of that rounded mean
//! bias      = ‖Σ_j e_j / S‖             rounded up
//! share[c]  = Σ_j e_jc² / Σ_j ‖e_j‖²    how the error is spread over the columns; 1 / D where there is none
//! coherence = max(1, mean of n_j, max of n_j − 6·√(2S)·Σ_c share[c]·ê_jc²) + lean / 12
//!             n_j = Σ_{c≠d} ê_jc·ê_jd·G_cd / (1 − Σ share²);  ê_j = e_j − Σe/S, divided by its length;  G = Σ_j ê_j·ê_jᵀ
//! lean      = max(0, l − 1 − 6·√(2·Σ share²))      l = S·Σ_c (cov_c(e, x)² / var_c(x)) / Σ_c (Σ_j e_jc²/S)
//! ```
//! n_j is 1 in the mean if errors of different rows and columns are independent, since of the sum over all rows in G the row itself is left,
//! with a standard deviation of `√(2S)·Σ share·ê²`; it is n where the error of row j stands in n rows. `mean`, `bias`, `share` and `coherence`
//! are those of the rows that are finite.
//!
//! l is S times the part of the squared errors that is a multiple of the numbers themselves, as where small ones become 0 and large ones are
//! clipped; by chance 1, with a standard deviation of `√(2·Σ share²)`. Where values are made of keys, such errors add up over all S rows: a
//! squared sum is up to l times that of independent errors. The factor of the estimate is 5, so a twelfth of it covers that twice.
//!
//! Deliberately absent: attention. rapt-reference says what these numbers bound.

use rapt_core::{Error, Lines, MatrixErrors, View};

use crate::dequantize::Rows;
use crate::quantize::filled;
use crate::quantized::shape_is;
use crate::source::{Real, with_real};
use crate::{QuantizedView, Result};

/// How many standard deviations of chance the repetitions of one row are less than, and errors that lean on numbers.
const CHANCE: f64 = 6.0;
/// What part of errors that lean on numbers counts.
const LEAN: f64 = 1.0 / 12.0;

/// The errors of a quantized tensor `[.., S, D]`, matrix by matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    matrices: usize,
    rows: usize,
    columns: usize,
    /// `[matrices][rows]`: `error`, then `spread`; `[matrices][columns]`: `mean`, then `share`; `[matrices]`: `bias`, then `coherence`.
    numbers: Vec<f32>,
}

impl Measured {
    /// Matrices, rows of each, columns.
    #[must_use]
    pub fn shape(&self) -> [usize; 3] {
        [self.matrices, self.rows, self.columns]
    }

    /// Bytes: 8 for each row, 8 for each column and 8 for each matrix.
    #[must_use]
    pub fn nbytes(&self) -> usize {
        self.numbers.len() * 4
    }

    /// The errors of one matrix, counted in row-major order.
    ///
    /// # Panics
    /// If there are not that many.
    #[must_use]
    pub fn matrix(&self, at: usize) -> MatrixErrors<'_> {
        let Measured { matrices, rows, columns, numbers } = self;
        assert!(at < *matrices, "matrix {at} of {matrices}");
        let (of_rows, of_columns) = (matrices * rows, matrices * columns);
        let part = |before: usize, len: usize| &numbers[before + at * len..][..len];
        MatrixErrors {
            error: part(0, *rows),
            spread: part(of_rows, *rows),
            mean: part(2 * of_rows, *columns),
            share: part(2 * of_rows + of_columns, *columns),
            bias: part(2 * (of_rows + of_columns), 1)[0],
            coherence: part(2 * (of_rows + of_columns) + matrices, 1)[0],
        }
    }

    /// All numbers as they lie in memory, with [`Measured::shape`] what makes it again: [`Measured::from_numbers`].
    #[must_use]
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    /// What [`Measured::numbers`] gave; `None` if they are not as many as the shape says.
    #[must_use]
    pub fn from_numbers([matrices, rows, columns]: [usize; 3], numbers: Vec<f32>) -> Option<Self> {
        let each = rows.checked_add(columns)?.checked_add(1)?.checked_mul(2)?;
        (numbers.len() == matrices.checked_mul(each)?).then_some(Measured { matrices, rows, columns, numbers })
    }
}

/// Measures `quantized` against `x`, of the same shape and of f64, f32, f16 or bf16, through its strides. Takes 4 bytes for each element of one
/// matrix and for each pair of its columns meanwhile.
///
/// # Errors
/// [`Error::Rank`] for fewer than 2 dimensions, [`Error::ShapeMismatch`], [`Error::UnsupportedDtype`], [`Error::OutOfMemory`],
/// [`Error::DeviceUnavailable`], in [`QuantError::Core`](crate::QuantError::Core).
pub fn measure(x: &View<'_>, quantized: &QuantizedView<'_>) -> Result<Measured> {
    shape_is("x", x, quantized.form().shape())?;
    let shape = *x.shape();
    if shape.len() < 2 {
        let allowed = "errors are measured matrix by matrix: at least 2";
        return Err(Error::Rank { tensor: "x", got: shape.len(), shape, allowed }.into());
    }
    let rows = Rows::new(quantized)?;
    with_real!("x", x.dtype(), T => typed::<T>(&x.lines::<T>("x")?, &rows, &shape))
}

fn typed<T: Real>(x: &Lines<'_, T>, decoded: &Rows<'_>, shape: &[usize]) -> Result<Measured> {
    let [lead @ .., rows, columns] = shape else { unreachable!("a matrix has two sizes") };
    let (rows, columns, matrices) = (*rows, *columns, lead.iter().product::<usize>());
    let (of_rows, of_columns) = (matrices * rows, matrices * columns);
    let mut numbers = filled(0f32, 2 * (of_rows + of_columns + matrices))?;
    let (by_row, rest) = numbers.split_at_mut(2 * of_rows);
    let (errors, spreads) = by_row.split_at_mut(of_rows);
    let (by_column, by_matrix) = rest.split_at_mut(2 * of_columns);
    let (means, shares) = by_column.split_at_mut(of_columns);
    let (biases, coherences) = by_matrix.split_at_mut(matrices);
    let mut matrix = Matrix::new(rows, columns)?;
    for at in 0..matrices {
        matrix.read(|row, x_row, decoded_row| {
            let line = at * rows + row;
            x_row.iter_mut().zip(x.line(line)).for_each(|(to, x)| *to = x.to_f64());
            decoded.read(line, decoded_row);
            // Kernels form the numbers of codes in f32.
            decoded_row.iter_mut().for_each(|x| *x = f64::from(*x as f32));
        });
        let (of_rows, of_columns) = (at * rows..(at + 1) * rows, at * columns..(at + 1) * columns);
        errors[of_rows.clone()].copy_from_slice(&matrix.error);
        let mean = &mut means[of_columns.clone()];
        mean.iter_mut().zip(&matrix.mean).for_each(|(to, mean)| *to = *mean as f32);
        for (row, spread) in spreads[of_rows].iter_mut().enumerate() {
            let squares =
                x.line(at * rows + row).zip(mean.iter()).map(|(x, mean)| (x.to_f64() - f64::from(*mean)).powi(2));
            *spread = length(squares.sum());
        }
        shares[of_columns].copy_from_slice(&matrix.share());
        biases[at] = length(matrix.mean_error.iter().map(|e| e * e).sum());
        coherences[at] = matrix.coherence();
    }
    Ok(Measured { matrices, rows, columns, numbers })
}

/// `√squares` rounded up to f32; infinite where it is no number.
fn length(squares: f64) -> f32 {
    // A sum of D squares in f64 errs by less than D·2⁻⁵³ of itself.
    let length = squares.sqrt() * (1.0 + 1e-12);
    let near = length as f32;
    if near.is_nan() {
        f32::INFINITY
    } else if f64::from(near) < length {
        near.next_up()
    } else {
        near
    }
}

/// One matrix at a time.
struct Matrix {
    columns: usize,
    error: Vec<f32>,
    mean: Vec<f64>,
    mean_error: Vec<f64>,
    squares: Vec<f64>,
    /// Sums of `x²` and of `e·x`.
    x_squares: Vec<f64>,
    products: Vec<f64>,
    finite: usize,
    /// The errors themselves, row by row; 0 for rows that are not finite.
    errors: Vec<f32>,
    /// `[columns, columns]`: their products.
    gram: Vec<f32>,
}

impl Matrix {
    fn new(rows: usize, columns: usize) -> Result<Self> {
        let overflow = || Error::OutOfMemory { bytes: usize::MAX };
        let (numbers, products) = (rows.checked_mul(columns), columns.checked_mul(columns));
        Ok(Matrix {
            columns,
            error: filled(0.0, rows)?,
            mean: filled(0.0, columns)?,
            mean_error: filled(0.0, columns)?,
            squares: filled(0.0, columns)?,
            x_squares: filled(0.0, columns)?,
            products: filled(0.0, columns)?,
            finite: 0,
            errors: filled(0.0, numbers.ok_or_else(overflow)?)?,
            gram: filled(0.0, products.ok_or_else(overflow)?)?,
        })
    }

    fn read(&mut self, mut read: impl FnMut(usize, &mut [f64], &mut [f64])) {
        let columns = self.columns;
        let (mut x, mut decoded) = (vec![0.0; columns], vec![0.0; columns]);
        let sums = [&mut self.mean, &mut self.mean_error, &mut self.squares, &mut self.x_squares, &mut self.products];
        sums.into_iter().for_each(|sums| sums.fill(0.0));
        self.finite = 0;
        for row in 0..self.error.len() {
            read(row, &mut x, &mut decoded);
            let errors = &mut self.errors[row * columns..][..columns];
            let squares: f64 = x.iter().zip(&decoded).map(|(x, y)| (x - y) * (x - y)).sum();
            self.error[row] = length(squares);
            errors.fill(0.0);
            if !squares.is_finite() {
                continue;
            }
            self.finite += 1;
            for c in 0..columns {
                let error = x[c] - decoded[c];
                errors[c] = error as f32;
                self.mean[c] += x[c];
                self.mean_error[c] += error;
                self.squares[c] += error * error;
                self.x_squares[c] += x[c] * x[c];
                self.products[c] += error * x[c];
            }
        }
        let count = self.finite.max(1) as f64;
        self.mean.iter_mut().chain(&mut self.mean_error).for_each(|sum| *sum /= count);
    }

    fn share(&self) -> Vec<f32> {
        let all: f64 = self.squares.iter().sum();
        let even = 1.0 / self.columns.max(1) as f64;
        self.squares.iter().map(|square| if all > 0.0 { square / all } else { even } as f32).collect()
    }

    /// How many times as large a squared sum of errors may be because they are a multiple of the numbers themselves, beyond chance.
    fn lean(&self, alike: f64) -> f64 {
        let count = self.finite as f64;
        let explained = |c: usize| {
            let of_x = self.x_squares[c] - count * self.mean[c] * self.mean[c];
            let both = self.products[c] - count * self.mean[c] * self.mean_error[c];
            // What is left of numbers that are all alike is rounding.
            if of_x > 1e-9 * self.x_squares[c] { both * both / of_x } else { 0.0 }
        };
        let all: f64 = self.squares.iter().sum();
        if all == 0.0 {
            return 0.0;
        }
        let found = count * (0..self.columns).map(explained).sum::<f64>() / all;
        (found - 1.0 - CHANCE * (2.0 * alike).sqrt()).max(0.0)
    }

    fn coherence(&mut self) -> f32 {
        let share: Vec<f64> = self.share().into_iter().map(f64::from).collect();
        let alike = share.iter().map(|share| share * share).sum::<f64>();
        let lean = LEAN * self.lean(alike);
        let Matrix { columns, mean_error, errors, gram, .. } = self;
        let columns = *columns;
        if columns == 0 || errors.is_empty() {
            return 1.0;
        }
        let rows = errors.len() / columns;
        // What is left of errors that are all alike is rounding.
        let least = 1e-6 * mean_error.iter().map(|e| e * e).sum::<f64>().sqrt();
        gram.fill(0.0);
        for row in errors.chunks_exact_mut(columns) {
            row.iter_mut().zip(mean_error.iter()).for_each(|(e, mean)| *e -= *mean as f32);
            let length = row.iter().map(|e| f64::from(*e) * f64::from(*e)).sum::<f64>().sqrt();
            let factor = if length > least { (1.0 / length) as f32 } else { 0.0 };
            row.iter_mut().for_each(|e| *e *= factor);
            for (sums, &e) in gram.chunks_exact_mut(columns).zip(row.iter()) {
                sums.iter_mut().zip(row.iter()).for_each(|(sum, other)| *sum += e * other);
            }
        }
        (0..columns).for_each(|c| gram[c * columns + c] = 0.0);
        if 1.0 - alike < 1e-3 {
            return (1.0 + lean) as f32;
        }
        let (mut sum, mut most) = (0.0, 0.0f64);
        for row in errors.chunks_exact(columns) {
            let mut form = 0.0;
            for (sums, &e) in gram.chunks_exact(columns).zip(row) {
                form += f64::from(e * sums.iter().zip(row).map(|(sum, other)| sum * other).sum::<f32>());
            }
            let along: f64 = row.iter().zip(&share).map(|(&e, share)| f64::from(e * e) * share).sum();
            sum += form;
            most = most.max(form - CHANCE * (2.0 * rows as f64).sqrt() * along);
        }
        ((sum / rows as f64).max(most).max(1.0 - alike) / (1.0 - alike) + lean) as f32
    }
}
