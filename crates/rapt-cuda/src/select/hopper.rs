//! hopper.cu: its tiles, who loads them, how many rows an item has, and what TMA moves.

use std::ops::Range;

use rapt_core::{Arch, DType, MaskClass, Spec, TensorSpec};

use super::{Caps, tensor_cores};
use crate::access::{as_it_lies, is_wide};
use crate::launch::Hopper;
use crate::params::{CacheTiles, HopperItems, MaskAccess, Params};
use crate::partition::Partition;
use crate::tensor_map::{BOX_ROWS, OUT_BOX_ROWS, TmaTensor};
use crate::variant::{Algorithm, KernelVariant, Loads, Sequences};

/// Keys from which on tiles of 112 are taken at head dims 80 and 96, below it tiles of 96: 3 % slower at 1024, 2 to 4 % faster at
/// 4096 (H200, 2026-11; between them not measured).
const MANY_KEYS: usize = 2048;
/// Most keys that are one tile of 80 at head dims up to 64 (4096 × 77: 52 µs, by tiles of 128 59; H200, 2026-11).
const ONE_TILE: usize = 80;
/// From so many keys on tiles are of 128 keys at head dims up to 64, and of 64 where they are more than one tile and fewer: these leave
/// room for four groups of queries, and for queries of the next item (64 × 12 heads of 197², 256², 512² at 16 × 32: 40, 42, 78 µs, by
/// tiles of 128 53, 51, 86; H100, 2026-11).
const SOME_KEYS: usize = 513;

/// Queries per block of hopper.cu and the keys that it can have (the first that fits shared memory): three groups of 64
/// queries where the sums of a group are few, else two; keys as many as leave the sums, and biases, in registers, also
/// beside softcap and slopes (`natural`). `many_keys`: the last tile of keys, which may be filled in part, is but one of
/// many. Measured on an H200, 2026-11: docs/internals/hopper.md.
const fn tiles(dims: (u32, u32), mask: Option<DType>, natural: bool, many_keys: bool) -> (u32, &'static [u32]) {
    match (dims, mask) {
        ((..=64, 33..=48), None) if natural => (128, &[128]),
        ((..=64, ..=64), None) => (192, &[128]),
        ((..=96, ..=96), None) => (192, if many_keys { &[112] } else { &[96] }),
        ((65.., ..=128), Some(DType::Bool)) if natural => (128, &[96, 64]),
        ((_, ..=128), None | Some(DType::Bool)) => (128, &[128, 96, 64]),
        ((_, ..=192), None) => (128, &[112, 80]),
        (_, None) => (128, &[80, 64]),
        (_, Some(DType::Bool)) => (128, &[64]),
        ((..=64, ..=64), Some(DType::F16 | DType::BF16)) => (128, &[128]),
        ((_, ..=128), Some(DType::F16 | DType::BF16)) => (128, &[96, 64]),
        ((_, ..=128), Some(_)) => (128, &[64]),
        (_, Some(_)) => (128, &[48]),
    }
}

/// Rows of K and V that TMA loads at once: whole tiles; out of pages as many as divide a tile and a page.
fn box_rows(spec: &Spec, block_n: u32) -> u32 {
    let divides =
        |rows: &u32, page_size: usize| block_n.is_multiple_of(*rows) && page_size.is_multiple_of(*rows as usize);
    match spec.pages.as_deref() {
        Some(pages) => (1..=block_n).rev().find(|rows| divides(rows, pages.page_size)).unwrap_or(1),
        None => block_n,
    }
}

/// Whether TMA loads q, k and v.
fn is_tma(spec: &Spec) -> bool {
    let pages = spec.pages.as_deref();
    let tensors = [spec.q, as_it_lies(&spec.k, pages), as_it_lies(&spec.v, pages)];
    tensors.iter().all(|tensor| moved(tensor, 1).is_some())
        && pages.is_none_or(|pages| pages.page_size.is_multiple_of(BOX_ROWS))
}

/// Whether head dims up to 64 have neither a mask nor scores that are changed.
fn is_plain(spec: &Spec) -> bool {
    let dims = tensor_cores::padded_dims(spec);
    dims.0.max(dims.1) <= 64 && spec.mask.is_none() && !tensor_cores::is_natural(spec, MaskClass::None)
}

/// The numbers of keys for which requests like `spec` have tiles of their own, if any do.
pub(super) fn few_keys(spec: &Spec) -> Range<usize> {
    if is_plain(spec) { ONE_TILE + 1..SOME_KEYS } else { 0..MANY_KEYS }
}

/// Queries of a block with tiles of 64 keys: four groups, or two where those would leave multiprocessors idle; three of sequences one after
/// another, since four spill 40 bytes. The bits are the same.
fn most_rows(spec: &Spec, caps: &Caps) -> u32 {
    if spec.varlen.is_some() {
        return 192;
    }
    let items = spec.batch().saturating_mul(spec.num_q_heads()).saturating_mul(spec.q_len().div_ceil(256));
    if items >= caps.multiprocessors as usize { 256 } else { 128 }
}

/// The variant of hopper.cu for so many keys, where it runs.
pub(super) fn variant(spec: &Spec, caps: &Caps, kv_len: usize) -> Option<KernelVariant> {
    if caps.arch != Arch::Sm90a {
        return None;
    }
    // Rows of K and V that are not whole sectors of memory are dear to read in large tiles.
    let whole_sectors = spec.head_dim().is_multiple_of(16) && spec.head_dim_v().is_multiple_of(16);
    let many_keys = whole_sectors && kv_len >= MANY_KEYS;
    // Biases are added in natural units by themselves.
    let natural = tensor_cores::is_natural(spec, MaskClass::None);
    let mask = spec.mask.map(|mask| mask.dtype);
    let dims = tensor_cores::padded_dims(spec);
    let is_plain = is_plain(spec);
    // Of a sequence among others, one tile of 128 has the bits of one of 80.
    let (block_m, tiles) = if is_plain && spec.kv_len() <= ONE_TILE {
        (192, [80].as_slice())
    } else if is_plain && few_keys(spec).contains(&kv_len) {
        (most_rows(spec, caps), [64].as_slice())
    } else {
        tiles(dims, mask, natural, many_keys)
    };
    let is_tma = is_tma(spec);
    // Two groups leave those that load by themselves, or look up where, the registers for it; the bits are the same.
    let is_cache = matches!(tensor_cores::sequences(spec), Sequences::Ragged | Sequences::Paged);
    let block_m = if is_tma && !is_cache { block_m } else { 128 };
    let of = |&block_n: &u32| {
        let by_threads = tensor_cores::tensor_core_variant(spec, caps, Algorithm::Hopper, [block_m, block_n]);
        let loads = match (is_tma, &spec.pages) {
            (true, _) => Loads::Tma,
            (false, Some(_)) => by_threads.loads,
            (false, None) => Loads::ByElement,
        };
        KernelVariant { loads, natural, ..by_threads }
    };
    tiles.iter().map(of).find(|variant| variant.shared_bytes() <= caps.shared_bytes)
}

/// A tensor in boxes of so many rows, if TMA moves it.
fn moved(tensor: &TensorSpec<4>, box_rows: u32) -> Option<TmaTensor> {
    TmaTensor::new(tensor, box_rows)
}

/// How the rows of a task are divided into items of hopper.cu.
#[derive(Clone, Copy, Debug)]
pub(super) struct Items {
    /// Groups of 64 rows of an item.
    pub(super) groups: usize,
    /// Items of a task.
    count: usize,
    /// Whether a late item and an early one are worked off in turn.
    pub(super) paired: bool,
    /// Items at the beginning that have a group less.
    pub(super) short: usize,
}

impl Items {
    /// In pairs where positions bound the keys, so that rows see unlike numbers of them; but where each item has a block they are
    /// alone. Then early items also have a group less rather than the last one one or two groups only, which take two thirds
    /// and five sixths of what three take (causal, H200, 2026-11: 6 % at 1024 rows, 3 % at 4096).
    fn new(bounded: bool, groups: usize, tasks: usize, rows: usize, multiprocessors: usize) -> Self {
        let count = rows.div_ceil(64 * groups);
        let paired = bounded && tasks.saturating_mul(count) > multiprocessors;
        let short = if paired && count > 1 { count * groups - rows.div_ceil(64) } else { 0 };
        Items { groups, count, paired, short }
    }

    /// The first row of an item.
    fn first_row(&self, item: usize) -> usize {
        (item * self.groups - item.min(self.short)) * 64
    }

    /// Items of a task, or pairs of them.
    fn units(&self) -> usize {
        if self.paired { self.count.div_ceil(2) } else { self.count }
    }
}

/// As many rows to an item as a block can have, or such as let a launch end sooner, where those would leave multiprocessors idle.
/// In sixths of what a tile of keys takes with three groups of 64 rows: with two it takes five, with one four, and an item three
/// beside its tiles (H200, 2026-11).
pub(super) fn items(spec: &Spec, caps: &Caps, variant: &KernelVariant, tasks: usize, task_heads: usize) -> Items {
    let range = spec.block_range();
    let rows = task_heads * spec.q_len();
    let multiprocessors = caps.multiprocessors.max(1) as usize;
    let block_n = variant.block_n as usize;
    let of = |groups: usize| Items::new(!range.is_unbounded(), groups, tasks, rows, multiprocessors);
    let rounds = |items: &Items| tasks.saturating_mul(items.units()).div_ceil(multiprocessors);
    let time = |groups: usize| {
        let items = of(groups);
        let tiles = |item: usize| {
            // Rows of several heads: any query may be among them.
            let (i0, i1) = if task_heads == 1 {
                (items.first_row(item), rows.min(items.first_row(item + 1)))
            } else {
                (0, spec.q_len())
            };
            let (lo, hi) = range.keys_of_run(i0, i1);
            hi.div_ceil(block_n).saturating_sub(lo / block_n)
        };
        let (last, middle) = (items.count - 1, items.count / 2);
        let (most, ends) = if items.paired {
            ((tiles(0) + tiles(last)).max(tiles(middle) + tiles(last - middle)), 2)
        } else {
            (tiles(0).max(tiles(middle)).max(tiles(last)), 1)
        };
        rounds(&items).saturating_mul(most * (3 + groups) + 3 * ends)
    };
    let whole = variant.block_m as usize / 64;
    // Of many rounds the last one counts for little.
    if rounds(&of(whole)) > 2 {
        return of(whole);
    }
    of((1..=whole).rev().min_by_key(|groups| time(*groups)).unwrap_or(whole))
}

/// What hopper.cu takes besides `params`, launched in `grid` blocks over sequences of so many `keys`, where they have lengths.
pub(super) fn launch(
    spec: &Spec,
    variant: &KernelVariant,
    partition: &Partition,
    params: &Params,
    grid: usize,
    keys: Range<usize>,
) -> Hopper {
    let is_tma = variant.loads == Loads::Tma;
    let input = |tensor: &TensorSpec<4>, box_rows| if is_tma { moved(tensor, box_rows) } else { None };
    // Rows of several heads are no box of out or the mask, and TMA converts nothing.
    let is_one_head = partition.task_heads == 1;
    let is_alike = spec.out.dtype == spec.numerics.storage;
    let out = if is_alike && is_one_head && variant.is_staged() { moved(&spec.out, OUT_BOX_ROWS) } else { None };
    let mask = spec.mask.as_ref();
    let tile = [variant.block_m, variant.block_n];
    let moved_mask = mask.filter(|_| is_tma && is_one_head).and_then(|mask| TmaTensor::mask(mask, tile));
    let mask_access = match (moved_mask, mask) {
        (Some(_), _) => MaskAccess::Tma,
        (None, Some(mask)) if is_wide(mask) => MaskAccess::By16Bytes,
        (None, _) => MaskAccess::KeyByKey,
    };
    let (pages, box_rows) = (spec.pages.as_deref(), box_rows(spec, variant.block_n));
    let [k, v] = [&spec.k, &spec.v].map(|tensor| input(&as_it_lies(tensor, pages), box_rows));
    Hopper {
        items: HopperItems::new(params, partition, mask_access, out.is_some(), grid),
        tiles: variant.reads_lengths().then_some(CacheTiles { keys, box_rows }),
        moved: [input(&spec.q, variant.block_m), k, v, out, moved_mask],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_of_a_task_follow_one_another_and_none_is_empty() {
        for groups in 1..=3 {
            for rows in (1..2000).chain([4096, 16_384, 99_999]) {
                for bounded in [false, true] {
                    let items = Items::new(bounded, groups, 132, rows, 132);
                    let starts: Vec<_> = (0..=items.count).map(|item| items.first_row(item)).collect();
                    assert_eq!(starts[0], 0);
                    assert!(starts[items.count] >= rows && starts[items.count - 1] < rows, "{items:?} {rows}");
                    let lengths = || starts.windows(2).map(|pair| pair[1] - pair[0]);
                    assert!(lengths().all(|n| n % 64 == 0 && n > 0 && n <= groups * 64), "{items:?} {rows}");
                    if items.short > 0 {
                        assert!(starts[items.count] - rows < 64, "{items:?} {rows}");
                    }
                }
            }
        }
    }
}
