// The warps of hopper.cu that multiply: what one step of their loop consists of.
//
//   multiply_keys    s = q.k, by wgmma, from shared memory             add_values   acc_o += p.v
//   apply_scores     softcap, slopes, biases, masks, positions         exponentiate, update_reference, raise_reference (softmax.cuh)
//   barriers         keys, values and tiles of the mask are waited for, and released when they have been read
//
// Groups take turns in enqueuing products (`TURN`): one's softmax runs beside the other's products.
// Deliberately absent: the order of the steps (hopper.cu), and the pass over values that are not finite (careful.cuh).

#pragma once
#include "common/scores.cuh"
#include "hopper/load.cuh"
#include "hopper/mask_ring.cuh"
#include "hopper/softmax.cuh"
#include "hopper/store.cuh"
#include "hopper/wgmma.cuh"

DEFINE_WGMMA_QK(wgmma_qk, BLOCK_N)
DEFINE_WGMMA_PV(wgmma_pv, HEAD_DIM_V)

// Whether the mask comes in where scores become exponents.
constexpr bool MASKS_LATE = MASK != NO_MASK && !NATURAL;
// Whether an item's first scores are begun before the one before it is stored: where there are registers for it.
constexpr bool CHAINED = MASK == NO_MASK && !NATURAL;

struct Consumer : RowSoftmax {
    const HopperParams& h;
    Shared& sh;
    int next_kind = 0;        // the kind of the tile that `skip_hidden_tiles` stopped at
    bool mask_ready = false;  // whether `kind_bits` is that of the next tile of the mask; else it is 0
    u32 kind_bits = 0;
    bool keys_ready = false, values_ready = false;  // as `poll_barriers` saw them
    // Kept in registers but where softcap and slopes, or loads element by element, need these: computed where used there.
    const int kept_group;
    const MaskRows::Place kept_place;
    const int kept_first;
    u32 done = 0, q_done = 0, m_done = 0;  // tiles whose values were added, items, tiles of the mask

    __device__ Consumer(const HopperParams& h, Shared& sh, int group)
        : h(h), sh(sh), kept_group(group), kept_place(mask_place(group)), kept_first(opaque((int)(threadIdx.x % 32 == 0))) {}

    // Which of the groups this thread is of.
    __device__ int group() const { return VECTOR ? kept_group : uniform(reread_tid() / 128); }
    // Where in a tile of the mask this thread's rows are.
    __device__ MaskRows::Place mask_place(int group) const { return {h.p, group * 64 + (int)threadIdx.x % 128 / 32 * 16}; }
    // Whether this is the warp's first lane.
    __device__ bool is_first() const { return NATURAL ? threadIdx.x % 32 == 0 : kept_first; }

    // s = q.k of tile n.
    __device__ void multiply_keys(Accumulator<NT>& s, u32 n) {
        const u32 keys = tile_low(sh.k[stage_of(n)], 0), queries = tile_low(sh.q[q_stage()], 0) + opaque(group()) * (64 * 128 / 16);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            const u32 within = d % BOX * 2 / 16;
            wgmma_qk(s, queries + d / BOX * (Q_BOX * 2 / 16) + within, keys + d / BOX * (K_BOX * 2 / 16) + within, d > 0);
        }
        wgmma_commit();
    }

    // acc_o += p.v of tile n, or = if nothing was added before.
    __device__ void add_values(OperandA<NT / 2>& p, u32 n, bool add) {
        const u32 values = tile_low(sh.v[stage_of(n)], K_BOX * 2);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < NT / 2; kt++) wgmma_pv(acc_o, p[kt], values + kt * (16 * 128 / 16), add || kt > 0);
        wgmma_commit();
    }

    // Scores become p; the barriers that the next values, `next`, need are polled before.
    template <bool MASKS>
    __device__ void exponentiate(Accumulator<NT>& s, const MaskRows& mask, float (&sum)[2], float c, u32 next) {
        poll_barriers(next);
        RowSoftmax::exponentiate<MASKS>(s, mask, sum, c, h.scale);
    }

    // Scores with scale, softcap and slopes in them; the answer is the factor that is not in them yet.
    __device__ float apply_natural_units(Accumulator<NT>& s, const Queries& queries, int n0) const {
        const Params& p = h.p;
        const float scale = h.scale, cap = (float)p.softcap, inverse_cap = (float)p.inverse_softcap;
        if (p.softcap == 0 && p.alibi == nullptr) return scale;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Row row = queries.row(0, r);
            const float slope = p.alibi == nullptr ? 0.f : load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride);
            const int distance = row.i + p.diagonal - queries.task.sequence.lag(p) - n0 - lane_column(threadIdx.x);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[nt][r * 2 + e];
                    x = natural_score(p, x, scale, cap, inverse_cap, slope, distance - nt * 8 - e);
                }
        }
        return 1.f;
    }

    // Scores with biases, masks and positions in them, and the rows' references where these may change: as `update_reference`, true if one
    // moves. A mask on which nothing but the exponents depends is left to `exponentiate` (MASKS_LATE): mask.kind is MIXED then.
    template <bool CAREFUL>
    __device__ bool apply_scores(Accumulator<NT>& s, const Work& work, int n0, MaskRows& mask, float (&factor)[2], float c) {
        const bool positions = n0 < work.all_lo || n0 + BN > work.all_hi;
        const bool tracks = CAREFUL || watched;
        float scale = h.scale;
        if (NATURAL) {
            const Place place = this->place(work);
            scale = apply_natural_units(s, Queries{h.p, place.task, place.r0}, n0);
        }
#if MASK != NO_MASK
        const bool masks = mask.kind == MIXED;
        if (MASKS_LATE && masks && !(positions | tracks)) return false;
        mask.kind = UNCHANGED;
#else
        const bool masks = false;
#endif
        // Biases are added to what is multiplied, and what has been multiplied is hidden.
        if (MASK == ADDITIVE_MASK && masks) mask.apply(s, scale, CAREFUL), scale = 1;
        if (NATURAL_UNITS && scale != 1) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[nt][e] *= scale;
        }
        if (MASK == BOOL_MASK && masks) mask.apply(s, scale, CAREFUL);
        // One branch for what is seldom.
        if (!(positions | tracks)) return false;
        if (positions) mask_positions(s, work, n0);
        if (!tracks) return false;
        if (CAREFUL || IS_WATCHED) return update_reference<CAREFUL>(s, factor, c);
        set_reference(s, c);
        return false;
    }

    // Few instructions: they run once or twice an item, and are fetched from far away each time.
    __device__ void mask_positions(Accumulator<NT>& s, const Work& work, int n0) const {
        const Params& p = h.p;
        const bool before = n0 < work.all_lo;
        const int first = n0 + lane_column(threadIdx.x);
#if VARLEN
        const Sequence of(varlen_entry(p, work.task));
#elif RAGGED
        const Sequence of(p, divide(work.task, p.by_tasks));
#else
        const Sequence of(p, 0);
#endif
        const int r0 = (NATURAL ? place(work).r0 : work.r0 + threadIdx.x % 128 / 32 * 16) + lane_row(threadIdx.x);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = r0 + r * 8;  // behind the last row too: nothing of that is stored
            const int i = VARLEN ? row : row - divide(row, p.by_q_len) * p.q_len;
            u32 seen = below(keys_hi(p, of, i) - first);
            if (before) seen &= ~below(keys_lo(p, of, i) - first);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (!(seen & 1u << key_bit(nt, e))) s[nt][r * 2 + e] = negative_infinity();
                }
        }
    }
    // A bit for each of a thread's keys of a tile, which are pairs 8 apart: those before key n, counted from its first.
    __device__ static u32 below(int n) {
        static_assert(NT <= 16, "a bit for each key");
        u32 bits;
        n = max(n, 0);
        asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(keys_before(n)));
        return bits;
    }

    // A barrier's answer takes some 250 cycles beside products (H200, 2026-11), so barriers are polled long before their answers are
    // needed: the next tile but one of the mask, counted from the last that was released; values `n` and the keys behind them.
    __device__ void poll_barriers(u32 n) {
#if MASK != NO_MASK
        mask_ready = mbarrier_test_wait(sh.mask.full[mask_stage_of(m_done + 1)], mask_phase_of(m_done + 1));
#endif
        keys_ready = mbarrier_test_wait(sh.k_full[stage_of(n + 1)], phase_of(n + 1));
        values_ready = mbarrier_test_wait(sh.v_full[stage_of(n)], phase_of(n));
    }
    // Loads the kind of the next tile if it is ready, and what the mask says of the tile before it, which `skip_hidden_tiles` stopped at.
    __device__ void load_mask(MaskRows& mask) {
#if MASK != NO_MASK
        kind_bits = load_if(sh.mask.kinds[mask_stage_of(m_done + 1)], mask_ready);
        mask.kind = next_kind;
        mask.take(sh.mask, mask_stage_of(m_done), NATURAL ? mask_place(opaque(group())) : kept_place);
#endif
    }
    // Releases the tile of the mask that was loaded.
    __device__ void release_mask() {
#if MASK != NO_MASK
        mbarrier_arrive(sh.mask.empty[mask_stage_of(m_done++)]);
#endif
    }

    // Moves n0 to the next tile, up to `end`, that the mask does not hide.
    __device__ bool skip_hidden_tiles(int& n0, int end) {
#if MASK != NO_MASK
        // By votes: the answers are the same in all lanes then, and known to the compiler as such.
        bool shows = __any_sync(~0u, kind_bits & SHOWS), changes = __any_sync(~0u, kind_bits & CHANGES);
        while (!shows && n0 <= end) {
            if (__all_sync(~0u, mask_ready)) {
                release_mask();
                mask_ready = false, kind_bits = 0, n0 += BN;
            } else {
                mbarrier_wait(sh.mask.full[mask_stage_of(m_done)], mask_phase_of(m_done));
                mask_ready = true, kind_bits = sh.mask.kinds[mask_stage_of(m_done)];
            }
            shows = __any_sync(~0u, kind_bits & SHOWS), changes = __any_sync(~0u, kind_bits & CHANGES);
        }
        next_kind = changes ? MIXED : UNCHANGED;
#endif
        return n0 <= end;
    }

    __device__ void release(u64& barrier) {
        __syncwarp();
        mbarrier_arrive_if(barrier, is_first());
    }

    // Releases values `n`. Where sums have no buffer of their own (OUT_THROUGH_V), they are stored through buffers of values, in items of
    // two tiles or more: those of the first group through the last but one, those of the second through the last. The other group has
    // read that buffer by then, as turns go, and arrives at the buffer's barrier; the group that stores through it (`to`, else -1)
    // releases it after its stores. Nothing waits for these: values are what the next item needs last. No group arrives twice before the
    // other has waited: the second needs turns for that, and the first the last values of an item of two tiles or more, which in a ring
    // of two stages lie in a buffer that the second has released by then.
    __device__ void release_values(u32 n, int to) {
        const bool is_kept = OUT_THROUGH_V && to == group();
        if (OUT_THROUGH_V && to >= 0 && !is_kept) bar_arrive(V_BUFFER + to, 256);
        __syncwarp();
        mbarrier_arrive_if(sh.v_empty[stage_of(n)], is_first() & !is_kept);
    }

    __device__ void release_queries() {
        if (queries_by_tma(h.p)) release(sh.q_empty[q_stage()]);
    }
    // Where the queries of the item at hand are; those that a group loads itself are always there.
    __device__ int q_stage() const { return (q_done + (Q_STAGES - 1)) % Q_STAGES; }
    __device__ void await_queries_by_tma() {
        mbarrier_wait(sh.q_full[q_done % Q_STAGES], q_done / Q_STAGES & 1);
        q_done++;
    }

    // An item without rows for this group: passes the barriers that others wait at, in the order of `run`.
    __device__ void skip_item(const Work& work) {
        if (queries_by_tma(h.p)) await_queries_by_tma();
        release_queries();
        mbarrier_wait(sh.k_full[stage_of(done)], phase_of(done));
        release(sh.k_empty[stage_of(done)]);
        MaskRows mask;
        const auto pass_mask = [&] { poll_barriers(done), load_mask(mask), release_mask(); };
        pass_mask();
        int next = work.n0 + BN;
        bool through_v = false;
#pragma unroll 1
        for (; skip_hidden_tiles(next, work.end); next += BN, done++) {
            mbarrier_wait(sh.k_full[stage_of(done + 1)], phase_of(done + 1));
            take_turn(), end_turn();
            release(sh.k_empty[stage_of(done + 1)]);
            pass_mask();
            mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
            release(sh.v_empty[stage_of(done)]);
            through_v = OUT_THROUGH_V;
        }
        if (through_v) bar_arrive(V_BUFFER, 256), bar_sync(V_BUFFER + 1, 256);
        mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
        release(sh.v_empty[stage_of(done++)]);
    }

    // Waits unless the barrier had been passed when it was polled.
    __device__ static void await(u64& barrier, u32 phase, bool passed) {
        if (!__all_sync(~0u, passed)) mbarrier_wait(barrier, phase);
    }
    __device__ void take_turn() { bar_sync(TURN + group(), 256); }
    __device__ void end_turn() {
        const int group = this->group();
        bar_arrive(group == WGS - 1 ? TURN : TURN + 1 + group, 256);
    }

    // What the rows are multiplied with and where they go; also stores their lse.
    template <bool CAREFUL>
    __device__ Ends finish(const Work& work) {
        const Params& p = h.p;
        const Place place = this->place(work);
        const Queries queries{p, place.task, place.r0};
        Ends ends;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_sum[r] = sum_of_lanes<4>(row_sum[r]);
            const Row row = queries.row(0, r);
            ends.inside[r] = place.r0 + (int)lane_row(threadIdx.x) + r * 8 < place.task.rows(p);
            float m = __fmul_rn(reference[r], LN_2);
            if (CAREFUL || IS_WATCHED) m = __fadd_rn(m, NATURAL_UNITS ? offset[r] : __fmul_rn(offset[r], h.scale));
            const RowEnd row_end(p, row, m, row_sum[r]);
            if (ends.inside[r] && threadIdx.x % 4 == 0) store_lse(p, row, row_end);
            ends.factor[r] = row_end.factor;
            ends.to[r] = 0;
            if (!STAGED || !h.out_by_tma) ends.to[r] = row.offset(p.out_stride);
        }
        return ends;
    }

    // Where rows are of several heads, or strides are none that TMA takes, the group loads its own queries.
    __device__ void load_queries(const Task& task, int r0) {
        const Params& p = h.p;
        const int group = this->group();
        bar_sync(OWN_QUERIES + group, 128);
        load_boxes<64, BM, K_BOXES>(
            sh.q[q_stage()] + group * 64 * BOX, (const Elem*)p.q, [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); },
            p.q_stride[3], task.rows(p) - r0, p.head_dim, threadIdx.x % 128
        );
        fence_proxy_async();
        bar_sync(OWN_QUERIES + group, 128);
    }

    // The next round from `round` on that has an item, -1 if there is none.
    __device__ int next_round(int round, bool again) const {
        for (;; round++) {
            const Item item(h, round);
            if (item.is_beyond(h)) {
                round = -1;
                break;
            }
            if (!item.is_none() && (!again || is_careful_round(sh, round))) break;
        }
        return CHAINED ? round : uniform(round);
    }
    __device__ Work work_of(int round) {
        if (round < 0) return {-1};
        const Params& p = h.p;
        const Item item(h, round);
        const Tiles tiles = item.tiles(h);
        const Task task(p, item.task);
        const int rows = task.rows(p), r0 = group_row(item), first_row = min(r0, rows - 1);
        const Seen seen(p, task, first_row, max(min(r0 + 64, rows), first_row + 1));
        Work work{round, item.task, VARLEN && r0 >= rows ? NO_ROW : r0, tiles.first, tiles.first + (tiles.count - 1) * BN, seen.all_lo, seen.all_hi};
        mask_ready = false, kind_bits = 0;
        work.any = skip_hidden_tiles(work.n0, work.end);
        return work;
    }
    // The group's first row of an item: far behind all rows (the sum stays an int) where the item has none for it.
    __device__ int group_row(const Item& item) const {
        const int group = this->group();
        return item.r0(h) + (group < item.groups(h) ? group * 64 : NO_ROW);
    }
    // Computed where it is needed, so that it takes no register meanwhile.
    __device__ Place place(const Work& work) const {
        if (CHAINED) return Place(h.p, work.task, opaque(work.r0));
        const Item item(h, opaque(work.round));
        return Place(h.p, item.task, group_row(item));
    }

    // Waits for q and the first keys.
    __device__ void await_queries(const Work& work) {
        if (queries_by_tma(h.p)) {
            await_queries_by_tma();
        } else {
            load_queries(Task(h.p, work.task), work.r0);
        }
        mbarrier_wait(sh.k_full[stage_of(done)], phase_of(done));
    }

    // By TMA, or from registers: also where the next sequence begins within a warp's rows.
    __device__ void store_sums(const Work& work, Ends ends) {
        if (STAGED && h.out_by_tma) {
            const Place place = this->place(work);
            if (!VARLEN || place.r0 + 16 <= place.task.rows(h.p)) return store_by_tma(h, sh, place, acc_o, ends);
            const Queries queries{h.p, place.task, place.r0};
            ends.to[0] = queries.row(0, 0).offset(h.p.out_stride), ends.to[1] = queries.row(0, 1).offset(h.p.out_stride);
        }
        store(h.p, acc_o, ends);
    }

    // Stores the sums of an item (by way of `buffer` of the values where they go through one), or notes it for a careful pass.
    __device__ void store_or_note(const Work& work, const Ends& ends, int buffer, bool through_v) {
        const Params& p = h.p;
        if (through_v) bar_sync(V_BUFFER + group(), 256);
        if (__any_sync(~0u, has_non_finite())) {
            if (threadIdx.x % 32 == 0) atomicOr(&sh.careful_rounds[work.round % CAREFUL_BITS / 32], 1u << work.round % 32);
#if OUT_THROUGH_V
        } else if (through_v && p.out_vector) {
            store_through(sh.v[buffer], p, place(work), acc_o, ends);
#endif
        } else {
            store_sums(work, ends);
        }
        if (through_v) fence_proxy_async(), release(sh.v_empty[buffer]);
    }

    // The items of this block (hopper.cu), then those that are noted for a careful pass (careful.cuh).
    __device__ void run();
    __device__ void run_careful();
    __device__ void isolate_values(const Work& work, int n0);
};
