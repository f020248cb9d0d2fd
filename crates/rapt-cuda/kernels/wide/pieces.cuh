// K and V of wide heads in pieces: a ring in shared memory that all threads fill by cp.async, STAGES pieces deep.
//
//   piece   two boxes of BLOCK_N keys: two neighbouring ones of K, or one of either half of the value columns
//   order   for each tile of keys: K from column 0, then V from column 0 of both halves
//
// Deliberately absent: what is computed of a piece, and how a box is filled (wide/boxes.cuh).

#pragma once
#include "wide/boxes.cuh"

constexpr int AHEAD = STAGES - 1 - BY_WGMMA;  // pieces that are asked for ahead
constexpr int K_PIECES = D / (2 * COLUMNS), V_PIECES = HALF / COLUMNS;
static_assert(D % (2 * COLUMNS) == 0, "head dims are padded to whole pieces");

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
