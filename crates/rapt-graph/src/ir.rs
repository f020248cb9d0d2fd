//! What a graph speaks of: values, and numbers that are arguments.

use rapt_pt2::{Condition, Expr, Real, TensorMeta};

/// A value of a graph, by its place in [`Graph::values`](crate::Graph::values).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// An integer argument: a number, or a symbolic value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Int {
    /// A number.
    Known(i64),
    /// What this value is when the graph runs.
    Value(ValueId),
}

/// A number as an argument. Its kind takes part in PyTorch's rules of promotion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// An integer.
    Int(Int),
    /// A float.
    Float(f64),
    /// A symbolic float.
    FloatValue(ValueId),
    /// A boolean.
    Bool(bool),
}

/// What a value is, as the program says.
#[derive(Clone, Debug, PartialEq)]
pub enum Type {
    /// A tensor of this form.
    Tensor(TensorMeta),
    /// An integer; its value follows from the symbols.
    Int(Expr),
    /// A boolean; its value follows from the symbols.
    Bool(Condition),
    /// A float; its value follows from the symbols.
    Float(Real),
}

/// A value.
#[derive(Clone, Debug)]
pub struct Value {
    /// Its name in the exported graph.
    pub name: String,
    /// What it is.
    pub ty: Type,
}
