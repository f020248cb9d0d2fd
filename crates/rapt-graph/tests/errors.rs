//! Every way in which a program, or a call of it, is refused: the exact error.

mod support;

use rapt_core::DType;
use rapt_graph::{Error, Interpreter, Item, OpError, Precision};
use rapt_pt2::{Argument, ExprError, InputSpec, OutputSpec};
use support::{Sketch, counting, floats, form, integers, ints, s, t};

const F32: DType = DType::F32;

/// `y = op(x)` on a float32 tensor of [s0, 4].
fn one(target: &str, arguments: &[(&str, Argument)]) -> Sketch {
    let mut all = vec![("self", t("x"))];
    all.extend_from_slice(arguments);
    base().op("y", F32, &["s0", "4"], target, &all).output("y")
}

fn base() -> Sketch {
    Sketch::new().symbol("s0", 2, Some(64)).input("x", F32, &["s0", "4"])
}

fn x() -> Item {
    counting(F32, &[3, 4])
}

#[test]
fn all_missing_operators_are_named_at_once() {
    let sketch = base()
        .op("a", F32, &["s0", "4"], "fft.default", &[("self", t("x"))])
        .op("b", F32, &["s0", "4"], "gelu.default", &[("self", t("a")), ("nonsense", Argument::Int(1))])
        .op("c", F32, &["s0", "4"], "fft.default", &[("self", t("b"))])
        .op("d", F32, &["s0", "4"], "bessel.default", &[("self", t("c"))]);
    let Err(Error::MissingOps { ops }) = sketch.graph() else { panic!() };
    let expected = [("torch.ops.aten.fft.default", 2, "n0"), ("torch.ops.aten.bessel.default", 1, "n3")];
    assert_eq!(ops, expected.map(|(target, count, node)| (target.to_owned(), count, node.to_owned())));
}

#[test]
fn arguments_are_those_of_the_schema() {
    let missing = base().op("y", F32, &["s0", "4"], "neg.default", &[]);
    assert_eq!(missing.op_error(&[]), OpError::MissingArgument("self".into()));
    let kind = one("transpose.int", &[("dim0", Argument::Bool(true)), ("dim1", Argument::Int(0))]);
    assert!(matches!(kind.op_error(&[]), OpError::ArgumentKind { name, .. } if name == "dim0"));
    assert_eq!(one("neg.default", &[("out", Argument::None)]).op_error(&[]), OpError::UnknownArgument("out".into()));
    let value = base().op(
        "y",
        F32,
        &["s0", "4"],
        "dropout.default",
        &[("input", t("x")), ("p", Argument::Float(0.5)), ("train", Argument::Bool(true))],
    );
    assert!(matches!(value.op_error(&[]), OpError::ArgumentValue { name, .. } if name == "train"));
    let device = Argument::Device(rapt_pt2::Device { kind: "cuda".into(), index: Some(0) });
    assert!(matches!(
        one("to.device", &[("device", device), ("dtype", Argument::Dtype(F32))]).op_error(&[]),
        OpError::ArgumentValue { name, .. } if name == "device"
    ));
}

#[test]
fn a_program_is_a_graph() {
    let undefined = base().op("y", F32, &["s0", "4"], "neg.default", &[("self", t("z"))]);
    assert_eq!(undefined.graph().unwrap_err(), Error::Undefined { user: "node n0".into(), name: "z".into() });
    assert_eq!(
        base().output("z").graph().unwrap_err(),
        Error::Undefined { user: "the signature".into(), name: "z".into() }
    );
    let later = base().op("y", F32, &["s0", "4"], "neg.default", &[("self", t("z"))]).op(
        "z",
        F32,
        &["s0", "4"],
        "neg.default",
        &[("self", t("x"))],
    );
    assert!(matches!(later.graph(), Err(Error::Undefined { name, .. }) if name == "z"));
    let twice = base().op("x", F32, &["s0", "4"], "neg.default", &[("self", t("x"))]);
    assert_eq!(twice.graph().unwrap_err(), Error::DefinedTwice("x".into()));
    let mut count = base();
    count.0.signature.inputs.clear();
    assert_eq!(count.graph().unwrap_err(), Error::SignatureCount { what: "inputs", graph: 1, signature: 0 });
    let kind = base().given(Argument::Other("as_custom_obj"), InputSpec::User(Argument::Other("as_custom_obj")));
    assert!(matches!(kind.graph(), Err(Error::Kind { got, .. }) if got == "as_custom_obj"));
    let state = base().output_of(t("x"), OutputSpec::BufferMutation { value: "x".into(), name: "cache".into() });
    assert_eq!(state.graph().unwrap_err(), Error::UnknownState("cache".into()));
}

/// Dtype, shape, strides and offset: each is certified by itself, and the error has both sides.
#[test]
fn what_is_inferred_must_be_what_the_program_says() {
    let stated = [
        (form(DType::F64, &["s0", "4"], None, "0"), "float64"),
        (form(F32, &["s0", "5"], None, "0"), "5]"),
        (form(F32, &["s0 + 1", "4"], None, "0"), "float32 [5, 4]"),
        (form(F32, &["s0", "4"], Some(&["1", "s0"]), "0"), "strides [1, 4]"),
        (form(F32, &["s0", "4"], None, "1"), "offset 1"),
    ];
    for (meta, part) in stated {
        let error = one("neg.default", &[]).tensor("y", meta).error(&[x()]);
        let Error::Disagrees { node, value, inferred, stated, .. } = &error else { panic!("{error}") };
        assert_eq!((node.as_str(), value.as_str()), ("n0", "y"));
        assert!(inferred.contains("float32 [4, 4] strides [4, 1] offset 0"), "{inferred}");
        assert!(stated.contains(part), "{stated}");
    }
    // The same for integers.
    let size = [("self", t("x")), ("dim", Argument::Int(0))];
    let int = base().node_of(vec![s("n")], "torch.ops.aten.sym_size.int", &size).sym("n", "s0 + 1");
    assert!(matches!(int.error(&[x()]), Error::Disagrees { value, .. } if value == "n"));
}

/// A stride that agrees at the sizes of the export, and nowhere else, is found.
#[test]
fn what_nobody_reads_is_not_compared_where_torch_says_so() {
    let sorted = |indices: &str, output: &str| {
        let two = base().node(&["v", indices], "sort.default", &[("self", t("x"))]);
        let two = two.tensor("v", form(F32, &["s0", "4"], None, "0"));
        two.tensor(indices, form(F32, &["s0", "4"], None, "0")).output(output).graph().unwrap().verify()
    };
    assert!(sorted("sort_unused_1", "v").is_ok());
    for (indices, output) in [("i", "v"), ("sort_unused_1", "sort_unused_1")] {
        assert!(matches!(sorted(indices, output), Err(Error::Disagrees { value, .. }) if value == indices));
    }
}

#[test]
fn agreement_at_one_binding_is_not_enough() {
    let meta = form(F32, &["s0", "4"], Some(&["s0", "1"]), "0");
    let error = one("neg.default", &[]).tensor("y", meta).error(&[x()]);
    assert!(matches!(&error, Error::Disagrees { stated, .. } if stated.contains("[2, 4] strides [2, 1]")), "{error}");
}

#[test]
fn strides_that_lead_nowhere_are_not_compared() {
    let view = [("self", t("x")), ("dim", Argument::Int(0))];
    let meta = form(F32, &["1", "s0", "4"], Some(&["77", "4", "1"]), "0");
    let sketch = base().node(&["y"], "unsqueeze.default", &view).tensor("y", meta).output("y");
    assert_eq!(sketch.run(&[x()])[0].len(), 12);
}

#[test]
fn expressions_without_a_value_are_errors() {
    let overflow = one("neg.default", &[]).tensor("y", form(F32, &["s0*9223372036854775807", "4"], None, "0"));
    let Error::Expr { value, cause: ExprError::Overflow(_) } = overflow.error(&[x()]) else { panic!() };
    assert_eq!(value, "y");
    let unbound = Sketch::new().input("x", F32, &["s9"]);
    assert_eq!(unbound.graph().unwrap().solve(&[]).unwrap_err(), Error::InputCount { expected: 1, got: 0 });
    assert!(matches!(unbound.error(&[x()]), Error::Expr { cause: ExprError::Unbound(symbol), .. } if symbol == "s9"));
    let negative = Sketch::new().input("x", F32, &["-3"]);
    assert!(matches!(negative.graph().unwrap().verify(), Err(Error::Kind { name, .. }) if name == "x"));
    let huge = Sketch::new().input("x", F32, &["4611686018427387904", "4"]);
    assert!(matches!(huge.graph().unwrap().verify(), Err(Error::Kind { name, .. }) if name == "x"));
}

#[test]
fn inputs_are_checked_before_anything_runs() {
    let sketch = one("neg.default", &[]).guard("n % 3 == 0");
    let name = || "x".to_owned();
    assert_eq!(sketch.error(&[]), Error::InputCount { expected: 1, got: 0 });
    let kind = sketch.error(&[Item::Int(3)]);
    assert_eq!(kind, Error::InputKind { name: name(), expected: "a tensor".into(), got: "the integer 3".into() });
    let dtype = sketch.error(&[counting(DType::F64, &[3, 4])]);
    assert_eq!(dtype, Error::InputDtype { name: name(), expected: F32, got: DType::F64 });
    assert_eq!(sketch.error(&[counting(F32, &[3])]), Error::InputRank { name: name(), expected: 2, got: 1 });
    let size = sketch.error(&[counting(F32, &[3, 5])]);
    assert_eq!(size, Error::InputSize { name: name(), dim: 1, expected: "4".into(), got: 5 });
    let range = sketch.error(&[counting(F32, &[66, 4])]);
    assert_eq!(range, Error::SymbolRange { symbol: "s0".into(), value: 66, min: 2, max: Some(64) });
    assert!(matches!(sketch.error(&[counting(F32, &[4, 4])]), Error::Guard(rapt_pt2::GuardError::Fails { .. })));
    let Item::Tensor(transposed) = counting(F32, &[4, 3]) else { panic!() };
    let meta = rapt_graph::Meta { shape: vec![3, 4], strides: vec![1, 3], ..transposed.meta.clone() };
    let strides = sketch.error(&[Item::Tensor(transposed.view(meta))]);
    assert_eq!(strides, Error::InputStrides { name: name(), expected: vec![4, 1], got: vec![1, 3] });
}

#[test]
fn guards_see_the_strides_that_the_program_states() {
    let lies = form(F32, &["s0", "3"], Some(&["1", "s0"]), "0");
    let mut sketch = Sketch::new().symbol("s0", 2, Some(64)).input_of("x", lies.clone());
    sketch = sketch.tensor("y", lies).node(&["y"], "neg.default", &[("self", t("x"))]).output("y").guard("n == 1");
    sketch.0.guards[0].sources[0].property = rapt_pt2::Property::Stride(0);
    // Whoever runs it lays an input of other strides out so first: that is what the graph then reads.
    let graph = sketch.graph().unwrap();
    let symbols = graph.solve(&[rapt_graph::Fact::Tensor(rapt_graph::Meta::contiguous(F32, &[5, 3]))]).unwrap();
    assert_eq!(symbols["s0"], 5);
    sketch.0.guards[0].condition = rapt_pt2::parse_condition("n == 3").unwrap();
    let refused =
        sketch.graph().unwrap().solve(&[rapt_graph::Fact::Tensor(rapt_graph::Meta::contiguous(F32, &[5, 3]))]);
    assert!(matches!(refused, Err(Error::Guard(rapt_pt2::GuardError::Fails { .. }))), "{refused:?}");
}

#[test]
fn sizes_determine_symbols_and_must_agree() {
    let sketch = Sketch::new()
        .symbol("s0", 2, None)
        .symbol("s1", 2, None)
        .input("a", F32, &["2*s0 + 1"])
        .input("b", F32, &["s1", "s0*s1"])
        .op("y", F32, &["2*s0 + 1"], "neg.default", &[("self", t("a"))])
        .output("y");
    assert_eq!(sketch.run(&[counting(F32, &[7]), counting(F32, &[5, 15])])[0].len(), 7);
    let odd = sketch.error(&[counting(F32, &[8]), counting(F32, &[5, 15])]);
    assert!(matches!(odd, Error::InputSize { name, dim: 0, .. } if name == "a"));
    let product = sketch.error(&[counting(F32, &[7]), counting(F32, &[5, 16])]);
    assert!(
        matches!(&product, Error::InputSize { name, dim: 1, expected, got: 16 } if name == "b" && expected.starts_with("15"))
    );
    let even = Sketch::new().symbol("s0", 2, None).input("a", F32, &["4", "2*s0"]);
    assert_eq!(
        even.error(&[counting(F32, &[4, 5])]),
        Error::InputSize { name: "a".into(), dim: 1, expected: "2*s0 with a whole number s0".into(), got: 5 }
    );
    let unsolved = Sketch::new().symbol("s0", 2, None).input("a", F32, &["s0**2"]);
    assert_eq!(unsolved.error(&[counting(F32, &[9])]), Error::Unsolved("s0".into()));
    let nowhere = Sketch::new().symbol("s0", 2, None).input("a", F32, &["4"]);
    assert_eq!(nowhere.error(&[counting(F32, &[4])]), Error::Unsolved("s0".into()));
}

#[test]
fn symbols_that_only_strides_have_are_those_of_the_given_tensor() {
    let sketch = Sketch::new()
        .symbol("s0", 2, None)
        .symbol("s1", i64::MIN, None)
        .symbol("s2", 2, Some(50))
        .input_of("x", form(F32, &["s0", "6"], Some(&["6*s1", "s1"]), "0"))
        .input_of("y", form(F32, &["s0", "3"], Some(&["s2", "1"]), "s1*s2"))
        .op("z", F32, &["s0", "6"], "neg.default", &[("self", t("x"))])
        .output("z");
    let graph = sketch.graph().unwrap();
    let strided = |shape: [i64; 2], strides: [i64; 2]| {
        rapt_graph::Fact::Tensor(rapt_graph::Meta {
            strides: strides.to_vec(),
            ..rapt_graph::Meta::contiguous(F32, &shape)
        })
    };
    let solved = |x, y| {
        let symbols = graph.solve(&[strided([5, 6], x), strided([5, 3], y)]).unwrap();
        (symbols["s0"], symbols["s1"], symbols["s2"])
    };
    assert_eq!(solved([6, 1], [3, 1]), (5, 1, 3));
    assert_eq!(solved([12, 2], [7, 1]), (5, 2, 7));
    assert_eq!(solved([1, 5], [3, 1]), (5, 5, 3));
    // No stride gives a value in the range, or a guard refuses it: what was at export.
    assert_eq!(solved([6, 1], [99, 1]), (5, 1, 4));
    assert_eq!(
        sketch.run(&[counting(F32, &[5, 6]), counting(F32, &[5, 3])])[0],
        (0..30).map(|n| -f64::from(n)).collect::<Vec<_>>()
    );
}

#[test]
fn inputs_fixed_at_export_keep_their_place() {
    let fixed = |value: Argument| InputSpec::Fixed { name: "flag".into(), value };
    let sketch = base().given(Argument::Bool(true), fixed(Argument::Bool(true))).output("x");
    assert_eq!(sketch.run(&[x(), Item::Bool(true)])[0].len(), 12);
    assert!(matches!(sketch.error(&[x(), Item::Bool(false)]), Error::InputKind { name, .. } if name == "flag"));
    assert_eq!(sketch.error(&[x()]), Error::InputCount { expected: 2, got: 1 });
}

#[test]
fn state_is_that_of_the_program() {
    let sketch = Sketch::new()
        .buffer("cache", F32, &["4"])
        .op("y", F32, &["4"], "neg.default", &[("self", t("cache"))])
        .output("y");
    let graph = sketch.graph().unwrap();
    let mut interpreter = Interpreter::new(&graph, Precision::Rounded);
    assert_eq!(interpreter.run(&[]).unwrap_err(), Error::MissingState("cache".into()));
    let four = floats(F32, &[4], &[1.0; 4]);
    assert_eq!(interpreter.set("cash", &four).unwrap_err(), Error::UnknownState("cash".into()));
    let wide = floats(DType::F64, &[4], &[1.0; 4]);
    assert!(matches!(interpreter.set("cache", &wide), Err(Error::StateForm { .. })));
    interpreter.set("cache", &four).unwrap();
    assert!(interpreter.run(&[]).is_ok());
}

#[test]
fn operations_refuse_what_does_not_fit() {
    let dim = one("transpose.int", &[("dim0", Argument::Int(2)), ("dim1", Argument::Int(0))]);
    assert_eq!(dim.op_error(&[x()]), OpError::DimOutOfRange { dim: 2, rank: 2 });
    let index = one("select.int", &[("dim", Argument::Int(1)), ("index", Argument::Int(4))]);
    assert_eq!(index.op_error(&[x()]), OpError::IndexOutOfRange { index: 4, dim: 1, size: 4 });
    assert!(matches!(one("view.default", &[("size", ints(&[-1, 3]))]).op_error(&[x()]), OpError::Shape(_)));
    assert!(matches!(one("expand.default", &[("size", ints(&[4, 8]))]).op_error(&[x()]), OpError::Shape(_)));
    assert_eq!(one("bitwise_not.default", &[]).op_error(&[x()]), OpError::Dtype { what: "bitwise_not", dtype: F32 });
    let negative = base().op("y", F32, &["s0", "4"], "zeros.default", &[("size", ints(&[-1]))]);
    assert!(matches!(negative.op_error(&[x()]), OpError::NoForm(_)));
    let full = [("self", t("x")), ("fill_value", Argument::Float(1e39))];
    let overflow = base().op("y", F32, &["s0", "4"], "full_like.default", &full);
    assert!(matches!(overflow.op_error(&[x()]), OpError::Overflow { dtype: F32, .. }));
    let size = ("size", ints(&[1 << 40]));
    let large = base().op("y", F32, &["1099511627776"], "zeros.default", &[size]).output("y");
    assert_eq!(large.op_error(&[x()]), OpError::TooLarge(1 << 40));
    let two = base().node(&["a", "b"], "neg.default", &[("self", t("x"))]);
    let two = two.tensor("a", form(F32, &["s0", "4"], None, "0")).tensor("b", form(F32, &["s0", "4"], None, "0"));
    assert_eq!(two.op_error(&[x()]), OpError::ResultCount { given: 1, named: 2 });
}

#[test]
fn integers_refuse_what_torch_refuses() {
    let run = |target: &str, name: &str, value: Argument, values: &[i64]| {
        let arguments = [("self", t("i")), (name, value)];
        let sketch = Sketch::new().input("i", DType::I64, &["2"]).op("y", DType::I64, &["2"], target, &arguments);
        sketch.output("y").op_error(&[Item::Tensor(integers(DType::I64, &[2], values))])
    };
    assert_eq!(run("floor_divide.Scalar", "other", Argument::Int(0), &[1, 2]), OpError::ZeroDivision);
    assert_eq!(run("remainder.Scalar", "other", Argument::Int(0), &[1, 2]), OpError::ZeroDivision);
    assert!(matches!(run("pow.Tensor_Scalar", "exponent", Argument::Int(-1), &[1, 2]), OpError::Refused(_)));
    let float = run("add_.Scalar", "other", Argument::Float(1.5), &[1, 2]);
    assert_eq!(float, OpError::DtypesDiffer(F32, DType::I64));
}

#[test]
fn what_a_program_asserts_is_checked() {
    let assert = |dtype| {
        let asserted = [("a", t("x")), ("dtype", Argument::Dtype(dtype))];
        base().node_of(Vec::new(), "torch.ops.aten._assert_tensor_metadata.default", &asserted).output("x")
    };
    assert_eq!(assert(F32).run(&[x()])[0].len(), 12);
    assert!(matches!(assert(DType::F64).op_error(&[x()]), OpError::Assertion { .. }));
    let constrain = |max| {
        let size = [("self", t("x")), ("dim", Argument::Int(0))];
        let range = [("size", s("n")), ("min", Argument::Int(0)), ("max", Argument::Int(max))];
        let sketch = base().node_of(vec![s("n")], "torch.ops.aten.sym_size.int", &size).sym("n", "s0");
        sketch.node_of(Vec::new(), "torch.ops.aten.sym_constrain_range_for_size.default", &range).output("x")
    };
    assert_eq!(constrain(4).run(&[x()])[0].len(), 12);
    assert!(matches!(constrain(4).op_error(&[counting(F32, &[5, 4])]), OpError::Assertion { .. }));
    let float = [("self", t("x")), ("other", Argument::SymFloat("n".into()))];
    let sketch =
        base().node_of(vec![s("n")], "torch.ops.aten.sym_size.int", &[("self", t("x")), ("dim", Argument::Int(0))]);
    let sketch = sketch.sym("n", "s0").op("y", F32, &["s0", "4"], "mul.Scalar", &float);
    assert!(matches!(sketch.op_error(&[x()]), OpError::NotAFloat(_)));
}
