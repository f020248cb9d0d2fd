//! The error of an output: relative L2 of the whole, and of its worst row.

/// A yardstick, or a measured error: relative L2 of the whole, and of the worst row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    /// Over the whole output.
    pub relative: f64,
    /// Of the worst row, against its own norm or the mean row's if that is larger.
    pub worst_row: f64,
    /// Which row that is.
    pub row: usize,
}

impl Figures {
    /// Of rows by the squares of their errors and of their norms.
    pub(crate) fn of_rows(rows: &[(f64, f64)]) -> Self {
        let ratio = |error: f64, norm: f64| if error == 0.0 { 0.0 } else { error.sqrt() / norm };
        let (error, norm) = rows.iter().fold((0.0, 0.0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
        let mean = rows.iter().map(|row| row.1.sqrt()).sum::<f64>() / rows.len().max(1) as f64;
        let mut figures = Figures { relative: ratio(error, norm.sqrt()), ..Figures::default() };
        for (n, &(error, norm)) in rows.iter().enumerate() {
            let worst = ratio(error, norm.sqrt().max(mean));
            if worst > figures.worst_row {
                (figures.worst_row, figures.row) = (worst, n);
            }
        }
        figures
    }
}

/// The error of `got`. Elements that are not finite in `reference` or in `got` do not count.
#[must_use]
pub fn figures(got: &[f64], reference: &[f64], head_dim_v: usize) -> Figures {
    let rows: Vec<(f64, f64)> = got
        .chunks(head_dim_v.max(1))
        .zip(reference.chunks(head_dim_v.max(1)))
        .map(|(got, reference)| {
            let finite = got.iter().zip(reference).filter(|(got, reference)| got.is_finite() && reference.is_finite());
            finite.fold((0.0, 0.0), |(error, norm), (got, reference)| {
                (error + (got - reference).powi(2), norm + reference * reference)
            })
        })
        .collect();
    Figures::of_rows(&rows)
}
