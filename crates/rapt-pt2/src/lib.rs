//! Archives that `torch.export.save` writes, read without libtorch.
//!
//! A `.pt2` archive is a zip file whose members are stored, not compressed: the program as JSON
//! (`torch._export.serde.schema`), and the raw bytes of each storage of weights and constants. Nothing in it is unpickled,
//! and nothing of it is run: this crate says what the archive holds, in types.
//!
//! Deliberately absent: any operator's meaning (rapt-graph), any default dtype, any conversion.

mod expr;
mod program;

pub use expr::{Expr, ExprError, Symbols};
pub use program::{
    Argument, Device, Graph, InputSpec, MemoryFormat, NamedArgument, Node, OutputSpec, Program, Signature, SymInt,
    Symbol, TensorMeta,
};
