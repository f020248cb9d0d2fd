//! How a request is cut: a function of the spec, the instruction set, the number of threads and the tiles.

use rapt_core::{CodesSpec, DType, Format, Granularity, INT8_BLOCK, Kernel, KernelKey, Qkv, Spec};

use super::tiles::Tiles;
use crate::arch;
use crate::partition::{Order, Partition};
use crate::problem::{Fold, Reading};
use crate::scratch::{CODE_KEYS, DecodeSizes, FactorsOfPairs, ForwardSizes, Scratch, partial_len};

/// Most bytes of packed K and V tiles per thread.
const PANEL_BYTES: usize = 1 << 20;
/// Most bytes of packed Q and accumulated O per thread.
const TILES_BYTES: usize = 1 << 20;
/// Most bytes of a chunk of K of the decode kernel, down to so many keys: what a second cache holds. No chunk of heads up to 256 numbers of
/// float32 is shortened, which the tuner measured as they are.
const CHUNK_BYTES: usize = 1 << 20;
const LEAST_CHUNK: usize = 128;
/// Tiles that must share a block before packing rows that lie apart pays.
const SHARING_TILES: usize = 4;
/// How many times as many rows an item may have where K and V are packed for that alone: they are packed once an item. In a [B,S,H,D] view of 24
/// heads of 128 f32 took 1.14 of the contiguous time with 256 rows, 1.10 with 512 and 1.09 with 1024 (Xeon, family 6 model 207, 2026-11).
const ROWS_APART: [usize; 2] = [4, 2];
/// Only while there are so many items for each thread: one that is slowed down holds the others up by an item at most.
const ITEMS_APART: usize = 12;

/// Keys per block of the forward kernel: the multiple of the micro-tile's rows below `block_n`, fewer where a block of K and
/// V would outgrow the cap.
fn forward_block(spec: &Spec, rows: usize, block_n: usize) -> usize {
    let row_bytes = (spec.head_dim() + spec.head_dim_v()) * spec.numerics.accumulation.size_bytes();
    let most = (PANEL_BYTES / row_bytes).clamp(1, block_n);
    if most > rows { most / rows * rows } else { most }
}

/// How `spec` is cut for the kernel of `key`.
pub(super) fn partition(
    spec: &Spec,
    key: &KernelKey,
    readings: &Qkv<Option<Reading>>,
    threads: usize,
    tiles: &Tiles,
) -> Partition {
    match key.kernel {
        Kernel::Decode => decode_partition(spec, readings, tiles),
        Kernel::ForwardInt8 => int8_partition(spec, key, threads),
        _ => forward_partition(spec, key, readings, threads, tiles),
    }
}

/// Whether rows of K and of V, `head_dim` and `head_dim_v` wide, do not follow one another in memory.
fn rows_lie_apart(spec: &Spec) -> [bool; 2] {
    let apart = |strides: [isize; 4], dim: usize, codes: &Option<Box<CodesSpec>>| {
        let shared = codes.as_deref().map_or(1, |codes| codes.format.codes_per_byte());
        strides[2].unsigned_abs() != dim.div_ceil(shared)
    };
    [apart(spec.k.strides, spec.head_dim(), &spec.codes.k), apart(spec.v.strides, spec.head_dim_v(), &spec.codes.v)]
}

/// Whether the elements of a row of K and of V follow one another, as numbers or codes that are read where they lie.
fn rows_are_whole(spec: &Spec, readings: &Qkv<Option<Reading>>) -> [bool; 2] {
    let whole = |strides: [isize; 4], dim: usize, reading: &Option<Reading>| {
        let elements = dim.div_ceil(reading.map_or(1, |reading| reading.kind.shared()));
        (strides[3] == 1 || elements == 1) && reading.is_none_or(|reading| reading.fold.is_some())
    };
    [whole(spec.k.strides, spec.head_dim(), &readings.k), whole(spec.v.strides, spec.head_dim_v(), &readings.v)]
}

/// Keys per chunk of the decode kernel: fewer for wide heads, so that K is still in the second cache when V is read, which may be the first
/// numbers of each key.
fn decode_block(spec: &Spec, readings: &Qkv<Option<Reading>>, block_n: usize) -> usize {
    let shared = readings.k.map_or(1, |reading| reading.kind.shared());
    let row_bytes = (spec.head_dim() * spec.k.dtype.size_bytes()).div_ceil(shared);
    let mut block_n = block_n;
    while block_n > LEAST_CHUNK && block_n * row_bytes > CHUNK_BYTES {
        block_n /= 2;
    }
    block_n
}

/// Whether decode multiplies codes as they are.
fn multiplies_codes(readings: &Qkv<Option<Reading>>) -> bool {
    let has_fold = |reading: &Option<Reading>| reading.is_some_and(|reading| reading.fold.is_some());
    has_fold(&readings.k) || has_fold(&readings.v)
}

fn decode_partition(spec: &Spec, readings: &Qkv<Option<Reading>>, tiles: &Tiles) -> Partition {
    let tile = &tiles.decode;
    let heads = spec.group_size();
    let rows = heads * spec.q_len();
    let per_batch = spec.num_q_heads() / heads;
    let [k_in_place, v_in_place] = rows_are_whole(spec, readings);
    let interleaved = spec.k.strides[2].unsigned_abs() > spec.k.strides[1].unsigned_abs();
    let block_n = decode_block(spec, readings, tile.block_n);
    let (codes, apart) = (multiplies_codes(readings), rows_lie_apart(spec).contains(&true));
    let ahead_bytes = match (codes, apart) {
        (_, true) => tile.ahead_bytes_apart,
        // The lines of a block of codes, asked for at once, are more than a core waits for: (1,32,1×4096,128) int8 took 4.6
        // instead of 2.6 ms (Zen 4, one thread, 2026-11).
        (true, false) => 0,
        (false, false) => tile.ahead_bytes,
    };
    Partition {
        tasks: spec.batch() * per_batch,
        heads,
        rows,
        chunk_rows: rows,
        chunks: spec.kv_len().div_ceil(block_n),
        order: if interleaved { Order::Heads { tasks: per_batch } } else { Order::Tasks },
        block_n,
        narrow: false,
        pv_keys: if codes { CODE_KEYS } else { tile.pv_keys },
        ahead_bytes,
        k_in_place,
        v_in_place,
    }
}

/// As many rows as packing K and V for products of tiles costs, of numbers in one, two and three parts: of three some 460 cycles a key at head dim
/// 128, where a row takes 8; of the others by their share of the work.
const PACKING_ROWS: [f64; 3] = [20.0, 50.0, 60.0];

/// How the rows of forward are shared out: tasks of `heads` query heads and `rows` rows, in items of `chunk_rows`.
struct Items {
    tasks: usize,
    heads: usize,
    rows: usize,
    chunk_rows: usize,
}

/// Tiles of `queries` rows, of which an item has as many as `most_rows` and the second cache hold, or a half, a quarter and so on of that, down to
/// two: as the threads end first. `packing`: as many rows as packing K and V for an item costs, where kernels always do; else there are four items
/// a thread, if an item still shares each block of keys among tiles.
fn items(
    spec: &Spec,
    queries: usize,
    most_rows: usize,
    tile_bytes: usize,
    threads: usize,
    packing: Option<f64>,
) -> Items {
    let heads = if spec.q_len() < 2 * queries { spec.group_size() } else { 1 };
    let tasks = spec.batch() * (spec.num_q_heads() / heads);
    let rows = heads * spec.q_len();
    let rows_of = |count: usize| (count * queries).min(rows.next_multiple_of(queries));
    let mut count = (most_rows / queries).clamp(1, (TILES_BYTES / tile_bytes).max(1));
    let Some(packing) = packing else {
        while count > 2 && tasks * rows.div_ceil(count * queries) < threads.saturating_mul(4) {
            count /= 2;
        }
        return Items { tasks, heads, rows, chunk_rows: rows_of(count) };
    };
    // In rows that see every key. A causal row sees half of them, and the items that see most are taken first.
    let time_of = |count: usize| {
        let (own, items) = (rows_of(count) as f64, tasks as f64 * rows.div_ceil(rows_of(count)) as f64);
        let (all, threads) = (rows as f64, threads as f64);
        if spec.causal.is_some() {
            let longest = own - own * own / (2.0 * all.max(own));
            ((tasks as f64 * all / 2.0 + items * packing) / threads).max(longest + packing)
        } else {
            (items / threads).ceil() * (own + packing)
        }
    };
    let counts = std::iter::successors(Some(count), |count| (*count > 3).then_some(count / 2));
    let count = counts.min_by(|a, b| time_of(*a).total_cmp(&time_of(*b))).unwrap_or(count);
    Items { tasks, heads, rows, chunk_rows: rows_of(count) }
}

fn forward_partition(
    spec: &Spec,
    key: &KernelKey,
    readings: &Qkv<Option<Reading>>,
    threads: usize,
    tiles: &Tiles,
) -> Partition {
    let tile = &tiles.forward;
    let shape = arch::tile_shape(key.arch, key.storage);
    let tile_bytes = shape.queries * (spec.head_dim() + spec.head_dim_v()) * key.accumulation.size_bytes();
    let packing = arch::tiled(key.arch, key.storage).map(|parts| PACKING_ROWS[parts - 1]);
    let tiled = arch::tiled(key.arch, key.storage).is_some();
    let as_summed = key.storage == key.accumulation && !tiled;
    let lie_apart = rows_lie_apart(spec);
    let items_of = |most_rows| items(spec, shape.queries, most_rows, tile_bytes, threads.max(1), packing);
    let enough = ITEMS_APART.saturating_mul(threads);
    let are_enough = |of: &Items| of.tasks.saturating_mul(of.rows.div_ceil(of.chunk_rows.max(1))) >= enough;
    let larger = ROWS_APART.into_iter().filter(|_| as_summed && lie_apart.contains(&true));
    let Items { tasks, heads, rows, chunk_rows } =
        larger.map(|times| items_of(times * tile.rows)).find(are_enough).unwrap_or_else(|| items_of(tile.rows));

    // Pairs of K along head_dim are read where they lie if every row is whole lanes, in steps of whole lanes.
    let [k_is_whole, v_is_whole] = rows_are_whole(spec, readings);
    let whole_lanes = spec.head_dim().is_multiple_of(2) && spec.k.strides[2] % 2 == 0 && spec.k.strides[3] == 1;
    let paired = arch::is_paired(key.arch, key.storage) && !tiled && whole_lanes && readings.k.is_none();
    // Rows that lie apart share few cache sets and touch a page each: packed once, a block is read by many tiles. In a
    // [B,S,H,D] view of 24 heads of 128 (rows 12 KiB apart) f32 in place lost 30 % (Zen 4, 2026-11).
    let shared = chunk_rows.div_ceil(shape.queries) >= SHARING_TILES;
    let [k_apart, v_apart] = lie_apart.map(|apart| shared && apart);
    let in_pages = spec.pages.is_some();
    Partition {
        tasks,
        heads,
        rows,
        chunk_rows,
        chunks: rows.div_ceil(chunk_rows),
        order: order(spec, tasks, threads),
        block_n: forward_block(spec, shape.rows, tile.block_n),
        narrow: tile.narrow,
        pv_keys: 0,
        ahead_bytes: 0,
        k_in_place: ((k_is_whole && as_summed) || paired) && !k_apart && !in_pages,
        v_in_place: v_is_whole && as_summed && !v_apart && !in_pages,
    }
}

/// The order of items of so many tasks: as many tasks at the end as there are threads keep all of them busy.
fn order(spec: &Spec, tasks: usize, threads: usize) -> Order {
    if spec.causal.is_some() { Order::LastRows { last_tasks: tasks.min(threads.max(1)) } } else { Order::Tasks }
}

/// Rows of an item of int8, where there are items enough for all threads.
const INT8_ROWS: usize = 256;

/// As forward's, in blocks of the definition's own; K and V are packed.
fn int8_partition(spec: &Spec, key: &KernelKey, threads: usize) -> Partition {
    let queries = arch::tile_shape(key.arch, DType::F32).queries;
    let tile_bytes = queries * (spec.head_dim().div_ceil(4) + spec.head_dim_v()) * key.accumulation.size_bytes();
    let Items { tasks, heads, rows, chunk_rows } = items(spec, queries, INT8_ROWS, tile_bytes, threads, None);
    Partition {
        tasks,
        heads,
        rows,
        chunk_rows,
        chunks: rows.div_ceil(chunk_rows),
        order: order(spec, tasks, threads),
        block_n: INT8_BLOCK,
        narrow: true,
        pv_keys: 0,
        ahead_bytes: 0,
        k_in_place: false,
        v_in_place: false,
    }
}

/// The scratch memory of one thread.
pub(super) fn scratch(spec: &Spec, key: &KernelKey, readings: &Qkv<Option<Reading>>, partition: &Partition) -> Scratch {
    let (head_dim, head_dim_v, block_n) = (spec.head_dim(), spec.head_dim_v(), partition.block_n);
    if key.kernel == Kernel::Decode {
        let panel_keys = partition.panel_keys();
        let (rows, multiplies_codes) = (partition.rows, multiplies_codes(readings));
        let codes = || [readings.k, readings.v].into_iter().flatten();
        let multiplies_pairs = codes().any(|reading| reading.pairs.is_some());
        let multiplies_quads = codes().any(|reading| reading.quads.is_some());
        return Scratch::decode(&DecodeSizes {
            head_dim,
            head_dim_v,
            rows,
            block_n,
            panel_keys,
            multiplies_codes,
            multiplies_pairs,
            multiplies_quads,
        });
    }
    let is_int8 = key.kernel == Kernel::ForwardInt8;
    let queries = arch::tile_shape(key.arch, if is_int8 { DType::F32 } else { key.storage }).queries;
    let sizes = ForwardSizes {
        head_dim,
        head_dim_v,
        tiles: partition.chunk_rows.div_ceil(queries),
        queries,
        block_n,
        has_mask: spec.mask.is_some(),
        pack_k: !partition.k_in_place,
        pack_v: !partition.v_in_place,
        tiled: arch::tiled(key.arch, key.storage),
        pairs: factors_of_pairs(spec, readings),
    };
    if is_int8 { Scratch::int8(&sizes) } else { Scratch::forward(&sizes) }
}

/// Whether keys that have one factor each have one of their own: a block may be all of a row.
pub(super) fn is_by_key(codes: &CodesSpec) -> bool {
    matches!(codes.granularity, Granularity::Token | Granularity::Block { .. })
}

/// Where forward keeps the factors of codes that it multiplies as pairs: those of V go to the output where all keys share them, and what
/// goes there is never infinite.
fn factors_of_pairs(spec: &Spec, readings: &Qkv<Option<Reading>>) -> FactorsOfPairs {
    let fold = |reading: &Option<Reading>| reading.and_then(|reading| reading.pairs);
    let mut factors = FactorsOfPairs { of_k: fold(&readings.k).is_some(), ..FactorsOfPairs::default() };
    if let (Some(fold), Some(codes)) = (fold(&readings.v), &spec.codes.v) {
        let is_shared = !is_by_key(codes) && codes.format != Format::E5m2;
        factors.of_output = match fold {
            Fold::Rows => is_shared,
            Fold::Channels => true,
            Fold::Groups => codes.format.has_global_scale(),
        };
        factors.of_v = fold == Fold::Rows && !is_shared;
    }
    factors
}

/// Bytes of partial results of the decode kernel.
pub(super) fn partials_bytes(spec: &Spec, key: &KernelKey, partition: &Partition) -> usize {
    if key.kernel != Kernel::Decode {
        return 0;
    }
    // Saturating: what cannot be counted cannot be allocated, and that is the error then.
    let row_bytes = partial_len(spec.head_dim_v()) * key.accumulation.size_bytes();
    (partition.tasks * partition.rows).saturating_mul(partition.chunks).saturating_mul(row_bytes)
}
