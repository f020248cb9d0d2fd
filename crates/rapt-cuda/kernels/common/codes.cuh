// q, k and v as codes of a quantized format (rapt_core::CodesSpec): what makes numbers of them, one at a time.
//
//   x[d] = (decode(code[d]) - zero_point[d / chunk]) * descale[d / chunk] * global_scale        each step in float32
//
// Codes of 4 bits lie two a byte, the lower half first. Factors of 8 bits may lie swizzled (common/swizzle.cuh).
// Deliberately absent: tiles of codes (decode/codes.cuh).

#pragma once
#include "common/math.cuh"
#include "common/swizzle.cuh"

// What a code is: `CodeKind` of codes.rs. 0: an element of the storage dtype.
#define NUMBERS 0
#define INT8 1
#define UINT8 2
#define INT4 3
#define E4M3FN 4
#define E5M2 5
#define E2M1 6
// PyTorch's export codes of the dtypes of scales, beside F32.
#define SCALE_E4M3FN 29
#define SCALE_E8M0 33

// Of one operand, byte for byte CodesParams of params.rs; strides in elements, of [batch, heads, len, chunks].
struct Codes {
    const u8 *descale, *zero_point;
    i64 descale_stride[4], zero_point_stride[4];
    float global_scale;
    int kind, chunk, scale_dtype;
    int in_pages;        // what belongs to a key lies in pages, as the key does
    int swizzled_tiles;  // in a row of tiles, where factors lie swizzled; else 0
};

// Whether codes of a kind lie two a byte.
__device__ constexpr bool is_packed(int kind) { return kind == INT4 || kind == E2M1; }

__device__ inline float e4m3fn_to_float(u32 code) {
    if ((code & 0x7f) == 0x7f) return not_a_number();
    const float size = __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
    return code & 0x80 ? -size : size;
}
__device__ inline float e8m0_to_float(u32 code) {
    return code == 255 ? not_a_number() : __uint_as_float(code == 0 ? 0x00400000u : code << 23);
}
__device__ inline float e2m1_to_float(u32 code) {
    const float size = __uint_as_float((code & 7) << 22) * 0x1p126f;
    return code & 8 ? -size : size;
}

// The number of one code (of its lower 4 bits where two share a byte), before zero point and scale: exact.
__device__ inline float decode_code(int kind, u32 code) {
    switch (kind) {
        case INT8: return (float)(signed char)code;
        case UINT8: return (float)(code & 0xff);
        case INT4: return (float)((int)(code << 28) >> 28);
        case E4M3FN: return e4m3fn_to_float(code);
        case E5M2: return f16_to_float((u16)(code << 8));
        default: return e2m1_to_float(code);
    }
}

__device__ inline float load_scale(const u8* base, int dtype, i64 at) {
    switch (dtype) {
        case SCALE_E4M3FN: return e4m3fn_to_float(base[at]);
        case SCALE_E8M0: return e8m0_to_float(base[at]);
        default: return ((const float*)base)[at];
    }
}

// Where one row of an operand and what belongs to its codes begin, in elements.
struct CodedRow {
    i64 row, descale, zero_point;
    // Row `row_of_block` of page or sequence `block`, which is of sequence `batch`.
    __device__ CodedRow(const i64 (&stride)[4], const Codes& codes, int batch, int head, int block, int row_of_block) {
        row = block * stride[0] + head * stride[1] + row_of_block * stride[2];
        const int of = codes.in_pages ? block : batch;
        const i64 of_row = codes.swizzled_tiles == 0 ? row_of_block : swizzled_row(row_of_block, codes.swizzled_tiles);
        descale = of * codes.descale_stride[0] + head * codes.descale_stride[1] + of_row * codes.descale_stride[2];
        zero_point = of * codes.zero_point_stride[0] + head * codes.zero_point_stride[1] + row_of_block * codes.zero_point_stride[2];
    }
    // Element d.
    __device__ Acc number(const void* base, i64 step, const Codes& codes, int d) const {
        if (codes.kind == NUMBERS) return widen(((const Elem*)base)[row + d * step]);
        const bool packed = is_packed(codes.kind);
        u32 code = ((const u8*)base)[row + (packed ? d / 2 : d) * step];
        if (packed) code = code >> d % 2 * 4 & 0xf;
        const int group = d / codes.chunk;
        float x = decode_code(codes.kind, code);
        if (codes.zero_point != nullptr) x -= codes.zero_point[zero_point + group * codes.zero_point_stride[3]];
        const int along = codes.swizzled_tiles == 0 ? group : along_swizzled_row(group);
        x = product(x, load_scale(codes.descale, codes.scale_dtype, descale + along * codes.descale_stride[3]));
        return product(x, codes.global_scale);
    }
};
