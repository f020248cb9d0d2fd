//! Functions of pointwise programs, element by element: against float64 over all exponents, against the rules of integers and
//! conversions, on every instruction set of this machine.

#[path = "pointwise/harness.rs"]
mod harness;

use half::{bf16, f16};
use harness::{Tensor, archs, run, unary};
use rapt_core::{Arch, DType};
use rapt_cpu::pointwise::{Binary, Instruction, Lane, Loop, Number, Program, Register, Unary, ZeroDivision};
use std::sync::Arc;

/// Units in the last place of the correctly rounded result, of float32, that `got` lies from `exact`.
fn ulps(got: f32, exact: f64) -> f64 {
    let nearest = exact as f32;
    if nearest.is_nan() || got.is_nan() {
        return if nearest.is_nan() && got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if got == nearest {
        return 0.0;
    }
    if !got.is_finite() || !nearest.is_finite() {
        // An overflow is one unit from the greatest number.
        let near = |x: f32| x.abs() == f32::MAX || x.is_infinite();
        return if near(got) && near(nearest) && got.signum() == nearest.signum() { 1.0 } else { f64::INFINITY };
    }
    let exponent = (nearest.abs().max(f32::MIN_POSITIVE).to_bits() >> 23) as i32 - 127 - 23;
    (f64::from(got) - exact).abs() / 2f64.powi(exponent)
}

/// Numbers of every exponent and sign, dense, and the special ones.
fn samples() -> Vec<f32> {
    // A step that shares no factor with 2^32.
    let mut x: Vec<f32> = (0..u64::from(u32::MAX)).step_by(2311).map(|bits| f32::from_bits(bits as u32)).collect();
    // Where functions of neural networks are used.
    x.extend((-60_000..60_000).map(|n| n as f32 * 0.000_37));
    for special in [0.0, f32::MIN_POSITIVE, 1.0, f32::MAX, f32::INFINITY, f32::from_bits(1), std::f32::consts::PI] {
        x.extend([special, -special, special.next_up(), -special.next_up(), special.next_down()]);
    }
    x.push(f32::NAN);
    x
}

/// `e^v / (1 + e^v)` to the last digit, where the usual form loses them.
fn sigmoid(v: f64) -> f64 {
    if v < 0.0 { libm::exp(v) / (1.0 + libm::exp(v)) } else { 1.0 / (1.0 + libm::exp(-v)) }
}

/// A number times something that is 0 where the number is −∞: NaN by definition.
fn times(x: f64, y: f64) -> f64 {
    if x.is_infinite() && y == 0.0 { f64::NAN } else { x * y }
}

fn gelu_tanh(x: f64) -> f64 {
    let v = 2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    times(x, sigmoid(v))
}

/// Each function, what it is in float64 (by libm, which is the same everywhere), and how many units in the last place it may be off.
type Case = (Unary, fn(f64) -> f64, f64);

const FUNCTIONS: [Case; 31] = [
    (Unary::Exp, libm::exp, 1.0),
    (Unary::Exp2, libm::exp2, 1.0),
    (Unary::Expm1, libm::expm1, 2.0),
    (Unary::Log, libm::log, 2.0),
    (Unary::Log2, libm::log2, 2.0),
    (Unary::Log10, libm::log10, 2.0),
    (Unary::Log1p, libm::log1p, 2.0),
    (Unary::Sin, libm::sin, 0.51),
    (Unary::Cos, libm::cos, 0.51),
    (Unary::Tan, libm::tan, 0.51),
    (Unary::Tanh, libm::tanh, 2.0),
    (Unary::Sinh, libm::sinh, 0.51),
    (Unary::Cosh, libm::cosh, 0.51),
    (Unary::Asin, libm::asin, 0.51),
    (Unary::Acos, libm::acos, 0.51),
    (Unary::Atan, libm::atan, 0.51),
    (Unary::Asinh, libm::asinh, 0.51),
    (Unary::Acosh, |x| if x < 1.0 { f64::NAN } else { libm::acosh(x) }, 0.51),
    (Unary::Atanh, libm::atanh, 0.51),
    (Unary::Erfc, libm::erfc, 0.51),
    (Unary::Erf, libm::erf, 1.5),
    (Unary::Sigmoid, sigmoid, 2.0),
    (Unary::Silu, |x| times(x, sigmoid(x)), 2.0),
    (Unary::Gelu, |x| times(0.5 * x, libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)), 2.0),
    (Unary::GeluTanh, gelu_tanh, 2.0),
    (Unary::Rsqrt, |x| 1.0 / x.sqrt(), 1.5),
    (Unary::Sqrt, f64::sqrt, 0.5),
    (Unary::Reciprocal, f64::recip, 0.5),
    (Unary::Floor, f64::floor, 0.0),
    (Unary::Round, f64::round_ties_even, 0.0),
    (Unary::Square, |x| x * x, 0.5),
];

#[test]
fn functions_of_float32_lie_within_their_bounds() {
    let x = samples();
    for arch in archs() {
        for (op, exact, bound) in FUNCTIONS {
            // Without a fused multiply-add they go by way of float64, which keeps the digits of the far tail from gelu_tanh.
            if arch == Arch::Scalar && op == Unary::GeluTanh {
                continue;
            }
            let got = unary(arch, op, &x);
            let worst = got.iter().zip(&x).map(|(&got, &x)| (ulps(got, exact(f64::from(x))), x, got));
            let worst = worst.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap();
            println!("{:>12} {op:?}: {:.3} ulp at {:e}", arch.name(), worst.0, worst.1);
            assert!(worst.0 <= bound, "{} {op:?} of {:e} is {:e}, {} ulp off", arch.name(), worst.1, worst.2, worst.0);
        }
    }
}

#[test]
fn zeros_have_the_sign_of_the_definition() {
    for arch in archs() {
        for (op, exact, _) in FUNCTIONS {
            for (x, got) in [0.0f32, -0.0].into_iter().zip(unary(arch, op, &[0.0, -0.0])) {
                let exact = exact(f64::from(x)) as f32;
                let is_same = got.to_bits() == exact.to_bits() || (got.is_nan() && exact.is_nan());
                assert!(is_same, "{} {op:?} of {x:?} is {got:?}", arch.name());
            }
        }
    }
}

/// The functions that keep fewer digits where their result is rounded to 16 bits at once.
const SHORT: [Unary; 3] = [Unary::Silu, Unary::Gelu, Unary::GeluTanh];

/// The bits of significands of float16 and bfloat16, and the exponents of their smallest normal numbers.
const HALVES: [(DType, i32, i32); 2] = [(DType::F16, 11, -14), (DType::BF16, 8, -126)];

#[test]
fn functions_of_16_bits_are_rounded_from_more_digits() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    for (arch, op) in archs().into_iter().flat_map(|arch| SHORT.map(|op| (arch, op))) {
        // As above.
        if arch == Arch::Scalar && op == Unary::GeluTanh {
            continue;
        }
        let exact = FUNCTIONS.iter().find(|case| case.0 == op).unwrap().1;
        for (dtype, digits, least) in HALVES {
            let number = |bits: u16| match dtype {
                DType::F16 => f16::from_bits(bits).to_f64(),
                _ => bf16::from_bits(bits).to_f64(),
            };
            let code = [Instruction::Load(0), Instruction::Unary(op, Register(0)), Instruction::Store(1, Register(1))];
            let mut tensors = [Tensor::dense(dtype, &all), Tensor::dense(dtype, &all)];
            run(arch, &code, &[all.len()], &mut tensors).unwrap();
            let mut worst = (0.0, 0.0);
            for (&bits, got) in all.iter().zip(tensors[1].elements::<u16>()) {
                let (x, got) = (number(bits), number(got));
                let exact = exact(x);
                assert_eq!(got.is_nan(), exact.is_nan(), "{} {op:?} of {x:e}", arch.name());
                if got == exact || got.is_nan() {
                    continue;
                }
                let exponent = (exact.abs().log2().floor() as i32).max(least) + 1 - digits;
                let off = (got - exact).abs() / 2f64.powi(exponent);
                worst = if off > worst.0 { (off, x) } else { worst };
            }
            println!("{:>12} {op:?} {dtype}: {:.3} ulp at {:e}", arch.name(), worst.0, worst.1);
            assert!(worst.0 <= 0.53, "{} {op:?} of {:e} in {dtype}: {} ulp off", arch.name(), worst.1, worst.0);
        }
    }
}

/// The interpreter's numbers of int64.
fn power(base: i64, exponent: i64) -> i64 {
    match (base, exponent) {
        (1, _) => 1,
        (-1, n) => {
            if n % 2 == 0 {
                1
            } else {
                -1
            }
        }
        (_, n) if n < 0 => 0,
        (base, n) => {
            let power = |base: i64, n: i64| base.wrapping_pow(u32::try_from(n).unwrap());
            power(power(base, 1 << 31), n >> 31).wrapping_mul(power(base, n & 0x7FFF_FFFF))
        }
    }
}

/// What a function is by definition.
type OfInts = fn(i64, i64) -> i64;
type OfFloats = dyn Fn(f64, f64) -> f64;
type Test = fn(f32, f32) -> bool;

const INTS: [i64; 15] = [0, 1, -1, 2, -2, 3, -3, 7, -7, 40, i64::MAX, i64::MIN, i64::MIN + 1, 1 << 40, -(1 << 33) - 5];

/// Every pair of them, a after b.
fn pairs<T: Copy>(all: &[T]) -> (Vec<T>, Vec<T>) {
    all.iter().flat_map(|&a| all.iter().map(move |&b| (a, b))).unzip()
}

fn binary<T: Copy, U: Copy>(
    arch: Arch,
    op: Binary,
    [a, b]: [&[T]; 2],
    dtype: DType,
    out: DType,
) -> Result<Vec<U>, ZeroDivision> {
    let code = [
        Instruction::Load(0),
        Instruction::Load(1),
        Instruction::Binary(op, Register(0), Register(1)),
        Instruction::Store(2, Register(2)),
    ];
    let bytes = vec![0u8; a.len() * out.bits() / 8];
    let mut tensors = [Tensor::dense(dtype, a), Tensor::dense(dtype, b), Tensor::dense(DType::U8, &bytes)];
    tensors[2].dtype = out;
    run(arch, &code, &[a.len()], &mut tensors)?;
    Ok(tensors[2].elements())
}

#[test]
fn integers_wrap_and_divide_as_defined() {
    // What is defined of each pair; of a divisor that is not 0.
    let cases: [(Binary, OfInts); 15] = [
        (Binary::Add, i64::wrapping_add),
        (Binary::Sub, i64::wrapping_sub),
        (Binary::Mul, i64::wrapping_mul),
        (Binary::DivFloor, |a, b| {
            let quotient = (i128::from(a)).div_euclid(i128::from(b));
            // Euclid's remainder is never negative: by a negative divisor its quotient lies one above.
            let rest = i128::from(a) - quotient * i128::from(b);
            (if b < 0 && rest != 0 { quotient - 1 } else { quotient }) as i64
        }),
        (Binary::DivTrunc, |a, b| (i128::from(a) / i128::from(b)) as i64),
        (Binary::Remainder, |a, b| {
            let rest = i128::from(a) % i128::from(b);
            (if rest != 0 && (rest < 0) != (b < 0) { rest + i128::from(b) } else { rest }) as i64
        }),
        (Binary::Fmod, |a, b| (i128::from(a) % i128::from(b)) as i64),
        (Binary::Pow, power),
        (Binary::Maximum, i64::max),
        (Binary::Minimum, i64::min),
        (Binary::BitwiseAnd, |a, b| a & b),
        (Binary::BitwiseOr, |a, b| a | b),
        (Binary::BitwiseXor, |a, b| a ^ b),
        (Binary::ShiftLeft, |a, b| u32::try_from(b).ok().and_then(|b| a.checked_shl(b)).unwrap_or(0)),
        (Binary::ShiftRight, |a, b| {
            u32::try_from(b).ok().and_then(|b| a.checked_shr(b)).unwrap_or(if a < 0 { -1 } else { 0 })
        }),
    ];
    for arch in archs() {
        for (op, exact) in cases {
            let divides = matches!(op, Binary::DivFloor | Binary::DivTrunc | Binary::Remainder | Binary::Fmod);
            let (a, b): (Vec<i64>, Vec<i64>) = INTS
                .iter()
                .flat_map(|&a| INTS.iter().map(move |&b| (a, b)))
                .filter(|(_, b)| !divides || *b != 0)
                .unzip();
            let got: Vec<i64> = binary(arch, op, [&a, &b], DType::I64, DType::I64).unwrap();
            for (at, &got) in got.iter().enumerate() {
                assert_eq!(got, exact(a[at], b[at]), "{} {op:?} of {} and {}", arch.name(), a[at], b[at]);
            }
            if divides {
                let zero = binary::<i64, i64>(arch, op, [&[1, 2, 3], &[1, 0, 1]], DType::I64, DType::I64);
                assert_eq!(zero, Err(ZeroDivision), "{op:?}");
            }
        }
        // In an int32 graph node the sum wraps to int32.
        let code = [
            Instruction::Load(0),
            Instruction::Binary(Binary::Mul, Register(0), Register(0)),
            Instruction::Convert(Register(1), DType::I32),
            Instruction::Unary(Unary::Abs, Register(2)),
            Instruction::Store(1, Register(3)),
        ];
        let x = [65_537, i32::MIN, -3];
        let mut tensors = [Tensor::dense(DType::I32, &x), Tensor::dense(DType::I64, &[0i64; 3])];
        run(arch, &code, &[3], &mut tensors).unwrap();
        assert_eq!(tensors[1].elements::<i64>(), [131_073, 0, 9]);
    }
}

#[test]
fn comparisons_extremes_and_quotients_of_floats_are_as_defined() {
    let x = [
        0.0f32,
        -0.0,
        1.0,
        -1.0,
        2.5,
        -2.5,
        7.3,
        0.1,
        1e-45,
        -3.4e38,
        3.4e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    let (a, b) = pairs(&x);
    let same = |got: f32, exact: f64| got == exact as f32 || (got.is_nan() && exact.is_nan());
    let floor = |a: f64, b: f64| {
        let rest = a % b;
        let quotient = (a - rest) / b - f64::from(u8::from(rest != 0.0 && (b < 0.0) != (rest < 0.0)));
        if b == 0.0 {
            a / b
        } else if quotient - quotient.floor() > 0.5 {
            quotient.floor() + 1.0
        } else {
            quotient.floor()
        }
    };
    let cases: [(Binary, &OfFloats); 13] = [
        (Binary::Add, &|a, b| a + b),
        (Binary::Sub, &|a, b| a - b),
        (Binary::Mul, &|a, b| a * b),
        (Binary::Div, &|a, b| a / b),
        (Binary::DivTrunc, &|a, b| f64::from((a / b) as f32).trunc()),
        (Binary::DivFloor, &floor),
        (Binary::Fmod, &|a, b| a % b),
        (Binary::Pow, &f64::powf),
        (Binary::Atan2, &f64::atan2),
        (Binary::Hypot, &f64::hypot),
        (Binary::Copysign, &f64::copysign),
        (Binary::Maximum, &|a, b| {
            if a.is_nan() || b.is_nan() {
                f64::NAN
            } else if a > b {
                a
            } else {
                b
            }
        }),
        (Binary::Minimum, &|a, b| {
            if a.is_nan() || b.is_nan() {
                f64::NAN
            } else if a < b {
                a
            } else {
                b
            }
        }),
    ];
    let tests: [(Binary, Test); 9] = [
        (Binary::Eq, |a, b| a == b),
        (Binary::Ne, |a, b| a != b),
        (Binary::Lt, |a, b| a < b),
        (Binary::Le, |a, b| a <= b),
        (Binary::Gt, |a, b| a > b),
        (Binary::Ge, |a, b| a >= b),
        (Binary::LogicalAnd, |a, b| a != 0.0 && b != 0.0),
        (Binary::LogicalOr, |a, b| a != 0.0 || b != 0.0),
        (Binary::LogicalXor, |a, b| (a != 0.0) != (b != 0.0)),
    ];
    for arch in archs() {
        for (op, exact) in cases {
            let got: Vec<f32> = binary(arch, op, [&a, &b], DType::F32, DType::F32).unwrap();
            for (at, &got) in got.iter().enumerate() {
                let exact = exact(f64::from(a[at]), f64::from(b[at]));
                assert!(same(got, exact), "{} {op:?} of {:e} and {:e}: {got:e}, {exact:e}", arch.name(), a[at], b[at]);
            }
        }
        for (op, exact) in tests {
            let got: Vec<u8> = binary(arch, op, [&a, &b], DType::F32, DType::Bool).unwrap();
            for (at, &got) in got.iter().enumerate() {
                assert_eq!(got, u8::from(exact(a[at], b[at])), "{} {op:?} of {:e} and {:e}", arch.name(), a[at], b[at]);
            }
            // Booleans: a byte other than 0 is 1.
            let got: Vec<u8> = binary(arch, op, [&[0u8, 0, 1, 7], &[0u8, 9, 0, 1]], DType::Bool, DType::Bool).unwrap();
            let exact = [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)].map(|(a, b)| u8::from(exact(a, b)));
            assert_eq!(got, exact, "{} {op:?} of booleans", arch.name());
        }
    }
}

/// A float to a dtype by rapt-graph's rules.
fn to_int(dtype: DType, x: f64) -> i64 {
    let within =
        |bound: f64, least: i64| if x.trunc() >= -bound && x.trunc() < bound { x.trunc() as i64 } else { least };
    let by_i32 = within(2f64.powi(31), i64::from(i32::MIN));
    match dtype {
        DType::Bool => i64::from(x != 0.0),
        DType::U8 => i64::from(within(2f64.powi(63), i64::MIN) as u8),
        DType::I64 => within(2f64.powi(63), i64::MIN),
        DType::I32 => by_i32,
        DType::I16 => i64::from(by_i32 as i16),
        _ => i64::from(by_i32 as i8),
    }
}

/// Converts and stores in one lane's widest dtype.
fn convert<T: Copy, U: Copy>(arch: Arch, x: &[T], from: DType, to: DType) -> Vec<U> {
    let wide = match Lane::of(to).unwrap() {
        Lane::F32 => DType::F32,
        Lane::F64 => DType::F64,
        Lane::Int => DType::I64,
        Lane::Bool => DType::Bool,
    };
    let code = [Instruction::Load(0), Instruction::Convert(Register(0), to), Instruction::Store(1, Register(1))];
    let mut out = Tensor::dense(DType::U8, &vec![0u8; x.len() * wide.bits() / 8]);
    out.dtype = wide;
    let mut tensors = [Tensor::dense(from, x), out];
    run(arch, &code, &[x.len()], &mut tensors).unwrap();
    tensors[1].elements()
}

#[test]
fn conversions_are_those_of_the_interpreter() {
    let floats = [
        0.0,
        -0.0,
        0.9,
        -0.9,
        1.5,
        255.7,
        256.0,
        -1.0,
        300.7,
        -300.7,
        40000.0,
        3e9,
        -3e9,
        2_147_483_647.0,
        2_147_483_648.0,
        -2_147_483_648.9,
        -2_147_483_649.5,
        1e19,
        -1e19,
        9.3e18,
        2f64.powi(40),
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1e-310,
        65504.0,
        65_519.999_999_999,
        65520.0,
        2f64.powi(-25) + 2f64.powi(-70),
        1.0 + 2f64.powi(-11) + 2f64.powi(-60),
        3.3895e38,
    ];
    let singles = floats.map(|x| x as f32);
    for arch in archs() {
        for to in [DType::I64, DType::I32, DType::I16, DType::I8, DType::U8] {
            assert_eq!(convert::<_, i64>(arch, &floats, DType::F64, to), floats.map(|x| to_int(to, x)), "{to}");
            let exact = singles.map(|x| to_int(to, f64::from(x)));
            assert_eq!(convert::<_, i64>(arch, &singles, DType::F32, to), exact, "{to}");
        }
        let exact = floats.map(|x| u8::from(x != 0.0));
        assert_eq!(convert::<_, u8>(arch, &floats, DType::F64, DType::Bool), exact);
        // Rounded once from float64, by way of float32 from integers.
        let bits = |x: Vec<f32>| x.into_iter().map(|x| if x.is_nan() { 1 } else { x.to_bits() }).collect::<Vec<u32>>();
        let exact = floats.map(|x| rapt_core::f16_from_f64(x).to_f32()).to_vec();
        assert_eq!(bits(convert(arch, &floats, DType::F64, DType::F16)), bits(exact));
        let exact = floats.map(|x| rapt_core::bf16_from_f64(x).to_f32()).to_vec();
        assert_eq!(bits(convert(arch, &floats, DType::F64, DType::BF16)), bits(exact));
        let ints = [0, 1, -1, (1 << 24) + 1, 65520, 4099, 65793, i64::MAX, i64::MIN, (1 << 53) + 1, 1 << 40];
        let exact = ints.map(|x| f16::from_f32(x as f32).to_f32()).to_vec();
        assert_eq!(bits(convert(arch, &ints, DType::I64, DType::F16)), bits(exact));
        let exact = ints.map(|x| bf16::from_f32(x as f32).to_f32()).to_vec();
        assert_eq!(bits(convert(arch, &ints, DType::I64, DType::BF16)), bits(exact));
        assert_eq!(bits(convert(arch, &ints, DType::I64, DType::F32)), bits(ints.map(|x| x as f32).to_vec()));
        assert_eq!(convert::<_, i64>(arch, &ints, DType::I64, DType::I16), ints.map(|x| i64::from(x as i16)));
    }
}

#[test]
fn every_16_bit_float_is_read_and_every_float32_rounded_to_nearest_even() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let x: Vec<f32> = samples();
    let same = |got: f32, exact: f32| got.to_bits() == exact.to_bits() || (got.is_nan() && exact.is_nan());
    for arch in archs() {
        let halves: Vec<f16> = all.iter().map(|&bits| f16::from_bits(bits)).collect();
        let got: Vec<f32> = convert(arch, &halves, DType::F16, DType::F32);
        assert!(got.iter().zip(&halves).all(|(got, x)| same(*got, x.to_f32())));
        let halves: Vec<bf16> = all.iter().map(|&bits| bf16::from_bits(bits)).collect();
        let got: Vec<f32> = convert(arch, &halves, DType::BF16, DType::F32);
        assert!(got.iter().zip(&halves).all(|(got, x)| same(*got, x.to_f32())));
        let got: Vec<f32> = convert(arch, &x, DType::F32, DType::F16);
        assert!(got.iter().zip(&x).all(|(got, x)| same(*got, f16::from_f32(*x).to_f32())), "{}", arch.name());
        let got: Vec<f32> = convert(arch, &x, DType::F32, DType::BF16);
        assert!(got.iter().zip(&x).all(|(got, x)| same(*got, bf16::from_f32(*x).to_f32())), "{}", arch.name());
        // A product of bfloat16 is rounded once per node, also inside of a chain.
        let code = [
            Instruction::Load(0),
            Instruction::Binary(Binary::Mul, Register(0), Register(0)),
            Instruction::Convert(Register(1), DType::BF16),
            Instruction::Binary(Binary::Add, Register(2), Register(0)),
            Instruction::Store(1, Register(3)),
        ];
        let mut tensors = [Tensor::dense(DType::BF16, &halves), Tensor::dense(DType::BF16, &halves)];
        run(arch, &code, &[halves.len()], &mut tensors).unwrap();
        for (got, x) in tensors[1].elements::<bf16>().into_iter().zip(&halves) {
            let square = bf16::from_f32(x.to_f32() * x.to_f32());
            let exact = bf16::from_f32(square.to_f32() + x.to_f32());
            assert!(same(got.to_f32(), exact.to_f32()), "{x}: {got}, {exact}");
        }
    }
}

#[test]
fn selections_constants_and_fused_products() {
    for arch in archs() {
        let code = [
            Instruction::Load(0),
            Instruction::Number(Number::F64(0.5)),
            Instruction::Binary(Binary::Gt, Register(0), Register(1)),
            Instruction::Number(Number::F64(-3.0)),
            Instruction::MulAdd(Register(0), Register(0), Register(3)),
            Instruction::Select(Register(2), Register(4), Register(3)),
            Instruction::Store(1, Register(5)),
        ];
        let x: Vec<f64> = (0..777).map(|n| f64::from(n) * 0.01).collect();
        let mut tensors = [Tensor::dense(DType::F64, &x), Tensor::dense(DType::F64, &x)];
        run(arch, &code, &[777], &mut tensors).unwrap();
        let exact: Vec<f64> = x.iter().map(|&x| if x > 0.5 { libm::fma(x, x, -3.0) } else { -3.0 }).collect();
        assert_eq!(tensors[1].elements::<f64>(), exact);
        // Powers whose exponent is a constant: of 2 and 3 they are products, and the second one rounds twice.
        for (exponent, bound) in [(2.0f32, 0.5), (3.0, 1.5), (4.0, 0.5)] {
            let code = [
                Instruction::Load(0),
                Instruction::Number(Number::F32(exponent)),
                Instruction::Binary(Binary::Pow, Register(0), Register(1)),
                Instruction::Store(1, Register(2)),
            ];
            let x: Vec<f32> = (-500..500).map(|n| n as f32 * 0.017).collect();
            let mut tensors = [Tensor::dense(DType::F32, &x), Tensor::dense(DType::F32, &x)];
            run(arch, &code, &[1000], &mut tensors).unwrap();
            for (got, x) in tensors[1].elements::<f32>().into_iter().zip(x) {
                assert!(
                    ulps(got, libm::pow(f64::from(x), f64::from(exponent))) <= bound,
                    "{x} to the power of {exponent}: {got}"
                );
            }
        }
    }
}

#[test]
fn what_is_no_program_is_named() {
    use rapt_cpu::pointwise::ProgramError;
    let new = |code: &[Instruction]| Program::new(vec![DType::F32, DType::I64], code.to_vec()).unwrap_err();
    assert_eq!(new(&[Instruction::Load(2)]), ProgramError::Operand { at: 0, operand: 2 });
    assert_eq!(
        new(&[Instruction::Unary(Unary::Neg, Register(0))]),
        ProgramError::Undefined { at: 0, register: Register(0) }
    );
    let mixed =
        [Instruction::Load(0), Instruction::Load(1), Instruction::Binary(Binary::Add, Register(0), Register(1))];
    assert_eq!(new(&mixed), ProgramError::Lanes { at: 2, lanes: vec![Lane::F32, Lane::Int] });
    let twice = [Instruction::Load(0), Instruction::Store(0, Register(0)), Instruction::Store(0, Register(0))];
    assert_eq!(new(&twice), ProgramError::StoredTwice { operand: 0 });
    assert_eq!(Program::new(vec![DType::C64], vec![]).unwrap_err(), ProgramError::Dtype { at: 0, dtype: DType::C64 });
    let copy = vec![Instruction::Load(0), Instruction::Store(1, Register(0))];
    let program = Arc::new(Program::new(vec![DType::F32, DType::F32], copy).unwrap());
    let new =
        |arch, shape: &[usize], strides: &[Vec<isize>]| Loop::new(arch, program.clone(), shape, strides).unwrap_err();
    assert_eq!(new(Arch::Scalar, &[2], &[vec![1]]), ProgramError::Strides { expected: 2, got: 1 });
    assert_eq!(new(Arch::Scalar, &[2], &[vec![1], vec![1, 1]]), ProgramError::Strides { expected: 1, got: 2 });
    assert_eq!(new(Arch::Scalar, &[usize::MAX, 2], &[vec![0, 0], vec![0, 0]]), ProgramError::TooLarge);
    assert_eq!(new(Arch::Sm80, &[2], &[vec![1], vec![1]]), ProgramError::Missing { arch: Arch::Sm80 });
    // Every function is defined on exactly the lanes that it says.
    for op in Unary::ALL {
        for (dtype, lane) in
            [(DType::F32, Lane::F32), (DType::F64, Lane::F64), (DType::I64, Lane::Int), (DType::Bool, Lane::Bool)]
        {
            let code = vec![Instruction::Load(0), Instruction::Unary(op, Register(0))];
            let made = Program::new(vec![dtype], code).map(Arc::new);
            assert_eq!(made.is_ok(), op.result(lane).is_some(), "{op:?} of {dtype}");
            if let Ok(program) = made {
                archs().into_iter().for_each(|arch| drop(Loop::new(arch, program.clone(), &[3], &[vec![1]]).unwrap()));
            }
        }
    }
    for op in Binary::ALL {
        for dtype in [DType::F32, DType::F64, DType::I64, DType::Bool] {
            let code = vec![Instruction::Load(0), Instruction::Binary(op, Register(0), Register(0))];
            if let Ok(program) = Program::new(vec![dtype], code).map(Arc::new) {
                archs().into_iter().for_each(|arch| drop(Loop::new(arch, program.clone(), &[3], &[vec![1]]).unwrap()));
            }
        }
    }
}
