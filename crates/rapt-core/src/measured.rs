//! What was measured of a matrix when it was quantized, and what kernels find of a head from it.
//!
//! rapt-quant measures a matrix, rapt-reference says what that bounds, and backends answer for heads. Deliberately absent: arithmetic.

/// The errors `e_j = x_j − x̂_j` of a matrix `[S, D]` of K or V. Lengths are Euclidean and rounded up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MatrixErrors<'a> {
    /// `‖e_j‖` of each row; infinite where the row is not finite.
    pub error: &'a [f32],
    /// `‖x_j − mean‖` of each row.
    pub spread: &'a [f32],
    /// Of each column: about the mean of the rows; exactly what `spread` is measured from.
    pub mean: &'a [f32],
    /// Of each column: its share of the squared errors.
    pub share: &'a [f32],
    /// The length of the mean error.
    pub bias: f32,
    /// In about how many rows one error repeats, or is the same multiple of the row; 1 where errors are as good as independent.
    pub coherence: f32,
}

/// How far a query head may be off: of all its rows together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadDeviation {
    /// The largest ε: by how much a score may be off.
    pub epsilon: f64,
    /// The length of the estimated errors of all rows, by no factor.
    pub estimate: f64,
    /// The same of the bounds that are known before probabilities are.
    pub before: f64,
    /// The same of the bounds that probabilities give.
    pub after: f64,
    /// The length of the output.
    pub norm: f64,
}
