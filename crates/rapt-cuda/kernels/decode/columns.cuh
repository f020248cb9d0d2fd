// Scores whose rows are the columns of mma.sync's sums, and their softmax: 8*QT rows of an item, 16*MT keys of a tile.
//
//   lane = 4*g + t      element h*2 + e of tile (qt, mt): row 8*qt + 2*t + e, key 16*mt + 8*h + g
//
// As softmax.cuh, but for the maximum that weights are counted from. They are computed with the one that there is, and once more
// where one of them is beyond LIMIT: so a tile has no maximum of its own as a rule.
//
//   p = 2^(s*c - row_max*c + shift);  weight = p * factor      factor: of a key, where TOKEN
//
// `shift` is SHIFT; where keys have factors it is such that the greatest weight is at most 2^SHIFT when the maximum is taken, so that
// weights fit their dtype whatever the factors are. Deliberately absent: factors of blocks.

#pragma once
#include "common/scores.cuh"
#include "common/softmax.cuh"

constexpr int QT = BLOCK_M / 8, MT = TILE / 16;
using Scores = float[QT][MT][4];
using OfRows = float[QT][2];
using OfKeys = float[MT][2];

// A lane's rows, computed where they are needed.
struct Columns {
    const Params& p;
    const Task task;
    int r0;
    __device__ Row row(int qt, int e) const {
        return Row(p, task, min(r0 + qt * 8 + lane_column((int)threadIdx.x) + e, task.rows(p) - 1));
    }
};

// The maximum, and the sum, over the lanes that have keys of the same rows.
__device__ inline float max_of_keys(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
__device__ inline float sum_of_keys(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// What a boolean mask says of a tile: a bit for each score, 1 where it is masked. Loaded before the product that is masked.
struct HiddenScores {
    u32 bits = 0;
    __device__ void fetch(const Params& p, const Columns& columns, int n0) {
#if MASK == BOOL_MASK
        bits = 0;
#pragma unroll
        for (int qt = 0; qt < QT; qt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const i64 row = mask_row(p, columns.row(qt, e));
#pragma unroll
                for (int n = 0; n < MT * 2; n++) {
                    const int j = n0 + n * 8 + lane_row((int)threadIdx.x);
                    float bias;
                    if (j < p.kv_len && is_masked(p, row, j, bias)) bits |= 1u << bit(qt, n, e);
                }
            }
#endif
    }
    __device__ static constexpr int bit(int qt, int n, int e) { return (qt * MT * 2 + n) * 2 + e; }
};

// Scale, softcap, slopes, biases and masks, for keys n0.. of which those below `end` count.
__device__ inline void apply_to_columns(
    Scores& s, const Params& p, const Columns& columns, const HiddenScores& hidden, int n0, int end, bool positions
) {
    const float scale = (float)p.scale, cap = (float)p.softcap, inverse_cap = (float)p.inverse_softcap;
    const Sequence& of = columns.task.sequence;
    const int first = n0 + lane_row((int)threadIdx.x);
#pragma unroll
    for (int qt = 0; qt < QT; qt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const Row row = columns.row(qt, e);
            const i64 mask_at = MASK == ADDITIVE_MASK ? mask_row(p, row) : 0;
            const float slope = NATURAL && p.alibi != nullptr ? load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride) : 0.f;
            const int lo = positions ? keys_lo(p, of, row.i) - first : 0;
            const int hi = positions ? min(keys_hi(p, of, row.i), end) - first : TILE;
#pragma unroll
            for (int n = 0; n < MT * 2; n++) {
                float& x = s[qt][n / 2][n % 2 * 2 + e];
                const int j = first + n * 8;
                bool masked = n * 8 < lo || n * 8 >= hi;
                if (NATURAL) x = natural_score(p, x, scale, cap, inverse_cap, slope, row.i + p.diagonal - of.lag(p) - j);
                if (MASK == BOOL_MASK) masked |= (hidden.bits >> HiddenScores::bit(qt, n, e) & 1) != 0;
                if (MASK == ADDITIVE_MASK && j < p.kv_len) {
                    float bias;
                    masked |= is_masked(p, mask_at, j, bias);
                    x += bias;
                }
                if (masked) x = negative_infinity();
            }
        }
}

// The state of a warp's rows but for their sums of values. HALF: weights become float16, and its range is made use of; else bfloat16,
// and the greatest weight is 1 and not rounded.
template <bool HALF, bool TOKEN>
struct ColumnSoftmax {
    static constexpr float SHIFT = HALF ? 7 : 0, RISE = HALF ? 8 : 0, LIMIT = HALF ? 0x1p15f : 1.0001f;
    // Counts as a factor where that is less: so sums of p stay below MOST_SUM.
    static constexpr float LEAST_FACTOR = 0x1p-90f, MOST_SUM = 0x1p107f;

    OfRows row_max, row_sum, shift, base, subtracted;
    bool is_slow;  // a row has no key yet, or a maximum that is taken from scores themselves

    __device__ void clear() {
#pragma unroll
        for (int qt = 0; qt < QT; qt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                row_max[qt][e] = negative_infinity(), row_sum[qt][e] = 0;
                shift[qt][e] = SHIFT, base[qt][e] = subtracted[qt][e] = 0;
            }
        is_slow = true;
    }

    // Scores become weights, before they are rounded; a masked one is -0 where CAREFUL. `rescale(qt, e, by)` follows a row's maximum.
    template <bool CAREFUL, class Rescale>
    __device__ void add_keys(Scores& s, const OfKeys& factor, float c, Rescale rescale) {
        Scores weights;
        OfRows sums;
        if (__any_sync(~0u, is_slow || weigh<CAREFUL, NATURAL>(weights, sums, s, factor, c))) {
            raise(s, factor, c, rescale);
            weigh<CAREFUL, true>(weights, sums, s, factor, c);
        }
#pragma unroll
        for (int qt = 0; qt < QT; qt++) {
            row_sum[qt][0] += sums[qt][0], row_sum[qt][1] += sums[qt][1];
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 4; n++) s[qt][mt][n] = weights[qt][mt][n];
        }
    }

    // What p is multiplied by in the end: 1 / 2^shift.
    __device__ float unshifted(int qt, int e) const { return exp2_approx(-shift[qt][e]); }

  private:
    __device__ static float bounded(float factor) { return fminf(fmaxf(fabsf(factor), LEAST_FACTOR), 0x1p127f); }

    // Whether a weight is beyond what it should be. BASED: scores are less `base`.
    template <bool CAREFUL, bool BASED>
    __device__ bool weigh(Scores& weights, OfRows& sums, const Scores& s, const OfKeys& factor, float c) const {
        float most = 0;
#pragma unroll
        for (int qt = 0; qt < QT; qt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                sums[qt][e] = 0;
#pragma unroll
                for (int n = 0; n < MT * 2; n++) {
                    const float score = s[qt][n / 2][n % 2 * 2 + e];
                    const float x = BASED ? score - base[qt][e] : score;
                    float weight = exponential_below(x, c, subtracted[qt][e]);
                    sums[qt][e] += weight;
                    if (TOKEN) weight = product(weight, factor[n / 2][n % 2]);
                    most = fmaxf(most, fabsf(weight));
                    if (CAREFUL && score == negative_infinity()) weight = -0.f;
                    weights[qt][n / 2][n % 2 * 2 + e] = weight;
                }
            }
        bool is_beyond = most > LIMIT;
#pragma unroll
        for (int qt = 0; qt < QT; qt++) is_beyond |= TOKEN && (sums[qt][0] > MOST_SUM || sums[qt][1] > MOST_SUM);
        return is_beyond;
    }

    // Takes the maxima of rows whose weights are too large.
    template <class Rescale>
    __device__ void raise(const Scores& s, const OfKeys& factor, float c, Rescale rescale) {
        bool any_slow = false;
#pragma unroll
        for (int qt = 0; qt < QT; qt++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float before = row_max[qt][e];
                float top = before;
#pragma unroll
                for (int n = 0; n < MT * 2; n++) top = fmaxf(top, s[qt][n / 2][n % 2 * 2 + e]);
                top = max_of_keys(top);
                // The greatest weight of the tile by its exponent, counted from `top`; and where it would lie now.
                float most = TOKEN ? negative_infinity() : 0;
                if (TOKEN) {
#pragma unroll
                    for (int n = 0; n < MT * 2; n++) {
                        const float x = (s[qt][n / 2][n % 2 * 2 + e] - top) * c;
                        most = fmaxf(most, x + log2_approx(bounded(factor[n / 2][n % 2])));
                    }
                    most = max_of_keys(most);
                }
                const float risen = (top - before) * c;
                if (most + risen + shift[qt][e] > SHIFT + RISE) {
                    const float to = TOKEN ? fminf(fmaxf(floorf(SHIFT - most), -120.f), 120.f) : SHIFT;
                    const float by = exp2_approx(to - shift[qt][e] - risen);
                    row_max[qt][e] = top, shift[qt][e] = to;
                    row_sum[qt][e] *= by;
                    rescale(qt, e, by);
                }
                const bool unset = row_max[qt][e] == negative_infinity();
                const float exponent = unset ? 0.f : row_max[qt][e] * c;
                const bool far = NATURAL || fabsf(exponent) > EXACT;
                base[qt][e] = far && !unset ? row_max[qt][e] : 0.f;
                subtracted[qt][e] = (far ? 0.f : exponent) - shift[qt][e];
                any_slow |= unset || (far && !NATURAL);
            }
        is_slow = __any_sync(~0u, any_slow);
    }
};
