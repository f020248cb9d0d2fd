//! The reference: a graph run node by node, in plain loops.
//!
//! It defines what a program means. Every element is computed in f64, or in i64 with wrap-around, and rounded once to its
//! dtype ([`Precision::Rounded`]), or not rounded at all ([`Precision::Wide`]). Tensors share storages as in eager PyTorch:
//! a write is seen through every view. What a program mutates stays in the interpreter's state, or in the caller's tensor.
//! A run that fails leaves both as they were.

use std::rc::Rc;

use rapt_pt2::Symbols;
use rustc_hash::FxHashMap;

use crate::solve::fixed;
use crate::{
    Binding, Cells, Error, Eval, Fact, Graph, Int, Meta, Node, Op, OpError, Out, Output, Precision, Shapes, Source,
    Tensor, Type, ValueId,
};

/// The elements that one tensor of a run may have: 8 GiB of f64.
const MAX_ELEMENTS: i64 = 1 << 30;

/// Bindings that are kept; the oldest goes when another comes.
const MAX_BINDINGS: usize = 64;

/// An argument or a result.
#[derive(Clone, Debug)]
pub enum Item {
    /// A tensor.
    Tensor(Tensor),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// `None`.
    None,
}

impl Item {
    fn fact(&self) -> Fact {
        match self {
            Item::Tensor(tensor) => Fact::Tensor(tensor.meta.clone()),
            Item::Int(n) => Fact::Int(*n),
            Item::Float(x) => Fact::Float(*x),
            Item::Bool(b) => Fact::Bool(*b),
            Item::None => Fact::None,
        }
    }

    fn of_fact(fact: &Fact) -> Item {
        match fact {
            Fact::Int(n) => Item::Int(*n),
            Fact::Float(x) => Item::Float(*x),
            Fact::Bool(b) => Item::Bool(*b),
            Fact::Tensor(_) | Fact::None => Item::None,
        }
    }
}

/// A graph with its parameters, buffers and constants, ready to run.
#[derive(Clone, Debug)]
pub struct Interpreter<'g> {
    graph: &'g Graph,
    precision: Precision,
    state: FxHashMap<String, Tensor>,
    bindings: Vec<Rc<Binding>>,
}

impl<'g> Interpreter<'g> {
    /// A graph without its state: every parameter, buffer and constant is to be [`set`](Interpreter::set).
    #[must_use]
    pub fn new(graph: &'g Graph, precision: Precision) -> Interpreter<'g> {
        Interpreter { graph, precision, state: FxHashMap::default(), bindings: Vec::new() }
    }

    /// Gives a parameter, buffer or constant by its name in the model. Tensors that are views of one another stay so: what is
    /// written to one is seen in the other.
    ///
    /// # Errors
    /// [`Error::UnknownState`]; [`Error::StateForm`] unless dtype, shape and strides are those that the program states.
    pub fn set(&mut self, name: &str, tensor: &Tensor) -> Result<(), Error> {
        let of = |input: &&crate::Input| input.source.state() == Some(name);
        let input = self.graph.inputs.iter().find(of).ok_or_else(|| Error::UnknownState(name.into()))?;
        let expected = input.value.map(|id| &self.graph.value(id).ty);
        let Some(Type::Tensor(meta)) = expected else {
            return Err(Error::Kind { name: name.into(), got: "no tensor".into() });
        };
        let failed = |cause| Error::Expr { value: input.name.clone(), cause };
        let expected = crate::bind::stated(meta, &Symbols::new()).map_err(failed)?;
        let tensor = tensor.at_offset(expected.offset);
        if !tensor.meta.agrees(&expected) {
            let (expected, got) = (expected.to_string(), tensor.meta.to_string());
            return Err(Error::StateForm { name: name.into(), expected, got });
        }
        self.state.insert(name.into(), tensor);
        Ok(())
    }

    /// A parameter, buffer or constant, as the last run left it.
    #[must_use]
    pub fn state(&self, name: &str) -> Option<&Tensor> {
        self.state.get(name)
    }

    /// Runs the graph on the caller's inputs, in the order of [`Graph::user_inputs`]. The results are those of the caller, in
    /// order; mutations have been made.
    ///
    /// # Errors
    /// As [`Graph::solve`], [`Graph::check_strides`] and [`Graph::bind`]; [`Error::MissingState`]; [`Error::Node`] for what only
    /// the values show. Then nothing was written.
    pub fn run(&mut self, inputs: &[Item]) -> Result<Vec<Item>, Error> {
        self.run_watched(inputs, &mut |_, _| {})
    }

    /// The same, with a look at each node's tensors once it has run. What is unused is `None`, as is what is no tensor.
    ///
    /// # Errors
    /// As [`Interpreter::run`].
    pub fn run_watched(
        &mut self,
        inputs: &[Item],
        watch: &mut dyn FnMut(&Node, &[Option<&Tensor>]),
    ) -> Result<Vec<Item>, Error> {
        let facts: Vec<Fact> = inputs.iter().map(Item::fact).collect();
        let symbols = self.graph.solve(&facts)?;
        let binding = self.binding(&symbols)?;
        self.graph.check_strides(&binding, &facts)?;
        let mut frame = Frame { binding: &binding, tensors: FxHashMap::default(), precision: self.precision };
        self.place_inputs(&mut frame, inputs)?;
        let kept = kept(self.graph, &frame);
        let done = run_nodes(self.graph, &mut frame, watch).and_then(|()| results(self.graph, &self.state, &frame));
        if done.is_err() {
            for (tensor, cells) in kept {
                tensor.restore(cells);
            }
        }
        done
    }

    /// The binding of these symbols, verified once.
    fn binding(&mut self, symbols: &Symbols) -> Result<Rc<Binding>, Error> {
        if let Some(binding) = self.bindings.iter().find(|binding| binding.symbols == *symbols) {
            return Ok(Rc::clone(binding));
        }
        let binding = Rc::new(self.graph.bind(symbols)?);
        if self.bindings.len() == MAX_BINDINGS {
            self.bindings.remove(0);
        }
        self.bindings.push(Rc::clone(&binding));
        Ok(binding)
    }

    fn place_inputs(&self, frame: &mut Frame<'_>, inputs: &[Item]) -> Result<(), Error> {
        let mut given = inputs.iter();
        for input in &self.graph.inputs {
            let tensor = match &input.source {
                Source::User | Source::Fixed(_) => match given.next() {
                    Some(Item::Tensor(tensor)) => tensor,
                    _ => continue,
                },
                source => {
                    let name = source.state().unwrap_or_default();
                    self.state.get(name).ok_or_else(|| Error::MissingState(name.into()))?
                }
            };
            let Some(id) = input.value else { continue };
            let Fact::Tensor(meta) = frame.binding.fact(id) else { continue };
            frame.tensors.insert(id, tensor.at_offset(meta.offset));
        }
        Ok(())
    }
}

impl Binding {
    /// The results of node `n`, which is `op`, by its definition; `None` for what is no tensor. `tensors` are its operands, as
    /// they lie. What a node writes in place is its operand; of a view too the operand is given, since nothing is computed.
    ///
    /// # Errors
    /// [`OpError`] for what only the values show.
    pub fn evaluate(
        &self,
        n: usize,
        op: &Op,
        tensors: impl IntoIterator<Item = (ValueId, Tensor)>,
        precision: Precision,
    ) -> Result<Vec<Option<Tensor>>, OpError> {
        let frame = Frame { binding: self, tensors: tensors.into_iter().collect(), precision };
        let given = |out: &Out| match out {
            Out::View { of, .. } => Ok(frame.tensors.get(of).cloned()),
            out => result(&frame, out),
        };
        let results = self.outs[n].iter().map(given).collect::<Result<Vec<Option<Tensor>>, _>>()?;
        let outs: Vec<Tensor> = results.iter().flatten().cloned().collect();
        op.eval(&frame, &outs)?;
        Ok(results)
    }
}

/// What nodes read: the numbers of a binding, and the tensors that are there.
struct Frame<'a> {
    binding: &'a Binding,
    tensors: FxHashMap<ValueId, Tensor>,
    precision: Precision,
}

impl Shapes for Frame<'_> {
    fn meta(&self, id: ValueId) -> Result<&Meta, OpError> {
        self.binding.meta(id)
    }

    fn int(&self, int: Int) -> Result<i64, OpError> {
        self.binding.int(int)
    }

    fn float(&self, id: ValueId) -> Result<f64, OpError> {
        self.binding.float(id)
    }

    fn bool(&self, id: ValueId) -> Result<bool, OpError> {
        self.binding.bool(id)
    }
}

impl Eval for Frame<'_> {
    fn tensor(&self, id: ValueId) -> Result<&Tensor, OpError> {
        self.tensors.get(&id).ok_or(OpError::NotATensor(id))
    }

    fn precision(&self) -> Precision {
        self.precision
    }
}

/// The storages that came from outside and that the graph writes to, with what they hold now.
fn kept(graph: &Graph, frame: &Frame<'_>) -> Vec<(Tensor, Cells)> {
    let written = graph.nodes.iter().filter_map(|node| frame.binding.storage(node.op.mutates()?));
    let mut kept: Vec<(Tensor, Cells)> = Vec::new();
    for tensor in written.filter_map(|root| frame.tensors.get(&root)) {
        if !kept.iter().any(|(other, _)| other.shares(tensor)) {
            kept.push((tensor.clone(), tensor.storage()));
        }
    }
    kept
}

fn run_nodes(
    graph: &Graph,
    frame: &mut Frame<'_>,
    watch: &mut dyn FnMut(&Node, &[Option<&Tensor>]),
) -> Result<(), Error> {
    let last = last_uses(graph, frame.binding);
    for (place, (node, outs)) in graph.nodes.iter().zip(&frame.binding.outs).enumerate() {
        let failed = |cause| Error::Node { node: node.name.clone(), target: node.target.clone(), cause };
        let tensors = outs.iter().filter_map(|out| result(frame, out).transpose());
        let tensors = tensors.collect::<Result<Vec<Tensor>, _>>().map_err(failed)?;
        node.op.eval(frame, &tensors).map_err(failed)?;
        let mut tensors = tensors.into_iter();
        for (out, id) in outs.iter().zip(&node.outputs) {
            let tensor = if is_tensor(frame, out) { tensors.next() } else { None };
            if let (Some(id), Some(tensor)) = (id, tensor) {
                frame.tensors.insert(*id, tensor);
            }
        }
        let seen: Vec<Option<&Tensor>> =
            node.outputs.iter().map(|id| id.and_then(|id| frame.tensors.get(&id))).collect();
        watch(node, &seen);
        for id in &last[place] {
            frame.tensors.remove(id);
        }
    }
    Ok(())
}

fn is_tensor(frame: &Frame<'_>, out: &Out) -> bool {
    match out {
        Out::Fresh(_) | Out::View { .. } => true,
        Out::Same(of) => frame.tensors.contains_key(of),
        Out::Int(_) | Out::Float(_) | Out::Bool(_) => false,
    }
}

/// The tensor of a result, zeros where it is fresh; `None` for a number.
fn result(frame: &Frame<'_>, out: &Out) -> Result<Option<Tensor>, OpError> {
    Ok(match out {
        Out::Fresh(meta) => match meta.extent() {
            Some(len) if len <= MAX_ELEMENTS => Some(Tensor::zeros(meta.clone())),
            len => return Err(OpError::TooLarge(len.unwrap_or(i64::MAX))),
        },
        Out::View { of, meta } => Some(frame.tensor(*of)?.view(meta.clone())),
        Out::Same(of) => frame.tensors.get(of).cloned(),
        Out::Int(_) | Out::Float(_) | Out::Bool(_) => None,
    })
}

/// Of each node, the values that nothing after it reads.
fn last_uses(graph: &Graph, binding: &Binding) -> Vec<Vec<ValueId>> {
    let mut last = vec![None; graph.values.len()];
    for (place, node) in graph.nodes.iter().enumerate() {
        for id in node.inputs.iter().chain(node.outputs.iter().flatten()) {
            last[id.0 as usize] = Some(place);
        }
    }
    for output in &graph.outputs {
        if let Output::Value(id) | Output::BufferMutation { value: id, .. } | Output::InputMutation { value: id, .. } =
            output
        {
            last[id.0 as usize] = None;
        }
    }
    // Inputs stay: they are the caller's, and mutations are written to them.
    for input in graph.inputs.iter().filter_map(|input| input.value) {
        last[input.0 as usize] = None;
    }
    let mut uses = vec![Vec::new(); binding.outs.len()];
    for (value, place) in last.iter().enumerate() {
        if let (Some(place), Ok(id)) = (place, u32::try_from(value)) {
            uses[*place].push(ValueId(id));
        }
    }
    uses
}

/// Makes the mutations that the signature declares, and gives what the caller gets.
fn results(graph: &Graph, state: &FxHashMap<String, Tensor>, frame: &Frame<'_>) -> Result<Vec<Item>, Error> {
    let tensor = |id: ValueId| {
        frame
            .tensors
            .get(&id)
            .ok_or_else(|| Error::Kind { name: graph.value(id).name.clone(), got: "no tensor".into() })
    };
    let mut items = Vec::new();
    let mut writes = Vec::new();
    for output in &graph.outputs {
        match output {
            Output::Value(id) => items.push(match frame.binding.fact(*id) {
                Fact::Tensor(_) => Item::Tensor(tensor(*id)?.clone()),
                fact => Item::of_fact(fact),
            }),
            Output::Fixed(argument) => items.push(fixed(argument).map_or(Item::None, |fact| Item::of_fact(&fact))),
            Output::BufferMutation { value, name } => {
                let target = state.get(name).ok_or_else(|| Error::MissingState(name.clone()))?;
                writes.push((name, tensor(*value)?, target));
            }
            Output::InputMutation { value, input } => {
                writes.push((&graph.value(*input).name, tensor(*value)?, tensor(*input)?));
            }
        }
    }
    for (name, value, target) in &writes {
        if (value.meta.dtype, &value.meta.shape) != (target.meta.dtype, &target.meta.shape) {
            let (expected, got) = (target.meta.to_string(), value.meta.to_string());
            return Err(Error::StateForm { name: (*name).clone(), expected, got });
        }
    }
    // All are read before any is written: the content of one may be a view of another.
    let contents: Vec<Cells> =
        writes.iter().map(|(_, value, target)| value.cast(target.meta.dtype, frame.precision)).collect();
    for ((_, _, target), cells) in writes.iter().zip(contents) {
        target.write(frame.precision, cells);
    }
    Ok(items)
}
