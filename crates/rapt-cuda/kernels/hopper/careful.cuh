// The second pass of hopper.cu, over items with a sum that is not finite, or that cannot be had so: one product after the other.
//
//   for each tile      s = q.k;  p = exponentials of s;  values that are not finite leave the tile (`isolate_values`)
//                      and go into the sums of the rows that attend them;  acc_o += p.v
//
// What nobody attends is in none of the sums then. A row that was well before has the same bits.

#pragma once
#include "hopper/consumer.cuh"

// Whether a value of the tile is not finite. All groups look together, each thread at its part: where scores alone asked for the careful
// pass, no tile has one, and this is all that it costs.
__device__ inline bool has_odd_values(const u8* tile) {
    constexpr u32 EXPONENT = STORAGE == F16 ? 0x7c00u : 0x7f80u;
    bool any = false;
#pragma unroll 1
    for (int at = threadIdx.x; at < V_BOXES * K_BOX / 8; at += CONSUMERS) {
        const uint4 x = ((const uint4*)tile)[at];
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (const u32 word : words)
            any |= (word & EXPONENT) == EXPONENT || (word >> 16 & EXPONENT) == EXPONENT;
    }
    return bar_any(CAREFUL_TILE, CONSUMERS, any);
}

// Takes values that are not finite out of the tile at hand, keys n0.., and adds them to the sums of the rows that attend
// them. In loops: this is rare, and its code should be small.
__device__ inline void Consumer::isolate_values(const Work& work, int n0) {
    constexpr u32 EXPONENT = STORAGE == F16 ? 0x7c00u : 0x7f80u;
    const Params& p = h.p;
    const Place place = this->place(work);
    const Queries queries{p, place.task, place.r0};
    u8* tile = (u8*)sh.v[stage_of(done)];
    mbarrier_wait(sh.v_full[stage_of(done)], phase_of(done));
    if (!has_odd_values(tile)) return;
    const Sequence& of = place.task.sequence;
    const int keys = min(BN, of.kv_len(p) - n0);
#pragma unroll 1
    for (int at = 0; at < VT * 2; at++) {
        const int c = at / 2 * 8 + lane_column(threadIdx.x) + at % 2;
        u32 kinds_of_row[2] = {0, 0};  // 1: +inf, 2: -inf, 4: NaN
#pragma unroll 1
        for (int j = 0; j < keys; j++) {
            const u32 x = *(const Elem*)(tile + c / BOX * (K_BOX * 2) + swizzle_128b(j, c % BOX));
            if ((x & EXPONENT) != EXPONENT) continue;
            const u32 kind = (x & 0x7fffu) != EXPONENT ? 4 : x >> 15 ? 2 : 1;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const Row row = queries.row(0, r);
                float bias;
                const bool seen = n0 + j >= keys_lo(p, of, row.i) && n0 + j < keys_hi(p, of, row.i);
                if (seen && !is_masked(p, mask_row(p, row), n0 + j, bias)) kinds_of_row[r] |= kind;
            }
        }
#pragma unroll
        for (int nt = 0; nt < VT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (nt * 2 + e % 2 != at || kinds_of_row[e / 2] == 0) continue;
                const float infinity = -negative_infinity();
                const u32 kinds = kinds_of_row[e / 2];
                acc_o[nt][e] += kinds == 1 ? infinity : kinds == 2 ? -infinity : not_a_number();
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

// Works off the items that were noted. Groups without rows multiply as well, whatever lies there.
__device__ inline void Consumer::run_careful() {
    const Params& p = h.p;
    const float c = NATURAL_UNITS ? LOG2_E : exponent_factor(p);
#pragma unroll 1
    for (int round = next_round(0, true); round >= 0; round = next_round(round + 1, true)) {
        const Work work = work_of(round).as_uniform();
        // Of another round that has the same note.
        if (!work.any) continue;
        int n0 = work.n0;
        bool more = true;
        reset_rows();
        zero(acc_o);
        await_queries(work);
#pragma unroll 1
        while (more) {
            Accumulator<NT> s;
            float factor[2], sum[2];
            OperandA<NT / 2> p_rounded;
            MaskRows mask;
            mbarrier_wait(sh.k_full[stage_of(done)], phase_of(done));
            multiply_keys(s, done);
            wgmma_wait<0>(s);
            release(sh.k_empty[stage_of(done)]);
            poll_barriers(done);
            load_mask(mask);
            release_mask();
            // Before values are waited for: they are loaded when tiles that the mask hides have been passed over.
            int n1 = n0 + BN;
            more = skip_hidden_tiles(n1, work.end);
            if (!more) release_queries();
            const bool moved = apply_scores<true>(s, work, n0, mask, factor, c);
            exponentiate<false>(s, mask, sum, c, done);
            if (moved | may_raise(sum)) raise_reference<true>(s, factor, moved, sum);
            pack_weights(p_rounded, s);
            isolate_values(work, n0);
            n0 = n1;
            add_values(p_rounded, done, true);
            wgmma_wait<0>(acc_o);
            release(sh.v_empty[stage_of(done++)]);
        }
        const Ends ends = finish<true>(work);
        if (work.has_rows(p)) store_sums(work, ends);
    }
}
