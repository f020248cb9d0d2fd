//! Programs that contradict the schema or themselves, and JSON made to cost time or memory.

use crate::builder::{Builder, CONSTANTS, PROGRAM, WEIGHTS, outcome};

/// `expect` is what reading the program says after `from` was replaced by `to`, without line and column.
fn check(from: &str, to: &str, expect: &str) {
    assert!(PROGRAM.contains(from), "{from}");
    let said = outcome(Builder::of(&PROGRAM.replacen(from, to, 1), WEIGHTS).build());
    let place = said.rfind(" at line ").unwrap_or(said.len());
    assert_eq!(&said[..place], expect, "{from} → {to}");
}

/// The same of the table of weights.
fn check_weights(from: &str, to: &str, expect: &str) {
    assert!(WEIGHTS.contains(from), "{from}");
    assert_eq!(outcome(Builder::of(PROGRAM, &WEIGHTS.replacen(from, to, 1)).build()), expect, "{from} → {to}");
}

#[test]
fn errors_name_the_place_in_the_json() {
    check(
        r#"[{"name": "self", "arg": {"as_tensor": {"name": "x"}}"#,
        r#"[{"name": "self", "arg": {"as_future": {"name": "x"}}"#,
        "models/model.json, at graph_module.graph.nodes[0].inputs[0].arg: unknown variant `as_future`, expected one of \
         `as_none`, `as_tensor`, `as_tensors`, `as_int`, `as_ints`, `as_float`, `as_floats`, `as_string`, `as_strings`, \
         `as_sym_int`, `as_sym_ints`, `as_scalar_type`, `as_memory_format`, `as_layout`, `as_device`, `as_bool`, \
         `as_bools`, `as_sym_bool`, `as_sym_bools`, `as_graph`, `as_optional_tensors`, `as_custom_obj`, `as_operator`, \
         `as_sym_float`, `as_sym_floats`, `as_optional_tensor`, `as_complex`, `as_nested_tensors`, `as_int_lists`, \
         `as_string_to_argument`, `as_float_lists`",
    );
    check(
        r#""w": {"dtype": 7"#,
        r#""w": {"dtype": NaN"#,
        "models/model.json, at graph_module.graph.tensor_values.w.dtype: expected value",
    );
    check(
        r#""storage_offset": {"as_int": 0}"#,
        r#""storage_offset": {"as_int": 0.5}"#,
        "models/model.json, at graph_module.graph.tensor_values.w.storage_offset.as_int: invalid type: floating point \
         `0.5`, expected i64",
    );
    check(
        r#""storage_offset": {"as_int": 0}"#,
        r#""storage_offset": {"as_int": 99999999999999999999}"#,
        "models/model.json, at graph_module.graph.tensor_values.w.storage_offset.as_int: invalid type: floating point \
         `1e+20`, expected i64",
    );
    check(
        r#""storage_offset": {"as_int": 0}"#,
        r#""storage_offset": {"as_int": 0, "as_expr": {"expr_str": "s0"}}"#,
        "models/model.json, at graph_module.graph.tensor_values.w.storage_offset: expected value",
    );
}

#[test]
fn unknown_fields_are_ignored_as_the_schema_allows() {
    check(r#""kind": 1"#, r#""kind": 1, "since_8_21": {"deep": [1, 2, {}]}"#, "read");
    check(r#""minor": 20"#, r#""minor": 99"#, "read");
}

#[test]
fn versions_are_checked_before_anything_else() {
    let anew = "Save it anew: python -c \"import torch; torch.export.save(torch.export.load('old.pt2'), 'new.pt2')\"  \
                # with torch 2.9 or later";
    let refused = |version: &str| {
        format!("schema version {version} of torch 2.15.0 is not read; 8.14 (torch 2.9) and later 8.x are. ")
    };
    check(r#""minor": 20"#, r#""minor": 13"#, &(refused("8.13") + anew));
    let export = "Save it anew: torch.export.save(torch.export.export(model, args), 'new.pt2')  # with torch 2.9 or later, \
                  from the model itself";
    check(r#""major": 8"#, r#""major": 9"#, &(refused("9.20") + export));
    check(r#""major": 8"#, r#""major": 7, "x": 0"#, &(refused("7.20") + export));
}

#[test]
fn names_are_defined_once_and_before_their_use() {
    let argument = r#""arg": {"as_tensor": {"name": "w"}}"#;
    check(argument, r#""arg": {"as_tensor": {"name": "q"}}"#, "y uses \"q\", which nothing before it defines");
    check(argument, r#""arg": {"as_tensor": {"name": "y"}}"#, "y uses \"y\", which nothing before it defines");
    check(argument, r#""arg": {"as_sym_int": {"as_name": "x"}}"#, "\"x\" of y has no entry in sym_int_values");
    check(
        r#""outputs": [{"as_tensor": {"name": "y"}}], "metadata""#,
        r#""outputs": [{"as_tensor": {"name": "x"}}], "metadata""#,
        "\"x\" is defined twice, by y again",
    );
    check(
        r#""outputs": [{"as_tensor": {"name": "y"}}], "metadata""#,
        r#""outputs": [{"as_tensor": {"name": "z"}}], "metadata""#,
        "\"z\" of y has no entry in tensor_values",
    );
    check(
        r#""outputs": [{"as_tensor": {"name": "y"}}],"#,
        r#""outputs": [{"as_tensor": {"name": "q"}}],"#,
        "the graph's outputs uses \"q\", which nothing before it defines",
    );
    check(
        r#""y": {"dtype": 7"#,
        r#""x": {"dtype": 7"#,
        "models/model.json, at graph_module.graph.tensor_values: \"x\" occurs twice",
    );
}

#[test]
fn the_signature_and_the_graph_agree() {
    check(
        r#"{"parameter": {"arg": {"name": "w"}"#,
        r#"{"parameter": {"arg": {"name": "x"}"#,
        "the signature and the graph disagree: input 0 is Parameter { value: \"x\", name: \"weight\" } there and \
         Tensor(\"w\") here",
    );
    check(
        r#", {"user_input": {"arg": {"as_tensor": {"name": "x"}}}}"#,
        "",
        "the signature and the graph disagree: 1 inputs in the signature, 2 in the graph",
    );
    check(
        r#"{"user_output": {"arg": {"as_tensor": {"name": "y"}}}}"#,
        r#"{"buffer_mutation": {"arg": {"name": "y"}, "buffer_name": "cache"}}"#,
        "the signature and the graph disagree: an output mutates \"cache\", which is no input",
    );
    check(
        r#"{"user_output": {"arg": {"as_tensor": {"name": "y"}}}}"#,
        r#"{"loss_output": {"arg": {"name": "y"}}}"#,
        "the program has an output of kind loss_output; only programs for inference are served",
    );
    check(
        r#"{"user_input": {"arg": {"as_tensor": {"name": "x"}}}}"#,
        r#"{"custom_obj": {"arg": {"name": "x", "class_fqn": "a.B"}, "custom_obj_name": "c"}}"#,
        "input \"x\" is of kind custom_obj; only tensors and plain values are served",
    );
    check(
        r#"\"context\": \"null\", \"children_spec\": [{\"type\": null"#,
        r#"\"context\": \"null\", \"children_spec\": [{\"type\": null, \"context\": null, \"children_spec\": []}, {\"type\": null"#,
        "the signature and the graph disagree: 1 user inputs in the signature, 2 in the description of the call",
    );
}

#[test]
fn forms_of_tensors_are_checked() {
    let codes = "the known codes are 1 BYTE, 2 CHAR, 3 SHORT, 4 INT, 5 LONG, 6 HALF, 7 FLOAT, 8 DOUBLE, 9 COMPLEXHALF, \
                 10 COMPLEXFLOAT, 11 COMPLEXDOUBLE, 12 BOOL, 13 BFLOAT16, 28 UINT16, 29 FLOAT8E4M3FN, 30 FLOAT8E5M2, \
                 31 FLOAT8E4M3FNUZ, 32 FLOAT8E5M2FNUZ, 33 FLOAT8E8M0FNU, 34 UINT32, 35 UINT64";
    for code in ["0", "14", "36", "-1", "256", "9223372036854775807"] {
        let to = format!(r#""w": {{"dtype": {code}"#);
        check(r#""w": {"dtype": 7"#, &to, &format!("w: dtype code {code} is not known; {codes}"));
    }
    check(r#""layout": 7}"#, r#""layout": 1}"#, "w: layout 1 is not served; only strided tensors (7) are");
    check(r#""strides": [{"as_int": 1}]"#, r#""strides": []"#, "w: it has not as many strides as sizes");
    check(
        r#""expr_str": "Symbol('s0')", "hint": {"as_int": 4}"#,
        r#""expr_str": "sin(s0)", "hint": null"#,
        "x: sin(…) of 1 arguments is not served as an integer",
    );
    check(
        r#""arg": {"as_tensor": {"name": "w"}}"#,
        r#""arg": {"as_memory_format": 9}"#,
        "y: memory format 9 is not known",
    );
}

#[test]
fn payloads_lie_within_their_entries() {
    let size = r#""sizes": [{"as_int": 2}]"#;
    let needs = |bytes: &str| format!("\"weight\" needs {bytes} bytes of \"data/weights/weight_0\", which has 8");
    check_weights(size, r#""sizes": [{"as_int": 3}]"#, &needs("12"));
    check_weights(r#""storage_offset": {"as_int": 0}"#, r#""storage_offset": {"as_int": 1}"#, &needs("12"));
    check_weights(r#""strides": [{"as_int": 1}]"#, r#""strides": [{"as_int": 2}]"#, &needs("12"));
    check_weights(r#""dtype": 7"#, r#""dtype": 8"#, &needs("16"));
    check_weights(size, r#""sizes": [{"as_int": 4611686018427387904}]"#, "weight: its extent does not fit 64 bits");
    check_weights(size, r#""sizes": [{"as_int": -2}]"#, "weight: a size, stride or offset is negative");
    check_weights(
        r#""strides": [{"as_int": 1}]"#,
        r#""strides": [{"as_int": -1}]"#,
        "weight: a size, stride or offset is negative",
    );
    check_weights(size, r#""sizes": [{"as_expr": {"expr_str": "s0"}}]"#, "weight: symbol s0 has no value");
    // A stride of 0 makes many elements of one; more than memory can hold are refused.
    check_weights(
        r#""sizes": [{"as_int": 2}], "requires_grad": true, "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 1}]"#,
        r#""sizes": [{"as_int": 9223372036854775807}], "requires_grad": true, "device": {"type": "cpu", "index": null}, "strides": [{"as_int": 0}]"#,
        "weight: its extent does not fit 64 bits",
    );
    check_weights(
        size,
        r#""sizes": [{"as_int": 1}]"#,
        "input \"w\" is float32 [2] in the graph, but its payload \"weight\" is float32 [1]",
    );
    check_weights(
        r#""weight": {"#,
        r#""weigth": {"#,
        "input \"w\" is parameter \"weight\", which the archive does not hold",
    );
    check_weights(
        r#""path_name": "weight_0""#,
        r#""path_name": "../../m/byteorder""#,
        "the archive has no entry \"data/weights/../../m/byteorder\"",
    );
    let pickled = "\"weight\" is pickled, which is code to run: tensor subclasses and custom objects are not served. Turn \
                   them into plain tensors before torch.export.export";
    check_weights(r#""use_pickle": false"#, r#""use_pickle": true"#, pickled);
    assert_eq!(CONSTANTS, r#"{"config": {}}"#);
}

#[test]
fn guards_that_are_not_understood_are_quoted() {
    let guard = "L['x'].size()[0] % 2 == 0";
    check(
        guard,
        "L['z'].size()[0] == 2",
        "guard \"L['z'].size()[0] == 2\" speaks of L['z'].size()[0], which is no input of the program",
    );
    check(
        guard,
        "L['x'].dtype == torch.float32",
        "guard \"L['x'].dtype == torch.float32\" speaks of L['x'].dtype, which is no input of the program",
    );
    check(
        guard,
        "___check_type_id(L['x'], 7)",
        "guard \"___check_type_id(L['x'], 7)\" is not understood: ___check_type_id(…) of 2 arguments is not served as a condition",
    );
    check(
        guard,
        "__import__('os').system('rm') == 0",
        "guard \"__import__('os').system('rm') == 0\" is not understood: ….system(…) of 1 arguments is not served as an integer",
    );
    check(
        guard,
        "L['x'].size()[0] == s0",
        "guard \"L['x'].size()[0] == s0\" is not understood: s0 is not served as an integer",
    );
}

#[test]
fn nesting_is_bounded() {
    let deep = |open: &str, close: &str, count: usize| format!("{}{}", open.repeat(count), close.repeat(count));
    // Where the schema has no nesting, and in a field that is skipped.
    for count in [1_000, 1_000_000] {
        let program = deep("[", "]", count);
        let said = outcome(Builder::of(&program, WEIGHTS).build());
        assert!(said.starts_with("models/model.json, at ") && said.len() < 200, "{said}");
        let skipped = PROGRAM.replacen(r#""metadata": {}"#, &format!(r#""metadata": {program}"#), 1);
        let said = outcome(Builder::of(&skipped, WEIGHTS).build());
        assert!(said == "read" || said.contains("recursion limit exceeded"), "{said}");
    }
    let spec = deep(r#"{\"type\": \"builtins.list\", \"context\": null, \"children_spec\": ["#, "]}", 10_000);
    let out_spec = r#"[1, {\"type\": null, \"context\": null, \"children_spec\": []}]", "forward"#;
    assert!(PROGRAM.contains(out_spec));
    let program = PROGRAM.replacen(out_spec, &format!(r#"[1, {spec}]", "forward"#), 1);
    let said = outcome(Builder::of(&program, WEIGHTS).build());
    assert!(said.starts_with("out_spec is not understood: recursion limit exceeded"), "{said}");
}
