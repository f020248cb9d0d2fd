//! What can be wrong with a graph, one variant per cause.

use rapt_core::DType;

use crate::{Meta, ValueId};

/// Why a program is no graph that Rapt runs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Operators that are not served: all of them, with the number of nodes and the first node of each.
    #[error("{} operators are not served: {}", ops.len(), list(ops))]
    MissingOps {
        /// Target, number of nodes, first node.
        ops: Vec<(String, usize, String)>,
    },
    /// A node whose operation cannot be made, or does not fit its operands.
    #[error("node {node} ({target}): {cause}")]
    Node {
        /// The node's name.
        node: String,
        /// The operator's name in the archive.
        target: String,
        /// What is wrong.
        cause: OpError,
    },
    /// A name that no input and no earlier node defines.
    #[error("{user} uses {name}, which nothing before it defines")]
    Undefined {
        /// What uses it.
        user: String,
        /// The name.
        name: String,
    },
    /// What was inferred of a value differs from what the program says of it.
    #[error("node {node} ({target}): {value} is inferred as {inferred}, and the program says {stated}")]
    Disagrees {
        /// The node's name.
        node: String,
        /// The operator's name in the archive.
        target: String,
        /// The value's name.
        value: String,
        /// What was inferred.
        inferred: String,
        /// What the program says.
        stated: String,
    },
    /// An expression of the program that has no value for these symbols.
    #[error("{value}: {cause}")]
    Expr {
        /// The value's name.
        value: String,
        /// Why.
        cause: rapt_pt2::ExprError,
    },
}

fn list(ops: &[(String, usize, String)]) -> String {
    let lines: Vec<String> =
        ops.iter().map(|(target, count, first)| format!("{target} ({count}, first at {first})")).collect();
    lines.join(", ")
}

/// Why an operation cannot be made of its arguments, or does not fit its operands.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// A required argument is missing.
    #[error("argument {0} is missing")]
    MissingArgument(String),
    /// An argument of a kind that the operator does not take.
    #[error("argument {name} is {got}, expected {expected}")]
    ArgumentKind {
        /// The argument's name.
        name: String,
        /// What was expected.
        expected: &'static str,
        /// What was given.
        got: String,
    },
    /// An argument whose value is not served.
    #[error("argument {name} = {value} is not served: {why}")]
    ArgumentValue {
        /// The argument's name.
        name: String,
        /// Its value.
        value: String,
        /// Why not.
        why: &'static str,
    },
    /// An argument that the operator does not have.
    #[error("there is no argument {0}")]
    UnknownArgument(String),
    /// A value that is used as a tensor and is none.
    #[error("value {0:?} is no tensor")]
    NotATensor(ValueId),
    /// A value that is used as an integer and is none.
    #[error("value {0:?} is no integer")]
    NotAnInteger(ValueId),
    /// A value that is used as a float and is none.
    #[error("value {0:?} is no float")]
    NotAFloat(ValueId),
    /// A dimension that the tensor does not have.
    #[error("dimension {dim} of a tensor of {rank} dimensions")]
    DimOutOfRange {
        /// The dimension asked for.
        dim: i64,
        /// The number of dimensions.
        rank: usize,
    },
    /// Two operands of unequal dtype where the operator takes equal ones.
    #[error("dtypes {0} and {1} differ")]
    DtypesDiffer(DType, DType),
    /// A dtype that the operator does not take.
    #[error("{what} is not computed in {dtype}")]
    Dtype {
        /// The operation.
        what: &'static str,
        /// The dtype.
        dtype: DType,
    },
    /// Shapes that do not fit each other or the arguments.
    #[error("{0}")]
    Shape(String),
    /// A tensor that differs from what the program asserts of it.
    #[error("the tensor is {got:?}, and the program asserts {asserted}")]
    Assertion {
        /// What is asserted.
        asserted: String,
        /// The tensor.
        got: Box<Meta>,
    },
    /// An index outside its dimension.
    #[error("index {index} is out of bounds for dimension {dim} of size {size}")]
    IndexOutOfRange {
        /// The index.
        index: i64,
        /// The dimension.
        dim: usize,
        /// The dimension's size.
        size: i64,
    },
}
