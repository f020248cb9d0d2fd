//! Quantized operands: the numbers that codes stand for. Attention on quantized q, k, v is attention on these.
//!
//! ```text
//! x[b, h, s, d] = (code[b, h, s, d] − zero_point[g]) · descale[g]
//! g: one of the whole tensor          descale []
//!    of each head                     descale [B, H]
//!    of each token                    descale [B, H, S]
//!    of each channel                  descale [B, H, 1, D]
//!    of each block along D            descale [B, H, S, n], blocks of D / n, a divisor of D
//! ```
//! The shape of a descale names its granularity. A descale is a factor; there is none that is taken to be 1. Codes are the numbers of the
//! format (an e4m3 code is its value), so nothing here knows formats.

/// Factors, and what is subtracted before: of one shape.
#[derive(Clone, Copy, Debug)]
pub struct Descale<'a> {
    /// Row-major, of `shape`.
    pub factor: &'a [f64],
    /// Row-major, of `shape`; none is 0.
    pub zero_point: Option<&'a [f64]>,
    /// `[]`, `[B, H]`, `[B, H, S]`, `[B, H, 1, D]` or `[B, H, S, n]`.
    pub shape: &'a [usize],
}

impl Descale<'_> {
    /// The numbers of `codes`, `[batch, heads, len, dim]` as `shape` says, in the same order.
    ///
    /// # Panics
    /// If the shape of the descale is none of the five, or a slice is not as long as its tensor.
    #[must_use]
    pub fn numbers(&self, codes: &[f64], shape: [usize; 4]) -> Vec<f64> {
        let [batch, heads, len, dim] = shape;
        let (rows, columns) = match *self.shape {
            [] => (0, 0),
            [b, h] if (b, h) == (batch, heads) => (1, 1),
            [b, h, s] if (b, h, s) == (batch, heads, len) => (len, 1),
            [b, h, 1, d] if (b, h, d) == (batch, heads, dim) => (1, dim),
            [b, h, s, n] if (b, h, s) == (batch, heads, len) && n > 0 && dim.is_multiple_of(n) => (len, n),
            _ => panic!("a descale of shape {:?} for {shape:?}", self.shape),
        };
        assert_eq!(codes.len(), batch * heads * len * dim, "length of codes");
        let groups = self.shape.iter().product::<usize>();
        assert_eq!(self.factor.len(), groups, "length of the descale");
        assert!(self.zero_point.is_none_or(|zero_point| zero_point.len() == groups), "length of the zero point");
        let number = |at: usize| {
            let (head, s, d) = (at / dim / len, at / dim % len, at % dim);
            // A dimension of one group is not stepped along.
            let row = if rows == len { s } else { 0 };
            let column = if columns == 0 { 0 } else { d * columns / dim };
            let group = (head * rows + row) * columns + column;
            (codes[at] - self.zero_point.map_or(0.0, |zero_point| zero_point[group])) * self.factor[group]
        };
        (0..codes.len()).map(number).collect()
    }
}
