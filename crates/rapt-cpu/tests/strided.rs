//! Kernels over strided tensors against plain definitions: any strides, every instruction set, any division of the work.

use rapt_core::DType;
use rapt_cpu::strided::{
    Along, Depthwise, Fault, Fold, FoldFunction, Form, Histogram, Kernel, Order, Pool, PoolFunction, Resize,
    RunningSum, Spread, Steps, Write,
};
use rapt_testkit::{Guard, Memory, Rng, decode, encode, round};

const DTYPES: [DType; 10] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U8,
    DType::Bool,
];

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// A tensor in memory: dimensions in any order, with gaps, some of them backwards.
struct Tensor {
    form: Form,
    memory: Memory,
    /// Where index 0 lies, in elements.
    first: usize,
}

/// All indices of a shape, in row-major order.
fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    let each = |all: Vec<Vec<usize>>, &n: &usize| {
        all.iter().flat_map(|index| (0..n).map(move |i| [&index[..], &[i]].concat())).collect()
    };
    shape.iter().fold(vec![Vec::new()], each)
}

impl Tensor {
    fn new(rng: &mut Rng, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
        let mut order: Vec<usize> = (0..shape.len()).collect();
        for d in (1..order.len()).rev() {
            order.swap(d, rng.below(d + 1));
        }
        let (mut strides, mut len, mut first) = (vec![0isize; shape.len()], 1usize, 0usize);
        for &d in &order {
            let gap = if rng.once_in(3) { rng.below(3) } else { 0 };
            let stride = len + gap;
            strides[d] = stride.cast_signed();
            len = stride * shape[d].max(1);
            if rng.once_in(4) && shape[d] > 0 {
                strides[d] = -strides[d];
                first += stride * (shape[d] - 1);
            }
        }
        let memory = Memory::new(len * dtype.bits() / 8, rng.pick(&[Guard::FrontPage, Guard::BackPage]));
        let mut tensor = Tensor { form: Form { dtype, shape: shape.to_vec(), strides }, memory, first };
        for (index, &value) in indices(shape).iter().zip(values) {
            let at = tensor.at(index);
            let size = dtype.bits() / 8;
            encode_any(dtype, value, &mut tensor.memory.bytes_mut()[at * size..][..size]);
        }
        tensor
    }

    fn at(&self, index: &[usize]) -> usize {
        let steps = index.iter().zip(&self.form.strides).map(|(&i, &stride)| i.cast_signed() * stride);
        (self.first.cast_signed() + steps.sum::<isize>()).cast_unsigned()
    }

    fn ptr(&self) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(self.first * self.form.dtype.bits() / 8)
    }

    fn values(&self) -> Vec<f64> {
        let size = self.form.dtype.bits() / 8;
        let one = |index: &Vec<usize>| {
            let at = self.at(index);
            decode_any(self.form.dtype, &self.memory.bytes()[at * size..][..size])
        };
        indices(&self.form.shape).iter().map(one).collect()
    }
}

fn encode_any(dtype: DType, value: f64, bytes: &mut [u8]) {
    match dtype {
        DType::I64 => bytes.copy_from_slice(&(value as i64).to_ne_bytes()),
        DType::I32 => bytes.copy_from_slice(&(value as i32).to_ne_bytes()),
        DType::I16 => bytes.copy_from_slice(&(value as i16).to_ne_bytes()),
        DType::I8 | DType::U8 => bytes[0] = (value as i64) as u8,
        DType::Bool => bytes[0] = u8::from(value != 0.0),
        _ => encode(dtype, value, bytes),
    }
}

fn decode_any(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::I64 => i64::from_ne_bytes(bytes.try_into().unwrap()) as f64,
        DType::I32 => f64::from(i32::from_ne_bytes(bytes.try_into().unwrap())),
        DType::I16 => f64::from(i16::from_ne_bytes(bytes.try_into().unwrap())),
        DType::I8 => f64::from(bytes[0].cast_signed()),
        DType::U8 => f64::from(bytes[0]),
        DType::Bool => f64::from(u8::from(bytes[0] != 0)),
        _ => decode(dtype, bytes),
    }
}

/// Numbers of a dtype: small ones, many of them equal; NaN, infinities and both zeros among floats where `odd`.
fn numbers(rng: &mut Rng, dtype: DType, n: usize, odd: bool) -> Vec<f64> {
    let one = |_| match dtype {
        DType::Bool => rng.below(2) as f64,
        DType::U8 => rng.below(7) as f64,
        _ if !is_float(dtype) => rng.below(9) as f64 - 4.0,
        _ if odd && rng.once_in(9) => rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0]),
        _ => round(dtype, (rng.normal() * 4.0).round() / 4.0),
    };
    (0..n).map(one).collect()
}

/// Runs a kernel in `items` parts, the last first.
fn run(kernel: &dyn Kernel, operands: &[&Tensor], items: usize) -> Result<(), Fault> {
    let pointers: Vec<*mut u8> = operands.iter().map(|tensor| tensor.ptr()).collect();
    let scratch = Memory::new(kernel.scratch_bytes(), Guard::BackPage);
    // SAFETY: the operands have the forms that the kernel was made for.
    unsafe {
        kernel.check(&pointers)?;
        for item in (0..items).rev() {
            kernel.run_item(item, items, &pointers, scratch.as_ptr());
        }
    }
    Ok(())
}

/// Equal as bits, every NaN as every other.
fn same(got: &[f64], expected: &[f64], what: &str) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{what}: {at} is {a}, {b}");
    }
}

/// Of each result, the numbers that it is made of, in row-major order of what goes.
fn groups(shape: &[usize], gone: &[usize], values: &[f64]) -> Vec<Vec<f64>> {
    let kept: Vec<usize> = (0..shape.len()).map(|d| if gone.contains(&d) { 1 } else { shape[d] }).collect();
    let place =
        |index: &[usize]| (0..shape.len()).fold(0, |at, d| at * kept[d] + if gone.contains(&d) { 0 } else { index[d] });
    let mut all = vec![Vec::new(); kept.iter().product()];
    for (index, &value) in indices(shape).iter().zip(values) {
        all[place(index)].push(value);
    }
    all
}

/// The first of the greatest, or of the NaN, by place.
fn greatest(x: &[f64], largest: bool) -> usize {
    let better = |a: f64, b: f64| !b.is_nan() && (a.is_nan() || if largest { a > b } else { a < b });
    (1..x.len()).fold(0, |best, i| if better(x[i], x[best]) { i } else { best })
}

fn fold_of(function: FoldFunction, x: &[f64], dtype: DType) -> f64 {
    let sum = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0, |sum, x| sum + x);
    let result = match function {
        FoldFunction::Sum => sum(&mut x.iter().copied()),
        FoldFunction::Mean => x.iter().sum::<f64>() / x.len() as f64,
        FoldFunction::Product if !is_float(dtype) => {
            return x.iter().fold(1i64, |product, &x| product.wrapping_mul(x as i64)) as f64;
        }
        FoldFunction::Product => x.iter().product(),
        FoldFunction::Any => return f64::from(u8::from(x.iter().any(|&x| x != 0.0))),
        FoldFunction::All => return f64::from(u8::from(x.iter().all(|&x| x != 0.0))),
        FoldFunction::Max => return x[greatest(x, true)],
        FoldFunction::Min => return x[greatest(x, false)],
        FoldFunction::Norm(order) if order.is_infinite() => {
            let x: Vec<f64> = x.iter().map(|x| x.abs()).collect();
            x[greatest(&x, order > 0.0)]
        }
        FoldFunction::Norm(0.0) => x.iter().filter(|&&x| x != 0.0).count() as f64,
        FoldFunction::Norm(order) => sum(&mut x.iter().map(|x| x.abs().powf(order))).powf(1.0 / order),
    };
    if is_float(dtype) { round(dtype, result) } else { result + 0.0 }
}

#[test]
fn reductions_are_their_definition() {
    let functions = [
        FoldFunction::Sum,
        FoldFunction::Mean,
        FoldFunction::Product,
        FoldFunction::Any,
        FoldFunction::All,
        FoldFunction::Max,
        FoldFunction::Min,
        FoldFunction::Norm(2.0),
        FoldFunction::Norm(1.0),
        FoldFunction::Norm(0.0),
        FoldFunction::Norm(3.0),
        FoldFunction::Norm(f64::INFINITY),
        FoldFunction::Norm(f64::NEG_INFINITY),
    ];
    let mut rng = Rng::new(1);
    let shapes: [&[usize]; 5] = [&[37, 5], &[3, 41, 9], &[2, 3, 4, 35], &[0, 4], &[70]];
    for round in 0..2 {
        for dtype in DTYPES {
            for shape in shapes {
                let gone: Vec<usize> = (0..shape.len()).filter(|_| rng.once_in(2)).collect();
                for function in functions {
                    let arch = rng.pick(rapt_cpu::available());
                    let values = numbers(&mut rng, dtype, shape.iter().product(), round == 1);
                    let x = Tensor::new(&mut rng, dtype, shape, &values);
                    let kept: Vec<usize> =
                        (0..shape.len()).map(|d| if gone.contains(&d) { 1 } else { shape[d] }).collect();
                    let to = match function {
                        FoldFunction::Any | FoldFunction::All => DType::Bool,
                        FoldFunction::Sum | FoldFunction::Product if !is_float(dtype) => DType::I64,
                        _ => dtype,
                    };
                    let mut out = Tensor::new(&mut rng, to, &kept, &[]);
                    // An expanded result would be written twice: its strides are those of its elements.
                    out.form.shape.clone_from(&kept);
                    let Some(kernel) = Fold::new(arch, function, &x.form, &gone, Some(&out.form), None) else {
                        let needs_floats = matches!(function, FoldFunction::Mean | FoldFunction::Norm(_));
                        let is_empty = gone.iter().any(|&d| shape[d] == 0);
                        assert!(is_empty || (needs_floats && !is_float(dtype)), "{function:?} of {dtype}");
                        continue;
                    };
                    let expected: Vec<f64> =
                        groups(shape, &gone, &values).iter().map(|x| fold_of(function, x, dtype)).collect();
                    run(&kernel, &[&x, &out], rng.pick(&[1, 3])).unwrap();
                    let what = format!("{function:?} of {dtype} {:?} over {gone:?}", x.form);
                    let exact = !matches!(function, FoldFunction::Norm(_) | FoldFunction::Product) || !is_float(dtype);
                    let got = out.values();
                    // Quarters add up exactly in float64 in any order; powers do not.
                    if exact {
                        same(&got, &expected, &what);
                    } else {
                        for (a, b) in got.iter().zip(&expected) {
                            let near =
                                (a - b).abs() <= b.abs() * 2f64.powi(-10) || a == b || (a.is_nan() && b.is_nan());
                            assert!(near, "{what}: {a}, {b}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn places_of_extrema_are_the_first() {
    let mut rng = Rng::new(2);
    for dtype in DTYPES.into_iter().filter(|&dtype| dtype != DType::Bool) {
        for (shape, gone) in [(&[4usize, 33][..], vec![1usize]), (&[50, 3], vec![0]), (&[5, 6, 7], vec![0, 1, 2])] {
            for largest in [false, true] {
                let values = numbers(&mut rng, dtype, shape.iter().product(), true);
                let x = Tensor::new(&mut rng, dtype, shape, &values);
                let kept: Vec<usize> = (0..shape.len()).map(|d| if gone.contains(&d) { 1 } else { shape[d] }).collect();
                let [out, places] = [dtype, DType::I64].map(|dtype| Tensor::new(&mut rng, dtype, &kept, &[]));
                let function = if largest { FoldFunction::Max } else { FoldFunction::Min };
                let arch = rng.pick(rapt_cpu::available());
                let kernel = Fold::new(arch, function, &x.form, &gone, Some(&out.form), Some(&places.form)).unwrap();
                run(&kernel, &[&x, &out, &places], 2).unwrap();
                let all = groups(shape, &gone, &values);
                let at: Vec<f64> = all.iter().map(|x| greatest(x, largest) as f64).collect();
                same(&places.values(), &at, "places");
                let best: Vec<f64> = all.iter().map(|x| x[greatest(x, largest)]).collect();
                same(&out.values(), &best, "extrema");
            }
        }
    }
}

#[test]
fn sums_run_and_numbers_are_counted() {
    let mut rng = Rng::new(3);
    for dtype in DTYPES {
        for shape in [&[5usize, 40, 3][..], &[70, 2], &[9]] {
            let dim = rng.below(shape.len());
            let values = numbers(&mut rng, dtype, shape.iter().product(), false);
            let x = Tensor::new(&mut rng, dtype, shape, &values);
            let to = if is_float(dtype) { dtype } else { DType::I64 };
            let out = Tensor::new(&mut rng, to, shape, &[]);
            run(&RunningSum::new(&x.form, dim, &out.form).unwrap(), &[&x, &out], 3).unwrap();
            let mut sums = std::collections::HashMap::new();
            let expected: Vec<f64> = indices(shape)
                .into_iter()
                .zip(&values)
                .map(|(mut index, value)| {
                    index.remove(dim);
                    let sum = sums.entry(index).or_insert(0.0);
                    *sum += value;
                    if is_float(dtype) { round(dtype, *sum) } else { *sum }
                })
                .collect();
            same(&out.values(), &expected, &format!("running sums of {dtype}"));
        }
    }
    let x = Tensor::new(&mut rng, DType::F32, &[6], &[0.0, 1.0, 1.5, 2.0, 5.0, f64::NAN]);
    let out = Tensor {
        form: Form { dtype: DType::F32, shape: vec![2], strides: vec![1] },
        memory: Memory::new(8, Guard::BackPage),
        first: 0,
    };
    run(&Histogram::new(&x.form, 2, [0.0, 2.0]).unwrap(), &[&x, &out], 1).unwrap();
    same(&out.values(), &[1.0, 3.0], "counts");
    let odd = run(&Histogram::new(&x.form, 2, [0.0, 0.0]).unwrap(), &[&x, &out], 1);
    assert!(matches!(odd, Err(Fault::Range { .. })), "a range of NaN");
}

#[test]
fn orders_are_those_of_a_stable_sort() {
    let mut rng = Rng::new(4);
    for dtype in DTYPES {
        for (shape, dim) in [(&[3usize, 50][..], 1), (&[21, 4], 0), (&[300], 0), (&[2, 0, 3], 1)] {
            for descending in [false, true] {
                let values = numbers(&mut rng, dtype, shape.iter().product(), true);
                let x = Tensor::new(&mut rng, dtype, shape, &values);
                let keep = if rng.once_in(2) { shape[dim] } else { shape[dim] / 3 };
                let mut kept = shape.to_vec();
                kept[dim] = keep;
                let [out, places] = [dtype, DType::I64].map(|dtype| Tensor::new(&mut rng, dtype, &kept, &[]));
                let kernel = Order::new(&x.form, dim, keep, descending, Some(&out.form), Some(&places.form)).unwrap();
                run(&kernel, &[&x, &out, &places], 2).unwrap();
                let others: Vec<usize> = (0..shape.len()).filter(|&d| d != dim).map(|d| shape[d]).collect();
                let inner: usize = shape[dim + 1..].iter().product();
                let mut expected = vec![0.0; kept.iter().product()];
                for lane in 0..others.iter().product::<usize>() {
                    let (o, i) = (lane / inner, lane % inner);
                    let at = |k: usize| values[(o * shape[dim] + k) * inner + i];
                    let mut order: Vec<usize> = (0..shape[dim]).collect();
                    order.sort_by(|&a, &b| {
                        let (a, b) = (at(a), at(b));
                        let verdict = a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
                        if descending { verdict.reverse() } else { verdict }
                    });
                    for (rank, k) in order.into_iter().take(keep).enumerate() {
                        expected[(o * keep + rank) * inner + i] = k as f64;
                    }
                }
                same(&places.values(), &expected, &format!("places of {dtype} {:?}", x.form));
            }
        }
    }
}

#[test]
fn elements_go_where_indices_say() {
    let mut rng = Rng::new(5);
    for index_dtype in [DType::I64, DType::I32] {
        for (shape, count, dim) in
            [(&[4usize, 9, 3][..], &[4usize, 5, 3][..], 1), (&[6, 5], &[9, 4], 0), (&[7], &[12], 0)]
        {
            let places: Vec<f64> = (0..count.iter().product()).map(|_| rng.below(shape[dim]) as f64).collect();
            let index = Tensor::new(&mut rng, index_dtype, count, &places);
            for (write, dtype, of) in [
                (Write::None, DType::F16, DType::F16),
                (Write::Set, DType::Bool, DType::Bool),
                (Write::Set, DType::F64, DType::F64),
                (Write::Add, DType::F64, DType::BF16),
                (Write::Add, DType::I32, DType::I32),
                (Write::Add, DType::Bool, DType::Bool),
            ] {
                let own = numbers(&mut rng, dtype, shape.iter().product(), false);
                let parts = numbers(&mut rng, of, count.iter().product(), false);
                let whole = Tensor::new(&mut rng, dtype, shape, &own);
                let part = Tensor::new(&mut rng, of, count, &parts);
                let kernel = Along::new(write, dim, &whole.form, &index.form, &part.form).unwrap();
                run(&kernel, &[&whole, &index, &part], 3).unwrap();
                let mut expected = own.clone();
                let mut read = parts.clone();
                for (n, mut at) in indices(count).into_iter().enumerate() {
                    at[dim] = places[n] as usize;
                    let place = at.iter().zip(shape).fold(0, |place, (i, n)| place * n + i);
                    match write {
                        Write::None => read[n] = own[place],
                        Write::Set => expected[place] = parts[n],
                        Write::Add if dtype == DType::Bool => expected[place] = expected[place].max(parts[n]),
                        Write::Add => expected[place] += parts[n],
                    }
                }
                same(&whole.values(), &expected, &format!("{write:?} of {dtype}"));
                same(&part.values(), &read, &format!("{write:?} of {dtype}"));
            }
            for wrong in [-1.0, shape[dim] as f64] {
                let mut places = places.clone();
                *places.last_mut().unwrap() = wrong;
                let index = Tensor::new(&mut rng, index_dtype, count, &places);
                let whole = Tensor::new(&mut rng, DType::F32, shape, &vec![1.0; shape.iter().product()]);
                let part = Tensor::new(&mut rng, DType::F32, count, &vec![2.0; count.iter().product()]);
                let kernel = Along::new(Write::Set, dim, &whole.form, &index.form, &part.form).unwrap();
                let fault = Fault::Index { index: wrong as i64, dim, size: shape[dim] };
                assert_eq!(run(&kernel, &[&whole, &index, &part], 1), Err(fault));
                assert!(whole.values().iter().all(|&x| x == 1.0), "something was written");
            }
        }
    }
}

/// An image in random order, or with its channels closest.
fn image(rng: &mut Rng, dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
    let mut image = Tensor::new(rng, dtype, shape, values);
    if rng.once_in(2) {
        let [n, c, h, w] = shape[..] else { return image };
        let strides = [h * w * c, 1, w * c, c].map(usize::cast_signed).to_vec();
        image = Tensor {
            form: Form { dtype, shape: shape.to_vec(), strides },
            memory: Memory::new(n * c * h * w * dtype.bits() / 8, Guard::BackPage),
            first: 0,
        };
        for (index, &value) in indices(shape).iter().zip(values) {
            let (at, size) = (image.at(index), dtype.bits() / 8);
            encode_any(dtype, value, &mut image.memory.bytes_mut()[at * size..][..size]);
        }
    }
    image
}

/// The places of the window of output `[i, j]`, in row-major order: row and column.
fn window(steps: &[Steps; 2], [i, j]: [usize; 2]) -> Vec<[usize; 2]> {
    let inside = |steps: &Steps, o: usize, k: usize| {
        (o * steps.stride + k * steps.dilation).checked_sub(steps.padding).filter(|&at| at < steps.input)
    };
    let rows = (0..steps[0].kernel).filter_map(|k| inside(&steps[0], i, k));
    rows.flat_map(|row| {
        (0..steps[1].kernel).filter_map(move |k| inside(&steps[1], j, k)).map(move |column| [row, column])
    })
    .collect()
}

#[test]
fn windows_are_pooled() {
    let mut rng = Rng::new(6);
    for dtype in DTYPES.into_iter().filter(|&dtype| dtype != DType::Bool) {
        for (kernel, stride, padding, dilation) in
            [(3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 2), (5, 3, 2, 1), (2, 1, 1, 3)]
        {
            let [n, c, h, w] = [2, rng.pick(&[1, 3, 35]), 9, rng.pick(&[7, 80])];
            let shape = [n, c, h, w];
            let output = |input: usize| (input + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
            let steps = [h, w].map(|input| Steps { input, output: output(input), kernel, stride, padding, dilation });
            let out_shape = [n, c, steps[0].output, steps[1].output];
            let values = numbers(&mut rng, dtype, shape.iter().product(), true);
            let x = image(&mut rng, dtype, &shape, &values);
            let [out, mean, places] =
                [dtype, dtype, DType::I64].map(|dtype| Tensor::new(&mut rng, dtype, &out_shape, &[]));
            let arch = rng.pick(rapt_cpu::available());
            let with = rng.once_in(2);
            let max =
                Pool::new(arch, PoolFunction::Max, steps, &x.form, &out.form, with.then_some(&places.form)).unwrap();
            let operands = [&x, &out, &places];
            run(&max, &operands[..2 + usize::from(with)], 3).unwrap();
            let function = PoolFunction::Mean { with_padding: false, divisor: None };
            run(&Pool::new(arch, function, steps, &x.form, &mean.form, None).unwrap(), &[&x, &mean], 2).unwrap();
            let (mut maxima, mut at, mut means) = (Vec::new(), Vec::new(), Vec::new());
            for index in indices(&out_shape) {
                let plane = &values[(index[0] * c + index[1]) * h * w..][..h * w];
                let all = window(&steps, [index[2], index[3]]);
                // The first of equal numbers and the last NaN; of no elements the first of the plane.
                let better = |best: usize, at: usize| plane[at] > plane[best] || plane[at].is_nan();
                let places = all.iter().map(|[row, column]| row * w + column);
                let best = places.reduce(|best, at| if better(best, at) { at } else { best }).unwrap_or(0);
                maxima.push(plane[best]);
                at.push(best as f64);
                let sum = all.iter().fold(0.0, |sum, [row, column]| sum + plane[row * w + column]);
                let by = all.len() as f64;
                means.push(match dtype {
                    _ if all.is_empty() => 0.0,
                    _ if is_float(dtype) => round(dtype, sum / by),
                    _ => (sum / by).trunc() + 0.0,
                });
            }
            same(&out.values(), &maxima, &format!("maxima of {dtype} {:?}", x.form));
            if with {
                same(&places.values(), &at, &format!("places of {dtype} {:?}", x.form));
            }
            same(&mean.values(), &means, &format!("means of {dtype} {:?}", x.form));
        }
    }
}

#[test]
fn images_are_resized() {
    let mut rng = Rng::new(7);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let shape = [2, 3, 4, 5];
        let mut values = numbers(&mut rng, dtype, shape.iter().product(), false);
        // Beside a weight of 0, and beside none.
        (values[2 * 5 + 1], values[20 + 4]) = (f64::NAN, f64::INFINITY);
        let x = image(&mut rng, dtype, &shape, &values);
        let rows = vec![(0, 1, Some(0.25)), (1, 2, Some(0.0)), (3, 3, None)];
        let columns = vec![(0, 1, Some(0.75)), (4, 4, None), (2, 3, Some(0.5)), (1, 1, Some(1.0))];
        let out = Tensor::new(&mut rng, dtype, &[2, 3, 3, 4], &[]);
        let arch = rng.pick(rapt_cpu::available());
        let kernel = Resize::new(arch, [rows.clone(), columns.clone()], &x.form, &out.form).unwrap();
        run(&kernel, &[&x, &out], 3).unwrap();
        let mix = |a: f64, b: f64, w: Option<f64>| w.map_or(a, |w| a * (1.0 - w) + b * w);
        let expected: Vec<f64> = indices(&out.form.shape)
            .iter()
            .map(|index| {
                let at = |row: usize, column: usize| values[((index[0] * 3 + index[1]) * 4 + row) * 5 + column];
                let ((top, bottom, down), (left, right, over)) = (rows[index[2]], columns[index[3]]);
                let lines = [top, bottom].map(|row| mix(at(row, left), at(row, right), over));
                round(dtype, mix(lines[0], lines[1], down))
            })
            .collect();
        same(&out.values(), &expected, &format!("{dtype} {:?}", x.form));
        assert!(Resize::new(arch, [rows, vec![(5, 0, None); 4]], &x.form, &out.form).is_none());
    }
}

#[test]
fn channels_are_convolved_by_themselves() {
    let mut rng = Rng::new(8);
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        for (each, stride, padding) in [(1, 1, 1), (1, 2, 0), (2, 1, 2)] {
            let [n, c, h, w] = [2, rng.pick(&[3, 40]), 6, rng.pick(&[5, 70])];
            let steps = [(h, 3), (w, 2)].map(|(input, kernel)| Steps {
                input,
                output: (input + 2 * padding - kernel) / stride + 1,
                kernel,
                stride,
                padding,
                dilation: 1,
            });
            let shape = [n, c, h, w];
            let small = |rng: &mut Rng, n: usize| -> Vec<f64> { (0..n).map(|_| rng.below(9) as f64 - 4.0).collect() };
            let (values, weights, biases) =
                (small(&mut rng, n * c * h * w), small(&mut rng, c * each * 6), small(&mut rng, c * each));
            let x = image(&mut rng, dtype, &shape, &values);
            let kernels = Tensor::new(&mut rng, dtype, &[c * each, 3, 2], &weights);
            let bias = Tensor::new(&mut rng, dtype, &[c * each], &biases);
            let out = Tensor::new(&mut rng, dtype, &[n, c * each, steps[0].output, steps[1].output], &[]);
            let arch = rng.pick(rapt_cpu::available());
            let forms = [&x.form, &out.form, &kernels.form];
            let kernel = Depthwise::new(arch, steps, forms, Some(&bias.form)).unwrap();
            run(&kernel, &[&x, &out, &kernels, &bias], 3).unwrap();
            let expected: Vec<f64> = indices(&out.form.shape)
                .iter()
                .map(|index| {
                    let plane = (index[0] * c + index[1] / each) * h * w;
                    let tap = |row: usize, column: usize| {
                        let [i, j] = [row + padding - index[2] * stride, column + padding - index[3] * stride];
                        weights[(index[1] * 3 + i) * 2 + j]
                    };
                    let all = window(&steps, [index[2], index[3]]);
                    let products = all.iter().map(|&[row, column]| values[plane + row * w + column] * tap(row, column));
                    biases[index[1]] + products.sum::<f64>()
                })
                .collect();
            let expected: Vec<f64> = expected.into_iter().map(|x| round(dtype, x)).collect();
            let got = out.values();
            // Small integers: the sums are exact, but for the sign of 0.
            assert!(got.iter().zip(&expected).all(|(a, b)| a == b), "{dtype} {:?}", x.form);
        }
    }
}

#[test]
fn sums_of_a_transposed_convolution_are_spread() {
    let mut rng = Rng::new(9);
    for (sums_dtype, dtype) in [(DType::F32, DType::BF16), (DType::F32, DType::F32), (DType::F64, DType::F64)] {
        let (batch, channels, input, kernel, stride, padding, dilation) =
            (2, 5, [3, 4], [3, 2], [2, 1], [1, 0], [1, 2]);
        let taps = kernel[0] * kernel[1];
        let count = taps * batch * input[0] * input[1] * channels;
        let values: Vec<f64> = (0..count).map(|_| rng.below(9) as f64 - 4.0).collect();
        let biases: Vec<f64> = (0..channels).map(|_| rng.below(5) as f64).collect();
        let sums_form = Form { dtype: sums_dtype, shape: vec![count], strides: vec![1] };
        let mut sums =
            Tensor { form: sums_form, memory: Memory::new(count * sums_dtype.bits() / 8, Guard::BackPage), first: 0 };
        for (at, &value) in values.iter().enumerate() {
            let size = sums_dtype.bits() / 8;
            encode(sums_dtype, value, &mut sums.memory.bytes_mut()[at * size..][..size]);
        }
        let bias = Tensor::new(&mut rng, dtype, &[channels], &biases);
        let output = [0, 1].map(|d| (input[d] - 1) * stride[d] + dilation[d] * (kernel[d] - 1) + 1 - 2 * padding[d]);
        let out = Tensor::new(&mut rng, dtype, &[batch, channels, output[0], output[1]], &[]);
        let geometry = [input, kernel, stride, padding, dilation];
        let arch = rng.pick(rapt_cpu::available());
        let spread = Spread::new(arch, sums_dtype, geometry, Some(&bias.form), &out.form).unwrap();
        run(&spread, &[&sums, &bias, &out], 3).unwrap();
        let mut expected: Vec<f64> = indices(&out.form.shape).iter().map(|index| biases[index[1]]).collect();
        for index in indices(&[kernel[0], kernel[1], batch, input[0], input[1], channels]) {
            let [i, j, image, row, column, channel] = index[..] else { unreachable!() };
            let at = |d: usize, from: usize, tap: usize| {
                (from * stride[d] + tap * dilation[d]).checked_sub(padding[d]).filter(|&at| at < output[d])
            };
            let (Some(y), Some(x)) = (at(0, row, i), at(1, column, j)) else { continue };
            let line = ((i * kernel[1] + j) * batch + image) * input[0] + row;
            let from = values[(line * input[1] + column) * channels + channel];
            expected[((image * channels + channel) * output[0] + y) * output[1] + x] += from;
        }
        same(&out.values(), &expected, &format!("{dtype}"));
    }
}
