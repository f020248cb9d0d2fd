// A mask tensor on its way to the scores of hopper.cu: warps of the loading group read it tile by tile, tell of each tile
// whether it hides everything or changes nothing, and leave it in a ring in shared memory, where rows are at hand as the
// threads that multiply have them.
//
//   boolean   a bit for each key, 1 where it is masked: a row is 16 bytes
//   additive  biases in their dtype (float64 as float); units of 16 bytes stand at unit ^ row % 8 where a row is whole
//             lines of 128 bytes, else rows are an odd number of units: 8 rows fall into distinct banks
//
// What is read 16 bytes at a time goes through the asynchronous copies of cp.async, tiles ahead; else key by key. Where
// all rows are one (a padding mask), that one is read. Rows and keys outside the tensor count as hidden.
// Deliberately absent: positions (causal, window), which the threads that multiply compare themselves.

#if MASK != NO_MASK
// What a tile of the mask says to those who would read it.
enum TileKind { HIDDEN, UNCHANGED, MIXED };

constexpr bool IS_BOOL = MASK == BOOL_MASK;
// Tiles asked for before the one that is told of; the others of the ring are with those who multiply.
constexpr int MASK_AHEAD = MASK_STAGES - 2;
constexpr int BIAS_BYTES = MASK_DTYPE == F16 || MASK_DTYPE == BF16 ? 2 : 4;
constexpr int KEY_BYTES = IS_BOOL ? 1 : BIAS_BYTES;  // as they lie in the ring
constexpr int UNIT_KEYS = 16 / KEY_BYTES, ROW_UNITS = BLOCK_N / UNIT_KEYS;
constexpr bool BIAS_SWIZZLED = ROW_UNITS % 8 == 0;
constexpr int BIAS_ROW = BIAS_SWIZZLED ? ROW_UNITS : ROW_UNITS | 1;  // units

struct MaskRing {
    uint4 raw[IS_BOOL ? MASK_AHEAD + 1 : 1][IS_BOOL ? BLOCK_M * ROW_UNITS : 1];  // booleans before they are bits
    uint4 rows[MASK_STAGES][BLOCK_M * (IS_BOOL ? 1 : BIAS_ROW)];
    u64 full[MASK_STAGES], empty[MASK_STAGES];
    u32 found[MASK_STAGES];  // a byte for each warp that reads: 1 where it shows something, 2 where it changes something
};
// What the warps found together.
__device__ inline int kind_of(u32 found) {
    if ((found & 0x010101u) == 0) return HIDDEN;
    return (found & 0x020202u) != 0 ? MIXED : UNCHANGED;
}
__device__ inline int mask_stage_of(u32 n) { return n % MASK_STAGES; }
__device__ inline u32 mask_phase_of(u32 n) { return n / MASK_STAGES & 1; }

// Whether every row that a block reads is the same.
__device__ inline bool is_one_row(const Params& p) {
    return p.mask_stride[2] == 0 && (p.task_heads == 1 || p.mask_stride[1] == 0);
}

// The loading side: READERS threads of three warps, `thread` of them here. No warp waits for another.
constexpr int READERS = 96;
struct MaskReader {
    const Params& p;
    MaskRing& ring;
    const bool wide;  // 16 bytes at a time
    const int thread;
    u32 asked = 0, told = 0;  // tiles
    const u8* base = nullptr;  // the thread's first row, at its column of key 0

    // A thread has one column of units, and of the rows every STEPth.
    static constexpr int STEP = READERS / ROW_UNITS;
    static_assert(READERS % ROW_UNITS == 0, "a column of units to each thread");
    __device__ int column() const { return thread % ROW_UNITS; }
    __device__ int first_row() const { return thread / ROW_UNITS; }
    // Of an item with fewer rows those behind it too: what they hide changes no bit.
    __device__ int rows() const { return is_one_row(p) ? 1 : BLOCK_M; }
    __device__ static int place(int r, int u) {
        return IS_BOOL ? r * ROW_UNITS + u : r * BIAS_ROW + (BIAS_SWIZZLED ? u ^ r % 8 : u);
    }
    // The first byte of row r of a task, which may lie beyond its last.
    __device__ const u8* row_of_mask(const Task& task, int r) const {
        return (const u8*)p.mask + Row(p, task, min(r, p.rows - 1)).offset(p.mask_stride) * KEY_BYTES;
    }

    // Asks for a tile; `to` is its room.
    __device__ void fetch(uint4* to, const Task& task, int r0, int n0) const {
        const int u = column(), j = n0 + u * UNIT_KEYS, end = rows(), inside = p.rows - r0;
        const int bytes = clamp((p.kv_len - j) * KEY_BYTES, 0, 16);
        if (wide && bytes == 16 && p.task_heads == 1 && inside >= end) {
            const u8* from = base + n0 * KEY_BYTES;
            const i64 far = p.mask_stride[2] * STEP * KEY_BYTES;
#pragma unroll 4
            for (int r = first_row(); r < end; r += STEP, from += far) {
                copy_async(shared_address(to + place(r, u)), (const Elem*)from);
            }
        } else if (wide) {
            // Rows of the next head follow those of one, or some rows or keys are outside.
#pragma unroll 1
            for (int r = first_row(); r < end; r += STEP) {
                const bool is = bytes > 0 && r < inside;
                const u8* from = is ? row_of_mask(task, r0 + r) + j * KEY_BYTES : (const u8*)p.mask;
                copy_async((Elem*)(to + place(r, u)), (const Elem*)from, is ? bytes : 0);
            }
        }
        commit_copies();
    }

    // The same key by key.
    __device__ void gather(uint4* to, const Task& task, int r0, int n0) const {
        const int u = column(), end = rows(), j = n0 + u * UNIT_KEYS;
        const i64 step = p.mask_stride[3];
#pragma unroll 1
        for (int r = first_row(); r < end; r += STEP) {
            const i64 row = Row(p, task, min(r0 + r, p.rows - 1)).offset(p.mask_stride);
#pragma unroll 1
            for (int word = 0; word < 4; word++) {
                u32 keys = 0;
#pragma unroll
                for (int i = 0; i < 4 / KEY_BYTES; i++) {
                    const int key = j + word * (4 / KEY_BYTES) + i;
                    if (r0 + r >= p.rows || key >= p.kv_len) continue;
                    const i64 at = row + key * step;
                    u32 x;
                    if (KEY_BYTES == 1) x = ((const u8*)p.mask)[at];
                    else if (KEY_BYTES == 2) x = ((const u16*)p.mask)[at];
                    else x = __float_as_uint(load_as(p.mask, MASK_DTYPE, at));
                    keys |= x << i * KEY_BYTES * 8;
                }
                ((u32*)&to[place(r, u)])[word] = keys;
            }
        }
    }

    __device__ static u32 weigh_bytes(u32 bytes, u32 weights, u32 sum) {
        asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(bytes), "r"(weights));
        return sum;
    }
    // A byte of 1 for each byte that is not 0.
    __device__ static u32 ones(u32 x) { return ((((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u) >> 7; }
    // A bit for each of 16 keys, 1 where it is masked; bytes are 0 or 1.
    __device__ static u32 hidden_keys(const uint4& x) {
        const u32 low = weigh_bytes(x.y, 0x80402010u, weigh_bytes(x.x, 0x08040201u, 0));
        const u32 high = weigh_bytes(x.w, 0x80402010u, weigh_bytes(x.z, 0x08040201u, 0));
        return (low | high << 8) ^ 0xffffu;
    }

    // The nth of the thread's own rows from `first` on; `first` again where there is none.
    __device__ static int row(int first, int n, int end) { return first + n * STEP < end ? first + n * STEP : first; }

    // Passes on the tile that lies at `raw`.
    __device__ void tell(uint4* raw, const Task& task, int r0, int n0) {
        const int stage = mask_stage_of(told), u = column();
        if (!wide) gather(raw, task, r0, n0);
        const int end = is_one_row(p) ? 1 : min(BLOCK_M, p.rows - r0);
        const bool outside = n0 + u * UNIT_KEYS >= p.kv_len;
        // Bits that differ from those of a hidden tile, and of one that changes nothing.
        u32 shown = 0, changed = 0;
        constexpr int BATCH = 4;  // units that are loaded together
#pragma unroll 1
        for (int first = first_row(); first < end; first += STEP * BATCH) {
            if (!IS_BOOL && shown != 0 && changed != 0) break;
            uint4 x[BATCH];
#pragma unroll
            for (int n = 0; n < BATCH; n++) x[n] = raw[place(row(first, n, end), u)];
            if (IS_BOOL) {
                u32 odd = 0;
#pragma unroll
                for (int n = 0; n < BATCH; n++) odd |= x[n].x | x[n].y | x[n].z | x[n].w;
                // Booleans are 0 and 1, but any other byte that is not 0 says the same.
                if ((odd & 0xfefefefeu) != 0) {
#pragma unroll
                    for (int n = 0; n < BATCH; n++) {
                        x[n] = make_uint4(ones(x[n].x), ones(x[n].y), ones(x[n].z), ones(x[n].w));
                    }
                }
#pragma unroll
                for (int n = 0; n < BATCH; n++) {
                    const u32 hidden = hidden_keys(x[n]);
                    ((u16*)&ring.rows[stage][row(first, n, end)])[u] = hidden;
                    shown |= hidden ^ 0xffffu, changed |= hidden;
                }
            } else {
                constexpr u32 ALL = KEY_BYTES == 4 ? 0xff800000u : MASK_DTYPE == F16 ? 0xfc00fc00u : 0xff80ff80u;
                constexpr u32 VALUE = KEY_BYTES == 4 ? 0x7fffffffu : 0x7fff7fffu;
#pragma unroll
                for (int n = 0; n < BATCH; n++) {
                    shown |= (x[n].x ^ ALL) | (x[n].y ^ ALL) | (x[n].z ^ ALL) | (x[n].w ^ ALL);
                    changed |= (x[n].x | x[n].y | x[n].z | x[n].w) & VALUE;
                }
            }
        }
        const bool shows = __any_sync(~0u, shown != 0 && !outside), changes = __any_sync(~0u, changed != 0 && !outside);
        if (thread % 32 == 0) ((u8*)&ring.found[stage])[thread / 32] = shows + changes * 2;
        arrive(ring.full[stage]);
        told++;
    }

    // Where the next tile that is asked for, or told of, comes to lie.
    __device__ uint4* room(u32 n) const { return IS_BOOL ? ring.raw[n % (MASK_AHEAD + 1)] : ring.rows[mask_stage_of(n)]; }
    __device__ void wait_for_room(u32 n) const { wait(ring.empty[mask_stage_of(n)], mask_phase_of(n) ^ 1); }
    __device__ void ask(const Task& task, int r0, int n0, int end) {
        if (n0 < end) {
            if (!IS_BOOL) wait_for_room(asked);
            fetch(room(asked++), task, r0, n0);
        } else {
            commit_copies();
        }
    }

    // Rows r0.. of a task, tiles of the keys from `first` to `end`: asks for the first ones,
    __device__ void begin(const Task& task, int r0, int first, int end) {
        base = row_of_mask(task, r0 + first_row()) + column() * 16;
#pragma unroll
        for (int n = 0; n < MASK_AHEAD; n++) ask(task, r0, first + n * BLOCK_N, end);
    }
    // and tells of them one by one.
    __device__ void step(const Task& task, int r0, int n0, int end) {
        ask(task, r0, n0 + MASK_AHEAD * BLOCK_N, end);
        wait_copies<MASK_AHEAD>();
        if (IS_BOOL) wait_for_room(told);
        tell(room(told), task, r0, n0);
    }
};

// The other side: what the mask says of a thread's two rows of a tile, taken out of the ring while the scores are made.
struct MaskRows {
    static constexpr int NT = BLOCK_N / 8, WORDS = IS_BOOL ? 4 : NT * BIAS_BYTES / 2;
    int kind;
    u32 word[2][WORDS];

    // `row` is the first of the two in the block; the other is 8 below.
    __device__ void take(const Params& p, const MaskRing& ring, int stage, int row) {
        if (kind != MIXED) return;
        const int lane = threadIdx.x % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = is_one_row(p) ? 0 : row + h * 8;
            if (IS_BOOL) {
                const uint4 bits = ring.rows[stage][r];
                word[h][0] = bits.x, word[h][1] = bits.y, word[h][2] = bits.z, word[h][3] = bits.w;
                continue;
            }
            const u8* base = (const u8*)&ring.rows[stage][r * BIAS_ROW];
            const int turned = BIAS_SWIZZLED ? r % 8 : 0;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                if (BIAS_BYTES == 2) {
                    word[h][nt] = *(const u32*)(base + (nt ^ turned) * 16 + lane * 4);
                } else {
                    const uint2 pair = *(const uint2*)(base + ((nt * 2 + lane / 2) ^ turned) * 16 + lane % 2 * 8);
                    word[h][nt * 2] = pair.x, word[h][nt * 2 + 1] = pair.y;
                }
            }
        }
    }

    __device__ float bias(int h, int nt, int e) const {
        if (BIAS_BYTES == 4) return __uint_as_float(word[h][nt * 2 + e]);
        const u32 pair = word[h][nt];
        if (MASK_DTYPE == F16) return f16_to_float(pair >> e * 16);
        return __uint_as_float(e == 0 ? pair << 16 : pair & 0xffff0000u);
    }

    __device__ void hide(float (&s)[NT][4]) const {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const u32 bits = word[h][nt / 4] >> threadIdx.x % 4 * 2;
                    if (bits & 1u << (nt % 4 * 8 + e)) s[nt][h * 2 + e] = negative_infinity();
                }
    }

    // s = s * factor + bias; careful: -inf where the bias is, whatever the score.
    __device__ void add(float (&s)[NT][4], float factor, bool careful) const {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[nt][e] = __fmaf_rn(s[nt][e], factor, bias(e / 2, nt, e % 2));
        if (!careful) return;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (bias(e / 2, nt, e % 2) == negative_infinity()) s[nt][e] = negative_infinity();
            }
    }
};
#else
struct MaskRows {};
#endif
