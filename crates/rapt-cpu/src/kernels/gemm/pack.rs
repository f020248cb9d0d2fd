//! Weights into panels, in their storage dtype. The order of a panel stands in gemm/packed.rs.

use super::Weights;
use crate::gemm::product::PackJob;
use crate::kernels::simd::Simd;

/// Packs panels.
///
/// # Safety
/// As `PackedLayout::pack_panels`; the instruction set is present.
pub(crate) unsafe fn panels<S: Simd, W: Weights<S>>(job: &PackJob) {
    let width = S::Q_VECS * S::LANES;
    let size = size_of::<W::Stored>();
    let lanes = job.k.div_ceil(W::STEPS);
    for panel in job.panels.clone() {
        // SAFETY: the caller vouches for all panels, and for the elements of their columns.
        unsafe {
            let to = job.to.add(panel * job.panel_bytes);
            to.write_bytes(0, job.panel_bytes);
            let columns = (job.n - panel * width).min(width);
            let first = panel * width;
            for lane in 0..lanes {
                for column in 0..columns {
                    for step in 0..W::STEPS.min(job.k - lane * W::STEPS) {
                        let k = (lane * W::STEPS + step) as isize;
                        let offset = k * job.w.k_stride + (first + column) as isize * job.w.n_stride;
                        let from = job.w.ptr.wrapping_offset(offset * size as isize).cast::<W::Stored>();
                        let at = (lane * width + column) * W::STEPS + step;
                        to.cast::<W::Stored>().add(at).write(*from);
                    }
                }
            }
        }
    }
}
