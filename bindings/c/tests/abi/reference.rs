//! What a call from C computes, against the reference: contiguous and strided tensors, each option, each dtype; and calls that
//! were seen before, whose contents, shapes and options have changed since.

use crate::support::{Call, DIM, HEADS, K, KV_LEN, LSE, MASK, OUT, Owned, Q, Q_LEN, SINKS, SLOPES, V, last_error};
use half::{bf16, f16};
use rapt_c::{rapt_causal, rapt_dtype, rapt_error, rapt_given, rapt_layout, rapt_options};
use rapt_reference::{Inputs, Mask, Outputs, Problem, naive};

fn wide(data: &[f32]) -> Vec<f64> {
    data.iter().map(|x| f64::from(*x)).collect()
}

/// What the reference says of a call whose tensors are row-major.
fn reference(call: &Call) -> Outputs {
    let options = &call.options;
    let given = |bit: rapt_given| options.given & bit as u32 != 0;
    let mut problem = Problem::plain(1, HEADS, Q_LEN, KV_LEN, DIM);
    if given(rapt_given::RAPT_GIVEN_SOFTMAX_SCALE) {
        problem.softmax_scale = options.softmax_scale;
    }
    problem.softcap = given(rapt_given::RAPT_GIVEN_SOFTCAP).then_some(options.softcap);
    problem.window.left = given(rapt_given::RAPT_GIVEN_WINDOW_LEFT).then_some(options.window_left as usize);
    problem.window.right = given(rapt_given::RAPT_GIVEN_WINDOW_RIGHT).then_some(options.window_right as usize);
    problem.causal = match options.causal {
        1 => Some(engine::Causal::TopLeft),
        2 => Some(engine::Causal::BottomRight),
        _ => None,
    };
    let seed = engine::DropoutSeed::new(options.dropout_seed, options.dropout_offset);
    problem.dropout = engine::Dropout::new(options.dropout_p).unwrap().map(|dropout| (dropout, seed));
    let [q, k, v, _, sinks, slopes, _] = &call.data.each_ref().map(|data| wide(data));
    let mask: Vec<bool> = call.mask.iter().copied().cycle().take(HEADS * Q_LEN * KV_LEN).collect();
    naive(
        &problem,
        &Inputs {
            q,
            k,
            v,
            mask: (!options.mask.is_null()).then_some(Mask::Bool(&mask)),
            sinks: (!options.sinks.is_null()).then_some(sinks),
            alibi_slopes: (!options.alibi_slopes.is_null()).then_some(slopes),
        },
    )
}

fn assert_near(what: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let near = got == expected || (got - expected).abs() <= tolerance * (1.0 + expected.abs());
        assert!(near, "{what}[{at}]: {got}, the reference says {expected}");
    }
}

fn assert_as_reference(what: &str, call: &Call) {
    assert_eq!(call.run(), rapt_error::RAPT_OK, "{what}: {}", last_error());
    let expected = reference(call);
    let [out, lse] = call.outputs();
    assert_near(&format!("{what}: out"), &wide(out), &expected.out, 1e-6);
    if !call.options_arg.is_null() && !call.options.lse.is_null() {
        assert_near(&format!("{what}: lse"), &wide(lse), &expected.lse, 1e-6);
    }
}

#[test]
fn each_option_is_the_references() {
    let engine = Owned::new(1);
    type Bend<'a> = &'a dyn Fn(&mut Call);
    let with = |bend: Bend<'_>| {
        let mut call = Call::new(&engine, 11);
        let size = call.options.size;
        // SAFETY: zero and NULL are values of each field.
        call.options = rapt_options { size, ..unsafe { std::mem::zeroed() } };
        bend(&mut call);
        call
    };
    assert_as_reference("everything", &Call::new(&engine, 11));
    let mut plain = with(&|_| ());
    assert_as_reference("a struct of zeros", &plain);
    let zeros = plain.outputs()[0].to_vec();
    plain.options_arg = std::ptr::null();
    assert_as_reference("no options", &plain);
    assert_eq!(plain.outputs()[0], zeros);

    let cases: [(&str, Bend<'_>); 13] = [
        ("causal top left", &|c| c.options.causal = rapt_causal::RAPT_CAUSAL_TOP_LEFT as i32),
        ("causal bottom right", &|c| c.options.causal = rapt_causal::RAPT_CAUSAL_BOTTOM_RIGHT as i32),
        ("scale", &|c| (c.options.given, c.options.softmax_scale) = (1, -0.25)),
        ("scale 0", &|c| c.options.given = 1),
        ("softcap", &|c| (c.options.given, c.options.softcap) = (2, 0.5)),
        ("window left 0", &|c| c.options.given = 4),
        ("window right 1", &|c| (c.options.given, c.options.window_right) = (8, 1)),
        ("mask", &|c| c.options.mask = &raw const c.tensors[MASK]),
        ("sinks", &|c| c.options.sinks = &raw const c.tensors[SINKS]),
        ("alibi_slopes", &|c| c.options.alibi_slopes = &raw const c.tensors[SLOPES]),
        ("dropout", &|c| (c.options.dropout_p, c.options.dropout_seed, c.options.dropout_offset) = (0.5, u64::MAX, 3)),
        ("all dropped", &|c| c.options.dropout_p = 1.0),
        ("lse", &|c| c.options.lse = &raw const c.tensors[LSE]),
    ];
    let results: Vec<Vec<f32>> = cases
        .iter()
        .map(|(name, bend)| {
            let call = with(bend);
            assert_as_reference(name, &call);
            call.outputs()[0].to_vec()
        })
        .collect();
    for (at, (name, _)) in cases.iter().enumerate().take(12) {
        assert_ne!(results[at], zeros, "{name} has no effect");
    }
}

#[test]
fn a_call_seen_before_reads_what_lies_there_now() {
    let engine = Owned::new(1);
    let mut call = Call::new(&engine, 3);
    assert_as_reference("first", &call);
    let first = call.outputs()[0].to_vec();
    assert_as_reference("the same", &call);
    assert_eq!(call.outputs()[0], first);
    for x in &mut call.data[Q] {
        *x = -*x;
    }
    assert_as_reference("another q at the same address", &call);
    call.options.dropout_p = 0.5;
    for seed in 1..4 {
        call.options.dropout_seed = seed;
        assert_as_reference("another seed", &call);
    }
    (call.options.dropout_p, call.options.dropout_seed) = (0.0, 0);
    assert_as_reference("without dropout again", &call);
    assert_ne!(call.outputs()[0], first);
    call.options.causal = rapt_causal::RAPT_CAUSAL_TOP_LEFT as i32;
    assert_as_reference("another option in the same struct", &call);
    call.options.sinks = std::ptr::null();
    assert_as_reference("one tensor less", &call);
    // The arrays behind the same pointers: one query less, which leaves the last row of out as it is.
    let before = call.outputs()[0].to_vec();
    for at in [Q, OUT, LSE] {
        call.shapes[at][2] = Q_LEN as i64 - 1;
    }
    call.options.mask = std::ptr::null();
    call.data[3].fill(crate::support::BEFORE);
    assert_eq!(call.run(), rapt_error::RAPT_OK, "{}", last_error());
    for head in 0..HEADS {
        let rows = &call.outputs()[0][head * Q_LEN * DIM..][..Q_LEN * DIM];
        let (served, beyond) = rows.split_at((Q_LEN - 1) * DIM);
        assert!(served.iter().all(|x| *x != crate::support::BEFORE));
        assert!(beyond.iter().all(|x| *x == crate::support::BEFORE), "{beyond:?}");
    }
    assert_ne!(call.outputs()[0], before);
}

#[test]
fn strides_of_every_sign_and_the_other_layout() {
    let engine = Owned::new(1);
    let expected = {
        let call = Call::new(&engine, 21);
        assert_as_reference("row-major", &call);
        call.outputs().map(<[f32]>::to_vec)
    };
    // Each of q, k, v, out and lse turned round along its length: the data begins at the last row.
    let mut call = Call::new(&engine, 21);
    let turn = |data: &mut [f32], rows: usize, width: usize| {
        let heads: Vec<f32> =
            data.chunks(rows * width).flat_map(|head| head.chunks(width).rev().flatten().copied()).collect();
        data.copy_from_slice(&heads);
    };
    for (at, held, rows, width) in
        [(Q, 0, Q_LEN, DIM), (K, 1, KV_LEN, DIM), (V, 2, KV_LEN, DIM), (OUT, 3, Q_LEN, DIM), (LSE, 6, Q_LEN, 1)]
    {
        turn(&mut call.data[held], rows, width);
        let storage_bytes = 4 * call.data[held].len() as i64;
        call.strides[at][2] *= -1;
        let tensor = &mut call.tensors[at];
        (tensor.storage, tensor.storage_bytes) = (tensor.data, storage_bytes);
        tensor.data = tensor.data.wrapping_byte_add(4 * (rows - 1) * width);
    }
    assert_eq!(call.run(), rapt_error::RAPT_OK, "{}", last_error());
    turn(&mut call.data[3], Q_LEN, DIM);
    turn(&mut call.data[6], Q_LEN, 1);
    assert_eq!(call.outputs().map(<[f32]>::to_vec), expected, "the same values, the same bits");

    // [batch, len, heads, head_dim], and out as every second element of a wider buffer that is left as it is between.
    let mut call = Call::new(&engine, 21);
    let (heads, dim) = (HEADS as i64, DIM as i64);
    for (at, held, rows) in [(Q, 0, Q_LEN), (K, 1, KV_LEN), (V, 2, KV_LEN)] {
        let rows_of = |data: &[f32]| -> Vec<f32> {
            let row = |i: usize| (0..HEADS).flat_map(move |h| data[(h * rows + i) * DIM..][..DIM].to_vec());
            (0..rows).flat_map(row).collect()
        };
        let turned = rows_of(&call.data[held]);
        call.data[held].copy_from_slice(&turned);
        call.shapes[at] = [1, rows as i64, heads, dim, 0, 0, 0, 0];
        call.strides[at] = [0, heads * dim, dim, 1, 0, 0, 0, 0];
    }
    let mut spread = vec![crate::support::BEFORE; 2 * call.data[3].len()];
    call.tensors[OUT].data = spread.as_mut_ptr().cast();
    call.tensors[OUT].storage_bytes = 4 * spread.len() as i64;
    call.shapes[OUT] = [1, Q_LEN as i64, heads, dim, 0, 0, 0, 0];
    call.strides[OUT] = [0, 2 * dim, 2 * dim * Q_LEN as i64, 2, 0, 0, 0, 0];
    call.options.layout = rapt_layout::RAPT_LAYOUT_BSHD as i32;
    assert_eq!(call.run(), rapt_error::RAPT_OK, "{}", last_error());
    let (even, odd): (Vec<_>, Vec<_>) = spread.chunks(2).map(|pair| (pair[0], pair[1])).unzip();
    assert_eq!(even, expected[0]);
    assert!(odd.iter().all(|x| *x == crate::support::BEFORE), "written between the elements of out");
}

#[test]
fn each_dtype_is_computed_as_itself() {
    let engine = Owned::new(2);
    let shape = [HEADS as i64, Q_LEN as i64, DIM as i64];
    let strides = [(Q_LEN * DIM) as i64, DIM as i64, 1];
    macro_rules! case {
        ($dtype:ident, $ty:ty, $from:expr, $into:expr, $tolerance:expr) => {{
            let n = HEADS * Q_LEN * DIM;
            let mut data: Vec<Vec<$ty>> =
                (0..3).map(|seed| crate::support::numbers(n, 40 + seed).into_iter().map($from).collect()).collect();
            data.push(vec![$from(crate::support::BEFORE); n]);
            let mut tensors = Vec::new();
            for data in &mut data {
                let mut tensor = crate::support::tensor(data.as_mut_ptr().cast(), rapt_dtype::$dtype);
                (tensor.ndim, tensor.shape, tensor.strides) = (3, shape.as_ptr(), strides.as_ptr());
                tensor.storage_bytes = size_of_val(data.as_slice()) as i64;
                tensors.push(tensor);
            }
            // SAFETY: an engine that is alive, tensors that are what they say, and no options.
            let code = unsafe {
                rapt_c::rapt_attention(engine.0, &tensors[0], &tensors[1], &tensors[2], &tensors[3], std::ptr::null())
            };
            assert_eq!(code, rapt_error::RAPT_OK, "{}", last_error());
            let wide: Vec<Vec<f64>> = data.iter().map(|data| data.iter().map($into).collect()).collect();
            let problem = Problem::plain(1, HEADS, Q_LEN, Q_LEN, DIM);
            let expected = naive(&problem, &Inputs::plain(&wide[0], &wide[1], &wide[2]));
            assert_near(stringify!($dtype), &wide[3], &expected.out, $tolerance);
        }};
    }
    case!(RAPT_DTYPE_F64, f64, f64::from, |x| *x, 1e-14);
    case!(RAPT_DTYPE_F32, f32, |x| x, |x| f64::from(*x), 1e-6);
    case!(RAPT_DTYPE_F16, f16, f16::from_f32, |x| x.to_f64(), 1e-3);
    case!(RAPT_DTYPE_BF16, bf16, bf16::from_f32, |x| x.to_f64(), 8e-3);
}
