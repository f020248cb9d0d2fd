// The softmax of hopper.cu: scores of a thread's two rows become weights and sums, with few rescalings.
//
//   first tile with a key    reference = max s * c                                          `set_reference`
//   each tile                p = 2^(s*c - reference);  row_sum += sum p                     `exponentiate`
//                            where weights have become large: reference, row_sum and acc_o
//                            follow the largest                                             `raise_reference`
//   watched rows             reference follows the tile's maximum, as soon as it has risen by SLACK    `update_reference`
//
// The reference is the maximum of the first tile in which a row sees a key: no other maximum is computed unless weights become large.
// Rows whose reference is far from 0, or low, so that scores may yet rise by any number (biases of -10000, slopes), are watched.
//
// Not OnlineSoftmax of common/softmax.cuh, which follows every tile's maximum; what that costs (TFLOP/s, H200, 2026-11, docs/lab/hopper.md):
//
//   no running maximum        with the careful pass apart, 345 instructions a tile at D 64 instead of 458: 489 instead of 443 at
//                             16,32,1024,64; 4 to 7 % at D 128
//   only watched rows move    bfloat16 masks at D 128 472 instead of 449
//   weights packed at last    before the wait for acc_o they make ptxas serialise wgmma (C7513)
//
// Deliberately absent: what changes scores before (consumer.cuh), and where sums go (store.cuh).

#pragma once
#include "common/softmax.cuh"
#include "hopper/work.cuh"

// Exponents of 2. From FAR on a tile's maximum is subtracted from the scores before they become exponents: a reference below it is
// off by at most 2^-12, a weight by 1.7e-4, less than half a last place of float16. Rows with a reference below LOW are watched.
// OVER: a weight from there on is too large for the reference to follow it.
constexpr float FAR = 8192, LOW = -64, OVER = 120;
// What the weights of a row and tile may sum up to before the row's reference follows them: a thread's, and all of them where
// nearly all keys share the maximum (p's rounding of it would be in all of the sum; where fewer share it, it is). Where scores are
// all but equal, a weight is 1.
constexpr float LARGE = 256, CROWD = BN * (1 + 1.f / 8192);
// Whether rows are watched: without biases and slopes scores seldom rise by much, and an item gets a careful pass where one is far.
constexpr bool IS_WATCHED = NATURAL_UNITS;

// Two rows of a group's 64, `lane_row` and 8 behind it of the warp's 16: a quarter of their keys and columns.
struct RowSoftmax {
    int unset = 0;     // bit r: row r has no reference yet
    int watched = 0;  // whether any of the warp's rows is, or has none
    // What is subtracted from a row's exponents is offset * c + reference; offset is 0 but for rows far from 0.
    float reference[2], offset[2], row_sum[2];
    Accumulator<VT> acc_o;

    __device__ void reset_rows() {
        reference[0] = reference[1] = offset[0] = offset[1] = row_sum[0] = row_sum[1] = 0, unset = 3, watched = 1;
    }

    // The maximum of a row's scores of a tile, in two chains: by `max_of_row` of common/softmax.cuh the kernel has 8 to 16 instructions
    // more (bfloat16 at head dims 64 and 128, with and without biases; NVRTC 13.2, 2026-11).
    __device__ static float row_max(const Accumulator<NT>& s, int r) {
        float top = s[0][r * 2], top_again = s[0][r * 2 + 1];
#pragma unroll
        for (int nt = 1; nt < NT; nt++) top = fmaxf(top, s[nt][r * 2]), top_again = fmaxf(top_again, s[nt][r * 2 + 1]);
        top = fmaxf(top, top_again);
        return max_of_lanes<4>(top);
    }

    // Gives a reference to rows that see their first key in this tile. An item with one that is far from 0 gets a careful pass.
    __device__ void set_reference(const Accumulator<NT>& s, float c) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float top = row_max(s, r);
            if (!(unset >> r & 1) || top == negative_infinity()) continue;
            reference[r] = __fmul_rn(top, c), unset &= ~(1 << r);
            if (fabsf(reference[r]) > FAR) row_sum[r] = not_a_number();
        }
        watched = __any_sync(~0u, unset);
    }

    // Also moves the reference where scores of watched rows have risen: true if any moves, and sums are yet to be multiplied with
    // `factor`. From scores far from 0 their maximum is subtracted. Each row by itself: its reference depends on no other row.
    template <bool CAREFUL>
    __device__ bool update_reference(Accumulator<NT>& s, float (&factor)[2], float c) {
        bool moves = false, stays = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float top = row_max(s, r), rise = __fmaf_rn(top - offset[r], c, -reference[r]);
            const bool is_open = unset >> r & 1, is_watched = offset[r] != 0 || (IS_WATCHED && reference[r] < LOW);
            const float most = is_watched ? SLACK : CAREFUL ? OVER : -negative_infinity();
            factor[r] = 1;
            if (top != negative_infinity() && (is_open || rise >= most)) {
                const float scaled = __fmul_rn(top, c), was_taken = offset[r], was = reference[r];
                const bool far = fabsf(scaled) > FAR;
                offset[r] = far ? top : 0.f, reference[r] = far ? 0.f : scaled;
                if (!is_open) factor[r] = exp2_approx(__fmaf_rn(was_taken - offset[r], c, was - reference[r]));
                row_sum[r] = __fmul_rn(row_sum[r], factor[r]), unset &= ~(1 << r), moves = true;
            }
            stays |= offset[r] != 0 || (IS_WATCHED && reference[r] < LOW);
        }
        watched = __any_sync(~0u, stays || unset != 0);
        if (__any_sync(~0u, offset[0] != 0 || offset[1] != 0)) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[nt][e] = __fsub_rn(s[nt][e], offset[e / 2]);
        }
        return __any_sync(~0u, moves);
    }

    // Scores become p, row_sum moves on, and `sum` is what the thread's weights of this tile add up to. MASKS: the mask is not in the
    // scores yet, nor is `scale`.
    template <bool MASKS>
    __device__ void exponentiate(Accumulator<NT>& s, const MaskRows& mask, float (&sum)[2], float c, float scale) {
        float part[2][2] = {};
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[nt][e];
                if (MASKS) x = mask.masked(x, scale, e / 2, nt, e % 2);
                x = exponential_below(x, c, reference[e / 2]);
                part[e / 2][e % 2] += x;
            }
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] = part[r][0] + part[r][1], row_sum[r] += sum[r];
    }

    // Whether `raise_reference` has anything to do in this tile, as far as the sums of the warp's threads show.
    __device__ static bool may_raise(const float (&sum)[2]) {
        static_assert(CROWD / 4 < LARGE, "either sum shows in a thread's");
        return __any_sync(~0u, fmaxf(sum[0], sum[1]) >= CROWD / 4);
    }

    // Sums are multiplied with `factor` where `update_reference` has moved a reference; where weights have become large, the reference
    // follows the largest: that is 1 then, which p does not round.
    template <bool CAREFUL>
    __device__ void raise_reference(Accumulator<NT>& s, float (&factor)[2], bool moved, const float (&sum)[2]) {
        bool rises[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float all = sum_of_lanes<4>(sum[r]), most = max_of_lanes<4>(sum[r]);
            rises[r] = most >= LARGE || all >= CROWD;
        }
        if (!(moved | __any_sync(~0u, rises[0] | rises[1]))) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float rise = log2_approx(row_max(s, r)), to = rises[r] ? reference[r] + rise : reference[r];
            const float down = exp2_approx(reference[r] - to);
            reference[r] = to;
            // Such an item gets a careful pass, in which `update_reference` moves rows of which one weight alone is that large.
            row_sum[r] = !CAREFUL && rise >= OVER ? not_a_number() : __fmul_rn(row_sum[r], down);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) s[nt][r * 2] *= down, s[nt][r * 2 + 1] *= down;
            factor[r] = moved ? factor[r] * down : down;
        }
        rescale(acc_o, factor, CAREFUL);
    }

    __device__ bool has_non_finite() const {
        return non_finite(acc_o) + (row_sum[0] + row_sum[1]) * 0.f != 0;
    }
};
