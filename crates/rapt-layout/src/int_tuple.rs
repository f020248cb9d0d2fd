//! Nested tuples of integers: shapes, strides and coordinates.
//!
//! `IntTuple = integer | (IntTuple, …)`. A tuple of one is not its element: `(4)` parses to 4, `(4,)` to a tuple of one.
//! Every number lies within ±2⁶² so that sums of two cannot overflow, and nesting is bounded: recursion stays shallow
//! whatever the text. Deliberately absent: arithmetic that can wrap.

use std::fmt;

use crate::error::{Error, Result};

/// The largest magnitude of any number here.
pub const LIMIT: i64 = 1 << 62;
/// The deepest nesting.
pub const MAX_DEPTH: usize = 32;
/// The most leaves of one tuple.
pub const MAX_LEAVES: usize = 4096;

/// An integer or a tuple of such.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum IntTuple {
    /// A leaf.
    Int(i64),
    /// A node.
    Tuple(Vec<IntTuple>),
}

/// `a · b`, refused beyond [`LIMIT`].
pub(crate) fn mul(a: i64, b: i64, what: &'static str) -> Result<i64> {
    a.checked_mul(b).filter(|product| product.unsigned_abs() <= LIMIT.unsigned_abs()).ok_or(Error::Overflow { what })
}

/// `a + b`, refused beyond [`LIMIT`].
pub(crate) fn add(a: i64, b: i64, what: &'static str) -> Result<i64> {
    a.checked_add(b).filter(|sum| sum.unsigned_abs() <= LIMIT.unsigned_abs()).ok_or(Error::Overflow { what })
}

impl IntTuple {
    /// Leaves in order.
    #[must_use]
    pub fn leaves(&self) -> Vec<i64> {
        let mut leaves = Vec::new();
        self.collect(&mut leaves);
        leaves
    }

    fn collect(&self, leaves: &mut Vec<i64>) {
        match self {
            IntTuple::Int(n) => leaves.push(*n),
            IntTuple::Tuple(items) => items.iter().for_each(|item| item.collect(leaves)),
        }
    }

    /// Modes at the top: 1 for a leaf.
    #[must_use]
    pub fn rank(&self) -> usize {
        match self {
            IntTuple::Int(_) => 1,
            IntTuple::Tuple(items) => items.len(),
        }
    }

    /// 0 for a leaf, 1 for a tuple of leaves, …
    #[must_use]
    pub fn depth(&self) -> usize {
        match self {
            IntTuple::Int(_) => 0,
            IntTuple::Tuple(items) => 1 + items.iter().map(IntTuple::depth).max().unwrap_or(0),
        }
    }

    /// The product of the leaves.
    ///
    /// # Errors
    /// [`Error::Overflow`].
    pub fn product(&self) -> Result<i64> {
        self.leaves().into_iter().try_fold(1, |product, n| mul(product, n, "a size"))
    }

    /// The mode at `at`; a leaf is its own mode 0.
    #[must_use]
    pub fn mode(&self, at: usize) -> Option<&IntTuple> {
        match self {
            IntTuple::Int(_) => (at == 0).then_some(self),
            IntTuple::Tuple(items) => items.get(at),
        }
    }

    /// Whether both have the same nesting.
    #[must_use]
    pub fn is_congruent(&self, other: &IntTuple) -> bool {
        match (self, other) {
            (IntTuple::Int(_), IntTuple::Int(_)) => true,
            (IntTuple::Tuple(a), IntTuple::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.is_congruent(b))
            }
            _ => false,
        }
    }

    /// The same nesting with other leaves; `leaves` must hold one for each.
    pub(crate) fn with_leaves(&self, leaves: &mut impl Iterator<Item = i64>) -> IntTuple {
        match self {
            // A caller gives as many as there are; 0 would be visible in any test.
            IntTuple::Int(_) => IntTuple::Int(leaves.next().unwrap_or_default()),
            IntTuple::Tuple(items) => IntTuple::Tuple(items.iter().map(|item| item.with_leaves(leaves)).collect()),
        }
    }

    /// Within the limits of this module.
    pub(crate) fn check(&self) -> Result<()> {
        if self.depth() > MAX_DEPTH {
            return Err(too_large("nesting", self.depth(), MAX_DEPTH));
        }
        let leaves = self.leaves();
        if leaves.len() > MAX_LEAVES {
            return Err(too_large("the number of leaves", leaves.len(), MAX_LEAVES));
        }
        match leaves.iter().any(|n| n.unsigned_abs() > LIMIT.unsigned_abs()) {
            true => Err(Error::Overflow { what: "a number" }),
            false => Ok(()),
        }
    }
}

fn too_large(what: &'static str, got: usize, most: usize) -> Error {
    let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    Error::TooLarge { what, got: number(got), most: number(most) }
}

impl From<i64> for IntTuple {
    fn from(n: i64) -> Self {
        IntTuple::Int(n)
    }
}

impl<T: Into<IntTuple>, const N: usize> From<[T; N]> for IntTuple {
    fn from(items: [T; N]) -> Self {
        IntTuple::Tuple(items.into_iter().map(Into::into).collect())
    }
}

impl From<Vec<IntTuple>> for IntTuple {
    fn from(items: Vec<IntTuple>) -> Self {
        IntTuple::Tuple(items)
    }
}

impl fmt::Display for IntTuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IntTuple::Int(n) => write!(f, "{n}"),
            IntTuple::Tuple(items) => {
                f.write_str("(")?;
                for (at, item) in items.iter().enumerate() {
                    if at > 0 {
                        f.write_str(",")?;
                    }
                    write!(f, "{item}")?;
                }
                // A tuple of one keeps its comma, as in Python, so that the text reads back as what it was.
                f.write_str(if items.len() == 1 { ",)" } else { ")" })
            }
        }
    }
}
