//! Programs written by hand.
#![allow(dead_code, reason = "each test binary uses a part")]

use rapt_core::DType;
use rapt_graph::{Cells, Error, Graph, Interpreter, Item, Meta, OpError, Precision, Tensor};
use rapt_pt2::{
    Argument, Device, Guard, InputSpec, NamedArgument, Node, OutputSpec, Program, Property, Signature, Source, SymInt,
    Symbol, TensorMeta, parse_condition, parse_expr,
};

/// A program that grows node by node.
pub(crate) struct Sketch(pub(crate) Program);

/// A tensor argument.
pub(crate) fn t(name: &str) -> Argument {
    Argument::Tensor(name.into())
}

/// A symbolic integer.
pub(crate) fn s(name: &str) -> Argument {
    Argument::SymInt(SymInt::Name(name.into()))
}

/// Integers.
pub(crate) fn ints(list: &[i64]) -> Argument {
    Argument::Ints(list.to_vec())
}

/// A form: sizes and strides as sympy's text, row-major where no strides are given.
pub(crate) fn form(dtype: DType, sizes: &[&str], strides: Option<&[&str]>, offset: &str) -> TensorMeta {
    let all = |texts: &[&str]| texts.iter().map(|text| parse_expr(text).expect("an expression")).collect();
    let row_major: Vec<String> = (0..sizes.len())
        .map(|d| sizes[d + 1..].iter().fold("1".to_owned(), |product, size| format!("{product}*({size})")))
        .collect();
    let row_major: Vec<&str> = row_major.iter().map(String::as_str).collect();
    TensorMeta {
        dtype,
        sizes: all(sizes),
        strides: all(strides.unwrap_or(&row_major)),
        storage_offset: parse_expr(offset).expect("an expression"),
        device: Device { kind: "cpu".into(), index: None },
    }
}

impl Sketch {
    pub(crate) fn new() -> Sketch {
        Sketch(Program {
            torch_version: "2.15.0".into(),
            schema_version: (8, 20),
            graph: rapt_pt2::Graph::default(),
            signature: Signature::default(),
            symbols: Vec::new(),
            guards: Vec::new(),
            call: None,
        })
    }

    pub(crate) fn symbol(mut self, name: &str, min: i64, max: Option<i64>) -> Sketch {
        self.0.symbols.push(Symbol { name: name.into(), min, max, hint: Some(min.max(4)) });
        self
    }

    pub(crate) fn tensor(mut self, name: &str, meta: TensorMeta) -> Sketch {
        self.0.graph.tensors.insert(name.into(), meta);
        self
    }

    /// An input of the caller, row-major.
    pub(crate) fn input(self, name: &str, dtype: DType, sizes: &[&str]) -> Sketch {
        self.input_of(name, form(dtype, sizes, None, "0"))
    }

    pub(crate) fn input_of(self, name: &str, meta: TensorMeta) -> Sketch {
        self.given(t(name), InputSpec::User(t(name))).tensor(name, meta)
    }

    pub(crate) fn given(mut self, argument: Argument, spec: InputSpec) -> Sketch {
        self.0.graph.inputs.push(argument);
        self.0.signature.inputs.push(spec);
        self
    }

    pub(crate) fn buffer(self, name: &str, dtype: DType, sizes: &[&str]) -> Sketch {
        let spec = InputSpec::Buffer { value: name.into(), name: name.into(), persistent: true };
        self.given(t(name), spec).tensor(name, form(dtype, sizes, None, "0"))
    }

    /// A node whose name is that of its first result; `target` below `torch.ops.aten`.
    pub(crate) fn node(self, results: &[&str], target: &str, arguments: &[(&str, Argument)]) -> Sketch {
        self.node_of(results.iter().map(|name| t(name)).collect(), &format!("torch.ops.aten.{target}"), arguments)
    }

    pub(crate) fn node_of(mut self, outputs: Vec<Argument>, target: &str, arguments: &[(&str, Argument)]) -> Sketch {
        let inputs = arguments.iter().map(|(name, value)| NamedArgument { name: (*name).into(), value: value.clone() });
        let name = format!("n{}", self.0.graph.nodes.len());
        self.0.graph.nodes.push(Node { name, target: target.into(), inputs: inputs.collect(), outputs });
        self
    }

    /// A node with one row-major result.
    pub(crate) fn op(
        self,
        name: &str,
        dtype: DType,
        sizes: &[&str],
        target: &str,
        arguments: &[(&str, Argument)],
    ) -> Sketch {
        self.node(&[name], target, arguments).tensor(name, form(dtype, sizes, None, "0"))
    }

    pub(crate) fn sym(mut self, name: &str, value: &str) -> Sketch {
        self.0.graph.sym_ints.insert(name.into(), parse_expr(value).expect("an expression"));
        self
    }

    pub(crate) fn output(mut self, name: &str) -> Sketch {
        self.0.graph.outputs.push(t(name));
        self.0.signature.outputs.push(OutputSpec::User(t(name)));
        self
    }

    pub(crate) fn output_of(mut self, argument: Argument, spec: OutputSpec) -> Sketch {
        self.0.graph.outputs.push(argument);
        self.0.signature.outputs.push(spec);
        self
    }

    /// A guard on the size of the first dimension of the first input, which it calls `n`.
    pub(crate) fn guard(mut self, condition: &str) -> Sketch {
        let source = Source { name: "n".into(), input: 0, property: Property::Size(0) };
        let condition = parse_condition(condition).expect("a condition");
        self.0.guards.push(Guard { text: "n".into(), condition, sources: vec![source] });
        self
    }

    pub(crate) fn graph(&self) -> Result<Graph, Error> {
        Graph::new(&self.0)
    }

    /// The first error of building, verifying or running it on these inputs.
    pub(crate) fn error(&self, inputs: &[Item]) -> Error {
        let graph = match self.graph() {
            Ok(graph) => graph,
            Err(error) => return error,
        };
        if let Err(error) = graph.verify() {
            return error;
        }
        Interpreter::new(&graph, Precision::Rounded).run(inputs).expect_err("an error")
    }

    /// The same, where it is an operation's.
    pub(crate) fn op_error(&self, inputs: &[Item]) -> OpError {
        match self.error(inputs) {
            Error::Node { cause, .. } => cause,
            other => panic!("{other}"),
        }
    }

    /// The numbers of the results.
    pub(crate) fn run(&self, inputs: &[Item]) -> Vec<Vec<f64>> {
        let graph = self.graph().expect("a graph");
        graph.verify().expect("a graph that agrees");
        let results = Interpreter::new(&graph, Precision::Rounded).run(inputs).expect("a run");
        results.iter().map(numbers).collect()
    }
}

pub(crate) fn numbers(item: &Item) -> Vec<f64> {
    match item {
        Item::Tensor(tensor) => tensor.floats(),
        Item::Int(n) => vec![*n as f64],
        other => panic!("{other:?}"),
    }
}

/// A row-major tensor of floats.
pub(crate) fn floats(dtype: DType, shape: &[i64], values: &[f64]) -> Tensor {
    Tensor::new(Meta::contiguous(dtype, shape), Cells::Float(values.to_vec()))
}

/// A row-major tensor of integers.
pub(crate) fn integers(dtype: DType, shape: &[i64], values: &[i64]) -> Tensor {
    Tensor::new(Meta::contiguous(dtype, shape), Cells::Int(values.to_vec()))
}

/// A tensor of the numbers from 0.
pub(crate) fn counting(dtype: DType, shape: &[i64]) -> Item {
    let count: i64 = shape.iter().product();
    Item::Tensor(match dtype {
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 => {
            floats(dtype, shape, &(0..count).map(|n| n as f64).collect::<Vec<_>>())
        }
        _ => integers(dtype, shape, &(0..count).collect::<Vec<_>>()),
    })
}
