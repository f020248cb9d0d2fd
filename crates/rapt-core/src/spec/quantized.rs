//! q, k or v as codes of a quantized format: what is said of them besides their tensor, and how it comes to canonical order.
//!
//! ```text
//! x[b, h, s, d] = (decode(code[b, h, s, d]) − zero_point[g]) · descale[g] (· global_scale)
//!
//! granularity   one factor for each    shape of the descale, in the order of the layout, at rank 4; rank 3 has no B, rank 2 no H
//!                                      bhsd             bshd
//! tensor        tensor                 []               []
//! head          head                   [B, H]           [B, H]
//! token         row over head_dim      [B, H, S]        [B, S, H]
//! channel       column over len        [B, H, 1, D]     [B, 1, H, D]
//! block         run along head_dim     [B, H, S, n]     [B, S, H, n]
//! ```
//! H are the heads of the operand itself: of q query heads, of k and v key heads. The rank of a descale tells its granularity. n
//! divides D, and D / n elements share a factor; where the last block of a row is shorter the granularity must be stated, because n
//! does not tell the size of a block then. 8-bit factors may lie [swizzled](crate::swizzle), in bhsd: of each head one flat matrix, `[B, H, x]`. Codes of 4 bits lie two a byte, the lower half first: their tensor has ceil(D / 2) as its
//! last size. Deliberately absent: a factor that is assumed.

use super::TensorSpec;
use super::order::{as_given, canonical};
use crate::swizzle::padded_numel;
use crate::thousands::thousands;
use crate::{DType, Error, Format, Granularity, Result, ScaleLayout, Shape, Strides, TensorForm, TensorLayout, View};

/// One thing for each of q, k and v.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Qkv<T> {
    /// Of q.
    pub q: T,
    /// Of k.
    pub k: T,
    /// Of v.
    pub v: T,
}

impl<T> Qkv<T> {
    /// Each with its name.
    pub fn named(&self) -> [(&'static str, &T); 3] {
        [("q", &self.q), ("k", &self.k), ("v", &self.v)]
    }
}

impl<T> Qkv<Option<Box<T>>> {
    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.q.is_none() && self.k.is_none() && self.v.is_none()
    }

    /// What is in each box.
    #[must_use]
    pub fn as_deref(&self) -> Qkv<Option<&T>> {
        Qkv { q: self.q.as_deref(), k: self.k.as_deref(), v: self.v.as_deref() }
    }
}

/// What makes numbers of the codes of one operand, but for addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CodesForm {
    /// The format of the codes.
    pub format: Format,
    /// The factors: [`Format::scale_dtype`], of a shape that names its granularity.
    pub descale: TensorForm,
    /// What is subtracted before: uint8, of the descale's shape. With [`Format::Uint8`] and no other.
    pub zero_point: Option<TensorForm>,
    /// Whether there is one more factor for the whole tensor. With [`Format::Nvfp4`] and no other.
    pub has_global_scale: bool,
    /// What whoever made the codes says of the granularity; `None` reads it off the descale's shape. Of a quantizer that knows no
    /// layout, `Head` and `Channel` speak of the last two dimensions, and are refused with [`TensorLayout::Bshd`].
    pub granularity: Option<Granularity>,
    /// How the factors lie: [`ScaleLayout::Swizzle32x4x4`] with factors of 8 bits, no pages, and [`TensorLayout::Bhsd`] (or rank 2).
    pub scale_layout: ScaleLayout,
    /// The number of elements of a row; `None` is as many as the codes' tensor holds, an even number where two share a byte.
    pub head_dim: Option<usize>,
}

impl CodesForm {
    /// Codes with these factors and nothing else.
    #[must_use]
    pub fn new(format: Format, descale: impl Into<TensorForm>) -> Self {
        CodesForm {
            format,
            descale: descale.into(),
            zero_point: None,
            has_global_scale: false,
            granularity: None,
            scale_layout: ScaleLayout::Plain,
            head_dim: None,
        }
    }

    /// With zero points of this form.
    #[must_use]
    pub fn with_zero_point(self, zero_point: impl Into<TensorForm>) -> Self {
        CodesForm { zero_point: Some(zero_point.into()), ..self }
    }
}

/// What makes numbers of the codes of one operand.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// The format of the codes.
    pub format: Format,
    /// The factors.
    pub descale: View<'a>,
    /// What is subtracted before.
    pub zero_point: Option<View<'a>>,
    /// One more factor for the whole tensor.
    pub global_scale: Option<f32>,
    /// See [`CodesForm::granularity`].
    pub granularity: Option<Granularity>,
    /// See [`CodesForm::scale_layout`].
    pub scale_layout: ScaleLayout,
    /// See [`CodesForm::head_dim`].
    pub head_dim: Option<usize>,
}

impl<'a> Codes<'a> {
    /// Codes with these factors and nothing else.
    #[must_use]
    pub fn new(format: Format, descale: View<'a>) -> Self {
        Codes {
            format,
            descale,
            zero_point: None,
            global_scale: None,
            granularity: None,
            scale_layout: ScaleLayout::Plain,
            head_dim: None,
        }
    }

    /// With zero points.
    #[must_use]
    pub fn with_zero_point(self, zero_point: View<'a>) -> Self {
        Codes { zero_point: Some(zero_point), ..self }
    }

    /// With one more factor for the whole tensor.
    #[must_use]
    pub fn with_global_scale(self, global_scale: f32) -> Self {
        Codes { global_scale: Some(global_scale), ..self }
    }
}

impl From<&Codes<'_>> for CodesForm {
    fn from(codes: &Codes<'_>) -> Self {
        CodesForm {
            format: codes.format,
            descale: (&codes.descale).into(),
            zero_point: codes.zero_point.as_ref().map(Into::into),
            has_global_scale: codes.global_scale.is_some(),
            granularity: codes.granularity,
            scale_layout: codes.scale_layout,
            head_dim: codes.head_dim,
        }
    }
}

/// What a [`Spec`](crate::Spec) says of an operand's codes, whose own sizes there are those of its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct CodesSpec {
    /// The format of the codes.
    pub format: Format,
    /// Which elements share a factor.
    pub granularity: Granularity,
    /// How many neighbours along head_dim share one: element `d` has factor `d / chunk`.
    pub chunk: usize,
    /// `[batch, heads, len, ceil(head_dim / chunk)]`, strides 0 where a factor is shared. Where factors lie swizzled the last two strides are
    /// that of a head's flat matrix, in which [`swizzled`](crate::swizzle::swizzled) says the place of each.
    pub descale: TensorSpec<4>,
    /// How the factors lie.
    pub scale_layout: ScaleLayout,
    /// Likewise, uint8.
    pub zero_point: Option<TensorSpec<4>>,
}

/// What the parts of an operand's codes are called.
pub(crate) struct PartNames {
    pub(crate) descale: &'static str,
    pub(crate) zero_point: &'static str,
    pub(crate) global_scale: &'static str,
}

/// Of q, k or v.
pub(crate) fn part_names(tensor: &'static str) -> PartNames {
    let [descale, zero_point, global_scale] = match tensor {
        "q" => ["q_descale", "q_zero_point", "q_global_scale"],
        "k" => ["k_descale", "k_zero_point", "k_global_scale"],
        _ => ["v_descale", "v_zero_point", "v_global_scale"],
    };
    PartNames { descale, zero_point, global_scale }
}

/// The tensor of an operand in canonical order, with the sizes of its numbers: that of codes that share bytes has fewer elements.
///
/// # Errors
/// [`Error::Rank`]; [`Error::OtherDtype`] and [`Error::ShapeMismatch`] for a tensor that does not hold such codes.
pub(crate) fn numbers_of(
    tensor: &'static str,
    form: &TensorForm,
    codes: Option<&CodesForm>,
    layout: TensorLayout,
) -> Result<TensorSpec<4>> {
    let stored = canonical(tensor, form, layout)?;
    let Some(codes) = codes else { return Ok(stored) };
    let (expected, per_byte) = (codes.format.code_dtype(), codes.format.codes_per_byte());
    if form.dtype != expected {
        return Err(Error::OtherDtype { tensor, expected, got: form.dtype });
    }
    let mut shape = stored.shape;
    shape[3] = codes.head_dim.unwrap_or(stored.shape[3].saturating_mul(per_byte));
    if shape[3].div_ceil(per_byte) != stored.shape[3] {
        let bytes = [shape[0], shape[1], shape[2], shape[3].div_ceil(per_byte)];
        let expected = as_given(bytes, form.shape.len(), layout);
        return Err(Error::ShapeMismatch { tensor, got: form.shape, expected });
    }
    Ok(TensorSpec { shape, ..stored })
}

/// The granularity that a descale of this shape has for numbers of this size; `None` if it has none.
fn granularity_of(
    descale: &TensorForm,
    stated: Option<Granularity>,
    [_, _, _, dim]: [usize; 4],
    rank: usize,
    layout: TensorLayout,
) -> Option<Granularity> {
    // Without heads a head is all there is.
    let stated =
        stated.map(|stated| if (rank, stated) == (2, Granularity::Head) { Granularity::Tensor } else { stated });
    let last = descale.shape.last().copied().unwrap_or(0);
    let found = match (rank.checked_sub(descale.shape.len())?, stated) {
        (0, Some(stated @ Granularity::Block(_))) => stated,
        (0, _) => match canonical("", descale, layout).ok()?.shape[2] {
            1 if last == dim => Granularity::Channel,
            _ if last > 0 && dim.is_multiple_of(last) => Granularity::Block(dim / last),
            _ => return None,
        },
        (1, _) => Granularity::Token,
        (2, _) if rank > 2 => Granularity::Head,
        _ if descale.shape.is_empty() => Granularity::Tensor,
        _ => return None,
    };
    stated.is_none_or(|stated| stated == found).then_some(found)
}

/// Sizes of a descale in canonical order, 1 where a factor is shared.
fn groups([batch, heads, len, dim]: [usize; 4], granularity: Granularity) -> [usize; 4] {
    match granularity {
        Granularity::Tensor => [1; 4],
        Granularity::Head => [batch, heads, 1, 1],
        Granularity::Token => [batch, heads, len, 1],
        Granularity::Channel => [batch, heads, 1, dim],
        Granularity::Block(size) => [batch, heads, len, dim.div_ceil(size)],
    }
}

/// A descale or zero point in canonical order, with sizes of 1 and strides of 0 for dimensions that it does not have.
fn placed(
    tensor: &'static str,
    form: &TensorForm,
    granularity: Granularity,
    rank: usize,
    layout: TensorLayout,
) -> Result<TensorSpec<4>> {
    let (mut shape, mut strides) = (form.shape.to_vec(), form.strides.to_vec());
    match granularity {
        Granularity::Tensor => {
            (shape, strides) = (vec![1; rank], vec![0; rank]);
        }
        // Heads come after the batch in every layout.
        Granularity::Head => {
            let at = if layout == TensorLayout::Bshd { shape.len() - 1 } else { shape.len() };
            for at in [at, shape.len() + 1] {
                shape.insert(at, 1);
                strides.insert(at, 0);
            }
        }
        Granularity::Token => {
            shape.push(1);
            strides.push(0);
        }
        Granularity::Channel | Granularity::Block(_) => {}
    }
    let overflow = || Error::Overflow { tensor, shape: form.shape, strides: form.strides };
    let shape = Shape::new(&shape).ok_or_else(overflow)?;
    let strides = Strides::new(&strides).ok_or_else(overflow)?;
    canonical(tensor, &TensorForm { shape, strides, ..*form }, layout)
}

/// Factors that lie swizzled, one flat matrix for each head: `[batch, heads, x]`, less the dimensions that are not there.
///
/// # Errors
/// [`Error::Rank`].
fn swizzled(form: &TensorForm, block: usize, shape: [usize; 4], rank: usize) -> Result<Option<TensorSpec<4>>> {
    let [batch, heads, len, dim] = shape;
    let groups = dim.div_ceil(block);
    let Some(numel) = padded_numel(len, groups).filter(|_| form.shape.len() + 1 == rank) else { return Ok(None) };
    // As if a matrix were a row of so many groups.
    let (mut sizes, mut strides) = (form.shape.to_vec(), form.strides.to_vec());
    let at = sizes.len() - 1;
    sizes.insert(at, 1);
    strides.insert(at, 0);
    let (Some(sizes), Some(strides)) = (Shape::new(&sizes), Strides::new(&strides)) else { return Ok(None) };
    let placed = canonical("", &TensorForm { shape: sizes, strides, ..*form }, TensorLayout::Bhsd)?;
    if placed.shape != [batch, heads, 1, numel] {
        return Ok(None);
    }
    let flat = placed.strides[3];
    let of = |d: usize| if placed.shape[d] == 1 { 0 } else { placed.strides[d] };
    Ok(Some(TensorSpec { shape: [batch, heads, len, groups], strides: [of(0), of(1), flat, flat], ..placed }))
}

/// The shapes that a descale may have, in words.
fn allowed(form: &CodesForm, shape: [usize; 4], rank: usize, layout: TensorLayout) -> String {
    let (format, given) = (form.format, |shape: [usize; 4]| as_given(shape, rank, layout));
    let [batch, heads, len, dim] = shape;
    if let (ScaleLayout::Swizzle32x4x4, Some(size)) = (form.scale_layout, format.own_block_size()) {
        let groups = dim.div_ceil(size);
        let flat = padded_numel(len, groups).map_or(String::new(), |numel| numel.to_string());
        let lead: String = [batch, heads][4 - rank..].iter().map(|size| format!("{size}, ")).collect();
        return format!(
            "[{lead}{flat}]: of each head {len}×{groups} factors, padded to multiples of 128×4 and swizzled"
        );
    }
    if let Some(size) = format.own_block_size() {
        let own = given([batch, heads, len, dim.div_ceil(size)]);
        return format!("{own}: blocks of {size} along head_dim {dim}");
    }
    let without = |dims: &[usize]| {
        let kept: Vec<usize> = (4 - rank..4).filter(|d| !dims.contains(d)).collect();
        Shape::new(&kept.iter().map(|&d| shape[d]).collect::<Vec<_>>()).unwrap_or(Shape::from([]))
    };
    let row = given(shape);
    let token = Shape::new(&row[..rank - 1]).unwrap_or(Shape::from([]));
    let head = if rank > 2 { format!(" (tensor), {} (head)", without(&[2, 3])) } else { " (tensor)".to_owned() };
    let channel = given([batch, heads, 1, dim]);
    format!("[]{head}, {token} (token), {channel} (channel), and {token} with one more size that divides {dim} (block)")
}

impl CodesSpec {
    /// What `form` says of the codes of an operand whose numbers are of `shape`, given with `rank` dimensions.
    ///
    /// # Errors
    /// [`Error::MissingPart`], [`Error::UnexpectedPart`], [`Error::OtherDtype`], [`Error::DescaleShape`],
    /// [`Error::ShapeMismatch`], [`Error::Option`].
    pub(crate) fn new(
        tensor: &'static str,
        form: &CodesForm,
        shape: [usize; 4],
        rank: usize,
        layout: TensorLayout,
    ) -> Result<Self> {
        let names = part_names(tensor);
        let format = form.format;
        form.check_parts(tensor, &names)?;
        form.check_options(rank, layout)?;
        if form.descale.dtype != format.scale_dtype() {
            let (tensor, expected) = (names.descale, format.scale_dtype());
            return Err(Error::OtherDtype { tensor, expected, got: form.descale.dtype });
        }
        let mismatch = || Error::DescaleShape {
            tensor: names.descale,
            got: form.descale.shape,
            of: as_given(shape, rank, layout),
            allowed: allowed(form, shape, rank, layout),
        };
        if let (ScaleLayout::Swizzle32x4x4, Some(size)) = (form.scale_layout, format.own_block_size()) {
            let descale = swizzled(&form.descale, size, shape, rank)?.ok_or_else(mismatch)?;
            let (granularity, scale_layout) = (Granularity::Block(size), form.scale_layout);
            return Ok(CodesSpec { format, granularity, chunk: size, descale, scale_layout, zero_point: None });
        }
        let stated = format.own_block_size().map(Granularity::Block).or(form.granularity);
        let granularity = granularity_of(&form.descale, stated, shape, rank, layout).ok_or_else(mismatch)?;
        let groups = groups(shape, granularity);
        let place = |tensor, form: &TensorForm| -> Result<Option<TensorSpec<4>>> {
            let given = placed(tensor, form, granularity, rank, layout)?;
            if given.shape != groups {
                return Ok(None);
            }
            let strides = std::array::from_fn(|d| if groups[d] == 1 { 0 } else { given.strides[d] });
            Ok(Some(TensorSpec { shape: [shape[0], shape[1], shape[2], groups[3]], strides, ..given }))
        };
        let descale = place(names.descale, &form.descale)?.ok_or_else(mismatch)?;
        let mut zero_point = None;
        if let Some(points) = &form.zero_point {
            let tensor = names.zero_point;
            if points.dtype != DType::U8 {
                return Err(Error::OtherDtype { tensor, expected: DType::U8, got: points.dtype });
            }
            let mismatch = Error::ShapeMismatch { tensor, got: points.shape, expected: form.descale.shape };
            if points.shape != form.descale.shape {
                return Err(mismatch);
            }
            zero_point = Some(place(tensor, points)?.ok_or(mismatch)?);
        }
        let chunk = match granularity {
            Granularity::Channel => 1,
            Granularity::Block(size) => size,
            _ => shape[3],
        };
        Ok(CodesSpec { format, granularity, chunk, descale, scale_layout: ScaleLayout::Plain, zero_point })
    }

    /// Whether what [`CodesSpec::new`] proves of its parts holds for an operand of these numbers.
    pub(super) fn is_coherent(&self, numbers: &TensorSpec<4>) -> bool {
        let CodesSpec { format, granularity, chunk, descale, scale_layout, zero_point } = self;
        let [batch, heads, len, dim] = numbers.shape;
        let expected = match granularity {
            Granularity::Channel => 1,
            Granularity::Block(size) => *size,
            _ => dim,
        };
        let shape = [batch, heads, len, dim.div_ceil(expected.max(1))];
        numbers.dtype == format.code_dtype()
            && *chunk == expected
            && *chunk > 0
            && (descale.shape, descale.dtype) == (shape, format.scale_dtype())
            && (*scale_layout == ScaleLayout::Plain || format.own_block_size().is_some())
            && zero_point.is_some() == format.has_zero_point()
            && zero_point.is_none_or(|points| (points.shape, points.dtype) == (shape, DType::U8))
    }

    /// Bytes of the codes of an operand of these numbers, each counted once; at most `u128::MAX`.
    #[must_use]
    pub fn code_bytes(&self, numbers: &TensorSpec<4>) -> u128 {
        let [batch, heads, len, dim] = numbers.shape;
        product(&[batch, heads, len, dim.div_ceil(self.format.codes_per_byte())])
    }

    /// Bytes of the factors and zero points, each counted once.
    #[must_use]
    pub fn scale_bytes(&self) -> u128 {
        let each = |tensor: &TensorSpec<4>| {
            let distinct = |(&n, &stride): (&usize, &isize)| if stride == 0 { n.min(1) } else { n };
            let mut sizes: Vec<usize> = tensor.shape.iter().zip(&tensor.strides).map(distinct).collect();
            if self.scale_layout == ScaleLayout::Swizzle32x4x4 {
                let [.., len, groups] = tensor.shape;
                sizes.truncate(2);
                sizes.push(padded_numel(len, groups).unwrap_or(usize::MAX));
            }
            product(&sizes).saturating_mul(tensor.dtype.size_bytes() as u128)
        };
        let global = if self.format.has_global_scale() { DType::F32.size_bytes() as u128 } else { 0 };
        each(&self.descale).saturating_add(self.zero_point.as_ref().map_or(0, each)).saturating_add(global)
    }

    /// Format, granularity and bytes, in words.
    pub(crate) fn in_words(&self, numbers: &TensorSpec<4>) -> String {
        let zero_point = if self.zero_point.is_some() { " and a zero point" } else { "" };
        let per = match self.granularity {
            Granularity::Block(size) => format!("block of {size}"),
            other => other.name().to_owned(),
        };
        let lying = if self.scale_layout == ScaleLayout::Swizzle32x4x4 { ", swizzled" } else { "" };
        format!(
            "{} codes, a scale{zero_point} for each {per}{lying}; {} bytes of codes, {} of scales",
            self.format,
            thousands(self.code_bytes(numbers)),
            thousands(self.scale_bytes())
        )
    }
}

fn product(sizes: &[usize]) -> u128 {
    sizes.iter().fold(1, |product: u128, &n| product.saturating_mul(n as u128))
}

impl CodesForm {
    /// Whether the parts are there that the format has, and no others.
    fn check_parts(&self, tensor: &'static str, names: &PartNames) -> Result<()> {
        let (format, codes) = (self.format, self.format.name());
        let parts = [
            (names.zero_point, self.zero_point.is_some(), format.has_zero_point()),
            (names.global_scale, self.has_global_scale, format.has_global_scale()),
        ];
        for (part, is_given, is_needed) in parts {
            match (is_given, is_needed) {
                (false, true) => return Err(Error::MissingPart { tensor, codes, part }),
                (true, false) => return Err(Error::UnexpectedPart { tensor, codes, part }),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether what is stated of granularity and layout of the factors can be served.
    fn check_options(&self, rank: usize, layout: TensorLayout) -> Result<()> {
        let refuse = |option, got: String, allowed: String| Err(Error::Option { option, got, allowed });
        if self.scale_layout != ScaleLayout::Plain {
            let got = format!("'{}'", self.scale_layout.name());
            if self.format.own_block_size().is_none() {
                return refuse("scale_layout", got, format!("'plain': the scales of {} are float32", self.format));
            }
            if layout == TensorLayout::Bshd && rank > 2 {
                let allowed = "'plain', or layout 'bhsd': in 'bshd' the last two dimensions are no head";
                return refuse("scale_layout", got, allowed.to_owned());
            }
        }
        if let (Some(own), Some(stated)) = (self.format.own_block_size(), self.granularity)
            && stated != Granularity::Block(own)
        {
            return refuse("granularity", stated.to_string(), format!("block {own}: that of {}", self.format));
        }
        match self.granularity {
            Some(Granularity::Block(0)) => refuse("block_size", "0".to_owned(), "an int from 1 up".to_owned()),
            Some(stated @ (Granularity::Head | Granularity::Channel)) if layout == TensorLayout::Bshd && rank > 2 => {
                let allowed = "tensor, token or block, or layout 'bhsd': in 'bshd' the last two dimensions are no head";
                refuse("granularity", stated.to_string(), allowed.to_owned())
            }
            _ => Ok(()),
        }
    }
}
