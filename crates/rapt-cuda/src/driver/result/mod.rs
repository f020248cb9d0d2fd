//! Foreign calls, each checked and its failure typed. Deliberately absent: caches, and any decision.

pub(super) mod cuda;
pub(super) mod nvrtc;
