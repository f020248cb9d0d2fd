// Where the sums of hopper.cu go: a warp's 16 rows through shared memory, by TMA from a buffer of their own (STAGED), if it can write out
// (strides and dtype that it takes, rows of one head). Where there is no such buffer, through one of the values' (OUT_THROUGH_V). From
// registers where there is neither.
//
// Deliberately absent: what sums are divided by, and the lse of rows that see a key (epilogue.cuh, consumer.cuh).

#pragma once
#include "common/epilogue.cuh"
#include "hopper/work.cuh"

// What a thread's two rows are multiplied with, and where they go.
struct Ends {
    float factor[2];
    i64 to[2];  // where TMA does not write
    bool inside[2];
};

// Two tiles of a warp's 16 rows to shared memory: rows 0 to 7 and 8 to 15 of 8 columns, then of the next 8. `row`: where the lane's
// row of box `first` begins.
__device__ inline void put_matrices(u32 row, int first, int nt, const Accumulator<VT>& acc_o, const Ends& ends) {
    const int lane = threadIdx.x % 32;
    const auto word = [&](int nt, int r) { return pack(acc_o[nt][r * 2] * ends.factor[r], acc_o[nt][r * 2 + 1] * ends.factor[r]); };
    const u32 to = stmatrix_unit(row, lane, nt, first);
    stmatrix(to, word(nt, 0), word(nt, 1), word(nt + 1, 0), word(nt + 1, 1));
}

// 8 bytes at once; the compiler makes several stores of a vector type here.
__device__ inline void store_8(Elem* to, u32 low, u32 high) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
}

#if OUT_THROUGH_V
// A warp's share of a tile of values, in elements, and how many boxes of its rows that holds.
constexpr int SHARE = V_BOXES * K_BOX / 4, BOXES_AT_ONCE = SHARE / (16 * BOX) < V_BOXES ? SHARE / (16 * BOX) : V_BOXES;
static_assert(BOXES_AT_ONCE > 0, "a box for each warp");

// Through `tile`, which the group has for itself. A lane writes 16 bytes of four rows.
__device__ inline void store_through(Elem* tile, const Params& p, const Place& place, const Accumulator<VT>& acc_o, const Ends& ends) {
    const int lane = threadIdx.x % 32, column = out_column(lane);
    const u8* share = (u8*)(tile + threadIdx.x % 128 / 32 * SHARE);
    const u32 row = shared_address(share) + stmatrix_row(lane);
    Elem* to[4];
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = (Elem*)p.out + __shfl_sync(~0u, ends.to[i / 2], out_owner(lane, i)) + column;
#pragma unroll
    for (int first = 0; first < V_BOXES; first += BOXES_AT_ONCE) {
#pragma unroll
        for (int nt = first * 8; nt < (first + BOXES_AT_ONCE) * 8 && nt < VT; nt += 2) put_matrices(row, first, nt, acc_o, ends);
        __syncwarp();
#pragma unroll
        for (int box = first; box < first + BOXES_AT_ONCE && box < V_BOXES; box++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = out_row(lane, i);
                const uint4 x = *(const uint4*)(share + (box - first) * (16 * 128) + swizzle_128b(r, column));
                if (place.r0 + r < place.task.rows(p) && box * BOX + column < p.head_dim_v) *(uint4*)(to[i] + box * BOX) = x;
            }
        }
        __syncwarp();
    }
}
#endif

// By TMA, which reads the buffer after this; it has read what the last item left there.
__device__ inline void store_by_tma(
    const HopperParams& h, Shared& sh, const Place& place, const Accumulator<VT>& acc_o, const Ends& ends
) {
#if STAGED
    const Params& p = h.p;
    const int lane = threadIdx.x % 32;
    Elem(&tile)[V_BOXES][16 * BOX] = sh.out[threadIdx.x / 32];
    if (lane == 0) tma_store_wait();
    __syncwarp();
    const u32 row = shared_address(tile) + stmatrix_row(lane);
#pragma unroll
    for (int nt = 0; nt < VT; nt += 2) put_matrices(row, 0, nt, acc_o, ends);
    fence_proxy_async();
    __syncwarp();
    if (lane != 0) return;
    const int head = tma_coordinate(p.out_stride[1], place.task.head), batch = tma_coordinate(p.out_stride[0], place.task.batch);
#pragma unroll
    for (int box = 0; box < V_BOXES; box++) tma_store(h.out_map, tile[box], box * BOX, place.task.sequence.first_query() + place.r0, head, batch);
    tma_store_commit();
#endif
}

__device__ inline void store(const Params& p, Accumulator<VT>& acc_o, const Ends& ends) {
    // Lanes exchange a word of two tiles in pairs: each has 4 columns of one of them then.
    const int odd = threadIdx.x & 1, column = odd * 8 + (threadIdx.x & 2) * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int nt = 0; nt < VT; nt++) acc_o[nt][r * 2] *= ends.factor[r], acc_o[nt][r * 2 + 1] *= ends.factor[r];
        if (p.out_vector) {
            Elem* to = (Elem*)p.out + ends.to[r] + column;
            asm("" : "+l"(to));  // one address, from which stores step
#pragma unroll
            for (int nt = 0; nt < VT; nt += 2) {
                const u32 here = pack(acc_o[nt][r * 2], acc_o[nt][r * 2 + 1]), next = pack(acc_o[nt + 1][r * 2], acc_o[nt + 1][r * 2 + 1]);
                const u32 got = __shfl_xor_sync(~0u, odd ? here : next, 1);
                // Columns are as many as head_dim_v, rounded up to 16.
                if (!ends.inside[r] || (nt + 2 == VT && nt * 8 + column >= p.head_dim_v)) continue;
                store_8(to + nt * 8, odd ? got : here, odd ? next : got);
            }
        } else {
#pragma unroll 1
            for (int at = 0; at < VT * 2; at++) {
                float x = 0;
#pragma unroll
                for (int nt = 0; nt < VT * 2; nt++) x = nt == at ? acc_o[nt / 2][r * 2 + nt % 2] : x;
                const int c = at / 2 * 8 + lane_column(threadIdx.x) + at % 2;
                if (ends.inside[r] && c < p.head_dim_v) store_as(p.out, p.out_dtype, ends.to[r] + c * p.out_stride[3], x);
            }
        }
    }
}

// Rows that see no key.
__device__ inline void store_nothing(const Params& p, const Place& place) {
#pragma unroll 1
    for (int r = place.r0 + lane_row(threadIdx.x); r < min(place.r0 + 16, place.task.rows(p)); r += 8) {
        const Row row(p, place.task, r);
        const RowEnd row_end(p, row, negative_infinity(), 0);
        if (threadIdx.x % 4 == 0) store_lse(p, row, row_end);
#pragma unroll 1
        for (int column = threadIdx.x % 4; column < p.head_dim_v; column += 4) {
            store_as(p.out, p.out_dtype, row.offset(p.out_stride) + column * p.out_stride[3], row_end.factor);
        }
    }
}
