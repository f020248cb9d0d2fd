// Queries rounded to int8, row by row, as rapt_reference::int8 defines it:
//
//   scale = max(max|q| / 127, 2^-126)      code = round(q / scale)       both quotients rounded to float32; ties to even
//
// A row with NaN or infinity has codes 0 and the scale NaN. A warp rounds the rows that it multiplies: LANES of its lanes share one, eight
// numbers each.
#pragma once
#include "common/params.cuh"
#include "int8/products.cuh"

template <int WIDTH>
struct RoundedRow {
    // A power of two that holds WIDTH / 8 units.
    static constexpr int UNITS = WIDTH / 8, LANES = UNITS <= 4 ? 4 : UNITS <= 8 ? 8 : UNITS <= 16 ? 16 : 32, ROWS = 32 / LANES;
};

// Eight numbers from column c of the row that begins at `row`; zeros where it has none.
__device__ inline void read_eight(float (&x)[8], const Params& p, i64 row, int c, bool inside) {
    const Elem* const from = (const Elem*)p.q + row;
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = 0;
    if (!inside) return;
#if VECTOR && STORAGE == F32
    if (c >= p.head_dim) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (c + half * 4 >= p.head_dim) break;
        const float4 four = *(const float4*)(from + c + half * 4);
        x[half * 4] = four.x, x[half * 4 + 1] = four.y, x[half * 4 + 2] = four.z, x[half * 4 + 3] = four.w;
    }
#elif VECTOR
    if (c >= p.head_dim) return;
    const uint4 eight = *(const uint4*)(from + c);
    const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = widen((Elem)(words[e / 2] >> e % 2 * 16));
#else
#pragma unroll
    for (int e = 0; e < 8; e++) {
        if (c + e < p.head_dim) x[e] = widen(from[(c + e) * p.q_stride[3]]);
    }
#endif
}

// Rows r0.. of the task, COUNT of them, to rows of `tile`, their scales to `scales`. A whole warp calls it.
template <int WIDTH, int COUNT>
__device__ inline void round_rows(u8* tile, float* scales, const Params& p, const Task& task, int r0) {
    using Of = RoundedRow<WIDTH>;
    const int lane = threadIdx.x % 32, unit = lane % Of::LANES;
#pragma unroll 4
    for (int first = 0; first < COUNT; first += Of::ROWS) {
        const int r = first + lane / Of::LANES;
        const bool inside = r0 + r < task.rows(p) && unit < Of::UNITS;
        const i64 row = Row(p, task, min(r0 + r, task.rows(p) - 1)).offset(p.q_stride);
        float x[8];
        read_eight(x, p, row, unit * 8, inside);
        // Bits of sizes: those of NaN are above those of infinity, and these above all others.
        u32 most = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
        for (int step = 1; step < Of::LANES; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
        const bool is_odd = most >= 0x7f800000u;
        const float scale = fmaxf(__fdiv_rn(__uint_as_float(most), 127.f), 0x1p-126f);
        u32 words[2] = {0, 0};
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const int code = is_odd ? 0 : __float2int_rn(__fdiv_rn(x[e], scale));
            words[e / 4] |= ((u32)code & 0xff) << e % 4 * 8;
        }
        if (unit < Of::UNITS) *(uint2*)(tile + byte_place<WIDTH>(r, unit * 8)) = {words[0], words[1]};
        if (unit == 0) scales[r] = is_odd ? not_a_number() : scale;
    }
}
