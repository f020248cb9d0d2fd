//! The table of entry points of products with packed weights.

use half::{bf16, f16};
use rapt_core::{Arch, DType};

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::scalar;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
use super::simd128;
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};
use crate::gemm::product::{Job, PackJob};
use crate::kernels::gemm::pack::panels;
use crate::kernels::gemm::{Weights, Widened, item, scratch_bytes};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::kernels::pairs::Paired;
use crate::kernels::products::Single;
use crate::kernels::simd::Simd;
#[cfg(target_arch = "x86_64")]
use crate::kernels::tiled::Tiled;

/// What an instruction set has for a storage dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernels {
    /// Computes an item.
    pub(crate) item: unsafe fn(&Job<'_>),
    /// Packs panels.
    pub(crate) pack: unsafe fn(&PackJob),
    /// The scratch memory for items of so many rows and steps; `None` if no address counts it.
    pub(crate) scratch_bytes: fn(usize, usize) -> Option<usize>,
    pub(crate) panel_columns: usize,
    /// Rows of a micro-tile.
    pub(crate) tile_rows: usize,
    /// Steps of the contraction in a lane of a panel, and its bytes.
    pub(crate) steps: usize,
    /// A panel's lanes are a multiple of it.
    pub(crate) lane_run: usize,
    pub(crate) lane_bytes: usize,
}

fn of<S: Simd, W: Weights<S>>() -> Kernels {
    Kernels {
        item: item::<S, W>,
        pack: panels::<S, W>,
        scratch_bytes: scratch_bytes::<S, W>,
        panel_columns: S::Q_VECS * S::LANES,
        tile_rows: S::ROWS.max(W::ROW_RUN),
        steps: W::STEPS,
        lane_run: W::LANE_RUN,
        lane_bytes: size_of::<W::Lane>(),
    }
}

/// bf16 tile by tile.
#[cfg(target_arch = "x86_64")]
fn amx_kernels() -> Kernels {
    /// An item while this thread has tiles.
    unsafe fn with_tiles(job: &Job<'_>) {
        // SAFETY: the unit was detected before these kernels were reached; the rest is the caller's promise.
        unsafe {
            let _tiles = amx::Tiles::new();
            item::<avx512::Avx512F32, Tiled<bf16>>(job);
        }
    }
    Kernels { item: with_tiles, ..of::<avx512::Avx512F32, Tiled<bf16>>() }
}

/// The table of one instruction set: `F` are its vectors of f32, `D` those of f64.
fn table<F: Simd<Elem = f32>, D: Simd<Elem = f64>>(dtype: DType) -> Option<Kernels> {
    match dtype {
        DType::F32 => Some(of::<F, Single>()),
        DType::F16 => Some(of::<F, Widened<f16>>()),
        DType::BF16 => Some(of::<F, Widened<bf16>>()),
        DType::F64 => Some(of::<D, Single>()),
        _ => None,
    }
}

/// The kernels of `arch` for `dtype`; `None` where this build has none.
pub(crate) fn kernels(arch: Arch, dtype: DType) -> Option<Kernels> {
    match arch {
        Arch::Scalar => table::<scalar::Scalar<f32>, scalar::Scalar<f64>>(dtype),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => table::<avx2::Avx2F32, avx2::Avx2F64>(dtype),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512Bf16 if dtype == DType::BF16 => Some(of::<avx512::Avx512F32, Paired>()),
        #[cfg(target_arch = "x86_64")]
        Arch::Amx if dtype == DType::BF16 => Some(amx_kernels()),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => {
            table::<avx512::Avx512F32, avx512::Avx512F64>(dtype)
        }
        #[cfg(target_arch = "aarch64")]
        Arch::NeonBf16 if dtype == DType::BF16 => Some(of::<neon::NeonF32, Paired>()),
        #[cfg(target_arch = "aarch64")]
        Arch::Neon | Arch::NeonBf16 => table::<neon::NeonF32, scalar::Scalar<f64>>(dtype),
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Arch::Simd128 => table::<simd128::Simd128F32, scalar::Scalar<f64>>(dtype),
        _ => None,
    }
}
