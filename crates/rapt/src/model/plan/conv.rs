//! Convolutions as products: the window of each output position is a row, the kernels of the channels are the columns.
//!
//! ```text
//! for each image, for each group:
//!     rows[position][channel, i, j] = x[channel, position · stride − padding + (i, j) · dilation], 0 outside     (im2col)
//!     y[position][out_channel]      = rows · w + bias, stored as the program lays the result out
//! ```

use rapt_core::DType;
use rapt_cpu::gemm::Gemm;
use rapt_cpu::pointwise::{Binary, Instruction, Loop, Register};
use rapt_graph::ops::{Conv, ConvSizes};
use rapt_graph::{Meta, Node};

use super::super::ModelError;
use super::build::Builder;
use super::place::Place;
use super::product::{self, Weights};
use super::{Kernel, Step};

/// A convolution.
#[derive(Debug)]
pub(in crate::model) struct Windows {
    /// The sizes.
    pub(in crate::model) sizes: ConvSizes,
    /// The input: batch, channel, height, width.
    pub(in crate::model) x: Place,
    /// The rows of one image and group.
    pub(in crate::model) rows: usize,
    /// The product of one image and group.
    pub(in crate::model) gemm: Gemm,
    /// Of each group, its kernels.
    pub(in crate::model) weights: Vec<Weights>,
    /// What is done with the sums of one image and group.
    pub(in crate::model) after: Loop,
    /// The bias of each channel, if there is one, and the result of the first image and group, `[positions, channels]` each.
    pub(in crate::model) operands: Vec<Place>,
    /// From one image of the result to the next, in elements.
    pub(in crate::model) image: i64,
}

impl Windows {
    pub(super) fn scratch_bytes(&self) -> usize {
        self.gemm.scratch_bytes().next_multiple_of(64) + self.after.scratch_bytes()
    }
}

/// A tensor with batch and two spatial dimensions.
pub(super) fn whole(place: &Place, batched: bool) -> Place {
    let mut place = place.clone();
    let Meta { shape, strides, .. } = &mut place.meta;
    if !batched {
        shape.insert(0, 1);
        strides.insert(0, 0);
    }
    if shape.len() == 3 {
        shape.insert(2, 1);
        strides.insert(2, 0);
    }
    place
}

impl Builder<'_> {
    /// A convolution of floats that is not transposed.
    pub(super) fn conv(&mut self, n: usize, node: &Node, op: &Conv) -> Result<bool, ModelError> {
        let Some((_, out)) = self.result(node) else { return Ok(false) };
        let sizes = op.sizes(self.binding).map_err(|cause| self.failed(node, cause))?;
        let Some((sizes, batched)) = sizes else { return Ok(false) };
        let dtype = out.meta.dtype;
        let weight = self.place(op.weight)?;
        let is_float = matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        if !is_float || sizes.transposed || !weight.meta.is_contiguous() || sizes.batch == 0 {
            return Ok(false);
        }
        let (x, out) = (whole(&self.place(op.input)?, batched), whole(&out, batched));
        let positions = sizes.output[0] * sizes.output[1];
        let depth = sizes.in_channels * sizes.kernel[0] * sizes.kernel[1];
        let signed = |n: usize| i64::try_from(n).unwrap_or(0);
        // One image and group of the result as positions by channels: height and width must lie as one.
        let strides = &out.meta.strides;
        if sizes.output[0] > 1 && sizes.output[1] > 1 && strides[2] != strides[3] * signed(sizes.output[1]) {
            return Ok(false);
        }
        let position = if sizes.output[1] > 1 { strides[3] } else { strides[2] };
        let shape = vec![signed(positions), signed(sizes.out_channels)];
        let meta = Meta { dtype, shape: shape.clone(), strides: vec![position, strides[1]], offset: out.meta.offset };
        let to = Place { buffer: out.buffer, meta };
        let (gemm, layout) = product::kernels(self.arch, dtype, [positions, sizes.out_channels, depth], self.threads)?;
        let mut matrices = Vec::new();
        for group in 0..sizes.groups {
            let mut kernels = weight.clone();
            kernels.meta.offset += signed(group * sizes.out_channels * depth);
            kernels.meta.shape = vec![signed(depth), signed(sizes.out_channels)];
            kernels.meta.strides = vec![1, signed(depth)];
            matrices.push(kernels);
        }
        let weights = self.weights(layout, matrices)?;
        let mut code = vec![Instruction::Load(0)];
        let mut operands = Vec::new();
        if let Some(bias) = op.bias {
            // Of the first group: the others begin further on.
            let of_group = self.place(bias)?.narrowed(0, 0, shape[1]);
            let mut bias = of_group.broadcast(&shape);
            bias.meta.strides[1] = of_group.meta.strides[0];
            operands.push(bias);
            code.extend([Instruction::Load(1), Instruction::Binary(Binary::Add, Register(0), Register(1))]);
        }
        operands.push(to);
        let sum = Register(if op.bias.is_some() { 2 } else { 0 });
        code.push(Instruction::Store(operands.len(), sum));
        let sums = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let after = self.each(&operands, Some(sums), &shape, code)?;
        self.close_for(&node.inputs)?;
        let rows = self.places.scratch(&Meta::contiguous(dtype, &[signed(positions), signed(depth)]));
        let mut uses: Vec<usize> = operands.iter().map(|place| place.buffer).collect();
        uses.extend([x.buffer, rows]);
        uses.extend(weights.iter().flat_map(Weights::uses));
        let image = out.meta.strides[0];
        let windows = Windows { sizes, x, rows, gemm, weights, after, operands, image };
        let kernel = Kernel::Conv(Box::new(windows));
        self.push(Step { node: n, nodes: 1, kernel, uses, keeps: Vec::new(), may_fail: false });
        Ok(true)
    }
}
