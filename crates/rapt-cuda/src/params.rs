//! A request as the kernels see it, byte for byte `Params` of kernels/common/params.cuh and `HopperParams` of kernels/hopper.cu.
//!
//! Made without addresses when a request is planned; a run fills these in. Deliberately absent: any choice.

use rapt_core::{
    BackwardTensors, Codes, CodesSpec, DType, Dropout, DropoutSeed, Finite, Granularity, Operands, PagesSpec,
    ScaleLayout, Spec, View, swizzle,
};

use crate::access::{as_it_lies, strides};
use crate::codes::CodeKind;
use crate::partition::{ChunkRule, Partition};
use crate::tensor_map::TensorMap;

/// What a number is divided by, as `divide` of common/params.cuh takes it: x / n = x * magic >> 32 + shift for x < 2^31.
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

pub(crate) fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

pub(crate) fn shift(n: i64) -> i32 {
    n.clamp(-(MOST_LEN as i64), MOST_LEN as i64) as i32
}

/// What strides and alignment decided of rows that are not loaded as tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Widths {
    /// Whether out is of the storage dtype and every row of it can be written 16 bytes at a time.
    pub(crate) out_vector: bool,
    /// Whether every row of the mask can be read two keys at a time.
    pub(crate) mask_pairs: bool,
}

/// Scale and cap as the kernels compute with them: inside the numbers of the accumulation dtype.
struct Scores {
    scale: f64,
    softcap: f64,
    inverse_softcap: f64,
}

impl Scores {
    fn new(spec: &Spec) -> Self {
        let (least, most) = match spec.numerics.accumulation {
            DType::F64 => (f64::MIN_POSITIVE, f64::MAX),
            _ => (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX)),
        };
        // A cap beyond the accumulation dtype caps none of its numbers.
        let softcap = spec.softcap.map(Finite::get).filter(|cap| *cap <= most);
        Scores {
            scale: spec.softmax_scale.get().clamp(-most, most),
            softcap: softcap.map_or(0.0, |cap| cap.max(least)),
            inverse_softcap: softcap.map_or(0.0, |cap| (1.0 / cap).clamp(least, most)),
        }
    }
}

impl Params {
    /// The parameters of `spec`, every address 0.
    pub(crate) fn new(spec: &Spec, partition: &Partition, widths: Widths) -> Self {
        let dtype = |dtype: DType| i32::from(dtype.code());
        let Scores { scale, softcap, inverse_softcap } = Scores::new(spec);
        let range = spec.block_range();
        let (lo, hi) = range.shifts();
        Params {
            q_stride: strides(&spec.q),
            k_stride: strides(&as_it_lies(&spec.k, spec.pages.as_deref())),
            v_stride: strides(&as_it_lies(&spec.v, spec.pages.as_deref())),
            out_stride: strides(&spec.out),
            mask_stride: spec.mask.as_ref().map_or([0; 4], strides),
            lse_stride: spec.lse.as_ref().map_or([0; 3], strides),
            sinks_stride: spec.sinks.as_ref().map_or(0, |sinks| strides(sinks)[0]),
            alibi_stride: spec.alibi_slopes.as_ref().map_or(0, |slopes| strides(slopes)[0]),
            scale,
            softcap,
            inverse_softcap,
            out_dtype: dtype(spec.out.dtype),
            sinks_dtype: spec.sinks.map_or(0, |sinks| dtype(sinks.dtype)),
            alibi_dtype: spec.alibi_slopes.map_or(0, |slopes| dtype(slopes.dtype)),
            heads: int(spec.num_q_heads()),
            group: int(spec.group_size()),
            task_heads: int(partition.task_heads),
            q_len: int(spec.q_len()),
            kv_len: int(spec.kv_len()),
            head_dim: int(spec.head_dim()),
            head_dim_v: int(spec.head_dim_v()),
            rows: int(partition.rows),
            row_blocks: int(partition.row_blocks),
            num_splits: int(partition.num_splits),
            chunk: int(partition.chunk),
            dv_blocks: int(partition.dv_blocks),
            lo_shift: shift(lo),
            hi_shift: shift(hi),
            diagonal: shift(range.diagonal),
            out_vector: i32::from(widths.out_vector),
            mask_pairs: i32::from(widths.mask_pairs),
            items: int(partition.items),
            is_cut: i32::from(partition.is_combined),
            by_q_len: Divisor::new(spec.q_len()),
            by_row_blocks: Divisor::new(partition.row_blocks),
            by_num_splits: Divisor::new(partition.num_splits),
            by_group: Divisor::new(spec.group_size()),
            by_tasks: Divisor::new(spec.num_q_heads() / partition.task_heads.max(1)),
            ..Params::default()
        }
    }

    /// These parameters of tensors that lie where `operands` say, with partial rows at `partials`.
    pub(crate) fn at(self, operands: &mut Operands<'_>, partials: usize) -> Self {
        let (out, lse) = (operands.out_ptr() as usize, operands.lse_ptr().map_or(0, |lse| lse as usize));
        let tensors = operands.tensors();
        let optional = |view: &Option<View<'_>>| view.as_ref().map_or(0, View::address);
        Params {
            q: tensors.q.address(),
            k: tensors.k.address(),
            v: tensors.v.address(),
            mask: optional(&tensors.mask),
            sinks: optional(&tensors.sinks),
            alibi: optional(&tensors.alibi_slopes),
            out,
            lse,
            partials,
            ..self
        }
    }

    /// These parameters of tensors whose gradients are asked for: out and lse are read.
    pub(crate) fn of_gradients(self, tensors: &BackwardTensors<'_>) -> Self {
        let optional = |view: &Option<View<'_>>| view.as_ref().map_or(0, View::address);
        Params {
            q: tensors.q.address(),
            k: tensors.k.address(),
            v: tensors.v.address(),
            mask: optional(&tensors.mask),
            sinks: optional(&tensors.sinks),
            alibi: optional(&tensors.alibi_slopes),
            out: tensors.out.address(),
            lse: tensors.lse.address(),
            ..self
        }
    }

    /// Where q, k, v, out and the mask lie: in the order of [`HopperParams::maps`].
    pub(crate) const fn mapped(&self) -> [usize; 5] {
        [self.q, self.k, self.v, self.out, self.mask]
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Params>()) }
    }
}

/// Which weights are dropped, and what sums of those kept are scaled by: `Dropping` of kernels/common/params.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DroppingParams {
    /// Low halves first.
    seed: [u32; 2],
    offset: [u32; 2],
    first_batch: u32,
    last: u32,
    scale: f64,
    /// Where seed and offset lie in the GPU's memory; 0: they are those above.
    draw: u64,
}

impl DroppingParams {
    /// Of a plan: without a draw.
    pub(crate) fn new(dropout: Option<Dropout>) -> Self {
        let of = |dropout: Dropout| DroppingParams {
            last: dropout.last_dropped(),
            scale: dropout.scale(),
            ..DroppingParams::default()
        };
        dropout.map_or(DroppingParams { scale: 1.0, ..DroppingParams::default() }, of)
    }

    /// These of a run with this draw.
    pub(crate) fn of(self, draw: Option<DropoutSeed>) -> Self {
        let halves = |x: u64| [x as u32, (x >> 32) as u32];
        let DropoutSeed { seed, offset, first_batch, memory } = draw.unwrap_or_default();
        let draw = memory.map_or(0, |draw| draw.address() as u64);
        DroppingParams { seed: halves(seed), offset: halves(offset), first_batch, draw, ..self }
    }
}

/// `Params` of variants that say whether weights are dropped.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DroppedParams {
    pub(crate) params: Params,
    pub(crate) dropping: DroppingParams,
}

impl DroppedParams {
    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<DroppedParams>()) }
    }
}

const _: () = assert!(size_of::<DroppedParams>() == size_of::<Params>() + 6 * 4 + 2 * 8, "DroppedParams has padding");

/// What makes numbers of the codes of one operand: `Codes` of kernels/common/codes.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct CodesParams {
    descale: usize,
    zero_point: usize,
    descale_stride: [i64; 4],
    zero_point_stride: [i64; 4],
    global_scale: f32,
    /// 0 for an operand that is no codes.
    kind: i32,
    chunk: i32,
    scale_dtype: i32,
    /// Whether what belongs to a key lies in pages, as the key does.
    in_pages: i32,
    /// In a row of tiles, where factors lie swizzled; else 0.
    swizzled_tiles: i32,
}

impl CodesParams {
    fn new(codes: Option<&CodesSpec>, pages: Option<&PagesSpec>) -> Self {
        let Some(codes) = codes else { return CodesParams { chunk: 1, ..CodesParams::default() } };
        let pages = pages.filter(|_| matches!(codes.granularity, Granularity::Token | Granularity::Block(_)));
        let swizzled_tiles = match codes.scale_layout {
            ScaleLayout::Plain => 0,
            ScaleLayout::Swizzle32x4x4 => int(codes.descale.shape[3].div_ceil(swizzle::COLUMNS)),
        };
        CodesParams {
            descale_stride: strides(&as_it_lies(&codes.descale, pages)),
            zero_point_stride: codes.zero_point.as_ref().map_or([0; 4], |of| strides(&as_it_lies(of, pages))),
            in_pages: i32::from(pages.is_some()),
            swizzled_tiles,
            kind: CodeKind::of(codes.format) as i32,
            chunk: int(codes.chunk),
            scale_dtype: i32::from(codes.descale.dtype.code()),
            ..CodesParams::default()
        }
    }

    fn at(self, codes: Option<&Codes<'_>>) -> Self {
        let Some(codes) = codes else { return self };
        CodesParams {
            descale: codes.descale.address(),
            zero_point: codes.zero_point.as_ref().map_or(0, View::address),
            global_scale: codes.global_scale.unwrap_or(1.0),
            ..self
        }
    }
}

/// Lengths and pages of sequences: `Ragged` of kernels/common/params.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RaggedParams {
    lengths: usize,
    page_table: usize,
    lengths_stride: i64,
    page_table_stride: [i64; 2],
    batch: i32,
    added: i32,
    num_pages: i32,
    page_size: i32,
    by_page_size: Divisor,
    log2_chunk: [i32; 3],
    long_from: [i32; 2],
    /// Blocks to which items are dealt; 0 where each item has one.
    blocks: i32,
}

impl RaggedParams {
    /// Without addresses.
    fn new(spec: &Spec, chunks: Option<ChunkRule>, blocks: usize) -> Self {
        let (lengths, pages) = (spec.lengths.as_deref(), spec.pages.as_deref());
        // Keys that are not split: one chunk, longer than all.
        let ChunkRule { keys, long_from } = chunks.unwrap_or(ChunkRule { keys: [1 << 30; 3], long_from: [0; 2] });
        RaggedParams {
            lengths_stride: lengths.and_then(|of| of.lengths).map_or(0, |lengths| strides(&lengths)[0]),
            page_table_stride: pages.map_or([0; 2], |pages| strides(&pages.table)),
            batch: int(spec.batch()),
            added: lengths.map_or(0, |of| int(of.added)),
            num_pages: pages.map_or(0, |pages| int(pages.num_pages)),
            page_size: pages.map_or(1, |pages| int(pages.page_size)),
            by_page_size: Divisor::new(pages.map_or(1, |pages| pages.page_size)),
            log2_chunk: keys.map(|keys| keys.ilog2() as i32),
            long_from: long_from.map(int),
            blocks: int(blocks),
            ..RaggedParams::default()
        }
    }

    fn at(self, operands: &Operands<'_>) -> Self {
        let optional = |view: &Option<View<'_>>| view.as_ref().map_or(0, View::address);
        let tensors = operands.tensors();
        RaggedParams { lengths: optional(&tensors.lengths), page_table: optional(&tensors.page_table), ..self }
    }
}

/// `Params` of variants that read codes, or lengths of sequences.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LaunchParams {
    params: Params,
    codes: [CodesParams; 3],
    ragged: RaggedParams,
}

impl LaunchParams {
    /// Without addresses. `blocks`: to which items are dealt, 0 where each has one.
    pub(crate) fn new(spec: &Spec, params: &Params, chunks: Option<ChunkRule>, blocks: usize) -> Self {
        let (codes, pages) = (spec.codes.as_deref(), spec.pages.as_deref());
        let codes =
            [CodesParams::new(codes.q, None), CodesParams::new(codes.k, pages), CodesParams::new(codes.v, pages)];
        LaunchParams { params: *params, codes, ragged: RaggedParams::new(spec, chunks, blocks) }
    }

    /// These parameters with `params`, which have addresses, and what else the operands have.
    pub(crate) fn at(&self, params: &Params, operands: &Operands<'_>) -> Self {
        let (codes, [q, k, v]) = (operands.tensors().codes.as_deref(), self.codes);
        LaunchParams {
            params: *params,
            codes: [q.at(codes.q), k.at(codes.k), v.at(codes.v)],
            ragged: self.ragged.at(operands),
        }
    }

    /// How many of its bytes a kernel takes that reads codes, and one that reads lengths.
    pub(crate) const fn bytes_of(codes: bool, lengths: bool) -> usize {
        match (codes, lengths) {
            (_, true) => size_of::<LaunchParams>(),
            (true, false) => std::mem::offset_of!(LaunchParams, ragged),
            (false, false) => size_of::<Params>(),
        }
    }

    /// The first `bytes` of them: what a launch passes.
    pub(crate) fn as_bytes(&self, bytes: usize) -> &[u8] {
        // SAFETY: a repr(C) struct of integers and floats, borrowed with self; the assertion on its size below proves that there
        // is no padding.
        let all =
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<LaunchParams>()) };
        &all[..bytes]
    }
}

const _: () = assert!(
    size_of::<LaunchParams>() == size_of::<Params>() + 3 * (2 * 8 + 8 * 8 + 6 * 4) + (5 * 8 + 4 * 4 + 8 + 6 * 4),
    "LaunchParams has padding"
);

/// How hopper.cu reads a mask: `MaskAccess` of hopper/mask_ring.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MaskAccess {
    KeyByKey,
    By16Bytes,
    Tma,
}

/// What hopper.cu takes behind `Params`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HopperItems {
    tasks: i32,
    paired: i32,
    mask_access: i32,
    shift: i32,
    out_tma: i32,
    item_groups: i32,
    short_items: i32,
    scale: f32,
    by_units: Divisor,
    by_grid: Divisor,
}

/// The one parameter of hopper.cu, byte for byte its `HopperParams`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct HopperParams {
    /// Of q, k, v, out and the mask; zeros where TMA is not used.
    maps: [TensorMap; 5],
    params: Params,
    items: HopperItems,
    padding: [u32; padding(size_of::<Params>() + size_of::<HopperItems>())],
}

/// The same of variants that read lengths of sequences.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HopperCacheParams {
    maps: [TensorMap; 5],
    all: LaunchParams,
    items: HopperItems,
    least_keys: i32,
    most_keys: i32,
    box_rows: i32,
    padding: [u32; padding(size_of::<LaunchParams>() + size_of::<HopperItems>() + 3 * 4)],
}

/// Words up to the alignment of maps behind so many bytes.
const fn padding(bytes: usize) -> usize {
    (64 - bytes % 64) % 64 / 4
}

/// By how many blocks work moves on from round to round, so that `grid` blocks reach all of a task's `units` in turn: the
/// least that leaves them no common divisor.
fn shift_of(grid: usize, units: usize) -> usize {
    let divisor = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (0..units).find(|shift| divisor(grid + shift, units) == 1).unwrap_or(0)
}

impl HopperItems {
    /// As `params`, launched in `grid` blocks.
    pub(crate) fn new(
        params: &Params,
        partition: &Partition,
        mask_access: MaskAccess,
        out_tma: bool,
        grid: usize,
    ) -> Self {
        let units = if partition.paired { partition.row_blocks.div_ceil(2) } else { partition.row_blocks };
        HopperItems {
            tasks: int(partition.tasks),
            paired: i32::from(partition.paired),
            mask_access: mask_access as i32,
            shift: int(shift_of(grid, units)),
            out_tma: i32::from(out_tma),
            item_groups: int(partition.item_rows / 64),
            short_items: int(partition.short_items),
            scale: params.scale as f32,
            by_units: Divisor::new(units),
            by_grid: Divisor::new(grid),
        }
    }
}

/// Which sequences of a cache a launch of hopper.cu takes, and how TMA loads their keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheTiles {
    /// How many keys a sequence has: from the first to below the second, or any other number where that is less.
    pub(crate) keys: std::ops::Range<usize>,
    /// Rows of K and V that TMA loads at once.
    pub(crate) box_rows: u32,
}

impl HopperParams {
    /// `params` have addresses; `maps` are of tensors that lie there.
    pub(crate) fn new(params: &Params, items: &HopperItems, maps: [TensorMap; 5]) -> Self {
        HopperParams { maps, params: *params, items: *items, ..HopperParams::default() }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of maps, `Params`, integers and floats, borrowed with self; what follows its last number up to
        // the alignment is a field, and the assertion on its size below proves that there is no other padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<HopperParams>()) }
    }
}

impl HopperCacheParams {
    /// `all` have addresses; `maps` are of tensors that lie there.
    pub(crate) fn new(all: &LaunchParams, items: &HopperItems, tiles: &CacheTiles, maps: [TensorMap; 5]) -> Self {
        HopperCacheParams {
            maps,
            all: *all,
            items: *items,
            least_keys: int(tiles.keys.start),
            most_keys: int(tiles.keys.end),
            box_rows: tiles.box_rows as i32,
            padding: Default::default(),
        }
    }

    /// The bytes that a launch passes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: a repr(C) struct of maps, `LaunchParams`, integers and floats, borrowed with self; what follows its last number up to
        // the alignment is a field, and the assertion on its size below proves that there is no other padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<HopperCacheParams>()) }
    }
}

const HOPPER_ITEMS: usize = 8 * 4 + 2 * 8;
const _: () = assert!(size_of::<HopperItems>() == HOPPER_ITEMS, "HopperItems has padding");
const _: () = assert!(
    size_of::<HopperParams>()
        == 5 * 128 + size_of::<Params>() + HOPPER_ITEMS + 4 * padding(size_of::<Params>() + HOPPER_ITEMS),
    "HopperParams has padding"
);
const _: () = assert!(
    size_of::<HopperCacheParams>()
        == 5 * 128
            + size_of::<LaunchParams>()
            + HOPPER_ITEMS
            + 3 * 4
            + 4 * padding(size_of::<LaunchParams>() + HOPPER_ITEMS + 3 * 4),
    "HopperCacheParams has padding"
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
    fn blocks_reach_every_run_of_rows_in_turn() {
        for (grid, units) in [(132, 6), (132, 8), (132, 7), (131, 6), (1, 1), (64, 64), (132, 1), (3, 1000)] {
            let shift = shift_of(grid, units);
            let reached: std::collections::HashSet<_> =
                (0..units).map(|round| round * (grid + shift) % units).collect();
            assert_eq!(reached.len(), units, "{grid} {units} {shift}");
        }
        assert_eq!((shift_of(132, 7), shift_of(132, 6)), (0, 1));
    }

    #[test]
    fn the_maps_come_first_and_the_size_is_that_of_aligned_maps() {
        assert_eq!(std::mem::offset_of!(HopperParams, params), 5 * 128);
        assert_eq!(std::mem::offset_of!(HopperCacheParams, all), 5 * 128);
        for (size, align) in [
            (size_of::<HopperParams>(), align_of::<HopperParams>()),
            (size_of::<HopperCacheParams>(), align_of::<HopperCacheParams>()),
        ] {
            assert_eq!((size % 64, align), (0, 64));
        }
    }
}
