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
//! f16 and bf16 p is rounded to storage in the first two, as flash-attention does. The worse of the three counts. A test
//! holds them to torch's own measured error, so that they cannot turn lax.

use rapt_core::DType;

use crate::gather::Gathered;
use crate::scalar::round;

#[derive(Clone, Copy, PartialEq)]
enum Form {
    Flash,
    Exp2,
    Math,
}

/// The outputs of every formula, rounded to `out_dtype`: `[batch, num_q_heads, q_len, head_dim_v]` each.
///
/// # Panics
/// If `storage` or `out_dtype` is not a dtype that attention computes.
#[must_use]
pub fn emulations(gathered: &Gathered, storage: DType, out_dtype: DType) -> Vec<Vec<f64>> {
    let transformed = gathered.problem.softcap.is_some() || gathered.bias.is_some() || gathered.alibi_slopes.is_some();
    let forms: &[Form] = if transformed { &[Form::Flash, Form::Math] } else { &[Form::Flash, Form::Exp2, Form::Math] };
    forms.iter().map(|&form| emulate(gathered, storage, out_dtype, form)).collect()
}

fn emulate(gathered: &Gathered, storage: DType, out_dtype: DType, form: Form) -> Vec<f64> {
    let problem = &gathered.problem;
    let r = |x: f64| if storage == DType::F64 { x } else { f64::from(x as f32) };
    let rows = problem.batch * problem.num_q_heads * problem.q_len;
    let mut out = Vec::new();
    for row in 0..rows {
        let attended = gathered.attended(row);
        if attended.is_empty() {
            out.extend(std::iter::repeat_n(0.0, problem.head_dim_v));
            continue;
        }
        let (h, i) = (gathered.head(row), row % problem.q_len);
        let q = &gathered.q[row * problem.head_dim..][..problem.head_dim];
        let key = |j: usize| &gathered.k[gathered.kv_row(row, j) * problem.head_dim..][..problem.head_dim];
        let value = |j: usize| &gathered.v[gathered.kv_row(row, j) * problem.head_dim_v..];
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
        if problem.dropout.is_some() {
            p.iter_mut().zip(&attended).for_each(|(p, &j)| *p = r(*p * problem.kept(row, j)));
        }
        for (&j, p) in attended.iter().zip(p) {
            acc_o.iter_mut().zip(value(j)).for_each(|(acc, v)| *acc = r(*acc + p * v));
        }
        let divisor = if form == Form::Math { 1.0 } else { row_sum };
        out.extend(acc_o.into_iter().map(|acc| round(out_dtype, r(acc / divisor))));
    }
    out
}
