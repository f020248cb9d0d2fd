//! Programs on any threads: the same bits for any number of them, engines of one's own, and executors that fail.
#![allow(missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rapt::model::{Input, InputForm, Model, ModelError, OutputForm};
use rapt::{DType, Engine, Error, Executor, Pool, Queue, Result, SerialExecutor, Tensor, View, ViewMut};

const ROWS: usize = 150;
const WIDTH: usize = 96;

/// The JSON of a program on float32 tensors: a linear layer, gelu, a residual, a norm, the scores of all rows, their softmax.
fn program() -> Vec<u8> {
    let tensor = |name: &str| format!(r#"{{"as_tensor": {{"name": "{name}"}}}}"#);
    let meta = |name: &str, sizes: [usize; 2]| {
        let int = |n: usize| format!(r#"{{"as_int": {n}}}"#);
        let (sizes, strides) = (sizes.map(int).join(", "), [sizes[1], 1].map(int).join(", "));
        format!(
            r#""{name}": {{"dtype": {}, "sizes": [{sizes}], "requires_grad": false, "device": {{"type": "cpu", "index": null}},
            "strides": [{strides}], "storage_offset": {{"as_int": 0}}, "layout": 7}}"#,
            DType::F32.code()
        )
    };
    let node = |name: &str, target: &str, inputs: &[(&str, String)]| {
        let given: Vec<String> = inputs
            .iter()
            .map(|(name, argument)| format!(r#"{{"name": "{name}", "arg": {argument}, "kind": 1}}"#))
            .collect();
        format!(
            r#"{{"target": "torch.ops.aten.{target}", "inputs": [{}], "outputs": [{}], "metadata": {{}}, "name": "{name}"}}"#,
            given.join(", "),
            tensor(name)
        )
    };
    let nodes = [
        node("up", "linear.default", &[("input", tensor("x")), ("weight", tensor("w"))]),
        node("act", "gelu.default", &[("self", tensor("up"))]),
        node("sum", "add.Tensor", &[("self", tensor("act")), ("other", tensor("x"))]),
        node("turned", "permute.default", &[("self", tensor("sum")), ("dims", r#"{"as_ints": [1, 0]}"#.into())]),
        node("scores", "mm.default", &[("self", tensor("sum")), ("mat2", tensor("turned"))]),
        node(
            "soft",
            "_softmax.default",
            &[
                ("self", tensor("scores")),
                ("dim", r#"{"as_int": 1}"#.into()),
                ("half_to_float", r#"{"as_bool": false}"#.into()),
            ],
        ),
        node("y", "mm.default", &[("self", tensor("soft")), ("mat2", tensor("sum"))]),
    ];
    let wide = |name: &str| meta(name, [ROWS, WIDTH]);
    let turned = meta("turned", [WIDTH, ROWS]).replace(
        &format!(r#""strides": [{{"as_int": {ROWS}}}, {{"as_int": 1}}]"#),
        &format!(r#""strides": [{{"as_int": 1}}, {{"as_int": {WIDTH}}}]"#),
    );
    let metas = [
        wide("x"),
        meta("w", [WIDTH, WIDTH]),
        wide("up"),
        wide("act"),
        wide("sum"),
        turned,
        meta("scores", [ROWS, ROWS]),
        meta("soft", [ROWS, ROWS]),
        wide("y"),
    ];
    let specs = ["x", "w"].map(|name| format!(r#"{{"user_input": {{"arg": {}}}}}"#, tensor(name)));
    format!(
        r#"{{"graph_module": {{"graph": {{
            "inputs": [{}, {}], "outputs": [{y}], "nodes": [{}], "tensor_values": {{{}}}, "sym_int_values": {{}},
            "sym_bool_values": {{}}, "is_single_tensor_return": false, "custom_obj_values": {{}}, "sym_float_values": {{}}}},
          "signature": {{"input_specs": [{}], "output_specs": [{{"user_output": {{"arg": {y}}}}}]}},
          "module_call_graph": [], "metadata": {{}}, "treespec_namedtuple_fields": {{}}}},
          "opset_version": {{"aten": 10}}, "range_constraints": {{}}, "schema_version": {{"major": 8, "minor": 20}},
          "verifiers": [], "torch_version": "2.15.0", "guards_code": []}}"#,
        tensor("x"),
        tensor("w"),
        nodes.join(", "),
        metas.join(", "),
        specs.join(", "),
        y = tensor("y"),
    )
    .into_bytes()
}

fn model() -> Model {
    Model::from_json(&program()).expect("a program")
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|n| ((n * 37) % 101) as f32 / 50.0 - 1.0).collect()
}

fn forms() -> [InputForm; 2] {
    [vec![ROWS, WIDTH], vec![WIDTH, WIDTH]].map(|shape| InputForm::Tensor { dtype: DType::F32, shape })
}

/// The bits of one run of `model` on `queue`.
fn bits(model: &Model, queue: &Queue<'_>) -> std::result::Result<Vec<u32>, ModelError> {
    let bound = model.bind_on(&forms(), queue)?;
    let (x, w) = (numbers(ROWS * WIDTH), numbers(WIDTH * WIDTH));
    let mut out = vec![f32::NAN; ROWS * WIDTH];
    let view = |numbers, shape: [usize; 2]| View::contiguous("x", numbers, shape.into()).map(Input::Read);
    let mut inputs = [view(&x, [ROWS, WIDTH])?, view(&w, [WIDTH, WIDTH])?];
    let mut places = [Some(ViewMut::contiguous("out", &mut out, [ROWS, WIDTH].into())?)];
    model.session().run_on(&bound, &mut inputs, &mut places, queue)?;
    Ok(out.iter().map(|x| x.to_bits()).collect())
}

/// Counts the chunks that a pool is given.
struct Counted {
    pool: Pool,
    most: AtomicUsize,
}

impl Counted {
    fn new(threads: usize) -> Counted {
        Counted { pool: Pool::new(threads), most: AtomicUsize::new(0) }
    }
}

impl Executor for Counted {
    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        self.most.fetch_max(chunks, Ordering::Relaxed);
        self.pool.parallel_for(chunks, work)
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let model = model();
    let expected = bits(&model, &Queue::Host(&SerialExecutor)).expect("served");
    assert!(expected.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    for threads in [1, 2, 3, 5] {
        let executor = Counted::new(threads);
        assert!(bits(&model, &Queue::Host(&executor)).expect("served") == expected, "{threads} threads");
        // One thread asks nobody; more share the work, and never more than were asked for.
        let most = executor.most.into_inner();
        assert!(if threads == 1 { most <= 1 } else { most == threads }, "{most} chunks for {threads} threads");
    }
}

#[test]
fn a_model_runs_on_the_engine_that_it_is_put_on() {
    let shared = model();
    let expected = bits(&shared, &Queue::Host(&SerialExecutor)).expect("served");
    for threads in [1, 3] {
        let engine = Arc::new(Engine::new(Some(threads)).expect("threads"));
        let model = shared.on(Arc::clone(&engine));
        assert_eq!(model.engine().expect("its own").threads().get(), threads);
        let bound = model.bind(&forms()).expect("bound");
        assert_eq!(bound.threads(), threads);
        let row = bound.explain().rows().iter().find(|(name, _)| name == "threads").cloned();
        assert_eq!(row.map(|(_, text)| text), Some(threads.to_string()));
        let (x, w) = (numbers(ROWS * WIDTH), numbers(WIDTH * WIDTH));
        let view = |numbers, shape: [usize; 2]| Input::Read(View::contiguous("x", numbers, shape.into()).unwrap());
        let outputs = model.run(&mut [view(&x, [ROWS, WIDTH]), view(&w, [WIDTH, WIDTH])]).expect("served");
        let [rapt::model::Output::Tensor(out)] = outputs.as_slice() else { panic!("one tensor") };
        let got: Vec<u32> = out.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect();
        assert!(got == expected, "{threads} threads");
    }
    let plain = shared.bind(&forms()).expect("bound");
    assert_eq!(plain.threads(), rapt::default_engine().unwrap().threads().get());
    assert!(matches!(plain.outputs(), [OutputForm::Tensor { .. }]));
}

/// Runs nothing and says that it is done.
struct Idle;

impl Executor for Idle {
    fn threads(&self) -> usize {
        2
    }

    fn parallel_for(&self, _chunks: usize, _work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        Ok(())
    }
}

/// Runs every chunk under a number of its own, and some that nobody asked for.
struct Wild;

impl Executor for Wild {
    fn threads(&self) -> usize {
        2
    }

    fn parallel_for(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<()> {
        std::thread::scope(|scope| {
            for chunk in 0..chunks + 3 {
                scope.spawn(move || work(chunk * 1_000_003 + 7));
            }
        });
        Ok(())
    }
}

#[test]
fn an_executor_that_leaves_work_undone_is_an_error_and_one_that_numbers_wildly_harms_nothing() {
    let model = model();
    let expected = bits(&model, &Queue::Host(&SerialExecutor)).expect("served");
    let error = bits(&model, &Queue::Host(&Idle)).unwrap_err();
    assert!(matches!(error, ModelError::Core(Error::WorkLeftUndone { done: 0, items }) if items > 1), "{error}");
    assert!(bits(&model, &Queue::Host(&Wild)).expect("served") == expected);
    let error = bits(&model, &Queue::Cuda { device: 0, stream: 0 }).unwrap_err();
    assert!(matches!(error, ModelError::Core(Error::Unsupported { .. })), "{error}");
}

#[test]
fn the_binding_of_another_program_is_refused() {
    let (one, other) = (model(), model());
    let bound = other.bind(&forms()).expect("bound");
    let (x, w) = (numbers(ROWS * WIDTH), numbers(WIDTH * WIDTH));
    let view = |numbers, shape: [usize; 2]| Input::Read(View::contiguous("x", numbers, shape.into()).unwrap());
    let mut out = Tensor::zeros(DType::F32, [ROWS, WIDTH].into()).unwrap();
    let mut places = [Some(out.view_mut().unwrap())];
    let mut inputs = [view(&x, [ROWS, WIDTH]), view(&w, [WIDTH, WIDTH])];
    let error = one.session().run_into(&bound, &mut inputs, &mut places).unwrap_err();
    assert!(matches!(error, ModelError::OtherModel), "{error}");
    // On another engine it is the same program.
    let engine = Arc::new(Engine::new(Some(2)).expect("threads"));
    one.on(engine).session().run_into(&one.bind(&forms()).unwrap(), &mut inputs, &mut places).expect("served");
}
