//! Tensors share storages as in eager PyTorch, and what a program keeps is kept.

mod support;

use rapt_core::DType;
use rapt_graph::{Error, Interpreter, Item, Meta, OpError, Precision};
use rapt_pt2::{Argument, OutputSpec};
use support::{Sketch, counting, floats, form, integers, ints, numbers, t};

const F32: DType = DType::F32;

fn base() -> Sketch {
    Sketch::new().input("x", F32, &["2", "3"])
}

/// `x.transpose(0, 1)[1:].mul_(10)`, then x.
fn written_through_a_view() -> Sketch {
    let transposed = form(F32, &["3", "2"], Some(&["1", "3"]), "0");
    let sliced = form(F32, &["2", "2"], Some(&["1", "3"]), "1");
    base()
        .node(&["a"], "transpose.int", &[("self", t("x")), ("dim0", Argument::Int(0)), ("dim1", Argument::Int(1))])
        .tensor("a", transposed)
        .node(&["b"], "slice.Tensor", &[("self", t("a")), ("dim", Argument::Int(0)), ("start", Argument::Int(1))])
        .tensor("b", sliced.clone())
        .node(&["c"], "mul_.Tensor", &[("self", t("b")), ("other", Argument::Float(10.0))])
        .tensor("c", sliced)
}

#[test]
fn a_write_through_a_view_is_seen() {
    let sketch = written_through_a_view()
        .op("d", F32, &["2", "3"], "clone.default", &[("self", t("x"))])
        .output("c")
        .output("d");
    let Item::Tensor(input) = counting(F32, &[2, 3]) else { panic!() };
    let results = sketch.run(&[Item::Tensor(input.clone())]);
    assert_eq!(results, [vec![10.0, 40.0, 20.0, 50.0], vec![0.0, 10.0, 20.0, 3.0, 40.0, 50.0]]);
    // The caller's tensor is the one that was written.
    assert_eq!(input.floats(), [0.0, 10.0, 20.0, 3.0, 40.0, 50.0]);
}

#[test]
fn bindings_know_which_values_share_a_storage() {
    let graph = written_through_a_view().graph().unwrap();
    let binding = graph.bind(&rapt_pt2::Symbols::new()).unwrap();
    let [x, a, b, c] = ["x", "a", "b", "c"].map(|name| graph.find(name).unwrap());
    assert_eq!([a, b, c].map(|id| binding.storage(id)), [Some(x); 3]);
    assert_eq!(graph.nodes[2].op.mutates(), Some(b));
}

#[test]
fn a_conversion_that_changes_nothing_is_its_input() {
    let convert = |dtype: DType| {
        let to = [("self", t("x")), ("dtype", Argument::Dtype(dtype))];
        let sketch = base().op("a", dtype, &["2", "3"], "to.dtype", &to);
        sketch.op("b", dtype, &["2", "3"], "add_.Tensor", &[("self", t("a")), ("other", Argument::Int(1))]).output("x")
    };
    assert_eq!(convert(F32).run(&[counting(F32, &[2, 3])])[0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(convert(DType::F64).run(&[counting(F32, &[2, 3])])[0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
}

#[test]
fn a_reshape_is_a_view_where_strides_reach_and_else_a_copy() {
    let reshape = |target: &str, strides: &[&str]| {
        let dims = [("self", t("x")), ("dim0", Argument::Int(0)), ("dim1", Argument::Int(1))];
        let sketch = base().node(&["a"], target, &dims[..if target.starts_with('t') { 3 } else { 1 }]);
        let sizes: &[&str] = if target.starts_with('t') { &["3", "2"] } else { &["2", "3"] };
        sketch
            .tensor("a", form(F32, sizes, Some(strides), "0"))
            .op("b", F32, &["6"], "reshape.default", &[("self", t("a")), ("shape", ints(&[-1]))])
            .op("c", F32, &["6"], "zero_.default", &[("self", t("b"))])
            .output("x")
    };
    assert_eq!(reshape("alias.default", &["3", "1"]).run(&[counting(F32, &[2, 3])])[0], [0.0; 6]);
    assert_eq!(reshape("transpose.int", &["1", "3"]).run(&[counting(F32, &[2, 3])])[0][5], 5.0);
}

#[test]
fn a_write_to_a_tensor_that_overlaps_itself_is_refused() {
    let expanded = form(F32, &["2", "3"], Some(&["0", "1"]), "0");
    let sketch = Sketch::new()
        .input("x", F32, &["3"])
        .node(&["a"], "expand.default", &[("self", t("x")), ("size", ints(&[2, 3]))])
        .tensor("a", expanded.clone())
        .node(&["b"], "neg_.default", &[("self", t("a"))])
        .tensor("b", expanded);
    assert_eq!(sketch.op_error(&[counting(F32, &[3])]), OpError::SelfOverlap);
}

/// `cache[0] += x; y = cache / i`, which fails where i is 0.
fn keeps() -> Sketch {
    let row = form(DType::I64, &["2"], None, "0");
    Sketch::new()
        .buffer("cache", DType::I64, &["2", "2"])
        .input("x", DType::I64, &["2"])
        .input("i", DType::I64, &["2"])
        .node(&["a"], "select.int", &[("self", t("cache")), ("dim", Argument::Int(0)), ("index", Argument::Int(0))])
        .tensor("a", row.clone())
        .node(&["b"], "add_.Tensor", &[("self", t("a")), ("other", t("x"))])
        .tensor("b", row)
        .op("y", DType::I64, &["2", "2"], "floor_divide.default", &[("self", t("cache")), ("other", t("i"))])
        .output("y")
}

#[test]
fn a_session_keeps_what_is_written_and_a_failed_run_writes_nothing() {
    let sketch = keeps();
    let graph = sketch.graph().unwrap();
    let mut interpreter = Interpreter::new(&graph, Precision::Rounded);
    let cache = integers(DType::I64, &[2, 2], &[1, 1, 1, 1]);
    interpreter.set("cache", &cache).unwrap();
    let pair = |a, b| Item::Tensor(integers(DType::I64, &[2], &[a, b]));
    assert_eq!(numbers(&interpreter.run(&[pair(5, 6), pair(1, 1)]).unwrap()[0]), [6.0, 7.0, 1.0, 1.0]);
    assert_eq!(cache.ints(), [6, 7, 1, 1]);
    let failed = interpreter.run(&[pair(5, 6), pair(1, 0)]);
    assert!(matches!(failed, Err(Error::Node { cause: OpError::ZeroDivision, .. })));
    assert_eq!(cache.ints(), [6, 7, 1, 1]);
    assert_eq!(numbers(&interpreter.run(&[pair(1, 1), pair(1, 1)]).unwrap()[0]), [7.0, 8.0, 1.0, 1.0]);
    assert_eq!(interpreter.state("cache").unwrap().ints(), [7, 8, 1, 1]);
}

#[test]
fn declared_mutations_are_made_after_the_run() {
    let sketch = Sketch::new()
        .buffer("cache", F32, &["2"])
        .input("x", F32, &["2"])
        .op("a", F32, &["2"], "add.Tensor", &[("self", t("cache")), ("other", t("x"))])
        .output_of(t("a"), OutputSpec::BufferMutation { value: "a".into(), name: "cache".into() })
        .output_of(t("cache"), OutputSpec::InputMutation { value: "cache".into(), input: "x".into() })
        .output("a");
    let graph = sketch.graph().unwrap();
    let mut interpreter = Interpreter::new(&graph, Precision::Rounded);
    interpreter.set("cache", &floats(F32, &[2], &[1.0, 2.0])).unwrap();
    let x = floats(F32, &[2], &[10.0, 20.0]);
    let results = interpreter.run(&[Item::Tensor(x.clone())]).unwrap();
    assert_eq!(numbers(&results[0]), [11.0, 22.0]);
    assert_eq!(interpreter.state("cache").unwrap().floats(), [11.0, 22.0]);
    // x took what cache held before.
    assert_eq!(x.floats(), [1.0, 2.0]);
}

#[test]
fn an_input_may_start_anywhere_in_its_storage() {
    let sketch = base().op("y", F32, &["2", "3"], "neg.default", &[("self", t("x"))]).output("y");
    let Item::Tensor(long) = counting(F32, &[10]) else { panic!() };
    let meta = Meta { shape: vec![2, 3], strides: vec![3, 1], offset: 4, ..long.meta.clone() };
    assert_eq!(sketch.run(&[Item::Tensor(long.view(meta))])[0], [-4.0, -5.0, -6.0, -7.0, -8.0, -9.0]);
}

/// Two tensors of two dtypes: ATen promotes one inside of the operator, the graph says so by a node.
#[test]
fn promotion_is_a_node() {
    let sketch = base()
        .input("i", DType::I64, &["3"])
        .op("y", F32, &["2", "3"], "add.Tensor", &[("self", t("x")), ("other", t("i"))])
        .output("y");
    let graph = sketch.graph().unwrap();
    assert_eq!(
        graph.nodes.iter().map(|node| node.target.as_str()).collect::<Vec<_>>(),
        ["promotion", "torch.ops.aten.add.Tensor"]
    );
    let results = sketch.run(&[counting(F32, &[2, 3]), counting(DType::I64, &[3])]);
    assert_eq!(results[0], [0.0, 2.0, 4.0, 3.0, 5.0, 7.0]);
}

#[test]
fn wide_floats_are_not_rounded() {
    let sketch = Sketch::new()
        .input("x", F32, &["1"])
        .op("y", F32, &["1"], "div.Tensor", &[("self", t("x")), ("other", Argument::Float(3.0))])
        .output("y");
    let graph = sketch.graph().unwrap();
    let run = |precision| {
        let x = floats(F32, &[1], &[1.0]);
        numbers(&Interpreter::new(&graph, precision).run(&[Item::Tensor(x)]).unwrap()[0])[0]
    };
    assert_eq!(run(Precision::Rounded), f64::from(1f32 / 3.0));
    assert_eq!(run(Precision::Wide), 1.0 / 3.0);
}
