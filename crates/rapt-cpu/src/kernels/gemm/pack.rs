//! Weights into panels, in their storage dtype. The order of a panel stands in gemm/packed.rs.
//!
//! Where the steps of a column follow one another, as in the weight of a linear layer, squares of lanes are transposed in
//! registers if a lane is as wide as the accumulation dtype (a pair of bf16 is). Where the columns of a step do, they are copied.
//! What is left, and any other strides, goes element by element.

use super::Weights;
use crate::gemm::product::{PackJob, Strided};
use crate::kernels::simd::{Part, Simd};

/// Packs panels.
///
/// # Safety
/// As `PackedLayout::pack_panels`; the instruction set is present.
pub(crate) unsafe fn panels<S: Simd, W: Weights<S>>(job: &PackJob) {
    let width = S::Q_VECS * S::LANES;
    let size = size_of::<W::Stored>();
    for panel in job.panels.clone() {
        let first = panel * width;
        let offset = first as isize * job.w.n_stride * size as isize;
        let w = Strided { ptr: job.w.ptr.wrapping_offset(offset), ..job.w };
        let columns = (job.n - first).min(width);
        // SAFETY: the caller vouches for all panels, and for the elements of their columns.
        unsafe {
            let to = job.to.add(panel * job.panel_bytes);
            // What no element is written to is 0.
            if columns < width || !job.k.is_multiple_of(W::STEPS * W::LANE_RUN) {
                to.write_bytes(0, job.panel_bytes);
            }
            let row_lanes = usize::try_from(w.n_stride).unwrap_or(0) / W::STEPS;
            let has_lanes = w.k_stride == 1 && (row_lanes * W::STEPS) as isize == w.n_stride;
            let is_whole = size_of::<W::Lane>() == size_of::<S::Elem>() && columns == width;
            let mut done = 0;
            if has_lanes && is_whole {
                done = job.k / W::STEPS / S::LANES * S::LANES;
                S::apart(Transpose { from: w.ptr.cast(), row_lanes, lanes: done, to: to.cast() });
            }
            if W::STEPS == 1 && w.n_stride == 1 && done == 0 {
                let row_bytes = w.k_stride * size as isize;
                for k in 0..job.k {
                    let from = w.ptr.wrapping_offset(k as isize * row_bytes);
                    std::ptr::copy_nonoverlapping(from, to.add(k * width * size), columns * size);
                }
            } else {
                elements::<S, W>(w, columns, done * W::STEPS..job.k, to.cast());
            }
        }
    }
}

/// Steps `steps` of `columns` columns, one by one, a few steps of all columns at a time: so long are their cache lines kept.
unsafe fn elements<S: Simd, W: Weights<S>>(
    w: Strided,
    columns: usize,
    steps: std::ops::Range<usize>,
    to: *mut W::Stored,
) {
    const AT_A_TIME: usize = 8;
    let width = S::Q_VECS * S::LANES;
    for start in steps.clone().step_by(AT_A_TIME) {
        let end = (start + AT_A_TIME).min(steps.end);
        for column in 0..columns {
            let from = w.ptr.cast::<W::Stored>().wrapping_offset(column as isize * w.n_stride);
            for k in start..end {
                let at = (k / W::STEPS * width + column) * W::STEPS + k % W::STEPS;
                // SAFETY: the caller vouches for these elements on both sides.
                unsafe { to.add(at).write(*from.wrapping_offset(k as isize * w.k_stride)) };
            }
        }
    }
}

/// A panel of whole squares of lanes: row `c` of `from` becomes column `c`.
struct Transpose<E> {
    /// Pairs of bf16 lie at multiples of 2 bytes: it is read by vectors there.
    from: *const E,
    row_lanes: usize,
    lanes: usize,
    to: *mut E,
}

impl<S: Simd> Part<S> for Transpose<S::Elem> {
    type Output = ();
    #[inline(always)]
    unsafe fn run(self) {
        let Transpose { from, row_lanes, lanes, to } = self;
        let width = S::Q_VECS * S::LANES;
        // SAFETY: the caller vouches for `width` rows of so many lanes, and for the panel.
        unsafe {
            for lane in (0..lanes).step_by(S::LANES) {
                for column in (0..width).step_by(S::LANES) {
                    // The next panel follows: the processor's own prefetchers do not see that 32 rows, each read piece by piece, are
                    // one piece of memory.
                    let ahead = from.wrapping_add(width * row_lanes + lane * width + column * S::LANES);
                    for line in 0..S::LANES {
                        S::prefetch(ahead.wrapping_add(line * S::LANES).cast());
                    }
                    let from = from.wrapping_add(column * row_lanes + lane);
                    S::transpose(from, row_lanes, to.add(lane * width + column), width);
                }
            }
        }
    }
}
