//! The identity of a kernel's text: what is fixed when it is compiled, and no length.

use std::fmt;

use rapt_core::{DType, Spec};

/// Rows of a block, keys of a block, and columns of values of a block: `BLOCK_M`, `BLOCK_N` and `BLOCK_DV` of wgsl/generic.wgsl.
pub(crate) const BLOCK_M: usize = 64;
pub(crate) const BLOCK_N: usize = 32;
pub(crate) const BLOCK_DV: usize = 64;
/// Threads of a workgroup.
pub(crate) const THREADS: usize = 256;
/// Bytes of workgroup memory: three tiles, the attended keys, and a word.
pub(crate) const SHARED_BYTES: usize = 256 * 16 + 256 * 8 + 512 * 16 + 256 * 4 + 4;

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
    /// The variant for the dtypes of `spec`; `has_16_bit_stores`: whether the device's text may say so.
    pub(crate) fn of(spec: &Spec, has_16_bit_stores: bool) -> Self {
        let out = spec.out.dtype;
        let stores = match (out, has_16_bit_stores) {
            (DType::F32, _) => Stores::Words,
            (_, true) => Stores::Halves,
            (_, false) => Stores::HalvesOfWords,
        };
        KernelVariant { storage: spec.numerics.storage, mask: spec.mask.map(|mask| mask.dtype), out, stores }
    }

    /// The name of its entry point.
    #[must_use]
    pub const fn entry(&self) -> &'static str {
        "attention"
    }
}

impl fmt::Display for KernelVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelVariant { storage, mask, out, stores } = self;
        write!(f, "generic {storage} to {out} {stores:?}")?;
        mask.map_or(Ok(()), |mask| write!(f, " mask {mask}"))
    }
}
