// Rings of tiles of codes and of their factors, one for each warp that reads, and what fills them: cp.async, or element by element.
// Deliberately absent: what is done with a tile.

#pragma once
#include "common/code_scales.cuh"
#include "decode/codes.cuh"
#include "decode/hand_over.cuh"
#include "decode/pages.cuh"

constexpr int K_SCALE_BYTES = scale_bytes(K_SCALES, D, K_BLOCK, K_SCALE_DTYPE);
constexpr int V_SCALE_BYTES = scale_bytes(V_SCALES, DV, V_BLOCK, V_SCALE_DTYPE);
using Keys = KeyRows<K_KIND, D, K_RUN>;
using Values = ValueRows<V_KIND, DV>;

struct Stage {
    static constexpr int V = TILE * Keys::PITCH, K_FACTORS = V + TILE * Values::PITCH, V_FACTORS = K_FACTORS + TILE * K_SCALE_BYTES;
    __align__(128) u8 bytes[(V_FACTORS + TILE * V_SCALE_BYTES + 127) / 128 * 128];
    __device__ u8* k() { return bytes; }
    __device__ u8* v() { return bytes + V; }
    __device__ u8* k_factors() { return bytes + K_FACTORS; }
    __device__ u8* v_factors() { return bytes + V_FACTORS; }
};

// Where the rows of a tile, or their factors, lie in memory: `rows` of them, strides in bytes.
struct BytesOfRows {
    const u8* base;
    i64 row_step, step;
    int rows, count;  // count: of codes' bytes, or of factors, in a row
#if PAGED
    bool is_even;  // each 16 rows are evenly spaced
    i64 own[TilePages::OWN];  // where row lane % TILE begins, and that 32 further on
#endif
    // Where row r begins, for a whole warp.
    __device__ const u8* row(int r) const {
#if PAGED
        i64 at = shuffle(own[0], r % 32);
        if constexpr (TILE > 32) {
            const i64 further = shuffle(own[1], r % 32);
            if (r >= 32) at = further;
        }
        return base + at;
#else
        return base + r * row_step;
#endif
    }
};

// Moves the tile's rows of codes. VECTOR: every row can be moved 16 bytes at a time.
template <class Rows>
__device__ inline void load_codes(u8* to, const BytesOfRows& from, const PassingCopy& copy) {
    const int lane = threadIdx.x % 32;
    if constexpr (VECTOR) {
        constexpr int UNITS = Rows::UNITS, ALL = TILE * UNITS;
        constexpr int STEP = 32 / UNITS, TURNS = Rows::PERIOD <= STEP ? 1 : Rows::PERIOD / STEP;
        if constexpr (32 % UNITS == 0 && ALL % 32 == 0 && TURNS <= 2) {
            // A lane's units stand in one column; every second, or every one, a constant apart.
            const int r = lane / UNITS, c = lane % UNITS * 16;
            const u8* at = from.base + r * from.row_step + c;
            const i64 step = STEP * from.row_step;
            const u32 tile = shared_address(to), even = tile + Rows::place(r, c), odd = tile + Rows::place(r + STEP * (TURNS - 1), c);
            const auto place = [&](int n) {
                return n % TURNS == 0 ? even + n * (STEP * Rows::PITCH) : odd + (n - 1) * (STEP * Rows::PITCH);
            };
#if PAGED
            if (STEP <= 16 && from.is_even && from.rows >= TILE) {
#pragma unroll
                for (int n = 0; n < ALL / 32; n++) {
                    if (n * STEP % 16 == 0) at = from.row(n * STEP) + r * from.row_step + c;
                    copy(place(n), at), at += step;
                }
            } else {
#pragma unroll 1
                for (int n = 0; n < ALL / 32; n++) {
                    const u8* row = from.row(r + n * STEP);
                    const bool inside = r + n * STEP < from.rows;
                    cp_async_zfill<16>(tile + Rows::place(r + n * STEP, c), inside ? row + c : from.base, inside);
                }
            }
#else
            if (from.rows >= TILE) {
#pragma unroll
                for (int n = 0; n < ALL / 32; n++) copy(place(n), at), at += step;
            } else {
#pragma unroll 1
                for (int n = 0; n < ALL / 32; n++) {
                    const bool inside = r + n * STEP < from.rows;
                    cp_async_zfill<16>(tile + Rows::place(r + n * STEP, c), inside ? at : from.base, inside);
                    at += step;
                }
            }
#endif
        } else {
            for (int at = lane; at < ALL; at += 32) {
                const int r = at / UNITS, c = at % UNITS * 16;
                const u8* row = from.row(r);
                const bool inside = r < from.rows;
                cp_async_zfill<16>(shared_address(to + Rows::place(r, c)), inside ? row + c : from.base, inside);
            }
        }
    } else {
        for (int at = lane; at < TILE * Rows::ROW; at += 32) {
            const int r = at / Rows::ROW, c = at % Rows::ROW;
            const u8* row = from.row(r);
            to[Rows::place(r, c)] = r < from.rows && c < from.count ? row[c * from.step] : 0;
        }
    }
}
// The factors of the tile's keys, BYTES of each. VECTOR: those of 8 bits can be moved four at a time, if there are as many.
template <int BYTES, int DTYPE>
__device__ inline void load_factors(u8* to, const BytesOfRows& from) {
    constexpr bool BY_4 = DTYPE == F32 || (VECTOR && BYTES % 4 == 0);
    constexpr int UNIT = BY_4 ? 4 : 1, UNITS = BYTES / UNIT;
    for (int at = threadIdx.x % 32; at < TILE * UNITS; at += 32) {
        const int r = at / UNITS, c = at % UNITS;
        const u8* row = from.row(r);
        const bool inside = r < from.rows;
        const u8* place = inside ? row + c * from.step * (DTYPE == F32 ? 1 : UNIT) : from.base;
        if constexpr (BY_4) cp_async_zfill<4>(shared_address(to + r * BYTES + c * 4), place, inside);
        else to[r * BYTES + c] = inside ? *place : 0;
    }
}
// The same of factors that lie swizzled from `base` on; `rows` from row n0 on count.
template <int BYTES>
__device__ inline void load_swizzled_factors(u8* to, const u8* base, const Codes& codes, int n0, int rows) {
    constexpr int UNIT = VECTOR && BYTES % 4 == 0 ? 4 : 1, UNITS = BYTES / UNIT;
    for (int at = threadIdx.x % 32; at < TILE * UNITS; at += 32) {
        const int r = at / UNITS, c = at % UNITS * UNIT;
        const bool inside = r < rows;
        const i64 place = swizzled_row(n0 + r, codes.swizzled_tiles) * codes.descale_stride[2] + along_swizzled_row(c) * codes.descale_stride[3];
        const u8* stored = inside ? base + place : base;
        if constexpr (UNIT == 4) cp_async_zfill<4>(shared_address(to + r * BYTES + c), stored, inside);
        else to[r * BYTES + c] = inside ? *stored : 0;
    }
}

// Fills a warp's ring, tile after tile, item after item: first the keys of a tile, later its values.
struct Loader : Walk {
    const u8 *k, *v, *k_factors, *v_factors;
#if PAGED
    u32 bad_tiles = 0;  // a bit for each tile of the ring, the latest lowest: the table names no page for a key of it
#endif
    const PassingCopy copy;

    __device__ Loader(const Params& p, const Item& first, u32 count) : Walk(first, count), copy(p) {
        enter(p);
        enter_heads(p);
        if (PAGED) to_next(p);
    }

    // Whether the tile that is multiplied next has keys in no page.
    __device__ bool next_is_bad() const {
#if PAGED
        return (bad_tiles >> (STAGES - 1) & 1) != 0;
#else
        return false;
#endif
    }
    __device__ const u8* factors(const Codes& codes) const {
        const i64 first = PAGED ? 0 : item.batch * codes.descale_stride[0] + item.sequence.first_key() * codes.descale_stride[2];
        const i64 at = first + item.kv_head * codes.descale_stride[1];
        return codes.descale + at * (codes.scale_dtype == F32 ? 4 : 1);
    }
    // What of a tile from key n0 on lies in memory; nothing of one that is bad.
    __device__ BytesOfRows rows(const Params& p, const u8* base, const i64 (&stride)[4], int size, int count) const {
        BytesOfRows rows{base, stride[2] * size, stride[3] * size, item.sequence.kv_len(p) - n0, count};
#if PAGED
#pragma unroll
        for (int n = 0; n < TilePages::OWN; n++) rows.own[n] = pages.offset(stride, n) * size;
        rows.is_even = TilePages::are_even(p);
        if (bad_tiles & 1) rows.rows = 0;
#else
        rows.base += n0 * rows.row_step;
#endif
        return rows;
    }
    // The factors of a tile from key n0 on, which begin at `base`.
    template <int BYTES, int DTYPE, bool SWIZZLED>
    __device__ void load_factors_of(u8* to, const Params& p, const u8* base, const Codes& codes) const {
        if constexpr (SWIZZLED) load_swizzled_factors<BYTES>(to, base, codes, n0, item.sequence.kv_len(p) - n0);
        else load_factors<BYTES, DTYPE>(to, rows(p, base, codes.descale_stride, DTYPE == F32 ? 4 : 1, 0));
    }
    __device__ void enter_heads(const Params& p) {
        k = (const u8*)p.k + item.kv_head * p.k_stride[1], v = (const u8*)p.v + item.kv_head * p.v_stride[1];
        if (!PAGED) k += item.batch * p.k_stride[0] + item.sequence.first_key() * p.k_stride[2];
        if (!PAGED) v += item.batch * p.v_stride[0] + item.sequence.first_key() * p.v_stride[2];
        k_factors = factors(p.k_codes), v_factors = factors(p.v_codes);
    }
    __device__ void to_next(const Params& p) {
        advance(p, [&] { enter_heads(p); });
    }
    // Pages are looked up while the tiles before arrive.
    __device__ void load_keys(const Params& p, Stage& to) {
        if (!PAGED) to_next(p);
#if PAGED
        if (n0 < end) pages.settle(p, item, n0);
        bad_tiles = bad_tiles << 1 | (n0 < end && pages.any_is_bad(p));
#endif
        if (n0 < end) {
            load_codes<Keys>(to.k(), rows(p, k, p.k_stride, 1, is_packed(K_KIND) ? (p.head_dim + 1) / 2 : p.head_dim), copy);
            if constexpr (K_SCALE_BYTES > 0) {
                load_factors_of<K_SCALE_BYTES, K_SCALE_DTYPE, K_SWIZZLED>(to.k_factors(), p, k_factors, p.k_codes);
            }
        }
        cp_async_commit();
    }
    __device__ void load_values(const Params& p, Stage& to) {
        if (n0 < end) {
            load_codes<Values>(to.v(), rows(p, v, p.v_stride, 1, is_packed(V_KIND) ? (p.head_dim_v + 1) / 2 : p.head_dim_v), copy);
            if constexpr (V_SCALE_BYTES > 0) {
                load_factors_of<V_SCALE_BYTES, V_SCALE_DTYPE, V_SWIZZLED>(to.v_factors(), p, v_factors, p.v_codes);
            }
        }
        cp_async_commit();
        if (PAGED) to_next(p);
    }
};
