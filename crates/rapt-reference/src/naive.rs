//! The whole row at once: scores, then max, then sum, then the weighted mean of v.
//!
//! A key that is not attended is `None`: it has no score, so it cannot weigh. Dot products are compensated (Ogita, Rump
//! and Oishi 2005, *Accurate sum and dot product*, Dot2), and a score carries what f64 cannot hold of it ([`Score`]), so
//! the reference's own error stays near one unit of f64 for any head_dim, kv_len and size of logits: an f64 engine is judged by
//! more than f64. Deliberately absent: blocks, [`rapt_core::BlockRange`] and everything else [`online`] uses.
//!
//! [`online`]: crate::online

use rapt_core::Causal;

use crate::{Inputs, Mask, Outputs, Problem, Row, weight};

/// Attention by the formula.
///
/// # Panics
/// If a slice of `inputs` is not as long as `problem` says, or heads do not group.
#[must_use]
pub fn naive(problem: &Problem, inputs: &Inputs<'_>) -> Outputs {
    problem.check(inputs);
    let rows = problem.batch * problem.num_q_heads * problem.q_len;
    let mut outputs = Outputs { out: Vec::with_capacity(rows * problem.head_dim_v), lse: Vec::with_capacity(rows) };
    for row in 0..rows {
        let row = Row::new(problem, inputs, row);
        let (scores, row_max, row_sum) = scores_of(&row);
        // Of a row without keys, and of one whose keys all weigh 0, the sums are the result.
        let is_weightless = scores.iter().all(|(_, s)| s.is_without_weight());
        let (row_max, row_sum) = if is_weightless { (f64::NEG_INFINITY, 1.0) } else { (row_max, row_sum) };
        let weights: Vec<f64> = scores.iter().map(|&(j, s)| s.weight(row_max) * row.kept(j)).collect();
        for column in 0..problem.head_dim_v {
            let values = scores.iter().map(|&(j, _)| row.v(j)[column]);
            outputs.out.push(dot(weights.iter().copied().zip(values)).value / row_sum);
        }
        outputs.lse.push(row_max + row_sum.ln());
    }
    outputs
}

/// The scores of the keys that a row attends, their maximum, and the sum of their weights; a sink is in both.
pub(crate) fn scores_of(row: &Row<'_>) -> (Vec<(usize, Score)>, f64, f64) {
    let scores: Vec<(usize, Score)> =
        (0..row.problem.kv_len).filter_map(|j| score(row, j).map(|score| (j, score))).collect();
    // f64::max passes over NaN; a NaN score still makes its own weight, and so the sum, NaN.
    let row_max = scores.iter().map(|(_, s)| s.value).chain(row.sink).fold(f64::NEG_INFINITY, f64::max);
    let weights = scores.iter().map(|(_, s)| s.weight(row_max));
    let sink = row.sink.map(|sink| Score::exact(sink).weight(row_max));
    let row_sum = dot(weights.chain(sink).map(|weight| (weight, 1.0))).value;
    (scores, row_max, row_sum)
}

/// Whether the position rule lets query `i` see key `j`, read literally.
pub(crate) fn seen(problem: &Problem, i: usize, j: usize) -> bool {
    let (i, j, d) = (i as i128, j as i128, problem.diagonal());
    let causal = match problem.causal {
        None => true,
        Some(Causal::TopLeft) => j <= i,
        Some(Causal::BottomRight) => j <= i + d,
    };
    let left = problem.window.left.is_none_or(|left| i + d - left as i128 <= j);
    let right = problem.window.right.is_none_or(|right| j <= i + d + right as i128);
    causal && left && right
}

/// A number and what f64 could not hold of it: the score is `value + rest`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Score {
    value: f64,
    rest: f64,
    /// The derivative of a softcap, where one was applied; else 1.
    cap_slope: f64,
}

impl Score {
    fn exact(value: f64) -> Self {
        Score { value, rest: 0.0, cap_slope: 1.0 }
    }

    /// `value` with `rest`, a correction below 2^-20. A greater one is forgotten: a bias at the lowest finite number
    /// absorbs the score that it is added to (by definition such a row gives the mean of v), and what is lost beside an
    /// infinity is no number.
    fn new(value: f64, rest: f64) -> Self {
        Score { rest: if rest.abs() < 1.0 / f64::from(1 << 20) { rest } else { 0.0 }, ..Score::exact(value) }
    }

    fn times(self, factor: f64) -> Self {
        let value = self.value * factor;
        Score::new(value, self.value.mul_add(factor, -value) + self.rest * factor)
    }

    fn plus(self, term: f64) -> Self {
        let value = self.value + term;
        let kept = value - self.value;
        let sum = Score::new(value, (self.value - (value - kept)) + (term - kept) + self.rest);
        Score { cap_slope: self.cap_slope, ..sum }
    }

    /// `c·tanh(x/c)`; the rest is carried by the slope.
    fn capped(self, c: f64) -> Self {
        let tanh = (self.value / c).tanh();
        let cap_slope = 1.0 - tanh * tanh;
        Score { cap_slope, ..Score::new(c * tanh, self.rest * cap_slope) }
    }

    /// The number.
    pub(crate) fn value(self) -> f64 {
        self.value
    }

    /// What a change of `q·k·softmax_scale` is multiplied with on its way to the score.
    pub(crate) fn slope_of_cap(self) -> f64 {
        self.cap_slope
    }

    /// Whether this key weighs 0 whatever the others score.
    pub(crate) fn is_without_weight(self) -> bool {
        self.value == f64::NEG_INFINITY
    }

    /// `exp(score − max)`.
    pub(crate) fn weight(self, max: f64) -> f64 {
        weight(self.value, max) * (1.0 + self.plus(-max).rest)
    }
}

/// The score of key `j`, or `None` if it is not attended.
fn score(row: &Row<'_>, j: usize) -> Option<Score> {
    let Row { problem, i, .. } = *row;
    if !seen(problem, i, j) {
        return None;
    }
    let bias = match row.mask {
        None => 0.0,
        Some(Mask::Bool(mask)) if mask[j] => 0.0,
        Some(Mask::Bool(_)) => return None,
        Some(Mask::Additive(bias)) if bias[j] == f64::NEG_INFINITY => return None,
        Some(Mask::Additive(bias)) => bias[j],
    };
    let x = dot(row.q.iter().copied().zip(row.k(j).iter().copied())).times(problem.softmax_scale);
    let capped = problem.softcap.map_or(x, |c| x.capped(c)).plus(bias);
    let distance = (i as i128 + problem.diagonal() - j as i128).unsigned_abs() as f64;
    Some(row.slope.map_or(capped, |slope| capped.plus(-slope * distance)))
}

/// `Σ a·b`, compensated. Sums that leave the finite numbers are those of plain arithmetic.
pub(crate) fn dot(pairs: impl Iterator<Item = (f64, f64)>) -> Score {
    let (mut sum, mut plain, mut lost) = (0.0f64, 0.0f64, 0.0f64);
    for (a, b) in pairs {
        let product = a * b;
        plain += product;
        let next = sum + product;
        let kept = next - sum;
        lost += (sum - (next - kept)) + (product - kept) + a.mul_add(b, -product);
        sum = next;
    }
    let compensated = Score::exact(sum).plus(lost);
    if compensated.value.is_finite() { compensated } else { Score::exact(plain) }
}

#[cfg(test)]
mod tests {
    use super::dot;

    #[test]
    fn the_dot_product_is_compensated_and_keeps_non_finite_sums() {
        let pairs = [(1e16, 1.0), (1.0, 1.0), (-1e16, 1.0)];
        assert_eq!(dot(pairs.into_iter()).value, 1.0);
        assert_eq!(dot([(f64::INFINITY, 1.0), (1.0, 1.0)].into_iter()).value, f64::INFINITY);
        assert!(dot([(f64::INFINITY, 1.0), (f64::NEG_INFINITY, 1.0)].into_iter()).value.is_nan());
        assert!(dot([(f64::NAN, 0.0)].into_iter()).value.is_nan());
        assert_eq!(dot(std::iter::empty()).value, 0.0);
    }
}
