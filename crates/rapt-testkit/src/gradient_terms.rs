//! Gradients beside the definition's: what PyTorch's roundings make of them, and the magnitudes of what is summed.
//!
//! ```text
//! s = Σ q·k · scale in order (then softcap, slopes, bias)      p = exp(s − lse), from lse as it was rounded (up to 1024); or with 16 sums side by side and
//!                                                              p = exp(s − max) / Σ exp(s − max), as PyTorch's math path keeps it
//! dp = m · Σ d_o·v, delta = Σ d_o·out − d_lse                  ds = p · (dp − delta)               m: of dropout, or 1
//! dq = Σ (ds·scale)·k, dk = Σ (ds·scale)·q, dv = Σ m·p·d_o     of f16 and bf16 with m·p and ds rounded to storage, as PyTorch's flash has them
//! ```
//! Every operation is rounded to the accumulation dtype. The sums of magnitudes are those of the same formula with every term made positive.

use rapt_core::DType;
use rapt_reference::{OutputGradients, Outputs, naive};

use crate::gather::Gathered;
use crate::scalar::round;

/// Gradients, or what stands for them.
pub(crate) struct Parts {
    pub(crate) dq: Vec<f64>,
    pub(crate) dk: Vec<f64>,
    pub(crate) dv: Vec<f64>,
    /// `[batch, num_q_heads, q_len, kv_len]`.
    pub(crate) d_bias: Option<Vec<f64>>,
    pub(crate) d_sinks: Option<Vec<f64>>,
}

impl Parts {
    fn zeros(gathered: &Gathered) -> Self {
        let of = &gathered.problem;
        let pairs = of.batch * of.num_q_heads * of.q_len * of.kv_len;
        Parts {
            dq: vec![0.0; gathered.q.len()],
            dk: vec![0.0; gathered.k.len()],
            dv: vec![0.0; gathered.v.len()],
            d_bias: gathered.bias.as_ref().map(|_| vec![0.0; pairs]),
            d_sinks: gathered.sinks.as_ref().map(|sinks| vec![0.0; sinks.len()]),
        }
    }
}

/// How one of the two is formed: `r` rounds an operation, `narrow` what a product takes, `abs` leaves signs or takes them away.
struct Arithmetic<'a> {
    r: &'a dyn Fn(f64) -> f64,
    narrow: &'a dyn Fn(f64) -> f64,
    abs: &'a dyn Fn(f64) -> f64,
    /// Sums of q·k side by side.
    lanes: usize,
    /// What a term may be off by, beside its score's rounding, in units of itself; `None`: terms are themselves.
    wide: Option<f64>,
}

/// See the module.
pub(crate) fn emulate(
    gathered: &Gathered,
    given: &OutputGradients<'_>,
    outputs: &Outputs,
    storage: DType,
    lanes: usize,
) -> Parts {
    let r = |x: f64| if storage == DType::F64 { x } else { f64::from(x as f32) };
    let narrow = |x: f64| round(storage, x);
    form(gathered, given, outputs, &Arithmetic { r: &r, narrow: &narrow, abs: &|x| x, lanes, wide: None })
}

/// Magnitudes; with `wide` what they may be off by: each by `wide` of itself and by four of the expected roundings of its score (docs/reference/numerics.md).
pub(crate) fn terms(gathered: &Gathered, given: &OutputGradients<'_>, wide: Option<f64>) -> Parts {
    let outputs = naive(&gathered.problem, &gathered.inputs());
    form(gathered, given, &outputs, &Arithmetic { r: &|x| x, narrow: &|x| x, abs: &f64::abs, lanes: 1, wide })
}

fn form(gathered: &Gathered, given: &OutputGradients<'_>, outputs: &Outputs, arithmetic: &Arithmetic<'_>) -> Parts {
    let Arithmetic { r, narrow, abs, lanes, wide } = *arithmetic;
    let problem = &gathered.problem;
    let (dim, dim_v, kv_len) = (problem.head_dim, problem.head_dim_v, problem.kv_len);
    let mut parts = Parts::zeros(gathered);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).fold(0.0, |sum, (a, b)| r(sum + abs(a * b)));
    let takes_magnitudes = abs(-1.0) > 0.0;
    let unit = if is_of_float64(wide) { f64::EPSILON / 2.0 } else { f64::from(f32::EPSILON) / 2.0 };
    for row in 0..outputs.lse.len() {
        let lse = outputs.lse[row];
        if lse == f64::NEG_INFINITY {
            continue;
        }
        let (h, i) = (gathered.head(row), row % problem.q_len);
        let (q, d_o) = (&gathered.q[row * dim..][..dim], &given.d_o[row * dim_v..][..dim_v]);
        let d_lse = given.d_lse.map_or(0.0, |d_lse| d_lse[row]);
        let out = dot(d_o, &outputs.out[row * dim_v..][..dim_v]);
        let delta = if takes_magnitudes { out + d_lse.abs() } else { r(out - d_lse) };
        let score = |j: usize| {
            let kv = gathered.kv_row(row, j);
            let mut sums = [0.0; 16];
            let terms = q.iter().zip(&gathered.k[kv * dim..][..dim]).enumerate();
            let mut squares = 0.0;
            terms.for_each(|(n, (q, k))| {
                sums[n % lanes] = r(sums[n % lanes] + q * k);
                squares += (sums[n % lanes] * problem.softmax_scale).powi(2);
            });
            let mut s = r(sums.into_iter().fold(0.0, |sum, lane| r(sum + lane)) * problem.softmax_scale);
            let mut rises = 1.0;
            squares += s * s;
            if let Some(c) = problem.softcap {
                let t = r(r(s / c).tanh());
                (s, rises) = (r(c * t), if takes_magnitudes { 1.0 + t * t } else { r(1.0 - r(t * t)) });
            }
            if let Some(slopes) = &gathered.alibi_slopes {
                let distance = (i as i128 + problem.diagonal() - j as i128).unsigned_abs() as f64;
                s = r(s - r(slopes[h] * distance));
            }
            if let Some(bias) = &gathered.bias {
                s = r(s + bias[row * kv_len + j]);
            }
            // A score at the lowest finite bias is that number, in any arithmetic.
            let own = if s.abs() < 1e30 { s * s } else { 0.0 };
            (j, s, rises, (squares + own).sqrt())
        };
        let scores: Vec<_> = gathered.attended(row).into_iter().map(score).collect();
        let sink = gathered.sinks.as_ref().map(|sinks| sinks[h]);
        // Where the logarithm of the sum drowns in lse, no kernel that is any good goes by it.
        let (top, sum) = if lanes == 1 && !takes_magnitudes && lse.abs() <= 1024.0 {
            (lse, 1.0)
        } else {
            let all = || scores.iter().map(|(_, s, ..)| *s).chain(sink);
            let top = all().fold(f64::NEG_INFINITY, f64::max);
            (top, all().fold(0.0, |sum, s| r(sum + r(r(s - top).exp()))))
        };
        let weight = |s: f64| r(r(r(s - top).exp()) / sum);
        if let (Some(d_sinks), Some(sink)) = (&mut parts.d_sinks, sink) {
            let off = wide.map_or(1.0, |wide| {
                wide + 4.0 * unit / 6f64.sqrt() * scores.iter().map(|(.., size)| *size).fold(0.0, f64::max)
            });
            d_sinks[h] = r(d_sinks[h] + abs(r(-weight(sink) * off * delta)));
        }
        let largest = scores.iter().map(|(.., size)| *size).fold(0.0, f64::max);
        for (j, s, rises, _) in scores {
            let kv = gathered.kv_row(row, j);
            let (k, v) = (&gathered.k[kv * dim..][..dim], &gathered.v[kv * dim_v..][..dim_v]);
            // A row's weights share their sum: the rounding of its largest score is that of each.
            let off = wide.map_or(1.0, |wide| wide + 4.0 * unit / 6f64.sqrt() * largest);
            let p = weight(s) * off;
            let kept = problem.kept(row, j);
            let dp = r(dot(d_o, v) * kept);
            let ds = r(p * if takes_magnitudes { dp + delta.abs() } else { r(dp - delta) });
            if let Some(d_bias) = &mut parts.d_bias {
                d_bias[row * kv_len + j] = ds;
            }
            let (p, dx) = (narrow(r(p * kept)), abs(r(narrow(r(ds * rises)) * problem.softmax_scale)));
            for d in 0..dim {
                let dq = &mut parts.dq[row * dim + d];
                *dq = r(*dq + abs(dx * k[d]));
                let dk = &mut parts.dk[kv * dim + d];
                *dk = r(*dk + abs(dx * q[d]));
            }
            for (dv, d_o) in parts.dv[kv * dim_v..][..dim_v].iter_mut().zip(d_o) {
                *dv = r(*dv + abs(p * d_o));
            }
        }
    }
    parts
}

/// Whether `wide` is one of float64.
fn is_of_float64(wide: Option<f64>) -> bool {
    wide.is_some_and(|wide| wide < 1e-12)
}
