//! What the compiler is asked for: options, and the macros that a kernel's source is compiled with.

use rapt_core::{Arch, DType, ScaleLayout};

use super::shared::{BACKWARD_HALVES_STAGES, BACKWARD_Q_STAGES, HOPPER_F32_STAGES};
use super::{Algorithm, KernelVariant, Loads, Pass, Sequences, generic_columns};
use crate::append::AppendParams;
use crate::backward::{BackwardHopperParams, BackwardParams};
use crate::codes::{Codes, TileCodes, TileScales};
use crate::deviation::DeviationParams;
use crate::params::{HopperCacheParams, HopperParams};
use crate::tensor_map::BOX_COLUMNS;
use crate::varlen::VarlenParams;

/// Options in the order in which they are added: it is part of what names machine code.
struct Options(Vec<String>);

impl Options {
    fn define(&mut self, name: &str, value: u32) {
        self.0.push(format!("-D{name}={value}"));
    }

    /// K or V of decode_codes.cu, mma.cu and int8.cu.
    fn add_tiles(&mut self, operand: &str, codes: TileCodes) {
        let (scales, block, dtype) = match codes.scales {
            TileScales::Uniform => (0, 1, DType::F32),
            TileScales::Token => (1, 1, DType::F32),
            TileScales::Channel => (2, 1, DType::F32),
            TileScales::Block(size, dtype) => (3, size, dtype),
        };
        self.define(&format!("{operand}_KIND"), codes.kind as u32);
        self.define(&format!("{operand}_SCALES"), scales);
        self.define(&format!("{operand}_BLOCK"), block);
        self.define(&format!("{operand}_SCALE_DTYPE"), u32::from(dtype.code()));
        if codes.scale_layout == ScaleLayout::Swizzle32x4x4 {
            self.define(&format!("{operand}_SWIZZLED"), 1);
        }
    }
}

impl KernelVariant {
    /// Registers of a thread of hopper.cu that multiplies, and of one that loads: as many as the block was given at its start. What
    /// spills hangs on both and follows no rule: these are such that no head dim does (NVRTC 13.2, each multiple of 16, values as
    /// wide; 64/96 spills 8 bytes).
    const fn registers(&self) -> (u32, u32) {
        let is_tma = matches!(self.loads, Loads::Tma);
        let changed = self.natural && is_tma;
        let of_cache = is_tma && self.reads_lengths();
        match (self.mask, self.dims.1) {
            // 12 to 16 bytes are spilled beside softcap and slopes here, with fewer registers or more.
            (None, 113..=128) if of_cache && self.natural => (232, 40),
            (None, _) if of_cache => (224, 56),
            (_, 65..=80) if self.block_m == 192 && changed => (152, 56),
            (_, 81..=96) if self.block_m == 192 && changed && self.block_n == 96 => (152, 56),
            _ if self.block_m == 256 => (112, 32),
            _ if self.block_m == 192 => (160, 32),
            (None, 161..=176 | 241..) if changed => (224, 56),
            (None, _) if is_tma => (232, 40),
            (None, 97..=112 | 129..=144) if self.natural => (200, 104),
            (None, _) => (216, 72),
            (Some(DType::Bool), ..=64) if self.natural => (200, 104),
            (Some(DType::F16 | DType::BF16), ..=64) if changed => (200, 104),
            (Some(DType::F16 | DType::BF16), 65..=112) if changed => (216, 72),
            (Some(DType::F32), _) => (216, 72),
            (Some(_), _) => (208, 88),
        }
    }

    /// The compiler's options.
    pub(crate) fn options(&self) -> Vec<String> {
        let mut options = Options(vec![
            format!("-arch={}", self.arch.name()),
            "-std=c++17".to_owned(),
            "-default-device".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ]);
        let mask = match self.mask {
            None => 0,
            Some(DType::Bool) => 1,
            Some(_) => 2,
        };
        options.define("PARAMS_BYTES", self.params_bytes() as u32);
        options.define("SHARED_BYTES", self.shared_bytes());
        options.define("STORAGE", u32::from(self.storage.code()));
        options.define("MASK", mask);
        options.define("MASK_DTYPE", self.mask.map_or(0, |dtype| u32::from(dtype.code())));
        if !self.is_of_any_dims() {
            options.define("NATURAL", u32::from(self.natural));
            options.define("VECTOR", u32::from(self.loads_vectors()));
            options.define("HEAD_DIM", self.dims.0);
            options.define("HEAD_DIM_V", self.dims.1);
        }
        match self.algorithm {
            Algorithm::Generic => options.define("DV_COLUMNS", generic_columns(self.storage)),
            Algorithm::Mma => {
                options.define("BLOCK_M", self.block_m);
                options.define("BLOCK_N", self.block_n);
                // Two blocks on a multiprocessor overlap one's products with the other's softmax.
                options.define("MIN_BLOCKS", if self.shared_bytes() <= 96 * 1024 { 2 } else { 1 });
            }
            Algorithm::Int8 => {
                options.define("BLOCK_M", self.block_m);
                options.define("BLOCK_N", self.block_n);
                options.define("MIN_BLOCKS", self.int8_resident());
            }
            Algorithm::Hopper => self.add_hopper(&mut options),
            Algorithm::HopperF32 => {
                options.define("BLOCK_M", self.block_m);
                options.define("BLOCK_N", self.block_n);
                self.add_hopper_f32(&mut options);
            }
            Algorithm::Wide | Algorithm::Latent => {
                options.define("BLOCK_M", self.block_m);
                options.define("BLOCK_N", self.block_n);
                if self.stages > 0 {
                    options.define("STAGES", self.stages);
                }
            }
            Algorithm::Decode | Algorithm::DecodeCodes => {
                options.define("STAGES", self.stages);
                options.define("TILE", self.block_n);
                options.define("WARPS", self.decode_warps());
                options.define("RESIDENT", self.decode_resident());
            }
            // Four of its warps fit beside a block of decode.cu in what that leaves of the registers.
            Algorithm::Combine => {
                options.define("LANE_COLUMNS", self.block_n);
                if self.storage != DType::F64 {
                    options.0.push("-maxrregcount=88".to_owned());
                }
            }
            Algorithm::Append => {
                options.define("APPEND_BYTES", AppendParams::bytes_of(self.codes != Codes::None) as u32);
            }
            Algorithm::Varlen => options.define("VARLEN_BYTES", size_of::<VarlenParams>() as u32),
            Algorithm::Deviation => {
                options.define("DEVIATION_BYTES", DeviationParams::bytes() as u32);
                options.define("BLOCK_M", self.block_m);
            }
            Algorithm::Backward(pass) | Algorithm::BackwardMma(pass) | Algorithm::BackwardHalves(pass) => {
                self.add_backward(&mut options, pass);
            }
            Algorithm::BackwardHopper => self.add_backward_hopper(&mut options),
            Algorithm::DeviationEnd => options.define("DEVIATION_BYTES", DeviationParams::bytes() as u32),
        }
        // Last, so that kernels without codes keep their names.
        if self.codes != Codes::None {
            // Of common/types.cuh: codes that become tiles of numbers, and codes that are multiplied.
            const AS_NUMBERS: u32 = 2;
            const AS_INTEGERS: u32 = 3;
            options.define(
                "CODES",
                match self.algorithm {
                    Algorithm::Mma => AS_NUMBERS,
                    Algorithm::Int8 => AS_INTEGERS,
                    _ => 1,
                },
            );
        }
        self.add_sequences(&mut options);
        self.add_tiles(&mut options);
        if self.says_dropped() {
            options.define("DROPOUT", u32::from(self.dropout));
        }
        options.0
    }

    fn add_backward(&self, options: &mut Options, pass: Pass) {
        options.define("BACKWARD_BYTES", size_of::<BackwardParams>() as u32);
        let again = match pass {
            Pass::KeysAgain => Some(Pass::Keys),
            Pass::QueriesAgain => Some(Pass::Queries),
            _ => None,
        };
        options.define("PASS", again.unwrap_or(pass) as u32);
        if again.is_some() {
            options.define("AGAIN", 1);
        }
        if matches!(self.algorithm, Algorithm::BackwardMma(_) | Algorithm::BackwardHalves(_)) {
            options.define("BLOCK_M", self.block_m);
            options.define("BLOCK_N", self.block_n);
            options.define("SPLIT", u32::from(self.is_split()));
        }
        if matches!(self.algorithm, Algorithm::BackwardMma(_)) {
            options.define("STAGES", self.stages);
            options.define(
                "MIN_BLOCKS",
                match self.shared_bytes() {
                    // Their loads are behind one another's products.
                    ..=76_800 if pass == Pass::Mask => 3,
                    ..=114_688 => 2,
                    _ => 1,
                },
            );
        } else if matches!(self.algorithm, Algorithm::BackwardHalves(_)) {
            self.add_backward_halves(options);
        } else if pass == Pass::Parts {
            options.define("DQ_COLUMNS", self.dq_columns());
            options.define("DQ_ROW", self.dq_row());
            options.define("DQ_TURNED", u32::from(self.turns_dq()));
            options.define("BLOCK_M", self.backward_block_m() as u32);
            options.define("BLOCK_N", self.backward_block_n() as u32);
        } else if pass == Pass::MaskParts || (pass == Pass::Rows && self.sequences == Sequences::Varlen) {
            options.define("BLOCK_M", self.block_m);
            options.define("BLOCK_N", self.block_n);
        } else if !matches!(pass, Pass::Rows | Pass::Sinks) {
            options.define("DV_COLUMNS", generic_columns(self.storage));
        }
    }

    fn add_backward_halves(&self, options: &mut Options) {
        options.define("A_STAGES", BACKWARD_HALVES_STAGES);
        let last = |columns: u32| (columns - 1) % BOX_COLUMNS + 1;
        options.define("LAST_COLUMNS", last(self.dims.0));
        options.define("LAST_COLUMNS_V", last(self.dims.1));
        // Scores that are changed, and addresses of elements, leave the second of two quarters no registers.
        let is_plain = !self.natural && self.mask.is_none() && self.loads != Loads::ByElement;
        options.define("QUARTERS", if is_plain { 2 } else { 1 });
        // As many as 512 threads were given at the start: 128 each. What spills follows no rule: these leave 0 to 8 bytes, up to 64 beside biases, and
        // up to 132 where weights are dropped and nothing else is asked (NVRTC 13.2).
        let loading = match (self.dims.0.max(self.dims.1), self.loads) {
            (..=64, Loads::ByElement) => 48,
            (..=64, _) => 40,
            (65..=112, _) => 64,
            _ if self.dropout => 64,
            _ => 56,
        };
        options.define("LOADING_REGISTERS", loading);
        options.define("MULTIPLYING_REGISTERS", 256 - loading);
    }

    fn add_backward_hopper(&self, options: &mut Options) {
        options.define("BACKWARD_BYTES", size_of::<BackwardParams>() as u32);
        options.define("BACKWARD_HOPPER_BYTES", size_of::<BackwardHopperParams>() as u32);
        options.define("BLOCK_M", self.block_m);
        options.define("BLOCK_N", self.block_n);
        options.define("DQ_COLUMNS", self.dq_columns());
        options.define("Q_STAGES", BACKWARD_Q_STAGES);
        options.define("D_O_STAGES", self.backward_d_o_stages());
        if self.has_halves() {
            options.define("DV_COLUMNS", self.half_columns().1);
        }
        options.define("DQ_TURNED", u32::from(self.turns_dq()));
        options.define("DQ_STAGES", self.backward_dq_stages());
        options.define("MASK_BOXES", self.backward_mask_boxes());
        options.define("MASK_BY_WARP", u32::from(self.loads == Loads::TmaButMask));
        // As many as 384 threads were given at the start. Who loads element by element takes the time, and needs more: some products are then done one by
        // one (C7512), and a few bytes spilled.
        let (consumer, producer) = if self.loads == Loads::ByElement { (232, 40) } else { (240, 24) };
        options.define("CONSUMER_REGISTERS", consumer);
        options.define("PRODUCER_REGISTERS", producer);
    }

    /// How keys are told apart by batch entry, and found.
    fn add_sequences(&self, options: &mut Options) {
        if self.reads_lengths() {
            options.define("RAGGED", 1);
        }
        if self.sequences == Sequences::Varlen {
            // Of common/types.cuh: the heads of a group share the rows of decode.cu and decode_codes.cu.
            const ROWS_OF_HEAD: u32 = 1;
            const ROWS_OF_GROUP: u32 = 2;
            let is_decode = matches!(self.algorithm, Algorithm::Decode | Algorithm::DecodeCodes);
            options.define("VARLEN", if is_decode { ROWS_OF_GROUP } else { ROWS_OF_HEAD });
        }
        if self.sequences == Sequences::Paged {
            options.define("PAGED", 1);
        }
        if self.gathers() {
            options.define("GATHERS", 1);
        }
    }

    /// Codes of K and V in tiles.
    fn add_tiles(&self, options: &mut Options) {
        if let Codes::Tiles { k, v } = self.codes {
            options.add_tiles("K", k);
            options.add_tiles("V", v);
            if self.algorithm == Algorithm::DecodeCodes {
                options.define("K_RUN", k.key_run(self.dims.0).unwrap_or(0));
                options.define("BLOCK_M", self.block_m);
            }
        }
    }

    /// Blocks of int8.cu on one multiprocessor: as many as leave scores and sums in registers (NVRTC 13.2: of three 16 bytes are spilled on
    /// other architectures).
    const fn int8_resident(&self) -> u32 {
        let large = matches!(self.arch, Arch::Sm90a | Arch::Sm100 | Arch::Sm103);
        let is_plain = !self.natural && self.mask.is_none();
        if is_plain && (self.dims.1 <= 64 || (large && self.dims.1 <= 128)) { 3 } else { 2 }
    }

    fn add_hopper_f32(&self, options: &mut Options) {
        options.define("STAGES", HOPPER_F32_STAGES);
        options.define("LAST_COLUMNS", (self.dims.1 - 1) % BOX_COLUMNS + 1);
        // As many as 512 threads were given at the start: 128 each.
        let loading = match (self.loads, self.sequences) {
            // 4 bytes are spilled here, with other numbers more.
            (Loads::ByElement, Sequences::Paged) => 96,
            (Loads::ByElement, _) => 88,
            _ => 80,
        };
        options.define("LOADING_REGISTERS", loading);
        options.define("MULTIPLYING_REGISTERS", 256 - loading);
    }

    fn add_hopper(&self, options: &mut Options) {
        let (multiplying, loading) = self.registers();
        let bytes = if self.reads_lengths() { size_of::<HopperCacheParams>() } else { size_of::<HopperParams>() };
        options.define("HOPPER_BYTES", bytes as u32);
        options.define("BLOCK_M", self.block_m);
        options.define("BLOCK_N", self.block_n);
        options.define("STAGES", self.ring_stages());
        options.define("Q_STAGES", self.q_stages());
        options.define("STAGED", u32::from(self.is_staged()));
        if self.mask.is_some() {
            options.define("MASK_STAGES", self.mask_stages());
        }
        options.define("CONSUMER_REGISTERS", multiplying);
        options.define("PRODUCER_REGISTERS", loading);
    }
}
