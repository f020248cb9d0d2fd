//! Divide (a layout into tiles) and product (a layout repeated).
//!
//! ```text
//! logical_divide(A, B)  = A ∘ (B, B*)                  B* the complement of B in size(A)
//! logical_product(A, B) = (A, A* ∘ B)                  A* the complement of A in size(A)·cosize(B)
//! zipped: ((tiles), (rests))    tiled: ((tiles), rest, rest, …)    flat: (tile, …, rest, …)
//! blocked: mode by mode (a, b), block after block       raked: (b, a), blocks interleaved
//! ```
//! By mode with [`Tiler::ByMode`]. Source: CuTe's documentation, "CuTe Layout Algebra".

use crate::algebra::refuse;
use crate::error::{Error, Result};
use crate::int_tuple::mul;
use crate::layout::Layout;
use crate::tiler::Tiler;

/// How the modes of a quotient or a product are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Mode by mode: ((tile, rest), …).
    Logical,
    /// ((tile, …), (rest, …)).
    Zipped,
    /// ((tile, …), rest, …).
    Tiled,
    /// (tile, …, rest, …).
    Flat,
}

impl Layout {
    /// Each mode becomes (tile, rest). Where the tiler does not divide the size, the rest is rounded up, as in CuTe, and
    /// reaches beyond the layout.
    ///
    /// # Errors
    /// As [`Layout::compose`] and [`Layout::complement`]; [`Error::Rank`].
    pub fn logical_divide(&self, tiler: &Tiler) -> Result<Layout> {
        match tiler {
            Tiler::Layout(layout) => {
                let rest = layout.complement(self.size())?;
                self.compose(&Layout::from_modes([layout.clone(), rest])?)
            }
            Tiler::Whole => Layout::from_modes([self.clone(), Layout::new(1, 0)?]),
            Tiler::ByMode(tilers) => self.by_mode("divide", tilers, Layout::logical_divide),
        }
    }

    /// Each mode becomes (itself, its repetition).
    ///
    /// # Errors
    /// As [`Layout::compose`] and [`Layout::complement`]; [`Error::Rank`].
    pub fn logical_product(&self, tiler: &Tiler) -> Result<Layout> {
        match tiler {
            Tiler::Layout(layout) => {
                if layout.range().0 < 0 {
                    return Err(refuse("product", layout, "a stride is negative"));
                }
                let rest = self.complement(mul(self.size(), layout.cosize(), "the size of a product")?)?;
                Layout::from_modes([self.clone(), rest.compose(layout)?])
            }
            Tiler::Whole => Layout::from_modes([self.clone(), Layout::new(1, 0)?]),
            Tiler::ByMode(tilers) => self.by_mode("product", tilers, Layout::logical_product),
        }
    }

    /// Divided and arranged.
    ///
    /// # Errors
    /// As [`Layout::logical_divide`].
    pub fn divide(&self, tiler: &Tiler, arrangement: Arrangement) -> Result<Layout> {
        arrange(self.logical_divide(tiler)?, tiler, arrangement)
    }

    /// Multiplied and arranged.
    ///
    /// # Errors
    /// As [`Layout::logical_product`].
    pub fn product(&self, tiler: &Tiler, arrangement: Arrangement) -> Result<Layout> {
        arrange(self.logical_product(tiler)?, tiler, arrangement)
    }

    /// Copies of `self` side by side: mode k is (self_k, other_k).
    ///
    /// # Errors
    /// As [`Layout::logical_product`].
    pub fn blocked_product(&self, other: &Layout) -> Result<Layout> {
        let (blocks, copies) = self.ranked_product(other)?;
        Layout::from_modes(
            blocks.into_iter().zip(copies).map(|(a, b)| Layout::from_modes([a, b])).collect::<Result<Vec<_>>>()?,
        )
    }

    /// Copies of `self` interleaved: mode k is (other_k, self_k).
    ///
    /// # Errors
    /// As [`Layout::logical_product`].
    pub fn raked_product(&self, other: &Layout) -> Result<Layout> {
        let (blocks, copies) = self.ranked_product(other)?;
        Layout::from_modes(
            blocks.into_iter().zip(copies).map(|(a, b)| Layout::from_modes([b, a])).collect::<Result<Vec<_>>>()?,
        )
    }

    /// The modes of both factors of the product, brought to one rank with `1:0`.
    fn ranked_product(&self, other: &Layout) -> Result<(Vec<Layout>, Vec<Layout>)> {
        let rank = self.rank().max(other.rank());
        let padded = |layout: &Layout| -> Result<Layout> {
            let mut modes = layout.modes();
            modes.resize(rank, Layout::new(1, 0)?);
            Layout::from_modes(modes)
        };
        let product = padded(self)?.logical_product(&padded(other)?.into())?;
        let part = |at| product.mode(at).map(|mode| mode.modes()).unwrap_or_default();
        Ok((part(0), part(1)))
    }
}

/// From ((tile, rest), …) along the tiler's nesting.
fn arrange(logical: Layout, tiler: &Tiler, arrangement: Arrangement) -> Result<Layout> {
    if arrangement == Arrangement::Logical {
        return Ok(logical);
    }
    let (tiles, rests) = unzip(&logical, tiler)?;
    match arrangement {
        Arrangement::Logical | Arrangement::Zipped => Layout::from_modes([tiles, rests]),
        Arrangement::Tiled => Layout::from_modes(std::iter::once(tiles).chain(rests.modes())),
        Arrangement::Flat => Layout::from_modes(tiles.modes().into_iter().chain(rests.modes())),
    }
}

fn unzip(logical: &Layout, tiler: &Tiler) -> Result<(Layout, Layout)> {
    let pair = |layout: &Layout| -> Result<(Layout, Layout)> {
        layout.mode(0).zip(layout.mode(1)).ok_or_else(|| Error::Rank {
            operation: "zip",
            layout: layout.to_string(),
            rank: layout.rank(),
            asked: 2,
        })
    };
    match tiler {
        Tiler::Layout(_) => pair(logical),
        // A whole mode has no tile: all of it is rest.
        Tiler::Whole => pair(logical).map(|(whole, one)| (one, whole)),
        Tiler::ByMode(tilers) => {
            let (mut tiles, mut rests) = (Vec::new(), Vec::new());
            for (at, mode) in logical.modes().iter().enumerate() {
                match tilers.get(at) {
                    Some(tiler) => {
                        let (tile, rest) = unzip(mode, tiler)?;
                        tiles.push(tile);
                        rests.push(rest);
                    }
                    None => rests.push(mode.clone()),
                }
            }
            Ok((Layout::from_modes(tiles)?, Layout::from_modes(rests)?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(text: &str) -> Layout {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn divide_as_in_cutes_documentation() {
        let check = |a: &str, tiler: &str, how, expect: &str| {
            let got = layout(a).divide(&tiler.parse().unwrap(), how).unwrap();
            assert_eq!(got.to_string(), expect, "{a} / {tiler} {how:?}");
        };
        use Arrangement::{Flat, Logical, Tiled, Zipped};
        check("(4,2,3):(2,1,8)", "4:2", Logical, "((2,2),(2,3)):((4,1),(2,8))");
        let (a, tiler) = ("(9,(4,8)):(59,(13,1))", "<3:3,(2,4):(1,8)>");
        check(a, tiler, Logical, "((3,3),((2,4),(2,2))):((177,59),((13,2),(26,1)))");
        check(a, tiler, Zipped, "((3,(2,4)),(3,(2,2))):((177,(13,2)),(59,(26,1)))");
        check(a, tiler, Tiled, "((3,(2,4)),3,(2,2)):((177,(13,2)),59,(26,1))");
        check(a, tiler, Flat, "(3,(2,4),3,(2,2)):(177,(13,2),59,(26,1))");
        check("(8,8):(8,1)", "<4,2>", Zipped, "((4,2),(2,4)):((8,1),(32,2))");
        check("(8,8,5):(8,1,64)", "<4,_>", Zipped, "((4,1),(2,8,5)):((8,0),(32,1,64))");
        check("16:1", "4", Logical, "(4,4):(1,4)");
        check("10:1", "4", Logical, "(4,3):(1,4)");
    }

    #[test]
    fn product_as_in_cutes_documentation() {
        let logical = |a: &str, b: &str| layout(a).logical_product(&layout(b).into()).unwrap().to_string();
        assert_eq!(logical("(2,2):(4,1)", "6:1"), "((2,2),(2,3)):((4,1),(2,8))");
        assert_eq!(logical("(2,2):(4,1)", "(4,2):(2,1)"), "((2,2),(4,2)):((4,1),(8,2))");
        let (block, copies) = (layout("(2,5):(5,1)"), layout("(3,4):(1,3)"));
        assert_eq!(block.blocked_product(&copies).unwrap().to_string(), "((2,3),(5,4)):((5,10),(1,30))");
        assert_eq!(block.raked_product(&copies).unwrap().to_string(), "((3,2),(4,5)):((10,5),(30,1))");
        let by_mode = layout("(2,5):(5,1)").product(&"<3:5,4:6>".parse().unwrap(), Arrangement::Zipped).unwrap();
        assert_eq!(by_mode.to_string(), "((2,5),(3,4)):((5,1),(10,30))");
    }

    #[test]
    fn more_tilers_than_modes_are_refused() {
        let error = layout("8:1").divide(&"<4,2>".parse().unwrap(), Arrangement::Zipped).unwrap_err();
        assert!(matches!(error, Error::Rank { rank: 1, asked: 2, .. }), "{error}");
    }
}
