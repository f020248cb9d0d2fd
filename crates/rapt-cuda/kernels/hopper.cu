// Attention on the tensor cores of compute capability 9.0 by wgmma, for many queries.
//
//   A block stays on its multiprocessor and works off items: up to BLOCK_M queries of a task, all keys that they see.
//   producer (4 warps)        Q of the item, then K and V in tiles of BLOCK_N keys from key 0, through a ring of STAGES;
//                             three of them read the mask, a tile or two before (masks.cu): what it hides is not loaded
//   consumers (WGS x 4 warps) 64 queries each:
//                               s = q.K[0];  p = weigh(s)
//     for n = 1..               s = q.K[n]          under way
//                               acc += p.V[n-1]     under way, behind it
//                               p' = weigh(s)       while acc is still under way, and the other group's products run
//                               acc *= fall;  p = p'
//                               acc += p.V[last]    under way: rows, factors and lse of this item, place of the next
//                               s = q.K[0]          of the next item under way: acc is stored (CHAINED)
//
// Groups take turns in enqueuing products (`TURN`): one's softmax runs beside the other's products. Q and the keys are read
// by the tensor cores from shared memory, p from registers: its accumulator layout is the operand's.
// What the copy engine cannot read (addresses and strides of 16 bytes, inner stride 1) the producer loads element by element
// into the same tiles: products, order and bits are the same.
//
// Values that nobody attends: an item with a sum that is not finite is noted and comes again at the end. Then values that
// are not finite are taken out of each tile, and go into the sums of the rows that attend them. Finite sums have the same
// bits both ways.
// Deliberately absent: splitting of the keys (decode.cu), float32.

// From this exponent on scores are compared with m before they become exponents: below it a reference is off by at most 2^-12,
// a weight by 1.7e-4, less than half a last place of float16.
constexpr float FAR = 8192;
// Whether an item's first scores are begun before the one before it is stored: where there are registers for it.
constexpr bool CHAINED = MASK == NO_MASK && !NATURAL;

struct Consumer {
    const HopperParams& h;
    Shared& sh;
    // The group, and its first row counted from its item's: far behind all rows (2^30; the sum stays an int) where items have
    // none for it.
    const int wg, ahead;
    int sought = 0;                        // the kind of the tile that `seek` found
    u32 done = 0, q_done = 0, m_done = 0;  // tiles whose values were added, items, tiles of the mask
    float m[2], l[2], fall[2], acc[VT][4];

    // s = q.k of tile n.
    __device__ void multiply_keys(float (&s)[NT][4], u32 n) {
        const u32 keys = tile_low(sh.k[stage_of(n)], 0), queries = tile_low(sh.q, 0) + anew(wg) * (64 * 128 / 16);
        begin_products();
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            const u32 within = d % BOX * 2 / 16;
            multiply_queries(s, queries + d / BOX * (Q_BOX * 2 / 16) + within, keys + d / BOX * (K_BOX * 2 / 16) + within, d > 0);
        }
        commit_products();
    }

    // acc += p.v of tile n, or = if nothing was added before.
    __device__ void add_values(u32 (&a)[NT / 2][4], u32 n, bool add) {
        const u32 values = tile_low(sh.v[stage_of(n)], K_BOX * 2);
        begin_products();
#pragma unroll
        for (int kt = 0; kt < NT / 2; kt++) multiply_values(acc, a[kt], values + kt * (16 * 128 / 16), add || kt > 0);
        commit_products();
    }

    // Scores become p; m and l move on, and `fall` is what acc is yet to be multiplied with. m follows the row's maximum only
    // when that has risen by more than SLACK powers of 2 (as in mma.cu): acc is seldom multiplied at all then.
    __device__ void weigh(float (&s)[NT][4], float c) {
        float base[2], taken[2];
        bool any_far = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = m[r], top_again = s[0][r * 2];
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                top = fmaxf(top, s[nt][r * 2]), top_again = fmaxf(top_again, s[nt][r * 2 + 1]);
            }
            top = fmaxf(top, top_again);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            top = (top - m[r]) * c > SLACK ? top : m[r];
            // A row without a key yet keeps m at -inf and compares with 0.
            base[r] = top == negative_infinity() ? 0.f : top;
            fall[r] = top == m[r] ? 1.f : exp2_fast((m[r] - base[r]) * c);
            m[r] = top;
            // Far from 0 the reference is rounded too coarsely to be the same number for two m. Each row by itself: its bits
            // are its own.
            const bool far = fabsf(base[r] * c) > FAR;
            taken[r] = far ? base[r] : 0.f;
            any_far |= far;
        }
        if (__any_sync(~0u, any_far)) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[nt][e] -= taken[e / 2];
            base[0] -= taken[0], base[1] -= taken[1];
        }
        float sum[2][2] = {};
        const float reference[2] = {base[0] * c, base[1] * c};
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[nt][e];
                x = exp2_fast(__fmaf_rn(x, c, -reference[e / 2]));
                sum[e / 2][e % 2] += x;
            }
#pragma unroll
        for (int r = 0; r < 2; r++) l[r] = __fmaf_rn(l[r], fall[r], sum[r][0] + sum[r][1]);
    }

    __device__ static void pack_weights(u32 (&a)[NT / 2][4], const float (&s)[NT][4]) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int r = 0; r < 2; r++) a[nt / 2][nt % 2 * 2 + r] = pack(s[nt][r * 2], s[nt][r * 2 + 1]);
    }

    __device__ void rescale(bool careful) {
        if (!__any_sync(~0u, fall[0] != 1 || fall[1] != 1)) return;
        if (careful) {
#pragma unroll
            for (int nt = 0; nt < VT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[nt][e] = weighed(fall[e / 2], acc[nt][e]);
        } else {
#pragma unroll
            for (int nt = 0; nt < VT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[nt][e] *= fall[e / 2];
        }
    }

    // Scores with scale, softcap and slopes in them; `factor` is what they are yet to be multiplied with.
    __device__ float bring_to_natural_units(float (&s)[NT][4], const Queries& queries, int n0) const {
        const Params& p = h.p;
        const float scale = (float)p.scale, cap = (float)p.softcap, inverse_cap = (float)p.inverse_softcap;
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
                    x *= scale;
                    if (p.softcap != 0) x = cap * tanhf(x * inverse_cap);
                    if (p.alibi != nullptr) x -= slope * (float)abs(distance - nt * 8 - e);
                }
        }
        return 1.f;
    }

    // What is added to the scores, and what hides them.
    __device__ void mask_scores(float (&s)[NT][4], const Work& work, int n0, const MaskRows& mask, bool careful) {
        const bool positions = n0 < work.all_lo || n0 + BN > work.all_hi;
        float factor = (float)h.p.scale;
        if (NATURAL) {
            const Place place = this->place(work);
            factor = bring_to_natural_units(s, Queries{h.p, place.task, place.r0}, n0);
        }
#if MASK == ADDITIVE_MASK
        if (mask.kind == MIXED) mask.add(s, factor, careful), factor = 1;
#endif
        if (NATURAL_UNITS && factor != 1) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[nt][e] *= factor;
        }
#if MASK == BOOL_MASK
        if (mask.kind == MIXED) mask.hide(s);
#endif
        if (!positions) return;
        const Place place = this->place(work);
        const Queries queries{h.p, place.task, place.r0};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = queries.row(0, r).i, first = n0 + threadIdx.x % 4 * 2;
            const int lo = keys_lo(h.p, i) - first;
            const u32 count = max(keys_hi(h.p, i) - first - lo, 0);
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    if ((u32)(nt * 8 + e - lo) >= count) s[nt][r * 2 + e] = negative_infinity();
                }
        }
    }

    // What the mask says of the tile that `seek` found last.
    __device__ void take_mask(MaskRows& mask) {
#if MASK != NO_MASK
        const int stage = mask_stage_of(m_done++);
        mask.kind = sought;
        mask.take(h.p, sh.mask, stage, wg * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4);
        arrive(sh.mask.empty[stage]);
#endif
    }

    // Finds the next tile from n0 on, up to `end`, that the mask does not hide.
    __device__ bool seek(int& n0, int end) {
#if MASK == NO_MASK
        return n0 <= end;
#else
        for (; n0 <= end; n0 += BN) {
            const int stage = mask_stage_of(m_done);
            wait(sh.mask.full[stage], mask_phase_of(m_done));
            sought = kind_of(__shfl_sync(~0u, sh.mask.found[stage], 0));
            if (sought != HIDDEN) return true;
            arrive(sh.mask.empty[mask_stage_of(m_done++)]);
        }
        return false;
#endif
    }

    __device__ void release(u64& barrier) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(barrier);
    }

    // Takes values that are not finite out of the tile at hand, keys n0.., and adds them to the sums of the rows that attend
    // them. In loops: this is rare, and its code should be small.
    __device__ void isolate_values(const Work& work, int n0) {
        constexpr u32 EXPONENT = STORAGE == F16 ? 0x7c00u : 0x7f80u;
        const Params& p = h.p;
        const Place place = this->place(work);
        const Queries queries{p, place.task, place.r0};
        u8* tile = (u8*)sh.v[stage_of(done)];
        wait(sh.v_full[stage_of(done)], phase_of(done));
        const int keys = min(BN, p.kv_len - n0);
#pragma unroll 1
        for (int at = 0; at < VT * 2; at++) {
            const int c = at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
            u32 found[2] = {0, 0};  // 1: +inf, 2: -inf, 4: NaN
#pragma unroll 1
            for (int j = 0; j < keys; j++) {
                const u32 x = *(const Elem*)(tile + c / BOX * (K_BOX * 2) + swizzled(j, c % BOX));
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
                    acc[nt][e] += kinds == 1 ? infinity : kinds == 2 ? -infinity : __uint_as_float(0x7fffffffu);
                }
        }
        // All groups together, once none of them needs what is taken out.
        meet(CAREFUL_TILE, CONSUMERS);
#pragma unroll 1
        for (int at = threadIdx.x; at < V_BOXES * K_BOX; at += CONSUMERS) {
            Elem& x = ((Elem*)tile)[at];
            if ((x & EXPONENT) == EXPONENT) x = 0;
        }
        fence_proxy();
        meet(CAREFUL_TILE, CONSUMERS);
    }

    __device__ void release_queries() {
        if (copies_queries(h.p)) release(sh.q_empty);
    }

    // An item without rows for this group: what others wait for, in the order of `run`.
    __device__ void pass_over(const Work& work, bool careful) {
        if (copies_queries(h.p)) wait(sh.q_full, q_done++ & 1);
        release_queries();
        wait(sh.k_full[stage_of(done)], phase_of(done));
        release(sh.k_empty[stage_of(done)]);
        MaskRows mask;
        take_mask(mask);
        int n0 = work.n0, next = n0 + BN;
#pragma unroll 1
        for (; seek(next, work.end); n0 = next, next += BN, done++) {
            if (careful) isolate_values(work, n0);
            wait(sh.k_full[stage_of(done + 1)], phase_of(done + 1));
            take_turn(), end_turn();
            release(sh.k_empty[stage_of(done + 1)]);
            take_mask(mask);
            wait(sh.v_full[stage_of(done)], phase_of(done));
            release(sh.v_empty[stage_of(done)]);
        }
        if (careful) isolate_values(work, n0);
        wait(sh.v_full[stage_of(done)], phase_of(done));
        release(sh.v_empty[stage_of(done++)]);
    }

    __device__ void take_turn() { meet(TURN + wg, 256); }
    __device__ void end_turn() { tell(wg == WGS - 1 ? TURN : TURN + 1 + wg, 256); }

    // What the rows are multiplied with and where they go; also stores their lse.
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
            const Finished finished(p, row, NATURAL_UNITS ? m[r] : natural_max(p, m[r]), l[r]);
            if (ends.inside[r] && threadIdx.x % 4 == 0) store_lse(p, row, finished);
            ends.factor[r] = finished.factor;
            ends.to[r] = 0;
            if (!STAGED || !h.out_copied) ends.to[r] = row.offset(p.out_stride);
        }
        return ends;
    }

    __device__ bool has_non_finite() const {
        float zero[4] = {};
#pragma unroll
        for (int nt = 0; nt < VT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) zero[e] = __fmaf_rn(acc[nt][e], 0.f, zero[e]);
        return zero[0] + zero[1] + (zero[2] + zero[3]) != 0;
    }

    // Rows of other heads and strides: the group loads its own queries.
    __device__ void load_queries(const Task& task, int r0) {
        const Params& p = h.p;
        meet(OWN_QUERIES + wg, 128);
        load_boxes<64, BM, K_BOXES>(
            sh.q + wg * 64 * BOX, (const Elem*)p.q, [&](int r) { return Row(p, task, r0 + r).offset(p.q_stride); },
            p.q_stride[3], p.rows - r0, p.head_dim, threadIdx.x % 128
        );
        fence_proxy();
        meet(OWN_QUERIES + wg, 128);
    }

    // The next round from `round` on that has an item, -1 if there is none.
    __device__ int next_round(int round, int pass) const {
        for (;; round++) {
            const Item item(h, round);
            if (item.is_beyond(h)) {
                round = -1;
                break;
            }
            if (!item.is_none() && (pass == 0 || comes_again(sh, round))) break;
        }
        return CHAINED ? round : same(round);
    }
    __device__ Work work_of(int round) {
        if (round < 0) return {-1};
        const Params& p = h.p;
        const Item item(h, round);
        const Tiles tiles = item.tiles(h);
        const int r0 = item.r0(h) + ahead, first_row = min(r0, p.rows - 1);
        const Seen seen(p, Task(p, item.task), first_row, max(min(r0 + 64, p.rows), first_row + 1));
        Work work{round, item.task, r0, tiles.first, tiles.first + (tiles.count - 1) * BN, seen.all_lo, seen.all_hi};
        work.any = seek(work.n0, work.end);
        return work;
    }
    // Derived anew where it is needed, which takes no register meanwhile.
    __device__ Place place(const Work& work) const {
        if (CHAINED) return Place(h.p, work.task, anew(work.r0));
        const Item item(h, anew(work.round));
        return Place(h.p, item.task, item.r0(h) + ahead);
    }

    // Waits for q and the first keys.
    __device__ void await_queries(const Work& work) {
        if (copies_queries(h.p)) {
            wait(sh.q_full, q_done++ & 1);
        } else {
            load_queries(Task(h.p, work.task), work.r0);
        }
        wait(sh.k_full[stage_of(done)], phase_of(done));
    }

    __device__ void zero_sums() {
#pragma unroll
        for (int nt = 0; nt < VT; nt++) acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0;
    }

    __device__ void run(int pass) {
        const Params& p = h.p;
        const bool careful = pass == 1;
        const float c = NATURAL_UNITS ? LOG2_E : exponent_factor(p);
        float s[NT][4];
        int round = next_round(0, pass);
        Work next = CHAINED ? work_of(round) : Work();
        bool begun = false;  // whether s has the next item's first scores
#pragma unroll 1
        while (round >= 0) {
            const Work work = CHAINED ? next.uniform() : work_of(round);
            if (!work.any || work.r0 >= p.rows) {
                if (work.any) {
                    pass_over(work, careful);
                } else {
                    store_nothing(p, place(work));
                }
                round = next_round(round + 1, pass);
                if (CHAINED) next = work_of(round);
                continue;
            }
            if (!begun) {
                await_queries(work);
                multiply_keys(s, done);
                wait_scores<0>(s);
            }
            release(sh.k_empty[stage_of(done)]);
            u32 a[NT / 2][4];
            MaskRows mask;
            int n0 = work.n0, n1 = n0 + BN;
            m[0] = m[1] = negative_infinity(), l[0] = l[1] = 0;
            if (careful) zero_sums();
            take_mask(mask);
            bool more = seek(n1, work.end);
            mask_scores(s, work, n0, mask, careful);
            weigh(s, c);
            pack_weights(a, s);
            if (!more) release_queries();
#pragma unroll 1
            for (; more; done++) {
                if (careful) isolate_values(work, n0);
                wait(sh.k_full[stage_of(done + 1)], phase_of(done + 1));
                take_turn();
                multiply_keys(s, done + 1);
                wait(sh.v_full[stage_of(done)], phase_of(done));
                add_values(a, done, careful || n0 != work.n0);
                end_turn();
                take_mask(mask);
                n0 = n1, n1 += BN;
                more = seek(n1, work.end);
                wait_scores<1>(s);
                release(sh.k_empty[stage_of(done + 1)]);
                if (!more) release_queries();
                mask_scores(s, work, n0, mask, careful);
                weigh(s, c);
                wait_sums<0>(acc);
                release(sh.v_empty[stage_of(done)]);
                pack_weights(a, s);
                rescale(careful);
            }
            if (careful) isolate_values(work, n0);
            wait(sh.v_full[stage_of(done)], phase_of(done));
            add_values(a, done, careful || n0 != work.n0);
            Ends ends;
            if (CHAINED) {
                ends = finish(work);
                round = next_round(round + 1, pass);
                next = work_of(round), begun = next.any && next.r0 < p.rows;
            }
            wait_sums<0>(acc);
            release(sh.v_empty[stage_of(done++)]);
            if (CHAINED) {
                if (begun) await_queries(next);
                // Of whatever lies there if nothing is begun, and unused then: products under a condition are made one by one
                // (C7515).
                multiply_keys(s, done);
            } else {
                ends = finish(work);
            }
            if (!careful && __any_sync(~0u, has_non_finite())) {
                if (threadIdx.x % 32 == 0) atomicOr(&sh.again[work.round % NOTES / 32], 1u << work.round % 32);
            } else {
                if (STAGED && h.out_copied) {
                    store_by_copy(h, sh, place(work), acc, ends);
                } else {
                    store(p, acc, ends);
                }
            }
            if (CHAINED) {
                wait_scores<0>(s);
            } else {
                round = next_round(round + 1, pass);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ HopperParams h) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& sh = *(Shared*)memory;
    const int group = same(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        init_barrier(sh.q_full, 1), init_barrier(sh.q_empty, WGS * 4);
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(sh.k_full[stage], VECTOR ? 1 : 128), init_barrier(sh.v_full[stage], VECTOR ? 1 : 128);
            init_barrier(sh.k_empty[stage], WGS * 4), init_barrier(sh.v_empty[stage], WGS * 4);
        }
#if MASK != NO_MASK
        for (int stage = 0; stage < MASK_STAGES; stage++) {
            init_barrier(sh.mask.full[stage], READERS), init_barrier(sh.mask.empty[stage], CONSUMERS + (VECTOR ? 1 : 128));
        }
#endif
        fence_barriers();
    }
    for (int at = threadIdx.x; at < NOTES / 32; at += THREADS) sh.again[at] = 0;
    __syncthreads();

    if (group == WGS) {
        give_registers<PRODUCER_REGISTERS>();
        const int lane = threadIdx.x - CONSUMERS;
        Producer producer{h, sh};
#if MASK != NO_MASK
        const int reading = VECTOR ? lane - (128 - READERS) : lane;
        const bool reads = reading >= 0 && reading < READERS;
        MaskReader reader{h.p, sh.mask, h.mask_wide != 0 && MASK_DTYPE != F64, reading};
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
                if (reads) reader.begin(task, r0, tiles.first, end);
                if (!VECTOR) {
                    producer.run(task, r0, tiles, [&](int n0) {
                        if (reads) reader.step(task, r0, n0, end);
                    });
                } else if (reads) {
#pragma unroll 1
                    for (int n0 = tiles.first; n0 < end; n0 += BN) reader.step(task, r0, n0, end);
                } else if (lane == 0) {
                    producer.run(task, r0, tiles, [](int) {});
                }
#endif
            }
            __syncwarp();
            meet(END, THREADS);
            u32 any = 0;
            for (int at = 0; at < NOTES / 32; at++) any |= sh.again[at];
            if (any == 0) break;
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        Consumer consumer{h, sh, group, group * 64 < h.item_rows ? group * 64 : 1 << 30};
        if (group == WGS - 1) tell(TURN, 256);
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
            consumer.run(pass);
            meet(END, THREADS);
            u32 any = 0;
            for (int at = 0; at < NOTES / 32; at++) any |= sh.again[at];
            if (any == 0) break;
        }
        if (STAGED && threadIdx.x % 32 == 0) await_copies_out();
    }
}
