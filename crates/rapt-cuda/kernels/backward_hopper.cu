// Gradients of float16 and bfloat16 on the tensor cores of compute capability 9.0 by wgmma: dq, dk and dv of a pair of tiles together, five
// products in one pass over scores.
//
//   A block stays on its multiprocessor and takes items, in their order: BLOCK_N keys of a key head, and the queries that see them, of all
//   heads of the group, in tiles of BLOCK_M rows (backward/hopper_items.cuh).
//   producer (1 warp, or 2)    K and V of the item; q with lse and delta, and d_o, through rings of 2 stages (backward/hopper_load.cuh)
//   consumers (2 x 4 warps)    64 keys each, per tile of queries, transposed: keys are the rows of scores
//
//     s = K @ q.T                            has been computed at the end of the tile before
//     dp = V @ d_o.T                         under way
//     p = exp2(s * c - lse + bias)           of pairs that are attended, else 0                      [or of softcap's tanh]
//     ds = p * (dp - delta)                  to shared memory, for both groups                       [times what softcap lets through]
//     dv += p @ d_o                          under way, p in registers
//     dq_part = ds.T @ K                     of the tile before, under way behind it: half of the columns each, or of 128 queries 64 each
//     dk += ds @ q                           under way behind it, ds in registers: dq_part to shared memory
//     s = K @ q.T                            of the next tile
//   hand over (a warp a group) dq += dq_part in device memory, in one order of keys: a tile waits for its turn, a count in device memory.
//                              Items are taken in that order, so that whatever is waited for was taken before. float32.
//
// Heads of up to 64 columns leave registers for tiles of 128 queries: half as many chains of products, exponentials and barriers. Wider ones leave them for
// 80, which are no rows of a product: dq_part.T = K.T @ ds.T, 64 columns a group, of ds with queries as rows (DQ_TURNED). Each product is waited for before
// registers of its operands are needed: where the assembler finds too few, it has products done one by one (C7512).
// p and ds are rounded to the storage dtype where they are multiplied, and nowhere else. dq_part lies in fragments, as threads hold it:
// backward_parts.cu makes rows of them, and multiplies by softmax_scale.
// A head with a sum that is not finite, or a lse that is not relied on, is noted: backward_mma.cu computes it again, behind this.
// Deliberately absent: slopes, dropout, biases of 32 bits or beside softcap (backward_mma.cu), and head dims above 128 (backward_hopper_wide.cu).

#include "backward/hopper_weigh.cuh"

DEFINE_WGMMA_QK(wgmma_scores, BLOCK_M)
DEFINE_WGMMA_PV(wgmma_dk, HEAD_DIM)
DEFINE_WGMMA_PV(wgmma_dv, HEAD_DIM_V)
#if DQ_TURNED
DEFINE_WGMMA_TK(wgmma_dq, BLOCK_M)
#else
DEFINE_WGMMA_TT(wgmma_dq, DQ_COLUMNS)
#endif

// A box of queries at a time, or all.
constexpr int AT_ONCE = DQ_TURNED ? BM : BOX, NT = AT_ONCE / 8, KT = AT_ONCE / 16, PARTS = BM / AT_ONCE;

struct Consumer {
    const BackwardHopperParams& h;
    Shared& sh;
    const int group;
    Accumulator<D / 8> dk;
    Accumulator<DV / 8> dv;
    u32 done = 0;  // tiles of queries
    u32 kv_phase = 0;

    // Rows of this group's keys times those of a tile of queries, over WIDTH columns: s of K and q, dp of V and d_o.
    template <int WIDTH>
    __device__ void multiply_rows(Accumulator<BM / 8>& x, const Elem* of_keys, const Elem* of_queries) const {
        const u32 keys = tile_low(of_keys, 0) + group * (64 * 128 / 16), queries = tile_low(of_queries, 0);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < WIDTH; d += 16) {
            const u32 within = d % BOX * 2 / 16;
            wgmma_scores(x, keys + d / BOX * (K_BOX * 2 / 16) + within, queries + d / BOX * (Q_BOX * 2 / 16) + within, d > 0);
        }
        wgmma_commit();
    }
    // Of a part of the queries.
    __device__ void add_dv(OperandA<KT>& p, int part, bool add) {
        const u32 arriving = tile_low(sh.d_o[done % 2], Q_BOX * 2) + part * (AT_ONCE * 128 / 16);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < KT; kt++) wgmma_dv(dv, p[kt], arriving + kt * (16 * 128 / 16), add || kt > 0);
        wgmma_commit();
    }
    __device__ void add_dk(OperandA<BM / 16>& ds, bool add) {
        const u32 queries = tile_low(sh.q[done % 2], Q_BOX * 2);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < BM / 16; kt++) wgmma_dk(dk, ds[kt], queries + kt * (16 * 128 / 16), add || kt > 0);
        wgmma_commit();
    }
    // Of tile n, over all keys: columns of this group, or of 128 queries its 64.
    __device__ void multiply_ds(Accumulator<DQ_TILES>& dq, u32 n) const {
        const u32 ds = tile_low(sh.ds[n % 2], 0), keys = tile_low(sh.k, 0), box = group * (K_BOX * 2 / 16);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < BN / 16; kt++) {
            const u32 rows = kt * (16 * 128 / 16);
#if DQ_TURNED
            wgmma_dq(dq, keys + box + rows, ds + kt / 4 * (Q_BOX * 2 / 16) + kt % 4 * (16 * 2 / 16), kt > 0);
#else
            const u32 columns = BOXES > 1 ? box : group * (DQ_COLUMNS * 2 / 16);
            wgmma_dq(dq, ds + (PARTS > 1 ? box : 0) + rows, keys + (PARTS > 1 ? 0 : columns) + rows, kt > 0);
#endif
        }
        wgmma_commit();
    }
    // ds of this group's keys, for both groups.
    __device__ void put_ds(const OperandA<BM / 16>& ds) const {
        if (DQ_TURNED) put_turned(sh.ds[done % 2] + group * Q_BOX, ds);
        else put_weights(sh.ds[done % 2] + group * 64 * BOX, 0, ds);
    }

    // What is left of its last tile.
    __device__ void end() {
        Accumulator<DQ_TILES> dq;
        mbarrier_wait(sh.ds_full[(done + 1) % 2], (done - 1) / 2 & 1);
        multiply_ds(dq, done + 1);
        wgmma_wait<0>(dq);
        hand_over(sh, group, dq, done - 1);
    }
    __device__ void store(const Item& item) const {
        const BackwardParams& b = h.b;
        const int kv_len = kv_len_of(h.items, item);
        if (non_finite(dk) + non_finite(dv) != 0) note_odd(b, entry_of(item), item.kv_head);
        const int first = item.first() + group * 64;
        Elem* const tile = sh.ds[0] + group * 64 * BOX;
        store_rows<2>(tile, dk, rows_of_keys(b.dk, b.dk_stride, item, first, kv_len, b.all.head_dim, b.dk_wide), (float)b.all.scale);
        store_rows<2>(tile, dv, rows_of_keys(b.dv, b.dv_stride, item, first, kv_len, b.all.head_dim_v, b.dv_wide), 1);
    }

    __device__ void run() {
        const BackwardParams& b = h.b;
        const bool is_first = threadIdx.x % 32 == 0;
        Accumulator<BM / 8> s;
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
            MaskColumns mask(b.all, sh, group * 64, 0);
            const Exponents exponents(b.all.scale, b.all.softcap, b.all.inverse_softcap);
#pragma unroll 1
            for (int left = item.tiles * b.all.group, n = 0; left > 0; left--, n++, done++) {
                const int i0 = i * BM;
                i = i + step == behind ? item.first_tile : i + step;
                Accumulator<BM / 8> dp;
                mbarrier_wait(sh.d_o_full[done % 2], done / 2 & 1);
                multiply_rows<DV>(dp, sh.v, sh.d_o[done % 2]);
#if MASK != NO_MASK
                mbarrier_wait(sh.mask_full, done & 1);
#endif
                const bool is_partly = i0 < whole_from | i0 > whole_to;
                OperandA<BM / 16> ds;
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    Accumulator<NT>& of = tiles_from<NT>(s + part * NT);
                    const float* lse = sh.lse[done % 2] + part * AT_ONCE;
                    exponentiate(of, exponents, lse, mask, part * NT);
                    if (is_partly) leave_out(of, extent_of(h.items, sh.items[round % 2]), item.first() + group * 64, i0 + part * AT_ONCE);
                    if (part == 0) wgmma_wait<0>(dp);
                    OperandA<KT> p;
                    pack_weights<NT>(p, of);
                    weigh(tiles_from<KT>(ds + part * KT), of, tiles_from<NT>(dp + part * NT), sh.delta[done % 2] + part * AT_ONCE, exponents, lse);
                    add_dv(p, part, n > 0 || part > 0);
                    // The next part's weights would find no registers beside these.
                    if (part + 1 < PARTS) wgmma_wait<0>(dv);
                }
#if MASK != NO_MASK
                __syncwarp();
                mbarrier_arrive_if(sh.mask_empty, is_first);
#endif
                mbarrier_wait(sh.ds_empty[done % 2], done / 2 & 1 ^ 1);
                put_ds(ds);
                fence_proxy_async();
                __syncwarp();
                mbarrier_arrive_if(sh.ds_full[done % 2], is_first);
                // dq of the tile before: the other group is not waited for.
                Accumulator<DQ_TILES> dq;
                if (n > 0) mbarrier_wait(sh.ds_full[(done + 1) % 2], (done - 1) / 2 & 1);
                multiply_ds(dq, done + 1);
                wgmma_wait<1>(dv);
                mbarrier_arrive_if(sh.d_o_empty[done % 2], is_first);
                add_dk(ds, n > 0);
                wgmma_wait<1>(dq);
                if (n > 0) {
                    mbarrier_arrive_if(sh.ds_empty[(done + 1) % 2], is_first);
                    hand_over(sh, group, dq, done - 1);
                }
                wgmma_wait<0>(dk);
                mbarrier_arrive_if(sh.q_empty[done % 2], is_first);
                if (left > 1) mbarrier_wait(sh.q_full[(done + 1) % 2], (done + 1) / 2 & 1);
                // Of whatever lies there behind the last one.
                multiply_rows<D>(s, sh.k, sh.q[(done + 1) % 2]);
                // Nothing is under way where the loop begins again: what is there is done one by one (C7514).
                wgmma_wait<0>(s);
            }
            end();
            mbarrier_arrive_if(sh.kv_empty, is_first);
            // The other group has read ds too: rows of gradients come there.
            bar_sync(DS, CONSUMERS);
            mbarrier_arrive_if(sh.ds_empty[(done + 1) % 2], is_first);
            const Item stored = as_uniform(sh.items[round % 2]);
            mbarrier_arrive_if(sh.item_empty[round % 2], is_first);
            store(stored);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(const __grid_constant__ BackwardHopperParams h) {
    run_block<Consumer>(h);
}
