//! Why a program is not loaded, or a call of it is refused: one variant per cause, each carrying the offender.

use rapt_core::{DType, Device, Error, ErrorKind};
use rapt_graph::OpError;

fn names(dtypes: &[DType]) -> String {
    dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ")
}

/// Why a program or a call of it is refused. Nothing was written, and the model serves the next call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The archive, or the program in it, is not what it says.
    #[error(transparent)]
    Archive(#[from] rapt_pt2::Error),
    /// The graph is not one that Rapt runs; operators that are not served are all listed.
    #[error(transparent)]
    Graph(#[from] rapt_graph::Error),
    /// An input of another dtype than the program declares. It is never converted.
    #[error("{input} has dtype {got}, the program declares {expected}")]
    Dtype {
        /// The input.
        input: String,
        /// What the program declares.
        expected: DType,
        /// What was given.
        got: DType,
    },
    /// Another number of inputs than the program has.
    #[error("the program takes {expected} inputs ({}), got {got}", names.join(", "))]
    InputCount {
        /// How many it takes.
        expected: usize,
        /// How many were given.
        got: usize,
        /// What they are called.
        names: Vec<String>,
    },
    /// An input that is a number where the program takes a tensor, or the reverse.
    #[error("{input} is {got}, the program takes {expected}")]
    InputKind {
        /// The input.
        input: String,
        /// What the program takes.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A tensor of the program of a dtype that programs may not have.
    #[error("{tensor} has dtype {got}, which programs may not have: allowed are {}", names(&super::SERVED))]
    UnsupportedDtype {
        /// Its name in the graph.
        tensor: String,
        /// Its dtype.
        got: DType,
    },
    /// A place for a result that is not what the result is.
    #[error("{output} is {expected}, and its place is {got}")]
    OutputForm {
        /// The result.
        output: String,
        /// What it is.
        expected: String,
        /// What was given.
        got: String,
    },
    /// An input that is not in host memory.
    #[error("{input} is on {got}: programs run on the CPU")]
    Device {
        /// The input.
        input: String,
        /// Where it lies.
        got: Device,
    },
    /// An input that the program writes, and that may not be written.
    #[error("{input} is read-only, and the program writes it")]
    ReadOnly {
        /// The input.
        input: String,
    },
    /// Inputs whose values or sizes a node does not take: an index outside its dimension, an integer divided by zero, an
    /// assertion of the program that fails.
    #[error("node {node} ({target}): {cause}")]
    Values {
        /// The node's name.
        node: String,
        /// The operator's name in the archive.
        target: String,
        /// What is wrong.
        cause: OpError,
    },
    /// A weight, constant or buffer that the program names and the archive does not hold.
    #[error("there is no {name}, which the program uses")]
    MissingState {
        /// Its name.
        name: String,
    },
    /// The binding of a model that is not the session's.
    #[error("the model was bound from another program than the session's")]
    OtherModel,
    /// A weight in memory of the caller's that is not what he says of it.
    #[error("the weight {name} is refused: {why}")]
    WeightForm {
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
    /// No plan for these sizes.
    #[error("no plan for these sizes: {why}")]
    Plan {
        /// Why.
        why: String,
    },
    /// Of a tensor of Rapt's own.
    #[error(transparent)]
    Core(#[from] Error),
}

impl ModelError {
    /// The family of this error: one exception type per family in a binding.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            ModelError::Archive(_) | ModelError::MissingState { .. } | ModelError::Plan { .. } => ErrorKind::Program,
            ModelError::Graph(error) => match error {
                rapt_graph::Error::MissingOps { .. } => ErrorKind::Unsupported,
                rapt_graph::Error::InputCount { .. } => ErrorKind::Kind,
                rapt_graph::Error::InputRank { .. }
                | rapt_graph::Error::InputSize { .. }
                | rapt_graph::Error::InputStrides { .. }
                | rapt_graph::Error::Guard(_)
                | rapt_graph::Error::SymbolRange { .. } => ErrorKind::Shape,
                _ => ErrorKind::Program,
            },
            ModelError::Values { cause, .. } => match cause {
                OpError::IndexOutOfRange { .. } => ErrorKind::Index,
                OpError::ZeroDivision => ErrorKind::ZeroDivision,
                OpError::Singular { .. } => ErrorKind::Number,
                OpError::Shape(_) | OpError::Assertion { .. } => ErrorKind::Shape,
                _ => ErrorKind::Program,
            },
            ModelError::Dtype { .. } => ErrorKind::DtypeBoundary,
            ModelError::UnsupportedDtype { .. } => ErrorKind::UnsupportedDtype,
            ModelError::OtherModel => ErrorKind::Option,
            ModelError::OutputForm { .. } => ErrorKind::Shape,
            ModelError::WeightForm { .. } => ErrorKind::Layout,
            ModelError::InputCount { .. } | ModelError::InputKind { .. } => ErrorKind::Kind,
            ModelError::Device { .. } => ErrorKind::Device,
            ModelError::ReadOnly { .. } => ErrorKind::Layout,
            ModelError::Core(error) => error.kind(),
        }
    }

    /// The input that the error speaks of, where it speaks of one.
    #[must_use]
    pub fn input(&self) -> Option<&str> {
        match self {
            ModelError::Dtype { input, .. }
            | ModelError::InputKind { input, .. }
            | ModelError::Device { input, .. }
            | ModelError::ReadOnly { input } => Some(input),
            _ => None,
        }
    }
}
