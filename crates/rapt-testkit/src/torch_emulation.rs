//! What PyTorch's error would be on these very inputs: plain formulas with its kernels' roundings.
//!
//! The table of [`limits`](crate::tolerance) was measured on N(0, 1) data. Masks, wide logits and short rows move the
//! error, and the rule judges by PyTorch on the *same* inputs; Rust tests have no torch, so three formulas stand in,
//! each rounded to the accumulation dtype after every operation:
//!
//! ```text
//! flash   s = (Σ q·k) · scale, in order (as a GEMM)   p = exp(s − max), rounded to storage; out = (Σ p·v) / Σ p
//! exp2    s = (Σ q·k) · scale·log2(e), 16 sums        p = exp2(s − max), rounded to storage (not under softcap or bias)
//! math    s = Σ (q·√|scale|)·(k·±√|scale|), in order  p = exp(s − max) / Σ exp(s − max); out = Σ p·v
//! ```
//!
//! A formula is one draw of a random error. Where it hinges on a few scores, [`expected`] gives its root mean square:
//! with unit roundoff `u`, each of the sums of `q·k` errs by `u/√6` of itself (a uniform half ulp, averaged over mantissas), and to first order
//!
//! ```text
//! σ_j = u/√6 · (|scale| · √(Σ_d (Σ_{e≤d} q_e·k_e)²) + √3·|s_j|)        |δout|² = Σ_j p_j² · σ_j² · |v_j − out|²
//! ```
//!
//! f16 and bf16 p is rounded to storage in the first two, as flash-attention does. The worse of the three counts. A test
//! holds them to torch's own measured error, so that they cannot turn lax.

use rapt_core::DType;

use crate::gather::Gathered;
use crate::scalar::round;
use crate::tolerance::Figures;

#[derive(Clone, Copy, PartialEq)]
enum Form {
    Flash,
    Exp2,
    Math,
}

/// Outputs of one formula: out rounded to `out_dtype`, and lse in the accumulation dtype.
#[derive(Clone, Debug)]
pub struct Emulation {
    /// `[batch, num_q_heads, q_len, head_dim_v]`.
    pub out: Vec<f64>,
    /// `[batch, num_q_heads, q_len]`.
    pub lse: Vec<f64>,
}

/// The outputs of every formula.
///
/// # Panics
/// If `storage` or `out_dtype` is not a dtype that attention computes.
#[must_use]
pub fn emulations(gathered: &Gathered, storage: DType, out_dtype: DType) -> Vec<Emulation> {
    let transformed = gathered.problem.softcap.is_some() || gathered.bias.is_some() || gathered.alibi_slopes.is_some();
    let forms: &[Form] = if transformed { &[Form::Flash, Form::Math] } else { &[Form::Flash, Form::Exp2, Form::Math] };
    forms.iter().map(|&form| emulate(gathered, storage, out_dtype, form)).collect()
}

fn emulate(gathered: &Gathered, storage: DType, out_dtype: DType, form: Form) -> Emulation {
    let problem = &gathered.problem;
    let r = |x: f64| if storage == DType::F64 { x } else { f64::from(x as f32) };
    let rows = problem.batch * problem.num_q_heads * problem.q_len;
    let mut outputs = Emulation { out: Vec::new(), lse: Vec::new() };
    for row in 0..rows {
        let attended = gathered.attended(row);
        if attended.is_empty() {
            outputs.out.extend(std::iter::repeat_n(0.0, problem.head_dim_v));
            outputs.lse.push(f64::NEG_INFINITY);
            continue;
        }
        let (head, i) = (row / problem.q_len, row % problem.q_len);
        let (b, h) = (head / problem.num_q_heads, head % problem.num_q_heads);
        let kv_head = b * problem.num_kv_heads + h / (problem.num_q_heads / problem.num_kv_heads);
        let q = &gathered.q[row * problem.head_dim..][..problem.head_dim];
        let key = |j: usize| &gathered.k[(kv_head * problem.kv_len + j) * problem.head_dim..][..problem.head_dim];
        let value = |j: usize| &gathered.v[(kv_head * problem.kv_len + j) * problem.head_dim_v..];
        let log2_e = if form == Form::Exp2 { std::f64::consts::LOG2_E } else { 1.0 };

        let score = |&j: &usize| {
            let mut s = if form == Form::Math {
                let root = problem.softmax_scale.abs().sqrt();
                let signed = root.copysign(problem.softmax_scale);
                let terms = q.iter().zip(key(j)).map(|(q, k)| r(q * root) * r(k * signed));
                terms.fold(0.0, |sum, term| r(sum + term))
            } else {
                let mut sums = [0.0; 16];
                let lanes = if form == Form::Flash { 1 } else { sums.len() };
                q.iter().zip(key(j)).enumerate().for_each(|(n, (q, k))| sums[n % lanes] = r(sums[n % lanes] + q * k));
                r(sums.into_iter().fold(0.0, |sum, lane| r(sum + lane)) * r(problem.softmax_scale * log2_e))
            };
            if let Some(c) = problem.softcap {
                s = r(r(c) * r(r(s / r(c)).tanh()));
            }
            if let Some(bias) = &gathered.bias {
                s = r(s + bias[row * problem.kv_len + j]);
            }
            if let Some(slopes) = &gathered.alibi_slopes {
                let distance = (i as i128 + problem.diagonal() - j as i128).unsigned_abs() as f64;
                s = r(s - r(slopes[h] * distance));
            }
            s
        };
        let scores: Vec<f64> = attended.iter().map(score).collect();
        let sink = gathered.sinks.as_ref().map(|sinks| r(sinks[h] * log2_e));
        let row_max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let exp = |s: f64| r(if form == Form::Exp2 { r(s - row_max).exp2() } else { r(s - row_max).exp() });
        let mut p: Vec<f64> = scores.into_iter().map(exp).collect();
        let row_sum = p.iter().copied().chain(sink.map(exp)).fold(0.0, |sum, p| r(sum + p));
        if form == Form::Math {
            p.iter_mut().for_each(|p| *p = r(*p / row_sum));
        } else {
            p.iter_mut().for_each(|p| *p = round(storage, *p));
        }
        let mut acc_o = vec![0.0; problem.head_dim_v];
        for (&j, p) in attended.iter().zip(p) {
            acc_o.iter_mut().zip(value(j)).for_each(|(acc, v)| *acc = r(*acc + p * v));
        }
        let divisor = if form == Form::Math { 1.0 } else { row_sum };
        outputs.out.extend(acc_o.into_iter().map(|acc| round(out_dtype, r(acc / divisor))));
        outputs.lse.push(r(row_max / log2_e + row_sum.ln()));
    }
    outputs
}

/// The expected error of torch's scores, and on how many distinct rows it hinges: `(Σ e²)² / Σ e⁴` over their errors `e`.
#[must_use]
pub fn expected(gathered: &Gathered, reference: &[f64], storage: DType) -> (Figures, f64) {
    let problem = &gathered.problem;
    let u = if storage == DType::F64 { f64::EPSILON / 2.0 } else { f64::from(f32::EPSILON) / 2.0 } / 6f64.sqrt();
    let mut errors = Vec::new();
    for (row, out) in reference.chunks(problem.head_dim_v).enumerate() {
        let (head, i) = (row / problem.q_len, row % problem.q_len);
        let (b, h) = (head / problem.num_q_heads, head % problem.num_q_heads);
        let kv_head = b * problem.num_kv_heads + h / (problem.num_q_heads / problem.num_kv_heads);
        let q = &gathered.q[row * problem.head_dim..][..problem.head_dim];
        let mut scores: Vec<(f64, f64, usize)> = Vec::new();
        for j in gathered.attended(row) {
            let k = &gathered.k[(kv_head * problem.kv_len + j) * problem.head_dim..][..problem.head_dim];
            let (mut sum, mut squares) = (0.0, 0.0);
            for (q, k) in q.iter().zip(k) {
                sum += q * k;
                squares += sum * sum;
            }
            let x = sum * problem.softmax_scale;
            let bias = gathered.bias.as_ref().map_or(0.0, |bias| bias[row * problem.kv_len + j]);
            let distance = (i as i128 + problem.diagonal() - j as i128).unsigned_abs() as f64;
            let alibi = gathered.alibi_slopes.as_ref().map_or(0.0, |slopes| slopes[h] * distance);
            let s = problem.softcap.map_or(x, |c| c * (x / c).tanh()) + bias - alibi;
            let sigma = u * (problem.softmax_scale.abs() * squares.sqrt() + 3f64.sqrt() * s.abs().max(alibi.abs()));
            scores.push((s, sigma, j));
        }
        let sink = gathered.sinks.as_ref().map(|sinks| sinks[h]);
        let logits = || scores.iter().map(|score| score.0).chain(sink);
        let row_max = logits().fold(f64::NEG_INFINITY, f64::max);
        let row_sum: f64 = logits().map(|s| (s - row_max).exp()).sum();
        let error: f64 = scores
            .iter()
            .map(|&(s, sigma, j)| {
                let v = &gathered.v[(kv_head * problem.kv_len + j) * problem.head_dim_v..];
                let distance: f64 = v.iter().zip(out).map(|(v, out)| (v - out).powi(2)).sum();
                ((s - row_max).exp() / row_sum * sigma).powi(2) * distance
            })
            .sum();
        let norm: f64 = out.iter().map(|out| out * out).sum();
        errors.push(if error.is_finite() && norm.is_finite() { (error, norm) } else { (0.0, 0.0) });
    }
    let ratio = |a: f64, b: f64| if a == 0.0 { 0.0 } else { a / b };
    let sum = |f: fn(&(f64, f64)) -> f64| errors.iter().map(f).sum::<f64>();
    let (error, norm) = (sum(|row| row.0), sum(|row| row.1));
    let mean = sum(|row| row.1.sqrt()) / errors.len().max(1) as f64;
    let mut figures = Figures { relative: ratio(error.sqrt(), norm.sqrt()), ..Figures::default() };
    for (row, (error, norm)) in errors.iter().enumerate() {
        let worst = ratio(error.sqrt(), norm.sqrt().max(mean));
        if worst > figures.worst_row {
            (figures.worst_row, figures.row) = (worst, row);
        }
    }
    // Rows that expanded strides make equal are one draw: their errors add up before they are counted.
    errors.sort_by(|a, b| a.0.total_cmp(&b.0));
    let draws = errors.chunk_by(|a, b| a.0 == b.0).map(|same| same.iter().map(|row| row.0).sum::<f64>().powi(2));
    (figures, ratio(error * error, draws.sum()))
}
