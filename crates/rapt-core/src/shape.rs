//! Shapes and strides: small inline vectors, and their sizes.
//!
//! Strides are in elements, of any sign; 0 repeats an element. Deliberately absent: any notion of a "normal" layout.

use std::fmt;
use std::ops::Deref;

/// The most dimensions that a tensor may have.
pub const MAX_RANK: usize = 8;

/// An inline vector of at most [`MAX_RANK`] sizes or strides.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims<T: Copy> {
    len: u8,
    at: [T; MAX_RANK],
}

/// Sizes of a tensor, outermost first.
pub type Shape = Dims<usize>;
/// Strides of a tensor in elements, outermost first.
pub type Strides = Dims<isize>;

impl<T: Copy + Default> Dims<T> {
    /// The dimensions of `slice`, or `None` if there are more than [`MAX_RANK`].
    #[must_use]
    pub fn new(slice: &[T]) -> Option<Self> {
        let mut at = [T::default(); MAX_RANK];
        at.get_mut(..slice.len())?.copy_from_slice(slice);
        Some(Dims { len: u8::try_from(slice.len()).ok()?, at })
    }
}

impl<T: Copy + Default, const N: usize> From<[T; N]> for Dims<T> {
    /// At most [`MAX_RANK`] dimensions, checked when compiled.
    fn from(array: [T; N]) -> Self {
        const { assert!(N <= MAX_RANK) };
        let mut at = [T::default(); MAX_RANK];
        at[..N].copy_from_slice(&array);
        Dims { len: N as u8, at }
    }
}

impl<T: Copy> Deref for Dims<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.at[..self.len as usize]
    }
}

impl<T: Copy + fmt::Display> fmt::Display for Dims<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (n, value) in self.iter().enumerate() {
            write!(f, "{}{value}", if n > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}

impl<T: Copy + fmt::Display> fmt::Debug for Dims<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Shape {
    /// The number of elements, or `None` if it overflows `isize`.
    #[must_use]
    pub fn numel(&self) -> Option<usize> {
        if self.contains(&0) {
            return Some(0);
        }
        let n = self.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
        isize::try_from(n).ok().map(|_| n)
    }

    /// Row-major strides, or `None` if they overflow `isize`.
    #[inline]
    #[must_use]
    pub fn contiguous(&self) -> Option<Strides> {
        let mut at = [0isize; MAX_RANK];
        let mut step = 1isize;
        for d in (0..self.len()).rev() {
            at[d] = step;
            step = step.checked_mul(isize::try_from(self[d].max(1)).ok()?)?;
        }
        Some(Dims { len: self.len, at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_strides_of_small_shapes() {
        assert_eq!(&*Shape::from([2, 3, 4]).contiguous().unwrap(), &[12, 4, 1]);
        assert_eq!(&*Shape::from([2, 0, 4]).contiguous().unwrap(), &[4, 4, 1]);
        assert_eq!(Shape::from([usize::MAX, 2]).numel(), None);
        assert_eq!(Shape::new(&[1; MAX_RANK + 1]), None);
    }
}
