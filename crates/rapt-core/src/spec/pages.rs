//! Keys and values in pages of a cache: what is said of them, and how they come to canonical order.
//!
//! ```text
//! k_cache, v_cache   bshd [num_pages, page_size, num_kv_heads, head_dim]    bhsd [num_pages, num_kv_heads, page_size, head_dim]
//! page_table         [batch, entries] of int32, or [entries] of one sequence
//! key j              row j % page_size of page page_table[j / page_size]
//! ```
//! In canonical order k is `[batch, num_kv_heads, kv_len, head_dim]`, with the strides of a page, and the stride from page to page in place
//! of that of the batch. Scales that have a row for each key lie in pages as the keys do; those of a tensor, a head or a channel are as of
//! one sequence. Entries of the table beyond those that `kv_len` takes are not read.

use super::quantized::{CodesForm, CodesSpec, numbers_of};
use super::{PagesSpec, TensorSpec};
use crate::{DType, Error, Granularity, Result, ScaleLayout, TensorForm, TensorLayout};

const PAGES: &str = "pages of a cache are [num_pages, page_size, num_kv_heads, head_dim], in layout bhsd \
                     [num_pages, num_kv_heads, page_size, head_dim]";

/// k or v: a strided tensor, or in pages, `[batch, kv_len]` of them. Beside it what the pages are.
///
/// # Errors
/// As [`numbers_of`]; [`Error::Rank`] for pages of another rank.
pub(crate) fn keys(
    tensor: &'static str,
    form: &TensorForm,
    codes: Option<&CodesForm>,
    layout: TensorLayout,
    in_pages: Option<[usize; 2]>,
) -> Result<(TensorSpec<4>, Pages)> {
    if in_pages.is_some() && form.shape.len() != 4 {
        return Err(Error::Rank { tensor, got: form.shape.len(), shape: form.shape, allowed: PAGES });
    }
    let mut spec = numbers_of(tensor, form, codes, layout)?;
    let [num_pages, _, page_size, _] = spec.shape;
    if let Some([batch, kv_len]) = in_pages {
        (spec.shape[0], spec.shape[2]) = (batch, kv_len);
    }
    Ok((spec, Pages { num_pages, page_size }))
}

/// How many pages there are, and how many keys each has; of a tensor without pages its batch and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    pub(crate) num_pages: usize,
    pub(crate) page_size: usize,
}

/// The codes of k or v in pages.
///
/// # Errors
/// As [`CodesSpec::new`]; [`Error::Option`] for swizzled scales.
pub(crate) fn codes_of_keys(
    tensor: &'static str,
    form: &CodesForm,
    numbers: &TensorSpec<4>,
    pages: Pages,
    layout: TensorLayout,
) -> Result<CodesSpec> {
    let [batch, heads, kv_len, dim] = numbers.shape;
    if form.scale_layout != ScaleLayout::Plain {
        let (option, got) = ("scale_layout", format!("'{}'", form.scale_layout.name()));
        let allowed = "'plain': in pages the scales of a key lie where the key does".to_owned();
        return Err(Error::Option { option, got, allowed });
    }
    let in_pages = CodesSpec::new(tensor, form, [pages.num_pages, heads, pages.page_size, dim], 4, layout);
    match in_pages {
        Ok(mut codes) if matches!(codes.granularity, Granularity::Token | Granularity::Block(_)) => {
            for part in [Some(&mut codes.descale), codes.zero_point.as_mut()].into_iter().flatten() {
                (part.shape[0], part.shape[2]) = (batch, kv_len);
            }
            Ok(codes)
        }
        in_pages => CodesSpec::new(tensor, form, numbers.shape, 4, layout).or_else(|error| in_pages.and(Err(error))),
    }
}

/// The pages of `k`, which are those of `v`, with their table.
///
/// # Errors
/// [`Error::SizeMismatch`] for pages that differ or hold nothing; [`Error::UnsupportedDtype`], [`Error::Rank`] and
/// [`Error::PageTableShort`] for the table.
pub(super) fn pages_spec([batch, kv_len]: [usize; 2], [k, v]: [Pages; 2], table: &TensorForm) -> Result<PagesSpec> {
    let differs = |size, got, expected| Err(Error::SizeMismatch { tensor: "v", size, got, other: "k", expected });
    if v.num_pages != k.num_pages {
        return differs("num_pages", v.num_pages, k.num_pages);
    }
    if v.page_size != k.page_size {
        return differs("page_size", v.page_size, k.page_size);
    }
    if table.dtype != DType::I32 {
        return Err(Error::UnsupportedDtype { tensor: "page_table", got: table.dtype, allowed: vec![DType::I32] });
    }
    let table = page_table(table)?;
    if table.shape[0] != batch {
        let (tensor, size, got) = ("page_table", "batch", table.shape[0]);
        return Err(Error::SizeMismatch { tensor, size, got, other: "q", expected: batch });
    }
    let spec = PagesSpec { page_size: k.page_size, num_pages: k.num_pages, table };
    let (entries, needed) = (table.shape[1], if k.page_size == 0 { usize::MAX } else { spec.used(kv_len) });
    if kv_len > 0 && entries < needed {
        return Err(Error::PageTableShort { entries, kv_len, page_size: k.page_size });
    }
    Ok(spec)
}

/// A page table as `[batch, entries]`.
///
/// # Errors
/// [`Error::Rank`].
pub(crate) fn page_table(form: &TensorForm) -> Result<TensorSpec<2>> {
    let allowed = "a page table is [batch, entries], or [entries] of one sequence";
    let rank = || Error::Rank { tensor: "page_table", got: form.shape.len(), shape: form.shape, allowed };
    match form.shape.len() {
        1 => {
            let TensorSpec { dtype, shape: [entries], strides: [step], alignment } =
                TensorSpec::<1>::of(form).ok_or_else(rank)?;
            Ok(TensorSpec { dtype, shape: [1, entries], strides: [0, step], alignment })
        }
        _ => TensorSpec::of(form).ok_or_else(rank),
    }
}

/// Where sequences begin, as int32 `[sequences + 1]`.
///
/// # Errors
/// [`Error::UnsupportedDtype`], [`Error::Rank`], [`Error::Option`] for none at all.
pub(crate) fn offsets_spec(tensor: &'static str, form: &TensorForm) -> Result<TensorSpec<1>> {
    if form.dtype != DType::I32 {
        return Err(Error::UnsupportedDtype { tensor, got: form.dtype, allowed: vec![DType::I32] });
    }
    let allowed = "one number for each sequence is asked, and one more";
    let rank = || Error::Rank { tensor, got: form.shape.len(), shape: form.shape, allowed };
    let spec = TensorSpec::<1>::of(form).filter(|_| form.shape.len() == 1).ok_or_else(rank)?;
    if spec.shape[0] == 0 {
        let allowed = "offsets of sequences begin with 0".to_owned();
        return Err(Error::Option { option: tensor, got: "[]".to_owned(), allowed });
    }
    Ok(spec)
}

/// The lengths of sequences as int32 `[batch]`.
///
/// # Errors
/// [`Error::UnsupportedDtype`], [`Error::Rank`], [`Error::SizeMismatch`].
pub(crate) fn lengths_spec(batch: usize, form: &TensorForm) -> Result<TensorSpec<1>> {
    let tensor = "cache_seqlens";
    if form.dtype != DType::I32 {
        return Err(Error::UnsupportedDtype { tensor, got: form.dtype, allowed: vec![DType::I32] });
    }
    let allowed = "one number for each sequence is asked";
    let rank = || Error::Rank { tensor, got: form.shape.len(), shape: form.shape, allowed };
    let spec = TensorSpec::<1>::of(form).ok_or_else(rank)?;
    if spec.shape[0] != batch {
        return Err(Error::SizeMismatch { tensor, size: "sequences", got: spec.shape[0], other: "q", expected: batch });
    }
    Ok(spec)
}
