//! Keys and values of many sequences in pages that they take as they grow, give back, and share.
//!
//! ```text
//! new_sequence ─► append ─► attention              pages are taken when keys need them
//!                 fork ─► append                   pages are shared; a shared last page is copied by who writes into it
//!                 truncate, free                   a page that no sequence has is free
//! ```
//! `sequences` is who has which page, `pages` the memory; attention is [`Engine::attention_with_kvcache`] on both. Deliberately absent:
//! devices other than the host, and choosing which sequence is to give way when pages run out.

mod pages;
mod sequences;

use rapt_core::{Compute, DType, Error, Options, Queue, Result, Shape, View, ViewMut};
use rapt_quant::{QuantError, Scheme};

use super::cache::KvCacheTensors;
use super::cache_view::{CacheCodes, CacheView};
use super::explain::RaggedPlan;
use crate::{Engine, Tensor};
use pages::Pages;
use sequences::Sequences;

pub use sequences::SequenceId;

/// What a [`KvCache`] holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvCacheForm {
    /// Pages of all sequences together. `num_pages · page_size` is at most 2³¹ − 1: page tables and lengths are int32.
    pub num_pages: usize,
    /// Keys of a page.
    pub page_size: usize,
    /// Heads of a key.
    pub num_kv_heads: usize,
    /// Elements of a key's head.
    pub head_dim: usize,
    /// Elements of a value's head.
    pub head_dim_v: usize,
    /// The dtype of keys and values that are not codes: float64, float32, float16 or bfloat16.
    pub dtype: DType,
    /// Where keys are stored as codes: their format, by token or by block, scales plain.
    pub k_codes: Option<Scheme>,
    /// Where values are stored as codes.
    pub v_codes: Option<Scheme>,
    /// One more factor of all keys: with codes of nvfp4 and no others. A block of keys reaches 2688 times as far at most.
    pub k_global_scale: Option<f32>,
    /// One more factor of all values.
    pub v_global_scale: Option<f32>,
}

impl KvCacheForm {
    /// Values with the head_dim of keys, and no codes.
    #[must_use]
    pub const fn new(num_pages: usize, page_size: usize, num_kv_heads: usize, head_dim: usize, dtype: DType) -> Self {
        KvCacheForm {
            num_pages,
            page_size,
            num_kv_heads,
            head_dim,
            head_dim_v: head_dim,
            dtype,
            k_codes: None,
            v_codes: None,
            k_global_scale: None,
            v_global_scale: None,
        }
    }

    fn check(&self) -> Result<()> {
        let sizes = [
            ("num_pages", self.num_pages),
            ("page_size", self.page_size),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("head_dim_v", self.head_dim_v),
        ];
        if let Some((option, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            let allowed = "a number from 1 up".to_owned();
            return Err(Error::Option { option, got: "0".to_owned(), allowed });
        }
        match self.num_pages.checked_mul(self.page_size) {
            Some(keys) if i32::try_from(keys).is_ok() => Ok(()),
            _ => {
                let allowed = format!("num_pages · page_size up to {}: lengths are int32", i32::MAX);
                let got = format!("{} pages of {}", self.num_pages, self.page_size);
                Err(Error::Option { option: "num_pages", got, allowed })
            }
        }
    }
}

/// What attends to the keys of a [`KvCache`].
#[derive(Debug)]
pub struct KvCacheQueries<'a> {
    /// Queries, `[batch, q_len, num_q_heads, head_dim]`.
    pub q: View<'a>,
    /// The sequence of each, `[batch]`; one may stand there more than once.
    pub ids: &'a [SequenceId],
    /// One more logit per head, `[num_q_heads]`.
    pub sinks: Option<View<'a>>,
    /// ALiBi slopes, `[num_q_heads]`.
    pub alibi_slopes: Option<View<'a>>,
    /// Where the result goes, `[batch, q_len, num_q_heads, head_dim_v]`.
    pub out: ViewMut<'a>,
    /// Where the log of the sum of exponentials goes, `[batch, num_q_heads, q_len]`.
    pub lse: Option<ViewMut<'a>>,
}

impl<'a> KvCacheQueries<'a> {
    /// Queries alone.
    #[must_use]
    pub fn new(q: View<'a>, ids: &'a [SequenceId], out: ViewMut<'a>) -> Self {
        KvCacheQueries { q, ids, sinks: None, alibi_slopes: None, out, lse: None }
    }
}

/// Keys and values of many sequences, in pages of host memory that it owns.
///
/// What changes it takes `&mut self`; [`attention`](KvCache::attention) may be called from several threads at once.
///
/// ```
/// use rapt::{DType, Engine, KvCache, KvCacheForm, KvCacheQueries, Options, Queue, View, ViewMut};
///
/// let engine = Engine::new(Some(1))?;
/// // 8 pages of 16 keys, one head of 2 elements.
/// let mut cache = KvCache::new(KvCacheForm::new(8, 16, 1, 2, DType::F32))?;
/// let first = cache.new_sequence();
/// let (k, v) = ([0.5f32, 1.0, 0.5, 1.0], [0.25f32, 0.75, 0.75, 0.25]);
/// let new = |data| View::contiguous("new", data, [2, 1, 2].into());
/// cache.append(first, &new(&k)?, &new(&v)?)?;
///
/// // Both have those two keys; what is appended to one from here on, the other does not see.
/// let second = cache.fork(first)?;
/// cache.append(second, &new(&k)?, &new(&v)?)?;
/// assert_eq!((cache.length(first)?, cache.length(second)?), (2, 4));
///
/// let (q, ids, mut out) = ([1.0f32, 0.5, 1.0, 0.5], [first, second], [0f32; 4]);
/// let queries = KvCacheQueries::new(
///     View::contiguous("q", &q, [2, 1, 1, 2].into())?,
///     &ids,
///     ViewMut::contiguous("out", &mut out, [2, 1, 1, 2].into())?,
/// );
/// cache.attention(&engine, queries, &Options::default(), &Queue::Host(engine.executor()))?;
/// assert_eq!(out, [0.5; 4]); // equal keys: the mean of the values
///
/// cache.free(first)?;
/// cache.free(second)?;
/// assert_eq!(cache.free_pages(), 8);
/// # Ok::<(), rapt::quant::QuantError>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    form: KvCacheForm,
    k: Pages,
    v: Pages,
    sequences: Sequences,
}

const NEW: &str = "new keys and values of a sequence are [new, num_kv_heads, head_dim]";
const NEW_BATCH: &str = "new keys and values of several sequences are [batch, new, num_kv_heads, head_dim]";

impl KvCache {
    /// A cache of free pages.
    ///
    /// # Errors
    /// [`Error::Option`] for a size of 0 or more keys than int32 counts; [`Error::UnsupportedDtype`]; [`Error::Unsupported`] for codes by
    /// tensor, head or channel, or with swizzled scales, and what to use; [`Error::MissingPart`] for nvfp4 without its global scale and
    /// [`Error::UnexpectedPart`] for another format with one, [`QuantError::BadScale`]; [`Error::Overflow`], [`Error::OutOfMemory`].
    pub fn new(form: KvCacheForm) -> Result<Self, QuantError> {
        form.check()?;
        let of_k = (form.k_codes, form.k_global_scale);
        let of_v = (form.v_codes, form.v_global_scale);
        let k = Pages::new(["k", "k_cache", "k_global_scale"], &form, form.head_dim, of_k)?;
        let v = Pages::new(["v", "v_cache", "v_global_scale"], &form, form.head_dim_v, of_v)?;
        Ok(KvCache { form, k, v, sequences: Sequences::new(form.num_pages, form.page_size)? })
    }

    /// What it holds.
    #[must_use]
    pub fn form(&self) -> &KvCacheForm {
        &self.form
    }

    /// A sequence without keys, which takes no page.
    pub fn new_sequence(&mut self) -> SequenceId {
        self.sequences.add()
    }

    /// Another sequence with the keys of `id`. Their pages are shared; a last page that has room is copied when one of the two writes into it.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        self.sequences.fork(id)
    }

    /// Keeps the first `length` keys of a sequence. Pages that no sequence has any more are free.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`]; [`Error::Option`] for more keys than it has.
    pub fn truncate(&mut self, id: SequenceId, length: usize) -> Result<()> {
        self.sequences.truncate(id, length)
    }

    /// Ends a sequence. Pages that no other sequence has are free; its id is refused from here on.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn free(&mut self, id: SequenceId) -> Result<()> {
        self.sequences.free(id)
    }

    /// The keys of a sequence.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`].
    pub fn length(&self, id: SequenceId) -> Result<usize> {
        self.sequences.length(id)
    }

    /// Pages that no sequence has.
    #[must_use]
    pub fn free_pages(&self) -> usize {
        self.sequences.free_pages()
    }

    /// Sequences that were not freed.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Appends `k` `[new, num_kv_heads, head_dim]` and `v` `[new, num_kv_heads, head_dim_v]` to a sequence, of any strides. They are of the
    /// cache's dtype, or where it holds codes of any of float64, float32, float16 and bfloat16, and are quantized.
    ///
    /// # Errors
    /// After an error everything is as before. [`Error::UnknownSequence`]; [`Error::OutOfPages`]; [`Error::Rank`], [`Error::SizeMismatch`],
    /// [`Error::OtherDtype`], [`Error::UnsupportedDtype`], [`Error::DeviceUnavailable`] for `k` and `v`; [`QuantError::NoCode`] and
    /// [`QuantError::ScaleOverflow`] for numbers that the format does not hold.
    pub fn append(&mut self, id: SequenceId, k: &View<'_>, v: &View<'_>) -> Result<(), QuantError> {
        self.append_rows(&[id], [k, v], 3, NEW)
    }

    /// Appends `k` `[batch, new, num_kv_heads, head_dim]` and `v` to `batch` sequences, of which none is given twice: to all of them or to none.
    ///
    /// # Errors
    /// As [`append`](KvCache::append); [`Error::Option`] for a sequence that is given twice.
    pub fn append_batch(&mut self, ids: &[SequenceId], k: &View<'_>, v: &View<'_>) -> Result<(), QuantError> {
        self.append_rows(ids, [k, v], 4, NEW_BATCH)
    }

    fn append_rows(
        &mut self,
        ids: &[SequenceId],
        [k, v]: [&View<'_>; 2],
        rank: usize,
        allowed: &'static str,
    ) -> Result<(), QuantError> {
        self.k.check(k, rank, allowed)?;
        self.v.check(v, rank, allowed)?;
        let same = |tensor, size, got, other, expected| {
            if got == expected { Ok(()) } else { Err(Error::SizeMismatch { tensor, size, got, other, expected }) }
        };
        if rank == 4 {
            same("k", "batch", k.shape()[0], "ids", ids.len())?;
            same("v", "batch", v.shape()[0], "ids", ids.len())?;
        }
        let new = k.shape()[rank - 3];
        same("v", "new keys", v.shape()[rank - 3], "k", new)?;
        let growth = self.sequences.growth(ids, new)?;
        let (of_k, of_v) = (self.k.encode(k)?, self.v.encode(v)?);
        self.k.write(&growth, k, of_k.as_ref())?;
        self.v.write(&growth, v, of_v.as_ref())?;
        self.sequences.grow(growth);
        Ok(())
    }

    /// The pages of keys, `[num_pages, page_size, num_kv_heads, head_dim]`; two codes of 4 bits share a byte. Rows that hold no key hold
    /// anything.
    ///
    /// # Errors
    /// None in practice: the shape was checked when the cache was made.
    pub fn k_pages(&self) -> Result<View<'_>> {
        self.k.view()
    }

    /// The pages of values, likewise.
    ///
    /// # Errors
    /// None in practice, as [`k_pages`](KvCache::k_pages).
    pub fn v_pages(&self) -> Result<View<'_>> {
        self.v.view()
    }

    /// What makes numbers of the codes of keys: scales `[num_pages, page_size, num_kv_heads]` by token, with one more dimension of blocks by
    /// block. `None` where keys are not codes.
    ///
    /// # Errors
    /// None in practice, as [`k_pages`](KvCache::k_pages).
    pub fn k_codes(&self) -> Result<Option<CacheCodes<'_>>> {
        self.k.codes()
    }

    /// What makes numbers of the codes of values, likewise.
    ///
    /// # Errors
    /// None in practice, as [`k_pages`](KvCache::k_pages).
    pub fn v_codes(&self) -> Result<Option<CacheCodes<'_>>> {
        self.v.codes()
    }

    /// The pages of each sequence in the order of its keys: int32 `[batch, entries]`, rows shorter than the longest filled with −1.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OutOfMemory`].
    pub fn page_table(&self, ids: &[SequenceId]) -> Result<Tensor> {
        let rows = ids.iter().map(|&id| self.sequences.pages(id)).collect::<Result<Vec<_>>>()?;
        let entries = rows.iter().map(|row| row.len()).max().unwrap_or(0);
        let all = rows.iter().map(|row| row.iter().copied().chain(std::iter::repeat(-1)).take(entries));
        numbers([ids.len(), entries].into(), all)
    }

    /// The keys of each sequence: int32 `[batch]`.
    ///
    /// # Errors
    /// [`Error::UnknownSequence`], [`Error::OutOfMemory`].
    pub fn cache_seqlens(&self, ids: &[SequenceId]) -> Result<Tensor> {
        // At most num_pages · page_size, which the form holds to int32.
        let lengths = ids.iter().map(|&id| Ok(self.sequences.length(id)? as i32)).collect::<Result<Vec<_>>>()?;
        numbers([ids.len()].into(), std::iter::once(lengths.iter().copied()))
    }

    /// Attention of queries to all keys of their sequences: what [`attention_into`](Engine::attention_into) gives for each alone on the same keys
    /// in one tensor, bit for bit. The last query is at the last key; `options.layout` is not read.
    ///
    /// # Errors
    /// As [`Engine::attention_with_kvcache`]; [`Error::UnknownSequence`], [`Error::SizeMismatch`] for other than one id for each sequence of `q`;
    /// [`Error::Unsupported`] for [`Compute::Int8`], as values here have factors of their own.
    pub fn attention(
        &self,
        engine: &Engine,
        queries: KvCacheQueries<'_>,
        options: &Options,
        queue: &Queue<'_>,
    ) -> Result<(), QuantError> {
        self.with_tensors(queries, options, |tensors| engine.attention_with_kvcache(tensors, options, queue))
    }

    /// What [`attention`](KvCache::attention) would run on so many threads: which kernel for which sequences. Nothing is computed or written.
    ///
    /// # Errors
    /// As [`attention`](KvCache::attention).
    pub fn explain(
        &self,
        engine: &Engine,
        queries: KvCacheQueries<'_>,
        options: &Options,
        threads: usize,
    ) -> Result<RaggedPlan, QuantError> {
        self.with_tensors(queries, options, |tensors| engine.explain_with_kvcache(tensors, options, threads))
    }

    /// What `call` answers for queries of the sequences, with their pages and lengths.
    fn with_tensors<T>(
        &self,
        queries: KvCacheQueries<'_>,
        options: &Options,
        call: impl FnOnce(KvCacheTensors<'_>) -> Result<T, QuantError>,
    ) -> Result<T, QuantError> {
        if options.compute == Compute::Int8 {
            return Err(Error::unsupported(
                "compute=\"int8\" over a cache that grows",
                "products of int8 are summed along the keys, and values that are appended have factors of their own",
                "leave compute at \"exact\", or call `attention_with_kvcache` on a cache whose v has factors by tensor, head or channel",
            )
            .into());
        }
        let KvCacheQueries { q, ids, sinks, alibi_slopes, out, lse } = queries;
        let (page_table, cache_seqlens) = (self.page_table(ids)?, self.cache_seqlens(ids)?);
        if let [batch, _, _, _] = **q.shape()
            && batch != ids.len()
        {
            let (tensor, size, got) = ("ids", "sequences", ids.len());
            return Err(Error::SizeMismatch { tensor, size, got, other: "q", expected: batch }.into());
        }
        let tensors = KvCacheTensors {
            q,
            k_cache: CacheView::Read(self.k_pages()?),
            v_cache: CacheView::Read(self.v_pages()?),
            k_codes: self.k_codes()?,
            v_codes: self.v_codes()?,
            k: None,
            v: None,
            cache_seqlens: Some(cache_seqlens.view()?),
            page_table: Some(page_table.view()?),
            sinks,
            alibi_slopes,
            out,
            lse,
        };
        call(tensors)
    }
}

/// A tensor of int32, line by line.
fn numbers(shape: Shape, lines: impl Iterator<Item = impl Iterator<Item = i32>>) -> Result<Tensor> {
    let mut tensor = Tensor::zeros(DType::I32, shape)?;
    if shape.numel() != Some(0) {
        let mut view = tensor.view_mut()?;
        lines.enumerate().try_for_each(|(at, line)| view.write_line("page_table", at, line))?;
    }
    Ok(tensor)
}
