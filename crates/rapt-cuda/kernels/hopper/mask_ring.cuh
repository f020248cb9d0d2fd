// A mask tensor between memory and the scores of hopper.cu: warps of the producer group read it tile by tile, publish of each tile
// whether it hides everything or changes nothing, and leave it in a ring in shared memory as the consumer threads read it.
//
//   boolean   a bit for each key (common/mask_bits.cuh)
//   additive  biases in their dtype, in boxes of 128, 64 or 32 bytes of each row, swizzled as TMA does it
//             (`bias_unit`): 8 rows fall into distinct banks
//
//   MaskReader   for each tile: wait for its slot; issue its load, MASK_AHEAD tiles ahead; scan what came; publish its kind
//   MaskRows     of a tile that is MIXED: what it says of a thread's two rows, in registers
//
// What TMA can read comes by it (BY_TMA): one thread issues all tiles, the others scan them. What else can be read 16 bytes at a time
// comes by cp.async; the rest key by key. Where all rows are one (a padding mask), that one is read. Rows and keys outside the tensor
// change nothing, or count as hidden.
// What an element means is in common/mask.cuh, which also says why hopper.cu does not load masks as the other kernels do.
// Deliberately absent: positions (causal, window), which the consumers compare themselves.

#pragma once
#include "common/mask.cuh"
#include "hopper/tma.cuh"

// What a tile of the mask does to scores.
enum TileKind { HIDDEN, UNCHANGED, MIXED };

#if MASK != NO_MASK
// How a mask can be read, as the host has found.
enum MaskAccess { KEY_BY_KEY, BY_16_BYTES, BY_TMA };

constexpr bool IS_BOOL = MASK == BOOL_MASK;
// Tiles issued before the one that is scanned, without TMA; the others of the ring are with the consumers.
constexpr int MASK_AHEAD = MASK_STAGES - 2, RAW_STAGES = IS_BOOL ? MASK_AHEAD + 1 : 1;
constexpr int BIAS_BYTES = MASK_DTYPE == F16 || MASK_DTYPE == BF16 ? 2 : 4;
constexpr int KEY_BYTES = IS_BOOL ? 1 : BIAS_BYTES;  // as they lie in the ring
constexpr int UNIT_KEYS = 16 / KEY_BYTES, ROW_UNITS = BLOCK_N / UNIT_KEYS;
// Of additive masks: boxes side by side, BLOCK_M rows each.
constexpr int BOX_UNITS = ROW_UNITS % 8 == 0 ? 8 : ROW_UNITS % 4 == 0 ? 4 : 2, BIAS_BOXES = ROW_UNITS / BOX_UNITS;
static_assert(IS_BOOL || ROW_UNITS % 2 == 0, "whole boxes");

struct MaskRing {
    uint4 rows[MASK_STAGES][BLOCK_M * (IS_BOOL ? 1 : ROW_UNITS)];
    uint4 raw[RAW_STAGES][IS_BOOL ? BLOCK_M * ROW_UNITS : 1];  // booleans before they are bits
    // Barriers: a tile came by TMA; it was taken out of `raw`; its kind is published; consumers and producer have released it.
    u64 loaded[MASK_STAGES], taken[MASK_STAGES], full[MASK_STAGES], empty[MASK_STAGES];
    u32 kinds[MASK_STAGES];  // a byte for each warp that scans: 1 if the tile shows a key, 2 if it changes a score
};
enum : u32 { SHOWS = 0x010101, CHANGES = 0x020202 };  // of `kinds`
// The kind of a tile by the bits of all warps.
__device__ inline int kind_of(u32 kinds) {
    if ((kinds & SHOWS) == 0) return HIDDEN;
    return (kinds & CHANGES) != 0 ? MIXED : UNCHANGED;
}
// A word of shared memory if `is`. Where `is` is a barrier's answer, the load stays behind the barrier: without the condition it was
// seen to come before (H200, 2026-11).
__device__ inline u32 load_if(const u32& from, bool is) {
    u32 word;
    asm volatile("{\n.reg .pred is;\nsetp.ne.u32 is, %2, 0;\nmov.u32 %0, 0;\n@is ld.shared.u32 %0, [%1];\n}"
                 : "=r"(word)
                 : "r"(shared_address(&from)), "r"((u32)is)
                 : "memory");
    return word;
}
__device__ inline int mask_stage_of(u32 n) { return n % MASK_STAGES; }
__device__ inline u32 mask_phase_of(u32 n) { return n / MASK_STAGES & 1; }

// The producer's side: READERS threads of three warps, `thread` of them here. No warp waits for another. With TMA the first thread
// issues all tiles, and the last two warps scan them.
constexpr int READERS = 96, SCANNERS = 64;
struct MaskReader {
    const Params& p;
    MaskRing& ring;
    const bool wide;  // 16 bytes at a time
    const int thread;
    u32 issued = 0, published = 0;  // tiles
    const u8* base = nullptr;  // the thread's first row, at its column of key 0

    // A thread has one column of units, and of the rows every STEPth.
    static constexpr int STEP = READERS / ROW_UNITS;
    static_assert(READERS % ROW_UNITS == 0, "a column of units to each thread");
    __device__ int column() const { return thread % ROW_UNITS; }
    __device__ int first_row() const { return thread / ROW_UNITS; }
    // Rows behind the last of a shorter item are read too: what they hide changes no bit.
    __device__ int rows() const { return is_one_row(p) ? 1 : BLOCK_M; }
    __device__ static int place(int r, int u) { return IS_BOOL ? r * ROW_UNITS + u : bias_unit<BOX_UNITS, BLOCK_M>(r, u); }
    // The first byte of row r of a task, which may lie beyond its last.
    __device__ const u8* row_of_mask(const Task& task, int r) const {
        return (const u8*)p.mask + mask_row(p, Row(p, task, min(r, p.rows - 1))) * KEY_BYTES;
    }

    // Issues the loads of a tile to its slot `to`.
    __device__ void fetch(uint4* to, const Task& task, int r0, int n0) const {
        const int u = column(), j = n0 + u * UNIT_KEYS, end = rows(), inside = p.rows - r0;
        const int bytes = clamp((p.kv_len - j) * KEY_BYTES, 0, 16);
        if (wide && bytes == 16 && p.task_heads == 1 && inside >= end) {
            const u8* from = base + n0 * KEY_BYTES;
            const i64 far = p.mask_stride[2] * STEP * KEY_BYTES;
#pragma unroll 4
            for (int r = first_row(); r < end; r += STEP, from += far) {
                cp_async(shared_address(to + place(r, u)), (const Elem*)from);
            }
        } else if (wide) {
            // Rows of the next head follow those of one, or some rows or keys are outside.
#pragma unroll 1
            for (int r = first_row(); r < end; r += STEP) {
                const bool is = bytes > 0 && r < inside;
                const u8* from = is ? row_of_mask(task, r0 + r) + j * KEY_BYTES : (const u8*)p.mask;
                cp_async((Elem*)(to + place(r, u)), (const Elem*)from, is ? bytes : 0);
            }
        }
        cp_async_commit();
    }

    // Loads a tile key by key.
    __device__ void gather(uint4* to, const Task& task, int r0, int n0) const {
        const int u = column(), end = rows(), j = n0 + u * UNIT_KEYS;
#pragma unroll 1
        for (int r = first_row(); r < end; r += STEP) {
            const i64 row = mask_row(p, Row(p, task, min(r0 + r, p.rows - 1)));
#pragma unroll 1
            for (int word = 0; word < 4; word++) {
                u32 keys = 0;
#pragma unroll
                for (int i = 0; i < 4 / KEY_BYTES; i++) {
                    const int key = j + word * (4 / KEY_BYTES) + i;
                    if (r0 + r >= p.rows || key >= p.kv_len) continue;
                    const i64 at = mask_key(p, row, key);
                    const u32 x = KEY_BYTES == 1 ? ((const u8*)p.mask)[at] : KEY_BYTES == 2 ? ((const u16*)p.mask)[at] : ((const u32*)p.mask)[at];
                    keys |= x << i * KEY_BYTES * 8;
                }
                ((u32*)&to[place(r, u)])[word] = keys;
            }
        }
    }

    // Booleans are 0 and 1, but any other byte that is not 0 means the same.
    template <int UNITS>
    __device__ static void make_ones(uint4 (&x)[UNITS]) {
        u32 odd = 0;
#pragma unroll
        for (int n = 0; n < UNITS; n++) odd |= x[n].x | x[n].y | x[n].z | x[n].w;
        if ((odd & 0xfefefefeu) == 0) return;
#pragma unroll
        for (int n = 0; n < UNITS; n++) x[n] = make_uint4(ones(x[n].x), ones(x[n].y), ones(x[n].z), ones(x[n].w));
    }
    // The bits of units 2*pair and the next of row r.
    __device__ void write_bits(int stage, int r, int pair, u32 seen, int n0, u32& shown, u32& changed) const {
        store_seen_keys((u8*)&ring.rows[stage][r], pair, seen);
        const int keys = p.kv_len - n0 - pair * 32;
        shown |= seen, changed |= ~seen & (keys > 16 ? ~0u : keys > 0 ? 0x0f0f0f0fu : 0);
    }

    // The nth of the thread's own rows from `first` on; `first` again where there is none.
    __device__ static int row(int first, int n, int end) { return first + n * STEP < end ? first + n * STEP : first; }

    // Scans the tile at `raw` and publishes its kind; booleans become bits.
    __device__ void publish(uint4* raw, const Task& task, int r0, int n0) {
        const int stage = mask_stage_of(published), u = column();
        if (!wide) gather(raw, task, r0, n0);
        const int end = is_one_row(p) ? 1 : min(BLOCK_M, p.rows - r0);
        const bool outside = !IS_BOOL && n0 + u * UNIT_KEYS >= p.kv_len;
        u32 shown = 0, changed = 0;
        constexpr int BATCH = 4;  // units that are loaded together
        if (IS_BOOL) __syncwarp();
#pragma unroll 1
        for (int first = first_row(); first < end; first += STEP * BATCH) {
            if (!IS_BOOL && shown != 0 && changed != 0) break;
            uint4 x[BATCH];
            if (IS_BOOL) {
                // Neighbours take two units of every other row of theirs.
#pragma unroll
                for (int n = 0; n < BATCH; n++) x[n] = raw[place(row(first, n / 2 * 2 + u % 2, end), (u & ~1) + n % 2)];
                make_ones(x);
#pragma unroll
                for (int n = 0; n < BATCH; n += 2) {
                    write_bits(stage, row(first, n + u % 2, end), u / 2, seen_keys(x[n], x[n + 1]), n0, shown, changed);
                }
            } else {
#pragma unroll
                for (int n = 0; n < BATCH; n++) {
                    x[n] = raw[place(row(first, n, end), u)];
                    scan(x[n], shown, changed);
                }
            }
        }
        publish_kind(shown != 0 && !outside, changed != 0 && !outside);
    }

    // Adds the bits that differ from those of a hidden tile, and of one that changes nothing.
    __device__ static void scan(const uint4& x, u32& shown, u32& changed) {
        constexpr u32 ALL = KEY_BYTES == 4 ? 0xff800000u : MASK_DTYPE == F16 ? 0xfc00fc00u : 0xff80ff80u;
        constexpr u32 VALUE = KEY_BYTES == 4 ? 0x7fffffffu : 0x7fff7fffu;
        shown |= (x.x ^ ALL) | (x.y ^ ALL) | (x.z ^ ALL) | (x.w ^ ALL);
        changed |= (x.x | x.y | x.z | x.w) & VALUE;
    }

    // Publishes what this warp saw in the tile.
    __device__ void publish_kind(bool shown, bool changed) {
        const int stage = mask_stage_of(published++);
        const bool shows = __any_sync(~0u, shown), changes = __any_sync(~0u, changed);
        if (thread % 32 == 0) ((u8*)&ring.kinds[stage])[thread / 32] = shows + changes * 2;
        mbarrier_arrive(ring.full[stage]);
    }

    // Where the next tile that is issued, or published, lies.
    __device__ uint4* slot(u32 n) const { return IS_BOOL ? ring.raw[n % RAW_STAGES] : ring.rows[mask_stage_of(n)]; }
    __device__ void wait_for_slot(u32 n) const { mbarrier_wait(ring.empty[mask_stage_of(n)], mask_phase_of(n) ^ 1); }
    __device__ void issue(const Task& task, int r0, int n0, int end) {
        if (n0 < end) {
            if (!IS_BOOL) wait_for_slot(issued);
            fetch(slot(issued++), task, r0, n0);
        } else {
            cp_async_commit();
        }
    }

    // Rows r0.. of a task, tiles of the keys from `first` to `end`: issues the first ones,
    __device__ void begin(const Task& task, int r0, int first, int end) {
        base = row_of_mask(task, r0 + first_row()) + column() * 16;
#pragma unroll
        for (int n = 0; n < MASK_AHEAD; n++) issue(task, r0, first + n * BLOCK_N, end);
    }
    // and publishes them one by one, with the next issued before each.
    __device__ void step(const Task& task, int r0, int n0, int end) {
        issue(task, r0, n0 + MASK_AHEAD * BLOCK_N, end);
        cp_async_wait<MASK_AHEAD>();
        if (IS_BOOL) wait_for_slot(published);
        publish(slot(published), task, r0, n0);
    }

    // With TMA, by one thread: all tiles of rows r0...
    __device__ void load_by_tma(const TensorMap& map, const Task& task, int r0, int first, int end) {
        const int row = tma_coordinate(p.mask_stride[2], r0), head = tma_coordinate(p.mask_stride[1], task.head);
        const int batch = tma_coordinate(p.mask_stride[0], task.batch);
#pragma unroll 1
        for (int n0 = first; n0 < end; n0 += BLOCK_N) {
            if (IS_BOOL) {
                mbarrier_wait(ring.taken[issued % RAW_STAGES], (issued / RAW_STAGES & 1) ^ 1);
            } else {
                wait_for_slot(issued);
            }
            uint4* to = slot(issued);
            u64& loaded = ring.loaded[load_stage(issued++)];
            mbarrier_arrive_expect_tx(loaded, rows() * ROW_UNITS * 16);
#pragma unroll
            for (int box = 0; box < (IS_BOOL ? 1 : BIAS_BOXES); box++) {
                tma_load(to + box * (BLOCK_M * BOX_UNITS), map, loaded, n0 + box * (BOX_UNITS * UNIT_KEYS), row, head, batch);
            }
        }
    }
    __device__ static int load_stage(u32 n) { return IS_BOOL ? n % RAW_STAGES : mask_stage_of(n); }

    // With TMA: scans and publishes a tile. Keys behind the last came as zeros; rows behind the last are not scanned.
    __device__ void publish_loaded(int r0, int n0) {
        const u32 phase = IS_BOOL ? published / RAW_STAGES & 1 : mask_phase_of(published);
        mbarrier_wait(ring.loaded[load_stage(published)], phase);
        const int end = is_one_row(p) ? 1 : min(BLOCK_M, p.rows - r0), scanner = thread % SCANNERS;
        const uint4* from = slot(published);
        u32 shown = 0, changed = 0;
        constexpr int BATCH = IS_BOOL ? 8 : 4;  // units that are loaded together
        if (IS_BOOL) {
            constexpr int PAIRS = ROW_UNITS / 2;  // of units of a row
            wait_for_slot(published);
            const int pairs = end * PAIRS;
#pragma unroll 1
            for (int first = scanner; first < pairs; first += SCANNERS * BATCH / 2) {
                uint4 x[BATCH];
                const auto pair = [&](int n) { return first + n * SCANNERS < pairs ? first + n * SCANNERS : first; };
#pragma unroll
                for (int n = 0; n < BATCH / 2; n++) x[n * 2] = from[pair(n) * 2], x[n * 2 + 1] = from[pair(n) * 2 + 1];
                make_ones(x);
#pragma unroll
                for (int n = 0; n < BATCH / 2; n++) {
                    const u32 seen = seen_keys(x[n * 2], x[n * 2 + 1]);
                    write_bits(mask_stage_of(published), pair(n) / PAIRS, pair(n) % PAIRS, seen, n0, shown, changed);
                }
            }
            mbarrier_arrive(ring.taken[published % RAW_STAGES]);
        } else {
            const int units = end * BOX_UNITS;
#pragma unroll
            for (int box = 0; box < BIAS_BOXES; box++) {
                if (n0 + box * (BOX_UNITS * UNIT_KEYS) >= p.kv_len) break;
#pragma unroll 1
                for (int first = scanner; first < units && (shown == 0 || changed == 0); first += SCANNERS * BATCH) {
#pragma unroll
                    for (int n = 0; n < BATCH; n++) {
                        const int at = first + n * SCANNERS;
                        scan(from[box * (BLOCK_M * BOX_UNITS) + (at < units ? at : first)], shown, changed);
                    }
                }
            }
        }
        publish_kind(shown != 0, changed != 0);
    }
};

// The consumer's side: what the mask says of a thread's two rows of a tile, loaded before the scores are complete.
struct MaskRows {
    static constexpr int NT = BLOCK_N / 8, WORDS = IS_BOOL ? 1 : NT * BIAS_BYTES / 2;
    int kind;
    u32 word[2][WORDS];

    // Where in a tile a thread's own rows lie, in bytes; `row` is the first of its warp's in the block.
    struct Place {
        int at, next_row;  // next_row: 8 rows further
        __device__ Place(const Params& p, int row) {
            const int lane = threadIdx.x % 32;
            const bool one = is_one_row(p);
            const int r = one ? 0 : row + (BIAS_BYTES == 2 && !IS_BOOL ? lane % 16 : lane / 4);
            if (IS_BOOL) {
                at = r * 16 + lane % 4 * 4;
            } else if (BIAS_BYTES == 2) {
                at = bias_unit<BOX_UNITS, BLOCK_M>(r, lane / 16) * 16;
            } else {
                at = bias_unit<BOX_UNITS, BLOCK_M>(r, lane % 4 / 2) * 16 + lane % 2 * 8;
            }
            next_row = one ? 0 : 8 * 16 * (IS_BOOL ? 1 : BOX_UNITS);
        }
    };

    __device__ void take(const MaskRing& ring, int stage, const Place& place) {
        if (kind != MIXED) return;
        const u8* tile = (const u8*)ring.rows[stage] + place.at;
        // Unit u, which is even: swizzles turn bits that lie above a thread's own.
        const auto unit = [&](const u8* from, int u) {
            return (const u8*)((u64)from ^ bias_unit_turn<BOX_UNITS>(u)) + bias_unit_step<BOX_UNITS, BLOCK_M>(u);
        };
        if (IS_BOOL) {
            word[0][0] = *(const u32*)tile, word[1][0] = *(const u32*)(tile + place.next_row);
        } else if (BIAS_BYTES == 2) {
            // Matrices: 8 keys of the upper rows and of the lower ones, then the next 8 keys; a lane names row lane % 16.
#pragma unroll
            for (int nt = 0; nt < NT; nt += 2) {
                u32 four[4];
                ldmatrix(four, shared_address(unit(tile, nt)));
                word[0][nt] = four[0], word[1][nt] = four[1], word[0][nt + 1] = four[2], word[1][nt + 1] = four[3];
            }
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    const uint2 pair = *(const uint2*)unit(tile + h * place.next_row, nt * 2);
                    word[h][nt * 2] = pair.x, word[h][nt * 2 + 1] = pair.y;
                }
        }
    }

    __device__ float bias(int h, int nt, int e) const {
        if (BIAS_BYTES == 4) return __uint_as_float(word[h][nt * 2 + e]);
        return bias_of_pair(word[h][nt], e);
    }

    // A score with the mask in it: s * factor + bias; or s, -inf where it is masked.
    __device__ float masked(float s, float factor, int h, int nt, int e) const {
        if (!IS_BOOL) return __fmaf_rn(s, factor, bias(h, nt, e));
        // Of a number and NaN the minimum is the number: a bit of a NaN's where the key is seen.
        const u32 bits = bits_of_tile(word[h][0], nt);
        return fminf(s, __uint_as_float((bits & 1u << key_bit(nt % 8, e)) | 0xff800000u));
    }

    // careful: -inf where the bias is, whatever the score.
    __device__ void apply(Accumulator<NT>& s, float factor, bool careful) const {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[nt][e] = masked(s[nt][e], factor, e / 2, nt, e % 2);
        if (IS_BOOL || !careful) return;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (bias(e / 2, nt, e % 2) == negative_infinity()) s[nt][e] = negative_infinity();
            }
    }
};
#else
struct MaskRows {
    static constexpr int kind = UNCHANGED;
    struct Place {
        __device__ Place(const Params&, int) {}
    };
    __device__ float masked(float s, float, int, int, int) const { return s; }
    __device__ void apply(Accumulator<BLOCK_N / 8>&, float, bool) const {}
};
#endif
