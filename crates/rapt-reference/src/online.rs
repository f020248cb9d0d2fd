//! The recurrence: blocks of keys stream by, and each row keeps its max, its sum and an accumulator.
//!
//! ```text
//! for each block of attended scores s:
//!     m' = max(m, max s)    a = exp(m − m')    l = a·l + Σ exp(s − m')    acc = a·acc + Σ exp(s − m')·v    m = m'
//! out = acc / l             lse = m + ln l     (the sink starts as m = sink, l = 1, acc = 0)
//! ```
//!
//! Milakov and Gimelshein 2018; with an accumulator, Dao et al. 2022. The position rule is [`BlockRange`]'s.
//! Deliberately absent: any row of scores longer than a block.

use rapt_core::{BlockRange, column_of_group, group_of_column};

use crate::{Inputs, Mask, Outputs, Problem, Row, weight};

/// Attention by the streaming recurrence, `block_n` keys at a time.
///
/// # Panics
/// If `block_n` is 0, a slice of `inputs` is not as long as `problem` says, or heads do not group.
#[must_use]
pub fn online(problem: &Problem, inputs: &Inputs<'_>, block_n: usize) -> Outputs {
    assert!(block_n > 0, "a block has at least one key");
    problem.check(inputs);
    let range = BlockRange::new(problem.q_len, problem.kv_len, problem.causal, problem.window);
    let rows = problem.batch * problem.num_q_heads * problem.q_len;
    let mut outputs = Outputs { out: vec![0.0; rows * problem.head_dim_v], lse: vec![f64::NEG_INFINITY; rows] };
    let (outs, lses) = (outputs.out.chunks_exact_mut(problem.head_dim_v.max(1)), outputs.lse.iter_mut());
    for (n, (acc_o, lse)) in outs.zip(lses).enumerate() {
        let row = Row::new(problem, inputs, n);
        let mut state = State {
            row_max: row.sink.unwrap_or(f64::NEG_INFINITY),
            row_sum: row.sink.map_or(0.0, |sink| weight(sink, sink)),
            acc_o,
            has_weight: false,
        };
        let (lo, hi) = range.keys_of(row.i);
        for start in (lo..hi).step_by(block_n) {
            state.block(&row, range.diagonal, start, hi.min(start + block_n));
        }
        if state.has_weight {
            state.acc_o.iter_mut().for_each(|acc| *acc /= state.row_sum);
            *lse = state.row_max + state.row_sum.ln();
        }
    }
    outputs
}

/// What a row keeps between blocks.
struct State<'a> {
    row_max: f64,
    row_sum: f64,
    acc_o: &'a mut [f64],
    /// A key that it attends scores more than `−inf`, or NaN.
    has_weight: bool,
}

impl State<'_> {
    /// Takes in the keys `start..end`, all of them within the position rule.
    fn block(&mut self, row: &Row<'_>, diagonal: i64, start: usize, end: usize) {
        let allowed = |&j: &usize| match row.mask {
            Some(Mask::Bool(mask)) => mask[j],
            Some(Mask::Additive(bias)) => bias[j] != f64::NEG_INFINITY,
            None => true,
        };
        let block: Vec<(usize, f64)> = (start..end).filter(allowed).map(|j| (j, score(row, diagonal, j))).collect();
        if block.is_empty() {
            return;
        }
        self.has_weight |= block.iter().any(|&(_, s)| s != f64::NEG_INFINITY);
        let block_max = block.iter().map(|&(_, s)| s).fold(self.row_max, f64::max);
        let rescale = weight(self.row_max, block_max);
        self.row_sum *= rescale;
        self.acc_o.iter_mut().for_each(|acc| *acc *= rescale);
        let kept = kept(row, start, end);
        for (j, s) in block {
            let p = weight(s, block_max);
            self.row_sum += p;
            self.acc_o.iter_mut().zip(row.v(j)).for_each(|(acc, v)| *acc += p * kept[j - start] * v);
        }
        self.row_max = block_max;
    }
}

/// What dropout multiplies the probabilities of keys `start..end` with, a group of columns at a time.
fn kept(row: &Row<'_>, start: usize, end: usize) -> Vec<f64> {
    let mut kept = vec![1.0; end - start];
    let Some((dropout, head)) = row.dropout else { return kept };
    // Sixteen columns are four groups.
    let (first, last) = (group_of_column(start / 16 * 16).0, end.div_ceil(16) * 4);
    for group in first..last {
        for (word, x) in head.block(row.i, group).into_iter().enumerate() {
            let column = column_of_group(group, word);
            if (start..end).contains(&column) {
                kept[column - start] = if x > dropout.last_dropped() { dropout.scale() } else { 0.0 };
            }
        }
    }
    kept
}

/// The score of an attended key.
fn score(row: &Row<'_>, diagonal: i64, j: usize) -> f64 {
    let mut s = row.q.iter().zip(row.k(j)).map(|(q, k)| q * k).sum::<f64>() * row.problem.softmax_scale;
    if let Some(c) = row.problem.softcap {
        s = c * (s / c).tanh();
    }
    if let Some(Mask::Additive(bias)) = row.mask {
        s += bias[j];
    }
    if let Some(slope) = row.slope {
        s -= slope * (row.i as i64 + diagonal - j as i64).abs() as f64;
    }
    s
}
