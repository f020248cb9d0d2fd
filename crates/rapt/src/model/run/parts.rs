//! Products whose right operand is packed some columns at a time: what a thread packs, it multiplies while it is in the cache.
//!
//! ```text
//! for each part of the columns, on any thread:
//!     scratch ◄── the part of w, packed
//!     for each block of rows of x: rows · scratch, to the result or through what follows
//! ```

use rapt_cpu::gemm::{Output, Rows, Strided as Matrix};
use rapt_cpu::pointwise::Loop;

use super::super::ModelError;
use super::super::plan::{Head, InCache, Place};
use super::{After, Frame, Shared, SharedRows};

impl Frame<'_> {
    pub(super) unsafe fn product_in_parts(
        &self,
        head: &Head,
        parts: &InCache,
        out: Option<&Place>,
        after: Option<&(Box<Loop>, Vec<Place>)>,
    ) -> Result<(), ModelError> {
        let x = SharedRows(Rows { ptr: self.at(&head.x), row_stride: head.x.meta.strides[0] as isize });
        let n = usize::try_from(parts.from.meta.shape[1]).unwrap_or(0);
        let (whole, size) = (self.matrix(&parts.from, 0), parts.from.size().cast_signed());
        let rows = out.map(|out| (Shared(self.at(out)), out.meta.strides[0] as isize));
        let (packed_at, after_at) = (parts.packed_at(), head.scratch_bytes());
        let count = n.div_ceil(parts.columns);
        self.items(count, &|part, scratch| {
            let (x, rows, column) = (&x, &rows, part * parts.columns);
            let which = usize::from(part + 1 == count);
            let (gemm, layout) = (&parts.gemms[which], &parts.layouts[which]);
            let whole = whole.get();
            let ptr = whole.ptr.wrapping_offset(column.cast_signed() * whole.n_stride * size);
            let packed = scratch.wrapping_add(packed_at);
            // SAFETY: promised by the caller of `run`: the matrix is there, and the scratch memory has room for a part's panels.
            let weights = unsafe {
                layout.pack_panels(0..layout.panels(), Matrix { ptr, ..whole }, packed);
                layout.view(packed)
            };
            let after = after.map(|(each, operands)| {
                let scratch = scratch.wrapping_add(after_at);
                After { frame: self, each, operands, scratch, column }
            });
            let output = match (rows, &after) {
                (Some((ptr, row_stride)), _) => {
                    let ptr = ptr.0.wrapping_offset(column.cast_signed() * size);
                    Output::Rows { ptr, row_stride: *row_stride }
                }
                (None, Some(after)) => Output::Epilogue(after),
                (None, None) => return,
            };
            for item in 0..gemm.items() {
                // SAFETY: as above; parts write apart.
                unsafe { gemm.run_item(item, x.0, weights, output, scratch) };
            }
        })
    }
}
