//! Rules 15 to 28 of exported programs (docs/reference/programs.md) at this interface: the graph, the backend, the codes.

use std::ffi::CStr;

use engine::DType;
use engine::model::SERVED;
use rapt_c::rapt_error::*;
use rapt_c::{rapt_dtype, rapt_dtype_bits, rapt_model_explain, rapt_string_free};

use crate::handles::{Memory, Model, PATTERN, element};
use crate::programs::{Program, binary, clone_of, value};

const EXACT_INT: i64 = 1 << 40;
const EXACT_FLOAT: f64 = 1.0 + f64::EPSILON;

/// `y = x` in the dtype of `like`.
fn cast(from: DType, to: DType) -> Program {
    let mut program = binary("torch.ops.aten.type_as.default", from);
    program.inputs[1].1.dtype = to;
    program.output.dtype = to;
    program
}

/// What a program is refused with when it is loaded.
fn refused(program: &Program) -> String {
    let (code, says) = Model::from_bytes(&program.archive()).err().expect("refused");
    assert_eq!(code, RAPT_ERROR_PROGRAM, "{says}");
    says
}

#[test]
fn rule_15_every_cast_is_a_node() {
    let (model, mut text) = (Model::of(&cast(DType::F32, DType::F64)), std::ptr::null_mut());
    // SAFETY: alive, and a pointer of this frame; the text is given back once.
    let explained = unsafe {
        assert_eq!(rapt_model_explain(model.0, &raw mut text), RAPT_OK);
        let explained = CStr::from_ptr(text).to_str().unwrap().to_owned();
        rapt_string_free(text);
        explained
    };
    assert!(explained.contains("aten.type_as.default"), "{explained}");
    // The operand is float64, and nothing converts it.
    let mut program = clone_of(DType::F32);
    program.target = "torch.ops.aten.neg.default";
    program.inputs[0].1.dtype = DType::F64;
    assert!(refused(&program).contains("float64"));
}

#[test]
fn rule_16_indices_are_int64() {
    let mut program = clone_of(DType::F32);
    program.target = "torch.ops.aten.argmax.default";
    program.output = value("y", DType::I64, &[]);
    let (x, out) = (Memory::f32s(&[3], &[1.0, 3.0, 2.0]), Memory::place(DType::I64, &[]));
    Model::of(&program).session().serves(&[&x], &[&out]);
    assert_eq!(out.to_i64s(), [1]);
    program.output.dtype = DType::I32;
    assert!(refused(&program).contains("int64"));
    type Search = (&'static str, Vec<(&'static str, i64)>, bool, Vec<i64>);
    let searches: [Search; 4] = [
        ("argsort.default", vec![], false, vec![0, 2, 1]),
        ("argmin.default", vec![("dim", -1)], false, vec![0]),
        ("sort.default", vec![], true, vec![0, 2, 1]),
        ("topk.default", vec![("k", 2)], true, vec![1, 2]),
    ];
    for (name, integers, has_values, expected) in searches {
        let size: Vec<i64> = if name.starts_with("argmin") { vec![] } else { vec![expected.len() as i64] };
        let indices = value("indices", DType::I64, &size);
        let mut program = clone_of(DType::F32);
        program.target = format!("torch.ops.aten.{name}").leak();
        program.integers = integers;
        (program.output, program.second) =
            if has_values { (value("values", DType::F32, &size), Some(indices)) } else { (indices, None) };
        let (values, indices) = (Memory::place(DType::F32, &size), Memory::place(DType::I64, &size));
        let places = if has_values { vec![&values, &indices] } else { vec![&indices] };
        Model::of(&program).session().serves(&[&x], &places);
        assert_eq!(indices.to_i64s(), expected, "{name}");
        program.second.as_mut().unwrap_or(&mut program.output).dtype = DType::I32;
        assert!(refused(&program).contains("int64"), "{name}");
    }
}

#[test]
fn rule_17_a_binary_operator_takes_equal_dtypes() {
    // ATen promotes: the graph has a cast before the sum, so that 2^24 + 1 is exact where the result is float64.
    let mut program = binary("torch.ops.aten.add.Tensor", DType::I64);
    (program.inputs[1].1.dtype, program.output.dtype) = (DType::F64, DType::F64);
    let (x, y) = (Memory::i64s(&[3], &[1 << 24, -1, 0]), Memory::f64s(&[3], &[1.0, 0.5, 0.0]));
    let out = Memory::place(DType::F64, &[3]);
    Model::of(&program).session().serves(&[&x, &y], &[&out]);
    assert_eq!(out.read(f64::from_le_bytes), [16_777_217.0, -0.5, 0.0]);
    program.output.dtype = DType::F32;
    assert!(refused(&program).contains("float64"));
    // A product has no promotion.
    let mut program = binary("torch.ops.aten.mm.default", DType::F32);
    program.inputs = vec![("self", value("a", DType::F32, &[2, 2])), ("mat2", value("b", DType::F64, &[2, 2]))];
    program.output = value("y", DType::F64, &[2, 2]);
    assert!(refused(&program).contains("float32 and float64 differ"));
}

#[test]
fn rule_18_functions_of_float64_are_computed_in_float64() {
    let given = [0.2036258018498955, 1.0 / 1_048_576.0, EXACT_FLOAT, 5.25];
    // Correctly rounded, by mpmath.
    let functions: [(&str, [f64; 4]); 7] = [
        ("exp", [1.2258393608007456, 1.0000009536747712, 2.718281828459046, 190.56626845863]),
        ("log", [-1.5914712741921968, -13.862943611198906, 2.2204460492503128e-16, 1.6582280766035324]),
        ("sin", [0.2022215443242917, 9.536743164061055e-07, 0.8414709848078966, -0.858934493426592]),
        ("cos", [0.9793398016067245, 0.9999999999995453, 0.5403023058681395, 0.5120854772418407]),
        ("tanh", [0.20085736448816496, 9.536743164059608e-07, 0.761594155955765, 0.9999449286177708]),
        ("erf", [0.22663058079546555, 1.0761062308265404e-06, 0.842700792949715, 0.9999999999998869]),
        ("pow", [0.7232035115608783, 0.9999867793541217, 1.0000000000000002, 6037.2108360790135]),
    ];
    for (name, exact) in functions {
        let (x, out) = (Memory::f64s(&[4], &given), Memory::place(DType::F64, &[4]));
        if name == "pow" {
            let mut program = binary("torch.ops.aten.pow.Tensor_Tensor", DType::F64);
            program.inputs = vec![("self", value("a", DType::F64, &[4])), ("exponent", value("b", DType::F64, &[4]))];
            program.output = value("y", DType::F64, &[4]);
            Model::of(&program).session().serves(&[&x, &x], &[&out]);
        } else {
            let mut program = clone_of(DType::F64);
            program.target = format!("torch.ops.aten.{name}.default").leak();
            program.inputs[0].1 = value("x", DType::F64, &[4]);
            program.output = value("y", DType::F64, &[4]);
            Model::of(&program).session().serves(&[&x], &[&out]);
        }
        for ((got, exact), x) in out.read(f64::from_le_bytes).into_iter().zip(exact).zip(given) {
            let away = got.to_bits().abs_diff(exact.to_bits());
            assert!(away <= 1, "{name}({x}) = {got:?}, {away} units in the last place from {exact:?}");
        }
    }
}

#[test]
fn rule_19_functions_of_integers_are_promoted_as_torch_does_or_refused() {
    let mut program = clone_of(DType::I64);
    (program.target, program.output.dtype) = ("torch.ops.aten.exp.default", DType::F32);
    let (x, out) = (Memory::i64s(&[3], &[0, 1, -1]), Memory::place(DType::F32, &[3]));
    Model::of(&program).session().serves(&[&x], &[&out]);
    assert_eq!(out.to_f32s(), [1.0, std::f32::consts::E, (-1.0f64).exp() as f32]);
    program.output.dtype = DType::I64;
    assert!(refused(&program).contains("float32"));
    let mut program = clone_of(DType::F32);
    program.target = "torch.ops.aten.bitwise_not.default";
    assert!(refused(&program).contains("bitwise_not is not computed in float32"));
}

#[test]
fn rule_20_arithmetic_is_native_in_int64_and_float64() {
    type Arithmetic = (&'static str, fn(i64, i64) -> i64);
    let numbers = [(1 << 53) + 1, -(1 << 62), EXACT_INT];
    let integers: [Arithmetic; 4] = [
        ("add.Tensor", i64::wrapping_add),
        ("mul.Tensor", i64::wrapping_mul),
        ("maximum.default", i64::max),
        ("remainder.Tensor", i64::rem_euclid),
    ];
    let (x, seven) = (Memory::i64s(&[3], &numbers), Memory::i64s(&[3], &[7; 3]));
    for (name, exact) in integers {
        let target = format!("torch.ops.aten.{name}").leak();
        let out = Memory::place(DType::I64, &[3]);
        Model::of(&binary(target, DType::I64)).session().serves(&[&x, &seven], &[&out]);
        assert_eq!(out.to_i64s(), numbers.map(|n| exact(n, 7)), "{target}");
    }
    let fine = [EXACT_FLOAT, 2.0f64.powi(-1000), 1e300];
    let (x, out) = (Memory::f64s(&[3], &fine), Memory::place(DType::F64, &[3]));
    Model::of(&binary("torch.ops.aten.mul.Tensor", DType::F64)).session().serves(&[&x, &x], &[&out]);
    assert_eq!(out.read(f64::from_le_bytes), fine.map(|x| x * x));
    // A sum of what float32 and int32 cannot hold, and reading by an index.
    let mut sum = clone_of(DType::I64);
    (sum.target, sum.output) = ("torch.ops.aten.sum.default", value("y", DType::I64, &[]));
    let out = Memory::place(DType::I64, &[]);
    Model::of(&sum).session().serves(&[&Memory::i64s(&[3], &numbers)], &[&out]);
    assert_eq!(out.to_i64s(), [numbers.iter().sum::<i64>()]);
    let mut select = binary("torch.ops.aten.embedding.default", DType::I64);
    select.inputs = vec![("weight", value("a", DType::I64, &[3, 1])), ("indices", value("b", DType::I64, &[2]))];
    select.output = value("y", DType::I64, &[2, 1]);
    let (table, out) = (Memory::i64s(&[3, 1], &numbers), Memory::place(DType::I64, &[2, 1]));
    Model::of(&select).session().serves(&[&table, &Memory::i64s(&[2], &[2, 0])], &[&out]);
    assert_eq!(out.to_i64s(), [numbers[2], numbers[0]]);
    // The same by a gather, and sums by a scatter, in both dtypes.
    for dtype in [DType::I64, DType::F64] {
        let given: Vec<u8> = match dtype {
            DType::I64 => numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
            _ => fine.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        let (x, zeros) = (Memory::of(dtype, &[3], &given), Memory::of(dtype, &[3], &[0; 24]));
        let index = Memory::i64s(&[3], &[2, 0, 1]);
        let mut gather = binary("torch.ops.aten.gather.default", dtype);
        gather.inputs = vec![("self", value("a", dtype, &[3])), ("index", value("b", DType::I64, &[3]))];
        gather.integers = vec![("dim", 0)];
        let out = Memory::place(dtype, &[3]);
        Model::of(&gather).session().serves(&[&x, &index], &[&out]);
        assert_eq!(out.bytes()[..24], [&given[16..], &given[..16]].concat(), "{dtype}");
        let mut scatter = gather;
        scatter.target = "torch.ops.aten.scatter_add.default";
        scatter.inputs.push(("src", value("c", dtype, &[3])));
        Model::of(&scatter).session().serves(&[&zeros, &index, &x], &[&out]);
        assert_eq!(out.bytes()[..24], [&given[8..], &given[..8]].concat(), "{dtype}");
    }
    // The greatest, of numbers that float32 cannot tell apart.
    let mut greatest = clone_of(DType::I64);
    (greatest.target, greatest.output) = ("torch.ops.aten.max.default", value("y", DType::I64, &[]));
    let out = Memory::place(DType::I64, &[]);
    Model::of(&greatest).session().serves(&[&Memory::i64s(&[3], &[1 << 60, (1 << 60) + 1, -1])], &[&out]);
    assert_eq!(out.to_i64s(), [(1 << 60) + 1]);
}

#[test]
fn rule_21_casts_are_torchs_over_the_whole_product() {
    for from in SERVED {
        for to in SERVED {
            let session = Model::of(&cast(from, to)).session();
            let (x, like, out) = (Memory::small(from, &[3]), Memory::small(to, &[3]), Memory::place(to, &[3]));
            session.serves(&[&x, &like], &[&out]);
            assert_eq!(out.bytes()[..3 * to.size_bytes()], like.bytes()[..3 * to.size_bytes()], "{from} to {to}");
        }
    }
    // Integers out of range wrap around.
    for (to, expected) in [(DType::I32, [0i64, -(1 << 31), 300]), (DType::U8, [0, 0, 44]), (DType::I8, [0, 0, 44])] {
        let (x, like) = (Memory::i64s(&[3], &[EXACT_INT, 1 << 31, 300]), Memory::small(to, &[3]));
        let out = Memory::place(to, &[3]);
        Model::of(&cast(DType::I64, to)).session().serves(&[&x, &like], &[&out]);
        let bytes: Vec<u8> = expected.iter().flat_map(|n| n.to_le_bytes()[..to.size_bytes()].to_vec()).collect();
        assert_eq!(out.bytes()[..bytes.len()], bytes, "{to}");
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
fn rule_24_sizes_are_known_of_every_dtype() {
    for dtype in SERVED {
        let model = Model::of(&clone_of(dtype));
        let form = model.bind(&[&Memory::small(dtype, &[3])]).unwrap_or_else(|error| panic!("{error:?}")).output(0);
        assert_eq!(form.storage_bytes as usize * 8, 3 * rapt_dtype_bits(form.dtype), "{dtype}");
    }
    for dtype in DType::ALL {
        assert_eq!(rapt_dtype_bits(dtype.code().into()), dtype.bits(), "{dtype}");
    }
}

#[test]
fn rule_25_experts_are_routed_with_int32_and_int64_indices() {
    for dtype in [DType::I32, DType::I64] {
        let mut program = clone_of(DType::F32);
        program.target = "torch.ops.transformers.grouped_mm_fallback.default";
        program.inputs = vec![
            ("input", value("x", DType::F32, &[3, 2])),
            ("weight", value("w", DType::F32, &[2, 2, 1])),
            ("offs", value("ends", dtype, &[2])),
        ];
        program.output = value("y", DType::F32, &[3, 1]);
        let x = Memory::f32s(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let w = Memory::f32s(&[2, 2, 1], &[1.0, 10.0, 100.0, 1000.0]);
        let ends = |ends: [i64; 2]| {
            let bytes: Vec<u8> = ends.iter().flat_map(|&end| element(dtype, end as f64)).collect();
            Memory::of(dtype, &[2], &bytes)
        };
        let (session, out) = (Model::of(&program).session(), Memory::place(DType::F32, &[3, 1]));
        session.refuses(&[&x, &w, &ends([1, 4])], &[&out], RAPT_ERROR_INDEX, "4");
        session.serves(&[&x, &w, &ends([1, 3])], &[&out]);
        assert_eq!(out.to_f32s(), [21.0, 4300.0, 6500.0], "{dtype}");
    }
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
fn rule_27_the_export_schema_is_the_only_source_of_codes() {
    // c10 has 0 for uint8 and 6 for float32; the schema has 1 and 7.
    assert_eq!((rapt_dtype::RAPT_DTYPE_U8 as i32, rapt_dtype::RAPT_DTYPE_F32 as i32), (1, 7));
    for dtype in SERVED {
        assert_eq!(Model::of(&clone_of(dtype)).input(0).dtype, i32::from(dtype.code()));
    }
}

#[test]
fn rule_28_codes_agree_with_the_schema_by_name_and_value_both_ways() {
    // torch 2.15's schema.ScalarType; the Python tests hold the engine's list against the installed torch.
    let schema = [
        (0, "unknown"),
        (1, "uint8"),
        (2, "int8"),
        (3, "int16"),
        (4, "int32"),
        (5, "int64"),
        (6, "float16"),
        (7, "float32"),
        (8, "float64"),
        (9, "complex32"),
        (10, "complex64"),
        (11, "complex128"),
        (12, "bool"),
        (13, "bfloat16"),
        (28, "uint16"),
        (29, "float8_e4m3fn"),
        (30, "float8_e5m2"),
        (31, "float8_e4m3fnuz"),
        (32, "float8_e5m2fnuz"),
        (33, "float8_e8m0fnu"),
        (34, "uint32"),
        (35, "uint64"),
    ];
    let name = |code: i32| {
        let name = rapt_c::rapt_dtype_name(code);
        // SAFETY: a string of the library, or NULL.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap())
    };
    for (code, expected) in schema {
        assert_eq!(name(code), Some(expected));
    }
    let ours: Vec<i32> = (-2..300).filter(|&code| name(code).is_some()).collect();
    let codes: Vec<i32> = DType::ALL.iter().map(|dtype| i32::from(dtype.code())).collect();
    let mut sorted = codes.clone();
    sorted.sort_unstable();
    assert_eq!(ours, sorted);
}
