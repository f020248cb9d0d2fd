//! Pooling, resizing, and the convolutions that are no products: transposed ones, and those of each channel by itself.

use rapt_cpu::pointwise::{Instruction, Register};
use rapt_cpu::strided::{Depthwise, FoldFunction, Form, Pool as PoolKernel, PoolFunction, Resize, Spread, Steps};
use rapt_graph::ops::{Conv, ConvSizes, Pool};
use rapt_graph::{Meta, Node, Shapes};

use super::super::ModelError;
use super::build::Builder;
use super::conv::whole;
use super::place::Place;
use super::product::{self, Head};
use super::strided::{form, is_float, permuted, wide};
use super::{Kernel, Step};

/// The most windows of an adaptive pooling that are reductions of their own.
const MOST_WINDOWS: i64 = 64;

/// The most groups of a transposed convolution, each with products of its own.
const MOST_GROUPS: usize = 8;

/// A line as an image of height 1.
fn tall(mut place: Place) -> Place {
    let last = place.meta.rank().saturating_sub(1);
    place.meta.shape.insert(last, 1);
    place.meta.strides.insert(last, 0);
    place
}

impl Builder<'_> {
    /// Pooling and resizing.
    pub(super) fn pool(&mut self, n: usize, node: &Node, op: &Pool) -> Result<bool, ModelError> {
        // A line is an image of height 1.
        let image = |place: Place| if op.is_of_lines() { tall(place) } else { place };
        let x = image(self.place(op.input())?);
        let [.., height, width] = x.meta.shape[..] else { return Ok(false) };
        let Some(out) = self.output(n, node, 0).map(image) else { return Ok(false) };
        let (function, window) = match op {
            Pool::Max { window, .. } => (PoolFunction::Max, window),
            Pool::Mean { window, count_include_pad, divisor_override, .. } => {
                let divisor = divisor_override.map(|by| self.binding.int(by)).transpose();
                let Ok(divisor) = divisor else { return Ok(false) };
                (PoolFunction::Mean { with_padding: *count_include_pad, divisor }, window)
            }
            Pool::AdaptiveMax { .. } => return Ok(false),
            Pool::Adaptive { .. } => return self.adaptive(n, node, &x, &out),
            Pool::Resize { .. } => {
                let Ok(Some(axes)) = op.axes(self.binding) else { return Ok(false) };
                let Some(kernel) = Resize::new(self.arch, axes, &form(&x), &form(&out)) else { return Ok(false) };
                self.close_for(&node.inputs)?;
                self.strided(n, kernel, vec![x, out], false, Vec::new());
                return Ok(true);
            }
        };
        let Ok(steps) = window.steps(self.binding, [height, width]) else { return Ok(false) };
        let size = |n: i64| usize::try_from(n).unwrap_or(0);
        let steps = steps.map(|steps| Steps {
            input: size(steps.size),
            output: size(steps.output),
            kernel: size(steps.kernel),
            stride: size(steps.stride),
            padding: size(steps.padding),
            dilation: size(steps.dilation),
        });
        let is_named =
            matches!(op, Pool::Max { indices: true, .. }) && node.outputs.get(1).is_some_and(Option::is_some);
        let places = if is_named { self.output(n, node, 1).map(image) } else { None };
        let of_places = places.as_ref().map(form);
        let kernel = PoolKernel::new(self.arch, function, steps, &form(&x), &form(&out), of_places.as_ref());
        let Some(kernel) = kernel else { return Ok(false) };
        self.close_for(&node.inputs)?;
        self.strided(n, kernel, [Some(x), Some(out), places].into_iter().flatten().collect(), false, Vec::new());
        Ok(true)
    }

    /// As many means as are asked for: windows of one size where they are, else a reduction for each.
    fn adaptive(&mut self, n: usize, node: &Node, x: &Place, out: &Place) -> Result<bool, ModelError> {
        let rank = x.meta.rank();
        let dims = [rank - 2, rank - 1];
        let [sizes, counts] = [x, out].map(|place| dims.map(|d| place.meta.shape[d]));
        let is_even = (0..2).all(|d| counts[d] > 0 && sizes[d] % counts[d] == 0);
        self.close_for(&node.inputs)?;
        if is_even && counts != [1, 1] {
            let steps = [0, 1].map(|d| {
                let [input, output] = [sizes[d], counts[d]].map(|n| usize::try_from(n).unwrap_or(0));
                let each = input / output.max(1);
                Steps { input, output, kernel: each, stride: each.max(1), padding: 0, dilation: 1 }
            });
            let function = PoolFunction::Mean { with_padding: false, divisor: None };
            let kernel = PoolKernel::new(self.arch, function, steps, &form(x), &form(out), None);
            let Some(kernel) = kernel else { return Ok(false) };
            self.strided(n, kernel, vec![x.clone(), out.clone()], false, Vec::new());
            return Ok(true);
        }
        if counts[0] * counts[1] > MOST_WINDOWS {
            return Ok(false);
        }
        for row in 0..counts[0] {
            for column in 0..counts[1] {
                let (mut from, mut to) = (x.clone(), out.clone());
                for (d, o) in [row, column].into_iter().enumerate() {
                    // ⌊o · size / count⌋ .. ⌈(o + 1) · size / count⌉
                    let start = o * sizes[d] / counts[d];
                    let end = ((o + 1) * sizes[d] + counts[d] - 1) / counts[d];
                    from = from.narrowed(dims[d], start, end - start);
                    to = to.narrowed(dims[d], o, 1);
                }
                let dtype = from.meta.dtype;
                if !self.fold_to(n, FoldFunction::Mean, (&from, dtype), &dims, [Some(to), None])? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// A transposed convolution, or one of each channel by itself.
    pub(super) fn other_conv(&mut self, n: usize, node: &Node, op: &Conv) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let sizes = op.sizes(self.binding).map_err(|cause| self.failed(node, cause))?;
        let Some((sizes, batched)) = sizes else { return Ok(false) };
        let weight = self.place(op.weight)?;
        if !is_float(out.meta.dtype) || sizes.batch == 0 {
            return Ok(false);
        }
        let (x, out) = (whole(&self.place(op.input)?, batched), whole(&out, batched));
        let bias = op.bias.map(|id| self.place(id)).transpose()?;
        if sizes.transposed {
            return self.transposed(n, node, (&sizes, &weight), [&x, &out], bias.as_ref());
        }
        let mut kernels = whole(&weight, true);
        if sizes.in_channels != 1 || kernels.meta.rank() != 4 {
            return Ok(false);
        }
        kernels.meta.shape.remove(1);
        kernels.meta.strides.remove(1);
        let size = |n: i64| usize::try_from(n).unwrap_or(0);
        let steps = [0, 1].map(|d| Steps {
            input: sizes.input[d],
            output: sizes.output[d],
            kernel: sizes.kernel[d],
            stride: size(sizes.stride[d]),
            padding: size(sizes.padding[d]),
            dilation: size(sizes.dilation[d]),
        });
        let of_bias = bias.as_ref().map(form);
        let forms = [&form(&x), &form(&out), &form(&kernels)];
        let Some(kernel) = Depthwise::new(self.arch, steps, forms, of_bias.as_ref()) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        let operands = [Some(x), Some(out), Some(kernels), bias].into_iter().flatten().collect();
        self.strided(n, kernel, operands, false, Vec::new());
        Ok(true)
    }

    /// For each group: positions by channels, a product for each tap, and the results gathered.
    fn transposed(
        &mut self,
        n: usize,
        node: &Node,
        (sizes, weight): (&ConvSizes, &Place),
        [x, out]: [&Place; 2],
        bias: Option<&Place>,
    ) -> Result<bool, ModelError> {
        let signed = |n: usize| i64::try_from(n).unwrap_or(0);
        let size = |n: i64| usize::try_from(n).unwrap_or(0);
        let (in_channels, out_channels) = (signed(sizes.in_channels), signed(sizes.out_channels));
        let positions = signed(sizes.batch * sizes.input[0] * sizes.input[1]);
        let taps = signed(sizes.kernel[0] * sizes.kernel[1]);
        let sums_dtype = wide(x.meta.dtype);
        if sizes.groups > MOST_GROUPS || positions == 0 || taps == 0 || in_channels == 0 {
            return Ok(false);
        }
        let weight = whole(weight, true);
        let sums = self.temporary(sums_dtype, &[taps, positions, out_channels]);
        let geometry =
            [sizes.input, sizes.kernel, sizes.stride.map(size), sizes.padding.map(size), sizes.dilation.map(size)];
        let kernel_of = |bias: Option<&Form>, out: &Form| Spread::new(self.arch, sums_dtype, geometry, bias, out);
        let of_group = out.narrowed(1, 0, out_channels);
        let first = bias.map(|bias| form(&bias.narrowed(0, 0, out_channels)));
        let Some(kernel) = kernel_of(first.as_ref(), &form(&of_group)) else { return Ok(false) };
        self.close_for(&node.inputs)?;
        for group in 0..signed(sizes.groups) {
            // [batch, height, width, channel]
            let own = permuted(&x.narrowed(1, group * in_channels, in_channels), &[0, 2, 3, 1]);
            let rows = [positions, in_channels];
            let direct = own.reshaped(&rows).filter(|own| in_channels == 1 || own.meta.strides[1] == 1);
            let own = match direct {
                Some(own) => own,
                None => {
                    let copy = self.copied(n, &own, own.meta.dtype)?;
                    Place { meta: Meta::contiguous(own.meta.dtype, &rows), ..copy }
                }
            };
            for tap in 0..taps {
                let (row, column) = (tap / signed(sizes.kernel[1]), tap % signed(sizes.kernel[1]));
                let mut w = weight.narrowed(0, group * in_channels, in_channels);
                w.meta.offset += row * w.meta.strides[2] + column * w.meta.strides[3];
                w.meta.shape.truncate(2);
                w.meta.strides.truncate(2);
                let mut to = sums.narrowed(0, tap, 1);
                to.meta.shape.remove(0);
                to.meta.strides.remove(0);
                self.sums_to(n, &own, &w, &to)?;
            }
            let bias = bias.map(|bias| bias.narrowed(0, group * out_channels, out_channels));
            let to = out.narrowed(1, group * out_channels, out_channels);
            let operands = [Some(sums.clone()), bias, Some(to)].into_iter().flatten().collect();
            self.strided(n, kernel.clone(), operands, false, Vec::new());
        }
        Ok(true)
    }

    /// A product whose sums are stored as they are: `x · w`, rows whose elements follow one another by a matrix.
    fn sums_to(&mut self, n: usize, x: &Place, w: &Place, to: &Place) -> Result<(), ModelError> {
        let [rows, columns] = [0, 1].map(|d| to.shape()[d]);
        let (gemm, layout) = product::kernels(self.arch, x.meta.dtype, [rows, columns, x.shape()[1]], self.threads)?;
        let weights = self.weights(layout, vec![w.clone()])?.remove(0);
        let mut uses = vec![x.buffer, to.buffer];
        uses.extend(weights.uses());
        let code = vec![Instruction::Load(0), Instruction::Store(1, Register(0))];
        let operands = vec![to.clone()];
        let each = self.each(&operands, Some(to.meta.dtype), &to.meta.shape, code)?;
        let head = Box::new(Head { gemm, x: x.clone(), weights });
        let kernel = Kernel::Product { head, out: None, after: Some((Box::new(each), operands)) };
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
        Ok(())
    }
}
