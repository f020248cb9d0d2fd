//! Rapt: attention with an exact tensor boundary.
//!
//! You hand it `q`, `k`, `v` where they lie (any strides, any dtype it knows) and it computes scaled dot-product
//! attention on them: no hidden cast, no hidden copy, no byte touched that is not yours. What it cannot serve exactly it
//! refuses with a typed [`Error`].
//!
//! ```
//! use rapt::{Options, View};
//!
//! // One head, two keys: [heads, len, head_dim].
//! let (q, k, v) = ([1.0f32, 0.5], [0.5f32, 1.0, 0.5, 1.0], [0.25f32, 0.75, 0.75, 0.25]);
//! let q = View::contiguous("q", &q, [1, 1, 2].into())?;
//! let k = View::contiguous("k", &k, [1, 2, 2].into())?;
//! let v = View::contiguous("v", &v, [1, 2, 2].into())?;
//! let out = rapt::attention(&q, &k, &v, &Options::default())?;
//! assert_eq!(out.to_vec::<f32>()?, [0.5, 0.5]); // equal keys: the mean of the values
//! # Ok::<(), rapt::Error>(())
//! ```
//!
//! Keys and values in fewer bits, whose numbers are formed where they are loaded:
//!
//! ```
//! use rapt::quant::{Format, Granularity, Scheme, quantize};
//! use rapt::{Options, ScaleLayout, View};
//!
//! let (q, kv) = ([1.0f32, 0.5], [0.5f32, -1.0, 0.25, 1.0]);
//! let q = View::contiguous("q", &q, [1, 1, 2].into())?;
//! let kv = View::contiguous("kv", &kv, [1, 2, 2].into())?;
//! let int8 = Scheme::new(Format::Int8, Some(Granularity::Token), ScaleLayout::Plain)?;
//! let kv = quantize(&kv, int8, None)?;
//! let out = rapt::attention_quantized(&q, &kv.view()?, &kv.view()?, &Options::default())?;
//! assert_eq!(out.to_vec::<f32>()?.len(), 2);
//! # Ok::<(), rapt::quant::QuantError>(())
//! ```
//! Codes that lie elsewhere, masks and outputs of your own: [`Tensors`] has [`Codes`] for q, k and v, for
//! [`Engine::attention_into`]. There is no scale that is taken to be 1.
//!
//! [`attention`] is the common case. [`Engine`] owns threads and scratch memory; [`Spec`] and [`Plan`] describe a request
//! and what will run for it, without any pointer. [`KvCache`] owns the keys and values of sequences that grow, in pages that
//! they share. [`Model`] is a program that PyTorch exported, run without it.
//! [`quant`] is tensors in fewer bits, with their scales. [`layout`] is apart from all of it: the algebra of layouts, and proof that what one tensor-core instruction writes is
//! what the next one reads.

mod backward;
mod call_cache;
pub mod cuda;
pub mod doctor;
mod engine;
pub mod model;
mod offload;
mod pool;
mod ragged;
mod tensor;
mod tolerance;
#[cfg(feature = "vulkan")]
pub mod vulkan;

pub use backward::backward_spec_of;
pub use call_cache::CallCache;
pub use engine::{Engine, Threads, attention, attention_quantized, default_engine, spec_of};
pub use model::{Model, ModelError, Session};
pub use offload::offload;
pub use pool::Pool;
pub use ragged::{
    CacheCodes, CacheView, KvCache, KvCacheForm, KvCacheQueries, KvCacheTensors, PackedTensors, RaggedPart, RaggedPlan,
    SequenceId, SequenceRows, VarlenBackwardTensors, VarlenTensors,
};
pub use rapt_bridge as bridge;
pub use rapt_core::{
    Alignment, Arch, BackwardOperands, BackwardPlan, BackwardSpec, BackwardTensors, BlockRange, COMPUTED, Caps, Causal,
    Certificate, Codes, CodesForm, CodesSpec, Compiled, Compute, Copied, Cost, Coverage, DType, Device, DeviceDraw,
    DeviceMemory, Dims, Direction, Disjoint, Dropout, DropoutSeed, Element, Error, ErrorKind, Executor, Explanation,
    Extent, Finite, Format, GradientForms, Granularity, INT8_BLOCK, InBounds, Injective, Kernel, KernelKey, Kv, Launch,
    LaunchPlan, Lines, MAX_RANK, MaskClass, Number, Numerics, Offload, Operands, Options, PRounding, PagesSpec, Plan,
    PlanPart, Qkv, QuantizedFact, Queue, Result, ScaleLayout, SerialExecutor, Shape, Spec, SpecBuilder, Strides,
    TensorForm, TensorLayout, TensorSpec, Tensors, Tile, UnknownDtypeCode, View, ViewMut, Window, Work, Workspace,
    prove_disjoint, prove_injective,
};
pub use rapt_cpu::{
    BackwardLaunch, CpuLaunch, KernelVariant as CpuKernelVariant, Step as CpuStep, available as available_isas,
    ceiling, select, select_backward,
};
pub use rapt_layout as layout;
pub use rapt_metal as metal;
pub use rapt_pt2 as pt2;
pub use rapt_quant as quant;
pub use rapt_reference as reference;
pub use tensor::Tensor;
pub use tolerance::{Backing, Errors, JudgedHead, Judgement, KAPPA, Tolerance};

/// The Rust of the README and of the documentation, which doc tests compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../../../docs/start/rust.md")]
struct Documentation;

/// The version of this crate: major, minor, patch.
#[must_use]
pub fn version() -> (u32, u32, u32) {
    let part = |text: &str| text.parse().unwrap_or(0);
    (
        part(env!("CARGO_PKG_VERSION_MAJOR")),
        part(env!("CARGO_PKG_VERSION_MINOR")),
        part(env!("CARGO_PKG_VERSION_PATCH")),
    )
}
