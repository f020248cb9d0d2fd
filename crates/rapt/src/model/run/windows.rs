//! Convolutions and mixtures of experts: products in a loop.

use rapt_cpu::gemm::{Output, Rows};
use rapt_graph::OpError;

use super::super::ModelError;
use super::super::memory;
use super::super::plan::{Experts, Place, Windows};
use super::{After, Frame, Shared, SharedRows};

impl Frame<'_> {
    /// # Safety
    /// As [`Frame::run`].
    pub(super) unsafe fn conv(&self, conv: &Windows) -> Result<(), ModelError> {
        let sizes = &conv.sizes;
        let (size, depth) = (conv.x.size(), sizes.in_channels * sizes.kernel[0] * sizes.kernel[1]);
        let rows = Shared(self.bases[conv.rows]);
        let own = conv.gemm.scratch_bytes().next_multiple_of(64);
        for (group, weights) in conv.weights.iter().enumerate() {
            // SAFETY: promised by the caller.
            let weights = unsafe { self.packed(weights)? };
            for image in 0..sizes.batch {
                let first = group * sizes.in_channels;
                let x = shifted(&conv.x, [(0, image), (1, first)]);
                let x = Shared(self.at(&x));
                self.items(sizes.output[0], &|row, _| {
                    let (x, rows) = (&x, &rows);
                    let to = rows.0.wrapping_add(row * sizes.output[1] * depth * size);
                    // SAFETY: promised by the caller: the image is there, and room for its rows.
                    unsafe { windows(conv, x.0, row, to) };
                })?;
                let operands: Vec<Place> = conv
                    .operands
                    .iter()
                    .enumerate()
                    .map(|(n, place)| {
                        let mut place = place.clone();
                        let is_out = n + 1 == conv.operands.len();
                        place.meta.offset += place.meta.strides[1] * (group * sizes.out_channels) as i64;
                        place.meta.offset += if is_out { conv.image * image as i64 } else { 0 };
                        place
                    })
                    .collect();
                let x = SharedRows(Rows { ptr: rows.0, row_stride: depth.cast_signed() });
                self.items(conv.gemm.items(), &|item, scratch| {
                    let x = &x;
                    let own = scratch.wrapping_add(own);
                    let (each, operands) = (&conv.after, &operands[..]);
                    let after = After { frame: self, each, operands, scratch: own, column: 0 };
                    // SAFETY: promised by the caller; the rows were written above.
                    unsafe { conv.gemm.run_item(item, x.0, weights, Output::Epilogue(&after), scratch) };
                })?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Frame::run`].
    pub(super) unsafe fn experts(&self, experts: &Experts) -> Result<Result<(), OpError>, ModelError> {
        // SAFETY: promised by the caller.
        let ends = unsafe { memory::tensor(self.bases[experts.ends.buffer], &experts.ends) }.ints();
        let rows = experts.x.meta.shape[0];
        let mut start = 0;
        for &end in &ends {
            if end < start || end > rows {
                return Ok(Err(OpError::IndexOutOfRange { index: end, dim: 0, size: rows }));
            }
            start = end;
        }
        let mut start = 0;
        for (end, weights) in ends.iter().map(|&end| usize::try_from(end).unwrap_or(0)).zip(&experts.weights) {
            let count = end - start;
            if count > 0 {
                let gemm = &experts.gemms[count - 1];
                // SAFETY: promised by the caller.
                let weights = unsafe { self.packed(weights)? };
                let at = |place: &Place| self.at(&shifted(place, [(0, start), (1, 0)]));
                let x = SharedRows(Rows { ptr: at(&experts.x), row_stride: experts.x.meta.strides[0] as isize });
                let (to, row_stride) = (Shared(at(&experts.out)), experts.out.meta.strides[0] as isize);
                self.items(gemm.items(), &|item, scratch| {
                    let (x, to) = (&x, &to);
                    let out = Output::Rows { ptr: to.0, row_stride };
                    // SAFETY: promised by the caller: the rows of this group are there.
                    unsafe { gemm.run_item(item, x.0, weights, out, scratch) };
                })?;
            }
            start = end;
        }
        // Rows of no group are 0.
        let rest = usize::try_from(rows).unwrap_or(0).saturating_sub(start);
        let (columns, stride) = (experts.out.shape()[1], experts.out.meta.strides[0] as isize);
        let size = experts.out.size();
        let to = self.at(&shifted(&experts.out, [(0, start), (1, 0)]));
        for row in 0..rest.cast_signed() {
            // SAFETY: promised by the caller; all bytes 0 are the number 0 in every float dtype.
            unsafe { to.wrapping_offset(row * stride * size.cast_signed()).write_bytes(0, columns * size) };
        }
        Ok(Ok(()))
    }
}

/// The place from these indices of its dimensions on.
fn shifted(place: &Place, indices: [(usize, usize); 2]) -> Place {
    let mut place = place.clone();
    for (dim, index) in indices {
        place.meta.offset += place.meta.strides[dim] * i64::try_from(index).unwrap_or(0);
    }
    place
}

/// The windows of one row of output positions: `x` is the first channel of the image and group.
unsafe fn windows(conv: &Windows, x: *const u8, row: usize, to: *mut u8) {
    // SAFETY: promised by the caller; elements are moved as words of their size.
    unsafe {
        match conv.x.size() {
            2 => windows_of::<u16>(conv, x.cast(), row, to.cast()),
            4 => windows_of::<u32>(conv, x.cast(), row, to.cast()),
            _ => windows_of::<u64>(conv, x.cast(), row, to.cast()),
        }
    }
}

unsafe fn windows_of<T: Copy + Default>(conv: &Windows, x: *const T, row: usize, to: *mut T) {
    let sizes = &conv.sizes;
    let [_, channel, down, right] = conv.x.meta.strides[..] else { return };
    let [height, width] = sizes.input.map(|n| n as i64);
    let mut to = to;
    for column in 0..sizes.output[1] as i64 {
        let top = row as i64 * sizes.stride[0] - sizes.padding[0];
        let left = column * sizes.stride[1] - sizes.padding[1];
        for c in 0..sizes.in_channels as i64 {
            for i in 0..sizes.kernel[0] as i64 {
                let y = top + i * sizes.dilation[0];
                for j in 0..sizes.kernel[1] as i64 {
                    let at = left + j * sizes.dilation[1];
                    let inside = (0..height).contains(&y) && (0..width).contains(&at);
                    let offset = c * channel + y * down + at * right;
                    // SAFETY: promised by the caller of `windows`: inside the image, and room for every element.
                    unsafe {
                        to.write(if inside { x.offset(offset as isize).read() } else { T::default() });
                        to = to.add(1);
                    }
                }
            }
        }
    }
}
