//! Sequences of different lengths for C: lying one after another, or in a cache.
//!
//! ```text
//! rapt_varlen_attention         q, k, v, cu_seqlens ─► VarlenTensors ──► Engine::varlen_attention
//! rapt_attention_with_kvcache   q, rapt_kvcache ─► KvCacheTensors ──apart──► Engine::attention_with_kvcache
//! ```
//! A tensor that is written shares no byte with another one of its call: in Rust borrows see to that, C is asked here. Deliberately
//! absent: masks, whose last dimension is one length, and the proofs that `served` keeps, since lengths are values.

use engine::quant::QuantError;
use engine::{
    CacheCodes, CacheView, Codes, Device, DropoutSeed, Error, KvCacheTensors, Options, Qkv, Queue, ScaleLayout,
    VarlenTensors, View, ViewMut, prove_disjoint, prove_injective,
};

use crate::abi::{rapt_codes, rapt_error, rapt_kvcache, rapt_options, rapt_tensor};
use crate::rapt_engine;
use crate::read::{self, CodesNames, CodesRead, optional, struct_size, to_read, view, view_mut};
use crate::refusal::{Refusal, guard};

/// The options of a ragged call, and the tensors among them.
pub(crate) struct Asked<'a> {
    pub(crate) options: Options,
    pub(crate) q_codes: *const rapt_codes,
    pub(crate) k_codes: *const rapt_codes,
    pub(crate) v_codes: *const rapt_codes,
    pub(crate) sinks: Option<View<'a>>,
    pub(crate) alibi_slopes: Option<View<'a>>,
    pub(crate) dropout: Option<DropoutSeed>,
    pub(crate) lse: Option<ViewMut<'a>>,
}

impl<'a> Asked<'a> {
    /// # Safety
    /// As rapt_attention(), for 'a.
    pub(crate) unsafe fn read(given: *const rapt_options, device: Device) -> Result<Self, Refusal> {
        let plain = Asked {
            options: Options::default(),
            q_codes: std::ptr::null(),
            k_codes: std::ptr::null(),
            v_codes: std::ptr::null(),
            sinks: None,
            alibi_slopes: None,
            dropout: None,
            lse: None,
        };
        if given.is_null() {
            return Ok(plain);
        }
        // SAFETY: the caller's word.
        let given = unsafe { read::options(given) }?;
        let options = read::parse(&given)?;
        absent("a mask", given.mask.is_null(), "rapt_attention() for each sequence, with a mask of its own")?;
        absent("a tolerance", given.tolerance.is_null(), "tolerance = NULL")?;
        // SAFETY: the caller's word.
        let (sinks, alibi_slopes) =
            unsafe { (optional("sinks", given.sinks)?, optional("alibi_slopes", given.alibi_slopes)?) };
        // SAFETY: as above.
        let lse = if given.lse.is_null() { None } else { Some(unsafe { view_mut("lse", given.lse) }?) };
        // SAFETY: as above.
        let dropout = unsafe { read::dropout(&given, device) }?;
        let rapt_options { q_codes, k_codes, v_codes, .. } = given;
        Ok(Asked { options, q_codes, k_codes, v_codes, sinks, alibi_slopes, dropout, lse })
    }

    /// What makes numbers of q, k and v.
    ///
    /// # Safety
    /// As rapt_attention(), for 'a.
    pub(crate) unsafe fn codes(&self) -> Result<Qkv<Option<Box<Codes<'a>>>>, Refusal> {
        // SAFETY: the caller's word.
        unsafe {
            Ok(Qkv {
                q: read::codes(&CodesNames::Q, self.q_codes)?,
                k: read::codes(&CodesNames::K, self.k_codes)?,
                v: read::codes(&CodesNames::V, self.v_codes)?,
            })
        }
    }
}

/// Refuses an option that sequences of different lengths do not have.
pub(crate) fn absent(what: &str, is_absent: bool, instead: &str) -> Result<(), Refusal> {
    if is_absent {
        return Ok(());
    }
    let what = format!("{what} with sequences of different lengths");
    Err(Error::unsupported(what, "no kernel reads it there", format!("give {instead}")).into())
}

/// Refuses tensors that do not all lie in host memory.
pub(crate) fn in_host_memory<'v>(
    given: impl IntoIterator<Item = (&'static str, Option<&'v View<'v>>)>,
) -> Result<(), Refusal> {
    let mut of_q = None;
    for (tensor, view) in given {
        let Some(view) = view else { continue };
        let (got, expected) = (view.device(), *of_q.get_or_insert(view.device()));
        if got != expected {
            return Err(Error::DeviceMismatch { tensor, expected, got }.into());
        }
    }
    match of_q {
        None | Some(Device::Cpu) => Ok(()),
        Some(device) => {
            let why = "sequences of different lengths are computed in host memory".to_owned();
            Err(Error::DeviceUnavailable { device, why }.into())
        }
    }
}

/// Attention of sequences that lie one after another, each to its own keys: the bits of rapt_attention() for each alone.
///
/// q is [total_q, num_q_heads, head_dim], k and v are [total_kv, num_kv_heads, head_dim], `options->lse` is
/// [num_q_heads, total_q]; `options->layout` is not read. `cu_seqlens_q` and `cu_seqlens_kv` are I32 [sequences + 1]: where
/// the rows of each begin and the last ends; rows of no sequence become zeros. `options` may be NULL; a mask and a tolerance are
/// refused. With dropout, sequence n is batch entry n. The factors of codes are those of layout BSHD without its batch: one row for each
/// of theirs (token, block), or those of all sequences.
///
/// # Safety
/// As rapt_attention().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_varlen_attention(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    k: *const rapt_tensor,
    v: *const rapt_tensor,
    cu_seqlens_q: *const rapt_tensor,
    cu_seqlens_kv: *const rapt_tensor,
    out: *const rapt_tensor,
    options: *const rapt_options,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word.
        let (q, k, v) = unsafe { (view("q", q)?, view("k", k)?, view("v", v)?) };
        // SAFETY: as above.
        let (cu_seqlens_q, cu_seqlens_kv) =
            unsafe { (view("cu_seqlens_q", cu_seqlens_q)?, view("cu_seqlens_kv", cu_seqlens_kv)?) };
        // SAFETY: as above.
        let (out, asked) = unsafe { (view_mut("out", out)?, Asked::read(options, q.device())?) };
        // SAFETY: as above.
        let codes = unsafe { asked.codes() }?;
        let Asked { options, sinks, alibi_slopes, dropout, lse, .. } = asked;
        in_host_memory([
            ("q", Some(&q)),
            ("k", Some(&k)),
            ("v", Some(&v)),
            ("cu_seqlens_q", Some(&cu_seqlens_q)),
            ("cu_seqlens_kv", Some(&cu_seqlens_kv)),
            ("sinks", sinks.as_ref()),
            ("alibi_slopes", alibi_slopes.as_ref()),
            ("out", Some(&out.as_view())),
            ("lse", lse.as_ref().map(ViewMut::as_view).as_ref()),
        ])?;
        let tensors =
            VarlenTensors { q, k, v, codes, cu_seqlens_q, cu_seqlens_kv, sinks, alibi_slopes, dropout, out, lse };
        Ok(engine.varlen_attention(tensors, &options, &Queue::Host(engine.executor()))?)
    })
}

/// Appends `cache->k` and `cache->v` to a cache, and attends to all its keys: the bits of rapt_attention() on one tensor.
///
/// q is [batch, q_len, num_q_heads, head_dim], `options->lse` is [batch, num_q_heads, q_len]; `options->layout` is not read.
/// The last query is at the last key, for causal masking (RAPT_CAUSAL_BOTTOM_RIGHT), windows and slopes. `options` may be NULL;
/// a mask, codes of q and a tolerance are refused. Everything is proven before anything is written, the cache and its factors too.
///
/// # Safety
/// As rapt_attention(). Where there are new keys, the cache and its factors are memory that nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rapt_attention_with_kvcache(
    engine: *const rapt_engine,
    q: *const rapt_tensor,
    cache: *const rapt_kvcache,
    out: *const rapt_tensor,
    options: *const rapt_options,
) -> rapt_error {
    guard(|| {
        let engine = to_read(engine, "engine")?;
        // SAFETY: neither NULL nor unaligned; that an engine lies there is the caller's word.
        let engine = unsafe { &(*engine).engine };
        // SAFETY: the caller's word.
        let (tensors, options) = unsafe { read_cache(q, cache, out, options) }?;
        check_apart(&tensors)?;
        let appended = match (tensors.k_codes.is_some(), tensors.v_codes.is_some() && tensors.v.is_some()) {
            (true, true) => "k or v",
            (false, _) => "v",
            (true, false) => "k",
        };
        let done = engine.attention_with_kvcache(tensors, &options, &Queue::Host(engine.executor()));
        done.map_err(|error| match error {
            QuantError::Core(error) => error.into(),
            error => Refusal::Quant { tensor: appended, error },
        })
    })
}

/// The tensors and options that the arguments say.
///
/// # Safety
/// As rapt_attention_with_kvcache(), for 'a.
unsafe fn read_cache<'a>(
    q: *const rapt_tensor,
    cache: *const rapt_kvcache,
    out: *const rapt_tensor,
    options: *const rapt_options,
) -> Result<(KvCacheTensors<'a>, Options), Refusal> {
    // SAFETY: the caller's word.
    let q = unsafe { view("q", q) }?;
    let cache = to_read(cache, "cache")?;
    // SAFETY: neither NULL nor unaligned; a struct of any version begins with its size.
    struct_size("cache.size", unsafe { (*cache).size }, &[size_of::<rapt_kvcache>()])?;
    // SAFETY: as long as its size says.
    let given = unsafe { cache.read() };
    // SAFETY: the caller's word.
    let (k, v) = unsafe { (optional("k", given.k)?, optional("v", given.v)?) };
    // SAFETY: as above.
    let (k_cache, v_cache) = unsafe {
        (cache_view("k_cache", given.k_cache, k.is_some())?, cache_view("v_cache", given.v_cache, v.is_some())?)
    };
    // SAFETY: as above.
    let (cache_seqlens, page_table) =
        unsafe { (optional("cache_seqlens", given.cache_seqlens)?, optional("page_table", given.page_table)?) };
    // SAFETY: as above.
    let (out, asked) = unsafe { (view_mut("out", out)?, Asked::read(options, q.device())?) };
    let Asked { options, q_codes, k_codes, v_codes, sinks, alibi_slopes, lse, .. } = asked;
    absent("q_codes", q_codes.is_null(), "q in numbers")?;
    // SAFETY: as above.
    let (k_codes, v_codes) = unsafe {
        (
            cache_codes(&CodesNames::K_CACHE, k_codes, k.is_some())?,
            cache_codes(&CodesNames::V_CACHE, v_codes, v.is_some())?,
        )
    };
    let tensors = KvCacheTensors {
        q,
        k_cache,
        v_cache,
        k_codes,
        v_codes,
        k,
        v,
        cache_seqlens,
        page_table,
        sinks,
        alibi_slopes,
        out,
        lse,
    };
    Ok((tensors, options))
}

/// A tensor of a cache, which is written if there is something to append.
///
/// # Safety
/// As [`view`], or, if it is written, as [`view_mut`].
unsafe fn cache_view<'a>(
    name: &'static str,
    given: *const rapt_tensor,
    is_written: bool,
) -> Result<CacheView<'a>, Refusal> {
    // SAFETY: the caller's word.
    unsafe {
        Ok(if is_written { CacheView::Write(view_mut(name, given)?) } else { CacheView::Read(view(name, given)?) })
    }
}

/// What makes numbers of a cache. A factor without dimensions is that of the tensor, which no new key changes.
///
/// # Safety
/// As [`cache_view`], for both tensors.
unsafe fn cache_codes<'a>(
    names: &CodesNames,
    given: *const rapt_codes,
    is_appended: bool,
) -> Result<Option<CacheCodes<'a>>, Refusal> {
    // SAFETY: the caller's word.
    let Some(read) = (unsafe { CodesRead::read(names, given) })? else { return Ok(None) };
    let CodesRead { format, granularity, head_dim, global_scale, .. } = read;
    if read.scale_layout != ScaleLayout::Plain {
        let (option, got) = (names.scale_layout, format!("'{}'", read.scale_layout.name()));
        let allowed = "'plain': in a cache the scales of a key lie where the key does".to_owned();
        return Err(Error::Option { option, got, allowed }.into());
    }
    let part = |name, given| {
        // SAFETY: the caller's word.
        unsafe {
            let is_written = is_appended && !view(name, given)?.shape().is_empty();
            cache_view(name, given, is_written)
        }
    };
    let zero_point = (!read.zero_point.is_null()).then(|| part(names.zero_point, read.zero_point)).transpose()?;
    let descale = part(names.descale, read.descale)?;
    Ok(Some(CacheCodes { format, descale, zero_point, global_scale, granularity, head_dim }))
}

/// Proves that all tensors lie in host memory, and that what is written of the cache shares no byte with another tensor.
fn check_apart(tensors: &KvCacheTensors<'_>) -> Result<(), Refusal> {
    let codes = [tensors.k_codes.as_ref(), tensors.v_codes.as_ref()];
    let [k_descale, v_descale] = codes.map(|codes| codes.map(|codes| &codes.descale));
    let [k_zero_point, v_zero_point] = codes.map(|codes| codes.and_then(|codes| codes.zero_point.as_ref()));
    // Each of k beside that of v.
    let cached = [
        ("k_cache", Some(&tensors.k_cache)),
        ("v_cache", Some(&tensors.v_cache)),
        ("k_descale", k_descale),
        ("v_descale", v_descale),
        ("k_zero_point", k_zero_point),
        ("v_zero_point", v_zero_point),
    ];
    let views = cached.map(|(name, view)| (name, view.map(CacheView::view)));
    let read = [
        ("q", Some(&tensors.q)),
        ("k", tensors.k.as_ref()),
        ("v", tensors.v.as_ref()),
        ("cache_seqlens", tensors.cache_seqlens.as_ref()),
        ("page_table", tensors.page_table.as_ref()),
        ("sinks", tensors.sinks.as_ref()),
        ("alibi_slopes", tensors.alibi_slopes.as_ref()),
    ];
    let (out, lse) = (tensors.out.as_view(), tensors.lse.as_ref().map(ViewMut::as_view));
    let of_cache = views.iter().map(|(name, view)| (*name, view.as_ref()));
    in_host_memory(read.into_iter().chain(of_cache).chain([("out", Some(&out)), ("lse", lse.as_ref())]))?;
    for (at, (name, cache)) in cached.into_iter().enumerate() {
        let Some(CacheView::Write(written)) = cache else { continue };
        prove_injective(name, written)?;
        for (other, view) in read {
            view.map_or(Ok(0), |view| prove_disjoint(name, written, other, view))?;
        }
        for (n, (other, view)) in views.iter().enumerate() {
            // Values that are not appended, or are so with their keys, may lie in the keys.
            let is_shared = n == at ^ 1 && (tensors.v.is_none() || tensors.values_begin_keys());
            if let (true, Some(view)) = (n != at && !is_shared, view) {
                prove_disjoint(name, written, other, view)?;
            }
        }
    }
    Ok(())
}
