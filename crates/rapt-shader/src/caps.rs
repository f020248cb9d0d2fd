//! What of a device a selection depends on.

use rapt_core::Arch;

use crate::matrices::MatrixUnits;

/// What a device has, as far as a selection depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Caps {
    /// The language of its texts: [`Arch::Wgsl`] or [`Arch::Msl`].
    pub arch: Arch,
    /// Whether texts may store 16-bit integers (`enable wgpu_int16`).
    pub has_16_bit_stores: bool,
    /// Most bytes of one storage binding.
    pub max_binding_bytes: u64,
    /// What the offset of a binding is a multiple of, in bytes.
    pub offset_alignment: u32,
    /// Most workgroups of a launch.
    pub max_items: usize,
    /// Most threads of a workgroup.
    pub max_threads: usize,
    /// Most bytes of workgroup memory.
    pub max_shared_bytes: usize,
    /// Blocks of 64 rows that are so few that most of its multiprocessors would have none: there `forward` has 32 rows a workgroup.
    pub few_blocks: usize,
    /// Whether it is a processor that computes what a GPU does, on subgroups of 8 threads, always, which texts may use.
    pub has_lanes: bool,
    /// Its cooperative matrices, if texts may use them.
    pub matrices: Option<MatrixUnits>,
}

impl Caps {
    /// For a device that does not say how many multiprocessors it has. An H200 has 132: with 16 blocks 64 rows took 1.6 times as long as 32, with 256
    /// 0.8 times (float32, head_dim 64; 2026-11).
    const FEW_BLOCKS: usize = 64;

    /// What every WebGPU device has.
    pub const WEBGPU: Caps = Caps {
        arch: Arch::Wgsl,
        has_16_bit_stores: false,
        max_binding_bytes: 128 << 20,
        offset_alignment: 256,
        max_items: 65_535 * 65_535,
        max_threads: 256,
        max_shared_bytes: 16 << 10,
        few_blocks: Caps::FEW_BLOCKS,
        has_lanes: false,
        matrices: None,
    };

    /// What every Apple GPU since the M1 has, of families 7 and up. A buffer is bound at any element, and indices have 31 bits.
    pub const METAL: Caps = Caps {
        arch: Arch::Msl,
        has_16_bit_stores: true,
        max_binding_bytes: 1 << 31,
        offset_alignment: 4,
        max_items: 65_535 * 65_535,
        max_threads: 1024,
        max_shared_bytes: 32 << 10,
        few_blocks: Caps::FEW_BLOCKS,
        has_lanes: false,
        matrices: Some(MatrixUnits::METAL),
    };

    /// What errors call the language of its texts.
    pub(crate) const fn language(&self) -> &'static str {
        match self.arch {
            Arch::Msl => "Metal",
            _ => "WGSL",
        }
    }
}
