//! From the schema to a [`Program`]: names resolved, expressions parsed, codes read, and what contradicts itself refused.
//!
//! ```text
//! bytes ─ serde ─► schema types ─ this file ─► Program
//! ```
//!
//! Memory: the schema types and the program together take at most [`MEMORY_MULTIPLE`](crate::MEMORY_MULTIPLE) times the
//! JSON's bytes.

use std::collections::{BTreeMap, BTreeSet};

use rapt_core::DType;
use serde::de::DeserializeOwned;

use crate::effects;
use crate::guard::Inputs;
use crate::inline;
use crate::lower;
use crate::schema::{self, Table};
use crate::{
    Argument, Call, Condition, Device, Error, Expr, Graph, Guard, InputSpec, MemoryFormat, NamedArgument, Node,
    OutputSpec, ParseError, Program, Real, Signature, SymInt, Symbol, TensorMeta,
};

/// The largest JSON that is read, in bytes. A program of 100 000 nodes takes some 100 MB.
const MAX_JSON_BYTES: usize = 1 << 29;
/// The least schema version that is read: torch 2.9, the first to keep raw weights.
const LEAST_VERSION: (u64, u64) = (8, 14);
/// The entry that messages name where no archive is read.
pub(crate) const MODEL_JSON: &str = "model.json";

/// The schema's code for strided tensors.
const STRIDED: i64 = 7;

/// `bytes` as a type of the schema. The place of an error is found by a second pass, which only errors pay for.
pub(crate) fn json<T: DeserializeOwned>(entry: &str, bytes: &[u8]) -> Result<T, Error> {
    if bytes.len() > MAX_JSON_BYTES {
        let what = format!("the length of {entry} in bytes");
        return Err(Error::Limit { what, found: bytes.len() as u64, limit: MAX_JSON_BYTES as u64 });
    }
    serde_json::from_slice(bytes).map_err(|error| {
        let mut deserializer = serde_json::Deserializer::from_slice(bytes);
        let again: Result<T, _> = serde_path_to_error::deserialize(&mut deserializer);
        let path = again.err().map_or_else(|| "its end".to_owned(), |found| found.path().to_string());
        Error::Json { entry: entry.to_owned(), path, reason: error.to_string() }
    })
}

impl Program {
    /// Reads a program in the JSON of `torch._export.serde`: the content of `models/model.json`, or what
    /// `torch._export.serde.serialize.serialize(program).exported_program` gives.
    ///
    /// # Errors
    /// [`Error`] for JSON that is not of a served schema version, contradicts itself, or uses forms that are not served.
    pub fn from_json(bytes: &[u8]) -> Result<Program, Error> {
        Program::from_entry(MODEL_JSON, bytes)
    }

    /// Reads the program in the archive's entry of that name.
    pub(crate) fn from_entry(entry: &str, bytes: &[u8]) -> Result<Program, Error> {
        // Where the JSON itself is broken, the whole program's types say better where.
        let versions: schema::Versions =
            json(entry, bytes).map_err(|error| json::<schema::ExportedProgram>(entry, bytes).err().unwrap_or(error))?;
        let schema::SchemaVersion { major, minor } = versions.schema_version;
        if major != LEAST_VERSION.0 || minor < LEAST_VERSION.1 {
            let torch = versions.torch_version.unwrap_or_else(|| "of unknown version".to_owned());
            return Err(Error::SchemaVersion { found: (major, minor), torch });
        }
        let program: schema::ExportedProgram = json(entry, bytes)?;
        let mut module = program.graph_module;
        let mut hints = BTreeMap::new();
        let mut nodes = inline::regions(module.graph);
        effects::without_tokens(&mut nodes, &mut module.signature);
        let graph = graph(nodes, &mut hints)?;
        let signature = signature(module.signature, &graph)?;
        let symbols = symbols(&graph, &program.range_constraints, &hints);
        let root = module.module_call_graph.into_iter().find(|entry| entry.fqn.is_empty());
        let call = root.and_then(|entry| entry.signature);
        let call = call.map(|call| Call::read(&call, &module.treespec_namedtuple_fields)).transpose()?;
        if let Some(call) = &call {
            check_call(call, &signature)?;
        }
        let guards = guards(program.guards_code.unwrap_or_default(), call.as_ref())?;
        let torch_version = program.torch_version.unwrap_or_default();
        let schema_version = (major as u32, u32::try_from(minor).unwrap_or(u32::MAX));
        Ok(Program { torch_version, schema_version, graph, signature, symbols, guards, call })
    }

    /// Checks the guards on the user inputs, in the order of the leaves of the call.
    ///
    /// # Errors
    /// [`GuardError`](crate::GuardError) for the first that does not hold.
    pub fn check_guards(&self, inputs: &[crate::InputValue<'_>]) -> Result<(), crate::GuardError> {
        self.guards.iter().try_for_each(|guard| guard.check(inputs))
    }
}

/// Fails unless the call has as many values as the signature.
fn check_call(call: &Call, signature: &Signature) -> Result<(), Error> {
    let user = |spec: &&InputSpec| matches!(spec, InputSpec::User(_) | InputSpec::Fixed { .. });
    let pairs = [
        ("inputs", call.inputs(), signature.inputs.iter().filter(user).count()),
        (
            "outputs",
            call.output.leaves(),
            signature.outputs.iter().filter(|spec| matches!(spec, OutputSpec::User(_))).count(),
        ),
    ];
    for (what, tree, specs) in pairs {
        if tree != specs {
            let reason = format!("{specs} user {what} in the signature, {tree} in the description of the call");
            return Err(Error::Signature { reason });
        }
    }
    Ok(())
}

fn guards(texts: Vec<String>, call: Option<&Call>) -> Result<Vec<Guard>, Error> {
    let Some(call) = call else {
        return match texts.into_iter().next() {
            None => Ok(Vec::new()),
            Some(text) => Err(Error::GuardSource { text, source_text: "L, but not how it is called".to_owned() }),
        };
    };
    let mut inputs = Inputs::new(call);
    texts.iter().map(|text| Guard::read(text, &mut inputs)).collect()
}

/// The symbols of `graph`, with their ranges and hints.
fn symbols(graph: &Graph, ranges: &Table<schema::RangeConstraint>, hints: &BTreeMap<String, i64>) -> Vec<Symbol> {
    let mut names = BTreeSet::new();
    let mut visit = |name: &str| {
        if !names.contains(name) {
            names.insert(name.to_owned());
        }
    };
    for meta in graph.tensors.values() {
        let numbers = meta.sizes.iter().chain(&meta.strides).chain([&meta.storage_offset]);
        numbers.for_each(|number| number.each_symbol(&mut |name| visit(name)));
    }
    graph.sym_ints.values().for_each(|expr| expr.each_symbol(&mut |name| visit(name)));
    graph.sym_bools.values().for_each(|condition| condition.each_symbol(&mut |name| visit(name)));
    graph.sym_floats.values().for_each(|real| real.each_symbol(&mut |name| visit(name)));
    let symbol = |name: String| {
        let range = ranges.0.get(&name);
        let hint = hints.get(&name).copied();
        Symbol {
            min: range.and_then(|range| range.min_val).unwrap_or(i64::MIN),
            max: range.and_then(|range| range.max_val),
            hint,
            name,
        }
    };
    names.into_iter().map(symbol).collect()
}

/// `int`, whose hint goes to `hints` if it is a symbol by itself.
fn sym_int(name: &str, int: schema::SymInt, hints: &mut BTreeMap<String, i64>) -> Result<Expr, Error> {
    let expr = match int {
        schema::SymInt::AsInt(number) => return Ok(Expr::Int(number)),
        schema::SymInt::AsExpr(expr) => expr,
    };
    let parsed = lower::parse_expr(&expr.expr_str).map_err(|cause| unparsed(name, cause))?;
    if let (Expr::Symbol(symbol), Some(schema::Hint::AsInt(hint))) = (&parsed, expr.hint)
        && !hints.contains_key(symbol)
    {
        hints.insert(symbol.clone(), hint);
    }
    Ok(parsed)
}

fn unparsed(name: &str, cause: ParseError) -> Error {
    Error::Expr { name: name.to_owned(), cause }
}

fn dtype(name: &str, code: i64) -> Result<DType, Error> {
    let known = u8::try_from(code).ok().and_then(|code| DType::from_code(code).ok());
    let known = known.filter(|dtype| *dtype != DType::Unknown);
    known.ok_or_else(|| Error::DtypeCode { name: name.to_owned(), code })
}

fn device(device: schema::Device) -> Device {
    Device { kind: device.kind, index: device.index }
}

/// The form of a tensor whose sizes are numbers or symbols.
pub(crate) fn tensor(name: &str, meta: schema::TensorMeta) -> Result<TensorMeta, Error> {
    tensor_with_hints(name, meta, &mut BTreeMap::new())
}

fn tensor_with_hints(
    name: &str,
    meta: schema::TensorMeta,
    hints: &mut BTreeMap<String, i64>,
) -> Result<TensorMeta, Error> {
    if meta.layout != STRIDED {
        return Err(Error::Layout { name: name.to_owned(), layout: meta.layout });
    }
    if meta.sizes.len() != meta.strides.len() {
        let reason = "it has not as many strides as sizes";
        return Err(Error::TensorMeta { name: name.to_owned(), reason });
    }
    let dtype = dtype(name, meta.dtype)?;
    let mut numbers = |numbers: Vec<schema::SymInt>| {
        numbers.into_iter().map(|number| sym_int(name, number, hints)).collect::<Result<Vec<Expr>, Error>>()
    };
    let (sizes, strides) = (numbers(meta.sizes)?, numbers(meta.strides)?);
    let storage_offset = sym_int(name, meta.storage_offset, hints)?;
    Ok(TensorMeta { dtype, sizes, strides, storage_offset, device: device(meta.device) })
}

/// Applies `read` to each value of `table`.
fn map<T, U>(table: Table<T>, mut read: impl FnMut(&str, T) -> Result<U, Error>) -> Result<BTreeMap<String, U>, Error> {
    table.0.into_iter().map(|(name, value)| read(&name, value).map(|value| (name, value))).collect()
}

fn graph(graph: schema::Graph, hints: &mut BTreeMap<String, i64>) -> Result<Graph, Error> {
    let tensors = map(graph.tensor_values, |name, meta| tensor_with_hints(name, meta, hints))?;
    let sym_ints = map(graph.sym_int_values, |name, int| sym_int(name, int, hints))?;
    let sym_bools = map(graph.sym_bool_values, |name, value| match value {
        schema::SymBool::AsBool(known) => Ok(Condition::Known(known)),
        schema::SymBool::AsExpr(expr) => lower::parse_condition(&expr.expr_str).map_err(|cause| unparsed(name, cause)),
    })?;
    let sym_floats = map(graph.sym_float_values, |name, value| match value {
        schema::SymFloat::AsFloat(number) => Ok(Real::Number(number.0.to_bits())),
        schema::SymFloat::AsExpr(expr) => lower::parse_real(&expr.expr_str).map_err(|cause| unparsed(name, cause)),
    })?;
    let all = |owner: &str, arguments: Vec<schema::Argument>| {
        arguments.into_iter().map(|value| argument(owner, value)).collect::<Result<Vec<Argument>, Error>>()
    };
    let mut read = Graph {
        inputs: all("the graph's inputs", graph.inputs)?,
        outputs: all("the graph's outputs", graph.outputs)?,
        nodes: Vec::with_capacity(graph.nodes.len()),
        tensors,
        sym_ints,
        sym_bools,
        sym_floats,
    };
    for (i, node) in graph.nodes.into_iter().enumerate() {
        let named = node.name.filter(|name| !name.is_empty());
        let owner = named.clone().unwrap_or_else(|| format!("node {i} ({})", node.target));
        let outputs = all(&owner, node.outputs)?;
        let first = outputs.iter().find_map(|value| names(value).next().map(str::to_owned));
        let inputs = node.inputs.into_iter().map(|input| {
            let value = argument(&owner, input.arg)?;
            Ok(NamedArgument { name: input.name, value })
        });
        let inputs = inputs.collect::<Result<Vec<NamedArgument>, Error>>()?;
        read.nodes.push(Node { name: named.or(first).unwrap_or(owner), target: node.target, inputs, outputs });
    }
    check_names(&read)?;
    Ok(read)
}

/// The argument of a node named `owner`.
fn argument(owner: &str, value: schema::Argument) -> Result<Argument, Error> {
    use schema::Argument as A;
    let code = |what, code| Error::UnknownCode { name: owner.to_owned(), what, code };
    let optional = |tensor| match tensor {
        schema::OptionalTensor::AsTensor(tensor) => Some(tensor.name),
        schema::OptionalTensor::AsNone(_) => None,
    };
    let int = |int| match int {
        schema::SymIntArgument::AsName(name) => SymInt::Name(name),
        schema::SymIntArgument::AsInt(number) => SymInt::Int(number),
    };
    Ok(match value {
        A::AsNone(_) => Argument::None,
        A::AsTensor(tensor) => Argument::Tensor(tensor.name),
        A::AsTensors(tensors) => Argument::Tensors(tensors.into_iter().map(|tensor| tensor.name).collect()),
        A::AsInt(number) => Argument::Int(number),
        A::AsInts(numbers) => Argument::Ints(numbers),
        A::AsFloat(number) => Argument::Float(number.0),
        A::AsFloats(numbers) => Argument::Floats(numbers.into_iter().map(|number| number.0).collect()),
        A::AsString(text) => Argument::String(text),
        A::AsStrings(texts) => Argument::Strings(texts),
        A::AsSymInt(value) => Argument::SymInt(int(value)),
        A::AsSymInts(values) => Argument::SymInts(values.into_iter().map(int).collect()),
        A::AsScalarType(code) => Argument::Dtype(dtype(owner, code)?),
        A::AsMemoryFormat(number) => Argument::MemoryFormat(match number {
            1 => MemoryFormat::Contiguous,
            2 => MemoryFormat::ChannelsLast,
            3 => MemoryFormat::ChannelsLast3d,
            4 => MemoryFormat::Preserve,
            _ => return Err(code("memory format", number)),
        }),
        A::AsLayout(number) => {
            let layout = u8::try_from(number).ok().filter(|layout| *layout <= 7);
            Argument::Layout(layout.ok_or_else(|| code("layout", number))?)
        }
        A::AsDevice(value) => Argument::Device(device(value)),
        A::AsBool(value) => Argument::Bool(value),
        A::AsBools(values) => Argument::Bools(values),
        A::AsSymBool(schema::SymBoolArgument::AsName(name)) => Argument::SymBool(name),
        A::AsSymBool(schema::SymBoolArgument::AsBool(value)) => Argument::Bool(value),
        A::AsSymFloat(schema::SymFloatArgument::AsName(name)) => Argument::SymFloat(name),
        A::AsSymFloat(schema::SymFloatArgument::AsFloat(number)) => Argument::Float(number.0),
        A::AsOptionalTensors(tensors) => Argument::OptionalTensors(tensors.into_iter().map(optional).collect()),
        A::AsOptionalTensor(tensor) => optional(tensor).map_or(Argument::None, Argument::Tensor),
        A::AsSymBools(_) => Argument::Other("as_sym_bools"),
        A::AsSymFloats(_) => Argument::Other("as_sym_floats"),
        A::AsGraph(_) => Argument::Other("as_graph"),
        A::AsCustomObj(_) => Argument::Other("as_custom_obj"),
        A::AsOperator(_) => Argument::Other("as_operator"),
        A::AsComplex(_) => Argument::Other("as_complex"),
        A::AsNestedTensors(_) => Argument::Other("as_nested_tensors"),
        A::AsIntLists(_) => Argument::Other("as_int_lists"),
        A::AsFloatLists(_) => Argument::Other("as_float_lists"),
        A::AsStringToArgument(_) => Argument::Other("as_string_to_argument"),
    })
}

/// The names of the graph's values in `argument`.
fn names(argument: &Argument) -> Box<dyn Iterator<Item = &str> + '_> {
    match argument {
        Argument::Tensor(name) | Argument::SymBool(name) | Argument::SymFloat(name) => {
            Box::new(std::iter::once(name.as_str()))
        }
        Argument::SymInt(SymInt::Name(name)) => Box::new(std::iter::once(name.as_str())),
        Argument::Tensors(names) => Box::new(names.iter().map(String::as_str)),
        Argument::OptionalTensors(names) => Box::new(names.iter().flatten().map(String::as_str)),
        Argument::SymInts(values) => Box::new(values.iter().filter_map(|value| match value {
            SymInt::Name(name) => Some(name.as_str()),
            SymInt::Int(_) => None,
        })),
        _ => Box::new(std::iter::empty()),
    }
}

/// Fails unless every name is defined once, before its first use, and has metadata of the kind it is used as.
fn check_names(graph: &Graph) -> Result<(), Error> {
    let mut defined: BTreeSet<&str> = BTreeSet::new();
    let fresh = |user: &str, value: &Argument, defined: &BTreeSet<&str>| match names(value)
        .find(|name| defined.contains(name))
    {
        Some(name) => Err(Error::Redefined { user: user.to_owned(), name: name.to_owned() }),
        None => check_kind(graph, user, value),
    };
    let usable = |user: &str, value: &Argument, defined: &BTreeSet<&str>| match names(value)
        .find(|name| !defined.contains(name))
    {
        Some(name) => Err(Error::Undefined { user: user.to_owned(), name: name.to_owned() }),
        None => check_kind(graph, user, value),
    };
    for input in &graph.inputs {
        fresh("the graph's inputs", input, &defined)?;
        defined.extend(names(input));
    }
    for node in &graph.nodes {
        for input in &node.inputs {
            usable(&node.name, &input.value, &defined)?;
        }
        for output in &node.outputs {
            fresh(&node.name, output, &defined)?;
            defined.extend(names(output));
        }
    }
    graph.outputs.iter().try_for_each(|output| usable("the graph's outputs", output, &defined))
}

/// Fails unless every name in `value` has metadata of its kind.
fn check_kind(graph: &Graph, user: &str, value: &Argument) -> Result<(), Error> {
    let (table, known): (_, &dyn Fn(&str) -> bool) = match value {
        Argument::SymInt(_) | Argument::SymInts(_) => ("sym_int_values", &|name| graph.sym_ints.contains_key(name)),
        Argument::SymBool(_) => ("sym_bool_values", &|name| graph.sym_bools.contains_key(name)),
        Argument::SymFloat(_) => ("sym_float_values", &|name| graph.sym_floats.contains_key(name)),
        _ => ("tensor_values", &|name| graph.tensors.contains_key(name)),
    };
    match names(value).find(|name| !known(name)) {
        Some(name) => Err(Error::NoMeta { user: user.to_owned(), name: name.to_owned(), table }),
        None => Ok(()),
    }
}

fn signature(signature: schema::GraphSignature, graph: &Graph) -> Result<Signature, Error> {
    let inputs = signature.input_specs.into_iter().map(input_spec).collect::<Result<Vec<InputSpec>, Error>>()?;
    let outputs = signature.output_specs.into_iter().map(output_spec).collect::<Result<Vec<OutputSpec>, Error>>()?;
    for (what, specs, values) in
        [("input", inputs.len(), graph.inputs.len()), ("output", outputs.len(), graph.outputs.len())]
    {
        if specs != values {
            let reason = format!("{specs} {what}s in the signature, {values} in the graph");
            return Err(Error::Signature { reason });
        }
    }
    for (i, (spec, input)) in inputs.iter().zip(&graph.inputs).enumerate() {
        let same = match spec {
            InputSpec::User(value) => same(value, input),
            // The graph has the constant itself in this place.
            InputSpec::Fixed { .. } => names(input).next().is_none(),
            InputSpec::Parameter { value, .. }
            | InputSpec::Buffer { value, .. }
            | InputSpec::Constant { value, .. } => {
                matches!(input, Argument::Tensor(name) if name == value)
            }
        };
        if !same {
            return Err(Error::Signature { reason: format!("input {i} is {spec:?} there and {input:?} here") });
        }
    }
    for (i, (spec, output)) in outputs.iter().zip(&graph.outputs).enumerate() {
        let same = match spec {
            OutputSpec::User(value) => same(value, output),
            OutputSpec::BufferMutation { value, .. } | OutputSpec::InputMutation { value, .. } => {
                matches!(output, Argument::Tensor(name) if name == value)
            }
        };
        if !same {
            return Err(Error::Signature { reason: format!("output {i} is {spec:?} there and {output:?} here") });
        }
    }
    check_mutations(&inputs, &outputs)?;
    Ok(Signature { inputs, outputs })
}

/// Whether the signature and the graph speak of the same value. NaN is the same as NaN.
fn same(spec: &Argument, value: &Argument) -> bool {
    match (spec, value) {
        (Argument::Float(a), Argument::Float(b)) => a.to_bits() == b.to_bits(),
        _ => spec == value,
    }
}

/// Fails unless what is mutated is an input.
fn check_mutations(inputs: &[InputSpec], outputs: &[OutputSpec]) -> Result<(), Error> {
    let mut states = BTreeSet::new();
    let mut users = BTreeSet::new();
    for input in inputs {
        match input {
            InputSpec::User(Argument::Tensor(value)) => drop(users.insert(value.as_str())),
            InputSpec::Parameter { name, .. } | InputSpec::Buffer { name, .. } | InputSpec::Constant { name, .. } => {
                states.insert(name.as_str());
            }
            _ => {}
        }
    }
    for output in outputs {
        let (found, name) = match output {
            OutputSpec::BufferMutation { name, .. } => (states.contains(name.as_str()), name),
            OutputSpec::InputMutation { input, .. } => (users.contains(input.as_str()), input),
            OutputSpec::User(_) => continue,
        };
        if !found {
            let reason = format!("an output mutates {name:?}, which is no input");
            return Err(Error::Signature { reason });
        }
    }
    Ok(())
}

fn input_spec(spec: schema::InputSpec) -> Result<InputSpec, Error> {
    use schema::ConstantValue as C;
    use schema::InputSpec as I;
    Ok(match spec {
        I::UserInput { arg } => InputSpec::User(argument("the signature's inputs", arg)?),
        I::Parameter { arg, parameter_name: name } => InputSpec::Parameter { value: arg.name, name },
        I::Buffer { arg, buffer_name: name, persistent } => InputSpec::Buffer { value: arg.name, name, persistent },
        I::TensorConstant { arg, tensor_constant_name: name } => InputSpec::Constant { value: arg.name, name },
        I::ConstantInput { name, value } => {
            let value = match value {
                C::AsNone(_) => Argument::None,
                C::AsInt(number) => Argument::Int(number),
                C::AsFloat(number) => Argument::Float(number.0),
                C::AsString(text) => Argument::String(text),
                C::AsBool(value) => Argument::Bool(value),
            };
            InputSpec::Fixed { name, value }
        }
        I::CustomObj { arg } => return Err(Error::InputKind { name: arg.name, kind: "custom_obj" }),
        I::Token { arg } => return Err(Error::InputKind { name: arg.name, kind: "token" }),
    })
}

fn output_spec(spec: schema::OutputSpec) -> Result<OutputSpec, Error> {
    use schema::OutputSpec as O;
    Ok(match spec {
        O::UserOutput { arg } => OutputSpec::User(argument("the signature's outputs", arg)?),
        O::BufferMutation { arg, buffer_name: name } | O::ParameterMutation { arg, parameter_name: name } => {
            OutputSpec::BufferMutation { value: arg.name, name }
        }
        O::UserInputMutation { arg, user_input_name: input } => OutputSpec::InputMutation { value: arg.name, input },
        O::LossOutput(_) => return Err(Error::Training { kind: "loss_output" }),
        O::GradientToParameter(_) => return Err(Error::Training { kind: "gradient_to_parameter" }),
        O::GradientToUserInput(_) => return Err(Error::Training { kind: "gradient_to_user_input" }),
        O::Token(_) => return Err(Error::Training { kind: "token" }),
    })
}
