//! Products with packed weights: `y[m][n] = Σ_k x[m][k] · w[k][n]` in f64, f32, f16 and bf16.
//!
//! ```text
//! PackedLayout::new(arch, dtype, k, n)      sizes, pure
//! PackedMatrix::pack(layout, w, executor)   w in memory of its own, or layout.pack_panels(…) into the caller's and layout.view(…)
//! Gemm::new(arch, dtype, [m, n, k], threads)   the partition, pure
//! gemm.run_item(item, x, w, out, scratch)   for each item in 0..gemm.items(), on any thread, in any order
//! ```
//! Sums are formed in f32 (f64 for f64): in blocks of a fixed number of steps, each from its first step on, one after the other, and the blocks are
//! added in their order. So the bits of a row depend on the row, on w and on the instruction set, not on m, on threads or on
//! tiles. bf16 on [`Arch::Avx512Bf16`] is multiplied two steps at a time by the dot instruction, which takes and gives 0 for
//! numbers below the least normal one. Deliberately absent: threads, alpha and beta, transposed outputs, splits of k.
//!
//! ```
//! use rapt_core::{DType, SerialExecutor, Workspace};
//! use rapt_cpu::gemm::{Gemm, Output, PackedLayout, PackedMatrix, Rows, Strided};
//!
//! let (m, n, k) = (2, 3, 4);
//! let x: Vec<f32> = (0..m * k).map(|i| i as f32).collect();
//! let w = vec![1.0f32; n * k]; // [out, in], as a linear layer has it
//! let mut y = vec![0.0f32; m * n];
//!
//! let arch = *rapt_cpu::available().last().unwrap();
//! let layout = PackedLayout::new(arch, DType::F32, k, n)?;
//! let strided = Strided { ptr: w.as_ptr().cast(), k_stride: 1, n_stride: k as isize };
//! // SAFETY: w has n rows of k elements.
//! let packed = unsafe { PackedMatrix::pack(layout, strided, &SerialExecutor)? };
//!
//! let gemm = Gemm::new(arch, DType::F32, [m, n, k], 1)?;
//! let mut scratch = Workspace::new();
//! scratch.ensure(gemm.scratch_bytes())?; // for each thread
//! let rows = Rows { ptr: x.as_ptr().cast(), row_stride: k as isize };
//! let out = Output::Rows { ptr: y.as_mut_ptr().cast(), row_stride: n as isize };
//! for item in 0..gemm.items() {
//!     // SAFETY: x has m rows of k elements, y has m of n, and w was packed for this arch, dtype, k and n.
//!     unsafe { gemm.run_item(item, rows, packed.view(), out, scratch.as_mut_ptr()) };
//! }
//! assert_eq!(y, [6.0, 6.0, 6.0, 22.0, 22.0, 22.0]);
//! # Ok::<(), rapt_core::Error>(())
//! ```

mod memory;
mod packed;
pub(crate) mod product;

use rapt_core::{Arch, DType, Error, Result};

pub use packed::{PackedLayout, PackedMatrix, PackedView};
pub use product::{Epilogue, Output, Rows, Strided};

use crate::arch::gemm::Kernels;
use crate::kernels::gemm::{ROW_BLOCK, SUM_ROW, TILE_COLUMNS};
use crate::pointwise::share;
use packed::kernels_of;
use product::Job;

/// From one row of a tile of sums to the next, in elements: what every [`Epilogue`] is called with.
pub const SUM_ROW_STRIDE: usize = SUM_ROW;

/// Items for each thread, so that one that was late does not keep the others waiting long.
const ITEMS_PER_THREAD: usize = 4;

/// A product of given sizes, cut into items.
#[derive(Clone, Debug)]
pub struct Gemm {
    kernels: Kernels,
    arch: Arch,
    dtype: DType,
    m: usize,
    n: usize,
    k: usize,
    item_rows: usize,
    /// Items side by side, of whole panels.
    across: usize,
    scratch_bytes: usize,
}

impl Gemm {
    /// The product of `x` (`m × k`) and `w` (`k × n`) of `dtype`, cut for `threads` threads.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an instruction set that this machine lacks; [`Error::UnsupportedDtype`] for one that is not
    /// f64, f32, f16 or bf16; [`Error::OutOfMemory`] if sizes are more than an address can count.
    pub fn new(arch: Arch, dtype: DType, [m, n, k]: [usize; 3], threads: usize) -> Result<Gemm> {
        let kernels = kernels_of(arch, dtype)?;
        let too_large = Error::OutOfMemory { bytes: usize::MAX };
        let bytes = |rows: usize, columns: usize| rows.checked_mul(columns)?.checked_mul(dtype.size_bytes());
        if [bytes(m, n), bytes(m, k)].into_iter().any(|bytes| bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()))
        {
            return Err(too_large);
        }
        let columns = kernels.panel_columns;
        let row_items = m.div_ceil(ROW_BLOCK);
        let item_rows = m.div_ceil(row_items.max(1)).next_multiple_of(kernels.tile_rows).clamp(1, ROW_BLOCK);
        let across = if threads <= 1 {
            1
        } else {
            let wanted = ITEMS_PER_THREAD.saturating_mul(threads).div_ceil(row_items.max(1));
            n.div_ceil(columns).min(wanted)
        };
        let scratch_bytes = (kernels.scratch_bytes)(item_rows.min(m), k);
        let scratch_bytes = scratch_bytes.ok_or(too_large)?;
        Ok(Gemm { kernels, arch, dtype, m, n, k, item_rows, across, scratch_bytes })
    }

    /// Pieces of work, none of which waits for another.
    #[must_use]
    pub fn items(&self) -> usize {
        if self.n == 0 { 0 } else { self.m.div_ceil(self.item_rows) * self.across }
    }

    /// The scratch memory of one thread, a multiple of 64; what an item leaves there, no other reads.
    #[must_use]
    pub fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    /// The most rows and columns of a tile that an [`Epilogue`] is called with.
    #[must_use]
    pub fn tile(&self) -> [usize; 2] {
        [self.item_rows.min(self.m), TILE_COLUMNS.min(self.n)]
    }

    /// Computes one item.
    ///
    /// # Safety
    /// - `item` is below [`items`](Self::items).
    /// - `x` is readable: m rows of k elements of the dtype.
    /// - `w` was packed in the layout of this product's arch, dtype, k and n.
    /// - `out` is writable where it is memory: m rows of n elements of the dtype that overlap neither one another, nor x, w or scratch;
    ///   each element is written by one item, and nothing between rows is touched.
    /// - `scratch` has [`scratch_bytes`](Self::scratch_bytes), aligned to 64, and is used by nobody else meanwhile.
    pub unsafe fn run_item(&self, item: usize, x: Rows, w: PackedView<'_>, out: Output<'_>, scratch: *mut u8) {
        let layout = w.layout();
        debug_assert!(item < self.items());
        debug_assert_eq!(
            (layout.arch(), layout.dtype(), layout.k(), layout.n()),
            (self.arch, self.dtype, self.k, self.n)
        );
        // Columns first: items that run at the same time share the rows of x.
        let row = item / self.across * self.item_rows;
        let panels = share(self.n.div_ceil(self.kernels.panel_columns), item % self.across, self.across);
        let [first, end] = [panels.start, panels.end].map(|panel| panel * self.kernels.panel_columns);
        let job = Job {
            rows: row..(row + self.item_rows).min(self.m),
            columns: first..end.min(self.n),
            k: self.k,
            x,
            w: w.as_ptr(),
            panel_bytes: layout.panel_bytes(),
            out,
            scratch,
        };
        // SAFETY: `new` saw the instruction set on this machine; the rest is the caller's promise.
        unsafe { (self.kernels.item)(&job) };
    }
}
