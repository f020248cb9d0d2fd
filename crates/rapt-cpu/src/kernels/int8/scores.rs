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
use crate::kernels::simd::{Part, Simd};
use crate::kernels::softmax::{Modifier, max_skipping_nan, probability, rescale, subtractable};
use crate::kernels::weigh::Positions;
use crate::problem::{Problem, Row};

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
        let of_rows = Positions::<f32>::new(problem, rows, (j0, n), positions);
        // SAFETY: x and bias have n rows of `queries`; the arrays have at least `queries` elements.
        unsafe {
            let masked = S::splat(f32::NEG_INFINITY);
            let mut max = [masked; V];
            for (v, max) in max.iter_mut().enumerate() {
                let at = v * S::LANES;
                let modifier = Modifier::<S>::new(&problem.scores).scaled(S::load(factors.add(at)));
                let lanes = of_rows.lanes::<S>(at);
                for j in 0..n {
                    let to = x.add(j * queries + at);
                    let bias = bias.map(|bias| bias.add(j * queries + at));
                    let score = lanes.modified(&modifier, S::load(to), j, bias);
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
