//! What rapt_varlen_attention() and rapt_attention_with_kvcache() refuse: each case with its code, a message that names the offender,
//! nothing written, and an engine that serves on.

use engine::{DType, Format, Granularity};
use rapt_c::rapt_error::{self, *};
use rapt_c::{rapt_causal, rapt_codes, rapt_compute, rapt_dtype, rapt_format, rapt_granularity, rapt_last_error_code};

use crate::handles::Memory;
use crate::ragged::{
    Call, DIM, DIM_V, Given, HEADS, KV_HEADS, ROOM, cached, coded, codes, drawn, place, plain, varlen,
};
use crate::support::{Owned, last_error};

struct Case {
    name: String,
    code: rapt_error,
    /// What the message has, parted by `|`.
    says: String,
    bend: Box<dyn Fn(&mut Call)>,
}

#[derive(Default)]
struct Table(Vec<Case>);

impl Table {
    fn add(&mut self, code: rapt_error, says: &str, bend: impl Fn(&mut Call) + 'static) {
        self.0.push(Case { name: says.to_owned(), code, says: says.to_owned(), bend: Box::new(bend) });
    }

    /// What any tensor of any call may have that is wrong.
    fn tensor(&mut self, name: &'static str, is_needed: bool) {
        if is_needed {
            self.add(RAPT_ERROR_POINTER, &format!("{name} is NULL"), move |call| call.at(name).given = Given::Null);
        }
        self.add(RAPT_ERROR_POINTER, &format!("{name} leads to"), move |call| call.at(name).given = Given::Unaligned);
        for field in ["shape", "strides"] {
            let says = format!("{name}->{field} is NULL");
            self.add(RAPT_ERROR_POINTER, &says, move |call| {
                let tensor = &mut call.at(name).tensor;
                *(if field == "shape" { &mut tensor.shape } else { &mut tensor.strides }) = std::ptr::null();
            });
        }
        self.add(RAPT_ERROR_UNSUPPORTED_DTYPE, &format!("{name} has a dtype that is not known"), move |call| {
            call.at(name).tensor.dtype = 263;
        });
        self.add(RAPT_ERROR_SHAPE, &format!("{name} has ndim -1"), move |call| call.at(name).tensor.ndim = -1);
        self.add(RAPT_ERROR_SHAPE, &format!("{name} has size -1"), move |call| call.at(name).memory.shape[0] = -1);
        self.add(RAPT_ERROR_LAYOUT, &format!("{name} has a null data pointer"), move |call| {
            call.at(name).tensor.data = std::ptr::null_mut();
            call.at(name).tensor.storage_bytes = 0;
        });
        self.add(RAPT_ERROR_LAYOUT, &format!("{name} of shape"), move |call| call.at(name).tensor.storage_bytes = 1);
        let says = if name == "q" { " is on " } else { name };
        for device in [0, 2, -1] {
            self.add(RAPT_ERROR_DEVICE, says, move |call| call.at(name).tensor.device = device);
        }
        self.add(RAPT_ERROR_DEVICE, &format!("{name} is on host memory with device_index 1"), move |call| {
            call.at(name).tensor.device_index = 1;
        });
    }

    /// What the options of both functions may have.
    fn options(&mut self) {
        self.add(RAPT_ERROR_POINTER, "engine is NULL", |call| call.engine = std::ptr::null());
        self.add(RAPT_ERROR_POINTER, "options leads to", |call| call.structs[0] = Given::Unaligned);
        self.add(RAPT_ERROR_OPTION, "options.size = 8", |call| call.options.size = 8);
        self.add(RAPT_ERROR_OPTION, "causal = 3", |call| call.options.causal = 3);
        self.add(RAPT_ERROR_OPTION, "layout = -1", |call| call.options.layout = -1);
        self.add(RAPT_ERROR_OPTION, "softmax_scale = 2", |call| call.options.softmax_scale = 2.0);
        self.add(RAPT_ERROR_OPTION, "scale = NaN", |call| {
            (call.options.given, call.options.softmax_scale) = (1, f64::NAN);
        });
        self.add(RAPT_ERROR_DEVICE, "cuda:0 is not available", |call| {
            call.tensors.iter_mut().for_each(|tensor| tensor.tensor.device = 2);
        });
        self.add(RAPT_ERROR_UNSUPPORTED, "a mask with sequences of different lengths is not served", |call| {
            call.put("mask", place(DType::Bool, &[1]));
        });
        self.add(RAPT_ERROR_OPTION, "compute = 3", |call| call.options.compute = 3);
        self.add(RAPT_ERROR_UNSUPPORTED, "compute=\"fp8\" on cpu", |call| {
            call.options.compute = rapt_compute::RAPT_COMPUTE_FP8 as i32;
        });
        self.add(RAPT_ERROR_UNSUPPORTED, "compute=\"int8\" with k that is no codes", |call| {
            call.options.compute = rapt_compute::RAPT_COMPUTE_INT8 as i32;
        });
        self.add(RAPT_ERROR_DTYPE_MISMATCH, "out has dtype float32, asked for is bfloat16", |call| {
            call.options.out_dtype = rapt_dtype::RAPT_DTYPE_BF16 as i32;
        });
        self.add(RAPT_ERROR_DTYPE_MISMATCH, "lse has dtype int32", |call| call.at("lse").tensor.dtype = 4);
        self.add(RAPT_ERROR_UNSUPPORTED_DTYPE, "sinks has dtype int32", |call| call.at("sinks").tensor.dtype = 4);
        self.add(RAPT_ERROR_SHAPE, "alibi_slopes has shape [1]", |call| call.at("alibi_slopes").memory.shape[0] = 1);
        for (name, stride) in [("out", 0), ("lse", 0)] {
            self.add(RAPT_ERROR_LAYOUT, &format!("{name} of shape"), move |call| {
                call.at(name).memory.strides[0] = stride;
            });
        }
    }

    /// `written` at the address of `other`.
    fn overlap(&mut self, written: &'static str, other: &'static str) {
        self.add(RAPT_ERROR_LAYOUT, &format!("shares memory with|{written}"), move |call| {
            let data = call.at(other).tensor.data;
            let written = &mut call.at(written).tensor;
            (written.data, written.storage_bytes) = (data, 0);
        });
    }

    /// Each case, on a call that is served without its bend.
    fn check(&self, engine: &Owned, make: impl Fn() -> Call) {
        for Case { name, code, says, bend } in &self.0 {
            let mut call = make();
            bend(&mut call);
            let before = call.bytes();
            let got = call.run();
            let message = last_error();
            assert_eq!((got, rapt_last_error_code()), (*code, *code), "{name}: {message}");
            assert!(says.split('|').all(|says| message.contains(says)), "{name}: `{message}` lacks `{says}`");
            assert!(before == call.bytes(), "{name}: {message}: something was written");
        }
        let call = make();
        assert_eq!(call.engine, engine.0.cast_const());
        assert_eq!(call.run(), RAPT_OK, "the engine serves on: {}", last_error());
    }
}

fn int8() -> rapt_codes {
    codes(rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0)
}

fn with_vectors(mut call: Call) -> Call {
    call.put("sinks", drawn(DType::F32, &[HEADS], 8));
    call.put("alibi_slopes", drawn(DType::F32, &[HEADS], 9));
    call
}

#[test]
fn what_is_wrong_about_sequences_one_after_another_is_refused_and_nothing_is_written() {
    let engine = Owned::new(1);
    let mut table = Table::default();
    table.options();
    for name in ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "out"] {
        table.tensor(name, true);
    }
    for name in ["sinks", "alibi_slopes", "lse"] {
        table.tensor(name, false);
    }
    for (at, names) in [(0, "q|q_descale"), (1, "k|k_descale"), (2, "v|v_descale")] {
        table.add(
            RAPT_ERROR_UNSUPPORTED_DTYPE,
            &format!("is int8 codes, which are no numbers without|{names}"),
            move |call| {
                call.codes[at] = Some(int8());
            },
        );
    }
    table.add(RAPT_ERROR_DTYPE_MISMATCH, "k has dtype float32, asked for is int8", |call| {
        call.put("k_descale", place(DType::F32, &[9, KV_HEADS]));
        call.codes[1] = Some(int8());
    });
    for (name, at, got) in [
        ("cu_seqlens_q", 0, -1),
        ("cu_seqlens_q", 1, -2),
        ("cu_seqlens_q", 2, 1),
        ("cu_seqlens_q", 2, 6),
        ("cu_seqlens_kv", 2, 3),
        ("cu_seqlens_kv", 2, i32::MAX),
        ("cu_seqlens_kv", 0, i32::MIN),
    ] {
        table.add(RAPT_ERROR_INDEX, &format!("{name}[{at}] is {got}"), move |call| {
            call.memory(name).set(at * 4, &got.to_le_bytes());
        });
    }
    table.add(RAPT_ERROR_SHAPE, "cu_seqlens_kv has sequences 3, cu_seqlens_q has 2", |call| {
        call.put("cu_seqlens_kv", Memory::i32s(&[4], &[0, 4, 9, 9]));
    });
    table.add(RAPT_ERROR_OPTION, "cu_seqlens_q = []", |call| call.put("cu_seqlens_q", Memory::i32s(&[0], &[])));
    table.add(RAPT_ERROR_UNSUPPORTED_DTYPE, "cu_seqlens_q has dtype int64", |call| {
        call.put("cu_seqlens_q", Memory::i64s(&[3], &[0, 2, 5]));
    });
    table.add(RAPT_ERROR_SHAPE, "cu_seqlens_q has 0 dimensions", |call| call.at("cu_seqlens_q").tensor.ndim = 0);
    for name in ["q", "k", "v"] {
        table.add(RAPT_ERROR_SHAPE, &format!("{name} has 2 dimensions"), move |call| call.at(name).tensor.ndim = 2);
    }
    table.add(RAPT_ERROR_DTYPE_MISMATCH, "k has dtype int32", |call| call.at("k").tensor.dtype = 4);
    table.add(RAPT_ERROR_UNSUPPORTED_DTYPE, "q has dtype int32", |call| {
        ["q", "k", "v", "out"].into_iter().for_each(|name| call.at(name).tensor.dtype = 4);
    });
    for (name, dim, size, says) in [
        ("v", 0, 8, "v has total_kv 8, k has 9"),
        ("k", 2, 23, "k has head_dim 23, q has 24"),
        ("v", 1, 1, "v has num_kv_heads 1, k has 2"),
        ("q", 2, 0, "q has head_dim 0"),
        ("out", 0, 4, "out has shape [4, 4, 16]"),
        ("lse", 0, 3, "lse has shape [3, 5]"),
    ] {
        table.add(RAPT_ERROR_SHAPE, says, move |call| {
            call.at(name).memory.shape[dim] = size;
            if name == "q" {
                call.at("k").memory.shape[dim] = size;
            }
        });
    }
    for other in ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "sinks", "alibi_slopes"] {
        table.overlap("out", other);
        table.overlap("lse", other);
    }
    table.overlap("lse", "out");
    assert!(table.0.len() > 130, "{} cases", table.0.len());
    table.check(&engine, || with_vectors(varlen(&engine, DType::F32, [&[2, 3], &[4, 5]], plain())));
}

const OPTIONAL: [&str; 8] = ["cache_seqlens", "k", "v", "sinks", "alibi_slopes", "lse", "page_table", "k_cache"];

fn of_cache() -> Table {
    let mut table = Table::default();
    table.options();
    for name in ["q", "k_cache", "v_cache", "out"] {
        table.tensor(name, true);
    }
    for name in OPTIONAL.into_iter().filter(|name| !["page_table", "k_cache"].contains(name)) {
        table.tensor(name, false);
    }
    table.add(RAPT_ERROR_POINTER, "cache is NULL", |call| call.structs[1] = Given::Null);
    table.add(RAPT_ERROR_POINTER, "cache leads to", |call| call.structs[1] = Given::Unaligned);
    for size in [0, 1, 48, 57, 64, usize::MAX] {
        let says = format!("cache.size = {size}; allowed: 56");
        table.add(RAPT_ERROR_OPTION, &says, move |call| call.cache_size = size);
    }
    table.add(RAPT_ERROR_OPTION, "causal = 'top_left'", |call| {
        call.options.causal = rapt_causal::RAPT_CAUSAL_TOP_LEFT as i32;
    });
    table.add(RAPT_ERROR_OPTION, "k = None", |call| call.tensors.retain(|tensor| tensor.name != "k"));
    table.add(RAPT_ERROR_OPTION, "cache_seqlens = None", |call| {
        call.tensors.retain(|tensor| tensor.name != "cache_seqlens");
    });
    for (at, got) in [(1, ROOM as i32 - 1), (1, -1), (0, i32::MAX), (0, i32::MIN)] {
        table.add(RAPT_ERROR_INDEX, &format!("cache_seqlens[{at}] is {got}"), move |call| {
            call.memory("cache_seqlens").set(at * 4, &got.to_le_bytes());
        });
    }
    table.add(RAPT_ERROR_SHAPE, "cache_seqlens has sequences 3, q has 2", |call| {
        call.put("cache_seqlens", Memory::i32s(&[3], &[1, 2, 3]));
    });
    table.add(RAPT_ERROR_UNSUPPORTED_DTYPE, "cache_seqlens has dtype int64", |call| {
        call.put("cache_seqlens", Memory::i64s(&[2], &[1, 2]));
    });
    for name in ["q", "k_cache", "v_cache", "k", "v"] {
        table.add(RAPT_ERROR_SHAPE, &format!("{name} has 3 dimensions"), move |call| call.at(name).tensor.ndim = 3);
    }
    for name in ["k_cache", "v_cache"] {
        let says = format!("{name} has dtype float16, q has float32");
        table.add(RAPT_ERROR_DTYPE_MISMATCH, &says, move |call| call.at(name).tensor.dtype = 6);
    }
    for name in ["k", "v"] {
        let says = format!("{name} has dtype float16, asked for is float32");
        table.add(RAPT_ERROR_DTYPE_MISMATCH, &says, move |call| call.at(name).tensor.dtype = 6);
    }
    for (name, dim, size, says) in [
        ("k", 0, 1, "k has batch 1, q has 2"),
        ("v", 0, 1, "v has batch 1, q has 2"),
        ("v", 1, 1, "v has new keys 1, k has 2"),
        ("k", 2, 1, "k has num_kv_heads 1, k_cache has 2"),
        ("v", 2, 1, "v has num_kv_heads 1, v_cache has 2"),
        ("k", 3, 23, "k has head_dim 23, k_cache has 24"),
        ("v", 3, 15, "v has head_dim 15, v_cache has 16"),
        ("v_cache", 2, 1, "v_cache has num_kv_heads 1, k_cache has 2"),
        ("k_cache", 3, 23, "k_cache has head_dim 23, q has 24"),
        ("out", 1, 1, "out has shape [2, 1, 4, 16]"),
        ("lse", 0, 1, "lse has shape [1, 4, 2]"),
    ] {
        table.add(RAPT_ERROR_SHAPE, says, move |call| call.at(name).memory.shape[dim] = size);
    }
    table.add(RAPT_ERROR_SHAPE, "k has new keys, of which the cache holds 33, k_cache has 32", |call| {
        call.put("k", drawn(DType::F32, &[2, ROOM + 1, KV_HEADS, DIM], 1));
        call.put("v", drawn(DType::F32, &[2, ROOM + 1, KV_HEADS, DIM_V], 2));
    });
    for written in ["out", "lse"] {
        for other in OPTIONAL {
            if other != written && other != "page_table" {
                table.overlap(written, other);
            }
        }
        table.overlap(written, "q");
    }
    for (written, other) in [("k_cache", "v_cache"), ("v_cache", "k_cache")] {
        table.overlap(written, other);
    }
    for written in ["k_cache", "v_cache"] {
        for other in ["q", "k", "v", "cache_seqlens", "sinks", "alibi_slopes"] {
            let says = format!("{written} shares memory with {other}");
            table.add(RAPT_ERROR_LAYOUT, &says, move |call| {
                // The other is larger: it is moved to the cache, so that all addresses lie in memory of the call.
                let data = call.at(written).tensor.data;
                let other = &mut call.at(other).tensor;
                (other.data, other.storage_bytes) = (data, 0);
            });
        }
        table
            .add(RAPT_ERROR_LAYOUT, &format!("{written} of shape"), move |call| call.at(written).memory.strides[1] = 0);
    }
    table
}

#[test]
fn what_is_wrong_about_a_cache_is_refused_and_nothing_is_written() {
    let engine = Owned::new(1);
    let mut table = of_cache();
    for (dim, size, says) in [(0, 1, "v_cache has batch 1, q has 2"), (1, 31, "v_cache has kv_len 31, k_cache has 32")]
    {
        table.add(RAPT_ERROR_SHAPE, says, move |call| call.at("v_cache").memory.shape[dim] = size);
    }
    assert!(table.0.len() > 190, "{} cases", table.0.len());
    table.check(&engine, || with_vectors(cached(&engine, DType::F32, None, 2, &[5, 9])));
}

#[test]
fn what_is_wrong_about_pages_is_refused_and_nothing_is_written() {
    let engine = Owned::new(1);
    let mut table = of_cache();
    table.tensor("page_table", false);
    for (at, page) in [(0, 17), (1, -1), (9, i32::MAX), (8, i32::MIN)] {
        // Entries of the second sequence are told by their place in its own row.
        let says = format!("page_table[{}] is {page}", at % 8);
        table.add(RAPT_ERROR_INDEX, &says, move |call| call.memory("page_table").set(at * 4, &page.to_le_bytes()));
    }
    // Sequence 0 writes keys 5 and 6 into its second page, sequence 1 keys 9 and 10 into its third.
    for (to, from, says) in [
        (8, 1, "takes new keys of sequence 0 and belongs to sequence 1"),
        (0, 1, "takes new keys of sequence 0 and belongs to sequence 0"),
        (0, 10, "takes new keys of sequence 1 and belongs to sequence 0"),
    ] {
        table.add(RAPT_ERROR_LAYOUT, says, move |call| {
            let page = call.memory("page_table").read(i32::from_le_bytes)[from];
            call.memory("page_table").set(to * 4, &page.to_le_bytes());
        });
    }
    table.add(RAPT_ERROR_SHAPE, "page_table has batch 1, q has 2", |call| call.at("page_table").memory.shape[0] = 1);
    table.add(RAPT_ERROR_SHAPE, "page_table has 1 dimensions", |call| call.at("page_table").tensor.ndim = 1);
    table.add(RAPT_ERROR_UNSUPPORTED_DTYPE, "page_table has dtype float32", |call| {
        call.at("page_table").tensor.dtype = 7;
    });
    table.add(RAPT_ERROR_SHAPE, "v_cache has num_pages 16, k_cache has 17", |call| {
        call.at("v_cache").memory.shape[0] = 16;
    });
    table.add(RAPT_ERROR_SHAPE, "v_cache has page_size 3, k_cache has 4", |call| {
        call.at("v_cache").memory.shape[1] = 3;
    });
    for written in ["out", "lse"] {
        table.overlap(written, "page_table");
    }
    for written in ["k_cache", "v_cache"] {
        let says = format!("{written} shares memory with page_table");
        table.add(RAPT_ERROR_LAYOUT, &says, move |call| {
            let data = call.at(written).tensor.data;
            let table = &mut call.at("page_table").tensor;
            (table.data, table.storage_bytes) = (data, 0);
        });
    }
    table.check(&engine, || with_vectors(cached(&engine, DType::F32, Some(4), 2, &[5, 9])));
}

/// What is wrong about codes in a cache, with pages and without.
fn of_codes() -> Table {
    let mut table = Table::default();
    for name in ["k_descale", "k_zero_point"] {
        table.tensor(name, false);
        table.add(RAPT_ERROR_SHAPE, &format!("{name} has "), move |call| call.at(name).memory.shape[0] = 1);
        table.add(RAPT_ERROR_SHAPE, &format!("{name} has "), move |call| call.at(name).memory.shape[1] -= 1);
        table.add(RAPT_ERROR_SHAPE, "has shape", move |call| call.at(name).memory.shape[2] = 1);
        table.add(RAPT_ERROR_SHAPE, "has shape", move |call| call.at(name).tensor.ndim = 1);
        table.add(RAPT_ERROR_LAYOUT, &format!("{name} of shape"), move |call| call.at(name).memory.strides[1] = 0);
        for other in ["q", "k", "v", "k_cache", "v_cache", "out", "lse", "cache_seqlens"] {
            table.overlap(name, other);
        }
    }
    table.overlap("k_descale", "k_zero_point");
    table.add(RAPT_ERROR_UNSUPPORTED_DTYPE, "k_cache is uint8 codes, which are no numbers without k_descale", |call| {
        call.at("k_descale").given = Given::Null;
    });
    table.add(RAPT_ERROR_UNSUPPORTED_DTYPE, "k_zero_point: nothing is assumed", |call| {
        call.at("k_zero_point").given = Given::Null;
    });
    table.add(RAPT_ERROR_UNSUPPORTED, "q_codes with sequences of different lengths is not served", |call| {
        call.codes[0] = Some(int8());
    });
    table.add(RAPT_ERROR_UNSUPPORTED, "compute=\"int8\" with v that is no codes", |call| {
        (call.options.compute, call.codes[1]) = (rapt_compute::RAPT_COMPUTE_INT8 as i32, Some(int8()));
        let cache = call.memory("k_cache").shape.clone();
        let cache: Vec<usize> = cache.iter().map(|size| *size as usize).collect();
        call.put("k_cache", place(DType::I8, &cache));
        call.tensors.retain(|tensor| !["k", "v", "k_zero_point"].contains(&tensor.name));
    });
    table.add(RAPT_ERROR_OPTION, "k_codes.format = 0", |call| call.codes[1].as_mut().unwrap().format = 0);
    table.add(RAPT_ERROR_OPTION, "k_codes.size = 8", |call| call.codes[1].as_mut().unwrap().size = 8);
    table.add(RAPT_ERROR_OPTION, "k_codes.granularity = 6", |call| call.codes[1].as_mut().unwrap().granularity = 6);
    table.add(RAPT_ERROR_DTYPE_MISMATCH, "k_cache has dtype int8, asked for is uint8", |call| {
        call.at("k_cache").tensor.dtype = rapt_dtype::RAPT_DTYPE_I8 as i32;
    });
    table.add(RAPT_ERROR_DTYPE_MISMATCH, "options->v_codes = NULL if v_cache has numbers", |call| {
        call.codes[2] = Some(int8());
        call.put("v_descale", drawn(DType::F32, &[2, ROOM, KV_HEADS], 1));
        call.at("v_cache").memory.shape[3] = DIM_V as i64;
        let shape: Vec<usize> = call.memory("v_cache").shape[..3].iter().map(|size| *size as usize).collect();
        call.put("v_descale", drawn(DType::F32, &shape, 1));
        call.codes[2].as_mut().unwrap().head_dim = DIM_V as i64;
    });
    for (at, bits, what) in [(3, f32::NAN, "NaN"), (DIM * KV_HEADS + 1, f32::INFINITY, "inf")] {
        let says = format!("is {what}, for which uint8 has no code");
        table.add(RAPT_ERROR_NUMBER, &says, move |call| call.memory("k").set(at * 4, &bits.to_le_bytes()));
    }
    table
}

#[test]
fn what_is_wrong_about_codes_in_a_cache_is_refused_and_nothing_is_written() {
    let engine = Owned::new(1);
    for page_size in [None, Some(4)] {
        of_codes().check(&engine, || coded(&engine, page_size, Format::Uint8, Granularity::Token).0);
        let mut table = Table::default();
        table.add(RAPT_ERROR_NUMBER, "k as codes: scale[] is -1", |call| {
            call.memory("k_descale").set(0, &(-1f32).to_le_bytes());
        });
        table.check(&engine, || coded(&engine, page_size, Format::Int8, Granularity::Tensor).0);
        let mut table = Table::default();
        for (granularity, code, says) in [
            (
                rapt_granularity::RAPT_GRANULARITY_OF_SHAPE,
                RAPT_ERROR_UNSUPPORTED,
                "new keys in a cache with factors by head",
            ),
            (rapt_granularity::RAPT_GRANULARITY_HEAD, RAPT_ERROR_OPTION, "granularity = head"),
        ] {
            table.add(code, says, move |call| {
                call.codes[1] = Some(codes(rapt_format::RAPT_FORMAT_INT8, granularity, 0));
                call.put("k_descale", drawn(DType::F32, &[2, KV_HEADS], 3));
            });
        }
        table.check(&engine, || coded(&engine, page_size, Format::Int8, Granularity::Token).0);
    }
}
