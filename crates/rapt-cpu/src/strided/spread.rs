//! What follows the products of a transposed convolution: every position of the result gathers what was sent to it.
//!
//! ```text
//! sums[tap][position][channel] = Σ x[position, ·] · w[·, channel, tap]                   products, before
//! y[channel, o] = bias[channel] + Σ sums[tap][i][channel]    over taps and positions with  i · stride + tap · dilation − padding = o
//! ```

use rapt_core::{Arch, DType};

use super::element::{Call, Element, Entry, Sum, Typed, entry};
use super::{Form, Kernel};

/// Operands: sums `[taps, batch · positions, channels]` without gaps, of float32 or float64; the bias of each channel, where there is
/// one; and the result `[batch, channels, height, width]`.
#[derive(Clone, Debug)]
pub struct Spread {
    channels: usize,
    input: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    bias: Option<(DType, isize)>,
    out: Form,
    run: Entry<Spread>,
}

impl Spread {
    /// The result of a transposed convolution of images of `input` rows and columns, for sums of `sums`. `None` for other dtypes,
    /// and forms that do not fit.
    #[must_use]
    pub fn new(
        arch: Arch,
        sums: DType,
        [input, kernel, stride, padding, dilation]: [[usize; 2]; 5],
        bias: Option<&Form>,
        out: &Form,
    ) -> Option<Spread> {
        let fits = matches!(sums, DType::F32 | DType::F64) && out.shape.len() == 4 && !stride.contains(&0);
        let of_bias = bias.map(|bias| (bias.dtype, bias.strides.first().copied().unwrap_or(0)));
        if !fits || bias.is_some_and(|bias| bias.shape != [out.shape[1]]) {
            return None;
        }
        let run = entry::<Run>(arch, sums)?;
        let (channels, out) = (out.shape[1], out.clone());
        Some(Spread { channels, input, kernel, stride, padding, dilation, bias: of_bias, out, run })
    }

    /// Of each tap that reaches position `o` of dimension `d`: the tap, and where it comes from.
    #[inline(always)]
    fn from(&self, d: usize, o: usize, tap: usize) -> Option<usize> {
        let at = (o + self.padding[d]).checked_sub(tap * self.dilation[d])?;
        (at % self.stride[d] == 0).then_some(at / self.stride[d]).filter(|&at| at < self.input[d])
    }
}

impl Kernel for Spread {
    fn name(&self) -> &'static str {
        "transposed convolution"
    }

    fn units(&self) -> usize {
        self.out.shape[0] * self.out.shape[2]
    }

    fn unit_work(&self) -> usize {
        let taps = self.kernel[0] * self.kernel[1];
        self.out.shape[3] * self.channels * taps.div_ceil(self.stride[0] * self.stride[1])
    }

    fn scratch_bytes(&self) -> usize {
        (self.channels * 8).next_multiple_of(64)
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        // SAFETY: promised by the caller; the instruction set is that of `new`.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

/// A parameter of a float dtype.
unsafe fn read(dtype: DType, ptr: *const u8, at: isize) -> f64 {
    // SAFETY: promised by the caller.
    unsafe {
        match dtype {
            DType::F64 => ptr.cast::<f64>().offset(at).read(),
            DType::F32 => f64::from(ptr.cast::<f32>().offset(at).read()),
            DType::F16 => ptr.cast::<half::f16>().offset(at).read().to_f64(),
            _ => ptr.cast::<half::bf16>().offset(at).read().to_f64(),
        }
    }
}

struct Run;

impl Typed for Run {
    type Kernel = Spread;
    #[inline(always)]
    unsafe fn run<T: Element>(spread: &Spread, call: &Call<'_>) {
        let sums = call.pointers[0].cast_const().cast::<T>();
        let out = call.pointers.last().copied().unwrap_or(std::ptr::null_mut());
        let Spread { channels, input, kernel, .. } = spread;
        let [image_step, channel_step, down, right] = [0, 1, 2, 3].map(|d| spread.out.strides[d]);
        let (height, images) = (spread.out.shape[2], spread.out.shape[0] * input[0]);
        let bytes = (spread.out.dtype.bits() / 8).cast_signed();
        let acc = call.scratch.cast::<f64>();
        for unit in call.units.clone() {
            let (image, row) = (unit / height, unit % height);
            for column in 0..spread.out.shape[3] {
                // SAFETY: the caller vouches for the operands, and for scratch memory of a number for each channel.
                unsafe {
                    for c in 0..*channels {
                        let bias = spread
                            .bias
                            .map_or(0.0, |(dtype, step)| read(dtype, call.pointers[1], c.cast_signed() * step));
                        acc.add(c).write(bias);
                    }
                    for i in 0..kernel[0] {
                        let Some(from_row) = spread.from(0, row, i) else { continue };
                        for j in 0..kernel[1] {
                            let Some(from_column) = spread.from(1, column, j) else { continue };
                            let tap = i * kernel[1] + j;
                            let line = tap * images + image * input[0] + from_row;
                            let position = line * input[1] + from_column;
                            let sums = sums.add(position * channels);
                            for c in 0..*channels {
                                *acc.add(c) += sums.add(c).read().float();
                            }
                        }
                    }
                    let to = image.cast_signed() * image_step + row.cast_signed() * down + column.cast_signed() * right;
                    for c in 0..*channels {
                        let at = (to + c.cast_signed() * channel_step) * bytes;
                        acc.add(c).read().write(spread.out.dtype, out.offset(at));
                    }
                }
            }
        }
    }
}
