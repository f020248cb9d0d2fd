//! The graph of an exported PyTorch program.
//!
//! A [`Graph`] is made of a [`rapt_pt2::Program`]: each node's operator becomes an [`Op`] with typed arguments, or the
//! program is refused with the list of all operators that are not served. For one binding of the symbols every shape is a
//! number: [`Op::infer`] says each result's dtype, shape, strides and storage, which must agree with what the program
//! itself says of it ([`Graph::bind`]). The [`interpreter`] is the definition of every operator: plain loops in f64 and i64.
//!
//! Deliberately absent: speed, threads, unsafe code, and any cast that is not a node.

#![forbid(unsafe_code)]

mod args;
mod bind;
mod build;
mod error;
mod forms;
mod graph;
pub mod interpreter;
mod ir;
mod meta;
mod number;
pub mod ops;
mod promote;
mod solve;
mod strides;
mod tensor;
mod verify;

pub use args::Args;
pub use bind::{Binding, Fact};
pub use error::{Error, OpError};
pub use graph::{Graph, Input, Node, Output, Source};
pub use interpreter::{Interpreter, Item};
pub use ir::{Int, Scalar, Type, Value, ValueId};
pub use meta::{Meta, Number, Out, Shapes};
pub use ops::Op;
pub use tensor::{Cells, Eval, Precision, Tensor};
