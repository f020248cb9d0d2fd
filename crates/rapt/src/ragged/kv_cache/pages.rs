//! The memory of keys, or of values: pages, and where they are codes the scales beside them.
//!
//! ```text
//! rows                  [num_pages, page_size, num_kv_heads, head_dim]            two codes a byte: ceil(head_dim / 2)
//! descale, zero_point   [num_pages, page_size, num_kv_heads]                      by token
//!                       [num_pages, page_size, num_kv_heads, blocks]              by block
//! ```
//! Deliberately absent: which page belongs to whom.

use rapt_core::{COMPUTED, DType, Device, Error, Granularity, Result, ScaleLayout, Shape, View, ViewMut, split};
use rapt_quant::{Form, QuantError, Quantized, Scheme, quantize, quantize_with_global};

use super::KvCacheForm;
use super::sequences::{Growth, PageCopy};
use crate::Tensor;
use crate::ragged::append::copy_rows;
use crate::ragged::cache_view::{CacheCodes, CacheView};

/// The pages of keys, or of values.
#[derive(Debug)]
pub(super) struct Pages {
    /// `k` or `v`, and the names of its cache and of its global scale.
    names: [&'static str; 3],
    scheme: Option<Scheme>,
    global: Option<f32>,
    num_kv_heads: usize,
    head_dim: usize,
    rows: Tensor,
    descale: Option<Tensor>,
    zero_point: Option<Tensor>,
}

/// Refuses what a cache that grows cannot hold.
fn served(scheme: Scheme) -> Result<()> {
    let refuse = |what: String, why: &str, instead: &str| Err(Error::unsupported(what, why, instead));
    if scheme.scale_layout() != ScaleLayout::Plain {
        let what = format!("a cache of scales in layout {}", scheme.scale_layout().name());
        return refuse(what, "the scales of a key lie where the key does", "scale_layout plain");
    }
    match scheme.granularity() {
        Granularity::Token | Granularity::Block(_) => Ok(()),
        other => {
            let why = "a factor of keys that lie there already does not fit new ones";
            refuse(format!("a cache with factors by {other}"), why, "granularity token or block")
        }
    }
}

/// Refuses a factor of all rows where the format has none, and codes without theirs.
fn check_global(names: [&'static str; 3], scheme: Option<Scheme>, global: Option<f32>) -> Result<(), QuantError> {
    let [tensor, _, part] = names;
    let codes = scheme.map_or("no", |scheme| scheme.format().name());
    match (scheme.is_some_and(|scheme| scheme.format().has_global_scale()), global) {
        (true, None) => Err(Error::MissingPart { tensor, codes, part }.into()),
        (false, Some(_)) => Err(Error::UnexpectedPart { tensor, codes, part }.into()),
        (_, Some(got)) if !(got > 0.0 && got.is_finite()) => Err(QuantError::BadScale { index: Shape::from([]), got }),
        _ => Ok(()),
    }
}

impl Pages {
    /// Pages of zeros.
    ///
    /// # Errors
    /// [`Error::UnsupportedDtype`], [`Error::Unsupported`], [`Error::Overflow`], [`Error::OutOfMemory`].
    pub(super) fn new(
        names: [&'static str; 3],
        form: &KvCacheForm,
        head_dim: usize,
        (scheme, global): (Option<Scheme>, Option<f32>),
    ) -> Result<Self, QuantError> {
        let KvCacheForm { num_pages, page_size, num_kv_heads, dtype, .. } = *form;
        if !dtype.is_computed() {
            return Err(Error::UnsupportedDtype { tensor: names[0], got: dtype, allowed: COMPUTED.to_vec() }.into());
        }
        check_global(names, scheme, global)?;
        let shape = Shape::from([num_pages, page_size, num_kv_heads, head_dim]);
        if shape.numel().is_none() {
            return Err(Error::Overflow { tensor: names[1], shape, strides: [].into() }.into());
        }
        let (rows, descale, zero_point) = match scheme {
            None => (Tensor::zeros(dtype, shape)?, None, None),
            Some(scheme) => {
                served(scheme)?;
                let (form, format) = (Form::new(scheme, shape)?, scheme.format());
                let scales = |dtype| Tensor::zeros(dtype, *form.scale_shape());
                let zero_point = format.has_zero_point().then(|| scales(DType::U8)).transpose()?;
                let rows = Tensor::zeros(format.code_dtype(), *form.codes_shape())?;
                (rows, Some(scales(format.scale_dtype())?), zero_point)
            }
        };
        Ok(Pages { names, scheme, global, num_kv_heads, head_dim, rows, descale, zero_point })
    }

    pub(super) fn view(&self) -> Result<View<'_>> {
        self.rows.view()
    }

    /// What makes numbers of the codes.
    pub(super) fn codes(&self) -> Result<Option<CacheCodes<'_>>> {
        let Some((scheme, descale)) = self.scheme.zip(self.descale.as_ref()) else { return Ok(None) };
        Ok(Some(CacheCodes {
            format: scheme.format(),
            descale: CacheView::Read(descale.view()?),
            zero_point: self.zero_point.as_ref().map(Tensor::view).transpose()?.map(CacheView::Read),
            global_scale: self.global,
            granularity: Some(scheme.granularity()),
            head_dim: Some(self.head_dim),
        }))
    }

    /// Whether `new`, whose last dimensions are `[new, num_kv_heads, head_dim]`, is such as these pages hold.
    ///
    /// # Errors
    /// [`Error::Rank`], [`Error::DeviceUnavailable`], [`Error::UnsupportedDtype`], [`Error::OtherDtype`], [`Error::SizeMismatch`].
    pub(super) fn check(&self, new: &View<'_>, rank: usize, allowed: &'static str) -> Result<()> {
        let [tensor, other, _] = self.names;
        let (shape, got) = (*new.shape(), new.dtype());
        if shape.len() != rank {
            return Err(Error::Rank { tensor, got: shape.len(), shape, allowed });
        }
        if new.device() != Device::Cpu {
            let why = format!("{tensor} is copied into host memory by the host's processor");
            return Err(Error::DeviceUnavailable { device: new.device(), why });
        }
        let expected = self.rows.dtype();
        match self.scheme {
            None if got != expected => return Err(Error::OtherDtype { tensor, expected, got }),
            Some(_) if !got.is_computed() => {
                return Err(Error::UnsupportedDtype { tensor, got, allowed: COMPUTED.to_vec() });
            }
            _ => {}
        }
        let sizes =
            [("num_kv_heads", shape[rank - 2], self.num_kv_heads), ("head_dim", shape[rank - 1], self.head_dim)];
        match sizes.into_iter().find(|(_, got, expected)| got != expected) {
            Some((size, got, expected)) => Err(Error::SizeMismatch { tensor, size, got, other, expected }),
            None => Ok(()),
        }
    }

    /// New rows as codes, where these pages are codes.
    ///
    /// # Errors
    /// Those of [`quantize`].
    pub(super) fn encode(&self, new: &View<'_>) -> Result<Option<Quantized>, QuantError> {
        let encode = |scheme| match self.global {
            Some(global) => quantize_with_global(new, scheme, global),
            None => quantize(new, scheme, None),
        };
        self.scheme.map(encode).transpose()
    }

    /// Copies pages, then writes `new`, or the codes made of it, where `growth` says.
    ///
    /// # Errors
    /// None in practice: what could be refused was checked.
    pub(super) fn write(
        &mut self,
        growth: &Growth,
        new: &View<'_>,
        quantized: Option<&Quantized>,
    ) -> Result<(), QuantError> {
        let parts = quantized.map(Quantized::parts).transpose()?;
        let (rows, is_batch) = (parts.as_ref().map_or(*new, |parts| parts.codes), new.shape().len() == 4);
        let scale = parts.as_ref().and_then(|parts| parts.scale);
        let zero_point = parts.as_ref().and_then(|parts| parts.zero_point);
        let tensors = [
            (Some(&mut self.rows), Some(rows)),
            (self.descale.as_mut(), scale),
            (self.zero_point.as_mut(), zero_point),
        ];
        for (tensor, from) in tensors {
            let (Some(tensor), Some(from)) = (tensor, from) else { continue };
            for copy in &growth.copies {
                copy_page(self.names[1], tensor.view_mut()?, copy)?;
            }
            let mut pages = tensor.view_mut()?;
            for run in &growth.runs {
                let from = if is_batch { from.index(0, run.sequence) } else { from };
                let mut page = pages.index(0, run.block);
                copy_rows(self.names[0], &from.narrow(0, &run.new), &mut page.narrow(0, &run.rows))?;
            }
        }
        Ok(())
    }
}

/// Copies the first rows of one page to another.
fn copy_page(tensor: &'static str, pages: ViewMut<'_>, copy: &PageCopy) -> Result<()> {
    let PageCopy { from, to, rows } = *copy;
    let last = from.max(to);
    let mut parts = split(tensor, pages, 0, &[0..last, last..last + 1])?;
    let [low, high] = parts.as_mut_slice() else { return Ok(()) };
    let mut low = low.index(0, from.min(to));
    let mut high = high.index(0, 0);
    let (from, to) = if from < to { (low.as_view(), &mut high) } else { (high.as_view(), &mut low) };
    copy_rows(tensor, &from.narrow(0, &(0..rows)), &mut to.narrow(0, &(0..rows)))
}
