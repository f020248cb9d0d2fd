//! Convolution in one, two and three dimensions, forwards and transposed, in groups.
//!
//! `y[n, o, i] = bias[o] + Σ_{c, k} x[n, c, i · stride − padding + k · dilation] · w[o, c, k]`, over the channels `c` of the
//! group of `o`. Transposed, each `x[n, c, i]` adds `w[c, o, k]` times itself to `y[n, o, i · stride − padding + k · dilation]`.
//! Floats are summed in f64 and rounded once, integers wrap. Fewer dimensions are three, the first of size 1. The padding's zeros are
//! numbers: with a weight that is NaN or infinite they make NaN.
//!
//! The result lies channels-last where the input or the weight does, as PyTorch's CPU kernels have it, of volumes in
//! float32, float16 and bfloat16.

use rapt_core::DType;

use super::linear::Arithmetic;
use super::shape::{
    bounded, cells, count, fresh, fresh_in_format, is_channels_last, misfit, need_number, need_same, refuse,
};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId, strides};

/// A convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct Conv {
    /// The input, `[batch, channels, ...]`, or without the batch where the operator's name says the dimensions.
    pub input: ValueId,
    /// The weight, `[out_channels, in_channels / groups, ...]`; transposed, `[in_channels, out_channels / groups, ...]`.
    pub weight: ValueId,
    /// What is added to each channel.
    pub bias: Option<ValueId>,
    /// The steps between windows: one for each spatial dimension, or one for all.
    pub stride: Vec<Int>,
    /// The zeros around the input.
    pub padding: Padding,
    /// The steps between a window's elements.
    pub dilation: Vec<Int>,
    /// The number of groups of channels.
    pub groups: Int,
    /// What is added to a transposed convolution's size; `None` where it is not transposed.
    pub transposed: Option<Vec<Int>>,
    /// The number of spatial dimensions that the operator's name says.
    pub spatial: Option<usize>,
}

/// The zeros around a convolution's input.
#[derive(Clone, Debug, PartialEq)]
pub enum Padding {
    /// As many on both sides of each spatial dimension.
    Sizes(Vec<Int>),
    /// As much as keeps the size, the odd one at the end.
    Same,
}

/// A convolution in numbers, of so many spatial dimensions.
#[derive(Clone, Copy, Debug)]
pub struct ConvSizes<const D: usize = 2> {
    /// Inputs.
    pub batch: usize,
    /// Groups of channels.
    pub groups: usize,
    /// Input channels of a group.
    pub in_channels: usize,
    /// Output channels of a group.
    pub out_channels: usize,
    /// The input's spatial sizes: height and width are the last.
    pub input: [usize; D],
    /// The kernel's.
    pub kernel: [usize; D],
    /// The output's.
    pub output: [usize; D],
    /// The steps between windows.
    pub stride: [i64; D],
    /// Zeros before the first element.
    pub padding: [i64; D],
    /// The steps between a window's elements.
    pub dilation: [i64; D],
    /// Whether it is transposed.
    pub transposed: bool,
}

impl Conv {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Conv, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "conv1d.default" => conv(args, Some(1), false, false),
            "conv1d.padding" => conv(args, Some(1), true, false),
            "conv2d.default" => conv(args, Some(2), false, false),
            "conv2d.padding" => conv(args, Some(2), true, false),
            "conv_transpose1d.default" => conv(args, Some(1), false, true),
            "conv_transpose2d.input" => conv(args, Some(2), false, true),
            "conv3d.default" => conv(args, Some(3), false, false),
            "conv3d.padding" => conv(args, Some(3), true, false),
            "conv_transpose3d.input" => conv(args, Some(3), false, true),
            "convolution.default" => args.bool_or("transposed", false).and_then(|t| conv(args, None, false, t)),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let (input, weight) = (shapes.meta(self.input)?, shapes.meta(self.weight)?);
        need_number("a convolution", input.dtype)?;
        need_same(input.dtype, weight.dtype)?;
        let (sizes, batched) = self.whole(shapes)?;
        let channels = signed(sizes.groups * sizes.out_channels);
        if let Some(bias) = self.bias {
            let bias = shapes.meta(bias)?;
            need_same(input.dtype, bias.dtype)?;
            if bias.shape != [channels] {
                return misfit(format!("a bias of shape {:?} for {channels} channels", bias.shape));
            }
        }
        let spatial = weight.rank() - 2;
        let mut shape = vec![signed(sizes.batch), channels];
        shape.extend(sizes.output[3 - spatial..].iter().map(|&n| signed(n)));
        bounded(&shape)?;
        // A batch of none goes to no kernel, and lies row-major.
        let channels_last = sizes.batch > 0 && self.is_channels_last(input, weight, batched);
        if !batched {
            shape.remove(0);
        }
        if spatial == 1 && channels_last && batched {
            let strides = strides::channels_innermost(&shape);
            return Ok(vec![Out::Fresh(Meta { dtype: input.dtype, shape, strides, offset: 0 })]);
        }
        if channels_last && !batched {
            let mut meta = Meta::contiguous(input.dtype, &shape);
            let channels = shape[0];
            match shape[..] {
                [_, _, width] => meta.strides = vec![1, channels * width, channels],
                [_, _, height, width] => {
                    meta.strides = vec![1, channels * width * height, channels * width, channels];
                }
                _ => meta.strides = vec![1, channels],
            }
            return Ok(vec![Out::Fresh(meta)]);
        }
        if channels_last {
            Ok(vec![fresh_in_format(input.dtype, &shape, true)?])
        } else {
            Ok(vec![fresh(input.dtype, &shape)?])
        }
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let (sizes, _) = self.whole(eval)?;
        let (x, w) = (cells(eval.tensor(self.input)?), cells(eval.tensor(self.weight)?));
        let bias = self.bias.map(|id| eval.tensor(id)).transpose()?;
        match (x, w) {
            (Cells::Float(x), Cells::Float(w)) => {
                let bias = bias.map(Tensor::floats);
                outs[0].write_floats(eval.precision(), sizes.convolve(&x, &w, bias.as_deref()));
            }
            (Cells::Int(x), Cells::Int(w)) => {
                let bias = bias.map(Tensor::ints);
                outs[0].write_ints(sizes.convolve(&x, &w, bias.as_deref()));
            }
            // The dtypes are equal: inference has checked it.
            _ => {}
        }
        Ok(())
    }

    /// Whether PyTorch's kernel works channels-last: where the input as the kernel sees it, or the weight, lies so.
    fn is_channels_last(&self, input: &Meta, weight: &Meta, batched: bool) -> bool {
        let mut input = input.clone();
        if !batched {
            let stride = input.shape[0] * input.strides[0];
            input.shape.insert(0, 1);
            input.strides.insert(0, stride);
        }
        if weight.rank() > 3 {
            let lies_so = is_channels_last(&input) || is_channels_last(weight);
            // Of volumes oneDNN's kernel alone does, which has neither float64 nor integers.
            let may = weight.rank() == 4 || matches!(input.dtype, DType::F32 | DType::F16 | DType::BF16);
            return may && lies_so;
        }
        // In one dimension the input is made row-major first, and both get a height of 1.
        let tall = |meta: &Meta| {
            let mut meta = meta.clone();
            let stride = meta.shape[2] * meta.strides[2];
            meta.shape.insert(2, 1);
            meta.strides.insert(2, stride);
            is_channels_last(&meta)
        };
        tall(&Meta::contiguous(input.dtype, &input.shape)) || tall(weight)
    }

    /// Whether each channel is convolved by itself.
    #[must_use]
    pub fn is_by_channel(&self, shapes: &dyn Shapes) -> bool {
        self.whole(shapes).is_ok_and(|(sizes, _)| !sizes.transposed && sizes.in_channels == 1 && sizes.groups > 1)
    }

    /// The convolution of images or lines in numbers, and whether the input has a batch; `None` where there are volumes.
    ///
    /// # Errors
    /// As [`Op::infer`](super::Op::infer).
    pub fn sizes(&self, shapes: &dyn Shapes) -> Result<Option<(ConvSizes, bool)>, OpError> {
        if shapes.meta(self.weight)?.rank() == 5 {
            return Ok(None);
        }
        let (sizes, batched) = self.whole(shapes)?;
        Ok(Some((sizes.image(), batched)))
    }

    fn whole(&self, shapes: &dyn Shapes) -> Result<(ConvSizes<3>, bool), OpError> {
        let (input, weight) = (shapes.meta(self.input)?, shapes.meta(self.weight)?);
        let (x, w) = (&input.shape, &weight.shape);
        let text = || format!("a convolution of shapes {x:?} and {w:?}");
        let spatial = w.len().saturating_sub(2);
        if !matches!(spatial, 1..=3) || self.spatial.is_some_and(|n| n != spatial) {
            return misfit(text());
        }
        let batched = x.len() == w.len();
        if !batched && (x.len() + 1 != w.len() || self.spatial.is_none()) {
            return misfit(text());
        }
        let (batch, x) = if batched { (x[0], &x[1..]) } else { (1, &x[..]) };
        let groups = shapes.int(self.groups)?;
        if groups < 1 || x[0] % groups != 0 {
            return misfit(format!("{} in {groups} groups", text()));
        }
        let transposed = self.transposed.is_some();
        let (in_channels, out_channels) =
            if transposed { (w[0], w[1].saturating_mul(groups)) } else { (w[1].saturating_mul(groups), w[0]) };
        if in_channels != x[0] || out_channels % groups != 0 || out_channels == 0 {
            return misfit(format!("{} in {groups} groups", text()));
        }
        let stride = triple(shapes, "stride", &self.stride, spatial, 1)?;
        let dilation = triple(shapes, "dilation", &self.dilation, spatial, 1)?;
        let kernel = three(&w[2..], 1);
        let mut padding = [0; 3];
        let mut both = [0; 3];
        match &self.padding {
            Padding::Sizes(sizes) => {
                padding = triple(shapes, "padding", sizes, spatial, 0)?;
                both = padding.map(|p| p.saturating_mul(2));
            }
            Padding::Same => {
                if stride != [1, 1, 1] {
                    return refuse("padding", "same", "the stride is not 1");
                }
                for d in 0..3 {
                    both[d] = dilation[d].saturating_mul(kernel[d] - 1);
                    padding[d] = both[d] / 2;
                }
            }
        }
        let more = match &self.transposed {
            Some(more) => triple(shapes, "output_padding", more, spatial, 0)?,
            None => [0; 3],
        };
        let size = three(&x[1..], 1);
        let mut output = [0; 3];
        for d in 0..3 {
            output[d] = output_size(transposed, [size[d], kernel[d], stride[d], dilation[d], both[d], more[d]])
                .filter(|&n| n >= 0 && (transposed || n > 0) && kernel[d] > 0)
                .map(count)
                .ok_or_else(|| OpError::Shape(format!("{}: the kernel is larger than the padded input", text())))?;
            if more[d] > 0 && more[d] >= stride[d].max(dilation[d]) {
                return refuse("output_padding", more[d].to_string(), "it must be smaller than stride or dilation");
            }
        }
        let sizes = ConvSizes {
            batch: count(batch),
            groups: count(groups),
            in_channels: count(in_channels / groups),
            out_channels: count(out_channels / groups),
            input: size.map(count),
            kernel: kernel.map(count),
            output,
            stride,
            padding,
            dilation,
            transposed,
        };
        Ok((sizes, batched))
    }
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Three sizes, the first ones `fill` where there are fewer.
fn three(list: &[i64], fill: i64) -> [i64; 3] {
    match *list {
        [a, b, c] => [a, b, c],
        [b, c] => [fill, b, c],
        [c] => [fill, fill, c],
        _ => [fill; 3],
    }
}

/// An argument for each spatial dimension; a single number counts for all.
fn triple(shapes: &dyn Shapes, name: &str, list: &[Int], spatial: usize, least: i64) -> Result<[i64; 3], OpError> {
    let list = shapes.ints(list)?;
    if list.len() != 1 && list.len() != spatial {
        return refuse(name, format!("{list:?}"), "one number for each spatial dimension is expected");
    }
    if list.iter().any(|&n| n < least) {
        return refuse(name, format!("{list:?}"), "it is too small");
    }
    // Nothing happens in the dimensions before: their stride and dilation are 1, their padding is 0.
    let all = if list.len() == 1 { vec![list[0]; spatial] } else { list };
    Ok(three(&all, least))
}

fn output_size(transposed: bool, [size, kernel, stride, dilation, padding, more]: [i64; 6]) -> Option<i64> {
    let reach = dilation.checked_mul(kernel - 1)?.checked_add(1)?;
    if transposed {
        (size - 1).checked_mul(stride)?.checked_sub(padding)?.checked_add(reach)?.checked_add(more)
    } else {
        let room = size.checked_add(padding)?.checked_sub(reach)?;
        Some(if room < 0 { -1 } else { room / stride + 1 })
    }
}

impl ConvSizes<3> {
    /// Without the first dimension.
    fn image(&self) -> ConvSizes {
        let of = |[_, a, b]: [usize; 3]| [a, b];
        let by = |[_, a, b]: [i64; 3]| [a, b];
        ConvSizes {
            batch: self.batch,
            groups: self.groups,
            in_channels: self.in_channels,
            out_channels: self.out_channels,
            input: of(self.input),
            kernel: of(self.kernel),
            output: of(self.output),
            stride: by(self.stride),
            padding: by(self.padding),
            dilation: by(self.dilation),
            transposed: self.transposed,
        }
    }

    // for each pair of positions that meet: y += x · w
    fn convolve<T: Arithmetic>(&self, x: &[T], w: &[T], bias: Option<&[T]>) -> Vec<T> {
        let [in_plane, out_plane, taps] = [self.input, self.output, self.kernel].map(|[a, b, c]| a * b * c);
        let out_channels = self.groups * self.out_channels;
        let mut y = vec![T::ZERO; self.batch * out_channels * out_plane];
        for n in 0..self.batch {
            for o in 0..out_channels {
                let group = o / self.out_channels;
                let y = &mut y[(n * out_channels + o) * out_plane..][..out_plane];
                if let Some(bias) = bias {
                    y.fill(bias[o]);
                }
                for c in 0..self.in_channels {
                    let channel = group * self.in_channels + c;
                    let x = &x[(n * self.groups * self.in_channels + channel) * in_plane..][..in_plane];
                    let row = if self.transposed {
                        channel * self.out_channels + o % self.out_channels
                    } else {
                        o * self.in_channels + c
                    };
                    self.plane(y, x, &w[row * taps..][..taps]);
                }
            }
        }
        y
    }

    /// One channel's part in one channel of the result.
    fn plane<T: Arithmetic>(&self, y: &mut [T], x: &[T], w: &[T]) {
        // Forwards the result's positions lead, transposed the input's: the other's are reached by stride and tap.
        let (lead, other) = if self.transposed { (self.input, self.output) } else { (self.output, self.input) };
        // The pairs of positions that meet at tap `k` of a dimension; forwards also those whose input is a zero of the padding.
        let pairs = |d: usize, k: usize| {
            let pair = move |i: usize| {
                let at = signed(i) * self.stride[d] - self.padding[d] + signed(k) * self.dilation[d];
                (i, usize::try_from(at).ok().filter(|&at| at < other[d]))
            };
            (0..lead[d]).map(pair).filter(|(_, at)| at.is_some() || !self.transposed)
        };
        let [_, height, width] = self.kernel;
        for (k, &w) in w.iter().enumerate() {
            let columns: Vec<(usize, Option<usize>)> = pairs(2, k % width).collect();
            for (plane, of_plane) in pairs(0, k / width / height) {
                for (row, of_row) in pairs(1, k / width % height) {
                    let leads = (plane * lead[1] + row) * lead[2];
                    let others = of_plane.zip(of_row).map(|(plane, row)| (plane * other[1] + row) * other[2]);
                    for &(column, of_column) in &columns {
                        let leads = leads + column;
                        match others.zip(of_column).map(|(others, column)| others + column) {
                            Some(others) if self.transposed => y[others] = y[others].mul_add(x[leads], w),
                            Some(others) => y[leads] = y[leads].mul_add(x[others], w),
                            None => y[leads] = y[leads].mul_add(T::ZERO, w),
                        }
                    }
                }
            }
        }
    }
}

fn conv(args: &Args<'_>, spatial: Option<usize>, by_name: bool, transposed: bool) -> Result<Conv, OpError> {
    let all =
        |name: &str, default: i64| Ok::<_, OpError>(args.opt_ints(name)?.unwrap_or_else(|| vec![Int::Known(default)]));
    let padding = match (by_name, args) {
        (false, _) => Padding::Sizes(all("padding", 0)?),
        (true, args) => match args.opt_str("padding")?.unwrap_or("valid") {
            "valid" => Padding::Sizes(vec![Int::Known(0)]),
            "same" => Padding::Same,
            other => return refuse("padding", other, "it is valid or same"),
        },
    };
    // The general operator says what the others leave out.
    let more = args.opt_ints("output_padding")?.unwrap_or_else(|| vec![Int::Known(0)]);
    Ok(Conv {
        input: args.tensor("input")?,
        weight: args.tensor("weight")?,
        bias: args.opt_tensor("bias")?,
        stride: all("stride", 1)?,
        padding,
        dilation: all("dilation", 1)?,
        groups: args.int_or("groups", 1)?,
        transposed: transposed.then_some(more),
        spatial,
    })
}
