//! Quantized operands of a case: drawn, laid out, poisoned, and read back as the numbers that they stand for.
//!
//! Codes and 8-bit scales are bytes: 0 to 255 where other tensors hold numbers. What they stand for is computed here from the bytes and
//! the shapes as a caller gives them, by other code than the engines'. Deliberately absent: how kernels read codes.

use rapt_core::{Codes, DType, Format, Granularity, Qkv, TensorLayout};
use rapt_quant::codes::{E4M3FN_VALUES, from_e8m0, to_e2m1, to_e4m3fn, to_e5m2, to_int4, to_int8, to_uint8};

use crate::buffer::TensorBuf;
use crate::rng::Rng;

/// How one operand is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodesCase {
    /// The format.
    pub format: Format,
    /// Which elements share a scale; of formats with blocks of their own, those.
    pub granularity: Granularity,
    /// Indices into the stride zoo of the descale and the zero points, modulo its length.
    pub places: [usize; 2],
}

/// The scales of one operand, row-major in canonical order; bytes where they have 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct ScaleValues {
    /// The factors.
    pub descale: Vec<f64>,
    /// What is subtracted.
    pub zero_point: Option<Vec<f64>>,
    /// The factor of the whole tensor.
    pub global: Option<f32>,
}

impl CodesCase {
    /// Any format and granularity for rows of `dim`.
    #[must_use]
    pub fn random(rng: &mut Rng, dim: usize) -> Self {
        let format = rng.pick(&Format::ALL);
        let block = rng.pick(&[1, 2, 3, 5, 8, 16, 32, 1 + dim / 2]);
        let plain = [
            Granularity::Tensor,
            Granularity::Head,
            Granularity::Token,
            Granularity::Channel,
            Granularity::Block(block),
        ];
        let drawn = rng.pick(&plain);
        let mut at = || if rng.once_in(2) { 0 } else { rng.below(1 << 16) };
        let places = [at(), at()];
        CodesCase { format, granularity: format.own_block_size().map_or(drawn, Granularity::Block), places }
    }

    /// k as int8 codes that products of int8 are formed of.
    #[must_use]
    pub fn int8_keys(rng: &mut Rng) -> Self {
        CodesCase::int8(rng, &[Granularity::Tensor, Granularity::Head, Granularity::Token, Granularity::Token])
    }

    /// v likewise.
    #[must_use]
    pub fn int8_values(rng: &mut Rng) -> Self {
        CodesCase::int8(rng, &[Granularity::Tensor, Granularity::Head, Granularity::Channel, Granularity::Channel])
    }

    fn int8(rng: &mut Rng, granularities: &[Granularity]) -> Self {
        let granularity = rng.pick(granularities);
        let mut at = || if rng.once_in(2) { 0 } else { rng.below(1 << 16) };
        CodesCase { format: Format::Int8, granularity, places: [at(), at()] }
    }

    /// The sizes of the tensor of codes for numbers of `shape`.
    #[must_use]
    pub fn stored(&self, [b, h, s, d]: [usize; 4]) -> [usize; 4] {
        [b, h, s, d.div_ceil(self.format.codes_per_byte())]
    }

    /// Sizes of the descale, 1 where a factor is shared.
    #[must_use]
    pub fn groups(&self, [b, h, s, d]: [usize; 4]) -> [usize; 4] {
        match self.granularity {
            Granularity::Tensor => [1; 4],
            Granularity::Head => [b, h, 1, 1],
            Granularity::Token => [b, h, s, 1],
            Granularity::Channel => [b, h, 1, d],
            Granularity::Block(size) => [b, h, s, d.div_ceil(size)],
        }
    }

    /// How many neighbours along a row share a factor.
    fn chunk(&self, dim: usize) -> usize {
        match self.granularity {
            Granularity::Channel => 1,
            Granularity::Block(size) => size,
            _ => dim,
        }
    }

    /// `numbers` of `shape` as bytes of codes, with their scales.
    #[must_use]
    pub fn quantize(&self, numbers: &[f64], shape: [usize; 4], rng: &mut Rng) -> (Vec<f64>, ScaleValues) {
        let (format, groups, dim) = (self.format, self.groups(shape), shape[3]);
        let chunk = self.chunk(dim);
        let group = |at: usize| {
            let (row, d) = (at / dim, at % dim);
            let index = [row / shape[2] / shape[1], row / shape[2] % shape[1], row % shape[2], d / chunk];
            (0..4).fold(0, |sum, n| sum * groups[n] + if groups[n] == 1 { 0 } else { index[n] })
        };
        let mut most = vec![0f64; groups.iter().product()];
        numbers.iter().enumerate().for_each(|(at, x)| most[group(at)] = most[group(at)].max(x.abs()));
        let global = format.has_global_scale().then_some(0.37f32);
        let of_group = |most: &f64| {
            let ratio = if *most > 0.0 { most / format.largest() } else { 1.0 };
            match format.scale_dtype() {
                DType::F8E8M0FNU => ratio.log2().ceil() + 127.0,
                DType::F8E4M3FN => f64::from(to_e4m3fn(ratio / f64::from(global.unwrap_or(1.0))).max(1)),
                // Of uint8 half of the range, so that codes lie on both sides of the zero point.
                _ if format.has_zero_point() => f64::from((2.6 * ratio) as f32),
                _ => f64::from(ratio as f32),
            }
        };
        let descale: Vec<f64> = most.iter().map(of_group).collect();
        let zero_point: Option<Vec<f64>> =
            format.has_zero_point().then(|| descale.iter().map(|_| (100 + rng.below(56)) as f64).collect());
        let code = |at: usize| {
            let group = group(at);
            let x = numbers[at] / factor(format, descale[group], global);
            match format {
                Format::Int8 => to_int8(x),
                Format::Uint8 => to_uint8(x, zero_point.as_ref().map_or(0, |points| points[group] as u8)),
                Format::Int4 => to_int4(x),
                Format::E4m3fn | Format::Mxfp8 => to_e4m3fn(x),
                Format::E5m2 => to_e5m2(x),
                Format::Mxfp4 | Format::Nvfp4 => to_e2m1(x),
            }
        };
        let codes: Vec<u8> = (0..numbers.len()).map(code).collect();
        let bytes = codes.chunks(dim.max(1)).flat_map(|row| {
            let pair = |pair: &[u8]| f64::from(pair[0] | pair.get(1).map_or(0, |high| high << 4));
            row.chunks(format.codes_per_byte()).map(pair).collect::<Vec<_>>()
        });
        (bytes.collect(), ScaleValues { descale, zero_point, global })
    }

    /// Makes codes of row `row` of numbers of `shape`, and its scale where it has one of its own, what none who attends it may survive.
    pub(crate) fn poison(
        &self,
        row: usize,
        shape: [usize; 4],
        bytes: &mut [f64],
        scales: Option<&mut ScaleValues>,
        rng: &mut Rng,
    ) {
        let bad = match self.format {
            Format::E4m3fn | Format::Mxfp8 => rng.pick(&[0x7f, 0xff]),
            Format::E5m2 => rng.pick(&[0x7f, 0x7c, 0xfc]),
            _ => rng.below(256),
        };
        let len = self.stored(shape)[3];
        bytes[row * len..][..len].fill(bad as f64);
        if let (Some(scales), Granularity::Token | Granularity::Block(_)) = (scales, self.granularity) {
            let bad = match self.format.scale_dtype() {
                DType::F32 => rng.pick(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY]),
                DType::F8E8M0FNU => 255.0,
                _ => 127.0,
            };
            let len = self.groups(shape)[3];
            scales.descale[row * len..][..len].fill(bad);
        }
    }

    /// The scales as an interface takes them: views of the buffers, less the dimensions that the granularity does not have.
    pub(crate) fn codes<'a>(&self, of: &'a ScaleBuffers, dim: usize, rank: usize, layout: TensorLayout) -> Codes<'a> {
        let view = |buffer: &'a TensorBuf, name| {
            let whole = buffer.view(name, rank, layout);
            let last = rank - 1;
            let len = if layout == TensorLayout::Bshd && rank == 4 {
                1
            } else {
                usize::from(rank == 4) + usize::from(rank > 2)
            };
            let len = if layout == TensorLayout::Bshd && rank == 3 { 0 } else { len };
            match self.granularity {
                Granularity::Token => whole.index(last, 0),
                Granularity::Head => whole.index(last, 0).index(len, 0),
                Granularity::Tensor => (0..rank).fold(whole, |view, _| view.index(0, 0)),
                _ => whole,
            }
        };
        let stated = matches!(self.granularity, Granularity::Block(_)).then_some(self.granularity);
        let zero_point = of.zero_point.as_ref().map(|points| view(points, "zero_point"));
        let head_dim = (self.format.codes_per_byte() > 1).then_some(dim);
        let descale = view(&of.descale, "descale");
        Codes { zero_point, global_scale: of.global, granularity: stated, head_dim, ..Codes::new(self.format, descale) }
    }
}

/// The scales of one operand in memory.
pub(crate) struct ScaleBuffers {
    pub(crate) descale: TensorBuf,
    pub(crate) zero_point: Option<TensorBuf>,
    pub(crate) global: Option<f32>,
}

impl ScaleBuffers {
    pub(crate) fn values(&self) -> ScaleValues {
        let zero_point = self.zero_point.as_ref().map(TensorBuf::values);
        ScaleValues { descale: self.descale.values(), zero_point, global: self.global }
    }
}

/// What a stored scale multiplies by, the global one included: exact.
fn factor(format: Format, stored: f64, global: Option<f32>) -> f64 {
    match format.scale_dtype() {
        DType::F8E8M0FNU => from_e8m0(stored as u8),
        DType::F8E4M3FN => f64::from(E4M3FN_VALUES[usize::from(stored as u8)]) * f64::from(global.unwrap_or(1.0)),
        _ => stored,
    }
}

/// The numbers, rounded once to f32, of codes `bytes` that stand for `[batch, heads, len, dim]`, row-major;
/// descale and zero points row-major as the caller orders them.
pub(crate) fn numbers(
    bytes: &[f64],
    codes: &Codes<'_>,
    (descale, points): (&[f64], Option<&[f64]>),
    shape: [usize; 4],
    rank: usize,
    layout: TensorLayout,
) -> Vec<f64> {
    let [_, heads, len, dim] = shape;
    let shared = codes.format.codes_per_byte();
    // The caller's order of dimensions, less those that the rank of the descale says it lacks.
    let mut order: Vec<usize> = (4 - rank..4).collect();
    if layout == TensorLayout::Bshd && rank > 2 {
        order.swap(rank - 3, rank - 2);
    }
    match rank - codes.descale.shape().len() {
        0 => {}
        1 => order.retain(|d| *d != 3),
        2 if rank > 2 => order.retain(|d| *d < 2),
        _ => order.clear(),
    }
    let chunk = match codes.granularity {
        Some(Granularity::Block(size)) => size,
        _ => 1,
    };
    let number = |at: usize| {
        let (row, d) = (at / dim, at % dim);
        let index = [row / len / heads, row / len % heads, row % len, d / chunk];
        let sizes = codes.descale.shape();
        let group = order.iter().zip(&**sizes).fold(0, |sum, (d, n)| sum * n + if *n == 1 { 0 } else { index[*d] });
        let byte = bytes[row * dim.div_ceil(shared) + d / shared] as u8;
        let code = if shared == 2 { byte >> (d % 2 * 4) & 0xf } else { byte };
        let x = f64::from(codes.format.decode(code)) - points.map_or(0.0, |points| points[group]);
        f64::from((x * factor(codes.format, descale[group], codes.global_scale)) as f32)
    };
    (0..shape.iter().product()).map(number).collect()
}

/// Codes for some of q, k and v.
#[must_use]
pub fn random_codes(rng: &mut Rng, dims: [usize; 3]) -> Qkv<Option<CodesCase>> {
    let (q, k, v) = (rng.once_in(4), !rng.once_in(4), !rng.once_in(4));
    let mut draw = |is: bool, dim: usize| is.then(|| CodesCase::random(rng, dim));
    Qkv { q: draw(q, dims[0]), k: draw(k || !(q || v), dims[1]), v: draw(v, dims[2]) }
}
