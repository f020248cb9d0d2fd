//! The gradients of attention, in f64.
//!
//! For one row, with `d_o` and `d_lse`, the gradients that arrive, and p_sink the weight of its sink:
//!
//! ```text
//! dv_j   += m_j · p_j · d_o                x_j = q·k_j · softmax_scale, s_j = softcap(x_j) + bias_j − slope · |i + d − j|
//! dp_j    = m_j · (d_o · v_j)              delta = Σ p_j · dp_j − d_lse = Σ d_o · out − d_lse
//! ds_j    = p_j · (dp_j − delta)           d_bias_j = ds_j            d_sink −= p_sink · delta
//! dx_j    = ds_j · softmax_scale · (1 − tanh²(x_j / c))
//! dq     += dx_j · k_j                     dk_j += dx_j · q
//! ```
//!
//! m_j is what dropout multiplies a probability with: 1 where there is none.
//!
//! A key that is not attended gets nothing of the row and is never read, nor is its bias, whose gradient is 0. A row without keys, or whose keys all
//! weigh 0, is zeros whatever arrives: it gives nothing, and what arrives there, NaN too, reaches nothing. Heads of a group sum into
//! their key head's dk and dv; rows and batch entries into d_sinks.
//!
//! The derivative is that of the formula, as far as numbers go: NaN and infinities of what is attended go where arithmetic takes them. Sums are
//! compensated, as [`naive`](crate::naive)'s are. Sources: Dao et al. 2022, *FlashAttention*, appendix B.2 (the backward pass; `delta` is the `D` of its
//! row sums); the chain rule for the rest. Deliberately absent: gradients of ALiBi's slopes, of scales and of softcap, which no caller learns.

use crate::naive::{dot, scores_of};
use crate::{Inputs, Mask, Problem, Row};

/// What arrives: the gradients of a loss by attention's outputs.
#[derive(Clone, Copy, Debug)]
pub struct OutputGradients<'a> {
    /// `[batch, num_q_heads, q_len, head_dim_v]`.
    pub d_o: &'a [f64],
    /// `[batch, num_q_heads, q_len]`; none is 0.
    pub d_lse: Option<&'a [f64]>,
}

/// What leaves: the gradients of that loss by attention's inputs, each of its input's sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients {
    /// By q.
    pub dq: Vec<f64>,
    /// By k.
    pub dk: Vec<f64>,
    /// By v.
    pub dv: Vec<f64>,
    /// By an additive mask, `[batch, num_q_heads, q_len, kv_len]`: a mask that was broadcast to that takes sums of it.
    pub d_bias: Option<Vec<f64>>,
    /// By the sinks.
    pub d_sinks: Option<Vec<f64>>,
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
    assert_eq!(given.d_o.len(), rows * head_dim_v, "length of d_o");
    assert!(given.d_lse.is_none_or(|lse| lse.len() == rows), "length of d_lse");
    let mut dq = vec![0.0; inputs.q.len()];
    let (mut dk, mut dv) = (Sums::zeros(inputs.k.len()), Sums::zeros(inputs.v.len()));
    let mut d_bias = matches!(inputs.mask, Some(Mask::Additive(_))).then(|| vec![0.0; rows * kv_len]);
    let mut d_sinks = inputs.sinks.map(|sinks| Sums::zeros(sinks.len()));
    for at in 0..rows {
        let row = Row::new(problem, inputs, at);
        let (scores, row_max, row_sum) = scores_of(&row);
        if scores.iter().all(|(_, score)| score.is_without_weight()) {
            continue;
        }
        let (batch_head, head) = (at / q_len, at / q_len % num_q_heads);
        let kv_head = batch_head / num_q_heads * num_kv_heads + head / problem.group_size();
        let d_o = &given.d_o[at * head_dim_v..][..head_dim_v];
        let p: Vec<f64> = scores.iter().map(|(_, score)| score.weight(row_max) / row_sum).collect();
        let kept: Vec<f64> = scores.iter().map(|&(j, _)| row.kept(j)).collect();
        let dp = |(&(j, _), kept): (&(usize, _), &f64)| {
            dot(d_o.iter().copied().zip(row.v(j).iter().copied())).value() * kept
        };
        let dp: Vec<f64> = scores.iter().zip(&kept).map(dp).collect();
        let d_lse = given.d_lse.map_or(0.0, |lse| lse[at]);
        let delta = dot(p.iter().copied().zip(dp.iter().copied())).value() - d_lse;
        if let (Some(d_sinks), Some(sink)) = (&mut d_sinks, row.sink) {
            d_sinks.add(head, -((sink - row_max).exp() / row_sum) * delta);
        }
        let mut dx = Vec::with_capacity(scores.len());
        for (((&(j, score), &p), dp), kept) in scores.iter().zip(&p).zip(dp).zip(kept) {
            for (column, &d_o) in d_o.iter().enumerate() {
                dv.add((kv_head * kv_len + j) * head_dim_v + column, p * kept * d_o);
            }
            let ds = p * (dp - delta);
            if let Some(d_bias) = &mut d_bias {
                d_bias[at * kv_len + j] = ds;
            }
            let dx_j = ds * score.slope_of_cap() * problem.softmax_scale;
            for (column, &q) in row.q.iter().enumerate() {
                dk.add((kv_head * kv_len + j) * head_dim + column, dx_j * q);
            }
            dx.push((j, dx_j));
        }
        for column in 0..head_dim {
            dq[at * head_dim + column] = dot(dx.iter().map(|&(j, dx)| (dx, row.k(j)[column]))).value();
        }
    }
    Gradients { dq, dk: dk.finish(), dv: dv.finish(), d_bias, d_sinks: d_sinks.map(Sums::finish) }
}
