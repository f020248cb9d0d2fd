// What blocks of decode.cu and decode_codes.cu do with items: a warp's tiles of their keys, and how these are loaded.
#pragma once
#include "common/ptx.cuh"
#include "decode/deal.cuh"

constexpr int THREADS = (WARPS + 1) * 32;

// The named barrier of the warps that read.
__device__ inline void bar_sync_readers() { asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory"); }

// A warp's tiles of an item: those from n0 on, WARPS tiles apart, that begin before `end`.
struct Tiles {
    int n0, end;
    __device__ Tiles(const Params& p, const Item& item, const Seen& seen) {
        const int warp = threadIdx.x / 32;
        const int chunk = item.sequence.chunk(p);
        const int first = max(seen.lo, item.split * chunk) / TILE * TILE;
        end = min(seen.hi, min(item.sequence.kv_len(p), (item.split + 1) * chunk));
        // Dealt by their place in the chunk, so that what is skipped before them moves none to another warp.
        const int place = (first - item.split * chunk) / TILE;
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
