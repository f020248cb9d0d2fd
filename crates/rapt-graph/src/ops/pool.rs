//! Pooling and resizing of images, `[batch, channels, height, width]` or without the batch; pooling of lines without the height.
//!
//! Maxima keep the first of equal numbers and the last NaN, as PyTorch's kernel does; means are summed in f64 and rounded
//! once, those of integers are cut. The result lies channels-last where the input does.

use rapt_core::DType;

use super::shape::{
    bounded, cells, count, fresh_in_format, is_channels_last, misfit, need_float, need_number, opt_floats, pick, refuse,
};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId};

/// A pooling or resizing.
#[derive(Clone, Debug, PartialEq)]
pub enum Pool {
    /// `max_pool2d` and `max_pool2d_with_indices`.
    Max {
        /// The image.
        input: ValueId,
        /// The windows.
        window: Window,
        /// Whether the maxima's places in their plane are a result too.
        indices: bool,
    },
    /// `avg_pool2d`.
    Mean {
        /// The image.
        input: ValueId,
        /// The windows.
        window: Window,
        /// Whether the padding counts in the number that the sum is divided by.
        count_include_pad: bool,
        /// What the sum is divided by instead.
        divisor_override: Option<Int>,
    },
    /// `adaptive_avg_pool2d`: as many windows as are asked for, which cover the image.
    Adaptive {
        /// The image.
        input: ValueId,
        /// The result's height and width.
        size: Vec<Int>,
        /// Whether there is no height: `adaptive_avg_pool1d`.
        line: bool,
    },
    /// `adaptive_max_pool2d`: the same of maxima, whose places in their plane are a result too.
    AdaptiveMax {
        /// The image.
        input: ValueId,
        /// The result's height and width.
        size: Vec<Int>,
        /// Whether there is no height: `adaptive_max_pool1d`.
        line: bool,
    },
    /// `upsample_nearest2d` and `upsample_bilinear2d`.
    Resize {
        /// The image, with batch.
        input: ValueId,
        /// The result's height and width, or nothing where the factors say them.
        size: Option<Vec<Int>>,
        /// The factors of height and width.
        factors: Option<Vec<f64>>,
        /// Bilinear, with whether corners stay corners; or nearest.
        bilinear: Option<bool>,
    },
}

/// Windows over an image.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// The windows' sizes: two numbers, or one for both.
    pub kernel: Vec<Int>,
    /// The steps between windows; none are the sizes.
    pub stride: Vec<Int>,
    /// The elements around the image.
    pub padding: Vec<Int>,
    /// The steps between a window's elements.
    pub dilation: Vec<Int>,
    /// Whether a window may reach past the padding.
    pub ceil_mode: bool,
    /// Whether there is no height: pooling in one dimension.
    pub line: bool,
}

/// Windows in numbers, for one of the two dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// The elements of the image.
    pub size: i64,
    /// The elements of a window.
    pub kernel: i64,
    /// From one window to the next.
    pub stride: i64,
    /// The elements before the image.
    pub padding: i64,
    /// From one element of a window to the next.
    pub dilation: i64,
    /// The windows.
    pub output: i64,
}

impl Pool {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Pool, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "max_pool2d.default" => max(args, false),
            "max_pool2d_with_indices.default" => max(args, true),
            "avg_pool2d.default" => mean(args),
            "max_pool1d.default" => max(args, false).and_then(lines),
            "max_pool1d_with_indices.default" => max(args, true).and_then(lines),
            "avg_pool1d.default" => mean(args).and_then(lines),
            "adaptive_avg_pool1d.default" => adaptive(args).and_then(lines),
            "adaptive_max_pool2d.default" => adaptive_max(args, false),
            "adaptive_max_pool1d.default" => adaptive_max(args, true),
            "adaptive_avg_pool2d.default" | "_adaptive_avg_pool2d.default" => adaptive(args),
            "upsample_nearest2d.vec" => resize(args, false),
            "upsample_bilinear2d.vec" => resize(args, true),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input())?;
        match self {
            Pool::Max { .. } | Pool::Mean { .. } => need_number("pooling", meta.dtype)?,
            Pool::Adaptive { .. } | Pool::AdaptiveMax { .. } => need_float("adaptive pooling", meta.dtype)?,
            // The nearest pixel of an image of bytes is a byte.
            Pool::Resize { bilinear: None, .. } if meta.dtype == DType::U8 => {}
            Pool::Resize { .. } => need_float("resizing", meta.dtype)?,
        }
        let shape = self.shape(shapes, meta)?;
        bounded(&shape)?;
        let out = |dtype| fresh_in_format(dtype, &shape, is_channels_last(meta));
        let mut outs = vec![out(meta.dtype)?];
        if let Pool::Max { indices: true, .. } | Pool::AdaptiveMax { .. } = self {
            outs.push(out(DType::I64)?);
        }
        Ok(outs)
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input())?;
        let x = cells(input);
        let [height, width] = self.plane(&input.meta)?;
        let lead = input.meta.rank() - if self.is_of_lines() { 1 } else { 2 };
        let planes = count(input.meta.shape[..lead].iter().product());
        match self {
            Pool::Max { window, .. } => {
                let steps = window.steps(eval, [height, width])?;
                let (places, within): (Vec<usize>, Vec<i64>) = maxima(&x, planes, steps).into_iter().unzip();
                outs[0].write(eval.precision(), pick(&x, places));
                if let Some(out) = outs.get(1) {
                    out.write_ints(within);
                }
            }
            Pool::Mean { window, count_include_pad, divisor_override, .. } => {
                let steps = window.steps(eval, [height, width])?;
                let divisor = divisor_override.map(|n| eval.int(n)).transpose()?;
                let padded = *count_include_pad;
                outs[0].write(
                    eval.precision(),
                    means(&x, planes, steps, |area, cut| divisor.unwrap_or(if padded { area } else { cut })),
                );
            }
            Pool::AdaptiveMax { .. } => {
                let size = self.plane(&outs[0].meta)?;
                let (places, within): (Vec<usize>, Vec<i64>) =
                    adaptive_maxima(&x, planes, [height, width], size).into_iter().unzip();
                outs[0].write(eval.precision(), pick(&x, places));
                outs[1].write_ints(within);
            }
            Pool::Adaptive { .. } => {
                let size = self.plane(&outs[0].meta)?;
                if let Cells::Float(x) = &x {
                    outs[0].write_floats(eval.precision(), adaptive_means(x, planes, [height, width], size));
                }
            }
            Pool::Resize { factors, bilinear, .. } => {
                let axes = axes(factors.as_deref(), *bilinear, [height, width], plane(&outs[0].meta)?);
                let pixels = weighted(&input.floats(), planes, [height, width], &axes);
                outs[0].write(eval.precision(), Cells::Float(pixels));
            }
        }
        Ok(())
    }

    /// The image.
    #[must_use]
    pub fn input(&self) -> ValueId {
        match *self {
            Pool::Max { input, .. }
            | Pool::Mean { input, .. }
            | Pool::Adaptive { input, .. }
            | Pool::AdaptiveMax { input, .. }
            | Pool::Resize { input, .. } => input,
        }
    }

    /// Whether there is no height.
    #[must_use]
    pub fn is_of_lines(&self) -> bool {
        match self {
            Pool::Max { window, .. } | Pool::Mean { window, .. } => window.line,
            Pool::Adaptive { line, .. } | Pool::AdaptiveMax { line, .. } => *line,
            Pool::Resize { .. } => false,
        }
    }

    /// Height and width; the height of a line is 1.
    fn plane(&self, meta: &Meta) -> Result<[i64; 2], OpError> {
        match meta.shape[..] {
            [.., width] if self.is_of_lines() => Ok([1, width]),
            _ => plane(meta),
        }
    }

    /// Of a resizing, what each row and each column of the result is made of; `None` of anything else.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn axes(&self, shapes: &dyn Shapes) -> Result<Option<[Axis; 2]>, OpError> {
        let Pool::Resize { input, factors, bilinear, .. } = self else { return Ok(None) };
        let meta = shapes.meta(*input)?;
        let [.., height, width] = self.shape(shapes, meta)?[..] else { return misfit("an image has two dimensions") };
        Ok(Some(axes(factors.as_deref(), *bilinear, plane(meta)?, [height, width])))
    }

    fn shape(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<Vec<i64>, OpError> {
        let sizes = self.plane(meta)?;
        let dims = if self.is_of_lines() { 1 } else { 2 };
        let Some(lead) = meta.shape.len().checked_sub(dims).map(|lead| &meta.shape[..lead]) else {
            return misfit("an image has two dimensions");
        };
        let size = match self {
            Pool::Max { window, .. } | Pool::Mean { window, .. } => {
                if let Pool::Mean { divisor_override: Some(n), .. } = self
                    && shapes.int(*n)? == 0
                {
                    return refuse("divisor_override", "0", "a sum is divided by it");
                }
                window.steps(shapes, sizes)?.map(|steps| steps.output)
            }
            Pool::Adaptive { size, line, .. } | Pool::AdaptiveMax { size, line, .. } => match shapes.ints(size)?[..] {
                [n] if *line => [1, n],
                [h, w] if !*line => [h, w],
                [n] => [n, n],
                ref other => return refuse("output_size", format!("{other:?}"), "two numbers are expected"),
            },
            Pool::Resize { size, factors, .. } => resized(shapes, size.as_deref(), factors.as_deref(), sizes)?,
        };
        let image = if matches!(self, Pool::Resize { .. }) { meta.rank() == 4 } else { matches!(lead.len(), 1 | 2) };
        // The batch alone may be empty.
        let empty = meta.shape[meta.rank().saturating_sub(dims + 1)..].contains(&0);
        if !image || empty {
            return misfit(format!("a tensor of shape {:?} is no image", meta.shape));
        }
        if matches!(self, Pool::Resize { .. }) && size.iter().any(|&n| n <= 0) {
            return misfit(format!("an image of height and width {size:?}"));
        }
        Ok([lead, &size[2 - dims..]].concat())
    }
}

impl Window {
    /// The windows over an image of these sizes.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn steps(&self, shapes: &dyn Shapes, sizes: [i64; 2]) -> Result<[Steps; 2], OpError> {
        let two = |name: &str, list: &[Int], least: i64| match shapes.ints(list)?[..] {
            // Nothing happens in the height of a line: its numbers are the least ones.
            [n] if self.line && n >= least => Ok([least, n]),
            [a, b] if self.line => refuse(name, format!("[{a}, {b}]"), "one number is expected"),
            [a, b] if a >= least && b >= least => Ok([a, b]),
            [n] if n >= least => Ok([n, n]),
            ref other => refuse(name, format!("{other:?}"), "one or two numbers, none too small, are expected"),
        };
        let kernel = two("kernel_size", &self.kernel, 1)?;
        let stride = if self.stride.is_empty() { kernel } else { two("stride", &self.stride, 1)? };
        let (padding, dilation) = (two("padding", &self.padding, 0)?, two("dilation", &self.dilation, 1)?);
        let along = |d: usize| Steps::new([sizes[d], kernel[d], stride[d], padding[d], dilation[d]], self.ceil_mode);
        Ok([along(0)?, along(1)?])
    }
}

impl Steps {
    /// The windows of a dimension: its size, then kernel, stride, padding and dilation.
    pub(super) fn new([size, kernel, stride, padding, dilation]: [i64; 5], ceil_mode: bool) -> Result<Steps, OpError> {
        if kernel < 1 || stride < 1 || padding < 0 || dilation < 1 {
            let text = format!("kernel {kernel}, stride {stride}, padding {padding}, dilation {dilation}");
            return misfit(format!("windows of {text}: one is too small"));
        }
        let Some(reach) = (kernel - 1).checked_mul(dilation).and_then(|n| n.checked_add(1)) else {
            return refuse("dilation", dilation.to_string(), "it is too large");
        };
        if padding > reach / 2 {
            return refuse("padding", padding.to_string(), "it is more than half of the kernel");
        }
        let room = size + 2 * padding - reach;
        let up = if ceil_mode { stride - 1 } else { 0 };
        let mut output = room.saturating_add(up).div_euclid(stride) + 1;
        // The last window must start inside the image or the padding before it.
        if ceil_mode && (output - 1).saturating_mul(stride) >= size + padding {
            output -= 1;
        }
        if output < 1 {
            return misfit(format!("windows of {kernel} over {size} elements"));
        }
        Ok(Steps { size, kernel, stride, padding, dilation, output })
    }

    /// The elements of window `o`, the padding among them: it ends at the padding's end, however large its kernel.
    pub(super) fn extent(self, o: i64) -> i64 {
        let start = o * self.stride - self.padding;
        (start + self.kernel).min(self.size + self.padding) - start
    }

    /// The elements of window `o`.
    pub(super) fn elements(self, o: i64) -> impl Iterator<Item = i64> {
        let start = o * self.stride - self.padding;
        (0..self.kernel).map(move |k| start + k * self.dilation).filter(move |i| (0..self.size).contains(i))
    }
}

fn plane(meta: &Meta) -> Result<[i64; 2], OpError> {
    match meta.shape[..] {
        [.., height, width] => Ok([height, width]),
        _ => misfit(format!("a tensor of shape {:?} is no image", meta.shape)),
    }
}

/// For each window the maximum's place in the tensor, and in its plane.
fn maxima(x: &Cells, planes: usize, [rows, columns]: [Steps; 2]) -> Vec<(usize, i64)> {
    let better = |p: usize, than: usize| match x {
        Cells::Float(x) => x[p] > x[than] || x[p].is_nan(),
        Cells::Int(x) => x[p] > x[than],
    };
    let mut all = Vec::new();
    for plane in 0..planes {
        let start = plane * count(rows.size * columns.size);
        for i in 0..rows.output {
            for j in 0..columns.output {
                let mut best: Option<i64> = None;
                for row in rows.elements(i) {
                    for at in columns.elements(j).map(|column| row * columns.size + column) {
                        if best.is_none_or(|best| better(start + count(at), start + count(best))) {
                            best = Some(at);
                        }
                    }
                }
                let best = best.unwrap_or(0);
                all.push((start + count(best), best));
            }
        }
    }
    all
}

/// The means; `divisor` is told a window's area with and without padding.
fn means(x: &Cells, planes: usize, [rows, columns]: [Steps; 2], divisor: impl Fn(i64, i64) -> i64) -> Cells {
    let mut floats = Vec::new();
    let mut ints = Vec::new();
    for plane in 0..planes {
        let start = plane * count(rows.size * columns.size);
        for i in 0..rows.output {
            for j in 0..columns.output {
                let at: Vec<usize> = rows
                    .elements(i)
                    .flat_map(|row| columns.elements(j).map(move |column| start + count(row * columns.size + column)))
                    .collect();
                let by = divisor(rows.extent(i) * columns.extent(j), i64::try_from(at.len()).unwrap_or(i64::MAX));
                match x {
                    _ if at.is_empty() => {
                        floats.push(0.0);
                        ints.push(0);
                    }
                    Cells::Float(x) => floats.push(at.iter().fold(0.0, |sum, &p| sum + x[p]) / by as f64),
                    Cells::Int(x) => ints.push(at.iter().fold(0i64, |sum, &p| sum.wrapping_add(x[p])).wrapping_div(by)),
                }
            }
        }
    }
    if matches!(x, Cells::Float(_)) { Cells::Float(floats) } else { Cells::Int(ints) }
}

/// The maxima over the windows of [`adaptive_means`]: their places in the tensor, and in their plane.
fn adaptive_maxima(x: &Cells, planes: usize, sizes: [i64; 2], output: [i64; 2]) -> Vec<(usize, i64)> {
    let better = |p: usize, than: usize| match x {
        Cells::Float(x) => x[p] > x[than] || x[p].is_nan(),
        Cells::Int(x) => x[p] > x[than],
    };
    let window = |d: usize, o: i64| o * sizes[d] / output[d]..((o + 1) * sizes[d] + output[d] - 1) / output[d];
    let mut all = Vec::new();
    for plane in 0..planes {
        let start = plane * count(sizes[0] * sizes[1]);
        for i in 0..output[0] {
            for j in 0..output[1] {
                let places = window(0, i).flat_map(|row| window(1, j).map(move |column| row * sizes[1] + column));
                let best =
                    places.reduce(|best, at| if better(start + count(at), start + count(best)) { at } else { best });
                let best = best.unwrap_or(0);
                all.push((start + count(best), best));
            }
        }
    }
    all
}

/// Window `o` of `output` covers `⌊o·size/output⌋ .. ⌈(o+1)·size/output⌉`.
fn adaptive_means(x: &[f64], planes: usize, sizes: [i64; 2], output: [i64; 2]) -> Vec<f64> {
    let window = |d: usize, o: i64| {
        let end = ((o + 1) * sizes[d] + output[d] - 1) / output[d];
        o * sizes[d] / output[d]..end
    };
    let mut all = Vec::new();
    for plane in 0..planes {
        let start = plane * count(sizes[0] * sizes[1]);
        for i in 0..output[0] {
            for j in 0..output[1] {
                let (rows, columns) = (window(0, i), window(1, j));
                let area = (rows.end - rows.start) * (columns.end - columns.start);
                let mut sum = 0.0;
                for row in rows {
                    sum = columns.clone().fold(sum, |sum, column| sum + x[start + count(row * sizes[1] + column)]);
                }
                all.push(sum / area as f64);
            }
        }
    }
    all
}

/// For each position of the result, two positions of the image and the weight of the second; `None` where the first is the result.
pub type Axis = Vec<(usize, usize, Option<f64>)>;

/// What rows and columns are made of: bilinear, with whether corners stay corners, or nearest.
fn axes(factors: Option<&[f64]>, bilinear: Option<bool>, from: [i64; 2], to: [i64; 2]) -> [Axis; 2] {
    [0, 1].map(|d| {
        let factor = factors.map(|factors| factors[d]);
        match bilinear {
            Some(corners) => linear_weights(from[d], to[d], factor, corners),
            None => nearest(from[d], to[d], factor),
        }
    })
}

/// The nearest position: `⌊o · scale⌋`, in f32 as PyTorch's kernel has it.
pub(super) fn nearest(from: i64, to: i64, factor: Option<f64>) -> Axis {
    let scale = match factor {
        Some(factor) if factor > 0.0 => (1.0 / factor) as f32,
        _ => from as f32 / to as f32,
    };
    let one = |o: i64| {
        let at = if to == from {
            o
        } else if to == 2 * from {
            o / 2
        } else {
            ((o as f32 * scale).floor() as i64).min(from - 1)
        };
        (count(at), count(at), None)
    };
    (0..to).map(one).collect()
}

/// The elements of the image from one position of the result to the next.
pub(super) fn scale_of(from: i64, to: i64, factor: Option<f64>, corners: bool) -> f64 {
    match factor {
        _ if corners && to > 1 => (from - 1) as f64 / (to - 1) as f64,
        _ if corners => 0.0,
        Some(factor) if factor > 0.0 => 1.0 / factor,
        _ => from as f64 / to as f64,
    }
}

/// Two neighbours of each position. A weight of 0 counts, as in PyTorch's kernels: 0 times an infinity is NaN. Of an axis that keeps its
/// size both are the position itself.
pub(super) fn linear_weights(from: i64, to: i64, factor: Option<f64>, corners: bool) -> Axis {
    if from == to {
        return (0..count(to)).map(|o| (o, o, Some(0.0))).collect();
    }
    let scale = scale_of(from, to, factor, corners);
    let one = |o: i64| {
        let at = if corners { scale * o as f64 } else { (scale * (o as f64 + 0.5) - 0.5).max(0.0) };
        let low = (at as i64).min(from - 1);
        let weight = (at - low as f64).clamp(0.0, 1.0);
        (count(low), count((low + 1).min(from - 1)), Some(weight))
    };
    (0..to).map(one).collect()
}

fn weighted(x: &[f64], planes: usize, sizes: [i64; 2], [rows, columns]: &[Axis; 2]) -> Vec<f64> {
    let mix = |a: f64, b: f64, weight: Option<f64>| weight.map_or(a, |weight| a * (1.0 - weight) + b * weight);
    let mut all = Vec::with_capacity(planes * rows.len() * columns.len());
    for plane in x.chunks(count(sizes[0] * sizes[1]).max(1)).take(planes) {
        for &(top, bottom, down) in rows {
            let at = |row: usize, column: usize| plane[row * count(sizes[1]) + column];
            all.extend(columns.iter().map(|&(left, right, over)| {
                mix(mix(at(top, left), at(top, right), over), mix(at(bottom, left), at(bottom, right), over), down)
            }));
        }
    }
    all
}

/// The result's height and width: as asked for, or the image's times the factors, cut.
fn resized(
    shapes: &dyn Shapes,
    size: Option<&[Int]>,
    factors: Option<&[f64]>,
    image: [i64; 2],
) -> Result<[i64; 2], OpError> {
    match (size, factors) {
        (Some(size), None) => match shapes.ints(size)?[..] {
            [h, w] => Ok([h, w]),
            ref other => refuse("output_size", format!("{other:?}"), "two numbers are expected"),
        },
        (None, Some(&[h, w])) => Ok([(image[0] as f64 * h) as i64, (image[1] as f64 * w) as i64]),
        (_, factors) => refuse("scale_factors", format!("{factors:?}"), "either a size or two factors are expected"),
    }
}

pub(super) fn window(args: &Args<'_>) -> Result<Window, OpError> {
    let all =
        |name: &str, default: i64| Ok::<_, OpError>(args.opt_ints(name)?.unwrap_or_else(|| vec![Int::Known(default)]));
    Ok(Window {
        kernel: args.ints("kernel_size")?,
        stride: args.opt_ints("stride")?.unwrap_or_default(),
        padding: all("padding", 0)?,
        dilation: all("dilation", 1)?,
        ceil_mode: args.bool_or("ceil_mode", false)?,
        line: false,
    })
}

fn max(args: &Args<'_>, indices: bool) -> Result<Pool, OpError> {
    Ok(Pool::Max { input: args.tensor("self")?, window: window(args)?, indices })
}

fn mean(args: &Args<'_>) -> Result<Pool, OpError> {
    Ok(Pool::Mean {
        input: args.tensor("self")?,
        window: window(args)?,
        count_include_pad: args.bool_or("count_include_pad", true)?,
        divisor_override: args.opt_int("divisor_override")?,
    })
}

fn adaptive(args: &Args<'_>) -> Result<Pool, OpError> {
    Ok(Pool::Adaptive { input: args.tensor("self")?, size: args.ints("output_size")?, line: false })
}

fn adaptive_max(args: &Args<'_>, line: bool) -> Result<Pool, OpError> {
    Ok(Pool::AdaptiveMax { input: args.tensor("self")?, size: args.ints("output_size")?, line })
}

/// The same in one dimension.
fn lines(mut pool: Pool) -> Result<Pool, OpError> {
    match &mut pool {
        Pool::Max { window, .. } | Pool::Mean { window, .. } => window.line = true,
        Pool::Adaptive { line, .. } | Pool::AdaptiveMax { line, .. } => *line = true,
        Pool::Resize { .. } => {}
    }
    Ok(pool)
}

fn resize(args: &Args<'_>, bilinear: bool) -> Result<Pool, OpError> {
    Ok(Pool::Resize {
        input: args.tensor("input")?,
        size: args.opt_ints("output_size")?,
        factors: opt_floats(args, "scale_factors")?,
        bilinear: if bilinear { Some(args.bool_or("align_corners", false)?) } else { None },
    })
}
