// What blocks of backward_hopper.cu work off, the memory that they share, and the warps that do not multiply.
//
//   item     BLOCK_N keys of a key head: those of a head one after another, the last keys first, in runs between which other heads come.
//            Taken from one count in device memory.
//   turns    dq of a tile of queries, a half of its columns: how many items have added to it, of those whose keys it sees, last keys first
//
// Whoever waits for a turn waits for an item that another block has taken before: that is at work on it or on one taken still earlier, and waits at most
// for earlier ones.

#pragma once
#include "backward/request.cuh"
#include "common/tile.cuh"
#include "hopper/tma.cuh"

constexpr int BM = BLOCK_M, BN = BLOCK_N, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int BOXES = (D + BOX - 1) / BOX, V_BOXES = (DV + BOX - 1) / BOX;
constexpr int K_BOX = BN * BOX, Q_BOX = BM * BOX;  // elements
// Floats of a group's part of a tile of dq.
constexpr int DQ_PART = BM * DQ_COLUMNS;  // [batch, heads, tiles of queries, 2, DQ_PART] in device memory
static_assert(BM == 64 && BN == 128, "two groups of 64 keys, and a box of queries");

// Byte for byte BackwardHopperParams of backward.rs.
struct BackwardHopperParams {
    TensorMap q_map, k_map, v_map, d_o_map;
    BackwardParams b;
    int items, key_tiles;
    int run, run_heads;  // tiles of a run, and heads that take a run each in turn
};
static_assert(sizeof(BackwardHopperParams) == BACKWARD_HOPPER_BYTES, "backward.rs and backward/hopper_load.cuh disagree");

// Who loads: a thread, or where TMA cannot two warps, element by element.
constexpr int LOADERS = VECTOR ? 1 : 64;
// Of warps 0 and 3 of the last four.
__device__ inline int loader() { return threadIdx.x % 32 + threadIdx.x % 128 / 96 * 32; }

// A place in a ring of buffers, and the parity of its barriers' phase there.
template <int STAGES>
struct Place {
    u32 stage = 0, phase = 0;
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// An item, and the tiles of queries that see its keys.
struct Item {
    int batch, kv_head, tile, first_tile, tiles;
    __device__ int first() const { return tile * BN; }
    // What shared memory hands on is not known to be the same of all lanes.
    __device__ Item as_uniform() const { return {uniform(batch), uniform(kv_head), uniform(tile), uniform(first_tile), uniform(tiles)}; }
};

struct Shared {
    __align__(1024) Elem k[BOXES * K_BOX];
    __align__(1024) Elem v[V_BOXES * K_BOX];
    __align__(1024) Elem ds[2][K_BOX];
    __align__(1024) float dq[2][DQ_PART];
    __align__(1024) Elem q[Q_STAGES][BOXES * Q_BOX];
    __align__(1024) Elem d_o[2][V_BOXES * Q_BOX];
    __align__(16) float lse[Q_STAGES][BM];
    __align__(16) float delta[Q_STAGES][BM];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], d_o_full[2], d_o_empty[2];
    u64 k_full, v_full, kv_empty, ds_full[2], ds_empty[2], dq_full[2], dq_empty[2], item_full[2], item_empty[2];
    Item items[2];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and backward/hopper_load.cuh disagree on shared memory");

// Barriers of the block by number, 0 being everyone's.
enum { DS = 1, OWN_DS = 2 };

__device__ inline void init_barriers(Shared& sh) {
    for (int n = 0; n < Q_STAGES; n++) mbarrier_init(sh.q_full[n], LOADERS), mbarrier_init(sh.q_empty[n], 8);
    mbarrier_init(sh.k_full, LOADERS), mbarrier_init(sh.v_full, LOADERS), mbarrier_init(sh.kv_empty, 8);
    for (int n = 0; n < 2; n++) {
        mbarrier_init(sh.d_o_full[n], LOADERS), mbarrier_init(sh.d_o_empty[n], 8);
        mbarrier_init(sh.ds_full[n], 8), mbarrier_init(sh.ds_empty[n], 8);
        mbarrier_init(sh.dq_full[n], 128), mbarrier_init(sh.dq_empty[n], 1);
        mbarrier_init(sh.item_full[n], 1), mbarrier_init(sh.item_empty[n], VECTOR ? 8 + 2 : 8 + 2 + 2);
    }
    fence_mbarrier_init();
}

// What one thread leaves for all; tile is -1 behind the last.
__device__ inline void find_item(const BackwardHopperParams& h, u32 item, volatile Item& to) {
    const Params& p = h.b.all;
    if (item >= (u32)h.items) {
        to.tile = -1;
        return;
    }
    const int set = item / (h.run_heads * h.key_tiles), in_set = item - set * h.run_heads * h.key_tiles;
    const int heads = min(h.run_heads, h.b.batch * h.b.kv_heads - set * h.run_heads), run = in_set / (heads * h.run);
    const int before = run * h.run, of = min(h.run, h.key_tiles - before);
    const int in_run = in_set - heads * before, head = in_run / of, at = in_run - head * of;
    const int tile = h.key_tiles - 1 - before - at, matrix = set * h.run_heads + head, batch = matrix / h.b.kv_heads;
    const Seeing seeing(p, Sequence(p, batch), tile * BN, min(tile * BN + BN, p.kv_len));
    const int first = seeing.lo / BM;
    to.batch = batch, to.kv_head = matrix - batch * h.b.kv_heads, to.tile = tile;
    to.first_tile = first, to.tiles = seeing.hi > seeing.lo ? (seeing.hi + BM - 1) / BM - first : 0;
}

// Behind all rows.
constexpr int NO_ROW = 1 << 30;

// Tiles of which no pair is left out by its position: those of queries from the first number up to the second.
__device__ inline int whole_from(const Params& p, const Item& item) {
    return item.first() + BN > p.kv_len ? NO_ROW : item.first() + BN - p.hi_shift;
}
__device__ inline int whole_to(const Params& p, const Item& item) { return min(p.q_len, item.first() - p.lo_shift + 1) - BM; }

// A tensor that tiles are loaded from.
struct Source {
    const TensorMap& map;
    const void* base;
    const i64 (&stride)[4];
    int rows, dim;
};

// A tile of rows r.. ; `more` bytes are waited for beside.
template <int BOXES_OF_TILE, int ROWS>
__device__ inline void load_tile(Elem* to, const Source& from, u64& full, u32 more, int batch, int head, int r) {
#if VECTOR
    mbarrier_arrive_expect_tx(full, BOXES_OF_TILE * ROWS * BOX * 2 + more);
    const int map_head = tma_coordinate(from.stride[1], head), map_batch = tma_coordinate(from.stride[0], batch);
#pragma unroll
    for (int box = 0; box < BOXES_OF_TILE; box++) tma_load(to + box * ROWS * BOX, from.map, full, box * BOX, r, map_head, map_batch);
#else
    constexpr int COLUMNS = BOXES_OF_TILE * BOX;
    const Elem* base = (const Elem*)from.base + row_offset(from.stride, batch, head, r);
#pragma unroll 2
    for (int at = loader(); at < ROWS * COLUMNS; at += LOADERS) {
        const int row = at / COLUMNS, c = at % COLUMNS;
        const Elem x = r + row < from.rows && c < from.dim ? base[row * from.stride[2] + c * from.stride[3]] : (Elem)0;
        *(Elem*)((u8*)(to + c / BOX * ROWS * BOX) + swizzle_128b(row, c % BOX)) = x;
    }
    fence_proxy_async();
    if (more == 0) mbarrier_arrive(full);
#endif
}
// What is known of the queries of a tile, behind its rows.
__device__ inline void load_states(float* to, const float* from, u64& full) {
#if VECTOR
    bulk_load(to, from, full, BM * 4);
#else
    for (int at = loader(); at < BM; at += LOADERS) to[at] = from[at];
#endif
}

// How many items add to tile i of queries before that of a tile of keys: those of later keys that it sees.
__device__ inline u32 turn_of(const Params& p, int tile, int i) {
    return (keys_hi(p, Sequence(p, 0), min(i * BM + BM, p.q_len) - 1) - 1) / BN - tile;
}

// One thread finds items; the loaders load what they need. What they know they ask of shared memory again: they have few registers.
__device__ inline void produce(const BackwardHopperParams& h, Shared& sh) {
    const BackwardParams& b = h.b;
    const Params& p = b.all;
    Place<Q_STAGES> q;
    Place<2> arriving;
    u32 kv_loaded = 0;
#pragma unroll 1
    for (u32 round = 0;; round++) {
        volatile Item& item = sh.items[round % 2];
        if (VECTOR || loader() == 0) {
            mbarrier_wait(sh.item_empty[round % 2], round / 2 & 1 ^ 1);
            find_item(h, take_number(b.zeroed), item);
            mbarrier_arrive(sh.item_full[round % 2]);
        }
        if (!VECTOR) __syncwarp(), mbarrier_wait(sh.item_full[round % 2], round / 2 & 1);
        if (item.tile < 0) return;
        if (item.tiles > 0) {
            mbarrier_wait(sh.kv_empty, kv_loaded++ & 1 ^ 1);
            load_tile<BOXES, BN>(sh.k, {h.k_map, p.k, p.k_stride, p.kv_len, p.head_dim}, sh.k_full, 0, item.batch, item.kv_head, item.tile * BN);
            load_tile<V_BOXES, BN>(sh.v, {h.v_map, p.v, p.v_stride, p.kv_len, p.head_dim_v}, sh.v_full, 0, item.batch, item.kv_head, item.tile * BN);
        }
#pragma unroll 1
        for (int head = 0; head < p.group; head++) {
#pragma unroll 1
            for (int n = 0; n < item.tiles; n++) {
                const int i = item.first_tile + n, of = item.kv_head * p.group + opaque(head);
                u64& full = sh.q_full[q.stage];
                mbarrier_wait(sh.q_empty[q.stage], q.phase ^ 1);
                load_tile<BOXES, BM>(sh.q[q.stage], {h.q_map, p.q, p.q_stride, p.q_len, p.head_dim}, full, 2 * BM * 4, item.batch, of, i * BM);
                const float* lse = b.log2_lse + ((i64)(item.batch * p.heads + of) * b.padded_rows + i * BM);
                load_states(sh.lse[q.stage], lse, full);
                load_states(sh.delta[q.stage], lse + (i64)b.batch * p.heads * b.padded_rows, full);
                if (!VECTOR) mbarrier_arrive(full);
                mbarrier_wait(sh.d_o_empty[arriving.stage], arriving.phase ^ 1);
                load_tile<V_BOXES, BM>(
                    sh.d_o[arriving.stage], {h.d_o_map, b.d_o, b.d_o_stride, p.q_len, p.head_dim_v}, sh.d_o_full[arriving.stage], 0, item.batch, of, i * BM
                );
                q.advance(), arriving.advance();
            }
        }
        if (!VECTOR) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(sh.item_empty[round % 2]);
        }
    }
}

// dq of a group's columns, as its threads hold it, to device memory: one thread.
__device__ inline void add_in_turn(const BackwardHopperParams& h, Shared& sh, int group) {
    const Params& p = h.b.all;
    u32 done = 0;
#pragma unroll 1
    for (u32 round = 0;; round++) {
        volatile Item& item = sh.items[round % 2];
        mbarrier_wait(sh.item_full[round % 2], round / 2 & 1);
        if (item.tile < 0) return;
#pragma unroll 1
        for (int head = 0; head < p.group; head++) {
#pragma unroll 1
            for (int n = 0; n < item.tiles; n++, done++) {
                const int i = item.first_tile + n, of = ((item.batch * p.heads + item.kv_head * p.group + opaque(head)) * tiles_of_queries(h.b) + i) * 2 + group;
                const u32 turn = turn_of(p, item.tile, i);
                u32* turns = turns_of(h.b) + of;
                mbarrier_wait(sh.dq_full[group], done & 1);
                while (load_acquire(turns) != turn) {
                }
                fence_proxy_async_global();
                if (turn == 0) bulk_store(h.b.dq_sums + (i64)of * DQ_PART, sh.dq[group], DQ_PART * 4);
                else bulk_add(h.b.dq_sums + (i64)of * DQ_PART, sh.dq[group], DQ_PART * 4);
                tma_store_commit();
                tma_store_wait();
                mbarrier_arrive(sh.dq_empty[group]);
                bulk_wait();
                fence_proxy_async_global();
                store_release(turns, turn + 1);
            }
        }
        mbarrier_arrive(sh.item_empty[round % 2]);
    }
}
