//! The identity of a kernel's text: what is fixed when it is compiled, and no length.

use std::fmt;

use rapt_core::{DType, Kernel, Spec};

use crate::matrices::MatrixTiles;
pub(crate) use crate::tiles::{BLOCK_M, Tiles};

/// Most rows of a task that `decode` serves.
pub(crate) const MOST_FEW_ROWS: usize = 16;
/// Most splits of the keys: threads of `combine`.
pub(crate) const MOST_SPLITS: usize = 128;
/// Columns of q that `lanes` holds, and of values of a workgroup.
pub(crate) const LANES_COLUMNS: usize = 64;
/// Keys of the shortest split.
pub(crate) const LEAST_SPLIT: usize = 256;

/// The algorithm of a text, with what of its tiles depends on sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// wgsl/generic.wgsl: every request.
    Generic,
    /// wgsl/forward.wgsl: many queries.
    Forward {
        /// How many times 64 columns of values a workgroup has: 1 or 2.
        column_groups: usize,
        /// How many times 32 rows: 1 or 2. The same bits come of both.
        row_groups: usize,
    },
    /// wgsl/lanes.wgsl: many queries, on a processor.
    Lanes,
    /// wgsl/matrices.wgsl: many queries, or few and a part of the keys, on a device with cooperative matrices of their dtype.
    Matrices(MatrixTiles),
    /// wgsl/decode.wgsl: few queries, of a part of the keys.
    Decode {
        /// Rows of a workgroup: 4 or 8, or 1 where a key head has no more.
        rows: usize,
    },
    /// wgsl/combine.wgsl: what `decode` found, folded to rows.
    Combine,
}

impl Algorithm {
    /// Its name among rapt-core's.
    pub(crate) const fn kernel(self) -> Kernel {
        match self {
            Algorithm::Generic => Kernel::Generic,
            Algorithm::Forward { .. } | Algorithm::Lanes => Kernel::Forward,
            Algorithm::Matrices(tiles) if tiles.is_split() => Kernel::Decode,
            Algorithm::Matrices(_) => Kernel::Matrices,
            Algorithm::Decode { .. } | Algorithm::Combine => Kernel::Decode,
        }
    }

    /// Whether its workgroups have parts of the keys, which [`Algorithm::Combine`] folds.
    pub(crate) const fn is_split(self) -> bool {
        match self {
            Algorithm::Decode { .. } => true,
            Algorithm::Matrices(tiles) => tiles.is_split(),
            _ => false,
        }
    }

    /// `generic`: three tiles, the attended keys, and a word. `forward`: tiles (of q and k, or of v with weights), attended keys, where rows lie, and three words. `decode`: queries,
    /// sums, maxima, weights, attended keys, and a word. `combine`: of each split factors, sums and flags, of eight sums and flags; shares.
    pub(crate) fn tiles(self) -> Tiles {
        match self {
            Algorithm::Generic => Tiles {
                block_m: BLOCK_M,
                block_n: 32,
                block_dv: 64,
                threads: 256,
                shared_bytes: 256 * 16 + 256 * 8 + 512 * 16 + 256 * 4 + 4,
            },
            Algorithm::Forward { column_groups, row_groups } => Tiles {
                block_m: 32 * row_groups,
                block_n: 64,
                block_dv: 64 * column_groups,
                threads: 128,
                shared_bytes: (16 * (8 * row_groups + 1) + 256 * column_groups + 16 + 8 * row_groups) * 16
                    + 128 * 4
                    + 12,
            },
            Algorithm::Lanes => Tiles {
                block_m: BLOCK_M,
                block_n: 4,
                block_dv: LANES_COLUMNS,
                threads: 16,
                // The word of `for_tile`, which is not written.
                shared_bytes: 4,
            },
            Algorithm::Matrices(tiles) => tiles.tiles(),
            Algorithm::Decode { rows } => Tiles {
                block_m: rows,
                block_n: 64,
                block_dv: 128,
                threads: 128,
                shared_bytes: ((256 + 64) * rows.div_ceil(4) + 520 + 128) * 4 * rows.min(4) + 128 * 4 + 4,
            },
            Algorithm::Combine => Tiles {
                block_m: 4,
                block_n: 1,
                block_dv: 8,
                threads: MOST_SPLITS,
                shared_bytes: MOST_SPLITS * (16 + 16 + 4 + 16) + MOST_SPLITS / 8 * (16 + 4),
            },
        }
    }
}

/// A buffer that variants bind, in group 0 behind the parameters, which are binding 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The tensor, which is its name in the text, or `partials`: what `decode` leaves to `combine`.
    pub tensor: &'static str,
    /// Its binding.
    pub index: u32,
    /// Whether it is written.
    pub is_output: bool,
}

const fn binding(tensor: &'static str, index: u32, is_output: bool) -> Binding {
    Binding { tensor, index, is_output }
}

/// The tensors. What a request does not have is bound to any buffer and not read.
pub const BINDINGS: [Binding; 8] = [
    binding("q", 1, false),
    binding("k", 2, false),
    binding("v", 3, false),
    binding("mask", 4, false),
    binding("sinks", 5, false),
    binding("alibi", 6, false),
    binding("out", 7, true),
    binding("lse", 8, true),
];

/// The binding of what `decode` leaves to `combine`.
pub const PARTIALS: u32 = 9;

const DECODED: [Binding; 6] =
    [BINDINGS[0], BINDINGS[1], BINDINGS[2], BINDINGS[3], BINDINGS[5], binding("partials", PARTIALS, true)];
const COMBINED: [Binding; 4] = [BINDINGS[4], BINDINGS[6], BINDINGS[7], binding("partials", PARTIALS, false)];

/// How elements of out are stored, so that no byte beside them changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stores {
    /// Whole words, of float32.
    Words,
    /// 16-bit elements, by 16-bit stores.
    Halves,
    /// 16-bit elements, by two atomic operations on their word which change these bits alone.
    HalvesOfWords,
}

/// What identifies a kernel's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct KernelVariant {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The dtype of q, k and v.
    pub storage: DType,
    /// The dtype of the mask, if there is one.
    pub mask: Option<DType>,
    /// The dtype of out.
    pub out: DType,
    /// How it is stored.
    pub stores: Stores,
}

impl KernelVariant {
    /// The variant of `algorithm` for the dtypes of `spec`; `has_16_bit_stores`: whether the device's text may say so.
    fn of(algorithm: Algorithm, spec: &Spec, has_16_bit_stores: bool) -> Self {
        let out = spec.out.dtype;
        let stores = match (out, has_16_bit_stores) {
            (DType::F32, _) => Stores::Words,
            (_, true) => Stores::Halves,
            (_, false) => Stores::HalvesOfWords,
        };
        let (storage, mask) = (spec.numerics.storage, spec.mask.map(|mask| mask.dtype));
        KernelVariant { algorithm, storage, mask, out, stores }
    }

    /// The kernels that `algorithm` launches: what `decode` leaves is float32, and `combine` stores out.
    pub(crate) fn all_of(algorithm: Algorithm, spec: &Spec, has_16_bit_stores: bool) -> (Self, Option<Self>) {
        let whole = KernelVariant::of(algorithm, spec, has_16_bit_stores);
        match algorithm {
            _ if algorithm.is_split() => {
                let combine = KernelVariant { algorithm: Algorithm::Combine, storage: DType::F32, mask: None, ..whole };
                (KernelVariant { out: DType::F32, stores: Stores::Words, ..whole }, Some(combine))
            }
            _ => (whole, None),
        }
    }

    /// The buffers that it binds.
    #[must_use]
    pub const fn bindings(&self) -> &'static [Binding] {
        match self.algorithm {
            Algorithm::Combine => &COMBINED,
            _ if self.algorithm.is_split() => &DECODED,
            _ => &BINDINGS,
        }
    }

    /// Whether its text asks for the number of a thread's subgroup.
    #[must_use]
    pub const fn has_subgroups(&self) -> bool {
        matches!(self.algorithm, Algorithm::Matrices(_) | Algorithm::Lanes)
    }

    /// Threads of a workgroup.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.algorithm.tiles().threads
    }

    /// Bytes of workgroup memory.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        self.algorithm.tiles().shared_bytes
    }

    /// The name of its entry point.
    #[must_use]
    pub const fn entry(&self) -> &'static str {
        "attention"
    }
}

impl fmt::Display for KernelVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelVariant { algorithm, storage, mask, out, stores } = self;
        match algorithm {
            Algorithm::Generic => write!(f, "generic")?,
            Algorithm::Forward { .. } => {
                let Tiles { block_m, block_dv, .. } = algorithm.tiles();
                write!(f, "forward of {block_m} rows and {block_dv} columns")?;
            }
            Algorithm::Lanes => write!(f, "lanes")?,
            Algorithm::Matrices(tiles) if tiles.is_split() => {
                write!(f, "decode of {} rows on matrices {tiles}", tiles.block_m)?;
            }
            Algorithm::Matrices(tiles) => write!(f, "matrices {tiles}")?,
            Algorithm::Decode { rows: 1 } => write!(f, "decode of a row")?,
            Algorithm::Decode { rows } => write!(f, "decode of {rows} rows")?,
            Algorithm::Combine => write!(f, "combine")?,
        }
        write!(f, " {storage} to {out} {stores:?}")?;
        mask.map_or(Ok(()), |mask| write!(f, " mask {mask}"))
    }
}
