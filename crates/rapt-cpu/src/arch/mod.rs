//! Instruction sets: one file each, and the table of entry points.
//!
//! Each entry point is a generic body compiled with the target features of one instruction set. **Invariant:** an entry
//! of the table is reached only through a plan whose arch was detected on this machine.

/// Functions that consist of intrinsics, as methods or on their own.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! intrinsics {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)? { $($body:tt)* })*) => {$(
        $(#[$meta])*
        #[inline(always)]
        $vis unsafe fn $name($($arg: $ty),*) $(-> $out)? {
            // SAFETY: the instruction set is there: all of it is inlined into entry points (`entries!`), which are called
            // after detection only. A caller that passes a pointer vouches for the elements that the name speaks of.
            unsafe { $($body)* }
        }
    )*};
}

/// Methods of [`Simd`](crate::kernels::simd::Simd) that are one instruction, named by the intrinsics of a width and a type.
#[cfg(target_arch = "x86_64")]
macro_rules! plain_methods {
    (
        $elem:ty, $v:ty:
        $splat:ident, $load:ident, $store:ident, $add:ident, $sub:ident,
        $mul:ident, $div:ident, $fma:ident, $max:ident
    ) => {
        #[inline(always)]
        fn hide(ptr: *const $elem) -> *const $elem {
            super::hidden(ptr)
        }
        intrinsics! {
            fn splat(x: $elem) -> $v { $splat(x) }
            fn load(ptr: *const $elem) -> $v { $load(ptr) }
            fn store(ptr: *mut $elem, x: $v) { $store(ptr, x) }
            fn add(a: $v, b: $v) -> $v { $add(a, b) }
            fn sub(a: $v, b: $v) -> $v { $sub(a, b) }
            fn mul(a: $v, b: $v) -> $v { $mul(a, b) }
            fn div(a: $v, b: $v) -> $v { $div(a, b) }
            fn fma(a: $v, b: $v, c: $v) -> $v { $fma(a, b, c) }
            fn max(a: $v, b: $v) -> $v { $max(a, b) }
            fn prefetch(ptr: *const u8) { _mm_prefetch::<_MM_HINT_T0>(ptr.cast()) }
        }
    };
}

/// Half-precision methods of a vector of f64, which no storage dtype reaches.
#[cfg(target_arch = "x86_64")]
macro_rules! no_halves {
    ($v:ty) => {
        unsafe fn load_f16(_: *const f16) -> $v {
            unreachable!("f64 accumulates f64 alone")
        }
        unsafe fn load_bf16(_: *const bf16) -> $v {
            unreachable!("f64 accumulates f64 alone")
        }
        unsafe fn store_f16(_: *mut f16, _: $v) {
            unreachable!("f64 accumulates f64 alone")
        }
        unsafe fn store_bf16(_: *mut bf16, _: $v) {
            unreachable!("f64 accumulates f64 alone")
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use half::{bf16, f16};
use rapt_core::{Arch, DType};

#[cfg(target_arch = "x86_64")]
use crate::kernels::pairs::Paired;
use crate::kernels::products::Single;
use crate::kernels::{decode, forward};
use crate::partition::Item;
use crate::problem::Problem;

/// Computes one item of a problem in scratch memory of the plan's size per thread.
pub(crate) type Entry = unsafe fn(&Problem, Item, *mut u8);

/// A pointer that the compiler takes as it is.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block, reason = "nothing is read through it: there is no instruction")]
fn hidden<E>(mut ptr: *const E) -> *const E {
    // SAFETY: no instruction at all.
    unsafe { std::arch::asm!("/* {0} */", inout(reg) ptr, options(pure, nomem, nostack, preserves_flags)) };
    ptr
}

/// The code of one step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A run of rows against all their keys.
    Forward,
    /// A chunk of keys for all rows of a task.
    Decode,
    /// The chunks of one task to its rows of the output.
    Combine,
}

/// The shape of an instruction set's forward tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileShape {
    /// Queries per tile.
    pub(crate) queries: usize,
    /// Broadcast rows per micro-tile.
    pub(crate) rows: usize,
}

macro_rules! entries {
    ($arch:ident, $name:ident, $shape:ident, $features:tt, $f32:ty, $f64:ty) => {
        fn $name(step: Step, storage: DType) -> Option<Entry> {
            use crate::kernels::simd::Storage;
            fn entry<T: Storage<$f32>>(step: Step) -> Option<Entry> {
                entries!(@pair $features, $f32, T, step)
            }
            fn entry_f64<T: Storage<$f64>>(step: Step) -> Option<Entry> {
                entries!(@pair $features, $f64, T, step)
            }
            match storage {
                DType::F32 => entry::<f32>(step),
                DType::F16 => entry::<f16>(step),
                DType::BF16 => entry::<bf16>(step),
                DType::F64 => entry_f64::<f64>(step),
                _ => None,
            }
        }
        fn $shape(storage: DType) -> TileShape {
            use crate::kernels::simd::Simd;
            fn of<S: Simd>() -> TileShape {
                TileShape { queries: S::Q_VECS * S::LANES, rows: S::ROWS }
            }
            if storage == DType::F64 { of::<$f64>() } else { of::<$f32>() }
        }
    };
    (@pair $features:tt, $simd:ty, $t:ident, $step:ident) => {{
        entries!(@fn $features, forward_entry, forward, item, $simd, Single);
        entries!(@fn $features, decode_entry, decode, item, $simd);
        entries!(@fn $features, combine_entry, decode, combine, $simd);
        let entry: Entry = match $step {
            Step::Forward => forward_entry::<$t>,
            Step::Decode => decode_entry::<$t>,
            Step::Combine => combine_entry::<$t>,
        };
        Some(entry)
    }};
    (@fn (), $name:ident, $module:ident, $body:ident, $simd:ty $(, $products:ty)?) => {
        unsafe fn $name<T: Storage<$simd>>(problem: &Problem, item: Item, scratch: *mut u8) {
            // SAFETY: as of the caller.
            unsafe { $module::$body::<$simd, T $(, $products)?>(problem, item, scratch) }
        }
    };
    (@fn ($features:literal), $name:ident, $module:ident, $body:ident, $simd:ty $(, $products:ty)?) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<T: Storage<$simd>>(problem: &Problem, item: Item, scratch: *mut u8) {
            // SAFETY: as of the caller.
            unsafe { $module::$body::<$simd, T $(, $products)?>(problem, item, scratch) }
        }
    };
}

entries!(Scalar, scalar_entry, scalar_shape, (), scalar::Scalar<f32>, scalar::Scalar<f64>);
#[cfg(target_arch = "x86_64")]
entries!(Avx2, avx2_entry, avx2_shape, ("avx2,fma,f16c"), avx2::Avx2F32, avx2::Avx2F64);
#[cfg(target_arch = "x86_64")]
entries!(
    Avx512,
    avx512_entry,
    avx512_shape,
    ("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"),
    avx512::Avx512F32,
    avx512::Avx512F64
);
/// As AVX-512, with the products of bf16 formed two at a time.
#[cfg(target_arch = "x86_64")]
fn avx512_bf16_entry(step: Step, storage: DType) -> Option<Entry> {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn forward_entry(problem: &Problem, item: Item, scratch: *mut u8) {
        // SAFETY: as of the caller.
        unsafe { forward::item::<avx512::Avx512F32, bf16, Paired>(problem, item, scratch) }
    }
    if step == Step::Forward && is_paired(Arch::Avx512Bf16, storage) {
        return Some(forward_entry);
    }
    avx512_entry(step, storage)
}

/// Whether forward's products are formed of pairs, and P is rounded to the storage dtype for the second one.
pub(crate) fn is_paired(arch: Arch, storage: DType) -> bool {
    arch == Arch::Avx512Bf16 && storage == DType::BF16
}

#[cfg(target_arch = "aarch64")]
entries!(Neon, neon_entry, neon_shape, ("neon"), neon::NeonF32, scalar::Scalar<f64>);

/// What is compiled of the kernels: one entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelVariant {
    /// The instruction set.
    pub arch: Arch,
    /// What it does.
    pub step: Step,
    /// The dtype of q, k and v.
    pub storage: DType,
}

impl KernelVariant {
    /// Its entry point, if this build has it.
    pub(crate) fn entry(&self) -> Option<Entry> {
        entry(self.arch, self.step, self.storage)
    }
}

fn entry(arch: Arch, step: Step, storage: DType) -> Option<Entry> {
    match arch {
        Arch::Scalar => scalar_entry(step, storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => avx2_entry(step, storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 => avx512_entry(step, storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512Bf16 => avx512_bf16_entry(step, storage),
        #[cfg(target_arch = "aarch64")]
        Arch::Neon => neon_entry(step, storage),
        _ => None,
    }
}

/// The forward tile of one instruction set; that of the scalar path for one that this build lacks.
pub(crate) fn tile_shape(arch: Arch, storage: DType) -> TileShape {
    match arch {
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => avx2_shape(storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Bf16 => avx512_shape(storage),
        #[cfg(target_arch = "aarch64")]
        Arch::Neon => neon_shape(storage),
        _ => scalar_shape(storage),
    }
}

/// Whether the processor is AMD's.
#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let id = std::arch::x86_64::__cpuid(0);
    [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD"
}

/// The instruction sets of this machine, best last.
pub(crate) fn detected() -> Vec<Arch> {
    #[allow(unused_mut, reason = "other architectures push nothing")]
    let mut found = vec![Arch::Scalar];
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        if avx2 {
            found.push(Arch::Avx2);
        }
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        if avx2 && avx512 {
            found.push(Arch::Avx512);
            if is_x86_feature_detected!("avx512bf16") {
                // One dot instruction in two cycles does less than f32 does: 32 against 64 flop per cycle and core
                // (Xeon, family 6 model 207, 2026-11). AMD's are said to do twice of f32's; nobody has measured it with these kernels.
                let best = if is_amd() { found.len() } else { found.len() - 1 };
                found.insert(best, Arch::Avx512Bf16);
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("neon") {
        found.push(Arch::Neon);
    }
    found
}
