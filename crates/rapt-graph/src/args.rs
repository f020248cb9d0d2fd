//! A node's arguments by the names of the operator's schema.
//!
//! Each is read once, in the kind that the operator takes, with ATen's default where the archive leaves it out. What was not
//! read when the operation is made is an argument that Rapt does not know, and an error.

use std::cell::Cell;

use rapt_core::DType;
use rapt_pt2::{Argument, MemoryFormat, SymInt};

use crate::{Int, OpError, Scalar, ValueId};

/// The arguments of one node.
pub struct Args<'a> {
    node: &'a rapt_pt2::Node,
    find: &'a dyn Fn(&str) -> Option<ValueId>,
    read: Vec<Cell<bool>>,
}

impl<'a> Args<'a> {
    /// The arguments of a node; `find` gives the value of a name.
    pub fn new(node: &'a rapt_pt2::Node, find: &'a dyn Fn(&str) -> Option<ValueId>) -> Args<'a> {
        Args { node, find, read: vec![Cell::new(false); node.inputs.len()] }
    }

    fn get(&self, name: &str) -> Option<&'a Argument> {
        let place = self.node.inputs.iter().position(|input| input.name == name)?;
        self.read[place].set(true);
        Some(&self.node.inputs[place].value)
    }

    fn wrong<T>(name: &str, expected: &'static str, got: &Argument) -> Result<T, OpError> {
        Err(OpError::ArgumentKind { name: name.into(), expected, got: format!("{got:?}") })
    }

    fn missing<T>(name: &str) -> Result<T, OpError> {
        Err(OpError::MissingArgument(name.into()))
    }

    fn value(&self, name: &str) -> Result<ValueId, OpError> {
        (self.find)(name).ok_or_else(|| OpError::MissingArgument(name.into()))
    }

    fn sym(&self, int: &SymInt) -> Result<Int, OpError> {
        Ok(match int {
            SymInt::Int(n) => Int::Known(*n),
            SymInt::Name(name) => Int::Value(self.value(name)?),
        })
    }

    /// A tensor.
    ///
    /// # Errors
    /// [`OpError`] where it is missing or no tensor.
    pub fn tensor(&self, name: &str) -> Result<ValueId, OpError> {
        self.opt_tensor(name)?.ok_or_else(|| OpError::MissingArgument(name.into()))
    }

    /// A tensor, or nothing.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_tensor(&self, name: &str) -> Result<Option<ValueId>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::Tensor(tensor)) => self.value(tensor).map(Some),
            Some(other) => Self::wrong(name, "a tensor", other),
        }
    }

    /// A list of tensors.
    ///
    /// # Errors
    /// [`OpError`] where it is missing or of another kind.
    pub fn tensors(&self, name: &str) -> Result<Vec<ValueId>, OpError> {
        match self.get(name) {
            Some(Argument::Tensors(names)) => names.iter().map(|n| self.value(n)).collect(),
            Some(other) => Self::wrong(name, "a list of tensors", other),
            None => Self::missing(name),
        }
    }

    /// A list of tensors, some of which may be missing.
    ///
    /// # Errors
    /// [`OpError`] where it is missing or of another kind.
    pub fn opt_tensors(&self, name: &str) -> Result<Vec<Option<ValueId>>, OpError> {
        match self.get(name) {
            Some(Argument::Tensors(names)) => names.iter().map(|n| self.value(n).map(Some)).collect(),
            Some(Argument::OptionalTensors(names)) => {
                names.iter().map(|n| n.as_deref().map(|n| self.value(n)).transpose()).collect()
            }
            Some(other) => Self::wrong(name, "a list of tensors", other),
            None => Self::missing(name),
        }
    }

    /// An integer.
    ///
    /// # Errors
    /// [`OpError`] where it is missing or of another kind.
    pub fn int(&self, name: &str) -> Result<Int, OpError> {
        self.opt_int(name)?.ok_or_else(|| OpError::MissingArgument(name.into()))
    }

    /// An integer, or the default.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn int_or(&self, name: &str, default: i64) -> Result<Int, OpError> {
        Ok(self.opt_int(name)?.unwrap_or(Int::Known(default)))
    }

    /// An integer, or nothing.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_int(&self, name: &str) -> Result<Option<Int>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::Int(n)) => Ok(Some(Int::Known(*n))),
            Some(Argument::SymInt(n)) => self.sym(n).map(Some),
            Some(other) => Self::wrong(name, "an integer", other),
        }
    }

    /// An integer that must be a number in the archive, such as a dimension.
    ///
    /// # Errors
    /// [`OpError`] where it is missing, symbolic, or of another kind.
    pub fn known_int(&self, name: &str) -> Result<i64, OpError> {
        match self.int(name)? {
            Int::Known(n) => Ok(n),
            Int::Value(_) => Err(OpError::ArgumentValue {
                name: name.into(),
                value: "symbolic".into(),
                why: "a number is needed here",
            }),
        }
    }

    /// The same with a default.
    ///
    /// # Errors
    /// [`OpError`] where it is symbolic or of another kind.
    pub fn known_int_or(&self, name: &str, default: i64) -> Result<i64, OpError> {
        if matches!(self.get(name), None | Some(Argument::None)) { Ok(default) } else { self.known_int(name) }
    }

    /// A list of integers.
    ///
    /// # Errors
    /// [`OpError`] where it is missing or of another kind.
    pub fn ints(&self, name: &str) -> Result<Vec<Int>, OpError> {
        self.opt_ints(name)?.ok_or_else(|| OpError::MissingArgument(name.into()))
    }

    /// A list of integers, or nothing. A single integer is a list of one, as in PyTorch.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_ints(&self, name: &str) -> Result<Option<Vec<Int>>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::Int(n)) => Ok(Some(vec![Int::Known(*n)])),
            Some(Argument::SymInt(n)) => Ok(Some(vec![self.sym(n)?])),
            Some(Argument::Ints(list)) => Ok(Some(list.iter().map(|&n| Int::Known(n)).collect())),
            Some(Argument::SymInts(list)) => list.iter().map(|n| self.sym(n)).collect::<Result<_, _>>().map(Some),
            // An empty list has no kind of its own: the archive writes it as a list of tensors.
            Some(Argument::Tensors(list)) if list.is_empty() => Ok(Some(Vec::new())),
            Some(other) => Self::wrong(name, "a list of integers", other),
        }
    }

    /// A number of any kind.
    ///
    /// # Errors
    /// [`OpError`] where it is missing or of another kind.
    pub fn scalar(&self, name: &str) -> Result<Scalar, OpError> {
        self.opt_scalar(name)?.ok_or_else(|| OpError::MissingArgument(name.into()))
    }

    /// A number of any kind, or nothing.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_scalar(&self, name: &str) -> Result<Option<Scalar>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::Int(n)) => Ok(Some(Scalar::Int(Int::Known(*n)))),
            Some(Argument::SymInt(n)) => Ok(Some(Scalar::Int(self.sym(n)?))),
            Some(Argument::Float(x)) => Ok(Some(Scalar::Float(*x))),
            Some(Argument::SymFloat(name)) => Ok(Some(Scalar::FloatValue(self.value(name)?))),
            Some(Argument::Bool(b)) => Ok(Some(Scalar::Bool(*b))),
            Some(other) => Self::wrong(name, "a number", other),
        }
    }

    /// A float; the archive writes a whole number as an integer at times.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_float(&self, name: &str) -> Result<Option<f64>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::Float(x)) => Ok(Some(*x)),
            Some(Argument::Int(n)) => Ok(Some(*n as f64)),
            Some(other) => Self::wrong(name, "a float", other),
        }
    }

    /// A boolean, or the default.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn bool_or(&self, name: &str, default: bool) -> Result<bool, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(default),
            Some(Argument::Bool(b)) => Ok(*b),
            Some(other) => Self::wrong(name, "a boolean", other),
        }
    }

    /// A symbolic boolean, or nothing where the argument is of another kind.
    ///
    /// # Errors
    /// [`OpError`] where nothing defines it.
    pub fn sym_bool(&self, name: &str) -> Result<Option<ValueId>, OpError> {
        match self.get(name) {
            Some(Argument::SymBool(value)) => self.value(value).map(Some),
            _ => Ok(None),
        }
    }

    /// A memory format, or nothing.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_memory_format(&self, name: &str) -> Result<Option<MemoryFormat>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::MemoryFormat(format)) => Ok(Some(*format)),
            Some(other) => Self::wrong(name, "a memory format", other),
        }
    }

    /// A dtype, or nothing.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_dtype(&self, name: &str) -> Result<Option<DType>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::Dtype(dtype)) => Ok(Some(*dtype)),
            Some(other) => Self::wrong(name, "a dtype", other),
        }
    }

    /// A text, or nothing.
    ///
    /// # Errors
    /// [`OpError`] where it is of another kind.
    pub fn opt_str(&self, name: &str) -> Result<Option<&'a str>, OpError> {
        match self.get(name) {
            None | Some(Argument::None) => Ok(None),
            Some(Argument::String(text)) => Ok(Some(text)),
            Some(other) => Self::wrong(name, "a text", other),
        }
    }

    /// An argument as the archive has it.
    #[must_use]
    pub fn raw(&self, name: &str) -> Option<&'a Argument> {
        self.get(name)
    }

    /// Accepts where tensors are made: any layout but strided, and any device but the CPU, is refused.
    ///
    /// # Errors
    /// [`OpError::ArgumentValue`].
    pub fn place(&self) -> Result<(), OpError> {
        let refuse = |name: &str, value: String, why| Err(OpError::ArgumentValue { name: name.into(), value, why });
        match self.get("layout") {
            None | Some(Argument::None | Argument::Layout(7)) => {}
            Some(other) => return refuse("layout", format!("{other:?}"), "only strided tensors are served"),
        }
        match self.get("device") {
            None | Some(Argument::None) => {}
            Some(Argument::Device(device)) if device.kind == "cpu" => {}
            Some(other) => return refuse("device", format!("{other:?}"), "programs run on the CPU"),
        }
        if self.bool_or("pin_memory", false)? {
            return refuse("pin_memory", "true".into(), "programs run on the CPU");
        }
        Ok(())
    }

    /// That every argument was read.
    ///
    /// # Errors
    /// [`OpError::UnknownArgument`].
    pub fn done(&self) -> Result<(), OpError> {
        match self.read.iter().position(|read| !read.get()) {
            Some(place) => Err(OpError::UnknownArgument(self.node.inputs[place].name.clone())),
            None => Ok(()),
        }
    }
}
