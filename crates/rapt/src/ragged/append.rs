//! New keys and values into a cache: where they go, whether they may, and the writing.

use std::collections::HashMap;

use rapt_core::{DType, Error, Granularity, Result, ScaleLayout, View, ViewMut, prove_disjoint, prove_injective};
use rapt_quant::{Given, Parts, QuantError, Quantized, Scheme, quantize, quantize_with_global};

use super::cache_view::{CacheCodes, CacheView, Run, is_per_key};

/// The new keys of all sequences.
pub(super) struct Append<'a> {
    /// New keys, and new values.
    new: [Option<View<'a>>; 2],
    runs: Vec<Run>,
    /// The entries of each sequence's page table that its keys take, new ones included.
    pages: Option<Vec<Vec<i32>>>,
    num_pages: usize,
}

const NAMES: [[&str; 2]; 2] = [["k", "k_cache"], ["v", "v_cache"]];
const SCALES: [&str; 2] = ["k_descale", "v_descale"];

impl<'a> Append<'a> {
    /// Where new keys go behind the first `before` of each sequence.
    ///
    /// # Errors
    /// [`Error::UnsupportedDtype`] for the page table, [`Error::PageIndex`] for an entry that is no page.
    pub(super) fn new(
        k: Option<View<'a>>,
        v: Option<View<'a>>,
        before: &[usize],
        page_table: Option<&View<'_>>,
        cache: &View<'_>,
    ) -> Result<Self> {
        let count = k.as_ref().map_or(0, |k| k.shape()[1]);
        let (num_pages, page_size) = (cache.shape()[0], cache.shape()[1]);
        let pages = match page_table {
            Some(table) => {
                let taken = |(b, &length): (usize, &usize)| {
                    let used = (length + count).div_ceil(page_size.max(1));
                    entries(&table.index(0, b), used, num_pages)
                };
                Some(before.iter().enumerate().map(taken).collect::<Result<Vec<_>>>()?)
            }
            None => None,
        };
        let mut runs = Vec::new();
        for (sequence, &length) in before.iter().enumerate() {
            let mut done = 0;
            while done < count {
                let at = length + done;
                let run = match &pages {
                    Some(pages) => {
                        let (row, block) = (at % page_size, pages[sequence][at / page_size] as usize);
                        let len = (page_size - row).min(count - done);
                        Run { sequence, block, rows: row..row + len, new: done..done + len }
                    }
                    None => Run { sequence, block: sequence, rows: at..at + count, new: 0..count },
                };
                done = run.new.end;
                runs.push(run);
            }
        }
        Ok(Append { new: [k, v], runs, pages, num_pages })
    }

    /// Proves that the new keys may be written.
    ///
    /// # Errors
    /// [`Error::PageShared`], [`Error::ReadOnly`], [`Error::OtherDtype`], [`Error::SizeMismatch`], [`Error::OutputOverlaps`],
    /// [`Error::OutputOverlapsItself`], [`Error::Unsupported`] for codes whose factors are not of a key or of the tensor.
    pub(super) fn check(
        &self,
        after: &[usize],
        caches: [&CacheView<'_>; 2],
        codes: [Option<&CacheCodes<'_>>; 2],
    ) -> Result<(), QuantError> {
        if self.runs.is_empty() {
            return Ok(());
        }
        self.check_pages(after)?;
        check_new(self.new.each_ref().map(Option::as_ref), caches, codes)
    }

    /// Proves that no page that is written belongs to two.
    fn check_pages(&self, after: &[usize]) -> Result<()> {
        let Some(pages) = &self.pages else { return Ok(()) };
        debug_assert_eq!(pages.len(), after.len());
        // Of each page the first sequence that has it.
        let mut owners: HashMap<i32, usize> = HashMap::with_capacity(self.num_pages.min(1 << 16));
        let mut shared: HashMap<i32, usize> = HashMap::new();
        for (sequence, pages) in pages.iter().enumerate() {
            for &page in pages {
                if let Some(&first) = owners.get(&page) {
                    shared.entry(page).or_insert(if first == sequence { first } else { sequence });
                } else {
                    owners.insert(page, sequence);
                }
            }
        }
        for run in &self.runs {
            let page = i32::try_from(run.block).unwrap_or(i32::MAX);
            if let Some(&other) = shared.get(&page) {
                let other = if other == run.sequence { owners[&page] } else { other };
                return Err(Error::PageShared { page, writer: run.sequence, other });
            }
        }
        Ok(())
    }

    /// Writes the new keys and values, as they are or as codes. All become codes first, so that a number without a code is refused before
    /// anything is written.
    ///
    /// # Errors
    /// Those of [`quantize`].
    pub(super) fn write(
        &self,
        caches: [&mut CacheView<'_>; 2],
        codes: [Option<&mut CacheCodes<'_>>; 2],
    ) -> Result<(), QuantError> {
        let of_codes = codes.each_ref().map(|codes| codes.as_deref());
        let mut new = self.new.each_ref().map(Option::as_ref);
        if values_begin_keys(new, caches.each_ref().map(|cache| &**cache), of_codes) {
            new[1] = None;
        }
        let mut quantized = [None, None];
        for n in 0..2 {
            if let (Some(new), Some(codes)) = (new[n], of_codes[n]) {
                quantized[n] = Some(encode(new, codes, &caches[n].view())?);
            }
        }
        for (n, (cache, codes)) in caches.into_iter().zip(codes).enumerate() {
            let (Some(new), CacheView::Write(cache)) = (new[n], cache) else { continue };
            match codes.zip(quantized[n].as_ref()) {
                None => self.copy(NAMES[n][0], new, cache)?,
                Some((codes, quantized)) => self.copy_codes(&quantized.parts()?, cache, codes)?,
            }
        }
        Ok(())
    }

    fn copy(&self, name: &'static str, new: &View<'_>, cache: &mut ViewMut<'_>) -> Result<()> {
        for run in &self.runs {
            let mut block = cache.narrow(0, &(run.block..run.block + 1));
            copy_rows(name, &run.of_new(new), &mut block.narrow(1, &run.rows))?;
        }
        Ok(())
    }

    fn copy_codes(&self, new: &Parts<'_>, cache: &mut ViewMut<'_>, codes: &mut CacheCodes<'_>) -> Result<()> {
        let per_key = is_per_key(&codes.descale.view(), codes.granularity, &cache.as_view());
        self.copy("codes", &new.codes, cache)?;
        let scales = [
            ("scale", new.scale.as_ref(), Some(&mut codes.descale)),
            ("zero_point", new.zero_point.as_ref(), codes.zero_point.as_mut()),
        ];
        for (name, from, to) in scales {
            if let (true, Some(from), Some(CacheView::Write(to))) = (per_key, from, to) {
                self.copy(name, from, to)?;
            }
        }
        Ok(())
    }
}

/// Proves that new keys and values may be written to `caches`, wherever they go there.
///
/// # Errors
/// Those of [`Append::check`], but for pages.
pub(super) fn check_new(
    given: [Option<&View<'_>>; 2],
    caches: [&CacheView<'_>; 2],
    codes: [Option<&CacheCodes<'_>>; 2],
) -> Result<(), QuantError> {
    for (n, [name, cache_name]) in NAMES.into_iter().enumerate() {
        let Some(new) = given[n] else { continue };
        let CacheView::Write(cache) = caches[n] else {
            return Err(Error::ReadOnly { tensor: cache_name }.into());
        };
        fits(name, cache_name, new, &cache.as_view(), codes[n])?;
        let scale = codes[n].map(|codes| written_scales(SCALES[n], codes, &cache.as_view())).transpose()?.flatten();
        for (written_name, written) in [(cache_name, Some(cache)), (SCALES[n], scale)] {
            let Some(written) = written else { continue };
            prove_injective(written_name, written)?;
            for (n, [name, ..]) in NAMES.into_iter().enumerate() {
                if let Some(new) = given[n] {
                    prove_disjoint(written_name, written, name, new)?;
                }
            }
        }
    }
    if let (CacheView::Write(k), CacheView::Write(v), [_, Some(_)]) = (caches[0], caches[1], given)
        && !values_begin_keys(given, caches, codes)
    {
        prove_disjoint("k_cache", k, "v_cache", &v.as_view())?;
    }
    Ok(())
}

/// Whether the rows of `part` are the first numbers of those of `whole`: the same memory, as addresses and strides tell.
fn begins(part: &View<'_>, whole: &View<'_>) -> bool {
    let (shape, of_whole) = (part.shape(), whole.shape());
    let rank = shape.len();
    let is_same = part.dtype() == whole.dtype() && part.device() == whole.device() && part.address() == whole.address();
    let last = rank.saturating_sub(1);
    let is_within =
        rank == of_whole.len() && (0..rank).all(|d| shape[d] == of_whole[d] || (d == last && shape[d] < of_whole[d]));
    is_same && is_within && (0..rank).all(|d| shape[d] < 2 || part.strides()[d] == whole.strides()[d])
}

/// Whether new values need no writing, because new keys write them: each value of the cache is the first numbers of its key, each new value
/// those of the new key, and what makes numbers of codes is one thing for both. Fewer than all of them: one cache that is given twice is
/// taken for a mistake.
pub(super) fn values_begin_keys(
    new: [Option<&View<'_>>; 2],
    [k_cache, v_cache]: [&CacheView<'_>; 2],
    codes: [Option<&CacheCodes<'_>>; 2],
) -> bool {
    let [Some(k), Some(v)] = new else { return false };
    let same_codes = match codes {
        [None, None] => true,
        [Some(of_k), Some(of_v)] => {
            let zero_points = [of_v, of_k].map(|of| of.zero_point.as_ref().map(CacheView::view));
            of_k.format == of_v.format
                && of_k.granularity == of_v.granularity
                && of_k.global_scale == of_v.global_scale
                && begins(&of_v.descale.view(), &of_k.descale.view())
                && match &zero_points {
                    [None, None] => true,
                    [Some(of_v), Some(of_k)] => begins(of_v, of_k),
                    _ => false,
                }
        }
        _ => false,
    };
    let is_part = v.shape().last() < k.shape().last();
    is_part && same_codes && begins(v, k) && begins(&v_cache.view(), &k_cache.view())
}

/// New keys as codes of a cache, with factors of their own or with that of the tensor.
fn encode(new: &View<'_>, codes: &CacheCodes<'_>, cache: &View<'_>) -> Result<Quantized, QuantError> {
    let descale = codes.descale.view();
    let given = (!is_per_key(&descale, codes.granularity, cache))
        .then(|| Given { scale: descale, zero_point: codes.zero_point.as_ref().map(CacheView::view) });
    let scheme = scheme_of(codes, cache)?;
    match codes.global_scale {
        Some(global) => quantize_with_global(new, scheme, global),
        None => quantize(new, scheme, given.as_ref()),
    }
}

/// The first `used` entries of a sequence's page table.
fn entries(table: &View<'_>, used: usize, num_pages: usize) -> Result<Vec<i32>> {
    if table.dtype() != DType::I32 {
        return Err(Error::UnsupportedDtype { tensor: "page_table", got: table.dtype(), allowed: vec![DType::I32] });
    }
    if used == 0 {
        return Ok(Vec::new());
    }
    let entries: Vec<i32> = table.lines("page_table")?.line(0).take(used).collect();
    match entries.iter().position(|&page| usize::try_from(page).map_or(true, |page| page >= num_pages)) {
        Some(at) => Err(Error::PageIndex { at, page: entries[at], num_pages }),
        None => Ok(entries),
    }
}

/// Whether new keys are such as the cache holds.
fn fits(
    name: &'static str,
    cache_name: &'static str,
    new: &View<'_>,
    cache: &View<'_>,
    codes: Option<&CacheCodes<'_>>,
) -> Result<()> {
    if codes.is_none() && new.dtype() != cache.dtype() {
        return Err(Error::OtherDtype { tensor: name, expected: cache.dtype(), got: new.dtype() });
    }
    let dim = match codes {
        Some(codes) => codes.head_dim.unwrap_or(cache.shape()[3] * codes.format.codes_per_byte()),
        None => cache.shape()[3],
    };
    for (size, got, expected) in [("num_kv_heads", new.shape()[2], cache.shape()[2]), ("head_dim", new.shape()[3], dim)]
    {
        if got != expected {
            return Err(Error::SizeMismatch { tensor: name, size, got, other: cache_name, expected });
        }
    }
    Ok(())
}

/// How new keys become codes of the cache.
fn scheme_of(codes: &CacheCodes<'_>, cache: &View<'_>) -> Result<Scheme, QuantError> {
    let descale = codes.descale.view();
    let dim = codes.head_dim.unwrap_or(cache.shape()[3] * codes.format.codes_per_byte());
    let granularity = match (codes.granularity, descale.shape().len()) {
        (Some(granularity), _) => granularity,
        (None, 0) => Granularity::Tensor,
        (None, 3) => Granularity::Token,
        (None, 4) if is_per_key(&descale, None, cache) => {
            let own = codes.format.own_block_size();
            Granularity::Block(own.unwrap_or(dim / descale.shape()[3].max(1)))
        }
        _ => Granularity::Head,
    };
    Scheme::new(codes.format, Some(granularity), ScaleLayout::Plain)
}

/// The scales that are written with new keys, if some are.
///
/// # Errors
/// [`Error::Unsupported`], [`Error::ReadOnly`].
fn written_scales<'v, 'c>(
    tensor: &'static str,
    codes: &'v CacheCodes<'c>,
    cache: &View<'_>,
) -> Result<Option<&'v ViewMut<'c>>, QuantError> {
    let scheme = scheme_of(codes, cache)?;
    let refuse = |what: String, why: &str, instead: &str| Err(Error::unsupported(what, why, instead).into());
    match scheme.granularity() {
        Granularity::Head | Granularity::Channel => refuse(
            format!("new keys in a cache with factors by {}", scheme.granularity()),
            "a factor of keys that lie there already does not fit new ones",
            "a cache with factors by token or block",
        ),
        Granularity::Tensor => Ok(None),
        _ => match (&codes.descale, &codes.zero_point) {
            (CacheView::Write(scales), None | Some(CacheView::Write(_))) => Ok(Some(scales)),
            _ => Err(Error::ReadOnly { tensor }.into()),
        },
    }
}

/// Copies elements of any dtype, as bits.
pub(super) fn copy_rows(name: &'static str, from: &View<'_>, to: &mut ViewMut<'_>) -> Result<()> {
    macro_rules! bits {
        ($($bytes:literal $dtype:ident $ty:ty),*) => {
            match from.dtype().size_bytes() {
                $($bytes => {
                    let (from, mut to) =
                        (from.reinterpreted(name, DType::$dtype)?, to.reinterpreted(name, DType::$dtype)?);
                    let lines = from.lines::<$ty>(name)?;
                    (0..lines.count()).try_for_each(|at| to.write_line(name, at, lines.line(at)))
                })*
                _ => Err(Error::UnsupportedDtype { tensor: name, got: from.dtype(), allowed: rapt_core::COMPUTED.to_vec() }),
            }
        };
    }
    bits!(1 U8 u8, 2 U16 u16, 4 U32 u32, 8 U64 u64)
}
