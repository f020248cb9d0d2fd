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
                if mask.dtype != DType::Bool && mask.strides[3] == 1 && n >= S::LANES {
                    let first = mask.at([rows[0].batch, rows[0].head, rows[0].i, j0]);
                    return biases::<S, V>(Begin::All(first), n, mask.dtype, bias);
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
                return biases::<S, V>(Begin::Each(&lanes), n, mask.dtype, bias);
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

/// Where the biases of a tile's lanes begin: one place for all of them, or one for each.
#[derive(Clone, Copy)]
enum Begin<'a> {
    All(*const u8),
    Each(&'a [*const u8; MAX_WIDTH]),
}

/// How a vector of biases of consecutive keys is loaded: in the accumulation dtype, in float16, in bfloat16, or one by one.
const OWN: u8 = 0;
const HALVES: u8 = 1;
const BRAINS: u8 = 2;
const OTHERS: u8 = 3;

/// Whether 16-bit biases are loaded as vectors: a module for browsers is to be small.
const BY_VECTORS: bool = !cfg!(target_arch = "wasm32");

/// Biases of `n` keys, at least a vector, to `bias[key][lane]`. Their dtype is asked here, and not at each load.
#[inline(always)]
unsafe fn biases<S: Simd, const V: usize>(begin: Begin<'_>, n: usize, dtype: DType, bias: *mut S::Elem) -> Effect {
    // SAFETY: as of the caller.
    unsafe {
        match (dtype, size_of::<S::Elem>()) {
            (DType::F32, 4) | (DType::F64, 8) => biases_of::<S, OWN, V>(begin, n, dtype, bias),
            (DType::F16, 4) if BY_VECTORS => biases_of::<S, HALVES, V>(begin, n, dtype, bias),
            (DType::BF16, 4) if BY_VECTORS => biases_of::<S, BRAINS, V>(begin, n, dtype, bias),
            _ => biases_of::<S, OTHERS, V>(begin, n, dtype, bias),
        }
    }
}

#[inline(always)]
unsafe fn biases_of<S: Simd, const KIND: u8, const V: usize>(
    begin: Begin<'_>,
    n: usize,
    dtype: DType,
    bias: *mut S::Elem,
) -> Effect {
    // SAFETY: as of the caller.
    unsafe {
        match begin {
            Begin::All(first) => spread_biases::<S, KIND, V>(first, n, dtype, bias),
            Begin::Each(lanes) => turn_biases::<S, KIND, V>(lanes, n, dtype, bias),
        }
    }
}

/// A vector of biases of consecutive keys.
#[inline(always)]
unsafe fn load_biases<S: Simd, const KIND: u8>(dtype: DType, ptr: *const u8) -> S::V {
    // SAFETY: the caller vouches for LANES elements.
    unsafe {
        match KIND {
            OWN => S::load(ptr.cast()),
            HALVES => S::load_f16(ptr.cast()),
            BRAINS => S::load_bf16(ptr.cast()),
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

/// Biases of `n` keys from `first` on, the same for every lane.
#[inline(always)]
unsafe fn spread_biases<S: Simd, const KIND: u8, const V: usize>(
    first: *const u8,
    n: usize,
    dtype: DType,
    bias: *mut S::Elem,
) -> Effect {
    let mut keys = [S::Elem::ZERO; MAX_LANES];
    let (width, mut total) = (V * S::LANES, 0);
    // SAFETY: there are n biases; `bias` has n rows of `width`.
    unsafe {
        let (zero, one, lowest) = (S::splat(S::Elem::ZERO), S::splat(S::Elem::ONE), S::splat(S::Elem::NEG_INFINITY));
        // How many are −inf, and how many 0.
        let (mut masked, mut nothing) = (zero, zero);
        for j in squares(n, S::LANES) {
            let x = load_biases::<S, KIND>(dtype, first.wrapping_add(j * dtype.size_bytes()));
            masked = S::add(masked, S::select(S::eq(x, lowest), one, zero));
            nothing = S::add(nothing, S::select(S::eq(x, zero), one, zero));
            S::store(keys.as_mut_ptr(), x);
            for (key, x) in keys.iter().enumerate().take(S::LANES) {
                let all = S::splat(*x);
                for v in (0..width).step_by(S::LANES) {
                    S::store(bias.add((j + key) * width + v), all);
                }
            }
            total += S::LANES;
        }
        let (masked, total) = (S::reduce_add(masked), S::Elem::from_i64(total as i64));
        let adds = masked + S::reduce_add(nothing) < total;
        Effect { masks: masked > S::Elem::ZERO, attends: masked < total, adds }
    }
}

/// Biases of `n` keys, square by square, transposed.
#[inline(always)]
unsafe fn turn_biases<S: Simd, const KIND: u8, const V: usize>(
    lanes: &[*const u8; MAX_WIDTH],
    n: usize,
    dtype: DType,
    bias: *mut S::Elem,
) -> Effect {
    let mut square = [S::Elem::ZERO; MAX_LANES * MAX_LANES];
    let (width, size, mut total) = (V * S::LANES, dtype.size_bytes(), 0);
    // SAFETY: each lane has n biases; `bias` has n rows of `width`.
    unsafe {
        let (zero, one, lowest) = (S::splat(S::Elem::ZERO), S::splat(S::Elem::ONE), S::splat(S::Elem::NEG_INFINITY));
        // How many are −inf.
        let mut masked = zero;
        for j in squares(n, S::LANES) {
            for v in (0..width).step_by(S::LANES) {
                for lane in 0..S::LANES {
                    let from = lanes[v + lane].wrapping_add(j * size);
                    // Rows lie further apart than the processor's own prefetchers follow.
                    S::prefetch(from.wrapping_add(2 * S::LANES * size));
                    let x = load_biases::<S, KIND>(dtype, from);
                    masked = S::add(masked, S::select(S::eq(x, lowest), one, zero));
                    S::store(square.as_mut_ptr().add(lane * S::LANES), x);
                }
                S::transpose(square.as_ptr(), S::LANES, bias.add(j * width + v), width);
                total += S::LANES * S::LANES;
            }
        }
        let masked = S::reduce_add(masked);
        let attends = masked < S::Elem::from_i64(total as i64);
        // Adding zeros changes nothing: they are not told apart.
        Effect { masks: masked > S::Elem::ZERO, attends, adds: attends }
    }
}
