// Tiles of K and V that are int8 codes, as they lie, and the factors of their keys.
//
//   keys       codes by cp.async; with a factor for each key (KEY_FACTORS) thread r loads that of key r to a register, and leaves it in
//              shared memory when the codes have come
//   values     codes by cp.async; their factors are multiplied into rows of out
//   pages      thread r looks up key r two tiles ahead, and leaves where it lies in one of two lists
//
// Behind the last key everything is 0. A factor that is not finite is NaN, and so is that of a key whose page does not exist.
// Deliberately absent: what is read of a tile (int8.cu).

#pragma once
#include "common/code_scales.cuh"
#include "common/pages.cuh"
#include "int8/products.cuh"

constexpr int KEYS = BLOCK_N, LOADERS = 128;
constexpr bool KEY_FACTORS = K_SCALES == TOKEN || PAGED;
static_assert(KEYS == LOADERS, "a thread for each key");

struct KeyTiles {
    __align__(128) u8 k[KEYS * byte_row(D)];
    __align__(128) u8 v[KEYS * byte_row(DV)];
    __align__(16) float factors[KEY_FACTORS ? KEYS : 4];
    int block[PAGED ? 2 * KEYS : 1], row[PAGED ? 2 * KEYS : 1];
};

__device__ inline float finite_or_nan(float factor) { return is_finite(factor) ? factor : not_a_number(); }

// Tiles of one task. All threads of a block call each function together.
struct Tiles {
    const Params& p;
    const Task& task;
    KeyTiles& sh;
    const u8 *k, *v;  // the head's first rows: of a page, or of the sequence
    float factor = 0; // of the thread's key of the tile that is on its way
#if PAGED
    KeyPlace ahead;   // of the thread's key of the tile behind that
#endif

    __device__ Tiles(const Params& p, const Task& task, KeyTiles& sh) : p(p), task(task), sh(sh) {
        const i64 head = kv_head(p, task), first = task.sequence.first_key(), batch = PAGED ? 0 : task.batch;
        k = (const u8*)p.k + batch * p.k_stride[0] + head * p.k_stride[1] + first * p.k_stride[2];
        v = (const u8*)p.v + batch * p.v_stride[0] + head * p.v_stride[1] + first * p.v_stride[2];
    }

    // Before the first tile, from key n0 on.
    __device__ void begin(int n0) {
#if PAGED
        find(n0);
        leave_places(n0);
        find(n0 + KEYS);
        __syncthreads();
#endif
    }
    __device__ void load_keys(int n0) {
        load<D>(sh.k, k, p.k_stride, n0, p.head_dim);
        if constexpr (KEY_FACTORS) factor = key_factor(n0, threadIdx.x);
    }
    __device__ void load_values(int n0) { load<DV>(sh.v, v, p.v_stride, n0, p.head_dim_v); }

    // Nobody reads the factors of the tile before.
    __device__ void leave_factors() {
        if constexpr (KEY_FACTORS) sh.factors[threadIdx.x] = finite_or_nan(factor);
    }
    // All that is read of the tile before the one from key n0 on has been asked for.
    __device__ void go_on(int n0) {
#if PAGED
        leave_places(n0 + KEYS);
        find(n0 + 2 * KEYS);
#endif
    }

  private:
    __device__ static int list(int n0) { return n0 / KEYS % 2 * KEYS; }
    // Where row r of the tile from key n0 on lies.
    __device__ KeyPlace place_of(int n0, int r) const {
        KeyPlace at;
#if PAGED
        at.block = sh.block[list(n0) + r], at.row = sh.row[list(n0) + r];
#else
        at.block = 0, at.row = n0 + r;
#endif
        return at;
    }
#if PAGED
    // No entry behind the last key is read.
    __device__ void find(int n0) {
        const int j = n0 + threadIdx.x;
        ahead.block = ahead.row = 0;
        if (j < task.sequence.kv_len(p)) ahead = KeyPlace(p, task.batch, j);
    }
    __device__ void leave_places(int n0) { sh.block[list(n0) + threadIdx.x] = ahead.block, sh.row[list(n0) + threadIdx.x] = ahead.row; }
#endif

    __device__ float key_factor(int n0, int r) const {
        const KeyPlace at = place_of(n0, r);
        if (n0 + r >= task.sequence.kv_len(p)) return 0;
        if (!at.exists(p)) return not_a_number();
        if (K_SCALES != TOKEN) return 1;
        const Codes& codes = p.k_codes;
        const i64 block = PAGED && codes.in_pages ? at.block : task.batch;
        const i64 row = PAGED ? at.row : task.sequence.first_key() + at.row;
        return ((const float*)codes.descale)[block * codes.descale_stride[0] + kv_head(p, task) * codes.descale_stride[1] + row * codes.descale_stride[2]];
    }

    template <int BYTES>
    __device__ void load(u8* tile, const u8* base, const i64 (&stride)[4], int n0, int dim) const {
        const int rows = task.sequence.kv_len(p) - n0;
        const auto row = [&](int r, bool& inside) {
            const KeyPlace at = place_of(n0, r);
            inside = inside && at.exists(p);
            return base + (inside ? at.block * stride[0] + at.row * stride[2] : 0);
        };
        if constexpr (VECTOR) {
            constexpr int UNITS = BYTES / 16;
            if constexpr (!PAGED && LOADERS % UNITS == 0) {
                // A thread's units stand in one column.
                constexpr int STEP = LOADERS / UNITS;
                const int first = threadIdx.x / UNITS, c = threadIdx.x % UNITS * 16;
                const int end = c < dim ? rows : 0;
                const u8* from = base + (n0 + first) * stride[2] + c;
                u32 to = shared_address(tile + byte_place<BYTES>(first, c));
                const i64 step = STEP * stride[2];
#pragma unroll
                for (int n = 0; n < KEYS / STEP; n++) {
                    const bool inside = first + n * STEP < end;
                    const u32 at = STEP % 8 == 0 ? to + n * STEP * byte_row(BYTES) : shared_address(tile + byte_place<BYTES>(first + n * STEP, c));
                    cp_async_zfill<16>(at, inside ? from : base, inside);
                    from += step;
                }
            } else {
#pragma unroll 4
                for (int at = threadIdx.x; at < KEYS * UNITS; at += LOADERS) {
                    const int r = at / UNITS, c = at % UNITS * 16;
                    bool inside = r < rows && c < dim;
                    const u8* from = row(r, inside);
                    cp_async_zfill<16>(shared_address(tile + byte_place<BYTES>(r, c)), inside ? from + c : base, inside);
                }
            }
        } else {
            // Neighbouring threads take what lies side by side.
            const bool by_row = stride[3] == 1 || stride[2] != 1;
#pragma unroll 2
            for (int at = threadIdx.x; at < KEYS * BYTES; at += LOADERS) {
                const int r = by_row ? at / BYTES : at % KEYS, c = by_row ? at % BYTES : at / KEYS;
                bool inside = r < rows && c < dim;
                const u8* from = row(r, inside);
                tile[byte_place<BYTES>(r, c)] = inside ? from[c * stride[3]] : 0;
            }
        }
        cp_async_commit();
    }
};
