// What the blocks of hopper.cu work off, and the memory and barriers that they share.
//
//   item      groups of 64 rows of a task, with all keys that they see: a round of a block. As many as a block has, or fewer where a
//             launch would leave multiprocessors idle. Where positions bound the keys, late rows and early ones in pairs; the first
//             items may have a group less then, else the last one what is left
//   ring      STAGES tiles of K and of V; a barrier each for full and for empty, whose phase follows from a count of tiles
//
// Deliberately absent: who loads it (load.cuh, mask_ring.cuh), and what is computed with it (consumer.cuh).

#pragma once
#include "common/params.cuh"
#include "common/tile.cuh"
#include "hopper/mask_ring.cuh"

constexpr int WGS = BLOCK_M / 64, BM = BLOCK_M, BN = BLOCK_N, NT = BN / 8, VT = DV / 8;
constexpr int CONSUMERS = WGS * 128, THREADS = CONSUMERS + 128;
constexpr int K_BOXES = (D + BOX - 1) / BOX, V_BOXES = (DV + BOX - 1) / BOX;
constexpr int K_BOX = BN * BOX, Q_BOX = BM * BOX;  // elements
// Biases are in natural units, whatever else is (common/softmax.cuh).
constexpr bool NATURAL_UNITS = NATURAL || MASK == ADDITIVE_MASK;
constexpr int CAREFUL_BITS = 1024;  // items that a block can tell apart
// Whether sums are stored through buffers of values: where they have no buffer of their own, TMA fills a ring of two stages, and two
// groups take turns with its buffers (`release_values`). Not beside masks: up to 10 % slower (H200, 2026-11).
#define OUT_THROUGH_V (!STAGED && VECTOR && MASK == NO_MASK && BLOCK_M == 128 && STAGES == 2)

// The whole parameter: HopperParams of params.rs.
struct HopperParams {
    TensorMap q_map, k_map, v_map, out_map, mask_map;
    Params p;
    int tasks, paired;  // whether rows that see many keys and rows that see few are worked off in pairs
    int mask_access;    // MaskAccess of mask_ring.cuh
    int shift;          // by how many blocks work moves on from round to round
    int out_by_tma;     // whether TMA writes out, by out_map
    int item_groups;    // groups of 64 rows
    int short_items;    // of a task, at its beginning: they have one group less
    float scale;
    Divisor by_units;   // runs of rows, or pairs of them, of one task
    Divisor by_grid;    // blocks of the launch
#if RAGGED
    int least_keys, most_keys;  // this launch takes sequences of the first to below the second, or all others where that is less
    int box_rows;               // rows of K and V that TMA loads at once, where they lie in pages
#endif
};
static_assert(sizeof(HopperParams) == HOPPER_BYTES, "params.rs and hopper/work.cuh disagree on HopperParams");

struct Shared {
    Elem q[Q_STAGES][K_BOXES * Q_BOX];
    Elem k[STAGES][K_BOXES * K_BOX], v[STAGES][V_BOXES * K_BOX];
#if STAGED
    Elem out[WGS * 4][V_BOXES][16 * BOX];  // of a warp
#endif
#if MASK != NO_MASK
    MaskRing mask;
#endif
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 careful_rounds[CAREFUL_BITS / 32];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "the host and hopper/work.cuh disagree on shared memory");

// Barriers of the block by number, 0 being everyone's.
enum { TURN = 1, END = 5, CAREFUL_TILE = 6, OWN_QUERIES = 8, V_BUFFER = 11 };

// Tiles of keys that an item reads: `count` from key `first` on.
struct Tiles {
    int first, count;
    __device__ Tiles(const Seen& seen)
        : first(seen.lo / BN * BN), count(seen.hi > first ? (seen.hi - first + BN - 1) / BN : 0) {}
};

// Which rows of which task this block computes in a round; rows of one task run side by side and share its K and V in L2.
struct Item {
    int block, task;
#if VARLEN
    const VarlenEntry* of = nullptr;  // null: there is none
    // Units cost less from turn to turn: blocks take them forwards, then backwards, then as below from a place further on.
    __device__ Item(const HopperParams& h, int round) : block(-1) {
        const int turn = h.paired ? round / 2 : round;
        u32 x = blockIdx.x + turn / 2 * h.shift;
        x -= divide(x, h.by_grid) * gridDim.x;
        task = turn * gridDim.x + (turn % 2 == 0 ? x : gridDim.x - 1 - x);
        if (is_beyond_all(h)) return;
        of = &varlen_entry(h.p, task);
        const int unit = task - of->first, i = unit - divide(unit, of->by_units) * of->units, late = of->blocks - 1 - i;
        block = h.paired && round % 2 == 1 ? (i == late ? -1 : i) : late;
    }
    __device__ bool is_beyond_all(const HopperParams& h) const { return ::is_beyond(h.p, task); }
    __device__ bool is_beyond(const HopperParams&) const { return of == nullptr; }
    __device__ int short_items(const HopperParams&) const { return of->short_items; }
#else
    __device__ Item(const HopperParams& h, int round) {
        const int blocks = h.p.row_blocks, turn = h.paired ? round / 2 : round;
        // A block does not have the same run of rows in every round: some are short.
        const u32 x = blockIdx.x + turn * h.shift;
        const int unit = turn * gridDim.x + (x - divide(x, h.by_grid) * gridDim.x);
        if (h.paired) {
            // A late run of rows, which sees the most keys, then the early one that makes all pairs alike.
            const int pairs = (blocks + 1) / 2;
            task = divide(unit, h.by_units);
            const int i = unit - task * pairs;
            block = round % 2 == 0 ? blocks - 1 - i : i;
            if (round % 2 == 1 && i == blocks - 1 - i) block = -1;
        } else {
            task = divide(unit, h.by_units), block = blocks - 1 - (unit - task * blocks);
        }
#if RAGGED
        if (is_beyond(h)) return;
        const int keys = Task(h.p, task).sequence.kv_len(h.p);
        if ((u32)(keys - h.least_keys) >= (u32)(h.most_keys - h.least_keys)) block = -1;
#endif
    }
    __device__ bool is_beyond(const HopperParams& h) const { return task >= h.tasks; }
    __device__ int short_items(const HopperParams& h) const { return h.short_items; }
#endif
    // The middle one of an odd number has no partner, and a sequence of another launch is not worked off here.
    __device__ bool is_none() const { return block < 0; }
    __device__ int groups(const HopperParams& h) const { return h.item_groups - (block < short_items(h)); }
    __device__ int r0(const HopperParams& h) const { return (block * h.item_groups - min(block, short_items(h))) * 64; }
    __device__ Tiles tiles(const HopperParams& h) const {
        const Task of(h.p, task);
        return Seen(h.p, of, r0(h), min(r0(h) + groups(h) * 64, of.rows(h.p)));
    }
};

// A task and the first of a warp's rows in it; a group of warps begins at row r0.
struct Place {
    Task task;
    int r0;
    __device__ Place(const Params& p, int task, int r0) : task(p, task), r0(r0 + threadIdx.x % 128 / 32 * 16) {}
};

// Behind all rows, and no sum of it and a few is none of an int's.
constexpr int NO_ROW = 1 << 30;

// An item as a group of warps works it off.
struct Work {
    int round, task, r0;  // round: -1 if there is none; r0: the group's first row
    int n0, end;          // the first tile of keys and the last
    int all_lo, all_hi;   // keys that each of the rows sees
    int any;              // whether there is a tile that the mask does not hide: n0 is it
    __device__ bool has_rows(const Params& p) const { return r0 < (VARLEN ? NO_ROW : p.rows); }
    // What a loop hands on is not known to be the same of all lanes.
    __device__ Work as_uniform() const {
        return {uniform(round), uniform(task), uniform(r0), uniform(n0), uniform(end), uniform(all_lo), uniform(all_hi), uniform(any)};
    }
};

// Which buffer tile `n` of a block has, counted from its first, and the parity of its barriers' phase.
__device__ inline int stage_of(u32 n) { return n % STAGES; }
__device__ inline u32 phase_of(u32 n) { return n / STAGES & 1; }

__device__ inline bool is_careful_round(const Shared& sh, int round) {
    return sh.careful_rounds[round % CAREFUL_BITS / 32] >> (round % 32) & 1;
}
__device__ inline bool any_careful_round(const Shared& sh) {
    u32 any = 0;
    for (int at = 0; at < CAREFUL_BITS / 32; at++) any |= sh.careful_rounds[at];
    return any != 0;
}
