//! The graph: values, nodes in the order of execution, and what goes in and out.
//!
//! It is the program with every operator in types. A node keeps its name and its target, so that every error is one of the
//! program that the user exported.

use rapt_pt2::{Argument, Guard, Symbol};

use crate::{Op, Value, ValueId};

/// One operation.
#[derive(Clone, Debug)]
pub struct Node {
    /// The node's name in the exported graph.
    pub name: String,
    /// The operator's name in the archive, such as `torch.ops.aten.add.Tensor`.
    pub target: String,
    /// The operation with its arguments.
    pub op: Op,
    /// The values that it reads or writes, each once.
    pub inputs: Vec<ValueId>,
    /// Its results: of an operator that returns a list, all tensors of the list. `None` is a result that nothing uses.
    pub outputs: Vec<Option<ValueId>>,
}

/// An input of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Its name in the exported graph.
    pub name: String,
    /// The value; `None` for an input that was fixed at export.
    pub value: Option<ValueId>,
    /// Who gives it.
    pub source: Source,
}

/// Who gives an input.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// The caller.
    User,
    /// A parameter, by its name in the model.
    Parameter(String),
    /// A buffer.
    Buffer {
        /// Its name in the model.
        name: String,
        /// Whether its bytes stand among the weights; otherwise among the constants.
        persistent: bool,
    },
    /// A tensor that tracing met as a constant, by its name.
    Constant(String),
    /// Nobody: it was fixed when the program was exported. The caller's arguments have a place for it.
    Fixed(Argument),
}

impl Source {
    /// The name of a parameter, buffer or constant: of what a session holds.
    #[must_use]
    pub fn state(&self) -> Option<&str> {
        match self {
            Source::Parameter(name) | Source::Buffer { name, .. } | Source::Constant(name) => Some(name),
            Source::User | Source::Fixed(_) => None,
        }
    }
}

/// An output of the graph.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// A value that the caller gets.
    Value(ValueId),
    /// An output that was fixed at export: `None`, or a number.
    Fixed(Argument),
    /// The new content of a buffer or parameter.
    BufferMutation {
        /// The content.
        value: ValueId,
        /// The buffer's or parameter's name in the model.
        name: String,
    },
    /// The new content of an input of the caller.
    InputMutation {
        /// The content.
        value: ValueId,
        /// The input.
        input: ValueId,
    },
}

/// A graph: what is computed, in order.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// The values.
    pub values: Vec<Value>,
    /// The nodes, each after those that it needs.
    pub nodes: Vec<Node>,
    /// The inputs, in the order of the program's signature.
    pub inputs: Vec<Input>,
    /// The outputs, in the order of the program's signature: mutations first, then what the caller gets.
    pub outputs: Vec<Output>,
    /// The symbols in shapes, with their ranges.
    pub symbols: Vec<Symbol>,
    /// What tracing found to hold of the inputs, beyond the ranges.
    pub guards: Vec<Guard>,
    /// Whether inputs may lie otherwise than stated; see [`Graph::with_inputs_laid_out`].
    pub(crate) lays_out: bool,
}

impl Graph {
    /// The graph for callers whose inputs do not lie as those of the export did. An input several of whose elements were one place in
    /// memory then (an expanded tensor), or which had wide gaps, is row-major in every binding: no other numbers fit into
    /// the stated form. The forms of such a binding agree with the program's in dtype and shape.
    #[must_use]
    pub fn with_inputs_laid_out(mut self) -> Graph {
        self.lays_out = true;
        self
    }

    /// The value of a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<ValueId> {
        let place = self.values.iter().position(|value| value.name == name)?;
        u32::try_from(place).ok().map(ValueId)
    }

    /// A value.
    #[must_use]
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }
}
