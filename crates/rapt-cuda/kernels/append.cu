// Writes new keys and values behind those of each sequence, as bits.
//
// A block writes one key of a sequence, all heads of it, and its value. A key that has no place, because a length leaves the cache or the
// table names no page, is not written; the attention of that sequence is NaN. Deliberately absent: conversions.

#include "common/pages.cuh"

constexpr int THREADS = 128;

// K or V: strides in bytes, of [batch, new, heads, head_dim] and of [pages or batch, rows, heads, head_dim]. Byte for byte AppendSide of append.rs.
struct Side {
    const u8* from;  // null: nothing is written
    u8* to;
    i64 from_stride[4], to_stride[4];
    int width, element_bytes;  // elements of a head
};
struct AppendParams {
    Params p;
    Side k, v;
    int kv_heads, unused;
};
static_assert(sizeof(AppendParams) == APPEND_BYTES, "append.rs and append.cu disagree on AppendParams");

__device__ inline void copy_element(u8* to, const u8* from, int bytes) {
    switch (bytes) {
        case 1: *to = *from; break;
        case 2: *(u16*)to = *(const u16*)from; break;
        case 4: *(u32*)to = *(const u32*)from; break;
        default: *(u64*)to = *(const u64*)from;
    }
}

__device__ inline void write(const Side& side, int kv_heads, int batch, int n, const KeyPlace& place) {
    if (side.from == nullptr) return;
    for (int at = threadIdx.x; at < kv_heads * side.width; at += THREADS) {
        const int head = at / side.width, d = at - head * side.width;
        const i64 from = batch * side.from_stride[0] + n * side.from_stride[1] + head * side.from_stride[2] + d * side.from_stride[3];
        const i64 to = place.block * side.to_stride[0] + place.row * side.to_stride[1] + head * side.to_stride[2] + d * side.to_stride[3];
        copy_element(side.to + to, side.from + from, side.element_bytes);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams a) {
    const int added = a.p.ragged.added, batch = blockIdx.x / added, n = blockIdx.x - batch * added;
    const Sequence sequence(a.p, batch);
    if (sequence.is_bad) return;
    const KeyPlace place(a.p, batch, sequence.kv_len(a.p) - added + n);
    if (!place.exists(a.p)) return;
    write(a.k, a.kv_heads, batch, n, place);
    write(a.v, a.kv_heads, batch, n, place);
}
