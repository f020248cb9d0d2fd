// The rows of a thread of hopper.cu: how scores become weights, what they are compared with, and the sums.
//
// What a row's scores are compared with, its reference, is their maximum in the first tile in which it sees a key. From there
// it follows weights that become large (`follow`): sums are seldom multiplied, and no other maximum is sought. But rows whose
// reference is far from 0, or low, so that scores may yet rise by any number (biases of -10000, slopes), are watched: their
// reference follows the maximum of each tile that has risen by SLACK (`track`).
// Deliberately absent: what changes scores before (hopper.cu), and where sums go (hopper_store.cu).

#pragma once
#include "common/softmax.cuh"
#include "hopper/work.cuh"

// Exponents of 2. From FAR on a tile's maximum is taken off the scores before they become exponents: a reference below it is
// off by at most 2^-12, a weight by 1.7e-4, less than half a last place of float16. Rows with a reference below LOW are watched.
// OVER: a weight from there on is too large to be followed.
constexpr float FAR = 8192, LOW = -64, OVER = 120;
// What the weights of a row and tile may sum up to before the row's reference follows them: a thread's, and all of them where
// nearly all keys share the maximum (p's rounding of it would be in all of the sum; where fewer share it, it is). Where scores are
// all but equal, a weight is 1.
constexpr float LARGE = 256, CROWD = BN * (1 + 1.f / 8192);
// Whether rows are watched: without biases and slopes scores seldom rise by much, and an item comes again where one is far.
constexpr bool WATCHES = NATURAL_UNITS;

// Two rows of a group's 64, lane / 4 and 8 behind it of the warp's 16: a quarter of their keys and columns.
struct Rows {
    int open = 0;     // bit r: row r has no reference yet
    int watched = 0;  // whether any of the warp's rows is, or has none
    // A row's reference is taken * c + reference; taken is 0 but for rows far from 0.
    float reference[2], taken[2], l[2], acc[VT][4];

    __device__ void begin_rows() {
        reference[0] = reference[1] = taken[0] = taken[1] = l[0] = l[1] = 0, open = 3, watched = 1;
    }
    __device__ void zero_sums() {
#pragma unroll
        for (int nt = 0; nt < VT; nt++) acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0;
    }

    // The largest of a row's scores of a tile.
    __device__ static float largest(const float (&s)[NT][4], int r) {
        float top = s[0][r * 2], top_again = s[0][r * 2 + 1];
#pragma unroll
        for (int nt = 1; nt < NT; nt++) top = fmaxf(top, s[nt][r * 2]), top_again = fmaxf(top_again, s[nt][r * 2 + 1]);
        top = fmaxf(top, top_again);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    }

    // Gives a reference to rows that see their first key in this tile. An item with one that is far from 0 comes again.
    __device__ void refer(const float (&s)[NT][4], float c) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float top = largest(s, r);
            if (!(open >> r & 1) || top == negative_infinity()) continue;
            reference[r] = __fmul_rn(top, c), open &= ~(1 << r);
            if (fabsf(reference[r]) > FAR) l[r] = not_a_number();
        }
        watched = __any_sync(~0u, open);
    }

    // Also moves it where scores of watched rows have risen: true if any moves, sums are yet to be multiplied with `fall` then. Of
    // scores far from 0 their maximum is taken off. Each row by itself: what it is compared with does not hang on others.
    template <bool AGAIN>
    __device__ bool track(float (&s)[NT][4], float (&rescale)[2], float c) {
        bool moves = false, stays = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float top = largest(s, r), rise = __fmaf_rn(top - taken[r], c, -reference[r]);
            const bool is_open = open >> r & 1, is_watched = taken[r] != 0 || (WATCHES && reference[r] < LOW);
            const float most = is_watched ? SLACK : AGAIN ? OVER : -negative_infinity();
            rescale[r] = 1;
            if (top != negative_infinity() && (is_open || rise >= most)) {
                const float scaled = __fmul_rn(top, c), was_taken = taken[r], was = reference[r];
                const bool far = fabsf(scaled) > FAR;
                taken[r] = far ? top : 0.f, reference[r] = far ? 0.f : scaled;
                if (!is_open) rescale[r] = exp2_approx(__fmaf_rn(was_taken - taken[r], c, was - reference[r]));
                l[r] = __fmul_rn(l[r], rescale[r]), open &= ~(1 << r), moves = true;
            }
            stays |= taken[r] != 0 || (WATCHES && reference[r] < LOW);
        }
        watched = __any_sync(~0u, stays || open != 0);
        if (__any_sync(~0u, taken[0] != 0 || taken[1] != 0)) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[nt][e] = __fsub_rn(s[nt][e], taken[e / 2]);
        }
        return __any_sync(~0u, moves);
    }

    // Scores become p, l moves on, and `sum` is what the thread's weights of this tile add up to. MASKS: the mask is yet to come in,
    // to scores that `scale` is yet to be multiplied with.
    template <bool MASKS>
    __device__ void weigh(float (&s)[NT][4], const MaskRows& mask, float (&sum)[2], float c, float scale) {
        float part[2][2] = {};
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float& x = s[nt][e];
                if (MASKS) x = mask.masked(x, scale, e / 2, nt, e % 2);
                x = exp2_approx(__fmaf_rn(x, c, -reference[e / 2]));
                part[e / 2][e % 2] += x;
            }
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] = part[r][0] + part[r][1], l[r] += sum[r];
    }

    // Whether `follow` has anything to do in this tile, as far as the sums of the warp's threads tell.
    __device__ static bool may_follow(const float (&sum)[2]) {
        static_assert(CROWD / 4 < LARGE, "either sum shows in a thread's");
        return __any_sync(~0u, fmaxf(sum[0], sum[1]) >= CROWD / 4);
    }

    // Sums are multiplied with `fall` where `track` has moved a reference; where weights have become large, the reference follows
    // the largest: that is 1 then, which p does not round.
    template <bool AGAIN>
    __device__ void follow(float (&s)[NT][4], float (&rescale)[2], bool moved, const float (&sum)[2]) {
        bool follows[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float all = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
            all += __shfl_xor_sync(~0u, all, 2);
            float most = fmaxf(sum[r], __shfl_xor_sync(~0u, sum[r], 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            follows[r] = most >= LARGE || all >= CROWD;
        }
        if (!(moved | __any_sync(~0u, follows[0] | follows[1]))) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float rise = log2_approx(largest(s, r)), to = follows[r] ? reference[r] + rise : reference[r];
            const float down = exp2_approx(reference[r] - to);
            reference[r] = to;
            // Such an item comes again: `track` moves rows of which one weight alone is that large.
            l[r] = !AGAIN && rise >= OVER ? not_a_number() : __fmul_rn(l[r], down);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) s[nt][r * 2] *= down, s[nt][r * 2 + 1] *= down;
            rescale[r] = moved ? rescale[r] * down : down;
        }
#pragma unroll
        for (int nt = 0; nt < VT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[nt][e] = AGAIN ? weighed(rescale[e / 2], acc[nt][e]) : rescale[e / 2] * acc[nt][e];
    }

    __device__ static void pack_weights(u32 (&a)[NT / 2][4], const float (&s)[NT][4]) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int r = 0; r < 2; r++) a[nt / 2][nt % 2 * 2 + r] = pack(s[nt][r * 2], s[nt][r * 2 + 1]);
    }

    __device__ bool has_non_finite() const {
        float zero[4] = {};
#pragma unroll
        for (int nt = 0; nt < VT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) zero[e] = __fmaf_rn(acc[nt][e], 0.f, zero[e]);
        return zero[0] + zero[1] + (zero[2] + zero[3]) + (l[0] + l[1]) * 0.f != 0;
    }
};
