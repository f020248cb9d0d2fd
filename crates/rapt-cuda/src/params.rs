//! A request as the kernels see it, byte for byte `Params` of kernels/common.cu.

use rapt_core::{DType, Operands, Spec, TensorSpec};

use crate::select::Design;
use crate::tensor_map::CopyMap;

/// What a number is divided by, as `divide` of common.cu takes it: x / n = x * magic >> 32 + shift for x < 2^31.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Divisor {
    /// 0 for n = 1.
    magic: u32,
    shift: u32,
}

impl Divisor {
    fn new(n: usize) -> Self {
        let n = n.clamp(1, MOST_LEN * 2) as u64;
        let log2 = u64::BITS - (n - 1).leading_zeros();
        if n == 1 {
            return Divisor::default();
        }
        Divisor { magic: (1u64 << (31 + log2)).div_ceil(n) as u32, shift: log2 - 1 }
    }
}

/// The kernels' one parameter. Pointers are device addresses; 0 where there is no such tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Params {
    q: usize,
    k: usize,
    v: usize,
    mask: usize,
    sinks: usize,
    alibi: usize,
    out: usize,
    lse: usize,
    partials: usize,
    q_stride: [i64; 4],
    k_stride: [i64; 4],
    v_stride: [i64; 4],
    out_stride: [i64; 4],
    mask_stride: [i64; 4],
    lse_stride: [i64; 3],
    sinks_stride: i64,
    alibi_stride: i64,
    scale: f64,
    softcap: f64,
    inverse_softcap: f64,
    out_dtype: i32,
    sinks_dtype: i32,
    alibi_dtype: i32,
    heads: i32,
    group: i32,
    task_heads: i32,
    q_len: i32,
    kv_len: i32,
    head_dim: i32,
    head_dim_v: i32,
    rows: i32,
    row_blocks: i32,
    num_splits: i32,
    chunk: i32,
    dv_blocks: i32,
    lo_shift: i32,
    hi_shift: i32,
    diagonal: i32,
    out_vector: i32,
    mask_pairs: i32,
    items: i32,
    is_cut: i32,
    by_q_len: Divisor,
    by_row_blocks: Divisor,
    by_num_splits: Divisor,
    by_group: Divisor,
    by_tasks: Divisor,
}

/// Lengths and positions below this keep every sum of three of them inside an i32.
pub(crate) const MOST_LEN: usize = 1 << 29;

fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

fn shift(n: i64) -> i32 {
    n.clamp(-(MOST_LEN as i64), MOST_LEN as i64) as i32
}

fn strides<const N: usize>(tensor: &TensorSpec<N>) -> [i64; N] {
    // A stride along a single element is never taken.
    std::array::from_fn(|d| if tensor.shape[d] > 1 { tensor.strides[d] as i64 } else { 0 })
}

/// Whether every row of the mask can be read two keys at a time, as far as there are two.
fn pairs_of(mask: &TensorSpec<4>, address: usize) -> bool {
    let step = strides(mask);
    let even = step[..3].iter().all(|stride| stride % 2 == 0);
    step[3] == 1 && even && address.is_multiple_of(2 * mask.dtype.size_bytes())
}

/// Whether every row of the mask can be read 16 bytes at a time, as far as there are 16.
pub(crate) fn is_wide(mask: &TensorSpec<4>, address: usize) -> bool {
    let (step, unit) = (strides(mask), 16 / mask.dtype.size_bytes() as i64);
    step[3] == 1 && step[..3].iter().all(|stride| stride % unit == 0) && address.is_multiple_of(16)
}

/// Whether every row of the tensor can be moved `bytes` at a time from `address`; a multiple of its element.
pub(crate) fn moves_by(tensor: &TensorSpec<4>, address: usize, bytes: usize) -> bool {
    let unit = bytes / tensor.dtype.size_bytes();
    let step = strides(tensor);
    let inner = tensor.shape[3] == 1 || step[3] == 1;
    let rows = step[..3].iter().all(|stride| stride % unit as i64 == 0);
    inner && rows && address.is_multiple_of(bytes) && tensor.shape[3].is_multiple_of(unit)
}

impl Params {
    pub(crate) fn new(spec: &Spec, design: &Design, operands: &mut Operands<'_>, partials: usize) -> Self {
        let (out, lse) = (operands.out_ptr() as usize, operands.lse_ptr().map_or(0, |lse| lse as usize));
        let tensors = operands.tensors();
        let address = |view: &Option<rapt_core::View<'_>>| view.as_ref().map_or(0, |view| view.as_ptr() as usize);
        let dtype = |dtype: DType| i32::from(dtype.code());
        let wide = spec.numerics.accumulation == DType::F64;
        let (least, most) =
            if wide { (f64::MIN_POSITIVE, f64::MAX) } else { (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX)) };
        // A cap beyond the accumulation dtype caps none of its numbers.
        let softcap = spec.softcap.map(rapt_core::Finite::get).filter(|cap| *cap <= most);
        let range = spec.block_range();
        let (lo, hi) = range.shifts();
        Params {
            q: tensors.q.as_ptr() as usize,
            k: tensors.k.as_ptr() as usize,
            v: tensors.v.as_ptr() as usize,
            mask: address(&tensors.mask),
            sinks: address(&tensors.sinks),
            alibi: address(&tensors.alibi_slopes),
            out,
            lse,
            partials,
            q_stride: strides(&spec.q),
            k_stride: strides(&spec.k),
            v_stride: strides(&spec.v),
            out_stride: strides(&spec.out),
            mask_stride: spec.mask.as_ref().map_or([0; 4], strides),
            lse_stride: spec.lse.as_ref().map_or([0; 3], strides),
            sinks_stride: spec.sinks.as_ref().map_or(0, |sinks| strides(sinks)[0]),
            alibi_stride: spec.alibi_slopes.as_ref().map_or(0, |slopes| strides(slopes)[0]),
            scale: spec.softmax_scale.get().clamp(-most, most),
            softcap: softcap.map_or(0.0, |cap| cap.max(least)),
            inverse_softcap: softcap.map_or(0.0, |cap| (1.0 / cap).clamp(least, most)),
            out_dtype: dtype(spec.out.dtype),
            sinks_dtype: spec.sinks.map_or(0, |sinks| dtype(sinks.dtype)),
            alibi_dtype: spec.alibi_slopes.map_or(0, |slopes| dtype(slopes.dtype)),
            heads: int(spec.num_q_heads()),
            group: int(spec.group_size()),
            task_heads: int(design.task_heads),
            q_len: int(spec.q_len()),
            kv_len: int(spec.kv_len()),
            head_dim: int(spec.head_dim()),
            head_dim_v: int(spec.head_dim_v()),
            rows: int(design.rows),
            row_blocks: int(design.row_blocks),
            num_splits: int(design.num_splits),
            chunk: int(design.chunk),
            dv_blocks: int(design.dv_blocks),
            lo_shift: shift(lo),
            hi_shift: shift(hi),
            diagonal: shift(range.diagonal),
            out_vector: i32::from(spec.out.dtype == spec.numerics.storage && moves_by(&spec.out, out, 16)),
            mask_pairs: i32::from(spec.mask.is_some_and(|mask| pairs_of(&mask, address(&tensors.mask)))),
            items: int(design.items),
            is_cut: i32::from(design.is_cut()),
            by_q_len: Divisor::new(spec.q_len()),
            by_row_blocks: Divisor::new(design.row_blocks),
            by_num_splits: Divisor::new(design.num_splits),
            by_group: Divisor::new(spec.group_size()),
            by_tasks: Divisor::new(spec.num_q_heads() / design.task_heads.max(1)),
        }
    }

    /// Where the mask lies; 0 if there is none.
    pub(crate) const fn mask_address(&self) -> usize {
        self.mask
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats without padding (asserted below), borrowed with self.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Params>()) }
    }
}

/// What the copy engine moves for hopper.cu.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HopperMaps {
    /// q, k and v, where it reads all of them.
    pub(crate) inputs: Option<[CopyMap; 3]>,
    /// Where it writes.
    pub(crate) out: Option<CopyMap>,
    /// The mask, where it reads that.
    pub(crate) mask: Option<CopyMap>,
}

/// How hopper.cu reads a mask: `MaskAccess` of masks.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MaskAccess {
    KeyByKey,
    By16Bytes,
    Copied,
}

/// The one parameter of hopper.cu, byte for byte its `HopperParams`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HopperParams {
    /// Of q, k, v, out and the mask; zeros where the copy engine is not used.
    pub(crate) maps: [CopyMap; 5],
    pub(crate) params: Params,
    pub(crate) tasks: i32,
    pub(crate) paired: i32,
    mask_access: i32,
    pub(crate) shift: i32,
    pub(crate) out_copied: i32,
    item_groups: i32,
    pub(crate) short_items: i32,
    scale: f32,
    by_units: Divisor,
    by_grid: Divisor,
    pub(crate) padding: [u32; HOPPER_PADDING],
}

/// Bytes of what follows `params`, but for the padding.
const HOPPER_REST: usize = 8 * 4 + 2 * 8;
const HOPPER_PADDING: usize = (64 - (size_of::<Params>() + HOPPER_REST) % 64) % 64 / 4;

/// By how many blocks work moves on from round to round, so that `grid` blocks meet all of a task's `units` in turn: the
/// least that leaves them no common divisor.
fn shift_of(grid: usize, units: usize) -> usize {
    let divides = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (0..units).find(|shift| divides(grid + shift, units) == 1).unwrap_or(0)
}

impl HopperParams {
    pub(crate) fn new(spec: &Spec, design: &Design, params: Params, maps: HopperMaps, grid: usize) -> Self {
        let [q, k, v] = maps.inputs.unwrap_or_default();
        let units = if design.paired { design.row_blocks.div_ceil(2) } else { design.row_blocks };
        let mask_access = match maps.mask {
            Some(_) => MaskAccess::Copied,
            None if spec.mask.is_some_and(|mask| is_wide(&mask, params.mask)) => MaskAccess::By16Bytes,
            None => MaskAccess::KeyByKey,
        };
        HopperParams {
            maps: [q, k, v, maps.out.unwrap_or_default(), maps.mask.unwrap_or_default()],
            params,
            tasks: int(design.tasks),
            paired: i32::from(design.paired),
            mask_access: mask_access as i32,
            shift: int(shift_of(grid, units)),
            out_copied: i32::from(maps.out.is_some()),
            item_groups: int(design.item_rows / 64),
            short_items: int(design.short_items),
            scale: params.scale as f32,
            by_units: Divisor::new(units),
            by_grid: Divisor::new(grid),
            padding: [0; HOPPER_PADDING],
        }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: as of `Params`; what follows its last number up to the alignment is a field.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<HopperParams>()) }
    }
}

const _: () = assert!(
    size_of::<HopperParams>() == 5 * 128 + size_of::<Params>() + HOPPER_REST + 4 * HOPPER_PADDING,
    "HopperParams has padding"
);
const _: () = assert!(size_of::<Params>() == 9 * 8 + 25 * 8 + 3 * 8 + 22 * 4 + 5 * 8, "Params has padding");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_divisor_divides_as_the_kernels_do() {
        let quotient = |x: u32, by: Divisor| {
            if by.magic == 0 { x } else { ((u64::from(x) * u64::from(by.magic)) >> 32) as u32 >> by.shift }
        };
        let most = (1u32 << 31) - 1;
        for n in (1u32..2000).chain([4095, 4096, 4097, 65_535, 1 << 20, (1 << 29) - 1, 1 << 29, 1 << 30]) {
            let by = Divisor::new(n as usize);
            let multiples = (0..40).map(|k: u32| k.saturating_mul(n)).flat_map(|x| [x, x.saturating_sub(1)]);
            for x in multiples.chain([0, 1, most, most - 1, most / n * n, (most / n * n).saturating_sub(1)]) {
                let x = x.min(most);
                assert_eq!(quotient(x, by), x / n, "{x} / {n}");
            }
        }
    }

    #[test]
    fn a_mask_is_read_16_bytes_at_a_time_where_every_row_allows_it() {
        let mask = |dtype, strides| TensorSpec {
            dtype,
            shape: [2, 1, 300, 512],
            strides,
            alignment: rapt_core::Alignment::MOST,
        };
        for (dtype, strides, address, wide) in [
            (DType::Bool, [153_600, 0, 512, 1], 64, true),
            (DType::Bool, [512, 0, 0, 1], 64, true),
            (DType::Bool, [153_600, 0, 512, 1], 65, false),
            (DType::Bool, [153_600, 0, 520, 1], 64, false),
            (DType::Bool, [153_600, 0, 1, 300], 64, false),
            (DType::BF16, [153_600, 0, 520, 1], 64, true),
            (DType::BF16, [153_600, 0, 516, 1], 64, false),
            (DType::F32, [153_600, 0, 516, 1], 64, true),
        ] {
            assert_eq!(is_wide(&mask(dtype, strides), address), wide, "{dtype} {strides:?} {address}");
        }
    }

    #[test]
    fn blocks_meet_every_run_of_rows_in_turn() {
        for (grid, units) in [(132, 6), (132, 8), (132, 7), (131, 6), (1, 1), (64, 64), (132, 1), (3, 1000)] {
            let shift = shift_of(grid, units);
            let met: std::collections::HashSet<_> = (0..units).map(|round| round * (grid + shift) % units).collect();
            assert_eq!(met.len(), units, "{grid} {units} {shift}");
        }
        assert_eq!((shift_of(132, 7), shift_of(132, 6)), (0, 1));
    }

    #[test]
    fn the_maps_come_first_and_the_size_is_that_of_aligned_maps() {
        assert_eq!(std::mem::offset_of!(HopperParams, params), 5 * 128);
        assert_eq!(size_of::<HopperParams>() % 64, 0);
        assert_eq!(align_of::<HopperParams>(), 64);
    }
}
