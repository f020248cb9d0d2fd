//! Swizzles: a permutation of addresses that spreads rows over the banks of shared memory.
//!
//! ```text
//! Sw<B,M,S>(x) = x ^ ((x & mask) >> S)      mask: B bits from bit M + max(0, S) on; for S < 0 the shift goes left
//! ```
//! It is its own inverse. `Sw<3,4,3>` on bytes is the 128-byte swizzle of TMA and wgmma, `Sw<2,4,3>` the 64-byte one,
//! `Sw<1,4,3>` the 32-byte one (PTX ISA, "Swizzling modes" of the tensor copies and "Shared Memory Matrix Layout" of wgmma).

use std::fmt;

use crate::error::{Error, Result};

/// `Sw<bits,base,shift>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Swizzle {
    bits: u32,
    base: u32,
    shift: i32,
}

impl Swizzle {
    /// The one that changes nothing.
    pub const NONE: Swizzle = Swizzle { bits: 0, base: 4, shift: 3 };

    /// `bits` bits, `base` bits below them stay, XOR over a distance of `shift`.
    ///
    /// # Errors
    /// [`Error::Swizzle`].
    pub fn new(bits: i64, base: i64, shift: i64) -> Result<Self> {
        let refused = Error::Swizzle { bits, base, shift };
        let in_word = |n: i64| (0..62).contains(&n);
        if !in_word(bits) || !in_word(base) || !in_word(shift.saturating_abs()) || shift.abs() < bits {
            return Err(refused);
        }
        if bits + base + shift.abs() > 62 {
            return Err(refused);
        }
        let narrow = |n: i64| u32::try_from(n).map_err(|_| Error::Swizzle { bits, base, shift });
        let shift = i32::try_from(shift).map_err(|_| Error::Swizzle { bits, base, shift: i64::from(i32::MAX) })?;
        Ok(Swizzle { bits: narrow(bits)?, base: narrow(base)?, shift })
    }

    /// The swizzle of shared memory by its span: 0 (none), 32, 64 or 128 bytes. It acts on byte addresses.
    ///
    /// # Errors
    /// [`Error::Word`].
    pub fn of_span(bytes: i64) -> Result<Self> {
        match bytes {
            0 | 16 => Ok(Swizzle::NONE),
            32 => Swizzle::new(1, 4, 3),
            64 => Swizzle::new(2, 4, 3),
            128 => Swizzle::new(3, 4, 3),
            _ => Err(Error::Word {
                what: "swizzle of",
                got: format!("{bytes} bytes"),
                allowed: "0, 32, 64, 128".to_owned(),
            }),
        }
    }

    /// The swizzled offset. Negative offsets are taken as their two's complement.
    #[must_use]
    pub fn apply(&self, offset: i64) -> i64 {
        let mask = ((1i64 << self.bits) - 1) << (self.base + self.shift.max(0).unsigned_abs());
        let moved = offset & mask;
        let distance = self.shift.unsigned_abs();
        offset ^ if self.shift >= 0 { moved >> distance } else { moved << distance }
    }

    /// Whether nothing moves.
    #[must_use]
    pub fn is_identity(&self) -> bool {
        self.bits == 0
    }

    /// The same swizzle for offsets in units `2^log2` times as large.
    ///
    /// # Errors
    /// [`Error::Swizzle`] if it would move parts of a unit.
    pub fn coarser(&self, log2: u32) -> Result<Self> {
        let base = i64::from(self.base) - i64::from(log2);
        Swizzle::new(self.bits.into(), base.max(if self.is_identity() { 0 } else { base }), self.shift.into())
    }
}

impl fmt::Display for Swizzle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sw<{},{},{}>", self.bits, self.base, self.shift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_128_byte_swizzle_moves_16_byte_chunks_by_the_row() {
        let swizzle = Swizzle::of_span(128).unwrap();
        for row in 0..16i64 {
            for chunk in 0..8 {
                assert_eq!(swizzle.apply(row * 128 + chunk * 16 + 5), row * 128 + (chunk ^ (row % 8)) * 16 + 5);
            }
        }
    }

    #[test]
    fn it_is_its_own_inverse_and_a_permutation() {
        for (bits, base, shift) in [(3, 4, 3), (2, 4, 3), (1, 4, 3), (2, 0, -2), (0, 4, 3), (3, 3, 3), (2, 1, 4)] {
            let swizzle = Swizzle::new(bits, base, shift).unwrap();
            let mut images: Vec<i64> = (0..4096).map(|x| swizzle.apply(x)).collect();
            assert!((0..4096).all(|x| swizzle.apply(images[x as usize]) == x), "{swizzle}");
            images.sort_unstable();
            assert!(images.iter().enumerate().all(|(at, x)| at as i64 == *x), "{swizzle}");
        }
    }

    #[test]
    fn bits_that_overlap_are_refused() {
        for (bits, base, shift) in [(3, 4, 2), (-1, 4, 3), (3, -1, 3), (30, 20, 30), (3, 4, i64::MIN), (i64::MAX, 1, 1)]
        {
            assert!(Swizzle::new(bits, base, shift).is_err(), "{bits} {base} {shift}");
        }
        assert!(Swizzle::of_span(48).is_err());
    }

    #[test]
    fn coarser_units() {
        let bytes = Swizzle::of_span(128).unwrap();
        let halves = bytes.coarser(1).unwrap();
        assert_eq!(halves.to_string(), "Sw<3,3,3>");
        assert!((0..4096).all(|x| bytes.apply(2 * x) == 2 * halves.apply(x)));
        assert!(bytes.coarser(5).is_err());
        assert!(Swizzle::NONE.coarser(5).is_ok());
    }
}
