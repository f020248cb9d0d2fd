//! Codes of a block of keys to panels of quads, and the factors beside them.
//!
//! ```text
//! K   [key][quad of head_dim]          sums [key] = −128 · Σ codes          factors [key], where each has its own
//! V   [quad of keys][dim]
//! ```
//! Zeros stand past the end of a row of K, and in place of the keys that a last quad of V lacks.

use crate::kernels::products::Block;
use crate::kernels::simd::{Part, Simd};
use crate::problem::Source;

/// A factor of K: one that is not finite is NaN, which every score is then.
fn or_nan(factor: f32) -> f32 {
    if factor.is_finite() { factor } else { f32::NAN }
}

/// The factor of all keys of a head.
///
/// # Safety
/// The source is K, of int8 codes, and has the head and at least one key.
#[inline(always)]
pub(super) unsafe fn shared_factor(source: &Source, batch: usize, head: usize) -> f32 {
    // SAFETY: promised by the caller.
    source.scales.map_or(f32::NAN, |scales| or_nan(unsafe { scales.of([batch, head, 0], 0) }.factor))
}

/// See the module.
pub(super) struct PackKeys<'a> {
    pub(super) source: &'a Source,
    pub(super) block: Block,
    pub(super) dim: usize,
    pub(super) panel: *mut i32,
    pub(super) sums: *mut i32,
    /// Where keys have factors of their own.
    pub(super) factors: Option<*mut f32>,
}

impl<S: Simd> Part<S> for PackKeys<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let PackKeys { source, block, dim, panel, sums, factors } = self;
        let (batch, head, j0) = block.first;
        let row_bytes = dim.next_multiple_of(4);
        let (rows, stride) = (source.rows, source.rows.strides[3]);
        for j in 0..block.n {
            let from = rows.at_key([batch, head, j0 + j, 0]);
            let to = panel.wrapping_add(j * (row_bytes / 4)).cast::<u8>();
            // SAFETY: keys j0..j0 + n are inside the tensor; the panel has a row, and the others an element, for each of n.
            unsafe {
                if stride == 1 {
                    std::ptr::copy_nonoverlapping(from, to, dim);
                } else {
                    for d in 0..dim {
                        *to.add(d) = *from.wrapping_offset(d as isize * stride);
                    }
                }
                for d in dim..row_bytes {
                    *to.add(d) = 0;
                }
                let codes = std::slice::from_raw_parts(to.cast::<i8>(), dim);
                *sums.add(j) = codes.iter().map(|&code| i32::from(code)).sum::<i32>().wrapping_mul(-128);
                if let Some((factors, scales)) = factors.zip(source.scales) {
                    *factors.add(j) = or_nan(scales.of([batch, head, j0 + j], 0).factor);
                }
            }
        }
    }
}

/// See the module.
pub(super) struct PackValues<'a> {
    pub(super) source: &'a Source,
    pub(super) block: Block,
    pub(super) dim: usize,
    pub(super) panel: *mut i32,
}

impl<S: Simd> Part<S> for PackValues<'_> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let PackValues { source, block, dim, panel } = self;
        let (batch, head, j0) = block.first;
        let (input, none) = (source.rows, 0u8);
        for (quad, j) in (0..block.n).step_by(4).enumerate() {
            let to = panel.wrapping_add(quad * dim).cast::<u32>();
            let mut rows = [std::ptr::from_ref(&none); 4];
            let mut strides = [0; 4];
            for key in j..block.n.min(j + 4) {
                rows[key - j] = input.at_key([batch, head, j0 + key, 0]);
                strides[key - j] = input.strides[3];
            }
            // SAFETY: keys j0..j0 + n are inside the tensor; the panel has `dim` quads for each four of them.
            unsafe {
                if strides == [1; 4] {
                    let [a, b, c, d] = rows.map(|row| std::slice::from_raw_parts(row, dim));
                    for at in 0..dim {
                        to.add(at).write(u32::from_le_bytes([a[at], b[at], c[at], d[at]]));
                    }
                } else {
                    for at in 0..dim {
                        let byte = |n: usize| *rows[n].wrapping_offset(at as isize * strides[n]);
                        to.add(at).write(u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]));
                    }
                }
            }
        }
    }
}
