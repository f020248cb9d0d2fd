//! From a Python tensor to a [`rapt::View`] and back. No element is read, copied or converted here.
//!
//! ```text
//! operand, export, stream       what a tensor says of itself; a consumed DLPack export; where a run was enqueued
//! torch (torch_abi), numpy      tensors whose library is known
//! stream_context                whose stream and memory serve a call on a GPU
//! dlpack (dlpack_abi, cuda_interface)   every other producer
//! read, allocate                the kind of an object, and new tensors of a kind
//! ```
//! Each file depends on those above it alone. The extent of a torch tensor is proven by its storage, that of a tensor made here by
//! its size; that of numpy arrays and DLPack capsules is declared.

mod allocate;
mod cuda_interface;
mod dlpack;
mod dlpack_abi;
mod export;
pub(crate) mod numpy;
mod operand;
mod read;
mod stream;
mod stream_context;
pub(crate) mod torch;
pub(crate) mod torch_abi;

pub(crate) use allocate::{Product, allocate, reserve};
pub(crate) use export::Export;
pub(crate) use operand::{Operand, shape};
pub(crate) use read::{kind_of, read, source_kind, type_name};
pub(crate) use stream::Enqueued;
pub(crate) use stream_context::StreamContext;
