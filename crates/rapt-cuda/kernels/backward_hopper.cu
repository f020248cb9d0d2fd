// Gradients of float16 and bfloat16 on the tensor cores of compute capability 9.0 by wgmma: dq, dk and dv of a pair of tiles together, five
// products in one pass over scores.
//
//   A block stays on its multiprocessor and takes items, in their order: BLOCK_N keys of a key head, and the queries that see them, of all
//   heads of the group, in tiles of BLOCK_M rows (backward/hopper_items.cuh).
//   producer (1 warp, or 2)    K and V of the item; q with lse and delta, and d_o, through rings of 3 and 2 stages (backward/hopper_load.cuh)
//   consumers (2 x 4 warps)    64 keys each, per tile of queries, transposed: keys are the rows of scores
//
//     s = K @ q.T                            has been computed at the end of the tile before
//     dp = V @ d_o.T                         under way
//     dk += ds @ q                           of the tile before, under way behind it
//     p = exp2(s * c - lse + bias)           of pairs that are attended, else 0
//     dv += p @ d_o                          under way
//     ds = p * (dp - delta)                  to shared memory, for both groups
//     dq_part = ds.T @ K                     of the tile before, under way: half of the columns each
//     s = K @ q.T                            of the next tile, under way behind it: dq_part to shared memory
//   hand over (a warp a group) dq += dq_part in device memory, in one order of keys: a tile waits for its turn, a count in device memory.
//                              Items are taken in that order, so that whatever is waited for was taken before. float32.
//
// p and ds are rounded to the storage dtype where they are multiplied, and nowhere else. dq_part lies in fragments, as threads hold it:
// backward_parts.cu makes rows of them, and multiplies by softmax_scale.
// A head with a sum that is not finite, or a lse that is not relied on, is noted: backward_mma.cu computes it again, behind this.
// Deliberately absent: softcap and slopes, biases of 32 bits, and head dims above 128 (backward_mma.cu).

#include "backward/hopper_mask.cuh"
#include "common/softmax.cuh"
#include "hopper/wgmma.cuh"

DEFINE_WGMMA_QK(wgmma_scores, BLOCK_M)
DEFINE_WGMMA_HELD(wgmma_held_scores, BLOCK_M, 0)
DEFINE_WGMMA_KM(wgmma_dk, HEAD_DIM)
DEFINE_WGMMA_PV(wgmma_held_dk, HEAD_DIM)
DEFINE_WGMMA_PV(wgmma_dv, HEAD_DIM_V)
DEFINE_WGMMA_TT(wgmma_dq, DQ_COLUMNS)

constexpr int NT = BM / 8, KT = BM / 16;
// Whether rows of K and V, and ds of a tile, are held in registers where they are operands: they are read from shared memory once.
constexpr bool HOLDS = D <= 64 && DV <= 64;

struct Consumer {
    const BackwardHopperParams& h;
    Shared& sh;
    const int group;
    Accumulator<D / 8> dk;
    Accumulator<DV / 8> dv;
    u32 done = 0;  // tiles of queries
    Place<KV_STAGES> kv;
    Place<Q_STAGES> q;
    OperandA<HOLDS ? D / 16 : 1> keys;
    OperandA<HOLDS ? DV / 16 : 1> values;
    OperandA<KT> ds = {};

    // This warp's rows of a tile of keys.
    template <int TILES>
    __device__ void hold(OperandA<TILES>& rows, const Elem* tile) const {
        const int lane = threadIdx.x % 32;
        const u32 row = shared_address(tile) + (group * 64 + threadIdx.x % 128 / 32 * 16) * 128 + stmatrix_row(lane);
#pragma unroll
        for (int kt = 0; kt < TILES; kt++) ldmatrix(rows[kt], stmatrix_unit(row, lane, kt * 2, 0));
    }

    // Rows of this group's keys times those of a tile of queries, over WIDTH columns: s of K and q, dp of V and d_o.
    template <int WIDTH, int TILES>
    __device__ void multiply_rows(Accumulator<NT>& x, OperandA<TILES>& held, const Elem* of_keys, const Elem* of_queries) {
        const u32 keys = tile_low(of_keys, 0) + group * (64 * 128 / 16), queries = tile_low(of_queries, 0);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < WIDTH; d += 16) {
            const u32 within = d % BOX * 2 / 16, at = queries + d / BOX * (Q_BOX * 2 / 16) + within;
            if constexpr (HOLDS) wgmma_held_scores(x, held[d / 16], at, d > 0);
            else wgmma_scores(x, keys + d / BOX * (K_BOX * 2 / 16) + within, at, d > 0);
        }
        wgmma_commit();
    }
    __device__ void add_dv(OperandA<KT>& p, u32 n, bool add) {
        const u32 arriving = tile_low(sh.d_o[n % 2], Q_BOX * 2);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) wgmma_dv(dv, p[kt], arriving + kt * (16 * 128 / 16), add || kt > 0);
        wgmma_commit();
    }
    // Of ds of tile n, and its queries.
    __device__ void add_dk(u32 n, u32 stage, bool add) {
        const u32 rows = tile_low(sh.ds[n % 2], 0) + group * (64 * 128 / 16), queries = tile_low(sh.q[stage], Q_BOX * 2);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) {
            const u32 at = queries + kt * (16 * 128 / 16);
            if constexpr (HOLDS) wgmma_held_dk(dk, ds[kt], at, add || kt > 0);
            else wgmma_dk(dk, rows + kt * (16 * 2 / 16), at, add || kt > 0);
        }
        wgmma_commit();
    }
    // Columns of this group, over all keys of the tile.
    __device__ void multiply_ds(Accumulator<DQ_COLUMNS / 8>& dq, u32 n) {
        const u32 ds = tile_low(sh.ds[n % 2], 0);
        const u32 keys = tile_low(sh.k[kv.stage], 0) + (BOXES > 1 ? group * (K_BOX * 2 / 16) : group * (DQ_COLUMNS * 2 / 16));
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < BN / 16; kt++) wgmma_dq(dq, ds + kt * (16 * 128 / 16), keys + kt * (16 * 128 / 16), kt > 0);
        wgmma_commit();
    }

    // Pairs of the tile that positions leave out weigh nothing.
    __device__ void leave_out(Accumulator<NT>& p, const Item& item, int i0) const {
        const Params& q = h.b.all;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int j = item.first() + key_row() + r * 8;
            // Queries first..end see the key.
            int first = max(0, j - q.hi_shift + 1), end = min(q.q_len, j - q.lo_shift + 1);
            if (j >= q.kv_len) end = first;
            first -= i0 + (int)lane_column(threadIdx.x), end -= i0 + (int)lane_column(threadIdx.x);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (nt * 8 + e < first || nt * 8 + e >= end) p[nt][r * 2 + e] = 0;
                }
        }
    }
    // This thread's first row of the item's keys.
    __device__ int key_row() const { return group * 64 + threadIdx.x % 128 / 32 * 16 + lane_row(threadIdx.x); }

    __device__ void put_ds(u32 n) const {
        const int lane = threadIdx.x % 32;
        const u32 row = shared_address(sh.ds[n % 2]) + (group * 64 + threadIdx.x % 128 / 32 * 16) * 128 + stmatrix_row(lane);
#pragma unroll
        for (int kt = 0; kt < KT; kt++) stmatrix(stmatrix_unit(row, lane, kt * 2, 0), ds[kt][0], ds[kt][1], ds[kt][2], ds[kt][3]);
    }

    // Numbers of this thread's queries of columns 8 * nt.. of scores.
    __device__ static float2 of_queries(const float* numbers, int nt) { return *(const float2*)(numbers + nt * 8 + lane_column((int)threadIdx.x)); }

    // Scores of the tile at hand become p.
    __device__ void exponentiate(Accumulator<NT>& s, MaskColumns& mask) const {
        const float c = (float)h.b.all.scale * LOG2_E;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float2 lse = of_queries(sh.lse[q.stage], nt);
            mask.load(nt);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                s[nt][r * 2] = exp2_approx(mask.applied(__fmaf_rn(s[nt][r * 2], c, -lse.x), nt, r, 0));
                s[nt][r * 2 + 1] = exp2_approx(mask.applied(__fmaf_rn(s[nt][r * 2 + 1], c, -lse.y), nt, r, 1));
            }
        }
    }
    // ds of the tile at hand, as an operand.
    __device__ void weigh(const Accumulator<NT>& p, const Accumulator<NT>& dp) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const float2 delta = of_queries(sh.delta[q.stage], nt);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float low = p[nt][r * 2] * (dp[nt][r * 2] - delta.x), high = p[nt][r * 2 + 1] * (dp[nt][r * 2 + 1] - delta.y);
                ds[operand_tile(nt)][operand_word(nt, r)] = pack(low, high);
            }
        }
    }

    // The part of dq of the nth tile.
    __device__ void hand_over(const Accumulator<DQ_COLUMNS / 8>& dq, u32 n) {
        const u32 stage = n % DQ_STAGES;
        float4* to = (float4*)sh.dq[group][stage] + threadIdx.x % 128;
        mbarrier_wait(sh.dq_empty[group][stage], n / DQ_STAGES & 1 ^ 1);
#pragma unroll
        for (int nt = 0; nt < DQ_COLUMNS / 8; nt++) to[nt * 128] = {dq[nt][0], dq[nt][1], dq[nt][2], dq[nt][3]};
        fence_proxy_async();
        mbarrier_arrive(sh.dq_full[group][stage]);
    }

    // Rows of a gradient: a warp's 16 through its rows of ds, which nobody reads any more.
    template <int TILES>
    __device__ void store(const Accumulator<TILES>& sums, void* to, const i64 (&stride)[4], const Item& item, int dim, bool wide, float factor) {
        const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x % 128 / 32 * 16;
        u8* tile = (u8*)sh.ds + row * 128;
        const u32 at = shared_address(tile) + stmatrix_row(lane);
        const auto word = [&](int nt, int r) { return pack(sums[nt][r * 2] * factor, sums[nt][r * 2 + 1] * factor); };
        __syncwarp();
#pragma unroll
        for (int nt = 0; nt < TILES; nt += 2) {
            const u32 unit = stmatrix_unit(at, lane, nt % 8, 0) + nt / 8 * sizeof(sh.ds[0]);
            stmatrix(unit, word(nt, 0), word(nt, 1), word(nt + 1, 0), word(nt + 1, 1));
        }
        __syncwarp();
        const int rows = min(16, h.b.all.kv_len - item.first() - row), c = out_column(lane);
        Elem* from = (Elem*)to + row_offset(stride, item.batch, item.kv_head, item.first() + row);
#pragma unroll
        for (int box = 0; box < (TILES + 7) / 8; box++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = out_row(lane, i), first = box * BOX + c;
                if (r >= rows || first >= dim) continue;
                const uint4 x = *(const uint4*)(tile + box * sizeof(sh.ds[0]) + swizzle_128b(r, c));
                if (wide) {
                    *(uint4*)(from + r * stride[2] + first) = x;
                } else {
                    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        if (first + e < dim) from[r * stride[2] + (first + e) * stride[3]] = (Elem)(words[e / 2] >> e % 2 * 16);
                    }
                }
            }
    }

    // Of keys that no query sees.
    __device__ void store_nothing(const Item& item) const {
        const BackwardParams& b = h.b;
        for (int at = threadIdx.x; at < BN * max(b.all.head_dim, b.all.head_dim_v); at += CONSUMERS) {
            const int j = item.first() + at % BN, c = at / BN;
            if (j >= b.all.kv_len) continue;
            if (c < b.all.head_dim) ((Elem*)b.dk)[row_offset(b.dk_stride, item.batch, item.kv_head, j) + c * b.dk_stride[3]] = 0;
            if (c < b.all.head_dim_v) ((Elem*)b.dv)[row_offset(b.dv_stride, item.batch, item.kv_head, j) + c * b.dv_stride[3]] = 0;
        }
    }

    __device__ void run() {
        const BackwardParams& b = h.b;
        const bool is_first = threadIdx.x % 32 == 0;
        Accumulator<NT> s;
#pragma unroll 1
        for (u32 round = 0;; round++) {
            mbarrier_wait(sh.item_full[round % 2], round / 2 & 1);
            const Item item = as_uniform(sh.items[round % 2]);
            if (item.tile < 0) break;
            if (item.tiles == 0) {
                mbarrier_arrive_if(sh.item_empty[round % 2], is_first);
                store_nothing(item);
                continue;
            }
            mbarrier_wait(sh.k_full[kv.stage], kv.phase);
            mbarrier_wait(sh.q_full[q.stage], q.phase);
            if (HOLDS) hold(keys, sh.k[kv.stage]);
            multiply_rows<D>(s, keys, sh.k[kv.stage], sh.q[q.stage]);
            wgmma_wait<0>(s);
            mbarrier_wait(sh.v_full[kv.stage], kv.phase);
            if (HOLDS) hold(values, sh.v[kv.stage]);
            const int whole_from = ::whole_from(h.items, item), whole_to = ::whole_to(h.items, item);
            const int step = h.items.step, behind = item.first_tile + item.tiles * step;
            int i = item.first_tile;
            MaskColumns mask(b.all, sh, group);
            u32 before = q.stage;  // of the queries of the tile before
#pragma unroll 1
            for (int left = item.tiles * b.all.group, n = 0; left > 0; left--, n++, done++) {
                const int i0 = i * BM;
                i = i + step == behind ? item.first_tile : i + step;
                Accumulator<NT> dp;
                mbarrier_wait(sh.d_o_full[done % 2], done / 2 & 1);
                multiply_rows<DV>(dp, values, sh.v[kv.stage], sh.d_o[done % 2]);
                // Where there is no tile before, of whatever lies there: nothing is added to that.
                add_dk(done + 1, before, n > 1);
#if MASK != NO_MASK
                mbarrier_wait(sh.mask_full, done & 1);
                exponentiate(s, mask);
                __syncwarp();
                mbarrier_arrive_if(sh.mask_empty, is_first);
#else
                exponentiate(s, mask);
#endif
                if (i0 < whole_from | i0 > whole_to) leave_out(s, item, i0);
                OperandA<KT> p;
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int r = 0; r < 2; r++) p[operand_tile(nt)][operand_word(nt, r)] = pack(s[nt][r * 2], s[nt][r * 2 + 1]);
                add_dv(p, done, n > 0);
                mbarrier_wait(sh.ds_empty[done % 2], done / 2 & 1 ^ 1);
                wgmma_wait<1>(dp);
                wgmma_wait<1>(dk);
                mbarrier_arrive_if(sh.q_empty[before], is_first & (n > 0));
                weigh(s, dp);
                put_ds(done);
                fence_proxy_async();
                // The products of this group read what its four warps have put there.
                bar_sync(OWN_DS + group, 128);
                mbarrier_arrive_if(sh.ds_full[done % 2], is_first);
                // dq of the tile before: the other group is not waited for.
                Accumulator<DQ_COLUMNS / 8> dq;
                if (n > 0) mbarrier_wait(sh.ds_full[(done + 1) % 2], (done - 1) / 2 & 1);
                multiply_ds(dq, done + 1);
                before = q.stage;
                q.advance();
                if (left > 1) mbarrier_wait(sh.q_full[q.stage], q.phase);
                // Of whatever lies there behind the last one.
                multiply_rows<D>(s, keys, sh.k[kv.stage], sh.q[q.stage]);
                wgmma_wait<1>(dq);
                mbarrier_arrive_if(sh.d_o_empty[done % 2], is_first);
                if (n > 0) {
                    mbarrier_arrive_if(sh.ds_empty[(done + 1) % 2], is_first);
                    hand_over(dq, done - 1);
                }
                // Nothing is under way where the loop begins again: what is there is done one by one (C7514).
                wgmma_wait<0>(s);
                wgmma_wait<0>(dv);
            }
            Accumulator<DQ_COLUMNS / 8> dq;
            mbarrier_wait(sh.ds_full[(done + 1) % 2], (done - 1) / 2 & 1);
            multiply_ds(dq, done + 1);
            add_dk(done + 1, before, item.tiles * b.all.group > 1);
            wgmma_wait<1>(dq);
            hand_over(dq, done - 1);
            wgmma_wait<0>(dk);
            mbarrier_arrive_if(sh.q_empty[before], is_first);
            mbarrier_arrive_if(sh.kv_empty[kv.stage], is_first);
            kv.advance();
            // The other group has read ds too: rows of gradients come there.
            bar_sync(DS, CONSUMERS);
            mbarrier_arrive_if(sh.ds_empty[(done + 1) % 2], is_first);
            mbarrier_arrive_if(sh.item_empty[round % 2], is_first);
            if (non_finite(dk) + non_finite(dv) != 0) note_odd(b, item.batch, item.kv_head);
            store(dk, b.dk, b.dk_stride, item, b.all.head_dim, b.dk_wide, (float)b.all.scale);
            store(dv, b.dv, b.dv_stride, item, b.all.head_dim_v, b.dv_wide, 1);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ BackwardHopperParams h) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const int group = uniform(threadIdx.x / 128);
    if (threadIdx.x == 0) init_barriers(sh);
    __syncthreads();
    if (group == 2) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int warp = uniform(threadIdx.x % 128 / 32);
        const bool is_first = threadIdx.x % 32 == 0;
        if (warp == 0 || warp == 3) {
            if (VECTOR ? threadIdx.x % 128 == 0 : true) produce(h, sh);
        } else if (is_first) {
            add_in_turn(h, sh, warp - 1);
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer{h, sh, group};
        consumer.run();
    }
}
