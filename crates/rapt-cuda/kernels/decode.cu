// Attention on the tensor cores for few queries: bound by how fast K and V arrive.
//
//   A block takes 16 rows (the queries of all heads that share K and V) and one chunk of keys. Its 4 warps read 16 keys at
//   a time, warp w the tiles w, w+4, ..., each through a ring of STAGES tiles of its own: no barrier in the loop.
//   Then the 4 states are put together in the order of the warps, and written out or left for combine.cu.
//
// Chunks have a fixed length, so the bits of a row follow kv_len alone. Deliberately absent: more rows than 16 a block.

constexpr int WARPS = 4, THREADS = WARPS * 32, TILE = 16, NT = TILE / 8;

struct Stage {
    Elem k[TILE * K_ROW], v[TILE * V_ROW];
};
struct Shared {
    Elem q[16 * K_ROW];
    union {
        Stage ring[WARPS][STAGES];
        struct {
            float acc[WARPS][16][DV], m[WARPS][16], l[WARPS][16];
        };
    };
};
static_assert(sizeof(Shared) == SHARED_BYTES, "select.rs and decode.cu disagree on shared memory");

// Computes the block's rows; false if a sum is not finite, with nothing written (never if CAREFUL).
template <bool CAREFUL>
__device__ inline bool attend(const Params& p, Shared& sh) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    u32 block = blockIdx.x;
    const int split = block % p.num_splits;
    block /= p.num_splits;
    const int r0 = (int)(block % p.row_blocks) * 16, task_index = block / p.row_blocks;
    const Task task(p, task_index);
    const int rows = min(16, p.rows - r0);
    const Elem* k = (const Elem*)p.k + task.batch * p.k_stride[0] + task.head / p.group * p.k_stride[1];
    const Elem* v = (const Elem*)p.v + task.batch * p.v_stride[0] + task.head / p.group * p.v_stride[1];

    load_tile<16, D, K_ROW, THREADS>(
        sh.q, (const Elem*)p.q, [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); }, p.q_stride[3],
        p.q_stride[2], rows, p.head_dim, tid
    );
    commit_copies();

    const Seen seen(p, task, r0, r0 + rows);
    const int first = max(seen.lo, split * p.chunk) / TILE * TILE;
    const int end = min(seen.hi, min(p.kv_len, (split + 1) * p.chunk));
    auto load = [&](int n0, int stage) {
        Stage& to = sh.ring[warp][stage];
        if (n0 < end) {
            load_even_tile<TILE, D, K_ROW, 32>(
                to.k, k + n0 * p.k_stride[2], p.k_stride[3], p.k_stride[2], p.kv_len - n0, p.head_dim, lane
            );
            load_even_tile<TILE, DV, V_ROW, 32>(
                to.v, v + n0 * p.v_stride[2], p.v_stride[3], p.v_stride[2], p.kv_len - n0, p.head_dim_v, lane
            );
        }
        commit_copies();
    };

    const float c = exponent_factor(p);
    const Queries queries{p, task, r0};
    Sums<1> sums;
    sums.clear();
    // Tiles are dealt by their place in the chunk, so that what is skipped before them moves none to another warp.
    const int place = (first - split * p.chunk) / TILE;
    int n0 = first + ((warp - place) % WARPS + WARPS) % WARPS * TILE;
    for (int stage = 0; stage < STAGES - 1; stage++) load(n0 + stage * WARPS * TILE, stage);
    wait_copies<STAGES - 2>();
    __syncthreads();
    for (int stage = 0; n0 < end; n0 += WARPS * TILE) {
        load(n0 + (STAGES - 1) * WARPS * TILE, (stage + STAGES - 1) % STAGES);
        wait_copies<STAGES - 1>();
        __syncwarp();
        const Stage& tile = sh.ring[warp][stage];
        float s[1][NT][4];
        MaskTile<1, NT> mask;
        mask.fetch(p, queries, n0);
        multiply_keys<1, NT>(s, sh.q, tile.k);
        const bool positions = n0 < seen.all_lo || n0 + TILE > min(seen.all_hi, end);
        if (NATURAL || MASK != NO_MASK || positions) {
            modify_scores<1, NT>(s, p, queries, mask, n0, end, positions);
        }
        u32 a[1][NT / 2][4];
        sums.template weigh<CAREFUL, NT>(a, s, c);
        sums.template add_values<CAREFUL, NT / 2>(a, tile.v);
        __syncwarp();
        stage = (stage + 1) % STAGES;
    }
    wait_copies<0>();
    if (!CAREFUL && __syncthreads_or(sums.has_non_finite())) return false;
    sums.reduce();

    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = lane / 4 + h * 8;
#pragma unroll
        for (int nt = 0; nt < DV / 8; nt++)
#pragma unroll
            for (int e = 0; e < 2; e++) sh.acc[warp][r][nt * 8 + lane % 4 * 2 + e] = sums.acc[0][nt][h * 2 + e];
        if (lane % 4 == 0) sh.m[warp][r] = natural_max(p, sums.m[0][h]), sh.l[warp][r] = sums.l[0][h];
    }
    __syncthreads();

    for (int r = warp; r < rows; r += WARPS) {
        float m = negative_infinity(), l = 0, weight[WARPS];
        for (int w = 0; w < WARPS; w++) m = fmaxf(m, sh.l[w][r] == 0 ? negative_infinity() : sh.m[w][r]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            weight[w] = sh.l[w][r] == 0 ? 0.f : expf(sh.m[w][r] - m);
            l += weight[w] * sh.l[w][r];
        }
        const Row row(p, task, r0 + r);
        const Finished finished(p, row, m, l);
        float* to = p.num_splits > 1 ? partial(p, task_index, r0 + r, split) : nullptr;
        const i64 at = row.offset(p.out_stride);
        for (int column = lane; column < p.head_dim_v; column += 32) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += weighed(weight[w], sh.acc[w][r][column]);
            if (to != nullptr) {
                to[column] = sum;
            } else {
                store_as(p.out, p.out_dtype, at + column * p.out_stride[3], l == 0 ? 0.f : sum * finished.factor);
            }
        }
        if (to == nullptr && lane == 0) store_lse(p, row, finished.lse);
        if (to != nullptr && lane == 0) to[p.head_dim_v] = m, to[p.head_dim_v + 1] = l;
    }
    return true;
}

__device__ __noinline__ void attend_carefully(const Params& p, Shared& sh) { attend<true>(p, sh); }

extern "C" __global__ void __launch_bounds__(THREADS) attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    Shared& sh = *(Shared*)memory;
    if (!attend<false>(p, sh)) attend_carefully(p, sh);
}
