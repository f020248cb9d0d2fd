//! Archives that torch wrote: what they hold, name by name. `fixtures/export.py` writes them.
#![allow(missing_docs)]

use rapt_pt2::{
    Archive, Argument, Error, Expr, GuardError, InputSpec, InputValue, Key, Kind, OutputSpec, Payload, Property,
    SymInt, Symbols, Tree,
};

fn open(name: &str) -> Archive {
    try_open(name).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn try_open(name: &str) -> Result<Archive, Error> {
    Archive::open(format!("{}/tests/fixtures/{name}.pt2", env!("CARGO_MANIFEST_DIR")))
}

fn f32s(archive: &Archive, payload: &Payload) -> Vec<f32> {
    let bytes = archive.storage(payload.storage);
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().expect("four bytes"))).collect()
}

/// A user input as guards see it.
fn tensor<'a>(sizes: &'a [i64], strides: &'a [i64]) -> InputValue<'a> {
    InputValue::Tensor { sizes, strides, storage_offset: 0 }
}

#[test]
fn programs_of_every_version_hold_the_same() {
    let versions = [
        ("torch-2.15", "2.15.0", 20),
        ("torch-2.11", "2.11.0", 17),
        ("torch-2.10", "2.10.0", 15),
        ("torch-2.9", "2.9.1", 14),
    ];
    for (folder, torch, minor) in versions {
        let archive = open(&format!("{folder}/state"));
        let program = archive.program();
        assert!(program.torch_version.starts_with(torch), "{}", program.torch_version);
        assert_eq!(program.schema_version, (8, minor));
        let targets: Vec<&str> = program.graph.nodes.iter().map(|node| node.target.as_str()).collect();
        assert_eq!(targets.len(), 12);
        assert!(targets.contains(&"torch.ops.aten.linear.default") && targets.contains(&"_operator.floordiv"));
        let inputs: Vec<&InputSpec> = program.signature.inputs.iter().collect();
        assert_eq!(inputs.len(), 8);
        assert_eq!(*inputs[0], InputSpec::Parameter { value: "p_linear_weight".into(), name: "linear.weight".into() });
        assert_eq!(*inputs[3], InputSpec::Buffer { value: "b_gain".into(), name: "gain".into(), persistent: false });
        assert_eq!(*inputs[4], InputSpec::Constant { value: "c_table".into(), name: "table".into() });
        assert_eq!(*inputs[7], InputSpec::User(Argument::Tensor("d_a".into())));
        assert!(program.signature.outputs.iter().all(|output| matches!(output, OutputSpec::User(_))));
        let fill = program.graph.nodes.iter().find(|node| node.target.ends_with("masked_fill.Scalar"));
        assert_eq!(fill.expect("masked_fill").inputs[2].value, Argument::Float(f64::NEG_INFINITY));
    }
}

#[test]
fn shapes_and_symbols_are_expressions_with_ranges_and_hints() {
    let archive = open("torch-2.15/state");
    let program = archive.program();
    let symbol = |name: &str| program.symbols.iter().find(|symbol| symbol.name == name).expect(name);
    let Expr::Symbol(batch) = &program.graph.tensors["x"].sizes[0] else { panic!("not a symbol") };
    let Expr::Symbol(seq) = &program.graph.tensors["x"].sizes[1] else { panic!("not a symbol") };
    assert_eq!((symbol(batch).min, symbol(batch).max, symbol(batch).hint), (2, Some(64), Some(2)));
    assert_eq!((symbol(seq).max, symbol(seq).hint), (Some(512), Some(6)));
    // A least value of 2 is how tracing says "neither 0 nor 1".
    assert!(
        symbol(batch).admits(1) && symbol(batch).admits(64) && !symbol(batch).admits(65) && !symbol(batch).admits(-1)
    );
    let strides: Vec<String> = program.graph.tensors["x"].strides.iter().map(ToString::to_string).collect();
    assert_eq!(strides, [format!("4*{seq}"), "4".into(), "1".into()]);
    let values: Symbols =
        program.symbols.iter().map(|symbol| (symbol.name.clone(), symbol.hint.expect("a hint"))).collect();
    let reshape = program.graph.tensors["reshape"].sizes[0].eval(&values);
    assert_eq!(reshape, Ok(24));
    assert_eq!(program.graph.sym_ints["floordiv"].eval(&values), Ok(4));
}

#[test]
fn a_functional_program_declares_its_mutations() {
    let archive = open("torch-2.15/functional");
    let outputs = &archive.program().signature.outputs;
    assert!(matches!(&outputs[0], OutputSpec::BufferMutation { name, .. } if name == "steps"), "{outputs:?}");
    assert_eq!(outputs.len(), 4);
}

#[test]
fn weights_keep_their_bytes_and_dtypes() {
    let archive = open("torch-2.15/state");
    let gain = archive.payload(&archive.program().signature.inputs[3]).expect("a buffer");
    assert_eq!((&gain.sizes[..], &gain.strides[..], gain.is_parameter), (&[3usize][..], &[1usize][..], false));
    assert_eq!(f32s(&archive, gain), [1.0; 3]);
    assert_eq!(f32s(&archive, &archive.constants()["table"]), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert!(archive.weights()["linear.weight"].is_parameter);
    archive.check_storages().expect("nothing is damaged");

    let archive = open("torch-2.15/shared");
    let dtypes: Vec<(&str, &str)> =
        archive.weights().iter().map(|(name, payload)| (name.as_str(), payload.dtype.name())).collect();
    let expect = [
        ("column", "float32"),
        ("embed.weight", "bfloat16"),
        ("exact", "float64"),
        ("flags", "bool"),
        ("head.weight", "bfloat16"),
        ("short", "float16"),
        ("wide", "int64"),
    ];
    assert_eq!(dtypes, expect);
    let bytes = |name: &str| archive.storage(archive.weights()[name].storage);
    assert_eq!(bytes("wide"), [(1i64 << 40).to_le_bytes(), (-1i64).to_le_bytes()].concat());
    assert_eq!(bytes("exact"), (1.0 + 2f64.powi(-52)).to_le_bytes());
    assert_eq!(bytes("flags"), [1, 0, 1]);
    assert_eq!(bytes("short"), [0x00, 0x38, 0x00, 0xc0]);
}

#[test]
fn names_share_storages_as_they_did_in_the_model() {
    let archive = open("torch-2.15/shared");
    let weights = archive.weights();
    assert_eq!(weights["embed.weight"].storage, weights["head.weight"].storage);
    assert_ne!(weights["embed.weight"].storage, weights["exact"].storage);
    // A cache whose halves are views of one tensor.
    let (keys, values) = (&archive.constants()["keys"], &archive.constants()["values"]);
    assert_eq!((keys.storage, keys.storage_offset, values.storage_offset), (values.storage, 0, 12));
    assert_eq!(archive.storage(keys.storage).len(), 48);
    // A transposed slice: the payload is the whole storage.
    let column = &weights["column"];
    assert_eq!(
        (&column.sizes[..], &column.strides[..], column.storage_offset),
        (&[2usize, 2][..], &[1usize, 3][..], 1)
    );
    assert_eq!(f32s(&archive, column), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    assert_eq!(archive.storages(), 7);
}

#[test]
fn payloads_start_at_multiples_of_64_bytes() {
    // What a map of the file gives to kernels that want aligned weights; noted, not required.
    let archive = open("torch-2.15/shared");
    let start = archive.storage(archive.weights()["wide"].storage).as_ptr().addr();
    assert!(start.is_multiple_of(64), "{start:x}");
}

#[test]
fn calls_keep_names_and_containers() {
    let archive = open("torch-2.15/calls");
    let call = archive.program().call.as_ref().expect("a call");
    let names: Vec<&str> = call.positional.iter().filter_map(|(name, _)| name.as_deref()).collect();
    assert_eq!(names, ["x", "args_0", "args_1"]);
    let names: Vec<&str> = call.keyword.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["none", "pair", "n", "f", "d", "w"]);
    let paths: Vec<String> = (0..call.inputs()).map(|number| call.input_path(number)).collect();
    let expect = ["x", "args_0", "args_1", "none", "pair.a", "pair.b", "n", "f", "d['l'][0]", "d['l'][1]", "w"];
    assert_eq!(paths, expect);
    let Tree::Node(Kind::Tuple, results) = &call.output else { panic!("{:?}", call.output) };
    let kind = |i: usize| match &results[i] {
        Tree::Leaf => None,
        Tree::Node(kind, _) => Some(kind.clone()),
    };
    let fields = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(kind(0), Some(Kind::NamedTuple { type_name: "fixtures.Pair".into(), fields }));
    let (fields, absent) = (vec!["y".to_owned()], vec!["extra".to_owned()]);
    assert_eq!(kind(1), Some(Kind::Object { type_name: "fixtures.Result".into(), fields, absent }));
    assert_eq!((kind(2), kind(3)), (None, None));
    assert_eq!(kind(5), Some(Kind::Dict("dict", vec![Key::Text("c".into()), Key::Int(1)])));
    assert_eq!(kind(7), Some(Kind::Dict("collections.OrderedDict", vec![Key::Text("q".into())])));
    assert_eq!(call.output.leaves(), 11);
    let outputs = &archive.program().signature.outputs;
    assert_eq!(outputs[4], OutputSpec::User(Argument::None));
    assert_eq!(outputs[5], OutputSpec::User(Argument::Int(5)));
    let fixed = &archive.program().signature.inputs[7];
    assert_eq!(*fixed, InputSpec::Fixed { name: "f".into(), value: Argument::Float(2.5) });
}

#[test]
fn guards_are_checked_on_the_inputs() {
    let archive = open("torch-2.15/calls");
    let check = |rows: i64, a: i64, b: i64| {
        let (x, x_strides, w) = ([rows, 4], [4, 1], [5, 6]);
        let mut inputs = [InputValue::Other; 11];
        for input in &mut inputs[..3] {
            *input = tensor(&x, &x_strides);
        }
        let (a, b) = ([a], [b]);
        (inputs[4], inputs[5], inputs[10]) = (tensor(&a, &[1]), tensor(&b, &[1]), tensor(&w, &[6, 1]));
        archive.program().check_guards(&inputs).map_err(|error| error.to_string())
    };
    assert_eq!(check(8, 12, 7), Ok(()));
    assert_eq!(check(16, 30, 7), Ok(()));
    let fails = |guard: &str, seen: &str| Err(format!("the inputs fail a guard of the program: {guard}, where {seen}"));
    assert_eq!(check(9, 12, 7), fails("(L['x'].size()[0] % 8) == 0", "L['x'].size()[0] is 9"));
    assert_eq!(
        check(8, 12, 8),
        fails("math.trunc(1.5*torch.sym_float(L['pair'].b.size()[0])) == 10", "L['pair'].b.size()[0] is 8")
    );
    let missing = archive.program().check_guards(&[InputValue::Int(3); 11]);
    let Err(GuardError::Missing { source_name, .. }) = missing else { panic!("{missing:?}") };
    assert_eq!(source_name, "L['x'].size()[0]");
}

#[test]
fn integers_that_are_inputs_have_guards_and_values() {
    for name in ["torch-2.15/symbols", "torch-2.9/symbols"] {
        let archive = open(name);
        let program = archive.program();
        assert_eq!(program.signature.inputs[1], InputSpec::User(Argument::SymInt(SymInt::Name("n".into()))));
        let guard = program.guards.iter().find(|guard| guard.text == "L['n'] <= L['x'].size()[0]").expect("a guard");
        let properties: Vec<_> = guard.sources.iter().map(|source| (source.input, source.property)).collect();
        assert_eq!(properties, [(1, Property::Value), (0, Property::Size(0))]);
        let inputs = [tensor(&[6], &[1]), InputValue::Int(3), tensor(&[2], &[1])];
        assert_eq!(program.check_guards(&inputs), Ok(()));
        let symbol = program.symbols.iter().find(|symbol| symbol.name == "u0").expect("a size that the data gives");
        assert_eq!((symbol.min, symbol.hint), (0, None));
        let values: Symbols = program.symbols.iter().map(|symbol| (symbol.name.clone(), 3)).collect();
        assert_eq!(program.graph.sym_floats["truediv_1"].eval(&values), Ok(1.5));
        assert_eq!(program.graph.sym_bools["ge"].eval(&values), Ok(true));
    }
}

#[test]
fn branches_are_kept_as_arguments_that_no_operator_takes() {
    let archive = open("torch-2.15/branch");
    let cond = &archive.program().graph.nodes[2];
    assert_eq!(cond.target, "torch.ops.higher_order.cond");
    assert_eq!(cond.inputs[1].value, Argument::Other("as_graph"));
}

#[test]
fn strides_of_inputs_are_expressions() {
    for name in ["torch-2.15/strided", "torch-2.12/strided"] {
        let archive = open(name);
        let tensor = &archive.program().graph.tensors["y"];
        let (sizes, strides) = (&tensor.sizes, &tensor.strides);
        assert_eq!((&strides[0], &strides[1]), (&Expr::Int(1), &sizes[0]), "a transposed input");
    }
}

#[test]
fn older_archives_are_refused_with_the_command_that_saves_them_anew() {
    let command = "python -c \"import torch; torch.export.save(torch.export.load('old.pt2'), 'new.pt2')\"  \
                   # with torch 2.9 or later";
    let refused = |name: &str| match try_open(name) {
        Ok(_) => panic!("{name} is read"),
        Err(error) => error.to_string(),
    };
    let expect =
        "schema version 8.8 of torch 2.8.0+cu128 is not read; 8.14 (torch 2.9) and later 8.x are. Save it anew: ";
    assert_eq!(refused("torch-2.8/pickled"), format!("{expect}{command}"));
    let expect = "the archive is of torch 2.7 or older: its weights are pickled, which is code to run. Save it anew: ";
    assert_eq!(refused("torch-2.7/pickled"), format!("{expect}{command}"));
}

#[test]
fn a_name_that_the_archive_does_not_hold_is_refused_with_those_it_does() {
    let path = format!("{}/tests/fixtures/torch-2.15/state.pt2", env!("CARGO_MANIFEST_DIR"));
    let Err(error) = Archive::open_named(&path, "decoder") else { panic!("it is read") };
    assert_eq!(error.to_string(), "the archive holds no program \"decoder\"; it holds model");
    let Err(error) = Archive::open(path + ".missing") else { panic!("it is read") };
    assert!(matches!(error, Error::Open { .. }), "{error}");
}
