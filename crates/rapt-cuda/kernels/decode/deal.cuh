// What blocks of decode.cu, decode_codes.cu and latent.cu work off, and who works off what. Deliberately absent: what is done with an item.
#pragma once
#include "common/params.cuh"

// Rows of an item, at most.
#ifndef ITEM_ROWS
#define ITEM_ROWS 16
#endif

#if RAGGED && !VARLEN
// How many items there are, and how they are dealt to p.ragged.blocks blocks; by whole warps. An item is a chunk of a row of blocks of one
// sequence; items of one such row follow one another, and those of a sequence. Blocks take as many items each, wherever that cuts a row; or a
// row each, where none would be left waiting for longer than a tenth of its time.
struct Deal {
    u32 items, each, rest, own;  // own: chunks of the lane's sequence of the first 32
    bool whole_rows;
    __device__ explicit Deal(const Params& p) : Deal(p, p.ragged.blocks, true) {}
    // To so many blocks; `may_take_rows`: or a row each.
    __device__ Deal(const Params& p, u32 blocks, bool may_take_rows) {
        own = splits_of(p, 0);
        u32 sum = own, most = own;
        for (int batch = 32; batch < p.ragged.batch; batch += 32) {
            const u32 splits = splits_of(p, batch);
            sum += splits, most = max(most, splits);
        }
        const u32 of_sequence = rows_of_sequence(p), rows = of_sequence * p.ragged.batch;
        items = __reduce_add_sync(~0u, sum) * of_sequence;
        whole_rows = may_take_rows && rows <= blocks && __reduce_max_sync(~0u, most) * 10 * blocks <= items * 11;
        const u32 units = whole_rows ? rows : items;
        each = units / blocks, rest = units - each * blocks;
    }
    // Rows of blocks of a sequence: of all its key heads.
    __device__ static u32 rows_of_sequence(const Params& p) { return p.row_blocks * divide(p.heads, p.by_group); }
    // The first unit of a block: an item, or a row.
    __device__ u32 first(u32 block) const { return each * block + min(block, rest); }
    // Chunks of the lane's sequence of those from `batch` on.
    __device__ static u32 splits_of(const Params& p, int batch) {
        const int lane = batch + threadIdx.x % 32;
        return lane < p.ragged.batch ? Sequence(p, lane).num_splits(p) : 0;
    }
};
#endif

// What an item is: rows r0.. of a task (all heads of kv_head), and the keys of one split. Divided out once: the items of a
// run follow one another.
struct Item {
    int split, row_block, kv_head, batch;
    Sequence sequence;
#if VARLEN
    u32 unit;
    __device__ Item(const Params& p, u32 unit) : split(0), batch(0), unit(unit) { enter(p); }
    // A unit is a block of rows of a head of keys, with all chunks.
    __device__ void enter(const Params& p) {
        const VarlenEntry& of = varlen_entry(p, unit);
        const u32 own = unit - of.first;
        sequence = Sequence(of), kv_head = divide(own, of.by_units), row_block = own - kv_head * of.units;
    }
#elif RAGGED
    u32 row_begin;  // the item of split 0
    // Unit `unit` of those that are dealt; by whole warps.
    __device__ Item(const Params& p, const Deal& deal, u32 unit) : batch(0), sequence(p, 0), row_begin(0) {
        const u32 each = Deal::rows_of_sequence(p);
        u32 row = unit;
        if (deal.whole_rows) {
            batch = row / each, row -= batch * each, split = 0;
        } else {
            u32 before = 0;
            for (; batch < p.ragged.batch; batch += 32) {
                u32 sum = batch == 0 ? deal.own : Deal::splits_of(p, batch);
#pragma unroll
                for (int step = 1; step < 32; step *= 2) {
                    const u32 other = __shfl_up_sync(~0u, sum, step);
                    if (threadIdx.x % 32 >= step) sum += other;
                }
                // The sequences of these 32 that end before the item.
                const int ended = __popc(__ballot_sync(~0u, (before + sum) * each <= unit));
                const u32 up_to = __shfl_sync(~0u, sum, max(ended - 1, 0));
                if (ended > 0) before += up_to;
                if (ended == 32) continue;
                batch += ended;
                break;
            }
            row -= before * each;
            const u32 splits = Sequence(p, batch).num_splits(p);
            split = row % splits, row /= splits, row_begin = unit - split;
        }
        sequence = Sequence(p, batch);
        kv_head = row / p.row_blocks, row_block = row - kv_head * p.row_blocks;
    }
#else
    __device__ Item(const Params& p, u32 item) : sequence(p, 0) {
        const u32 rows = divide(item, p.by_num_splits), task = divide(rows, p.by_row_blocks);
        split = item - rows * p.num_splits, row_block = rows - task * p.row_blocks;
        batch = divide(task, p.by_tasks), kv_head = task - batch * kv_heads(p);
    }
#endif
    __device__ void step(const Params& p) {
        if (++split < sequence.num_splits(p)) return;
#if VARLEN
        split = 0;
        if (!is_beyond(p, ++unit)) enter(p);
#else
#if RAGGED
        row_begin += split;
#endif
        split = 0;
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if (++kv_head < kv_heads(p)) return;
        kv_head = 0, batch++;
#if RAGGED
        if (batch < p.ragged.batch) sequence = Sequence(p, batch);
#endif
#endif
    }
    __device__ static int kv_heads(const Params& p) { return divide(p.heads, p.by_group); }
    __device__ int r0() const { return row_block * ITEM_ROWS; }
    __device__ Task task(const Params& p) const { return Task(batch, kv_head * p.group, sequence); }
    __device__ int task_index(const Params& p) const { return batch * kv_heads(p) + kv_head; }
    __device__ int rows(const Params& p) const { return min(ITEM_ROWS, task(p).rows(p) - r0()); }
    __device__ Seen seen(const Params& p) const { return Seen(p, task(p), r0(), r0() + rows(p)); }
};

// The items of a block: `count` from the first on.
struct Run {
    Item item;
    u32 first, count;
    // Whether chunks of an item's row are left to combine.cu, because other blocks have the others.
    __device__ bool cuts(const Params& p, const Item& of) const {
#if VARLEN
        return false;
#elif RAGGED
        return of.row_begin < first || of.row_begin + of.sequence.num_splits(p) > first + count;
#else
        return p.is_cut;
#endif
    }
};
