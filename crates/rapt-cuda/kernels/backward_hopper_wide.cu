// Gradients of float16 and bfloat16 by wgmma as backward_hopper.cu has them, of heads with more than 128 columns, whose sums of 64 keys fill the registers of
// two groups of warps.
//
//   items, producer and turns are those of backward_hopper.cu, of 64 keys a tile; q with lse and delta in 2 stages, d_o in one
//   consumers (2 x 4 warps)    of scores half of the queries each, of sums half of the columns each; per tile of 64 queries, transposed
//
//     s = K @ q.T                            has been computed at the end of the tile before
//     dp = V @ d_o.T                         under way
//     p = exp2(s * c - lse + bias)           of pairs that are attended, else 0: to shared memory, for both groups
//     dv += p @ d_o                          under way
//     ds = p * (dp - delta)                  likewise
//     dk += ds @ q, dq_part = ds.T @ K       under way
//     s = K @ q.T                            of the next tile, under way behind them: dq_part to shared memory, 64 columns at a time
//   hand over (a warp a group) as in backward_hopper.cu
//
// Where a row of scores is rounded, and how sums that are not finite are noted: as in backward_hopper.cu.

#define WIDE 1
#include "backward/hopper_weigh.cuh"

// Columns of dk and of dv of a group, and queries of scores.
constexpr int COLUMNS = BOXES / 2 * BOX, COLUMNS_V = V_BOXES / 2 * BOX, QUERIES = BM / 2;
static_assert(COLUMNS == DQ_COLUMNS, "the host and backward_hopper_wide.cu disagree on columns of dq");
constexpr int NT = QUERIES / 8, KT = BM / 16;

DEFINE_WGMMA_QK(wgmma_scores, 32)
DEFINE_WGMMA_KM(wgmma_dk, DQ_COLUMNS)
DEFINE_WGMMA_KM(wgmma_dv, DV_COLUMNS)
DEFINE_WGMMA_TT(wgmma_dq, DQ_COLUMNS)

struct Consumer {
    const BackwardHopperParams& h;
    Shared& sh;
    const int group;
    Accumulator<COLUMNS / 8> dk;
    Accumulator<COLUMNS_V / 8> dv;
    u32 done = 0;  // tiles of queries
    u32 kv_phase = 0;

    // Rows of keys times this group's of a tile of queries, over WIDTH columns: s of K and q, dp of V and d_o.
    template <int WIDTH>
    __device__ void multiply_rows(Accumulator<NT>& x, const Elem* of_keys, const Elem* of_queries) const {
        const u32 keys = tile_low(of_keys, 0), queries = tile_low(of_queries, 0) + group * (QUERIES * 128 / 16);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < WIDTH; d += 16) {
            const u32 within = d % BOX * 2 / 16;
            wgmma_scores(x, keys + d / BOX * (K_BOX * 2 / 16) + within, queries + d / BOX * (Q_BOX * 2 / 16) + within, d > 0);
        }
        wgmma_commit();
    }
    __device__ void add_dv() {
        const u32 p = tile_low(sh.ds[done % 2], 0), arriving = tile_low(sh.d_o[0], Q_BOX * 2) + group * (COLUMNS_V / BOX) * (Q_BOX * 2 / 16);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) wgmma_dv(dv, p + kt * (16 * 2 / 16), arriving + kt * (16 * 128 / 16), 1);
        wgmma_commit();
    }
    __device__ void add_dk() {
        const u32 ds = tile_low(sh.ds[2], 0), queries = tile_low(sh.q[done % 2], Q_BOX * 2) + group * (COLUMNS / BOX) * (Q_BOX * 2 / 16);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) wgmma_dk(dk, ds + kt * (16 * 2 / 16), queries + kt * (16 * 128 / 16), 1);
        wgmma_commit();
    }
    __device__ void multiply_ds(Accumulator<DQ_COLUMNS / 8>& dq) const {
        const u32 ds = tile_low(sh.ds[2], 0), keys = tile_low(sh.k, K_BOX * 2) + group * (COLUMNS / BOX) * (K_BOX * 2 / 16);
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
                store_nothing(b, item, kv_len_of(h.items, item));
                continue;
            }
            begin_item(*this, s);
            const Extent extent = extent_of(h.items, sh.items[round % 2]);
            const int whole_from = ::whole_from(extent, item), whole_to = ::whole_to(extent, item);
            const int step = step_of(h.items, item), behind = item.first_tile + item.tiles * step;
            int i = item.first_tile;
            zero(dk), zero(dv);
            MaskColumns mask(b.all, sh, 0, group * NT);
            const Exponents exponents(b.all.scale, b.all.softcap, b.all.inverse_softcap);
#pragma unroll 1
            for (int left = item.tiles * b.all.group; left > 0; left--, done++) {
                const int i0 = i * BM;
                i = i + step == behind ? item.first_tile : i + step;
                Accumulator<NT> dp;
                mbarrier_wait(sh.d_o_full[0], done & 1);
                multiply_rows<DV>(dp, sh.v, sh.d_o[0]);
#if MASK != NO_MASK
                mbarrier_wait(sh.mask_full, done & 1);
#endif
                exponentiate(s, exponents, sh.lse[done % 2] + group * QUERIES, mask);
#if MASK != NO_MASK
                __syncwarp();
                mbarrier_arrive_if(sh.mask_empty, is_first);
#endif
                if (i0 < whole_from | i0 > whole_to) leave_out(s, extent_of(h.items, sh.items[round % 2]), item.first(), i0 + group * QUERIES);
                OperandA<NT / 2> weights;
                pack_weights<NT>(weights, s);
                // Of the tile before the last, both groups have multiplied them.
                put_weights(sh.ds[done % 2], group * NT, weights);
                fence_proxy_async();
                bar_sync(DS, CONSUMERS);
                add_dv();
                wgmma_wait<1>(dp);
                weigh(weights, s, dp, sh.delta[done % 2] + group * QUERIES, exponents, sh.lse[done % 2] + group * QUERIES);
                put_weights(sh.ds[2], group * NT, weights);
                fence_proxy_async();
                bar_sync(DS, CONSUMERS);
                add_dk();
                Accumulator<DQ_COLUMNS / 8> dq;
                multiply_ds(dq);
                if (left > 1) mbarrier_wait(sh.q_full[(done + 1) % 2], (done + 1) / 2 & 1);
                // Of whatever lies there behind the last one.
                multiply_rows<D>(s, sh.k, sh.q[(done + 1) % 2]);
                wgmma_wait<3>(dv);
                mbarrier_arrive_if(sh.d_o_empty[0], is_first);
                wgmma_wait<1>(dk);
                wgmma_wait<1>(dq);
                mbarrier_arrive_if(sh.q_empty[done % 2], is_first);
                hand_over(sh, group, dq, done);
                // Nothing is under way where the loop begins again (C7514).
                wgmma_wait<0>(s);
            }
            mbarrier_arrive_if(sh.kv_empty, is_first);
            mbarrier_arrive_if(sh.item_empty[round % 2], is_first);
            // Rows of gradients go through tiles of weights, which the other group has multiplied too.
            bar_sync(DS, CONSUMERS);
            if (non_finite(dk) + non_finite(dv) != 0) note_odd(b, entry_of(item), item.kv_head);
            const auto rows = [&](void* to, const i64(&stride)[4], int columns, int dim, bool wide) {
                KeyRows of = rows_of_keys(to, stride, item, item.first(), kv_len_of(h.items, item), dim - group * columns, wide);
                of.first += group * columns * stride[3];
                return of;
            };
            store_rows<1>(sh.ds[group], dk, rows(b.dk, b.dk_stride, COLUMNS, b.all.head_dim, b.dk_wide), (float)b.all.scale);
            store_rows<1>(sh.ds[group], dv, rows(b.dv, b.dv_stride, COLUMNS_V, b.all.head_dim_v, b.dv_wide), 1);
            bar_sync(DS, CONSUMERS);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ BackwardHopperParams h) {
    run_block<Consumer>(h);
}
