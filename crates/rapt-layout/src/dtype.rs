//! The element types of tensor-core instructions, by name and width. No arithmetic.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// An element type of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// 32-bit integer.
    S32,
    /// The 19 high bits of a single, in 32.
    Tf32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 bits of exponent.
    E4m3,
    /// 8-bit float, 5 bits of exponent.
    E5m2,
    /// Signed byte.
    S8,
    /// Unsigned byte.
    U8,
}

const NAMES: [(Dtype, &str, u32); 9] = [
    (Dtype::F32, "f32", 32),
    (Dtype::S32, "s32", 32),
    (Dtype::Tf32, "tf32", 32),
    (Dtype::F16, "f16", 16),
    (Dtype::Bf16, "bf16", 16),
    (Dtype::E4m3, "e4m3", 8),
    (Dtype::E5m2, "e5m2", 8),
    (Dtype::S8, "s8", 8),
    (Dtype::U8, "u8", 8),
];

impl Dtype {
    /// The width in bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        NAMES[self as usize].2
    }

    /// As the PTX ISA writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES[self as usize].1
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        NAMES.iter().find(|(_, name, _)| *name == text).map(|(dtype, ..)| *dtype).ok_or_else(|| Error::Word {
            what: "dtype",
            got: text.to_owned(),
            allowed: NAMES.map(|(_, name, _)| name).join(", "),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (at, (dtype, name, bits)) in NAMES.into_iter().enumerate() {
            assert_eq!((dtype as usize, name.parse(), dtype.bits()), (at, Ok(dtype), bits));
        }
        assert!("float".parse::<Dtype>().is_err());
    }
}
