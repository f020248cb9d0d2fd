//! Gradients from C: those of the reference, and refusals with nothing written.

use std::ptr::{null, null_mut};

use rapt_c::{
    rapt_attention, rapt_attention_backward, rapt_cuda_attention, rapt_cuda_attention_backward, rapt_cuda_queue,
    rapt_cuda_varlen_attention, rapt_cuda_varlen_attention_backward, rapt_device, rapt_dtype, rapt_error,
    rapt_gradients, rapt_options, rapt_tensor, rapt_varlen_attention, rapt_varlen_attention_backward,
};
use rapt_reference::{Gradients, Inputs, OutputGradients, Problem, backward};

use crate::support::{BEFORE, Owned, last_error};

const HEADS: i64 = 2;
const Q_LEN: i64 = 3;
const KV_LEN: i64 = 5;
const DIM: i64 = 4;

/// Numbers, with the shape and the strides that a rapt_tensor leads to.
struct Tensor {
    data: Vec<f32>,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Tensor {
    fn new(shape: &[i64], value: impl Fn(usize) -> f32) -> Self {
        let numel: i64 = shape.iter().product();
        let strides = (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect();
        Tensor { data: (0..numel as usize).map(value).collect(), shape: shape.to_vec(), strides }
    }

    fn struct_of(&mut self) -> rapt_tensor {
        rapt_tensor {
            data: self.data.as_mut_ptr().cast(),
            dtype: rapt_dtype::RAPT_DTYPE_F32 as i32,
            device: rapt_device::RAPT_DEVICE_CPU as i32,
            device_index: 0,
            ndim: self.shape.len() as i32,
            shape: self.shape.as_ptr(),
            strides: self.strides.as_ptr(),
            storage_bytes: 0,
            storage: null(),
        }
    }

    fn wide(&self) -> Vec<f64> {
        self.data.iter().map(|x| f64::from(*x)).collect()
    }
}

/// q, k, v, out, d_o, lse, sinks; dq, dk, dv, d_sinks.
fn tensors() -> [Tensor; 11] {
    let wave = |n: usize, step: f32| (n as f32 * step).sin();
    let (q, kv, lse) = ([HEADS, Q_LEN, DIM], [HEADS, KV_LEN, DIM], [HEADS, Q_LEN]);
    let before = |shape: &[i64]| Tensor::new(shape, |_| BEFORE);
    [
        Tensor::new(&q, |n| wave(n, 0.7)),
        Tensor::new(&kv, |n| wave(n, 1.3)),
        Tensor::new(&kv, |n| wave(n, 0.9)),
        before(&q),
        Tensor::new(&q, |n| wave(n, 2.1)),
        before(&lse),
        Tensor::new(&[HEADS], |n| n as f32 - 0.5),
        before(&q),
        before(&kv),
        before(&kv),
        before(&[HEADS]),
    ]
}

const OPTIONS: rapt_options = rapt_options {
    size: size_of::<rapt_options>(),
    given: 0,
    causal: 2,
    layout: 0,
    out_dtype: 0,
    softmax_scale: 0.0,
    softcap: 0.0,
    window_left: 0,
    window_right: 0,
    mask: null(),
    sinks: null(),
    alibi_slopes: null(),
    lse: null(),
    q_codes: null(),
    k_codes: null(),
    v_codes: null(),
    tolerance: null(),
    compute: 0,
    dropout_p: 0.0,
    dropout_seed: 0,
    dropout_offset: 0,
    dropout_draw: null(),
};

#[test]
fn gradients_are_those_of_the_reference() {
    as_the_reference(&OPTIONS);
    let dropping = |dropout_p| rapt_options { dropout_p, dropout_seed: u64::MAX, dropout_offset: 7, ..OPTIONS };
    as_the_reference(&dropping(0.4));
    as_the_reference(&dropping(1.0));
}

fn as_the_reference(options: &rapt_options) {
    let engine = Owned::new(2);
    let mut tensors = tensors();
    let structs = tensors.each_mut().map(Tensor::struct_of);
    let [q, k, v, out, d_o, lse, sinks, dq, dk, dv, d_sinks] = structs.each_ref().map(std::ptr::from_ref);
    let options = rapt_options { lse, sinks, ..*options };
    let gradients =
        rapt_gradients { size: size_of::<rapt_gradients>(), d_lse: null(), dq, dk, dv, d_mask: null(), d_sinks };
    // SAFETY: all of it is alive, and the tensors are what they say.
    unsafe {
        assert_eq!(rapt_attention(engine.0, q, k, v, out, &raw const options), rapt_error::RAPT_OK, "{}", last_error());
        let done = rapt_attention_backward(engine.0, q, k, v, out, d_o, &raw const gradients, &raw const options);
        assert_eq!(done, rapt_error::RAPT_OK, "{}", last_error());
    }
    let [q, k, v, d_o, sinks] = [0, 1, 2, 4, 6].map(|n| tensors[n].wide());
    let [heads, q_len, kv_len, dim] = [HEADS, Q_LEN, KV_LEN, DIM].map(|n| n as usize);
    let seed = engine::DropoutSeed::new(options.dropout_seed, options.dropout_offset);
    let dropout = engine::Dropout::new(options.dropout_p).unwrap().map(|dropout| (dropout, seed));
    let causal = Some(engine::Causal::BottomRight);
    let problem = Problem { causal, dropout, ..Problem::plain(1, heads, q_len, kv_len, dim) };
    let inputs = Inputs { sinks: Some(&sinks), ..Inputs::plain(&q, &k, &v) };
    let Gradients { dq, dk, dv, d_sinks, .. } =
        backward(&problem, &inputs, &OutputGradients { d_o: &d_o, d_lse: None });
    for (n, expected) in [(7, dq), (8, dk), (9, dv), (10, d_sinks.unwrap())] {
        for (at, (got, expected)) in tensors[n].wide().iter().zip(&expected).enumerate() {
            assert!((got - expected).abs() <= 1e-6, "gradient {n}[{at}]: {got}, the reference says {expected}");
        }
    }
}

#[test]
fn what_is_missing_or_no_gradient_is_refused_and_nothing_is_written() {
    let engine = Owned::new(1);
    let mut tensors = tensors();
    let structs = tensors.each_mut().map(Tensor::struct_of);
    let [q, k, v, out, d_o, lse, _, dq, dk, dv, d_sinks] = structs.each_ref().map(std::ptr::from_ref);
    let size = size_of::<rapt_gradients>();
    let plain = rapt_options { lse, ..OPTIONS };
    let asked = rapt_gradients { size, d_lse: null(), dq, dk, dv, d_mask: null(), d_sinks: null() };
    let call = |arguments: [*const rapt_tensor; 5], gradients: *const rapt_gradients, options: *const rapt_options| {
        let [q, k, v, out, d_o] = arguments;
        // SAFETY: what is not NULL is alive and what it says.
        unsafe { rapt_attention_backward(engine.0, q, k, v, out, d_o, gradients, options) }
    };
    let all = [q, k, v, out, d_o];
    for n in 0..5 {
        let mut arguments = all;
        arguments[n] = null();
        assert_eq!(call(arguments, &raw const asked, &raw const plain), rapt_error::RAPT_ERROR_POINTER, "argument {n}");
    }
    assert_eq!(call(all, null(), &raw const plain), rapt_error::RAPT_ERROR_POINTER);
    assert_eq!(call(all, &raw const asked, null()), rapt_error::RAPT_ERROR_POINTER);
    let without_lse = OPTIONS;
    assert_eq!(call(all, &raw const asked, &raw const without_lse), rapt_error::RAPT_ERROR_POINTER, "no lse");
    // SAFETY: an engine of NULL is refused.
    let no_engine =
        unsafe { rapt_attention_backward(null_mut(), q, k, v, out, d_o, &raw const asked, &raw const plain) };
    assert_eq!(no_engine, rapt_error::RAPT_ERROR_POINTER);
    let other = rapt_gradients { size: size - 8, ..asked };
    assert_eq!(call(all, &raw const other, &raw const plain), rapt_error::RAPT_ERROR_OPTION);
    let of_no_sinks = rapt_gradients { d_sinks, ..asked };
    assert_eq!(call(all, &raw const of_no_sinks, &raw const plain), rapt_error::RAPT_ERROR_UNSUPPORTED);
    let shared = rapt_gradients { dk: dv, ..asked };
    assert_eq!(call(all, &raw const shared, &raw const plain), rapt_error::RAPT_ERROR_LAYOUT, "{}", last_error());
    let of_keys = rapt_gradients { dq: dk, dk: null(), ..asked };
    assert_eq!(call(all, &raw const of_keys, &raw const plain), rapt_error::RAPT_ERROR_SHAPE, "{}", last_error());
    assert!(tensors[7..].iter().all(|tensor| tensor.data.iter().all(|&x| x == BEFORE)));
}

const KV_HEADS: i64 = 1;

/// q, k, v, out, d_o, lse, sinks; dq, dk, dv, d_sinks of so many rows and keys, heads after the rows.
fn packed(rows: i64, keys: i64) -> [Tensor; 11] {
    let wave = |n: usize, step: f32| (n as f32 * step).sin();
    let (q, kv, lse) = ([rows, HEADS, DIM], [keys, KV_HEADS, DIM], [HEADS, rows]);
    let before = |shape: &[i64]| Tensor::new(shape, |_| BEFORE);
    [
        Tensor::new(&q, |n| wave(n, 0.7)),
        Tensor::new(&kv, |n| wave(n, 1.3)),
        Tensor::new(&kv, |n| wave(n, 0.9)),
        before(&q),
        Tensor::new(&q, |n| wave(n, 2.1)),
        before(&lse),
        Tensor::new(&[HEADS], |n| n as f32 - 0.5),
        before(&q),
        before(&kv),
        before(&kv),
        before(&[HEADS]),
    ]
}

struct Offsets {
    data: Vec<i32>,
    shape: [i64; 1],
}

impl Offsets {
    fn new(data: &[i32]) -> Self {
        Offsets { data: data.to_vec(), shape: [data.len() as i64] }
    }

    fn struct_of(&mut self) -> rapt_tensor {
        const ONE: [i64; 1] = [1];
        rapt_tensor {
            data: self.data.as_mut_ptr().cast(),
            dtype: rapt_dtype::RAPT_DTYPE_I32 as i32,
            device: rapt_device::RAPT_DEVICE_CPU as i32,
            device_index: 0,
            ndim: 1,
            shape: self.shape.as_ptr(),
            strides: ONE.as_ptr(),
            storage_bytes: 0,
            storage: null(),
        }
    }
}

/// Forward and backward of `tensors`, as sequences at these offsets or as one dense call.
fn run(tensors: &mut [Tensor; 11], offsets: Option<[&mut Offsets; 2]>) -> rapt_error {
    let engine = Owned::new(2);
    let structs = tensors.each_mut().map(Tensor::struct_of);
    let [q, k, v, out, d_o, lse, sinks, dq, dk, dv, d_sinks] = structs.each_ref().map(std::ptr::from_ref);
    let options = rapt_options { lse, sinks, layout: 1, ..OPTIONS };
    let gradients =
        rapt_gradients { size: size_of::<rapt_gradients>(), d_lse: null(), dq, dk, dv, d_mask: null(), d_sinks };
    let (options, gradients) = (&raw const options, &raw const gradients);
    let Some(offsets) = offsets else {
        // SAFETY: all of it is alive, and the tensors are what they say.
        return unsafe {
            assert_eq!(rapt_attention(engine.0, q, k, v, out, options), rapt_error::RAPT_OK, "{}", last_error());
            rapt_attention_backward(engine.0, q, k, v, out, d_o, gradients, options)
        };
    };
    let offsets = offsets.map(Offsets::struct_of);
    let [of_q, of_kv] = offsets.each_ref().map(std::ptr::from_ref);
    // SAFETY: as above.
    unsafe {
        let done = rapt_varlen_attention(engine.0, q, k, v, of_q, of_kv, out, options);
        if done != rapt_error::RAPT_OK {
            return done;
        }
        rapt_varlen_attention_backward(engine.0, q, k, v, of_q, of_kv, out, d_o, gradients, options)
    }
}

#[test]
fn gradients_of_sequences_are_those_of_each_alone_and_zeros_in_rows_of_none() {
    // Three sequences, of which one has no queries and one no keys; a row before them and one behind are of none.
    let ([of_q, of_kv], mut all) = ([[1, 3, 3, 7], [0, 5, 9, 9]], packed(8, 10));
    let done = run(&mut all, Some([&mut Offsets::new(&of_q), &mut Offsets::new(&of_kv)]));
    assert_eq!(done, rapt_error::RAPT_OK, "{}", last_error());
    let mut of_sinks = vec![0f32; HEADS as usize];
    for n in 0..3 {
        let range = |of: &[i32; 4], row: i64| of[n] as usize * row as usize..of[n + 1] as usize * row as usize;
        let (rows, keys) = (range(&of_q, HEADS * DIM), range(&of_kv, KV_HEADS * DIM));
        let mut one = packed(i64::from(of_q[n + 1] - of_q[n]), i64::from(of_kv[n + 1] - of_kv[n]));
        for (at, rows) in [(0, &rows), (1, &keys), (2, &keys), (4, &rows)] {
            one[at].data.copy_from_slice(&all[at].data[rows.clone()]);
        }
        assert_eq!(run(&mut one, None), rapt_error::RAPT_OK, "{}", last_error());
        for (at, rows) in [(3, &rows), (7, &rows), (8, &keys), (9, &keys)] {
            assert_eq!(all[at].data[rows.clone()], one[at].data, "tensor {at} of sequence {n}");
        }
        of_sinks.iter_mut().zip(&one[10].data).for_each(|(sum, own)| *sum += own);
    }
    assert_eq!(all[10].data, of_sinks);
    let (row, key) = ((HEADS * DIM) as usize, (KV_HEADS * DIM) as usize);
    for (at, row, behind) in [(3, row, 7), (7, row, 7), (8, key, 9), (9, key, 9)] {
        let before = if row == key { &[][..] } else { &all[at].data[..row] };
        assert!(before.iter().chain(&all[at].data[behind * row..]).all(|x| x.to_bits() == 0), "rows of none");
    }
}

#[test]
fn gradients_of_sequences_refuse_what_their_forward_refuses() {
    for (of_q, of_kv, code) in [
        ([0, 3, 2], [0, 5, 9], rapt_error::RAPT_ERROR_INDEX),
        ([0, 3, 9], [0, 5, 9], rapt_error::RAPT_ERROR_INDEX),
        ([0, 3, 7], [-1, 5, 9], rapt_error::RAPT_ERROR_INDEX),
    ] {
        let mut tensors = packed(8, 10);
        assert_eq!(run(&mut tensors, Some([&mut Offsets::new(&of_q), &mut Offsets::new(&of_kv)])), code);
        let forward = last_error();
        let engine = Owned::new(1);
        let structs = tensors.each_mut().map(Tensor::struct_of);
        let [q, k, v, out, d_o, lse, _, dq, dk, dv, _] = structs.each_ref().map(std::ptr::from_ref);
        let [mut of_q, mut of_kv] = [Offsets::new(&of_q), Offsets::new(&of_kv)];
        let offsets = [of_q.struct_of(), of_kv.struct_of()];
        let [of_q, of_kv] = offsets.each_ref().map(std::ptr::from_ref);
        let plain = rapt_options { lse, ..OPTIONS };
        let size = size_of::<rapt_gradients>();
        let asked = rapt_gradients { size, d_lse: null(), dq, dk, dv, d_mask: null(), d_sinks: null() };
        let call = |of_q, asked: rapt_gradients, plain: rapt_options| {
            // SAFETY: what is not NULL is alive and what it says.
            unsafe {
                rapt_varlen_attention_backward(
                    engine.0,
                    q,
                    k,
                    v,
                    of_q,
                    of_kv,
                    out,
                    d_o,
                    &raw const asked,
                    &raw const plain,
                )
            }
        };
        assert_eq!((call(of_q, asked, plain), last_error()), (code, forward));
        assert_eq!(call(null(), asked, plain), rapt_error::RAPT_ERROR_POINTER);
        assert_eq!(call(of_q, asked, rapt_options { mask: q, ..plain }), rapt_error::RAPT_ERROR_INDEX);
        let shared = rapt_gradients { dk: dv, ..asked };
        assert_ne!(call(of_q, shared, plain), rapt_error::RAPT_OK);
        assert!(tensors[7..].iter().all(|tensor| tensor.data.iter().all(|&x| x == BEFORE)));
    }
    // With offsets that can be: a mask, and a gradient in the memory of another.
    let mut tensors = packed(8, 10);
    let engine = Owned::new(1);
    let structs = tensors.each_mut().map(Tensor::struct_of);
    let [q, k, v, out, d_o, lse, _, dq, dk, dv, _] = structs.each_ref().map(std::ptr::from_ref);
    let [mut of_q, mut of_kv] = [Offsets::new(&[0, 3, 8]), Offsets::new(&[0, 5, 10])];
    let offsets = [of_q.struct_of(), of_kv.struct_of()];
    let [of_q, of_kv] = offsets.each_ref().map(std::ptr::from_ref);
    let plain = rapt_options { lse, ..OPTIONS };
    let size = size_of::<rapt_gradients>();
    let asked = rapt_gradients { size, d_lse: null(), dq, dk, dv, d_mask: null(), d_sinks: null() };
    for (asked, plain, code) in [
        (asked, rapt_options { mask: q, ..plain }, rapt_error::RAPT_ERROR_UNSUPPORTED),
        (rapt_gradients { dk: dv, ..asked }, plain, rapt_error::RAPT_ERROR_LAYOUT),
        (asked, OPTIONS, rapt_error::RAPT_ERROR_POINTER),
    ] {
        // SAFETY: what is not NULL is alive and what it says.
        let done = unsafe {
            rapt_varlen_attention_backward(engine.0, q, k, v, of_q, of_kv, out, d_o, &raw const asked, &raw const plain)
        };
        assert_eq!(done, code, "{}", last_error());
    }
    assert!(tensors[7..].iter().all(|tensor| tensor.data.iter().all(|&x| x == BEFORE)));
}

/// The codes of the four functions of a GPU's queue, forward and backward, dense and of sequences.
fn enqueued(structs: &[rapt_tensor; 11], offsets: &rapt_tensor, queue: *const rapt_cuda_queue) -> [rapt_error; 4] {
    let engine = Owned::new(1);
    let [q, k, v, out, d_o, lse, _, dq, dk, dv, _] = structs.each_ref().map(std::ptr::from_ref);
    let options = rapt_options { lse, dropout_p: 0.5, ..OPTIONS };
    let (size, none) = (size_of::<rapt_gradients>(), null());
    let gradients = rapt_gradients { size, d_lse: none, dq, dk, dv, d_mask: none, d_sinks: none };
    let (options, gradients) = (&raw const options, &raw const gradients);
    let of = std::ptr::from_ref(offsets);
    // SAFETY: all of it is alive; tensors of a GPU, which these are not, are asked for their sizes alone.
    unsafe {
        [
            rapt_cuda_attention(engine.0, q, k, v, out, options, queue),
            rapt_cuda_attention_backward(engine.0, q, k, v, out, d_o, gradients, options, queue),
            rapt_cuda_varlen_attention(engine.0, q, k, v, of, of, out, options, queue),
            rapt_cuda_varlen_attention_backward(engine.0, q, k, v, of, of, out, d_o, gradients, options, queue),
        ]
    }
}

#[test]
fn a_queue_of_a_gpu_takes_tensors_of_a_gpu_and_says_what_it_needs() {
    let mut tensors = tensors();
    let structs = tensors.each_mut().map(Tensor::struct_of);
    let (mut at, shape, strides) = ([0i32, 2], [2i64], [1i64]);
    let (data, dtype) = (at.as_mut_ptr().cast(), rapt_dtype::RAPT_DTYPE_I32 as i32);
    let offsets = rapt_tensor { data, dtype, ndim: 1, shape: shape.as_ptr(), strides: strides.as_ptr(), ..structs[0] };
    let mut needed = usize::MAX;
    let size = size_of::<rapt_cuda_queue>();
    let asking = rapt_cuda_queue {
        size,
        stream: null_mut(),
        workspace: null_mut(),
        workspace_bytes: 0,
        needed_bytes: &raw mut needed,
    };
    assert_eq!(enqueued(&structs, &offsets, null()), [rapt_error::RAPT_ERROR_POINTER; 4]);
    let short = rapt_cuda_queue { size: size - 1, ..asking };
    assert_eq!(enqueued(&structs, &offsets, &raw const short), [rapt_error::RAPT_ERROR_OPTION; 4]);
    assert_eq!(enqueued(&structs, &offsets, &raw const asking), [rapt_error::RAPT_ERROR_DEVICE; 4]);
    assert!(last_error().contains("rapt_cuda_queue"), "{}", last_error());
    // Without a driver that is said; with one nothing runs.
    let far = |of: rapt_tensor| rapt_tensor { device: rapt_device::RAPT_DEVICE_CUDA as i32, ..of };
    let [dense, of_dense, ..] = enqueued(&structs.map(far), &far(offsets), &raw const asking);
    for code in [dense, of_dense] {
        assert!([rapt_error::RAPT_OK, rapt_error::RAPT_ERROR_DEVICE].contains(&code), "{}", last_error());
    }
    assert_eq!(needed == usize::MAX, of_dense != rapt_error::RAPT_OK);
    assert!([3, 7, 8, 9].iter().all(|&n| tensors[n].data.iter().all(|x| *x == BEFORE)));
}
