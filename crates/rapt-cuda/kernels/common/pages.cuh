// Where a key lies: in the tensor of its batch entry, or in a page of a cache.
//
//   PAGED   key j of sequence b is row j % page_size of page page_table[b, j / page_size]
//
// The host has not seen the table: an entry that names no page is never followed, and the key's numbers are NaN instead.
#pragma once
#include "common/params.cuh"

// A row of a page, or of a batch entry.
struct KeyPlace {
    int block, row;
    __device__ KeyPlace() {}
    __device__ KeyPlace(const Params& p, int batch, int j) {
#if PAGED
        const Ragged& of = p.ragged;
        const int entry = divide(j, of.by_page_size);
        block = of.page_table[batch * of.page_table_stride[0] + entry * of.page_table_stride[1]];
        row = j - entry * of.page_size;
#else
        block = batch, row = j;
#endif
    }
    __device__ bool exists(const Params& p) const {
#if PAGED
        return (u32)block < (u32)p.ragged.num_pages;
#else
        return true;
#endif
    }
};
