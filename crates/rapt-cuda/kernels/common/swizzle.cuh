// Where factors of 8 bits stand that lie swizzled (rapt_core::swizzle): a head's matrix is cut into tiles of 128 rows and 4 columns, which
// follow one another row by row, `tiles` in each.
//
//   place(row, column) = swizzled_row(row) + along_swizzled_row(column)
//
// Plain C++: tests/fragments.rs compares every place.

#pragma once
#include "common/types.cuh"

__device__ inline i64 swizzled_row(u32 row, u32 tiles) { return (i64)(row / 128 * tiles) * 512 + (row % 32 * 16 + row % 128 / 32 * 4); }
__device__ inline u32 along_swizzled_row(u32 column) { return column / 4 * 512 + column % 4; }
