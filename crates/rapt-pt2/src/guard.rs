//! Guards: what tracing found to hold of the inputs, checked on the inputs of each call.
//!
//! torch writes them as Python over `L`, the arguments by name: `L['x'].size()[1] % 8 == 0`,
//! `L['d']['a'].stride()[0] >= 4`, `L['flat_args'][2].size()[0] != 1`. Each part that speaks of an input becomes a symbol of
//! a [`Condition`], found in the tree of the call when the program is loaded.

use std::collections::BTreeMap;

use crate::lower::{self, Names};
use crate::syntax::{self, Ast};
use crate::tree::Step;
use crate::{Call, Condition, Error, ExprError, Symbols};

/// A condition on the inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Guard {
    /// As torch wrote it.
    pub text: String,
    /// The condition, over symbols named as the sources are.
    pub condition: Condition,
    /// What the symbols stand for.
    pub sources: Vec<Source>,
}

/// A number of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Its text in the guard, such as `L['x'].size()[0]`.
    pub name: String,
    /// Which user input, in the order of the leaves of the call.
    pub input: usize,
    /// Which number of it.
    pub property: Property,
}

/// A number of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// The size of a dimension.
    Size(usize),
    /// The stride of a dimension, in elements.
    Stride(usize),
    /// The number of dimensions.
    Dim,
    /// The first element's place in the storage, in elements.
    StorageOffset,
    /// The value of an input that is an integer.
    Value,
}

/// What guards see of an input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InputValue<'a> {
    /// A tensor's form. Strides and offset in elements.
    Tensor {
        /// The sizes.
        sizes: &'a [i64],
        /// The strides.
        strides: &'a [i64],
        /// The first element's place in its storage.
        storage_offset: i64,
    },
    /// An integer.
    Int(i64),
    /// Anything else, of which guards cannot speak.
    Other,
}

/// A guard that does not hold, or cannot be checked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GuardError {
    /// It does not hold.
    #[error("the inputs fail a guard of the program: {guard}{}", seen(.values))]
    Fails {
        /// The guard.
        guard: String,
        /// The values it was checked on, by name.
        values: Vec<(String, i64)>,
    },
    /// It speaks of what the input does not have.
    #[error("guard {guard} speaks of {source_name}, which this input does not have")]
    Missing {
        /// The guard.
        guard: String,
        /// The part of it.
        source_name: String,
    },
    /// It has no value for these inputs.
    #[error("guard {guard}: {cause}")]
    Value {
        /// The guard.
        guard: String,
        /// Why.
        cause: ExprError,
    },
}

/// The values behind a message.
fn seen(values: &[(String, i64)]) -> String {
    let list: Vec<String> = values.iter().map(|(name, value)| format!("{name} is {value}")).collect();
    if list.is_empty() { String::new() } else { format!(", where {}", list.join(", ")) }
}

/// The inputs that guards name, looked up once each.
pub(crate) struct Inputs<'a> {
    call: &'a Call,
    known: BTreeMap<String, Option<usize>>,
}

impl<'a> Inputs<'a> {
    /// The inputs of `call`.
    pub(crate) fn new(call: &'a Call) -> Inputs<'a> {
        Inputs { call, known: BTreeMap::new() }
    }
}

impl Guard {
    /// Reads a guard of a program that is called so.
    ///
    /// # Errors
    /// [`Error::Guard`] for a text that is not understood, [`Error::GuardSource`] for one on what is no input.
    pub fn parse(text: &str, call: &Call) -> Result<Guard, Error> {
        Guard::read(text, &mut Inputs::new(call))
    }

    /// Reads a guard of a program with these inputs.
    ///
    /// # Errors
    /// [`Error::Guard`] for a text that is not understood, [`Error::GuardSource`] for one on what is no input.
    pub(crate) fn read(text: &str, inputs: &mut Inputs<'_>) -> Result<Guard, Error> {
        let refuse = |cause| Error::Guard { text: text.to_owned(), cause };
        let tree = syntax::parse(text).map_err(refuse)?;
        let mut sources = BTreeMap::new();
        let mut unknown = None;
        let mut find = |tree: &Ast<'_>| {
            let (base, steps, property, written) = source(tree)?;
            let name = format!("{base}{written}");
            match *inputs.known.entry(base).or_insert_with(|| inputs.call.leaf(&steps)) {
                Some(input) => drop(sources.insert(name.clone(), (input, property))),
                None => unknown = unknown.take().or_else(|| Some(name.clone())),
            }
            Some(name)
        };
        let condition = lower::condition(&tree, &mut Names::Sources(&mut find));
        if let Some(source_text) = unknown {
            return Err(Error::GuardSource { text: text.to_owned(), source_text });
        }
        let sources = sources.into_iter().map(|(name, (input, property))| Source { name, input, property });
        Ok(Guard { text: text.to_owned(), condition: condition.map_err(refuse)?, sources: sources.collect() })
    }

    /// Checks the guard on the user inputs, in the order of the leaves of the call.
    ///
    /// # Errors
    /// [`GuardError`] if it does not hold, with the guard and the values.
    pub fn check(&self, inputs: &[InputValue<'_>]) -> Result<(), GuardError> {
        let guard = || self.text.clone();
        let mut symbols = Symbols::new();
        for source in &self.sources {
            let value = inputs.get(source.input).and_then(|input| source.property.of(input));
            let source_name = || source.name.clone();
            let value = value.ok_or_else(|| GuardError::Missing { guard: guard(), source_name: source_name() })?;
            symbols.insert(source_name(), value);
        }
        match self.condition.eval(&symbols) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let value = |source: &Source| (source.name.clone(), symbols[&source.name]);
                Err(GuardError::Fails { guard: guard(), values: self.sources.iter().map(value).collect() })
            }
            Err(cause) => Err(GuardError::Value { guard: guard(), cause }),
        }
    }
}

impl Property {
    /// This number of `input`, if it has it.
    fn of(self, input: &InputValue<'_>) -> Option<i64> {
        match (self, input) {
            (Property::Size(dim), InputValue::Tensor { sizes, .. }) => sizes.get(dim).copied(),
            (Property::Stride(dim), InputValue::Tensor { strides, .. }) => strides.get(dim).copied(),
            (Property::Dim, InputValue::Tensor { sizes, .. }) => i64::try_from(sizes.len()).ok(),
            (Property::StorageOffset, InputValue::Tensor { storage_offset, .. }) => Some(*storage_offset),
            (Property::Value, InputValue::Int(value)) => Some(*value),
            _ => None,
        }
    }
}

/// A source as it is written: the input, the steps to it, the number of it, and how that is written.
type Written<'a> = (String, Vec<Step<'a>>, Property, String);

/// The source that `tree` is, if it is one.
fn source<'a>(tree: &Ast<'a>) -> Option<Written<'a>> {
    let number = |tree: &Ast<'_>| match tree {
        Ast::Int(number) => usize::try_from(*number).ok(),
        _ => None,
    };
    let (base, property, written) = match tree {
        Ast::Index(list, dim) => match (&**list, number(dim)) {
            (Ast::Call(method, arguments), Some(dim)) if arguments.is_empty() => match &**method {
                Ast::Attribute(base, "size") => (base, Property::Size(dim), format!(".size()[{dim}]")),
                Ast::Attribute(base, "stride") => (base, Property::Stride(dim), format!(".stride()[{dim}]")),
                _ => return None,
            },
            (Ast::Attribute(base, "shape"), Some(dim)) => (base, Property::Size(dim), format!(".shape[{dim}]")),
            _ => return input_value(tree),
        },
        Ast::Call(method, arguments) => match (&**method, &arguments[..]) {
            (Ast::Attribute(base, "dim"), []) => (base, Property::Dim, ".dim()".to_owned()),
            (Ast::Attribute(base, "storage_offset"), []) => {
                (base, Property::StorageOffset, ".storage_offset()".to_owned())
            }
            (Ast::Attribute(base, "size"), [dim]) => {
                let dim = number(dim)?;
                (base, Property::Size(dim), format!(".size({dim})"))
            }
            (Ast::Attribute(base, "stride"), [dim]) => {
                let dim = number(dim)?;
                (base, Property::Stride(dim), format!(".stride({dim})"))
            }
            _ => return None,
        },
        Ast::Attribute(base, "ndim") => (base, Property::Dim, ".ndim".to_owned()),
        _ => return input_value(tree),
    };
    let (name, steps) = path(base)?;
    Some((name, steps, property, written))
}

/// The source that is an input itself.
fn input_value<'a>(tree: &Ast<'a>) -> Option<Written<'a>> {
    let (name, steps) = path(tree)?;
    (!steps.is_empty()).then_some((name, steps, Property::Value, String::new()))
}

/// The steps from `L` to what `tree` is.
fn path<'a>(tree: &Ast<'a>) -> Option<(String, Vec<Step<'a>>)> {
    let mut steps = Vec::new();
    let mut at = tree;
    loop {
        at = match at {
            Ast::Name("L") => break,
            Ast::Attribute(base, name) => {
                steps.push(Step::Attribute(name));
                base
            }
            Ast::Index(base, index) => {
                match **index {
                    Ast::Int(number) => steps.push(Step::Int(number)),
                    Ast::Text(text) => steps.push(Step::Text(text)),
                    _ => return None,
                }
                base
            }
            _ => return None,
        };
    }
    steps.reverse();
    let written = steps.iter().map(|step| match step {
        Step::Text(text) => format!("['{text}']"),
        Step::Int(number) => format!("[{number}]"),
        Step::Attribute(name) => format!(".{name}"),
    });
    Some((std::iter::once("L".to_owned()).chain(written).collect(), steps))
}
