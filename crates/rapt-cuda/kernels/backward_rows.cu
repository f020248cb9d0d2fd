// What gradients need of each row: delta, and what its probabilities are recomputed from; and the gradients of the sinks, which need no more.
//
//   PASS ROWS    64 rows a block, 4 lanes a row    delta = sum d_o*out - d_lse;  top = lse; and of sequences one after another, the list of
//                                                  tiles of keys where backward_hopper.cu takes them (key_tile.cuh)
//   PASS SINKS   a block a head   d_sink = -sum p_sink*delta, over rows and batch entries in one order
//
// A row whose lse is -inf attends nothing: what arrives there counts for nothing. In a lse beyond LARGE the logarithm of the sum drowns; such a row
// gets its maximum and its sum anew, from its own keys: a lane a key. Deliberately absent: any product but of those rows.

#include "backward/key_tile.cuh"
#include "backward/sequences.cuh"
#include "common/softmax.cuh"

#define ROWS 0
#define SINKS 4
constexpr int THREADS = 256, WARPS = THREADS / 32, LANES = 4, ROWS_OF_BLOCK = THREADS / LANES;
// How many blocks a multiprocessor has registers for: loads of 16 bits are to be under way for all of them. Of an H200; elsewhere it was not measured. Rows
// of sequences would be spilled with more than four.
#if __CUDA_ARCH__ == 900
constexpr int MIN_BLOCKS = PASS != ROWS || STORAGE != F16 && STORAGE != BF16 ? 1 : VARLEN ? 4 : 6;
#else
constexpr int MIN_BLOCKS = 1;
#endif
constexpr Acc LARGE = LARGE_LSE;

// The maximum and the sum of exponentials of keys so far.
struct Largest {
    Acc top = negative_infinity(), sum = 0;
    __device__ void add(Acc other_top, Acc other_sum) {
        if (other_sum == 0) return;
        const Acc max = maximum(top, other_top);
        sum = (sum == 0 ? (Acc)0 : sum * exponential(top - max)) + other_sum * exponential(other_top - max);
        top = max;
    }
};

__device__ inline Largest largest_of(const BackwardParams& b, int batch, int head, int at) {
    const Params& p = b.all;
    const Sequence sequence = sequence_of_row(b, batch, at);
    const int i = at - sequence.first_query(), diagonal = i + p.diagonal - sequence.lag(p);
    const Row row(p, Task(batch, head, sequence), i);
    const i64 mask_at = mask_row(p, row);
    const Acc slope = slope_of(p, head);
    const int kv_head = divide(head, p.by_group);
    const Elem* q = (const Elem*)p.q + row_offset(p.q_stride, batch, head, at);
    const Elem* k = (const Elem*)p.k + row_offset(p.k_stride, batch, kv_head, sequence.first_key());
    Largest of;
    for (int j = keys_lo(p, sequence, i) + (int)threadIdx.x % 32; j < keys_hi(p, sequence, i); j += 32) {
        Acc bias = 0;
        if (MASK != NO_MASK && is_masked(p, mask_at, j, bias)) continue;
        const Elem* key = k + j * p.k_stride[2];
        Acc x = 0;
        for (int d = 0; d < p.head_dim; d++) x = fused(widen(q[d * p.q_stride[3]]), widen(key[d * p.k_stride[3]]), x);
        const Score score(p, x, slope, diagonal - j, bias);
        of.add(score.s, 1);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Acc top = __shfl_xor_sync(~0u, of.top, step), sum = __shfl_xor_sync(~0u, of.sum, step);
        of.add(top, sum);
    }
    return of;
}

// sum d_o*out of row i by its lanes, 8 columns a lane at a time: all that is loaded of 64 columns is under way at once.
__device__ inline Acc delta_of(const BackwardParams& b, int batch, int head, int i) {
    const Params& p = b.all;
    const i64 d_o = row_offset(b.d_o_stride, batch, head, i), out = row_offset(p.out_stride, batch, head, i);
    const int dim = p.head_dim_v, from = threadIdx.x % LANES * 8;
    Acc sum = 0;
#if STORAGE == F16 || STORAGE == BF16
    if (b.rows_wide) {
        constexpr int UNITS = 64 / (LANES * 8);
#pragma unroll 1
        for (int first = from; first < dim; first += UNITS * LANES * 8) {
            uint4 x[UNITS], y[UNITS];
#pragma unroll
            for (int n = 0; n < UNITS; n++) {
                const int c = first + n * LANES * 8;
                if (c >= dim) continue;
                x[n] = *(const uint4*)((const Elem*)b.d_o + d_o + c), y[n] = *(const uint4*)((const Elem*)p.out + out + c);
            }
#pragma unroll
            for (int n = 0; n < UNITS; n++) {
                if (first + n * LANES * 8 >= dim) continue;
                const u32 of_x[4] = {x[n].x, x[n].y, x[n].z, x[n].w}, of_y[4] = {y[n].x, y[n].y, y[n].z, y[n].w};
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const u32 shift = e % 2 * 16;
                    sum = fused(widen((Elem)(of_x[e / 2] >> shift)), widen((Elem)(of_y[e / 2] >> shift)), sum);
                }
            }
        }
        return sum_of_lanes<LANES>(sum);
    }
#endif
    // In the same order.
    for (int first = from; first < dim; first += LANES * 8)
        for (int c = first; c < min(first + 8, dim); c++) {
            const Acc arriving = load_as(b.d_o, p.out_dtype, d_o + c * b.d_o_stride[3]);
            sum = fused(arriving, load_as(p.out, p.out_dtype, out + c * p.out_stride[3]), sum);
        }
    return sum_of_lanes<LANES>(sum);
}

// The state of row i, by its lanes, from its lse and its sum of d_o*out, which says nothing where lse is -inf: that may be NaN.
__device__ inline RowState state_of(const BackwardParams& b, int batch, int head, int i, Acc lse, Acc sum) {
    const Params& p = b.all;
    RowState state = {positive_infinity(), 0, 0, 1};
    const bool is_read = lse != negative_infinity();
    if (is_read) {
        // An infinite lse has no probabilities.
        state.top = lse == positive_infinity() ? (Acc)not_a_number() : lse, state.delta = sum;
        if (b.d_lse != nullptr) {
            state.delta -= ((const Acc*)b.d_lse)[batch * b.d_lse_stride[0] + head * b.d_lse_stride[1] + i * b.d_lse_stride[2]];
        }
    }
    // The warp looks for the sums of such rows together, one after another.
    const bool is_large = is_read & (lse > LARGE | lse < -LARGE);
    for (int lane = 0; lane < 32; lane += LANES) {
        if (!__shfl_sync(~0u, (int)is_large, lane)) continue;
        Largest of = largest_of(b, batch, head, __shfl_sync(~0u, i, lane));
        // NaN, and what has no sum that could be relied on, stay as lse has them.
        if (threadIdx.x % 32 / LANES == lane / LANES && of.sum > 0 && of.top != negative_infinity()) {
            if (p.sinks != nullptr) of.add(load_as(p.sinks, p.sinks_dtype, head * p.sinks_stride), 1);
            state.top = of.top, state.log2_sum = logarithm(of.sum) * (Acc)1.4426950408889634, state.inverse_sum = 1 / of.sum;
        }
    }
    return state;
}

#if VARLEN
// Where a tile of part n is taken, of which `left` tiles of the part are left, itself among them: parts are taken `key_set` at a time, and of these always
// the one of which most is left. What such a set has room for begins at `first`, and `end` is behind its tiles.
struct Taken {
    int at = 0, first, end = 0;
    __device__ Taken(const BackwardParams& b, const Parts& of, int n, int left) {
        const int from = n / b.key_set * b.key_set, behind = min(from + b.key_set, of.sequences + 2);
        for (int m = from + (int)threadIdx.x % 32; m < behind; m += 32) {
            const int tiles = (of.begin(m + 1) - of.begin(m) + BLOCK_N - 1) / BLOCK_N;
            end += tiles, at += max(0, tiles - left) + (m < n && tiles >= left);
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) end += __shfl_xor_sync(~0u, end, step), at += __shfl_xor_sync(~0u, at, step);
        first = of.begin(from) / BLOCK_N + from, end += first, at += first;
    }
};
// The tiles of keys that backward_hopper.cu takes, in their order: a warp for each.
__device__ inline void find_key_tiles(const BackwardParams& b) {
    const Params& p = b.all;
    const Parts of_queries = parts_of_queries(b), of_keys = parts_of_keys(b);
    const auto first_tile = [&](int n, int rows) { return clamp(of_queries.begin(n), 0, of_queries.total) / rows + n; };
    KeyTile* const to = (KeyTile*)b.key_tiles;
    const bool is_first = threadIdx.x % 32 == 0;
    for (int at = blockIdx.x * WARPS + threadIdx.x / 32; at < b.key_units; at += gridDim.x * WARPS) {
        const bool is_in_order = of_queries.are_in_order() && of_keys.are_in_order();
        bool is_none = true;
        if (is_in_order) {
            const OwnRows<BLOCK_N, true> own(b, 0, at);
            const Sequence& of = own.sequence;
            const int lag = of.lag(p), n = of.number + 1, nth = own.first / BLOCK_N, step = of.queries < b.long_queries ? b.key_step : -b.key_step;
            const Taken taken(b, of_keys, n, step > 0 ? nth + 1 : (of.keys + BLOCK_N - 1) / BLOCK_N - nth);
            is_none = at >= taken.end;
            if (is_first && own.rows > 0) {
                KeyTile& tile = to[taken.at];
                tile.number = of.number, tile.tile = nth, tile.first_query = of.q0, tile.first_key = of.k0;
                tile.of = {of.queries, of.keys, p.lo_shift - lag, p.hi_shift - lag};
                tile.query_tile = first_tile(n, BLOCK_M), tile.sums_tile = first_tile(n, 16), tile.is_in_order = 1, tile.step = step;
            }
        }
        if (is_first && is_none) {
            to[at].tile = 0, to[at].is_in_order = is_in_order;
            to[at].of = {0, 0, 0, 0};
        }
    }
}
#endif

// A block's rows, also those that backward_hopper.cu has beyond the last of a head or sequence. There nothing is attended; what is read is the last one's.
__device__ inline void find_states(const BackwardParams& b) {
    const Params& p = b.all;
    griddepcontrol_launch_dependents();
    for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < b.zeroed_words; at += (i64)gridDim.x * THREADS) b.zeroed[at] = 0;
    const int matrix = blockIdx.x / b.units, padded = (blockIdx.x - matrix * b.units) * ROWS_OF_BLOCK + threadIdx.x / LANES;
    const int batch = matrix / p.heads, head = matrix - batch * p.heads;
    int i = padded, end = p.q_len;
#if VARLEN
    if (b.log2_lse != nullptr) {
        find_key_tiles(b);
        // A warp's rows lie in one tile of queries.
        static_assert(BLOCK_M % (32 / LANES) == 0, "rows of a warp lie in two tiles");
        const OwnRows<BLOCK_M, false> own(b, 0, (padded - (int)threadIdx.x % 32 / LANES) / BLOCK_M);
        if (own.rows <= 0) return;
        i = own.sequence.first_query() + own.first + padded % BLOCK_M, end = own.sequence.first_query() + own.first + own.rows;
    }
#endif
    const i64 of_lse = batch * p.lse_stride[0] + head * p.lse_stride[1] + i * p.lse_stride[2];
    const Acc lse = i < end ? ((const Acc*)p.lse)[of_lse] : negative_infinity();
    const RowState state = state_of(b, batch, head, i, lse, delta_of(b, batch, head, min(i, end - 1)));
    if (threadIdx.x % LANES != 0) return;
    if (i < end) b.states[state_index(p, batch, head, i)] = state;
#if STORAGE == F16 || STORAGE == BF16
    if (b.log2_lse == nullptr || padded >= b.padded_rows) return;
    float* to = b.log2_lse + (i64)matrix * b.padded_rows + padded;
    to[0] = __fmaf_rn(state.top, LOG2_E, state.log2_sum), to[(i64)b.batch * p.heads * b.padded_rows] = state.delta;
#endif
}

// A block's sink.
__device__ inline void sum_sink(const BackwardParams& b, Acc (&of_warp)[WARPS]) {
    const Params& p = b.all;
    const int head = blockIdx.x;
    const Acc sink = load_as(p.sinks, p.sinks_dtype, head * p.sinks_stride);
    Acc sum = 0;
    for (int batch = 0; batch < b.batch; batch++) {
        for (int i = threadIdx.x; i < p.q_len; i += THREADS) {
            const RowState of = b.states[state_index(p, batch, head, i)];
            if (!is_dead(of)) sum = fused(-product(exponential(sink - of.top), of.inverse_sum), of.delta, sum);
        }
    }
    sum = sum_of_lanes<32>(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < WARPS; warp++) sum += of_warp[warp];
    store_as(b.d_sinks, p.sinks_dtype, head * b.d_sinks_stride, sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) backward(const __grid_constant__ BackwardParams b) {
    extern __shared__ __align__(128) u8 memory[];
    if (PASS == ROWS) find_states(b);
    else sum_sink(b, *(Acc(*)[WARPS])memory);
}
