//! Foreign calls, each checked and its failure typed. Deliberately absent: caches, and any decision.

pub(crate) mod driver;
pub(crate) mod nvrtc;
