//! Layout algebra and the fragment checker: proof that what one instruction writes is what the next one reads.
//!
//! ```text
//! notation ─► Layout ── compose, complement, divide, product, inverses, recast, slice ─► Layout      layout, algebra, …
//! name ─► Atom: (thread, value) ↔ (row, column), or (row, column) ─► place                            atlas
//! producer + consumer ─► Report: proven, or the first disagreement, the fault, a repair that is proven   check
//! the same on plain memory with poison: S = Q·Kᵀ ─► P ─► P·V                                          emulate
//! ```
//!
//! ```
//! use rapt_layout::Layout;
//!
//! let c: Layout = "((128,128),1,1):((65536,1),0,0)".parse()?;
//! assert_eq!((c.cosize(), c.range().1), (8_323_200, 8_323_199));
//! let p = c.compose(&"(128,64)".parse()?)?;
//! assert_eq!(p.to_string(), "(128,64):(65536,1)");
//! # Ok::<(), rapt_layout::Error>(())
//! ```
//!
//! Numbers have units ([`mod@unit`]): cells of tensor memory, elements of a width, bytes. Deliberately absent: any other crate
//! of Rapt, any device, and layouts whose strides are not integers.
#![forbid(unsafe_code)]

mod algebra;
pub mod atlas;
pub mod check;
mod composed;
mod divide;
pub mod draw;
mod dtype;
pub mod emulate;
mod error;
mod int_tuple;
mod layout;
mod parse;
mod recast;
mod slice;
mod swizzle;
mod tiler;
pub mod unit;

pub use composed::ComposedLayout;
pub use divide::Arrangement;
pub use dtype::Dtype;
pub use error::{Error, Result};
pub use int_tuple::{IntTuple, LIMIT, MAX_DEPTH, MAX_LEAVES};
pub use layout::{Layout, MOST_ENUMERATED};
pub use slice::Coord;
pub use swizzle::Swizzle;
pub use tiler::Tiler;
