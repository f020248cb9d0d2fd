// Tiles of keys, or of values, whose rows lie in pages, as 128 threads gather them.
//
//   warp w of 4 has rows w, w + 4, ..; its lane n has looked up where row w + 4*n lies
//
// A key whose page does not exist is NaN, and one behind the last of its sequence 0. Deliberately absent: where a row goes in shared
// memory, which the caller says, and pages that TMA reads (hopper/load.cuh).

#pragma once
#include "common/pages.cuh"
#include "common/ptx.cuh"

constexpr u16 NAN_16 = 0x7fff;  // of float16 and of bfloat16
constexpr u32 NAN_PAIR = 0x7fff7fff;

// Where the rows of a tile lie: each lane has looked up one.
template <int ROWS>
struct GatheredRows {
    static constexpr int OF_WARP = ROWS / 4;
    static_assert(ROWS % 4 == 0 && OF_WARP <= 32, "a lane for each row");
    KeyPlace own;

    __device__ static int warp() { return threadIdx.x % 128 / 32; }

    // Looks up the rows of the tile from key n0 on; no entry behind the last key is read.
    __device__ void find(const Params& p, const Task& task, int n0) {
        const int lane = threadIdx.x % 32, j = n0 + warp() + lane * 4;
        own.block = own.row = 0;
        if (lane < OF_WARP && j < task.sequence.kv_len(p)) own = KeyPlace(p, task.batch, j);
    }

    // Loads these rows of the head that begins at `base`: `rows` of them, of `dim` elements each, zero up to WIDTH. Units of UNIT elements at
    // column c of row r go to `to(r, c)`: 8, by cp.async, or 1.
    template <int WIDTH, int UNIT, class To>
    __device__ void load(const Params& p, const Elem* base, const i64 (&stride)[4], int rows, int dim, To to) const {
        static_assert(UNIT == 8 || UNIT == 1, "16 bytes, or an element");
        constexpr int UNITS = WIDTH / UNIT, ALL = OF_WARP * UNITS;
        const int lane = threadIdx.x % 32;
        const i64 offset = own.block * stride[0] + own.row * stride[2];
        const u32 known = __ballot_sync(~0u, own.exists(p));
#pragma unroll 4
        for (int first = 0; first < ALL; first += 32) {
            const int at = min(first + lane, ALL - 1), n = at / UNITS, c = at % UNITS * UNIT, r = warp() + n * 4;
            const bool inside = r < rows && c < dim, is_known = known >> n & 1;
            const Elem* from = base + (shuffle(offset, n) + c * (UNIT == 8 ? 1 : stride[3]));
            if (ALL % 32 != 0 && first + lane >= ALL) continue;
            if constexpr (UNIT == 8) {
                if (inside && !is_known) *(uint4*)to(r, c) = {NAN_PAIR, NAN_PAIR, NAN_PAIR, NAN_PAIR};
                else cp_async(to(r, c), inside ? from : base, inside ? 16 : 0);
            } else {
                *to(r, c) = !inside ? (Elem)0 : is_known ? *from : (Elem)NAN_16;
            }
        }
    }

  private:
    __device__ static i64 shuffle(i64 x, int lane) {
        const u32 low = __shfl_sync(~0u, (u32)x, lane), high = __shfl_sync(~0u, (u32)(x >> 32), lane);
        return (i64)((u64)high << 32 | low);
    }
};
