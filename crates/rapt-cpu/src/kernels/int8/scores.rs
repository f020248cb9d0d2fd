//! From products of integers to quads of probabilities.
//!
//! ```text
//! x = product · factor of its key                                          raw: compared as it is, or
//! x = softcap(x · f) − slope·|i + d − j| + bias                            natural: where something is added; f of each query
//! m_b = max_j x     p = 2^((x − m_b)·c)     pc = round(255 · p)            c = log2(e) · (f | 1)
//! ```

use std::marker::PhantomData;

use super::quads::Quads;
use crate::kernels::mask;
use crate::kernels::simd::{Part, Real, Simd};
use crate::kernels::softmax::{Modifier, max_skipping_nan, probability, rescale, subtractable};
use crate::problem::{Problem, Row};

/// The most lanes of a tile.
const MAX_QUERIES: usize = 32;

/// What [`Effect`](mask::Effect) leaves to do on scores of keys `j0..j0 + n`. Answers their maxima.
pub(super) struct Modify<'a, S: Simd, const V: usize> {
    pub(super) problem: &'a Problem,
    pub(super) rows: &'a [Row],
    /// The first key, and how many there are.
    pub(super) keys: (usize, usize),
    pub(super) x: *mut f32,
    pub(super) bias: Option<*const f32>,
    /// Of each query.
    pub(super) factors: *const f32,
    /// Whether some row does not see every key.
    pub(super) positions: bool,
    pub(super) vectors: PhantomData<S>,
}

impl<S: Simd<Elem = f32>, const V: usize> Part<S> for Modify<'_, S, V> {
    type Output = [S::V; V];
    #[inline(always)]
    unsafe fn run(self) -> [S::V; V] {
        let Modify { problem, rows, keys: (j0, n), x, bias, factors, positions, .. } = self;
        let queries = V * S::LANES;
        // Positions relative to j0: a block is short, so they are exact; a distance beyond 2^24 is rounded like any other number.
        let (mut lo, mut hi) = ([0f32; MAX_QUERIES], [n as f32; MAX_QUERIES]);
        let (mut diagonal, mut slope) = ([0f32; MAX_QUERIES], [0f32; MAX_QUERIES]);
        for (lane, row) in rows.iter().enumerate() {
            if positions {
                let (first, last) = problem.range.keys_of(row.i);
                lo[lane] = (first.clamp(j0, j0 + n) - j0) as f32;
                hi[lane] = (last.clamp(j0, j0 + n) - j0) as f32;
            }
            if let Some(slopes) = &problem.alibi_slopes {
                diagonal[lane] = f32::from_i64(row.i as i64 + problem.range.diagonal - j0 as i64);
                // SAFETY: one slope per head of q.
                slope[lane] = unsafe { f32::load_as(slopes.dtype, slopes.at([row.head])) };
            }
        }
        // SAFETY: x and bias have n rows of `queries`; the arrays have at least `queries` elements.
        unsafe {
            let masked = S::splat(f32::NEG_INFINITY);
            let mut max = [masked; V];
            for (v, max) in max.iter_mut().enumerate() {
                let at = v * S::LANES;
                let modifier = Modifier::<S>::new(&problem.scores).scaled(S::load(factors.add(at)));
                let (lo, hi) = (S::load(lo.as_ptr().add(at)), S::load(hi.as_ptr().add(at)));
                let (diagonal, slope) = (S::load(diagonal.as_ptr().add(at)), S::load(slope.as_ptr().add(at)));
                for j in 0..n {
                    let to = x.add(j * queries + at);
                    let key = S::splat(j as f32);
                    let mut distance = None;
                    if problem.alibi_slopes.is_some() {
                        distance = Some((slope, S::abs(S::sub(diagonal, key))));
                    }
                    let mut score = modifier.apply(S::load(to), distance);
                    if let Some(bias) = bias {
                        score = modifier.add_bias(score, S::load(bias.add(j * queries + at)));
                    }
                    if positions {
                        score = S::select(S::lt(key, hi), S::select(S::lt(key, lo), masked, score), masked);
                    }
                    S::store(to, score);
                    *max = max_skipping_nan::<S>(*max, score);
                }
            }
            max
        }
    }
}

/// The state of a tile's rows.
#[derive(Clone, Copy)]
pub(super) struct State {
    pub(super) row_max: *mut f32,
    pub(super) row_sum: *mut f32,
    /// What makes natural scores of raw ones.
    pub(super) factors: *mut f32,
}

/// Scores of `n` keys to quads of probabilities in place, and onto the sums. Answers what O and the sums of this block are multiplied with.
pub(super) struct Weigh<S: Simd, Q, const V: usize, const MASKED: bool> {
    pub(super) natural: bool,
    pub(super) state: State,
    pub(super) n: usize,
    pub(super) x: *mut f32,
    /// The block's maxima.
    pub(super) max: [S::V; V],
    pub(super) integers: PhantomData<Q>,
}

impl<S: Simd<Elem = f32>, Q: Quads<S>, const V: usize, const MASKED: bool> Part<S> for Weigh<S, Q, V, MASKED> {
    type Output = [[S::V; V]; 2];
    #[inline(always)]
    unsafe fn run(self) -> [[S::V; V]; 2] {
        let Weigh { natural, state, n, x, max, .. } = self;
        let queries = V * S::LANES;
        // SAFETY: x has n rows of `queries`, the state `queries` elements.
        unsafe {
            let log2_e = S::splat(std::f32::consts::LOG2_E);
            let (mut scale_log2, mut subtract, mut sum) = ([log2_e; V], max, [S::splat(0.0); V]);
            for v in 0..V {
                if !natural {
                    scale_log2[v] = S::mul(S::load(state.factors.add(v * S::LANES)), log2_e);
                }
                subtract[v] = subtractable::<S>(max[v]);
            }
            let whole = n / 4 * 4;
            for j in (0..whole).step_by(4) {
                for v in 0..V {
                    let mut codes = [Q::splat(0); 4];
                    for (key, code) in codes.iter_mut().enumerate() {
                        let score = S::load(x.add((j + key) * queries + v * S::LANES));
                        let p = probability::<S, MASKED>(score, subtract[v], scale_log2[v]);
                        sum[v] = S::add(sum[v], p);
                        *code = Q::round(S::mul(p, S::splat(255.0)));
                    }
                    // Row j / 4 is written after rows j.. were read, and those before it.
                    Q::store(x.add(j / 4 * queries + v * S::LANES).cast(), Q::join(codes));
                }
            }
            if whole < n {
                for v in 0..V {
                    let mut codes = [Q::splat(0); 4];
                    for key in whole..n {
                        let score = S::load(x.add(key * queries + v * S::LANES));
                        let p = probability::<S, MASKED>(score, subtract[v], scale_log2[v]);
                        sum[v] = S::add(sum[v], p);
                        codes[key - whole] = Q::round(S::mul(p, S::splat(255.0)));
                    }
                    Q::store(x.add(whole / 4 * queries + v * S::LANES).cast(), Q::join(codes));
                }
            }
            let (mut old, mut new) = (max, max);
            for v in 0..V {
                let at = v * S::LANES;
                let (row_max, row_sum) = (S::load(state.row_max.add(at)), state.row_sum.add(at));
                let risen = max_skipping_nan::<S>(row_max, max[v]);
                old[v] = rescale::<S>(row_max, risen, scale_log2[v]);
                new[v] = rescale::<S>(max[v], risen, scale_log2[v]);
                S::store(row_sum, S::fma(sum[v], new[v], S::mul(S::load(row_sum), old[v])));
                S::store(state.row_max.add(at), risen);
            }
            [old, new]
        }
    }
}

/// Biases of a mask on keys `j0..j0 + n` of a tile; `None` where no query sees any.
pub(super) unsafe fn read_mask<S: Simd<Elem = f32>, const V: usize>(
    problem: &Problem,
    rows: &[Row],
    keys: (usize, usize),
    bias: *mut f32,
) -> Option<mask::Effect> {
    let Some(mask) = &problem.mask else {
        return Some(mask::Effect { masks: false, attends: true, adds: false });
    };
    // SAFETY: promised by the caller: bias has a row of the tile's lanes for each key.
    let effect = unsafe { S::apart(mask::ReadTile::<S, V> { mask, rows, keys, bias }) };
    (!effect.is_empty()).then_some(effect)
}
