//! The tensors of a cache, as it is given: to be read, or to be written too.

use std::ops::Range;

use rapt_core::{Codes, Format, Granularity, View, ViewMut};

/// A tensor of a cache: to be read, or also written, where keys are appended.
#[derive(Debug)]
pub enum CacheView<'a> {
    /// To be read.
    Read(View<'a>),
    /// To be read and written.
    Write(ViewMut<'a>),
}

impl CacheView<'_> {
    /// To be read.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        match self {
            CacheView::Read(view) => *view,
            CacheView::Write(view) => view.as_view(),
        }
    }
}

/// What makes numbers of the codes of a cache.
#[derive(Debug)]
pub struct CacheCodes<'a> {
    /// The format of the codes.
    pub format: Format,
    /// The factors: `[]` (tensor), `[batch, num_kv_heads]` (head), `[batch, 1, num_kv_heads, head_dim]` (channel); one for each key in the
    /// shape of the cache less head_dim (token), or with the number of blocks in its place (block).
    pub descale: CacheView<'a>,
    /// What is subtracted before, of the descale's shape: with [`Format::Uint8`] and no other.
    pub zero_point: Option<CacheView<'a>>,
    /// One more factor for the whole cache: with [`Format::Nvfp4`] and no other.
    pub global_scale: Option<f32>,
    /// Which elements share a factor, where the descale's shape does not tell; see [`CodesForm::granularity`](crate::CodesForm::granularity).
    pub granularity: Option<Granularity>,
    /// The numbers of a key, where two codes share a byte and the last one is alone in its.
    pub head_dim: Option<usize>,
}

impl CacheCodes<'_> {
    /// As attention reads them.
    pub(super) fn codes(&self) -> Codes<'_> {
        Codes {
            zero_point: self.zero_point.as_ref().map(CacheView::view),
            global_scale: self.global_scale,
            granularity: self.granularity,
            head_dim: self.head_dim,
            ..Codes::new(self.format, self.descale.view())
        }
    }
}

/// Whether factors have a row for each key of `cache`.
pub(super) fn is_per_key(descale: &View<'_>, granularity: Option<Granularity>, cache: &View<'_>) -> bool {
    match (descale.shape().len(), granularity) {
        (_, Some(granularity)) => matches!(granularity, Granularity::Token | Granularity::Block(_)),
        (3, None) => true,
        // Of one key a block, or a page, the channels of a batch have the rank of keys too, and another first size.
        (4, None) if cache.shape()[1] == 1 => descale.shape()[..2] == cache.shape()[..2] && descale.shape()[0] > 1,
        (4, None) => descale.shape()[1] == cache.shape()[1],
        _ => false,
    }
}

/// Rows of one page, or of a sequence without pages: where they lie in the cache, and which of the new ones they are.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) sequence: usize,
    /// The page, or the sequence.
    pub(super) block: usize,
    pub(super) rows: Range<usize>,
    pub(super) new: Range<usize>,
}

impl Run {
    /// Its rows among the new ones.
    pub(super) fn of_new<'v>(&self, new: &View<'v>) -> View<'v> {
        new.narrow(0, &(self.sequence..self.sequence + 1)).narrow(1, &self.new)
    }
}
