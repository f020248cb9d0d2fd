//! Codes of sequences that lie one after another, and products of int8 there and in caches: each sequence has the bits that rapt_attention()
//! gives for it alone with the same options.

use engine::DType;
use rapt_c::rapt_error::*;
use rapt_c::{rapt_causal, rapt_compute, rapt_dtype, rapt_format, rapt_granularity, rapt_options};

use crate::handles::Memory;
use crate::ragged::{
    Call, DIM, DIM_V, Function, HEADS, KV_HEADS, ROOM, causal, codes, drawn, offsets, place, plain, rows, sizes,
};
use crate::support::{Owned, last_error, numbers};

/// Codes from −127 to 127.
fn int8(shape: &[usize], seed: u32) -> Memory {
    let drawn = numbers(shape.iter().product(), seed);
    let bytes: Vec<u8> = drawn.into_iter().map(|x| ((x * 127.0) as i8).max(-127).cast_unsigned()).collect();
    Memory::of(DType::I8, &sizes(shape), &bytes)
}

/// Factors of codes, of either sign.
fn factors(shape: &[usize], seed: u32) -> Memory {
    let drawn = numbers(shape.iter().product::<usize>().max(1), seed);
    let bytes: Vec<u8> = drawn.into_iter().flat_map(|x| (x * 0.02).to_le_bytes()).collect();
    Memory::of(DType::F32, &sizes(shape), &bytes)
}

/// Keys by token, values with factors of `v_shape`.
fn with_codes(
    mut call: Call,
    [keys, values]: [&[usize]; 2],
    [k_shape, v_shape]: [&[usize]; 2],
    names: [&'static str; 2],
) -> Call {
    call.put(names[0], int8(keys, 61));
    call.put(names[1], int8(values, 62));
    call.put("k_descale", factors(k_shape, 63));
    call.put("v_descale", factors(v_shape, 64));
    let of_shape = |dim: usize| {
        let codes = codes(rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_OF_SHAPE, 0);
        Some(rapt_c::rapt_codes { head_dim: dim as i64, ..codes })
    };
    (call.codes[1], call.codes[2]) = (of_shape(DIM), of_shape(DIM_V));
    call
}

/// The bits of rapt_attention() for one sequence of `rows` queries and `keys` keys, of the bytes of its tensors.
fn alone(
    engine: &Owned,
    options: rapt_options,
    q: &[u8],
    [k, k_descale, v]: [&[u8]; 3],
    v_descale: Memory,
) -> [Vec<u8>; 2] {
    let (q_len, kv_len) = (q.len() / (HEADS * DIM * 4), k.len() / (KV_HEADS * DIM));
    let call = Call::new(Function::Attention, engine, rapt_options { layout: 1, ..options })
        .with("q", Memory::of(DType::F32, &sizes(&[q_len, HEADS, DIM]), q))
        .with("out", place(DType::F32, &[q_len, HEADS, DIM_V]))
        .with("lse", place(DType::F32, &[HEADS, q_len]));
    let [keys, values] = [[kv_len, KV_HEADS, DIM], [kv_len, KV_HEADS, DIM_V]];
    let mut call = with_codes(call, [&keys, &values], [&[kv_len, KV_HEADS], &[]], ["k", "v"]);
    call.put("k", Memory::of(DType::I8, &sizes(&keys), k));
    call.put("v", Memory::of(DType::I8, &sizes(&values), v));
    call.put("k_descale", Memory::of(DType::F32, &sizes(&[kv_len, KV_HEADS]), k_descale));
    call.put("v_descale", v_descale);
    assert_eq!(call.run(), RAPT_OK, "{}", last_error());
    [("out", q_len * HEADS * DIM_V * 4), ("lse", HEADS * q_len * 4)]
        .map(|(name, len)| call.memory(name).bytes()[..len].to_vec())
}

fn computed(compute: rapt_compute) -> rapt_options {
    rapt_options { compute: compute as i32, ..causal(rapt_causal::RAPT_CAUSAL_BOTTOM_RIGHT) }
}

#[test]
fn codes_of_sequences_one_after_another_have_the_bits_of_calls_alone() {
    let engine = Owned::new(2);
    let (q_lens, kv_lens) = ([1, 40, 0, 3, 2], [90, 40, 7, 0, 150]);
    let (total, keys) = (q_lens.iter().sum::<usize>(), kv_lens.iter().sum::<usize>());
    let mut outs = Vec::new();
    for options in [plain(), computed(rapt_compute::RAPT_COMPUTE_EXACT), computed(rapt_compute::RAPT_COMPUTE_INT8)] {
        let call = Call::new(Function::Varlen, &engine, options)
            .with("q", drawn(DType::F32, &[total, HEADS, DIM], 1))
            .with("cu_seqlens_q", offsets(&q_lens))
            .with("cu_seqlens_kv", offsets(&kv_lens))
            .with("out", place(DType::F32, &[total, HEADS, DIM_V]))
            .with("lse", place(DType::F32, &[HEADS, total]));
        let shapes = [&[keys, KV_HEADS, DIM][..], &[keys, KV_HEADS, DIM_V]];
        let call = with_codes(call, shapes, [&[keys, KV_HEADS], &[1, KV_HEADS, DIM_V]], ["k", "v"]);
        assert_eq!(call.run(), RAPT_OK, "{}", last_error());
        let part = |name: &str| call.memory(name).bytes();
        let (out, lse) = (part("out"), part("lse"));
        let (mut row, mut key) = (0, 0);
        for (n, (q_len, kv_len)) in q_lens.into_iter().zip(kv_lens).enumerate() {
            let (queries, of_keys) = (row..row + q_len, key..key + kv_len);
            let of = |name: &str, bytes: usize| rows(&part(name), of_keys.clone(), bytes).to_vec();
            let codes = [of("k", KV_HEADS * DIM), of("k_descale", KV_HEADS * 4), of("v", KV_HEADS * DIM_V)];
            let q = rows(&part("q"), queries.clone(), HEADS * DIM * 4).to_vec();
            let v_descale = factors(&[1, KV_HEADS, DIM_V], 64);
            let [one, one_lse] = alone(&engine, options, &q, codes.each_ref().map(Vec::as_slice), v_descale);
            assert_eq!(rows(&out, queries.clone(), HEADS * DIM_V * 4), one, "sequence {n}");
            for head in 0..HEADS {
                let at = |first: usize| (first + head * total) * 4..(first + head * total + q_len) * 4;
                assert_eq!(lse[at(row)], one_lse[head * q_len * 4..][..q_len * 4], "sequence {n}");
            }
            (row, key) = (row + q_len, key + kv_len);
        }
        outs.push(out);
    }
    assert_ne!(outs[1], outs[2], "products of int8 are an approximation");
}

#[test]
fn products_of_int8_in_a_cache_have_the_bits_of_calls_alone() {
    let engine = Owned::new(2);
    let lengths = [0, 5, ROOM];
    for page_size in [None, Some(4)] {
        let blocks = page_size.map_or(3, |size| 3 * ROOM / size);
        let rows_of_block = page_size.unwrap_or(ROOM);
        let mut outs = Vec::new();
        for compute in [rapt_compute::RAPT_COMPUTE_EXACT, rapt_compute::RAPT_COMPUTE_INT8] {
            let options = computed(compute);
            let call = Call::new(Function::KvCache, &engine, options)
                .with("q", drawn(DType::F32, &[3, 2, HEADS, DIM], 1))
                .with("cache_seqlens", Memory::i32s(&[3], &lengths.map(|length| length as i32)))
                .with("out", place(DType::F32, &[3, 2, HEADS, DIM_V]))
                .with("lse", place(DType::F32, &[3, HEADS, 2]));
            let shapes = [&[blocks, rows_of_block, KV_HEADS, DIM][..], &[blocks, rows_of_block, KV_HEADS, DIM_V]];
            let scales = [&[blocks, rows_of_block, KV_HEADS][..], &[3, KV_HEADS]];
            let mut call = with_codes(call, shapes, scales, ["k_cache", "v_cache"]);
            // Pages of a sequence from the last one down.
            let table: Vec<i32> = (0..blocks as i32).rev().collect();
            if page_size.is_some() {
                call.put("page_table", Memory::i32s(&[3, (blocks / 3) as i64], &table));
            }
            assert_eq!(call.run(), RAPT_OK, "{}", last_error());
            let part = |name: &str| call.memory(name).bytes();
            for (b, length) in lengths.into_iter().enumerate() {
                let row = |j: usize| match page_size {
                    None => b * ROOM + j,
                    Some(size) => table[b * blocks / 3 + j / size] as usize * size + j % size,
                };
                let of = |name: &str, bytes: usize| {
                    let whole = part(name);
                    (0..length).flat_map(|j| whole[row(j) * bytes..][..bytes].to_vec()).collect::<Vec<u8>>()
                };
                let codes =
                    [of("k_cache", KV_HEADS * DIM), of("k_descale", KV_HEADS * 4), of("v_cache", KV_HEADS * DIM_V)];
                let of_heads = &part("v_descale")[b * KV_HEADS * 4..][..KV_HEADS * 4];
                let q = rows(&part("q"), b..b + 1, 2 * HEADS * DIM * 4).to_vec();
                let v_descale = Memory::of(DType::F32, &sizes(&[KV_HEADS]), of_heads);
                let [one, one_lse] = alone(&engine, options, &q, codes.each_ref().map(Vec::as_slice), v_descale);
                assert_eq!(rows(&part("out"), b..b + 1, 2 * HEADS * DIM_V * 4), one, "{page_size:?}, sequence {b}");
                assert_eq!(rows(&part("lse"), b..b + 1, 2 * HEADS * 4), one_lse, "{page_size:?}, sequence {b}");
            }
            outs.push(part("out"));
        }
        assert_ne!(outs[0], outs[1], "products of int8 are an approximation");
    }
}

#[test]
fn outputs_share_no_memory_with_factors() {
    let engine = Owned::new(1);
    for (written, other) in [("out", "k_descale"), ("lse", "v_descale"), ("out", "q_zero_point")] {
        let call = Call::new(Function::Varlen, &engine, plain())
            .with("q", place(DType::U8, &[5, HEADS, DIM]))
            .with("q_descale", factors(&[5, HEADS], 60))
            .with("q_zero_point", place(DType::U8, &[5, HEADS]))
            .with("cu_seqlens_q", offsets(&[2, 3]))
            .with("cu_seqlens_kv", offsets(&[4, 5]))
            .with("out", place(DType::F32, &[5, HEADS, DIM_V]))
            .with("lse", place(DType::F32, &[HEADS, 5]));
        let shapes = [&[9, KV_HEADS, DIM][..], &[9, KV_HEADS, DIM_V]];
        let mut call = with_codes(call, shapes, [&[9, KV_HEADS], &[]], ["k", "v"]);
        call.options.out_dtype = rapt_dtype::RAPT_DTYPE_F32 as i32;
        call.codes[0] = Some(codes(rapt_format::RAPT_FORMAT_UINT8, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0));
        assert_eq!(call.run(), RAPT_OK, "{}", last_error());
        // Within the output, which is the longer: beyond its end may be any tensor.
        let data = call.at(written).tensor.data;
        (call.at(other).tensor.data, call.at(other).tensor.storage_bytes) = (data, 0);
        let before = call.bytes();
        assert_eq!(call.run(), RAPT_ERROR_LAYOUT);
        assert!(last_error().contains(&format!("{written} shares memory with {other}")), "{}", last_error());
        assert!(before == call.bytes(), "nothing is written");
    }
}
