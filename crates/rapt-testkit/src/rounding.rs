//! What the rounding of logits does to a result: an error that every implementation in the accumulation dtype has.
//!
//! A logit sums `head_dim` products. With unit roundoff `u` (2⁻²⁴, f64: 2⁻⁵³) the addition that gives the partial sum `S_d` errs by
//! at most `u·|S_d|`, up or down: by `u·|S_d|/√6` in the root mean square, uniform in half a unit in the last place and averaged over
//! mantissas. Scale, softcap, slope and the last sum are rounded once each:
//!
//! ```text
//! σ_ij = u/√6 · √(scale² · Σ_d S_d² + x_ij² + softcap(x_ij)² + (slope · distance)² + s_ij²)         S_d = Σ_{e≤d} q_ie · k_je
//! ε_ij = u · (4 · |scale| · √(Σ_d S_d²) + |x_ij| + |softcap(x_ij)| + |slope · distance| + |s_ij|)
//! ```
//!
//! `σ` is the expected rounding of a logit, `ε` its bound: independent errors of at most `u·|S_d|` come to more than the first term with
//! a probability of at most `2·e⁻⁸`, 7e-4 (Hoeffding's inequality; for inner products Higham and Mary 2019, *A New Approach to
//! Probabilistic Rounding Error Analysis*, and Ipsen and Zhou 2020, *Probabilistic Error Analysis for Inner Products*). To first order
//! lse moves by the softmax's mean of the logits' errors, and a row of out by what they shift between values:
//!
//! ```text
//! |δlse_i| ≤ Σ_j p_ij · ε_ij                e_i² = Σ_j (p_ij · σ_ij)² · |m_ij · v_j − out_i|²
//! ```
//!
//! where m_ij is what dropout multiplies p_ij with, or 1.
//!
//! Where products cancel, both are large beside the logit. Deliberately absent: roundings of p and of out.

use rapt_core::DType;
use rapt_reference::Outputs;

use crate::figures::Figures;
use crate::gather::Gathered;

/// `λ` of Hoeffding's `2·exp(−λ²/2)`.
const LAMBDA: f64 = 4.0;

/// What rounding the logits of one problem does, to first order.
#[derive(Clone, Debug)]
pub struct LogitRounding {
    /// By how much lse may move, row by row.
    pub lse: Vec<f64>,
    /// The expected error of out, before p and out are rounded.
    pub out: Figures,
    /// On how many rows that hinges: `(Σ e²)² / Σ e⁴` over their errors `e`; infinite if none has one.
    pub rows: f64,
}

impl LogitRounding {
    /// Of a problem whose exact outputs are `exact`, with logits in the accumulation dtype of `storage`.
    #[must_use]
    pub fn of(gathered: &Gathered, exact: &Outputs, storage: DType) -> Self {
        let head_dim_v = gathered.problem.head_dim_v;
        let unit = if storage == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) } / 2.0;
        let (mut lse, mut errors) = (Vec::new(), Vec::new());
        for (row, out) in exact.out.chunks(head_dim_v).enumerate() {
            let logits: Vec<(usize, Logit)> =
                gathered.attended(row).into_iter().map(|j| (j, Logit::of(gathered, row, j))).collect();
            let sink = gathered.sinks.as_ref().map(|sinks| sinks[gathered.head(row)]);
            let values = || logits.iter().map(|(_, logit)| logit.value).chain(sink);
            let row_max = values().fold(f64::NEG_INFINITY, f64::max);
            let row_sum: f64 = values().map(|s| (s - row_max).exp()).sum();
            let (mut moved, mut error) = (0.0, 0.0);
            for (j, logit) in logits {
                let p = (logit.value - row_max).exp() / row_sum;
                let v = &gathered.v[gathered.kv_row(row, j) * head_dim_v..];
                let kept = gathered.problem.kept(row, j);
                moved += p * unit * logit.bound;
                error += (p * unit * logit.expected).powi(2)
                    * v.iter().zip(out).map(|(v, o)| (kept * v - o).powi(2)).sum::<f64>();
            }
            let norm: f64 = out.iter().map(|out| out * out).sum();
            lse.push(if moved.is_finite() { moved } else { 0.0 });
            errors.push(if error.is_finite() && norm.is_finite() { (error, norm) } else { (0.0, 0.0) });
        }
        let out = Figures::of_rows(&errors);
        // Rows that expanded strides make equal have one error: it adds up before it is counted.
        let mut squares: Vec<f64> = errors.into_iter().map(|(error, _)| error).collect();
        squares.sort_by(f64::total_cmp);
        let of_rows: f64 = squares.iter().sum();
        let of_errors: f64 = squares.chunk_by(|a, b| a == b).map(|same| same.iter().sum::<f64>().powi(2)).sum();
        LogitRounding { lse, out, rows: if of_rows == 0.0 { f64::INFINITY } else { of_rows * of_rows / of_errors } }
    }
}

/// One logit, its expected rounding and the bound of it, in units of the roundoff.
struct Logit {
    value: f64,
    expected: f64,
    bound: f64,
}

impl Logit {
    fn of(gathered: &Gathered, row: usize, j: usize) -> Self {
        let problem = &gathered.problem;
        let i = row % problem.q_len;
        let q = &gathered.q[row * problem.head_dim..][..problem.head_dim];
        let k = &gathered.k[gathered.kv_row(row, j) * problem.head_dim..][..problem.head_dim];
        let (mut sum, mut squares) = (0.0, 0.0);
        for (q, k) in q.iter().zip(k) {
            sum += q * k;
            squares += sum * sum;
        }
        let x = sum * problem.softmax_scale;
        let capped = problem.softcap.map_or(x, |c| c * (x / c).tanh());
        let bias = gathered.bias.as_ref().map_or(0.0, |bias| bias[row * problem.kv_len + j]);
        let distance = (i as i128 + problem.diagonal() - j as i128).unsigned_abs() as f64;
        let slope = gathered.alibi_slopes.as_ref().map_or(0.0, |slopes| slopes[gathered.head(row)] * distance);
        let value = capped + bias - slope;
        let sums = problem.softmax_scale.abs() * squares.sqrt();
        let once = [x, capped, slope, value];
        Logit {
            value,
            expected: once.iter().fold(sums * sums, |sum, x| sum + x * x).sqrt() / 6f64.sqrt(),
            bound: once.iter().fold(LAMBDA * sums, |sum, x| sum + x.abs()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rapt_reference::{Problem, naive};

    use super::*;
    use crate::case::Case;

    fn one_key(q: &[f64], k: &[f64]) -> Gathered {
        let problem = Problem { softmax_scale: 1.0, ..Problem::plain(1, 1, 1, 1, q.len()) };
        let v = vec![1.0; q.len()];
        let (q, k) = (q.to_vec(), k.to_vec());
        Gathered { problem, q, k, v, bools: None, bias: None, sinks: None, alibi_slopes: None }
    }

    #[test]
    fn products_that_cancel_leave_their_rounding_in_lse() {
        let of = |q: &[f64], k: &[f64]| {
            let gathered = one_key(q, k);
            let exact = naive(&gathered.problem, &gathered.inputs());
            LogitRounding::of(&gathered, &exact, DType::F32).lse[0] / 2f64.powi(-24)
        };
        // 300·300 − 300·299.99 = 3: three times 3, and four times the partial sums.
        let sums = (9e4f64.powi(2) + 9.0).sqrt();
        assert!((of(&[300.0, 300.0], &[300.0, -299.99]) - (9.0 + 4.0 * sums)).abs() < 1e-5);
        assert!((of(&[1.0], &[1.0]) - 7.0).abs() < 1e-12);
    }

    #[test]
    fn ordinary_logits_leave_the_limit_of_lse_as_it_is() {
        for dtype in [DType::F64, DType::F32] {
            for head_dim in [1, 8, 64, 128, 256] {
                for kv_len in [1, 2, 40] {
                    let case = Case::plain(dtype, [1, 2, 100, head_dim], kv_len);
                    let values = case.values();
                    let problem = Problem::plain(1, 2, 100, kv_len, head_dim);
                    let (q, k, v) = (values.q, values.k, values.v);
                    let gathered =
                        Gathered { problem, q, k, v, bools: None, bias: None, sinks: None, alibi_slopes: None };
                    let exact = naive(&gathered.problem, &gathered.inputs());
                    let unit = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
                    for (moved, lse) in LogitRounding::of(&gathered, &exact, dtype).lse.iter().zip(&exact.lse) {
                        assert!(*moved < unit * (1.0 + lse.abs()), "{dtype} {head_dim} {kv_len}: {moved:e}, lse {lse}");
                    }
                }
            }
        }
    }

    #[test]
    fn rows_are_counted_by_their_part_of_the_error() {
        let problem = Problem { softmax_scale: 1.0, ..Problem::plain(1, 1, 4, 2, 1) };
        let rows = |q: [f64; 4]| {
            let (q, k, v) = (q.to_vec(), vec![1.0, -1.0], vec![1.0, -1.0]);
            let gathered = Gathered { problem, q, k, v, bools: None, bias: None, sinks: None, alibi_slopes: None };
            LogitRounding::of(&gathered, &naive(&gathered.problem, &gathered.inputs()), DType::F32).rows
        };
        assert_eq!(rows([0.0; 4]), f64::INFINITY);
        assert!((rows([1.0, 0.0, 0.0, 0.0]) - 1.0).abs() < 1e-12);
        // Four equal rows are one draw; four that are nearly equal are four.
        assert!((rows([1.0; 4]) - 1.0).abs() < 1e-12);
        assert!((rows([1.0, 1.001, 0.999, 1.002]) - 4.0).abs() < 1e-2);
    }
}
