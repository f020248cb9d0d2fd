//! Instruction sets: one file each, and the table of entry points.
//!
//! Each entry point is a generic body over the vectors of one instruction set, whose `apart` compiles each part of it with that
//! instruction set's target features. **Invariant:** an entry of the table is reached only through a plan whose arch was
//! detected on this machine.

/// Functions that consist of intrinsics, as methods or on their own.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! intrinsics {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)? { $($body:tt)* })*) => {$(
        $(#[$meta])*
        #[inline(always)]
        $vis unsafe fn $name($($arg: $ty),*) $(-> $out)? {
            // SAFETY: the instruction set is there: all of it is inlined into parts (`apart!`) of entry points, which are
            // called after detection only. A caller that passes a pointer vouches for the elements that the name speaks of.
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
        const PREFETCHES: bool = true;
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

/// A method that runs a part in a function of its own, with these target features: `Simd::apart` or one like it.
macro_rules! apart {
    ($name:ident $(, $features:literal)?) => {
        unsafe fn $name<P: crate::kernels::simd::Part<Self>>(part: P) -> P::Output {
            $(#[target_feature(enable = $features)])?
            #[inline(never)]
            unsafe fn compiled<S: Simd, P: crate::kernels::simd::Part<S>>(part: P) -> P::Output {
                // SAFETY: as of the caller.
                unsafe { part.run() }
            }
            // SAFETY: an entry point of this instruction set is called after its detection only.
            unsafe { compiled::<Self, P>(part) }
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
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod gemm;
mod int8;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod simd128;

use half::{bf16, f16};
use rapt_core::{Arch, DType, Error, Result};

#[cfg(target_arch = "x86_64")]
use crate::kernels::coded::packer;
use crate::kernels::codes::{CodeVectors, reader};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::kernels::pairs::Paired;
#[cfg(target_arch = "x86_64")]
use crate::kernels::parts::Numbers;
use crate::kernels::products::Single;
use crate::kernels::simd::{Simd, Storage};
#[cfg(target_arch = "x86_64")]
use crate::kernels::tiled::{TILE_KEYS, Tiled};
use crate::kernels::{backward, combine, decode, forward, rounds};
use crate::partition::Turn;
use crate::problem::{Problem, ReadRows, Reading, RowKind, RowReader};

/// Computes one item of a problem in scratch memory of the plan's size per thread.
pub(crate) type Entry = unsafe fn(&Problem, Turn, *mut u8);

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
    /// The same with products of int8.
    ForwardInt8,
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

/// The table of one instruction set: `F` are its vectors of f32, `D` those of f64.
fn entry_of<F: Simd<Elem = f32>, D: Simd<Elem = f64>>(step: Step, storage: DType) -> Option<Entry> {
    fn of<S: Simd, T: Storage<S>>(step: Step) -> Entry {
        match step {
            Step::Forward => forward::item::<S, T, Single>,
            Step::ForwardInt8 => unreachable!("`entry` asks `int8` for it"),
            Step::Decode => decode::item::<S, T>,
            Step::Combine => combine::combine::<S, T>,
        }
    }
    match storage {
        DType::F32 => Some(of::<F, f32>(step)),
        DType::F16 => Some(of::<F, f16>(step)),
        DType::BF16 => Some(of::<F, bf16>(step)),
        DType::F64 => Some(of::<D, f64>(step)),
        _ => None,
    }
}

/// The forward tile of one instruction set, as [`entry_of`] has it.
fn shape_of<F: Simd, D: Simd>(storage: DType) -> TileShape {
    fn of<S: Simd>() -> TileShape {
        TileShape { queries: S::Q_VECS * S::LANES, rows: S::ROWS }
    }
    if storage == DType::F64 { of::<D>() } else { of::<F>() }
}

/// As AVX-512, with the products of bf16 formed two at a time.
#[cfg(target_arch = "x86_64")]
fn avx512_bf16_entry(step: Step, storage: DType) -> Option<Entry> {
    if step == Step::Forward && is_paired(Arch::Avx512Bf16, storage) {
        return Some(forward::item::<avx512::Avx512F32, bf16, Paired>);
    }
    entry_of::<avx512::Avx512F32, avx512::Avx512F64>(step, storage)
}

/// As AVX-512, with forward's products formed tile by tile, of bf16 or of what is a sum of them.
#[cfg(target_arch = "x86_64")]
fn amx_entry(step: Step, storage: DType) -> Option<Entry> {
    /// Forward while this thread has tiles.
    unsafe fn forward<T: Numbers<avx512::Avx512F32>>(problem: &Problem, turn: Turn, memory: *mut u8) {
        // SAFETY: the unit was detected before this entry was reached; the rest is the caller's promise.
        unsafe {
            let _tiles = amx::Tiles::new();
            forward::item::<avx512::Avx512F32, T, Tiled<T>>(problem, turn, memory);
        }
    }
    match storage {
        DType::BF16 if step == Step::Forward => return Some(forward::<bf16>),
        DType::F16 if step == Step::Forward => return Some(forward::<f16>),
        DType::F32 if step == Step::Forward => return Some(forward::<f32>),
        _ => {}
    }
    entry_of::<avx512::Avx512F32, avx512::Avx512F64>(step, storage)
}

/// Whether forward's products are formed of pairs, and P is rounded to the storage dtype for the second one.
pub(crate) fn is_paired(arch: Arch, storage: DType) -> bool {
    matches!(arch, Arch::Avx512Bf16 | Arch::Amx | Arch::NeonBf16) && storage == DType::BF16
}

/// Parts of a number where forward's products are formed tile by tile, of K and V that are packed.
pub(crate) fn tiled(arch: Arch, storage: DType) -> Option<usize> {
    match storage {
        DType::BF16 if arch == Arch::Amx => Some(1),
        DType::F16 if arch == Arch::Amx => Some(2),
        DType::F32 if arch == Arch::Amx => Some(3),
        _ => None,
    }
}

/// Whether tests ask for tiles whatever a request's length ([`tile_every_request`](crate::tile_every_request)).
pub(crate) fn every_request_is_tiled() -> bool {
    EVERY_REQUEST_IS_TILED.load(std::sync::atomic::Ordering::Relaxed)
}

pub(crate) static EVERY_REQUEST_IS_TILED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// What is compiled of the kernels: one entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelVariant {
    /// The instruction set.
    pub arch: Arch,
    /// What it does.
    pub step: Step,
    /// The dtype that rows are read in, or numbers are formed in where they are codes.
    pub storage: DType,
}

impl KernelVariant {
    /// Whether it may be entered on a machine with these instruction sets.
    ///
    /// # Errors
    /// [`Error::Unsupported`] unless its own is among them and this build has it.
    pub fn check(&self, available: &[Arch]) -> Result<()> {
        self.entry(available).map(|_| ())
    }

    /// Its entry point, as [`KernelVariant::check`] says.
    pub(crate) fn entry(&self, available: &[Arch]) -> Result<Entry> {
        let missing = || Error::unsupported(self.arch.name(), "this machine or build lacks it", "plan on this machine");
        if !available.contains(&self.arch) {
            return Err(missing());
        }
        entry(self.arch, self.step, self.storage).ok_or_else(missing)
    }

    /// Whether this build has it.
    pub(crate) fn is_built(&self) -> bool {
        entry(self.arch, self.step, self.storage).is_some()
    }
}

fn entry(arch: Arch, step: Step, storage: DType) -> Option<Entry> {
    if step == Step::ForwardInt8 {
        return int8::entry(arch, storage);
    }
    match arch {
        Arch::Scalar => entry_of::<scalar::Scalar<f32>, scalar::Scalar<f64>>(step, storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => entry_of::<avx2::Avx2F32, avx2::Avx2F64>(step, storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Vnni => entry_of::<avx512::Avx512F32, avx512::Avx512F64>(step, storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512Bf16 => avx512_bf16_entry(step, storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Amx => amx_entry(step, storage),
        #[cfg(target_arch = "aarch64")]
        Arch::NeonBf16 if step == Step::Forward && is_paired(arch, storage) => {
            Some(forward::item::<neon::NeonF32, bf16, Paired>)
        }
        #[cfg(target_arch = "aarch64")]
        Arch::Neon | Arch::NeonBf16 => entry_of::<neon::NeonF32, scalar::Scalar<f64>>(step, storage),
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Arch::Simd128 => entry_of::<simd128::Simd128F32, scalar::Scalar<f64>>(step, storage),
        _ => None,
    }
}

/// What is made of the vectors of an instruction set.
pub(crate) trait Vectors {
    /// What it is.
    type Output;
    /// Makes it; `S` are the vectors of f32, `D` those of f64.
    fn visit<S: Simd<Elem = f32>, D: Simd<Elem = f64>>(self) -> Self::Output;
}

/// What `vectors` makes of an instruction set; of the scalar path for one that this build lacks. What is made may be entered
/// after the instruction set's detection only.
pub(crate) fn with_vectors<V: Vectors>(arch: Arch, vectors: V) -> V::Output {
    match arch {
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => vectors.visit::<avx2::Avx2F32, avx2::Avx2F64>(),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => {
            vectors.visit::<avx512::Avx512F32, avx512::Avx512F64>()
        }
        #[cfg(target_arch = "aarch64")]
        Arch::Neon | Arch::NeonBf16 => vectors.visit::<neon::NeonF32, scalar::Scalar<f64>>(),
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Arch::Simd128 => vectors.visit::<simd128::Simd128F32, scalar::Scalar<f64>>(),
        _ => vectors.visit::<scalar::Scalar<f32>, scalar::Scalar<f64>>(),
    }
}

/// The kernels of gradients that form products of pairs, of bf16 on instruction sets that have them, or in tiles of what is a sum of bf16.
pub(crate) fn gradients_of_pairs(arch: Arch, storage: DType) -> Option<backward::Entries> {
    match (arch, storage) {
        #[cfg(target_arch = "x86_64")]
        (Arch::Avx512Bf16, DType::BF16) => Some(backward::Entries::of::<avx512::Avx512F32, Paired, bf16>()),
        #[cfg(target_arch = "x86_64")]
        (Arch::Amx, DType::BF16) => Some(backward::Entries::of::<avx512::Avx512F32, Tiled<bf16>, bf16>()),
        #[cfg(target_arch = "x86_64")]
        (Arch::Amx, DType::F16) => Some(backward::Entries::of_parts::<avx512::Avx512F32, f16>()),
        #[cfg(target_arch = "x86_64")]
        (Arch::Amx, DType::F32) => Some(backward::Entries::of_parts::<avx512::Avx512F32, f32>()),
        #[cfg(target_arch = "aarch64")]
        (Arch::NeonBf16, DType::BF16) => Some(backward::Entries::of::<neon::NeonF32, Paired, bf16>()),
        _ => None,
    }
}

/// The rounds of f32 FMAs, and the lanes of their vectors.
pub(crate) fn fma_rounds(arch: Arch) -> Rounds {
    fn of<S: Simd<Elem = f32>>() -> Rounds {
        (rounds::rounds_of::<S>, 2 * rounds::SUMS * S::LANES)
    }
    match arch {
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => of::<avx2::Avx2F32>(),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => of::<avx512::Avx512F32>(),
        #[cfg(target_arch = "aarch64")]
        Arch::Neon | Arch::NeonBf16 => of::<neon::NeonF32>(),
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Arch::Simd128 => of::<simd128::Simd128F32>(),
        _ => (rounds::plain_rounds, 2 * rounds::SUMS),
    }
}

/// A loop of independent products, and the FLOPs of one round of it.
pub(crate) type Rounds = (unsafe fn(usize, f32, f32) -> f32, usize);

/// Rounds of products of bfloat16 in the unit that forward uses.
pub(crate) fn bf16_rounds(arch: Arch) -> Option<Rounds> {
    match arch {
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512Bf16 => {
            Some((rounds::pair_rounds_of::<avx512::Avx512F32>, 4 * rounds::SUMS * <avx512::Avx512F32 as Simd>::LANES))
        }
        #[cfg(target_arch = "x86_64")]
        Arch::Amx => Some((amx::rounds, 4 * 2 * 2 * amx::SIDE * amx::TILE)),
        _ => None,
    }
}

/// What reads rows that are no numbers of the kernel's own; that of the scalar path for an instruction set that this build lacks. Entered
/// by kernels of that instruction set only.
pub(crate) fn row_reader(arch: Arch, reading: Reading) -> RowReader {
    #[cfg(target_arch = "x86_64")]
    fn of<S: CodeVectors>(Reading { kind, fold, .. }: Reading) -> RowReader {
        let products = fold.and_then(|fold| decode::code_products::<S>(kind, fold));
        RowReader { read: reader::<S>(kind), products, pack: None }
    }
    let numbers = |read: fn(RowKind) -> ReadRows| RowReader { read: read(reading.kind), products: None, pack: None };
    match arch {
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => of::<avx2::Avx2F32>(reading),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512Bf16 if let Some(fold) = reading.pairs => {
            let RowReader { read, products, .. } = of::<avx512::Avx512F32>(reading);
            let pairs = |products| decode::pair_products::<avx512::Avx512F32>(products, reading.kind, fold);
            RowReader { read, products: products.map(pairs), pack: packer::<avx512::Avx512F32>(reading.kind) }
        }
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512Vnni if let Some(fold) = reading.quads => {
            let reader = of::<avx512::Avx512F32>(reading);
            let quads = |products| decode::quad_products::<avx512::Avx512F32>(products, reading.kind, fold);
            RowReader { products: reader.products.map(quads), ..reader }
        }
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => of::<avx512::Avx512F32>(reading),
        #[cfg(target_arch = "aarch64")]
        Arch::Neon | Arch::NeonBf16 => numbers(reader::<neon::NeonF32>),
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Arch::Simd128 => numbers(reader::<simd128::Simd128F32>),
        _ => numbers(reader::<scalar::Scalar<f32>>),
    }
}

/// The lanes of the vectors in which decode loads codes as they are; `None` where codes become numbers first.
pub(crate) fn code_lanes(arch: Arch) -> Option<usize> {
    match arch {
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => Some(avx2::Avx2F32::LANES),
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => Some(avx512::Avx512F32::LANES),
        _ => None,
    }
}

/// The forward tile of one instruction set; that of the scalar path for one that this build lacks.
pub(crate) fn tile_shape(arch: Arch, storage: DType) -> TileShape {
    match arch {
        #[cfg(target_arch = "x86_64")]
        Arch::Avx2 => shape_of::<avx2::Avx2F32, avx2::Avx2F64>(storage),
        #[cfg(target_arch = "x86_64")]
        Arch::Amx if tiled(arch, storage).is_some() => {
            TileShape { rows: TILE_KEYS, ..shape_of::<avx512::Avx512F32, avx512::Avx512F64>(storage) }
        }
        #[cfg(target_arch = "x86_64")]
        Arch::Avx512 | Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx => {
            shape_of::<avx512::Avx512F32, avx512::Avx512F64>(storage)
        }
        #[cfg(target_arch = "aarch64")]
        Arch::Neon | Arch::NeonBf16 => shape_of::<neon::NeonF32, scalar::Scalar<f64>>(storage),
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Arch::Simd128 => shape_of::<simd128::Simd128F32, scalar::Scalar<f64>>(storage),
        _ => shape_of::<scalar::Scalar<f32>, scalar::Scalar<f64>>(storage),
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
            let of_bytes = is_x86_feature_detected!("avx512vnni");
            if of_bytes {
                found.push(Arch::Avx512Vnni);
            }
            // Every processor with the dot of bf16 has that of bytes, which int8 relies on. Codes become pairs by look-ups of bytes;
            // every processor with the dot but Intel's first has those too.
            let look_ups = is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("gfni");
            if is_x86_feature_detected!("avx512bf16") && of_bytes && look_ups {
                // On the Xeon (family 6 model 207, 2026-11) the dot instruction does 32 flop per cycle and core, f32's FMA
                // 64: it comes after. On AMD's it comes first by published figures, 2 to 1; docs/lab/cpu.md has none of these
                // kernels there.
                let best = if is_amd() { found.len() } else { found.len() - 2 };
                found.insert(best, Arch::Avx512Bf16);
                if amx::is_usable() || amx::unit() == amx::Unit::Model {
                    found.push(Arch::Amx);
                }
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("neon") {
        found.push(Arch::Neon);
        // Every processor with the dot of bf16 has that of signed and unsigned bytes (Armv8.6 has both). By the vendors' guides a dot of
        // bf16 takes as long as an FMA of float32 and does twice the work of it.
        if std::arch::is_aarch64_feature_detected!("bf16") && std::arch::is_aarch64_feature_detected!("i8mm") {
            found.push(Arch::NeonBf16);
        }
    }
    // A module with these vectors is one that its engine has accepted.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    found.push(Arch::Simd128);
    found
}
