//! What a tensor's codes are, which of them share a scale, and how the scales lie: the vocabulary of quantized tensors.

use std::fmt;

use crate::{DType, codes};

/// A quantized number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Two's complement, −127 to 127, symmetric: f32 scale = absmax / 127.
    Int8,
    /// 0 to 255 with a zero point: f32 scale = range / 255, where the range holds 0.
    Uint8,
    /// Two's complement, −7 to 7, symmetric: f32 scale = absmax / 7. Two a byte, the lower half first.
    Int4,
    /// OCP OFP8 e4m3: f32 scale = absmax / 448.
    E4m3fn,
    /// OCP OFP8 e5m2: f32 scale = absmax / 57344.
    E5m2,
    /// OCP MX: e4m3 in blocks of 32 along the last dimension, each with a power of two (e8m0).
    Mxfp8,
    /// OCP MX: e2m1 in blocks of 32, each with a power of two (e8m0). Two a byte, the lower half first.
    Mxfp4,
    /// e2m1 in blocks of 16, each with an e4m3 scale, and one f32 for the tensor. Two a byte, the lower half first.
    Nvfp4,
}

impl Format {
    /// Every format.
    pub const ALL: [Format; 8] = [
        Format::Int8,
        Format::Uint8,
        Format::Int4,
        Format::E4m3fn,
        Format::E5m2,
        Format::Mxfp8,
        Format::Mxfp4,
        Format::Nvfp4,
    ];

    /// The name, such as `e4m3fn`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Format::Int8 => "int8",
            Format::Uint8 => "uint8",
            Format::Int4 => "int4",
            Format::E4m3fn => "e4m3fn",
            Format::E5m2 => "e5m2",
            Format::Mxfp8 => "mxfp8",
            Format::Mxfp4 => "mxfp4",
            Format::Nvfp4 => "nvfp4",
        }
    }

    /// The format with this [`name`](Format::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Format> {
        Format::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The dtype of the tensor of codes; uint8 where two share a byte.
    #[must_use]
    pub const fn code_dtype(self) -> DType {
        match self {
            Format::Int8 => DType::I8,
            Format::Uint8 | Format::Int4 | Format::Mxfp4 | Format::Nvfp4 => DType::U8,
            Format::E4m3fn | Format::Mxfp8 => DType::F8E4M3FN,
            Format::E5m2 => DType::F8E5M2,
        }
    }

    /// The size of one code in bits.
    #[must_use]
    pub const fn code_bits(self) -> usize {
        match self {
            Format::Int4 | Format::Mxfp4 | Format::Nvfp4 => 4,
            _ => 8,
        }
    }

    /// The dtype of the scales.
    #[must_use]
    pub const fn scale_dtype(self) -> DType {
        match self {
            Format::Mxfp8 | Format::Mxfp4 => DType::F8E8M0FNU,
            Format::Nvfp4 => DType::F8E4M3FN,
            _ => DType::F32,
        }
    }

    /// The block size that belongs to the format, where one does.
    #[must_use]
    pub const fn own_block_size(self) -> Option<usize> {
        match self {
            Format::Mxfp8 | Format::Mxfp4 => Some(32),
            Format::Nvfp4 => Some(16),
            _ => None,
        }
    }

    /// The format that a tensor of this dtype has of itself, one code an element and a scale in f32; `None` where codes are packed,
    /// or have scales that only their format tells.
    #[must_use]
    pub const fn of_dtype(dtype: DType) -> Option<Format> {
        match dtype {
            DType::I8 => Some(Format::Int8),
            DType::U8 => Some(Format::Uint8),
            DType::F8E4M3FN => Some(Format::E4m3fn),
            DType::F8E5M2 => Some(Format::E5m2),
            _ => None,
        }
    }

    /// How many codes share a byte.
    #[must_use]
    pub const fn codes_per_byte(self) -> usize {
        8 / self.code_bits()
    }

    /// Whether a zero point is subtracted from its codes.
    #[must_use]
    pub const fn has_zero_point(self) -> bool {
        matches!(self, Format::Uint8)
    }

    /// Whether one f32 scales the whole tensor beside the scales of its blocks.
    #[must_use]
    pub const fn has_global_scale(self) -> bool {
        matches!(self, Format::Nvfp4)
    }

    /// Whether NaN and ±inf have a code: ±inf itself in e5m2, NaN for both in e4m3fn.
    #[must_use]
    pub const fn has_nan(self) -> bool {
        matches!(self, Format::E4m3fn | Format::E5m2 | Format::Mxfp8)
    }

    /// The largest number of a code; for uint8 the number of steps in its range.
    #[must_use]
    pub const fn largest(self) -> f64 {
        match self {
            Format::Int8 => 127.0,
            Format::Uint8 => 255.0,
            Format::Int4 => 7.0,
            Format::E4m3fn | Format::Mxfp8 => 448.0,
            Format::E5m2 => 57344.0,
            Format::Mxfp4 | Format::Nvfp4 => 6.0,
        }
    }

    /// The number of one code (of its lower 4 bits where codes have 4), before zero point and scale: exact.
    #[must_use]
    pub fn decode(self, code: u8) -> f32 {
        match self {
            Format::Int8 => f32::from(code.cast_signed()),
            Format::Uint8 => f32::from(code),
            Format::Int4 => f32::from(codes::from_int4(code)),
            Format::E4m3fn | Format::Mxfp8 => codes::E4M3FN_VALUES[usize::from(code)],
            Format::E5m2 => codes::E5M2_VALUES[usize::from(code)],
            Format::Mxfp4 | Format::Nvfp4 => codes::E2M1_VALUES[usize::from(code & 0xf)],
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// All.
    Tensor,
    /// A matrix: the last two dimensions.
    Head,
    /// A row: the last dimension.
    Token,
    /// A column of a matrix: the last dimension but one.
    Channel,
    /// This many elements along the last dimension.
    Block(usize),
}

impl Granularity {
    /// The name, without the block size.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Granularity::Tensor => "tensor",
            Granularity::Head => "head",
            Granularity::Token => "token",
            Granularity::Channel => "channel",
            Granularity::Block(_) => "block",
        }
    }

    /// The block size, of blocks.
    #[must_use]
    pub const fn block_size(self) -> Option<usize> {
        match self {
            Granularity::Block(size) => Some(size),
            _ => None,
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Granularity::Block(size) => write!(f, "block {size}"),
            other => f.write_str(other.name()),
        }
    }
}

/// How the scales of blocks lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ScaleLayout {
    /// Row-major.
    #[default]
    Plain,
    /// Each matrix of scales padded to multiples of 128×4 and reordered as tensor cores of Blackwell read it: PyTorch's
    /// `SwizzleType.SWIZZLE_32_4_4`, cuBLAS' "1D block scaling factors layout". The formats with 8-bit scales have it.
    Swizzle32x4x4,
}

impl ScaleLayout {
    /// The name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ScaleLayout::Plain => "plain",
            ScaleLayout::Swizzle32x4x4 => "swizzle_32_4_4",
        }
    }
}
