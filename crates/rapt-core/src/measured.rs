//! What was measured of a matrix when it was quantized: how far its numbers lie from those that they were made of.
//!
//! rapt-quant measures it, rapt-reference says what it bounds, and kernels read it. Deliberately absent: arithmetic.

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
