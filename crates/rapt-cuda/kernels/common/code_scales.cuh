// Which codes of K or V share a factor, and how many bytes of factors a key has.
#pragma once
#include "common/codes.cuh"

#define UNIFORM 0
#define TOKEN 1
#define CHANNEL 2
#define BLOCK 3

// Whether factors of blocks lie swizzled.
#ifndef K_SWIZZLED
#define K_SWIZZLED 0
#endif
#ifndef V_SWIZZLED
#define V_SWIZZLED 0
#endif

// Bytes of the factors of a key that are loaded with its codes.
constexpr int scale_bytes(int scales, int dim, int block, int dtype) {
    return scales == TOKEN ? 4 : scales == BLOCK ? dim / block * (dtype == F32 ? 4 : 1) : 0;
}
