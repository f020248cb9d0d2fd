// kernels/common/types.cuh for a host compiler: the words of CUDA C++ that the maps need, and integer types.

#pragma once
#define __device__
#include <cstdint>
#include <utility>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct uint2 {
    u32 x, y;
};
struct uint4 {
    u32 x, y, z, w;
};
struct Lane {
    u32 x;
};
// The lane that is run.
inline Lane threadIdx;

// Bytes of `low` (0 to 3) and `high` (4 to 7) by the nibbles of `which`.
inline u32 __byte_perm(u32 low, u32 high, u32 which) {
    const u64 both = (u64)high << 32 | low;
    u32 picked = 0;
    for (int n = 0; n < 4; n++) picked |= (u32)(both >> (which >> n * 4 & 7) * 8 & 0xff) << n * 8;
    return picked;
}
