//! How far rows of attention on codes may be off, from what was measured of K and V: rapt-reference has the equations.
//!
//! ```text
//! for each block of keys:
//!     s = q @ k.T;  p, max, sum = softmax(s)                            as decode's
//!     w = (p·a)²;   o = o·f + p @ v;   g = g·f² + w @ v                 f: what the risen maximum leaves of earlier sums
//!     Σp·a  Σp·a·r  Σp·b  Σ(p·b)²  Σw  Σw·‖v‖²                          rescaled likewise
//! Σw·‖v − o‖² = Σw·‖v‖² − 2·o·g + ‖o‖²·Σw
//! ```
//! Errors of keys and values are taken relative to the largest, so that no square of them underflows. Block sums are f32, sums of blocks f64.
//! Deliberately absent: outputs. Nothing but [`RowDeviation`]s is written.

use rapt_core::MatrixErrors;

use super::products::{dots, weighted_sum, weighted_sum_selecting};
use super::rows::Keys;
use super::softmax::SoftmaxRow;
use super::{all_finite, read_query};
use crate::kernels::products::{Packing, Single};
use crate::kernels::simd::{Part, Real, Simd};
use crate::kernels::softmax::{Finished, rescale};
use crate::partition::QK_KEYS;
use crate::problem::{Problem, Row};

/// Queries of an item.
pub(crate) const ROWS: usize = 16;
/// Keys of a block: a multiple of every vector's length, and of [`QK_KEYS`].
pub(crate) const KEYS: usize = 64;

/// Lanes that [`weigh`] treats alike: as many as the longest vector has.
const LANES: usize = 16;

/// What is known of one row; as `rapt_reference::RowError`, with squares where the reference has lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RowDeviation {
    pub(crate) epsilon: f64,
    pub(crate) estimate: f64,
    pub(crate) before: f64,
    pub(crate) after: f64,
    pub(crate) norm: f64,
}

/// What was measured of K and V of one key head.
#[derive(Clone, Copy)]
pub(crate) struct HeadErrors<'a> {
    pub(crate) k: Option<MatrixErrors<'a>>,
    pub(crate) v: Option<MatrixErrors<'a>>,
}

/// Queries of one key head, and all their keys.
pub(crate) struct Rows<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    /// The first, and the end, of the rows of the head's group: `q_len` of each of its query heads.
    pub(crate) rows: (usize, usize),
    pub(crate) errors: HeadErrors<'a>,
    /// Of [`scratch_len`] elements.
    pub(crate) scratch: *mut f32,
    /// One for each row.
    pub(crate) out: *mut RowDeviation,
}

/// Elements of scratch memory.
pub(crate) fn scratch_len(head_dim: usize, head_dim_v: usize) -> usize {
    let (dim, dim_v) = (head_dim.next_multiple_of(16), head_dim_v.next_multiple_of(16));
    ROWS * (dim + 2 * dim_v + 2 * KEYS) + KEYS * (dim.max(dim_v) + 5)
}

/// An entry point.
pub(crate) type Run = unsafe fn(Rows<'_>);

/// Computes the rows.
///
/// # Safety
/// The instruction set is present; what the fields speak of is there, and errors are as long as K and V.
pub(crate) unsafe fn run<S: Simd<Elem = f32>>(rows: Rows<'_>) {
    // SAFETY: as of the caller.
    unsafe { S::apart(rows) }
}

/// Sums of one row, relative to the largest errors.
#[derive(Clone, Copy, Default)]
struct Sums {
    p: f64,
    pa: f64,
    par: f64,
    pb: f64,
    pb2: f64,
    w: f64,
    wv: f64,
}

impl Sums {
    fn rescaled(&mut self, factor: f64) {
        let square = factor * factor;
        [&mut self.p, &mut self.pa, &mut self.par, &mut self.pb].into_iter().for_each(|sum| *sum *= factor);
        [&mut self.pb2, &mut self.w, &mut self.wv].into_iter().for_each(|sum| *sum *= square);
    }
}

/// The largest of the keys that a row attends.
#[derive(Clone, Copy, Default)]
struct Most {
    a: f32,
    b: f32,
    r: f32,
}

/// Errors of the keys of a block, the first two over their largest.
#[derive(Clone, Copy)]
struct BlockErrors {
    a: *mut f32,
    b: *mut f32,
    r: *mut f32,
    /// `‖v̂‖²`.
    v: *mut f32,
}

impl BlockErrors {
    /// Those of the keys `j0..j0 + n`.
    #[inline(always)]
    unsafe fn read<S: Simd<Elem = f32>>(
        &self,
        values: &Keys<f32>,
        (j0, n, dim_v): (usize, usize, usize),
        errors: HeadErrors<'_>,
        [most_a, most_b]: [f32; 2],
    ) {
        for j in 0..n {
            // SAFETY: the caller vouches for the values and a block of each.
            unsafe {
                let v = squares_of::<S>(values.first.wrapping_offset(j as isize * values.stride), dim_v);
                *self.v.add(j) = v;
                *self.a.add(j) = errors.k.map_or(0.0, |k| k.error[j0 + j] / most_a);
                *self.b.add(j) = errors.v.map_or(0.0, |v| v.error[j0 + j] / most_b);
                *self.r.add(j) = errors.v.map_or_else(|| v.sqrt() * 1.000_01, |v| v.spread[j0 + j]);
            }
        }
    }
}

/// The smallest run of keys that holds every key seen by these queries.
fn seen(problem: &Problem, queries: impl Iterator<Item = usize>) -> (usize, usize) {
    let ranges = queries.map(|i| problem.range.keys_of(i)).filter(|(lo, hi)| lo < hi);
    ranges.reduce(|all, of| (all.0.min(of.0), all.1.max(of.1))).unwrap_or((0, 0))
}

/// The largest finite error; 1 where there is none above 0.
fn largest(errors: Option<MatrixErrors<'_>>) -> f32 {
    let finite = errors.iter().flat_map(|errors| errors.error).copied().filter(|error| error.is_finite());
    let largest = finite.fold(0.0, f32::max);
    if largest > 0.0 { largest } else { 1.0 }
}

fn squares(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum()
}

impl<S: Simd<Elem = f32>> Part<S> for Rows<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Rows { problem, batch, kv_head, rows: (r0, r1), errors, scratch, out } = self;
        let (dim, dim_v, n_rows) = (problem.head_dim, problem.head_dim_v, r1 - r0);
        let (q_stride, o_stride) = (dim.next_multiple_of(16), dim_v.next_multiple_of(16));
        let row = |r: usize| {
            let (head, i) = (kv_head * problem.group_size + (r0 + r) / problem.q_len, (r0 + r) % problem.q_len);
            Row { batch, head, i }
        };
        let q = scratch;
        let s = q.wrapping_add(ROWS * q_stride);
        let w = s.wrapping_add(ROWS * KEYS);
        let o = w.wrapping_add(ROWS * KEYS);
        let g = o.wrapping_add(ROWS * o_stride);
        let panel = g.wrapping_add(ROWS * o_stride);
        let bias = panel.wrapping_add(KEYS * q_stride.max(o_stride));
        let of_block = [1, 2, 3, 4].map(|at| bias.wrapping_add(at * KEYS));
        let of_block = BlockErrors { a: of_block[0], b: of_block[1], r: of_block[2], v: of_block[3] };
        let (most_a, most_b) = (largest(errors.k), largest(errors.v));
        let (mut sums, mut most, mut max) =
            ([Sums::default(); ROWS], [Most::default(); ROWS], [f32::NEG_INFINITY; ROWS]);
        // SAFETY: the scratch memory holds all of the above; keys and rows are inside the operands.
        unsafe {
            let scale_log2 = S::splat(f32::from_f64_clamped(problem.scores.exponent()));
            std::ptr::write_bytes(o, 0, 2 * ROWS * o_stride);
            std::ptr::write_bytes(of_block.a, 0, 4 * KEYS);
            for r in 0..n_rows {
                let (at, to) = (row(r), q.add(r * q_stride));
                if let Some(source) = &problem.sources.q {
                    read_query::<S>(source, [at.batch, at.head, at.i], dim, problem.scores.negate_q, to);
                } else {
                    let from = problem.q.at([at.batch, at.head, at.i, 0]).cast::<f32>();
                    let stride = problem.q.strides[3];
                    <Single as Packing<S, f32>>::load_query(from, stride, dim, problem.scores.negate_q, to);
                }
            }
            let (lo, hi) = seen(problem, (0..n_rows).map(|r| row(r).i));
            for j0 in (lo..hi).step_by(KEYS) {
                let n = KEYS.min(hi - j0);
                let keys = match &problem.sources.k {
                    Some(source) => Keys::<f32>::read(source, (batch, kv_head, j0), n, dim, panel),
                    None => Keys::near(&problem.k, (batch, kv_head, j0), n, dim, panel),
                };
                for first in (0..n).step_by(QK_KEYS) {
                    let s = s.add(first);
                    if first + QK_KEYS <= n {
                        dots::<S, _, QK_KEYS>(&keys, first, dim, n_rows, (q, q_stride), (s, KEYS));
                    } else {
                        for at in 0..n - first {
                            dots::<S, _, 1>(&keys, first + at, dim, n_rows, (q, q_stride), (s.add(at), KEYS));
                        }
                    }
                }
                let values = match &problem.sources.v {
                    Some(source) => Keys::<f32>::read(source, (batch, kv_head, j0), n, dim_v, panel),
                    None => Keys::near(&problem.v, (batch, kv_head, j0), n, dim_v, panel),
                };
                of_block.read::<S>(&values, (j0, n, dim_v), errors, [most_a, most_b]);
                let mut masked = false;
                for r in 0..n_rows {
                    let (mut state, s, at) = ([0.0; 2], s.add(r * KEYS), row(r));
                    let state_at = state.as_mut_ptr();
                    masked |= SoftmaxRow::<S> { problem, row: at, keys: (j0, n), s, bias, state: state_at }.run();
                    let risen = if state[0] > max[r] { state[0] } else { max[r] };
                    let of_old = lane::<S>(rescale::<S>(S::splat(max[r]), S::splat(risen), scale_log2));
                    let of_new = lane::<S>(rescale::<S>(S::splat(state[0]), S::splat(risen), scale_log2));
                    max[r] = risen;
                    if of_old != 1.0 {
                        sums[r].rescaled(f64::from(of_old));
                        for d in 0..dim_v {
                            *o.add(r * o_stride + d) *= of_old;
                            *g.add(r * o_stride + d) *= of_old * of_old;
                        }
                    }
                    weigh((s, w.add(r * KEYS)), n, of_new, of_block, (&mut sums[r], &mut most[r]));
                }
                let is_clean = !masked || all_finite::<S, _>(&values, n, dim_v);
                for (weights, to) in [(s, o), (w, g)] {
                    let weights = (weights.cast_const(), KEYS);
                    if is_clean {
                        weighted_sum::<S, _, false>(&values, n, n_rows, weights, (to, o_stride), dim_v);
                    } else {
                        weighted_sum_selecting::<S, _>(&values, n, n_rows, weights, (to, o_stride), dim_v);
                    }
                }
            }
            for r in 0..n_rows {
                let sink = problem.sinks.map(|sinks| f32::load_as(sinks.dtype, sinks.at([row(r).head])));
                let to_natural = f32::from_f64_clamped(problem.scores.to_natural());
                let done = Finished::new(max[r], sums[r].p as f32, to_natural, sink);
                let slices = [(q, q_stride, dim), (o, o_stride, dim_v), (g, o_stride, dim_v)];
                let [q, o, g] = slices.map(|(ptr, stride, n)| std::slice::from_raw_parts(ptr.add(r * stride), n));
                let scale = problem.scores.scale;
                let end = End { q, o, g, scale, factor: f64::from(done.factor), largest: [most_a, most_b], errors };
                *out.add(r) = end.row(sums[r], most[r], sink.is_some());
            }
        }
    }
}

/// `‖x‖²` of `n` elements.
#[inline(always)]
unsafe fn squares_of<S: Simd<Elem = f32>>(x: *const f32, n: usize) -> f32 {
    // SAFETY: the caller vouches for n elements.
    unsafe {
        let (mut sum, mut d) = (S::splat(0.0), 0);
        while d + S::LANES <= n {
            let x = S::load(x.add(d));
            sum = S::fma(x, x, sum);
            d += S::LANES;
        }
        let mut all = S::reduce_add(sum);
        for d in d..n {
            all += *x.add(d) * *x.add(d);
        }
        all
    }
}

/// The first lane.
#[inline(always)]
unsafe fn lane<S: Simd<Elem = f32>>(x: S::V) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: as many elements as the longest vector has.
    unsafe { S::store(lanes.as_mut_ptr(), x) };
    lanes[0]
}

/// Brings a row's probabilities of a block to the risen maximum, and adds up what they weigh.
#[inline(always)]
unsafe fn weigh(
    (p, w): (*mut f32, *mut f32),
    n: usize,
    factor: f32,
    of: BlockErrors,
    (sums, most): (&mut Sums, &mut Most),
) {
    let mut add = [[0f32; LANES]; 7];
    let mut top = [[0f32; LANES]; 3];
    // SAFETY: the caller vouches for blocks of KEYS elements.
    unsafe {
        for j in n..n.next_multiple_of(LANES) {
            *p.add(j) = f32::MASKED;
        }
        for j in (0..n).step_by(LANES) {
            let of = [of.a, of.b, of.r, of.v].map(|ptr| *ptr.add(j).cast::<[f32; LANES]>());
            let (p, w) = (&mut *p.add(j).cast::<[f32; LANES]>(), &mut *w.add(j).cast::<[f32; LANES]>());
            // Lane by lane alike, so that it becomes vectors.
            for lane in 0..LANES {
                let [a, b, r, v] = of.map(|of| of[lane]);
                let is_masked = p[lane].is_masked();
                let x = p[lane] * factor;
                let (pa, pb) = (x * a, x * b);
                let square = pa * pa;
                p[lane] = x;
                w[lane] = if is_masked { f32::MASKED } else { square };
                for (add, term) in add.iter_mut().zip([x, pa, pa * r, pb, pb * pb, square, square * v]) {
                    add[lane] += if is_masked { 0.0 } else { term };
                }
                for (top, x) in top.iter_mut().zip([a, b, r]) {
                    top[lane] = if !is_masked && (x > top[lane] || x.is_nan()) { x } else { top[lane] };
                }
            }
        }
    }
    let into = [&mut sums.p, &mut sums.pa, &mut sums.par, &mut sums.pb, &mut sums.pb2, &mut sums.w, &mut sums.wv];
    into.into_iter().zip(add).for_each(|(sum, add)| *sum += f64::from(add.iter().sum::<f32>()));
    for (most, top) in [&mut most.a, &mut most.b, &mut most.r].into_iter().zip(top) {
        *most = top.into_iter().fold(*most, |most, x| if x > most || x.is_nan() { x } else { most });
    }
}

/// A row whose keys have all been seen.
struct End<'a> {
    q: &'a [f32],
    o: &'a [f32],
    g: &'a [f32],
    scale: f64,
    factor: f64,
    largest: [f32; 2],
    errors: HeadErrors<'a>,
}

impl End<'_> {
    fn row(&self, sums: Sums, most: Most, has_sink: bool) -> RowDeviation {
        let End { q, o, g, scale, factor, largest, errors } = *self;
        let [most_a, most_b] = largest.map(f64::from);
        if factor == 0.0 {
            return RowDeviation::default();
        }
        let mut sums = sums;
        sums.rescaled(factor);
        let along: f64 = o.iter().zip(g).map(|(&o, &g)| f64::from(o) * f64::from(g)).sum::<f64>() * factor.powi(3);
        let norm = squares(o) * factor * factor;
        // What f32 may have lost of the difference is added.
        let lost = 1e-6 * (sums.wv + norm * sums.w);
        let apart = (sums.wv - 2.0 * along + norm * sums.w).max(0.0) + lost;
        let slope = scale * squares(q).sqrt();
        let (a, ar, b) = (slope * most_a * sums.pa, slope * most_a * sums.par, most_b * sums.pb);
        let epsilon = slope * most_a * f64::from(most.a);
        let phi = if epsilon == 0.0 { 1.0 } else { epsilon.exp_m1() / epsilon };
        let mean = errors.v.map_or(&[][..], |v| v.mean);
        let from_mean: f64 = o
            .iter()
            .enumerate()
            .map(|(d, &o)| {
                let c = mean.get(d).map_or(0.0, |&c| f64::from(c));
                (f64::from(o) * factor - c).powi(2)
            })
            .sum();
        let left = 1.0 - phi * a;
        let after = b + phi * (ar + a * (from_mean.sqrt() + b)) / left;
        let after = if left > 0.0 || left.is_nan() { after } else { f64::INFINITY };
        let most_r = if has_sink { f64::from(most.r).max(squares(mean).sqrt()) } else { f64::from(most.r) };
        let before = 2.0 * (epsilon / 2.0).tanh() * most_r + most_b * f64::from(most.b);
        let in_q: f64 = errors.k.map_or(0.0, |k| {
            q.iter().zip(k.share).map(|(&q, &share)| f64::from(q) * f64::from(q) * f64::from(share)).sum()
        });
        let repeats = |errors: Option<MatrixErrors<'_>>| errors.map_or(1.0, |errors| f64::from(errors.coherence));
        let bias = errors.v.map_or(0.0, |v| f64::from(v.bias)) * sums.p;
        let of_keys = scale * scale * in_q * repeats(errors.k) * apart * most_a * most_a;
        let of_values = repeats(errors.v) * sums.pb2 * most_b * most_b;
        RowDeviation {
            epsilon,
            estimate: of_keys + of_values + bias * bias,
            before: before * before,
            after: after * after,
            norm,
        }
    }
}
