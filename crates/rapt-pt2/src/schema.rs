//! `torch._export.serde.schema` as serde types: what a program and its payload tables are in JSON.
//!
//! Field for field the names of schema 8.20, of which a reader of inference programs needs these. The schema's rule for
//! compatible changes is followed: within one major version fields may be added, which are ignored here; a member that
//! a union does not have is an error, because its meaning is unknown. Floats that JSON has no number for are texts, and
//! integers stand where floats are meant: [`Float`] reads all.

// The members of the schema's unions all begin with `as_`.
#![allow(clippy::enum_variant_names)]

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, Visitor};

/// An object whose keys are names, each at most once.
#[derive(Debug)]
pub(crate) struct Table<T>(pub(crate) BTreeMap<String, T>);

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table(BTreeMap::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Table<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Table<T>, D::Error> {
        struct Names<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Names<T> {
            type Value = Table<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table<T>, A::Error> {
                let mut table = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, T>()? {
                    if table.contains_key(&name) {
                        return Err(A::Error::custom(format_args!("{name:?} occurs twice")));
                    }
                    table.insert(name, value);
                }
                Ok(Table(table))
            }
        }
        deserializer.deserialize_map(Names(std::marker::PhantomData))
    }
}

/// A float: a number, or `"Infinity"`, `"-Infinity"`, `"NaN"`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Float(pub(crate) f64);

impl<'de> Deserialize<'de> for Float {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Float, D::Error> {
        struct Number;
        impl Visitor<'_> for Number {
            type Value = Float;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number, \"Infinity\", \"-Infinity\" or \"NaN\"")
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Float, E> {
                Ok(Float(number))
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Float, E> {
                Ok(Float(number as f64))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Float, E> {
                Ok(Float(number as f64))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Float, E> {
                match text {
                    "Infinity" => Ok(Float(f64::INFINITY)),
                    "-Infinity" => Ok(Float(f64::NEG_INFINITY)),
                    "NaN" => Ok(Float(f64::NAN)),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
        }
        deserializer.deserialize_any(Number)
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct ExportedProgram {
    pub(crate) graph_module: GraphModule,
    #[serde(default)]
    pub(crate) range_constraints: Table<RangeConstraint>,
    #[serde(default)]
    pub(crate) torch_version: Option<String>,
    #[serde(default)]
    pub(crate) guards_code: Option<Vec<String>>,
}

/// What is read before the rest: an older program may differ in anything else.
#[derive(Debug, Deserialize)]
pub(crate) struct Versions {
    pub(crate) schema_version: SchemaVersion,
    #[serde(default)]
    pub(crate) torch_version: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct SchemaVersion {
    pub(crate) major: u64,
    pub(crate) minor: u64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RangeConstraint {
    pub(crate) min_val: Option<i64>,
    pub(crate) max_val: Option<i64>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct GraphModule {
    pub(crate) graph: Graph,
    pub(crate) signature: GraphSignature,
    #[serde(default)]
    pub(crate) module_call_graph: Vec<ModuleCallEntry>,
    #[serde(default)]
    pub(crate) treespec_namedtuple_fields: Table<NamedTupleDef>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct NamedTupleDef {
    pub(crate) field_names: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ModuleCallEntry {
    pub(crate) fqn: String,
    #[serde(default)]
    pub(crate) signature: Option<ModuleCallSignature>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ModuleCallSignature {
    pub(crate) in_spec: String,
    pub(crate) out_spec: String,
    #[serde(default)]
    pub(crate) forward_arg_names: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Graph {
    pub(crate) inputs: Vec<Argument>,
    pub(crate) outputs: Vec<Argument>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) tensor_values: Table<TensorMeta>,
    pub(crate) sym_int_values: Table<SymInt>,
    pub(crate) sym_bool_values: Table<SymBool>,
    #[serde(default)]
    pub(crate) sym_float_values: Table<SymFloat>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Node {
    pub(crate) target: String,
    pub(crate) inputs: Vec<NamedArgument>,
    pub(crate) outputs: Vec<Argument>,
    #[serde(default)]
    pub(crate) name: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct NamedArgument {
    pub(crate) name: String,
    pub(crate) arg: Argument,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Name {
    pub(crate) name: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OptionalTensor {
    AsTensor(Name),
    AsNone(IgnoredAny),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymIntArgument {
    AsName(String),
    AsInt(i64),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymFloatArgument {
    AsName(String),
    AsFloat(Float),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymBoolArgument {
    AsName(String),
    AsBool(bool),
}

/// The union of all that an operator takes and returns. Members that no served operator takes are not looked into.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Argument {
    AsNone(IgnoredAny),
    AsTensor(Name),
    AsTensors(Vec<Name>),
    AsInt(i64),
    AsInts(Vec<i64>),
    AsFloat(Float),
    AsFloats(Vec<Float>),
    AsString(String),
    AsStrings(Vec<String>),
    AsSymInt(SymIntArgument),
    AsSymInts(Vec<SymIntArgument>),
    AsScalarType(i64),
    AsMemoryFormat(i64),
    AsLayout(i64),
    AsDevice(Device),
    AsBool(bool),
    AsBools(Vec<bool>),
    AsSymBool(SymBoolArgument),
    AsSymBools(IgnoredAny),
    AsGraph(GraphArgument),
    AsOptionalTensors(Vec<OptionalTensor>),
    AsCustomObj(IgnoredAny),
    AsOperator(String),
    AsSymFloat(SymFloatArgument),
    AsSymFloats(IgnoredAny),
    AsOptionalTensor(OptionalTensor),
    AsComplex(IgnoredAny),
    AsNestedTensors(IgnoredAny),
    AsIntLists(IgnoredAny),
    AsStringToArgument(IgnoredAny),
    AsFloatLists(IgnoredAny),
}

#[derive(Debug, Deserialize)]
pub(crate) struct GraphArgument {
    pub(crate) graph: Box<Graph>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Device {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default)]
    pub(crate) index: Option<i64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Hint {
    AsInt(i64),
    AsBool(IgnoredAny),
    AsFloat(IgnoredAny),
}

#[derive(Debug, Deserialize)]
pub(crate) struct SymExpr {
    pub(crate) expr_str: String,
    #[serde(default)]
    pub(crate) hint: Option<Hint>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymInt {
    AsExpr(SymExpr),
    AsInt(i64),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymFloat {
    AsExpr(SymExpr),
    AsFloat(Float),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SymBool {
    AsExpr(SymExpr),
    AsBool(bool),
}

#[derive(Debug, Deserialize)]
pub(crate) struct TensorMeta {
    pub(crate) dtype: i64,
    pub(crate) sizes: Vec<SymInt>,
    pub(crate) device: Device,
    pub(crate) strides: Vec<SymInt>,
    pub(crate) storage_offset: SymInt,
    pub(crate) layout: i64,
}

#[derive(Debug, Deserialize)]
pub(crate) struct GraphSignature {
    pub(crate) input_specs: Vec<InputSpec>,
    pub(crate) output_specs: Vec<OutputSpec>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum InputSpec {
    UserInput { arg: Argument },
    Parameter { arg: Name, parameter_name: String },
    Buffer { arg: Name, buffer_name: String, persistent: bool },
    TensorConstant { arg: Name, tensor_constant_name: String },
    CustomObj { arg: Name },
    ConstantInput { name: String, value: ConstantValue },
    Token { arg: Name },
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ConstantValue {
    AsNone(IgnoredAny),
    AsInt(i64),
    AsFloat(Float),
    AsString(String),
    AsBool(bool),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OutputSpec {
    UserOutput { arg: Argument },
    LossOutput(IgnoredAny),
    BufferMutation { arg: Name, buffer_name: String },
    GradientToParameter(IgnoredAny),
    GradientToUserInput(IgnoredAny),
    UserInputMutation { arg: Name, user_input_name: String },
    Token(IgnoredAny),
    ParameterMutation { arg: Name, parameter_name: String },
}

#[derive(Debug, Deserialize)]
pub(crate) struct PayloadConfig {
    pub(crate) config: Table<PayloadMeta>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct PayloadMeta {
    pub(crate) path_name: String,
    pub(crate) is_param: bool,
    pub(crate) use_pickle: bool,
    #[serde(default)]
    pub(crate) tensor_meta: Option<TensorMeta>,
}
