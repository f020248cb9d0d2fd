// Sequences that lie one after another: where each lies, and what is worked off of it.
//
//   sequence b    queries cu_seqlens_q[b] .. cu_seqlens_q[b + 1], keys cu_seqlens_kv[b] .. cu_seqlens_kv[b + 1]
//   launch        one or two for few queries, one or two for many: the kernel that a call for the sequence alone would have
//   units         what a launch deals to its blocks: blocks of rows, or pairs of them. Sequences with many keys come first
//
// The host has not seen the offsets. Queries of a sequence count where they lie in q, end where they begin or later, and begin where no
// sequence before has any, nor would have: no row is of two. Rows of no sequence become 0, lse -inf. Keys that do not lie in k make the
// sequence's rows NaN. Block 0 deals, the others look for rows of no sequence. Deliberately absent: attention.

#include "common/math.cuh"
#include "common/params.cuh"
#include "common/ptx.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, BUCKETS = 128, LAUNCHES = 3;
// Entries that a thread writes by itself.
constexpr int FEW_UNITS = 8;

// A launch over those sequences that have many queries, or few of from `least_rows` to below `most_rows` rows of a head of keys, and keys from
// `least_keys` to below `most_keys`, or any other number where that is less. DealtLaunch of varlen.rs.
struct VarlenLaunch {
    VarlenTable* table;
    int many;                            // whether it takes sequences with many queries
    int least_rows, most_rows, least_keys, most_keys;
    int task_heads, item_rows;           // item_rows 0: none are of this launch
    int paired;                          // units are a late block of rows and an early one
    int log2_chunk[3], long_from[2];     // of few queries: Ragged of common/params.cuh
    int unused;
};
// Byte for byte VarlenParams of varlen.rs.
struct VarlenParams {
    Params p;
    const int *q, *kv;
    i64 q_step, kv_step;
    int sequences, total_q, total_kv, bottom_right;
    int few_queries, few_rows;  // most queries, and most rows of a head of keys, that are few
    VarlenLaunch launches[LAUNCHES];
};
static_assert(sizeof(VarlenParams) == VARLEN_BYTES, "varlen.rs and varlen.cu disagree on VarlenParams");

// What lies between the rows of two sequences.
struct Gap {
    int from, to;
};

struct Shared {
    int tops[WARPS][2];
    u32 units[LAUNCHES][BUCKETS];
    Gap gaps[THREADS];
};

// The greatest of `x` of all threads before this one and of `carried`, which becomes that of all.
struct Highest {
    int carried = 0;
    __device__ int before(int x, int (&tops)[WARPS][2], int which) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int top = x;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, top, step);
            if (lane >= step) top = max(top, other);
        }
        __syncthreads();
        if (lane == 31) tops[warp][which] = top;
        __syncthreads();
        int before = __shfl_up_sync(~0u, top, 1);
        before = lane == 0 ? carried : max(before, carried);
        int all = carried;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const int of = tops[w][which];
            if (w < warp) before = max(before, of);
            all = max(all, of);
        }
        carried = all;
        return before;
    }
};

// The rows of q of a thread's sequence, if they count, and what lies before them.
struct Rows {
    int from, len;
    bool counts;
    Gap gap;
};

// Sequences of which each thread has one, in their order.
struct Walk {
    Highest offsets, ends;
    __device__ Rows next(const VarlenParams& a, Shared& sh, int b) {
        Rows rows{0, 0, false, {0, 0}};
        int end = 0;
        const bool is_one = b < a.sequences;
        if (is_one) rows.from = a.q[b * a.q_step], end = a.q[(b + 1) * a.q_step];
        const int highest = offsets.before(is_one ? rows.from : 0, sh.tops, 0);
        rows.counts = is_one && rows.from >= highest && end >= rows.from && end <= a.total_q;
        const int last = ends.before(rows.counts ? end : 0, sh.tops, 1);
        if (rows.counts) rows.len = end - rows.from, rows.gap = {last, rows.from};
        return rows;
    }
};

// As divided by on the host (Divisor of params.rs), for n from 1 on.
__device__ inline Divisor divisor(u32 n) {
    if (n == 1) return {0, 0};
    const u32 log2 = 32 - __clz(n - 1);
    return {(u32)(((1ull << (31 + log2)) + n - 1) / n), log2 - 1};
}

// A sequence as its launch works it off. Nothing of it is dealt where it has no rows.
struct Sized {
    VarlenEntry entry;
    int launch, bucket;
    __device__ Sized() : entry{}, launch(-1), bucket(0) {}
    __device__ Sized(const VarlenParams& a, const Rows& rows, int b) : entry{}, launch(-1), bucket(0) {
        if (rows.len == 0) return;
        const int k0 = a.kv[b * a.kv_step], k1 = a.kv[(b + 1) * a.kv_step];
        entry.is_bad = k0 < 0 || k1 < k0 || k1 > a.total_kv;
        entry.q0 = rows.from, entry.q_len = rows.len, entry.number = b;
        if (!entry.is_bad) entry.k0 = k0, entry.kv_len = k1 - k0;
        const int keys = entry.kv_len;
        const int of_head = rows.len * a.p.group;
        const bool few = rows.len <= a.few_queries && of_head <= a.few_rows;
        for (int n = 0; n < LAUNCHES; n++) {
            const VarlenLaunch& of = a.launches[n];
            const bool has_rows = few ? (u32)(of_head - of.least_rows) < (u32)(of.most_rows - of.least_rows) : of.many != 0;
            if (of.item_rows > 0 && has_rows && (u32)(keys - of.least_keys) < (u32)(of.most_keys - of.least_keys)) launch = n;
        }
        if (launch < 0) return;
        const VarlenLaunch& of = a.launches[launch];
        if (a.bottom_right) entry.lag = (a.total_kv - keys) - (a.total_q - rows.len);
        entry.log2_chunk = few ? of.log2_chunk[keys < of.long_from[0] ? 0 : keys < of.long_from[1] ? 1 : 2] : 30;
        const int of_task = of.task_heads * rows.len;
        entry.blocks = (of_task + of.item_rows - 1) / of.item_rows;
        entry.units = of.paired ? (entry.blocks + 1) / 2 : entry.blocks;
        if (of.paired && entry.blocks > 1) entry.short_items = entry.blocks * (of.item_rows / 64) - (of_task + 63) / 64;
        entry.by_units = divisor(entry.units);
        // Four buckets to a power of two.
        const int log2 = 31 - __clz(keys | 1);
        bucket = BUCKETS - 1 - (log2 < 2 ? keys : (log2 - 2) * 4 + (keys >> log2 - 2));
    }
};

__device__ inline void clear_row(const VarlenParams& a, int row) {
    const Params& p = a.p;
    for (int at = threadIdx.x; at < p.heads * p.head_dim_v; at += THREADS) {
        const int head = at / p.head_dim_v, column = at - head * p.head_dim_v;
        store_as(p.out, p.out_dtype, head * p.out_stride[1] + row * p.out_stride[2] + column * p.out_stride[3], 0);
    }
    if (p.lse == nullptr) return;
    for (int head = threadIdx.x; head < p.heads; head += THREADS) {
        ((Acc*)p.lse)[head * p.lse_stride[1] + row * p.lse_stride[2]] = negative_infinity();
    }
}

// Blocks take every so many rows.
__device__ inline void clear_gaps(const VarlenParams& a, Shared& sh) {
    const int own = blockIdx.x - 1, blocks = gridDim.x - 1;
    Walk walk;
    for (int base = 0; base < a.sequences; base += THREADS) {
        const Rows rows = walk.next(a, sh, base + threadIdx.x);
        const bool any = rows.counts && rows.gap.to > rows.gap.from;
        sh.gaps[threadIdx.x] = any ? rows.gap : Gap{0, 0};
        if (!__syncthreads_or(any)) continue;
        for (int n = 0; n < THREADS; n++) {
            for (int row = sh.gaps[n].from + own; row < sh.gaps[n].to; row += blocks) clear_row(a, row);
        }
    }
    for (int row = walk.ends.carried + own; row < a.total_q; row += blocks) clear_row(a, row);
}

// How many units each bucket of a launch has, then where those of a bucket begin. `of` becomes the thread's last sequence.
__device__ inline void count_units(const VarlenParams& a, Shared& sh, Sized& of) {
    for (int at = threadIdx.x; at < LAUNCHES * BUCKETS; at += THREADS) sh.units[at / BUCKETS][at % BUCKETS] = 0;
    __syncthreads();
    Walk walk;
    for (int base = 0; base < a.sequences; base += THREADS) {
        const int b = base + threadIdx.x;
        of = Sized(a, walk.next(a, sh, b), b);
        if (of.launch >= 0) atomicAdd(&sh.units[of.launch][of.bucket], (u32)of.entry.units);
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < LAUNCHES && a.launches[warp].item_rows > 0) {
        u32 before = 0;
        for (int first = 0; first < BUCKETS; first += 32) {
            const u32 own = sh.units[warp][first + lane];
            u32 sum = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(~0u, sum, step);
                if (lane >= step) sum += other;
            }
            sh.units[warp][first + lane] = before + sum - own;
            before += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) a.launches[warp].table->units = before;
    }
    __syncthreads();
}

__device__ inline void deal(const VarlenParams& a, Shared& sh) {
    Sized of;
    count_units(a, sh, of);
    const int lane = threadIdx.x % 32;
    Walk walk;
    for (int base = 0; base < a.sequences; base += THREADS) {
        const int b = base + threadIdx.x;
        if (a.sequences > THREADS) of = Sized(a, walk.next(a, sh, b), b);
        u32 place = 0;
        if (of.launch >= 0) {
            const VarlenLaunch& launch = a.launches[of.launch];
            place = atomicAdd(&sh.units[of.launch][of.bucket], (u32)of.entry.units);
            of.entry.first = place * (a.p.heads / launch.task_heads);
            if (of.entry.units <= FEW_UNITS) {
                for (int n = 0; n < of.entry.units; n++) launch.table->entries[place + n] = of.entry;
            }
        }
        // A warp writes the entries of each of its longer sequences together.
        for (u32 left = __ballot_sync(~0u, of.launch >= 0 && of.entry.units > FEW_UNITS); left != 0; left &= left - 1) {
            const int from = __ffs(left) - 1;
            VarlenEntry entry;
#pragma unroll
            for (int n = 0; n < (int)(sizeof(VarlenEntry) / 4); n++) {
                ((int*)&entry)[n] = __shfl_sync(~0u, ((const int*)&of.entry)[n], from);
            }
            const u32 at = __shfl_sync(~0u, place, from);
            VarlenEntry* to = a.launches[__shfl_sync(~0u, of.launch, from)].table->entries + at;
            for (int n = lane; n < entry.units; n += 32) to[n] = entry;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) varlen(const __grid_constant__ VarlenParams a) {
    __shared__ Shared sh;
    griddepcontrol_launch_dependents();
    if (blockIdx.x == 0) {
        deal(a, sh);
    } else {
        clear_gaps(a, sh);
    }
}
