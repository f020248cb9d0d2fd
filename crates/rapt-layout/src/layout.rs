//! A layout: `shape : stride`, a function from coordinates to integers.
//!
//! ```text
//! L(c₀, c₁, …) = Σ c_k · d_k        over the leaves
//! L(i)         = L(i mod s₀, i / s₀ mod s₁, …)      colexicographic: the first mode moves fastest
//! ```
//! The last mode takes the whole rest of `i`, as in CuTe, so that `L(i)` is defined beyond the size. Source: C. Cecka,
//! "CuTe Layout Representation and Algebra", arXiv:2603.02298; J. Shah, "A Note on the Algebra of CuTe Layouts".
//! Deliberately absent: units. A layout is numbers; `unit` says of what.

use std::fmt;

use crate::error::{Error, Result};
use crate::int_tuple::{IntTuple, add, mul};

/// The most elements that are enumerated: 128 lanes × 512 columns × 32 bits, eight times over.
pub const MOST_ENUMERATED: i64 = 1 << 24;

/// A nested shape with a stride for each leaf.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    shape: IntTuple,
    stride: IntTuple,
}

/// One leaf of a layout: extent and stride.
pub(crate) type Mode = (i64, i64);

impl Layout {
    /// `shape : stride`.
    ///
    /// # Errors
    /// [`Error::NotCongruent`], [`Error::Extent`], [`Error::Overflow`] (of the size or the cosize), [`Error::TooLarge`].
    pub fn new(shape: impl Into<IntTuple>, stride: impl Into<IntTuple>) -> Result<Self> {
        let (shape, stride) = (shape.into(), stride.into());
        shape.check()?;
        stride.check()?;
        if !shape.is_congruent(&stride) {
            return Err(Error::NotCongruent { shape: shape.to_string(), stride: stride.to_string() });
        }
        if let Some(extent) = shape.leaves().into_iter().find(|extent| *extent < 1) {
            return Err(Error::Extent { extent, shape: shape.to_string() });
        }
        let layout = Layout { shape, stride };
        layout.shape.product()?;
        layout.reach()?;
        Ok(layout)
    }

    /// The compact layout of a shape whose first mode moves fastest.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn column_major(shape: impl Into<IntTuple>) -> Result<Self> {
        let shape = shape.into();
        shape.check()?;
        let mut next = 1;
        let mut strides = Vec::new();
        for extent in shape.leaves() {
            strides.push(next);
            next = mul(next, extent, "a stride")?;
        }
        let stride = shape.with_leaves(&mut strides.into_iter());
        Layout::new(shape, stride)
    }

    /// The compact layout of a shape whose last mode moves fastest.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn row_major(shape: impl Into<IntTuple>) -> Result<Self> {
        let shape = shape.into();
        shape.check()?;
        let mut next = 1;
        let mut strides = Vec::new();
        for extent in shape.leaves().into_iter().rev() {
            strides.push(next);
            next = mul(next, extent, "a stride")?;
        }
        let stride = shape.with_leaves(&mut strides.into_iter().rev());
        Layout::new(shape, stride)
    }

    /// A layout whose modes are `layouts`.
    ///
    /// # Errors
    /// [`Error::Overflow`], [`Error::TooLarge`].
    pub fn from_modes(layouts: impl IntoIterator<Item = Layout>) -> Result<Self> {
        let (shapes, strides): (Vec<_>, Vec<_>) = layouts.into_iter().map(|l| (l.shape, l.stride)).unzip();
        Layout::new(shapes, strides)
    }

    /// One mode stays a leaf, several become a tuple, none is `1:0`.
    pub(crate) fn from_flat(modes: &[Mode]) -> Result<Self> {
        match modes {
            [] => Layout::new(1, 0),
            [(extent, stride)] => Layout::new(*extent, *stride),
            _ => Layout::from_modes(modes.iter().map(|(s, d)| Layout { shape: (*s).into(), stride: (*d).into() })),
        }
    }

    /// The shape.
    #[must_use]
    pub fn shape(&self) -> &IntTuple {
        &self.shape
    }

    /// The stride.
    #[must_use]
    pub fn stride(&self) -> &IntTuple {
        &self.stride
    }

    /// Modes at the top.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shape.rank()
    }

    /// The nesting.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.shape.depth()
    }

    /// The number of coordinates.
    #[must_use]
    pub fn size(&self) -> i64 {
        self.shape.leaves().iter().product() // Proven by `new` not to overflow.
    }

    /// Σ (extent − 1)·|stride|.
    fn reach(&self) -> Result<i64> {
        self.flat()
            .into_iter()
            .try_fold(0, |sum, (extent, stride)| add(sum, mul(extent - 1, stride.abs(), "the cosize")?, "the cosize"))
    }

    /// One more than the largest offset (with strides taken without sign, as in CuTe).
    #[must_use]
    pub fn cosize(&self) -> i64 {
        1 + self.flat().into_iter().map(|(extent, stride)| (extent - 1) * stride.abs()).sum::<i64>()
    }

    /// The smallest and the largest offset.
    #[must_use]
    pub fn range(&self) -> (i64, i64) {
        self.flat().into_iter().fold((0, 0), |(low, high), (extent, stride)| {
            let far = (extent - 1) * stride;
            (low + far.min(0), high + far.max(0))
        })
    }

    /// Leaves as (extent, stride).
    pub(crate) fn flat(&self) -> Vec<Mode> {
        self.shape.leaves().into_iter().zip(self.stride.leaves()).collect()
    }

    /// The mode at `at`, itself a layout.
    #[must_use]
    pub fn mode(&self, at: usize) -> Option<Layout> {
        let (shape, stride) = (self.shape.mode(at)?, self.stride.mode(at)?);
        Some(Layout { shape: shape.clone(), stride: stride.clone() })
    }

    /// All modes.
    #[must_use]
    pub fn modes(&self) -> Vec<Layout> {
        (0..self.rank()).filter_map(|at| self.mode(at)).collect()
    }

    /// The same function on a flat shape.
    #[must_use]
    pub fn flatten(&self) -> Layout {
        match self.shape {
            IntTuple::Int(_) => self.clone(),
            IntTuple::Tuple(_) => {
                let leaves =
                    |tuple: &IntTuple| IntTuple::Tuple(tuple.leaves().into_iter().map(IntTuple::Int).collect());
                Layout { shape: leaves(&self.shape), stride: leaves(&self.stride) }
            }
        }
    }

    /// `L(i)`, for `i ≥ 0`; beyond the size the last mode goes on.
    ///
    /// # Errors
    /// [`Error::Coordinate`] below 0, [`Error::Overflow`].
    pub fn at(&self, index: i64) -> Result<i64> {
        if index < 0 {
            return Err(self.no_coordinate(&index));
        }
        at_flat(&self.flat(), index)
    }

    /// `L(c)` for a coordinate of the shape's profile, or of any that is coarser.
    ///
    /// # Errors
    /// [`Error::Coordinate`] where the profile or an extent does not fit, [`Error::Overflow`].
    pub fn at_coord(&self, coord: &IntTuple) -> Result<i64> {
        match (coord, &self.shape) {
            (IntTuple::Int(index), _) if *index >= 0 && *index < self.size() => self.at(*index),
            (IntTuple::Tuple(coords), IntTuple::Tuple(_)) if coords.len() == self.rank() => {
                let parts = self.modes().into_iter().zip(coords);
                parts.into_iter().try_fold(0, |sum, (mode, coord)| {
                    let part = mode.at_coord(coord).map_err(|_| self.no_coordinate(&coords_text(coords)))?;
                    add(sum, part, "an offset")
                })
            }
            _ => Err(self.no_coordinate(coord)),
        }
    }

    pub(crate) fn no_coordinate(&self, coord: &impl fmt::Display) -> Error {
        Error::Coordinate { coord: coord.to_string(), shape: self.shape.to_string() }
    }

    /// The coordinate of `index`, of the shape's profile.
    ///
    /// # Errors
    /// [`Error::Coordinate`] outside the size.
    pub fn coord_of(&self, index: i64) -> Result<IntTuple> {
        if index < 0 || index >= self.size() {
            return Err(self.no_coordinate(&index));
        }
        let mut rest = index;
        let mut coords = self.shape.leaves().into_iter().map(|extent| {
            let coord = rest % extent;
            rest /= extent;
            coord
        });
        Ok(self.shape.with_leaves(&mut coords))
    }

    /// Every offset, in the order of the index.
    ///
    /// # Errors
    /// [`Error::TooLarge`] above [`MOST_ENUMERATED`].
    pub fn offsets(&self) -> Result<Vec<i64>> {
        let size = self.size();
        if size > MOST_ENUMERATED {
            return Err(Error::TooLarge {
                what: "the size of a layout to enumerate",
                got: size,
                most: MOST_ENUMERATED,
            });
        }
        // Mode by mode: what is there, repeated at each further coordinate.
        let mut offsets = vec![0];
        for (extent, stride) in self.flat() {
            let inner = offsets.len();
            offsets.reserve(inner * usize::try_from(extent - 1).unwrap_or(0));
            for k in 1..extent {
                for at in 0..inner {
                    offsets.push(offsets[at] + k * stride);
                }
            }
        }
        Ok(offsets)
    }

    /// Whether no two coordinates share an offset.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn is_injective(&self) -> Result<bool> {
        let mut offsets = self.offsets()?;
        offsets.sort_unstable();
        Ok(offsets.windows(2).all(|pair| pair[0] != pair[1]))
    }

    /// Whether the offsets are exactly 0, 1, …, size − 1.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn is_bijective(&self) -> Result<bool> {
        Ok(self.range() == (0, self.size() - 1) && self.is_injective()?)
    }
}

/// `L(index)` for the leaves of a layout.
pub(crate) fn at_flat(modes: &[Mode], index: i64) -> Result<i64> {
    let mut rest = index;
    let mut sum = 0;
    let last = modes.len().saturating_sub(1);
    for (at, (extent, stride)) in modes.iter().enumerate() {
        let coord = if at == last { rest } else { rest % extent };
        rest /= extent;
        sum = add(sum, mul(coord, *stride, "an offset")?, "an offset")?;
    }
    Ok(sum)
}

fn coords_text(coords: &[IntTuple]) -> String {
    IntTuple::Tuple(coords.to_vec()).to_string()
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.shape, self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(text: &str) -> Layout {
        text.parse().unwrap()
    }

    #[test]
    fn the_accumulator_of_the_tutorial() {
        let c = layout("((128,128),1,1):((65536,1),0,0)");
        assert_eq!((c.size(), c.cosize(), c.range()), (16384, 8_323_200, (0, 8_323_199)));
        assert_eq!(c.at(127).unwrap(), 127 << 16);
        assert_eq!(c.at_coord(&[IntTuple::from([5, 7]), 0.into(), 0.into()].into()).unwrap(), (5 << 16) + 7);
    }

    #[test]
    fn coordinates_and_indices() {
        let l = layout("(3,(2,3)):(3,(12,1))");
        // The example of CuTe's tutorial on layouts.
        assert_eq!(l.at(17).unwrap(), 2 * 3 + 12 + 2);
        assert_eq!(l.coord_of(16).unwrap().to_string(), "(1,(1,2))");
        assert_eq!(l.at_coord(&[1, 5].into()).unwrap(), l.at(16).unwrap());
        assert!(l.at_coord(&[1, 6].into()).is_err() && l.at_coord(&[1, 0, 0].into()).is_err() && l.at(-1).is_err());
        let offsets = l.offsets().unwrap();
        assert!((0..18).all(|i| offsets[i as usize] == l.at(i).unwrap()));
    }

    #[test]
    fn what_is_no_layout_is_refused() {
        let refused = |shape: IntTuple, stride: IntTuple| Layout::new(shape, stride).unwrap_err();
        assert!(matches!(refused([4, 2].into(), 1.into()), Error::NotCongruent { .. }));
        assert!(matches!(refused(0.into(), 1.into()), Error::Extent { extent: 0, .. }));
        assert!(matches!(refused([1 << 40, 1 << 40].into(), [1, 1].into()), Error::Overflow { .. }));
        assert!(matches!(refused(3.into(), (1i64 << 62).into()), Error::Overflow { .. }));
        assert!(matches!(refused(1.into(), i64::MIN.into()), Error::Overflow { .. }));
        assert!(matches!(layout("(99999,99999):(0,0)").offsets(), Err(Error::TooLarge { .. })));
    }

    #[test]
    fn negative_strides_are_numbers() {
        let l = layout("4:-2");
        assert_eq!((l.offsets().unwrap(), l.cosize(), l.range()), (vec![0, -2, -4, -6], 7, (-6, 0)));
    }
}
