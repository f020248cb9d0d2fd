//! The formula in f64, a row at a time: what `bench` holds a kernel against.
//!
//! `softmax(softcap(q·k·scale) + bias, over the keys that causal, window and mask leave) · v`. Row-major tensors,
//! `[heads, len, dim]` of one batch. Deliberately absent: speed, strides, and any code of the kernels.

use rapt::{Causal, Options};

/// The keys that a mask leaves, or what it adds; `[q_len, kv_len]`, for every head.
pub(crate) enum Mask<'a> {
    /// No mask.
    None,
    /// True = attend.
    Bool(&'a [bool]),
    /// Added to the scores.
    Additive(&'a [f64]),
}

/// Sizes and options of one problem.
pub(crate) struct Formula<'a> {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) head_dim_v: usize,
    pub(crate) options: Options,
    pub(crate) mask: Mask<'a>,
}

impl Formula<'_> {
    /// Whether query `i` sees key `j`, as far as positions go.
    fn sees(&self, i: usize, j: usize) -> bool {
        let Options { causal, window, .. } = self.options;
        let shift = if causal == Some(Causal::BottomRight) { self.kv_len as i128 - self.q_len as i128 } else { 0 };
        let (at, j) = (i as i128 + shift, j as i128);
        (causal.is_none() || j <= at)
            && window.left.is_none_or(|left| j >= at - left as i128)
            && window.right.is_none_or(|right| j <= at + right as i128)
    }

    /// The score of query `i` and key `j`, or `None` where it is masked.
    fn score(&self, i: usize, j: usize, q: &[f64], k: &[f64]) -> Option<f64> {
        if !self.sees(i, j) {
            return None;
        }
        let scale = self.options.softmax_scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt());
        let scaled = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * scale;
        let score = self.options.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
        match self.mask {
            Mask::None => Some(score),
            Mask::Bool(mask) => mask[i * self.kv_len + j].then_some(score),
            Mask::Additive(bias) => Some(score + bias[i * self.kv_len + j]),
        }
    }

    /// `[heads, q_len, head_dim_v]`; a row that sees no key is zeros.
    pub(crate) fn out(&self, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let mut out = Vec::with_capacity(self.heads * self.q_len * self.head_dim_v);
        for (row, q) in q.chunks(self.head_dim).enumerate() {
            let (head, i) = (row / self.q_len, row % self.q_len);
            let first = head / (self.heads / self.kv_heads) * self.kv_len;
            let scores: Vec<(usize, f64)> = (0..self.kv_len)
                .filter_map(|j| Some((j, self.score(i, j, q, &k[(first + j) * self.head_dim..][..self.head_dim])?)))
                .collect();
            let row_max = scores.iter().fold(f64::NEG_INFINITY, |max, (_, score)| max.max(*score));
            let p: Vec<(usize, f64)> = scores.iter().map(|(j, score)| (*j, (score - row_max).exp())).collect();
            let row_sum: f64 = p.iter().map(|(_, p)| p).sum();
            let at = |d: usize| p.iter().map(|(j, p)| p * v[(first + j) * self.head_dim_v + d]).sum::<f64>();
            out.extend((0..self.head_dim_v).map(|d| if p.is_empty() { 0.0 } else { at(d) / row_sum }));
        }
        out
    }
}

/// Sixteenths in −1..1, which every dtype holds exactly.
pub(crate) fn sample(seed: usize, len: usize) -> Vec<f64> {
    (0..len).map(|n| (((n * 7 + seed * 13) * 37 % 33) as f64 - 16.0) / 16.0).collect()
}

/// The relative L2 distance of `got` from `law`.
pub(crate) fn relative_error(got: impl Iterator<Item = f64>, law: &[f64]) -> f64 {
    let off: f64 = got.zip(law).map(|(got, law)| (got - law).powi(2)).sum();
    let whole: f64 = law.iter().map(|law| law.powi(2)).sum();
    if whole == 0.0 { off.sqrt() } else { (off / whole).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_keys(options: Options, mask: Mask<'_>) -> Vec<f64> {
        let formula = Formula { heads: 1, kv_heads: 1, q_len: 2, kv_len: 2, head_dim: 1, head_dim_v: 1, options, mask };
        formula.out(&[0.0, 0.0], &[1.0, 2.0], &[1.0, 3.0])
    }

    #[test]
    fn equal_scores_give_the_mean_of_what_is_seen() {
        let plain = Options::default();
        assert_eq!(two_keys(plain, Mask::None), [2.0, 2.0]);
        assert_eq!(two_keys(plain.with_causal(Causal::TopLeft), Mask::None), [1.0, 2.0]);
        assert_eq!(two_keys(plain.with_window(Some(0), Some(0)), Mask::None), [1.0, 3.0]);
        assert_eq!(two_keys(plain, Mask::Bool(&[false, false, false, true])), [0.0, 3.0]);
        let biased = two_keys(plain, Mask::Additive(&[0.0, f64::NEG_INFINITY, 3f64.ln(), 0.0]));
        assert!((biased[0] - 1.0).abs() < 1e-15 && (biased[1] - 1.5).abs() < 1e-15, "{biased:?}");
    }

    #[test]
    fn the_error_is_relative() {
        assert_eq!(relative_error([3.0, 4.0].into_iter(), &[3.0, 4.0]), 0.0);
        assert!((relative_error([3.0, 4.5].into_iter(), &[3.0, 4.0]) - 0.1).abs() < 1e-15);
    }
}
