//! Regions of a program that only say how gradients and autocasting are switched: their nodes take the region's place.
//!
//! ```text
//! c, s = wrap_with_set_grad_enabled(False, submod, x, f)         submod(a, b): y = a * b; return cos(y), sin(y)
//! ─►  region_0.y = x * f,  c = cos(region_0.y),  s = sin(region_0.y)
//! ```
//!
//! PyTorch writes such a region wherever a model that is exported with gradients on has `torch.no_grad()` inside, and where it
//! switches autocasting off. Values inside get the region's number before their names; a result that is one of the operands, or
//! another result again, is an alias. Deliberately absent: regions that switch autocasting on, whose nodes convert their
//! operands, and other operators with graphs.

use std::collections::BTreeMap;

use crate::schema::{Argument, Graph, Name, NamedArgument, Node, OptionalTensor, SymBoolArgument};
use crate::schema::{SymFloatArgument, SymIntArgument, Table};

const SET_GRAD: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";
const AUTOCAST: &str = "torch.ops.higher_order.wrap_with_autocast";
const ALIAS: &str = "torch.ops.aten.alias.default";

/// `graph` with the nodes of its regions in their place.
pub(crate) fn regions(mut graph: Graph) -> Graph {
    let nodes = std::mem::take(&mut graph.nodes);
    let mut count = 0;
    for mut node in nodes {
        let Some(region) = Region::take(&mut node) else {
            graph.nodes.push(node);
            continue;
        };
        // A number, because a name of the archive's own could be long, and stands before every name inside.
        region.put_into(&mut graph, format!("region_{count}"));
        count += 1;
    }
    graph
}

/// A node that computes what its graph does.
struct Region {
    body: Graph,
    operands: Vec<Argument>,
    results: Vec<Argument>,
}

impl Region {
    /// The region that a node is; other nodes stay as they are.
    fn take(node: &mut Node) -> Option<Region> {
        let argument = |at: usize| node.inputs.get(at).map(|input| &input.arg);
        let at = match (node.target.as_str(), argument(0), argument(2)) {
            (SET_GRAD, Some(Argument::AsBool(_)), _) => 1,
            // Device, dtype, whether it is on, whether casts are kept.
            (AUTOCAST, _, Some(Argument::AsBool(false))) => 4,
            _ => return None,
        };
        let Some(Argument::AsGraph(body)) = argument(at) else { return None };
        let (inner, outer) = (&body.graph.inputs, &node.inputs[at + 1..]);
        let taken = inner.len() == outer.len()
            && inner.iter().zip(outer).all(|(inner, outer)| Value::of(inner).takes(&Value::of(&outer.arg)));
        let given = body.graph.outputs.len() == node.outputs.len()
            && body.graph.outputs.iter().chain(&node.outputs).all(|value| matches!(value, Argument::AsTensor(_)));
        if !taken || !given {
            return None;
        }
        let operands = node.inputs.split_off(at + 1).into_iter().map(|input| input.arg).collect();
        let Some(NamedArgument { arg: Argument::AsGraph(body), .. }) = node.inputs.pop() else { return None };
        Some(Region { body: regions(*body.graph), operands, results: std::mem::take(&mut node.outputs) })
    }

    /// Appends the region's nodes, and what is known of their values.
    fn put_into(self, graph: &mut Graph, prefix: String) {
        let Region { mut body, operands, results } = self;
        let mut names = Names { prefix, known: BTreeMap::new() };
        for (inner, outer) in body.inputs.iter().zip(operands) {
            if let Some(inner) = Value::of(inner).name() {
                names.known.insert(inner.to_owned(), outer);
            }
        }
        let mut aliases = Vec::new();
        for (inner, outer) in body.outputs.into_iter().zip(results) {
            let Value::Tensor(value) = Value::of(&inner) else { continue };
            if names.known.contains_key(value) {
                aliases.push((inner, outer));
            } else {
                names.known.insert(value.to_owned(), outer);
            }
        }
        for node in &mut body.nodes {
            node.name = node.name.take().map(|name| format!("{}.{name}", names.prefix));
            node.inputs.iter_mut().for_each(|input| names.replace(&mut input.arg));
            node.outputs.iter_mut().for_each(|output| names.replace(output));
        }
        graph.nodes.append(&mut body.nodes);
        for (mut inner, outer) in aliases {
            names.replace(&mut inner);
            let inputs = vec![NamedArgument { name: "self".to_owned(), arg: inner }];
            graph.nodes.push(Node { target: ALIAS.to_owned(), inputs, outputs: vec![outer], name: None });
        }
        names.keep(body.tensor_values, &mut graph.tensor_values);
        names.keep(body.sym_int_values, &mut graph.sym_int_values);
        names.keep(body.sym_bool_values, &mut graph.sym_bool_values);
        names.keep(body.sym_float_values, &mut graph.sym_float_values);
    }
}

/// What an argument is to a graph that is called with it.
enum Value<'a> {
    Tensor(&'a str),
    Int(Option<&'a str>),
    Other,
}

impl<'a> Value<'a> {
    fn of(argument: &'a Argument) -> Value<'a> {
        match argument {
            Argument::AsTensor(tensor) => Value::Tensor(&tensor.name),
            Argument::AsSymInt(SymIntArgument::AsName(name)) => Value::Int(Some(name)),
            Argument::AsSymInt(SymIntArgument::AsInt(_)) | Argument::AsInt(_) => Value::Int(None),
            _ => Value::Other,
        }
    }

    fn name(&self) -> Option<&'a str> {
        match self {
            Value::Tensor(name) => Some(name),
            Value::Int(name) => *name,
            Value::Other => None,
        }
    }

    fn takes(&self, operand: &Value<'_>) -> bool {
        matches!((self, operand), (Value::Tensor(_), Value::Tensor(_)) | (Value::Int(_), Value::Int(_)))
    }
}

/// What the values of a region are called outside of it.
struct Names {
    prefix: String,
    /// Operands and results.
    known: BTreeMap<String, Argument>,
}

impl Names {
    fn outside(&self, name: &str) -> String {
        let known = self.known.get(name).and_then(|value| Value::of(value).name());
        known.map_or_else(|| format!("{}.{name}", self.prefix), str::to_owned)
    }

    fn replace(&self, argument: &mut Argument) {
        let tensor = |tensor: &mut Name| tensor.name = self.outside(&tensor.name);
        let optional = |optional: &mut OptionalTensor| {
            if let OptionalTensor::AsTensor(name) = optional {
                tensor(name);
            }
        };
        match argument {
            Argument::AsTensor(name) => tensor(name),
            Argument::AsTensors(names) => names.iter_mut().for_each(tensor),
            Argument::AsOptionalTensor(name) => optional(name),
            Argument::AsOptionalTensors(names) => names.iter_mut().for_each(optional),
            Argument::AsSymInt(int) => self.int(int),
            Argument::AsSymInts(ints) => ints.iter_mut().for_each(|int| self.int(int)),
            Argument::AsSymBool(SymBoolArgument::AsName(name))
            | Argument::AsSymFloat(SymFloatArgument::AsName(name)) => {
                *name = self.outside(name);
            }
            _ => {}
        }
    }

    fn int(&self, int: &mut SymIntArgument) {
        let SymIntArgument::AsName(name) = int else { return };
        *int = match self.known.get(name) {
            Some(&Argument::AsInt(number) | &Argument::AsSymInt(SymIntArgument::AsInt(number))) => {
                SymIntArgument::AsInt(number)
            }
            _ => SymIntArgument::AsName(self.outside(name)),
        };
    }

    /// Moves what is known of values that have no name outside.
    fn keep<T>(&self, from: Table<T>, into: &mut Table<T>) {
        for (name, value) in from.0 {
            if !self.known.contains_key(&name) {
                into.0.insert(self.outside(&name), value);
            }
        }
    }
}
