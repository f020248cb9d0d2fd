//! The interface of `cargo xtask tune`: plans with tiles of the caller's choice, which [`run`](crate::run()) runs as it does those
//! of the table.
//!
//! Deliberately absent: timing (`examples/tune.rs`).

use rapt_core::{Caps, Plan, Result, Spec};

use crate::select::{self, tiles::Tiles};

/// [`select`](crate::select()) with `tiles` in place of the table's.
///
/// # Errors
/// Those of `select`.
pub fn select_with(spec: &Spec, caps: &Caps, tiles: &Tiles) -> Result<Plan> {
    select::select_tiled(spec, caps, tiles)
}
