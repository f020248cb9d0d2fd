//! The reference: what attention is, in f64. Every backend of Rapt is judged by it.
//!
//! For query `i` and key `j` of one head, with `d = kv_len − q_len` if causal is bottom-right, else 0:
//!
//! ```text
//! s   = softcap(q_i · k_j · softmax_scale) + bias_ij − slope · |i + d − j|       softcap(x) = c · tanh(x / c)
//! p_j = exp(s_j − max) / (Σ exp(s − max) + exp(sink − max))                      over attended keys only
//! out = Σ p_j · v_j            lse = max + ln(Σ exp(s − max) + exp(sink − max))
//! ```
//!
//! A key is attended if causal, window, boolean mask and bias all allow it; a bias masks only where it is `−inf`. A key
//! that is not attended is never read, so nothing lying there reaches an output. A row that attends no key is zeros
//! with `lse = −inf`, whatever its sink and its query hold. NaN in a query, or in an attended key or bias, makes the
//! row and its lse NaN, and so does a bias of `+inf`; NaN in an attended value makes its column of the row NaN. An
//! attended key may still score `−inf` (an infinite operand): its weight is 0, and a row of nothing else ends as a row
//! without keys.
//!
//! With dropout a probability is multiplied with 0 where it is dropped, and with `1 / (1 − p)` elsewhere, before it meets v
//! ([`rapt_core::DropoutSeed`] says which is); lse knows nothing of it. A dropped key is attended: its NaN is not hidden.
//!
//! Its gradients are those of [`backward`].
//!
//! Two forms that share no arithmetic are given and checked against each other: [`naive`] holds a whole row of scores
//! and reads the position rule pair by pair; [`online`] streams blocks of keys and asks [`rapt_core::BlockRange`].
//!
//! Sources: Vaswani et al. 2017, *Attention Is All You Need* (the formula); Milakov and Gimelshein 2018, *Online
//! normalizer calculation for softmax* (the recurrence); Dao et al. 2022 and Dao 2023, *FlashAttention* and
//! *FlashAttention-2* (the recurrence over blocks with an accumulator, lse, bottom-right causal); Press et al. 2021,
//! *Train Short, Test Long* (ALiBi); Gemma Team 2024, *Gemma 2* (softcap); Xiao et al. 2023, *Efficient Streaming
//! Language Models with Attention Sinks*, and OpenAI 2025, *gpt-oss* (a learned sink logit per head); Ainslie et al.
//! 2023, *GQA* (grouped heads); Srivastava et al. 2014, *Dropout: A Simple Way to Prevent Neural Networks from Overfitting* (scaled while training).
//!
//! Data layout: contiguous f64 in canonical order, `[batch, heads, len, dim]`. Deliberately absent: strides, storage
//! dtypes, threads, and speed.

#![forbid(unsafe_code)]

mod backward;
mod descale;
mod int8;
mod naive;
mod online;
mod quantization;

pub use backward::{Gradients, OutputGradients, backward};
pub use descale::Descale;
pub use int8::{Int8Inputs, Int8Outputs, int8};
pub use naive::naive;
pub use online::online;
pub use quantization::{HeadErrors, RowError, quantization_error};

use rapt_core::{Causal, Dropout, DropoutHead, DropoutSeed, Window};

/// Sizes and options of one problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    /// Problems that share nothing.
    pub batch: usize,
    /// Heads of q and out; a multiple of `num_kv_heads`.
    pub num_q_heads: usize,
    /// Heads of k and v.
    pub num_kv_heads: usize,
    /// Queries per head.
    pub q_len: usize,
    /// Keys per head.
    pub kv_len: usize,
    /// The size of a query and a key.
    pub head_dim: usize,
    /// The size of a value.
    pub head_dim_v: usize,
    /// The factor of `q·k`.
    pub softmax_scale: f64,
    /// `c` of `c·tanh(x/c)`.
    pub softcap: Option<f64>,
    /// Causal masking.
    pub causal: Option<Causal>,
    /// The sliding window.
    pub window: Window,
    /// How often probabilities are dropped, and which.
    pub dropout: Option<(Dropout, DropoutSeed)>,
}

impl Problem {
    /// Plain attention: as many key heads as query heads, `head_dim_v = head_dim`, scale `1/sqrt(head_dim)`.
    #[must_use]
    pub fn plain(batch: usize, heads: usize, q_len: usize, kv_len: usize, head_dim: usize) -> Self {
        Problem {
            batch,
            num_q_heads: heads,
            num_kv_heads: heads,
            q_len,
            kv_len,
            head_dim,
            head_dim_v: head_dim,
            softmax_scale: 1.0 / (head_dim as f64).sqrt(),
            softcap: None,
            causal: None,
            window: Window::default(),
            dropout: None,
        }
    }

    /// `d`: what is added to a query's index to reach the diagonal.
    #[must_use]
    pub fn diagonal(&self) -> i128 {
        if self.causal == Some(Causal::BottomRight) { self.kv_len as i128 - self.q_len as i128 } else { 0 }
    }

    /// What dropout multiplies the probability of key `column` with, for row `row` of `[batch, num_q_heads, q_len]`: 1 without dropout.
    #[must_use]
    pub fn kept(&self, row: usize, column: usize) -> f64 {
        let Some((dropout, seed)) = self.dropout else { return 1.0 };
        let batch_head = row / self.q_len;
        let head = seed.of_head(batch_head / self.num_q_heads, batch_head % self.num_q_heads);
        if head.is_dropped(dropout, row % self.q_len, column) { 0.0 } else { dropout.scale() }
    }

    fn group_size(&self) -> usize {
        self.num_q_heads.checked_div(self.num_kv_heads).unwrap_or(1).max(1)
    }

    /// # Panics
    /// If a slice is not as long as its tensor, or the heads do not group.
    fn check(&self, inputs: &Inputs<'_>) {
        let Problem { batch, num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v, .. } = *self;
        let groups = num_q_heads == num_kv_heads || (num_kv_heads > 0 && num_q_heads.is_multiple_of(num_kv_heads));
        assert!(groups, "{num_q_heads} query heads do not group over {num_kv_heads}");
        assert_eq!(inputs.q.len(), batch * num_q_heads * q_len * head_dim, "length of q");
        assert_eq!(inputs.k.len(), batch * num_kv_heads * kv_len * head_dim, "length of k");
        assert_eq!(inputs.v.len(), batch * num_kv_heads * kv_len * head_dim_v, "length of v");
        let pairs = batch * num_q_heads * q_len * kv_len;
        match inputs.mask {
            Some(Mask::Bool(mask)) => assert_eq!(mask.len(), pairs, "length of mask"),
            Some(Mask::Additive(bias)) => assert_eq!(bias.len(), pairs, "length of bias"),
            None => {}
        }
        for vector in [inputs.sinks, inputs.alibi_slopes].into_iter().flatten() {
            assert_eq!(vector.len(), num_q_heads, "length of a vector per head");
        }
    }
}

/// A dense mask, `[batch, num_q_heads, q_len, kv_len]`.
#[derive(Clone, Copy, Debug)]
pub enum Mask<'a> {
    /// True attends.
    Bool(&'a [bool]),
    /// Added to the score; `−inf` masks.
    Additive(&'a [f64]),
}

/// The tensors of one problem, contiguous in canonical order.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[batch, num_q_heads, q_len, head_dim]`.
    pub q: &'a [f64],
    /// `[batch, num_kv_heads, kv_len, head_dim]`.
    pub k: &'a [f64],
    /// `[batch, num_kv_heads, kv_len, head_dim_v]`.
    pub v: &'a [f64],
    /// `[batch, num_q_heads, q_len, kv_len]`.
    pub mask: Option<Mask<'a>>,
    /// `[num_q_heads]`: one more logit per head, unscaled, without a value.
    pub sinks: Option<&'a [f64]>,
    /// `[num_q_heads]`.
    pub alibi_slopes: Option<&'a [f64]>,
}

impl<'a> Inputs<'a> {
    /// The three required tensors alone.
    #[must_use]
    pub fn plain(q: &'a [f64], k: &'a [f64], v: &'a [f64]) -> Self {
        Inputs { q, k, v, mask: None, sinks: None, alibi_slopes: None }
    }
}

/// What attention answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// `[batch, num_q_heads, q_len, head_dim_v]`.
    pub out: Vec<f64>,
    /// `[batch, num_q_heads, q_len]`, natural log.
    pub lse: Vec<f64>,
}

/// One query of one head, and what it may look at. The rows of k and v are those of its group's head.
#[derive(Clone, Copy)]
struct Row<'a> {
    problem: &'a Problem,
    i: usize,
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    mask: Option<Mask<'a>>,
    sink: Option<f64>,
    slope: Option<f64>,
    dropout: Option<(Dropout, DropoutHead)>,
}

impl<'a> Row<'a> {
    /// Row `row` of `[batch, num_q_heads, q_len]`.
    fn new(problem: &'a Problem, inputs: &Inputs<'a>, row: usize) -> Self {
        let Problem { num_q_heads, num_kv_heads, q_len, kv_len, head_dim, head_dim_v, .. } = *problem;
        let (batch_head, i) = (row / q_len, row % q_len);
        let (b, h) = (batch_head / num_q_heads, batch_head % num_q_heads);
        let kv_head = b * num_kv_heads + h / problem.group_size();
        Row {
            problem,
            i,
            q: &inputs.q[row * head_dim..][..head_dim],
            k: &inputs.k[kv_head * kv_len * head_dim..][..kv_len * head_dim],
            v: &inputs.v[kv_head * kv_len * head_dim_v..][..kv_len * head_dim_v],
            mask: inputs.mask.map(|mask| match mask {
                Mask::Bool(mask) => Mask::Bool(&mask[row * kv_len..][..kv_len]),
                Mask::Additive(bias) => Mask::Additive(&bias[row * kv_len..][..kv_len]),
            }),
            sink: inputs.sinks.map(|sinks| sinks[h]),
            slope: inputs.alibi_slopes.map(|slopes| slopes[h]),
            dropout: problem.dropout.map(|(dropout, seed)| (dropout, seed.of_head(b, h))),
        }
    }

    fn k(&self, j: usize) -> &'a [f64] {
        &self.k[j * self.problem.head_dim..][..self.problem.head_dim]
    }

    fn v(&self, j: usize) -> &'a [f64] {
        &self.v[j * self.problem.head_dim_v..][..self.problem.head_dim_v]
    }

    /// What dropout multiplies the probability of key `j` with.
    fn kept(&self, j: usize) -> f64 {
        self.dropout.map_or(
            1.0,
            |(dropout, head)| {
                if head.is_dropped(dropout, self.i, j) { 0.0 } else { dropout.scale() }
            },
        )
    }
}

/// `exp(s − max)`; 0 for `s = −inf` even if nothing greater was seen.
fn weight(s: f64, max: f64) -> f64 {
    if s == f64::NEG_INFINITY { 0.0 } else { (s - max).exp() }
}
