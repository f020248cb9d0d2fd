//! Archives that `torch.export.save` writes, read without libtorch.
//!
//! A `.pt2` archive is a zip file whose members are stored, not compressed: the program as JSON
//! (`torch._export.serde.schema`), and the raw bytes of each storage of weights and constants. Nothing in it is unpickled,
//! and nothing of it is run: this crate says what the archive holds, in types.
//!
//! Deliberately absent: any operator's meaning (rapt-graph), any default dtype, any conversion.

mod archive;
mod display;
mod effects;
mod error;
mod expr;
mod guard;
mod inline;
mod lower;
mod payload;
mod program;
mod read;
mod schema;
mod syntax;
mod tree;
mod zip;

pub use archive::Archive;
pub use error::{EXPORT_ANEW, Error, SAVE_ANEW};
pub use expr::{Condition, Expr, ExprError, ParseError, Real, Relation, Rounding, Symbols};
pub use guard::{Guard, GuardError, InputValue, Property, Source};
pub use lower::{parse_condition, parse_expr, parse_real};
pub use payload::{Payload, StorageId};
pub use program::{
    Argument, Device, Graph, InputSpec, MemoryFormat, NamedArgument, Node, OutputSpec, Program, Signature, SymInt,
    Symbol, TensorMeta,
};
pub use tree::{Call, Key, Kind, Tree};

/// The most memory that reading an archive takes, as a multiple of the archive's bytes: what is parsed and what is built
/// of it, together. The worst input known, an expression of one-digit arguments, takes half of it.
pub const MEMORY_MULTIPLE: usize = 128;
