//! Small programs, written as torch writes them: one node each, with inputs, a buffer, symbols and guards.

use std::fmt::Write as _;

use engine::DType;

/// A tensor of a program: its name, its dtype and its sizes; a negative size is the symbol `s0`, and stands first.
#[derive(Clone)]
pub(crate) struct Value {
    pub(crate) name: &'static str,
    pub(crate) dtype: DType,
    pub(crate) sizes: Vec<i64>,
}

/// A program of one node.
pub(crate) struct Program {
    pub(crate) target: &'static str,
    /// The inputs, each with the name of the argument that it is.
    pub(crate) inputs: Vec<(&'static str, Value)>,
    /// The integers that follow the first tensor, by the names of their arguments.
    pub(crate) integers: Vec<(&'static str, i64)>,
    /// A buffer with its bytes, and the name of the argument that it is.
    pub(crate) buffer: Option<(&'static str, Value, Vec<u8>)>,
    pub(crate) output: Value,
    /// A second result, as of a sort.
    pub(crate) second: Option<Value>,
    pub(crate) guard: Option<&'static str>,
}

pub(crate) fn value(name: &'static str, dtype: DType, sizes: &[i64]) -> Value {
    Value { name, dtype, sizes: sizes.to_vec() }
}

/// `y = clone(x)` on three elements.
pub(crate) fn clone_of(dtype: DType) -> Program {
    Program {
        target: "torch.ops.aten.clone.default",
        inputs: vec![("self", value("x", dtype, &[3]))],
        integers: vec![],
        buffer: None,
        output: value("y", dtype, &[3]),
        second: None,
        guard: None,
    }
}

/// `y = a op b` on three elements each.
pub(crate) fn binary(target: &'static str, dtype: DType) -> Program {
    Program {
        target,
        inputs: vec![("self", value("a", dtype, &[3])), ("other", value("b", dtype, &[3]))],
        integers: vec![],
        buffer: None,
        output: value("y", dtype, &[3]),
        second: None,
        guard: None,
    }
}

/// `a.copy_(b)`: the program writes its first input.
pub(crate) fn copy(dtype: DType) -> Program {
    let mut program = binary("torch.ops.aten.copy_.default", dtype);
    program.inputs[1].0 = "src";
    program
}

/// `total += x`, with the buffer `total` of three zeros.
pub(crate) fn counter(dtype: DType) -> Program {
    Program {
        target: "torch.ops.aten.add_.Tensor",
        inputs: vec![("other", value("x", dtype, &[3]))],
        integers: vec![],
        buffer: Some(("self", value("total", dtype, &[3]), vec![0; 3 * dtype.size_bytes()])),
        output: value("y", dtype, &[3]),
        second: None,
        guard: None,
    }
}

/// `y = -x` with x of [s0, 2], where s0 is even.
pub(crate) fn even_rows() -> Program {
    Program {
        target: "torch.ops.aten.neg.default",
        inputs: vec![("self", value("x", DType::F32, &[-1, 2]))],
        integers: vec![],
        buffer: None,
        output: value("y", DType::F32, &[-1, 2]),
        second: None,
        guard: Some("L['x'].size()[0] % 2 == 0"),
    }
}

impl Value {
    fn meta(&self) -> String {
        let number = |n: i64| format!(r#"{{"as_int": {n}}}"#);
        let size = |&n: &i64| match n {
            ..0 => r#"{"as_expr": {"expr_str": "Symbol('s0')", "hint": {"as_int": 4}}}"#.to_owned(),
            n => number(n),
        };
        let sizes: Vec<String> = self.sizes.iter().map(size).collect();
        let strides = (0..self.sizes.len()).map(|dim| number(self.sizes[dim + 1..].iter().product()));
        format!(
            r#"{{"dtype": {}, "sizes": [{}], "requires_grad": false, "device": {{"type": "cpu", "index": null}},
            "strides": [{}], "storage_offset": {{"as_int": 0}}, "layout": 7}}"#,
            self.dtype.code(),
            sizes.join(", "),
            strides.collect::<Vec<_>>().join(", ")
        )
    }

    fn argument(&self) -> String {
        format!(r#"{{"as_tensor": {{"name": "{}"}}}}"#, self.name)
    }
}

impl Program {
    /// The text of `models/model.json`.
    pub(crate) fn json(&self) -> String {
        let list = |parts: Vec<String>| parts.join(", ");
        let buffer = || self.buffer.iter().map(|(argument, value, _)| (*argument, value));
        let inputs = || self.inputs.iter().map(|(argument, value)| (*argument, value));
        // The graph has what the archive holds before what the caller gives.
        let all = || buffer().chain(inputs());
        // The operator's `self` comes first in its schema.
        let (first, rest): (Vec<_>, Vec<_>) = all().partition(|(argument, _)| *argument == "self");
        let argument =
            |(name, value): (&str, &Value)| format!(r#"{{"name": "{name}", "arg": {}, "kind": 1}}"#, value.argument());
        let integers = self
            .integers
            .iter()
            .map(|(name, n)| format!(r#"{{"name": "{name}", "arg": {{"as_int": {n}}}, "kind": 1}}"#));
        let arguments =
            list(first.into_iter().map(argument).chain(integers).chain(rest.into_iter().map(argument)).collect());
        let results = || [&self.output].into_iter().chain(&self.second);
        let meta = |value: &Value| format!(r#""{}": {}"#, value.name, value.meta());
        let metas = list(all().map(|(_, value)| meta(value)).chain(results().map(meta)).collect());
        let held = |(_, value): (&str, &Value)| {
            format!(
                r#"{{"buffer": {{"arg": {{"name": "{0}"}}, "buffer_name": "{0}", "persistent": true}}}}"#,
                value.name
            )
        };
        let given = |(_, value): (&str, &Value)| format!(r#"{{"user_input": {{"arg": {}}}}}"#, value.argument());
        let specs = list(buffer().map(held).chain(inputs().map(given)).collect());
        let leaf = r#"{\"type\": null, \"context\": null, \"children_spec\": []}"#;
        let leaves = list(vec![leaf.to_owned(); self.inputs.len()]);
        let results = || results().map(Value::argument);
        let specs_out = list(results().map(|result| format!(r#"{{"user_output": {{"arg": {result}}}}}"#)).collect());
        let tree = match self.second {
            None => format!("[1, {leaf}]"),
            Some(_) => {
                format!(
                    r#"[1, {{\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": [{leaf}, {leaf}]}}]"#
                )
            }
        };
        let names = list(inputs().map(|(_, value)| format!(r#""{}""#, value.name)).collect());
        let graph_inputs = list(all().map(|(_, value)| value.argument()).collect());
        let guards = self.guard.map_or(String::new(), |guard| format!(r#""{guard}""#));
        format!(
            r#"{{"graph_module": {{"graph": {{
                "inputs": [{graph_inputs}], "outputs": [{results}],
                "nodes": [{{"target": "{target}", "name": "{name}", "inputs": [{arguments}], "outputs": [{results}], "metadata": {{}}}}],
                "tensor_values": {{{metas}}}, "sym_int_values": {{}}, "sym_bool_values": {{}}, "sym_float_values": {{}}}},
              "signature": {{"input_specs": [{specs}], "output_specs": [{specs_out}]}},
              "module_call_graph": [{{"fqn": "", "signature": {{"inputs": [], "outputs": [],
                "in_spec": "[1, {{\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": [{{\"type\": \"builtins.tuple\", \"context\": \"null\", \"children_spec\": [{leaves}]}}, {{\"type\": \"builtins.dict\", \"context\": \"[]\", \"children_spec\": []}}]}}]",
                "out_spec": "{tree}", "forward_arg_names": [{names}]}}}}],
              "metadata": {{}}, "treespec_namedtuple_fields": {{}}}},
              "opset_version": {{"aten": 10}}, "range_constraints": {{"s0": {{"min_val": 2, "max_val": 8}}}},
              "schema_version": {{"major": 8, "minor": 20}}, "verifiers": ["TRAINING"], "torch_version": "2.15.0",
              "guards_code": [{guards}]}}"#,
            results = list(results().collect()),
            name = self.output.name,
            target = self.target,
        )
    }

    /// The whole archive.
    pub(crate) fn archive(&self) -> Vec<u8> {
        self.archive_of(&self.json())
    }

    /// The whole archive with another program in it.
    pub(crate) fn archive_of(&self, json: &str) -> Vec<u8> {
        let mut config = String::new();
        if let Some((_, value, _)) = &self.buffer {
            write!(
                config,
                r#""{}": {{"path_name": "weight_0", "is_param": false, "use_pickle": false, "tensor_meta": {}}}"#,
                value.name,
                value.meta()
            )
            .expect("a text");
        }
        let config = format!(r#"{{"config": {{{config}}}}}"#);
        let mut entries: Vec<(&str, &[u8])> = vec![
            ("m/data/weights/model_weights_config.json", config.as_bytes()),
            ("m/data/constants/model_constants_config.json", br#"{"config": {}}"#),
            ("m/models/model.json", json.as_bytes()),
            ("m/archive_format", b"pt2"),
            ("m/archive_version", b"0"),
            ("m/byteorder", b"little"),
        ];
        if let Some((_, _, bytes)) = &self.buffer {
            entries.push(("m/data/weights/weight_0", bytes));
        }
        zip(&entries)
    }
}

fn little(bytes: &mut Vec<u8>, numbers: &[(u64, usize)]) {
    for (number, count) in numbers {
        bytes.extend_from_slice(&number.to_le_bytes()[..*count]);
    }
}

/// A zip file of stored entries.
fn zip(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, content) in entries {
        let (place, size, crc) = (bytes.len() as u64, content.len() as u64, crc32(content).into());
        // Version 2.0, no flags, stored, no time; checksum, two sizes, the length of the name, no extra field.
        let header = [(20, 2), (0, 2), (0, 2), (0, 4), (crc, 4), (size, 4), (size, 4), (name.len() as u64, 2), (0, 2)];
        little(&mut bytes, &[(0x0403_4b50, 4)]);
        little(&mut bytes, &header);
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(content);
        little(&mut directory, &[(0x0201_4b50, 4), (20, 2)]);
        little(&mut directory, &header);
        little(&mut directory, &[(0, 2), (0, 2), (0, 2), (0, 4), (place, 4)]);
        directory.extend_from_slice(name.as_bytes());
    }
    let (count, start) = (entries.len() as u64, bytes.len() as u64);
    bytes.extend_from_slice(&directory);
    little(
        &mut bytes,
        &[(0x0605_4b50, 4), (0, 4), (count, 2), (count, 2), (directory.len() as u64, 4), (start, 4), (0, 2)],
    );
    bytes
}

/// CRC-32 as zip has it, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    })
}
