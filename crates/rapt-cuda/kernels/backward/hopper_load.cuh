// The memory that a block of backward_hopper.cu or backward_hopper_wide.cu shares, and its warps that do not multiply: those that load what items need,
// and those that add parts of dq in their turn.
//
// WIDE: heads of more than 128 columns. 64 keys in place of 128; each of both groups has half of the columns of sums, two boxes or one, so that boxes are
// even in number; a group's part of dq comes in pieces of 64 columns.

#pragma once
#include "backward/hopper_items.cuh"
#include "backward/request.cuh"
#include "common/tile.cuh"
#include "hopper/tma.cuh"

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
#ifndef WIDE
#define WIDE 0
#endif
constexpr int boxes_of(int dim) { return WIDE ? (dim + 2 * BOX - 1) / (2 * BOX) * 2 : (dim + BOX - 1) / BOX; }
constexpr int BOXES = boxes_of(D), V_BOXES = boxes_of(DV);
constexpr int K_BOX = BN * BOX, Q_BOX = BM * BOX;  // elements
// Tiles of 8 columns of a group's part of dq of a tile, and floats of it: queries are its rows, or columns of dq are (DQ_TURNED).
constexpr int DQ_TILES = DQ_TURNED ? BM / 8 : DQ_COLUMNS / 8;
constexpr int DQ_PART = 64 * 8 * DQ_TILES;  // [batch, heads, tiles of queries, 2, DQ_PART] in device memory, but for columns that there are not
constexpr int DQ_PIECES = WIDE ? DQ_COLUMNS / BOX : 1, DQ_PIECE = DQ_PART / DQ_PIECES;
// Tiles of weights: ds twice, or p twice and ds.
constexpr int WEIGHTS = WIDE ? 3 : 2;
static_assert(DQ_TURNED ? BM % 16 == 0 && BOXES == 2 : BM == 64 || BM == 128 && BOXES == 1 && V_BOXES == 1, "a box of queries, or two of few columns, or dq turned");
static_assert(BN == (WIDE ? 64 : 128), "two groups of 64 keys, or one for both");

// Byte for byte BackwardHopperParams of backward.rs.
struct BackwardHopperParams {
    TensorMap q_map, k_map, v_map, d_o_map, mask_map;
    BackwardParams b;
    Items items;
    int mask_unit;  // of MASK_BY_WARP: bytes of a mask's row that are copied at a time, 8 or 4, the latter wherever rows begin; or 1 for a key
};
static_assert(sizeof(BackwardHopperParams) == BACKWARD_HOPPER_BYTES, "backward.rs and backward/hopper_load.cuh disagree");

// Who loads: a thread, or where TMA cannot two warps, element by element; of a mask alone that TMA cannot load a warp of its own.
constexpr int LOADERS = VECTOR ? 1 : 64, MASK_LOADERS = MASK_BY_WARP ? 32 : LOADERS;
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

// What shared memory hands on is not known to be the same of all lanes.
__device__ inline Item as_uniform(const volatile Item& of) {
    Item item;
    item.batch = VARLEN ? 0 : uniform(of.batch), item.kv_head = uniform(of.kv_head);
    item.tile = uniform(of.tile), item.first_tile = uniform(of.first_tile), item.tiles = uniform(of.tiles);
#if VARLEN
    item.number = uniform(of.number), item.first_key = uniform(of.first_key), item.of.kv_len = uniform(of.of.kv_len);
    item.step = uniform(of.step);
#endif
    return item;
}
// Of what shared memory hands on, read where it is needed.
__device__ inline Extent extent_of(const Items& items, const volatile Item& item) {
#if VARLEN
    return {item.of.q_len, item.of.kv_len, item.of.lo_shift, item.of.hi_shift};
#else
    return items.all;
#endif
}
__device__ inline int kv_len_of(const Items& items, const Item& item) {
#if VARLEN
    return item.of.kv_len;
#else
    return items.all.kv_len;
#endif
}
// Where its queries and keys begin in their tensors, its tiles of queries among those of all, and in which order they are taken.
#if VARLEN
__device__ inline int first_query_of(const volatile Item& item) { return item.first_query; }
__device__ inline int first_key_of(const volatile Item& item) { return item.first_key; }
__device__ inline int query_tile_of(const volatile Item& item) { return item.query_tile; }
__device__ inline int sums_tile_of(const volatile Item& item) { return item.sums_tile; }
__device__ inline int step_of(const Items&, const volatile Item& item) { return item.step; }
#else
__device__ inline int first_query_of(const volatile Item&) { return 0; }
__device__ inline int first_key_of(const volatile Item&) { return 0; }
__device__ inline int query_tile_of(const volatile Item&) { return 0; }
__device__ inline int sums_tile_of(const volatile Item&) { return 0; }
__device__ inline int step_of(const Items& items, const volatile Item&) { return items.step; }
#endif
__device__ inline int entry_of(const Item& item) {
#if VARLEN
    return item.number;
#else
    return item.batch;
#endif
}

struct Shared {
    __align__(1024) Elem k[BOXES * K_BOX];
    __align__(1024) Elem v[V_BOXES * K_BOX];
    __align__(1024) Elem ds[WEIGHTS][BM * BN];
    __align__(1024) float dq[2][DQ_STAGES][DQ_PIECE];
    __align__(1024) Elem q[Q_STAGES][BOXES * Q_BOX];
    __align__(1024) Elem d_o[D_O_STAGES][V_BOXES * Q_BOX];
#if MASK != NO_MASK
    __align__(1024) u8 mask[MASK_BOXES][BM * 128];  // a tile as backward/hopper_mask.cuh reads it
#endif
    __align__(16) float lse[Q_STAGES][BM];
    __align__(16) float delta[Q_STAGES][BM];
#if MASK != NO_MASK
    u64 mask_full, mask_empty;
#endif
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], d_o_full[D_O_STAGES], d_o_empty[D_O_STAGES];
    u64 k_full, v_full, kv_empty, ds_full[2], ds_empty[2], dq_full[2][DQ_STAGES], dq_empty[2][DQ_STAGES], item_full[2], item_empty[2];
#if VARLEN
    u64 landed;
#endif
    Item items[2];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and backward/hopper_load.cuh disagree on shared memory");

// Barriers of the block by number, 0 being everyone's.
enum { DS = 1 };

__device__ inline void init_barriers(Shared& sh) {
    for (int n = 0; n < Q_STAGES; n++) mbarrier_init(sh.q_full[n], LOADERS), mbarrier_init(sh.q_empty[n], 8);
    mbarrier_init(sh.k_full, LOADERS), mbarrier_init(sh.v_full, LOADERS), mbarrier_init(sh.kv_empty, 8);
    for (int n = 0; n < D_O_STAGES; n++) mbarrier_init(sh.d_o_full[n], LOADERS), mbarrier_init(sh.d_o_empty[n], 8);
    for (int n = 0; n < 2; n++) {
        mbarrier_init(sh.ds_full[n], 8), mbarrier_init(sh.ds_empty[n], 8);
        for (int stage = 0; stage < DQ_STAGES; stage++) mbarrier_init(sh.dq_full[n][stage], 128), mbarrier_init(sh.dq_empty[n][stage], 1);
        mbarrier_init(sh.item_full[n], 1), mbarrier_init(sh.item_empty[n], VECTOR ? 8 + 2 + MASK_BY_WARP : 8 + 2 + 2);
    }
#if MASK != NO_MASK
    mbarrier_init(sh.mask_full, MASK_LOADERS), mbarrier_init(sh.mask_empty, 8);
#endif
#if VARLEN
    mbarrier_init(sh.landed, 1);
#endif
    fence_mbarrier_init();
}

// What one thread leaves for all; tile is -1 behind the last.
__device__ inline void find_item(const BackwardHopperParams& h, u32 number, volatile Item& to) {
    if (number >= (u32)h.items.count) {
        to.tile = -1;
        return;
    }
    const Item item = item_of(h.items, (int)number, h.b.key_tiles);
    to.batch = item.batch, to.kv_head = item.kv_head, to.tile = item.tile, to.first_tile = item.first_tile, to.tiles = item.tiles;
#if VARLEN
    to.number = item.number, to.first_query = item.first_query, to.first_key = item.first_key;
    to.of.q_len = item.of.q_len, to.of.kv_len = item.of.kv_len, to.of.lo_shift = item.of.lo_shift, to.of.hi_shift = item.of.hi_shift;
    to.query_tile = item.query_tile, to.sums_tile = item.sums_tile, to.step = item.step;
#endif
}

// Rows of a tensor from `row` on, up to row `end`.
struct Source {
    const TensorMap& map;
    const void* base;
    const i64 (&stride)[4];
    int batch, head, row, end, dim;
    const void* zeros;
};

#if VECTOR
template <int BOXES_OF_TILE, int ROWS>
__device__ inline void load_boxes(Elem* to, const Source& from, u64& full, u32 more) {
    mbarrier_arrive_expect_tx(full, BOXES_OF_TILE * ROWS * BOX * 2 + more);
    const int head = tma_coordinate(from.stride[1], from.head), batch = tma_coordinate(from.stride[0], from.batch);
#pragma unroll
    for (int box = 0; box < BOXES_OF_TILE; box++) tma_load(to + box * ROWS * BOX, from.map, full, box * BOX, from.row, head, batch);
}
#endif

// A tile of them; `more` bytes are waited for beside.
template <int BOXES_OF_TILE, int ROWS>
__device__ inline void load_tile(Shared& sh, u32& landings, Elem* to, const Source& from, u64& full, u32 more) {
#if VECTOR && VARLEN
    const int rows = from.end - from.row;
    load_boxes<BOXES_OF_TILE, ROWS>(to, from, rows < ROWS ? sh.landed : full, rows < ROWS ? 0 : more);
    if (rows >= ROWS) return;
    // Zeros where the next sequence lies: its rows would reach sums, as NaN times a weight of 0 is NaN.
    mbarrier_wait(sh.landed, landings++ & 1);
    const u32 bytes = (ROWS - rows) * BOX * 2;
    mbarrier_arrive_expect_tx(full, BOXES_OF_TILE * bytes + more);
#pragma unroll
    for (int box = 0; box < BOXES_OF_TILE; box++) bulk_load(to + box * ROWS * BOX + rows * BOX, from.zeros, full, bytes);
#elif VECTOR
    load_boxes<BOXES_OF_TILE, ROWS>(to, from, full, more);
#else
    const int rows = from.end - from.row;
#pragma unroll 1
    for (int c = loader(); c < BOXES_OF_TILE * BOX; c += LOADERS) {
        const Elem* x = (const Elem*)from.base + row_offset(from.stride, from.batch, from.head, from.row) + c * from.stride[3];
        u8* const box = (u8*)(to + c / BOX * ROWS * BOX);
#pragma unroll 4
        for (int row = 0; row < ROWS; row++, x += from.stride[2]) {
            *(Elem*)(box + swizzle_128b(row, c % BOX)) = row < rows && c < from.dim ? *x : (Elem)0;
        }
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

#if MASK != NO_MASK
// A key of a mask as it is stored.
template <int BYTES>
struct StoredKey {
    using Type = u8;
};
template <>
struct StoredKey<2> {
    using Type = u16;
};
constexpr int MASK_KEY_BYTES = MASK == BOOL_MASK ? 1 : 2, MASK_BOX = 128 / MASK_KEY_BYTES;  // keys of a box
// What the mask says of queries i0.. and keys j0..
__device__ inline void load_mask(const BackwardHopperParams& h, Shared& sh, int batch, int head, int i0, int j0) {
    const Params& p = h.b.all;
    const int rows = is_one_row(p) ? 1 : BM;
#if VECTOR
    mbarrier_arrive_expect_tx(sh.mask_full, MASK_BOXES * rows * 128);
    const int row = tma_coordinate(p.mask_stride[2], i0), map_head = tma_coordinate(p.mask_stride[1], head), map_batch = tma_coordinate(p.mask_stride[0], batch);
#pragma unroll
    for (int box = 0; box < MASK_BOXES; box++) tma_load(sh.mask[box], h.mask_map, sh.mask_full, j0 + box * MASK_BOX, row, map_head, map_batch);
#else
#pragma unroll 1
    for (int c = loader(); c < BN; c += LOADERS) {
        i64 at = mask_key(p, row_offset(p.mask_stride, batch, head, i0), j0 + c);
        u8* const box = sh.mask[c / MASK_BOX];
        const int byte = c % MASK_BOX * MASK_KEY_BYTES, inside = j0 + c < p.kv_len ? min(rows, p.q_len - i0) : 0;
#pragma unroll 2
        for (int row = 0; row < rows; row++, at += p.mask_stride[2]) {
            u8* to = box + swizzle_128b(row, byte / 2) + byte % 2;
            if (MASK_KEY_BYTES == 1) *to = row < inside ? ((const u8*)p.mask)[at] : 0;
            else *(u16*)to = row < inside ? ((const u16*)p.mask)[at] : 0;
        }
    }
    mbarrier_arrive(sh.mask_full);
#endif
}

#if MASK_BY_WARP
// The same by a warp: its part of a tile.
struct MaskRows {
    const u8* at;                // the first key of the first row
    i64 step;                    // to the next row
    int rows, inside_rows;       // of a box, and those that there are
    int bytes;                   // of a row's keys that there are
    __device__ MaskRows(const Params& p, int batch, int head, int i0, int j0)
        : at((const u8*)p.mask + (row_offset(p.mask_stride, batch, head, i0) + j0 * p.mask_stride[3]) * MASK_KEY_BYTES),
          step(MASK_KEY_BYTES * p.mask_stride[2]),
          rows(is_one_row(p) ? 1 : BM),
          inside_rows(min(rows, p.q_len - i0)),
          bytes(clamp((p.kv_len - j0) * MASK_KEY_BYTES, 0, BN * MASK_KEY_BYTES)) {}
    // How many bytes of row r are before its first whole word.
    __device__ u32 before_words(int r) const { return 0u - ((u32)(u64)at + (u32)r * (u32)step) & 3; }
};
// Where byte `byte` of row r of a box lies, behind the first box.
__device__ inline int mask_place(int r, int byte) { return byte / 128 * (BM * 128) + r * 128 + (byte % 128 ^ r % 8 * 16); }
// UNIT bytes of a row by a lane, EACH times: it is `across` of a row's lanes, and `down` of the DOWN rows that a warp has at once.
template <int UNIT>
struct MaskLane {
    static constexpr int ROW_BYTES = BN * MASK_KEY_BYTES, ACROSS = ROW_BYTES / UNIT < 32 ? ROW_BYTES / UNIT : 32, DOWN = 32 / ACROSS;
    static constexpr int EACH = ROW_BYTES / (ACROSS * UNIT), ROWS = 8 * DOWN;  // rows of as many lines as a swizzle tells apart
    const int across, down;
    __device__ MaskLane() : across(opaque((int)threadIdx.x) % ACROSS), down(opaque((int)threadIdx.x) % 32 / ACROSS) {}
    // Of what lies at `first` of the lane's first of ROWS rows, where it lies of the k-th that it has of them.
    static __device__ int of_row(int first, int k) { return (first ^ k * DOWN % 8 * 16) + k * (DOWN * 128); }
};

// Zeros in rows that there are not.
__device__ inline void clear_mask(Shared& sh, const MaskRows& of) {
    for (int box = 0; box < MASK_BOXES; box++)
#pragma unroll 1
        for (int at = of.inside_rows * 8 + opaque((int)threadIdx.x) % 32; at < of.rows * 8; at += 32) *(uint4*)(sh.mask[box] + at * 16) = uint4{0, 0, 0, 0};
}
// Where keys lie side by side: `UNIT` bytes at a time. SHIFTED: rows begin anywhere, and words from the first whole one of a row on lie where the row's
// words belong, but for those that copy_ends copies.
template <int UNIT, bool SHIFTED>
__device__ inline void copy_mask(Shared& sh, const MaskRows& of) {
    using Lane = MaskLane<UNIT>;
    const Lane lane;
#pragma unroll 1
    for (int byte = lane.across * UNIT; byte < Lane::ROW_BYTES; byte += Lane::ACROSS * UNIT) {
        const int left = of.bytes - byte, bytes = clamp(SHIFTED && left < UNIT + 3 ? 0 : left, 0, UNIT);
        if (SHIFTED && (byte == Lane::ROW_BYTES - UNIT || (left > 0 && left < UNIT + 3))) continue;
        int to = mask_place(lane.down, byte);
        // Of words their last byte, were the row's first at a multiple of 4.
        u64 from = bytes == 0 ? (u64)of.at : (u64)(of.at + lane.down * of.step + byte) + (SHIFTED ? 3 : 0);
        const i64 step = bytes == 0 ? 0 : Lane::DOWN * of.step;
        const auto copy = [&](int k) {
            cp_async_part<UNIT>(shared_address(sh.mask[0] + Lane::of_row(to, k)), (const void*)(SHIFTED ? from & ~(u64)3 : from), bytes);
            from += step;
        };
        int r = lane.down;
#pragma unroll 1
        for (; r + 7 * Lane::DOWN < of.inside_rows; r += Lane::ROWS, to += Lane::ROWS * 128)
#pragma unroll
            for (int k = 0; k < 8; k++) copy(k);
#pragma unroll 1
        for (int k = 0; r + k * Lane::DOWN < of.inside_rows; k++) copy(k);
    }
}
// A word of row r: its KEYS keys, of which the first `keys` lie from byte `at` on, and the others are the row's first.
__device__ inline void copy_word(Shared& sh, const MaskRows& of, int r, int word, int at, int keys) {
    using Stored = StoredKey<MASK_KEY_BYTES>::Type;
    constexpr int KEYS = 4 / MASK_KEY_BYTES;
    const u8* from = of.at + r * of.step;
    Stored stored[KEYS];
#pragma unroll
    for (int n = 0; n < KEYS; n++) {
        const int byte = n < keys ? at + n * MASK_KEY_BYTES : (n - keys) * MASK_KEY_BYTES;
        stored[n] = byte < of.bytes ? *(const Stored*)(from + byte) : (Stored)0;
    }
    Stored* to = (Stored*)(sh.mask[0] + mask_place(r, word * 4));
#pragma unroll
    for (int n = 0; n < KEYS; n++) to[n] = stored[n];
}
// Words that are no whole ones of a row: the last, of which the row's last keys are the first and those before its first whole word the others; and two
// with the last keys that there are.
__device__ inline void copy_ends(Shared& sh, const MaskRows& of) {
    constexpr int LAST = MaskLane<4>::ROW_BYTES / 4 - 1, KEYS = 4 / MASK_KEY_BYTES;
    // Of that before the last with keys all may be there for whatever is before whole words.
    const int end = (of.bytes - 1) / 4, first = max(of.bytes - (end - 1) * 4 < 7 ? end - 1 : end, 0);
#pragma unroll 1
    for (int r = opaque((int)threadIdx.x) % 32; r < of.inside_rows; r += 32) {
        const int before = (int)of.before_words(r);
        copy_word(sh, of, r, LAST, LAST * 4 + before, KEYS - before / MASK_KEY_BYTES);
#pragma unroll 1
        for (int word = first; word <= end && word < LAST; word++) copy_word(sh, of, r, word, word * 4 + before, KEYS);
    }
}
// What lies as words of rows that begin anywhere, to where it belongs.
__device__ inline void shift_mask(Shared& sh, const MaskRows& of) {
    using Lane = MaskLane<4>;
    const Lane lane;
    constexpr int AT_ONCE = 2;  // rows, whose words are under way together
    const auto at = [&](int first, int k, int n) { return (u32*)(sh.mask[0] + Lane::of_row(first, k) + n * (BM * 128)); };
    int to = mask_place(lane.down, lane.across * 4);
    u32 bits = (u32)(u64)(of.at + lane.down * of.step) * (0u - 8);  // before whole words, to a multiple of 32
#pragma unroll 1
    for (int r = 0; r < of.inside_rows; r += Lane::ROWS, to += Lane::ROWS * 128) {
        // Addresses are computed where they are used: eight of them would take as many registers.
        const int here = opaque(to);
#pragma unroll
        for (int k = 0; k < 8; k += AT_ONCE) {
            u32 words[AT_ONCE][Lane::EACH], before[AT_ONCE][Lane::EACH];
#pragma unroll
            for (int m = 0; m < AT_ONCE * Lane::EACH; m++) words[m / Lane::EACH][m % Lane::EACH] = *at(here, k + m / Lane::EACH, m % Lane::EACH);
#pragma unroll
            for (int m = 0; m < AT_ONCE * Lane::EACH; m++)
                before[m / Lane::EACH][m % Lane::EACH] = __shfl_sync(~0u, words[m / Lane::EACH][m % Lane::EACH], lane.across + Lane::ACROSS - 1 & Lane::ACROSS - 1, Lane::ACROSS);
#pragma unroll
            for (int row = 0; row < AT_ONCE; row++, bits -= (u32)of.step * (8 * Lane::DOWN))
#pragma unroll
                for (int n = 0; n < Lane::EACH; n++) {
                    const u32 of_box_before = before[row][(n + Lane::EACH - 1) % Lane::EACH];
                    *at(here, k + row, n) = __funnelshift_l(lane.across == 0 ? of_box_before : before[row][n], words[row][n], bits);
                }
        }
    }
}
// Where keys do not lie side by side: each by itself, through registers.
__device__ inline void gather_mask(const Params& p, Shared& sh, const MaskRows& of) {
    using Stored = StoredKey<MASK_KEY_BYTES>::Type;
    constexpr int AT_ONCE = 4;
    const i64 key_step = MASK_KEY_BYTES * p.mask_stride[3];
#pragma unroll 1
    for (int o = opaque((int)threadIdx.x) % 32 * MASK_KEY_BYTES; o < BN * MASK_KEY_BYTES; o += 32 * MASK_KEY_BYTES) {
        const u8* from = of.at + o / MASK_KEY_BYTES * key_step;
#pragma unroll 1
        for (int r = 0; r < of.inside_rows; r += AT_ONCE) {
            Stored stored[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++, from += of.step) stored[n] = r + n < of.inside_rows && o < of.bytes ? *(const Stored*)from : (Stored)0;
#pragma unroll
            for (int n = 0; n < AT_ONCE; n++)
                if (r + n < of.inside_rows) *(Stored*)(sh.mask[0] + mask_place(r + n, o)) = stored[n];
        }
    }
}
__device__ inline void load_mask_by_warp(const BackwardHopperParams& h, Shared& sh, int batch, int head, int i0, int j0) {
    const Params& p = h.b.all;
    const MaskRows of(p, batch, head, i0, j0);
    clear_mask(sh, of);
    const bool is_shifted = h.mask_unit == 4 && (of.before_words(0) | (u32)of.step % 4) != 0;
    if (h.mask_unit == 8) {
        copy_mask<8, false>(sh, of);
    } else if (is_shifted) {
        copy_mask<4, true>(sh, of);
    } else if (h.mask_unit == 4) {
        copy_mask<4, false>(sh, of);
    } else {
        gather_mask(p, sh, of);
    }
    // What was stored is there for those who wait only when the thread itself arrives.
    if (h.mask_unit >= 4 && !is_shifted && of.inside_rows == of.rows) return mbarrier_arrive_behind_copies(sh.mask_full);
    cp_async_commit();
    if (is_shifted) copy_ends(sh, of);
    cp_async_wait<0>();
    __syncwarp();
    if (is_shifted) shift_mask(sh, of);
    mbarrier_arrive(sh.mask_full);
}
#endif
#endif

// One thread finds items; the loaders load what they need. What they know they ask of shared memory again: they have few registers.
__device__ inline void produce(const BackwardHopperParams& h, Shared& sh) {
    const BackwardParams& b = h.b;
    const Params& p = b.all;
    Place<Q_STAGES> q;
    Place<D_O_STAGES> arriving;
    u32 kv_phase = 0, landings = 0;
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
            const int batch = item.batch, head = item.kv_head;
            const int first = item.tile * BN + first_key_of(item), end = first_key_of(item) + extent_of(h.items, item).kv_len;
            mbarrier_wait(sh.kv_empty, kv_phase ^ 1);
            load_tile<BOXES, BN>(sh, landings, sh.k, {h.k_map, p.k, p.k_stride, batch, head, first, end, p.head_dim, zeros_of(b)}, sh.k_full, 0);
            load_tile<V_BOXES, BN>(sh, landings, sh.v, {h.v_map, p.v, p.v_stride, batch, head, first, end, p.head_dim_v, zeros_of(b)}, sh.v_full, 0);
            kv_phase ^= 1;
        }
#pragma unroll 1
        for (int head = 0; head < p.group; head++) {
#pragma unroll 1
            for (int n = 0; n < item.tiles; n++) {
                const int i = item.first_tile + n * step_of(h.items, item), of = item.kv_head * p.group + opaque(head);
                const int batch = item.batch, row = first_query_of(item) + i * BM, end = first_query_of(item) + extent_of(h.items, item).q_len;
                u64& full = sh.q_full[q.stage];
                mbarrier_wait(sh.q_empty[q.stage], q.phase ^ 1);
                const Source of_q = {h.q_map, p.q, p.q_stride, batch, of, row, end, p.head_dim, zeros_of(b)};
                load_tile<BOXES, BM>(sh, landings, sh.q[q.stage], of_q, full, 2 * BM * 4);
                const float* lse = b.log2_lse + ((i64)(batch * p.heads + of) * b.padded_rows + (query_tile_of(item) + i) * BM);
                load_states(sh.lse[q.stage], lse, full);
                load_states(sh.delta[q.stage], lse + (i64)b.batch * p.heads * b.padded_rows, full);
                if (!VECTOR) mbarrier_arrive(full);
                mbarrier_wait(sh.d_o_empty[arriving.stage], arriving.phase ^ 1);
                const Source of_d_o = {h.d_o_map, b.d_o, b.d_o_stride, batch, of, row, end, p.head_dim_v, zeros_of(b)};
                load_tile<V_BOXES, BM>(sh, landings, sh.d_o[arriving.stage], of_d_o, sh.d_o_full[arriving.stage], 0);
#if MASK != NO_MASK && !MASK_BY_WARP
                // As many tiles as of d_o, whose place says whether they are even.
                mbarrier_wait(sh.mask_empty, (D_O_STAGES == 2 ? arriving.stage : arriving.phase) ^ 1);
                load_mask(h, sh, batch, of, i * BM, item.tile * BN);
#endif
                q.advance(), arriving.advance();
            }
        }
        if (!VECTOR) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(sh.item_empty[round % 2]);
        }
    }
}

#if MASK_BY_WARP
// A warp loads the mask that TMA does not.
__device__ inline void produce_mask(const BackwardHopperParams& h, Shared& sh) {
    const Params& p = h.b.all;
    u32 done = 0;  // tiles
#pragma unroll 1
    for (u32 round = 0;; round++) {
        volatile Item& item = sh.items[round % 2];
        mbarrier_wait(sh.item_full[round % 2], round / 2 & 1);
        if (item.tile < 0) return;
#pragma unroll 1
        for (int head = 0; head < p.group; head++) {
#pragma unroll 1
            for (int n = 0; n < item.tiles; n++, done++) {
                const int i0 = (item.first_tile + n * step_of(h.items, item)) * BM, j0 = item.tile * BN, of = item.kv_head * p.group + opaque(head);
                mbarrier_wait(sh.mask_empty, done & 1 ^ 1);
                load_mask_by_warp(h, sh, item.batch, of, i0, j0);
            }
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(sh.item_empty[round % 2]);
    }
}
#endif

// Threads of a group that have columns of dq which there are, where these are rows.
__device__ constexpr int threads_of(int group) { return DQ_TURNED && group == 1 ? (D - 64) * 2 : 128; }

// A group's part of dq of tile i of a matrix of queries in device memory, and how much of it there is: eights of queries by `threads_of`, the first group's
// before the second's; or warps of 16 rows, of half of the columns all of the tile's, of 128 queries half of them.
struct PartOfDq {
    float* at;
#if DQ_TURNED
    u32 bytes;
    __device__ PartOfDq(const BackwardHopperParams& h, const volatile Item& item, int matrix, int i, int group) {
        const int rows = VARLEN ? min(BM, (extent_of(h.items, item).q_len - i * BM + 15) / 16 * 16) : BM;
        at = h.b.dq_sums + ((i64)matrix * h.b.sum_rows + sums_tile_of(item) * 16 + i * BM) * D + group * (rows * 64);
        bytes = rows / 8 * threads_of(group) * 16;
    }
    // A piece to device memory, or added to what is there.
    __device__ void add(int, const float* piece, bool is_first) const {
        if (is_first) bulk_store(at, piece, bytes);
        else bulk_add(at, piece, bytes);
    }
#else
    int warps;
    __device__ PartOfDq(const BackwardHopperParams& h, const volatile Item& item, int matrix, int i, int group) {
#if VARLEN
        const int left = item.of.q_len - i * BM - (BM > 64 ? group * 64 : 0);
        warps = left >= 64 ? 4 : left <= 0 ? 0 : (left + 15) / 16;
        at = h.b.dq_sums + ((i64)matrix * h.b.sum_rows + item.sums_tile * 16 + i * BM) * (2 * DQ_PART / BM) +
             group * (BM > 64 ? DQ_PART : warps * (DQ_PART / 4));
#else
        warps = 4;
        at = h.b.dq_sums + (i64)((matrix * (h.b.padded_rows / BM) + i) * 2 + group) * DQ_PART;
#endif
    }
    __device__ void add(int number, const float* piece, bool is_first) const {
        float* to = at + number * warps * (DQ_PIECE / 4);
        if (warps == 4) {
            if (is_first) bulk_store(to, piece, DQ_PIECE * 4);
            else bulk_add(to, piece, DQ_PIECE * 4);
            return;
        }
#pragma unroll 1
        for (int from = 0; from < DQ_PIECE && warps > 0; from += 512, to += warps * 128) {
            if (is_first) bulk_store(to, piece + from, warps * 512);
            else bulk_add(to, piece + from, warps * 512);
        }
    }
#endif
};

// A group's part of dq, as its threads hold it, to device memory: one thread.
__device__ inline void add_in_turn(const BackwardHopperParams& h, Shared& sh, int group) {
    const Params& p = h.b.all;
    Place<DQ_STAGES> dq;
#pragma unroll 1
    for (u32 round = 0;; round++) {
        volatile Item& item = sh.items[round % 2];
        mbarrier_wait(sh.item_full[round % 2], round / 2 & 1);
        if (item.tile < 0) return;
#pragma unroll 1
        for (int head = 0; head < p.group; head++) {
#pragma unroll 1
            for (int n = 0; n < item.tiles; n++) {
                const int i = item.first_tile + n * step_of(h.items, item), matrix = item.batch * p.heads + item.kv_head * p.group + opaque(head);
                const u32 turn = turn_of(extent_of(h.items, item), step_of(h.items, item), item.tile, i);
                u32* turns = turns_of(h.b) + (matrix * (h.b.padded_rows / BM) + query_tile_of(item) + i) * 2 + group;
                const PartOfDq part(h, item, matrix, i, group);
#pragma unroll 1
                for (int piece = 0; piece < DQ_PIECES; piece++, dq.advance()) {
                    mbarrier_wait(sh.dq_full[group][dq.stage], dq.phase);
                    while (piece == 0 && load_acquire(turns) != turn) {
                    }
                    if (piece == 0) fence_proxy_async_global();
                    part.add(piece, sh.dq[group][dq.stage], turn == 0);
                    tma_store_commit();
                    tma_store_wait();
                    mbarrier_arrive(sh.dq_empty[group][dq.stage]);
                }
                bulk_wait();
                fence_proxy_async_global();
                store_release(turns, turn + 1);
            }
        }
        mbarrier_arrive(sh.item_empty[round % 2]);
    }
}

// The last four warps.
__device__ inline void work_beside(const BackwardHopperParams& h, Shared& sh) {
    const int warp = uniform(threadIdx.x % 128 / 32);
    if (warp == 0 || warp == 3) {
        if (VECTOR ? threadIdx.x % 128 == 0 : true) produce(h, sh);
#if MASK_BY_WARP
        else if (warp == 3) produce_mask(h, sh);
#endif
    } else if (threadIdx.x % 32 == 0) {
        add_in_turn(h, sh, warp - 1);
    }
}
