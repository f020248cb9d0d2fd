// K and V of wide heads in pieces: a ring in shared memory that all threads fill by cp.async, STAGES pieces deep.
//
//   box     rows of 128 bytes, their 16-byte units at unit ^ row % 8 (swizzle_128b, as ldmatrix reads them without conflicts)
//   piece   two boxes of BLOCK_N keys: two neighbouring ones of K, or one of either half of the value columns
//   order   for each tile of keys: K from column 0, then V from column 0 of both halves
//
// What cp.async cannot move (16-byte alignment, inner stride 1) is loaded element by element into the same boxes: the bits are the same.
// Deliberately absent: what is computed of a piece.

#pragma once
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

// Whether products are those of wgmma, which are waited for a piece later.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && STORAGE != F32
#define BY_WGMMA 1
#else
#define BY_WGMMA 0
#endif
constexpr int WIDE_THREADS = 256, KEYS = BLOCK_N;
constexpr int AHEAD = STAGES - 1 - BY_WGMMA;  // pieces that are asked for ahead
constexpr int UNIT = 16 / sizeof(Elem), COLUMNS = 8 * UNIT;  // elements of 16 bytes, and of a row of a box
constexpr int HALF = DV / 2;                                 // value columns of a warp
constexpr int K_PIECES = D / (2 * COLUMNS), V_PIECES = HALF / COLUMNS;
static_assert(D % (2 * COLUMNS) == 0 && DV % (2 * COLUMNS) == 0, "head dims are padded to whole pieces");

typedef Elem Box[KEYS * COLUMNS];
struct Piece {
    Box boxes[2];
};

// Element c of row r of a box.
__device__ inline int box_place(int r, int c) { return r * COLUMNS + ((c / UNIT) ^ r % 8) * UNIT + c % UNIT; }

// ROWS rows of `source`, zero beyond those, and beyond the columns, that it has. `offset(r)` is where row r begins, in elements.
template <int ROWS, class Offset>
__device__ inline void load_box(Elem* box, const SourceRows& source, Offset offset) {
    if constexpr (VECTOR) {
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * 8; at += WIDE_THREADS) {
            const int r = at / 8, c = at % 8 * UNIT;
            const bool inside = r < source.rows && c < source.dim;
            cp_async(box + box_place(r, c), inside ? source.base + offset(r) + c : source.base, inside ? 16 : 0);
        }
    } else {
        // Neighbouring threads take what lies side by side.
        const bool by_rows = source.row_step == 1 && source.step != 1;
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * COLUMNS; at += WIDE_THREADS) {
            const int r = by_rows ? at % ROWS : at / COLUMNS, c = by_rows ? at / ROWS : at % COLUMNS;
            const bool inside = r < source.rows && c < source.dim;
            box[box_place(r, c)] = inside ? source.base[offset(r) + c * source.step] : (Elem)0;
        }
    }
}

// Where an ldmatrix of a warp's 16 queries begins in a box, and one of its half of the keys (the lanes are those of tile.cuh).
__device__ inline u32 query_rows(const Elem* box, int slab) {
    const int lane = threadIdx.x % 32;
    return shared_address(box) + (slab * 16 + lane % 16) * 128 + (lane / 16 * 16 ^ lane % 8 * 16);
}
__device__ inline u32 key_rows(const Piece& keys, int half) {
    const int lane = threadIdx.x % 32;
    return shared_address(keys.boxes[0]) + (half * (KEYS / 2) + lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 * 16 ^ lane % 8 * 16);
}

// A thread's 16 bytes of a box's first rows: of every 32nd row it takes as much.
struct OwnUnits {
    const Elem* from;
    i64 step;  // 32 rows
    u32 place;

    __device__ OwnUnits() {}
    __device__ OwnUnits(const Elem* base, i64 row_step) {
        const int r = threadIdx.x / 8, c = threadIdx.x % 8 * UNIT;
        from = base + r * row_step + c, step = 32 * row_step, place = box_place(r, c) * (u32)sizeof(Elem);
    }
    // A whole box, from column `column` on.
    __device__ void load(const Elem* box, int column) const {
        const Elem* at = from + column;
        const u32 to = shared_address(box) + place;
#pragma unroll
        for (int n = 0; n < KEYS / 32; n++, at += step) cp_async(to + n * (32 * 128), at);
    }
};

// A matrix of a task from column `column` on: at least its address, where there is no such column.
__device__ inline SourceRows columns_from(const Elem* base, const i64 (&stride)[4], int rows, int dim, int column) {
    return {dim > column ? base + column * stride[3] : base, stride[3], stride[2], rows, dim - column};
}

// The pieces of keys first..end in order, the next AHEAD of them under way.
struct PieceRing {
    const Params& p;
    Piece* pieces;
    const Elem *k, *v;        // of key n0
    OwnUnits own_k, own_v;
    int n0, end, piece = 0;   // what is asked for next
    int at = 0;               // what is computed next

    __device__ PieceRing(const Params& p, Piece* pieces, const Task& task, int first, int end) : p(p), pieces(pieces), n0(first), end(end) {
        k = (const Elem*)p.k + task.batch * p.k_stride[0] + kv_head(p, task) * p.k_stride[1] + n0 * p.k_stride[2];
        v = (const Elem*)p.v + task.batch * p.v_stride[0] + kv_head(p, task) * p.v_stride[1] + n0 * p.v_stride[2];
        own_k = OwnUnits(k, p.k_stride[2]), own_v = OwnUnits(v, p.v_stride[2]);
    }
    __device__ void load_next(int stage) {
        if (n0 < end) {
            const bool is_k = piece < K_PIECES;
            const int column = is_k ? piece * 2 * COLUMNS : (piece - K_PIECES) * COLUMNS, apart = is_k ? COLUMNS : HALF;
            Box(&boxes)[2] = pieces[stage].boxes;
            if (VECTOR && p.kv_len - n0 >= KEYS && column + apart + COLUMNS <= (is_k ? p.head_dim : p.head_dim_v)) {
                const OwnUnits own = is_k ? own_k : own_v;
                own.load(boxes[0], column), own.load(boxes[1], column + apart);
            } else {
                load_in_part(boxes, is_k, column, apart);
            }
            if (++piece == K_PIECES + V_PIECES) {
                piece = 0, n0 += KEYS;
                const i64 k_step = KEYS * p.k_stride[2], v_step = KEYS * p.v_stride[2];
                k += k_step, v += v_step, own_k.from += k_step, own_v.from += v_step;
            }
        }
        cp_async_commit();
    }
    // Fewer keys or columns, or not by 16 bytes: rare, or slow anyway.
    __device__ void load_in_part(Box (&boxes)[2], bool is_k, int column, int apart) const {
#pragma unroll 1
        for (int b = 0; b < 2; b++, column += apart) {
            const SourceRows rows =
                columns_from(is_k ? k : v, is_k ? p.k_stride : p.v_stride, p.kv_len - n0, is_k ? p.head_dim : p.head_dim_v, column);
            load_box<KEYS>(boxes[b], rows, [&](int r) { return r * rows.row_step; });
        }
    }
    __device__ void begin() {
        for (int stage = 0; stage < AHEAD; stage++) load_next(stage);
    }
    // By all threads: waits for the next piece, for which `release` is called when its products are made, or under way.
    __device__ Piece& next() {
        cp_async_wait<AHEAD - 1>();
        if (BY_WGMMA) fence_proxy_async();
        __syncthreads();
        if (!BY_WGMMA) refill();
        return pieces[at];
    }
    // Products by wgmma end a piece later.
    __device__ void release() {
        if (BY_WGMMA) {
            refill();
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
        if (++at == STAGES) at = 0;
    }

  private:
    // Asks for a piece in the place of the one before this; of the one before that, by wgmma.
    __device__ void refill() { load_next(at + AHEAD >= STAGES ? at + AHEAD - STAGES : at + AHEAD); }
};
