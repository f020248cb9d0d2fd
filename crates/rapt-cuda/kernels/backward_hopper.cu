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
// Deliberately absent: softcap and slopes, biases of 32 bits (backward_mma.cu), and head dims above 128 (backward_hopper_wide.cu).

#include "backward/hopper_weigh.cuh"
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
                store_nothing(b, item);
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
            MaskColumns mask(b.all, sh, group * 64, 0);
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
                exponentiate(s, (float)b.all.scale * LOG2_E, sh.lse[q.stage], mask);
                __syncwarp();
                mbarrier_arrive_if(sh.mask_empty, is_first);
#else
                exponentiate(s, (float)b.all.scale * LOG2_E, sh.lse[q.stage], mask);
#endif
                if (i0 < whole_from | i0 > whole_to) leave_out(s, b.all, item.first() + group * 64, i0);
                OperandA<KT> p;
                pack_weights<NT>(p, s);
                add_dv(p, done, n > 0);
                mbarrier_wait(sh.ds_empty[done % 2], done / 2 & 1 ^ 1);
                wgmma_wait<1>(dp);
                wgmma_wait<1>(dk);
                mbarrier_arrive_if(sh.q_empty[before], is_first & (n > 0));
                weigh(ds, s, dp, sh.delta[q.stage]);
                put_weights(sh.ds[done % 2] + group * 64 * BOX, 0, ds);
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
                    hand_over(sh, group, dq, done - 1);
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
            hand_over(sh, group, dq, done - 1);
            wgmma_wait<0>(dk);
            mbarrier_arrive_if(sh.q_empty[before], is_first);
            mbarrier_arrive_if(sh.kv_empty[kv.stage], is_first);
            kv.advance();
            // The other group has read ds too: rows of gradients come there.
            bar_sync(DS, CONSUMERS);
            mbarrier_arrive_if(sh.ds_empty[(done + 1) % 2], is_first);
            mbarrier_arrive_if(sh.item_empty[round % 2], is_first);
            if (non_finite(dk) + non_finite(dv) != 0) note_odd(b, item.batch, item.kv_head);
            const int first = item.first() + group * 64;
            Elem* const tile = sh.ds[0] + group * 64 * BOX;
            store_rows<2>(tile, dk, rows_of_keys(b.dk, b.dk_stride, item, first, b.all.kv_len, b.all.head_dim, b.dk_wide), (float)b.all.scale);
            store_rows<2>(tile, dv, rows_of_keys(b.dv, b.dv_stride, item, first, b.all.kv_len, b.all.head_dim_v, b.dv_wide), 1);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ BackwardHopperParams h) {
    run_block<Consumer>(h);
}
