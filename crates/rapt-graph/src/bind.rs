//! One binding of the symbols, verified: what is inferred of every value must be what the program says of it.
//!
//! For one binding of the symbols every form is a number. Each node infers its results from its operands; the program's own
//! metadata, evaluated for the same symbols, must agree in dtype, shape, strides and offset, or the program is refused by node
//! and name. Strides are compared where they lead somewhere ([`Meta::agrees`]): PyTorch's kernels and its tracer leave the
//! stride of a dimension of size 1, and those of a tensor without elements, to chance.
//!
//! A binding also knows which values share a storage, that no view leaves its storage, and that nothing writes to a tensor
//! that overlaps itself.

use rapt_pt2::{Expr, ExprError, Symbols, TensorMeta};

use crate::forms;
use crate::ops::{Copy, Op};
use crate::{Error, Graph, Int, Meta, Node, OpError, Out, Output, Shapes, Source, Type, ValueId};

/// What is known of a value for one binding of the symbols.
#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// The form of a tensor.
    Tensor(Meta),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// `None`: only of inputs.
    None,
}

impl std::fmt::Display for Fact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fact::Tensor(meta) => write!(f, "a tensor {meta}"),
            Fact::Int(n) => write!(f, "the integer {n}"),
            Fact::Float(x) => write!(f, "the float {x}"),
            Fact::Bool(b) => write!(f, "the boolean {b}"),
            Fact::None => f.write_str("None"),
        }
    }
}

/// A graph for one binding of its symbols: every form a number, and verified.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The symbols.
    pub symbols: Symbols,
    /// Of each node, its results.
    pub outs: Vec<Vec<Out>>,
    facts: Vec<Fact>,
    /// Of each tensor, the value that its storage came with, and how many elements that has.
    storages: Vec<Option<(ValueId, i64)>>,
    /// Whether an input lies otherwise than stated: then everything after it may.
    laid_out: bool,
    /// Storages that are one in PyTorch, seen in two dtypes, and two here: neither may be written from then on.
    in_two_dtypes: Vec<ValueId>,
}

impl Binding {
    /// What is known of a value.
    #[must_use]
    pub fn fact(&self, id: ValueId) -> &Fact {
        &self.facts[id.0 as usize]
    }

    /// The value that a tensor's storage came with: itself, or the tensor that it is a view of in the end. Two inputs of the
    /// graph may still share a storage, which only the caller knows.
    #[must_use]
    pub fn storage(&self, id: ValueId) -> Option<ValueId> {
        self.storages[id.0 as usize].map(|(root, _)| root)
    }

    fn set(&mut self, id: ValueId, fact: Fact, storage: Option<(ValueId, i64)>) {
        self.facts[id.0 as usize] = fact;
        self.storages[id.0 as usize] = storage;
    }
}

impl Shapes for Binding {
    fn meta(&self, id: ValueId) -> Result<&Meta, OpError> {
        match self.fact(id) {
            Fact::Tensor(meta) => Ok(meta),
            _ => Err(OpError::NotATensor(id)),
        }
    }

    fn int(&self, int: Int) -> Result<i64, OpError> {
        match int {
            Int::Known(n) => Ok(n),
            Int::Value(id) => match self.fact(id) {
                Fact::Int(n) => Ok(*n),
                _ => Err(OpError::NotAnInteger(id)),
            },
        }
    }

    fn float(&self, id: ValueId) -> Result<f64, OpError> {
        match self.fact(id) {
            Fact::Float(x) => Ok(*x),
            _ => Err(OpError::NotAFloat(id)),
        }
    }

    fn bool(&self, id: ValueId) -> Result<bool, OpError> {
        match self.fact(id) {
            Fact::Bool(b) => Ok(*b),
            _ => Err(OpError::NotABool(id)),
        }
    }
}

/// The form that the program states, for these symbols.
///
/// # Errors
/// [`ExprError`].
pub(crate) fn stated(meta: &TensorMeta, symbols: &Symbols) -> Result<Meta, ExprError> {
    let all = |exprs: &[Expr]| exprs.iter().map(|expr| expr.eval(symbols)).collect::<Result<Vec<i64>, _>>();
    Ok(Meta {
        dtype: meta.dtype,
        shape: all(&meta.sizes)?,
        strides: all(&meta.strides)?,
        offset: meta.storage_offset.eval(symbols)?,
    })
}

impl Graph {
    /// The graph for these values of its symbols, verified node by node.
    ///
    /// # Errors
    /// [`Error::SymbolRange`] and [`Error::Unsolved`] for the symbols; [`Error::Node`] where an operator does not fit its
    /// operands; [`Error::Disagrees`] where what is inferred is not what the program says.
    pub fn bind(&self, symbols: &Symbols) -> Result<Binding, Error> {
        self.check_ranges(symbols)?;
        let mut binding = Binding {
            symbols: symbols.clone(),
            outs: Vec::with_capacity(self.nodes.len()),
            facts: vec![Fact::None; self.values.len()],
            storages: vec![None; self.values.len()],
            laid_out: false,
            in_two_dtypes: Vec::new(),
        };
        for input in &self.inputs {
            let Some(id) = input.value else { continue };
            let failed = |cause| Error::Expr { value: input.name.clone(), cause };
            match &self.value(id).ty {
                Type::Tensor(meta) => {
                    let mut form = stated(meta, symbols).map_err(failed)?;
                    if self.lays_out && input.source == Source::User && form.is_loose() {
                        binding.laid_out = true;
                        form = Meta::contiguous(form.dtype, &form.shape);
                    }
                    let extent = form.extent().filter(|_| form.strides.len() == form.rank());
                    let len = extent.ok_or_else(|| Error::Kind { name: input.name.clone(), got: form.to_string() })?;
                    binding.set(id, Fact::Tensor(form), Some((id, len)));
                }
                Type::Int(expr) => binding.set(id, Fact::Int(expr.eval(symbols).map_err(failed)?), None),
                Type::Bool(_) | Type::Float(_) => {
                    return Err(Error::Kind { name: input.name.clone(), got: "a symbolic float or boolean".into() });
                }
            }
        }
        for node in &self.nodes {
            self.step(&mut binding, node)?;
        }
        Ok(binding)
    }

    /// That every symbol has a value in its range.
    pub(crate) fn check_ranges(&self, symbols: &Symbols) -> Result<(), Error> {
        for symbol in &self.symbols {
            let value = *symbols.get(&symbol.name).ok_or_else(|| Error::Unsolved(symbol.name.clone()))?;
            if !symbol.admits(value) {
                let (min, max) = (symbol.min, symbol.max);
                return Err(Error::SymbolRange { symbol: symbol.name.clone(), value, min, max });
            }
        }
        Ok(())
    }

    /// Infers a node's results, checks them, and enters them.
    fn step(&self, binding: &mut Binding, node: &Node) -> Result<(), Error> {
        let failed = |cause| Error::Node { node: node.name.clone(), target: node.target.clone(), cause };
        let mut outs = node.op.infer(binding).map_err(failed)?;
        if outs.len() != node.outputs.len() {
            return Err(failed(OpError::ResultCount { given: outs.len(), named: node.outputs.len() }));
        }
        if let Some(written) = node.op.mutates()
            && crate::strides::overlaps_itself(binding.meta(written).map_err(failed)?)
        {
            return Err(failed(OpError::SelfOverlap));
        }
        if let Some(written) = node.op.mutates()
            && binding.storage(written).is_some_and(|root| binding.in_two_dtypes.contains(&root))
        {
            return Err(failed(OpError::Refused(
                "a tensor is written that the program sees in another dtype too: clone it before it is seen so",
            )));
        }
        for (out, id) in outs.iter_mut().zip(&node.outputs) {
            self.choose(binding, node, out, *id)?;
            let (fact, storage) = entry(binding, out, *id).map_err(failed)?;
            let Some(id) = *id else { continue };
            self.compare(binding, node, id, &fact)?;
            binding.set(id, fact, storage);
        }
        if let (Op::Copy(Copy::Bits { input, .. }), Some(Out::Fresh(_)), Some(id)) =
            (&node.op, outs.first(), node.outputs.first().copied().flatten())
        {
            binding.in_two_dtypes.extend(binding.storage(*input).into_iter().chain([id]));
        }
        binding.outs.push(outs);
        Ok(())
    }

    /// Of the forms that a result may have, lets it have the one that the program says.
    fn choose(&self, binding: &Binding, node: &Node, out: &mut Out, id: Option<ValueId>) -> Result<(), Error> {
        let Some(id) = id else { return Ok(()) };
        let Type::Tensor(meta) = &self.value(id).ty else { return Ok(()) };
        let (Out::Fresh(form) | Out::View { meta: form, .. }) = &*out else { return Ok(()) };
        let failed = |cause| Error::Expr { value: self.value(id).name.clone(), cause };
        let stated = stated(meta, &binding.symbols).map_err(failed)?;
        if !form.agrees(&stated)
            && let Some(other) = forms::other(node, binding, out, &stated)
        {
            *out = Out::Fresh(other);
        }
        Ok(())
    }

    /// Whether a node or the caller reads a value.
    pub(crate) fn is_read(&self, id: ValueId) -> bool {
        let given = |output: &Output| match output {
            Output::Value(value) | Output::BufferMutation { value, .. } | Output::InputMutation { value, .. } => {
                *value == id
            }
            Output::Fixed(_) => false,
        };
        self.nodes.iter().any(|node| node.inputs.contains(&id)) || self.outputs.iter().any(given)
    }

    fn compare(&self, binding: &Binding, node: &Node, id: ValueId, fact: &Fact) -> Result<(), Error> {
        let value = self.value(id);
        let failed = |cause| Error::Expr { value: value.name.clone(), cause };
        let (agrees, stated) = match (&value.ty, fact) {
            (Type::Tensor(meta), _) => {
                let stated = stated(meta, &binding.symbols).map_err(failed)?;
                let alike = |own: &Meta| (own.dtype, &own.shape) == (stated.dtype, &stated.shape);
                let agrees =
                    matches!(fact, Fact::Tensor(own) if own.agrees(&stated) || (binding.laid_out && alike(own)));
                (agrees, Fact::Tensor(stated).to_string())
            }
            (Type::Int(expr), _) => {
                let stated = Fact::Int(expr.eval(&binding.symbols).map_err(failed)?);
                (*fact == stated, stated.to_string())
            }
            (Type::Bool(condition), _) => {
                let stated = Fact::Bool(condition.eval(&binding.symbols).map_err(failed)?);
                (*fact == stated, stated.to_string())
            }
            (Type::Float(real), _) => {
                let stated = Fact::Float(real.eval(&binding.symbols).map_err(failed)?);
                (*fact == stated, stated.to_string())
            }
        };
        // torch names what nobody reads so. Its tracer may state another dtype of it than its kernels give: torch 2.11 does of the
        // logarithms of float64 attention.
        if agrees || (value.name.contains("_unused_") && !self.is_read(id)) {
            return Ok(());
        }
        Err(Error::Disagrees {
            node: node.name.clone(),
            target: node.target.clone(),
            value: value.name.clone(),
            inferred: fact.to_string(),
            stated,
        })
    }
}

/// What a result is, and the storage that it lies in; `id` is its value, if it has one.
fn entry(binding: &Binding, out: &Out, id: Option<ValueId>) -> Result<(Fact, Option<(ValueId, i64)>), OpError> {
    let extent = |meta: &Meta| {
        let complete = meta.extent().filter(|_| meta.strides.len() == meta.rank());
        complete.ok_or_else(|| OpError::NoForm(meta.to_string()))
    };
    let storage = |of: ValueId| binding.storages[of.0 as usize].ok_or(OpError::NotATensor(of));
    Ok(match out {
        Out::Fresh(meta) => {
            let len = extent(meta)?;
            (Fact::Tensor(meta.clone()), id.map(|id| (id, len)))
        }
        Out::View { of, meta } => {
            let (needed, (root, len)) = (extent(meta)?, storage(*of)?);
            // A view without elements may start at the end of its storage, and reads nothing.
            if needed > len && meta.numel() > 0 {
                return Err(OpError::OutOfStorage { needed, len });
            }
            (Fact::Tensor(meta.clone()), Some((root, len)))
        }
        Out::Same(of) => (binding.fact(*of).clone(), binding.storages[of.0 as usize]),
        Out::Int(n) => (Fact::Int(*n), None),
        Out::Float(x) => (Fact::Float(*x), None),
        Out::Bool(b) => (Fact::Bool(*b), None),
    })
}
