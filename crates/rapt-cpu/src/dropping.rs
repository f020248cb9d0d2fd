//! Dropout as kernels see it.

use rapt_core::{DropoutSeed, Spec, Tensors};

/// Which weights of a run are dropped, and what those kept are scaled with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropping {
    pub(crate) seed: DropoutSeed,
    /// The largest word at which a weight is dropped.
    pub(crate) last: u32,
    /// `1 / (1 − p)`: the end of a row is multiplied with it, as its weights are not.
    pub(crate) scale: f64,
}

impl Dropping {
    /// What `spec` and its run say.
    pub(crate) fn new(spec: &Spec, tensors: &Tensors<'_>) -> Option<Self> {
        let (dropout, seed) = spec.dropout.zip(tensors.dropout)?;
        Some(Dropping { seed, last: dropout.last_dropped(), scale: dropout.scale() })
    }
}
