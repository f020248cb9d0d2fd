//! A cache of keys and values for C, which owns its pages: a handle of [`KvCache`].
//!
//! ```text
//! rapt_kv_cache_create(form) ─► rapt_kv_cache ─┬─ new_sequence, fork, truncate, free, append     alone
//!                                              └─ length, page_table, attention                  any number at once
//! rapt_kv_cache_get_pages ─► rapt_kv_cache_pages, page_table, seqlens ─► rapt_attention_with_kvcache, over the same memory
//! ```
//! A lock stands for the borrows of Rust: calls that change a cache wait for all others. What a caller gives may lie in the pages, which
//! borrows exclude in Rust, and is then refused here. Deliberately absent: choosing which sequence gives way when pages run out.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use engine::quant::{QuantError, Scheme};
use engine::{
    CacheCodes, DType, Error, Granularity, KvCache, KvCacheForm, KvCacheQueries, Queue, SequenceId, Tensor, View,
    ViewMut, prove_injective,
};

use crate::abi::{
    rapt_codes, rapt_device, rapt_error, rapt_granularity, rapt_kv_cache_form, rapt_kv_cache_pages, rapt_options,
    rapt_scale_layout, rapt_tensor,
};
use crate::handle::{create, destroy};
use crate::ragged::{Asked, absent, in_host_memory};
use crate::rapt_engine;
use crate::read::{CodesNames, dtype_of, format_code, scheme, struct_size, to_read, to_write, view, view_mut};
use crate::refusal::{Refusal, guard};

/// Keys and values of many sequences, in pages that it owns; see rapt_kv_cache_create().
#[allow(non_camel_case_types, reason = "a name of rapt.h")]
pub struct rapt_kv_cache {
    cache: RwLock<KvCache>,
    k: PagesTold,
    v: PagesTold,
}

/// A tensor of the cache, as C sees it. Boxed: pointers lead to it.
struct Told {
    tensor: rapt_tensor,
    /// Shape and strides, where `tensor` leads to.
    _sizes: [Vec<i64>; 2],
}

impl Told {
    fn new(view: &View<'_>) -> Box<Told> {
        // The memory was had for these sizes, so they fit.
        let shape: Vec<i64> = view.shape().iter().map(|&size| size as i64).collect();
        let strides: Vec<i64> = view.strides().iter().map(|&stride| stride as i64).collect();
        let tensor = rapt_tensor {
            data: view.as_ptr().cast_mut().cast(),
            dtype: view.dtype().code().into(),
            device: rapt_device::RAPT_DEVICE_CPU as i32,
            device_index: 0,
            ndim: shape.len() as i32,
            shape: shape.as_ptr(),
            strides: strides.as_ptr(),
            storage_bytes: view.reach_bytes().1 as i64,
            storage: std::ptr::null(),
        };
        Box::new(Told { tensor, _sizes: [shape, strides] })
    }
}

/// The memory of keys, or of values, as C sees it.
struct PagesTold {
    rows: Box<Told>,
    descale: Option<Box<Told>>,
    zero_point: Option<Box<Told>>,
    global_scale: Option<Box<f32>>,
    codes: Option<rapt_codes>,
}

impl PagesTold {
    fn new(rows: &View<'_>, codes: Option<&CacheCodes<'_>>) -> PagesTold {
        let mut told = PagesTold {
            rows: Told::new(rows),
            descale: codes.map(|codes| Told::new(&codes.descale.view())),
            zero_point: codes.and_then(|codes| Some(Told::new(&codes.zero_point.as_ref()?.view()))),
            global_scale: codes.and_then(|codes| codes.global_scale).map(Box::new),
            codes: None,
        };
        told.codes = codes.map(|codes| {
            let tensor = |of: &Option<Box<Told>>| of.as_ref().map_or(std::ptr::null(), |told| &raw const told.tensor);
            let (granularity, block_size) = match codes.granularity {
                Some(Granularity::Block(size)) => (rapt_granularity::RAPT_GRANULARITY_BLOCK, size as i64),
                _ => (rapt_granularity::RAPT_GRANULARITY_TOKEN, 0),
            };
            rapt_codes {
                size: size_of::<rapt_codes>(),
                format: format_code(codes.format),
                granularity: granularity as i32,
                block_size,
                head_dim: codes.head_dim.map_or(0, |dim| dim as i64),
                descale: tensor(&told.descale),
                zero_point: tensor(&told.zero_point),
                global_scale: told.global_scale.as_ref().map_or(std::ptr::null(), |scale| &raw const **scale),
                scale_layout: rapt_scale_layout::RAPT_SCALE_LAYOUT_PLAIN as i32,
            }
        });
        told
    }

    /// Refuses a tensor of the caller that lies in this memory.
    fn check_apart(
        &self,
        [cache, descale, zero_point]: [&'static str; 3],
        (other, view): (&'static str, &View<'_>),
    ) -> Result<(), Refusal> {
        let tensors =
            [(cache, Some(&self.rows)), (descale, self.descale.as_ref()), (zero_point, self.zero_point.as_ref())];
        for (tensor, told) in tensors {
            let Some(told) = told else { continue };
            let ((before, after), address) = (view.reach_bytes(), view.address());
            let own = told.tensor.data as usize;
            let end = own + told.tensor.storage_bytes as usize;
            if address.wrapping_add_signed(before) < end && own < address.wrapping_add_signed(after) {
                return Err(Error::OutputOverlaps { tensor, other }.into());
            }
        }
        Ok(())
    }
}

impl rapt_kv_cache {
    fn new(form: KvCacheForm) -> Result<Self, Refusal> {
        let cache = KvCache::new(form).map_err(|error| match error {
            QuantError::Core(error) => Refusal::Form(error),
            error => Refusal::Quant { tensor: "k or v", error },
        })?;
        let (k, v) = (
            PagesTold::new(&cache.k_pages()?, cache.k_codes()?.as_ref()),
            PagesTold::new(&cache.v_pages()?, cache.v_codes()?.as_ref()),
        );
        Ok(rapt_kv_cache { cache: RwLock::new(cache), k, v })
    }

    /// # Safety
    /// A cache lives at `cache` for 'a, or it is NULL.
    unsafe fn at<'a>(cache: *const rapt_kv_cache) -> Result<&'a Self, Refusal> {
        // SAFETY: neither NULL nor unaligned; the rest is the caller's word.
        to_read(cache, "cache").map(|cache| unsafe { &*cache })
    }

    fn read(&self) -> RwLockReadGuard<'_, KvCache> {
        // What changes a cache is whole or did nothing.
        self.cache.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, KvCache> {
        self.cache.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a tensor of the caller that lies in the cache's memory.
    fn check_apart(&self, name: &'static str, view: &View<'_>) -> Result<(), Refusal> {
        self.k.check_apart(["k_cache", "k_descale", "k_zero_point"], (name, view))?;
        self.v.check_apart(["v_cache", "v_descale", "v_zero_point"], (name, view))
    }

    /// Appends `k` and `v` by `append`.
    ///
    /// # Safety
    /// `k` and `v` as [`view`].
    unsafe fn append_by(
        &self,
        [k, v]: [*const rapt_tensor; 2],
        append: impl FnOnce(&mut KvCache, [&View<'_>; 2]) -> Result<(), QuantError>,
    ) -> Result<(), Refusal> {
        // SAFETY: the caller's word.
        let (k, v) = unsafe { (view("k", k)?, view("v", v)?) };
        self.check_apart("k", &k)?;
        self.check_apart("v", &v)?;
        let tensor = match (&self.k.codes, &self.v.codes) {
            (Some(_), Some(_)) => "k or v",
            (Some(_), None) => "k",
            (None, _) => "v",
        };
        append(&mut self.write(), [&k, &v]).map_err(|error| of_quant(error, tensor))
    }

    /// Writes `numbers` of sequences, of which row `n` begins row `n` of `place` and `rest` fills it.
    fn tell(&self, name: &'static str, mut place: ViewMut<'_>, numbers: &Tensor, rest: i32) -> Result<(), Refusal> {
        in_host_memory([(name, Some(&place.as_view()))])?;
        prove_injective(name, &place)?;
        self.check_apart(name, &place.as_view())?;
        if place.dtype() != DType::I32 {
            return Err(Error::OtherDtype { tensor: name, expected: DType::I32, got: place.dtype() }.into());
        }
        if place.shape().contains(&0) {
            return Ok(());
        }
        let (numbers, width) = (numbers.to_vec::<i32>()?, numbers.shape().last().copied().unwrap_or(0));
        let lines = place.shape()[..place.shape().len() - 1].iter().product();
        for line in 0..lines {
            let row = numbers[line * width..][..width].iter().copied().chain(std::iter::repeat(rest));
            place.write_line(name, line, row)?;
        }
        Ok(())
    }
}

fn of_quant(error: QuantError, tensor: &'static str) -> Refusal {
    match error {
        QuantError::Core(error) => error.into(),
        error => Refusal::Quant { tensor, error },
    }
}

/// # Safety
/// `ids` leads to `count` numbers, or is NULL.
unsafe fn ids_of(ids: *const u64, count: usize) -> Result<Vec<SequenceId>, Refusal> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let ids = to_read(ids, "ids")?;
    let bytes = count.checked_mul(size_of::<u64>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.ok_or(Refusal::Length { argument: "ids", got: count.saturating_mul(size_of::<u64>()) })?;
    // SAFETY: neither NULL nor unaligned, no longer than an allocation; that `count` numbers lie there is the caller's word.
    let ids = unsafe { std::slice::from_raw_parts(ids, count) };
    Ok(ids.iter().map(|id| SequenceId::from_number(*id)).collect())
}

/// # Safety
/// `form` leads to as many bytes as its size says, and what its pointers lead to is what it says; or it is NULL.
unsafe fn form_of(form: *const rapt_kv_cache_form) -> Result<KvCacheForm, Refusal> {
    let form = to_read(form, "form")?;
    // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
    struct_size("form.size", unsafe { (*form).size }, &[size_of::<rapt_kv_cache_form>()])?;
    // SAFETY: as long as its size says.
    let given = unsafe { form.read() };
    let size = |option, got: i64| {
        let allowed = || "a number from 1 up".to_owned();
        usize::try_from(got).map_err(|_| Error::Option { option, got: got.to_string(), allowed: allowed() })
    };
    // SAFETY: the caller's word.
    let (k_codes, v_codes) =
        unsafe { (scheme(&CodesNames::K, given.k_codes)?, scheme(&CodesNames::V, given.v_codes)?) };
    let dtype = match dtype_of("k", given.dtype)? {
        // None is used.
        DType::Unknown if k_codes.is_some() && v_codes.is_some() => DType::F32,
        dtype => dtype,
    };
    let head_dim = size("head_dim", given.head_dim)?;
    let [num_pages, page_size, num_kv_heads] = [
        size("num_pages", given.num_pages)?,
        size("page_size", given.page_size)?,
        size("num_kv_heads", given.num_kv_heads)?,
    ];
    let head_dim_v = if given.head_dim_v == 0 { head_dim } else { size("head_dim_v", given.head_dim_v)? };
    let of =
        |codes: Option<(Scheme, Option<f32>)>| (codes.map(|(scheme, _)| scheme), codes.and_then(|(_, global)| global));
    let ((k_codes, k_global_scale), (v_codes, v_global_scale)) = (of(k_codes), of(v_codes));
    let form = KvCacheForm::new(num_pages, page_size, num_kv_heads, head_dim, dtype);
    Ok(KvCacheForm { head_dim_v, k_codes, v_codes, k_global_scale, v_global_scale, ..form })
}

/// A cache of free pages, into `*cache`: it is given back by rapt_kv_cache_destroy(). On an error `*cache` is as before.
///
/// The memory of all pages is had here. Any number of threads may use a cache at once: calls that change it (new_sequence, fork,
/// truncate, free, append) wait for all others, the rest run beside one another.
///
/// # Safety
/// `form` leads to `form->size` bytes, and its pointers to what they say; `cache` leads to a pointer that may be written. Each may be
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_create(
    form: *const rapt_kv_cache_form,
    cache: *mut *mut rapt_kv_cache,
) -> rapt_error {
    // SAFETY: the caller's word.
    create(cache, "cache", || rapt_kv_cache::new(unsafe { form_of(form) }?))
}

/// Gives a cache back, with its sequences and pages. NULL is ignored.
///
/// # Safety
/// `cache` came from rapt_kv_cache_create(), was not destroyed before, and is used by no other thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_destroy(cache: *mut rapt_kv_cache) {
    // SAFETY: the caller's word.
    unsafe { destroy(cache) }
}

/// A sequence without keys, by the number that names it, into `*id`. No other sequence of this process has it, also after it is freed.
///
/// # Safety
/// `cache` is alive, or NULL; `id` leads to a number that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_new_sequence(cache: *mut rapt_kv_cache, id: *mut u64) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let cache = unsafe { rapt_kv_cache::at(cache) }?;
        let id = to_write(id, "id")?;
        // SAFETY: neither NULL nor unaligned.
        unsafe { id.write(cache.write().new_sequence().number()) };
        Ok(())
    })
}

/// Another sequence with the keys of `id`, into `*fork`. Their pages are shared; a last page that has room is copied when one of the
/// two writes into it. On an error `*fork` is as before.
///
/// # Safety
/// `cache` is alive, or NULL; `fork` leads to a number that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_fork(cache: *mut rapt_kv_cache, id: u64, fork: *mut u64) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let cache = unsafe { rapt_kv_cache::at(cache) }?;
        let fork = to_write(fork, "fork")?;
        let made = cache.write().fork(SequenceId::from_number(id))?;
        // SAFETY: neither NULL nor unaligned.
        unsafe { fork.write(made.number()) };
        Ok(())
    })
}

/// Keeps the first `length` keys of a sequence. Pages that no sequence has any more are free.
///
/// # Safety
/// `cache` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_truncate(cache: *mut rapt_kv_cache, id: u64, length: usize) -> rapt_error {
    // SAFETY: the caller's word.
    guard(|| Ok(unsafe { rapt_kv_cache::at(cache) }?.write().truncate(SequenceId::from_number(id), length)?))
}

/// Ends a sequence. Pages that no other sequence has are free; its number is refused from here on.
///
/// # Safety
/// `cache` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_free(cache: *mut rapt_kv_cache, id: u64) -> rapt_error {
    // SAFETY: the caller's word.
    guard(|| Ok(unsafe { rapt_kv_cache::at(cache) }?.write().free(SequenceId::from_number(id))?))
}

/// The keys of a sequence, into `*length`.
///
/// # Safety
/// `cache` is alive, or NULL; `length` leads to a number that may be written, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_length(cache: *const rapt_kv_cache, id: u64, length: *mut usize) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let cache = unsafe { rapt_kv_cache::at(cache) }?;
        let length = to_write(length, "length")?;
        let found = cache.read().length(SequenceId::from_number(id))?;
        // SAFETY: neither NULL nor unaligned.
        unsafe { length.write(found) };
        Ok(())
    })
}

/// What `count` says of a cache; 0 for NULL.
///
/// # Safety
/// `cache` is alive, or NULL.
unsafe fn counted(cache: *const rapt_kv_cache, count: fn(&KvCache) -> usize) -> usize {
    let mut counted = 0;
    guard(|| {
        if !cache.is_null() {
            // SAFETY: the caller's word.
            counted = count(&unsafe { rapt_kv_cache::at(cache) }?.read());
        }
        Ok(())
    });
    counted
}

/// Pages that no sequence has; 0 for NULL.
///
/// # Safety
/// `cache` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_free_pages(cache: *const rapt_kv_cache) -> usize {
    // SAFETY: the caller's word.
    unsafe { counted(cache, KvCache::free_pages) }
}

/// Sequences that were not freed; 0 for NULL.
///
/// # Safety
/// `cache` is alive, or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_num_sequences(cache: *const rapt_kv_cache) -> usize {
    // SAFETY: the caller's word.
    unsafe { counted(cache, KvCache::num_sequences) }
}

/// Appends `k` [new, num_kv_heads, head_dim] and `v` [new, num_kv_heads, head_dim_v] to a sequence, of any strides. They are of the
/// cache's dtype; those that become codes are of F64, F32, F16 or BF16. On an error everything is as before.
///
/// # Safety
/// `cache` is alive, or NULL; `k` and `v` are what they say: readable memory that nobody writes during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_append(
    cache: *mut rapt_kv_cache,
    id: u64,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let cache = unsafe { rapt_kv_cache::at(cache) }?;
        let id = SequenceId::from_number(id);
        // SAFETY: as above.
        unsafe { cache.append_by([k, v], |cache, [k, v]| cache.append(id, k, v)) }
    })
}

/// Appends `k` [num_ids, new, num_kv_heads, head_dim] and `v`, likewise, to `num_ids` sequences, of which none is given twice: to all of
/// them or, on an error, to none.
///
/// # Safety
/// As rapt_kv_cache_append(); `ids` leads to `num_ids` numbers, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_append_batch(
    cache: *mut rapt_kv_cache,
    ids: *const u64,
    num_ids: usize,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let (cache, ids) = unsafe { (rapt_kv_cache::at(cache)?, ids_of(ids, num_ids)?) };
        // SAFETY: as above.
        unsafe { cache.append_by([k, v], |cache, [k, v]| cache.append_batch(&ids, k, v)) }
    })
}

/// The pages of each sequence in the order of its keys, into `page_table`: I32 [num_ids, entries], of as many entries as the longest
/// sequence has pages or more; those behind the last page of a sequence become -1.
///
/// # Safety
/// `cache` is alive; `ids` leads to `num_ids` numbers; `page_table` is what it says: writable memory that nobody else uses. Each may be
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_page_table(
    cache: *const rapt_kv_cache,
    ids: *const u64,
    num_ids: usize,
    page_table: *const rapt_tensor,
) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let (cache, ids) = unsafe { (rapt_kv_cache::at(cache)?, ids_of(ids, num_ids)?) };
        // SAFETY: as above.
        let place = unsafe { view_mut("page_table", page_table) }?;
        let held = cache.read();
        let (table, tensor) = (held.page_table(&ids)?, "page_table");
        let &[rows, entries] = &**place.shape() else {
            let (got, shape) = (place.shape().len(), *place.shape());
            return Err(Error::Rank { tensor, got, shape, allowed: "a page table is [num_ids, entries]" }.into());
        };
        if rows != ids.len() {
            let (size, other, expected) = ("sequences", "ids", ids.len());
            return Err(Error::SizeMismatch { tensor, size, got: rows, other, expected }.into());
        }
        if entries < table.shape()[1] {
            let lengths = ids.iter().map(|&id| held.length(id)).collect::<Result<Vec<_>, _>>()?;
            let (kv_len, page_size) = (lengths.into_iter().max().unwrap_or(0), held.form().page_size);
            return Err(Error::PageTableShort { entries, kv_len, page_size }.into());
        }
        cache.tell(tensor, place, &table, -1)
    })
}

/// The keys of each sequence, into `cache_seqlens`: I32 [num_ids].
///
/// # Safety
/// As rapt_kv_cache_page_table().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_seqlens(
    cache: *const rapt_kv_cache,
    ids: *const u64,
    num_ids: usize,
    cache_seqlens: *const rapt_tensor,
) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let (cache, ids) = unsafe { (rapt_kv_cache::at(cache)?, ids_of(ids, num_ids)?) };
        // SAFETY: as above.
        let place = unsafe { view_mut("cache_seqlens", cache_seqlens) }?;
        let lengths = cache.read().cache_seqlens(&ids)?;
        if *place.shape() != *lengths.shape() {
            let (tensor, got, expected) = ("cache_seqlens", *place.shape(), *lengths.shape());
            return Err(Error::ShapeMismatch { tensor, got, expected }.into());
        }
        cache.tell("cache_seqlens", place, &lengths, 0)
    })
}

/// The memory of a cache, as rapt_attention_with_kvcache() reads it beside rapt_kv_cache_page_table() and rapt_kv_cache_seqlens(). The
/// caller sets `pages->size` to sizeof(rapt_kv_cache_pages); all else is written. Rows that hold no key hold anything.
///
/// It is to be read, and only while no call appends: what is written there is not what the cache says of it.
///
/// # Safety
/// `cache` is alive, or NULL; `pages` leads to `pages->size` bytes, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_get_pages(
    cache: *const rapt_kv_cache,
    pages: *mut rapt_kv_cache_pages,
) -> rapt_error {
    guard(|| {
        // SAFETY: the caller's word.
        let rapt_kv_cache { k, v, .. } = unsafe { rapt_kv_cache::at(cache) }?;
        let pages = to_write(pages, "pages")?;
        // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
        struct_size("pages.size", unsafe { (*pages).size }, &[size_of::<rapt_kv_cache_pages>()])?;
        let codes = |of: &PagesTold| of.codes.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let found = rapt_kv_cache_pages {
            size: size_of::<rapt_kv_cache_pages>(),
            k_cache: &raw const k.rows.tensor,
            v_cache: &raw const v.rows.tensor,
            k_codes: codes(k),
            v_codes: codes(v),
        };
        // SAFETY: as long as its size says, which was found to be that of this struct.
        unsafe { pages.write(found) };
        Ok(())
    })
}

/// Attention of q [num_ids, q_len, num_q_heads, head_dim] to all keys of each sequence of `ids`, into `out`: the bits of
/// rapt_attention() on the same keys in one tensor. One sequence may stand in `ids` more than once.
///
/// `options->lse` is [num_ids, num_q_heads, q_len]; `options->layout` is not read. The last query is at the last key, for causal masking
/// (RAPT_CAUSAL_BOTTOM_RIGHT), windows and slopes. `options` may be NULL; a mask, a tolerance and codes are
/// refused: the cache knows its own.
///
/// # Safety
/// `cache` is alive, or NULL; `ids` leads to `num_ids` numbers, or is NULL; all else as rapt_attention().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_kv_cache_attention(
    engine: *const rapt_engine,
    cache: *const rapt_kv_cache,
    q: *const rapt_tensor,
    ids: *const u64,
    num_ids: usize,
    out: *const rapt_tensor,
    options: *const rapt_options,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word.
        let (cache, q, ids) = unsafe { (rapt_kv_cache::at(cache)?, view("q", q)?, ids_of(ids, num_ids)?) };
        // SAFETY: as above.
        let (out, asked) = unsafe { (view_mut("out", out)?, Asked::read(options, q.device())?) };
        let Asked { options, q_codes, k_codes, v_codes, sinks, alibi_slopes, lse, .. } = asked;
        absent("q_codes", q_codes.is_null(), "q in numbers")?;
        absent("k_codes", k_codes.is_null(), "NULL: the cache knows its own")?;
        absent("v_codes", v_codes.is_null(), "NULL: the cache knows its own")?;
        in_host_memory([
            ("q", Some(&q)),
            ("sinks", sinks.as_ref()),
            ("alibi_slopes", alibi_slopes.as_ref()),
            ("out", Some(&out.as_view())),
            ("lse", lse.as_ref().map(ViewMut::as_view).as_ref()),
        ])?;
        let queries = KvCacheQueries { sinks, alibi_slopes, lse, ..KvCacheQueries::new(q, &ids, out) };
        let done = cache.read().attention(engine, queries, &options, &Queue::Host(engine.executor()));
        done.map_err(|error| of_quant(error, "k or v"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handles are used from any thread.
    #[test]
    fn what_the_handle_locks_may_be_used_from_several_threads() {
        fn check<T: Send + Sync>() {}
        check::<RwLock<KvCache>>();
    }
}
