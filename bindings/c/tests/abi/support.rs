//! A call of rapt_attention() whose every part can be bent: eight tensors, their arrays, the options and the engine.

use std::ffi::{CStr, c_void};

use rapt_c::{
    rapt_attention, rapt_device, rapt_dtype, rapt_engine, rapt_engine_create, rapt_engine_destroy, rapt_error,
    rapt_given, rapt_last_error, rapt_options, rapt_tensor,
};

pub(crate) const Q: usize = 0;
pub(crate) const K: usize = 1;
pub(crate) const V: usize = 2;
pub(crate) const OUT: usize = 3;
pub(crate) const MASK: usize = 4;
pub(crate) const SINKS: usize = 5;
pub(crate) const SLOPES: usize = 6;
pub(crate) const LSE: usize = 7;

pub(crate) const NAMES: [&str; 8] = ["q", "k", "v", "out", "mask", "sinks", "alibi_slopes", "lse"];

/// What outputs hold before a call.
pub(crate) const BEFORE: f32 = -77.25;

pub(crate) const HEADS: usize = 2;
pub(crate) const Q_LEN: usize = 3;
pub(crate) const KV_LEN: usize = 5;
pub(crate) const DIM: usize = 4;

/// An engine that is given back when it is dropped.
pub(crate) struct Owned(pub(crate) *mut rapt_engine);
// SAFETY: an engine may be used from any thread.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    pub(crate) fn new(threads: i32) -> Self {
        let engine = rapt_engine_create(threads);
        assert!(!engine.is_null(), "{}", last_error());
        Owned(engine)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and used no more.
        unsafe { rapt_engine_destroy(self.0) };
    }
}

/// The message of this thread's last failed call.
pub(crate) fn last_error() -> String {
    // SAFETY: a string of this thread.
    unsafe { CStr::from_ptr(rapt_last_error()) }.to_str().unwrap().to_owned()
}

/// A tensor in host memory, without dimensions yet.
pub(crate) fn tensor(data: *mut c_void, dtype: rapt_dtype) -> rapt_tensor {
    rapt_tensor {
        data,
        dtype: dtype as i32,
        device: rapt_device::RAPT_DEVICE_CPU as i32,
        device_index: 0,
        ndim: 0,
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        storage_bytes: 0,
        storage: std::ptr::null(),
    }
}

/// `n` numbers that follow from `seed`, in −1..1.
pub(crate) fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// A call with everything that can be given; `args` and `options_arg` are what is passed.
pub(crate) struct Call {
    pub(crate) engine: *const rapt_engine,
    pub(crate) args: [*const rapt_tensor; 4],
    pub(crate) options_arg: *const rapt_options,
    pub(crate) options: rapt_options,
    pub(crate) tensors: [rapt_tensor; 8],
    pub(crate) shapes: [[i64; 8]; 8],
    pub(crate) strides: [[i64; 8]; 8],
    pub(crate) data: [Vec<f32>; 7],
    pub(crate) mask: Vec<bool>,
}

impl Call {
    /// Boxed, because its parts lead to one another.
    pub(crate) fn new(engine: &Owned, seed: u32) -> Box<Call> {
        let (q, k) = (HEADS * Q_LEN * DIM, HEADS * KV_LEN * DIM);
        let mut data = [
            numbers(q, seed),
            numbers(k, seed + 1),
            numbers(k, seed + 2),
            vec![BEFORE; q],
            numbers(HEADS, seed + 3),
            numbers(HEADS, seed + 4),
            vec![BEFORE; HEADS * Q_LEN],
        ];
        // An output at the address of a small one overlaps that one alone, whatever lies behind it.
        data.iter_mut().for_each(|numbers| numbers.reserve_exact(q.max(k)));
        let mut mask: Vec<bool> = (0..Q_LEN * KV_LEN).map(|at| !(at + seed as usize).is_multiple_of(4)).collect();
        let mut float = |at: usize| tensor(data[at].as_mut_ptr().cast(), rapt_dtype::RAPT_DTYPE_F32);
        let bools = tensor(mask.as_mut_ptr().cast(), rapt_dtype::RAPT_DTYPE_BOOL);
        let tensors = [float(0), float(1), float(2), float(3), bools, float(4), float(5), float(6)];
        let options = rapt_options {
            size: size_of::<rapt_options>(),
            given: rapt_given::RAPT_GIVEN_SOFTMAX_SCALE as u32 | rapt_given::RAPT_GIVEN_WINDOW_LEFT as u32,
            causal: 0,
            layout: 0,
            out_dtype: 0,
            softmax_scale: 0.75,
            softcap: 0.0,
            window_left: 3,
            window_right: 0,
            mask: std::ptr::null(),
            sinks: std::ptr::null(),
            alibi_slopes: std::ptr::null(),
            lse: std::ptr::null(),
            q_codes: std::ptr::null(),
            k_codes: std::ptr::null(),
            v_codes: std::ptr::null(),
            tolerance: std::ptr::null(),
            compute: 0,
            dropout_p: 0.0,
            dropout_seed: 0,
            dropout_offset: 0,
            dropout_draw: std::ptr::null(),
        };
        let mut call = Box::new(Call {
            engine: engine.0,
            args: [std::ptr::null(); 4],
            options_arg: std::ptr::null(),
            options,
            tensors,
            shapes: [[0; 8]; 8],
            strides: [[0; 8]; 8],
            data,
            mask,
        });
        let (heads, q_len, kv_len, dim) = (HEADS as i64, Q_LEN as i64, KV_LEN as i64, DIM as i64);
        let shapes: [&[i64]; 8] = [
            &[1, heads, q_len, dim],
            &[1, heads, kv_len, dim],
            &[1, heads, kv_len, dim],
            &[1, heads, q_len, dim],
            &[1, 1, q_len, kv_len],
            &[heads],
            &[heads],
            &[1, heads, q_len],
        ];
        for (at, shape) in shapes.into_iter().enumerate() {
            call.shapes[at][..shape.len()].copy_from_slice(shape);
            let mut step = 1;
            for d in (0..shape.len()).rev() {
                call.strides[at][d] = step;
                step *= shape[d];
            }
            call.tensors[at].ndim = shape.len() as i32;
            call.tensors[at].shape = call.shapes[at].as_ptr();
            call.tensors[at].strides = call.strides[at].as_ptr();
        }
        for at in 0..4 {
            call.args[at] = &raw const call.tensors[at];
        }
        call.options.mask = &raw const call.tensors[MASK];
        call.options.sinks = &raw const call.tensors[SINKS];
        call.options.alibi_slopes = &raw const call.tensors[SLOPES];
        call.options.lse = &raw const call.tensors[LSE];
        call.options_arg = &raw const call.options;
        call
    }

    pub(crate) fn run(&self) -> rapt_error {
        let [q, k, v, out] = self.args;
        // SAFETY: what is neither NULL nor unaligned here leads to live memory of its type and length.
        unsafe { rapt_attention(self.engine, q, k, v, out, self.options_arg) }
    }

    /// `out` and `lse`.
    pub(crate) fn outputs(&self) -> [&[f32]; 2] {
        // SAFETY: the library wrote through pointers to these vectors; nobody writes now.
        [3, 6].map(|at| unsafe { std::slice::from_raw_parts(self.data[at].as_ptr(), self.data[at].len()) })
    }

    /// Another pointer to the options or to a descriptor: the argument or field that holds it.
    pub(crate) fn descriptor(&mut self, at: usize) -> &mut *const rapt_tensor {
        match at {
            Q | K | V | OUT => &mut self.args[at],
            MASK => &mut self.options.mask,
            SINKS => &mut self.options.sinks,
            SLOPES => &mut self.options.alibi_slopes,
            _ => &mut self.options.lse,
        }
    }
}
