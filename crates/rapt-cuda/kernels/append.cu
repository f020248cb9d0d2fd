// Writes new keys and values behind those of each sequence: as bits, or, where the cache is codes (CODES), as codes with factors of their
// own, by key or by block, or with the factor of the tensor.
//
// A block writes one key of a sequence, all heads of it, and its value. A key that has no place, because a length leaves the cache or the
// table names no page, is not written; the attention of that sequence is NaN. Codes that share a byte are of one key: no other is touched.
// Deliberately absent: the arithmetic of codes (common/encode.cuh), and conversions between dtypes of numbers.

#include "common/encode.cuh"
#include "common/pages.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;

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
#if CODES
    int dtype[2];           // of the new numbers, keys and values
    int writes_factors[2];  // whether codes get factors of their own
#endif
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

#if CODES
// Groups of a key whose factors a warp has at a time: an even number, so that no byte holds codes of two such runs.
constexpr int GROUPS = 64;

__device__ inline double number_at(const u8* at, int dtype) {
    switch (dtype) {
        case F16: return f16_to_float(*(const u16*)at);
        case BF16: return bf16_to_float(*(const u16*)at);
        case F32: return *(const float*)at;
        default: return *(const double*)at;
    }
}

__device__ inline void reduce_reach(Reach& reach) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const double low = __shfl_xor_sync(~0u, reach.low, step), high = __shfl_xor_sync(~0u, reach.high, step);
        if (low < reach.low) reach.low = low;
        if (high > reach.high) reach.high = high;
    }
    reach.odd = __any_sync(~0u, reach.odd);
}

// New keys, or new values, that become codes.
struct NewCodes {
    const Side& side;
    const Codes& codes;
    int dtype, writes_factors;
};
// Key n of a sequence, one head of it.
struct NewHead {
    int batch, n, head;
};

// One head of a key, by a warp; `factors` is its own.
__device__ inline void encode_head(const NewCodes& of, const NewHead& new_head, const KeyPlace& place, Factor (&factors)[GROUPS]) {
    const Side& side = of.side;
    const Codes& codes = of.codes;
    const int batch = new_head.batch, n = new_head.n, head = new_head.head;
    const int lane = threadIdx.x % 32, kind = codes.kind, chunk = min(codes.chunk, side.width);
    const u8* from = side.from + batch * side.from_stride[0] + n * side.from_stride[1] + head * side.from_stride[2];
    const auto number = [&](int d) { return number_at(from + d * side.from_stride[3], of.dtype); };
    u8* to = side.to + place.block * side.to_stride[0] + place.row * side.to_stride[1] + head * side.to_stride[2];
    const CodedRow row(side.to_stride, codes, batch, head, place.block, place.row);
    const int per_byte = is_packed(kind) ? 2 : 1;
    for (int first = 0; first < side.width; first += GROUPS * chunk) {
        const int end = min(side.width, first + GROUPS * chunk), groups = (end - first + chunk - 1) / chunk;
        for (int g = 0; g < groups; g++) {
            const int group = first / chunk + g;
            const i64 at = row.descale + group * codes.descale_stride[3], zero_at = row.zero_point + group * codes.zero_point_stride[3];
            Factor factor;
            if (of.writes_factors) {
                Reach reach;
                for (int d = first + g * chunk + lane; d < min(end, first + (g + 1) * chunk); d += 32) reach.add(kind, number(d));
                reduce_reach(reach);
                factor = factor_of(kind, codes.scale_dtype, codes.global_scale, reach);
                if (lane == 0) {
                    if (codes.scale_dtype == F32) {
                        ((u32*)codes.descale)[at] = factor.stored;
                    } else {
                        ((u8*)codes.descale)[at] = (u8)factor.stored;
                    }
                    if (codes.zero_point != nullptr) ((u8*)codes.zero_point)[zero_at] = (u8)factor.zero_point;
                }
            } else {
                factor = {0, (double)((const float*)codes.descale)[at], 0};
            }
            if (lane == 0) factors[g] = factor;
        }
        __syncwarp();
        for (int d = first + lane * per_byte; d < end; d += 32 * per_byte) {
            u32 byte = 0;
            for (int i = 0; i < per_byte && d + i < end; i++) {
                const Factor& factor = factors[(d + i - first) / chunk];
                byte |= encode(kind, number(d + i) / factor.step, factor.zero_point) << i * 4;
            }
            to[d / per_byte * side.to_stride[3]] = (u8)byte;
        }
        __syncwarp();
    }
}

__device__ inline void write_codes(const AppendParams& a, int which, int batch, int n, const KeyPlace& place, Factor (&factors)[GROUPS]) {
    const NewCodes of{which == 0 ? a.k : a.v, which == 0 ? a.p.k_codes : a.p.v_codes, a.dtype[which], a.writes_factors[which]};
    if (of.side.from == nullptr) return;
    for (int head = threadIdx.x / 32; head < a.kv_heads; head += WARPS) encode_head(of, {batch, n, head}, place, factors);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) append(const __grid_constant__ AppendParams a) {
    const int added = a.p.ragged.added, batch = blockIdx.x / added, n = blockIdx.x - batch * added;
    const Sequence sequence(a.p, batch);
    if (sequence.is_bad) return;
    const KeyPlace place(a.p, batch, sequence.kv_len(a.p) - added + n);
    if (!place.exists(a.p)) return;
#if CODES
    __shared__ Factor factors[WARPS][GROUPS];
    for (int which = 0; which < 2; which++) {
        if ((which == 0 ? a.p.k_codes : a.p.v_codes).kind != NUMBERS) {
            write_codes(a, which, batch, n, place, factors[threadIdx.x / 32]);
        } else {
            write(which == 0 ? a.k : a.v, a.kv_heads, batch, n, place);
        }
    }
#else
    write(a.k, a.kv_heads, batch, n, place);
    write(a.v, a.kv_heads, batch, n, place);
#endif
}
