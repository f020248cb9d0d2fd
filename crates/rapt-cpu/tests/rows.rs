//! Norms, softmax and sums along rows, and rows by index, against float64.

use rapt_core::{Arch, DType};
use rapt_cpu::rows::{IndexOutOfRange, RowError, RowFunction, RowKernel, RowOperands, Rows, gather_rows};
use rapt_testkit::{Guard, Memory, Rng, decode, encode, round};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const FUNCTIONS: [RowFunction; 7] = [
    RowFunction::LayerNorm { eps: 1e-5 },
    RowFunction::RmsNorm { eps: 1e-6 },
    RowFunction::Softmax,
    RowFunction::LogSoftmax,
    RowFunction::Sum,
    RowFunction::Mean,
    RowFunction::Max,
];

/// A sum, with what each addition loses (Neumaier 1974).
fn total(x: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0.0f64, 0.0);
    for x in x {
        let next = sum + x;
        lost += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    if lost.is_finite() { sum + lost } else { sum }
}

/// The definition, of a row in float64; mean and rstd beside.
fn exact(function: RowFunction, x: &[f64], weight: &[f64], bias: &[f64]) -> (Vec<f64>, [f64; 2]) {
    let n = x.len() as f64;
    let sum = total(x.iter().copied());
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers = total(x.iter().map(|x| (x - max).exp()));
    match function {
        RowFunction::LayerNorm { eps } | RowFunction::RmsNorm { eps } => {
            let mean = if matches!(function, RowFunction::RmsNorm { .. }) { 0.0 } else { sum / n };
            let rstd = 1.0 / (total(x.iter().map(|x| (x - mean) * (x - mean))) / n + eps).sqrt();
            let y = x.iter().zip(weight.iter().zip(bias)).map(|(x, (w, b))| (x - mean) * rstd * w + b);
            (y.collect(), [mean, rstd])
        }
        RowFunction::Softmax => (x.iter().map(|x| (x - max).exp() / powers).collect(), [0.0; 2]),
        RowFunction::LogSoftmax => (x.iter().map(|x| x - max - powers.ln()).collect(), [0.0; 2]),
        RowFunction::Sum => (vec![sum], [0.0; 2]),
        RowFunction::Mean => (vec![sum / n], [0.0; 2]),
        RowFunction::Max => (vec![if x.iter().any(|x| x.is_nan()) { f64::NAN } else { max }], [0.0; 2]),
    }
}

fn archs() -> Vec<Arch> {
    rapt_cpu::available()
        .iter()
        .copied()
        .filter(|arch| !matches!(arch, Arch::Avx512Vnni | Arch::Avx512Bf16 | Arch::Amx))
        .collect()
}

/// Numbers in memory between guards, each row `stride` elements after the one before.
fn placed(dtype: DType, values: &[f64], columns: usize, stride: usize, guard: Guard) -> Memory {
    let rows = values.len() / columns.max(1);
    let size = dtype.bits() / 8;
    let mut memory = Memory::new((rows.saturating_sub(1) * stride + columns.min(values.len())) * size, guard);
    for (at, value) in values.iter().enumerate() {
        let at = (at / columns * stride + at % columns) * size;
        encode(dtype, *value, &mut memory.bytes_mut()[at..at + size]);
    }
    memory
}

fn read(memory: &Memory, dtype: DType, at: usize) -> f64 {
    let size = dtype.bits() / 8;
    decode(dtype, &memory.bytes()[at * size..(at + 1) * size])
}

/// The step from 1 to the next number.
fn step(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 2f64.powi(-52),
        DType::F32 => 2f64.powi(-23),
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    }
}

struct Case {
    arch: Arch,
    function: RowFunction,
    dtype: DType,
    params: Option<DType>,
    columns: usize,
    guard: Guard,
}

/// Runs three rows, and compares each with the definition.
fn check(rng: &mut Rng, case: &Case) {
    let Case { arch, function, dtype, params, columns: n, guard } = *case;
    let rows = 3;
    let is_norm = matches!(function, RowFunction::LayerNorm { .. } | RowFunction::RmsNorm { .. });
    let has_bias = matches!(function, RowFunction::LayerNorm { .. });
    let params = params.filter(|_| is_norm);
    let kernel = RowKernel::new(arch, function, dtype, n, [params, params.filter(|_| has_bias)]).unwrap();
    let random = |rng: &mut Rng, n: usize, dtype: DType, scale: f64, plus: f64| -> Vec<f64> {
        (0..n).map(|_| round(dtype, rng.normal() * scale + plus)).collect()
    };
    let x = random(rng, rows * n, dtype, 2.0, 1.0);
    let param = params.unwrap_or(DType::F32);
    let (weight, bias) = match params {
        Some(_) => (random(rng, n, param, 1.0, 0.0), random(rng, n, param, 1.0, 0.0)),
        None => (vec![1.0; n], vec![0.0; n]),
    };
    let bias = if has_bias { bias } else { vec![0.0; n] };
    let wide = if function.keeps_rows() { n } else { 1 };
    let memory = placed(dtype, &x, n, n + 5, guard);
    let [weights, biases] = [&weight, &bias].map(|values| placed(param, values, n, n, guard));
    let out = placed(dtype, &vec![0.0; rows * wide], wide, wide + 2, guard);
    let [mean, rstd] = [0, 1].map(|_| placed(dtype, &[0.0; 3], 3, 3, guard));
    let operands = RowOperands {
        rows,
        x: memory.as_ptr(),
        x_stride: n as isize + 5,
        out_stride: wide as isize + 2,
        weight: weights.as_ptr(),
        bias: biases.as_ptr(),
        mean: if has_bias { mean.as_ptr() } else { std::ptr::null_mut() },
        rstd: if is_norm { rstd.as_ptr() } else { std::ptr::null_mut() },
        ..RowOperands::new(out.as_ptr())
    };
    let work = Memory::new(kernel.scratch_bytes(), guard);
    for item in 0..2 {
        // SAFETY: the memory is as long as rows and strides reach.
        unsafe { kernel.run_item(item, 2, &operands, work.as_ptr()) };
    }
    for row in 0..rows {
        let (expected, stats) = exact(function, &x[row * n..][..n], &weight, &bias);
        // A sum of n numbers errs like their sizes; the rest like a few roundings of numbers near what is computed.
        let sizes: f64 = x[row * n..][..n].iter().map(|x| x.abs()).sum();
        let wide_step = step(if dtype == DType::F64 { DType::F64 } else { DType::F32 });
        for (column, y) in expected.iter().enumerate() {
            let got = read(&out, dtype, row * (wide + 2) + column);
            let scale = match function {
                RowFunction::Sum => sizes,
                RowFunction::Mean => sizes / n as f64,
                RowFunction::Max => 0.0,
                RowFunction::Softmax => 4.0 * y,
                _ => 8.0 * (1.0 + bias[column].abs() + y.abs()),
            };
            let bound = step(dtype) * 0.501 * y.abs()
                + 4.0 * wide_step * scale
                + 2f64.powi(-25) * f64::from(u8::from(dtype == DType::F16));
            assert!(
                (got - y).abs() <= bound || (got.is_nan() && y.is_nan()),
                "{} {function:?} {dtype} of {n}: row {row} column {column} is {got}, {y}",
                arch.name()
            );
        }
        for (memory, exact, is_there) in [(&mean, stats[0], has_bias), (&rstd, stats[1], is_norm)] {
            if is_there {
                let got = read(memory, dtype, row);
                let bound = step(dtype) * 0.501 * exact.abs() + 16.0 * wide_step * (1.0 + exact.abs());
                assert!((got - exact).abs() <= bound || exact.is_nan(), "{function:?} {dtype}: {got}, {exact}");
            }
        }
    }
}

#[test]
fn rows_are_as_defined_at_any_length() {
    let mut rng = Rng::new(3);
    for arch in archs() {
        for function in FUNCTIONS {
            for dtype in DTYPES {
                for columns in [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 130, 384, 1000] {
                    for guard in [Guard::FrontPage, Guard::BackPage] {
                        let params = if columns % 2 == 0 { Some(dtype) } else { None };
                        check(&mut rng, &Case { arch, function, dtype, params, columns, guard });
                    }
                }
                let guard = Guard::BackPage;
                check(&mut rng, &Case { arch, function, dtype, params: Some(dtype), columns: 16384, guard });
                if matches!(dtype, DType::F16 | DType::BF16) {
                    check(&mut rng, &Case { arch, function, dtype, params: Some(DType::F32), columns: 77, guard });
                }
            }
        }
    }
}

/// One row of float32.
fn row(arch: Arch, function: RowFunction, x: &[f32]) -> Vec<f32> {
    let kernel = RowKernel::new(arch, function, DType::F32, x.len(), [None, None]).unwrap();
    let mut out = vec![0f32; x.len().max(1)];
    let mut scratch = vec![0u64; kernel.scratch_bytes() / 8];
    let operands = RowOperands { rows: 1, x: x.as_ptr().cast(), ..RowOperands::new(out.as_mut_ptr().cast()) };
    // SAFETY: one row, and scratch memory of its length.
    unsafe { kernel.run_item(0, 1, &operands, scratch.as_mut_ptr().cast()) };
    out.truncate(if function.keeps_rows() { x.len() } else { 1 });
    out
}

#[test]
fn infinities_and_nan_are_as_defined() {
    for arch in archs() {
        let mut x = vec![0.5f32; 37];
        x[33] = f32::NEG_INFINITY;
        let y = row(arch, RowFunction::Softmax, &x);
        assert!(y[33] == 0.0 && (y[0] - 1.0 / 36.0).abs() < 1e-8);
        assert_eq!(row(arch, RowFunction::LogSoftmax, &x)[33], f32::NEG_INFINITY);
        assert!(row(arch, RowFunction::Softmax, &[f32::NEG_INFINITY; 19]).iter().all(|y| y.is_nan()));
        for at in [0, 17, 36] {
            let mut x = x.clone();
            x[at] = f32::NAN;
            assert!(row(arch, RowFunction::Max, &x)[0].is_nan());
            assert!(row(arch, RowFunction::Sum, &x)[0].is_nan());
            assert!(row(arch, RowFunction::Softmax, &x).iter().all(|y| y.is_nan()));
        }
        assert_eq!(row(arch, RowFunction::Max, &[f32::NEG_INFINITY; 5]), [f32::NEG_INFINITY]);
        assert_eq!(row(arch, RowFunction::Max, &[1.0, f32::INFINITY, 2.0]), [f32::INFINITY]);
        assert_eq!(row(arch, RowFunction::Sum, &[]), [0.0]);
        assert!(row(arch, RowFunction::Mean, &[])[0].is_nan());
        assert!(row(arch, RowFunction::Softmax, &[]).is_empty());
        // A shift as large as numbers go changes nothing.
        assert_eq!(row(arch, RowFunction::Softmax, &[f32::MAX, f32::MAX]), [0.5, 0.5]);
    }
}

#[test]
fn what_has_no_kernel_is_named() {
    let new =
        |function, dtype, columns, params| RowKernel::new(Arch::Scalar, function, dtype, columns, params).unwrap_err();
    let norm = RowFunction::RmsNorm { eps: 0.0 };
    assert_eq!(new(norm, DType::I64, 3, [None, None]), RowError::Dtype(DType::I64));
    assert_eq!(new(norm, DType::F32, 3, [None, Some(DType::F32)]), RowError::Param(DType::F32));
    assert_eq!(new(norm, DType::F32, 3, [Some(DType::BF16), None]), RowError::Param(DType::BF16));
    assert_eq!(new(RowFunction::Max, DType::F32, 0, [None, None]), RowError::Empty);
    assert_eq!(new(norm, DType::F32, usize::MAX, [None, None]), RowError::TooLarge);
}

#[test]
fn rows_are_read_by_index() {
    let table: Vec<f32> = (0..40).map(|n| n as f32).collect();
    let mut out = [0f32; 12];
    let mut gather = |indices: *const u8, dtype, step| {
        let table = Rows { ptr: table.as_ptr().cast(), rows: 10, row_bytes: 12, stride_bytes: 16 };
        let rows = Rows { ptr: out.as_mut_ptr().cast(), rows: 3, row_bytes: 12, stride_bytes: 16 };
        // SAFETY: ten rows of four, three indices, three rows of four.
        unsafe { gather_rows(table, indices, dtype, step, rows) }.map(|()| out)
    };
    let rows = [36.0, 37.0, 38.0, 0.0, 0.0, 1.0, 2.0, 0.0, 16.0, 17.0, 18.0, 0.0];
    assert_eq!(gather([9i64, 0, 4].as_ptr().cast(), DType::I64, 1), Ok(rows));
    assert_eq!(gather([9i32, 7, 0, 7, 4].as_ptr().cast(), DType::I32, 2), Ok(rows));
    let refused = |at, index| Err(IndexOutOfRange { at, index, size: 10 });
    assert_eq!(gather([9i64, 10, -1].as_ptr().cast(), DType::I64, 1), refused(1, 10));
    assert_eq!(gather([9i32, 1, -1].as_ptr().cast(), DType::I32, 1), refused(2, -1));
    assert_eq!(refused(2, -1).unwrap_err().to_string(), "index -1 of 10 rows");
}
