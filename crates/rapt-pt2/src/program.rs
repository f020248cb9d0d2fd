//! An exported program in types: what `models/model.json` says, name by name.
//!
//! The names are those of `torch._export.serde.schema`, where a reader finds what each field means to PyTorch.

use std::collections::BTreeMap;

use rapt_core::DType;

use crate::{Call, Condition, Expr, Guard, Real};

/// An exported program.
#[derive(Clone, Debug)]
pub struct Program {
    /// The version of torch that wrote it, such as `2.15.0`.
    pub torch_version: String,
    /// The schema's major and minor version.
    pub schema_version: (u32, u32),
    /// The graph.
    pub graph: Graph,
    /// What each input and output of the graph is.
    pub signature: Signature,
    /// The symbols in shapes, with their ranges, in the order of their names.
    pub symbols: Vec<Symbol>,
    /// What tracing found to hold of the inputs, beyond the ranges.
    pub guards: Vec<Guard>,
    /// How the model is called and what it returns, where the program says.
    pub call: Option<Call>,
}

/// The nodes of a program in the order of execution, and what is known of each value.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// The graph's inputs, in the order of [`Signature::inputs`].
    pub inputs: Vec<Argument>,
    /// The graph's outputs, in the order of [`Signature::outputs`].
    pub outputs: Vec<Argument>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The form of each tensor.
    pub tensors: BTreeMap<String, TensorMeta>,
    /// The value of each symbolic integer.
    pub sym_ints: BTreeMap<String, Expr>,
    /// The value of each symbolic boolean.
    pub sym_bools: BTreeMap<String, Condition>,
    /// The value of each symbolic float.
    pub sym_floats: BTreeMap<String, Real>,
}

/// One call of an operator.
#[derive(Clone, Debug)]
pub struct Node {
    /// The node's name in the exported graph; that of its first result where the program names no nodes.
    pub name: String,
    /// The operator, such as `torch.ops.aten.add.Tensor`.
    pub target: String,
    /// Its arguments, by the names of the operator's schema. An argument that equals its default may be missing.
    pub inputs: Vec<NamedArgument>,
    /// Its results.
    pub outputs: Vec<Argument>,
}

/// An argument with its name in the operator's schema.
#[derive(Clone, Debug)]
pub struct NamedArgument {
    /// The name.
    pub name: String,
    /// The value.
    pub value: Argument,
}

/// An argument or a result.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// `None`.
    None,
    /// A tensor, by name.
    Tensor(String),
    /// A list of tensors.
    Tensors(Vec<String>),
    /// A list of tensors, some of which are `None`.
    OptionalTensors(Vec<Option<String>>),
    /// An integer.
    Int(i64),
    /// A list of integers.
    Ints(Vec<i64>),
    /// A float. The archive writes those that JSON has no number for as text.
    Float(f64),
    /// A list of floats.
    Floats(Vec<f64>),
    /// A boolean.
    Bool(bool),
    /// A list of booleans.
    Bools(Vec<bool>),
    /// A text.
    String(String),
    /// A list of texts.
    Strings(Vec<String>),
    /// An integer that may be symbolic.
    SymInt(SymInt),
    /// A list of integers, some of which are symbolic.
    SymInts(Vec<SymInt>),
    /// A symbolic boolean, by name.
    SymBool(String),
    /// A symbolic float, by name.
    SymFloat(String),
    /// A dtype.
    Dtype(DType),
    /// A memory format.
    MemoryFormat(MemoryFormat),
    /// A layout, by its code in the schema; 7 is strided.
    Layout(u8),
    /// A device.
    Device(Device),
    /// A value of a kind that no served operator takes, by the schema's name for it.
    Other(&'static str),
}

/// An integer in a list of arguments: a number, or a symbolic value by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SymInt {
    /// A number.
    Int(i64),
    /// The name of a symbolic integer of the graph.
    Name(String),
}

/// How a tensor's elements are to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryFormat {
    /// Row-major.
    Contiguous,
    /// Row-major of the order batch, height, width, channel.
    ChannelsLast,
    /// The same with depth.
    ChannelsLast3d,
    /// As the input lies.
    Preserve,
}

/// A device, as PyTorch writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Such as `cpu`.
    pub kind: String,
    /// The device's number, where there is one.
    pub index: Option<i64>,
}

/// The form of a tensor: all but its address.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorMeta {
    /// The dtype of the elements.
    pub dtype: DType,
    /// The sizes, in elements.
    pub sizes: Vec<Expr>,
    /// The strides, in elements.
    pub strides: Vec<Expr>,
    /// The first element's place in the storage, in elements.
    pub storage_offset: Expr,
    /// The device it was exported on.
    pub device: Device,
}

/// What the inputs and outputs of the graph are.
#[derive(Clone, Debug, Default)]
pub struct Signature {
    /// One for each input of the graph.
    pub inputs: Vec<InputSpec>,
    /// One for each output of the graph: mutations first, then what the user gets.
    pub outputs: Vec<OutputSpec>,
}

/// What an input of the graph is.
#[derive(Clone, Debug, PartialEq)]
pub enum InputSpec {
    /// Given by the caller.
    User(Argument),
    /// A parameter.
    Parameter {
        /// The value's name in the graph.
        value: String,
        /// The parameter's name in the model.
        name: String,
    },
    /// A buffer.
    Buffer {
        /// The value's name in the graph.
        value: String,
        /// The buffer's name in the model.
        name: String,
        /// Whether its bytes stand among the weights; otherwise among the constants.
        persistent: bool,
    },
    /// A tensor that tracing met as a constant.
    Constant {
        /// The value's name in the graph.
        value: String,
        /// The constant's name.
        name: String,
    },
    /// An input that was fixed when the program was exported.
    Fixed {
        /// Its name.
        name: String,
        /// Its value.
        value: Argument,
    },
}

/// What an output of the graph is.
#[derive(Clone, Debug, PartialEq)]
pub enum OutputSpec {
    /// Returned to the caller.
    User(Argument),
    /// The new content of a buffer or parameter.
    BufferMutation {
        /// The value's name in the graph.
        value: String,
        /// The buffer's or parameter's name in the model.
        name: String,
    },
    /// The new content of an input of the caller.
    InputMutation {
        /// The value's name in the graph.
        value: String,
        /// The input's name in the graph.
        input: String,
    },
}

impl Symbol {
    /// Whether the program serves this value, as PyTorch decides it: a least value of up to 2 is no bound, because
    /// tracing takes every symbol to be neither 0 nor 1 and says so in the ranges
    /// (`torch._export.utils._check_input_constraints_for_graph`); guards refuse 0 and 1 where they matter.
    #[must_use]
    pub fn admits(&self, value: i64) -> bool {
        let least = if (0..=2).contains(&self.min) { 0 } else { self.min };
        value >= least && self.max.is_none_or(|max| value <= max)
    }
}

/// A symbol that stands for a size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Its name, such as `s77`.
    pub name: String,
    /// The least value that the program serves.
    pub min: i64,
    /// The greatest value that the program serves, if there is one.
    pub max: Option<i64>,
    /// The value that it had when the program was exported.
    pub hint: Option<i64>,
}
