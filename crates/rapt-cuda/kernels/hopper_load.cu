// What the blocks of hopper.cu work off, and the threads that load it: Q, K and V, by the copy engine where it can read them, else
// element by element into the same tiles.
//
//   item      groups of 64 rows of a task, with all keys that they see: a round of a block. As many as a block has, or fewer where a
//             launch would leave multiprocessors idle. Where positions bound the keys, late rows and early ones in pairs; the first
//             items may have a group less then, else the last one what is left
//   ring      STAGES tiles of K and of V; a barrier each for full and for empty, whose phase follows from a count of tiles
//
// Deliberately absent: what is done with it (hopper.cu), and the mask (masks.cu).

constexpr int WGS = BLOCK_M / 64, BM = BLOCK_M, BN = BLOCK_N, NT = BN / 8, VT = DV / 8;
constexpr int CONSUMERS = WGS * 128, THREADS = CONSUMERS + 128;
constexpr int K_BOXES = (D + BOX - 1) / BOX, V_BOXES = (DV + BOX - 1) / BOX;
constexpr int K_BOX = BN * BOX, Q_BOX = BM * BOX;  // elements
// Biases are in natural units, whatever else is (mma.cu).
constexpr bool NATURAL_UNITS = NATURAL || MASK == ADDITIVE_MASK;
constexpr int NOTES = 1024;  // items that a block can tell apart
// Whether sums leave through buffers of values: where they have no room of their own, the copy engine fills a ring of two stages,
// and two groups lend each other its buffers (`release_values`). Not beside masks: up to 10 % slower (H200, 2026-11).
#define LENT (!STAGED && VECTOR && MASK == NO_MASK && BLOCK_M == 128 && STAGES == 2)

// The whole parameter: HopperParams of params.rs.
struct HopperParams {
    CopyMap q_map, k_map, v_map, out_map, mask_map;
    Params p;
    int tasks, paired;  // whether rows that see many keys and rows that see few are worked off in pairs
    int mask_access;    // MaskAccess of masks.cu
    int shift;          // by how many blocks work moves on from round to round
    int out_copied;     // whether the copy engine writes out, by out_map
    int item_groups;    // groups of 64 rows
    int short_items;    // of a task, at its beginning: they have one group less
    float scale;
    Divisor by_units;   // runs of rows, or pairs of them, of one task
    Divisor by_grid;    // blocks of the launch
};
static_assert(sizeof(HopperParams) == HOPPER_BYTES, "params.rs and hopper.cu disagree on HopperParams");

struct Shared {
    Elem q[K_BOXES * Q_BOX];
    Elem k[STAGES][K_BOXES * K_BOX], v[STAGES][V_BOXES * K_BOX];
#if STAGED
    Elem out[WGS * 4][V_BOXES][16 * BOX];  // of a warp
#endif
#if MASK != NO_MASK
    MaskRing mask;
#endif
    u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 again[NOTES / 32];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "code.rs and hopper.cu disagree on shared memory");

// Barriers of the block by number, 0 being everyone's.
enum { TURN = 1, END = 5, CAREFUL_TILE = 6, OWN_QUERIES = 8, LEND = 11 };

// Tiles of keys that an item reads: `count` from key `first` on.
struct Tiles {
    int first, count;
    __device__ Tiles(const Seen& seen)
        : first(seen.lo / BN * BN), count(seen.hi > first ? (seen.hi - first + BN - 1) / BN : 0) {}
};

// Which rows of which task this block computes in a round; rows of one task run side by side and share its K and V in L2.
struct Item {
    int block, task;
    __device__ Item(const HopperParams& h, int round) {
        const int blocks = h.p.row_blocks, turn = h.paired ? round / 2 : round;
        // A block does not meet the same run of rows in every round: some are short.
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
    }
    __device__ bool is_beyond(const HopperParams& h) const { return task >= h.tasks; }
    // The middle one of an odd number has no partner.
    __device__ bool is_none() const { return block < 0; }
    __device__ int groups(const HopperParams& h) const { return h.item_groups - (block < h.short_items); }
    __device__ int r0(const HopperParams& h) const { return (block * h.item_groups - min(block, h.short_items)) * 64; }
    __device__ Tiles tiles(const HopperParams& h) const {
        return Seen(h.p, Task(h.p, task), r0(h), min(r0(h) + groups(h) * 64, h.p.rows));
    }
};

// A task and the first of a warp's rows in it; a group of warps begins at row r0.
struct Place {
    Task task;
    int r0;
    __device__ Place(const Params& p, int task, int r0) : task(p, task), r0(r0 + threadIdx.x % 128 / 32 * 16) {}
};

// An item as a group of warps works it off.
struct Work {
    int round, task, r0;  // round: -1 if there is none; r0: the group's first row
    int n0, end;          // the first tile of keys and the last
    int all_lo, all_hi;   // keys that each of the rows sees
    int any;              // whether there is a tile; the group has sought it then
    // What a loop hands on is not known to be the same of all lanes.
    __device__ Work uniform() const {
        return {same(round), same(task), same(r0), same(n0), same(end), same(all_lo), same(all_hi), same(any)};
    }
};

// Which buffer tile `n` of a block has, counted from its first, and the parity of its barriers' phase.
__device__ inline int stage_of(u32 n) { return n % STAGES; }
__device__ inline u32 phase_of(u32 n) { return n / STAGES & 1; }

__device__ inline bool comes_again(const Shared& sh, int round) {
    return sh.again[round % NOTES / 32] >> (round % 32) & 1;
}
__device__ inline bool any_comes_again(const Shared& sh) {
    u32 any = 0;
    for (int at = 0; at < NOTES / 32; at++) any |= sh.again[at];
    return any != 0;
}

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
            *(uint4*)((u8*)(tile + c / BOX * BOX_ROWS * BOX) + swizzled(r, c % BOX)) = chunk;
        }
    } else {
#pragma unroll AT_ONCE
        for (int at = lane; at < ROWS * BOXES * BOX; at += 128) {
            const int r = at / (BOXES * BOX), c = at % (BOXES * BOX);
            const Elem x = r < rows && c < dim ? base[offset(r) + c * step] : (Elem)0;
            *(Elem*)((u8*)(tile + c / BOX * BOX_ROWS * BOX) + swizzled(r, c % BOX)) = x;
        }
    }
}

__device__ inline bool copies_queries(const Params& p) { return VECTOR && p.task_heads == 1; }

struct Producer {
    const HopperParams& h;
    Shared& sh;
    u32 k_loaded = 0, v_loaded = 0, q_loaded = 0, m_seen = 0;

    __device__ void load_queries(const Task& task, int r0) {
        const Params& p = h.p;
        wait(sh.q_empty, ~q_loaded++ & 1);
        arrive_expecting(sh.q_full, sizeof(sh.q));
        const int head = along(p.q_stride[1], task.head), batch = along(p.q_stride[0], task.batch);
#pragma unroll
        for (int box = 0; box < K_BOXES; box++) {
            copy_box(sh.q + box * Q_BOX, h.q_map, sh.q_full, box * BOX, r0, head, batch);
        }
    }

    // One tile of K or V.
    template <int BOXES>
    __device__ void load(
        Elem (&tiles)[STAGES][BOXES * K_BOX], u64 (&full)[STAGES], u64 (&empty)[STAGES], u32& loaded, const CopyMap& map,
        const void* base, const i64 (&stride)[4], int dim, const Task& task, int n0
    ) {
        const int stage = stage_of(loaded);
        wait(empty[stage], phase_of(loaded++) ^ 1);
        Elem* tile = tiles[stage];
        u64& barrier = full[stage];
        const int head = divide(task.head, h.p.by_group);
        if constexpr (VECTOR) {
            arrive_expecting(barrier, sizeof(tiles[0]));
#pragma unroll
            for (int box = 0; box < BOXES; box++) {
                copy_box(tile + box * K_BOX, map, barrier, box * BOX, n0, along(stride[1], head), along(stride[0], task.batch));
            }
        } else {
            const Elem* from = (const Elem*)base + task.batch * stride[0] + head * stride[1] + n0 * stride[2];
            load_boxes<BN, BN, BOXES>(
                tile, from, [&](int r) { return r * stride[2]; }, stride[3], h.p.kv_len - n0, dim, threadIdx.x % 128
            );
            fence_proxy();
            arrive(barrier);
        }
    }
    __device__ void load_keys(const Task& task, int n0) {
        const Params& p = h.p;
        load<K_BOXES>(sh.k, sh.k_full, sh.k_empty, k_loaded, h.k_map, p.k, p.k_stride, p.head_dim, task, n0);
    }
    __device__ void load_values(const Task& task, int n0) {
        const Params& p = h.p;
        load<V_BOXES>(sh.v, sh.v_full, sh.v_empty, v_loaded, h.v_map, p.v, p.v_stride, p.head_dim_v, task, n0);
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
            if (before < 0 && copies_queries(h.p)) load_queries(task, r0);
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
        wait(sh.mask.full[stage], mask_phase_of(m_seen++));
        const bool hidden = kind_of(sh.mask.found[stage]) == HIDDEN;
        arrive(sh.mask.empty[stage]);
        return hidden;
#endif
    }
};

