//! CUDA's own libraries: foreign functions ([`sys`]) and the same checked and typed ([`result`]). No other module has any.

mod result;
mod sys;

pub(crate) use result::cuda::{Cuda, Driver, Facts, Function, Grid};
pub(crate) use result::nvrtc::{Compiler, Cubin, Nvrtc};
