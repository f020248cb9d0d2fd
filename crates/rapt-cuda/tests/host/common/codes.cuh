// kernels/common/codes.cuh for a host compiler: the kinds of codes alone.

#pragma once
#include "common/types.cuh"

#define INT8 1
#define UINT8 2
#define INT4 3
#define E4M3FN 4
#define E5M2 5
#define E2M1 6
#define SCALE_E4M3FN 29
#define SCALE_E8M0 33

constexpr bool is_packed(int kind) { return kind == INT4 || kind == E2M1; }
