//! Forward for few queries: vectors run along head_dim, and each key and value is read once for all rows of its group.
//!
//! ```text
//! item = block_n keys of one kv head:
//!     s[row][key]   = q · k                      4 keys × 2 rows at a time, summed across lanes at the end
//!     p, max, sum   = softmax over the chunk     vectors along the keys
//!     o[row][dim]   = Σ_key p · v                blocks of pv_keys keys, so that a slice of V is still in L1
//! then, per row, in the order of chunks:  m = max m_c,  o = Σ o_c · 2^((m_c − m) · scale_log2),  sum likewise
//! ```
//! (Flash-Decoding, Dao 2023.) The cut into chunks follows the length of K alone, so the bits do not depend on threads.
//! Rows of K, then of V, are asked for some bytes before they are read: the processor's own prefetchers end at a page.
//! Rows of K and V that are codes, or not of the kernel's dtype beside such, become numbers in a panel that stays in L1.
//! Deliberately absent: packing where the inner stride is 1; rows beyond [`MAX_ROWS`].

use super::codes::read_query;
use super::combine::combine;
use super::mask;
use super::products::{Packing, Single};
use super::simd::{Part, Real, Simd, Storage};
use super::softmax::{Modifier, max_skipping_nan, probability, subtractable};
use crate::partition::{Item, QK_KEYS};
use crate::problem::{Input, Problem, Row, Source};
use crate::scratch::partial_len;

/// The most rows of a task: beyond, the lanes of the forward tile are used well enough.
pub(crate) const MAX_ROWS: usize = 8;

/// Consecutive keys of K or V: `row(j)` is where key `j` begins, with an inner stride of 1.
#[derive(Clone, Copy)]
struct Keys<T> {
    first: *const T,
    stride: isize,
}

impl<T: Copy> Keys<T> {
    /// Keys from `j0` on where they lie; `None` if their elements are apart.
    #[inline(always)]
    fn in_place(input: &Input<4>, (batch, head, j0): (usize, usize, usize), dim: usize) -> Option<Self> {
        let [_, _, stride, inner] = input.strides;
        (inner == 1 || dim == 1).then(|| Keys { first: input.at([batch, head, j0, 0]).cast::<T>(), stride })
    }

    /// Keys `j0..j0 + n` gathered into `panel`. Without a vector method, and out of the loops that most calls run: inlined,
    /// it takes the registers of their addresses.
    #[inline(never)]
    unsafe fn gathered(
        input: &Input<4>,
        (batch, head, j0): (usize, usize, usize),
        n: usize,
        dim: usize,
        panel: *mut T,
    ) -> Self {
        let first = input.at([batch, head, j0, 0]).cast::<T>();
        let [_, _, stride, inner] = input.strides;
        for j in 0..n {
            for d in 0..dim {
                // SAFETY: element d of key j0 + j; the panel has n rows of dim.
                unsafe {
                    *panel.add(j * dim + d) = *first.wrapping_offset(j as isize * stride + d as isize * inner);
                }
            }
        }
        Keys { first: panel, stride: dim as isize }
    }

    /// Keys `j0..j0 + n` as numbers of f32, which are what a kernel loads that has sources.
    #[inline(always)]
    unsafe fn read(
        source: &Source,
        (batch, head, j0): (usize, usize, usize),
        n: usize,
        dim: usize,
        panel: *mut T,
    ) -> Self {
        debug_assert_eq!(size_of::<T>(), size_of::<f32>());
        // SAFETY: keys j0..j0 + n are inside the tensor; the panel has n rows of dim.
        unsafe { (source.read)(source, [batch, head, j0], n, dim, panel.cast()) };
        Keys { first: panel, stride: dim as isize }
    }

    #[inline(always)]
    fn row(&self, j: usize) -> *const T {
        self.first.wrapping_offset(j as isize * self.stride)
    }

    /// The keys from key `j` on.
    #[inline(always)]
    fn from(self, j: usize) -> Self {
        Keys { first: self.row(j), ..self }
    }
}

/// What is asked for ahead of being read: the rows of K of a chunk, then those of V.
#[derive(Clone, Copy)]
struct Ahead {
    k: *const u8,
    v: *const u8,
    /// Bytes from row to row, and of a row.
    k_step: isize,
    v_step: isize,
    k_bytes: usize,
    v_bytes: usize,
    /// Keys of the chunk, and how many of them lie between a row that is read and the row that is asked for; 0: none is.
    n: usize,
    keys: usize,
}

impl Ahead {
    #[inline(always)]
    fn new(problem: &Problem, (batch, head, j0): (usize, usize, usize), n: usize) -> Self {
        let row_bytes = |input: &Input<4>, dim: usize, source: &Option<Source>| {
            let elements = dim.div_ceil(source.as_ref().map_or(1, |source| source.shared));
            if input.strides[3] == 1 { elements * input.size as usize } else { 0 }
        };
        let k_bytes = row_bytes(&problem.k, problem.head_dim, &problem.sources.k);
        let v_bytes = row_bytes(&problem.v, problem.head_dim_v, &problem.sources.v);
        Ahead {
            k: problem.k.at([batch, head, j0, 0]),
            v: problem.v.at([batch, head, j0, 0]),
            k_step: problem.k.strides[2] * problem.k.size,
            v_step: problem.v.strides[2] * problem.v.size,
            k_bytes,
            v_bytes,
            n,
            keys: problem.partition.ahead_bytes.div_ceil(k_bytes.max(v_bytes).max(1)),
        }
    }

    /// Asks for what follows keys `j..j + taken` of K, which are about to be read.
    #[inline(always)]
    unsafe fn of_keys<S: Simd>(&self, j: usize, taken: usize) {
        if self.keys > 0 {
            for j in j + self.keys..j + self.keys + taken {
                if j < self.n {
                    fetch::<S>(self.k.wrapping_offset(j as isize * self.k_step), self.k_bytes);
                } else if j - self.n < self.n {
                    fetch::<S>(self.v.wrapping_offset((j - self.n) as isize * self.v_step), self.v_bytes);
                }
            }
        }
    }

    /// As above for V.
    #[inline(always)]
    unsafe fn of_values<S: Simd>(&self, j: usize, taken: usize) {
        if self.keys > 0 {
            for j in j + self.keys..self.n.min(j + self.keys + taken) {
                fetch::<S>(self.v.wrapping_offset(j as isize * self.v_step), self.v_bytes);
            }
        }
    }
}

/// Asks for `bytes` from `row` on.
#[inline(always)]
fn fetch<S: Simd>(row: *const u8, bytes: usize) {
    for at in (0..bytes).step_by(64) {
        // SAFETY: of an entry point's instruction set; nothing is read.
        unsafe { S::prefetch(row.wrapping_add(at)) };
    }
}

/// One chunk of keys, and what both products read.
struct Chunk<'a, T> {
    problem: &'a Problem,
    /// Batch, head of K and V, first key.
    first: (usize, usize, usize),
    /// Keys.
    n: usize,
    /// Where keys or values are gathered whose elements lie apart.
    panel: *mut T,
    ahead: Ahead,
}

/// Computes the partial result of one chunk of keys for all rows of one task.
pub(crate) unsafe fn item<S: Simd, T: Storage<S>>(problem: &Problem, item: Item, memory: *mut u8) {
    let (rows, block_n, dim_v) = (problem.partition.rows, problem.partition.block_n, problem.head_dim_v);
    let scratch = &problem.scratch;
    let base = memory.cast::<S::Elem>();
    let origin = problem.task_origin(item.task);
    let kv_head = origin.1 / problem.group_size;
    let partial = partial_len(dim_v);
    let chunk_end = problem.kv_len.min((item.chunk + 1) * block_n);
    let (lo, hi) = problem.keys_of_rows(0, rows);
    let (j0, j1) = (lo.max(item.chunk * block_n), hi.min(chunk_end));
    // SAFETY: memory and partials are as long as the plan asked for; keys j0..j1 are inside K, V and mask.
    unsafe {
        let partials = problem
            .partials
            .cast::<S::Elem>()
            .add((item.task * problem.partition.chunks + item.chunk) * rows * partial);
        for at in 0..rows * partial {
            *partials.add(at) = S::Elem::ZERO;
        }
        for row in 0..rows {
            *partials.add(row * partial + dim_v) = S::Elem::NEG_INFINITY;
        }
        if j0 >= j1 {
            return;
        }
        let n = j1 - j0;
        let (q, s, panel) = (base.add(scratch.q), base.add(scratch.p), base.add(scratch.k_panel).cast::<T>());
        let first = (origin.0, kv_head, j0);
        let chunk = &Chunk { problem, first, n, panel, ahead: Ahead::new(problem, first, n) };

        // s = q @ k.T
        S::apart(FirstProduct { chunk, origin, q, s });

        let mut masked = false;
        for r in 0..rows {
            let state = partials.add(r * partial + dim_v);
            let (s, bias) = (s.add(r * block_n), base.add(scratch.bias));
            masked |= S::apart(SoftmaxRow::<S> { problem, row: problem.row(origin, r), keys: (j0, n), s, bias, state });
        }

        // o = p @ v
        S::apart(SecondProduct { chunk, masked, p: s, o: partials });
        if problem.partition.chunks == 1 {
            combine::<S, T>(problem, item, memory);
        }
    }
}

/// Scores of all rows of a task; `q` is where its queries are kept meanwhile.
struct FirstProduct<'a, E, T> {
    chunk: &'a Chunk<'a, T>,
    origin: (usize, usize),
    q: *mut E,
    s: *mut E,
}

impl<S: Simd, T: Storage<S>> Part<S> for FirstProduct<'_, S::Elem, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let FirstProduct { chunk, origin, q, s } = self;
        let Chunk { problem, first: (batch, kv_head, j0), n, panel, ahead } = *chunk;
        // Copies: behind a reference they would be read again after every store.
        let (k, dim, rows) = (problem.k, problem.head_dim, problem.partition.rows);
        let (q_stride, s_stride) = (problem.scratch.head_dim_padded, problem.partition.block_n);
        // SAFETY: as in `item`.
        unsafe {
            for r in 0..rows {
                let row = problem.row(origin, r);
                let (to, negate) = (q.add(r * q_stride), problem.scores.negate_q);
                if let Some(source) = &problem.sources.q {
                    read_query::<S>(source, [row.batch, row.head, row.i], dim, negate, to);
                } else {
                    let from = problem.q.at([row.batch, row.head, row.i, 0]).cast::<T>();
                    <Single as Packing<S, T>>::load_query(from, problem.q.strides[3], dim, negate, to);
                }
            }
            let (source, in_place) = (problem.sources.k.as_ref(), Keys::in_place(&k, (batch, kv_head, j0), dim));
            let at_a_time = if source.is_some() { problem.partition.panel_keys() } else { QK_KEYS };
            let mut j = 0;
            while j < n {
                let taken = at_a_time.min(n - j);
                ahead.of_keys::<S>(j, taken);
                let keys = match (source, in_place) {
                    (Some(source), _) => Keys::read(source, (batch, kv_head, j0 + j), taken, dim, panel),
                    (None, Some(keys)) => keys.from(j),
                    (None, None) => Keys::gathered(&k, (batch, kv_head, j0 + j), taken, dim, panel),
                };
                for first in (0..taken).step_by(QK_KEYS) {
                    let s = s.add(j + first);
                    if first + QK_KEYS <= taken {
                        dots::<S, T, QK_KEYS>(&keys, first, dim, rows, (q, q_stride), (s, s_stride));
                    } else {
                        for at in 0..taken - first {
                            dots::<S, T, 1>(&keys, first + at, dim, rows, (q, q_stride), (s.add(at), s_stride));
                        }
                    }
                }
                j += taken;
            }
        }
    }
}

/// `s[r][k] = q_r · k_{at + k}` for `K` keys and all rows; q and s with the distance of their rows.
#[inline(always)]
unsafe fn dots<S: Simd, T: Storage<S>, const K: usize>(
    keys: &Keys<T>,
    at: usize,
    dim: usize,
    rows: usize,
    (q, q_stride): (*const S::Elem, usize),
    (s, s_stride): (*mut S::Elem, usize),
) {
    let mut r = 0;
    // SAFETY: as in `item`.
    unsafe {
        while r < rows {
            let (q, s) = ((q.add(r * q_stride), q_stride), (s.add(r * s_stride), s_stride));
            if rows - r >= 2 {
                dots_micro::<S, T, K, 2>(keys, at, dim, q, s);
                r += 2;
            } else {
                dots_micro::<S, T, K, 1>(keys, at, dim, q, s);
                r += 1;
            }
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "a column of the accumulators")]
unsafe fn dots_micro<S: Simd, T: Storage<S>, const K: usize, const R: usize>(
    keys: &Keys<T>,
    at: usize,
    dim: usize,
    (q, q_stride): (*const S::Elem, usize),
    (s, s_stride): (*mut S::Elem, usize),
) {
    // SAFETY: as in `item`: K keys of dim elements, R rows of q and s.
    unsafe {
        let k: [*const T; K] = std::array::from_fn(|n| keys.row(at + n));
        let mut acc = [[S::splat(S::Elem::ZERO); R]; K];
        let mut d = 0;
        while d + S::LANES <= dim {
            let mut qs = [S::splat(S::Elem::ZERO); R];
            for (r, qs) in qs.iter_mut().enumerate() {
                *qs = S::load(q.add(r * q_stride + d));
            }
            for (k, acc) in k.iter().zip(&mut acc) {
                let k = T::load(k.add(d));
                for (q, acc) in qs.iter().zip(acc) {
                    *acc = S::fma(k, *q, *acc);
                }
            }
            d += S::LANES;
        }
        for r in 0..R {
            let mut column = [acc[0][r]; 4];
            for (n, sum) in column.iter_mut().enumerate() {
                *sum = acc[n % K][r];
            }
            let sums = S::reduce_add_4(column);
            for (n, &sum) in sums.iter().enumerate().take(K) {
                let mut sum = sum;
                for d in d..dim {
                    sum = sum + (*k[n].add(d)).widen() * *q.add(r * q_stride + d);
                }
                *s.add(r * s_stride + n) = sum;
            }
        }
    }
}

/// Scores of one row to probabilities in place; the maximum and the sum go to `state`. Answers whether a key was masked.
struct SoftmaxRow<'a, S: Simd> {
    problem: &'a Problem,
    row: Row,
    /// The first key, and how many there are.
    keys: (usize, usize),
    s: *mut S::Elem,
    bias: *mut S::Elem,
    state: *mut S::Elem,
}

impl<S: Simd> Part<S> for SoftmaxRow<'_, S> {
    type Output = bool;
    #[inline(always)]
    unsafe fn run(self) -> bool {
        let SoftmaxRow { problem, row, keys: (j0, n), s, bias, state } = self;
        let (first, last) = problem.range.keys_of(row.i);
        let (first, last) = (first.clamp(j0, j0 + n) - j0, last.clamp(j0, j0 + n) - j0);
        let padded = n.next_multiple_of(S::LANES);
        // SAFETY: s and bias have block_n elements, a multiple of every vector's length.
        unsafe {
            let effect = problem.mask.as_ref().map(|mask| mask::read_row(mask, row, (j0, n), bias, 1));
            let biased = effect.is_some_and(|effect| effect.masks || effect.adds);
            let positions = first > 0 || last < n;
            let mut slope = None;
            if let Some(slopes) = &problem.alibi_slopes {
                slope = Some(S::splat(S::Elem::load_as(slopes.dtype, slopes.at([row.head]))));
            }
            let masked = S::Elem::NEG_INFINITY;
            for j in n..padded {
                *s.add(j) = masked;
                *bias.add(j) = masked;
            }
            if problem.scores.natural || biased {
                let modifier = Modifier::<S>::new(&problem.scores);
                let diagonal = row.i as i64 + problem.range.diagonal - j0 as i64;
                for j in (0..padded).step_by(S::LANES) {
                    let mut distance = None;
                    if let Some(slope) = slope {
                        let mut at = [S::Elem::ZERO; 16];
                        for (lane, at) in at.iter_mut().enumerate().take(S::LANES) {
                            *at = S::Elem::from_i64((diagonal - (j + lane) as i64).abs());
                        }
                        distance = Some((slope, S::load(at.as_ptr())));
                    }
                    let mut x = modifier.apply(S::load(s.add(j)), distance);
                    if biased {
                        x = modifier.add_bias(x, S::load(bias.add(j)));
                    }
                    S::store(s.add(j), x);
                }
            }
            for j in (0..first).chain(last..padded) {
                *s.add(j) = masked;
            }

            let mut max = S::splat(masked);
            for j in (0..padded).step_by(S::LANES) {
                max = max_skipping_nan::<S>(max, S::load(s.add(j)));
            }
            let mut lanes = [masked; 16];
            S::store(lanes.as_mut_ptr(), max);
            let max = lanes.into_iter().fold(masked, |a, b| if b > a { b } else { a });
            let scale_log2 = S::splat(S::Elem::from_f64_clamped(problem.scores.exponent()));
            let subtract = subtractable::<S>(S::splat(max));
            let mut sum = S::splat(S::Elem::ZERO);
            for j in (0..padded).step_by(S::LANES) {
                let p = probability::<S, true>(S::load(s.add(j)), subtract, scale_log2);
                sum = S::add(sum, p);
                S::store(s.add(j), p);
            }
            *state = max;
            *state.add(1) = S::reduce_add(sum);
            positions || effect.is_some_and(|effect| effect.masks)
        }
    }
}

/// Whether the first `n` values, of `dim` elements, are all finite.
#[inline(always)]
unsafe fn all_finite<S: Simd, T: Storage<S>>(values: &Keys<T>, n: usize, dim: usize) -> bool {
    // 0 · x is 0 for finite x and NaN otherwise; a sum of those is 0 or NaN.
    // SAFETY: as in `item`.
    unsafe {
        let mut sum = S::splat(S::Elem::ZERO);
        let mut tail = S::Elem::ZERO;
        for j in 0..n {
            let row = values.row(j);
            let mut d = 0;
            while d + S::LANES <= dim {
                sum = S::fma(T::load(row.add(d)), S::splat(S::Elem::ZERO), sum);
                d += S::LANES;
            }
            for d in d..dim {
                tail = tail + (*row.add(d)).widen() * S::Elem::ZERO;
            }
        }
        !(S::reduce_add(sum) + tail).is_nan()
    }
}

/// What the values of a chunk add to the rows of `o`.
struct SecondProduct<'a, E, T> {
    chunk: &'a Chunk<'a, T>,
    /// Whether some key is masked for some row.
    masked: bool,
    p: *const E,
    o: *mut E,
}

impl<S: Simd, T: Storage<S>> Part<S> for SecondProduct<'_, S::Elem, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let SecondProduct { chunk, masked, p, o } = self;
        let Chunk { problem, first: (batch, kv_head, j0), n, panel, ahead } = *chunk;
        // Copies, as in the first product.
        let (v, dim_v, rows) = (problem.v, problem.head_dim_v, problem.partition.rows);
        let (p_stride, o_stride, pv_keys) = (problem.partition.block_n, partial_len(dim_v), problem.partition.pv_keys);
        // SAFETY: as in `item`.
        unsafe {
            let in_place = Keys::in_place(&v, (batch, kv_head, j0), dim_v);
            let mut j = 0;
            while j < n {
                let take = pv_keys.min(n - j);
                ahead.of_values::<S>(j, take);
                let keys = match (&problem.sources.v, in_place) {
                    (Some(source), _) => Keys::read(source, (batch, kv_head, j0 + j), take, dim_v, panel),
                    (None, Some(keys)) => keys.from(j),
                    (None, None) => Keys::gathered(&v, (batch, kv_head, j0 + j), take, dim_v, panel),
                };
                let clean = !masked || all_finite::<S, T>(&keys, take, dim_v);
                let (p, o) = ((p.add(j), p_stride), (o, o_stride));
                if clean {
                    weighted_sum::<S, T>(&keys, take, rows, p, o, dim_v);
                } else {
                    weighted_sum_selecting::<S, T>(&keys, take, rows, p, o, dim_v);
                }
                j += take;
            }
        }
    }
}

/// `o[r] += Σ_j p[r][j] · v_j` for `rows` rows; p and o with the distance of their rows.
#[inline(always)]
unsafe fn weighted_sum<S: Simd, T: Storage<S>>(
    keys: &Keys<T>,
    n: usize,
    rows: usize,
    (p, p_stride): (*const S::Elem, usize),
    (o, o_stride): (*mut S::Elem, usize),
    dim: usize,
) {
    let mut r = 0;
    // SAFETY: as in `item`.
    unsafe {
        while r < rows {
            let (p, o) = ((p.add(r * p_stride), p_stride), (o.add(r * o_stride), o_stride));
            match rows - r {
                4.. => {
                    weighted_rows::<S, T, 4, 2>(keys, n, p, o, dim);
                    r += 4;
                }
                2..4 => {
                    weighted_rows::<S, T, 2, 4>(keys, n, p, o, dim);
                    r += 2;
                }
                _ => {
                    weighted_rows::<S, T, 1, 8>(keys, n, p, o, dim);
                    r += 1;
                }
            }
        }
    }
}

/// `R` rows, `V` vectors of head_dim_v at a time; then single vectors; then single elements.
#[inline(always)]
unsafe fn weighted_rows<S: Simd, T: Storage<S>, const R: usize, const V: usize>(
    keys: &Keys<T>,
    n: usize,
    p: (*const S::Elem, usize),
    o: (*mut S::Elem, usize),
    dim: usize,
) {
    // SAFETY: as in `item`: n keys of dim elements, R rows of p and o.
    unsafe {
        let mut d = 0;
        while d + V * S::LANES <= dim {
            weighted_slice::<S, T, R, V>(keys, n, p, o, d);
            d += V * S::LANES;
        }
        while d + S::LANES <= dim {
            weighted_slice::<S, T, R, 1>(keys, n, p, o, d);
            d += S::LANES;
        }
        for d in d..dim {
            for r in 0..R {
                let mut sum = S::Elem::ZERO;
                for j in 0..n {
                    sum = sum + *p.0.add(r * p.1 + j) * (*keys.row(j).add(d)).widen();
                }
                let o = o.0.add(r * o.1 + d);
                *o = *o + sum;
            }
        }
    }
}

#[inline(always)]
unsafe fn weighted_slice<S: Simd, T: Storage<S>, const R: usize, const V: usize>(
    keys: &Keys<T>,
    n: usize,
    (p, p_stride): (*const S::Elem, usize),
    (o, o_stride): (*mut S::Elem, usize),
    d: usize,
) {
    // SAFETY: as in `item`.
    unsafe {
        let mut acc = [[S::splat(S::Elem::ZERO); V]; R];
        for j in 0..n {
            let row = keys.row(j).add(d);
            let mut vs = [S::splat(S::Elem::ZERO); V];
            for (n, vs) in vs.iter_mut().enumerate() {
                *vs = T::load(row.add(n * S::LANES));
            }
            for (r, acc) in acc.iter_mut().enumerate() {
                let p = S::splat(*p.add(r * p_stride + j));
                for (v, acc) in vs.iter().zip(acc) {
                    *acc = S::fma(p, *v, *acc);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, &sum) in acc.iter().enumerate() {
                let at = o.add(r * o_stride + d + n * S::LANES);
                S::store(at, S::add(S::load(at), sum));
            }
        }
    }
}

/// As [`weighted_sum`] with the same bits, never touching a masked value: it may be NaN or infinite.
#[inline(always)]
unsafe fn weighted_sum_selecting<S: Simd, T: Storage<S>>(
    keys: &Keys<T>,
    n: usize,
    rows: usize,
    (p, p_stride): (*const S::Elem, usize),
    (o, o_stride): (*mut S::Elem, usize),
    dim: usize,
) {
    // SAFETY: as in `item`.
    unsafe {
        for r in 0..rows {
            let p = p.add(r * p_stride);
            let mut d = 0;
            while d < dim {
                let whole = d + S::LANES <= dim;
                let mut acc = S::splat(S::Elem::ZERO);
                let mut tail = S::Elem::ZERO;
                for j in (0..n).filter(|&j| !(*p.add(j)).is_masked()) {
                    let v = keys.row(j).add(d);
                    if whole {
                        acc = S::fma(S::splat(*p.add(j)), T::load(v), acc);
                    } else {
                        tail = tail + *p.add(j) * (*v).widen();
                    }
                }
                let at = o.add(r * o_stride + d);
                if whole {
                    S::store(at, S::add(S::load(at), acc));
                    d += S::LANES;
                } else {
                    *at = *at + tail;
                    d += 1;
                }
            }
        }
    }
}
