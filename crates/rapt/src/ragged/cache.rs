//! Attention to the keys of a cache, and to new ones that are appended to it first.
//!
//! ```text
//! q         [batch, q_len, num_q_heads, head_dim]
//! caches    [batch, most keys, num_kv_heads, head_dim]      or pages [num_pages, page_size, num_kv_heads, head_dim] and a page table
//! k, v      [batch, new keys, num_kv_heads, head_dim]       written behind the first cache_seqlens keys of each sequence
//! ```
//! (The terms are those of flash-attention.) The last query is at the last key: causal, windows and slopes are
//! bottom-right. Everything is proven before the first new key is written. A cache of codes has scales of its own form: one row of them
//! for each key lies where the key does, those of a tensor, a head or a channel are of the sequence, and stay as they are.

use std::sync::Arc;

use rapt_core::{
    Causal, Codes, Device, Error, Operands, Options, Plan, Qkv, Queue, Result, Shape, TensorLayout, View, ViewMut,
    Window, split,
};
use rapt_cpu::Batch;
use rapt_quant::QuantError;

use super::append::{Append, values_begin_keys};
use super::cache_view::{CacheCodes, CacheView, is_per_key};
use super::{Sequence, host, lengths, prove_apart};
use crate::Engine;

/// The tensors of [`Engine::attention_with_kvcache`].
#[derive(Debug)]
pub struct KvCacheTensors<'a> {
    /// Queries, `[batch, q_len, num_q_heads, head_dim]`.
    pub q: View<'a>,
    /// Keys, `[batch, most keys, num_kv_heads, head_dim]`, or pages `[num_pages, page_size, num_kv_heads, head_dim]`.
    pub k_cache: CacheView<'a>,
    /// Values, likewise, with head_dim_v. May lie in the memory of `k_cache` where no `v` is given, or where values are the first numbers
    /// of their keys both in the caches and in `k` and `v`: these are then written once.
    pub v_cache: CacheView<'a>,
    /// Where `k_cache` is codes: what makes numbers of them.
    pub k_codes: Option<CacheCodes<'a>>,
    /// Where `v_cache` is codes.
    pub v_codes: Option<CacheCodes<'a>>,
    /// New keys, `[batch, new, num_kv_heads, head_dim]`, to be written behind those of each sequence.
    pub k: Option<View<'a>>,
    /// New values; `None` where those of the new keys lie in `k_cache`. May lie in the memory of `k`.
    pub v: Option<View<'a>>,
    /// The keys of each sequence before the new ones: int32 `[batch]`. `None` is all that a cache without pages holds.
    pub cache_seqlens: Option<View<'a>>,
    /// The pages of each sequence: int32 `[batch, entries]`. What lies behind the pages of a sequence is not read.
    pub page_table: Option<View<'a>>,
    /// One more logit per head, `[num_q_heads]`.
    pub sinks: Option<View<'a>>,
    /// ALiBi slopes, `[num_q_heads]`.
    pub alibi_slopes: Option<View<'a>>,
    /// Where the result goes, `[batch, q_len, num_q_heads, head_dim_v]`.
    pub out: ViewMut<'a>,
    /// Where the log of the sum of exponentials goes, `[batch, num_q_heads, q_len]`.
    pub lse: Option<ViewMut<'a>>,
}

const RANK: &str = "[batch, len, heads, head_dim]; a cache of pages is [num_pages, page_size, heads, head_dim]";

fn rank_is(tensor: &'static str, view: &View<'_>, rank: usize, allowed: &'static str) -> Result<()> {
    let (got, shape) = (view.shape().len(), *view.shape());
    if got == rank { Ok(()) } else { Err(Error::Rank { tensor, got, shape, allowed }) }
}

/// The cache as all sequences see it.
struct Reads<'a> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    codes: [Option<Codes<'a>>; 2],
    page_table: Option<View<'a>>,
    sinks: Option<View<'a>>,
    alibi_slopes: Option<View<'a>>,
}

impl<'a> Reads<'a> {
    /// Sequence `b` with `kv_len` keys.
    fn sequence(&self, b: usize, kv_len: usize) -> Sequence<'a> {
        let alone = b..b + 1;
        let (mut k, mut v) = (self.k, self.v);
        if self.page_table.is_none() {
            [k, v] = [k, v].map(|cache| cache.narrow(0, &alone).narrow(1, &(0..kv_len)));
        }
        let [of_k, of_v] = self.codes.map(|codes| codes.map(|codes| Box::new(self.codes_of(codes, b, kv_len))));
        let pages = self.page_table.map(|table| (table.index(0, b), kv_len));
        let codes = Qkv { q: None, k: of_k, v: of_v };
        let (sinks, alibi_slopes) = (self.sinks, self.alibi_slopes);
        Sequence { q: self.q.narrow(0, &alone), k, v, codes, sinks, alibi_slopes, dropout: None, pages }
    }

    /// Those of the factors that are of sequence `b`.
    fn codes_of(&self, codes: Codes<'a>, b: usize, kv_len: usize) -> Codes<'a> {
        let is_paged = self.page_table.is_some();
        let part = |view: View<'a>| {
            let per_key = is_per_key(&view, codes.granularity, &self.k);
            match view.shape().len() {
                0 => view,
                _ if per_key && is_paged => view,
                2.. if per_key => view.narrow(0, &(b..b + 1)).narrow(1, &(0..kv_len)),
                _ => view.narrow(0, &(b..b + 1)),
            }
        };
        Codes { descale: part(codes.descale), zero_point: codes.zero_point.map(part), ..codes }
    }
}

/// A call of which everything is proven: nothing is written yet.
pub(super) struct Prepared<'a> {
    q: View<'a>,
    /// Of keys and of values, with what makes numbers of codes.
    caches: [CacheView<'a>; 2],
    codes: [Option<CacheCodes<'a>>; 2],
    page_table: Option<View<'a>>,
    sinks: Option<View<'a>>,
    alibi_slopes: Option<View<'a>>,
    /// Of each sequence.
    outs: Vec<ViewMut<'a>>,
    lses: Option<Vec<ViewMut<'a>>>,
    /// Its keys with the new ones.
    after: Vec<usize>,
    pub(super) plans: Vec<Arc<Plan>>,
    appends: Append<'a>,
}

impl KvCacheTensors<'_> {
    /// Whether new values are written with the new keys: each value is the first numbers of its key, in the caches and in `k` and `v`, as
    /// addresses and strides tell, and what makes numbers of codes is one thing for both. Only then may caches share memory beside a `v`.
    #[must_use]
    pub fn values_begin_keys(&self) -> bool {
        let codes = [self.k_codes.as_ref(), self.v_codes.as_ref()];
        values_begin_keys([self.k.as_ref(), self.v.as_ref()], [&self.k_cache, &self.v_cache], codes)
    }

    /// Ranks, devices, and that there are as many sequences everywhere.
    pub(super) fn check(&self) -> Result<()> {
        let (k_cache, v_cache) = (self.k_cache.view(), self.v_cache.view());
        for (tensor, view) in [("q", &self.q), ("k_cache", &k_cache), ("v_cache", &v_cache)] {
            rank_is(tensor, view, 4, RANK)?;
        }
        let batch = self.q.shape()[0];
        let same = |tensor, size, got, expected| {
            if got == expected { Ok(()) } else { Err(Error::SizeMismatch { tensor, size, got, other: "q", expected }) }
        };
        match &self.page_table {
            Some(table) => {
                rank_is("page_table", table, 2, "a page table is [batch, entries]")?;
                same("page_table", "batch", table.shape()[0], batch)?;
            }
            None => {
                same("k_cache", "batch", k_cache.shape()[0], batch)?;
                same("v_cache", "batch", v_cache.shape()[0], batch)?;
                let (got, expected) = (v_cache.shape()[1], k_cache.shape()[1]);
                if got != expected {
                    let (tensor, size, other) = ("v_cache", "kv_len", "k_cache");
                    return Err(Error::SizeMismatch { tensor, size, got, other, expected });
                }
            }
        }
        self.check_scales(self.k_codes.as_ref(), &k_cache, ["k_cache", "k_descale", "k_zero_point"])?;
        self.check_scales(self.v_codes.as_ref(), &v_cache, ["v_cache", "v_descale", "v_zero_point"])?;
        for (tensor, view) in [("k", &self.k), ("v", &self.v)] {
            if let Some(view) = view {
                rank_is(tensor, view, 4, RANK)?;
                same(tensor, "batch", view.shape()[0], batch)?;
            }
        }
        if self.v.is_some() && self.k.is_none() {
            let allowed = "the new keys that v goes with".to_owned();
            return Err(Error::Option { option: "k", got: "None".to_owned(), allowed });
        }
        if let Some((k, v)) = self.k.as_ref().zip(self.v.as_ref()) {
            let (got, expected) = (v.shape()[1], k.shape()[1]);
            if got != expected {
                return Err(Error::SizeMismatch { tensor: "v", size: "new keys", got, other: "k", expected });
            }
        }
        let [q_len, heads] = [self.q.shape()[1], self.q.shape()[2]];
        let shape_is = |tensor, out: &ViewMut<'_>, expected: Shape| {
            let got = *out.shape();
            if got == expected { Ok(()) } else { Err(Error::ShapeMismatch { tensor, got, expected }) }
        };
        let dim_v = match self.v_codes.as_ref() {
            Some(codes) => codes.head_dim.unwrap_or(v_cache.shape()[3] * codes.format.codes_per_byte()),
            None => v_cache.shape()[3],
        };
        shape_is("out", &self.out, [batch, q_len, heads, dim_v].into())?;
        self.lse.as_ref().map_or(Ok(()), |lse| shape_is("lse", lse, [batch, heads, q_len].into()))
    }

    /// That there are factors for every key of a cache, or for every sequence.
    fn check_scales(
        &self,
        codes: Option<&CacheCodes<'_>>,
        cache: &View<'_>,
        [cache_name, descale, zero_point]: [&'static str; 3],
    ) -> Result<()> {
        let Some(codes) = codes else { return Ok(()) };
        let parts =
            [(descale, Some(codes.descale.view())), (zero_point, codes.zero_point.as_ref().map(CacheView::view))];
        let given = parts.into_iter().filter_map(|(tensor, view)| Some((tensor, view?)));
        for (tensor, view) in given.filter(|(_, view)| !view.shape().is_empty()) {
            let of_keys: &[&str] =
                if self.page_table.is_some() { &["num_pages", "page_size"] } else { &["batch", "kv_len"] };
            let (sizes, other, of) = match is_per_key(&view, codes.granularity, cache) {
                true => (of_keys, cache_name, cache),
                false => (&["batch"][..], "q", &self.q),
            };
            for (size, (&got, &expected)) in sizes.iter().zip(view.shape().iter().zip(of.shape().iter())) {
                if got != expected {
                    return Err(Error::SizeMismatch { tensor, size, got, other, expected });
                }
            }
        }
        Ok(())
    }

    /// The keys of each sequence before the new ones.
    pub(super) fn lengths(&self) -> Result<Vec<usize>> {
        let batch = self.q.shape()[0];
        let new = self.k.as_ref().map_or(0, |k| k.shape()[1]);
        let room = self.room();
        match &self.cache_seqlens {
            Some(given) if new <= room => lengths::lengths("cache_seqlens", given, batch, room - new),
            None if self.page_table.is_none() && self.k.is_none() => Ok(vec![room; batch]),
            None => {
                let allowed = "int32 [batch]: pages, and caches that take new keys, do not tell how many they hold";
                Err(Error::Option { option: "cache_seqlens", got: "None".to_owned(), allowed: allowed.to_owned() })
            }
            Some(_) => {
                let (got, size, other) = (new, "new keys, of which the cache holds", "k_cache");
                Err(Error::SizeMismatch { tensor: "k", size, got, other, expected: room })
            }
        }
    }

    /// Keys for which a sequence has room.
    pub(super) fn room(&self) -> usize {
        let cache = self.k_cache.view();
        match &self.page_table {
            Some(table) => table.shape()[1].saturating_mul(cache.shape()[1]),
            None => cache.shape()[1],
        }
    }

    /// What is read of all sequences.
    pub(super) fn apart(&self, tensor: &'static str, out: &ViewMut<'_>) -> Result<()> {
        let views = |codes: &Option<CacheCodes<'_>>, name: [&'static str; 2]| -> Result<()> {
            let Some(codes) = codes else { return Ok(()) };
            let zero_point = codes.zero_point.as_ref().map(CacheView::view);
            prove_apart(tensor, out, [(name[0], Some(&codes.descale.view())), (name[1], zero_point.as_ref())])
        };
        views(&self.k_codes, ["k_descale", "k_zero_point"])?;
        views(&self.v_codes, ["v_descale", "v_zero_point"])?;
        let inputs = [
            ("q", Some(&self.q)),
            ("k_cache", Some(&self.k_cache.view())),
            ("v_cache", Some(&self.v_cache.view())),
            ("k", self.k.as_ref()),
            ("v", self.v.as_ref()),
            ("cache_seqlens", self.cache_seqlens.as_ref()),
            ("page_table", self.page_table.as_ref()),
            ("sinks", self.sinks.as_ref()),
            ("alibi_slopes", self.alibi_slopes.as_ref()),
        ];
        prove_apart(tensor, out, inputs)
    }
}

/// What makes numbers of caches that are codes, for all sequences together; of a cache without pages for its first `kv_len` keys.
pub(super) fn codes_of_all<'a>(
    [of_k, of_v]: [Option<&'a CacheCodes<'_>>; 2],
    k_cache: &View<'_>,
    is_paged: bool,
    kv_len: usize,
) -> Qkv<Option<Box<Codes<'a>>>> {
    let narrowed = |codes: &'a CacheCodes<'_>| {
        let codes = codes.codes();
        let part = |view: View<'a>| {
            let is_cut = !is_paged && view.shape().len() >= 2 && is_per_key(&view, codes.granularity, k_cache);
            if is_cut { view.narrow(1, &(0..kv_len)) } else { view }
        };
        Box::new(Codes { descale: part(codes.descale), zero_point: codes.zero_point.map(part), ..codes })
    };
    Qkv { q: None, k: of_k.map(narrowed), v: of_v.map(narrowed) }
}

/// An error of a sequence's spec, whose k and v are the caches.
pub(super) fn of_caches(mut error: Error) -> Error {
    let rename = |name: &mut &'static str| match *name {
        "k" => *name = "k_cache",
        "v" => *name = "v_cache",
        _ => {}
    };
    match &mut error {
        Error::DtypeMismatch { tensor, .. }
        | Error::OtherDtype { tensor, .. }
        | Error::UnsupportedDtype { tensor, .. }
        | Error::MissingPart { tensor, .. }
        | Error::UnexpectedPart { tensor, .. }
        | Error::ZeroHeadDim { tensor, .. }
        | Error::ShapeMismatch { tensor, .. }
        | Error::Overflow { tensor, .. } => rename(tensor),
        Error::SizeMismatch { tensor, other, .. } => {
            rename(tensor);
            rename(other);
        }
        _ => {}
    }
    error
}

/// The options of a call whose last query is at the last key.
pub(super) fn bottom_right(options: &Options, has_slopes: bool, q_len: usize) -> Result<Options> {
    let options = Options { layout: TensorLayout::Bshd, ..*options };
    let positions = has_slopes || options.window != Window::default();
    match options.causal {
        Some(Causal::TopLeft) => {
            let allowed = "None, 'bottom_right': the last query is at the last key of a cache".to_owned();
            Err(Error::Option { option: "causal", got: "'top_left'".to_owned(), allowed })
        }
        // One query sees the same keys with and without causal masking.
        None if positions && q_len == 1 => Ok(Options { causal: Some(Causal::BottomRight), ..options }),
        None if positions => Err(Error::unsupported(
            "a window, or slopes, of several queries without causal masking",
            "their positions count from the last key, which only causal masking says so far",
            "give causal='bottom_right', or one query a call",
        )),
        _ => Ok(options),
    }
}

impl Engine {
    /// Appends `k` and `v` to a cache, and gives the attention of each sequence to all its keys: what
    /// [`attention_into`](Engine::attention_into) gives for each alone on the same keys in one tensor, bit for bit.
    ///
    /// New keys are stored in the dtype of the cache; where that is codes they are quantized with scales of their own, by token or block, or
    /// with the factor of the tensor. `options.layout` is not read: the layout is `[batch, len, heads, head_dim]`.
    ///
    /// # Errors
    /// Any [`Error`]; nothing is written before everything is proven. [`Error::Length`] for a sequence that the cache does not hold,
    /// [`Error::PageIndex`] for a page that it does not have, [`Error::PageShared`] for new keys in a page of another sequence,
    /// [`Error::DeviceMismatch`] outside host memory, where [`plan_with_kvcache`](Engine::plan_with_kvcache) serves; [`QuantError::NoCode`] for a number that the format of the cache does not hold.
    pub fn attention_with_kvcache(
        &self,
        tensors: KvCacheTensors<'_>,
        options: &Options,
        queue: &Queue<'_>,
    ) -> Result<(), QuantError> {
        if tensors.q.device() != Device::Cpu {
            let (expected, got) = (tensors.q.device(), Device::Cpu);
            return Err(Error::DeviceMismatch { tensor: "queue", expected, got }.into());
        }
        let executor = host(queue)?;
        let Prepared { q, caches, codes, page_table, sinks, alibi_slopes, outs, lses, after, plans, appends } =
            self.prepare(tensors, options, executor.threads())?;
        let ([mut k_cache, mut v_cache], [mut k_codes, mut v_codes]) = (caches, codes);
        let batch = Batch::new(&plans, executor.threads())?;
        // Memory that cannot be had is told before anything is written.
        self.with_workspace(batch.workspace_bytes(), |workspace| {
            appends.write([&mut k_cache, &mut v_cache], [k_codes.as_mut(), v_codes.as_mut()])?;

            let (k, v) = (k_cache.view(), v_cache.view());
            let codes = [k_codes.as_ref(), v_codes.as_ref()].map(|codes| codes.map(CacheCodes::codes));
            let reads = Reads { q, k, v, codes, page_table, sinks, alibi_slopes };
            let mut lses = lses.map(Vec::into_iter);
            let sequence = |(b, out)| reads.sequence(b, after[b]).tensors(out, lses.as_mut().and_then(Iterator::next));
            let tensors = outs.into_iter().enumerate().map(sequence);
            let checked = tensors.zip(&plans).map(|(tensors, plan)| Operands::check(tensors, plan.spec()));
            let mut operands = checked.collect::<Result<Vec<_>>>()?;
            Ok(batch.run(&mut operands, workspace, executor)?)
        })
    }

    /// Proves everything about a call on so many threads, and plans each sequence.
    ///
    /// # Errors
    /// As [`attention_with_kvcache`](Engine::attention_with_kvcache).
    pub(super) fn prepare<'a>(
        &self,
        tensors: KvCacheTensors<'a>,
        options: &Options,
        threads: usize,
    ) -> Result<Prepared<'a>, QuantError> {
        tensors.check()?;
        let options = bottom_right(options, tensors.alibi_slopes.is_some(), tensors.q.shape()[1])?;
        let before = tensors.lengths()?;
        let new = tensors.k.as_ref().map_or(0, |k| k.shape()[1]);
        let after: Vec<usize> = before.iter().map(|length| length + new).collect();
        tensors.apart("out", &tensors.out)?;
        if let Some(lse) = &tensors.lse {
            tensors.apart("lse", lse)?;
            prove_apart("lse", lse, [("out", Some(&tensors.out.as_view()))])?;
        }
        let KvCacheTensors { q, k_cache, v_cache, k_codes, v_codes, k, v, page_table, .. } = tensors;
        let KvCacheTensors { sinks, alibi_slopes, out, lse, .. } = tensors;
        let each: Vec<_> = (0..before.len()).map(|b| b..b + 1).collect();
        let outs = split("out", out, 0, &each)?;
        let lses = lse.map(|lse| split("lse", lse, 0, &each)).transpose()?;

        let plans = {
            let (k, v) = (k_cache.view(), v_cache.view());
            let codes = [k_codes.as_ref(), v_codes.as_ref()].map(|codes| codes.map(CacheCodes::codes));
            let reads = Reads { q, k, v, codes, page_table, sinks, alibi_slopes };
            let lse = |b: usize| lses.as_ref().map(|lses| &lses[b]);
            let spec = |(b, out)| reads.sequence(b, after[b]).spec(out, lse(b), &options).map_err(of_caches);
            let specs = outs.iter().enumerate().map(spec).collect::<Result<Vec<_>>>()?;
            self.plan_each(&specs, threads)?
        };
        let appends = Append::new(k, v, &before, page_table.as_ref(), &k_cache.view())?;
        appends.check(&after, [&k_cache, &v_cache], [k_codes.as_ref(), v_codes.as_ref()])?;
        let (caches, codes) = ([k_cache, v_cache], [k_codes, v_codes]);
        Ok(Prepared { q, caches, codes, page_table, sinks, alibi_slopes, outs, lses, after, plans, appends })
    }
}
