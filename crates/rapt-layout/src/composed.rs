//! A layout behind a swizzle: `x ↦ Sw(offset + L(x))`.

use std::fmt;

use crate::error::{Error, Result};
use crate::int_tuple::{IntTuple, add};
use crate::layout::Layout;
use crate::swizzle::Swizzle;

/// `swizzle o offset o layout`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ComposedLayout {
    swizzle: Swizzle,
    offset: i64,
    layout: Layout,
}

impl ComposedLayout {
    /// `swizzle o offset o layout`.
    ///
    /// # Errors
    /// [`Error::NoSuchLayout`] where a swizzle would meet a negative offset; [`Error::Overflow`].
    pub fn new(swizzle: Swizzle, offset: i64, layout: Layout) -> Result<Self> {
        let (low, high) = layout.range();
        let low = add(low, offset, "an offset")?;
        add(high, offset, "an offset")?;
        if low < 0 && !swizzle.is_identity() {
            let why = "a swizzle permutes addresses from 0 up".to_owned();
            return Err(Error::NoSuchLayout { operation: "swizzle", layout: layout.to_string(), why });
        }
        Ok(ComposedLayout { swizzle, offset, layout })
    }

    /// The swizzle.
    #[must_use]
    pub fn swizzle(&self) -> Swizzle {
        self.swizzle
    }

    /// What is added before the swizzle.
    #[must_use]
    pub fn offset(&self) -> i64 {
        self.offset
    }

    /// The layout within.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The layout alone, if there is neither swizzle nor offset.
    #[must_use]
    pub fn plain(&self) -> Option<&Layout> {
        (self.swizzle.is_identity() && self.offset == 0).then_some(&self.layout)
    }

    /// The value at an index.
    ///
    /// # Errors
    /// As [`Layout::at`].
    pub fn at(&self, index: i64) -> Result<i64> {
        Ok(self.swizzle.apply(add(self.layout.at(index)?, self.offset, "an offset")?))
    }

    /// The value at a coordinate.
    ///
    /// # Errors
    /// As [`Layout::at_coord`].
    pub fn at_coord(&self, coord: &IntTuple) -> Result<i64> {
        Ok(self.swizzle.apply(add(self.layout.at_coord(coord)?, self.offset, "an offset")?))
    }

    /// Every value, in the order of the index.
    ///
    /// # Errors
    /// As [`Layout::offsets`].
    pub fn offsets(&self) -> Result<Vec<i64>> {
        let mut offsets = self.layout.offsets()?;
        for offset in &mut offsets {
            *offset = self.swizzle.apply(*offset + self.offset);
        }
        Ok(offsets)
    }

    /// `self ∘ other`.
    ///
    /// # Errors
    /// As [`Layout::compose`].
    pub fn compose(&self, other: &Layout) -> Result<ComposedLayout> {
        ComposedLayout::new(self.swizzle, self.offset, self.layout.compose(other)?)
    }
}

impl From<Layout> for ComposedLayout {
    fn from(layout: Layout) -> Self {
        ComposedLayout { swizzle: Swizzle::NONE, offset: 0, layout }
    }
}

impl fmt::Display for ComposedLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.plain() {
            Some(layout) => write!(f, "{layout}"),
            None => write!(f, "{} o {} o {}", self.swizzle, self.offset, self.layout),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_through_all_three() {
        let layout: ComposedLayout = "Sw<3,4,3> o 128 o (8,128):(128,1)".parse().unwrap();
        assert_eq!(layout.at_coord(&[0, 0].into()).unwrap(), 128 + 16);
        let all = layout.offsets().unwrap();
        assert!((0..1024).all(|i| all[i as usize] == layout.at(i).unwrap()));
        let rows = layout.compose(&"8:1".parse().unwrap()).unwrap();
        assert_eq!(rows.to_string(), "Sw<3,4,3> o 128 o 8:128");
        assert!("Sw<3,4,3> o -1 o 8:1".parse::<ComposedLayout>().is_err());
    }
}
