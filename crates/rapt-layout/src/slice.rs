//! Slices: a coordinate with blanks leaves the layout of what is blank, and an offset.

use std::fmt;

use crate::error::Result;
use crate::int_tuple::{IntTuple, add};
use crate::layout::Layout;

/// A coordinate in which `_` stands for all of a mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Coord {
    /// An index of the mode.
    At(i64),
    /// All of the mode.
    All,
    /// One for each mode.
    Tuple(Vec<Coord>),
}

impl Layout {
    /// The layout of the modes that `coord` leaves blank, and the offset of the others.
    ///
    /// # Errors
    /// [`crate::Error::Coordinate`] where the coordinate does not fit.
    pub fn slice(&self, coord: &Coord) -> Result<(Layout, i64)> {
        let (mut modes, offset) = self.slice_modes(coord)?;
        let layout = match modes.len() {
            0 => Layout::new(1, 0)?,
            1 => modes.remove(0),
            _ => Layout::from_modes(modes)?,
        };
        Ok((layout, offset))
    }

    fn slice_modes(&self, coord: &Coord) -> Result<(Vec<Layout>, i64)> {
        match coord {
            Coord::All => Ok((vec![self.clone()], 0)),
            Coord::At(index) => Ok((Vec::new(), self.at_coord(&IntTuple::Int(*index))?)),
            Coord::Tuple(coords) => {
                if coords.len() != self.rank() || matches!(self.shape(), IntTuple::Int(_)) {
                    return Err(self.no_coordinate(coord));
                }
                let (mut modes, mut offset) = (Vec::new(), 0);
                for (mode, coord) in self.modes().iter().zip(coords) {
                    let (kept, part) = mode.slice_modes(coord)?;
                    offset = add(offset, part, "an offset")?;
                    // A sliced mode keeps its own nesting where more than one part of it is left.
                    match (coord, kept.len()) {
                        (Coord::Tuple(_), 2..) => modes.push(Layout::from_modes(kept)?),
                        _ => modes.extend(kept),
                    }
                }
                Ok((modes, offset))
            }
        }
    }
}

impl fmt::Display for Coord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Coord::At(index) => write!(f, "{index}"),
            Coord::All => f.write_str("_"),
            Coord::Tuple(coords) => {
                let texts: Vec<String> = coords.iter().map(Coord::to_string).collect();
                write!(f, "({})", texts.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_stay() {
        let check = |layout: &str, coord: &str, expect: (&str, i64)| {
            let layout: Layout = layout.parse().unwrap();
            let (got, offset) = layout.slice(&coord.parse().unwrap()).unwrap();
            assert_eq!((got.to_string().as_str(), offset), expect, "{layout} {coord}");
        };
        let l = "((3,2),((2,3),2)):((4,1),((2,15),100))";
        check(l, "(2,_)", ("((2,3),2):((2,15),100)", 8));
        check(l, "((1,_),((_,2),_))", ("(2,(2,2)):(1,(2,100))", 4 + 30));
        check(l, "(5,((1,_),1))", ("3:15", 9 + 2 + 100));
        check(l, "(0,0)", ("1:0", 0));
        check(l, "_", (l, 0));
        let layout: Layout = l.parse().unwrap();
        assert!(layout.slice(&"(6,_)".parse().unwrap()).is_err());
        assert!(layout.slice(&"(1,_,_)".parse().unwrap()).is_err());
        assert!(layout.slice(&"((1,(_,_)),_)".parse().unwrap()).is_err());
    }
}
