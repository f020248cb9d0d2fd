//! Convolutions of each channel by itself: as many groups as channels.
//!
//! ```text
//! for each row of results, for 32 of its columns (or of its channels, where these lie closest):
//!     acc[k] = bias;   for each element of the window in the image:   acc[k] += x[..] · w[..]
//! ```
//! Sums are float32, of float64 float64; a window has few elements, which are added one after the other.

use rapt_core::{Arch, DType};

use super::element::{Call, Element, Entry, Num, Typed, entry};
use super::windows::{Over, Reach, Steps};
use super::{Dim, Form, Kernel, TILE};

/// Operands: x `[batch, channels, height, width]`, the result, the kernels `[out_channels, height, width]`, and the bias of each
/// channel of the result, where there is one.
#[derive(Clone, Debug)]
pub struct Depthwise {
    /// x, result, kernels, bias.
    over: Over<4>,
    taps: [isize; 2],
    has_bias: bool,
    run: Entry<Depthwise>,
}

impl Depthwise {
    /// The convolution with windows of `steps`. All operands are of one float dtype; `None` for others, and for forms that do
    /// not fit.
    #[must_use]
    pub fn new(arch: Arch, steps: [Steps; 2], [x, out, kernels]: [&Form; 3], bias: Option<&Form>) -> Option<Depthwise> {
        let is_float = matches!(x.dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
        let forms = [Some(out), Some(kernels), bias];
        let ranks = [x, out].map(|form| form.shape.len()) == [4, 4] && kernels.shape.len() == 3;
        if !is_float || !ranks || forms.into_iter().flatten().any(|form| form.dtype != x.dtype) {
            return None;
        }
        let (channels, out_channels) = (x.shape[1], out.shape[1]);
        let each = out_channels.checked_div(channels)?;
        let fits = each * channels == out_channels && kernels.shape[0] == out_channels;
        if !fits || bias.is_some_and(|bias| bias.shape != [out_channels]) {
            return None;
        }
        let [kernel, of_bias] = [kernels.strides[0], bias.map_or(0, |bias| bias.strides[0])];
        let dim = |d: usize| Dim { size: out.shape[d], strides: [x.strides[d], out.strides[d], 0, 0] };
        let times = each.cast_signed();
        let of_channel =
            Dim { size: channels, strides: [x.strides[1], out.strides[1] * times, kernel * times, of_bias * times] };
        let of_each = Dim { size: each, strides: [0, out.strides[1], kernel, of_bias] };
        let is_last = each == 1 && x.strides[1] == 1 && x.strides[3] != 1 && channels > 1;
        let dims = if is_last {
            vec![dim(0), of_channel, dim(2), dim(3)]
        } else {
            vec![dim(0), of_channel, of_each, dim(2), dim(3)]
        };
        let over = Over::new(steps, dims, is_last)?;
        let taps = [kernels.strides[1], kernels.strides[2]];
        Some(Depthwise { over, taps, has_bias: bias.is_some(), run: entry::<Run>(arch, x.dtype)? })
    }
}

impl Kernel for Depthwise {
    fn name(&self) -> &'static str {
        "convolution by channel"
    }

    fn units(&self) -> usize {
        self.over.units()
    }

    fn unit_work(&self) -> usize {
        self.over.unit_work()
    }

    unsafe fn run_units(&self, units: std::ops::Range<usize>, pointers: &[*mut u8], scratch: *mut u8) {
        // SAFETY: promised by the caller; the instruction set is that of `new`.
        unsafe { (self.run)(self, &Call { units, pointers, scratch }) };
    }
}

struct Run;

impl Typed for Run {
    type Kernel = Depthwise;
    #[inline(always)]
    unsafe fn run<T: Element>(kernel: &Depthwise, call: &Call<'_>) {
        let over = &kernel.over;
        let [x, out, kernels] = [0, 1, 2].map(|operand| call.pointers[operand].cast::<T>());
        let biases = call.pointers.last().copied().unwrap_or(std::ptr::null_mut()).cast::<T>();
        // From the weight of one result of a tile to the next: 0, or those of channels.
        let weight_step = over.channels.map_or(0, |channels| channels.strides[2]);
        over.each_tile(call, |tile, [from, to, weight, bias]| {
            let mut acc = [T::Num::ZERO; TILE];
            if kernel.has_bias {
                for (k, acc) in acc.iter_mut().enumerate().take(tile.width) {
                    // SAFETY: the caller vouches for the biases.
                    *acc = unsafe { biases.offset(bias + over.result(tile, k, 3)).read() }.num();
                }
            }
            over.each_tap(tile, |[i, j], Reach { skipped, count, at, step, .. }| {
                let tap = i.cast_signed() * kernel.taps[0] + j.cast_signed() * kernel.taps[1];
                let first = tile.first.cast_signed() * weight_step;
                // SAFETY: the caller vouches for image and kernels, and `reach` stays inside the image.
                unsafe {
                    let (x, w) = (x.offset(from + at).cast_const(), kernels.offset(weight + tap + first));
                    let acc = &mut acc[skipped..skipped + count];
                    if weight_step == 0 && step == 1 {
                        let w = w.read().num();
                        for (k, acc) in acc.iter_mut().enumerate() {
                            *acc = acc.plus_product(x.add(k).read().num(), w);
                        }
                    } else {
                        for (k, acc) in acc.iter_mut().enumerate() {
                            let (k, w) = (k.cast_signed(), w.offset(k.cast_signed() * weight_step));
                            *acc = acc.plus_product(x.offset(k * step).read().num(), w.read().num());
                        }
                    }
                }
            });
            for (k, &acc) in acc.iter().enumerate().take(tile.width) {
                // SAFETY: the caller vouches for the results.
                unsafe { out.offset(to + over.result(tile, k, 1)).write(T::of_num(acc)) };
            }
        });
    }
}
