// The warps of hopper.cu that load Q, K and V: by TMA where it can read them, else element by element into the same tiles.
//
//   for each tile n that the mask does not hide      wait until its buffer is released; load K[n], then V[n-1]
//
// Deliberately absent: the mask (mask_ring.cuh).

#pragma once
#include "hopper/work.cuh"

// Elements that a lane has under way, where they come one by one: as many as registers allow.
constexpr int AT_ONCE = MASK_DTYPE == F32 && DV > 192 ? 2 : 4;

// ROWS rows of boxes of BOX_ROWS rows, by 128 threads, zero beyond `rows` and `dim`.
template <int ROWS, int BOX_ROWS, int BOXES, class Offset>
__device__ inline void load_boxes(Elem* tile, const Elem* base, Offset offset, i64 step, int rows, int dim, int lane) {
    if constexpr (VECTOR) {
        for (int at = lane; at < ROWS * BOXES * 8; at += 128) {
            const int r = at / (BOXES * 8), c = at % (BOXES * 8) * 8;
            uint4 chunk = {0, 0, 0, 0};
            if (r < rows && c < dim) chunk = *(const uint4*)(base + offset(r) + c);
            *(uint4*)((u8*)(tile + c / BOX * BOX_ROWS * BOX) + swizzle_128b(r, c % BOX)) = chunk;
        }
    } else {
#pragma unroll AT_ONCE
        for (int at = lane; at < ROWS * BOXES * BOX; at += 128) {
            const int r = at / (BOXES * BOX), c = at % (BOXES * BOX);
            const Elem x = r < rows && c < dim ? base[offset(r) + c * step] : (Elem)0;
            *(Elem*)((u8*)(tile + c / BOX * BOX_ROWS * BOX) + swizzle_128b(r, c % BOX)) = x;
        }
    }
}

__device__ inline bool queries_by_tma(const Params& p) { return VECTOR && p.task_heads == 1; }

// K or V in memory, as TMA reads it and as threads do.
struct Operand {
    const TensorMap& map;
    const void* base;
    const i64 (&stride)[4];
    int dim;
};

// Its tiles in shared memory, their barriers, and how many were loaded so far.
template <int BOXES>
struct TileRing {
    Elem (&tiles)[STAGES][BOXES * K_BOX];
    u64 (&full)[STAGES];
    u64 (&empty)[STAGES];
    u32& loaded;
};

struct Producer {
    const HopperParams& h;
    Shared& sh;
    u32 k_loaded = 0, v_loaded = 0, q_loaded = 0, m_seen = 0;

    __device__ void load_queries(const Task& task, int r0) {
        const Params& p = h.p;
        const int stage = q_loaded % Q_STAGES;
        mbarrier_wait(sh.q_empty[stage], ~(q_loaded++ / Q_STAGES) & 1);
        mbarrier_arrive_expect_tx(sh.q_full[stage], sizeof(sh.q[0]));
        const int head = tma_coordinate(p.q_stride[1], task.head), batch = tma_coordinate(p.q_stride[0], task.batch);
#pragma unroll
        for (int box = 0; box < K_BOXES; box++) {
            tma_load(sh.q[stage] + box * Q_BOX, h.q_map, sh.q_full[stage], box * BOX, task.sequence.first_query() + r0, head, batch);
        }
    }

    // One tile of K or V.
    template <int BOXES>
    __device__ void load(const TileRing<BOXES>& ring, const Operand& operand, const Task& task, int n0) {
        const i64(&stride)[4] = operand.stride;
        const int stage = stage_of(ring.loaded);
        mbarrier_wait(ring.empty[stage], phase_of(ring.loaded++) ^ 1);
        Elem* tile = ring.tiles[stage];
        u64& barrier = ring.full[stage];
        const int head = divide(task.head, h.p.by_group), row = task.sequence.first_key() + n0;
        if constexpr (VECTOR) {
            mbarrier_arrive_expect_tx(barrier, sizeof(ring.tiles[0]));
#pragma unroll
            for (int box = 0; box < BOXES; box++) {
                const int map_head = tma_coordinate(stride[1], head), map_batch = tma_coordinate(stride[0], task.batch);
                tma_load(tile + box * K_BOX, operand.map, barrier, box * BOX, row, map_head, map_batch);
            }
        } else {
            const Elem* from = (const Elem*)operand.base + task.batch * stride[0] + head * stride[1] + row * stride[2];
            load_boxes<BN, BN, BOXES>(
                tile, from, [&](int r) { return r * stride[2]; }, stride[3], task.sequence.kv_len(h.p) - n0, operand.dim, threadIdx.x % 128
            );
            fence_proxy_async();
            mbarrier_arrive(barrier);
        }
    }
    __device__ void load_keys(const Task& task, int n0) {
        const Params& p = h.p;
        const TileRing<K_BOXES> ring{sh.k, sh.k_full, sh.k_empty, k_loaded};
        load(ring, {h.k_map, p.k, p.k_stride, p.head_dim}, task, n0);
    }
    __device__ void load_values(const Task& task, int n0) {
        const Params& p = h.p;
        const TileRing<V_BOXES> ring{sh.v, sh.v_full, sh.v_empty, v_loaded};
        load(ring, {h.v_map, p.v, p.v_stride, p.head_dim_v}, task, n0);
    }

    // `read_mask(n0)` comes before each tile.
    template <class Read>
    __device__ void run(const Task& task, int r0, const Tiles& tiles, Read read_mask) {
        if (tiles.count == 0) return;
        // In the order in which room for them becomes free: K of a tile, then V of the one before it.
        int before = -1;
#pragma unroll 1
        for (int n = 0; n < tiles.count; n++) {
            const int n0 = tiles.first + n * BN;
            read_mask(n0);
            if (is_hidden()) continue;
            load_keys(task, n0);
            if (before < 0 && queries_by_tma(h.p)) load_queries(task, r0);
            if (before >= 0) load_values(task, before);
            before = n0;
        }
        if (before >= 0) load_values(task, before);
    }

    // Whether the mask hides all of the next tile.
    __device__ bool is_hidden() {
#if MASK == NO_MASK
        return false;
#else
        const int stage = mask_stage_of(m_seen);
        mbarrier_wait(sh.mask.full[stage], mask_phase_of(m_seen++));
        const bool hidden = kind_of(sh.mask.kinds[stage]) == HIDDEN;
        mbarrier_arrive(sh.mask.empty[stage]);
        return hidden;
#endif
    }
};
