//! The one place where a mask tensor is read.
//!
//! A row of the mask becomes biases in the accumulation dtype: `True` is 0, `False` is −inf, a number is itself. Only −inf
//! masks. Read in place through any strides; a mask that is the same for every query of a tile is read once.

use rapt_core::DType;

use super::simd::{Real, Simd};
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
    let stride = mask.strides[3] * mask.dtype.size_bytes() as isize;
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

/// What the mask does to keys `j0..j0 + n` of one row of a boolean mask, without writing anything.
#[inline(always)]
unsafe fn scan_row(mask: &Input<4>, row: Row, (j0, n): (usize, usize)) -> Effect {
    // SAFETY: keys j0..j0 + n are inside the mask; with stride 1 they are n consecutive bytes.
    let bytes = unsafe { std::slice::from_raw_parts(mask.at([row.batch, row.head, row.i, j0]), n) };
    let zeros = bytes.iter().map(|&byte| usize::from(byte == 0)).sum::<usize>();
    Effect { masks: zeros > 0, attends: zeros < n, adds: false }
}

/// Biases of keys `j0..j0 + n` for the queries of a tile, to `bias[key][lane]`. Lanes without a query get the biases of
/// some other lane. The buffer is written only if the answer is neither empty nor without effect.
#[inline(always)]
pub(crate) unsafe fn read_tile<S: Simd>(
    mask: &Input<4>,
    rows: &[Row],
    (j0, n): (usize, usize),
    bias: *mut S::Elem,
) -> Effect {
    let width = S::Q_VECS * S::LANES;
    let one_head = rows.iter().all(|row| row.head == rows[0].head);
    // SAFETY: as for `read_row`; bias has n rows of `width`.
    unsafe {
        if mask.strides[2] == 0 && (one_head || mask.strides[1] == 0) {
            let effect = read_row(mask, rows[0], (j0, n), bias, width);
            for j in 0..n {
                let all = S::splat(*bias.add(j * width));
                for v in 0..S::Q_VECS {
                    S::store(bias.add(j * width + v * S::LANES), all);
                }
            }
            return effect;
        }
        if mask.dtype == DType::Bool && mask.strides[3] == 1 {
            let effect = rows.iter().map(|&row| scan_row(mask, row, (j0, n))).fold(Effect::NOTHING, Effect::and);
            if !effect.masks || effect.is_empty() {
                return effect;
            }
        }
        let mut effect = Effect::NOTHING;
        for lane in 0..width {
            let row = rows[lane.min(rows.len() - 1)];
            effect = effect.and(read_row(mask, row, (j0, n), bias.add(lane), width));
        }
        effect
    }
}
