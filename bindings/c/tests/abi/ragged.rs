//! rapt_varlen_attention() and rapt_attention_with_kvcache(): each sequence has the bits that rapt_attention() gives for it alone,
//! with any options, in pages and without, step by step, and with codes in the cache.

use std::ops::Range;
use std::ptr::null;

use engine::quant::{Scheme, quantize};
use engine::{DType, Format, Granularity, ScaleLayout, View};
use rapt_c::rapt_error::{self, *};
use rapt_c::{
    rapt_attention, rapt_attention_with_kvcache, rapt_causal, rapt_codes, rapt_engine, rapt_format, rapt_given,
    rapt_granularity, rapt_kvcache, rapt_layout, rapt_options, rapt_tensor, rapt_varlen_attention,
};

use crate::handles::{Memory, element};
use crate::support::{Owned, last_error, numbers};

pub(crate) const HEADS: usize = 4;
pub(crate) const KV_HEADS: usize = 2;
pub(crate) const DIM: usize = 24;
pub(crate) const DIM_V: usize = 16;
/// Keys that a cache holds of a sequence.
pub(crate) const ROOM: usize = 32;

/// A pointer as it is given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    Whole,
    Null,
    Unaligned,
}

impl Given {
    pub(crate) fn apply<T>(self, pointer: *const T) -> *const T {
        match self {
            Given::Whole => pointer,
            Given::Null => null(),
            Given::Unaligned => pointer.wrapping_byte_add(4),
        }
    }
}

/// A tensor of a call, and what is bent of it.
pub(crate) struct Tensor {
    pub(crate) name: &'static str,
    pub(crate) memory: Memory,
    pub(crate) tensor: rapt_tensor,
    pub(crate) given: Given,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Function {
    Attention,
    Varlen,
    KvCache,
}

/// A call of one of the functions, with tensors by their names.
pub(crate) struct Call {
    pub(crate) function: Function,
    pub(crate) engine: *const rapt_engine,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) options: rapt_options,
    pub(crate) cache_size: usize,
    /// Of `options` and `cache`.
    pub(crate) structs: [Given; 2],
    /// Of q, k and v; their tensors are `k_descale` and the like.
    pub(crate) codes: [Option<rapt_codes>; 3],
}

impl Call {
    pub(crate) fn new(function: Function, engine: &Owned, options: rapt_options) -> Call {
        let structs = [Given::Whole; 2];
        let cache_size = size_of::<rapt_kvcache>();
        Call { function, engine: engine.0, tensors: Vec::new(), options, cache_size, structs, codes: [None; 3] }
    }

    pub(crate) fn with(mut self, name: &'static str, memory: Memory) -> Call {
        self.put(name, memory);
        self
    }

    /// In place of the tensor with this name.
    pub(crate) fn put(&mut self, name: &'static str, memory: Memory) {
        self.tensors.retain(|tensor| tensor.name != name);
        self.tensors.push(Tensor { name, tensor: memory.tensor(), memory, given: Given::Whole });
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    pub(crate) fn at(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor of the call")
    }

    pub(crate) fn memory(&self, name: &str) -> &Memory {
        &self.find(name).expect("a tensor of the call").memory
    }

    pub(crate) fn run(&self) -> rapt_error {
        let given = |name: &str| self.find(name).map_or(null(), |tensor| tensor.given.apply(&raw const tensor.tensor));
        let parts = [["q_descale", "q_zero_point"], ["k_descale", "k_zero_point"], ["v_descale", "v_zero_point"]];
        let codes: [Option<rapt_codes>; 3] = std::array::from_fn(|n| {
            self.codes[n].map(|codes| rapt_codes {
                descale: given(parts[n][0]),
                zero_point: given(parts[n][1]),
                ..codes
            })
        });
        let [q_codes, k_codes, v_codes] =
            codes.each_ref().map(|codes| codes.as_ref().map_or(null(), std::ptr::from_ref));
        let options = rapt_options {
            mask: given("mask"),
            sinks: given("sinks"),
            alibi_slopes: given("alibi_slopes"),
            lse: given("lse"),
            q_codes,
            k_codes,
            v_codes,
            ..self.options
        };
        let cache = rapt_kvcache {
            size: self.cache_size,
            k_cache: given("k_cache"),
            v_cache: given("v_cache"),
            cache_seqlens: given("cache_seqlens"),
            page_table: given("page_table"),
            k: given("k"),
            v: given("v"),
        };
        let options = self.structs[0].apply(&raw const options);
        let cache = self.structs[1].apply(&raw const cache);
        let (q, k, v, out) = (given("q"), given("k"), given("v"), given("out"));
        // SAFETY: what is neither NULL nor unaligned here leads to live memory of its type and length.
        unsafe {
            match self.function {
                Function::Attention => rapt_attention(self.engine, q, k, v, out, options),
                Function::Varlen => {
                    let [of_q, of_kv] = ["cu_seqlens_q", "cu_seqlens_kv"].map(given);
                    rapt_varlen_attention(self.engine, q, k, v, of_q, of_kv, out, options)
                }
                Function::KvCache => rapt_attention_with_kvcache(self.engine, q, cache, out, options),
            }
        }
    }

    /// The bytes of all tensors.
    pub(crate) fn bytes(&self) -> Vec<(&'static str, Vec<u8>)> {
        self.tensors.iter().map(|tensor| (tensor.name, tensor.memory.bytes())).collect()
    }
}

/// Numbers of a dtype that follow from `seed`.
pub(crate) fn drawn(dtype: DType, shape: &[usize], seed: u32) -> Memory {
    let drawn = numbers(shape.iter().product(), seed);
    let bytes: Vec<u8> = drawn.into_iter().flat_map(|x| element(dtype, f64::from(x) * 2.0)).collect();
    Memory::of(dtype, &sizes(shape), &bytes)
}

pub(crate) fn place(dtype: DType, shape: &[usize]) -> Memory {
    Memory::place(dtype, &sizes(shape))
}

pub(crate) fn sizes(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|size| *size as i64).collect()
}

pub(crate) fn plain() -> rapt_options {
    // SAFETY: zero and NULL are values of each field.
    rapt_options { size: size_of::<rapt_options>(), ..unsafe { std::mem::zeroed() } }
}

pub(crate) fn causal(causal: rapt_causal) -> rapt_options {
    rapt_options { causal: causal as i32, ..plain() }
}

/// Options of every kind that sequences of different lengths have.
pub(crate) fn many() -> rapt_options {
    let given =
        [rapt_given::RAPT_GIVEN_SOFTMAX_SCALE, rapt_given::RAPT_GIVEN_SOFTCAP, rapt_given::RAPT_GIVEN_WINDOW_LEFT];
    rapt_options {
        given: given.into_iter().fold(0, |bits, bit| bits | bit as u32),
        softmax_scale: 0.3,
        softcap: 4.0,
        window_left: 5,
        ..causal(rapt_causal::RAPT_CAUSAL_BOTTOM_RIGHT)
    }
}

/// Rows of so many bytes each.
pub(crate) fn rows(bytes: &[u8], rows: Range<usize>, row_bytes: usize) -> &[u8] {
    &bytes[rows.start * row_bytes..rows.end * row_bytes]
}

/// The dtype of lse.
pub(crate) fn lse_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The bytes of out and lse that rapt_attention() gives for one sequence, of the bytes of q, k and v.
pub(crate) fn alone(engine: &Owned, dtype: DType, [q, k, v]: [&[u8]; 3], of: &Call) -> [Vec<u8>; 2] {
    let size = dtype.size_bytes();
    let (q_len, kv_len) = (q.len() / (HEADS * DIM * size), v.len() / (KV_HEADS * DIM_V * size));
    let tensor = |bytes, shape: [usize; 3]| Memory::of(dtype, &sizes(&shape), bytes);
    let mut call = Call::new(Function::Attention, engine, rapt_options { layout: 1, ..of.options })
        .with("q", tensor(q, [q_len, HEADS, DIM]))
        .with("v", tensor(v, [kv_len, KV_HEADS, DIM_V]))
        .with("out", place(dtype, &[q_len, HEADS, DIM_V]))
        .with("lse", place(lse_dtype(dtype), &[HEADS, q_len]));
    for name in ["sinks", "alibi_slopes"] {
        if let Some(tensor) = of.find(name) {
            call.put(name, Memory::of(dtype, &[HEADS as i64], &tensor.memory.bytes()[..HEADS * size]));
        }
    }
    call.put("k", tensor(k, [kv_len, KV_HEADS, DIM]));
    outputs(&call, [q_len * HEADS * DIM_V * size, HEADS * q_len * lse_dtype(dtype).size_bytes()])
}

/// The bytes of `out` and `lse` of a call that must be served.
fn outputs(call: &Call, len: [usize; 2]) -> [Vec<u8>; 2] {
    assert_eq!(call.run(), RAPT_OK, "{}", last_error());
    [("out", len[0]), ("lse", len[1])].map(|(name, len)| call.memory(name).bytes()[..len].to_vec())
}

pub(crate) fn offsets(lengths: &[usize]) -> Memory {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end as i32)
    });
    let offsets: Vec<i32> = std::iter::once(0).chain(ends).collect();
    Memory::i32s(&[offsets.len() as i64], &offsets)
}

/// A call of rapt_varlen_attention() with numbers of every input.
pub(crate) fn varlen(engine: &Owned, dtype: DType, [q_lens, kv_lens]: [&[usize]; 2], options: rapt_options) -> Call {
    let (total, keys) = (q_lens.iter().sum::<usize>(), kv_lens.iter().sum::<usize>());
    Call::new(Function::Varlen, engine, options)
        .with("q", drawn(dtype, &[total, HEADS, DIM], 1))
        .with("k", drawn(dtype, &[keys, KV_HEADS, DIM], 2))
        .with("v", drawn(dtype, &[keys, KV_HEADS, DIM_V], 3))
        .with("cu_seqlens_q", offsets(q_lens))
        .with("cu_seqlens_kv", offsets(kv_lens))
        .with("out", place(dtype, &[total, HEADS, DIM_V]))
        .with("lse", place(lse_dtype(dtype), &[HEADS, total]))
}

#[test]
fn sequences_one_after_another_have_the_bits_of_calls_alone() {
    let engine = Owned::new(2);
    let (q_lens, kv_lens) = ([1, 40, 0, 3, 70, 2], [90, 40, 7, 0, 65, 1]);
    let total: usize = q_lens.iter().sum();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for (options, has_vectors) in
            [(plain(), false), (causal(rapt_causal::RAPT_CAUSAL_TOP_LEFT), false), (many(), true)]
        {
            let mut call = varlen(&engine, dtype, [&q_lens, &kv_lens], options);
            if has_vectors {
                call.put("sinks", drawn(dtype, &[HEADS], 4));
                call.put("alibi_slopes", drawn(dtype, &[HEADS], 5));
            }
            let (size, lse_size) = (dtype.size_bytes(), lse_dtype(dtype).size_bytes());
            let [out, lse] = outputs(&call, [total * HEADS * DIM_V * size, HEADS * total * lse_size]);
            let [q, k, v] = ["q", "k", "v"].map(|name| call.memory(name).bytes());
            let (mut row, mut key) = (0, 0);
            for (n, (q_len, kv_len)) in q_lens.into_iter().zip(kv_lens).enumerate() {
                let (of_q, of_kv) = (row..row + q_len, key..key + kv_len);
                (row, key) = (of_q.end, of_kv.end);
                let parts = [
                    rows(&q, of_q.clone(), HEADS * DIM * size),
                    rows(&k, of_kv.clone(), KV_HEADS * DIM * size),
                    rows(&v, of_kv, KV_HEADS * DIM_V * size),
                ];
                let [one, one_lse] = alone(&engine, dtype, parts, &call);
                assert_eq!(rows(&out, of_q.clone(), HEADS * DIM_V * size), one, "{dtype} {n}");
                let of_heads =
                    (0..HEADS).flat_map(|head| rows(&lse[head * total * lse_size..], of_q.clone(), lse_size));
                assert_eq!(of_heads.copied().collect::<Vec<_>>(), one_lse, "{dtype} {n}");
            }
        }
    }
}

/// A call of rapt_attention_with_kvcache() that appends as many keys as it has queries. Pages lie in no order.
pub(crate) fn cached(engine: &Owned, dtype: DType, page_size: Option<usize>, q_len: usize, lengths: &[i32]) -> Call {
    let batch = lengths.len();
    let entries = page_size.map_or(0, |size| ROOM / size);
    let [blocks, rows] = page_size.map_or([batch, ROOM], |size| [batch * entries + 1, size]);
    let mut call = Call::new(Function::KvCache, engine, causal(rapt_causal::RAPT_CAUSAL_BOTTOM_RIGHT))
        .with("q", drawn(dtype, &[batch, q_len, HEADS, DIM], 1))
        .with("k_cache", drawn(dtype, &[blocks, rows, KV_HEADS, DIM], 2))
        .with("v_cache", drawn(dtype, &[blocks, rows, KV_HEADS, DIM_V], 3))
        .with("cache_seqlens", Memory::i32s(&[batch as i64], lengths))
        .with("k", drawn(dtype, &[batch, q_len, KV_HEADS, DIM], 4))
        .with("v", drawn(dtype, &[batch, q_len, KV_HEADS, DIM_V], 5))
        .with("out", place(dtype, &[batch, q_len, HEADS, DIM_V]))
        .with("lse", place(lse_dtype(dtype), &[batch, HEADS, q_len]));
    if page_size.is_some() {
        let table: Vec<i32> = (0..batch * entries).rev().map(|page| page as i32).collect();
        call.put("page_table", Memory::i32s(&[batch as i64, entries as i64], &table));
    }
    call
}

/// Where key `j` of sequence `b` lies, in rows.
fn row(call: &Call, b: usize, j: usize) -> usize {
    let rows = call.memory("k_cache").shape[1] as usize;
    match call.find("page_table") {
        None => b * rows + j,
        Some(table) => {
            let entries = table.memory.shape[1] as usize;
            let page = table.memory.read(i32::from_le_bytes)[b * entries + j / rows];
            page as usize * rows + j % rows
        }
    }
}

/// The first `n` rows of sequence `b` in a tensor of the cache, one after another.
fn gathered(call: &Call, name: &str, row_bytes: usize, b: usize, n: usize) -> Vec<u8> {
    let bytes = call.memory(name).bytes();
    (0..n).flat_map(|j| rows(&bytes[row(call, b, j) * row_bytes..], 0..1, row_bytes).to_vec()).collect()
}

/// Compares what a served call gave with each sequence alone; `lengths` with the new keys.
fn assert_as_alone(engine: &Owned, dtype: DType, call: &Call, lengths: &[i32], what: &str) {
    let (size, lse_size) = (dtype.size_bytes(), lse_dtype(dtype).size_bytes());
    let q_len = call.memory("q").shape[1] as usize;
    let [of_out, of_lse] = [q_len * HEADS * DIM_V * size, HEADS * q_len * lse_size];
    let [out, lse] = outputs(call, [lengths.len() * of_out, lengths.len() * of_lse]);
    let q = call.memory("q").bytes();
    for (b, length) in lengths.iter().enumerate() {
        let k = gathered(call, "k_cache", KV_HEADS * DIM * size, b, *length as usize);
        let v = gathered(call, "v_cache", KV_HEADS * DIM_V * size, b, *length as usize);
        let parts = [rows(&q, b..b + 1, q_len * HEADS * DIM * size), &k, &v];
        let [one, one_lse] = alone(engine, dtype, parts, call);
        assert_eq!(rows(&out, b..b + 1, of_out), one, "{what}: sequence {b}");
        assert_eq!(rows(&lse, b..b + 1, of_lse), one_lse, "{what}: sequence {b}");
    }
}

#[test]
fn steps_of_decoding_append_and_have_the_bits_of_whole_tensors() {
    let engine = Owned::new(2);
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        for page_size in [None, Some(1), Some(4), Some(16)] {
            for q_len in [1, 3] {
                let what = format!("{dtype}, pages of {page_size:?}, {q_len} a step");
                let mut lengths = [0, 5, 17];
                let call = cached(&engine, dtype, page_size, q_len, &lengths);
                for step in 0..(ROOM - 17) / q_len {
                    for (name, dim) in [("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM_V)] {
                        let new = drawn(dtype, &[3, q_len, dim], 10 + step as u32);
                        call.memory(name).set(0, &new.bytes());
                    }
                    call.memory("cache_seqlens").set(0, &lengths.map(i32::to_le_bytes).concat());
                    let before = ["k_cache", "v_cache"].map(|name| call.memory(name).bytes());
                    let ends = lengths.map(|length| length + q_len as i32);
                    assert_as_alone(&engine, dtype, &call, &ends, &what);
                    for (n, (name, dim)) in [("k", DIM), ("v", DIM_V)].into_iter().enumerate() {
                        let of_row = KV_HEADS * dim * dtype.size_bytes();
                        let (new, mut expected) = (call.memory(name).bytes(), before[n].clone());
                        for b in 0..3 {
                            for i in 0..q_len {
                                let at = row(&call, b, lengths[b] as usize + i) * of_row;
                                expected[at..at + of_row].copy_from_slice(rows(
                                    &new[(b * q_len + i) * of_row..],
                                    0..1,
                                    of_row,
                                ));
                            }
                        }
                        let cache = call.memory(["k_cache", "v_cache"][n]).bytes();
                        assert!(
                            cache == expected,
                            "{what}: new keys lie behind the others, and nothing else is written"
                        );
                    }
                    assert_eq!(call.memory("cache_seqlens").read(i32::from_le_bytes), lengths, "it is not written");
                    lengths = ends;
                }
            }
        }
    }
}

#[test]
fn a_cache_that_takes_no_new_keys_is_only_read() {
    let engine = Owned::new(1);
    for page_size in [None, Some(8)] {
        for has_lengths in [true, false] {
            if page_size.is_some() && !has_lengths {
                continue;
            }
            let lengths = if has_lengths { [9, 31, 0] } else { [ROOM as i32; 3] };
            let mut call = cached(&engine, DType::F32, page_size, 2, &lengths);
            call.options = many();
            call.put("sinks", drawn(DType::F32, &[HEADS], 6));
            call.put("alibi_slopes", drawn(DType::F32, &[HEADS], 7));
            call.tensors.retain(|tensor| !["k", "v"].contains(&tensor.name));
            if !has_lengths {
                call.tensors.retain(|tensor| tensor.name != "cache_seqlens");
            }
            let before = ["k_cache", "v_cache"].map(|name| call.memory(name).bytes());
            assert_as_alone(&engine, DType::F32, &call, &lengths, "only read");
            assert_eq!(before, ["k_cache", "v_cache"].map(|name| call.memory(name).bytes()));
        }
    }
}

/// As in multi-head latent attention: values are the first numbers of each key.
#[test]
fn values_may_lie_in_the_keys() {
    let engine = Owned::new(1);
    for of_new in [None, Some("k")] {
        let mut call = cached(&engine, DType::F32, Some(4), 1, &[6, 11]);
        let mut shapes = Vec::new();
        for (values, keys) in [("v_cache", Some("k_cache")), ("v", of_new)] {
            let Some(keys) = keys else {
                call.tensors.retain(|tensor| tensor.name != values);
                continue;
            };
            let keys = call.find(keys).unwrap();
            let mut tensor = keys.tensor;
            let shape: Vec<i64> = [&keys.memory.shape[..3], &[DIM_V as i64]].concat();
            tensor.shape = shape.as_ptr();
            shapes.push(shape);
            call.at(values).tensor = tensor;
        }
        let [out, lse] = outputs(&call, [2 * HEADS * DIM_V * 4, 2 * HEADS * 4]);
        for (b, length) in [(0, 7), (1, 12)] {
            let k = gathered(&call, "k_cache", KV_HEADS * DIM * 4, b, length);
            let v: Vec<u8> = k.chunks(DIM * 4).flat_map(|key| key[..DIM_V * 4].to_vec()).collect();
            let q = call.memory("q").bytes();
            let [one, one_lse] = alone(&engine, DType::F32, [rows(&q, b..b + 1, HEADS * DIM * 4), &k, &v], &call);
            assert_eq!(rows(&out, b..b + 1, HEADS * DIM_V * 4), one, "new values: {of_new:?}");
            assert_eq!(rows(&lse, b..b + 1, HEADS * 4), one_lse, "new values: {of_new:?}");
        }
    }
}

#[test]
fn without_options_a_call_is_plain_attention() {
    let engine = Owned::new(1);
    let calls = || {
        let mut cached = cached(&engine, DType::F32, Some(4), 2, &[5, 9]);
        cached.options = plain();
        [varlen(&engine, DType::F32, [&[2, 3], &[4, 5]], plain()), cached]
    };
    for (mut with, mut without) in calls().into_iter().zip(calls()) {
        with.tensors.retain(|tensor| tensor.name != "lse");
        // The layout is that of the tensors, whatever the options say.
        with.options.layout = rapt_layout::RAPT_LAYOUT_BSHD as i32;
        without.structs[0] = Given::Null;
        assert_eq!([with.run(), without.run()], [RAPT_OK; 2], "{}", last_error());
        assert_eq!(with.memory("out").bytes(), without.memory("out").bytes());
    }
}

#[test]
fn there_may_be_no_sequence_no_query_and_no_key() {
    let engine = Owned::new(1);
    for lengths in [&[][..], &[0, 0]] {
        let call = varlen(&engine, DType::F32, [lengths, lengths], plain());
        assert_eq!(call.run(), RAPT_OK, "{}", last_error());
    }
    for page_size in [None, Some(4)] {
        for (q_len, lengths) in [(1, &[][..]), (0, &[3, 0]), (2, &[0, 0])] {
            let mut call = cached(&engine, DType::F32, page_size, q_len, lengths);
            if lengths == [0, 0] {
                call.tensors.retain(|tensor| !["k", "v"].contains(&tensor.name));
            }
            let before = ["k_cache", "v_cache"].map(|name| call.memory(name).bytes());
            assert_eq!(call.run(), RAPT_OK, "{}", last_error());
            assert_eq!(before, ["k_cache", "v_cache"].map(|name| call.memory(name).bytes()));
            if lengths == [0, 0] {
                assert!(call.memory("out").to_f32s().iter().all(|x| *x == 0.0), "no key weighs anything");
                assert!(call.memory("lse").to_f32s().iter().all(|x| *x == f32::NEG_INFINITY));
            }
        }
    }
}

/// A rapt_codes without its tensors.
pub(crate) fn codes(format: rapt_format, granularity: rapt_granularity, block_size: i64) -> rapt_codes {
    rapt_codes {
        size: size_of::<rapt_codes>(),
        format: format as i32,
        granularity: granularity as i32,
        block_size,
        head_dim: DIM as i64,
        descale: null(),
        zero_point: null(),
        global_scale: null(),
        scale_layout: 0,
    }
}

/// A call whose keys are codes, as by `cached`; and how many factors a head of a key has.
pub(crate) fn coded(
    engine: &Owned,
    page_size: Option<usize>,
    format: Format,
    granularity: Granularity,
) -> (Call, usize) {
    let mut call = cached(engine, DType::F32, page_size, 1, &[0, 5]);
    let [blocks, rows]: [usize; 2] = std::array::from_fn(|d| call.memory("k_cache").shape[d] as usize);
    let (of_format, of_granularity, block_size) = match (format, granularity) {
        (Format::Int8, Granularity::Token) => {
            (rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0)
        }
        (Format::Int8, _) => (rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_TENSOR, 0),
        (Format::Uint8, _) => (rapt_format::RAPT_FORMAT_UINT8, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0),
        (Format::Int4, _) => (rapt_format::RAPT_FORMAT_INT4, rapt_granularity::RAPT_GRANULARITY_BLOCK, 8),
        (Format::E4m3fn, _) => (rapt_format::RAPT_FORMAT_E4M3FN, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0),
        _ => (rapt_format::RAPT_FORMAT_MXFP4, rapt_granularity::RAPT_GRANULARITY_OF_SHAPE, 0),
    };
    call.codes[1] = Some(codes(of_format, of_granularity, block_size));
    let per_head = if let Granularity::Block(size) = granularity { DIM.div_ceil(size) } else { 1 };
    let shape: Vec<usize> = match granularity {
        Granularity::Tensor => vec![],
        Granularity::Block(_) => vec![blocks, rows, KV_HEADS, per_head],
        _ => vec![blocks, rows, KV_HEADS],
    };
    call.put("k_cache", place(format.code_dtype(), &[blocks, rows, KV_HEADS, DIM / format.codes_per_byte()]));
    let factors = Memory::place(format.scale_dtype(), &sizes(&shape));
    let bytes = if format.scale_dtype() == DType::F32 { 0.0625f32.to_le_bytes().to_vec() } else { vec![120] };
    factors.set(0, &bytes.repeat(shape.iter().product()));
    call.put("k_descale", factors);
    if format.has_zero_point() {
        call.put("k_zero_point", place(DType::U8, &shape));
    }
    (call, per_head)
}

#[test]
fn new_keys_become_codes_with_factors_of_their_own() {
    let engine = Owned::new(2);
    for (format, granularity) in [
        (Format::Int8, Granularity::Token),
        (Format::Int8, Granularity::Tensor),
        (Format::Uint8, Granularity::Token),
        (Format::E4m3fn, Granularity::Token),
        (Format::Int4, Granularity::Block(8)),
        (Format::Mxfp4, Granularity::Block(32)),
    ] {
        for page_size in [None, Some(4)] {
            let what = format!("{format} by {granularity}, pages of {page_size:?}");
            let (call, per_head) = coded(&engine, page_size, format, granularity);
            let is_whole = granularity == Granularity::Tensor;
            let code_bytes = KV_HEADS * DIM / format.codes_per_byte();
            let of_scale = format.scale_dtype().size_bytes();
            for step in 0..7 {
                let lengths = [step, 5 + step];
                call.memory("cache_seqlens").set(0, &lengths.map(i32::to_le_bytes).concat());
                let new = numbers(2 * KV_HEADS * DIM, 40 + step as u32);
                call.memory("k").set(0, &new.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
                let before = call.memory("k_descale").bytes();
                let [out, lse] = outputs(&call, [2 * HEADS * DIM_V * 4, 2 * HEADS * 4]);
                assert!(!is_whole || before == call.memory("k_descale").bytes(), "{what}: the tensor's factor stays");
                for (b, length) in lengths.into_iter().enumerate() {
                    let n = length as usize + 1;
                    let part = |name, row_bytes| gathered(&call, name, row_bytes, b, n);
                    let factors = match is_whole {
                        true => before.clone(),
                        false => part("k_descale", KV_HEADS * per_head * of_scale),
                    };
                    if !is_whole {
                        // The last key alone, quantized.
                        let one = &new[b * KV_HEADS * DIM..][..KV_HEADS * DIM];
                        let view = View::contiguous("k", one, [1, 1, KV_HEADS, DIM].into()).unwrap();
                        let scheme = Scheme::new(format, Some(granularity), ScaleLayout::Plain).unwrap();
                        let made = quantize(&view, scheme, None).unwrap();
                        let stored = part("k_cache", code_bytes);
                        assert_eq!(stored[(n - 1) * code_bytes..], *made.codes(), "{what}");
                    }
                    let [one, one_lse] = alone_of_codes(&engine, &call, b, [&part("k_cache", code_bytes), &factors]);
                    assert_eq!(rows(&out, b..b + 1, HEADS * DIM_V * 4), one, "{what}: step {step}, sequence {b}");
                    assert_eq!(rows(&lse, b..b + 1, HEADS * 4), one_lse, "{what}: step {step}, sequence {b}");
                }
            }
        }
    }
}

/// rapt_attention() on the codes of a sequence and their factors, with the values of `call`.
fn alone_of_codes(engine: &Owned, call: &Call, b: usize, [keys, factors]: [&[u8]; 2]) -> [Vec<u8>; 2] {
    let (cache, scales) = (call.memory("k_cache"), call.memory("k_descale"));
    let dtype = |memory: &Memory| DType::from_code(u8::try_from(memory.dtype).unwrap()).unwrap();
    let width = cache.shape[3];
    let n = keys.len() as i64 / (KV_HEADS as i64 * width);
    let of_sequence = |memory: &Memory| match memory.shape.len() {
        0 => vec![],
        _ => [&[n], &memory.shape[2..]].concat(),
    };
    let v = gathered(call, "v_cache", KV_HEADS * DIM_V * 4, b, n as usize);
    let q = call.memory("q").bytes();
    let q = rows(&q, b..b + 1, HEADS * DIM * 4);
    let mut one = Call::new(Function::Attention, engine, rapt_options { layout: 1, ..call.options })
        .with("q", Memory::of(DType::F32, &sizes(&[1, HEADS, DIM]), q))
        .with("k", Memory::of(dtype(cache), &[n, KV_HEADS as i64, width], keys))
        .with("k_descale", Memory::of(dtype(scales), &of_sequence(scales), factors))
        .with("v", Memory::of(DType::F32, &[n, KV_HEADS as i64, DIM_V as i64], &v))
        .with("out", place(DType::F32, &[1, HEADS, DIM_V]))
        .with("lse", place(DType::F32, &[HEADS, 1]));
    if let Some(points) = call.find("k_zero_point") {
        let bytes = gathered(call, "k_zero_point", KV_HEADS, b, n as usize);
        one.put("k_zero_point", Memory::of(DType::U8, &of_sequence(&points.memory), &bytes));
    }
    one.codes[1] = call.codes[1];
    outputs(&one, [HEADS * DIM_V * 4, HEADS * 4])
}
