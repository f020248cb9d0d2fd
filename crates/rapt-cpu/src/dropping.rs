//! Dropout as kernels see it.

use rapt_core::{DropoutSeed, Spec};

/// Which weights of a run are dropped, and what those kept are scaled with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropping {
    pub(crate) seed: DropoutSeed,
    /// The largest word at which a weight is dropped.
    pub(crate) last: u32,
    /// `1 / (1 − p)`. Forward multiplies the end of a row with it, as its weights are not; backward what arrives at each.
    pub(crate) scale: f64,
}

impl Dropping {
    /// What `spec` and its run say.
    pub(crate) fn new(spec: &Spec, seed: Option<DropoutSeed>) -> Option<Self> {
        let (dropout, seed) = spec.dropout.zip(seed)?;
        Some(Dropping { seed, last: dropout.last_dropped(), scale: dropout.scale() })
    }
}
