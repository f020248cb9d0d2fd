// The warps of hopper.cu that load Q, K and V: by TMA where it can read them, else element by element into the same tiles.
//
//   for each tile n that the mask does not hide      wait until its buffer is released; load K[n], then V[n-1]
//
//   pages (PAGED)    by TMA, a lane of one warp for each box of a tile, which lies in one page; where pages are too small for boxes, all
//                    threads gather rows (common/gather.cuh), 16 bytes at a time (GATHERS), and hand over a tile when the next is under way
//
// Deliberately absent: the mask (mask_ring.cuh).

#pragma once
#include "common/gather.cuh"
#include "hopper/work.cuh"

// Elements that a lane has under way, where they come one by one: as many as registers allow.
constexpr int AT_ONCE = MASK_DTYPE == F32 && DV > 192 ? 2 : 4;

// ROWS rows of boxes of BOX_ROWS rows, by 128 threads, zero beyond `rows` and `dim`.
template <int ROWS, int BOX_ROWS, int BOXES, class Offset>
__device__ inline void load_boxes(Elem* tile, const Elem* base, Offset offset, i64 step, int rows, int dim, int lane) {
    if constexpr (VECTOR || GATHERS) {
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

// Whether a thread of these warps loads K and V: one by TMA, or a warp where they lie in pages; else all of them.
__device__ inline bool loads_keys(int thread) { return !VECTOR || (PAGED ? thread < 32 : thread == 0); }

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
        if (PAGED && threadIdx.x % 32 != 0) return;
        mbarrier_arrive_expect_tx(sh.q_full[stage], sizeof(sh.q[0]));
        const int head = tma_coordinate(p.q_stride[1], task.head), batch = tma_coordinate(p.q_stride[0], task.batch);
#pragma unroll
        for (int box = 0; box < K_BOXES; box++) {
            tma_load(sh.q[stage] + box * Q_BOX, h.q_map, sh.q_full[stage], box * BOX, task.sequence.first_query() + r0, head, batch);
        }
    }

#if PAGED
    u64* gathered = nullptr;  // the barrier of a tile whose rows are under way

    // Hands over the tile that was gathered, once no more than PENDING later ones are under way.
    template <int PENDING>
    __device__ void hand_over_gathered() {
        cp_async_wait<PENDING>();
        fence_proxy_async();
        if (gathered != nullptr) mbarrier_arrive(*gathered);
        gathered = nullptr;
    }

    // One tile of K or V out of pages, by rows.
    template <int BOXES>
    __device__ void gather(const TileRing<BOXES>& ring, const Operand& operand, const Task& task, int n0) {
        const Params& p = h.p;
        GatheredRows<BN> rows;
        rows.find(p, task, n0);
        const int stage = stage_of(ring.loaded);
        const u32 phase = phase_of(ring.loaded++) ^ 1;
        // Nobody waits for a buffer with a tile that others wait for.
        if (GATHERS && !__all_sync(~0u, mbarrier_test_wait(ring.empty[stage], phase))) hand_over_gathered<0>();
        mbarrier_wait(ring.empty[stage], phase);
        Elem* tile = ring.tiles[stage];
        rows.load<BOXES * BOX, GATHERS ? 8 : 1>(
            p, (const Elem*)operand.base + kv_head(p, task) * operand.stride[1], operand.stride, task.sequence.kv_len(p) - n0, operand.dim,
            [&](int r, int c) { return (Elem*)((u8*)(tile + c / BOX * K_BOX) + swizzle_128b(r, c % BOX)); }
        );
        if (GATHERS) {
            cp_async_commit();
            hand_over_gathered<1>();
            gathered = &ring.full[stage];
        } else {
            fence_proxy_async();
            mbarrier_arrive(ring.full[stage]);
        }
    }

    // One tile of K or V out of pages, by a warp: a lane has a box of each 64 columns. Keys behind the last come as zeros; those of a page
    // that does not exist are NaN.
    template <int BOXES>
    __device__ void load_from_pages(const TileRing<BOXES>& ring, const Operand& operand, const Task& task, int n0) {
        const Params& p = h.p;
        const int lane = threadIdx.x % 32, r = lane * h.box_rows, stage = stage_of(ring.loaded);
        const bool has_box = r < BN, has_keys = has_box && n0 + r < task.sequence.kv_len(p);
        KeyPlace at;
        at.block = 0, at.row = p.ragged.page_size;  // behind the rows of a page
        if (has_keys) at = KeyPlace(p, task.batch, n0 + r);
        mbarrier_wait(ring.empty[stage], phase_of(ring.loaded++) ^ 1);
        Elem* tile = ring.tiles[stage] + r * BOX;
        const bool is_bad = has_keys && !at.exists(p);
        const u32 bad = __ballot_sync(~0u, is_bad);
        if (is_bad) {
#pragma unroll 1
            for (int unit = 0; unit < BOXES * h.box_rows * 8; unit++) {
                const int box = unit / (h.box_rows * 8);
                ((uint4*)(tile + box * K_BOX))[unit - box * (h.box_rows * 8)] = {NAN_PAIR, NAN_PAIR, NAN_PAIR, NAN_PAIR};
            }
            fence_proxy_async();
        }
        __syncwarp();
        const u32 bytes = sizeof(ring.tiles[0]) - __popc(bad) * BOXES * h.box_rows * (BOX * 2);
        if (lane == 0) mbarrier_arrive_expect_tx(ring.full[stage], bytes);
        __syncwarp();
        if (!has_box || is_bad) return;
        const int head = tma_coordinate(operand.stride[1], kv_head(p, task)), page = tma_coordinate(operand.stride[0], at.block);
#pragma unroll
        for (int box = 0; box < BOXES; box++) tma_load(tile + box * K_BOX, operand.map, ring.full[stage], box * BOX, at.row, head, page);
    }
#endif

    // One tile of K or V.
    template <int BOXES>
    __device__ void load(const TileRing<BOXES>& ring, const Operand& operand, const Task& task, int n0) {
#if PAGED
        if constexpr (VECTOR) {
            load_from_pages(ring, operand, task, n0);
        } else {
            gather(ring, operand, task, n0);
        }
#else
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
#endif
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
#if PAGED
        if (GATHERS) hand_over_gathered<0>();
#endif
    }

    // Whether the mask hides all of the next tile.
    __device__ bool is_hidden() {
#if MASK == NO_MASK
        return false;
#else
        const int stage = mask_stage_of(m_seen);
        mbarrier_wait(sh.mask.full[stage], mask_phase_of(m_seen++));
        const bool hidden = kind_of(sh.mask.kinds[stage]) == HIDDEN;
        if (VECTOR && PAGED) __syncwarp();
        if (!(VECTOR && PAGED) || threadIdx.x % 32 == 0) mbarrier_arrive(sh.mask.empty[stage]);
        return hidden;
#endif
    }
};
