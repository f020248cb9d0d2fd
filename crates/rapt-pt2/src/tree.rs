//! How a program is called and what it returns: the pytrees of `in_spec` and `out_spec`.
//!
//! PyTorch flattens the arguments of a call, `(args, kwargs)`, and builds the result from a flat list. A [`Tree`] says how:
//! its leaves, from left to right, are the user inputs or outputs of the graph. Containers of types that are not Python's
//! own keep their name and the names of their fields, so that a binding can build them or something like them.

use serde::Deserialize;
use serde_json::Value;

use crate::Error;
use crate::schema::{ModuleCallSignature, NamedTupleDef, Table};

/// The longest description of a tree that is read, in bytes.
const MAX_SPEC_BYTES: usize = 1 << 22;

/// The most leaves of all arguments, and of the result: guards look inputs up by walking the tree.
const MAX_LEAVES: usize = 1 << 12;

/// How a model is called, and what it returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The positional arguments as they were given at export, with their names in `forward` where these are known. The
    /// arguments of `*args` are named `args_0`, `args_1`, ….
    pub positional: Vec<(Option<String>, Tree)>,
    /// The keyword arguments, in the order of their leaves.
    pub keyword: Vec<(String, Tree)>,
    /// The result.
    pub output: Tree,
}

/// A tree of containers.
#[derive(Clone, Debug, PartialEq)]
pub enum Tree {
    /// One value.
    Leaf,
    /// A container of trees.
    Node(Kind, Vec<Tree>),
}

/// What a container is.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// `tuple`
    Tuple,
    /// `list`
    List,
    /// `collections.deque`, with its greatest length.
    Deque(Option<u64>),
    /// `dict`, `collections.OrderedDict` or `collections.defaultdict`, by name, with one key for each child.
    Dict(&'static str, Vec<Key>),
    /// A named tuple.
    NamedTuple {
        /// The name that its type was registered by.
        type_name: String,
        /// The names of the children.
        fields: Vec<String>,
    },
    /// A dataclass, a model output or a cache: a type that is registered with names for its children.
    Object {
        /// The name that the type was registered by.
        type_name: String,
        /// The names of the children.
        fields: Vec<String>,
        /// The fields that were `None`.
        absent: Vec<String>,
    },
    /// A registered type of which only the number of children is known.
    Opaque {
        /// The name that the type was registered by.
        type_name: String,
    },
}

/// A key of a dictionary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// A text.
    Text(String),
    /// An integer.
    Int(i64),
}

/// A step from a container to a child, as guards write it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step<'a> {
    /// `['name']`
    Text(&'a str),
    /// `[0]`
    Int(i64),
    /// `.name`
    Attribute(&'a str),
}

#[derive(Deserialize)]
struct Spec {
    #[serde(rename = "type")]
    kind: Option<String>,
    context: Option<Value>,
    children_spec: Vec<Spec>,
}

impl Tree {
    /// The number of leaves.
    #[must_use]
    pub fn leaves(&self) -> usize {
        match self {
            Tree::Leaf => 1,
            Tree::Node(_, children) => children.iter().map(Tree::leaves).sum(),
        }
    }

    /// How leaf `number` is reached from this tree, in Python's notation: written behind `path`.
    pub fn path(&self, mut number: usize, path: &mut String) {
        let Tree::Node(kind, children) = self else { return };
        for (i, child) in children.iter().enumerate() {
            let leaves = child.leaves();
            if number >= leaves {
                number -= leaves;
                continue;
            }
            path.push_str(&match kind {
                Kind::Dict(_, keys) => match &keys[i] {
                    Key::Text(key) => format!("['{key}']"),
                    Key::Int(key) => format!("[{key}]"),
                },
                Kind::NamedTuple { fields, .. } | Kind::Object { fields, .. } => format!(".{}", fields[i]),
                _ => format!("[{i}]"),
            });
            return child.path(number, path);
        }
    }

    /// The number of the leaf that `steps` lead to.
    fn leaf(&self, steps: &[Step<'_>]) -> Option<usize> {
        let Tree::Node(kind, children) = self else { return steps.is_empty().then_some(0) };
        let (step, rest) = steps.split_first()?;
        let named = |names: &[String], name: &str| names.iter().position(|field| field == name);
        let child = match (kind, step) {
            (Kind::Dict(_, keys), Step::Text(name)) => {
                keys.iter().position(|key| matches!(key, Key::Text(key) if key == name))?
            }
            (Kind::Dict(_, keys), Step::Int(number)) => keys.iter().position(|key| *key == Key::Int(*number))?,
            (Kind::NamedTuple { fields, .. } | Kind::Object { fields, .. }, Step::Attribute(name)) => {
                named(fields, name)?
            }
            (Kind::Object { fields, .. }, Step::Text(name)) => named(fields, name)?,
            (Kind::Dict(..), Step::Attribute(_)) | (_, Step::Attribute(_) | Step::Text(_)) => return None,
            (_, Step::Int(number)) => usize::try_from(*number).ok()?,
        };
        let before: usize = children.get(..child)?.iter().map(Tree::leaves).sum();
        Some(before + children.get(child)?.leaf(rest)?)
    }
}

impl Call {
    /// The number of leaves of all arguments.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.arguments().map(|(_, tree)| tree.leaves()).sum()
    }

    /// How user input `number` is reached from the arguments, such as `d['l'][1]`.
    #[must_use]
    pub fn input_path(&self, number: usize) -> String {
        let mut rest = number;
        for (i, (name, tree)) in self.arguments().enumerate() {
            if rest < tree.leaves() {
                let mut path = name.map_or_else(|| format!("args[{i}]"), str::to_owned);
                tree.path(rest, &mut path);
                return path;
            }
            rest -= tree.leaves();
        }
        format!("input {number}")
    }

    /// All arguments: the positional, then the keyword ones.
    fn arguments(&self) -> impl Iterator<Item = (Option<&str>, &Tree)> {
        let positional = self.positional.iter().map(|(name, tree)| (name.as_deref(), tree));
        positional.chain(self.keyword.iter().map(|(name, tree)| (Some(name.as_str()), tree)))
    }

    /// The user input that `steps` lead to from `L`, as guards write it: `['x']`, `['args'][0]`, `['flat_args'][3]`.
    pub(crate) fn leaf(&self, steps: &[Step<'_>]) -> Option<usize> {
        let (Step::Text(first), rest) = steps.split_first()? else { return None };
        if let ("flat_args", [Step::Int(number)]) = (*first, rest) {
            return usize::try_from(*number).ok().filter(|number| *number < self.inputs());
        }
        let find = |wanted: &str, rest: &[Step<'_>]| {
            let mut before = 0;
            for (name, tree) in self.arguments() {
                if name == Some(wanted) {
                    return Some(before + tree.leaf(rest)?);
                }
                before += tree.leaves();
            }
            None
        };
        match rest.split_first() {
            // An argument of `*args` is named `args_0` in the signature; one of `**kwargs` by itself.
            Some((Step::Int(number), deeper)) => {
                find(first, rest).or_else(|| find(&format!("{first}_{number}"), deeper))
            }
            Some((Step::Text(name), deeper)) => find(first, rest).or_else(|| find(name, deeper)),
            _ => find(first, rest),
        }
    }

    /// Reads the signature of the root module.
    pub(crate) fn read(signature: &ModuleCallSignature, named_tuples: &Table<NamedTupleDef>) -> Result<Call, Error> {
        let arguments = read_spec("in_spec", &signature.in_spec, named_tuples)?;
        let shape = || wrong("in_spec", "it is not a tuple of positional and a dictionary of keyword arguments");
        let Tree::Node(Kind::Tuple, mut parts) = arguments else { return Err(shape()) };
        let (Some(keyword), Some(positional), true) = (parts.pop(), parts.pop(), parts.is_empty()) else {
            return Err(shape());
        };
        let Tree::Node(Kind::Tuple, positional) = positional else { return Err(shape()) };
        let Tree::Node(Kind::Dict(_, keys), keyword) = keyword else { return Err(shape()) };
        let mut names = signature.forward_arg_names.iter().flatten();
        let positional = positional.into_iter().map(|tree| (names.next().cloned(), tree)).collect();
        let mut named = Vec::with_capacity(keyword.len());
        for (key, tree) in keys.into_iter().zip(keyword) {
            let Key::Text(name) = key else { return Err(shape()) };
            named.push((name, tree));
        }
        let output = read_spec("out_spec", &signature.out_spec, named_tuples)?;
        Ok(Call { positional, keyword: named, output })
    }
}

fn wrong(which: &'static str, reason: impl Into<String>) -> Error {
    Error::Tree { which, reason: reason.into() }
}

fn read_spec(which: &'static str, text: &str, named_tuples: &Table<NamedTupleDef>) -> Result<Tree, Error> {
    if text.len() > MAX_SPEC_BYTES {
        let what = format!("the length of {which} in bytes");
        return Err(Error::Limit { what, found: text.len() as u64, limit: MAX_SPEC_BYTES as u64 });
    }
    // serde_json stops at 128 levels of nesting, which bounds the tree's height.
    let (protocol, spec): (u64, Spec) = serde_json::from_str(text).map_err(|error| wrong(which, error.to_string()))?;
    if protocol != 1 {
        return Err(wrong(which, format!("protocol {protocol} is not known; 1 is")));
    }
    let tree = spec.tree(which, named_tuples)?;
    match tree.leaves() {
        leaves if leaves > MAX_LEAVES => {
            let what = format!("the number of values of {which}");
            Err(Error::Limit { what, found: leaves as u64, limit: MAX_LEAVES as u64 })
        }
        _ => Ok(tree),
    }
}

impl Spec {
    fn tree(self, which: &'static str, named_tuples: &Table<NamedTupleDef>) -> Result<Tree, Error> {
        let count = self.children_spec.len();
        let Some(type_name) = self.kind else {
            return match count {
                0 => Ok(Tree::Leaf),
                _ => Err(wrong(which, "a leaf has children")),
            };
        };
        let kind = kind(which, type_name, self.context, count, named_tuples)?;
        let children = self.children_spec.into_iter().map(|child| child.tree(which, named_tuples));
        Ok(Tree::Node(kind, children.collect::<Result<_, _>>()?))
    }
}

/// What the container named `type_name` with `count` children is.
fn kind(
    which: &'static str,
    type_name: String,
    context: Option<Value>,
    count: usize,
    named_tuples: &Table<NamedTupleDef>,
) -> Result<Kind, Error> {
    // Most contexts are JSON within a text.
    let inner = match &context {
        Some(Value::String(text)) => serde_json::from_str(text).unwrap_or(Value::Null),
        Some(value) => value.clone(),
        None => Value::Null,
    };
    let counted = |kind: Kind, names: usize| {
        if names == count { Ok(kind) } else { Err(wrong(which, format!("{names} keys for {count} children"))) }
    };
    let dict = |name: &'static str, keys: &Value| {
        let keys = keys.as_array().and_then(|keys| keys.iter().map(key).collect::<Option<Vec<Key>>>());
        let keys = keys.ok_or_else(|| wrong(which, format!("{name} has keys that are neither texts nor integers")))?;
        let names = keys.len();
        counted(Kind::Dict(name, keys), names)
    };
    match type_name.as_str() {
        "builtins.tuple" => Ok(Kind::Tuple),
        "builtins.list" => Ok(Kind::List),
        "collections.deque" => Ok(Kind::Deque(inner.as_u64())),
        "builtins.dict" => dict("dict", &inner),
        "collections.OrderedDict" => dict("collections.OrderedDict", &inner),
        "collections.defaultdict" => dict("collections.defaultdict", inner.get("dict_context").unwrap_or(&Value::Null)),
        "collections.namedtuple" => {
            let Some(Value::String(type_name)) = context else {
                return Err(wrong(which, "a named tuple without a type"));
            };
            let Some(def) = named_tuples.0.get(&type_name) else {
                return Err(wrong(
                    which,
                    format!("named tuple {type_name:?} has no entry in treespec_namedtuple_fields"),
                ));
            };
            counted(Kind::NamedTuple { type_name, fields: def.field_names.clone() }, def.field_names.len())
        }
        _ => {
            // Dataclasses write [fields, fields that are None]; model outputs and caches write [fields].
            let (fields, absent) = match inner.as_array().map(Vec::as_slice) {
                Some([fields @ Value::Array(_), absent @ Value::Array(_)]) => (texts(fields), texts(absent)),
                Some(_) => (texts(&inner), Some(Vec::new())),
                None => (None, None),
            };
            match (fields, absent) {
                (Some(fields), Some(absent)) if fields.len() == count => Ok(Kind::Object { type_name, fields, absent }),
                _ => Ok(Kind::Opaque { type_name }),
            }
        }
    }
}

fn key(value: &Value) -> Option<Key> {
    match value {
        Value::String(text) => Some(Key::Text(text.clone())),
        value => value.as_i64().map(Key::Int),
    }
}

fn texts(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
}
