//! Programs from Rust: typed reads, places for results, sessions, and what is refused.
#![allow(missing_docs)]

use std::sync::Arc;

use rapt::model::{Input, InputForm, Model, ModelError, Output, Template, Weight};
use rapt::{DType, ErrorKind, Shape, Strides, View, ViewMut};

/// The JSON of a program `output = op(x…)` on tensors of these dtypes and of shape [3].
fn program(target: &str, inputs: &[(&str, DType)], out: DType) -> Vec<u8> {
    let meta = |dtype: DType| {
        format!(
            r#"{{"dtype": {}, "sizes": [{{"as_int": 3}}], "requires_grad": false, "device": {{"type": "cpu", "index": null}},
            "strides": [{{"as_int": 1}}], "storage_offset": {{"as_int": 0}}, "layout": 7}}"#,
            dtype.code()
        )
    };
    let tensor = |name: &str| format!(r#"{{"as_tensor": {{"name": "{name}"}}}}"#);
    let list = |parts: Vec<String>| parts.join(", ");
    let arguments = list(
        inputs
            .iter()
            .enumerate()
            .map(|(n, (argument, _))| {
                format!(r#"{{"name": "{argument}", "arg": {}, "kind": 1}}"#, tensor(&format!("x{n}")))
            })
            .collect(),
    );
    let names = || (0..inputs.len()).map(|n| format!("x{n}"));
    let metas = list(inputs.iter().enumerate().map(|(n, (_, dtype))| format!(r#""x{n}": {}"#, meta(*dtype))).collect());
    let specs = list(names().map(|name| format!(r#"{{"user_input": {{"arg": {}}}}}"#, tensor(&name))).collect());
    format!(
        r#"{{"graph_module": {{"graph": {{
            "inputs": [{inputs}], "outputs": [{y}],
            "nodes": [{{"target": "{target}", "inputs": [{arguments}], "outputs": [{y}], "metadata": {{}}, "name": "y"}}],
            "tensor_values": {{{metas}, "y": {out}}}, "sym_int_values": {{}}, "sym_bool_values": {{}},
            "is_single_tensor_return": false, "custom_obj_values": {{}}, "sym_float_values": {{}}}},
          "signature": {{"input_specs": [{specs}], "output_specs": [{{"user_output": {{"arg": {y}}}}}]}},
          "module_call_graph": [], "metadata": {{}}, "treespec_namedtuple_fields": {{}}}},
          "opset_version": {{"aten": 10}}, "range_constraints": {{}}, "schema_version": {{"major": 8, "minor": 20}},
          "verifiers": [], "torch_version": "2.15.0", "guards_code": []}}"#,
        inputs = list(names().map(|name| tensor(&name)).collect()),
        y = tensor("y"),
        out = meta(out),
    )
    .into_bytes()
}

fn clone_of(dtype: DType) -> Model {
    Model::from_json(&program("torch.ops.aten.clone.default", &[("self", dtype)], dtype)).expect("a program")
}

#[test]
fn a_result_is_read_in_its_dtype_and_no_other() {
    let numbers = [1i64 << 40, -1, 7];
    let view = View::contiguous("x", &numbers, [3].into()).unwrap();
    let outputs = clone_of(DType::I64).run(&mut [Input::Read(view)]).unwrap();
    let [Output::Tensor(out)] = outputs.as_slice() else { panic!("one tensor: {outputs:?}") };
    assert_eq!(out.to_vec::<i64>().unwrap(), numbers);
    assert!(out.to_vec::<f64>().is_err() && out.to_vec::<i32>().is_err() && out.to_vec::<u64>().is_err());
}

#[test]
fn an_input_is_never_converted() {
    let numbers = [1f32, 2.0, 3.0];
    let view = View::contiguous("x", &numbers, [3].into()).unwrap();
    let model = clone_of(DType::F64);
    let error = model.run(&mut [Input::Read(view)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DtypeBoundary);
    assert!(matches!(error, ModelError::Dtype { expected: DType::F64, got: DType::F32, .. }), "{error}");
    let wide = [1f64, 2.0, 1.0 + f64::EPSILON];
    let view = View::contiguous("x", &wide, [3].into()).unwrap();
    assert_eq!(model.run(&mut [Input::Read(view)]).unwrap().len(), 1, "the model serves the next call");
}

#[test]
fn results_go_where_the_caller_says_with_any_strides_and_only_in_their_own_dtype() {
    let model = clone_of(DType::I32);
    let numbers = [1i32, -2, 3];
    let view = View::contiguous("x", &numbers, [3].into()).unwrap();
    let bound = model.bind(&[InputForm::Tensor { dtype: DType::I32, shape: vec![3] }]).unwrap();
    let mut session = model.session();
    let mut memory = [9i32; 6];
    let place = ViewMut::strided("out", &mut memory, 1, Shape::from([3]), Strides::from([2])).unwrap();
    session.run_into(&bound, &mut [Input::Read(view)], &mut [Some(place)]).unwrap();
    assert_eq!(memory, [9, 1, 9, -2, 9, 3]);
    let mut other = [0u32; 3];
    let place = ViewMut::contiguous("out", &mut other, [3].into()).unwrap();
    let error = session.run_into(&bound, &mut [Input::Read(view)], &mut [Some(place)]).unwrap_err();
    assert!(matches!(error, ModelError::OutputForm { .. }), "{error}");
    let error = session.run_into(&bound, &mut [Input::Read(view)], &mut []).unwrap_err();
    assert!(matches!(error, ModelError::OutputForm { .. }), "{error}");
    assert_eq!(other, [0; 3]);
}

#[test]
fn what_a_program_writes_must_be_writable_and_is_written() {
    let json = program("torch.ops.aten.copy_.default", &[("self", DType::F32), ("src", DType::F32)], DType::F32);
    let model = Model::from_json(&json).unwrap();
    assert!(model.inputs()[0].is_written && !model.inputs()[1].is_written);
    let (mut x, y) = ([0f32; 3], [1f32, 2.0, 3.0]);
    let source = View::contiguous("y", &y, [3].into()).unwrap();
    let read = View::contiguous("x", &x, [3].into()).unwrap();
    let error = model.run(&mut [Input::Read(read), Input::Read(source)]).unwrap_err();
    assert!(matches!(error, ModelError::ReadOnly { .. }), "{error}");
    let written = ViewMut::contiguous("x", &mut x, [3].into()).unwrap();
    model.run(&mut [Input::Write(written), Input::Read(source)]).unwrap();
    assert_eq!(x, y);
}

#[test]
fn counts_kinds_and_missing_operators_are_refused_with_what_is_wrong() {
    let model = clone_of(DType::F32);
    let error = model.run(&mut []).unwrap_err();
    assert_eq!(
        (error.kind(), error.to_string().contains("takes 1 inputs (x0), got 0")),
        (ErrorKind::Kind, true),
        "{error}"
    );
    assert_eq!(model.run(&mut [Input::Int(3)]).unwrap_err().kind(), ErrorKind::Kind);
    let missing = program("torch.ops.aten.no_such_operator.default", &[("self", DType::F32)], DType::F32);
    let error = Model::from_json(&missing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("no_such_operator"), "{error}");
    let unserved = program("torch.ops.aten.clone.default", &[("self", DType::U16)], DType::U16);
    assert_eq!(Model::from_json(&unserved).unwrap_err().kind(), ErrorKind::UnsupportedDtype);
    assert_eq!(Model::from_json(b"{").unwrap_err().kind(), ErrorKind::Program);
    assert_eq!(Model::from_bytes(&b"no archive"[..]).unwrap_err().kind(), ErrorKind::Program);
}

/// `y = x + w` where w is a parameter.
fn template() -> Template {
    let json = program("torch.ops.aten.add.Tensor", &[("self", DType::F32), ("other", DType::F32)], DType::F32);
    let user = r#"{"user_input": {"arg": {"as_tensor": {"name": "x1"}}}}"#;
    let parameter = r#"{"parameter": {"arg": {"name": "x1"}, "parameter_name": "w"}}"#;
    let json = String::from_utf8(json).unwrap();
    assert!(json.contains(user));
    Template::from_json(json.replace(user, parameter).as_bytes()).unwrap()
}

fn weight(memory: &Arc<Vec<f64>>) -> Weight {
    Weight {
        name: "w".into(),
        dtype: DType::F32,
        shape: vec![3],
        strides: vec![1],
        offset: 1,
        storage: memory.as_ptr().cast(),
        storage_bytes: size_of_val(memory.as_slice()),
    }
}

#[test]
fn models_of_one_template_have_weights_of_their_own() {
    let template = template();
    assert_eq!(template.inputs().len(), 1);
    let numbers = |w: [f32; 3]| {
        let words = [0.0, w[0], w[1], w[2]].map(f32::to_le_bytes).concat();
        Arc::new(words.chunks_exact(8).map(|word| f64::from_le_bytes(word.try_into().unwrap())).collect::<Vec<f64>>())
    };
    let x = [1f32, 2.0, 3.0];
    let memories = [numbers([10.0, 20.0, 30.0]), numbers([0.5, 0.25, 0.125])];
    for (memory, expected) in memories.into_iter().zip([[11.0, 22.0, 33.0], [1.5, 2.25, 3.125]]) {
        // SAFETY: the model keeps the memory, and nothing writes to it.
        let model = unsafe { template.with_weights(vec![weight(&memory)], Arc::clone(&memory) as _) }.unwrap();
        let held = Arc::downgrade(&memory);
        drop(memory);
        let view = View::contiguous("x", &x, [3].into()).unwrap();
        let outputs = model.run(&mut [Input::Read(view)]).unwrap();
        let [Output::Tensor(out)] = outputs.as_slice() else { panic!("one tensor: {outputs:?}") };
        assert_eq!(out.to_vec::<f32>().unwrap(), expected);
        drop(model);
        assert!(held.upgrade().is_none(), "the model alone kept the memory");
    }
}

#[test]
fn weights_that_are_not_what_is_said_of_them_are_refused() {
    let (template, memory) = (template(), Arc::new(vec![0f64; 2]));
    // SAFETY: the memory is kept, and no weight that leaves it is read.
    let with = |weights| unsafe { template.with_weights(weights, Arc::clone(&memory) as _) };
    assert!(matches!(with(Vec::new()).unwrap_err(), ModelError::MissingState { name } if name == "w"));
    let odd: [fn(&mut Weight); 5] = [
        |w| w.offset = 2,
        |w| w.strides = vec![2],
        |w| w.strides = vec![usize::MAX],
        |w| w.strides = Vec::new(),
        |w| w.storage = w.storage.wrapping_add(4),
    ];
    for change in odd {
        let mut weight = weight(&memory);
        change(&mut weight);
        let error = with(vec![weight]).unwrap_err();
        assert!(matches!(error, ModelError::WeightForm { .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Layout);
    }
    // What the program states is compared when it is bound.
    let other = Weight { dtype: DType::I32, ..weight(&memory) };
    let form = [InputForm::Tensor { dtype: DType::F32, shape: vec![3] }];
    assert_eq!(with(vec![other]).unwrap().bind(&form).unwrap_err().kind(), ErrorKind::Program);
}
