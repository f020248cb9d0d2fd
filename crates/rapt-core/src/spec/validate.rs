//! What a spec's tensors must be.

use super::compute;
use super::{Kv, MaskSpec, Numerics, Spec, TensorSpec};
use crate::{COMPUTED, DType, Error, Result, Shape, TensorForm};

fn expect_size(
    tensor: &'static str,
    size: &'static str,
    got: usize,
    other: &'static str,
    expected: usize,
) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::SizeMismatch { tensor, size, got, other, expected }) }
}

/// Whether a bias, a vector per head or an output may have this dtype: a float not wider than the accumulation dtype.
pub(super) fn is_float_within(dtype: DType, accumulation: DType) -> bool {
    dtype.is_computed() && dtype.bits() <= accumulation.bits()
}

pub(super) fn floats_within(accumulation: DType) -> Vec<DType> {
    COMPUTED.iter().copied().filter(|&dtype| is_float_within(dtype, accumulation)).collect()
}

pub(super) fn per_head(
    tensor: &'static str,
    form: &TensorForm,
    num_q_heads: usize,
    accumulation: DType,
) -> Result<TensorSpec<1>> {
    if !is_float_within(form.dtype, accumulation) {
        let allowed = floats_within(accumulation);
        return Err(Error::UnsupportedDtype { tensor, got: form.dtype, allowed });
    }
    let expected = Shape::from([num_q_heads]);
    if form.shape != expected {
        return Err(Error::ShapeMismatch { tensor, got: form.shape, expected });
    }
    TensorSpec::of(form).ok_or(Error::ShapeMismatch { tensor, got: form.shape, expected })
}

/// Whether q, k and v, in canonical order, fit one another and stay within what is counted.
///
/// # Errors
/// [`Error::SizeMismatch`], [`Error::ZeroHeadDim`], [`Error::HeadGroups`], [`Error::Overflow`].
pub(super) fn check_sizes([q, k, v]: [&TensorSpec<4>; 3], given: [&TensorForm; 3]) -> Result<()> {
    let [batch, num_q_heads, q_len, head_dim] = q.shape;
    let [_, num_kv_heads, kv_len, _] = k.shape;
    let head_dim_v = v.shape[3];
    expect_size("k", "batch", k.shape[0], "q", batch)?;
    expect_size("v", "batch", v.shape[0], "q", batch)?;
    expect_size("v", "num_kv_heads", v.shape[1], "k", num_kv_heads)?;
    expect_size("v", "kv_len", v.shape[2], "k", kv_len)?;
    expect_size("k", "head_dim", k.shape[3], "q", head_dim)?;
    let [q_form, k_form, v_form] = given;
    for (tensor, form, dim) in [("q", q_form, head_dim), ("v", v_form, head_dim_v)] {
        if dim == 0 {
            return Err(Error::ZeroHeadDim { tensor, shape: form.shape });
        }
    }
    if !heads_group(num_q_heads, num_kv_heads) {
        return Err(Error::HeadGroups { num_q_heads, num_kv_heads });
    }
    let limits = [
        (q_form, "q", q_len, LENGTH_BITS),
        (k_form, "k", kv_len, LENGTH_BITS),
        (q_form, "q", head_dim, HEAD_DIM_BITS),
        (v_form, "v", head_dim_v, HEAD_DIM_BITS),
    ];
    for (form, tensor, size, bits) in limits {
        if size as u64 >= 1 << bits {
            return Err(Error::Overflow { tensor, shape: form.shape, strides: form.strides });
        }
    }
    Ok(())
}

/// Lengths stay below 2^62, so that positions fit i64, and head dims below 2^32, so that the size of a tile fits usize.
const LENGTH_BITS: u32 = 62;
const HEAD_DIM_BITS: u32 = 32;

fn heads_group(num_q_heads: usize, num_kv_heads: usize) -> bool {
    num_q_heads == num_kv_heads || (num_kv_heads > 0 && num_q_heads.is_multiple_of(num_kv_heads))
}

/// A mask of at most four dimensions, broadcast to `target`.
///
/// # Errors
/// [`Error::MaskShape`].
pub(crate) fn broadcast_mask(form: &TensorForm, target: [usize; 4]) -> Result<MaskSpec> {
    let mismatch = || Error::MaskShape { got: form.shape, expected: Shape::from(target) };
    let missing = target.len().checked_sub(form.shape.len()).ok_or_else(mismatch)?;
    let mut strides = [0isize; 4];
    for (d, (&n, &stride)) in form.shape.iter().zip(form.strides.iter()).enumerate() {
        match (n, target[missing + d]) {
            (n, wanted) if n == wanted => strides[missing + d] = if n == 1 { 0 } else { stride },
            (1, _) => {}
            _ => return Err(mismatch()),
        }
    }
    Ok(TensorSpec { dtype: form.dtype, shape: target, strides, alignment: form.alignment })
}

impl Spec {
    /// Whether the relations that the builder proves still hold.
    pub(crate) fn is_coherent(&self) -> bool {
        let Spec { q, k, v, out, .. } = self;
        let [batch, num_q_heads, q_len, head_dim] = q.shape;
        let [_, num_kv_heads, kv_len, _] = k.shape;
        let head_dim_v = v.shape[3];
        let Numerics { storage, accumulation, .. } = self.numerics;
        let codes = !self.is_quantized()
            || accumulation == DType::F32 && self.quantized().all(|(_, tensor, codes)| codes.is_coherent(tensor));
        let has_storage = |codes: bool, tensor: &TensorSpec<4>| codes || tensor.dtype == storage;
        let dtypes = has_storage(self.codes.q.is_some(), q)
            && has_storage(self.codes.k.is_some(), k)
            && has_storage(self.codes.v.is_some(), v)
            && storage.is_computed()
            && accumulation == storage.accumulation()
            && is_float_within(out.dtype, accumulation);
        let groups = heads_group(num_q_heads, num_kv_heads);
        let sizes = k.shape == [batch, num_kv_heads, kv_len, head_dim]
            && v.shape == [batch, num_kv_heads, kv_len, head_dim_v]
            && out.shape == [batch, num_q_heads, q_len, head_dim_v]
            && (1..1 << HEAD_DIM_BITS).contains(&(head_dim as u64))
            && (1..1 << HEAD_DIM_BITS).contains(&(head_dim_v as u64))
            && (q_len.max(kv_len) as u64) < 1 << LENGTH_BITS;
        let lse = self.lse.is_none_or(|lse| lse.dtype == accumulation && lse.shape == out.shape[..3]);
        let mask = self.mask.is_none_or(|mask| {
            mask.shape == [batch, num_q_heads, q_len, kv_len]
                && (mask.dtype == DType::Bool || is_float_within(mask.dtype, accumulation))
        });
        let vectors = [&self.sinks, &self.alibi_slopes]
            .into_iter()
            .flatten()
            .all(|vector| vector.shape == [num_q_heads] && is_float_within(vector.dtype, accumulation));
        let pages = self.pages.is_some() == (self.kv == Kv::Paged)
            && self.pages.as_deref().is_none_or(|pages| {
                (batch == 1 || self.lengths.is_some())
                    && pages.table.shape[0] == batch
                    && pages.table.dtype == DType::I32
                    && (kv_len == 0 || pages.page_size > 0 && pages.used(kv_len) <= pages.table.shape[1])
            });
        let lengths = self.lengths.as_deref().is_none_or(|of| {
            of.added <= kv_len
                && of.lengths.is_none_or(|lengths| lengths.dtype == DType::I32 && lengths.shape == [batch])
        });
        let varlen = self.varlen.is_some() == (self.kv == Kv::Varlen)
            && self.varlen.as_deref().is_none_or(|of| {
                let offsets = [of.cu_seqlens_q, of.cu_seqlens_kv];
                batch == 1
                    && offsets
                        .iter()
                        .all(|offsets| offsets.dtype == DType::I32 && offsets.shape == [of.sequences() + 1])
                    && self.mask.is_none()
                    && self.lengths.is_none()
            });
        let compute = compute::check(self.compute, self.device, head_dim, self.codes.as_deref()).is_ok();
        codes && compute && dtypes && groups && sizes && lse && mask && vectors && pages && lengths && varlen
    }
}
