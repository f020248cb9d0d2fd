//! How far attention on quantized K and V may be from attention on what they were made of: two bounds and an estimate, row by row.
//!
//! Of row `i`, with p̂ and ô computed on k̂ and v̂, and what was measured of them ([`MatrixErrors`]): a_j the error of key j, b_j of value j,
//! r_j the distance of value j from a point c.
//!
//! ```text
//! ε_j     = |scale|·‖q‖·a_j                                       |s_j − ŝ_j| ≤ ε_j; softcap makes it smaller
//! before  = 2·tanh(ε/2)·max r + max b                             ε, r and b the largest that are attended; needs no p̂
//! after   = C + φ·(B + A·(‖ô − c‖ + C)) / (1 − φ·A)               while φ·A < 1, else infinite
//!           A = Σ p̂·ε   B = Σ p̂·ε·r   C = Σ p̂·b   φ = (e^ε − 1)/ε
//! estimate² = scale²·Σ_c share_c·q_c²·m_k · Σ p̂²·a²·‖v̂ − ô‖²      + m_v·Σ p̂²·b² + (bias·Σp̂)²
//! ```
//! `before` and `after` bound `‖o − ô‖`: the total variation of two softmaxes whose logits differ by at most ε is at most tanh(ε/2); and
//! `o − c = Σ p̂e^δ(v − c) / Σ p̂e^δ` with |δ| ≤ ε_j. A sink is a key with ε = 0 and v = 0.
//!
//! `estimate` is what independent errors of mean `bias` add up to, to first order. `share` says along which columns K errs, so that a query and
//! errors that lie in the same few columns are not taken for independent; `m_k` and `m_v` are how often errors repeat, or lean on the numbers
//! (`coherence`). It is no
//! bound: what factor makes it hold on data of many kinds is measured (docs/internals/calibration.md).
//!
//! K or V that is not quantized errs by nothing. Deliberately absent: the rounding of the kernel that computes ô.

use rapt_core::MatrixErrors;

use crate::naive::scores_of;
use crate::{Inputs, Problem, Row};

/// What was measured of K and V of one key head.
#[derive(Clone, Copy, Debug)]
pub struct HeadErrors<'a> {
    /// Of the keys; `None` where they are not quantized.
    pub k: Option<MatrixErrors<'a>>,
    /// Of the values.
    pub v: Option<MatrixErrors<'a>>,
}

/// What is known of one row of the output, all of it in the units of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowError {
    /// ε: by how much a score may be off.
    pub epsilon: f64,
    /// The estimate, by no factor.
    pub estimate: f64,
    /// The bound that is known before p̂ is.
    pub before: f64,
    /// The bound that p̂ gives.
    pub after: f64,
    /// `‖ô‖`.
    pub norm: f64,
}

/// Of each row, `[batch, num_q_heads, q_len]`, how far `naive` on `inputs` may be from `naive` on the numbers that their k and v were made
/// of. `errors` are `[batch, num_kv_heads]`. A row that attends no key is exact.
///
/// # Panics
/// As [`naive`](crate::naive); or if `errors` are not as many and as long as `problem` says.
#[must_use]
pub fn quantization_error(problem: &Problem, inputs: &Inputs<'_>, errors: &[HeadErrors<'_>]) -> Vec<RowError> {
    problem.check(inputs);
    assert_eq!(errors.len(), problem.batch * problem.num_kv_heads, "heads of errors");
    let rows = problem.batch * problem.num_q_heads * problem.q_len;
    let of_row = |row: usize| {
        let (batch, head) = (row / problem.q_len / problem.num_q_heads, row / problem.q_len % problem.num_q_heads);
        let errors = &errors[batch * problem.num_kv_heads + head / problem.group_size()];
        row_error(&Row::new(problem, inputs, row), errors)
    };
    (0..rows).map(of_row).collect()
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

/// The larger, or NaN.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

fn row_error(row: &Row<'_>, errors: &HeadErrors<'_>) -> RowError {
    let (weights, row_max, row_sum) = scores_of(row);
    if weights.is_empty() {
        return RowError::default();
    }
    let p: Vec<(usize, f64)> = weights.iter().map(|&(j, score)| (j, score.weight(row_max) / row_sum)).collect();
    let o: Vec<f64> = (0..row.problem.head_dim_v).map(|d| p.iter().map(|&(j, p)| p * row.v(j)[d]).sum()).collect();
    let scale = row.problem.softmax_scale.abs();
    let slope = scale * norm(row.q.iter().copied());
    let of = |errors: Option<MatrixErrors<'_>>, j: usize| errors.map_or(0.0, |errors| f64::from(errors.error[j]));
    let c: Vec<f64> = match errors.v {
        Some(v) => v.mean.iter().map(|&x| f64::from(x)).collect(),
        None => vec![0.0; o.len()],
    };
    let spread = |j: usize| match errors.v {
        Some(v) => f64::from(v.spread[j]),
        None => norm(row.v(j).iter().copied()),
    };
    let (mut epsilon, mut most_r, mut most_b) =
        (0.0, if row.sink.is_some() { norm(c.iter().copied()) } else { 0.0 }, 0.0);
    let (mut a_sum, mut b_sum, mut c_sum, mut p_sum) = (0.0, 0.0, 0.0, 0.0);
    let (mut of_keys, mut of_values) = (0.0, 0.0);
    for &(j, p) in &p {
        let (a, b, r) = (of(errors.k, j), of(errors.v, j), spread(j));
        epsilon = larger(slope * a, epsilon);
        most_r = larger(r, most_r);
        most_b = larger(b, most_b);
        a_sum += p * slope * a;
        b_sum += p * slope * a * r;
        c_sum += p * b;
        p_sum += p;
        let away = norm(row.v(j).iter().zip(&o).map(|(v, o)| v - o));
        of_keys += (p * a * away).powi(2);
        of_values += (p * b).powi(2);
    }
    let phi = if epsilon == 0.0 { 1.0 } else { epsilon.exp_m1() / epsilon };
    let away = norm(o.iter().zip(&c).map(|(o, c)| o - c));
    let left = 1.0 - phi * a_sum;
    let after = c_sum + phi * (b_sum + a_sum * (away + c_sum)) / left;
    let in_q = errors.k.map_or(0.0, |k| row.q.iter().zip(k.share).map(|(q, &share)| q * q * f64::from(share)).sum());
    let repeats = |errors: Option<MatrixErrors<'_>>| errors.map_or(1.0, |errors| f64::from(errors.coherence));
    let bias = errors.v.map_or(0.0, |v| f64::from(v.bias)) * p_sum;
    let squares = scale * scale * in_q * repeats(errors.k) * of_keys + repeats(errors.v) * of_values + bias * bias;
    RowError {
        epsilon,
        estimate: squares.sqrt(),
        before: 2.0 * (epsilon / 2.0).tanh() * most_r + most_b,
        after: if left > 0.0 || left.is_nan() { after } else { f64::INFINITY },
        norm: norm(o.iter().copied()),
    }
}
