//! Codes of quantized formats as kernels read them: what one is, which share a factor, and how many a thread loads at once.

use rapt_core::{CodesSpec, DType, Format, Granularity, ScaleLayout};

/// What one code is: the numbers of kernels/common/codes.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum CodeKind {
    /// Two's complement.
    Int8 = 1,
    /// With a zero point.
    Uint8 = 2,
    /// Two's complement of 4 bits, two a byte.
    Int4 = 3,
    /// A float of 8 bits, without infinities.
    E4m3fn = 4,
    /// A float of 8 bits, with infinities.
    E5m2 = 5,
    /// A float of 4 bits, two a byte.
    E2m1 = 6,
}

impl CodeKind {
    /// Of a format.
    pub(crate) const fn of(format: Format) -> Self {
        match format {
            Format::Int8 => CodeKind::Int8,
            Format::Uint8 => CodeKind::Uint8,
            Format::Int4 => CodeKind::Int4,
            Format::E4m3fn | Format::Mxfp8 => CodeKind::E4m3fn,
            Format::E5m2 => CodeKind::E5m2,
            Format::Mxfp4 | Format::Nvfp4 => CodeKind::E2m1,
        }
    }

    /// Codes in a byte.
    pub(crate) const fn per_byte(self) -> u32 {
        match self {
            CodeKind::Int4 | CodeKind::E2m1 => 2,
            _ => 1,
        }
    }
}

/// Which codes of K or V share a factor, as decode_codes.cu and mma.cu are compiled for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileScales {
    /// All of a head.
    Uniform,
    /// Those of a key.
    Token,
    /// Those of a column.
    Channel,
    /// So many neighbours of a key, with factors of this dtype.
    Block(u32, DType),
}

/// Of which product a tile is an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    /// Of the scores.
    K,
    /// Of the output.
    V,
}

/// K or V as decode_codes.cu and mma.cu read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileCodes {
    /// What one code is.
    pub kind: CodeKind,
    /// Which share a factor.
    pub scales: TileScales,
    /// How factors lie.
    pub scale_layout: ScaleLayout,
}

impl TileCodes {
    /// Of an operand.
    pub(crate) fn of(codes: &CodesSpec) -> Self {
        let scales = match codes.granularity {
            Granularity::Tensor | Granularity::Head => TileScales::Uniform,
            Granularity::Token => TileScales::Token,
            Granularity::Channel => TileScales::Channel,
            Granularity::Block(size) => TileScales::Block(size as u32, codes.descale.dtype),
        };
        TileCodes { kind: CodeKind::of(codes.format), scales, scale_layout: codes.scale_layout }
    }

    /// Bytes of a row of `dim` codes.
    pub(crate) const fn row_bytes(self, dim: u32) -> u32 {
        dim / self.kind.per_byte()
    }

    /// Bytes of the factors of a key that are loaded with its codes.
    pub(crate) const fn scale_bytes(self, dim: u32) -> u32 {
        match self.scales {
            TileScales::Token => 4,
            TileScales::Block(size, dtype) => dim / size * dtype.size_bytes() as u32,
            TileScales::Uniform | TileScales::Channel => 0,
        }
    }

    /// How many codes of a row a lane loads at once: as many as 16 bytes hold, the lanes' codes make whole parts of the row, and share as few
    /// factors as the kernel multiplies at a time.
    ///
    /// Of keys, which four lanes share; `None` where decode_codes.cu does not serve them.
    pub(crate) fn key_run(self, dim: u32) -> Option<u32> {
        let (part, longest) = match self.scales {
            // Factors in operands are those of a lane, and others of all four.
            TileScales::Block(size, DType::F8E4M3FN) => (dim, size),
            TileScales::Block(size, _) => (size, size),
            _ => (dim, dim),
        };
        let fits = |run: &u32| part.is_multiple_of(4 * run) && longest.is_multiple_of(*run);
        [32, 16, 8, 4].into_iter().filter(|run| run / self.kind.per_byte() <= 16).find(fits)
    }

    /// Whether blocks, if there are any, are as many times `size` codes.
    pub(crate) const fn has_blocks_of(self, size: u32) -> bool {
        !matches!(self.scales, TileScales::Block(of, _) if !of.is_multiple_of(size))
    }

    /// As the sum of how many numbers of 16 bits mma.cu multiplies a code with those factors that it multiplies into it.
    pub(crate) const fn terms(self, operand: Operand) -> u32 {
        match (self.scales, operand) {
            (TileScales::Channel, Operand::K) | (TileScales::Block(_, DType::F32), _) => 2,
            _ => 1,
        }
    }

    /// Whether one float16 holds each code with those factors.
    pub(crate) const fn fits_float16(self, operand: Operand) -> bool {
        self.terms(operand) == 1 && !matches!(self.scales, TileScales::Block(_, DType::F8E8M0FNU))
    }

    /// Bytes of a key that mma.cu loads as they lie: `Stage` of kernels/mma/coded_tiles.cuh.
    pub(crate) const fn staged_bytes(self, dim: u32) -> u32 {
        let factors = self.scale_bytes(dim);
        self.row_bytes(dim).next_multiple_of(16) + if factors > 0 { factors } else { 1 } + 1
    }

    /// Bytes from row to row in a tile: `CodeRows::PITCH` of kernels/decode/codes.cuh.
    pub(crate) const fn pitch(self, dim: u32) -> u32 {
        let row = self.row_bytes(dim);
        if row <= 64 { if row <= 16 { 16 } else { row.next_power_of_two() } } else { row.next_multiple_of(128) }
    }
}

/// What a kernel reads that is codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codes {
    /// Nothing.
    None,
    /// Any of q, k and v, as the launch says (generic.cu).
    Any,
    /// K and V (decode_codes.cu, mma.cu).
    Tiles {
        /// The keys.
        k: TileCodes,
        /// The values.
        v: TileCodes,
    },
}
