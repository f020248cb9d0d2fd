// Attention on the tensor cores of compute capability 9.0 by wgmma, for many queries.
//
//   A block stays on its multiprocessor and works off items: BLOCK_M queries of a task, all keys that they see.
//   producer (4 warps)        Q of the item, then K and V in tiles of BLOCK_N keys from key 0, through a ring of STAGES
//   consumers (WGS x 4 warps) 64 queries each:
//                               s = q.K[0];  p = weigh(s)
//     for n = 1..               s = q.K[n]          under way
//                               acc += p.V[n-1]     under way, behind it
//                               p' = weigh(s)       while acc is still under way, and the other group's products run
//                               acc *= fall;  p = p'
//                               acc += p.V[last]
//
// Groups take turns in enqueuing products (`TURN`): one's softmax runs beside the other's products. Q and the keys are read
// by the tensor cores from shared memory, p from registers: its accumulator layout is the operand's.
// What the copy engine cannot read (addresses and strides of 16 bytes, inner stride 1) the producer loads element by element
// into the same tiles: products, order and bits are the same.
//
// Values that nobody attends: an item with a sum that is not finite is noted and comes again at the end. Then values that
// are not finite are taken out of each tile, and go into the sums of the rows that attend them. Finite sums have the same
// bits both ways.
// Deliberately absent: splitting of the keys (decode.cu), float32.

constexpr int WGS = BLOCK_M / 64, BM = BLOCK_M, BN = BLOCK_N, NT = BN / 8, VT = DV / 8;
constexpr int CONSUMERS = WGS * 128, THREADS = CONSUMERS + 128;
constexpr int K_BOXES = (D + BOX - 1) / BOX, V_BOXES = (DV + BOX - 1) / BOX;
constexpr int K_BOX = BN * BOX, Q_BOX = BM * BOX;  // elements
constexpr int NOTES = 1024;                        // items that a block can tell apart

// The whole parameter: HopperParams of params.rs.
struct HopperParams {
    CopyMap q_map, k_map, v_map;
    Params p;
    int tasks, paired;  // whether rows that see many keys and rows that see few are worked off in pairs
    int mask_wide;      // rows of the mask can be read 16 bytes at a time
};
static_assert(sizeof(HopperParams) == HOPPER_BYTES, "params.rs and hopper.cu disagree on HopperParams");

struct Shared {
    Elem q[K_BOXES * Q_BOX];
    Elem k[STAGES][K_BOXES * K_BOX], v[STAGES][V_BOXES * K_BOX];
    u64 q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u32 again[NOTES / 32];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "code.rs and hopper.cu disagree on shared memory");

// Barriers of the block by number, 0 being everyone's.
enum { TURN = 1, END = 5, CAREFUL_TILE = 6, OWN_QUERIES = 8 };

// Which rows of which task this block computes in a round; rows of one task run side by side and share its K and V in L2.
struct Item {
    int block, task;
    __device__ Item(const HopperParams& h, int round) {
        const int blocks = h.p.row_blocks;
        if (h.paired) {
            // A late run of rows, which sees the most keys, then the early one that makes all pairs alike.
            const int pairs = (blocks + 1) / 2, unit = round / 2 * gridDim.x + blockIdx.x, i = unit % pairs;
            task = unit / pairs, block = round % 2 == 0 ? blocks - 1 - i : i;
            if (round % 2 == 1 && i == blocks - 1 - i) block = -1;
        } else {
            const int unit = round * gridDim.x + blockIdx.x;
            task = unit / blocks, block = blocks - 1 - unit % blocks;
        }
    }
    __device__ bool is_beyond(const HopperParams& h) const { return task >= h.tasks; }
    // The middle one of an odd number has no partner.
    __device__ bool is_none() const { return block < 0; }
    __device__ int r0() const { return block * BM; }
};

// The task of a round and the first of a warp's rows in it.
struct Place {
    Task task;
    int r0;
    __device__ Place(const HopperParams& h, const Item& item, int wg)
        : task(h.p, item.task), r0(item.r0() + wg * 64 + threadIdx.x % 128 / 32 * 16) {}
    __device__ Place(const HopperParams& h, int round, int wg) : Place(h, Item(h, round), wg) {}
};

// Which buffer tile `n` of a block has, counted from its first, and the parity of its barriers' phase.
__device__ inline int stage_of(u32 n) { return n % STAGES; }
__device__ inline u32 phase_of(u32 n) { return n / STAGES & 1; }

// The same number as if it had just come: what is derived from it is derived anew, and needs no register meanwhile.
template <class T>
__device__ inline T anew(T x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Tiles of keys that an item reads: `count` from key `first` on.
struct Tiles {
    int first, count;
    __device__ Tiles(const Seen& seen)
        : first(seen.lo / BN * BN), count(seen.hi > first ? (seen.hi - first + BN - 1) / BN : 0) {}
};

__device__ inline bool comes_again(const Shared& sh, int round) {
    return sh.again[round % NOTES / 32] >> (round % 32) & 1;
}

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
#pragma unroll 4
        for (int at = lane; at < ROWS * BOXES * BOX; at += 128) {
            const int r = at / (BOXES * BOX), c = at % (BOXES * BOX);
            const Elem x = r < rows && c < dim ? base[offset(r) + c * step] : (Elem)0;
            *(Elem*)((u8*)(tile + c / BOX * BOX_ROWS * BOX) + swizzled(r, c % BOX)) = x;
        }
    }
}

__device__ inline bool copies_queries(const Params& p) { return VECTOR && p.task_heads == 1; }
// An index along a dimension that is not stepped through.
__device__ inline int along(i64 stride, int index) { return stride == 0 ? 0 : index; }

struct Producer {
    const HopperParams& h;
    Shared& sh;
    u32 k_loaded = 0, v_loaded = 0, q_loaded = 0;

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
        const int head = task.head / h.p.group;
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

    __device__ void run(const Item& item) {
        const Task task(h.p, item.task);
        const int r0 = item.r0();
        const Tiles tiles(Seen(h.p, task, r0, min(r0 + BM, h.p.rows)));
        if (tiles.count == 0) return;
        if (copies_queries(h.p)) load_queries(task, r0);
        // In the order in which they are waited for.
        load_keys(task, tiles.first);
#pragma unroll 1
        for (int n = 0; n < tiles.count; n++) {
            if (n + 1 < tiles.count) load_keys(task, tiles.first + (n + 1) * BN);
            load_values(task, tiles.first + n * BN);
        }
    }
};

    // Four lanes of a row exchange 4x4 words: lane t has tile t's word of each then.
    __device__ inline void turn(u32 (&w)[4]) {
        const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 got = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
            (odd ? w[i] : w[i + 1]) = got;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 got = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
            (high ? w[i] : w[i + 2]) = got;
        }
    }

// A boolean mask's rows in a tile of keys, read a tile ahead. The four lanes of a row take 16 keys each in turn; a lane's
// word has a bit for each of its keys that is masked, and lanes look into one another's words.
struct BoolAhead {
    static constexpr int CHUNKS = BN / 16, PER_LANE = (CHUNKS + 3) / 4;
    static_assert(PER_LANE <= 2, "a word holds 32 keys");
    const u8* row[2];
    uint4 keys[2][PER_LANE];

    __device__ void begin(const HopperParams& h, int round, int wg) {
        const Place place(h, round, wg);
        const Queries queries{h.p, place.task, place.r0};
        for (int r = 0; r < 2; r++) row[r] = (const u8*)h.p.mask + queries.row(0, r).offset(h.p.mask_stride);
    }

    __device__ void fetch(const HopperParams& h, int n0) {
        const i64 step = h.p.mask_stride[3];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                const int chunk = k * 4 + threadIdx.x % 4, j = n0 + chunk * 16;
                uint4& to = keys[r][k];
                to = make_uint4(0, 0, 0, 0);
                if (chunk >= CHUNKS) continue;
                if (h.mask_wide && j + 16 <= h.p.kv_len) {
                    to = *(const uint4*)(row[r] + j);
                } else {
#pragma unroll 1
                    for (int i = 0; i < 16 && j + i < h.p.kv_len; i++) {
                        const u32 bit = row[r][(j + i) * step] != 0 ? 1u << i % 4 * 8 : 0;
                        to.x |= i / 4 == 0 ? bit : 0, to.y |= i / 4 == 1 ? bit : 0;
                        to.z |= i / 4 == 2 ? bit : 0, to.w |= i / 4 == 3 ? bit : 0;
                    }
                }
            }
    }

    // Four bits for the bytes of a word that are 0.
    __device__ static u32 zeros(u32 x) {
        const u32 high = ~(((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
        return (high >> 7) * 0x01020408u >> 24 & 15;
    }
    __device__ void pack_hidden(u32 (&hidden)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            hidden[r] = 0;
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                const uint4 x = keys[r][k];
                hidden[r] |= (zeros(x.x) | zeros(x.y) << 4 | zeros(x.z) << 8 | zeros(x.w) << 12) << k * 16;
            }
        }
    }

    __device__ static void hide(float (&s)[NT][4], const u32 (&hidden)[2]) {
        if (!__any_sync(~0u, hidden[0] | hidden[1])) return;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 word[4];
#pragma unroll
            for (int n = 0; n < 4; n++) word[n] = __shfl_sync(~0u, hidden[r], lane / 4 * 4 + n) >> lane % 4 * 2;
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (word[nt / 2 % 4] & 1u << (nt / 8 * 16 + nt % 2 * 8 + e)) s[nt][r * 2 + e] = negative_infinity();
                }
        }
    }
};

// An additive mask of 16 bits in the same way: lanes take 8 keys each in turn, and exchange them where scores are at hand.
struct BiasAhead {
    static constexpr int CHUNKS = BN / 8, PER_LANE = (CHUNKS + 3) / 4;
    const u16* row[2];
    uint4 keys[2][PER_LANE];

    __device__ void begin(const HopperParams& h, int round, int wg) {
        const Place place(h, round, wg);
        const Queries queries{h.p, place.task, place.r0};
        for (int r = 0; r < 2; r++) row[r] = (const u16*)h.p.mask + queries.row(0, r).offset(h.p.mask_stride);
    }

    __device__ void fetch(const HopperParams& h, int n0) {
        const i64 step = h.p.mask_stride[3];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                const int chunk = k * 4 + threadIdx.x % 4, j = n0 + chunk * 8;
                uint4& to = keys[r][k];
                to = make_uint4(0, 0, 0, 0);
                if (chunk >= CHUNKS) continue;
                if (h.mask_wide && j + 8 <= h.p.kv_len) {
                    to = *(const uint4*)(row[r] + j);
                } else {
#pragma unroll 1
                    for (int i = 0; i < 8 && j + i < h.p.kv_len; i++) {
                        const u32 half = (u32)row[r][(j + i) * step] << i % 2 * 16;
                        to.x |= i / 2 == 0 ? half : 0, to.y |= i / 2 == 1 ? half : 0;
                        to.z |= i / 2 == 2 ? half : 0, to.w |= i / 2 == 3 ? half : 0;
                    }
                }
            }
    }

    __device__ static float widen_bias(u16 bits) { return MASK_DTYPE == F16 ? f16_to_float(bits) : bf16_to_float(bits); }

    // s = softcap(s * scale) - slope * distance + bias, and -inf where the bias is.
    __device__ void add(float (&s)[NT][4], const Params& p, const Queries& queries, int n0) const {
        const float scale = (float)p.scale, cap = (float)p.softcap, inverse_cap = (float)p.inverse_softcap;
        const bool plain = p.softcap == 0 && p.alibi == nullptr;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (!plain) {
                const Row row = queries.row(0, r);
                const float slope = p.alibi == nullptr ? 0.f : load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride);
                const int distance = row.i + p.diagonal - n0 - threadIdx.x % 4 * 2;
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[nt][r * 2 + e];
                        x *= scale;
                        if (p.softcap != 0) x = cap * tanhf(x * inverse_cap);
                        if (p.alibi != nullptr) x -= slope * (float)abs(distance - nt * 8 - e);
                    }
            }
            const float factor = plain ? scale : 1.f;
#pragma unroll
            for (int k = 0; k < PER_LANE; k++) {
                u32 w[4] = {keys[r][k].x, keys[r][k].y, keys[r][k].z, keys[r][k].w};
                turn(w);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int nt = min(k * 4 + i, NT - 1);
                    if (k * 4 + i >= NT) continue;
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float bias = widen_bias(w[i] >> e * 16);
                        float& x = s[nt][r * 2 + e];
                        x = bias == negative_infinity() ? bias : __fmaf_rn(x, factor, bias);
                    }
                }
            }
        }
    }
};
constexpr bool BOOL_AHEAD = MASK == BOOL_MASK && !NATURAL;
constexpr bool BIAS_AHEAD = MASK == ADDITIVE_MASK && (MASK_DTYPE == F16 || MASK_DTYPE == BF16);
constexpr bool AHEAD = BOOL_AHEAD || BIAS_AHEAD;

template <bool BIAS>
struct AheadOf {
    typedef BoolAhead Type;
};
template <>
struct AheadOf<true> {
    typedef BiasAhead Type;
};

struct Consumer {
    const HopperParams& h;
    Shared& sh;
    const int wg;
    u32 done = 0, q_done = 0;  // tiles whose values were added, items
    float m[2], l[2], fall[2], acc[VT][4];

    // s = q.k of tile n.
    __device__ void multiply_keys(float (&s)[NT][4], u32 n) {
        const u32 keys = tile_low(sh.k[stage_of(n)], 0), queries = tile_low(sh.q, 0) + anew(wg) * (64 * 128 / 16);
        begin_products();
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            const u32 within = d % BOX * 2 / 16;
            multiply_queries(s, queries + d / BOX * (Q_BOX * 2 / 16) + within, keys + d / BOX * (K_BOX * 2 / 16) + within, d > 0);
        }
        commit_products();
    }

    // acc += p.v of tile n.
    __device__ void add_values(u32 (&a)[NT / 2][4], u32 n) {
        const u32 values = tile_low(sh.v[stage_of(n)], K_BOX * 2);
        begin_products();
#pragma unroll
        for (int kt = 0; kt < NT / 2; kt++) multiply_values(acc, a[kt], values + kt * (16 * 128 / 16));
        commit_products();
    }

    // Scores become p; m and l move on, and `fall` is what acc is yet to be multiplied with.
    __device__ void weigh(float (&s)[NT][4], float c) {
        float base[2];
        bool big = NATURAL;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = m[r], top_again = s[0][r * 2];
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                top = fmaxf(top, s[nt][r * 2]), top_again = fmaxf(top_again, s[nt][r * 2 + 1]);
            }
            top = fmaxf(top, top_again);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            // A row without a key yet keeps m at -inf and compares with 0.
            base[r] = top == negative_infinity() ? 0.f : top;
            fall[r] = top == m[r] ? 1.f : exp2_fast((m[r] - base[r]) * c);
            m[r] = top;
            if (!NATURAL) big |= fabsf(base[r] * c) > EXACT;
        }
        if (NATURAL || __any_sync(~0u, big)) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[nt][e] -= base[e / 2];
            base[0] = base[1] = 0;
        }
        float sum[2][2] = {};
        const float reference[2] = {base[0] * c, base[1] * c};
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[nt][e];
                x = exp2_fast(NATURAL ? x * c : __fmaf_rn(x, c, -reference[e / 2]));
                sum[e / 2][e % 2] += x;
            }
#pragma unroll
        for (int r = 0; r < 2; r++) l[r] = __fmaf_rn(l[r], fall[r], sum[r][0] + sum[r][1]);
    }

    __device__ static void pack_weights(u32 (&a)[NT / 2][4], const float (&s)[NT][4]) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int r = 0; r < 2; r++) a[nt / 2][nt % 2 * 2 + r] = pack(s[nt][r * 2], s[nt][r * 2 + 1]);
    }

    __device__ void rescale(bool careful) {
        if (!__any_sync(~0u, fall[0] != 1 || fall[1] != 1)) return;
        if (careful) {
#pragma unroll
            for (int nt = 0; nt < VT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[nt][e] = weighed(fall[e / 2], acc[nt][e]);
        } else {
#pragma unroll
            for (int nt = 0; nt < VT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[nt][e] *= fall[e / 2];
        }
    }

    // What is added to the scores, and what hides them.
    __device__ void mask_scores(float (&s)[NT][4], int round, const Seen& seen, int n0, const u32 (&hidden)[2]) {
        if (BOOL_AHEAD) BoolAhead::hide(s, hidden);
        const bool positions = n0 < seen.all_lo || n0 + BN > seen.all_hi;
        if (((!NATURAL && MASK == NO_MASK) || AHEAD) && !positions) return;
        const Place place(h, anew(round), wg);
        const Queries queries{h.p, place.task, place.r0};
        if (!AHEAD && (NATURAL || MASK != NO_MASK)) {
            MaskTile<1, NT> mask;
            mask.fetch(h.p, queries, n0);
            modify_scores<1, NT>(*(float(*)[1][NT][4])&s, h.p, queries, mask, n0, h.p.kv_len, false);
        }
        if (!positions) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = queries.row(0, r).i, first = n0 + threadIdx.x % 4 * 2;
            const int lo = keys_lo(h.p, i) - first;
            const u32 count = max(keys_hi(h.p, i) - first - lo, 0);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if ((u32)(nt * 8 + e - lo) >= count) s[nt][r * 2 + e] = negative_infinity();
                }
        }
    }

    // Bits make room for the next tile's keys at once; biases stay until the scores are there.
    __device__ void look_ahead(BoolAhead& ahead, u32 (&hidden)[2], int n0) const {
        if (BOOL_AHEAD) ahead.pack_hidden(hidden), ahead.fetch(h, n0);
    }
    __device__ void look_ahead(BiasAhead&, u32 (&)[2], int) const {}
    __device__ void add_bias(float (&)[NT][4], BoolAhead&, int, int) const {}
    __device__ void add_bias(float (&s)[NT][4], BiasAhead& ahead, int round, int n0) const {
        const Place place(h, anew(round), wg);
        ahead.add(s, h.p, Queries{h.p, place.task, place.r0}, n0);
        ahead.fetch(h, n0 + BN);
    }

    __device__ void release(u64& barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(barrier);
    }

    // Takes values that are not finite out of the tile at hand, keys n0.., and adds them to the sums of the rows that attend
    // them. In loops: this is rare, and its code should be small.
    __device__ void isolate_values(int round, int n0) {
        constexpr u32 EXPONENT = STORAGE == F16 ? 0x7c00u : 0x7f80u;
        const Params& p = h.p;
        const Place place(h, anew(round), wg);
        const Queries queries{p, place.task, place.r0};
        u8* tile = (u8*)sh.v[stage_of(done)];
        wait(sh.v_full[stage_of(done)], phase_of(done));
        const int keys = min(BN, p.kv_len - n0);
#pragma unroll 1
        for (int at = 0; at < VT * 2; at++) {
            const int c = at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
            u32 found[2] = {0, 0};  // 1: +inf, 2: -inf, 4: NaN
#pragma unroll 1
            for (int j = 0; j < keys; j++) {
                const u32 x = *(const Elem*)(tile + c / BOX * (K_BOX * 2) + swizzled(j, c % BOX));
                if ((x & EXPONENT) != EXPONENT) continue;
                const u32 kind = (x & 0x7fffu) != EXPONENT ? 4 : x >> 15 ? 2 : 1;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const Row row = queries.row(0, r);
                    float bias;
                    const bool seen = n0 + j >= keys_lo(p, row.i) && n0 + j < keys_hi(p, row.i);
                    if (seen && !is_masked(p, row.offset(p.mask_stride), n0 + j, bias)) found[r] |= kind;
                }
            }
#pragma unroll
            for (int nt = 0; nt < VT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (nt * 2 + e % 2 != at || found[e / 2] == 0) continue;
                    const float infinity = -negative_infinity();
                    const u32 kinds = found[e / 2];
                    acc[nt][e] += kinds == 1 ? infinity : kinds == 2 ? -infinity : __uint_as_float(0x7fffffffu);
                }
        }
        // All groups together, once none of them needs what is taken out.
        meet(CAREFUL_TILE, CONSUMERS);
#pragma unroll 1
        for (int at = threadIdx.x; at < V_BOXES * K_BOX; at += CONSUMERS) {
            Elem& x = ((Elem*)tile)[at];
            if ((x & EXPONENT) == EXPONENT) x = 0;
        }
        fence_proxy();
        meet(CAREFUL_TILE, CONSUMERS);
    }

    __device__ void take_turn() { meet(TURN + wg, 256); }
    __device__ void end_turn() { tell(wg == WGS - 1 ? TURN : TURN + 1 + wg, 256); }

    __device__ bool has_non_finite() const {
        float zero[4] = {};
#pragma unroll
        for (int nt = 0; nt < VT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) zero[e] = __fmaf_rn(acc[nt][e], 0.f, zero[e]);
        return zero[0] + zero[1] + (zero[2] + zero[3]) != 0;
    }

    __device__ void store(int round) {
        const Params& p = h.p;
        const Place place(h, anew(round), wg);
        const Queries queries{p, place.task, place.r0};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            l[r] += __shfl_xor_sync(~0u, l[r], 1);
            l[r] += __shfl_xor_sync(~0u, l[r], 2);
            const Row row = queries.row(0, r);
            const bool inside = place.r0 + (int)(threadIdx.x % 32 / 4) + r * 8 < p.rows;
            const Finished finished(p, row, natural_max(p, m[r]), l[r]);
            if (inside && threadIdx.x % 4 == 0) store_lse(p, row, finished.lse);
            const i64 to = row.offset(p.out_stride);
#pragma unroll
            for (int nt = 0; nt < VT; nt++) acc[nt][r * 2] *= finished.factor, acc[nt][r * 2 + 1] *= finished.factor;
            if (p.out_vector) {
#pragma unroll
                for (int nt = 0; nt < VT; nt += 4) {
                    u32 w[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        w[i] = nt + i < VT ? pack(acc[min(nt + i, VT - 1)][r * 2], acc[min(nt + i, VT - 1)][r * 2 + 1]) : 0;
                    }
                    turn(w);
                    const int column = (nt + (int)(threadIdx.x % 4)) * 8;
                    if (inside && column < p.head_dim_v) {
                        *(uint4*)((Elem*)p.out + to + column) = make_uint4(w[0], w[1], w[2], w[3]);
                    }
                }
            } else {
#pragma unroll 1
                for (int at = 0; at < VT * 2; at++) {
                    float x = 0;
#pragma unroll
                    for (int nt = 0; nt < VT * 2; nt++) x = nt == at ? acc[nt / 2][r * 2 + nt % 2] : x;
                    const int column = at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
                    if (inside && column < p.head_dim_v) {
                        store_as(p.out, p.out_dtype, to + column * p.out_stride[3], x);
                    }
                }
            }
        }
    }

    // Rows of other heads and strides: the group loads its own queries.
    __device__ void load_queries(const Task& task, int r0) {
        const Params& p = h.p;
        meet(OWN_QUERIES + wg, 128);
        load_boxes<64, BM, K_BOXES>(
            sh.q + wg * 64 * BOX, (const Elem*)p.q, [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); },
            p.q_stride[3], p.rows - r0, p.head_dim, threadIdx.x % 128
        );
        fence_proxy();
        meet(OWN_QUERIES + wg, 128);
    }

    __device__ void run(const Item& item, int round, bool careful) {
        const Params& p = h.p;
        const Task task(p, item.task);
        const int r0 = item.r0() + wg * 64, first_row = min(r0, p.rows - 1);
        const Tiles tiles(Seen(p, task, item.r0(), min(item.r0() + BM, p.rows)));
        const Seen seen(p, task, first_row, max(min(r0 + 64, p.rows), first_row + 1));
        const float c = exponent_factor(p);
#pragma unroll
        for (int nt = 0; nt < VT; nt++) acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0;
        m[0] = m[1] = negative_infinity(), l[0] = l[1] = 0;

        if (tiles.count > 0) {
            if (copies_queries(p)) {
                wait(sh.q_full, q_done++ & 1);
            } else {
                load_queries(task, r0);
            }
            float s[NT][4];
            u32 a[NT / 2][4], hidden[2];
            typename AheadOf<BIAS_AHEAD>::Type ahead;
            if (AHEAD) ahead.begin(h, anew(round), wg), ahead.fetch(h, tiles.first);
            wait(sh.k_full[stage_of(done)], phase_of(done));
            multiply_keys(s, done);
            look_ahead(ahead, hidden, tiles.first + BN);
            wait_scores<0>(s);
            release(sh.k_empty[stage_of(done)]);
            add_bias(s, ahead, round, tiles.first);
            mask_scores(s, round, seen, tiles.first, hidden);
            weigh(s, c);
            pack_weights(a, s);
            const int end = tiles.first + (tiles.count - 1) * BN;
#pragma unroll 1
            for (int n0 = tiles.first; n0 < end; n0 += BN, done++) {
                const u32 next = done + 1;
                if (careful) isolate_values(round, n0);
                wait(sh.k_full[stage_of(next)], phase_of(next));
                take_turn();
                multiply_keys(s, next);
                wait(sh.v_full[stage_of(done)], phase_of(done));
                add_values(a, done);
                end_turn();
                look_ahead(ahead, hidden, n0 + 2 * BN);
                wait_scores<1>(s);
                release(sh.k_empty[stage_of(next)]);
                add_bias(s, ahead, round, n0 + BN);
                mask_scores(s, round, seen, n0 + BN, hidden);
                weigh(s, c);
                wait_sums<0>(acc);
                release(sh.v_empty[stage_of(done)]);
                pack_weights(a, s);
                rescale(careful);
            }
            if (copies_queries(p)) release(sh.q_empty);
            if (careful) isolate_values(round, end);
            wait(sh.v_full[stage_of(done)], phase_of(done));
            add_values(a, done);
            wait_sums<0>(acc);
            release(sh.v_empty[stage_of(done++)]);
        }
        if (!careful && __any_sync(~0u, has_non_finite())) {
            if (threadIdx.x % 32 == 0) atomicOr(&sh.again[round % NOTES / 32], 1u << round % 32);
        } else {
            store(round);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ HopperParams h) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        init_barrier(sh.q_full, 1), init_barrier(sh.q_empty, WGS * 4);
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(sh.k_full[stage], VECTOR ? 1 : 128), init_barrier(sh.v_full[stage], VECTOR ? 1 : 128);
            init_barrier(sh.k_empty[stage], WGS * 4), init_barrier(sh.v_empty[stage], WGS * 4);
        }
        fence_barriers();
    }
    for (int at = threadIdx.x; at < NOTES / 32; at += THREADS) sh.again[at] = 0;
    __syncthreads();

    if (group == WGS) {
        give_registers<PRODUCER_REGISTERS>();
        Producer producer{h, sh};
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
            if (!VECTOR || threadIdx.x == CONSUMERS) {
#pragma unroll 1
                for (int round = 0;; round++) {
                    const Item item(h, round);
                    if (item.is_beyond(h)) break;
                    if (!item.is_none() && (pass == 0 || comes_again(sh, round))) producer.run(item);
                }
            }
            __syncwarp();
            meet(END, THREADS);
            u32 any = 0;
            for (int at = 0; at < NOTES / 32; at++) any |= sh.again[at];
            if (any == 0) break;
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer consumer{h, sh, group};
        if (group == WGS - 1) tell(TURN, 256);
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
            for (int round = 0;; round++) {
                const Item item(h, round);
                if (item.is_beyond(h)) break;
                if (!item.is_none() && (pass == 0 || comes_again(sh, round))) consumer.run(item, round, pass == 1);
            }
            meet(END, THREADS);
            u32 any = 0;
            for (int at = 0; at < NOTES / 32; at++) any |= sh.again[at];
            if (any == 0) break;
        }
    }
}
