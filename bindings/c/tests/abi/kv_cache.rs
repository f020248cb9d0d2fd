//! rapt_kv_cache: each sequence has the bits that rapt_attention() gives for its keys in one tensor, whatever was appended, forked,
//! truncated and freed; the pages are what the Rust cache holds, and rapt_attention_with_kvcache() reads them where they lie.

use std::ptr::{null, null_mut};

use engine::quant::Scheme;
use engine::{DType, Format, Granularity, KvCache, KvCacheForm, ScaleLayout, SequenceId, View};
use rapt_c::rapt_error::{self, *};
use rapt_c::{
    rapt_attention_with_kvcache, rapt_codes, rapt_format, rapt_granularity, rapt_kv_cache, rapt_kv_cache_append,
    rapt_kv_cache_append_batch, rapt_kv_cache_attention, rapt_kv_cache_create, rapt_kv_cache_destroy,
    rapt_kv_cache_fork, rapt_kv_cache_form, rapt_kv_cache_free, rapt_kv_cache_free_pages, rapt_kv_cache_get_pages,
    rapt_kv_cache_length, rapt_kv_cache_new_sequence, rapt_kv_cache_num_sequences, rapt_kv_cache_page_table,
    rapt_kv_cache_pages, rapt_kv_cache_seqlens, rapt_kv_cache_truncate, rapt_kvcache, rapt_options, rapt_tensor,
};

use crate::handles::Memory;
use crate::ragged::{
    Call, DIM, DIM_V, Function, HEADS, KV_HEADS, alone, codes, drawn, lse_dtype, many, place, plain, rows, sizes,
};
use crate::support::{Owned, last_error};

pub(crate) const PAGES: usize = 24;
pub(crate) const PAGE_SIZE: usize = 4;

/// A cache that is given back when it is dropped.
pub(crate) struct Cache(pub(crate) *mut rapt_kv_cache);
// SAFETY: a cache may be used from any thread.
unsafe impl Send for Cache {}
// SAFETY: as above.
unsafe impl Sync for Cache {}

impl Drop for Cache {
    fn drop(&mut self) {
        // SAFETY: made once, and used no more.
        unsafe { rapt_kv_cache_destroy(self.0) };
    }
}

pub(crate) fn form(dtype: DType) -> rapt_kv_cache_form {
    rapt_kv_cache_form {
        size: size_of::<rapt_kv_cache_form>(),
        num_pages: PAGES as i64,
        page_size: PAGE_SIZE as i64,
        num_kv_heads: KV_HEADS as i64,
        head_dim: DIM as i64,
        head_dim_v: DIM_V as i64,
        dtype: dtype.code().into(),
        k_codes: null(),
        v_codes: null(),
    }
}

fn done(answer: rapt_error) {
    assert_eq!(answer, RAPT_OK, "{}", last_error());
}

impl Cache {
    pub(crate) fn new(form: &rapt_kv_cache_form) -> Cache {
        let mut cache = null_mut();
        // SAFETY: a struct and a pointer of this frame.
        done(unsafe { rapt_kv_cache_create(form, &raw mut cache) });
        Cache(cache)
    }

    pub(crate) fn add(&self) -> u64 {
        let mut id = u64::MAX;
        // SAFETY: alive, and a number of this frame.
        done(unsafe { rapt_kv_cache_new_sequence(self.0, &raw mut id) });
        id
    }

    pub(crate) fn fork(&self, id: u64) -> u64 {
        let mut fork = u64::MAX;
        // SAFETY: as above.
        done(unsafe { rapt_kv_cache_fork(self.0, id, &raw mut fork) });
        fork
    }

    pub(crate) fn length(&self, id: u64) -> usize {
        let mut length = usize::MAX;
        // SAFETY: as above.
        done(unsafe { rapt_kv_cache_length(self.0, id, &raw mut length) });
        length
    }

    pub(crate) fn append(&self, ids: &[u64], [k, v]: [&rapt_tensor; 2]) -> rapt_error {
        // SAFETY: alive, numbers of this frame, and tensors with memory of their own.
        unsafe {
            match ids {
                [id] if k.ndim == 3 => rapt_kv_cache_append(self.0, *id, k, v),
                ids => rapt_kv_cache_append_batch(self.0, ids.as_ptr(), ids.len(), k, v),
            }
        }
    }

    /// Page table, of one entry more than the longest needs, and lengths.
    pub(crate) fn tables(&self, ids: &[u64]) -> [Memory; 2] {
        let entries = ids.iter().map(|id| self.length(*id).div_ceil(PAGE_SIZE)).max().unwrap_or(0) + 1;
        let (table, lengths) = (place(DType::I32, &[ids.len(), entries]), place(DType::I32, &[ids.len()]));
        // SAFETY: as above.
        unsafe {
            done(rapt_kv_cache_page_table(self.0, ids.as_ptr(), ids.len(), &table.tensor()));
            done(rapt_kv_cache_seqlens(self.0, ids.as_ptr(), ids.len(), &lengths.tensor()));
        }
        [table, lengths]
    }

    pub(crate) fn pages(&self) -> rapt_kv_cache_pages {
        let size = size_of::<rapt_kv_cache_pages>();
        let mut pages =
            rapt_kv_cache_pages { size, k_cache: null(), v_cache: null(), k_codes: null(), v_codes: null() };
        // SAFETY: alive, and a struct of this frame.
        done(unsafe { rapt_kv_cache_get_pages(self.0, &raw mut pages) });
        pages
    }

    /// The bytes of `out` and `lse`, with options whose other tensors are those of `of`.
    fn attend(&self, engine: &Owned, ids: &[u64], q: &Memory, of: &Call) -> [Vec<u8>; 2] {
        let (q_len, dtype) = (q.shape[1] as usize, DType::from_code(q.dtype as u8).unwrap());
        let out = place(dtype, &[ids.len(), q_len, HEADS, DIM_V]);
        let lse = place(lse_dtype(dtype), &[ids.len(), HEADS, q_len]);
        let tensor = |name| of.find(name).map(|tensor| tensor.memory.tensor());
        let (sinks, slopes, of_lse) = (tensor("sinks"), tensor("alibi_slopes"), lse.tensor());
        let options = rapt_options {
            sinks: sinks.as_ref().map_or(null(), std::ptr::from_ref),
            alibi_slopes: slopes.as_ref().map_or(null(), std::ptr::from_ref),
            lse: &raw const of_lse,
            ..of.options
        };
        let (of_q, of_out) = (q.tensor(), out.tensor());
        // SAFETY: all alive, each with memory of its own.
        done(unsafe { rapt_kv_cache_attention(engine.0, self.0, &of_q, ids.as_ptr(), ids.len(), &of_out, &options) });
        [out.bytes(), lse.bytes()]
    }
}

/// A sequence beside the bytes of its keys and values.
#[derive(Clone)]
struct Shadow {
    id: u64,
    rows: [Vec<u8>; 2],
}

/// New keys and values: tensors, and their bytes of each sequence.
fn new_rows(dtype: DType, batch: Option<usize>, new: usize, seed: u32) -> [Memory; 2] {
    let shape = |dim| [batch.as_slice(), &[new, KV_HEADS, dim]].concat();
    [drawn(dtype, &shape(DIM), 2 * seed), drawn(dtype, &shape(DIM_V), 2 * seed + 1)]
}

fn append(cache: &Cache, dtype: DType, to: &mut [Shadow], new: usize, seed: u32) {
    let tensors = new_rows(dtype, (to.len() != 1).then_some(to.len()), new, seed);
    let ids: Vec<u64> = to.iter().map(|shadow| shadow.id).collect();
    done(cache.append(&ids, [&tensors[0].tensor(), &tensors[1].tensor()]));
    for (at, dim) in [DIM, DIM_V].into_iter().enumerate() {
        let row_bytes = new * KV_HEADS * dim * dtype.size_bytes();
        for (n, shadow) in to.iter_mut().enumerate() {
            shadow.rows[at].extend_from_slice(rows(&tensors[at].bytes(), n..n + 1, row_bytes));
        }
    }
}

/// Compares attention of all sequences with a call for each alone.
fn assert_as_alone(engine: &Owned, cache: &Cache, dtype: DType, of: &Call, shadows: &[Shadow]) {
    let (q_len, size) = (2, dtype.size_bytes());
    let ids: Vec<u64> = shadows.iter().map(|shadow| shadow.id).collect();
    let q = drawn(dtype, &[ids.len(), q_len, HEADS, DIM], 90);
    let [out, lse] = cache.attend(engine, &ids, &q, of);
    let [of_out, of_lse] = [q_len * HEADS * DIM_V * size, HEADS * q_len * lse_dtype(dtype).size_bytes()];
    for (b, shadow) in shadows.iter().enumerate() {
        assert_eq!(cache.length(shadow.id), shadow.rows[0].len() / (KV_HEADS * DIM * size));
        let q = q.bytes();
        let parts = [rows(&q, b..b + 1, q_len * HEADS * DIM * size), &shadow.rows[0], &shadow.rows[1]];
        let [one, one_lse] = alone(engine, dtype, parts, of);
        assert_eq!(rows(&out, b..b + 1, of_out), one, "{dtype}: sequence {b}");
        assert_eq!(rows(&lse, b..b + 1, of_lse), one_lse, "{dtype}: sequence {b}");
    }
}

#[test]
fn sequences_that_grow_fork_and_shrink_have_the_bits_of_calls_alone() {
    let engine = Owned::new(2);
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        for (options, has_vectors) in [(plain(), false), (many(), true)] {
            let mut of = Call::new(Function::KvCache, &engine, options);
            if has_vectors {
                of.put("sinks", drawn(dtype, &[HEADS], 6));
                of.put("alibi_slopes", drawn(dtype, &[HEADS], 7));
            }
            let cache = Cache::new(&form(dtype));
            let new = || Shadow { id: cache.add(), rows: [Vec::new(), Vec::new()] };
            let mut all = vec![new(), new()];
            assert_as_alone(&engine, &cache, dtype, &of, &all);
            append(&cache, dtype, &mut all[..1], 6, 1);
            append(&cache, dtype, &mut all, 5, 2);
            // The last page of the first one, 3 of 4 rows, is shared; each of the two then writes into it.
            let fork = Shadow { id: cache.fork(all[0].id), rows: all[0].rows.clone() };
            all.push(fork);
            append(&cache, dtype, &mut all[2..], 1, 3);
            append(&cache, dtype, &mut all, 3, 4);
            assert_as_alone(&engine, &cache, dtype, &of, &all);
            // SAFETY: alive.
            done(unsafe { rapt_kv_cache_truncate(cache.0, all[0].id, 9) });
            for (rows, dim) in all[0].rows.iter_mut().zip([DIM, DIM_V]) {
                rows.truncate(9 * KV_HEADS * dim * dtype.size_bytes());
            }
            append(&cache, dtype, &mut all[..1], 2, 5);
            // SAFETY: alive.
            done(unsafe { rapt_kv_cache_free(cache.0, all.remove(1).id) });
            // One sequence may be asked twice.
            all.push(all[0].clone());
            assert_as_alone(&engine, &cache, dtype, &of, &all);
            all.pop();
            for shadow in &all {
                // SAFETY: alive.
                done(unsafe { rapt_kv_cache_free(cache.0, shadow.id) });
            }
            // SAFETY: alive.
            let counts = unsafe { (rapt_kv_cache_free_pages(cache.0), rapt_kv_cache_num_sequences(cache.0)) };
            assert_eq!(counts, (PAGES, 0));
        }
    }
}

/// The codes of a form: no tensors.
pub(crate) fn asked(format: rapt_format, granularity: rapt_granularity, block_size: i64) -> rapt_codes {
    rapt_codes { head_dim: 0, ..codes(format, granularity, block_size) }
}

/// A tensor as the pages have it: dtype, shape and bytes.
fn told(tensor: &rapt_tensor) -> (i32, Vec<i64>, Vec<u8>) {
    // SAFETY: of a cache that lives: as many sizes as dimensions, and all bytes of its storage.
    unsafe {
        let shape = std::slice::from_raw_parts(tensor.shape, tensor.ndim as usize).to_vec();
        let bytes = std::slice::from_raw_parts(tensor.data.cast::<u8>(), tensor.storage_bytes as usize);
        (tensor.dtype, shape, bytes.to_vec())
    }
}

fn bytes_of(view: &View<'_>) -> Vec<u8> {
    let len = view.shape().iter().product::<usize>() * view.dtype().size_bytes();
    // SAFETY: a tensor of the cache, row-major.
    unsafe { std::slice::from_raw_parts(view.as_ptr(), len) }.to_vec()
}

#[test]
fn codes_are_those_of_the_rust_cache_and_are_read_where_they_lie() {
    use rapt_granularity::{RAPT_GRANULARITY_BLOCK as BLOCK, RAPT_GRANULARITY_OF_SHAPE as OF_SHAPE};
    let engine = Owned::new(2);
    let by_token = (OF_SHAPE, Granularity::Token);
    for (code, format, (granularity, by)) in [
        (rapt_format::RAPT_FORMAT_INT8, Format::Int8, by_token),
        (rapt_format::RAPT_FORMAT_UINT8, Format::Uint8, by_token),
        (rapt_format::RAPT_FORMAT_INT4, Format::Int4, (BLOCK, Granularity::Block(8))),
        (
            rapt_format::RAPT_FORMAT_E4M3FN,
            Format::E4m3fn,
            (rapt_granularity::RAPT_GRANULARITY_TOKEN, Granularity::Token),
        ),
        (rapt_format::RAPT_FORMAT_E5M2, Format::E5m2, by_token),
        (rapt_format::RAPT_FORMAT_MXFP8, Format::Mxfp8, (OF_SHAPE, Granularity::Block(32))),
        (rapt_format::RAPT_FORMAT_MXFP4, Format::Mxfp4, (OF_SHAPE, Granularity::Block(32))),
        (rapt_format::RAPT_FORMAT_NVFP4, Format::Nvfp4, (OF_SHAPE, Granularity::Block(16))),
    ] {
        let global = format.has_global_scale().then_some(0.01f32);
        let of_global = global.as_ref().map_or(null(), std::ptr::from_ref);
        let asked = asked(code, granularity, if granularity == BLOCK { 8 } else { 0 });
        let asked = rapt_codes { global_scale: of_global, ..asked };
        let scheme = Scheme::new(format, Some(by), ScaleLayout::Plain).unwrap();
        // Keys alone are codes, and then both.
        for v_too in [false, true] {
            let codes: [*const rapt_codes; 2] = [&raw const asked, if v_too { &raw const asked } else { null() }];
            let dtype = if v_too { 0 } else { form(DType::F32).dtype };
            let cache =
                Cache::new(&rapt_kv_cache_form { dtype, k_codes: codes[0], v_codes: codes[1], ..form(DType::F32) });
            let mut rust = KvCache::new(KvCacheForm {
                head_dim_v: DIM_V,
                k_codes: Some(scheme),
                v_codes: v_too.then_some(scheme),
                k_global_scale: global,
                v_global_scale: global.filter(|_| v_too),
                ..KvCacheForm::new(PAGES, PAGE_SIZE, KV_HEADS, DIM, DType::F32)
            })
            .unwrap();
            let (ids, rust_ids) = ([cache.add(), cache.add()], [rust.new_sequence(), rust.new_sequence()]);
            for (step, new) in [7, 1, 4].into_iter().enumerate() {
                let [k, v] = new_rows(DType::F32, Some(2), new, 60 + step as u32);
                done(cache.append(&ids, [&k.tensor(), &v.tensor()]));
                let [of_k, of_v] = [&k, &v].map(Memory::to_f32s);
                let view = |data, dim| View::contiguous("new", data, [2, new, KV_HEADS, dim].into()).unwrap();
                rust.append_batch(&rust_ids, &view(&of_k, DIM), &view(&of_v, DIM_V)).unwrap();
            }
            let pages = cache.pages();
            assert_eq!(pages.v_codes.is_null(), !v_too);
            assert_same_pages(format, &pages, &rust);
            let [table, lengths] = cache.tables(&ids);
            let (rust_table, ends) = (rust.page_table(&rust_ids).unwrap(), [12, 12]);
            let expected: Vec<i32> =
                rust_table.to_vec::<i32>().unwrap().chunks(3).flat_map(|row| [row, &[-1]].concat()).collect();
            assert_eq!((table.read(i32::from_le_bytes), lengths.read(i32::from_le_bytes)), (expected, ends.to_vec()));
            assert_read_in_place(&engine, &cache, &ids, &pages);
        }
    }
}

fn assert_same_pages(format: Format, pages: &rapt_kv_cache_pages, rust: &KvCache) {
    let of_rust = [
        (rust.k_pages().unwrap(), rust.k_codes().unwrap(), pages.k_cache, pages.k_codes),
        (rust.v_pages().unwrap(), rust.v_codes().unwrap(), pages.v_cache, pages.v_codes),
    ];
    for (rows, codes, of_rows, of_codes) in of_rust {
        // SAFETY: of a cache that lives.
        let (of_rows, of_codes) = unsafe { (&*of_rows, of_codes.as_ref()) };
        let same = |view: &View<'_>, tensor: &rapt_tensor| {
            let shape: Vec<i64> = sizes(view.shape());
            assert_eq!(told(tensor), (i32::from(view.dtype().code()), shape, bytes_of(view)), "{format}");
        };
        same(&rows, of_rows);
        assert_eq!(codes.is_some(), of_codes.is_some());
        let (Some(codes), Some(of_codes)) = (codes, of_codes) else { continue };
        // SAFETY: as above.
        let (descale, zero_point, global) =
            unsafe { (&*of_codes.descale, of_codes.zero_point.as_ref(), of_codes.global_scale.as_ref()) };
        same(&codes.descale.view(), descale);
        assert_eq!((codes.zero_point.is_some(), codes.global_scale), (zero_point.is_some(), global.copied()));
        if let (Some(ours), Some(zero_point)) = (codes.zero_point, zero_point) {
            same(&ours.view(), zero_point);
        }
    }
}

/// rapt_attention_with_kvcache() on the pages of the cache gives what the cache gives.
fn assert_read_in_place(engine: &Owned, cache: &Cache, ids: &[u64], pages: &rapt_kv_cache_pages) {
    let q = drawn(DType::F32, &[ids.len(), 1, HEADS, DIM], 70);
    let [expected, expected_lse] = cache.attend(engine, ids, &q, &Call::new(Function::KvCache, engine, many()));
    let [table, lengths] = cache.tables(ids);
    let out = place(DType::F32, &[ids.len(), 1, HEADS, DIM_V]);
    let lse = place(DType::F32, &[ids.len(), HEADS, 1]);
    let [q, table, lengths, of_out, of_lse] = [&q, &table, &lengths, &out, &lse].map(Memory::tensor);
    let options = rapt_options { k_codes: pages.k_codes, v_codes: pages.v_codes, lse: &raw const of_lse, ..many() };
    let given = rapt_kvcache {
        size: size_of::<rapt_kvcache>(),
        k_cache: pages.k_cache,
        v_cache: pages.v_cache,
        cache_seqlens: &raw const lengths,
        page_table: &raw const table,
        k: null(),
        v: null(),
    };
    // SAFETY: all alive, and the cache is only read.
    done(unsafe { rapt_attention_with_kvcache(engine.0, &q, &given, &of_out, &options) });
    assert_eq!((out.bytes(), lse.bytes()), (expected, expected_lse));
}

#[test]
fn a_number_of_rust_names_the_same_sequence_in_c_and_no_two_caches_share_one() {
    let (one, other) = (Cache::new(&form(DType::F32)), Cache::new(&form(DType::F32)));
    let (id, theirs) = (one.add(), other.add());
    assert_ne!(id, theirs);
    assert_ne!(SequenceId::from_number(id), SequenceId::from_number(theirs));
    let mut length = 0;
    // SAFETY: alive, and a number of this frame.
    assert_eq!(unsafe { rapt_kv_cache_length(one.0, theirs, &raw mut length) }, RAPT_ERROR_INDEX);
}

#[test]
fn threads_attend_while_another_one_appends() {
    let (engine, cache) = (Owned::new(2), Cache::new(&form(DType::F32)));
    let of = || Call::new(Function::KvCache, &engine, many());
    let mut read = [Shadow { id: cache.add(), rows: [Vec::new(), Vec::new()] }];
    append(&cache, DType::F32, &mut read, 13, 1);
    let q = || drawn(DType::F32, &[1, 2, HEADS, DIM], 5);
    let expected = cache.attend(&engine, &[read[0].id], &q(), &of());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..40 {
                    assert_eq!(cache.attend(&engine, &[read[0].id], &q(), &of()), expected);
                }
            });
        }
        scope.spawn(|| {
            for step in 0..40 {
                let fork = cache.fork(read[0].id);
                append(&cache, DType::F32, &mut [Shadow { id: fork, rows: [Vec::new(), Vec::new()] }], 7, step);
                // SAFETY: alive.
                done(unsafe { rapt_kv_cache_free(cache.0, fork) });
            }
        });
    });
    assert_as_alone(&engine, &cache, DType::F32, &of(), &read);
}
