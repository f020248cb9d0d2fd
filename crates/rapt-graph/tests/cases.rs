//! Operators against torch: each line of `cases/cases.jsonl`, which `cases/make.py` writes, through `read`, `infer`, `eval`.
//!
//! Dtypes, shapes and strides must be those that torch records; integers equal; floats the same after rounding, but for one
//! step of their dtype (f64: a few, since torch sums in another order). What torch refuses must be an error here.
//! `RAPT_GRAPH_CASES` names another file of such lines.

use std::collections::BTreeMap;
use std::fmt::Write;

use rapt_core::DType;
use rapt_graph::{Args, Cells, Eval, Int, Meta, Op, OpError, Out, Precision, Shapes, Tensor, ValueId};
use rapt_pt2::{Argument, NamedArgument, Node};
use serde_json::Value;

struct Values(Vec<Tensor>);

impl Shapes for Values {
    fn meta(&self, id: ValueId) -> Result<&Meta, OpError> {
        Ok(&self.0[id.0 as usize].meta)
    }

    fn int(&self, int: Int) -> Result<i64, OpError> {
        match int {
            Int::Known(n) => Ok(n),
            Int::Value(id) => Err(OpError::NotAnInteger(id)),
        }
    }

    fn float(&self, id: ValueId) -> Result<f64, OpError> {
        Err(OpError::NotAFloat(id))
    }

    fn bool(&self, id: ValueId) -> Result<bool, OpError> {
        Err(OpError::NotABool(id))
    }
}

impl Eval for Values {
    fn tensor(&self, id: ValueId) -> Result<&Tensor, OpError> {
        Ok(&self.0[id.0 as usize])
    }

    fn precision(&self) -> Precision {
        Precision::Rounded
    }
}

fn ints(value: &Value) -> Vec<i64> {
    value.as_array().expect("a list").iter().map(|n| n.as_i64().expect("an integer")).collect()
}

fn number(value: &Value) -> f64 {
    match value {
        Value::String(text) => text.parse().expect("a number"),
        value => value.as_f64().expect("a number"),
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// The form that a tensor is written with: dtype, shape, strides unless row-major, offset unless 0.
fn form(value: &Value) -> Meta {
    let dtype = DType::from_name(value["t"].as_str().expect("a dtype")).expect("a dtype");
    let mut meta = Meta::contiguous(dtype, &ints(&value["s"]));
    if let Some(strides) = value.get("d") {
        meta.strides = ints(strides);
    }
    meta.offset = value.get("o").map_or(0, |o| o.as_i64().expect("an offset"));
    meta
}

/// A tensor: its storage's numbers are written out, or follow from a seed.
fn tensor(value: &Value) -> Tensor {
    let meta = form(value);
    let len = value["n"].as_i64().expect("a length");
    let raw = |seed: i64, i: i64| (i * 37 + seed * 101) % 61 - 30;
    let cells = match value.get("seed").map(|seed| seed.as_i64().expect("a seed")) {
        Some(seed) if is_float(meta.dtype) => Cells::Float((0..len).map(|i| raw(seed, i) as f64 / 8.0).collect()),
        Some(seed) if meta.dtype == DType::Bool => {
            Cells::Int((0..len).map(|i| i64::from(raw(seed, i) % 3 == 0)).collect())
        }
        Some(seed) => Cells::Int((0..len).map(|i| raw(seed, i)).collect()),
        None if is_float(meta.dtype) => {
            Cells::Float(value["x"].as_array().expect("numbers").iter().map(number).collect())
        }
        None => Cells::Int(ints(&value["x"])),
    };
    Tensor::new(meta, cells)
}

/// An argument, with its tensors entered among the values.
fn argument(value: &Value, values: &mut Vec<Tensor>) -> Argument {
    let mut enter = |value: &Value| {
        values.push(tensor(value));
        (values.len() - 1).to_string()
    };
    match value {
        Value::Null => Argument::None,
        Value::Bool(b) => Argument::Bool(*b),
        Value::Number(n) => n.as_i64().map_or_else(|| Argument::Float(number(value)), Argument::Int),
        Value::String(_) => Argument::Float(number(value)),
        Value::Object(object) if object.contains_key("t") => Argument::Tensor(enter(value)),
        Value::Object(object) => match (object.get("str"), object.get("dtype")) {
            (Some(text), _) => Argument::String(text.as_str().expect("a text").into()),
            (_, dtype) => {
                let name = dtype.and_then(Value::as_str).expect("a dtype");
                Argument::Dtype(DType::from_name(name).expect("a dtype"))
            }
        },
        Value::Array(list) if list.iter().any(Value::is_object) => {
            if list.iter().any(Value::is_null) {
                Argument::OptionalTensors(list.iter().map(|t| (!t.is_null()).then(|| enter(t))).collect())
            } else {
                Argument::Tensors(list.iter().map(enter).collect())
            }
        }
        Value::Array(list) if list.iter().any(Value::is_f64) => Argument::Floats(list.iter().map(number).collect()),
        Value::Array(_) => Argument::Ints(ints(value)),
    }
}

/// The results of a line, or why there are none.
fn run(line: &Value) -> Result<Vec<Tensor>, OpError> {
    let mut values = Vec::new();
    let inputs = line["in"].as_object().expect("arguments");
    let inputs: Vec<NamedArgument> = inputs
        .iter()
        .map(|(name, value)| NamedArgument { name: name.clone(), value: argument(value, &mut values) })
        .collect();
    let target = format!("torch.ops.{}", line["op"].as_str().expect("an operator"));
    let node = Node { name: "node".into(), target: target.clone(), inputs, outputs: Vec::new() };
    let find = |name: &str| name.parse().ok().map(ValueId);
    let op = Op::read(&target, &Args::new(&node, &find)).unwrap_or_else(|| panic!("{target} is not served"))?;
    let values = Values(values);
    let outs: Vec<Tensor> = op
        .infer(&values)?
        .into_iter()
        .map(|out| match out {
            Out::Fresh(meta) => Tensor::zeros(meta),
            Out::View { of, meta } => values.0[of.0 as usize].view(meta),
            Out::Same(of) => {
                assert_eq!(op.mutates(), Some(of), "what is returned is what is written to");
                values.0[of.0 as usize].clone()
            }
            out => panic!("{out:?} is no tensor"),
        })
        .collect();
    let before: Vec<Cells> = values.0.iter().map(Tensor::storage).collect();
    op.eval(&values, &outs)?;
    for (i, (tensor, before)) in values.0.iter().zip(before).enumerate() {
        if op.mutates() != u32::try_from(i).ok().map(ValueId) {
            // NaN is unequal to itself, so the texts are compared.
            assert_eq!(format!("{:?}", tensor.storage()), format!("{before:?}"), "an operand was written to");
        }
    }
    Ok(outs)
}

/// The distance of a number from its neighbours in a dtype.
fn spacing(dtype: DType, x: f64) -> f64 {
    let (digits, least) = match dtype {
        DType::F32 => (23, -149),
        DType::F16 => (10, -24),
        DType::BF16 => (7, -133),
        _ => (52, -1074),
    };
    if x == 0.0 { 2f64.powi(least) } else { 2f64.powi((x.abs().log2().floor() as i32 - digits).max(least)) }
}

/// What differs between a result and torch's.
fn difference(got: &Tensor, expected: &Value) -> Option<String> {
    let form = form(expected);
    // PyTorch's fake tensors say nothing of where a result starts.
    let mut meta = got.meta.clone();
    meta.offset = 0;
    if !meta.agrees(&form) {
        return Some(format!("form {} is not {form}", got.meta));
    }
    let numbers: Vec<f64> = expected["x"].as_array().expect("numbers").iter().map(number).collect();
    if !is_float(form.dtype) {
        let (got, expected) = (got.ints(), ints(&expected["x"]));
        return (got != expected).then(|| format!("{got:?} is not {expected:?}"));
    }
    let got = got.floats();
    let largest = numbers.iter().filter(|x| x.is_finite()).fold(0.0f64, |a, x| a.max(x.abs()));
    let close = |(&a, &b): (&f64, &f64)| {
        let steps =
            if form.dtype == DType::F64 { 8.0 * spacing(DType::F64, largest) } else { 1.01 * spacing(form.dtype, b) };
        // A cancelled sum keeps the rounding of its parts, in f64.
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= steps.max(1e-15 * largest)
    };
    let same = got.len() == numbers.len() && got.iter().zip(&numbers).all(close);
    (!same).then(|| format!("{got:?} is not {numbers:?}"))
}

#[test]
fn operators_give_what_torch_gives() {
    let mut failures = String::new();
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let text = match std::env::var("RAPT_GRAPH_CASES") {
        Ok(path) => std::fs::read_to_string(path).expect("a file of cases"),
        Err(_) => include_str!("cases/cases.jsonl").to_owned(),
    };
    for (number, line) in text.lines().enumerate() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let op = line["op"].as_str().expect("an operator").to_owned();
        let mut fail = |why: String| {
            let _ = writeln!(failures, "line {}: {op}({}): {why}", number + 1, line["in"]);
        };
        match (std::panic::catch_unwind(|| run(&line)), line.get("error")) {
            (Err(_), _) => fail("a panic".into()),
            (Ok(Err(_)), Some(_)) => {}
            (Ok(Ok(_)), Some(error)) => fail(format!("a result, where torch says {error}")),
            (Ok(Err(error)), None) => fail(error.to_string()),
            (Ok(Ok(outs)), None) => {
                let expected = line["out"].as_array().expect("results");
                if outs.len() != expected.len() {
                    fail(format!("{} results instead of {}", outs.len(), expected.len()));
                }
                for (out, expected) in outs.iter().zip(expected) {
                    if let Some(why) = difference(out, expected) {
                        fail(why);
                    }
                }
            }
        }
        *seen.entry(op).or_default() += 1;
    }
    let count = failures.lines().count();
    assert!(failures.is_empty(), "{count} of {} cases fail:\n{failures}", seen.values().sum::<usize>());
    assert!(seen.len() > 80, "only {} operators have cases", seen.len());
}
