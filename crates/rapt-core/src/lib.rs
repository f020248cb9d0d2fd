//! The vocabulary of Rapt: what a request for attention is, before any kernel exists.
//!
//! ```text
//!              Spec ──select(&Spec, &Caps)──► Plan
//! Views ──► Operands ──checked against Spec──► run(&Plan, Operands, &mut Workspace, &Queue) ──► out (+ lse)
//! ```
//!
//! Every type here is plain data. A [`Spec`] holds everything but pointers and is checked once; [`Operands`] are
//! [`View`]s proven against a [`Spec`]; a [`Plan`] is owned and says what will run. Deliberately absent: kernels,
//! foreign function interfaces, allocation of tensors, and any conversion from one dtype to another.

mod backward;
mod block_range;
mod cache_folder;
mod certificate;
pub mod codes;
mod copied;
mod device;
mod dropout;
mod dtype;
mod error;
mod explain;
pub mod float64;
mod form;
mod format;
mod lines;
mod measured;
mod offload;
mod operands;
mod options;
mod overlap;
mod plan;
mod queue;
mod shape;
mod spec;
pub mod swizzle;
mod thousands;
mod view;

pub use backward::{BackwardOperands, BackwardPlan, BackwardSpec, BackwardTensors, GradientForms};
pub use block_range::{BlockRange, Tile};
pub use cache_folder::cache_folder;
pub use certificate::{Certificate, Coverage, Disjoint, InBounds, Injective, QuantizedFact};
pub use copied::Copied;
pub use device::Device;
pub use dropout::{
    DeviceDraw, Dropout, DropoutHead, DropoutSeed, PHILOX_INCREMENTS, PHILOX_MULTIPLIERS, PHILOX_ROUNDS,
    column_of_group, group_of_column, philox,
};
pub use dtype::{COMPUTED, DType, Element, Number, UnknownDtypeCode, bf16_from_f64, f16_from_f64};
pub use error::{Error, ErrorKind, Result};
pub use explain::Explanation;
pub use form::{Alignment, TensorForm};
pub use format::{Format, Granularity, ScaleLayout};
pub use lines::Lines;
pub use measured::{HeadDeviation, MatrixErrors};
pub use offload::Offload;
pub use operands::{Operands, Tensors, prove_disjoint, prove_injective, split};
pub use options::{Causal, Compute, Finite, INT8_BLOCK, Options, TensorLayout, Window};
pub use plan::{
    Arch, Caps, Compiled, Cost, Kernel, KernelKey, Launch, LaunchPlan, MaskClass, PRounding, Plan, PlanPart, Work,
};
pub use queue::{DeviceMemory, Executor, Queue, SerialExecutor, Workspace};
pub use shape::{Dims, MAX_RANK, Shape, Strides};
pub use spec::{
    Codes, CodesForm, CodesSpec, Direction, Kv, LengthsSpec, MaskSpec, Numerics, PagesSpec, Qkv, Spec, SpecBuilder,
    TensorSpec, VarlenSpec,
};
pub use view::{Extent, View, ViewMut};
