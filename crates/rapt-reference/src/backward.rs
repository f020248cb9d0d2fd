//! The gradients of attention, in f64.
//!
//! For one row, with `w = d_out` and `u = d_lse`, the gradients that arrive, and p_sink the weight of its sink:
//!
//! ```text
//! dv_j   += p_j · w                        x_j = q·k_j · softmax_scale, s_j = softcap(x_j) + bias_j − slope · |i + d − j|
//! dp_j    = w · v_j                        D   = Σ p_j · dp_j − u
//! ds_j    = p_j · (dp_j − D)               d_bias_j = ds_j            d_sink −= p_sink · D
//! dx_j    = ds_j · softmax_scale · (1 − tanh²(x_j / c))
//! dq     += dx_j · k_j                     dk_j += dx_j · q
//! ```
//!
//! A key that is not attended gets nothing of the row and is never read, nor is its bias, whose gradient is 0. A row without keys, or whose keys all
//! weigh 0, is zeros whatever arrives: it gives nothing, and what arrives there, NaN too, reaches nothing. Heads of a group sum into
//! their key head's dk and dv; rows and batch entries into d_sinks.
//!
//! The derivative is that of the formula, as far as numbers go: NaN and infinities of what is attended go where arithmetic takes them. Sums are
//! compensated, as [`naive`](crate::naive)'s are. Sources: Dao et al. 2022, *FlashAttention*, appendix B.2 (the backward pass; `D` is its row
//! sum); the chain rule for the rest. Deliberately absent: gradients of ALiBi's slopes, of scales and of softcap, which no caller learns.

use crate::naive::{dot, scores_of};
use crate::{Inputs, Mask, Problem, Row};

/// What arrives: the gradients of a loss by attention's outputs.
#[derive(Clone, Copy, Debug)]
pub struct OutputGradients<'a> {
    /// `[batch, num_q_heads, q_len, head_dim_v]`.
    pub out: &'a [f64],
    /// `[batch, num_q_heads, q_len]`; none is 0.
    pub lse: Option<&'a [f64]>,
}

/// What leaves: the gradients of that loss by attention's inputs, each of its input's sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// By q.
    pub q: Vec<f64>,
    /// By k.
    pub k: Vec<f64>,
    /// By v.
    pub v: Vec<f64>,
    /// By an additive mask, `[batch, num_q_heads, q_len, kv_len]`: a mask that was broadcast to that takes sums of it.
    pub bias: Option<Vec<f64>>,
    /// By the sinks.
    pub sinks: Option<Vec<f64>>,
}

/// Sums whose rounding is kept beside them (Neumaier 1974).
struct Sums(Vec<(f64, f64)>);

impl Sums {
    fn zeros(len: usize) -> Self {
        Sums(vec![(0.0, 0.0); len])
    }

    fn add(&mut self, at: usize, term: f64) {
        let (sum, lost) = &mut self.0[at];
        let next = *sum + term;
        *lost += if sum.abs() >= term.abs() { (*sum - next) + term } else { (term - next) + *sum };
        *sum = next;
    }

    /// What left the finite numbers has lost nothing that could be added.
    fn finish(self) -> Vec<f64> {
        self.0.into_iter().map(|(sum, lost)| if sum.is_finite() { sum + lost } else { sum }).collect()
    }
}

/// The gradients by the formula.
///
/// # Panics
/// As [`naive`](crate::naive); if a slice of `given` is not as long as its output.
#[must_use]
pub fn backward(problem: &Problem, inputs: &Inputs<'_>, given: &OutputGradients<'_>) -> Gradients {
    problem.check(inputs);
    let Problem { num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v, .. } = *problem;
    let rows = problem.batch * num_q_heads * q_len;
    assert_eq!(given.out.len(), rows * head_dim_v, "length of the gradient of out");
    assert!(given.lse.is_none_or(|lse| lse.len() == rows), "length of the gradient of lse");
    let mut q = vec![0.0; inputs.q.len()];
    let (mut k, mut v) = (Sums::zeros(inputs.k.len()), Sums::zeros(inputs.v.len()));
    let mut bias = matches!(inputs.mask, Some(Mask::Additive(_))).then(|| vec![0.0; rows * kv_len]);
    let mut sinks = inputs.sinks.map(|sinks| Sums::zeros(sinks.len()));
    for at in 0..rows {
        let row = Row::new(problem, inputs, at);
        let (scores, row_max, row_sum) = scores_of(&row);
        if scores.iter().all(|(_, score)| score.is_without_weight()) {
            continue;
        }
        let (batch_head, head) = (at / q_len, at / q_len % num_q_heads);
        let kv_head = batch_head / num_q_heads * num_kv_heads + head / problem.group_size();
        let d_out = &given.out[at * head_dim_v..][..head_dim_v];
        let p: Vec<f64> = scores.iter().map(|(_, score)| score.weight(row_max) / row_sum).collect();
        let dp: Vec<f64> =
            scores.iter().map(|&(j, _)| dot(d_out.iter().copied().zip(row.v(j).iter().copied())).value()).collect();
        let d_lse = given.lse.map_or(0.0, |lse| lse[at]);
        let mean = dot(p.iter().copied().zip(dp.iter().copied())).value() - d_lse;
        if let (Some(sinks), Some(sink)) = (&mut sinks, row.sink) {
            sinks.add(head, -((sink - row_max).exp() / row_sum) * mean);
        }
        let mut dx = Vec::with_capacity(scores.len());
        for ((&(j, score), &p), dp) in scores.iter().zip(&p).zip(dp) {
            for (column, &d_out) in d_out.iter().enumerate() {
                v.add((kv_head * kv_len + j) * head_dim_v + column, p * d_out);
            }
            let ds = p * (dp - mean);
            if let Some(bias) = &mut bias {
                bias[at * kv_len + j] = ds;
            }
            let dx_j = ds * score.slope_of_cap() * problem.softmax_scale;
            for (column, &q) in row.q.iter().enumerate() {
                k.add((kv_head * kv_len + j) * head_dim + column, dx_j * q);
            }
            dx.push((j, dx_j));
        }
        for column in 0..head_dim {
            q[at * head_dim + column] = dot(dx.iter().map(|&(j, dx)| (dx, row.k(j)[column]))).value();
        }
    }
    Gradients { q, k: k.finish(), v: v.finish(), bias, sinks: sinks.map(Sums::finish) }
}
