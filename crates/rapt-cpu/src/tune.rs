//! The door of `cargo xtask tune`: plans and runs with tiles of the caller's choice, the same way as those of the table.
//!
//! Deliberately absent: timing (`examples/tune.rs`), and any other use: a plan made here is run here, with the same tiles.

use rapt_core::{Caps, Executor, Operands, Plan, Result, Spec, Workspace};

use crate::tiles::Tiles;
use crate::{run, select};

/// [`select`](crate::select()) with `tiles` in place of the table's.
///
/// # Errors
/// Those of `select`.
pub fn select_with(spec: &Spec, caps: &Caps, tiles: &Tiles) -> Result<Plan> {
    select::select_tiled(spec, caps, tiles)
}

/// [`run`](crate::run()) with `tiles` in place of the table's.
///
/// # Errors
/// Those of `run`; [`Error::OutOfMemory`](rapt_core::Error::OutOfMemory) for a workspace that was measured for smaller tiles.
pub fn run_with(
    plan: &Plan,
    tiles: &Tiles,
    operands: &mut Operands<'_>,
    workspace: &mut Workspace,
    executor: &dyn Executor,
) -> Result<()> {
    run::run_tiled(plan, tiles, operands, workspace, executor)
}
