//! Keys and values in pages of a cache: what is said of them, and how they come to canonical order.
//!
//! ```text
//! k_cache, v_cache   bshd [num_pages, page_size, num_kv_heads, head_dim]    bhsd [num_pages, num_kv_heads, page_size, head_dim]
//! page_table         [entries] of int32
//! key j              row j % page_size of page page_table[j / page_size]
//! ```
//! In canonical order k is `[1, num_kv_heads, kv_len, head_dim]`, with the strides of a page, and the stride from page to page in place of
//! that of the batch. Scales that have a row for each key lie in pages as the keys do; those of a tensor, a head or a channel are as of
//! one sequence. Entries of the table beyond those that `kv_len` takes are not read.

use super::quantized::{CodesForm, CodesSpec, numbers_of};
use super::{PagesSpec, TensorSpec};
use crate::{DType, Error, Granularity, Result, TensorForm, TensorLayout};

const PAGES: &str = "pages of a cache are [num_pages, page_size, num_kv_heads, head_dim], in layout bhsd \
                     [num_pages, num_kv_heads, page_size, head_dim]";

/// k or v: a strided tensor, or `kv_len` keys in pages. Beside it what the pages are.
///
/// # Errors
/// As [`numbers_of`]; [`Error::Rank`] for pages of another rank.
pub(crate) fn keys(
    tensor: &'static str,
    form: &TensorForm,
    codes: Option<&CodesForm>,
    layout: TensorLayout,
    kv_len: Option<usize>,
) -> Result<(TensorSpec<4>, Pages)> {
    if kv_len.is_some() && form.shape.len() != 4 {
        return Err(Error::Rank { tensor, got: form.shape.len(), shape: form.shape, allowed: PAGES });
    }
    let mut spec = numbers_of(tensor, form, codes, layout)?;
    let [num_pages, _, page_size, _] = spec.shape;
    if let Some(kv_len) = kv_len {
        (spec.shape[0], spec.shape[2]) = (1, kv_len);
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
/// As [`CodesSpec::new`].
pub(crate) fn codes_of_keys(
    tensor: &'static str,
    form: &CodesForm,
    numbers: &TensorSpec<4>,
    pages: Pages,
    layout: TensorLayout,
) -> Result<CodesSpec> {
    let [_, heads, kv_len, dim] = numbers.shape;
    let in_pages = CodesSpec::new(tensor, form, [pages.num_pages, heads, pages.page_size, dim], 4, layout);
    match in_pages {
        Ok(mut codes) if matches!(codes.granularity, Granularity::Token | Granularity::Block(_)) => {
            for part in [Some(&mut codes.descale), codes.zero_point.as_mut()].into_iter().flatten() {
                (part.shape[0], part.shape[2]) = (1, kv_len);
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
pub(super) fn pages_spec(kv_len: usize, [k, v]: [Pages; 2], table: &TensorForm) -> Result<PagesSpec> {
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
    let rank = |allowed| Error::Rank { tensor: "page_table", got: table.shape.len(), shape: table.shape, allowed };
    let of_table = (table.shape.len() == 1).then(|| TensorSpec::of(table)).flatten();
    let table = of_table.ok_or_else(|| rank("a sequence has one dimension of entries"))?;
    let spec = PagesSpec { page_size: k.page_size, num_pages: k.num_pages, table };
    let (entries, needed) = (table.shape[0], if k.page_size == 0 { usize::MAX } else { spec.used(kv_len) });
    if kv_len > 0 && entries < needed {
        return Err(Error::PageTableShort { entries, kv_len, page_size: k.page_size });
    }
    Ok(spec)
}
