//! What can be wrong with a graph, one variant per cause.

use rapt_core::DType;

use crate::ValueId;

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
    /// A value of a kind that graphs do not have.
    #[error("{name} is {got}, which graphs do not have")]
    Kind {
        /// The value's name.
        name: String,
        /// What it is.
        got: String,
    },
    /// A graph whose inputs or outputs are not those of its signature.
    #[error("the graph has {graph} {what}, its signature {signature}")]
    SignatureCount {
        /// `inputs` or `outputs`.
        what: &'static str,
        /// Those of the graph.
        graph: usize,
        /// Those of the signature.
        signature: usize,
    },
    /// A name that stands for two values.
    #[error("{0} is defined twice")]
    DefinedTwice(String),
    /// Another number of arguments than the program takes.
    #[error("the program takes {expected} inputs, and {got} are given")]
    InputCount {
        /// Inputs of the program.
        expected: usize,
        /// Inputs given.
        got: usize,
    },
    /// An argument of another kind, or another value, than the program takes.
    #[error("input {name} is {got}, expected {expected}")]
    InputKind {
        /// The input's name.
        name: String,
        /// What the program takes.
        expected: String,
        /// What is given.
        got: String,
    },
    /// A tensor of another dtype than the program takes. There is no conversion.
    #[error("input {name} is {got}, and the program takes {expected}")]
    InputDtype {
        /// The input's name.
        name: String,
        /// What the program takes.
        expected: DType,
        /// What is given.
        got: DType,
    },
    /// A tensor of another number of dimensions than the program takes.
    #[error("input {name} has {got} dimensions, and the program takes {expected}")]
    InputRank {
        /// The input's name.
        name: String,
        /// What the program takes.
        expected: usize,
        /// What is given.
        got: usize,
    },
    /// A tensor of another size than the program takes with the other inputs.
    #[error("input {name} has size {got} in dimension {dim}, and the program takes {expected}")]
    InputSize {
        /// The input's name.
        name: String,
        /// The dimension.
        dim: usize,
        /// What the program takes: a number, or an expression with its value.
        expected: String,
        /// What is given.
        got: i64,
    },
    /// A tensor that lies otherwise than the program was exported for.
    #[error("input {name} has strides {got:?}, and the program takes {expected:?}")]
    InputStrides {
        /// The input's name.
        name: String,
        /// What the program takes.
        expected: Vec<i64>,
        /// What is given.
        got: Vec<i64>,
    },
    /// A symbol's value outside the range that the program serves.
    #[error("{symbol} = {value} is outside the range {min} to {} that the program serves", max.map_or_else(|| "any".to_owned(), |max| max.to_string()))]
    SymbolRange {
        /// The symbol.
        symbol: String,
        /// Its value.
        value: i64,
        /// The least value.
        min: i64,
        /// The greatest value, if there is one.
        max: Option<i64>,
    },
    /// A guard of the program that the inputs fail.
    #[error(transparent)]
    Guard(#[from] rapt_pt2::GuardError),
    /// A symbol that no input determines.
    #[error("no input determines {0}")]
    Unsolved(String),
    /// A parameter, buffer or constant that the program does not have.
    #[error("the program has no parameter, buffer or constant {0}")]
    UnknownState(String),
    /// A parameter, buffer or constant that was not given.
    #[error("{0} was not given")]
    MissingState(String),
    /// A parameter, buffer or constant of another form than the program states.
    #[error("{name} is {got}, and the program states {expected}")]
    StateForm {
        /// The name in the model.
        name: String,
        /// What the program states.
        expected: String,
        /// What is given.
        got: String,
    },
}

fn list(ops: &[(String, usize, String)]) -> String {
    let line = |(target, count, first): &(String, usize, String)| {
        format!(
            "{target} ({count}, first at {first}{})",
            hint(target).map_or(String::new(), |hint| format!(": {hint}"))
        )
    };
    ops.iter().map(line).collect::<Vec<_>>().join(", ")
}

/// What to write instead of an operator whose result is another number or size for other values, which no program with sizes known before
/// a run has.
fn hint(target: &str) -> Option<&'static str> {
    match target.strip_prefix("torch.ops.aten.")?.split_once('.')?.0 {
        "item" | "_local_scalar_dense" | "is_nonzero" => {
            Some("compute with the tensor itself, or make the number an integer argument of the model")
        }
        "nonzero" | "masked_select" | "unique_dim" | "_unique2" | "unique_consecutive" | "bincount" => {
            Some("its size depends on values: use torch.where, a mask or a fixed size")
        }
        _ => None,
    }
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
    /// A value that is used as a boolean and is none.
    #[error("value {0:?} is no boolean")]
    NotABool(ValueId),
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
    #[error("the value is {got}, and the program asserts {asserted}")]
    Assertion {
        /// What is asserted.
        asserted: String,
        /// The value.
        got: String,
    },
    /// Operands whose kinds the operator refuses in PyTorch too.
    #[error("{0}")]
    Refused(&'static str),
    /// A number that a dtype does not hold.
    #[error("{value} is out of range for {dtype}")]
    Overflow {
        /// The number.
        value: String,
        /// The dtype.
        dtype: DType,
    },
    /// An integer division by zero.
    #[error("an integer is divided by zero")]
    ZeroDivision,
    /// A matrix that is singular, or not positive definite, where the operator needs one that is not.
    #[error("{name}: matrix {place} is {}", because(*at, *definite))]
    Singular {
        /// The function.
        name: &'static str,
        /// Which matrix of the batch.
        place: usize,
        /// The pivot that is 0, or the order of the leading part that is not positive definite, counted from 1.
        at: i64,
        /// Whether a matrix has to be positive definite.
        definite: bool,
    },
    /// A result of more elements than the interpreter holds.
    #[error("{0} elements are more than the interpreter holds")]
    TooLarge(i64),
    /// A form with a negative size, stride or offset, or one that 64 bits do not count.
    #[error("{0} is no form of a tensor")]
    NoForm(String),
    /// A view that leaves its tensor's storage.
    #[error("the view needs {needed} elements of a storage of {len}")]
    OutOfStorage {
        /// Elements that it needs.
        needed: i64,
        /// Elements that there are.
        len: i64,
    },
    /// A write to a tensor several of whose elements are one number.
    #[error("the operation writes to a tensor several of whose elements share one place in memory")]
    SelfOverlap,
    /// An operator that gives another number of results than the node names.
    #[error("the operator gives {given} results, and the node names {named}")]
    ResultCount {
        /// Results of the operator.
        given: usize,
        /// Results that the node names.
        named: usize,
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

fn because(at: i64, definite: bool) -> String {
    if definite {
        format!("not positive definite: its leading part of order {at} is not")
    } else {
        format!("singular: its pivot {at} is zero")
    }
}
