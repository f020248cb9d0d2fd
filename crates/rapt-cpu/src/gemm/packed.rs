//! The right operand of a product, packed into panels of columns.
//!
//! ```text
//! panel p, lane t, column c  ◄── w[t][p · width + c]        pairs: lane t holds steps 2t (low half) and 2t + 1
//! ```
//! A panel has as many columns as the accumulators of one row; columns past n, the second half of a last odd step, and what fills the
//! last tile of a unit that multiplies tiles, are 0.
//! The elements keep their storage dtype.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rapt_core::{Arch, DType, Error, Executor, Result};

use super::memory::Memory;
use super::product::{PackJob, Strided};
use crate::arch::gemm::{Kernels, kernels};
use crate::caps::available;

/// The kernels of `arch` for `dtype`.
pub(super) fn kernels_of(arch: Arch, dtype: DType) -> Result<Kernels> {
    if !available().contains(&arch) {
        return Err(Error::unsupported(arch.name(), "this machine or build lacks it", "plan on this machine"));
    }
    kernels(arch, dtype).ok_or_else(|| Error::UnsupportedDtype {
        tensor: "w",
        got: dtype,
        allowed: vec![DType::F64, DType::F32, DType::F16, DType::BF16],
    })
}

/// Where the elements of a packed `k × n` matrix lie: sizes without memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    arch: Arch,
    dtype: DType,
    k: usize,
    n: usize,
    panel_columns: usize,
    panel_bytes: usize,
}

impl PackedLayout {
    /// The layout of `arch` for `k` steps and `n` columns of `dtype`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an instruction set that this machine lacks; [`Error::UnsupportedDtype`] for one that is not
    /// f64, f32, f16 or bf16; [`Error::OutOfMemory`] if its bytes are more than an address can count.
    pub fn new(arch: Arch, dtype: DType, k: usize, n: usize) -> Result<PackedLayout> {
        let kernels = kernels_of(arch, dtype)?;
        let panel_columns = kernels.panel_columns;
        let lane_row_bytes = panel_columns * kernels.lane_bytes;
        let too_large = || Error::OutOfMemory { bytes: usize::MAX };
        let lanes = k.div_ceil(kernels.steps).checked_next_multiple_of(kernels.lane_run);
        let panel_bytes = lanes.and_then(|lanes| lanes.checked_mul(lane_row_bytes)).ok_or_else(too_large)?;
        let bytes = panel_bytes.checked_mul(n.div_ceil(panel_columns)).ok_or_else(too_large)?;
        isize::try_from(bytes).map_err(|_| too_large())?;
        Ok(PackedLayout { arch, dtype, k, n, panel_columns, panel_bytes })
    }

    /// The instruction set whose vectors read it.
    #[must_use]
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The dtype of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Steps of the contraction.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Columns.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Its bytes; those of an address divisible by 64 are read as fast as can be.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.panels() * self.panel_bytes
    }

    /// Panels: what [`pack_panels`](Self::pack_panels) packs in any order, each on its own.
    #[must_use]
    pub fn panels(&self) -> usize {
        self.n.div_ceil(self.panel_columns)
    }

    pub(super) fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Packs `panels` of `w` to their places after `to`, where panel 0 begins. NaN and infinities are kept as they are.
    ///
    /// # Safety
    /// Every element of the columns of these panels in `w` is readable; `to` has [`len_bytes`](Self::len_bytes), of which those of
    /// `panels` are writable and nobody else's, and is aligned to 8 bytes; `panels` are below [`panels`](Self::panels).
    pub unsafe fn pack_panels(&self, panels: Range<usize>, w: Strided, to: *mut u8) {
        let kernels = kernels(self.arch, self.dtype).expect("`new` found them");
        let PackedLayout { k, n, panel_bytes, .. } = *self;
        // SAFETY: `new` saw the instruction set on this machine; the rest is the caller's promise.
        unsafe { (kernels.pack)(&PackJob { panels, k, n, w, to, panel_bytes }) };
    }

    /// A matrix that lies packed at `ptr`.
    ///
    /// # Safety
    /// All panels are packed there in this layout, and stay so during `'a`.
    #[must_use]
    pub unsafe fn view<'a>(&self, ptr: *const u8) -> PackedView<'a> {
        PackedView { layout: *self, ptr, memory: PhantomData }
    }
}

/// A packed matrix in somebody's memory.
#[derive(Clone, Copy, Debug)]
pub struct PackedView<'a> {
    layout: PackedLayout,
    ptr: *const u8,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: it is read only, like a shared slice.
unsafe impl Send for PackedView<'_> {}
// SAFETY: as above.
unsafe impl Sync for PackedView<'_> {}

impl PackedView<'_> {
    /// Where its elements lie.
    #[must_use]
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.ptr
    }
}

/// A packed matrix in memory of its own, aligned to 64 bytes and on large pages where the system has them.
#[derive(Debug)]
pub struct PackedMatrix {
    layout: PackedLayout,
    memory: Memory,
}

impl PackedMatrix {
    /// Packs `w` on the threads of `executor`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::WorkerPanicked`], [`Error::WorkLeftUndone`].
    ///
    /// # Safety
    /// Every element of `w` is readable: `layout.k() × layout.n()` of `layout.dtype()`.
    pub unsafe fn pack(layout: PackedLayout, w: Strided, executor: &dyn Executor) -> Result<PackedMatrix> {
        /// What the threads share.
        struct Job(Strided, *mut u8);
        // SAFETY: w is read only, and each thread writes panels of its own.
        unsafe impl Sync for Job {}

        let mut memory = Memory::new(layout.len_bytes())?;
        let job = &Job(w, memory.as_mut_ptr());
        let (next, panels) = (AtomicUsize::new(0), layout.panels());
        executor.parallel_for(executor.threads().min(panels), &|_| {
            loop {
                let panel = next.fetch_add(1, Ordering::Relaxed);
                if panel >= panels {
                    break;
                }
                // SAFETY: each panel is taken once, and the memory has room for all; w is the caller's promise.
                unsafe { layout.pack_panels(panel..panel + 1, job.0, job.1) };
            }
        })?;
        let done = next.load(Ordering::Relaxed).min(panels);
        if done < panels {
            return Err(Error::WorkLeftUndone { done, items: panels });
        }
        Ok(PackedMatrix { layout, memory })
    }

    /// Where its elements lie.
    #[must_use]
    pub fn layout(&self) -> &PackedLayout {
        &self.layout
    }

    /// The bytes that it takes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    /// To multiply with.
    #[must_use]
    pub fn view(&self) -> PackedView<'_> {
        PackedView { layout: self.layout, ptr: self.memory.as_ptr(), memory: PhantomData }
    }
}
