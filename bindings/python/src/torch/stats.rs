//! How many calls on torch tensors Rapt served.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;

static SERVED: AtomicU64 = AtomicU64::new(0);

/// Counts one call on torch tensors as served.
#[pyfunction]
pub(crate) fn count_served() {
    SERVED.fetch_add(1, Ordering::Relaxed);
}

/// The number of calls on torch tensors that were served since the module was loaded.
#[pyfunction]
pub(crate) fn served() -> u64 {
    SERVED.load(Ordering::Relaxed)
}
