// What stands between a product q.k and a score: scale, softcap, slopes, biases, masks and positions.
//
//   s = softcap(q.k * softmax_scale) - slope*|i + diagonal - j| + bias;  -inf where masked
//
// Deliberately absent: how a mask is read (mask.cuh), and what becomes of scores (softmax.cuh).

#pragma once
#include "common/mask.cuh"

// A product q.k in natural units: scale, softcap, and the slope of a key `distance` away.
__device__ inline Acc natural_score(
    const Params& p, Acc x, Acc scale, Acc cap, Acc inverse_cap, Acc slope, int distance
) {
    x = product(x, scale);
    if (p.softcap != 0) x = cap * hyperbolic_tangent(x * inverse_cap);
    if (p.alibi != nullptr) x = fused(-slope, (Acc)abs(distance), x);
    return x;
}

#if STORAGE != F64
// Keys n0.. of which those below `end` count, and whether some row does not see all of them.
struct TileKeys {
    int n0, end;
    bool positions;
};
// Scale, softcap, slopes, biases and masks. `scale_of(mt, h)`: the scale of a row.
template <int MT, int NT, class Scale>
__device__ inline void apply_scaled_scores(
    Accumulator<NT> (&s)[MT], const Params& p, const Queries& queries, const MaskTile<MT, NT>& mask, const TileKeys& keys, Scale scale_of
) {
    const auto [n0, end, positions] = keys;
    const float cap = (float)p.softcap;
    const float inverse_cap = (float)p.inverse_softcap;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Row row = queries.row(mt, h);
            const float scale = scale_of(mt, h);
            const i64 mask_at = MASK == ADDITIVE_MASK ? mask_row(p, row) : 0;
            const float slope =
                NATURAL && p.alibi != nullptr ? load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride) : 0.f;
            const int i = row.i;
            // Counted from the thread's first key, so that what an element is compared with is a constant.
            const int first = n0 + lane_column(threadIdx.x);
            const Sequence& of = queries.task.sequence;
            const int lo = positions ? keys_lo(p, of, i) - first : 0;
            const int hi = positions ? min(keys_hi(p, of, i), end) - first : NT * 8;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                const int j0 = first + nt * 8;
                bool masked[2] = {nt * 8 < lo || nt * 8 >= hi, nt * 8 + 1 < lo || nt * 8 + 1 >= hi};
                float bias[2];
                mask.read(p, mask_at, {mt, h, nt}, j0, masked, bias);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[mt][nt][h * 2 + e];
                    if (NATURAL) {
                        x = natural_score(p, x, scale, cap, inverse_cap, slope, i + p.diagonal - of.lag(p) - j0 - e);
                        if (MASK == ADDITIVE_MASK) x += bias[e];
                    }
                    if (masked[e]) x = negative_infinity();
                }
            }
        }
}
// The same where all rows have the scale of the request.
template <int MT, int NT>
__device__ inline void apply_scores(
    Accumulator<NT> (&s)[MT], const Params& p, const Queries& queries, const MaskTile<MT, NT>& mask, int n0, int end,
    bool positions
) {
    const float scale = (float)p.scale;
    apply_scaled_scores<MT, NT>(s, p, queries, mask, {n0, end, positions}, [&](int, int) { return scale; });
}
#endif
