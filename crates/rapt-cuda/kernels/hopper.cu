// Attention on the tensor cores of compute capability 9.0 by wgmma, for many queries.
//
//   A block stays on its multiprocessor and works off items: up to BLOCK_M queries of a task, all keys that they see.
//   producer (4 warps)        Q of the item, then K and V in tiles of BLOCK_N keys from key 0, through a ring of STAGES;
//                             the others bring the mask, some tiles before (masks.cu): what it hides is not loaded
//   consumers (WGS x 4 warps) 64 queries each:
//                               s = q.K[0];  p = weigh(s)
//     for n = 1..               s = q.K[n]          under way
//                               acc += p.V[n-1]     under way, behind it
//                               p = weigh(s)        while acc is still under way, and the other group's products run
//                               acc += p.V[last]    under way: rows, factors and lse of this item, place of the next
//                               s = q.K[0]          of the next item under way: acc is stored (CHAINED)
//
// Groups take turns in enqueuing products (`TURN`): one's softmax runs beside the other's products. Q and the keys are read
// by the tensor cores from shared memory, p from registers: its accumulator layout is the operand's.
// What the copy engine cannot read (addresses and strides of 16 bytes, inner stride 1) the producer loads element by element
// into the same tiles: products, order and bits are the same.
//
// An item with a sum that is not finite, or that cannot be had so, is noted and comes again at the end (`run_again`), one
// product after the other. Then values that are not finite are taken out of each tile, and go into the sums of the rows that
// attend them: what nobody attends is in none. A row that was well before has the same bits.
// Deliberately absent: what rows are compared with (hopper_rows.cu), splitting of the keys (decode.cu), float32.

#include "hopper/load.cuh"
#include "hopper/rows.cuh"
#include "hopper/store.cuh"

// Whether the mask comes in where scores become exponents.
constexpr bool MASKS_LATE = MASK != NO_MASK && !NATURAL;
// Whether an item's first scores are begun before the one before it is stored: where there are registers for it.
constexpr bool CHAINED = MASK == NO_MASK && !NATURAL;

struct Consumer : Rows {
    const HopperParams& h;
    Shared& sh;
    int sought = 0;                        // the kind of the tile that `seek` found
    bool mask_ready = false;                     // whether `found` is what was found in the next tile of the mask; else it is 0
    u32 found = 0;
    bool has_keys = false, has_values = false;  // what `ask_ahead` was told
    // Not where softcap and slopes, or loads element by element, take the registers: derived where needed there.
    const int kept_group;
    const MaskRows::Place kept_place;
    const int kept_first;
    u32 done = 0, q_done = 0, m_done = 0;  // tiles whose values were added, items, tiles of the mask

    __device__ Consumer(const HopperParams& h, Shared& sh, int group)
        : h(h), sh(sh), kept_group(group), kept_place(mask_place(group)), kept_first(anew((int)(threadIdx.x % 32 == 0))) {}

    // Which of the groups this thread is of.
    __device__ int group() const { return VECTOR ? kept_group : same(thread_anew() / 128); }
    // Where in a tile of the mask this thread's rows are.
    __device__ MaskRows::Place mask_place(int group) const { return {h.p, group * 64 + (int)threadIdx.x % 128 / 32 * 16}; }
    // Whether this is the warp's first lane.
    __device__ bool is_first() const { return NATURAL ? threadIdx.x % 32 == 0 : kept_first; }

    // s = q.k of tile n.
    __device__ void multiply_keys(float (&s)[NT][4], u32 n) {
        const u32 keys = tile_low(sh.k[stage_of(n)], 0), queries = tile_low(sh.q, 0) + anew(group()) * (64 * 128 / 16);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            const u32 within = d % BOX * 2 / 16;
            wgmma_qk(s, queries + d / BOX * (Q_BOX * 2 / 16) + within, keys + d / BOX * (K_BOX * 2 / 16) + within, d > 0);
        }
        wgmma_commit();
    }

    // acc += p.v of tile n, or = if nothing was added before.
    __device__ void add_values(u32 (&a)[NT / 2][4], u32 n, bool add) {
        const u32 values = tile_low(sh.v[stage_of(n)], K_BOX * 2);
        wgmma_fence();
#pragma unroll
        for (int kt = 0; kt < NT / 2; kt++) wgmma_pv(acc, a[kt], values + kt * (16 * 128 / 16), add || kt > 0);
        wgmma_commit();
    }

    // Scores become p; what the next values, `next`, need is asked for meanwhile.
    template <bool MASKS>
    __device__ void weigh(float (&s)[NT][4], const MaskRows& mask, float (&sum)[2], float c, u32 next) {
        ask_ahead(next);
        Rows::weigh<MASKS>(s, mask, sum, c, h.scale);
    }

    // Scores with scale, softcap and slopes in them; `factor` is what they are yet to be multiplied with.
    __device__ float apply_natural_units(float (&s)[NT][4], const Queries& queries, int n0) const {
        const Params& p = h.p;
        const float scale = h.scale, cap = (float)p.softcap, inverse_cap = (float)p.inverse_softcap;
        if (p.softcap == 0 && p.alibi == nullptr) return scale;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const Row row = queries.row(0, r);
            const float slope = p.alibi == nullptr ? 0.f : load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride);
            const int distance = row.i + p.diagonal - n0 - threadIdx.x % 4 * 2;
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[nt][r * 2 + e];
                    x = __fmul_rn(x, scale);
                    if (p.softcap != 0) x = cap * tanhf(x * inverse_cap);
                    if (p.alibi != nullptr) x = __fmaf_rn(-slope, (float)abs(distance - nt * 8 - e), x);
                }
        }
        return 1.f;
    }

    // What is added to the scores, and what hides them; what they are compared with where that may change. As `track`. A mask on which
    // nothing but the exponents depends is left to `weigh` (MASKS_LATE): mask.kind is MIXED then.
    template <bool AGAIN>
    __device__ bool apply_scores(float (&s)[NT][4], const Work& work, int n0, MaskRows& mask, float (&rescale)[2], float c) {
        const bool positions = n0 < work.all_lo || n0 + BN > work.all_hi;
        const bool tracks = AGAIN || watched;
        float factor = h.scale;
        if (NATURAL) {
            const Place place = this->place(work);
            factor = apply_natural_units(s, Queries{h.p, place.task, place.r0}, n0);
        }
#if MASK != NO_MASK
        const bool masks = mask.kind == MIXED;
        if (MASKS_LATE && masks && !(positions | tracks)) return false;
        mask.kind = UNCHANGED;
#else
        const bool masks = false;
#endif
        // Biases are added to what is multiplied, and hidden is what has been.
        if (MASK == ADDITIVE_MASK && masks) mask.apply(s, factor, AGAIN), factor = 1;
        if (NATURAL_UNITS && factor != 1) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[nt][e] *= factor;
        }
        if (MASK == BOOL_MASK && masks) mask.apply(s, factor, AGAIN);
        // One branch for what is seldom.
        if (!(positions | tracks)) return false;
        if (positions) hide_positions(s, work, n0);
        if (!tracks) return false;
        if (AGAIN || WATCHES) return track<AGAIN>(s, rescale, c);
        refer(s, c);
        return false;
    }

    // As few instructions as may be: they run once or twice an item, and each is fetched anew then.
    __device__ void hide_positions(float (&s)[NT][4], const Work& work, int n0) const {
        const Params& p = h.p;
        const bool before = n0 < work.all_lo;
        const int first = n0 + threadIdx.x % 4 * 2;
        const int r0 = (NATURAL ? place(work).r0 : work.r0 + threadIdx.x % 128 / 32 * 16) + threadIdx.x % 32 / 4;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = r0 + r * 8;  // what rows behind the last see is no matter
            const int i = row - divide(row, p.by_q_len) * p.q_len;
            u32 seen = below(keys_hi(p, i) - first);
            if (before) seen &= ~below(keys_lo(p, i) - first);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if (!(seen & 1u << (nt * 2 + e))) s[nt][r * 2 + e] = negative_infinity();
                }
        }
    }
    // A bit for each of a thread's keys of a tile, which are pairs 8 apart: those before key n, counted from its first.
    __device__ static u32 below(int n) {
        static_assert(NT <= 16, "a bit for each key");
        u32 bits;
        n = max(n, 0);
        asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(n / 8 * 2 + min(n % 8, 2)));
        return bits;
    }

    // Answers from shared memory take some 250 cycles beside products (H200, 2026-11), so they are asked for long before: whether the
    // next tile but one of the mask, counted from the last that was let go, is told of; whether values `n` and the keys behind are there,
    __device__ void ask_ahead(u32 n) {
#if MASK != NO_MASK
        mask_ready = mbarrier_test_wait(sh.mask.full[mask_stage_of(m_done + 1)], mask_phase_of(m_done + 1));
#endif
        has_keys = mbarrier_test_wait(sh.k_full[stage_of(n + 1)], phase_of(n + 1));
        has_values = mbarrier_test_wait(sh.v_full[stage_of(n)], phase_of(n));
    }
    // then of which kind it is, and what the tile before it says, which `seek` found.
    __device__ void take_mask(MaskRows& mask) {
#if MASK != NO_MASK
        found = load_if(sh.mask.found[mask_stage_of(m_done + 1)], mask_ready);
        mask.kind = sought;
        mask.take(sh.mask, mask_stage_of(m_done), NATURAL ? mask_place(anew(group())) : kept_place);
#endif
    }
    // Lets go of what was taken.
    __device__ void release_mask() {
#if MASK != NO_MASK
        mbarrier_arrive(sh.mask.empty[mask_stage_of(m_done++)]);
#endif
    }

    // Finds the next tile from n0 on, up to `end`, that the mask does not hide.
    __device__ bool seek(int& n0, int end) {
#if MASK != NO_MASK
        // By votes: what is the same of all lanes then.
        bool shows = __any_sync(~0u, found & SHOWS), changes = __any_sync(~0u, found & CHANGES);
        while (!shows && n0 <= end) {
            if (__all_sync(~0u, mask_ready)) {
                release_mask();
                mask_ready = false, found = 0, n0 += BN;
            } else {
                mbarrier_wait(sh.mask.full[mask_stage_of(m_done)], mask_phase_of(m_done));
                mask_ready = true, found = sh.mask.found[mask_stage_of(m_done)];
            }
            shows = __any_sync(~0u, found & SHOWS), changes = __any_sync(~0u, found & CHANGES);
        }
        sought = changes ? MIXED : UNCHANGED;
#endif
        return n0 <= end;
    }

    __device__ void release(u64& barrier) {
        __syncwarp();
        mbarrier_arrive_if(barrier, is_first());
    }

    // Lets go of values `n`. Sums leave through buffers of values where they have no room of their own (LENT), in items of two tiles
    // or more: those of the first group through the last but one, those of the second through the last. The other group has read it
    // by then, as turns go, and tells so; the group that it is lent to (`to`, else -1) keeps it until it has stored. Nothing waits for
    // these: values are what the next item needs last. Nobody tells twice before the other has heard: the second group needs turns for
    // that, and the first one the last values of an item of two tiles or more, which in a ring of two stages come into a buffer that the
    // second has let go of then.
    __device__ void release_values(u32 n, int to) {
        const bool is_kept = LENT && to == group();
        if (LENT && to >= 0 && !is_kept) bar_arrive(LEND + to, 256);
        __syncwarp();
        mbarrier_arrive_if(sh.v_empty[stage_of(n)], is_first() & !is_kept);
    }

    // Takes values that are not finite out of the tile at hand, keys n0.., and adds them to the sums of the rows that attend
    // them. In loops: this is rare, and its code should be small.
    __device__ void isolate_values(const Work& work, int n0) {
        constexpr u32 EXPONENT = STORAGE == F16 ? 0x7c00u : 0x7f80u;
        const Params& p = h.p;
        const Place place = this->place(work);
        const Queries queries{p, place.task, place.r0};
        u8* tile = (u8*)sh.v[stage_of(done)];
        mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
        const int keys = min(BN, p.kv_len - n0);
#pragma unroll 1
        for (int at = 0; at < VT * 2; at++) {
            const int c = at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
            u32 found[2] = {0, 0};  // 1: +inf, 2: -inf, 4: NaN
#pragma unroll 1
            for (int j = 0; j < keys; j++) {
                const u32 x = *(const Elem*)(tile + c / BOX * (K_BOX * 2) + swizzle_128b(j, c % BOX));
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
                    acc[nt][e] += kinds == 1 ? infinity : kinds == 2 ? -infinity : not_a_number();
                }
        }
        // All groups together, once none of them needs what is taken out.
        bar_sync(CAREFUL_TILE, CONSUMERS);
#pragma unroll 1
        for (int at = threadIdx.x; at < V_BOXES * K_BOX; at += CONSUMERS) {
            Elem& x = ((Elem*)tile)[at];
            if ((x & EXPONENT) == EXPONENT) x = 0;
        }
        fence_proxy_async();
        bar_sync(CAREFUL_TILE, CONSUMERS);
    }

    __device__ void release_queries() {
        if (copies_queries(h.p)) release(sh.q_empty);
    }

    // An item without rows for this group: what others wait for, in the order of `run`.
    __device__ void pass_over(const Work& work) {
        if (copies_queries(h.p)) mbarrier_wait(sh.q_full, q_done++ & 1);
        release_queries();
        mbarrier_wait(sh.k_full[stage_of(done)], phase_of(done));
        release(sh.k_empty[stage_of(done)]);
        MaskRows mask;
        const auto pass_mask = [&] { ask_ahead(done), take_mask(mask), release_mask(); };
        pass_mask();
        int next = work.n0 + BN;
        bool lent = false;
#pragma unroll 1
        for (; seek(next, work.end); next += BN, done++) {
            mbarrier_wait(sh.k_full[stage_of(done + 1)], phase_of(done + 1));
            take_turn(), end_turn();
            release(sh.k_empty[stage_of(done + 1)]);
            pass_mask();
            mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
            release(sh.v_empty[stage_of(done)]);
            lent = LENT;
        }
        if (lent) bar_arrive(LEND, 256), bar_sync(LEND + 1, 256);
        mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
        release(sh.v_empty[stage_of(done++)]);
    }

    // Waits if what was asked before had not come to pass then.
    __device__ static void await(u64& barrier, u32 phase, bool passed) {
        if (!__all_sync(~0u, passed)) mbarrier_wait(barrier, phase);
    }
    __device__ void take_turn() { bar_sync(TURN + group(), 256); }
    __device__ void end_turn() {
        const int group = this->group();
        bar_arrive(group == WGS - 1 ? TURN : TURN + 1 + group, 256);
    }

    // What the rows are multiplied with and where they go; also stores their lse.
    template <bool AGAIN>
    __device__ Ends finish(const Work& work) {
        const Params& p = h.p;
        const Place place = this->place(work);
        const Queries queries{p, place.task, place.r0};
        Ends ends;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            l[r] += __shfl_xor_sync(~0u, l[r], 1);
            l[r] += __shfl_xor_sync(~0u, l[r], 2);
            const Row row = queries.row(0, r);
            ends.inside[r] = place.r0 + (int)(threadIdx.x % 32 / 4) + r * 8 < p.rows;
            float m = __fmul_rn(reference[r], LN_2);
            if (AGAIN || WATCHES) m = __fadd_rn(m, NATURAL_UNITS ? taken[r] : __fmul_rn(taken[r], h.scale));
            const Finished finished(p, row, m, l[r]);
            if (ends.inside[r] && threadIdx.x % 4 == 0) store_lse(p, row, finished);
            ends.factor[r] = finished.factor;
            ends.to[r] = 0;
            if (!STAGED || !h.out_copied) ends.to[r] = row.offset(p.out_stride);
        }
        return ends;
    }

    // Rows of other heads and strides: the group loads its own queries.
    __device__ void load_queries(const Task& task, int r0) {
        const Params& p = h.p;
        const int group = this->group();
        bar_sync(OWN_QUERIES + group, 128);
        load_boxes<64, BM, K_BOXES>(
            sh.q + group * 64 * BOX, (const Elem*)p.q, [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); },
            p.q_stride[3], p.rows - r0, p.head_dim, threadIdx.x % 128
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
            if (!item.is_none() && (!again || comes_again(sh, round))) break;
        }
        return CHAINED ? round : same(round);
    }
    __device__ Work work_of(int round) {
        if (round < 0) return {-1};
        const Params& p = h.p;
        const Item item(h, round);
        const Tiles tiles = item.tiles(h);
        const int r0 = group_row(item), first_row = min(r0, p.rows - 1);
        const Seen seen(p, Task(p, item.task), first_row, max(min(r0 + 64, p.rows), first_row + 1));
        Work work{round, item.task, r0, tiles.first, tiles.first + (tiles.count - 1) * BN, seen.all_lo, seen.all_hi};
        mask_ready = false, found = 0;
        work.any = seek(work.n0, work.end);
        return work;
    }
    // The group's first row of an item: far behind all rows (the sum stays an int) where the item has none for it.
    __device__ int group_row(const Item& item) const {
        const int group = this->group();
        return item.r0(h) + (group < item.groups(h) ? group * 64 : 1 << 30);
    }
    // Derived anew where it is needed, which takes no register meanwhile.
    __device__ Place place(const Work& work) const {
        if (CHAINED) return Place(h.p, work.task, anew(work.r0));
        const Item item(h, anew(work.round));
        return Place(h.p, item.task, group_row(item));
    }

    // Waits for q and the first keys.
    __device__ void await_queries(const Work& work) {
        if (copies_queries(h.p)) {
            mbarrier_wait(sh.q_full, q_done++ & 1);
        } else {
            load_queries(Task(h.p, work.task), work.r0);
        }
        mbarrier_wait(sh.k_full[stage_of(done)], phase_of(done));
    }

    __device__ void run() {
        const Params& p = h.p;
        const float c = NATURAL_UNITS ? LOG2_E : exponent_factor(p);
        float s[NT][4];
        int round = next_round(0, false);
        Work next = CHAINED ? work_of(round) : Work();
        bool begun = false;  // whether s has the next item's first scores
#pragma unroll 1
        while (round >= 0) {
            const Work work = CHAINED ? next.uniform() : work_of(round);
            if (!work.any || work.r0 >= p.rows) {
                if (work.any) {
                    pass_over(work);
                } else {
                    store_nothing(p, place(work));
                }
                round = next_round(round + 1, false);
                if (CHAINED) next = work_of(round);
                continue;
            }
            if (!begun) {
                await_queries(work);
                multiply_keys(s, done);
                wgmma_wait<0>(s);
            }
            release(sh.k_empty[stage_of(done)]);
            u32 a[NT / 2][4];
            MaskRows mask;
            int n0 = work.n0, n1 = n0 + BN;
            begin_rows();
            ask_ahead(done);
            take_mask(mask);
            release_mask();
            bool more = seek(n1, work.end);
            float rescale[2], sum[2];
            apply_scores<false>(s, work, n0, mask, rescale, c);
            weigh<false>(s, mask, sum, c, done);
            pack_weights(a, s);
            if (!more) release_queries();
#pragma unroll 1
            for (; more; done++) {
                take_mask(mask);
                await(sh.k_full[stage_of(done + 1)], phase_of(done + 1), has_keys);
                take_turn();
                multiply_keys(s, done + 1);
                await(sh.v_full[stage_of(done)], phase_of(done), has_values);
                add_values(a, done, n0 != work.n0);
                end_turn();
                release_mask();
                n0 = n1, n1 += BN;
                more = seek(n1, work.end);
                wgmma_wait<1>(s);
                release(sh.k_empty[stage_of(done + 1)]);
                mbarrier_arrive_if(sh.q_empty, is_first() & !more & copies_queries(p));
                const bool moved = apply_scores<false>(s, work, n0, mask, rescale, c);
                if (MASKS_LATE && mask.kind == MIXED) {
                    weigh<true>(s, mask, sum, c, done + 1);
                } else {
                    weigh<false>(s, mask, sum, c, done + 1);
                }
                // The branch before the wait holds the exponentials there; without it the compiler puts them behind.
                if (moved | may_follow(sum)) {
                    wgmma_wait<0>(acc);
                    follow<false>(s, rescale, moved, sum);
                } else {
                    wgmma_wait<0>(acc);
                }
                release_values(done, more ? -1 : 0);
                pack_weights(a, s);
            }
            mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
            add_values(a, done, n0 != work.n0);
            Ends ends;
            if (CHAINED) {
                ends = finish<false>(work);
                round = next_round(round + 1, false);
                next = work_of(round), begun = next.any && next.r0 < p.rows;
            }
            wgmma_wait<0>(acc);
            const bool lent = LENT && n0 != work.n0;
            release_values(done++, lent ? 1 : -1);
            const int buffer = LENT ? stage_of(done - 2 + group()) : 0;  // that is lent
            if (CHAINED) {
                if (begun) await_queries(next);
                // Of whatever lies there if nothing is begun, and unused then: products under a condition are made one by one
                // (C7515).
                multiply_keys(s, done);
            } else {
                ends = finish<false>(work);
            }
            if (lent) bar_sync(LEND + group(), 256);
            if (__any_sync(~0u, has_non_finite())) {
                if (threadIdx.x % 32 == 0) atomicOr(&sh.again[work.round % NOTES / 32], 1u << work.round % 32);
#if LENT
            } else if (lent && p.out_vector) {
                store_through(sh.v[buffer], p, place(work), acc, ends);
#endif
            } else {
                if (STAGED && h.out_copied) {
                    store_by_copy(h, sh, place(work), acc, ends);
                } else {
                    store(p, acc, ends);
                }
            }
            if (lent) fence_proxy_async(), release(sh.v_empty[buffer]);
            if (CHAINED) {
                wgmma_wait<0>(s);
            } else {
                round = next_round(round + 1, false);
            }
        }
    }

    // Works off the items that were noted. Groups without rows multiply as well, whatever lies there.
    __device__ void run_again() {
        const Params& p = h.p;
        const float c = NATURAL_UNITS ? LOG2_E : exponent_factor(p);
#pragma unroll 1
        for (int round = next_round(0, true); round >= 0; round = next_round(round + 1, true)) {
            const Work work = work_of(round).uniform();
            // Of another round that has the same note.
            if (!work.any) continue;
            int n0 = work.n0;
            bool more = true;
            begin_rows();
            zero_sums();
            await_queries(work);
#pragma unroll 1
            while (more) {
                float s[NT][4], rescale[2], sum[2];
                u32 a[NT / 2][4];
                MaskRows mask;
                mbarrier_wait(sh.k_full[stage_of(done)], phase_of(done));
                multiply_keys(s, done);
                wgmma_wait<0>(s);
                release(sh.k_empty[stage_of(done)]);
                ask_ahead(done);
                take_mask(mask);
                release_mask();
                // Before values are waited for: they are loaded when tiles that the mask hides have been passed over.
                int n1 = n0 + BN;
                more = seek(n1, work.end);
                if (!more) release_queries();
                const bool moved = apply_scores<true>(s, work, n0, mask, rescale, c);
                weigh<false>(s, mask, sum, c, done);
                if (moved | may_follow(sum)) follow<true>(s, rescale, moved, sum);
                pack_weights(a, s);
                isolate_values(work, n0);
                n0 = n1;
                add_values(a, done, true);
                wgmma_wait<0>(acc);
                release(sh.v_empty[stage_of(done++)]);
            }
            const Ends ends = finish<true>(work);
            if (work.r0 >= p.rows) continue;
            if (STAGED && h.out_copied) {
                store_by_copy(h, sh, place(work), acc, ends);
            } else {
                store(p, acc, ends);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ HopperParams h) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const int group = same(threadIdx.x / 128);
#if MASK != NO_MASK
    const bool copies = VECTOR && h.mask_access == COPIED;
#endif
    if (threadIdx.x == 0) {
        mbarrier_init(sh.q_full, 1), mbarrier_init(sh.q_empty, WGS * 4);
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(sh.k_full[stage], VECTOR ? 1 : 128), mbarrier_init(sh.v_full[stage], VECTOR ? 1 : 128);
            mbarrier_init(sh.k_empty[stage], WGS * 4), mbarrier_init(sh.v_empty[stage], WGS * 4);
        }
#if MASK != NO_MASK
        for (int stage = 0; stage < MASK_STAGES; stage++) {
            mbarrier_init(sh.mask.copied[stage], 1), mbarrier_init(sh.mask.taken[stage], SCANNERS);
            mbarrier_init(sh.mask.full[stage], copies ? SCANNERS : READERS);
            mbarrier_init(sh.mask.empty[stage], CONSUMERS + (VECTOR ? 1 : 128));
            sh.mask.found[stage] = 0;
        }
#endif
        fence_mbarrier_init();
    }
    for (int at = threadIdx.x; at < NOTES / 32; at += THREADS) sh.again[at] = 0;
    __syncthreads();

    if (group == WGS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int lane = threadIdx.x - CONSUMERS;
        Producer producer{h, sh};
#if MASK != NO_MASK
        const int reading = VECTOR ? lane - (128 - READERS) : lane;
        const bool reads = reading >= 0 && reading < READERS;
        MaskReader reader{h.p, sh.mask, h.mask_access != KEY_BY_KEY && MASK_DTYPE != F64, reading};
#endif
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
            for (int round = 0;; round++) {
                const Item item(h, round);
                if (item.is_beyond(h)) break;
                if (item.is_none() || (pass == 1 && !comes_again(sh, round))) continue;
                const Task task(h.p, item.task);
                const int r0 = item.r0(h);
                const Tiles tiles = item.tiles(h);
#if MASK == NO_MASK
                if (!VECTOR || lane == 0) producer.run(task, r0, tiles, [](int) {});
#else
                const int end = tiles.first + tiles.count * BN;
                if (reads && !copies) reader.begin(task, r0, tiles.first, end);
                if (!VECTOR) {
                    producer.run(task, r0, tiles, [&](int n0) {
                        if (reads) reader.step(task, r0, n0, end);
                    });
                } else if (copies && reading == 0) {
                    reader.copy(h.mask_map, task, r0, tiles.first, end);
                } else if (copies && reading >= READERS - SCANNERS) {
#pragma unroll 1
                    for (int n0 = tiles.first; n0 < end; n0 += BN) reader.publish_copied(r0, n0);
                } else if (reads && !copies) {
#pragma unroll 1
                    for (int n0 = tiles.first; n0 < end; n0 += BN) reader.step(task, r0, n0, end);
                } else if (lane == 0) {
                    producer.run(task, r0, tiles, [](int) {});
                }
#endif
            }
            __syncwarp();
            bar_sync(END, THREADS);
            if (!any_comes_again(sh)) break;
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer consumer{h, sh, group};
        if (group == WGS - 1) bar_arrive(TURN, 256);
        consumer.run();
        bar_sync(END, THREADS);
        if (any_comes_again(sh)) {
            consumer.run_again();
            bar_sync(END, THREADS);
        }
        if (STAGED && threadIdx.x % 32 == 0) tma_store_wait();
    }
}
