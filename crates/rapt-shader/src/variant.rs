//! The identity of a kernel's text: what is fixed when it is compiled, and no length.

use std::fmt;

use rapt_core::{DType, Kernel, Spec};

/// Rows of a block, whatever the algorithm: the rows of windows are counted in these.
pub(crate) const BLOCK_M: usize = 64;

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
    },
}

/// What a workgroup takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiles {
    /// Keys of a block.
    pub(crate) block_n: usize,
    /// Columns of values.
    pub(crate) block_dv: usize,
    /// Threads.
    pub(crate) threads: usize,
    /// Bytes of workgroup memory.
    pub(crate) shared_bytes: usize,
}

impl Tiles {
    /// Those of what launches nothing.
    pub(crate) const NONE: Tiles = Tiles { block_n: 1, block_dv: 1, threads: 1, shared_bytes: 0 };
}

impl Algorithm {
    /// Its name among rapt-core's.
    pub(crate) const fn kernel(self) -> Kernel {
        match self {
            Algorithm::Generic => Kernel::Generic,
            Algorithm::Forward { .. } => Kernel::Forward,
        }
    }

    /// `generic`: three tiles, the attended keys, and a word. `forward`: tiles, weights, attended keys, where rows lie, and a word.
    pub(crate) const fn tiles(self) -> Tiles {
        match self {
            Algorithm::Generic => Tiles {
                block_n: 32,
                block_dv: 64,
                threads: 256,
                shared_bytes: 256 * 16 + 256 * 8 + 512 * 16 + 256 * 4 + 4,
            },
            Algorithm::Forward { column_groups } => Tiles {
                block_n: 64,
                block_dv: 64 * column_groups,
                threads: 128,
                shared_bytes: 544 * 16 + 1088 * 16 + 128 * 4 + 16 * 16 + 4,
            },
        }
    }
}

/// A buffer that every variant binds, in group 0 behind the parameters, which are binding 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// The tensor, which is its name in the text.
    pub tensor: &'static str,
    /// Its binding.
    pub index: u32,
    /// Whether it is written.
    pub is_output: bool,
}

const fn binding(tensor: &'static str, index: u32, is_output: bool) -> Binding {
    Binding { tensor, index, is_output }
}

/// The buffers of every variant. What a request does not have is bound to any buffer and not read.
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
    pub(crate) fn of(algorithm: Algorithm, spec: &Spec, has_16_bit_stores: bool) -> Self {
        let out = spec.out.dtype;
        let stores = match (out, has_16_bit_stores) {
            (DType::F32, _) => Stores::Words,
            (_, true) => Stores::Halves,
            (_, false) => Stores::HalvesOfWords,
        };
        let (storage, mask) = (spec.numerics.storage, spec.mask.map(|mask| mask.dtype));
        KernelVariant { algorithm, storage, mask, out, stores }
    }

    /// Threads of a workgroup.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.algorithm.tiles().threads
    }

    /// Bytes of workgroup memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> usize {
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
            Algorithm::Forward { .. } => write!(f, "forward of {} columns", algorithm.tiles().block_dv)?,
        }
        write!(f, " {storage} to {out} {stores:?}")?;
        mask.map_or(Ok(()), |mask| write!(f, " mask {mask}"))
    }
}
