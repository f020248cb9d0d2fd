// Attention on the tensor cores for few queries: bound by how fast K and V arrive.
//
//   An item is 16 rows (the queries of all heads that share K and V) and one chunk of keys. A block takes a run of items:
//     4 warps read TILE keys at a time, warp w the tiles w, w+4, ... of a chunk, each through a ring of STAGES tiles of its
//     own that runs on from item to item: no warp waits for another, and no load for an item's end
//     at the end of an item they leave their states to a fifth warp, which puts them together in the order of the warps and
//     folds chunk after chunk, or, where the block does not see the whole row (p.is_cut), leaves the chunk to combine.cu
//
// Blocks are as many as fit the device at once: none starts while another ends. Chunks follow kv_len alone, and with them
// the bits of a row; which block takes an item is no matter. Deliberately absent: more rows than 16 an item.

constexpr int WARPS = 4, THREADS = (WARPS + 1) * 32, NT = TILE / 8;
constexpr int STATE_ROW = DV + 8;  // floats: 4 rows of 8 fall into distinct banks

struct Stage {
    Elem k[TILE * K_ROW], v[TILE * V_ROW];
};
struct Shared {
    Stage ring[WARPS][STAGES];
    Elem q[16 * K_ROW];
    // What the warps leave: half of an item's rows at a time.
    float left[WARPS][8][STATE_ROW], left_m[WARPS][8], left_l[WARPS][8];
    // The rows so far, of the fifth warp alone.
    float acc[16][DV], m[16], l[16];
    // Items with a sum that is not finite lie within.
    u32 odd_from, odd_to;
};
static_assert(sizeof(Shared) == SHARED_BYTES, "select.rs and decode.cu disagree on shared memory");

// Named barriers: the fifth warp waits for all (FULL), a warp for the fifth (EMPTY + warp), the four for one another.
constexpr int FULL = 1, EMPTY = 2, FOUR = EMPTY + WARPS;
__device__ inline void wait_at(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive_at(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// What an item is: rows r0.. of a task (all heads of kv_head), and the keys of one split. Divided out once: the items of a
// run follow one another.
struct Item {
    int split, row_block, kv_head, batch, kv_heads;
    __device__ Item(const Params& p, u32 item) {
        const u32 rows = divide(item, p.by_num_splits), task = divide(rows, p.by_row_blocks);
        split = item - rows * p.num_splits, row_block = rows - task * p.row_blocks;
        kv_heads = divide(p.heads, p.by_group);
        batch = divide(task, p.by_tasks), kv_head = task - batch * kv_heads;
    }
    __device__ void step(const Params& p) {
        if (++split < p.num_splits) return;
        split = 0;
        if (++row_block < p.row_blocks) return;
        row_block = 0;
        if (++kv_head < kv_heads) return;
        kv_head = 0, batch++;
    }
    __device__ int r0() const { return row_block * 16; }
    __device__ Task task(const Params& p) const { return Task(batch, kv_head * p.group); }
    __device__ int task_index() const { return batch * kv_heads + kv_head; }
    __device__ Seen seen(const Params& p) const { return Seen(p, task(p), r0(), min(r0() + 16, p.rows)); }
};

// A warp's tiles of an item: those from n0 on, WARPS tiles apart, that begin before `end`.
struct Tiles {
    int n0, end;
    __device__ Tiles(const Params& p, const Item& item, const Seen& seen) {
        const int warp = threadIdx.x / 32;
        const int first = max(seen.lo, item.split * p.chunk) / TILE * TILE;
        end = min(seen.hi, min(p.kv_len, (item.split + 1) * p.chunk));
        // Dealt by their place in the chunk, so that what is skipped before them moves none to another warp.
        const int place = (first - item.split * p.chunk) / TILE;
        n0 = first + ((warp - place) % WARPS + WARPS) % WARPS * TILE;
    }
};

// Fills a warp's ring, tile after tile, item after item.
struct Loader {
    Item item;
    u32 left;
    int n0, end;
    const Elem *k, *v;

    __device__ Loader(const Params& p, const Item& first, u32 count) : item(first), left(count) { enter(p); }

    __device__ void enter(const Params& p) {
        const Tiles tiles(p, item, item.seen(p));
        n0 = tiles.n0, end = tiles.end;
        k = (const Elem*)p.k + item.batch * p.k_stride[0] + item.kv_head * p.k_stride[1];
        v = (const Elem*)p.v + item.batch * p.v_stride[0] + item.kv_head * p.v_stride[1];
    }

    __device__ void load(const Params& p, Stage& to) {
        const int lane = threadIdx.x % 32;
        while (n0 >= end && left > 1) left--, item.step(p), enter(p);
        if (n0 < end) {
            load_even_tile<TILE, D, 32>(
                to.k, k + n0 * p.k_stride[2], p.k_stride[3], p.k_stride[2], p.kv_len - n0, p.head_dim, lane
            );
            load_even_tile<TILE, DV, 32>(
                to.v, v + n0 * p.v_stride[2], p.v_stride[3], p.v_stride[2], p.kv_len - n0, p.head_dim_v, lane
            );
            n0 += WARPS * TILE;
        }
        commit_copies();
    }
};

// The four warps' part of `count` items from `item` on.
template <bool CAREFUL>
__device__ inline void attend(const Params& p, Shared& sh, Item item, u32 count) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    Loader loader(p, item, count);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) loader.load(p, sh.ring[warp][stage]);
    const float c = exponent_factor(p);
    bool is_left = false;
    int stage = 0;
    for (u32 done = 0; done < count; done++, item.step(p)) {
        const Task task = item.task(p);
        const Seen seen = item.seen(p);
        const int r0 = item.r0(), rows = min(16, p.rows - r0);
        if (done == 0 || item.split == 0) {
            // Other rows than before.
            wait_at(FOUR, WARPS * 32);
            load_tile<16, D, WARPS * 32>(
                sh.q, (const Elem*)p.q, [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); }, p.q_stride[3],
                p.q_stride[2], rows, p.head_dim, tid
            );
            commit_copies();
            wait_copies<0>();
            wait_at(FOUR, WARPS * 32);
        }
        const Queries queries{p, task, r0};
        Sums<1> sums;
        sums.clear();
        const Tiles tiles(p, item, seen);
        for (int n0 = tiles.n0; n0 < tiles.end; n0 += WARPS * TILE) {
            loader.load(p, sh.ring[warp][stage == 0 ? STAGES - 1 : stage - 1]);
            wait_copies<STAGES - 1>();
            __syncwarp();
            const Stage& tile = sh.ring[warp][stage];
            float s[1][NT][4];
            MaskTile<1, NT> mask;
            mask.fetch(p, queries, n0);
            multiply_keys<1, NT>(s, sh.q, tile.k);
            const bool positions = n0 < seen.all_lo || n0 + TILE > min(seen.all_hi, tiles.end);
            if (NATURAL || MASK != NO_MASK || positions) {
                modify_scores<1, NT>(s, p, queries, mask, n0, tiles.end, positions);
            }
            u32 a[1][NT / 2][4];
            sums.template weigh<CAREFUL, NT>(a, s, c, 0.f);
            sums.template add_values<CAREFUL, NT / 2>(a, tile.v);
            __syncwarp();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        sums.reduce();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (h * 8 >= rows) break;
            if (is_left) wait_at(EMPTY + warp, 64);
            is_left = true;
            const int g = lane / 4;
            if (h * 8 + g < rows) {
#pragma unroll
                for (int nt = 0; nt < DV / 8; nt++) {
                    const float2 pair = {sums.acc[0][nt][h * 2], sums.acc[0][nt][h * 2 + 1]};
                    *(float2*)&sh.left[warp][g][nt * 8 + lane % 4 * 2] = pair;
                }
            }
            if (lane % 4 == 0) sh.left_m[warp][g] = natural_max(p, sums.m[0][h]), sh.left_l[warp][g] = sums.l[0][h];
            arrive_at(FULL, THREADS);
        }
    }
    wait_copies<0>();
    if (is_left) wait_at(EMPTY + warp, 64);
}

// The fifth warp's part of the same items.
__device__ inline void gather(const Params& p, Shared& sh, Item item, u32 count) {
    constexpr int PER_LANE = (DV + 31) / 32;
    const int lane = threadIdx.x % 32;
    u32 odd_from = count, odd_to = 0;
    for (u32 done = 0; done < count; done++, item.step(p)) {
        const int r0 = item.r0(), rows = min(16, p.rows - r0);
        bool is_odd = false;
        for (int half = 0; half < rows; half += 8) {
            wait_at(FULL, THREADS);
#pragma unroll 1
            for (int r = half; r < min(half + 8, rows); r++) {
                float m = negative_infinity(), l = 0, weight[WARPS];
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    if (sh.left_l[w][r - half] != 0) m = fmaxf(m, sh.left_m[w][r - half]);
                }
#pragma unroll
                for (int w = 0; w < WARPS; w++) {
                    const float share = sh.left_l[w][r - half];
                    weight[w] = share == 0 ? 0.f : expf(sh.left_m[w][r - half] - m);
                    l += weight[w] * share;
                }
                float sum[PER_LANE];
#pragma unroll
                for (int n = 0; n < PER_LANE; n++) {
                    const int column = min(lane + n * 32, DV - 1);
                    sum[n] = 0;
#pragma unroll
                    for (int w = 0; w < WARPS; w++) sum[n] += weighed(weight[w], sh.left[w][r - half][column]);
                    is_odd |= !is_finite(sum[n]);
                }
                if (p.is_cut) {
                    float* to = partial(p, item.task_index(), r0 + r, item.split);
#pragma unroll
                    for (int n = 0; n < PER_LANE; n++) {
                        if (lane + n * 32 < p.head_dim_v) to[lane + n * 32] = sum[n];
                    }
                    if (lane == 0) to[p.head_dim_v] = m, to[p.head_dim_v + 1] = l;
                    continue;
                }
                float so_far = item.split == 0 ? negative_infinity() : sh.m[r];
                float l_so_far = item.split == 0 ? 0.f : sh.l[r];
                const Fold fold(so_far, m);
                l_so_far = fold.add(l_so_far, l);
#pragma unroll
                for (int n = 0; n < PER_LANE; n++) {
                    const int column = min(lane + n * 32, DV - 1);
                    sum[n] = fold.add(item.split == 0 ? 0.f : sh.acc[r][column], sum[n]);
                }
                if (item.split + 1 < p.num_splits) {
                    __syncwarp();
#pragma unroll
                    for (int n = 0; n < PER_LANE; n++) {
                        if (lane + n * 32 < DV) sh.acc[r][lane + n * 32] = sum[n];
                    }
                    if (lane == 0) sh.m[r] = so_far, sh.l[r] = l_so_far;
                    __syncwarp();
                    continue;
                }
                const Row row(p, item.task(p), r0 + r);
                const Finished finished(p, row, so_far, l_so_far);
                const i64 at = row.offset(p.out_stride);
#pragma unroll
                for (int n = 0; n < PER_LANE; n++) {
                    const int column = lane + n * 32;
                    if (column < p.head_dim_v) {
                        const float x = l_so_far == 0 ? 0.f : sum[n] * finished.factor;
                        store_as(p.out, p.out_dtype, at + column * p.out_stride[3], x);
                    }
                }
                if (lane == 0) store_lse(p, row, finished.lse);
            }
#pragma unroll
            for (int w = 0; w < WARPS; w++) arrive_at(EMPTY + w, 64);
        }
        if (__any_sync(~0u, is_odd)) odd_from = min(odd_from, done), odd_to = done + 1;
    }
    if (lane == 0) sh.odd_from = odd_from, sh.odd_to = odd_to;
}

__device__ __noinline__ void attend_carefully(const Params& p, Shared& sh, Item item, u32 count) {
    attend<true>(p, sh, item, count);
}

// Two blocks to a multiprocessor, where registers for that are enough.
extern "C" __global__ void __launch_bounds__(THREADS, DV > 128 ? 1 : 2) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    Shared& sh = *(Shared*)memory;
    begin_dependents();
    // Runs of whole rows, or of chunks wherever they cut a row; the first runs take what is left over.
    const u32 unit = p.is_cut ? 1 : p.num_splits;
    const u32 units = p.is_cut ? p.items : divide(p.items, p.by_num_splits);
    const u32 each = units / gridDim.x, over = units - each * gridDim.x;
    const u32 first = (each * blockIdx.x + min(blockIdx.x, over)) * unit;
    const u32 count = (each + (blockIdx.x < over ? 1 : 0)) * unit;
    Item item(p, first);
    const bool is_reader = threadIdx.x < WARPS * 32;
    if (is_reader) attend<false>(p, sh, item, count);
    else gather(p, sh, item, count);
    __syncthreads();
    if (sh.odd_from >= sh.odd_to) return;
    // The rows, or chunks, from the first such to the last, once more.
    const u32 from = sh.odd_from / unit * unit, to = (sh.odd_to + unit - 1) / unit * unit;
    for (u32 n = 0; n < from; n++) item.step(p);
    __syncthreads();
    if (is_reader) attend_carefully(p, sh, item, to - from);
    else gather(p, sh, item, to - from);
}
