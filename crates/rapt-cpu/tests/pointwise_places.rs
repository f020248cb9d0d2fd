//! Where elements lie: tails, broadcasts, permuted and negative strides, operands in place, and memory that nobody may touch.

#[path = "pointwise/harness.rs"]
mod harness;

use std::sync::Arc;

use harness::{Tensor, archs, run, scratch, unary};
use rapt_core::DType;
use rapt_cpu::pointwise::{Binary, Instruction, Loop, Program, Register, Unary};
use rapt_testkit::{Guard, Memory, Rng};

const ADD: [Instruction; 4] = [
    Instruction::Load(0),
    Instruction::Load(1),
    Instruction::Binary(Binary::Sub, Register(0), Register(1)),
    Instruction::Store(2, Register(2)),
];
const COPY: [Instruction; 2] = [Instruction::Load(0), Instruction::Store(1, Register(0))];

/// Offsets of all elements, row-major.
fn offsets(shape: &[usize], strides: &[isize]) -> Vec<isize> {
    let mut all = vec![0];
    for (&n, &stride) in shape.iter().zip(strides) {
        all = all.iter().flat_map(|&at| (0..n as isize).map(move |i| at + i * stride)).collect();
    }
    if shape.contains(&0) { Vec::new() } else { all }
}

/// A tensor over `shape`: dimensions in any order, some of them reversed, gaps between them; broadcast where `may_repeat`.
fn place(rng: &mut Rng, dtype: DType, shape: &[usize], may_repeat: bool) -> Tensor {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    for i in (1..order.len()).rev() {
        if rng.once_in(3) {
            order.swap(i, rng.below(i + 1));
        }
    }
    let (mut strides, mut step, mut offset) = (vec![0; shape.len()], 1 + isize::from(rng.once_in(6)), 0);
    for &d in order.iter().rev() {
        if may_repeat && rng.once_in(4) {
            continue;
        }
        strides[d] = step;
        step = step * shape[d].max(1) as isize + isize::from(rng.once_in(4)) * rng.below(5) as isize;
        if rng.once_in(5) {
            offset += strides[d] * (shape[d].max(1) as isize - 1);
            strides[d] = -strides[d];
        }
    }
    let bytes = vec![0xA5; step.unsigned_abs() * dtype.bits() / 8];
    Tensor { dtype, bytes, offset: offset as usize, strides }
}

fn put(tensor: &mut Tensor, at: isize, value: f64) {
    let at = (tensor.offset as isize + at) as usize;
    let mut write = |bytes: &[u8]| tensor.bytes[at * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
    match tensor.dtype {
        DType::F32 => write(&(value as f32).to_ne_bytes()),
        DType::F64 => write(&value.to_ne_bytes()),
        DType::BF16 => write(&half::bf16::from_f64(value).to_ne_bytes()),
        DType::F16 => write(&half::f16::from_f64(value).to_ne_bytes()),
        DType::I64 => write(&(value as i64).to_ne_bytes()),
        DType::I32 => write(&(value as i32).to_ne_bytes()),
        DType::I16 => write(&(value as i16).to_ne_bytes()),
        _ => write(&[value as i8 as u8]),
    }
}

fn get(tensor: &Tensor, at: isize) -> f64 {
    let at = (tensor.offset as isize + at) as usize;
    fn read<const N: usize>(tensor: &Tensor, at: usize) -> [u8; N] {
        tensor.bytes[at * N..][..N].try_into().unwrap()
    }
    match tensor.dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(read(tensor, at))),
        DType::F64 => f64::from_ne_bytes(read(tensor, at)),
        DType::BF16 => half::bf16::from_ne_bytes(read(tensor, at)).to_f64(),
        DType::F16 => half::f16::from_ne_bytes(read(tensor, at)).to_f64(),
        DType::I64 => i64::from_ne_bytes(read(tensor, at)) as f64,
        DType::I32 => f64::from(i32::from_ne_bytes(read(tensor, at))),
        DType::I16 => f64::from(i16::from_ne_bytes(read(tensor, at))),
        _ => f64::from(tensor.bytes[at] as i8),
    }
}

const DTYPES: [DType; 8] =
    [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::I32, DType::I16, DType::I8];

#[test]
fn any_shape_and_strides_give_each_element_its_place_and_touch_no_other() {
    let mut rng = Rng::new(7);
    let sizes = [0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 67];
    for round in 0..1500 {
        let rank = rng.below(5);
        let mut shape: Vec<usize> = (0..rank).map(|_| rng.pick(&sizes)).collect();
        // Not all too large, and sometimes longer than a tile.
        while shape.iter().product::<usize>() > 40_000 {
            let d = rng.below(rank);
            shape[d] = 2;
        }
        if rank > 0 && shape.iter().product::<usize>() < 20 && rng.once_in(2) {
            let d = rng.below(rank);
            shape[d] = 1500;
        }
        let arch = rng.pick(&archs());
        let dtype = rng.pick(&DTYPES);
        let is_copy = rng.once_in(2);
        let mut tensors = vec![place(&mut rng, dtype, &shape, true)];
        if !is_copy {
            tensors.push(place(&mut rng, dtype, &shape, true));
        }
        tensors.push(place(&mut rng, dtype, &shape, false));
        let places: Vec<Vec<isize>> = tensors.iter().map(|t| offsets(&shape, &t.strides)).collect();
        let out = tensors.len() - 1;
        for (tensor, places) in tensors.iter_mut().zip(&places).take(out) {
            for &at in places {
                put(tensor, at, rng.below(50) as f64);
            }
        }
        let mut expected = tensors[out].clone();
        for (n, &at) in places[out].iter().enumerate() {
            let a = get(&tensors[0], places[0][n]);
            let value = if is_copy { a } else { a - get(&tensors[1], places[1][n]) };
            put(&mut expected, at, value);
        }
        let inputs: Vec<Vec<u8>> = tensors[..out].iter().map(|t| t.bytes.clone()).collect();
        run(arch, if is_copy { &COPY } else { &ADD }, &shape, &mut tensors).unwrap();
        let what = || format!("round {round}: {} {dtype} {shape:?} {:?}", arch.name(), tensors[out].strides);
        assert_eq!(tensors[out].bytes, expected.bytes, "{}", what());
        assert!(inputs.iter().zip(&tensors).all(|(before, now)| *before == now.bytes), "{}", what());
    }
}

#[test]
fn an_elements_bits_do_not_depend_on_where_it_stands() {
    let x: Vec<f32> = (0..3000u32).map(|n| (n as f32 - 1500.0) * 0.013).collect();
    for arch in archs() {
        for op in Unary::ALL
            .into_iter()
            .filter(|op| op.result(rapt_cpu::pointwise::Lane::F32) == Some(rapt_cpu::pointwise::Lane::F32))
        {
            let all = unary(arch, op, &x);
            for from in [1, 2, 3, 5, 7, 1023, 1025] {
                for n in [1, 2, 15, 17, 63, 65, 700] {
                    let part = unary(arch, op, &x[from..from + n]);
                    let same = part.iter().zip(&all[from..]).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan());
                    assert!(same, "{} {op:?} of {n} from {from}", arch.name());
                }
            }
        }
    }
}

#[test]
fn what_is_stored_where_it_was_loaded_is_computed_of_what_was_there() {
    // Two results of one register; the first goes where the register was loaded from.
    let code = [
        Instruction::Load(0),
        Instruction::Unary(Unary::Neg, Register(0)),
        Instruction::Store(0, Register(1)),
        Instruction::Unary(Unary::Relu, Register(0)),
        Instruction::Store(1, Register(3)),
    ];
    for arch in archs() {
        let x: Vec<f32> = (0..2000u16).map(f32::from).collect();
        let mut tensors = [Tensor::dense(DType::F32, &x), Tensor::dense(DType::F32, &x)];
        run(arch, &code, &[2000], &mut tensors).unwrap();
        assert_eq!(tensors[0].elements::<f32>(), x.iter().map(|x| -x).collect::<Vec<_>>());
        assert_eq!(tensors[1].elements::<f32>(), x);
    }
}

/// Runs a loop over memory between pages that may not be touched.
fn guarded(arch: rapt_core::Arch, code: &[Instruction], dtypes: &[DType], shape: &[usize], guard: Guard) {
    let program = Arc::new(Program::new(dtypes.to_vec(), code.to_vec()).unwrap());
    let mut row_major = vec![1isize; shape.len()];
    for d in (0..shape.len().saturating_sub(1)).rev() {
        row_major[d] = row_major[d + 1] * shape[d + 1] as isize;
    }
    let each = Loop::new(arch, program, shape, &vec![row_major; dtypes.len()]).unwrap();
    let n: usize = shape.iter().product();
    let memory: Vec<Memory> = dtypes.iter().map(|dtype| Memory::new(n * dtype.bits() / 8, guard)).collect();
    let work = Memory::new(each.scratch_bytes(), guard);
    let pointers: Vec<*mut u8> = memory.iter().map(Memory::as_ptr).collect();
    for item in 0..each.items(2) {
        // SAFETY: the memory is as long as shape and strides reach.
        unsafe { each.run_item(item, each.items(2), &pointers, work.as_ptr()).unwrap() };
    }
}

#[test]
fn nothing_beside_operands_and_scratch_memory_is_touched() {
    for arch in archs() {
        for guard in [Guard::FrontPage, Guard::BackPage] {
            for n in [1, 3, 15, 16, 17, 63, 65, 255, 300, 1025, 4099] {
                for dtype in DTYPES {
                    guarded(arch, &COPY, &[dtype; 2], &[n], guard);
                    guarded(arch, &ADD, &[dtype; 3], &[3, n], guard);
                    let code = [
                        Instruction::Load(0),
                        Instruction::Unary(Unary::Gelu, Register(1)),
                        Instruction::Store(1, Register(2)),
                    ];
                    let code = [code[0], Instruction::Convert(Register(0), DType::F32), code[1], code[2]];
                    guarded(arch, &code, &[dtype, DType::BF16], &[n], guard);
                }
            }
        }
    }
}

#[test]
fn rectangles_of_a_matrix_product_are_as_its_elements() {
    // out = (relu(sums + bias) + residual) · factor, in bfloat16, from a tile of sums with rows of its own; bias and factor are
    // the same in each row.
    let code = [
        Instruction::Load(0),
        Instruction::Load(1),
        Instruction::Binary(Binary::Add, Register(0), Register(1)),
        Instruction::Convert(Register(2), DType::BF16),
        Instruction::Unary(Unary::Relu, Register(3)),
        Instruction::Load(2),
        Instruction::Binary(Binary::Add, Register(4), Register(5)),
        Instruction::Load(4),
        Instruction::Binary(Binary::Mul, Register(6), Register(7)),
        Instruction::Store(3, Register(8)),
    ];
    let dtypes = vec![DType::F32, DType::BF16, DType::BF16, DType::BF16, DType::BF16];
    let (columns, tile) = (300usize, 256usize);
    for arch in archs() {
        let program = Arc::new(Program::new(dtypes.clone(), code.to_vec()).unwrap());
        let [whole, same] = [vec![columns as isize, 1], vec![0, 1]];
        let strides = [vec![tile as isize, 1], same.clone(), whole.clone(), whole, same];
        let each = Loop::rectangle(arch, program, 8, tile, &strides).unwrap();
        let sums: Vec<f32> = (0..8 * tile).map(|n| (n as f32 * 0.37).sin() * 9.0).collect();
        let [bias, factor] = [0.01, 0.03]
            .map(|step| (0..columns).map(|n| half::bf16::from_f32(n as f32 * step)).collect::<Vec<half::bf16>>());
        let residual: Vec<half::bf16> = (0..8 * columns).map(|n| half::bf16::from_f32((n % 17) as f32)).collect();
        let mut out = vec![half::bf16::from_f32(-77.0); 8 * columns];
        let mut scratch = scratch(each.scratch_bytes());
        for (rows, wide, first) in [(8, 256, 0), (5, 44, 256), (0, 9, 3), (1, 1, 299)] {
            let pointers = [
                sums.as_ptr().cast::<u8>().cast_mut(),
                bias[first..].as_ptr().cast::<u8>().cast_mut(),
                residual[first..].as_ptr().cast::<u8>().cast_mut(),
                out[first..].as_mut_ptr().cast(),
                factor[first..].as_ptr().cast::<u8>().cast_mut(),
            ];
            let before = out.clone();
            // SAFETY: the rectangle lies within the tensors.
            unsafe { each.run_rectangle(rows, wide, &pointers, scratch.as_mut_ptr().cast()).unwrap() };
            for (at, got) in out.iter().enumerate() {
                let (row, column) = (at / columns, at % columns);
                if row < rows && (first..first + wide).contains(&column) {
                    let sum = half::bf16::from_f32(sums[row * tile + column - first] + bias[column].to_f32());
                    let sum = sum.to_f32().max(0.0) + residual[at].to_f32();
                    let exact = half::bf16::from_f32(sum * factor[column].to_f32());
                    assert_eq!(got.to_f32(), exact.to_f32(), "{row} {column}");
                } else {
                    assert_eq!(*got, before[at], "{row} {column}");
                }
            }
        }
    }
}
