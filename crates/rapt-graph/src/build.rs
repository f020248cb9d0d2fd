//! A program becomes a graph: names become values, operators become types.
//!
//! Every operator that is not served is named in one error. Nothing is computed, and no form is checked: that is the
//! verifier's part.

use std::cell::RefCell;

use rapt_core::DType;
use rapt_pt2::{Argument, Expr, InputSpec, OutputSpec, Program, SymInt, TensorMeta};
use rustc_hash::FxHashMap;

use crate::ops::Copy;
use crate::{Args, Error, Graph, Input, Node, Op, OpError, Output, Source, Type, Value, ValueId};

impl Graph {
    /// The graph of a program.
    ///
    /// # Errors
    /// [`Error::MissingOps`] with all operators that are not served; [`Error::Node`] for a node whose arguments do not fit its
    /// operator; [`Error::Undefined`], [`Error::DefinedTwice`] and [`Error::SignatureCount`] for a program that is no graph.
    pub fn new(program: &Program) -> Result<Graph, Error> {
        let mut builder = Builder { program, graph: Graph::default(), names: FxHashMap::default() };
        builder.graph.symbols.clone_from(&program.symbols);
        builder.graph.guards.clone_from(&program.guards);
        builder.inputs()?;
        builder.nodes()?;
        builder.outputs()?;
        builder.graph.check_absent()?;
        Ok(builder.graph)
    }

    /// That nobody reads a result that an operator does not compute.
    fn check_absent(&self) -> Result<(), Error> {
        for node in &self.nodes {
            let (absent, why) = match &node.op {
                Op::Svd(op) => {
                    (op.absent(), "singular values are served, and the vectors that the program reads are not")
                }
                Op::System(op) => (
                    op.absent(),
                    "solutions and determinants are served, and the factors that the program reads are not",
                ),
                _ => continue,
            };
            let read = |&n: &usize| node.outputs.get(n).copied().flatten().is_some_and(|id| self.is_read(id));
            if absent.iter().any(read) {
                let cause = OpError::Refused(why);
                return Err(Error::Node { node: node.name.clone(), target: node.target.clone(), cause });
            }
        }
        Ok(())
    }
}

struct Builder<'a> {
    program: &'a Program,
    graph: Graph,
    names: FxHashMap<&'a str, ValueId>,
}

impl<'a> Builder<'a> {
    fn inputs(&mut self) -> Result<(), Error> {
        let program = self.program;
        let (arguments, specs) = (&program.graph.inputs, &program.signature.inputs);
        same_count("inputs", arguments.len(), specs.len())?;
        for (argument, spec) in arguments.iter().zip(specs) {
            let value = self.define(argument)?;
            let (name, source) = match spec {
                InputSpec::User(given) => match name_of(given) {
                    Some(name) => (name, Source::User),
                    None => ("", Source::Fixed(given.clone())),
                },
                InputSpec::Parameter { value, name } => (value.as_str(), Source::Parameter(name.clone())),
                InputSpec::Buffer { value, name, persistent } => {
                    (value.as_str(), Source::Buffer { name: name.clone(), persistent: *persistent })
                }
                InputSpec::Constant { value, name } => (value.as_str(), Source::Constant(name.clone())),
                InputSpec::Fixed { name, value } => (name.as_str(), Source::Fixed(value.clone())),
            };
            if !matches!(source, Source::Fixed(_)) && value != self.names.get(name).copied() {
                return Err(Error::Undefined { user: "the signature".into(), name: name.into() });
            }
            self.graph.inputs.push(Input { name: name.into(), value, source });
        }
        Ok(())
    }

    /// The value that an input or result defines; `None` for one that has no name.
    fn define(&mut self, argument: &'a Argument) -> Result<Option<ValueId>, Error> {
        let Some(name) = name_of(argument) else {
            return match argument {
                Argument::Other(kind) => Err(Error::Kind { name: "a value".into(), got: (*kind).into() }),
                _ => Ok(None),
            };
        };
        let graph = &self.program.graph;
        let undefined = || Error::Undefined { user: "the graph".into(), name: name.into() };
        let ty = match argument {
            Argument::Tensor(_) => Type::Tensor(graph.tensors.get(name).ok_or_else(undefined)?.clone()),
            Argument::SymInt(_) => Type::Int(graph.sym_ints.get(name).ok_or_else(undefined)?.clone()),
            Argument::SymFloat(_) => Type::Float(graph.sym_floats.get(name).ok_or_else(undefined)?.clone()),
            _ => Type::Bool(graph.sym_bools.get(name).ok_or_else(undefined)?.clone()),
        };
        self.enter(name, ty)
    }

    fn enter(&mut self, name: &'a str, ty: Type) -> Result<Option<ValueId>, Error> {
        let id = ValueId(u32::try_from(self.graph.values.len()).unwrap_or(u32::MAX));
        if self.names.insert(name, id).is_some() {
            return Err(Error::DefinedTwice(name.into()));
        }
        self.graph.values.push(Value { name: name.into(), ty });
        Ok(Some(id))
    }

    fn nodes(&mut self) -> Result<(), Error> {
        let mut missing: Vec<(String, usize, String)> = Vec::new();
        let mut first_error = None;
        for node in &self.program.graph.nodes {
            let used = RefCell::new(Vec::new());
            let unknown = RefCell::new(None);
            let find = |name: &str| {
                let id = self.names.get(name).copied();
                match id {
                    Some(id) if !used.borrow().contains(&id) => used.borrow_mut().push(id),
                    Some(_) => {}
                    None => *unknown.borrow_mut() = Some(name.to_owned()),
                }
                id
            };
            let read = Op::read(&node.target, &Args::new(node, &find));
            let unknown = unknown.into_inner();
            let used = used.into_inner();
            let op = match read {
                Some(Ok(op)) => Some(op),
                Some(Err(cause)) => {
                    first_error.get_or_insert_with(|| match unknown {
                        Some(name) => Error::Undefined { user: format!("node {}", node.name), name },
                        None => Error::Node { node: node.name.clone(), target: node.target.clone(), cause },
                    });
                    None
                }
                None => {
                    match missing.iter_mut().find(|(target, ..)| *target == node.target) {
                        Some((_, count, _)) => *count += 1,
                        None => missing.push((node.target.clone(), 1, node.name.clone())),
                    }
                    None
                }
            };
            let outputs = self.results(node)?;
            if let Some(mut op) = op {
                let mut inputs = used;
                self.promote(&node.name, &mut op, &mut inputs);
                let (name, target) = (node.name.clone(), node.target.clone());
                self.graph.nodes.push(Node { name, target, op, inputs, outputs });
            }
        }
        // The list of what is not served is worth more than the first other error.
        if !missing.is_empty() {
            return Err(Error::MissingOps { ops: missing });
        }
        first_error.map_or(Ok(()), Err)
    }

    /// Makes nodes of the conversions that ATen's promotion makes inside of an operator.
    fn promote(&mut self, node: &str, op: &mut Op, inputs: &mut Vec<ValueId>) {
        let forms: FxHashMap<ValueId, (DType, usize)> = inputs
            .iter()
            .filter_map(|&id| match &self.graph.value(id).ty {
                Type::Tensor(meta) => Some((id, (meta.dtype, meta.sizes.len()))),
                _ => None,
            })
            .collect();
        let form = |id| forms.get(&id).copied();
        let mut cast = |id, dtype| {
            let operand = self.graph.value(id);
            let name = format!("{} as {dtype} for {node}", operand.name);
            let Type::Tensor(meta) = &operand.ty else { return id };
            let ty = Type::Tensor(TensorMeta { dtype, storage_offset: Expr::Int(0), ..meta.clone() });
            let cast = ValueId(u32::try_from(self.graph.values.len()).unwrap_or(u32::MAX));
            self.graph.values.push(Value { name: name.clone(), ty });
            self.graph.nodes.push(Node {
                name,
                target: "promotion".into(),
                op: Op::Copy(Copy::Promote { input: id, dtype }),
                inputs: vec![id],
                outputs: vec![Some(cast)],
            });
            inputs.push(cast);
            cast
        };
        op.promote(&form, &mut cast);
    }

    fn results(&mut self, node: &'a rapt_pt2::Node) -> Result<Vec<Option<ValueId>>, Error> {
        let mut outputs = Vec::new();
        for argument in &node.outputs {
            match argument {
                Argument::Tensors(names) => {
                    for name in names {
                        outputs.push(self.define_tensor(name)?);
                    }
                }
                Argument::OptionalTensors(names) => {
                    for name in names {
                        outputs.push(name.as_ref().map_or(Ok(None), |name| self.define_tensor(name))?);
                    }
                }
                argument => outputs.push(self.define(argument)?),
            }
        }
        Ok(outputs)
    }

    fn define_tensor(&mut self, name: &'a str) -> Result<Option<ValueId>, Error> {
        let meta = self.program.graph.tensors.get(name);
        let undefined = || Error::Undefined { user: "the graph".into(), name: name.into() };
        self.enter(name, Type::Tensor(meta.ok_or_else(undefined)?.clone()))
    }

    fn outputs(&mut self) -> Result<(), Error> {
        let specs = &self.program.signature.outputs;
        same_count("outputs", self.program.graph.outputs.len(), specs.len())?;
        let find = |name: &str| {
            let id = self.names.get(name).copied();
            id.ok_or_else(|| Error::Undefined { user: "the signature".into(), name: name.into() })
        };
        for spec in specs {
            self.graph.outputs.push(match spec {
                OutputSpec::User(argument) => match (name_of(argument), argument) {
                    (Some(name), _) => Output::Value(find(name)?),
                    (None, Argument::None | Argument::Int(_) | Argument::Float(_) | Argument::Bool(_)) => {
                        Output::Fixed(argument.clone())
                    }
                    (None, other) => {
                        return Err(Error::Kind { name: "an output".into(), got: format!("{other:?}") });
                    }
                },
                OutputSpec::BufferMutation { value, name } => {
                    if !self.graph.inputs.iter().any(|input| input.source.state() == Some(name)) {
                        return Err(Error::UnknownState(name.clone()));
                    }
                    Output::BufferMutation { value: find(value)?, name: name.clone() }
                }
                OutputSpec::InputMutation { value, input } => {
                    Output::InputMutation { value: find(value)?, input: find(input)? }
                }
            });
        }
        Ok(())
    }
}

fn same_count(what: &'static str, graph: usize, signature: usize) -> Result<(), Error> {
    if graph == signature { Ok(()) } else { Err(Error::SignatureCount { what, graph, signature }) }
}

/// The name of an argument that stands for one value.
fn name_of(argument: &Argument) -> Option<&str> {
    match argument {
        Argument::Tensor(name)
        | Argument::SymInt(SymInt::Name(name))
        | Argument::SymBool(name)
        | Argument::SymFloat(name) => Some(name),
        _ => None,
    }
}
