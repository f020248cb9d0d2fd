//! The identity of a kernel's machine code, its source text and its geometry: what is compiled, and what the host must
//! know of it. Sizes of shared memory are computed here and asserted again by the compiler.

use std::fmt;

use rapt_core::{Arch, DType};

use crate::error::{CudaError, Result};
use crate::params::{HopperParams, Params};
use crate::result::nvrtc::{Compiler, Cubin};
use crate::source;
use crate::tensor_map::BOX_COLUMNS;

/// An algorithm of `kernels/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Body {
    /// Any request, on the ordinary units.
    Generic,
    /// Many queries, on the tensor cores.
    Forward,
    /// Many queries, on the tensor cores of compute capability 9.0.
    Hopper,
    /// Many queries of float32, on the tensor cores of compute capability 9.0.
    Float32,
    /// Few queries, on the tensor cores.
    Decode,
    /// Puts splits together.
    Combine,
}

/// What identifies machine code: everything that is fixed when it is compiled, and no length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Code {
    pub(crate) body: Body,
    pub(crate) arch: Arch,
    pub(crate) storage: DType,
    /// The dtype of the mask, if there is one.
    pub(crate) mask: Option<DType>,
    /// Whether scores are brought to natural units before they are compared (mma.cu).
    pub(crate) natural: bool,
    /// Whether rows of q, k and v can be moved 16 bytes at a time (mma.cu), or by the copy engine (hopper.cu).
    pub(crate) vector: bool,
    /// head_dim and head_dim_v, rounded up to 16 (mma.cu; else 0).
    pub(crate) dims: (u32, u32),
    /// Queries per block.
    pub(crate) block_m: u32,
    /// Keys per block of forward.cu and hopper.cu, tiles in flight per warp of decode.cu, value columns per block of
    /// generic.cu.
    pub(crate) depth: u32,
}

/// Keys per block of generic.cu, and of most of forward.cu.
pub(crate) const BLOCK_N: u32 = 64;
/// Columns per warp of combine.cu, and warps per block.
pub(crate) const COMBINE_COLUMNS: usize = 32;
pub(crate) const COMBINE_WARPS: usize = 2;
/// Queries per block of generic.cu.
pub(crate) const GENERIC_BLOCK_M: u32 = 64;
/// Queries per block of decode.cu.
pub(crate) const DECODE_BLOCK_M: u32 = 16;
const WARPS: u32 = 4;
/// Blocks of K, and of V, that float32.cu has in flight.
const FLOAT32_STAGES: u32 = 2;
/// Shared memory that hopper.cu may fill: 227 KiB.
const RING_BYTES: u32 = 227 * 1024;

/// Elements of a row of a tile in shared memory: `row_of` of mma.cu.
const fn row_of(dim: u32) -> u32 {
    if dim.is_multiple_of(64) { dim } else { dim + 8 }
}

impl Code {
    /// Value columns that one block of generic.cu computes.
    pub(crate) const fn generic_columns(storage: DType) -> u32 {
        if matches!(storage, DType::F64) { 64 } else { 128 }
    }

    /// The kernel's name in the compiled module.
    pub(crate) const fn entry(&self) -> &'static std::ffi::CStr {
        match self.body {
            Body::Combine => c"combine",
            _ => c"attention",
        }
    }

    /// Keys of a tile of decode.cu: 8 KiB or so of K and V.
    pub(crate) const fn decode_tile(&self) -> u32 {
        if self.dims.0 + self.dims.1 <= 128 { 32 } else { 16 }
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

    /// Whether the kernel waits for the launch before it of itself, where the architecture can.
    pub(crate) const fn overlaps(&self) -> bool {
        matches!(self.body, Body::Decode | Body::Combine)
            && !matches!(self.arch, Arch::Sm80 | Arch::Sm86 | Arch::Sm87 | Arch::Sm89)
    }

    /// Threads per block.
    pub(crate) const fn threads(&self) -> u32 {
        match self.body {
            Body::Generic => 256,
            Body::Forward => 32 * WARPS,
            // One more puts together what they leave.
            Body::Decode => 32 * (self.decode_warps() + 1),
            Body::Hopper => 2 * self.block_m + 128,
            Body::Float32 => 512,
            Body::Combine => 32 * COMBINE_WARPS as u32,
        }
    }

    /// Tiles of K, and of V, that hopper.cu has in flight.
    const fn stages(&self) -> u32 {
        if self.ring_bytes(4) + self.mask_bytes(4) <= RING_BYTES { 4 } else { 2 }
    }

    /// Tiles of the mask that hopper.cu has in flight.
    const fn mask_stages(&self) -> u32 {
        let rest = RING_BYTES.saturating_sub(self.ring_bytes(self.stages()));
        if self.mask_bytes(4) <= rest {
            4
        } else if self.mask_bytes(3) <= rest {
            3
        } else {
            2
        }
    }

    /// Shared memory of masks.cu with so many stages: its `MaskRing`.
    const fn mask_bytes(&self, stages: u32) -> u32 {
        let tiles = match self.mask {
            None => return 0,
            // Bits, and bytes that are yet to become bits.
            Some(DType::Bool) => stages * self.block_m * 16 + (stages - 1) * self.block_m * self.depth,
            Some(dtype) => {
                let key = if matches!(dtype, DType::F16 | DType::BF16) { 2 } else { 4 };
                stages * self.block_m * self.depth * key + 16
            }
        };
        (tiles + stages * (4 * 8 + 4)).next_multiple_of(16)
    }

    /// Shared memory of hopper.cu with a ring of so many stages: tiles in boxes of 64 columns, barriers, notes.
    const fn ring_bytes(&self, stages: u32) -> u32 {
        let (k, v) = (self.dims.0.div_ceil(BOX_COLUMNS), self.dims.1.div_ceil(BOX_COLUMNS));
        let row = 2 * BOX_COLUMNS;
        row * (k * self.block_m + stages * (k + v) * self.depth) + 8 * (2 + 4 * stages) + 128
    }

    /// Shared memory through which hopper.cu stores what it computed, if there is room for it. Not where it loads element by
    /// element, which has no register left for it.
    const fn staged_bytes(&self) -> u32 {
        let tile = 2 * self.block_m * self.dims.1.next_multiple_of(BOX_COLUMNS);
        let so_far = self.ring_bytes(self.stages()) + self.mask_bytes(self.mask_stages());
        if self.vector && so_far + tile <= RING_BYTES { tile } else { 0 }
    }

    /// Whether the copy engine may write what hopper.cu computed.
    pub(crate) const fn is_staged(&self) -> bool {
        matches!(self.body, Body::Hopper) && self.staged_bytes() > 0
    }

    /// Registers of a thread of hopper.cu that multiplies, and of one that loads: as many as the block was given at its start. What
    /// spills hangs on both and follows no rule: these are such that no head dim does (NVRTC 13.2, each multiple of 16).
    const fn registers(&self) -> (u32, u32) {
        let changed = self.natural && self.vector;
        match (self.mask, self.dims.1) {
            (_, 65..=80) if self.block_m == 192 && changed => (152, 56),
            (_, 81..=96) if self.block_m == 192 && changed && self.depth == 96 => (152, 56),
            _ if self.block_m == 192 => (160, 32),
            (None, 161..=176 | 241..) if changed => (224, 56),
            (None, _) if self.vector => (232, 40),
            (None, 97..=112 | 129..=144) if self.natural => (200, 104),
            (None, _) => (216, 72),
            (Some(DType::Bool), ..=64) if self.natural => (200, 104),
            (Some(DType::F16 | DType::BF16), ..=64) if changed => (200, 104),
            (Some(DType::F16 | DType::BF16), 65..=112) if changed => (216, 72),
            (Some(DType::F32), _) => (216, 72),
            (Some(_), _) => (208, 88),
        }
    }

    /// Dynamic shared memory per block: the size of the kernel's `Shared`.
    pub(crate) const fn shared_bytes(&self) -> u32 {
        let (k_row, v_row) = (row_of(self.dims.0), row_of(self.dims.1));
        match self.body {
            Body::Generic => {
                let (size, depth) = if matches!(self.storage, DType::F64) { (8, 16) } else { (4, 32) };
                let padded = GENERIC_BLOCK_M + 4;
                let (qk, v) = (2 * depth * padded, depth * Code::generic_columns(self.storage));
                (BLOCK_N * padded + if qk > v { qk } else { v }) * size + 16 * GENERIC_BLOCK_M
            }
            Body::Forward => {
                let tiles = 2 * (self.block_m * k_row + self.depth * (k_row + v_row));
                let staged = 4 * WARPS * 16 * (self.dims.1 + 4);
                if tiles > staged { tiles } else { staged }
            }
            Body::Decode => {
                let ring = 2 * self.decode_warps() * self.depth * self.decode_tile() * (k_row + v_row);
                let parts = 16 * self.decode_warps() / 32;
                let (left, so_far) = (4 * 32 * (self.dims.1 + 8 + 2), 4 * 16 * self.dims.1 + 2 * 4 * 32 * parts);
                ring + 2 * 16 * k_row + left + so_far + 2 * 8 + 8
            }
            Body::Hopper => self.ring_bytes(self.stages()) + self.mask_bytes(self.mask_stages()) + self.staged_bytes(),
            Body::Float32 => {
                let (k, v) = (self.dims.0.div_ceil(BOX_COLUMNS), self.dims.1.div_ceil(BOX_COLUMNS));
                let (row, stages) = (2 * 2 * BOX_COLUMNS, FLOAT32_STAGES);
                let tiles = row * (k * self.block_m + stages * (k + v) * self.depth);
                tiles + 4 * (self.block_m + stages * 2 * self.depth) + 8 * 4 * stages + 2 * 4 * (2 + 2 * stages)
            }
            Body::Combine => 0,
        }
    }

    /// The whole source text.
    pub(crate) fn source(&self) -> String {
        source::text(match self.body {
            Body::Generic => "generic.cu",
            Body::Forward => "mma.cu",
            Body::Hopper => "hopper.cu",
            Body::Float32 => "hopper_f32.cu",
            Body::Decode => "decode.cu",
            Body::Combine => "combine.cu",
        })
    }

    /// The compiler's options.
    pub(crate) fn options(&self) -> Vec<String> {
        let mut options = vec![
            format!("-arch={}", self.arch.name()),
            "-std=c++17".to_owned(),
            "-default-device".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        let mask = match self.mask {
            None => 0,
            Some(DType::Bool) => 1,
            Some(_) => 2,
        };
        let mut define = |name: &str, value: u32| options.push(format!("-D{name}={value}"));
        define("PARAMS_BYTES", size_of::<Params>() as u32);
        define("SHARED_BYTES", self.shared_bytes());
        define("STORAGE", u32::from(self.storage.code()));
        define("MASK", mask);
        define("MASK_DTYPE", self.mask.map_or(0, |dtype| u32::from(dtype.code())));
        match self.body {
            Body::Generic => define("DV_COLUMNS", self.depth),
            Body::Forward | Body::Hopper | Body::Float32 | Body::Decode => {
                define("NATURAL", u32::from(self.natural));
                define("VECTOR", u32::from(self.vector));
                define("HEAD_DIM", self.dims.0);
                define("HEAD_DIM_V", self.dims.1);
            }
            Body::Combine => {}
        }
        match self.body {
            Body::Forward => {
                define("BLOCK_M", self.block_m);
                define("BLOCK_N", self.depth);
                // Two blocks on a multiprocessor overlap one's products with the other's softmax.
                define("MIN_BLOCKS", if self.shared_bytes() <= 96 * 1024 { 2 } else { 1 });
            }
            Body::Hopper => {
                let (multiplying, loading) = self.registers();
                define("HOPPER_BYTES", size_of::<HopperParams>() as u32);
                define("BLOCK_M", self.block_m);
                define("BLOCK_N", self.depth);
                define("STAGES", self.stages());
                define("STAGED", u32::from(self.is_staged()));
                if self.mask.is_some() {
                    define("MASK_STAGES", self.mask_stages());
                }
                define("CONSUMER_REGISTERS", multiplying);
                define("PRODUCER_REGISTERS", loading);
            }
            Body::Float32 => {
                define("BLOCK_M", self.block_m);
                define("BLOCK_N", self.depth);
                define("STAGES", FLOAT32_STAGES);
                define("LAST_COLUMNS", (self.dims.1 - 1) % BOX_COLUMNS + 1);
                // As many as 512 threads were given at the start: 128 each.
                let loading = if self.vector { 80 } else { 88 };
                define("LOADING_REGISTERS", loading);
                define("MULTIPLYING_REGISTERS", 256 - loading);
            }
            Body::Decode => {
                define("STAGES", self.depth);
                define("TILE", self.decode_tile());
                define("WARPS", self.decode_warps());
                define("RESIDENT", self.decode_resident());
            }
            // Four of its warps fit beside a block of decode.cu in what that leaves of the registers.
            Body::Combine if !matches!(self.storage, DType::F64) => options.push("-maxrregcount=88".to_owned()),
            _ => {}
        }
        options
    }

    /// Compiles this.
    pub(crate) fn compile(&self, compiler: &dyn Compiler) -> Result<Cubin> {
        let refused = |log| CudaError::Compile { kernel: self.to_string(), arch: self.arch.name(), log };
        compiler.compile(&format!("{}.cu", self.name()), &self.source(), &self.options())?.map_err(refused)
    }

    const fn name(&self) -> &'static str {
        match self.body {
            Body::Generic => "generic",
            Body::Forward => "forward",
            Body::Hopper => "hopper",
            Body::Float32 => "float32",
            Body::Decode => "decode",
            Body::Combine => "combine",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.storage)?;
        if matches!(self.body, Body::Forward | Body::Hopper | Body::Float32 | Body::Decode) {
            write!(f, " {}/{}", self.dims.0, self.dims.1)?;
            f.write_str(if self.natural { " natural" } else { "" })?;
            f.write_str(if self.vector { "" } else { " element by element" })?;
        }
        self.mask.map_or(Ok(()), |dtype| write!(f, " mask {dtype}"))
    }
}

/// What the compiler reported of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The kernel.
    pub code: Code,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of spill stores in the kernel itself.
    pub spilled_bytes: u32,
    /// The size of the machine code.
    pub cubin_bytes: usize,
}

impl Report {
    /// Reads the compiler's log: the entry's own lines, before those of functions that it calls.
    pub(crate) fn read(code: Code, cubin: &Cubin) -> Option<Self> {
        let entry = cubin.log.split_once("Compiling entry function")?.1;
        let number_before = |word: &str| {
            let head = entry.split_once(word)?.0;
            head.split_whitespace().next_back()?.parse::<u32>().ok()
        };
        let spilled_bytes = number_before("bytes spill stores")?;
        let registers = entry.split_once("Used ")?.1.split_whitespace().next()?.parse().ok()?;
        Some(Report { code, registers, spilled_bytes, cubin_bytes: cubin.bytes.len() })
    }
}
