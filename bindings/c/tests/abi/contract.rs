//! The rules of exported programs (docs/reference/programs.md) that concern this interface, each a test named after its rule.
//!
//! A refused call is made with places that hold a pattern: afterwards they hold it still, and the session serves a right call.
//!
//! Rules 1 to 14 stand here, 15 to 28 in `contract_graph`.

use engine::DType;
use engine::model::SERVED;
use rapt_c::rapt_error::*;
use rapt_c::{rapt_last_error_code, rapt_model_num_inputs, rapt_model_num_outputs, rapt_tensor};

use crate::handles::{Memory, Model, PATTERN, shape};
use crate::programs::{binary, clone_of, copy, value};
use crate::support::last_error;

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
fn rule_02_the_message_gives_the_conversion_that_corrects_it() {
    let header = include_str!("../../include/rapt_types.h");
    for declared in SERVED {
        let model = Model::of(&binary("torch.ops.aten.maximum.default", declared));
        let other = if declared == DType::F32 { DType::F64 } else { DType::F32 };
        let (x, y, out) = (Memory::small(declared, &[3]), Memory::small(other, &[3]), Memory::place(declared, &[3]));
        let code = format!("RAPT_DTYPE_{}", format!("{declared:?}").to_uppercase());
        assert!(header.contains(&format!("  {code} = {},", declared.code())), "{code}");
        model.session().refuses(&[&x, &y], &[&out], RAPT_ERROR_DTYPE_BOUNDARY, &format!("Mend: convert b to {code}"));
    }
}

#[test]
fn rule_03_a_matching_dtype_is_served_without_a_word() {
    // A thread of its own has no error yet.
    std::thread::spawn(|| {
        for dtype in SERVED {
            let (x, out) = (Memory::small(dtype, &[3]), Memory::place(dtype, &[3]));
            Model::of(&clone_of(dtype)).session().serves(&[&x], &[&out]);
            assert_eq!(out.bytes()[..3 * dtype.size_bytes()], x.bytes()[..3 * dtype.size_bytes()], "{dtype}");
            assert_eq!((rapt_last_error_code(), last_error().as_str()), (RAPT_OK, ""), "{dtype}");
        }
    })
    .join()
    .unwrap();
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
    let cases = [
        (DType::U8, [100, 200, 255], [200, 144, 254]),
        (DType::I8, [100, -1, 127], [-56, -2, -2]),
        (DType::I16, [20_000, -1, 32_767], [-25_536, -2, -2]),
    ];
    for (dtype, of, sum) in cases {
        let narrow = |n: &i32| n.to_le_bytes()[..dtype.size_bytes()].to_vec();
        let bytes: Vec<u8> = of.iter().flat_map(narrow).collect();
        let session = Model::of(&binary("torch.ops.aten.add.Tensor", dtype)).session();
        let (x, out) = (Memory::of(dtype, &[3], &bytes), Memory::place(dtype, &[3]));
        session.serves(&[&x, &x], &[&out]);
        let sum: Vec<u8> = sum.iter().flat_map(narrow).collect();
        assert_eq!(out.bytes()[..sum.len()], sum, "{dtype}");
        // A weight of the same dtype.
        let mut program = clone_of(dtype);
        program.inputs.clear();
        program.buffer = Some(("self", value("held", dtype, &[3]), bytes));
        Model::of(&program).session().serves(&[], &[&out]);
        assert_eq!(out.bytes()[..sum.len()], x.bytes()[..sum.len()], "{dtype}");
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
fn rule_09_tf32_is_no_float32() {
    assert!(
        ![include_str!("../../include/rapt.h"), include_str!("../../include/rapt_types.h")]
            .concat()
            .to_lowercase()
            .contains("tf32")
    );
    // 1 + 2^-20 needs more than the 10 bits of TF32.
    let mut program = binary("torch.ops.aten.mm.default", DType::F32);
    program.inputs = vec![("self", value("a", DType::F32, &[4, 4])), ("mat2", value("b", DType::F32, &[4, 4]))];
    program.output = value("y", DType::F32, &[4, 4]);
    let x = Memory::f32s(&[4, 4], &[1.0 + 1.0 / 1_048_576.0; 16]);
    let identity: Vec<f32> = (0..16).map(|n| if n % 5 == 0 { 1.0 } else { 0.0 }).collect();
    let out = Memory::place(DType::F32, &[4, 4]);
    Model::of(&program).session().serves(&[&x, &Memory::f32s(&[4, 4], &identity)], &[&out]);
    assert_eq!(out.bytes(), x.bytes());
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
