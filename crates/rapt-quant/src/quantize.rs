//! From numbers to codes.
//!
//! ```text
//! reach of each group: the least and the largest of its finite elements and 0;  absmax = the larger size
//! int8 int4 e4m3fn e5m2   scale = f32(absmax / largest)
//! uint8                   scale = f32(range / 255), zero_point = round(−least / scale)
//! mxfp8 mxfp4             scale = 2^(floor(log2(absmax)) − largest exponent), at least 2^−127
//! nvfp4                   global = f32(absmax of the tensor / (6·448)), scale = e4m3(absmax / (6·global))
//! code = encode(x / scale)    the quotient in f64, then rounded to nearest even and saturated
//! ```
//! For inputs of at most 24 bits the quotient in f64 rounds to the code that the exact one rounds to. A group whose
//! finite elements are all zero has scale 1. Scales round to nearest; one that is subnormal in its dtype rounds up, because
//! rounded down by up to half of itself it would saturate what it was made for. MX scales are the OCP rule
//! (Microscaling Formats 1.0, section 6.3), under which the largest element of a block may saturate.

use rapt_core::{DType, Error, Lines, Shape, View};

use crate::quantized::{Stored, bytes, shape_is};
use crate::source::{Real, called, with_real};
use crate::{Form, Format, QuantError, Quantized, Result, Scheme, codes};

/// Scales that are given and not computed.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// f32, of [`Form::scale_shape`], each finite and greater than 0.
    pub scale: View<'a>,
    /// uint8, of the same shape: for [`Format::Uint8`] and no other.
    pub zero_point: Option<View<'a>>,
}

/// The codes and scales of `x`, whose dtype is f64, f32, f16 or bf16, read in place through its strides.
///
/// # Errors
/// [`QuantError::NoCode`] with the first element in row-major order that the format does not hold (NaN and ±inf in
/// integers and 4-bit floats), [`QuantError::ScaleOverflow`], [`QuantError::BadScale`], [`QuantError::Missing`],
/// [`QuantError::Unexpected`]; [`QuantError::Core`] with [`Error::UnsupportedDtype`], [`Error::Rank`], [`Error::ShapeMismatch`],
/// [`Error::OtherDtype`], [`Error::Option`], [`Error::DeviceUnavailable`], [`Error::OutOfMemory`].
pub fn quantize(x: &View<'_>, scheme: Scheme, given: Option<&Given<'_>>) -> Result<Quantized> {
    scaled(x, scheme, given.map_or(By::Reach, By::Given))
}

/// As [`quantize`] with the factor of the whole tensor given: codes that are to lie beside others of that factor, such as new keys of a cache.
///
/// # Errors
/// As [`quantize`]; [`QuantError::BadScale`] for a factor that is not finite and greater than 0, [`QuantError::ScaleOverflow`] for a block that
/// reaches beyond what it and the largest scale of a block stand for, [`QuantError::Unexpected`] for a format that has no such factor.
pub fn quantize_with_global(x: &View<'_>, scheme: Scheme, global: f32) -> Result<Quantized> {
    let format = scheme.format();
    if !format.has_global_scale() {
        return Err(QuantError::Unexpected { part: "global_scale", format });
    }
    if !(global > 0.0 && global.is_finite()) {
        return Err(QuantError::BadScale { index: Shape::from([]), got: global });
    }
    scaled(x, scheme, By::Global(global))
}

/// Where scales come from.
#[derive(Clone, Copy)]
enum By<'a> {
    /// The reach of each group.
    Reach,
    /// Somebody computed them.
    Given(&'a Given<'a>),
    /// The reach of each group, and this factor of the tensor.
    Global(f32),
}

fn scaled(x: &View<'_>, scheme: Scheme, by: By<'_>) -> Result<Quantized> {
    let form = Form::new(scheme, *x.shape())?;
    with_real!("x", x.dtype(), T => typed::<T>(&x.lines::<T>("x")?, form, by))
}

/// The scales of all groups: as they are stored, and as numbers to divide by.
struct Scales {
    /// In the order of the groups.
    stored: Stored,
    zero_point: Option<Vec<u8>>,
    global: Option<f32>,
    steps: Vec<f64>,
}

fn typed<T: Real>(x: &Lines<'_, T>, form: Form, by: By<'_>) -> Result<Quantized> {
    let reach = reaches(x, &form)?;
    let scales = match by {
        By::Given(given) => read_given(given, &form)?,
        By::Global(global) => in_two_levels(&reach, &form, global)?,
        By::Reach => match form.format() {
            Format::Mxfp8 | Format::Mxfp4 => powers_of_two(&reach, &form)?,
            Format::Nvfp4 => in_two_levels(&reach, &form, global_scale(&reach, &form)?)?,
            _ => in_f32(&reach, &form)?,
        },
    };
    let codes = encode(x, &form, &scales)?;
    let stored = match scales.stored {
        Stored::F32(scales) => Stored::F32(scales),
        Stored::Bytes(plain) => Stored::Bytes(placed(&plain, &form)?),
    };
    Ok(Quantized::new(form, codes, stored, scales.zero_point, scales.global))
}

/// The least and the largest finite element of a group, 0 among them.
#[derive(Clone, Copy, Debug, Default)]
struct Reach {
    low: f64,
    high: f64,
}

impl Reach {
    fn absmax(self) -> f64 {
        self.high.max(-self.low)
    }
}

fn out_of_memory(bytes: usize) -> QuantError {
    Error::OutOfMemory { bytes }.into()
}

/// `len` times `value`, or an error where memory ends.
pub(crate) fn filled<T: Clone>(value: T, len: usize) -> Result<Vec<T>> {
    let mut items = Vec::new();
    items.try_reserve_exact(len).map_err(|_| out_of_memory(len.saturating_mul(size_of::<T>())))?;
    items.resize(len, value);
    Ok(items)
}

fn reaches<T: Real>(x: &Lines<'_, T>, form: &Form) -> Result<Vec<Reach>> {
    let mut reaches = filled(Reach::default(), form.groups())?;
    let mut row = filled(0.0, x.line_len())?;
    for line in 0..x.count() {
        row.iter_mut().zip(x.line(line)).for_each(|(to, x)| *to = x.to_f64());
        let first = form.first_group(line);
        for (reach, chunk) in reaches[first..].iter_mut().zip(row.chunks(form.chunk())) {
            // 0 times what is not finite is NaN.
            let is_finite = chunk.iter().fold(0.0, |sum, x| sum + x * 0.0) == 0.0;
            if is_finite {
                reach.low = chunk.iter().fold(reach.low, |low, &x| if x < low { x } else { low });
                reach.high = chunk.iter().fold(reach.high, |high, &x| if x > high { x } else { high });
                continue;
            }
            if form.format().has_nan() {
                let finite = chunk.iter().filter(|x| x.is_finite());
                *reach = finite.fold(*reach, |it, &x| Reach { low: it.low.min(x), high: it.high.max(x) });
            }
        }
        if !form.format().has_nan()
            && let Some(at) = row.iter().position(|x| !x.is_finite())
        {
            return Err(QuantError::NoCode { index: x.index(line, at), what: called(row[at]), format: form.format() });
        }
    }
    Ok(reaches)
}

/// reach / largest in f32, so that reach / scale is at most a hair beyond `largest`.
fn f32_scale(reach: f64, largest: f64, format: Format) -> Result<f32> {
    if reach == 0.0 {
        return Ok(1.0);
    }
    let scale = (reach / largest) as f32;
    if scale.is_infinite() {
        return Err(QuantError::ScaleOverflow { reach, format, dtype: DType::F32 });
    }
    let is_short = scale < f32::MIN_POSITIVE && f64::from(scale) * largest < reach;
    Ok(if is_short { f32::from_bits(scale.to_bits() + 1) } else { scale })
}

fn in_f32(reaches: &[Reach], form: &Form) -> Result<Scales> {
    let format = form.format();
    let mut scales = Vec::with_capacity(reaches.len());
    let mut zero_point = Vec::new();
    for reach in reaches {
        let size = if format.has_zero_point() { reach.high - reach.low } else { reach.absmax() };
        let scale = f32_scale(size, format.largest(), format)?;
        scales.push(scale);
        if format.has_zero_point() {
            zero_point.push(codes::to_uint8(-reach.low / f64::from(scale), 0));
        }
    }
    Ok(Scales {
        steps: scales.iter().copied().map(f64::from).collect(),
        stored: Stored::F32(scales),
        zero_point: format.has_zero_point().then_some(zero_point),
        global: None,
    })
}

/// The exponent of the largest power of two of a format, which the MX rule subtracts.
const fn largest_exponent(format: Format) -> i32 {
    match format {
        Format::Mxfp8 => 8,
        _ => 2,
    }
}

fn powers_of_two(reaches: &[Reach], form: &Form) -> Result<Scales> {
    let format = form.format();
    let code = |reach: &Reach| match reach.absmax() {
        0.0 => Ok(127),
        absmax => match (codes::floor_log2(absmax) - largest_exponent(format)).max(-127) {
            128.. => Err(QuantError::ScaleOverflow { reach: absmax, format, dtype: DType::F8E8M0FNU }),
            exponent => Ok((exponent + 127) as u8),
        },
    };
    let stored = reaches.iter().map(code).collect::<Result<Vec<_>>>()?;
    let steps = stored.iter().map(|&code| codes::from_e8m0(code)).collect();
    Ok(Scales { stored: Stored::Bytes(stored), zero_point: None, global: None, steps })
}

/// The e4m3 code of a block's scale, for the scale of the tensor.
fn block_scale(absmax: f64, global: f64) -> u8 {
    const ONE: u8 = 0x38;
    const LEAST_NORMAL: u8 = 0x08;
    if absmax == 0.0 {
        return ONE;
    }
    let largest = Format::Nvfp4.largest();
    let code = codes::to_e4m3fn(absmax / (largest * global));
    let value = f64::from(codes::E4M3FN_VALUES[usize::from(code)]);
    if code < LEAST_NORMAL && value * largest * global < absmax { code + 1 } else { code }
}

/// The factor of the tensor with which its largest block has the largest scale.
fn global_scale(reaches: &[Reach], form: &Form) -> Result<f32> {
    let format = form.format();
    let absmax = reaches.iter().fold(0.0, |most: f64, reach| most.max(reach.absmax()));
    f32_scale(absmax, format.largest() * Format::E4m3fn.largest(), format)
}

fn in_two_levels(reaches: &[Reach], form: &Form, global: f32) -> Result<Scales> {
    let format = form.format();
    // What the largest scale stands for, and what rounds to it.
    let most = format.largest() * f64::from(global) * (Format::E4m3fn.largest() + 16.0);
    if let Some(reach) = reaches.iter().map(|reach| reach.absmax()).find(|&reach| reach > most) {
        return Err(QuantError::ScaleOverflow { reach, format, dtype: DType::F8E4M3FN });
    }
    let stored: Vec<u8> = reaches.iter().map(|reach| block_scale(reach.absmax(), f64::from(global))).collect();
    let step = |&code: &u8| f64::from(codes::E4M3FN_VALUES[usize::from(code)]) * f64::from(global);
    let steps = stored.iter().map(step).collect();
    Ok(Scales { stored: Stored::Bytes(stored), zero_point: None, global: Some(global), steps })
}

fn read_given(given: &Given<'_>, form: &Form) -> Result<Scales> {
    let format = form.format();
    if format.scale_dtype() != DType::F32 {
        let allowed = format!("None: {format} computes its own");
        return Err(Error::Option { option: "scale", got: "a tensor".to_owned(), allowed }.into());
    }
    shape_is("scale", &given.scale, form.scale_shape())?;
    let lines = given.scale.lines::<f32>("scale")?;
    for line in 0..lines.count() {
        for (at, got) in lines.line(line).enumerate() {
            if !(got > 0.0 && got.is_finite()) {
                return Err(QuantError::BadScale { index: lines.index(line, at), got });
            }
        }
    }
    let zero_point = match (&given.zero_point, format.has_zero_point()) {
        (Some(zero_point), true) => {
            shape_is("zero_point", zero_point, form.scale_shape())?;
            Some(zero_point.lines::<u8>("zero_point")?.elements().collect())
        }
        (None, true) => return Err(QuantError::Missing { part: "zero_point", format }),
        (Some(_), false) => return Err(QuantError::Unexpected { part: "zero_point", format }),
        (None, false) => None,
    };
    Ok(Scales {
        stored: Stored::F32(lines.elements().collect()),
        zero_point,
        global: None,
        steps: lines.elements().map(f64::from).collect(),
    })
}

/// The scales of bytes in the layout that was asked, padding 0.
fn placed(plain: &[u8], form: &Form) -> Result<Vec<u8>> {
    let mut stored = filled(0, bytes(form.scale_shape()))?;
    for (group, &code) in plain.iter().enumerate() {
        stored[form.place(group)] = code;
    }
    Ok(stored)
}

fn encode<T: Real>(x: &Lines<'_, T>, form: &Form, scales: &Scales) -> Result<Vec<u8>> {
    match form.format() {
        Format::Int8 => encode_by(x, form, scales, |x, _| codes::to_int8(x)),
        Format::Uint8 => {
            let zero_points = scales.zero_point.as_deref().unwrap_or(&[]);
            encode_by(x, form, scales, |x, group| codes::to_uint8(x, zero_points[group]))
        }
        Format::Int4 => encode_by(x, form, scales, |x, _| codes::to_int4(x)),
        Format::E4m3fn | Format::Mxfp8 => encode_by(x, form, scales, |x, _| codes::to_e4m3fn(x)),
        Format::E5m2 => encode_by(x, form, scales, |x, _| codes::to_e5m2(x)),
        Format::Mxfp4 | Format::Nvfp4 => encode_by(x, form, scales, |x, _| codes::to_e2m1(x)),
    }
}

fn encode_by<T: Real>(
    x: &Lines<'_, T>,
    form: &Form,
    scales: &Scales,
    code: impl Fn(f64, usize) -> u8,
) -> Result<Vec<u8>> {
    let mut out = filled(0, bytes(form.codes_shape()))?;
    let mut row = filled(0.0, x.line_len())?;
    let mut codes = filled(0, x.line_len())?;
    let row_bytes = form.codes_shape().last().copied().unwrap_or(1);
    for (line, out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        row.iter_mut().zip(x.line(line)).for_each(|(to, x)| *to = x.to_f64());
        let first = form.first_group(line);
        let chunks = row.chunks(form.chunk()).zip(codes.chunks_mut(form.chunk()));
        for (group, (row, codes)) in (first..).zip(chunks) {
            let step = scales.steps[group];
            codes.iter_mut().zip(row).for_each(|(to, x)| *to = code(x / step, group));
        }
        if row_bytes == codes.len() {
            out.copy_from_slice(&codes);
        } else {
            let pairs = codes.chunks(2);
            out.iter_mut().zip(pairs).for_each(|(to, pair)| *to = pair[0] | pair.get(1).unwrap_or(&0) << 4);
        }
    }
    Ok(out)
}
