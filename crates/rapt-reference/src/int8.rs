//! Attention with `compute="int8"`: an approximation, defined here to the last rounding that is not float32's own.
//!
//! k and v are int8 codes with factors: of k one of the tensor, of each head, or of each token (row); of v one of the tensor, of each
//! head, or of each channel (column). Of query row `i`, with blocks of [`INT8_BLOCK`] keys from key 0 on:
//!
//! ```text
//! scale_i = max(max|q_i| / 127, 2^-126)        qc_i = round(q_i / scale_i)               both quotients rounded to f32; ties to even
//! x_ij    = qc_i · kc_j (· k_factor_j)         an integer; times the factor of a token, rounded to f32
//! s_ij    = softcap(x_ij · scale_i · softmax_scale (· k_factor)) + bias_ij − slope · |i + d − j|
//! m_b     = max of the block's s_ij            p_ij = exp(s_ij − m_b)                     pc_ij = round(255 · p_ij), ties to even
//! out_i   = v_factor · Σ_b w_b · (Σ_j pc_ij · vc_j) / 255 / l_i                           w_b = exp(m_b − m_i), the sums in a block integers
//! l_i     = Σ_b w_b · Σ_j p_ij + exp(sink − m_i)      lse_i = m_i + ln l_i                m_i = max of all s_ij and the sink
//! ```
//! So a row's codes depend on itself and the keys that it attends, block by block, and on nothing else. Which keys are attended, and what
//! becomes of a row without any, is as in [`naive`](crate::naive()). A query row with NaN or infinity, and a factor of k that is not finite,
//! make NaN of the rows that attend with it; a factor of v multiplies as it is.
//!
//! Sources: Zhang et al. 2024, *SageAttention* (int8 q and k, smoothed probabilities of a block against its own maximum); Dao et al. 2022
//! (blocks of keys). Deliberately absent: the order of sums, which float32 rounds; how far that may lead is [`Int8Outputs::out_error`].

use rapt_core::INT8_BLOCK;

use crate::naive::seen;
use crate::{Descale, Inputs, Mask, Outputs, Problem, Row};

/// The tensors of one problem.
#[derive(Clone, Copy, Debug)]
pub struct Int8Inputs<'a> {
    /// q, which float32 holds exactly, and the codes of k and v, each a number from −128 to 127; the rest as everywhere.
    pub inputs: Inputs<'a>,
    /// Factors of k, of shape `[]`, `[B, H]` or `[B, H, S]`; no zero point.
    pub k: Descale<'a>,
    /// Factors of v, of shape `[]`, `[B, H]` or `[B, H, 1, D]`; no zero point.
    pub v: Descale<'a>,
}

/// What attention answers, and how far float32 may be from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Int8Outputs {
    /// The approximation.
    pub outputs: Outputs,
    /// Of each element of `outputs.out`: what sums in float32 may be off by, and what hangs on codes of p so near a tie that float32 may
    /// round them the other way. Storing `out` in a dtype of 16 bits comes on top.
    pub out_error: Vec<f64>,
    /// Of each lse.
    pub lse_error: Vec<f64>,
}

/// A few roundings to float32, relative to what is rounded.
const ROUNDINGS: f64 = 1.0 / (1u64 << 21) as f64;

/// A weight beside the sum of all that float32 need not hold: four times its smallest normal number.
const UNDERFLOW: f64 = 4.0 * f32::MIN_POSITIVE as f64;

/// Attention by the definition of this module.
///
/// # Panics
/// As [`naive`](crate::naive()); or if a descale is none of those that are named above.
#[must_use]
pub fn int8(problem: &Problem, inputs: &Int8Inputs<'_>) -> Int8Outputs {
    problem.check(&inputs.inputs);
    assert!(problem.dropout.is_none(), "int8 has no dropout");
    let rows = problem.batch * problem.num_q_heads * problem.q_len;
    let mut all = Int8Outputs {
        outputs: Outputs { out: Vec::new(), lse: Vec::new() },
        out_error: Vec::new(),
        lse_error: Vec::new(),
    };
    for n in 0..rows {
        let row = Row::new(problem, &inputs.inputs, n);
        let (batch, head) = (n / problem.q_len / problem.num_q_heads, n / problem.q_len % problem.num_q_heads);
        let kv_head = batch * problem.num_kv_heads + head / problem.group_size();
        of_row(&row, inputs, kv_head, &mut all);
    }
    all
}

/// The factor of k of key `j`, and whether it is that key's own.
fn k_factor(inputs: &Int8Inputs<'_>, kv_head: usize, j: usize, kv_len: usize) -> (f64, bool) {
    let Descale { factor, zero_point, shape } = inputs.k;
    assert!(zero_point.is_none(), "int8 has no zero point");
    match shape.len() {
        0 => (factor[0], false),
        2 => (factor[kv_head], false),
        3 => (factor[kv_head * kv_len + j], true),
        _ => panic!("a descale of k of shape {shape:?}"),
    }
}

/// The factor of column `d` of v.
fn v_factor(inputs: &Int8Inputs<'_>, kv_head: usize, d: usize, dim: usize) -> f64 {
    let Descale { factor, zero_point, shape } = inputs.v;
    assert!(zero_point.is_none(), "int8 has no zero point");
    match *shape {
        [] => factor[0],
        [_, _] => factor[kv_head],
        [_, _, 1, _] => factor[kv_head * dim + d],
        _ => panic!("a descale of v of shape {shape:?}"),
    }
}

/// The codes of a query row and their scale.
fn quantized(q: &[f64]) -> (Vec<i64>, f64) {
    // NaN is larger than everything here: max passes over it.
    let most = q.iter().fold(0f32, |most, &x| if x.is_nan() { f32::NAN } else { most.max(x.abs() as f32) });
    if !most.is_finite() || q.iter().any(|x| x.is_nan()) {
        return (vec![0; q.len()], f64::NAN);
    }
    let scale = (most / 127.0).max(f32::MIN_POSITIVE);
    (q.iter().map(|&x| (x as f32 / scale).round_ties_even() as i64).collect(), f64::from(scale))
}

/// A score, and by how much float32 may be off.
struct Score {
    s: f64,
    error: f64,
}

/// The score of key `j`; nothing where it is not attended.
fn score(row: &Row<'_>, (codes, scale): &(Vec<i64>, f64), (k_factor, is_own): (f64, bool), j: usize) -> Option<Score> {
    let Row { problem, i, .. } = *row;
    let bias = match row.mask {
        _ if !seen(problem, i, j) => return None,
        None => 0.0,
        Some(Mask::Bool(mask)) if mask[j] => 0.0,
        Some(Mask::Bool(_)) => return None,
        Some(Mask::Additive(bias)) if bias[j] == f64::NEG_INFINITY => return None,
        Some(Mask::Additive(bias)) => bias[j],
    };
    let product: i64 = codes.iter().zip(row.k(j)).map(|(q, &k)| q * k as i64).sum();
    let k_factor = if k_factor.is_finite() { k_factor } else { f64::NAN };
    let (x, k_factor) =
        if is_own { (f64::from((product as f32) * (k_factor as f32)), 1.0) } else { (product as f64, k_factor) };
    let x = x * (scale * problem.softmax_scale * k_factor);
    let capped = problem.softcap.map_or(x, |c| c * (x / c).tanh());
    let distance = (i as i128 + problem.diagonal() - j as i128).unsigned_abs() as f64;
    let slope = row.slope.map_or(0.0, |slope| slope * distance);
    let error = (x.abs() + bias.abs() + slope.abs()) * ROUNDINGS;
    Some(Score { s: capped - slope + bias, error })
}

fn of_row(row: &Row<'_>, inputs: &Int8Inputs<'_>, kv_head: usize, all: &mut Int8Outputs) {
    let Problem { kv_len, head_dim_v: dim, .. } = *row.problem;
    let codes = quantized(row.q);
    let scores: Vec<(usize, Score)> = (0..kv_len)
        .filter_map(|j| score(row, &codes, k_factor(inputs, kv_head, j, kv_len), j).map(|score| (j, score)))
        .collect();
    if scores.is_empty() {
        all.outputs.out.extend(std::iter::repeat_n(0.0, dim));
        all.out_error.extend(std::iter::repeat_n(0.0, dim));
        all.outputs.lse.push(f64::NEG_INFINITY);
        all.lse_error.push(0.0);
        return;
    }
    let max = scores.iter().map(|(_, score)| score.s).chain(row.sink).fold(f64::NEG_INFINITY, f64::max);
    // Differences of scores and their exponentials are off by no more than the scores are.
    let error = 2.0 * scores.iter().map(|(_, score)| score.error).fold(max.abs() * ROUNDINGS, f64::max) + ROUNDINGS;
    let mut sum = row.sink.map_or(0.0, |sink| (sink - max).exp());
    let (mut out, mut size, mut undecided) = (vec![0.0; dim], vec![0.0; dim], vec![0.0; dim]);
    for block in scores.chunk_by(|(a, _), (b, _)| a / INT8_BLOCK == b / INT8_BLOCK) {
        let block_max = block.iter().map(|(_, score)| score.s).fold(f64::NEG_INFINITY, f64::max);
        let weight = (block_max - max).exp();
        let (mut sums, mut sizes) = (vec![0i64; dim], vec![0i64; dim]);
        for (j, score) in block {
            let p = (score.s - block_max).exp();
            sum += weight * p;
            let code = (255.0 * p).round_ties_even() as i64;
            let from_tie = (255.0 * p - (255.0 * p).floor() - 0.5).abs();
            let is_undecided = from_tie <= 255.0 * p * error;
            for (d, &v) in row.v(*j).iter().enumerate() {
                sums[d] += code * v as i64;
                sizes[d] += code * (v as i64).abs();
                undecided[d] += if is_undecided { weight * v.abs() } else { 0.0 };
            }
        }
        for d in 0..dim {
            out[d] += weight * sums[d] as f64;
            size[d] += weight * sizes[d] as f64;
        }
    }
    for d in 0..dim {
        let factor = v_factor(inputs, kv_head, d, dim) / 255.0 / sum;
        all.outputs.out.push(factor * out[d]);
        let of_underflow = 128.0 * UNDERFLOW * v_factor(inputs, kv_head, d, dim).abs();
        all.out_error.push(factor.abs() * (undecided[d] + error * size[d]) + of_underflow);
    }
    let lse = max + sum.ln();
    all.outputs.lse.push(lse);
    all.lse_error.push(error + lse.abs() * ROUNDINGS);
}
