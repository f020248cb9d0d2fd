//! A spec: everything about a request but its pointers, checked once.
//!
//! All tensors are brought to one canonical order here: `q`, `out` as `[batch, num_q_heads, q_len, head_dim(_v)]`,
//! `k`, `v` as `[batch, num_kv_heads, kv_len, head_dim(_v)]`, `mask` as `[batch, num_q_heads, q_len, kv_len]` with zero
//! strides where it broadcasts, `lse` as `[batch, num_q_heads, q_len]`. No element moves: only sizes and strides are
//! permuted. What is codes has the sizes of its numbers. Deliberately absent: pointers (but for their alignment), devices' capabilities, and any choice of a kernel.

mod builder;
mod compute;
mod order;
mod pages;
mod quantized;
mod validate;

use crate::{
    Alignment, BlockRange, Causal, Compute, DType, Device, Dropout, Error, Finite, Options, Result, Shape, TensorForm,
    TensorLayout, Window,
};

pub use builder::SpecBuilder;
pub(crate) use order::canonical;
pub(crate) use pages::{codes_of_keys, keys, lengths_spec, offsets_spec, page_table};
pub use quantized::{Codes, CodesForm, CodesSpec, Qkv};
pub(crate) use quantized::{numbers_of, part_names};
pub(crate) use validate::broadcast_mask;

/// A tensor without its pointer: `N` sizes and strides in canonical order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorSpec<const N: usize> {
    /// The dtype of the elements.
    pub dtype: DType,
    /// Sizes.
    pub shape: [usize; N],
    /// Strides in elements.
    pub strides: [isize; N],
    /// What its address is a multiple of, as far as a kernel may depend on it.
    pub alignment: Alignment,
}

impl<const N: usize> TensorSpec<N> {
    /// A tensor whose dimensions are the last ones of `N`, the others 1; `None` if it has more.
    pub(crate) fn of(form: &TensorForm) -> Option<Self> {
        let missing = N.checked_sub(form.shape.len())?;
        let (mut shape, mut strides) = ([1; N], [0; N]);
        shape[missing..].copy_from_slice(&form.shape);
        strides[missing..].copy_from_slice(&form.strides);
        Some(TensorSpec { dtype: form.dtype, shape, strides, alignment: form.alignment })
    }
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Direction {
    /// `out` and `lse` from `q`, `k`, `v`.
    Forward,
    /// Gradients by `q`, `k`, `v`, the mask and the sinks from those by `out` and `lse`.
    Backward,
}

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kv {
    /// One strided tensor each.
    Dense,
    /// Pages of a cache, in the order of a page table.
    Paged,
    /// Sequences that lie one after another, each with queries and keys of its own.
    Varlen,
}

/// The pages that k and v lie in.
///
/// Key `j` is row `j % page_size` of page `page_table[j / page_size]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PagesSpec {
    /// Keys of a page.
    pub page_size: usize,
    /// Pages of the cache.
    pub num_pages: usize,
    /// The page table: int32, `[batch, entries]`, of which the first [`PagesSpec::used`] of a sequence are read.
    pub table: TensorSpec<2>,
}

impl PagesSpec {
    /// Entries of the page table that `kv_len` keys take.
    #[must_use]
    pub fn used(&self, kv_len: usize) -> usize {
        kv_len.div_ceil(self.page_size.max(1))
    }
}

/// Sequences with lengths of their own, which the device reads; the host knows the most that there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LengthsSpec {
    /// int32 `[batch]`; `None` where all are as long as they may be.
    pub lengths: Option<TensorSpec<1>>,
    /// Keys of each sequence behind those.
    pub added: usize,
}

/// Sequences that lie one after another, and where they begin, which the device reads. The host knows how many rows all have together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VarlenSpec {
    /// Where the queries of each sequence begin, and the last ones end: int32 `[sequences + 1]`.
    pub cu_seqlens_q: TensorSpec<1>,
    /// The same of keys.
    pub cu_seqlens_kv: TensorSpec<1>,
}

impl VarlenSpec {
    /// How many sequences there are.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.cu_seqlens_q.shape[0].saturating_sub(1)
    }
}

/// The dtypes that numbers pass through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// The dtype of those of q, k and v that are not codes; float32 where all are.
    pub storage: DType,
    /// The dtype of products, sums, maxima and exponentials.
    pub accumulation: DType,
}

/// The mask of a spec.
pub type MaskSpec = TensorSpec<4>;

/// A checked request. Built by [`Spec::builder`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Spec {
    /// What is computed.
    pub direction: Direction,
    /// How keys and values are stored.
    pub kv: Kv,
    /// Where [`Kv::Paged`]: the pages. The first stride of k, of v and of those of their scales that have a row for each key is then that from
    /// page to page.
    pub pages: Option<Box<PagesSpec>>,
    /// Where sequences have lengths of their own; `kv_len` is then the most.
    pub lengths: Option<Box<LengthsSpec>>,
    /// Where [`Kv::Varlen`]: the sequences. There is one batch entry then; `q_len` and `kv_len` are those of all sequences together.
    pub varlen: Option<Box<VarlenSpec>>,
    /// The dtypes that numbers pass through.
    pub numerics: Numerics,
    /// Where every tensor lies.
    pub device: Device,
    /// `[batch, num_q_heads, q_len, head_dim]`.
    pub q: TensorSpec<4>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`.
    pub k: TensorSpec<4>,
    /// `[batch, num_kv_heads, kv_len, head_dim_v]`.
    pub v: TensorSpec<4>,
    /// Of those of q, k and v that are codes: what makes numbers of them. The dtype and the strides of such an operand are those of
    /// its codes, its sizes those of the numbers.
    pub codes: Qkv<Option<Box<CodesSpec>>>,
    /// `[batch, num_q_heads, q_len, head_dim_v]`.
    pub out: TensorSpec<4>,
    /// `[batch, num_q_heads, q_len]`.
    pub lse: Option<TensorSpec<3>>,
    /// `[batch, num_q_heads, q_len, kv_len]`, strides 0 where it broadcasts.
    pub mask: Option<MaskSpec>,
    /// `[num_q_heads]`: one more logit per head, unscaled.
    pub sinks: Option<TensorSpec<1>>,
    /// `[num_q_heads]`: ALiBi slopes.
    pub alibi_slopes: Option<TensorSpec<1>>,
    /// The factor of `q·k`.
    pub softmax_scale: Finite,
    /// `c·tanh(x/c)` on the scaled scores.
    pub softcap: Option<Finite>,
    /// Causal masking.
    pub causal: Option<Causal>,
    /// The sliding window.
    pub window: Window,
    /// The order of dimensions in which `q`, `k`, `v`, `out` and `lse` were given.
    pub layout: TensorLayout,
    /// What products are formed of.
    pub compute: Compute,
    /// How often weights are dropped; which, each run says.
    pub dropout: Option<Dropout>,
}

impl Spec {
    /// Starts a spec from the three inputs: views, or forms of tensors that are nowhere yet.
    #[inline]
    #[must_use]
    pub fn builder(
        q: impl Into<TensorForm>,
        k: impl Into<TensorForm>,
        v: impl Into<TensorForm>,
        options: &Options,
    ) -> SpecBuilder {
        SpecBuilder::new(q.into(), k.into(), v.into(), *options)
    }

    /// Problems that share nothing.
    #[must_use]
    pub fn batch(&self) -> usize {
        self.q.shape[0]
    }
    /// Heads of q.
    #[must_use]
    pub fn num_q_heads(&self) -> usize {
        self.q.shape[1]
    }
    /// Heads of k and v.
    #[must_use]
    pub fn num_kv_heads(&self) -> usize {
        self.k.shape[1]
    }
    /// Query heads per head of k and v; 1 if there are none.
    #[inline]
    #[must_use]
    pub fn group_size(&self) -> usize {
        self.num_q_heads().checked_div(self.num_kv_heads()).unwrap_or(1).max(1)
    }
    /// Queries per head.
    #[must_use]
    pub fn q_len(&self) -> usize {
        self.q.shape[2]
    }
    /// Keys per head.
    #[must_use]
    pub fn kv_len(&self) -> usize {
        self.k.shape[2]
    }
    /// The size of a query and a key.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.q.shape[3]
    }
    /// The size of a value.
    #[must_use]
    pub fn head_dim_v(&self) -> usize {
        self.v.shape[3]
    }

    /// Whether q, k or v is codes.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        !self.codes.is_empty()
    }
    /// Each operand that is codes: its name, its tensor, and what makes numbers of it.
    pub fn quantized(&self) -> impl Iterator<Item = (&'static str, &TensorSpec<4>, &CodesSpec)> {
        let tensors = [&self.q, &self.k, &self.v];
        self.codes
            .named()
            .into_iter()
            .zip(tensors)
            .filter_map(|((name, codes), tensor)| Some((name, tensor, codes.as_deref()?)))
    }

    /// That nothing is dropped: what a backend without dropout asks first, which `place` names.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn refuse_dropout(&self, place: impl std::fmt::Display) -> Result<()> {
        let Some(dropout) = self.dropout else { return Ok(()) };
        let what = format!("dropout_p={} on {place}", dropout.p());
        Err(Error::unsupported(what, "its kernels drop nothing; those of CPUs and of NVIDIA GPUs do", "dropout_p=0.0"))
    }

    /// Which keys each query may see by position.
    #[inline]
    #[must_use]
    pub fn block_range(&self) -> BlockRange {
        BlockRange::new(self.q_len(), self.kv_len(), self.causal, self.window)
    }

    /// Query-key pairs that causal and window leave, over the whole problem.
    #[must_use]
    pub fn pairs(&self) -> u64 {
        (self.batch() as u64)
            .saturating_mul(self.num_q_heads() as u64)
            .saturating_mul(self.block_range().pairs(self.q_len()))
    }

    /// The shape of `out` as the caller orders it, for inputs of `rank` dimensions.
    #[inline]
    #[must_use]
    pub fn out_shape(&self, rank: usize) -> Shape {
        order::as_given(self.out.shape, rank, self.layout)
    }

    /// The shape of `lse` for inputs of `rank` dimensions.
    #[must_use]
    pub fn lse_shape(&self, rank: usize) -> Shape {
        Shape::new(&self.out.shape[4 - rank..3]).expect("at most three dimensions")
    }
}
