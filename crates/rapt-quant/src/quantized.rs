//! A quantized tensor: owned, or made of parts that lie elsewhere.

use rapt_core::{Codes, DType, Error, Granularity, Shape, View};

use crate::{Form, QuantError, Result, Scheme};

/// The number of bytes of a tensor of bytes. A [`Form`] holds only shapes whose sizes were multiplied without overflow.
pub(crate) fn bytes(shape: &Shape) -> usize {
    shape.numel().unwrap_or(0)
}

pub(crate) fn shape_is(tensor: &'static str, view: &View<'_>, expected: &Shape) -> Result<()> {
    if view.shape() == expected {
        return Ok(());
    }
    Err(Error::ShapeMismatch { tensor, got: *view.shape(), expected: *expected }.into())
}

fn dtype_is(tensor: &'static str, view: &View<'_>, expected: DType) -> Result<()> {
    if view.dtype() == expected {
        return Ok(());
    }
    Err(Error::OtherDtype { tensor, expected, got: view.dtype() }.into())
}

fn of_bytes<'a>(tensor: &'static str, bytes: &'a [u8], shape: &Shape, dtype: DType) -> Result<View<'a>> {
    Ok(View::contiguous(tensor, bytes, *shape)?.reinterpreted(tensor, dtype)?)
}

/// Scales as they lie in memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stored {
    /// Of the formats with f32 scales.
    F32(Vec<f32>),
    /// e8m0 or e4m3.
    Bytes(Vec<u8>),
}

/// A quantized tensor in host memory, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    form: Form,
    codes: Vec<u8>,
    scale: Stored,
    zero_point: Option<Vec<u8>>,
    global_scale: Option<f32>,
}

impl Quantized {
    pub(crate) fn new(
        form: Form,
        codes: Vec<u8>,
        scale: Stored,
        zero_point: Option<Vec<u8>>,
        global_scale: Option<f32>,
    ) -> Self {
        Quantized { form, codes, scale, zero_point, global_scale }
    }

    /// The shapes and dtypes of the parts.
    #[must_use]
    pub fn form(&self) -> &Form {
        &self.form
    }

    /// The bytes of the codes, row-major.
    #[must_use]
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The scales, if they are f32.
    #[must_use]
    pub fn scale_f32(&self) -> Option<&[f32]> {
        match &self.scale {
            Stored::F32(scale) => Some(scale),
            Stored::Bytes(_) => None,
        }
    }

    /// The scales, if they have 8 bits.
    #[must_use]
    pub fn scale_bytes(&self) -> Option<&[u8]> {
        match &self.scale {
            Stored::F32(_) => None,
            Stored::Bytes(scale) => Some(scale),
        }
    }

    /// The zero points, of uint8.
    #[must_use]
    pub fn zero_point(&self) -> Option<&[u8]> {
        self.zero_point.as_deref()
    }

    /// The scale of the whole tensor, of nvfp4.
    #[must_use]
    pub fn global_scale(&self) -> Option<f32> {
        self.global_scale
    }

    /// Its parts to be read.
    ///
    /// # Errors
    /// None in practice: the parts were made for this form.
    pub fn parts(&self) -> Result<Parts<'_>> {
        let (form, format) = (&self.form, self.form.format());
        let scale = match &self.scale {
            Stored::F32(scale) => View::contiguous("scale", scale, *form.scale_shape())?,
            Stored::Bytes(scale) => of_bytes("scale", scale, form.scale_shape(), format.scale_dtype())?,
        };
        let zero_point = self.zero_point.as_deref();
        Ok(Parts {
            codes: of_bytes("codes", &self.codes, form.codes_shape(), format.code_dtype())?,
            scale: Some(scale),
            zero_point: zero_point.map(|it| of_bytes("zero_point", it, form.scale_shape(), DType::U8)).transpose()?,
            global_scale: self.global_scale,
        })
    }

    /// This tensor to be read.
    ///
    /// # Errors
    /// None in practice: the parts were made for this form.
    pub fn view(&self) -> Result<QuantizedView<'_>> {
        QuantizedView::new(self.form, self.parts()?)
    }
}

/// The parts of a quantized tensor, of any strides.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Of [`Format::code_dtype`](crate::Format::code_dtype) and [`Form::codes_shape`].
    pub codes: View<'a>,
    /// Of [`Format::scale_dtype`](crate::Format::scale_dtype) and [`Form::scale_shape`]. There is no default: without it codes are no numbers.
    pub scale: Option<View<'a>>,
    /// uint8, of [`Form::scale_shape`]: with [`Format::Uint8`](crate::Format::Uint8) and no other.
    pub zero_point: Option<View<'a>>,
    /// With [`Format::Nvfp4`](crate::Format::Nvfp4) and no other.
    pub global_scale: Option<f32>,
}

/// A quantized tensor whose parts were checked against its form.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedView<'a> {
    pub(crate) form: Form,
    pub(crate) codes: View<'a>,
    pub(crate) scale: View<'a>,
    pub(crate) zero_point: Option<View<'a>>,
    pub(crate) global_scale: Option<f32>,
}

impl<'a> QuantizedView<'a> {
    /// Prequantized codes with their scales. Shapes and dtypes are checked; values are not looked at: each is a number that
    /// the tensor then has, NaN and 0 among the scales too.
    ///
    /// # Errors
    /// [`QuantError::Missing`] for a part that the format needs, [`QuantError::Unexpected`] for one that it does not have;
    /// [`Error::OtherDtype`] and [`Error::ShapeMismatch`] in [`QuantError::Core`].
    pub fn new(form: Form, parts: Parts<'a>) -> Result<Self> {
        let format = form.format();
        let Parts { codes, scale, zero_point, global_scale } = parts;
        dtype_is("codes", &codes, format.code_dtype())?;
        shape_is("codes", &codes, form.codes_shape())?;
        let scale = scale.ok_or(QuantError::Missing { part: "scale", format })?;
        dtype_is("scale", &scale, format.scale_dtype())?;
        shape_is("scale", &scale, form.scale_shape())?;
        for (part, is_given, is_needed) in [
            ("zero_point", zero_point.is_some(), format.has_zero_point()),
            ("global_scale", global_scale.is_some(), format.has_global_scale()),
        ] {
            match (is_given, is_needed) {
                (false, true) => return Err(QuantError::Missing { part, format }),
                (true, false) => return Err(QuantError::Unexpected { part, format }),
                _ => {}
            }
        }
        if let Some(zero_point) = &zero_point {
            dtype_is("zero_point", zero_point, DType::U8)?;
            shape_is("zero_point", zero_point, form.scale_shape())?;
        }
        Ok(QuantizedView { form, codes, scale, zero_point, global_scale })
    }

    /// The quantized tensor that attention reads from `tensor` and `codes` in layout BHSD, of numbers of this shape. A granularity that is
    /// not stated is that of the factors' shape, as there.
    ///
    /// # Errors
    /// As [`QuantizedView::new`] and [`Form::new`]; [`Error::DescaleShape`] in [`QuantError::Core`] for factors of no granularity.
    pub fn of_codes(tensor: View<'a>, codes: &Codes<'a>, shape: Shape) -> Result<Self> {
        let Codes { format, descale, zero_point, global_scale, granularity, scale_layout, .. } = *codes;
        let form = |granularity| Form::new(Scheme::new(format, Some(granularity), scale_layout)?, shape);
        let form = match granularity.or(format.own_block_size().map(Granularity::Block)) {
            Some(granularity) => form(granularity)?,
            None => {
                let (dim, last) = (shape.last().copied().unwrap_or(0), descale.shape().last().copied().unwrap_or(0));
                let blocks = (last > 0 && dim.is_multiple_of(last)).then(|| Granularity::Block(dim / last));
                let all = [Granularity::Tensor, Granularity::Head, Granularity::Token, Granularity::Channel];
                let mut forms = all.into_iter().chain(blocks).filter_map(|granularity| form(granularity).ok());
                let found = forms.find(|form| form.scale_shape() == descale.shape());
                let allowed = "those of a tensor, a head, a token, a channel, or blocks of one size".to_owned();
                found.ok_or(Error::DescaleShape { tensor: "scale", got: *descale.shape(), of: shape, allowed })?
            }
        };
        QuantizedView::new(form, Parts { codes: tensor, scale: Some(descale), zero_point, global_scale })
    }

    /// The shapes and dtypes of the parts.
    #[must_use]
    pub fn form(&self) -> &Form {
        &self.form
    }

    /// The tensor of codes, as attention takes it: with [`codes`](QuantizedView::codes) beside it.
    #[must_use]
    pub fn tensor(&self) -> View<'a> {
        self.codes
    }

    /// What makes numbers of the codes, as attention takes it.
    #[must_use]
    pub fn codes(&self) -> Codes<'a> {
        let QuantizedView { form, scale, zero_point, global_scale, .. } = *self;
        Codes {
            zero_point,
            global_scale,
            granularity: Some(form.scheme().granularity()),
            scale_layout: form.scheme().scale_layout(),
            head_dim: form.shape().last().copied(),
            ..Codes::new(form.format(), scale)
        }
    }
}
