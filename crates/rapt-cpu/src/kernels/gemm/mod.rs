//! An item of a product with packed weights.
//!
//! ```text
//! for ROW_BLOCK rows of x, for TILE_COLUMNS columns:                          a tile of sums in scratch memory
//!     many rows:       for BLOCK lanes of the contraction, for a panel of w:  all rows · panel    x and the panel stay in L2
//!     one micro-tile:  for a panel of w, for BLOCK lanes:                     rows · panel        w is one stream
//!     one row:         for PANELS panels of w, for BLOCK lanes:               row · panels        w is PANELS streams
//!     the tile to the output, rounded, or to the epilogue
//! ```
//! The rows of x are the broadcast rows of `matmul`, the columns of a panel its vectors. 16-bit weights that are not multiplied in
//! pairs are widened: for many rows a block of a panel into scratch memory, for few where they are loaded; the bits are the same.
//! Scratch memory: the tile; a widened block of a panel; rows of x, where they do not lie as the inner loop reads them.

pub(crate) mod pack;

use std::marker::PhantomData;

use super::matmul::{Broadcast, Onto, Place, micro_rows, tile};
use super::pack::load_row;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::pairs::{Bf16Pairs, Paired};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::products::Packing;
use super::products::{Lanes, Single};
use super::simd::{Part, Real, Simd, Storage};
use crate::gemm::product::{Job, Output, Rows};

/// Rows of an item at most: their tile of sums is 128 KiB of f32, as much as a block of x in f32.
pub(crate) const ROW_BLOCK: usize = 128;
/// Columns of a tile at most: a multiple of any panel's.
pub(crate) const TILE_COLUMNS: usize = 256;
/// From one row of a tile of sums to the next: a cache line more than its columns, or the rows of a panel would share few sets of L1.
pub(crate) const SUM_ROW: usize = TILE_COLUMNS + 16;
/// Lanes of the contraction that are summed from 0 on before they are added to what was. Fixed: it decides bits. 192 to 1024 are
/// within 3 % of one another on the benchmark's sizes (Zen 4, 2026-11); so is asking for the next panel ahead, which is left out.
const BLOCK: usize = 384;

/// How weights lie in a panel, and what becomes of x.
pub(crate) trait Weights<S: Simd>: Lanes<S> {
    /// The storage dtype.
    type Stored: Storage<S>;
    /// Whether blocks of panels are widened for many rows.
    const WIDENED: bool;
    /// Whether rows of x may have to be copied.
    const COPIED: bool;
    /// The lanes of a panel and of a copied row, and the rows of a tile of sums, are multiples of these.
    const LANE_RUN: usize = 1;
    const ROW_RUN: usize = 1;
    /// Lanes `from..from + n` of `rows` rows of `x`, which has `k` steps, where they lie or copied to `to`, which has
    /// `rows · n` lanes.
    unsafe fn rows(x: Rows, k: usize, rows: usize, from: usize, n: usize, to: *mut S::Elem) -> Broadcast<S::Elem>;
    /// Rows times panels.
    #[inline(always)]
    unsafe fn multiply(blocks: Blocks<S, Self>) {
        // SAFETY: promised by the caller.
        unsafe { Self::apart(blocks) }
    }
    /// One row times panels.
    #[inline(always)]
    unsafe fn multiply_row(row: OneRow<S, Self>) {
        // SAFETY: promised by the caller.
        unsafe { Self::apart(row) }
    }
}

impl<S: Simd> Weights<S> for Single
where
    S::Elem: Storage<S>,
{
    type Stored = S::Elem;
    const WIDENED: bool = false;
    const COPIED: bool = false;
    unsafe fn rows(x: Rows, _: usize, _: usize, from: usize, _: usize, _: *mut S::Elem) -> Broadcast<S::Elem> {
        Broadcast { ptr: x.ptr.cast::<S::Elem>().wrapping_add(from), row: x.row_stride, step: 1 }
    }
}

/// Weights of a 16-bit dtype, one step per lane.
#[derive(Clone, Copy)]
pub(crate) struct Widened<T>(PhantomData<T>);

impl<S: Simd, T: Storage<S>> Lanes<S> for Widened<T> {
    const STEPS: usize = 1;
    type Lane = T;
    #[inline(always)]
    unsafe fn load(ptr: *const T) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { T::load(ptr) }
    }
    #[inline(always)]
    unsafe fn accumulate(b: S::V, x: S::V, acc: S::V) -> S::V {
        // SAFETY: promised by the caller.
        unsafe { S::fma(b, x, acc) }
    }
    #[inline(always)]
    unsafe fn apart<P: Part<S>>(part: P) -> P::Output {
        // SAFETY: promised by the caller.
        unsafe { S::apart(part) }
    }
}

impl<S: Simd, T: Storage<S>> Weights<S> for Widened<T> {
    type Stored = T;
    const WIDENED: bool = true;
    const COPIED: bool = true;
    unsafe fn rows(x: Rows, _: usize, rows: usize, from: usize, n: usize, to: *mut S::Elem) -> Broadcast<S::Elem> {
        let src = x.ptr.cast::<T>().wrapping_add(from);
        // SAFETY: promised by the caller.
        unsafe { S::apart(WidenRows { src, stride: x.row_stride, rows, n, to }) };
        Broadcast { ptr: to, row: n as isize, step: 1 }
    }
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
impl<S: Bf16Pairs> Weights<S> for Paired {
    type Stored = half::bf16;
    const WIDENED: bool = false;
    const COPIED: bool = true;
    unsafe fn rows(x: Rows, k: usize, rows: usize, from: usize, n: usize, to: *mut f32) -> Broadcast<f32> {
        let first = x.ptr.cast::<half::bf16>().wrapping_add(2 * from);
        // A last step without a second one has a 0 beside it, and other rows must be whole pairs away.
        let steps = (2 * n).min(k - 2 * from);
        if steps == 2 * n && (x.row_stride % 2 == 0 || rows == 1) {
            return Broadcast { ptr: first.cast(), row: x.row_stride / 2, step: 1 };
        }
        for r in 0..rows {
            let row = first.wrapping_offset(r as isize * x.row_stride);
            // SAFETY: promised by the caller.
            unsafe { <Paired as Packing<S, half::bf16>>::load_query(row, 1, steps, false, to.add(r * n)) };
        }
        Broadcast { ptr: to, row: n as isize, step: 1 }
    }
}

/// Rows to the accumulation dtype, one after the other.
struct WidenRows<S: Simd, T> {
    src: *const T,
    stride: isize,
    rows: usize,
    n: usize,
    to: *mut S::Elem,
}

impl<S: Simd, T: Storage<S>> Part<S> for WidenRows<S, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        for r in 0..self.rows {
            let row = self.src.wrapping_offset(r as isize * self.stride);
            // SAFETY: the caller vouches for rows of n elements on both sides.
            unsafe { load_row::<S, T>(row, 1, self.n, self.to.add(r * self.n)) };
        }
    }
}

/// `rows` rows of `b` over `lanes` lanes, in blocks, times `panels` panels: to the first sums, or onto those that are there.
pub(crate) struct Blocks<S: Simd, M: Lanes<S>> {
    pub(crate) rows: usize,
    pub(crate) lanes: usize,
    pub(crate) b: Broadcast<S::Elem>,
    pub(crate) panels: usize,
    pub(crate) w: *const M::Lane,
    pub(crate) panel_lanes: usize,
    pub(crate) y: Place<S::Elem>,
    pub(crate) first: bool,
}

impl<S: Simd, M: Lanes<S>> Part<S> for Blocks<S, M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Blocks { rows, lanes, b, panels, w, panel_lanes, y, first } = self;
        let width = S::Q_VECS * S::LANES;
        for p in 0..panels {
            // SAFETY: the caller vouches for all panels, and for as many columns of y.
            let (w, y) = unsafe { (w.add(p * panel_lanes), Place { ptr: y.ptr.add(p * width), ..y }) };
            let mut t = 0;
            loop {
                let n = (lanes - t).min(BLOCK);
                let onto = if first && t == 0 { Onto::Nothing } else { Onto::Sum };
                let mut r = 0;
                while r < rows {
                    let take = micro_rows::<S, 2>(rows - r);
                    // SAFETY: rows r..r + take are below `rows`, lanes t..t + n below `lanes`.
                    unsafe {
                        let b = Broadcast { ptr: b.ptr.wrapping_offset(r as isize * b.row + t as isize), ..b };
                        let y = Place { ptr: y.ptr.add(r * y.row), ..y };
                        tile::<S, M, 2, false>(take, n, w.add(t * width), b, y, onto);
                    }
                    r += take;
                }
                t += n;
                if t >= lanes {
                    break;
                }
            }
        }
    }
}

/// One row over all its lanes, in blocks, times `PANELS` panels at a time: as many sums as hide the latency of a product, and
/// as many streams of memory. The sums are those of [`Blocks`], bit for bit.
pub(crate) struct OneRow<S: Simd, M: Lanes<S>> {
    pub(crate) lanes: usize,
    pub(crate) b: *const S::Elem,
    pub(crate) panels: usize,
    pub(crate) w: *const M::Lane,
    pub(crate) panel_lanes: usize,
    pub(crate) y: *mut S::Elem,
}

/// Panels that one row is multiplied with at a time. Of memory beyond the caches (1×2048×5632, one core of Zen 4, 2026-11) four are
/// read at 87 to 102 % of the rate of a plain sum, one at 55 to 100 %; asking for lines 1 KiB ahead takes a tenth off.
const PANELS: usize = 4;

impl<S: Simd, M: Lanes<S>> Part<S> for OneRow<S, M> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let OneRow { lanes, b, panels, w, panel_lanes, y } = self;
        let width = S::Q_VECS * S::LANES;
        let mut p = 0;
        // SAFETY: the caller vouches for all panels, for the lanes of b, and for as many columns of y.
        unsafe {
            while p + PANELS <= panels {
                one_row::<S, M, PANELS>(lanes, b, w.add(p * panel_lanes), panel_lanes, y.add(p * width));
                p += PANELS;
            }
            while p < panels {
                one_row::<S, M, 1>(lanes, b, w.add(p * panel_lanes), panel_lanes, y.add(p * width));
                p += 1;
            }
        }
    }
}

/// The sums of one row with `P` panels.
#[inline(always)]
unsafe fn one_row<S: Simd, M: Lanes<S>, const P: usize>(
    lanes: usize,
    b: *const S::Elem,
    w: *const M::Lane,
    panel_lanes: usize,
    y: *mut S::Elem,
) {
    let width = S::Q_VECS * S::LANES;
    let mut from = 0;
    loop {
        let end = (from + BLOCK).min(lanes);
        // SAFETY: the caller vouches for `lanes` lanes of b and of each panel, and for the panels' columns of y.
        unsafe {
            let mut sums = [[S::splat(S::Elem::ZERO); 2]; P];
            for t in from..end {
                // Pairs of bf16 lie at multiples of 2 bytes.
                let b = S::splat(b.add(t).read_unaligned());
                for (p, sums) in sums.iter_mut().enumerate() {
                    let w = w.add(p * panel_lanes + t * width);
                    sums[0] = M::accumulate(b, M::load(w), sums[0]);
                    sums[1] = M::accumulate(b, M::load(w.add(S::LANES)), sums[1]);
                }
            }
            for (p, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let y = y.add(p * width + v * S::LANES);
                    S::store(y, if from == 0 { sum } else { S::add(S::load(y), sum) });
                }
            }
        }
        from = end;
        if from >= lanes {
            break;
        }
    }
}

/// Rows of sums to rows of the output, rounded to its dtype.
struct Store<S: Simd, T> {
    sizes: [usize; 2],
    from: Place<S::Elem>,
    to: *mut T,
    stride: isize,
}

impl<S: Simd, T: Storage<S>> Part<S> for Store<S, T> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Store { sizes: [rows, columns], from, to, stride } = self;
        for r in 0..rows {
            let to = to.wrapping_offset(r as isize * stride);
            // SAFETY: the caller vouches for rows of so many columns on both sides.
            unsafe {
                let from = from.ptr.add(r * from.row);
                let mut c = 0;
                while c + S::LANES <= columns {
                    T::store(to.add(c), S::load(from.add(c)));
                    c += S::LANES;
                }
                while c < columns {
                    *to.add(c) = T::narrow(*from.add(c));
                    c += 1;
                }
            }
        }
    }
}

/// Elements of the accumulation dtype: the tile, a widened block of a panel, rows of x.
fn parts<S: Simd, W: Weights<S>>(rows: usize, k: usize) -> Option<[usize; 3]> {
    let is_many = rows > S::ROWS;
    let rows = rows.checked_next_multiple_of(W::ROW_RUN)?;
    let tile = rows.checked_mul(SUM_ROW)?;
    let panel = if W::WIDENED { BLOCK * S::Q_VECS * S::LANES } else { 0 };
    let lanes = k.div_ceil(W::STEPS).checked_next_multiple_of(W::LANE_RUN)?;
    let lanes = if is_many { lanes.min(BLOCK) } else { lanes };
    let x = if W::COPIED { rows.checked_mul(lanes)?.checked_next_multiple_of(16)? } else { 0 };
    Some([tile, panel, x])
}

/// The scratch memory for items of `rows` rows.
pub(crate) fn scratch_bytes<S: Simd, W: Weights<S>>(rows: usize, k: usize) -> Option<usize> {
    let parts = parts::<S, W>(rows, k)?;
    let sum = parts.into_iter().try_fold(0usize, usize::checked_add)?;
    sum.checked_mul(size_of::<S::Elem>()).filter(|&bytes| isize::try_from(bytes).is_ok())
}

/// Computes an item.
///
/// # Safety
/// As `Gemm::run_item`; the instruction set is present.
pub(crate) unsafe fn item<S: Simd, W: Weights<S>>(job: &Job<'_>) {
    let rows = job.rows.len();
    let y = job.scratch.cast::<S::Elem>();
    let [tile, panel, _] = parts::<S, W>(rows, job.k).expect("the scratch memory has this size");
    // SAFETY: the scratch memory has these parts.
    let (widened, copied) = unsafe { (y.add(tile), y.add(tile + panel)) };
    let size = size_of::<W::Stored>() as isize;
    let x = Rows { ptr: job.x.ptr.wrapping_offset(job.rows.start as isize * job.x.row_stride * size), ..job.x };
    let lanes = job.k.div_ceil(W::STEPS).next_multiple_of(W::LANE_RUN);
    let few = rows <= S::ROWS;
    // SAFETY: promised by the caller; copied has room for as many lanes.
    let whole = few.then(|| unsafe { W::rows(x, job.k, rows, 0, lanes, copied) });
    let width = S::Q_VECS * S::LANES;
    for column in job.columns.clone().step_by(TILE_COLUMNS) {
        let columns = (job.columns.end - column).min(TILE_COLUMNS);
        let panels = columns.div_ceil(width);
        let y = Place { ptr: y, row: SUM_ROW };
        // SAFETY: the panels of these columns are there, all in one piece.
        let w = unsafe { job.w.add(column / width * job.panel_bytes).cast::<W::Lane>() };
        let panel_lanes = lanes * width;
        // SAFETY: promised by the caller.
        unsafe {
            match whole {
                Some(b) if rows == 1 => {
                    W::multiply_row(OneRow::<S, W> { lanes, b: b.ptr, panels, w, panel_lanes, y: y.ptr });
                }
                Some(b) => W::multiply(Blocks::<S, W> { rows, lanes, b, panels, w, panel_lanes, y, first: true }),
                None => many::<S, W>(job.k, [rows, panels], x, w, y, [widened, copied]),
            }
            match job.out {
                Output::Rows { ptr, row_stride } => {
                    let offset = job.rows.start as isize * row_stride + column as isize;
                    let to = ptr.cast::<W::Stored>().wrapping_offset(offset);
                    S::apart(Store { sizes: [rows, columns], from: y, to, stride: row_stride });
                }
                Output::Epilogue(epilogue) => {
                    epilogue.tile(job.rows.clone(), column..column + columns, y.ptr.cast(), y.row);
                }
            }
        }
    }
}

/// The sums of many rows: block after block of the contraction, so that x stays in the cache.
#[inline(always)]
unsafe fn many<S: Simd, W: Weights<S>>(
    k: usize,
    [rows, panels]: [usize; 2],
    x: Rows,
    w: *const W::Lane,
    y: Place<S::Elem>,
    [widened, copied]: [*mut S::Elem; 2],
) {
    let width = S::Q_VECS * S::LANES;
    let all = k.div_ceil(W::STEPS).next_multiple_of(W::LANE_RUN);
    let panel_lanes = all * width;
    let mut t = 0;
    loop {
        let lanes = (all - t).min(BLOCK);
        let first = t == 0;
        // SAFETY: lanes t..t + lanes are below `all`; the rest is the caller's promise.
        unsafe {
            let b = W::rows(x, k, rows, t, lanes, copied);
            let w = w.add(t * width);
            if W::WIDENED {
                for p in 0..panels {
                    let src = w.add(p * panel_lanes).cast::<W::Stored>();
                    S::apart(WidenRows { src, stride: 0, rows: 1, n: lanes * width, to: widened });
                    let y = Place { ptr: y.ptr.add(p * width), ..y };
                    let w = widened.cast_const();
                    S::apart(Blocks::<S, Single> { rows, lanes, b, panels: 1, w, panel_lanes: 0, y, first });
                }
            } else {
                W::multiply(Blocks::<S, W> { rows, lanes, b, panels, w, panel_lanes, y, first });
            }
        }
        t += lanes;
        if t >= all {
            break;
        }
    }
}
