// The Tensor Memory Accelerator (TMA): boxes of a tensor between global and shared memory by one thread, and the barriers that
// count their bytes. Source: PTX ISA, "cp.async.bulk.tensor". Deliberately absent: clusters and multicast.

#pragma once
#include "common/fragment.cuh"
#include "common/ptx.cuh"

// What the driver's cuTensorMapEncodeTiled wrote.
struct alignas(64) TensorMap {
    u64 words[16];
};

// Makes initialised barriers visible to TMA.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive_expect_tx(u64& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}

// Orders this thread's ordinary stores to shared memory before what TMA and the tensor cores do next.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An index along a dimension that is not stepped through.
__device__ inline int tma_coordinate(i64 stride, int index) { return stride == 0 ? 0 : index; }

// One box: columns c.., rows r.. of a head; what lies outside the tensor comes as zeros.
__device__ inline void tma_load(void* to, const TensorMap& map, u64& barrier, int c, int r, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(&barrier)), "r"(c), "r"(r), "r"(head), "r"(batch)
        : "memory"
    );
}

// One box of the swizzle_128b tile `from` to columns c.., rows r.. of a head; what lies outside the tensor is left out. Copies are
// under way once committed, and `from` may be written again when the thread that began them has waited.
__device__ inline void tma_store(const TensorMap& map, const void* from, int c, int r, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(shared_address(from)), "r"(c), "r"(r), "r"(head), "r"(batch)
                 : "memory");
}
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// --- bulk copies of contiguous bytes, multiples of 16 --------------------------------------------------------------------------

__device__ inline void bulk_load(void* to, const void* from, u64& barrier, u32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&barrier))
                 : "memory");
}
// To device memory; committed and waited for as `tma_store`. The second adds float32, each number by itself.
__device__ inline void bulk_store(float* to, const float* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ inline void bulk_add(float* to, const float* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// Waits until what was committed is to be seen by this thread.
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders what this thread does to device memory itself and what TMA does for it.
__device__ inline void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
