// What blocks of decode.cu and decode_codes.cu work off: items, and a warp's tiles of their keys.
#pragma once
#include "common/params.cuh"
#include "common/ptx.cuh"

constexpr int THREADS = (WARPS + 1) * 32;

// The named barrier of the warps that read.
__device__ inline void bar_sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// What an item is: rows r0.. of a task (all heads of kv_head), and the keys of one split. Divided out once: the items of a
// run follow one another.
struct Item {
    int split, row_block, kv_head, batch;
    __device__ Item(const Params& p, u32 item) {
        const u32 rows = divide(item, p.by_num_splits), task = divide(rows, p.by_row_blocks);
        split = item - rows * p.num_splits, row_block = rows - task * p.row_blocks;
        batch = divide(task, p.by_tasks), kv_head = task - batch * kv_heads(p);
    }
    __device__ void step(const Params& p) {
        if (++split < p.num_splits) return;
        split = 0;
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if (++kv_head < kv_heads(p)) return;
        kv_head = 0, batch++;
    }
    __device__ static int kv_heads(const Params& p) { return divide(p.heads, p.by_group); }
    __device__ int r0() const { return row_block * 16; }
    __device__ Task task(const Params& p) const { return Task(batch, kv_head * p.group); }
    __device__ int task_index(const Params& p) const { return batch * kv_heads(p) + kv_head; }
    __device__ Seen seen(const Params& p) const { return Seen(p, task(p), r0(), min(r0() + 16, p.rows)); }
};

// A warp's tiles of an item: those from n0 on, WARPS tiles apart, that begin before `end`.
struct Tiles {
    int n0, end;
    __device__ Tiles(const Params& p, const Item& item, const Seen& seen) {
        const int warp = threadIdx.x / 32;
        const int first = max(seen.lo, item.split * p.chunk) / TILE * TILE;
        end = min(seen.hi, min(p.kv_len, (item.split + 1) * p.chunk));
        // Dealt by their place in the chunk, so that what is skipped before them moves none to another warp.
        const int place = (first - item.split * p.chunk) / TILE;
        n0 = first + ((warp - place) % WARPS + WARPS) % WARPS * TILE;
    }
};

// Moves 16 bytes that are the first to give way in L2 where no other run of rows of the task reads them: what else lies there
// (the code, other blocks' partial rows) stays. K and V that batches share by a stride of 0 may be read again then. 1.3 µs of 71.5 at 4 x 8 heads, 16,384 keys; H200, 2026-11.
struct PassingCopy {
    u64 policy;
    __device__ PassingCopy(const Params& p) {
        asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
        if (p.row_blocks == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    }
    __device__ void operator()(u32 to, const void* from) const {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy));
    }
};
