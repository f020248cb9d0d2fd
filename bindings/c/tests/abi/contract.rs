//! The rules of exported programs (docs/reference/programs.md) that concern this interface, each a test named after its rule.
//!
//! A refused call is made with places that hold a pattern: afterwards they hold it still, and the session serves a right call.

use std::ffi::CStr;

use engine::DType;
use engine::model::SERVED;
use rapt_c::rapt_error::*;
use rapt_c::{
    rapt_bound_destroy, rapt_bound_output, rapt_dtype, rapt_model, rapt_model_bind, rapt_model_destroy,
    rapt_model_from_bytes, rapt_model_input, rapt_model_num_inputs, rapt_model_num_outputs, rapt_model_open,
    rapt_model_output, rapt_session_create, rapt_session_destroy, rapt_session_held_bytes, rapt_session_reset,
    rapt_session_run, rapt_tensor,
};

use crate::handles::{Memory, Model, PATTERN, Session, element, empty_port, shape, tensors};
use crate::programs::{binary, clone_of, copy, counter, even_rows, value};
use crate::support::{Owned, last_error};

/// The dtypes that are read as such, by the contract.
const READS: [DType; 7] = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64, DType::Bool];

const EXACT_INT: i64 = 1 << 40;
const EXACT_FLOAT: f64 = 1.0 + f64::EPSILON;

// What goes in

#[test]
fn rule_01_an_input_of_another_dtype_is_refused_before_any_work() {
    for declared in READS {
        let model = Model::of(&copy(declared));
        let session = model.session();
        for given in SERVED.into_iter().filter(|given| *given != declared) {
            let (x, y, out) =
                (Memory::small(declared, &[3]), Memory::small(given, &[3]), Memory::place(declared, &[3]));
            let says = format!("b has dtype {given}, the program declares {declared}");
            session.refuses(&[&x, &y], &[&out], RAPT_ERROR_DTYPE_BOUNDARY, &says);
            assert_eq!(model.bind(&[&x, &y]).err().map(|(code, _)| code), Some(RAPT_ERROR_DTYPE_BOUNDARY));
        }
        let (x, y) = (Memory::place(declared, &[3]), Memory::small(declared, &[3]));
        let out = Memory::place(declared, &[3]);
        session.serves(&[&x, &y], &[&out]);
        assert_eq!((x.bytes()[..3].to_vec(), out.bytes()), (y.bytes()[..3].to_vec(), y.bytes()), "{declared}");
    }
}

#[test]
fn rule_04_another_number_of_inputs_or_results_is_an_error_with_both_counts() {
    let model = Model::of(&binary("torch.ops.aten.add.Tensor", DType::I64));
    let session = model.session();
    let (x, out) = (Memory::small(DType::I64, &[3]), Memory::place(DType::I64, &[3]));
    for inputs in [vec![], vec![&x], vec![&x, &x, &x]] {
        let says = format!("takes 2 inputs (a, b), got {}", inputs.len());
        session.refuses(&inputs, &[&out], RAPT_ERROR_KIND, &says);
        assert_eq!(model.bind(&inputs).err().map(|(code, _)| code), Some(RAPT_ERROR_KIND));
    }
    for outputs in [vec![], vec![&out, &out]] {
        let says = format!("gives 1 results (output), got {} places", outputs.len());
        session.refuses(&[&x, &x], &outputs, RAPT_ERROR_KIND, &says);
    }
    session.serves(&[&x, &x], &[&out]);
    assert_eq!(out.to_i64s(), [0, 2, 0]);
}

#[test]
fn rule_05_a_missing_dtype_is_never_float32() {
    let program = clone_of(DType::F32);
    let session = Model::of(&program).session();
    let (x, out) = (Memory::small(DType::F32, &[3]).of_code(0), Memory::place(DType::F32, &[3]));
    session.refuses(&[&x], &[&out], RAPT_ERROR_DTYPE_BOUNDARY, "x has dtype unknown, the program declares float32");
    let right = Memory::small(DType::F32, &[3]);
    session.refuses(&[&right], &[&Memory::place(DType::F32, &[3]).of_code(0)], RAPT_ERROR_DTYPE_MISMATCH, "unknown");
    session.serves(&[&right], &[&out]);
    for stated in [r#""dtype": 0, "#, ""] {
        let json = program.json().replacen(r#""dtype": 7, "#, stated, 1);
        let (code, says) = Model::from_bytes(&program.archive_of(&json)).err().expect("refused");
        assert!(code == RAPT_ERROR_PROGRAM && says.contains("dtype"), "{code:?}: {says}");
    }
}

#[test]
fn rule_06_an_unknown_code_is_an_error_that_lists_the_known() {
    let program = clone_of(DType::F32);
    let session = Model::of(&program).session();
    let (right, out) = (Memory::small(DType::F32, &[3]), Memory::place(DType::F32, &[3]));
    for code in [14, 27, 36, 255, 263, -1, i32::MIN] {
        let known = format!("code {code}; the known are 0 unknown, 1 uint8");
        let x = Memory::small(DType::F32, &[3]).of_code(code);
        session.refuses(
            &[&x],
            &[&out],
            RAPT_ERROR_UNSUPPORTED_DTYPE,
            &format!("x: input has a dtype that is not known: {known}"),
        );
        let place = Memory::place(DType::F32, &[3]).of_code(code);
        session.refuses(
            &[&right],
            &[&place],
            RAPT_ERROR_UNSUPPORTED_DTYPE,
            &format!("output: output has a dtype that is not known: {known}"),
        );
        let json = program.json().replacen(r#""dtype": 7, "#, &format!(r#""dtype": {code}, "#), 1);
        let (of, says) = Model::from_bytes(&program.archive_of(&json)).err().expect("refused");
        assert!(of == RAPT_ERROR_PROGRAM && says.contains("dtype"), "{of:?}: {says}");
    }
    session.serves(&[&right], &[&out]);
}

#[test]
fn rule_07_narrow_integers_are_computed_exactly() {
    for (dtype, of, sum) in [(DType::U8, [100, 200, 255], [200, 144, 254]), (DType::I8, [100, -1, 127], [-56, -2, -2])]
    {
        let bytes: Vec<u8> = of.iter().map(|n: &i32| *n as u8).collect();
        let session = Model::of(&binary("torch.ops.aten.add.Tensor", dtype)).session();
        let (x, out) = (Memory::of(dtype, &[3], &bytes), Memory::place(dtype, &[3]));
        session.serves(&[&x, &x], &[&out]);
        assert_eq!(out.bytes()[..3], sum.map(|n: i32| n as u8), "{dtype}");
    }
}

#[test]
fn rule_08_dtypes_that_are_not_served_are_refused_by_name_in_both_directions() {
    let session = Model::of(&clone_of(DType::I32)).session();
    let (right, out) = (Memory::small(DType::I32, &[3]), Memory::place(DType::I32, &[3]));
    for dtype in DType::ALL.iter().copied().filter(|dtype| !SERVED.contains(dtype) && *dtype != DType::Unknown) {
        let (code, says) = Model::from_bytes(&clone_of(dtype).archive()).err().expect("refused");
        assert_eq!(code, RAPT_ERROR_UNSUPPORTED_DTYPE, "{says}");
        assert!(says.contains(dtype.name()) && says.contains("float64") && says.contains("bool"), "{says}");
        let says = format!("x has dtype {dtype}, the program declares int32");
        session.refuses(&[&Memory::small(dtype, &[3])], &[&out], RAPT_ERROR_DTYPE_BOUNDARY, &says);
        let says = format!("output: its place has dtype {dtype}, the result has int32");
        session.refuses(&[&right], &[&Memory::place(dtype, &[3])], RAPT_ERROR_DTYPE_MISMATCH, &says);
    }
    session.serves(&[&right], &[&out]);
}

#[test]
fn rule_10_weights_keep_bytes_and_dtype() {
    let bits = [EXACT_INT + 1, i64::MIN, i64::MAX];
    let mut program = clone_of(DType::I64);
    program.inputs.clear();
    let bytes = bits.iter().flat_map(|n| n.to_le_bytes()).collect();
    program.buffer = Some(("self", value("held", DType::I64, &[3]), bytes));
    let out = Memory::place(DType::I64, &[3]);
    Model::of(&program).session().serves(&[], &[&out]);
    assert_eq!(out.to_i64s(), bits);
    let bits = [EXACT_FLOAT.to_bits(), (-0.0f64).to_bits(), 1];
    let mut program = clone_of(DType::F64);
    program.inputs.clear();
    let bytes = bits.iter().flat_map(|n| n.to_le_bytes()).collect();
    program.buffer = Some(("self", value("held", DType::F64, &[3]), bytes));
    let out = Memory::place(DType::F64, &[3]);
    Model::of(&program).session().serves(&[], &[&out]);
    assert_eq!(out.read(u64::from_le_bytes), bits);
}

// What comes out

#[test]
fn rule_11_a_result_is_read_in_its_own_dtype_and_no_other() {
    for dtype in READS {
        let session = Model::of(&clone_of(dtype)).session();
        let x = Memory::small(dtype, &[3]);
        for other in DType::ALL.iter().copied().filter(|other| *other != dtype) {
            let says = format!("output: its place has dtype {other}, the result has {dtype}");
            session.refuses(&[&x], &[&Memory::place(other, &[3])], RAPT_ERROR_DTYPE_MISMATCH, &says);
        }
        let out = Memory::place(dtype, &[3]);
        session.serves(&[&x], &[&out]);
        assert_eq!(out.bytes(), x.bytes(), "{dtype}");
    }
}

#[test]
fn rule_12_half_precision_is_written_bit_for_bit_into_memory_of_the_caller() {
    for (dtype, bits) in [(DType::F16, [0x3c01u16, 0x0001, 0xfbff]), (DType::BF16, [0x3f81, 0x0001, 0xff7f])] {
        let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let (x, out) = (Memory::of(dtype, &[3], &bytes), Memory::place(dtype, &[3]));
        let model = Model::of(&clone_of(dtype));
        model.session().serves(&[&x], &[&out]);
        drop(model);
        assert_eq!(out.read(u16::from_le_bytes), bits, "{dtype}: it is the caller's when the model is gone");
    }
}

#[test]
fn rule_13_a_result_of_a_dtype_that_is_not_served_is_an_error_that_names_it() {
    for dtype in [DType::U16, DType::F8E4M3FN, DType::C64] {
        let mut program = clone_of(DType::F32);
        program.output.dtype = dtype;
        let (code, says) = Model::from_bytes(&program.archive()).err().expect("refused");
        assert!(code == RAPT_ERROR_UNSUPPORTED_DTYPE && says.contains(&format!("y has dtype {dtype}")), "{says}");
    }
}

#[test]
fn rule_14_the_declared_dtype_is_the_written_one() {
    let model = Model::of_torch("shared");
    let (ids, position) = (Memory::i64s(&[1, 2], &[3, 1]), Memory::i64s(&[2], &[0, 1]));
    let bound = model.bind(&[&ids, &position]).unwrap_or_else(|error| panic!("{error:?}"));
    // SAFETY: alive.
    let (inputs, count) = unsafe { (rapt_model_num_inputs(model.0), rapt_model_num_outputs(model.0)) };
    assert_eq!((inputs, count), (2, 6));
    let declared: Vec<i32> = (0..count).map(|place| model.output(place).dtype).collect();
    let expected = [DType::BF16, DType::I64, DType::F64, DType::F16, DType::Bool, DType::F32];
    assert_eq!(declared, expected.map(|dtype| i32::from(dtype.code())));
    let forms: Vec<rapt_tensor> = (0..count).map(|place| bound.output(place)).collect();
    assert_eq!(forms.iter().map(|form| form.dtype).collect::<Vec<_>>(), declared);
    assert_eq!(forms.iter().map(|form| form.storage_bytes).collect::<Vec<_>>(), [20, 16, 8, 4, 1, 16]);
    let places: Vec<Memory> =
        forms.iter().zip(expected).map(|(form, dtype)| Memory::place(dtype, shape(form))).collect();
    model.session().serves(&[&ids, &position], &places.iter().collect::<Vec<_>>());
    // The buffer that this program returns with one added is [2^40, -1].
    assert!(places.iter().all(|place| place.bytes()[0] != PATTERN), "every result was written");
}

// The graph

#[test]
fn rule_18_functions_of_float64_are_computed_in_float64() {
    let mut program = clone_of(DType::F64);
    program.target = "torch.ops.aten.exp.default";
    let (x, out) = (Memory::f64s(&[3], &[1.0, f64::EPSILON, -30.25]), Memory::place(DType::F64, &[3]));
    Model::of(&program).session().serves(&[&x], &[&out]);
    for (got, x) in out.read(f64::from_le_bytes).into_iter().zip([1.0f64, f64::EPSILON, -30.25]) {
        assert!((got - x.exp()).abs() <= f64::EPSILON * x.exp(), "exp({x}) = {got}");
    }
}

#[test]
fn rule_20_arithmetic_is_native_in_int64() {
    let numbers = [(1 << 53) + 1, -(1 << 62), EXACT_INT];
    for (target, expected) in [
        ("torch.ops.aten.add.Tensor", numbers.map(|n: i64| n.wrapping_add(n))),
        ("torch.ops.aten.mul.Tensor", numbers.map(|n: i64| n.wrapping_mul(n))),
    ] {
        let (x, out) = (Memory::i64s(&[3], &numbers), Memory::place(DType::I64, &[3]));
        Model::of(&binary(target, DType::I64)).session().serves(&[&x, &x], &[&out]);
        assert_eq!(out.to_i64s(), expected, "{target}");
    }
}

#[test]
fn rule_22_large_integers_and_fine_floats_survive_bit_for_bit() {
    let numbers = [EXACT_INT, -EXACT_INT - 1, i64::MIN];
    let (x, out) = (Memory::i64s(&[3], &numbers), Memory::place(DType::I64, &[3]));
    Model::of(&clone_of(DType::I64)).session().serves(&[&x], &[&out]);
    assert_eq!(out.to_i64s(), numbers);
    let (x, out) = (Memory::f64s(&[3], &[EXACT_FLOAT, -0.0, 5e-324]), Memory::place(DType::F64, &[3]));
    Model::of(&clone_of(DType::F64)).session().serves(&[&x], &[&out]);
    assert_eq!(out.read(u64::from_le_bytes), x.read(u64::from_le_bytes));
}

// The backend

#[test]
fn rule_23_a_device_without_kernels_for_programs_is_refused() {
    let session = Model::of(&clone_of(DType::F32)).session();
    let (right, out) = (Memory::small(DType::F32, &[3]), Memory::place(DType::F32, &[3]));
    for device in [2, 3, 0, -1] {
        let mut x = Memory::small(DType::F32, &[3]);
        x.device = device;
        session.refuses(&[&x], &[&out], RAPT_ERROR_DEVICE, "x is on");
        let mut place = Memory::place(DType::F32, &[3]);
        place.device = device;
        session.refuses(&[&right], &[&place], RAPT_ERROR_DEVICE, "output: its place is on");
    }
    session.serves(&[&right], &[&out]);
}

#[test]
fn rule_26_results_are_written_where_the_caller_says() {
    let session = Model::of(&clone_of(DType::I32)).session();
    let x = Memory::of(DType::I32, &[3], &[1i32, -2, 3].map(i32::to_le_bytes).concat());
    let mut out = Memory::place(DType::I32, &[8]);
    (out.shape, out.strides, out.offset) = (vec![3], vec![-2], 5);
    session.serves(&[&x], &[&out]);
    let pattern = i32::from_le_bytes([PATTERN; 4]);
    out.shape = vec![8];
    assert_eq!(out.read(i32::from_le_bytes), [pattern, 3, pattern, -2, pattern, 1, pattern, pattern]);
    // The same numbers, read backwards from where they lie.
    let (mut backwards, out) =
        (Memory::of(DType::I32, &[3], &[3i32, -2, 1].map(i32::to_le_bytes).concat()), Memory::place(DType::I32, &[3]));
    (backwards.strides, backwards.offset) = (vec![-1], 2);
    session.serves(&[&backwards], &[&out]);
    assert_eq!(out.read(i32::from_le_bytes), [1, -2, 3]);
    // Memory of another operand, one address for three elements, and outside the storage.
    let both = Memory::place(DType::I32, &[3]);
    session.refuses(&[&both], &[&both], RAPT_ERROR_LAYOUT, "output: it is written, and shares memory with x");
    let mut repeated = Memory::place(DType::I32, &[3]);
    repeated.strides = vec![0];
    session.refuses(&[&x], &[&repeated], RAPT_ERROR_LAYOUT, "writes one address from two places");
    let mut outside = Memory::place(DType::I32, &[3]);
    outside.strides = vec![1 << 40];
    session.refuses(&[&x], &[&outside], RAPT_ERROR_LAYOUT, "output: output");
    session.refuses(&[&x], &[&Memory::place(DType::I32, &[4])], RAPT_ERROR_SHAPE, "output");
    session.serves(&[&x], &[&out]);
}

#[test]
fn rule_27_and_28_the_codes_are_those_of_the_export_schema() {
    // c10 has 0 for uint8 and 6 for float32; the schema has 1 and 7. tests/abi/header.rs compares every code.
    assert_eq!((rapt_dtype::RAPT_DTYPE_U8 as i32, rapt_dtype::RAPT_DTYPE_F32 as i32), (1, 7));
    for dtype in SERVED {
        assert_eq!(Model::of(&clone_of(dtype)).input(0).dtype, i32::from(dtype.code()));
    }
}

// What else a boundary promises

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
