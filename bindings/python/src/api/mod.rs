//! The functions and classes of the package, each from Python's arguments to Python's answer.

pub(crate) mod attention;
pub(crate) mod backward;
pub(crate) mod cli;
mod codes;
pub(crate) mod context;
pub(crate) mod doctor;
pub(crate) mod jagged;
pub(crate) mod kv_cache;
pub(crate) mod layout;
pub(crate) mod log;
pub(crate) mod measured;
pub(crate) mod mlx;
pub(crate) mod options;
pub(crate) mod plan;
pub(crate) mod quant;
pub(crate) mod ragged;
pub(crate) mod sdpa;
pub(crate) mod tolerance;
pub(crate) mod varlen;
pub(crate) mod varlen_backward;
