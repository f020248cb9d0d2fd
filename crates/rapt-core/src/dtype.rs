//! One dtype enum, with the names and codes of PyTorch's export schema.
//!
//! Sizes are in bits. The schema (`torch._export.serde.schema.ScalarType`) is the source of truth for names and codes;
//! a test of the Python package compares this table with the installed torch, name by name and value by value.
//! Deliberately absent: any conversion between dtypes, and any default.

use half::{bf16, f16};

macro_rules! dtypes {
    ($( $(#[$doc:meta])* $variant:ident = $code:literal, $schema:literal, $name:literal, $bits:literal; )*) => {
        /// The dtype of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum DType {
            $( $(#[$doc])* $variant = $code, )*
        }

        impl DType {
            /// Every dtype, in the order of its code.
            pub const ALL: &'static [DType] = &[$(DType::$variant),*];

            /// The name in PyTorch's export schema, such as `BFLOAT16`.
            #[must_use]
            pub const fn schema_name(self) -> &'static str {
                match self { $(DType::$variant => $schema),* }
            }

            /// The usual name, such as `bfloat16`: PyTorch's own where it has one.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name),* }
            }

            /// The size of one element in bits; 0 for [`DType::Unknown`].
            #[inline]
            #[must_use]
            pub const fn bits(self) -> usize {
                match self { $(DType::$variant => $bits),* }
            }

            /// The dtype with this export-schema code.
            ///
            /// # Errors
            /// [`UnknownDtypeCode`] for any code that the schema does not name.
            pub const fn from_code(code: u8) -> Result<DType, UnknownDtypeCode> {
                match code { $($code => Ok(DType::$variant),)* _ => Err(UnknownDtypeCode { code }) }
            }
        }
    };
}

dtypes! {
    /// Not stated by the producer; always refused.
    Unknown = 0, "UNKNOWN", "unknown", 0;
    /// Unsigned 8-bit integer.
    U8 = 1, "BYTE", "uint8", 8;
    /// Signed 8-bit integer.
    I8 = 2, "CHAR", "int8", 8;
    /// Signed 16-bit integer.
    I16 = 3, "SHORT", "int16", 16;
    /// Signed 32-bit integer.
    I32 = 4, "INT", "int32", 32;
    /// Signed 64-bit integer.
    I64 = 5, "LONG", "int64", 64;
    /// IEEE binary16.
    F16 = 6, "HALF", "float16", 16;
    /// IEEE binary32.
    F32 = 7, "FLOAT", "float32", 32;
    /// IEEE binary64.
    F64 = 8, "DOUBLE", "float64", 64;
    /// Two binary16.
    C32 = 9, "COMPLEXHALF", "complex32", 32;
    /// Two binary32.
    C64 = 10, "COMPLEXFLOAT", "complex64", 64;
    /// Two binary64.
    C128 = 11, "COMPLEXDOUBLE", "complex128", 128;
    /// One byte, 0 or 1.
    Bool = 12, "BOOL", "bool", 8;
    /// The upper half of a binary32.
    BF16 = 13, "BFLOAT16", "bfloat16", 16;
    /// Unsigned 16-bit integer.
    U16 = 28, "UINT16", "uint16", 16;
    /// 8-bit float, 4 exponent bits, no infinities.
    F8E4M3FN = 29, "FLOAT8E4M3FN", "float8_e4m3fn", 8;
    /// 8-bit float, 5 exponent bits.
    F8E5M2 = 30, "FLOAT8E5M2", "float8_e5m2", 8;
    /// 8-bit float, 4 exponent bits, one NaN, no negative zero.
    F8E4M3FNUZ = 31, "FLOAT8E4M3FNUZ", "float8_e4m3fnuz", 8;
    /// 8-bit float, 5 exponent bits, one NaN, no negative zero.
    F8E5M2FNUZ = 32, "FLOAT8E5M2FNUZ", "float8_e5m2fnuz", 8;
    /// 8-bit power of two.
    F8E8M0FNU = 33, "FLOAT8E8M0FNU", "float8_e8m0fnu", 8;
    /// Unsigned 32-bit integer.
    U32 = 34, "UINT32", "uint32", 32;
    /// Unsigned 64-bit integer.
    U64 = 35, "UINT64", "uint64", 64;
}

/// The dtypes that attention computes; every other one is recognised and refused by name.
pub const COMPUTED: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

impl DType {
    /// The export-schema code. Not c10's `ScalarType` number.
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The size of one element in bytes. Every dtype of the schema fills whole bytes.
    #[inline]
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        self.bits() / 8
    }

    /// Whether attention computes this dtype.
    #[must_use]
    pub fn is_computed(self) -> bool {
        COMPUTED.contains(&self)
    }

    /// The dtype in which products and sums of this storage dtype are accumulated.
    #[must_use]
    pub const fn accumulation(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The dtype with this [`name`](DType::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }
}

/// A dtype code that the export schema does not name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("dtype code {code} is not known; the known codes are {}", known_codes())]
pub struct UnknownDtypeCode {
    /// The code.
    pub code: u8,
}

/// Every code with its name, as errors list them.
pub(crate) fn known_codes() -> String {
    DType::ALL.iter().map(|d| format!("{} {}", d.code(), d.schema_name())).collect::<Vec<_>>().join(", ")
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that is the element of a tensor.
///
/// Sealed: the dtype tag of a [`View`](crate::View) built from a slice is true by construction.
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// The tag of this type.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($ty:ty => $dtype:ident),*) => { $(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        }
    )* };
}

elements!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, bool => Bool,
          u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64);

/// An [`Element`] of which every pattern of bits is a value: all but bool.
pub trait Number: Element {}

impl Number for f64 {}
impl Number for f32 {}
impl Number for f16 {}
impl Number for bf16 {}
impl Number for u8 {}
impl Number for i8 {}
impl Number for u16 {}
impl Number for u32 {}
impl Number for u64 {}
impl Number for i16 {}
impl Number for i32 {}
impl Number for i64 {}

/// `x` in f32, rounded to odd: of what f32 does not hold, the neighbour whose last bit is 1. Rounding that once more to a
/// narrower dtype is as rounding `x` itself (Boldo and Melquiond, 2008); `half` cuts the last 32 bits of an f64 instead.
fn rounded_to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || nearest.is_nan() {
        return nearest;
    }
    let is_above = f64::from(nearest).abs() > x.abs();
    f32::from_bits((nearest.to_bits() - u32::from(is_above)) | 1)
}

/// `x` in binary16, rounded once, to nearest even.
#[must_use]
pub fn f16_from_f64(x: f64) -> f16 {
    f16::from_f32(rounded_to_odd(x))
}

/// `x` in bfloat16, rounded once, to nearest even.
#[must_use]
pub fn bf16_from_f64(x: f64) -> bf16 {
    bf16::from_f32(rounded_to_odd(x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_every_other_code_is_refused() {
        for code in 0..=u8::MAX {
            match DType::from_code(code) {
                Ok(dtype) => assert_eq!(dtype.code(), code),
                Err(error) => {
                    assert!(DType::ALL.iter().all(|dtype| dtype.code() != code));
                    assert!(error.to_string().contains("13 BFLOAT16"), "the known codes are listed: {error}");
                }
            }
        }
        assert_eq!(DType::ALL.len(), 22);
    }

    #[test]
    fn names_are_unique_and_sizes_are_those_of_the_types() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_name(dtype.name()), Some(*dtype));
        }
        assert_eq!(<f16 as Element>::DTYPE.size_bytes(), size_of::<f16>());
        assert_eq!(<bool as Element>::DTYPE.size_bytes(), size_of::<bool>());
        assert_eq!(<i64 as Element>::DTYPE.size_bytes(), size_of::<i64>());
    }

    #[test]
    fn f64_is_rounded_once_to_16_bits() {
        let tiny = 2f64.powi(-45);
        for (half_step, even, above) in
            [(2f64.powi(-11), 1.0, 1.0 + 2f64.powi(-10)), (2f64.powi(-8), 1.0, 1.0 + 2f64.powi(-7))]
        {
            let to = |x: f64| if half_step < 0.001 { f16_from_f64(x).to_f64() } else { bf16_from_f64(x).to_f64() };
            assert_eq!(to(1.0 + half_step), even, "a tie goes to the even number");
            assert_eq!(to(1.0 + half_step + tiny), above, "what lies above a tie does not");
            assert_eq!(to(1.0 + half_step - tiny), even);
            assert_eq!(to(-1.0 - half_step - tiny), -above);
        }
        assert_eq!(f16_from_f64(65_519.999_999_999), f16::MAX);
        assert_eq!(f16_from_f64(65520.0), f16::INFINITY);
        assert_eq!(bf16_from_f64(1e300), bf16::INFINITY);
        assert_eq!(bf16_from_f64(-1e300), bf16::NEG_INFINITY);
        // Half of the least number is a tie with 0; a little more is not.
        assert_eq!(f16_from_f64(2f64.powi(-25)).to_bits(), 0);
        assert_eq!(f16_from_f64(2f64.powi(-25) + 2f64.powi(-70)).to_bits(), 1);
        assert_eq!(bf16_from_f64(-2f64.powi(-134)).to_bits(), 0x8000);
        assert_eq!(bf16_from_f64(-2f64.powi(-134) - 2f64.powi(-180)).to_bits(), 0x8001);
        assert!(f16_from_f64(f64::NAN).is_nan() && bf16_from_f64(f64::NAN).is_nan());
        assert_eq!(f16_from_f64(f64::NEG_INFINITY), f16::NEG_INFINITY);
        assert_eq!(f16_from_f64(-0.0).to_bits(), 0x8000);
    }
}
