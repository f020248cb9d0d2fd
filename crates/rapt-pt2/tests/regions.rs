//! Regions that switch gradients or autocasting off: their nodes take their place, under names of their own. Checks with tokens.
#![allow(missing_docs)]

use rapt_pt2::{Argument, Error, Program};

const TENSOR: &str = r#"{"dtype": 7, "sizes": [{"as_int": 2}], "device": {"type": "cpu", "index": null},
    "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}"#;

fn tensor(name: &str) -> String {
    format!(r#"{{"as_tensor": {{"name": "{name}"}}}}"#)
}

fn listed(names: &[&str]) -> String {
    names.iter().map(|name| tensor(name)).collect::<Vec<_>>().join(", ")
}

fn node(target: &str, inputs: &[String], outputs: &[&str]) -> String {
    let inputs: Vec<String> = inputs.iter().map(|arg| format!(r#"{{"name": "", "arg": {arg}}}"#)).collect();
    format!(r#"{{"target": "{target}", "inputs": [{}], "outputs": [{}]}}"#, inputs.join(", "), listed(outputs))
}

/// A graph whose values are all vectors of two floats.
fn graph(inputs: &[&str], nodes: &[String], outputs: &[&str], values: &[&str]) -> String {
    let values: Vec<String> = values.iter().map(|name| format!(r#""{name}": {TENSOR}"#)).collect();
    format!(
        r#"{{"inputs": [{}], "outputs": [{}], "nodes": [{}], "tensor_values": {{{}}}, "sym_int_values": {{}}, "sym_bool_values": {{}}}}"#,
        listed(inputs),
        listed(outputs),
        nodes.join(", "),
        values.join(", ")
    )
}

fn region(body: &str, operands: &[&str], results: &[&str]) -> String {
    let mut inputs =
        vec![r#"{"as_bool": false}"#.into(), format!(r#"{{"as_graph": {{"name": "s", "graph": {body}}}}}"#)];
    inputs.extend(operands.iter().map(|name| tensor(name)));
    node("torch.ops.higher_order.wrap_with_set_grad_enabled", &inputs, results)
}

/// A program that takes `x` and returns these.
fn read(nodes: &[String], outputs: &[&str], values: &[&str]) -> Result<Program, Error> {
    let specs: Vec<String> =
        outputs.iter().map(|name| format!(r#"{{"user_output": {{"arg": {}}}}}"#, tensor(name))).collect();
    let json = format!(
        r#"{{"graph_module": {{"graph": {}, "signature": {{"input_specs": [{{"user_input": {{"arg": {}}}}}], "output_specs": [{}]}}}},
            "schema_version": {{"major": 8, "minor": 20}}}}"#,
        graph(&["x"], nodes, outputs, values),
        tensor("x"),
        specs.join(", ")
    );
    Program::from_json(json.as_bytes())
}

fn neg(from: &str, to: &str) -> String {
    node("torch.ops.aten.neg.default", &[tensor(from)], &[to])
}

/// Each node as its operand, its last word, and its result.
fn shown(program: &Program) -> Vec<String> {
    let name = |value: &Argument| match value {
        Argument::Tensor(name) => name.clone(),
        other => format!("{other:?}"),
    };
    let line = |node: &rapt_pt2::Node| {
        let target = node.target.trim_start_matches("torch.ops.aten.").trim_end_matches(".default");
        format!("{} = {target}({})", name(&node.outputs[0]), name(&node.inputs[0].value))
    };
    program.graph.nodes.iter().map(line).collect()
}

#[test]
fn the_nodes_of_a_region_take_its_place() {
    // Inside, `x` is another value than outside, and results are called as those of the region.
    let inner = graph(&["x"], &[neg("x", "y")], &["y"], &["x", "y"]);
    let body = graph(&["a"], &[neg("a", "x"), region(&inner, &["x"], &["c"])], &["c", "a", "c"], &["a", "x", "c"]);
    let nodes = [neg("x", "n"), region(&body, &["n"], &["c", "same", "twice"]), neg("c", "d")];
    let outputs = ["d", "same", "twice"];
    let program = read(&nodes, &outputs, &["x", "n", "c", "same", "twice", "d"]).expect("a program");
    let expected = [
        "n = neg(x)",
        "region_0.x = neg(n)",
        "c = neg(region_0.x)",
        "same = alias(n)",
        "twice = alias(c)",
        "d = neg(c)",
    ];
    assert_eq!(shown(&program), expected);
    let values: Vec<&String> = program.graph.tensors.keys().collect();
    assert_eq!(values, ["c", "d", "n", "region_0.x", "same", "twice", "x"]);
}

#[test]
fn a_region_that_does_not_fit_stays_a_node() {
    let body = graph(&["a"], &[neg("a", "b")], &["b"], &["a", "b"]);
    for (operands, results) in [(&["x", "x"][..], &["c"][..]), (&[], &["c"]), (&["x"], &["c", "d"])] {
        let program = read(&[region(&body, operands, results)], &["x"], &["x", "c", "d"]).expect("a program");
        assert_eq!(program.graph.nodes.len(), 1);
        assert!(program.graph.nodes[0].target.ends_with("wrap_with_set_grad_enabled"));
    }
    let cond = node(
        "torch.ops.higher_order.cond",
        &[tensor("x"), format!(r#"{{"as_graph": {{"name": "s", "graph": {body}}}}}"#)],
        &["c"],
    );
    let program = read(&[cond], &["c"], &["x", "c"]).expect("a program");
    assert_eq!(program.graph.nodes[0].inputs[1].value, Argument::Other("as_graph"));
}

#[test]
fn names_that_meet_are_refused() {
    let body = graph(&["a"], &[neg("a", "b"), neg("b", "c")], &["c"], &["a", "b", "c"]);
    let taken = [neg("x", "region_0.b"), region(&body, &["x"], &["d"])];
    assert!(
        matches!(read(&taken, &["d"], &["x", "region_0.b", "d"]), Err(Error::Redefined { name, .. }) if name == "region_0.b")
    );
    // A value that the body does not define is none of the program's.
    let open = graph(&["a"], &[neg("x", "c")], &["c"], &["a", "x", "c"]);
    let undefined = read(&[region(&open, &["x"], &["d"])], &["d"], &["x", "d"]);
    assert!(matches!(undefined, Err(Error::Undefined { name, .. }) if name == "region_0.x"));
}

/// A program with a token, whose node with effects calls `operator`.
fn with_token(operator: &str) -> Result<Program, Error> {
    let check = format!(
        r#"{{"target": "torch.ops.higher_order.with_effects", "inputs": [{{"name": "", "arg": {}}},
            {{"name": "", "arg": {{"as_operator": "{operator}"}}}}, {{"name": "", "arg": {}}},
            {{"name": "", "arg": {{"as_string": "linalg.inv"}}}}, {{"name": "is_matrix", "arg": {{"as_bool": false}}}}],
            "outputs": [{}, {{"as_none": true}}]}}"#,
        tensor("t"),
        tensor("x"),
        tensor("after")
    );
    let json = format!(
        r#"{{"graph_module": {{"graph": {}, "signature": {{
            "input_specs": [{{"token": {{"arg": {{"name": "t"}}}}}}, {{"user_input": {{"arg": {}}}}}],
            "output_specs": [{{"token": {{"arg": {{"name": "after"}}}}}}, {{"user_output": {{"arg": {}}}}}]}}}},
            "schema_version": {{"major": 8, "minor": 20}}}}"#,
        graph(&["t", "x"], &[check, neg("x", "y")], &["after", "y"], &["t", "x", "after", "y"]),
        tensor("x"),
        tensor("y")
    );
    Program::from_json(json.as_bytes())
}

#[test]
fn a_check_of_matrices_needs_no_token() {
    let program = with_token("torch.ops.aten._linalg_check_errors.default").expect("a program");
    let [check, neg] = &program.graph.nodes[..] else { panic!("two nodes") };
    assert_eq!(check.target, "torch.ops.aten._linalg_check_errors.default");
    let names: Vec<&str> = check.inputs.iter().map(|input| input.name.as_str()).collect();
    assert_eq!((names, check.outputs.len()), (vec!["info", "api_name", "is_matrix"], 0));
    assert_eq!(check.inputs[0].value, Argument::Tensor("x".into()));
    assert_eq!(neg.target, "torch.ops.aten.neg.default");
    assert_eq!((program.signature.inputs.len(), program.signature.outputs.len()), (1, 1));
    let values: Vec<&str> = program.graph.tensors.keys().map(String::as_str).collect();
    assert_eq!(values, ["x", "y"]);
}

#[test]
fn another_operator_with_effects_is_refused_with_its_token() {
    let refused = with_token("torch.ops.aten._print.default");
    assert!(matches!(&refused, Err(Error::InputKind { name, kind: "token" }) if name == "t"), "{refused:?}");
}
