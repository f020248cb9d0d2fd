//! Patches of images as columns: `im2col`, and `col2im`, which adds them up again.
//!
//! Column `l` of `im2col` has the elements of window `l`, channel by channel, 0 where the window reaches past the image. `col2im` adds
//! every element to where it came from: sums are f64 and rounded once. Results lie row-major.

use super::shape::{bounded, cells, count, fresh, need_float, need_plain, refuse};
use crate::{Args, Cells, Eval, Int, Meta, OpError, Out, Shapes, Tensor, ValueId};

/// Patches.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// Images `[batch, channels, height, width]`, or columns `[batch, channels · window, windows]`; both also without the batch.
    input: ValueId,
    /// Height and width of the images, where columns become images.
    image: Option<Vec<Int>>,
    /// Windows: their sizes, dilation, padding and stride.
    window: [Vec<Int>; 4],
}

/// Patches in numbers.
struct Sizes {
    batch: i64,
    channels: i64,
    image: [i64; 2],
    kernel: [i64; 2],
    dilation: [i64; 2],
    padding: [i64; 2],
    stride: [i64; 2],
    windows: [i64; 2],
}

impl Patches {
    pub(super) fn read(target: &str, args: &Args<'_>) -> Option<Result<Patches, OpError>> {
        Some(match target.strip_prefix("torch.ops.aten.")? {
            "im2col.default" => patches(args, false),
            "col2im.default" => patches(args, true),
            _ => return None,
        })
    }

    pub(super) fn infer(&self, shapes: &dyn Shapes) -> Result<Vec<Out>, OpError> {
        let meta = shapes.meta(self.input)?;
        let s = self.sizes(shapes, meta)?;
        let (batched, shape) = if self.image.is_some() {
            need_float("a sum of patches", meta.dtype)?;
            (meta.rank() == 3, vec![s.batch, s.channels, s.image[0], s.image[1]])
        } else {
            need_plain("patches", meta.dtype)?;
            let rows = s.channels.saturating_mul(s.kernel[0]).saturating_mul(s.kernel[1]);
            (meta.rank() == 4, vec![s.batch, rows, s.windows[0].saturating_mul(s.windows[1])])
        };
        bounded(&shape)?;
        Ok(vec![fresh(meta.dtype, if batched { &shape } else { &shape[1..] })?])
    }

    pub(super) fn mutates(&self) -> Option<ValueId> {
        None
    }

    pub(super) fn eval(&self, eval: &dyn Eval, outs: &[Tensor]) -> Result<(), OpError> {
        let input = eval.tensor(self.input)?;
        let sizes = self.sizes(eval, &input.meta)?;
        match (cells(input), self.image.is_some()) {
            (Cells::Float(x), true) => {
                let mut y = vec![0.0; count(outs[0].meta.numel())];
                sizes.each(|column, place| {
                    if let Some(place) = place {
                        y[place] += x[column];
                    }
                });
                outs[0].write_floats(eval.precision(), y);
            }
            (Cells::Float(x), false) => {
                let mut y = vec![0.0; count(outs[0].meta.numel())];
                sizes.each(|column, place| y[column] = place.map_or(0.0, |place| x[place]));
                outs[0].write_floats(eval.precision(), y);
            }
            (Cells::Int(x), _) => {
                let mut y = vec![0; count(outs[0].meta.numel())];
                sizes.each(|column, place| y[column] = place.map_or(0, |place| x[place]));
                outs[0].write_ints(y);
            }
        }
        Ok(())
    }

    fn sizes(&self, shapes: &dyn Shapes, meta: &Meta) -> Result<Sizes, OpError> {
        let [kernel, dilation, padding, stride] = [("kernel_size", 1), ("dilation", 1), ("padding", 0), ("stride", 1)];
        let two = |at: usize, (name, least): (&str, i64)| match shapes.ints(&self.window[at])?[..] {
            [n] if n >= least => Ok([n, n]),
            [a, b] if a >= least && b >= least => Ok([a, b]),
            ref other => refuse(name, format!("{other:?}"), "two numbers, none too small, are expected"),
        };
        let (kernel, dilation) = (two(0, kernel)?, two(1, dilation)?);
        let (padding, stride) = (two(2, padding)?, two(3, stride)?);
        let unfit = || OpError::Shape(format!("patches of a tensor of shape {:?}", meta.shape));
        let (batch, channels, image) = match (&self.image, &meta.shape[..]) {
            (None, &[ref lead @ .., c, h, w]) if lead.len() < 2 => (lead.first().copied().unwrap_or(1), c, [h, w]),
            (Some(size), &[ref lead @ .., rows, _]) if lead.len() < 2 => {
                let image = match shapes.ints(size)?[..] {
                    [h, w] => [h, w],
                    ref other => return refuse("output_size", format!("{other:?}"), "two numbers are expected"),
                };
                let each = kernel[0].checked_mul(kernel[1]).filter(|each| rows % each == 0).ok_or_else(unfit)?;
                (lead.first().copied().unwrap_or(1), rows / each, image)
            }
            _ => return Err(unfit()),
        };
        let along = |d: usize| {
            let reach = dilation[d].checked_mul(kernel[d] - 1)?.checked_add(1)?;
            let room = padding[d].checked_mul(2)?.checked_add(image[d])?.checked_sub(reach)?;
            (room >= 0 && image[d] > 0).then(|| room / stride[d] + 1)
        };
        let windows = [along(0).ok_or_else(unfit)?, along(1).ok_or_else(unfit)?];
        if self.image.is_some() && meta.shape.last() != Some(&windows[0].saturating_mul(windows[1])) {
            return Err(unfit());
        }
        Ok(Sizes { batch, channels, image, kernel, dilation, padding, stride, windows })
    }
}

impl Sizes {
    /// Calls `each` with every place among the columns and the place in the images that it is of; `None` is outside of them.
    fn each(&self, mut each: impl FnMut(usize, Option<usize>)) {
        let mut column = 0;
        let inside = |d: usize, window: i64, k: i64| {
            Some(window * self.stride[d] - self.padding[d] + k * self.dilation[d])
                .filter(|i| (0..self.image[d]).contains(i))
        };
        for plane in 0..self.batch * self.channels {
            for (kh, kw) in (0..self.kernel[0]).flat_map(|kh| (0..self.kernel[1]).map(move |kw| (kh, kw))) {
                for row in (0..self.windows[0]).map(|window| inside(0, window, kh)) {
                    for at in (0..self.windows[1]).map(|window| inside(1, window, kw)) {
                        let place = row.zip(at).map(|(row, at)| (plane * self.image[0] + row) * self.image[1] + at);
                        each(column, place.map(count));
                        column += 1;
                    }
                }
            }
        }
    }
}

fn patches(args: &Args<'_>, is_back: bool) -> Result<Patches, OpError> {
    let image = if is_back { Some(args.ints("output_size")?) } else { None };
    let window = [args.ints("kernel_size")?, args.ints("dilation")?, args.ints("padding")?, args.ints("stride")?];
    Ok(Patches { input: args.tensor("self")?, image, window })
}
