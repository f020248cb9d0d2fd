//! Tilers: what a layout is divided or multiplied by.

use std::fmt;

use crate::layout::Layout;

/// A layout for the whole, or one tiler for each of the first modes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tiler {
    /// For the layout as a whole. An integer n is `n:1`.
    Layout(Layout),
    /// One for each of the first modes; further modes stay as they are.
    ByMode(Vec<Tiler>),
    /// The mode stays as it is.
    Whole,
}

impl From<Layout> for Tiler {
    fn from(layout: Layout) -> Self {
        Tiler::Layout(layout)
    }
}

impl fmt::Display for Tiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tiler::Layout(layout) => write!(f, "{layout}"),
            Tiler::Whole => f.write_str("_"),
            Tiler::ByMode(tilers) => {
                let texts: Vec<String> = tilers.iter().map(Tiler::to_string).collect();
                write!(f, "<{}>", texts.join(","))
            }
        }
    }
}
