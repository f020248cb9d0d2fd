//! The identity of a kernel's machine code: what is fixed when it is compiled, and no length.
//!
//! From a variant follow its source text, the compiler's options (options.rs), its shared memory (shared.rs, asserted again by the
//! compiler) and its threads. Deliberately absent: where machine code comes from (`artifacts`), and which
//! variant is chosen when (`select`).

mod options;
mod shared;

use std::fmt;

use rapt_core::{Arch, DType, Kernel, ScaleLayout};

use crate::codes::{Codes, TileCodes};
use crate::params::{DroppedParams, LaunchParams};
use crate::source;

/// An algorithm of `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Any request, on the ordinary units.
    Generic,
    /// Many queries, on the tensor cores.
    Mma,
    /// Many queries, on the tensor cores of compute capability 9.0.
    Hopper,
    /// Many queries of float32, on the tensor cores of compute capability 9.0.
    HopperF32,
    /// Many queries of wide heads, and of float32, on the tensor cores.
    Wide,
    /// Few queries, on the tensor cores.
    Decode,
    /// Few queries of heads of 513 to 576 with values up to 512, on the tensor cores.
    Latent,
    /// Few queries over K and V that are codes, on the tensor cores.
    DecodeCodes,
    /// Products of int8, on the tensor cores.
    Int8,
    /// Puts splits together.
    Combine,
    /// Writes new keys into a cache.
    Append,
    /// Finds sequences that lie one after another, and deals them to the launches behind it.
    Varlen,
    /// How far queries on codes may be off.
    Deviation,
    /// What those come to for each head.
    DeviationEnd,
    /// A pass of gradients, on the ordinary units.
    Backward(Pass),
    /// A pass of gradients, on the tensor cores.
    BackwardMma(Pass),
    /// Gradients of float32 by halves on compute capability 9.0.
    BackwardHalves(Pass),
    /// dq, dk and dv together, by the instructions of compute capability 9.0.
    BackwardHopper,
}

/// What a launch of a backward pass finds: the numbers of kernels/backward*.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Pass {
    /// What each row's probabilities are recomputed from.
    Rows = 0,
    /// dk and dv.
    Keys = 1,
    /// dq.
    Queries = 2,
    /// The gradient of a mask.
    Mask = 3,
    /// The gradients of sinks.
    Sinks = 4,
    /// dq, dk and dv.
    Together = 5,
    /// dq of the parts that [`Pass::Together`] leaves.
    Parts = 6,
    /// dk and dv of the heads that kernels before have noted.
    KeysAgain = 7,
    /// dq of such heads.
    QueriesAgain = 8,
    /// The gradient of a mask, of the parts of its tiles.
    MaskParts = 9,
}

impl Pass {
    const fn name(self) -> &'static str {
        match self {
            Pass::Rows => "rows",
            Pass::Keys => "keys",
            Pass::Queries => "queries",
            Pass::Mask => "mask",
            Pass::Sinks => "sinks",
            Pass::Together => "together",
            Pass::Parts => "parts",
            Pass::KeysAgain => "keys again",
            Pass::QueriesAgain => "queries again",
            Pass::MaskParts => "mask parts",
        }
    }
}

impl Algorithm {
    /// Its name in a [`KernelKey`](rapt_core::KernelKey).
    pub(crate) const fn kernel(self) -> Kernel {
        match self {
            Algorithm::Mma | Algorithm::Hopper | Algorithm::HopperF32 | Algorithm::Wide => Kernel::Forward,
            Algorithm::Decode | Algorithm::Latent | Algorithm::DecodeCodes => Kernel::Decode,
            Algorithm::Int8 => Kernel::ForwardInt8,
            Algorithm::Generic
            | Algorithm::Combine
            | Algorithm::Append
            | Algorithm::Varlen
            | Algorithm::Deviation
            | Algorithm::DeviationEnd => Kernel::Generic,
            Algorithm::Backward(_)
            | Algorithm::BackwardMma(_)
            | Algorithm::BackwardHalves(_)
            | Algorithm::BackwardHopper => Kernel::Backward,
        }
    }

    /// Of a backward pass.
    pub(crate) const fn pass(self) -> Option<Pass> {
        match self {
            Algorithm::Backward(pass) | Algorithm::BackwardMma(pass) | Algorithm::BackwardHalves(pass) => Some(pass),
            Algorithm::BackwardHopper => Some(Pass::Together),
            _ => None,
        }
    }
}

/// Who loads tiles of q, k and v into shared memory, and in which pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// TMA, box by box (compute capability 9.0).
    Tma,
    /// The same, but of a mask whose rows TMA does not take: a warp copies it.
    TmaButMask,
    /// Threads, 16 bytes at a time.
    By16Bytes,
    /// Threads, element by element.
    ByElement,
}

/// How keys are told apart by batch entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sequences {
    /// All have as many, in one tensor.
    Even,
    /// Each has a length of its own, which the device reads.
    Ragged,
    /// The same, and they lie in pages.
    Paged,
    /// There is one, in which sequences lie one after another.
    Varlen,
}

/// What identifies machine code: everything that is fixed when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct KernelVariant {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The architecture that it is compiled for.
    pub arch: Arch,
    /// The dtype of q, k and v.
    pub storage: DType,
    /// The dtype of the mask, if there is one.
    pub mask: Option<DType>,
    /// Whether scores are multiplied by their scale before they are compared, and not in the exponent.
    pub natural: bool,
    /// How tiles are loaded.
    pub loads: Loads,
    /// head_dim and head_dim_v, rounded up to 16 (of int8, to 32; of wide, to whole pieces of 256 bytes; of latent, to 64 and 128); 0 where they are no part of the code (generic, combine).
    pub dims: (u32, u32),
    /// Queries per block; 0 for combine.
    pub block_m: u32,
    /// Keys per tile; of combine, columns of a lane.
    pub block_n: u32,
    /// Tiles in flight per warp of decode, pieces in flight of wide; 0 elsewhere.
    pub stages: u32,
    /// What it reads that is codes.
    pub codes: Codes,
    /// Whether it reads lengths and pages.
    pub sequences: Sequences,
    /// Whether it drops weights.
    pub dropout: bool,
}

/// Queries per block of generic.cu, and its keys per tile.
const GENERIC_TILE: (u32, u32) = (64, 64);
/// Queries per block of decode.cu.
pub(crate) const DECODE_BLOCK_M: u32 = 16;
/// Columns per warp of combine.cu for each of a lane, and warps per block.
pub(crate) const COMBINE_COLUMNS: usize = 32;
pub(crate) const COMBINE_WARPS: usize = 2;
/// Warps per block of mma.cu and int8.cu.
const MMA_WARPS: u32 = 4;
/// Threads of a block of deviation.cu and deviation_end.cu.
const DEVIATION_THREADS: u32 = 256;
/// Bytes of a row of a piece of wide.cu.
pub(crate) const WIDE_PIECE_BYTES: u32 = 256;

/// Value columns that one block of generic.cu computes.
pub(crate) const fn generic_columns(storage: DType) -> u32 {
    if matches!(storage, DType::F64) { 64 } else { 128 }
}

impl KernelVariant {
    /// The one variant of generic.cu for these dtypes.
    pub(crate) const fn generic(arch: Arch, storage: DType, mask: Option<DType>) -> Self {
        let (block_m, block_n) = GENERIC_TILE;
        KernelVariant {
            algorithm: Algorithm::Generic,
            arch,
            storage,
            mask,
            natural: true,
            loads: Loads::ByElement,
            dims: (0, 0),
            block_m,
            block_n,
            stages: 0,
            codes: Codes::None,
            sequences: Sequences::Even,
            dropout: false,
        }
    }

    /// What puts the splits of this variant together.
    pub(crate) const fn combine(self) -> Self {
        KernelVariant {
            algorithm: Algorithm::Combine,
            mask: None,
            natural: true,
            loads: Loads::ByElement,
            dims: (0, 0),
            block_m: 0,
            // Where rows are many, a lane takes several columns.
            block_n: if matches!(self.algorithm, Algorithm::Wide) { 4 } else { 1 },
            stages: 0,
            codes: Codes::None,
            dropout: false,
            // It reads lengths, and no key.
            sequences: if matches!(self.sequences, Sequences::Even) { Sequences::Even } else { Sequences::Ragged },
            ..self
        }
    }

    /// What writes new keys into the caches of this variant, whatever their dtype, or whatever codes they are.
    pub(crate) const fn append(self) -> Self {
        let KernelVariant { arch, sequences, .. } = self;
        let codes = if matches!(self.codes, Codes::None) { Codes::None } else { Codes::Any };
        let plain = KernelVariant::generic(arch, DType::F32, None);
        KernelVariant { algorithm: Algorithm::Append, sequences, codes, ..plain }
    }

    /// What finds the sequences of this variant, whatever reads them behind it.
    pub(crate) const fn varlen(self) -> Self {
        let storage = if matches!(self.storage, DType::F64) { DType::F64 } else { DType::F32 };
        let (algorithm, sequences) = (Algorithm::Varlen, Sequences::Varlen);
        KernelVariant { algorithm, sequences, ..KernelVariant::generic(self.arch, storage, None) }
    }

    /// The variant of a pass of gradients on the ordinary units.
    pub(crate) const fn backward(arch: Arch, storage: DType, mask: Option<DType>, pass: Pass) -> Self {
        // Sinks are read, and no mask.
        let mask = if matches!(pass, Pass::Sinks) { None } else { mask };
        KernelVariant { algorithm: Algorithm::Backward(pass), ..KernelVariant::generic(arch, storage, mask) }
    }

    /// Whether half of the blocks of backward_mma.cu or backward_halves.cu sum dk, and half dv: registers hold both of narrower heads.
    pub(crate) const fn is_split(&self) -> bool {
        let is_f32 = matches!(self.storage, DType::F32);
        let most = match self.algorithm {
            Algorithm::BackwardHalves(Pass::Keys) => 64,
            // Of float32 they do not beside scores that are changed.
            Algorithm::BackwardMma(Pass::Keys | Pass::KeysAgain) if is_f32 && (self.natural || self.mask.is_some()) => {
                64
            }
            Algorithm::BackwardMma(Pass::Keys | Pass::KeysAgain) => 128,
            _ => return false,
        };
        self.dims.0 > most || self.dims.1 > most
    }

    /// What makes figures of heads of those that this variant of deviation.cu leaves of rows.
    pub(crate) const fn deviation_end(self) -> Self {
        KernelVariant { algorithm: Algorithm::DeviationEnd, mask: None, block_m: 0, block_n: 0, ..self }
    }

    /// Whether it reads lengths of sequences as caches have them.
    pub(crate) const fn reads_lengths(&self) -> bool {
        matches!(self.sequences, Sequences::Ragged | Sequences::Paged)
    }

    /// Whether its parameters say which weights are dropped: those of gradients always do.
    pub(crate) const fn says_dropped(&self) -> bool {
        self.dropout || self.algorithm.pass().is_some()
    }

    /// Whether threads of hopper.cu load rows out of pages 16 bytes at a time, where TMA does not load them.
    pub(crate) const fn gathers(&self) -> bool {
        matches!((self.algorithm, self.loads), (Algorithm::Hopper, Loads::By16Bytes))
    }

    /// Whether tiles come by more than an element, in the way that its source has for them.
    const fn loads_vectors(&self) -> bool {
        !matches!(self.loads, Loads::ByElement) && !self.gathers()
    }

    /// The kernel's name in the compiled module.
    pub(crate) const fn entry(&self) -> &'static std::ffi::CStr {
        match self.algorithm {
            Algorithm::Combine => c"combine",
            Algorithm::Append => c"append",
            Algorithm::Varlen => c"varlen",
            Algorithm::Deviation => c"deviation",
            Algorithm::DeviationEnd => c"deviation_end",
            Algorithm::Backward(_)
            | Algorithm::BackwardMma(_)
            | Algorithm::BackwardHalves(_)
            | Algorithm::BackwardHopper => c"backward",
            _ => c"attention",
        }
    }

    /// Keys of a tile of decode.cu: 8 KiB or so of K and V.
    pub(crate) const fn decode_tile(dims: (u32, u32)) -> u32 {
        if dims.0 + dims.1 <= 128 { 32 } else { 16 }
    }

    /// Warps of decode.cu that read: as many as keep the memory of the largest devices busy, one block to a multiprocessor.
    pub(crate) const fn decode_warps(&self) -> u32 {
        let large = matches!(self.arch, Arch::Sm90a | Arch::Sm100 | Arch::Sm103);
        if large && self.dims.0 <= 128 && self.dims.1 <= 128 { 8 } else { 4 }
    }

    /// Blocks of decode.cu on one multiprocessor, where they fit; more lose to their streams' getting in one another's way.
    pub(crate) const fn decode_resident(&self) -> u32 {
        if self.decode_warps() == 8 || self.dims.1 > 128 { 1 } else { 2 }
    }

    /// Whether the kernel itself waits for the launch before it, or for what it reads of it and ends behind it, where the architecture can.
    pub(crate) const fn overlaps(&self) -> bool {
        let waits = matches!(self.algorithm, Algorithm::Decode | Algorithm::DecodeCodes | Algorithm::Combine)
            || matches!((self.algorithm, self.sequences), (Algorithm::Hopper, Sequences::Varlen))
            || matches!(self.algorithm, Algorithm::BackwardHopper | Algorithm::Backward(Pass::Parts))
            || matches!(self.algorithm, Algorithm::BackwardMma(Pass::KeysAgain | Pass::QueriesAgain));
        waits && !matches!(self.arch, Arch::Sm80 | Arch::Sm86 | Arch::Sm87 | Arch::Sm89)
    }

    /// Bytes of the parameters that all kernels take.
    pub(crate) fn params_bytes(&self) -> usize {
        if self.says_dropped() {
            return size_of::<DroppedParams>();
        }
        LaunchParams::bytes_of(self.codes != Codes::None, self.reads_lengths())
    }

    /// Threads per block.
    pub(crate) const fn threads(&self) -> u32 {
        match self.algorithm {
            Algorithm::Generic | Algorithm::Backward(_) | Algorithm::Wide | Algorithm::Latent => 256,
            Algorithm::Deviation | Algorithm::DeviationEnd => DEVIATION_THREADS,
            Algorithm::Mma | Algorithm::BackwardMma(_) | Algorithm::Int8 => 32 * MMA_WARPS,
            // One more puts together what they leave.
            Algorithm::Decode | Algorithm::DecodeCodes => 32 * (self.decode_warps() + 1),
            Algorithm::Hopper => 2 * self.block_m + 128,
            Algorithm::HopperF32 | Algorithm::BackwardHalves(_) => 512,
            Algorithm::BackwardHopper => 384,
            Algorithm::Combine => 32 * COMBINE_WARPS as u32,
            Algorithm::Append => 128,
            Algorithm::Varlen => 256,
        }
    }

    /// Whether head dims are no part of the code.
    const fn is_of_any_dims(&self) -> bool {
        matches!(
            self.algorithm,
            Algorithm::Generic
                | Algorithm::Combine
                | Algorithm::Append
                | Algorithm::Varlen
                | Algorithm::Deviation
                | Algorithm::DeviationEnd
        ) || matches!(self.algorithm, Algorithm::Backward(pass) if pass as u8 != Pass::Parts as u8)
    }

    /// The whole source text.
    pub(crate) fn source(&self) -> String {
        source::text(self.file_name())
    }

    /// The name of its file in `kernels/`.
    pub(crate) const fn file_name(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Generic => "generic.cu",
            Algorithm::Mma => "mma.cu",
            Algorithm::Hopper => "hopper.cu",
            Algorithm::HopperF32 => "hopper_f32.cu",
            Algorithm::Wide => "wide.cu",
            Algorithm::Decode => "decode.cu",
            Algorithm::Latent => "latent.cu",
            Algorithm::DecodeCodes => "decode_codes.cu",
            Algorithm::Int8 => "int8.cu",
            Algorithm::Combine => "combine.cu",
            Algorithm::Append => "append.cu",
            Algorithm::Varlen => "varlen.cu",
            Algorithm::Deviation => "deviation.cu",
            Algorithm::DeviationEnd => "deviation_end.cu",
            Algorithm::Backward(Pass::Rows | Pass::Sinks) => "backward_rows.cu",
            Algorithm::Backward(Pass::Parts) => "backward_parts.cu",
            Algorithm::Backward(Pass::MaskParts) => "backward_mask.cu",
            Algorithm::Backward(_) => "backward.cu",
            Algorithm::BackwardHopper if self.has_halves() => "backward_hopper_wide.cu",
            Algorithm::BackwardHopper => "backward_hopper.cu",
            Algorithm::BackwardMma(_) => "backward_mma.cu",
            Algorithm::BackwardHalves(_) => "backward_halves.cu",
        }
    }
}

impl fmt::Display for KernelVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file_name().trim_end_matches(".cu"))?;
        if let Some(pass) = self.algorithm.pass() {
            write!(f, " {}", pass.name())?;
        }
        if !matches!(self.algorithm, Algorithm::Append | Algorithm::Varlen) {
            write!(f, " {}", self.storage)?;
        }
        if !self.is_of_any_dims() {
            write!(f, " {}/{}", self.dims.0, self.dims.1)?;
            f.write_str(if self.natural { " natural" } else { "" })?;
            f.write_str(if self.loads == Loads::ByElement { " element by element" } else { "" })?;
            f.write_str(if self.loads == Loads::TmaButMask { " mask by a warp" } else { "" })?;
            f.write_str(if self.gathers() { " gathered" } else { "" })?;
        }
        match self.codes {
            Codes::None => {}
            Codes::Any => f.write_str(" codes")?,
            Codes::Tiles { k, v } => {
                for TileCodes { kind, scales, scale_layout } in [k, v] {
                    let lying = if scale_layout == ScaleLayout::Plain { "" } else { " swizzled" };
                    write!(f, " {kind:?} {scales:?}{lying}")?;
                }
            }
        }
        match self.sequences {
            Sequences::Even => {}
            Sequences::Ragged => f.write_str(" ragged")?,
            Sequences::Paged => f.write_str(" paged")?,
            Sequences::Varlen if self.algorithm != Algorithm::Varlen => f.write_str(" varlen")?,
            Sequences::Varlen => {}
        }
        f.write_str(if self.dropout { " dropout" } else { "" })?;
        self.mask.map_or(Ok(()), |dtype| write!(f, " mask {dtype}"))
    }
}
