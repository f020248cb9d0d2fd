//! Pooling of volumes, `[batch, channels, depth, height, width]` or without the batch.
//!
//! The rules are those of images (`pool.rs`): maxima keep the first of equal numbers and the last NaN, means are summed in f64 and
//! rounded once, those of integers are cut. Maxima lie channels-last where the input does, everything else row-major.

use std::ops::Range;

use rapt_core::DType;

use super::pool::{Steps, Window, window};
use super::shape::{
    bounded, cells, count, fresh_in_format, is_channels_last, misfit, need_float, need_number, pick, refuse,
};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId};

/// A pooling of volumes.
#[derive(Clone, Debug, PartialEq)]
pub enum Volume {
    /// `max_pool3d` and `max_pool3d_with_indices`.
    Max {
        /// The volumes.
        input: ValueId,
        /// The windows.
        window: Window,
        /// Whether the maxima's places in their volume are a result too.
        indices: bool,
    },
    /// `avg_pool3d`.
    Mean {
        /// The volumes.
        input: ValueId,
        /// The windows.
        window: Window,
        /// Whether the padding counts in the number that the sum is divided by.
        count_include_pad: bool,
        /// What the sum is divided by instead.
        divisor_override: Option<Int>,
    },
    /// `adaptive_avg_pool3d` and `adaptive_max_pool3d`: as many windows as are asked for, which cover the volume.
    Adaptive {
        /// The volumes.
        input: ValueId,
        /// The result's depth, height and width.
        size: Vec<Int>,
        /// Whether the maxima and their places are the results, and not the means.
        max: bool,
    },
}

/// The windows of a volume: of each dimension the elements of each window.
struct Windows {
    sizes: [i64; 3],
    along: [Vec<Vec<i64>>; 3],
    /// The same with the padding that counts: how many elements each window has.
    extents: [Vec<i64>; 3],
}

impl Volume {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Volume, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "max_pool3d.default" => max(args, false),
            "max_pool3d_with_indices.default" => max(args, true),
            "avg_pool3d.default" => mean(args),
            "adaptive_avg_pool3d.default" | "_adaptive_avg_pool3d.default" => adaptive(args, false),
            "adaptive_max_pool3d.default" => adaptive(args, true),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input())?;
        let (max, places) = match self {
            Volume::Max { indices, .. } => (true, *indices),
            Volume::Mean { .. } => (false, false),
            Volume::Adaptive { max, .. } => {
                need_float("adaptive pooling", meta.dtype)?;
                (false, *max)
            }
        };
        need_number("pooling", meta.dtype)?;
        let windows = self.windows(shapes, meta)?;
        let output = [0, 1, 2].map(|d| i64::try_from(windows.along[d].len()).unwrap_or(i64::MAX));
        let shape = [&meta.shape[..meta.rank() - 3], &output[..]].concat();
        bounded(&shape)?;
        let out = |dtype| fresh_in_format(dtype, &shape, max && is_channels_last(meta));
        let mut outs = vec![out(meta.dtype)?];
        if places {
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
        let windows = self.windows(eval, &input.meta)?;
        let volumes = count(input.meta.shape[..input.meta.rank() - 3].iter().product());
        match self {
            Volume::Max { .. } | Volume::Adaptive { max: true, .. } => {
                let (places, within): (Vec<usize>, Vec<i64>) = windows.maxima(&x, volumes).into_iter().unzip();
                outs[0].write(eval.precision(), pick(&x, places));
                if let Some(out) = outs.get(1) {
                    out.write_ints(within);
                }
            }
            Volume::Mean { count_include_pad, divisor_override, .. } => {
                let divisor = divisor_override.map(|n| eval.int(n)).transpose()?;
                let padded = *count_include_pad;
                let by = |extent: i64, cut: i64| divisor.unwrap_or(if padded { extent } else { cut });
                outs[0].write(eval.precision(), windows.means(&x, volumes, by));
            }
            Volume::Adaptive { max: false, .. } => {
                outs[0].write(eval.precision(), windows.means(&x, volumes, |_, cut| cut));
            }
        }
        Ok(())
    }

    fn input(&self) -> ValueId {
        match *self {
            Volume::Max { input, .. } | Volume::Mean { input, .. } | Volume::Adaptive { input, .. } => input,
        }
    }

    fn windows(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<Windows, OpError> {
        let (&[ref lead @ .., depth, height, width], true) = (&meta.shape[..], matches!(meta.rank(), 4 | 5)) else {
            return misfit(format!("a tensor of shape {:?} is no volume", meta.shape));
        };
        let sizes = [depth, height, width];
        // The batch alone may be empty.
        if sizes.contains(&0) || lead[lead.len() - 1] == 0 {
            return misfit(format!("a tensor of shape {:?} is no volume", meta.shape));
        }
        match self {
            Volume::Max { window, .. } | Volume::Mean { window, .. } => {
                if let Volume::Mean { divisor_override: Some(n), .. } = self
                    && shapes.int(*n)? == 0
                {
                    return refuse("divisor_override", "0", "a sum is divided by it");
                }
                let steps = steps(shapes, window, sizes)?;
                let extents = steps.map(|steps| (0..steps.output).map(|o| steps.extent(o)).collect());
                Ok(Windows {
                    sizes,
                    along: steps.map(|s| (0..s.output).map(|o| s.elements(o).collect()).collect()),
                    extents,
                })
            }
            Volume::Adaptive { size, .. } => {
                let output = match shapes.ints(size)?[..] {
                    [d, h, w] => [d, h, w],
                    [n] => [n; 3],
                    ref other => return refuse("output_size", format!("{other:?}"), "three numbers are expected"),
                };
                let window = |d: usize, o: i64| -> Range<i64> {
                    o * sizes[d] / output[d]..((o + 1) * sizes[d] + output[d] - 1) / output[d]
                };
                let along = [0, 1, 2].map(|d| (0..output[d]).map(|o| window(d, o).collect()).collect());
                Ok(Windows { sizes, along, extents: [Vec::new(), Vec::new(), Vec::new()] })
            }
        }
    }
}

impl Windows {
    /// Calls `each` with each window's elements' places in the volume, in row-major order of the windows, and its size with padding.
    fn each(&self, mut each: impl FnMut(&[i64], i64)) {
        let [_, height, width] = self.sizes;
        let extent = |d: usize, o: usize| self.extents[d].get(o).copied().unwrap_or(0);
        let mut places = Vec::new();
        for (d, planes) in self.along[0].iter().enumerate() {
            for (h, rows) in self.along[1].iter().enumerate() {
                for (w, columns) in self.along[2].iter().enumerate() {
                    places.clear();
                    for plane in planes {
                        for row in rows.iter().map(|row| (plane * height + row) * width) {
                            places.extend(columns.iter().map(|column| row + column));
                        }
                    }
                    each(&places, extent(0, d) * extent(1, h) * extent(2, w));
                }
            }
        }
    }

    fn volume(&self) -> usize {
        count(self.sizes.iter().product())
    }

    /// For each window the maximum's place in the tensor, and in its volume.
    fn maxima(&self, x: &Cells, volumes: usize) -> Vec<(usize, i64)> {
        let better = |p: usize, than: usize| match x {
            Cells::Float(x) => x[p] > x[than] || x[p].is_nan(),
            Cells::Int(x) => x[p] > x[than],
        };
        let mut all = Vec::new();
        for start in (0..volumes).map(|v| v * self.volume()) {
            self.each(|places, _| {
                let first = |best: i64, at: i64| if better(start + count(at), start + count(best)) { at } else { best };
                let best = places.iter().copied().reduce(first).unwrap_or(0);
                all.push((start + count(best), best));
            });
        }
        all
    }

    /// The means; `divisor` is told a window's size with and without padding.
    fn means(&self, x: &Cells, volumes: usize, divisor: impl Fn(i64, i64) -> i64) -> Cells {
        let (mut floats, mut ints) = (Vec::new(), Vec::new());
        for start in (0..volumes).map(|v| v * self.volume()) {
            self.each(|places, extent| {
                let by = divisor(extent, i64::try_from(places.len()).unwrap_or(i64::MAX));
                let at = places.iter().map(|&p| start + count(p));
                match x {
                    Cells::Float(_) if places.is_empty() => floats.push(0.0),
                    Cells::Float(x) => floats.push(at.fold(0.0, |sum, p| sum + x[p]) / by as f64),
                    Cells::Int(_) if places.is_empty() => ints.push(0),
                    Cells::Int(x) => ints.push(at.fold(0i64, |sum, p| sum.wrapping_add(x[p])).wrapping_div(by)),
                }
            });
        }
        if matches!(x, Cells::Float(_)) { Cells::Float(floats) } else { Cells::Int(ints) }
    }
}

fn steps(shapes: &dyn Shapes, window: &Window, sizes: [i64; 3]) -> Result<[Steps; 3], OpError> {
    let three = |name: &str, list: &[Int]| match shapes.ints(list)?[..] {
        [n] => Ok([n; 3]),
        [a, b, c] => Ok([a, b, c]),
        ref other => refuse(name, format!("{other:?}"), "one or three numbers are expected"),
    };
    let kernel = three("kernel_size", &window.kernel)?;
    let stride = if window.stride.is_empty() { kernel } else { three("stride", &window.stride)? };
    let (padding, dilation) = (three("padding", &window.padding)?, three("dilation", &window.dilation)?);
    let along = |d: usize| Steps::new([sizes[d], kernel[d], stride[d], padding[d], dilation[d]], window.ceil_mode);
    Ok([along(0)?, along(1)?, along(2)?])
}

fn max(args: &Args<'_>, indices: bool) -> Result<Volume, OpError> {
    Ok(Volume::Max { input: args.tensor("self")?, window: window(args)?, indices })
}

fn mean(args: &Args<'_>) -> Result<Volume, OpError> {
    Ok(Volume::Mean {
        input: args.tensor("self")?,
        window: window(args)?,
        count_include_pad: args.bool_or("count_include_pad", true)?,
        divisor_override: args.opt_int("divisor_override")?,
    })
}

fn adaptive(args: &Args<'_>, max: bool) -> Result<Volume, OpError> {
    Ok(Volume::Adaptive { input: args.tensor("self")?, size: args.ints("output_size")?, max })
}
