//! The one place where a mask tensor is read.
//!
//! A row of the mask becomes biases in the accumulation dtype: `True` is 0, `False` is −inf, a number is itself. Only −inf
//! masks. Read in place through any strides; a mask that is the same for every query of a tile is read once. A tile wants
//! its queries side by side, the mask has its keys so: where they are neighbours, squares are read by rows and transposed,
//! booleans as bytes. Element by element that was 25 to 60 % of a run at head_dim 64 (Zen 4, 2026-11).

use rapt_core::DType;

use super::simd::{Part, Real, Simd};
use crate::problem::{Input, Row};

/// What a stretch of the mask does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Effect {
    /// Some key is masked.
    pub(crate) masks: bool,
    /// Some key is not masked.
    pub(crate) attends: bool,
    /// Some bias is neither 0 nor −inf.
    pub(crate) adds: bool,
}

impl Effect {
    const NOTHING: Effect = Effect { masks: false, attends: false, adds: false };

    fn and(self, other: Effect) -> Effect {
        Effect { masks: self.masks | other.masks, attends: self.attends | other.attends, adds: self.adds | other.adds }
    }

    /// No query sees any key.
    pub(crate) fn is_empty(self) -> bool {
        !self.attends
    }
}

/// Biases of keys `j0..j0 + n` for one row, to `dst[0], dst[step], …`.
#[inline(always)]
pub(crate) unsafe fn read_row<E: Real>(
    mask: &Input<4>,
    row: Row,
    (j0, n): (usize, usize),
    dst: *mut E,
    step: usize,
) -> Effect {
    let first = mask.at([row.batch, row.head, row.i, j0]);
    let stride = mask.strides[3] * mask.size;
    // SAFETY: keys j0..j0 + n are inside the mask; the caller vouches for n elements of dst.
    unsafe {
        if mask.dtype == DType::Bool {
            let (mut masks, mut attends) = (false, false);
            for j in 0..n {
                let attend = *first.wrapping_offset(j as isize * stride) != 0;
                masks |= !attend;
                attends |= attend;
                *dst.add(j * step) = if attend { E::ZERO } else { E::NEG_INFINITY };
            }
            return Effect { masks, attends, adds: false };
        }
        let mut effect = Effect::NOTHING;
        for j in 0..n {
            let bias = E::load_as(mask.dtype, first.wrapping_offset(j as isize * stride));
            let masked = bias == E::NEG_INFINITY;
            effect.masks |= masked;
            effect.attends |= !masked;
            effect.adds |= !masked && bias != E::ZERO;
            *dst.add(j * step) = bias;
        }
        effect
    }
}

/// Whether the mask lets a row attend a key.
pub(crate) unsafe fn attends<E: Real>(mask: &Input<4>, row: Row, j: usize) -> bool {
    let at = mask.at([row.batch, row.head, row.i, j]);
    // SAFETY: an element of the mask.
    unsafe { if mask.dtype == DType::Bool { *at != 0 } else { E::load_as(mask.dtype, at) != E::NEG_INFINITY } }
}

/// What the mask does to keys `j0..j0 + n` of one row of a boolean mask, without writing anything.
#[inline(always)]
unsafe fn scan_row(mask: &Input<4>, row: Row, (j0, n): (usize, usize)) -> Effect {
    // SAFETY: keys j0..j0 + n are inside the mask; with stride 1 they are n consecutive bytes.
    let bytes = unsafe { std::slice::from_raw_parts(mask.at([row.batch, row.head, row.i, j0]), n) };
    let (eights, rest) = bytes.as_chunks::<8>();
    let (mut masks, mut attends) = (0, 0);
    for eight in eights {
        let eight = u64::from_ne_bytes(*eight);
        // Not 0 if one of the bytes is.
        masks |= eight.wrapping_sub(0x0101_0101_0101_0101) & !eight & 0x8080_8080_8080_8080;
        attends |= eight;
    }
    let mut effect = Effect { masks: masks != 0, attends: attends != 0, adds: false };
    for &byte in rest {
        effect.masks |= byte == 0;
        effect.attends |= byte != 0;
    }
    effect
}

/// Bytes in a square of booleans: rows and columns.
const SQUARE: usize = 8;

/// The most lanes of a tile, and the most lanes of a vector.
const MAX_WIDTH: usize = 32;
const MAX_LANES: usize = 16;

/// Biases of some keys for the queries of a tile, to `bias[key][lane]`. Lanes without a query get the biases of some other lane.
/// The buffer is written only if the answer is neither empty nor without effect.
pub(crate) struct ReadTile<'a, S: Simd, const V: usize> {
    pub(crate) mask: &'a Input<4>,
    pub(crate) rows: &'a [Row],
    /// The first key, and how many there are.
    pub(crate) keys: (usize, usize),
    pub(crate) bias: *mut S::Elem,
}

impl<S: Simd, const V: usize> Part<S> for ReadTile<'_, S, V> {
    type Output = Effect;
    #[inline(always)]
    unsafe fn run(self) -> Effect {
        let ReadTile { mask, rows, keys: (j0, n), bias } = self;
        let width = V * S::LANES;
        let one_head = rows.iter().all(|row| row.head == rows[0].head);
        // SAFETY: as for `read_row`; bias has n rows of `width`.
        unsafe {
            if mask.strides[2] == 0 && (one_head || mask.strides[1] == 0) {
                if mask.dtype == DType::Bool && mask.strides[3] == 1 {
                    let effect = scan_row(mask, rows[0], (j0, n));
                    if !effect.masks || effect.is_empty() {
                        return effect;
                    }
                }
                let effect = read_row(mask, rows[0], (j0, n), bias, width);
                for j in 0..n {
                    let all = S::splat(*bias.add(j * width));
                    for v in 0..V {
                        S::store(bias.add(j * width + v * S::LANES), all);
                    }
                }
                return effect;
            }
            let neighbours = mask.strides[3] == 1;
            let lanes = lanes_of(mask, rows, j0);
            if mask.dtype == DType::Bool && neighbours {
                let effect = scan_rows(mask, rows, (j0, n));
                if !effect.masks || effect.is_empty() {
                    return effect;
                }
                if n >= SQUARE {
                    let (zero, masked) = (S::splat(S::Elem::ZERO), S::splat(S::Elem::NEG_INFINITY));
                    let mut turned = [[0; MAX_WIDTH]; SQUARE];
                    for j in squares(n, SQUARE) {
                        turn_bools::<S, V>(&lanes, j, &mut turned);
                        for (key, bytes) in turned.iter().enumerate() {
                            for v in (0..width).step_by(S::LANES) {
                                let falses = S::falses(bytes.as_ptr().add(v));
                                S::store(bias.add((j + key) * width + v), S::select(falses, masked, zero));
                            }
                        }
                    }
                    return effect;
                }
            } else if neighbours && n >= S::LANES {
                let (mut square, dtype) = ([S::Elem::ZERO; MAX_LANES * MAX_LANES], mask.dtype);
                let (mut masked, mut total) = (S::splat(S::Elem::ZERO), 0);
                for j in squares(n, S::LANES) {
                    for v in 0..V {
                        let lanes = &lanes[v * S::LANES..][..S::LANES];
                        let to = bias.add(j * width + v * S::LANES);
                        bias_square::<S>(dtype, lanes, j, &mut square, to, width, &mut masked);
                        total += S::LANES * S::LANES;
                    }
                }
                let masked = S::reduce_add(masked);
                let attends = masked < S::Elem::from_i64(total as i64);
                // Adding zeros changes nothing: they are not told apart.
                return Effect { masks: masked > S::Elem::ZERO, attends, adds: attends };
            }
            let mut effect = Effect::NOTHING;
            for lane in 0..width {
                let row = rows[lane.min(rows.len() - 1)];
                effect = effect.and(read_row(mask, row, (j0, n), bias.add(lane), width));
            }
            effect
        }
    }
}

/// Where squares of `size` begin that cover `0..n`, `n ≥ size`: the last one may overlap the one before it.
#[inline(always)]
fn squares(n: usize, size: usize) -> impl Iterator<Item = usize> {
    (0..n.div_ceil(size)).map(move |square| (square * size).min(n - size))
}

/// Where the rows of a tile begin in the mask; lanes without a query get the address of some other lane.
#[inline(always)]
fn lanes_of(mask: &Input<4>, rows: &[Row], j0: usize) -> [*const u8; MAX_WIDTH] {
    let mut lanes = [std::ptr::null(); MAX_WIDTH];
    for (lane, at) in lanes.iter_mut().enumerate() {
        let row = rows[lane.min(rows.len() - 1)];
        *at = mask.at([row.batch, row.head, row.i, j0]);
    }
    lanes
}

/// Whether [`ScanTile`] and [`MaskTile`] serve keys of which there are `n`.
#[inline(always)]
pub(crate) fn is_plain(mask: &Input<4>, n: usize) -> bool {
    mask.dtype == DType::Bool && mask.strides[3] == 1 && mask.strides[2] != 0 && n >= SQUARE
}

/// What a boolean mask with neighbouring keys does to some keys of a tile.
pub(crate) struct ScanTile<'a> {
    pub(crate) mask: &'a Input<4>,
    pub(crate) rows: &'a [Row],
    /// The first key, and how many there are.
    pub(crate) keys: (usize, usize),
}

impl<S: Simd> Part<S> for ScanTile<'_> {
    type Output = Effect;
    #[inline(always)]
    unsafe fn run(self) -> Effect {
        // SAFETY: as of the caller.
        unsafe { scan_rows(self.mask, self.rows, self.keys) }
    }
}

/// What such a mask does to keys `j0..j0 + n` of these rows.
#[inline(always)]
unsafe fn scan_rows(mask: &Input<4>, rows: &[Row], (j0, n): (usize, usize)) -> Effect {
    let mut effect = Effect::NOTHING;
    for &row in rows {
        // SAFETY: as of the caller.
        effect = effect.and(unsafe { scan_row(mask, row, (j0, n)) });
    }
    effect
}

/// Puts such a mask on scores `x[key][lane]`, with no biases between: −inf where it is false.
pub(crate) struct MaskTile<'a, S: Simd, const V: usize> {
    pub(crate) mask: &'a Input<4>,
    pub(crate) rows: &'a [Row],
    /// The first key, and how many there are.
    pub(crate) keys: (usize, usize),
    pub(crate) x: *mut S::Elem,
}

impl<S: Simd, const V: usize> Part<S> for MaskTile<'_, S, V> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let MaskTile { mask, rows, keys: (j0, n), x } = self;
        let width = V * S::LANES;
        let lanes = lanes_of(mask, rows, j0);
        let mut turned = [[0; MAX_WIDTH]; SQUARE];
        // SAFETY: x has n rows of `width`; n ≥ SQUARE.
        unsafe {
            let masked = S::splat(S::Elem::NEG_INFINITY);
            for j in squares(n, SQUARE) {
                turn_bools::<S, V>(&lanes, j, &mut turned);
                for (key, bytes) in turned.iter().enumerate() {
                    for v in (0..width).step_by(S::LANES) {
                        let at = x.add((j + key) * width + v);
                        S::store(at, S::select(S::falses(bytes.as_ptr().add(v)), masked, S::load(at)));
                    }
                }
            }
        }
    }
}

/// Eight keys from `j` on of a boolean mask for every query of a tile.
#[inline(always)]
unsafe fn turn_bools<S: Simd, const V: usize>(
    lanes: &[*const u8; MAX_WIDTH],
    j: usize,
    turned: &mut [[u8; MAX_WIDTH]; SQUARE],
) {
    for lane in (0..V * S::LANES).step_by(SQUARE) {
        let mut rows = [std::ptr::null(); SQUARE];
        for (row, at) in rows.iter_mut().enumerate() {
            *at = lanes[lane + row].wrapping_add(j);
        }
        // SAFETY: the lanes of a tile, a multiple of 8, have 8 bytes from j on.
        unsafe { S::transpose_bytes(rows, turned.as_mut_ptr().cast::<u8>().add(lane), MAX_WIDTH) };
    }
}

/// A square of biases, transposed; `masked` counts what is −inf.
#[inline(always)]
unsafe fn bias_square<S: Simd>(
    dtype: DType,
    lanes: &[*const u8],
    j: usize,
    square: &mut [S::Elem; MAX_LANES * MAX_LANES],
    to: *mut S::Elem,
    width: usize,
    masked: &mut S::V,
) {
    // SAFETY: each lane has LANES biases from j on; `to` has LANES rows of `width`.
    unsafe {
        let (zero, one) = (S::splat(S::Elem::ZERO), S::splat(S::Elem::ONE));
        for (lane, from) in lanes.iter().enumerate() {
            let x = load_biases::<S>(dtype, from.wrapping_add(j * dtype.size_bytes()));
            let is_masked = S::eq(x, S::splat(S::Elem::NEG_INFINITY));
            *masked = S::add(*masked, S::select(is_masked, one, zero));
            S::store(square.as_mut_ptr().add(lane * S::LANES), x);
        }
        S::transpose(square.as_ptr(), S::LANES, to, width);
    }
}

/// A vector of biases of consecutive keys.
#[inline(always)]
unsafe fn load_biases<S: Simd>(dtype: DType, ptr: *const u8) -> S::V {
    // SAFETY: the caller vouches for LANES elements.
    unsafe {
        match (dtype, size_of::<S::Elem>()) {
            (DType::F32, 4) | (DType::F64, 8) => S::load(ptr.cast()),
            (DType::F16, 4) => S::load_f16(ptr.cast()),
            (DType::BF16, 4) => S::load_bf16(ptr.cast()),
            _ => {
                let mut x = [S::Elem::ZERO; MAX_LANES];
                for (lane, x) in x.iter_mut().enumerate().take(S::LANES) {
                    *x = S::Elem::load_as(dtype, ptr.wrapping_add(lane * dtype.size_bytes()));
                }
                S::load(x.as_ptr())
            }
        }
    }
}
