//! What calls of exported programs promise beside the rules on dtypes: ports, guards, sessions, numbers, archives, threads.

use std::ffi::CStr;

use engine::DType;
use rapt_c::rapt_error::*;
use rapt_c::{
    rapt_bound_destroy, rapt_bound_output, rapt_model, rapt_model_bind, rapt_model_destroy, rapt_model_from_bytes,
    rapt_model_input, rapt_model_num_inputs, rapt_model_num_outputs, rapt_model_open, rapt_model_output,
    rapt_session_create, rapt_session_destroy, rapt_session_held_bytes, rapt_session_reset, rapt_session_run,
    rapt_tensor,
};

use crate::handles::{Memory, Model, Session, element, empty_port, shape, tensors};
use crate::programs::{binary, clone_of, copy, counter, even_rows, value};
use crate::support::{Owned, last_error};

#[test]
fn a_port_has_its_name_its_sizes_and_whether_they_vary() {
    let text = |at: *const std::ffi::c_char| {
        // SAFETY: a string of the model, which lives.
        unsafe { CStr::from_ptr(at) }.to_str().unwrap().to_owned()
    };
    let model = Model::of(&even_rows());
    let port = model.input(0);
    assert_eq!((text(port.name).as_str(), port.ndim, port.is_dynamic, port.is_written), ("x", 2, 1, 0));
    // SAFETY: two sizes of a model that lives.
    let (sizes, words) = unsafe { ([*port.shape, *port.shape.add(1)], [*port.sizes, *port.sizes.add(1)].map(text)) };
    assert_eq!((sizes, words.each_ref().map(String::as_str)), ([-1, 2], ["s0", "2"]));
    let written = Model::of(&copy(DType::F32));
    assert_eq!((written.input(0).is_written, written.input(1).is_written, written.input(0).is_dynamic), (1, 0, 0));
    assert_eq!(text(model.output(0).name), "output");
    let mut port = empty_port();
    for (place, size, code) in [(1, port.size, RAPT_ERROR_OPTION), (0, 40, RAPT_ERROR_OPTION)] {
        port.size = size;
        // SAFETY: alive, and a struct of this frame.
        assert_eq!(unsafe { rapt_model_input(model.0, place, &raw mut port) }, code);
        assert!(port.name.is_null() && port.dtype == -1, "nothing is written on refusal");
    }
}

#[test]
fn a_size_that_depends_on_the_input_is_learnt_before_the_run_and_a_guard_that_fails_is_quoted() {
    let model = Model::of(&even_rows());
    let session = model.session();
    for rows in [2i64, 6] {
        let numbers: Vec<f32> = (0..rows * 2).map(|n| n as f32).collect();
        let x = Memory::f32s(&[rows, 2], &numbers);
        let bound = model.bind(&[&x]).unwrap_or_else(|error| panic!("{error:?}"));
        let mut form = bound.output(0);
        assert_eq!((shape(&form), form.storage_bytes, form.data.is_null()), (&[rows, 2][..], rows * 8, true));
        let mut memory = vec![0f32; numbers.len()];
        form.data = memory.as_mut_ptr().cast();
        let inputs = tensors(&[&x]);
        // SAFETY: alive; the form with memory of the told length is a place.
        let done = unsafe { rapt_session_run(session.0, inputs.as_ptr(), 1, &raw const form, 1) };
        assert_eq!(done, RAPT_OK, "{}", last_error());
        assert!(memory.iter().zip(&numbers).all(|(got, x)| *got == -x));
    }
    for (rows, code, says) in [(3, RAPT_ERROR_SHAPE, "L['x'].size()[0] is 3"), (10, RAPT_ERROR_SHAPE, "s0")] {
        let x = Memory::small(DType::F32, &[rows, 2]);
        let (got, message) = model.bind(&[&x]).err().expect("refused");
        assert!(got == code && message.contains(says), "{got:?}: {message}");
        session.refuses(&[&x], &[&Memory::place(DType::F32, &[rows, 2])], code, says);
    }
    session.refuses(&[&Memory::small(DType::F32, &[4])], &[&Memory::place(DType::F32, &[4])], RAPT_ERROR_SHAPE, "x");
    let x = Memory::small(DType::F32, &[4, 2]);
    session.serves(&[&x], &[&Memory::place(DType::F32, &[4, 2])]);
}

#[test]
fn a_session_keeps_what_the_program_writes_and_reset_forgets_it() {
    for dtype in [DType::F32, DType::I64] {
        let model = Model::of(&counter(dtype));
        let (one, two) = (model.session(), model.session());
        let x = Memory::of(dtype, &[3], &(0..3).flat_map(|_| element(dtype, 1.0)).collect::<Vec<u8>>());
        let out = Memory::place(dtype, &[3]);
        let total = |n: f64| (0..3).flat_map(|_| element(dtype, n)).collect::<Vec<u8>>();
        assert_eq!(one.held_bytes(), 0);
        for n in [1.0, 2.0, 3.0] {
            one.serves(&[&x], &[&out]);
            assert_eq!(out.bytes()[..total(n).len()], total(n));
        }
        assert!(one.held_bytes() >= 3 * dtype.size_bytes());
        let wrong = Memory::small(DType::Bool, &[3]);
        one.refuses(&[&wrong], &[&out], RAPT_ERROR_DTYPE_BOUNDARY, "x has dtype bool");
        two.serves(&[&x], &[&out]);
        assert_eq!(out.bytes()[..total(1.0).len()], total(1.0), "a session of its own");
        one.serves(&[&x], &[&out]);
        assert_eq!(out.bytes()[..total(4.0).len()], total(4.0), "a refused call has changed nothing");
        // SAFETY: alive.
        assert_eq!(unsafe { rapt_session_reset(one.0) }, RAPT_OK);
        assert_eq!(one.held_bytes(), 0);
        drop(model);
        one.serves(&[&x], &[&out]);
        assert_eq!(out.bytes()[..total(1.0).len()], total(1.0), "a session outlives its model");
    }
}

#[test]
fn a_truncated_or_altered_archive_is_an_error_and_no_model() {
    let whole = counter(DType::F32).archive();
    for len in (0..whole.len()).step_by(7).chain([0, whole.len() - 1]) {
        let (code, says) = Model::from_bytes(&whole[..len]).err().expect("refused");
        assert_eq!(code, RAPT_ERROR_PROGRAM, "{len}: {says}");
    }
    let mut altered = whole.clone();
    let at = whole.windows(5).position(|window| window == b"total").expect("the buffer's name");
    altered[at] = b'T';
    let (code, says) = Model::from_bytes(&altered).err().expect("refused");
    assert!(code == RAPT_ERROR_PROGRAM && says.contains("is damaged: its CRC-32"), "{says}");
    let mut missing = clone_of(DType::F32);
    missing.target = "torch.ops.aten.no_such_operator.default";
    let (code, says) = Model::from_bytes(&missing.archive()).err().expect("refused");
    assert!(code == RAPT_ERROR_UNSUPPORTED && says.contains("no_such_operator"), "{says}");
    let (engine, path, mut model) = (Owned::new(1), c"/no/such/file.pt2", std::ptr::null_mut());
    // SAFETY: an engine that is alive, a string, and a pointer of this frame.
    assert_eq!(unsafe { rapt_model_open(engine.0, path.as_ptr(), &raw mut model) }, RAPT_ERROR_PROGRAM);
    assert!(model.is_null() && last_error().contains("/no/such/file.pt2"), "{}", last_error());
    assert!(Model::from_bytes(&whole).is_ok());
}

#[test]
fn numbers_and_none_are_tensors_without_dimensions() {
    let model = Model::of_torch("calls");
    let names: Vec<String> = (0..11)
        // SAFETY: a string of the model, which lives.
        .map(|place| unsafe { CStr::from_ptr(model.input(place).name) }.to_str().unwrap().to_owned())
        .collect();
    assert_eq!(names[3..8], ["none", "pair.a", "pair.b", "n", "f",][..]);
    let square = || Memory::small(DType::F32, &[8, 5]);
    let none = || Memory::of(DType::Unknown, &[], &[]);
    let mut inputs = vec![
        square(),
        square(),
        square(),
        none(),
        Memory::small(DType::F32, &[7]),
        Memory::small(DType::F32, &[7]),
        Memory::i64s(&[], &[4]),
        Memory::f64s(&[], &[2.5]),
        Memory::small(DType::F32, &[2]),
        Memory::small(DType::F32, &[6]),
        Memory::small(DType::F32, &[4, 6]),
    ];
    let bound = model.bind(&inputs.iter().collect::<Vec<_>>()).unwrap_or_else(|error| panic!("{error:?}"));
    // SAFETY: alive.
    let count = unsafe { rapt_model_num_outputs(model.0) };
    let dtype_of = |form: &rapt_tensor| DType::from_code(u8::try_from(form.dtype).unwrap()).unwrap();
    let forms: Vec<rapt_tensor> = (0..count).map(|place| bound.output(place)).collect();
    let outputs: Vec<Memory> = forms.iter().map(|form| Memory::place(dtype_of(form), shape(form))).collect();
    // The results are told as Pair, Result, w, None, 5, …: the fifth is the number, the one before it None.
    let numbers: Vec<usize> = (0..count).filter(|place| model.output(*place).dtype == 0).collect();
    let [none_at, number_at] = numbers[..] else { panic!("{numbers:?}") };
    assert_eq!((dtype_of(&forms[none_at]), dtype_of(&forms[number_at])), (DType::Unknown, DType::I64));
    let session = model.session();
    session.serves(&inputs.iter().collect::<Vec<_>>(), &outputs.iter().collect::<Vec<_>>());
    assert_eq!(outputs[number_at].to_i64s(), [5]);
    assert_eq!(outputs[0].to_f32s().len(), 40);
    inputs[6] = Memory::i64s(&[], &[5]);
    let all = |inputs: &[Memory], code, says| {
        session.refuses(&inputs.iter().collect::<Vec<_>>(), &outputs.iter().collect::<Vec<_>>(), code, says);
    };
    all(&inputs, RAPT_ERROR_KIND, "n");
    inputs[6] = Memory::i64s(&[1], &[3]);
    all(&inputs, RAPT_ERROR_KIND, "n");
    inputs[6] = none();
    all(&inputs, RAPT_ERROR_KIND, "n");
    inputs[6] = Memory::i64s(&[], &[4]);
    inputs[0] = none();
    all(&inputs, RAPT_ERROR_DTYPE_BOUNDARY, "x has dtype unknown");
}

#[test]
fn a_model_runs_on_the_threads_of_its_engine_which_may_be_given_back_before() {
    let archive = counter(DType::F32).archive();
    for threads in [1, 3] {
        let model = Model::on(threads, &archive).unwrap_or_else(|error| panic!("{error:?}"));
        let mut text = std::ptr::null_mut();
        // SAFETY: alive, and a pointer of this frame; the text is given back.
        let says = unsafe {
            assert_eq!(rapt_c::rapt_model_explain(model.0, &raw mut text), RAPT_OK);
            let says = CStr::from_ptr(text).to_str().unwrap().to_owned();
            rapt_c::rapt_string_free(text);
            says
        };
        let row = says.lines().find(|line| line.starts_with("threads")).expect("a row");
        assert_eq!(row.split_whitespace().last(), Some(threads.to_string().as_str()), "{says}");
    }
}

#[test]
fn null_and_unaligned_pointers_are_refused_everywhere() {
    let engine = Owned::new(1);
    let model = Model::of(&clone_of(DType::F32));
    let session = model.session();
    let (x, out) = (Memory::small(DType::F32, &[3]), Memory::place(DType::F32, &[3]));
    let (given, places) = (tensors(&[&x]), tensors(&[&out]));
    let (mut made, mut bound, mut text) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    let (mut new_session, mut port, mut form) = (std::ptr::null_mut(), empty_port(), places[0]);
    let (no_model, no_session) = (std::ptr::null::<rapt_model>(), std::ptr::null_mut());
    let unaligned = given.as_ptr().wrapping_byte_add(4);
    // SAFETY: what is neither NULL nor unaligned leads to live memory of its type.
    unsafe {
        let answers = [
            rapt_model_open(std::ptr::null(), c"x".as_ptr(), &raw mut made),
            rapt_model_open(engine.0, std::ptr::null(), &raw mut made),
            rapt_model_open(engine.0, c"x".as_ptr(), std::ptr::null_mut()),
            rapt_model_from_bytes(std::ptr::null(), given.as_ptr().cast(), 1, &raw mut made),
            rapt_model_from_bytes(engine.0, std::ptr::null(), 0, &raw mut made),
            rapt_model_input(no_model, 0, &raw mut port),
            rapt_model_output(no_model, 0, &raw mut port),
            rapt_model_input(model.0, 0, std::ptr::null_mut()),
            rapt_c::rapt_model_explain(no_model, &raw mut text),
            rapt_c::rapt_model_explain(model.0, std::ptr::null_mut()),
            rapt_model_bind(no_model, given.as_ptr(), 1, &raw mut bound),
            rapt_model_bind(model.0, std::ptr::null(), 1, &raw mut bound),
            rapt_model_bind(model.0, unaligned, 1, &raw mut bound),
            rapt_model_bind(model.0, given.as_ptr(), 1, std::ptr::null_mut()),
            rapt_bound_output(std::ptr::null(), 0, &raw mut form),
            rapt_session_create(no_model, &raw mut new_session),
            rapt_session_create(model.0, std::ptr::null_mut()),
            rapt_session_run(no_session, given.as_ptr(), 1, places.as_ptr(), 1),
            rapt_session_run(session.0, std::ptr::null(), 1, places.as_ptr(), 1),
            rapt_session_run(session.0, unaligned, 1, places.as_ptr(), 1),
            rapt_session_run(session.0, given.as_ptr(), 1, std::ptr::null(), 1),
            rapt_session_reset(no_session),
        ];
        for (at, answer) in answers.into_iter().enumerate() {
            assert_eq!(answer, RAPT_ERROR_POINTER, "call {at}");
        }
        assert_eq!((rapt_model_num_inputs(no_model), rapt_model_num_outputs(no_model)), (0, 0));
        assert_eq!(rapt_session_held_bytes(no_session), 0);
        rapt_model_destroy(std::ptr::null_mut());
        rapt_session_destroy(no_session);
        rapt_bound_destroy(std::ptr::null_mut());
        let far = rapt_model_from_bytes(engine.0, given.as_ptr().cast(), usize::MAX, &raw mut made);
        assert_eq!(far, RAPT_ERROR_OPTION);
        // What explain gives is a text that is given back.
        assert_eq!(rapt_c::rapt_model_explain(model.0, &raw mut text), RAPT_OK);
        assert!(CStr::from_ptr(text).to_str().unwrap().contains("input x"));
        rapt_c::rapt_string_free(text);
    }
    assert!(made.is_null() && bound.is_null() && new_session.is_null());
    for field in ["data", "shape", "strides"] {
        let mut bad = given[0];
        match field {
            "data" => bad.data = std::ptr::null_mut(),
            "shape" => bad.shape = std::ptr::null(),
            _ => bad.strides = std::ptr::null(),
        }
        // SAFETY: as above.
        let got = unsafe { rapt_session_run(session.0, &raw const bad, 1, places.as_ptr(), 1) };
        let code = if field == "data" { RAPT_ERROR_LAYOUT } else { RAPT_ERROR_POINTER };
        assert!(got == code && last_error().starts_with("x: input"), "{got:?}: {}", last_error());
    }
    session.serves(&[&x], &[&out]);
}

#[test]
fn a_model_serves_many_threads_and_a_session_one_after_another() {
    struct Shared(Model, Session);
    // SAFETY: handles may be used from any thread.
    unsafe impl Sync for Shared {}
    let model = Model::of(&counter(DType::I64));
    let session = model.session();
    let shared = &Shared(model, session);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                let Shared(model, session) = shared;
                let x = Memory::i64s(&[3], &[1, 1, 1]);
                let out = Memory::place(DType::I64, &[3]);
                for _ in 0..25 {
                    session.serves(&[&x], &[&out]);
                    let own = model.session();
                    own.serves(&[&x], &[&out]);
                    assert_eq!(out.to_i64s(), [1, 1, 1]);
                }
            });
        }
    });
    let (x, out) = (Memory::i64s(&[3], &[0, 0, 0]), Memory::place(DType::I64, &[3]));
    shared.1.serves(&[&x], &[&out]);
    assert_eq!(out.to_i64s(), [100, 100, 100]);
}

#[test]
fn an_index_outside_its_dimension_and_a_division_by_zero_have_codes_of_their_own() {
    let mut program = clone_of(DType::F32);
    program.target = "torch.ops.aten.embedding.default";
    let weight = value("table", DType::F32, &[4, 2]);
    program.inputs = vec![("weight", weight), ("indices", value("rows", DType::I64, &[3]))];
    program.output = value("y", DType::F32, &[3, 2]);
    let session = Model::of(&program).session();
    let table = Memory::f32s(&[4, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    let out = Memory::place(DType::F32, &[3, 2]);
    for row in [4, -1, i64::MIN, i64::MAX] {
        let says = format!(
            "node y (torch.ops.aten.embedding.default): index {row} is out of bounds for dimension 0 of size 4"
        );
        session.refuses(&[&table, &Memory::i64s(&[3], &[0, row, 1])], &[&out], RAPT_ERROR_INDEX, &says);
    }
    session.serves(&[&table, &Memory::i64s(&[3], &[3, 0, 1])], &[&out]);
    assert_eq!(out.to_f32s(), [6.0, 7.0, 0.0, 1.0, 2.0, 3.0]);

    let session = Model::of(&binary("torch.ops.aten.floor_divide.default", DType::I64)).session();
    let (x, out) = (Memory::i64s(&[3], &[7, -7, 9]), Memory::place(DType::I64, &[3]));
    let zero = Memory::i64s(&[3], &[2, 2, 0]);
    session.refuses(&[&x, &zero], &[&out], RAPT_ERROR_ZERO_DIVISION, "an integer is divided by zero");
    session.serves(&[&x, &Memory::i64s(&[3], &[2, 2, -2])], &[&out]);
    assert_eq!(out.to_i64s(), [3, -4, -5]);
}

#[test]
fn results_are_told_row_major_and_share_no_memory_with_one_another() {
    let model = Model::of_torch("shared");
    let (ids, position) = (Memory::i64s(&[1, 2], &[3, 1]), Memory::i64s(&[2], &[0, 1]));
    let bound = model.bind(&[&ids, &position]).unwrap_or_else(|error| panic!("{error:?}"));
    let forms: Vec<rapt_tensor> = (0..6).map(|place| bound.output(place)).collect();
    // SAFETY: three strides, which live as long as the binding.
    let strides = unsafe { std::slice::from_raw_parts(forms[0].strides, 3) };
    assert_eq!((shape(&forms[0]), strides), (&[1, 2, 5][..], &[10, 5, 1][..]));
    let memory = vec![0u64; 64];
    let at = |words: usize| memory[words..].as_ptr().cast_mut().cast();
    let mut places = forms.clone();
    for (place, form) in places.iter_mut().enumerate() {
        form.data = at(8 * place);
    }
    let (inputs, session) = (tensors(&[&ids, &position]), model.session());
    // SAFETY: alive, and as many tensors as told, each with its memory.
    let run = |places: &[rapt_tensor]| unsafe {
        rapt_session_run(session.0, inputs.as_ptr(), 2, places.as_ptr(), places.len())
    };
    assert_eq!(run(&places), RAPT_OK, "{}", last_error());
    places[5].data = places[0].data;
    assert_eq!(run(&places), RAPT_ERROR_LAYOUT);
    assert!(last_error().contains("it is written, and shares memory with"), "{}", last_error());
}

#[test]
fn a_result_that_is_a_float_is_written() {
    let program = clone_of(DType::F32);
    let mut parts = program.json().split(r#"{"as_tensor": {"name": "y"}}"#).map(str::to_owned).collect::<Vec<String>>();
    let float = r#"{"as_float": 2.5}"#;
    assert_eq!(parts.len(), 4);
    let last = parts.pop().unwrap();
    let json = format!(r#"{}{float}{}{{"as_tensor": {{"name": "y"}}}}{}{float}{last}"#, parts[0], parts[1], parts[2]);
    let session = Model::from_bytes(&program.archive_of(&json)).unwrap_or_else(|error| panic!("{error:?}")).session();
    let (x, out) = (Memory::small(DType::F32, &[3]), Memory::place(DType::F64, &[]));
    session.serves(&[&x], &[&out]);
    assert_eq!(out.read(f64::from_le_bytes), [2.5]);
}
