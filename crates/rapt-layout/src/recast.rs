//! The same memory counted in elements of another width.
//!
//! ```text
//! upcast n:    n old elements are one new:    (s, d) ↦ (s, d/n) for d ≥ n, (s·d/n, 1) for d < n
//! downcast n:  one old element is n new:      (s, d) ↦ (s, d·n), and the contiguous mode (s, 1) ↦ (s·n, 1)
//! ```
//! CuTe rounds where a width does not divide; here that is an error, because the result would name other bytes.

use crate::algebra::refuse;
use crate::error::Result;
use crate::int_tuple::mul;
use crate::layout::Layout;

impl Layout {
    /// Counted in elements `n` times as wide.
    ///
    /// # Errors
    /// [`crate::Error::NoSuchLayout`] unless whole wide elements are named.
    pub fn upcast(&self, n: i64) -> Result<Layout> {
        if n < 1 {
            return Err(refuse("upcast", self, format!("the factor {n} is below 1")));
        }
        self.map_leaves(|extent, stride| {
            let step = stride.abs();
            if step == 0 || n == 1 {
                Ok((extent, stride))
            } else if step % n == 0 {
                Ok((extent, stride / n))
            } else if n % step == 0 && extent % (n / step) == 0 {
                Ok((extent / (n / step), stride.signum()))
            } else if extent == 1 {
                Ok((1, 0))
            } else {
                Err(refuse("upcast", self, format!("the mode {extent}:{stride} names no whole groups of {n}")))
            }
        })
    }

    /// Counted in elements `n` times as narrow.
    ///
    /// # Errors
    /// [`crate::Error::NoSuchLayout`] unless the factor is at least 1, or no mode is contiguous; [`crate::Error::Overflow`].
    pub fn downcast(&self, n: i64) -> Result<Layout> {
        if n < 1 {
            return Err(refuse("downcast", self, format!("the factor {n} is below 1")));
        }
        self.map_leaves(|extent, stride| match stride.abs() {
            1 if n > 1 => Ok((mul(extent, n, "an extent")?, stride)),
            _ => Ok((extent, mul(stride, n, "a stride")?)),
        })
    }

    /// From elements of `from` bits to elements of `to` bits.
    ///
    /// # Errors
    /// As [`Layout::upcast`] and [`Layout::downcast`]; [`crate::Error::NoSuchLayout`] where neither width divides the other.
    pub fn recast(&self, from: i64, to: i64) -> Result<Layout> {
        match (from, to) {
            (1.., 1..) if to % from == 0 => self.upcast(to / from),
            (1.., 1..) if from % to == 0 => self.downcast(from / to),
            (1.., 1..) => {
                let (a, b) = (from / gcd(from, to), to / gcd(from, to));
                self.downcast(a)?.upcast(b)
            }
            _ => Err(refuse("recast", self, format!("widths of {from} and {to} bits"))),
        }
    }

    fn map_leaves(&self, f: impl Fn(i64, i64) -> Result<(i64, i64)>) -> Result<Layout> {
        let modes = self.flat().into_iter().map(|(s, d)| f(s, d)).collect::<Result<Vec<_>>>()?;
        let (shape, stride): (Vec<i64>, Vec<i64>) = modes.into_iter().unzip();
        Layout::new(
            self.shape().with_leaves(&mut shape.into_iter()),
            self.stride().with_leaves(&mut stride.into_iter()),
        )
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(text: &str) -> Layout {
        text.parse().unwrap()
    }

    #[test]
    fn cells_and_halves_of_tensor_memory() {
        let cells = layout("(128,64):(65536,1)");
        let halves = cells.recast(32, 16).unwrap();
        assert_eq!(halves.to_string(), "(128,128):(131072,1)");
        assert_eq!(halves.recast(16, 32).unwrap(), cells);
    }

    #[test]
    fn modes_inside_a_wide_element_shrink() {
        assert_eq!(layout("(8,4):(1,8)").upcast(4).unwrap().to_string(), "(2,4):(1,2)");
        assert_eq!(layout("(8,4):(4,1)").upcast(4).unwrap().to_string(), "(8,1):(1,1)");
        assert_eq!(layout("(2,8):(2,4)").upcast(4).unwrap().to_string(), "(1,8):(1,1)");
        assert_eq!(layout("(8,4):(0,1)").upcast(4).unwrap().to_string(), "(8,1):(0,1)");
        assert_eq!(layout("4:2").recast(24, 16).unwrap().to_string(), "4:3");
    }

    #[test]
    fn parts_of_an_element_are_refused() {
        for (text, n) in [("(8,4):(3,1)", 4), ("(3,4):(1,8)", 2), ("8:1", 0)] {
            assert!(layout(text).upcast(n).is_err(), "{text} {n}");
        }
        assert!(layout("8:1").downcast(0).is_err() && layout("8:1").recast(0, 8).is_err());
    }
}
