//! What a rapt_kv_cache refuses: each case with its code and a message that names the offender; no byte of the cache, its sequences and the
//! caller's tensors has changed, and cache and engine serve on.

use std::ptr::{null, null_mut};

use engine::DType;
use rapt_c::rapt_error::{self, *};
use rapt_c::{
    rapt_codes, rapt_device, rapt_dtype, rapt_format, rapt_granularity, rapt_kv_cache_append,
    rapt_kv_cache_append_batch, rapt_kv_cache_attention, rapt_kv_cache_create, rapt_kv_cache_destroy,
    rapt_kv_cache_fork, rapt_kv_cache_form, rapt_kv_cache_free, rapt_kv_cache_free_pages, rapt_kv_cache_get_pages,
    rapt_kv_cache_length, rapt_kv_cache_new_sequence, rapt_kv_cache_num_sequences, rapt_kv_cache_page_table,
    rapt_kv_cache_pages, rapt_kv_cache_seqlens, rapt_kv_cache_truncate, rapt_last_error_code, rapt_options,
    rapt_tensor,
};

use crate::handles::Memory;
use crate::kv_cache::{Cache, PAGE_SIZE, PAGES, asked, form};
use crate::ragged::{DIM, DIM_V, HEADS, KV_HEADS, drawn, place, plain, sizes};
use crate::support::{Owned, last_error};

fn assert_refused(answer: rapt_error, code: rapt_error, says: &str) {
    let message = last_error();
    assert_eq!((answer, rapt_last_error_code()), (code, code), "`{says}`: {message}");
    assert!(says.split('|').all(|says| message.contains(says)), "`{message}` lacks `{says}`");
}

#[test]
fn a_form_that_is_wrong_makes_no_cache() {
    let wrong = |code, says: &str, bend: &dyn Fn(&mut rapt_kv_cache_form)| {
        let mut given = form(DType::F32);
        bend(&mut given);
        let mut cache = null_mut();
        // SAFETY: structs of this frame, and a pointer of it.
        assert_refused(unsafe { rapt_kv_cache_create(&raw const given, &raw mut cache) }, code, says);
        assert!(cache.is_null(), "{says}: written on refusal");
    };
    wrong(RAPT_ERROR_OPTION, "form.size = 8", &|form| form.size = 8);
    for (says, at) in [("num_pages", 0), ("page_size", 1), ("num_kv_heads", 2), ("head_dim", 3), ("head_dim_v", 4)] {
        for size in [-1, 0, i64::MIN] {
            if (at, size) != (4, 0) {
                wrong(RAPT_ERROR_OPTION, &format!("{says} = {size}|a number from 1 up"), &|form| {
                    *[
                        &mut form.num_pages,
                        &mut form.page_size,
                        &mut form.num_kv_heads,
                        &mut form.head_dim,
                        &mut form.head_dim_v,
                    ][at] = size;
                });
            }
        }
    }
    wrong(RAPT_ERROR_OPTION, "num_pages|int32", &|form| form.num_pages = 1 << 31);
    wrong(RAPT_ERROR_SHAPE, "k_cache", &|form| (form.num_kv_heads, form.head_dim) = (1 << 40, 1 << 20));
    wrong(RAPT_ERROR_UNSUPPORTED_DTYPE, "k has dtype", &|form| form.dtype = 0);
    wrong(RAPT_ERROR_UNSUPPORTED_DTYPE, "k has dtype int64", &|form| form.dtype = rapt_dtype::RAPT_DTYPE_I64 as i32);
    wrong(RAPT_ERROR_UNSUPPORTED_DTYPE, "code 99", &|form| form.dtype = 99);
    let with = |code, says: &str, codes: rapt_codes| wrong(code, says, &|form| form.v_codes = &raw const codes);
    let int8 = || asked(rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0);
    let nvfp4 = || asked(rapt_format::RAPT_FORMAT_NVFP4, rapt_granularity::RAPT_GRANULARITY_OF_SHAPE, 0);
    let memory = Memory::place(DType::F32, &[1]);
    let (tensor, scale, nan) = (memory.tensor(), 0.5f32, f32::NAN);
    with(RAPT_ERROR_OPTION, "v_codes.size = 3", rapt_codes { size: 3, ..int8() });
    with(RAPT_ERROR_OPTION, "v_codes.format = 0", rapt_codes { format: 0, ..int8() });
    with(RAPT_ERROR_OPTION, "v_codes.granularity = 9", rapt_codes { granularity: 9, ..int8() });
    with(RAPT_ERROR_OPTION, "v_codes.block_size = 4", rapt_codes { block_size: 4, ..int8() });
    with(RAPT_ERROR_OPTION, "v_codes.head_dim = 16", rapt_codes { head_dim: 16, ..int8() });
    with(RAPT_ERROR_OPTION, "v_descale = a tensor|NULL", rapt_codes { descale: &raw const tensor, ..int8() });
    with(RAPT_ERROR_OPTION, "v_zero_point = a tensor|NULL", rapt_codes { zero_point: &raw const tensor, ..int8() });
    let says = "v_global_scale|form->v_codes->global_scale = NULL";
    with(RAPT_ERROR_OPTION, says, rapt_codes { global_scale: &raw const scale, ..int8() });
    with(RAPT_ERROR_UNSUPPORTED_DTYPE, "v_global_scale|point form->v_codes->global_scale to it", nvfp4());
    with(RAPT_ERROR_NUMBER, "NaN", rapt_codes { global_scale: &raw const nan, ..nvfp4() });
    let bent = (&raw const scale).wrapping_byte_add(1);
    with(RAPT_ERROR_POINTER, "v_codes->global_scale leads to", rapt_codes { global_scale: bent, ..nvfp4() });
    let head = asked(rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_HEAD, 0);
    with(RAPT_ERROR_UNSUPPORTED, "factors by head|granularity token or block", head);
    wrong(RAPT_ERROR_POINTER, "k_codes leads to", &|form| form.k_codes = null::<rapt_codes>().wrapping_byte_add(4));
    let mut cache = null_mut();
    // SAFETY: NULL, and a struct and a pointer of this frame.
    unsafe {
        assert_refused(rapt_kv_cache_create(null(), &raw mut cache), RAPT_ERROR_POINTER, "form is NULL");
        assert_refused(rapt_kv_cache_create(&form(DType::F32), null_mut()), RAPT_ERROR_POINTER, "cache is NULL");
    }
}

/// A cache with two sequences of 5 keys, and tensors for calls.
struct Setting {
    engine: Owned,
    cache: Cache,
    ids: [u64; 2],
    k: Memory,
    v: Memory,
    q: Memory,
    out: Memory,
}

type Bytes = (Vec<Vec<u8>>, Vec<i32>, Vec<i32>, usize, usize);

impl Setting {
    fn new() -> Self {
        let cache = Cache::new(&form(DType::F32));
        let ids = [cache.add(), cache.add()];
        let [k, v] = [DIM, DIM_V].map(|dim| drawn(DType::F32, &[2, 5, KV_HEADS, dim], dim as u32));
        assert_eq!(cache.append(&ids, [&k.tensor(), &v.tensor()]), RAPT_OK, "{}", last_error());
        let (q, out) = (drawn(DType::F32, &[2, 1, HEADS, DIM], 3), place(DType::F32, &[2, 1, HEADS, DIM_V]));
        Setting { engine: Owned::new(1), cache, ids, k, v, q, out }
    }

    /// All that a refused call must leave as it is.
    fn bytes(&self) -> Bytes {
        let pages = self.cache.pages();
        let of = |tensor: *const rapt_tensor| {
            // SAFETY: the memory of a cache that lives.
            unsafe {
                std::slice::from_raw_parts((*tensor).data.cast::<u8>(), (*tensor).storage_bytes as usize).to_vec()
            }
        };
        let [table, lengths] = self.cache.tables(&self.ids).map(|memory| memory.read(i32::from_le_bytes));
        // SAFETY: alive.
        let counts = unsafe { (rapt_kv_cache_free_pages(self.cache.0), rapt_kv_cache_num_sequences(self.cache.0)) };
        let tensors = [&self.k, &self.v, &self.q, &self.out].map(Memory::bytes);
        ([&tensors[..], &[of(pages.k_cache), of(pages.v_cache)]].concat(), table, lengths, counts.0, counts.1)
    }

    fn refuses(&self, code: rapt_error, says: &str, call: impl FnOnce(&Setting) -> rapt_error) {
        let before = self.bytes();
        assert_refused(call(self), code, says);
        assert!(before == self.bytes(), "{says}: something changed");
    }

    fn attend(&self, ids: &[u64], bend: impl FnOnce(&mut [rapt_tensor; 2], &mut rapt_options)) -> rapt_error {
        let (mut tensors, mut options) = ([self.q.tensor(), self.out.tensor()], plain());
        bend(&mut tensors, &mut options);
        let [q, out] = &tensors;
        // SAFETY: all alive; what is not said rightly is refused.
        unsafe { rapt_kv_cache_attention(self.engine.0, self.cache.0, q, ids.as_ptr(), ids.len(), out, &options) }
    }

    fn append(&self, ids: &[u64], bend: impl FnOnce(&mut [rapt_tensor; 2])) -> rapt_error {
        let mut tensors = [self.k.tensor(), self.v.tensor()];
        bend(&mut tensors);
        let [k, v] = &tensors;
        self.cache.append(ids, [k, v])
    }

    fn serves_on(&self) {
        assert_eq!(self.append(&self.ids, |_| {}), RAPT_OK, "{}", last_error());
        assert_eq!(self.attend(&self.ids, |_, _| {}), RAPT_OK, "{}", last_error());
    }
}

#[test]
fn a_sequence_that_the_cache_does_not_have_is_refused_by_each_call() {
    let setting = Setting::new();
    let gone = setting.cache.fork(setting.ids[0]);
    let cache = setting.cache.0;
    // SAFETY: alive.
    assert_eq!(unsafe { rapt_kv_cache_free(cache, gone) }, RAPT_OK);
    let says = format!("the cache has no sequence {gone}|rapt_kv_cache_new_sequence()");
    let says = says.as_str();
    let (mut number, mut length) = (7u64, 7usize);
    let ids = [setting.ids[0], gone];
    let (table, lengths) = (place(DType::I32, &[2, 8]), place(DType::I32, &[2]));
    // SAFETY: alive, and memory of this frame.
    unsafe {
        let code = RAPT_ERROR_INDEX;
        setting.refuses(code, says, |_| rapt_kv_cache_fork(cache, gone, &raw mut number));
        setting.refuses(code, says, |_| rapt_kv_cache_truncate(cache, gone, 0));
        setting.refuses(code, says, |_| rapt_kv_cache_free(cache, gone));
        setting.refuses(code, says, |_| rapt_kv_cache_length(cache, gone, &raw mut length));
        setting.refuses(code, says, |of| of.append(&ids, |_| {}));
        setting.refuses(code, says, |of| of.attend(&ids, |_, _| {}));
        setting.refuses(code, says, |_| rapt_kv_cache_page_table(cache, ids.as_ptr(), 2, &table.tensor()));
        setting.refuses(code, says, |_| rapt_kv_cache_seqlens(cache, ids.as_ptr(), 2, &lengths.tensor()));
    }
    let before = [place(DType::I32, &[2, 8]), place(DType::I32, &[2])];
    assert_eq!((number, length), (7, 7), "written on refusal");
    assert_eq!([table.bytes(), lengths.bytes()], before.map(|memory| memory.bytes()));
    setting.serves_on();
}

#[test]
fn keys_for_which_there_is_no_page_are_appended_to_no_sequence() {
    let setting = Setting::new();
    let new = (PAGES - 4) / 2 * PAGE_SIZE + 4;
    let [k, v] = [DIM, DIM_V].map(|dim| drawn(DType::F32, &[2, new, KV_HEADS, dim], 9));
    // Each has 3 rows of its second page left.
    let says = format!("{} more pages are needed, the cache has {} free", PAGES - 4 + 2, PAGES - 4);
    setting.refuses(RAPT_ERROR_OUT_OF_MEMORY, &says, |of| of.cache.append(&of.ids, [&k.tensor(), &v.tensor()]));
    setting.refuses(RAPT_ERROR_OPTION, "length = 6|0 to 5", |of| {
        // SAFETY: alive.
        unsafe { rapt_kv_cache_truncate(of.cache.0, of.ids[0], 6) }
    });
    setting.serves_on();
}

#[test]
fn new_keys_that_do_not_fit_are_refused() {
    let setting = Setting::new();
    let twice = [setting.ids[0]; 2];
    setting.refuses(RAPT_ERROR_OPTION, "ids = |twice|each sequence once", |of| of.append(&twice, |_| {}));
    setting.refuses(RAPT_ERROR_SHAPE, "k has batch 2|ids", |of| of.append(&[of.ids[0], of.ids[1], 0], |_| {}));
    setting.refuses(RAPT_ERROR_SHAPE, "new keys and values", |of| of.append(&of.ids, |[k, _]| k.ndim = 3));
    let f16 = rapt_dtype::RAPT_DTYPE_F16 as i32;
    setting.refuses(RAPT_ERROR_DTYPE_MISMATCH, "k has dtype float16|k in RAPT_DTYPE_F32", |of| {
        of.append(&of.ids, |[k, _]| k.dtype = f16)
    });
    setting.refuses(RAPT_ERROR_DEVICE, "v|cuda:0", |of| {
        of.append(&of.ids, |[_, v]| v.device = rapt_device::RAPT_DEVICE_CUDA as i32)
    });
    setting.refuses(RAPT_ERROR_LAYOUT, "v of shape", |of| of.append(&of.ids, |[_, v]| v.storage_bytes = 8));
    for (says, shape) in [
        ("k has num_kv_heads 3", [2, 5, KV_HEADS + 1, DIM]),
        ("k has head_dim 8", [2, 5, KV_HEADS, 8]),
        ("v has new keys 5, k has 4", [2, 4, KV_HEADS, DIM]),
    ] {
        let shape = sizes(&shape);
        setting.refuses(RAPT_ERROR_SHAPE, &says[..says.len().min(12)], |of| {
            of.append(&of.ids, |[k, _]| (k.shape, k.storage_bytes) = (shape.as_ptr(), 0))
        });
    }
    // Keys that lie in the cache's own pages, of which C may have an address.
    let pages = setting.cache.pages();
    // SAFETY: of a cache that lives.
    let own = unsafe { (*pages.v_cache).data };
    setting.refuses(RAPT_ERROR_LAYOUT, "v_cache|shares memory with k", |of| {
        of.append(&of.ids, |[k, _]| (k.data, k.storage_bytes) = (own, 0))
    });
    setting.serves_on();
}

#[test]
fn numbers_without_a_code_are_refused() {
    let codes = asked(rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0);
    let cache = Cache::new(&rapt_kv_cache_form { k_codes: &raw const codes, ..form(DType::F32) });
    let id = cache.add();
    let [k, v] = [DIM, DIM_V].map(|dim| drawn(DType::F32, &[1, KV_HEADS, dim], 1));
    k.set(4, &f32::NAN.to_le_bytes());
    assert_refused(cache.append(&[id], [&k.tensor(), &v.tensor()]), RAPT_ERROR_NUMBER, "k as codes|NaN|int8");
    assert_eq!(cache.length(id), 0);
    k.set(4, &1f32.to_le_bytes());
    assert_eq!(cache.append(&[id], [&k.tensor(), &v.tensor()]), RAPT_OK, "{}", last_error());
}

#[test]
fn attention_refuses_what_does_not_fit_and_writes_nothing() {
    let setting = Setting::new();
    let codes = asked(rapt_format::RAPT_FORMAT_INT8, rapt_granularity::RAPT_GRANULARITY_TOKEN, 0);
    let mask = Memory::place(DType::Bool, &[1]).tensor();
    let one = setting.ids[..1].to_vec();
    setting.refuses(RAPT_ERROR_SHAPE, "ids|sequences", |of| of.attend(&one, |_, _| {}));
    setting.refuses(RAPT_ERROR_UNSUPPORTED, "k_codes|the cache knows its own", |of| {
        of.attend(&of.ids, |_, options| options.k_codes = &raw const codes)
    });
    setting.refuses(RAPT_ERROR_UNSUPPORTED, "v_codes|the cache knows its own", |of| {
        of.attend(&of.ids, |_, options| options.v_codes = &raw const codes)
    });
    setting.refuses(RAPT_ERROR_UNSUPPORTED, "a mask", |of| {
        of.attend(&of.ids, |_, options| options.mask = &raw const mask)
    });
    setting.refuses(RAPT_ERROR_OPTION, "causal = 9", |of| of.attend(&of.ids, |_, options| options.causal = 9));
    setting.refuses(RAPT_ERROR_OPTION, "compute = 3", |of| of.attend(&of.ids, |_, options| options.compute = 3));
    setting.refuses(RAPT_ERROR_UNSUPPORTED, "compute=\"int8\" over a cache that grows", |of| {
        of.attend(&of.ids, |_, options| options.compute = 1)
    });
    setting
        .refuses(RAPT_ERROR_UNSUPPORTED, "compute=\"fp8\"", |of| of.attend(&of.ids, |_, options| options.compute = 2));
    setting.refuses(RAPT_ERROR_SHAPE, "q", |of| of.attend(&of.ids, |[q, _], _| q.ndim = 3));
    setting.refuses(RAPT_ERROR_DTYPE_MISMATCH, "q|float32", |of| {
        of.attend(&of.ids, |[q, _], _| q.dtype = rapt_dtype::RAPT_DTYPE_BF16 as i32)
    });
    let pages = setting.cache.pages();
    // SAFETY: of a cache that lives.
    let own = unsafe { (*pages.k_cache).data };
    setting.refuses(RAPT_ERROR_LAYOUT, "out shares memory with k_cache", |of| {
        of.attend(&of.ids, |[_, out], _| (out.data, out.storage_bytes) = (own, 0))
    });
    setting.serves_on();
}

#[test]
fn tables_that_are_too_short_or_of_another_kind_are_refused() {
    let setting = Setting::new();
    let table = |says: &str, code, memory: &Memory, bend: &dyn Fn(&mut rapt_tensor)| {
        let (mut tensor, before) = (memory.tensor(), memory.bytes());
        bend(&mut tensor);
        setting.refuses(code, says, |of| {
            // SAFETY: alive; what is not said rightly is refused.
            unsafe { rapt_kv_cache_page_table(of.cache.0, of.ids.as_ptr(), 2, &raw const tensor) }
        });
        assert_eq!(memory.bytes(), before, "{says}");
    };
    let place = |dtype, shape: &[usize]| place(dtype, shape);
    table("page_table has 1 entries|5 keys", RAPT_ERROR_SHAPE, &place(DType::I32, &[2, 1]), &|_| {});
    table("page_table has sequences 3|ids", RAPT_ERROR_SHAPE, &place(DType::I32, &[3, 2]), &|_| {});
    table("[num_ids, entries]", RAPT_ERROR_SHAPE, &place(DType::I32, &[2]), &|_| {});
    table("page_table has dtype int64", RAPT_ERROR_DTYPE_MISMATCH, &place(DType::I64, &[2, 2]), &|_| {});
    let strides = [0, 1];
    table("page_table", RAPT_ERROR_LAYOUT, &place(DType::I32, &[2, 2]), &|table| table.strides = strides.as_ptr());
    // SAFETY: of a cache that lives.
    let own = unsafe { (*setting.cache.pages().k_cache).data };
    table("k_cache|shares memory with page_table", RAPT_ERROR_LAYOUT, &place(DType::I32, &[2, 2]), &|table| {
        (table.data, table.storage_bytes) = (own, 0);
    });
    for (says, code, memory) in [
        ("cache_seqlens", RAPT_ERROR_SHAPE, place(DType::I32, &[3])),
        ("cache_seqlens has dtype", RAPT_ERROR_DTYPE_MISMATCH, place(DType::F32, &[2])),
    ] {
        setting.refuses(code, says, |of| {
            // SAFETY: as above.
            unsafe { rapt_kv_cache_seqlens(of.cache.0, of.ids.as_ptr(), 2, &memory.tensor()) }
        });
    }
    setting.serves_on();
}

#[test]
fn null_is_an_answer_everywhere() {
    let setting = Setting::new();
    let (cache, engine, ids) = (setting.cache.0, setting.engine.0, setting.ids);
    let [k, v, q, out] = [&setting.k, &setting.v, &setting.q, &setting.out].map(Memory::tensor);
    let (k, v, q, out) = (&raw const k, &raw const v, &raw const q, &raw const out);
    let (mut number, mut length) = (0, 0);
    let mut pages = setting.cache.pages();
    let is = |says: &str, call: &mut dyn FnMut() -> rapt_error| {
        let says = format!("{says} is NULL");
        setting.refuses(RAPT_ERROR_POINTER, &says, |_| call());
    };
    // SAFETY: NULL, or alive and of this frame.
    unsafe {
        is("cache", &mut || rapt_kv_cache_new_sequence(null_mut(), &raw mut number));
        is("id", &mut || rapt_kv_cache_new_sequence(cache, null_mut()));
        is("cache", &mut || rapt_kv_cache_fork(null_mut(), ids[0], &raw mut number));
        is("fork", &mut || rapt_kv_cache_fork(cache, ids[0], null_mut()));
        is("cache", &mut || rapt_kv_cache_truncate(null_mut(), ids[0], 0));
        is("cache", &mut || rapt_kv_cache_free(null_mut(), ids[0]));
        is("cache", &mut || rapt_kv_cache_length(null(), ids[0], &raw mut length));
        is("length", &mut || rapt_kv_cache_length(cache, ids[0], null_mut()));
        is("cache", &mut || rapt_kv_cache_append(null_mut(), ids[0], k, v));
        is("k", &mut || rapt_kv_cache_append(cache, ids[0], null(), v));
        is("v", &mut || rapt_kv_cache_append(cache, ids[0], k, null()));
        is("ids", &mut || rapt_kv_cache_append_batch(cache, null(), 2, k, v));
        is("cache", &mut || rapt_kv_cache_page_table(null(), ids.as_ptr(), 2, out));
        is("ids", &mut || rapt_kv_cache_page_table(cache, null(), 2, out));
        is("page_table", &mut || rapt_kv_cache_page_table(cache, ids.as_ptr(), 2, null()));
        is("cache_seqlens", &mut || rapt_kv_cache_seqlens(cache, ids.as_ptr(), 2, null()));
        is("cache", &mut || rapt_kv_cache_get_pages(null(), &raw mut pages));
        is("pages", &mut || rapt_kv_cache_get_pages(cache, null_mut()));
        is("engine", &mut || rapt_kv_cache_attention(null(), cache, q, ids.as_ptr(), 2, out, null()));
        is("cache", &mut || rapt_kv_cache_attention(engine, null(), q, ids.as_ptr(), 2, out, null()));
        is("q", &mut || rapt_kv_cache_attention(engine, cache, null(), ids.as_ptr(), 2, out, null()));
        is("ids", &mut || rapt_kv_cache_attention(engine, cache, q, null(), 2, out, null()));
        is("out", &mut || rapt_kv_cache_attention(engine, cache, q, ids.as_ptr(), 2, null(), null()));
        setting.refuses(RAPT_ERROR_OPTION, "ids is|bytes", |_| {
            rapt_kv_cache_attention(engine, cache, q, ids.as_ptr(), usize::MAX, out, null())
        });
        setting.refuses(RAPT_ERROR_OPTION, "pages.size = 1", |_| {
            let mut pages = rapt_kv_cache_pages { size: 1, ..pages };
            rapt_kv_cache_get_pages(cache, &raw mut pages)
        });
        assert_eq!((rapt_kv_cache_free_pages(null()), rapt_kv_cache_num_sequences(null())), (0, 0));
        rapt_kv_cache_destroy(null_mut());
        // Without options it is plain attention.
        assert_eq!(rapt_kv_cache_attention(engine, cache, q, ids.as_ptr(), 2, out, null()), RAPT_OK);
    }
    setting.serves_on();
}
