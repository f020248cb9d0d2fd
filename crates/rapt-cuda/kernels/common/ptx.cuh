// PTX instructions that every tensor-core kernel uses, by their names: ldmatrix, mma.sync, cp.async, mbarrier, bar, griddepcontrol.
#pragma once
#include "common/dtype.cuh"

#if (STORAGE == F16 || STORAGE == F32) && CODES != 1  // float32 as two f16 (hopper_f32.cu); codes themselves as bf16
#define MMA_TYPE "f16"
constexpr bool MMA_HALF = true;
#else
#define MMA_TYPE "bf16"
constexpr bool MMA_HALF = false;
#endif

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ inline void ldmatrix(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ inline void ldmatrix_trans(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ inline void ldmatrix_trans(u32 (&r)[2], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(at));
}
// A warp's 8 x 8 matrix of 16-bit elements with rows and columns exchanged: a lane has columns 2t, 2t+1 of row g.
__device__ inline u32 movmatrix_trans(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
__device__ inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The product of operands that are float16 (HALF) or bfloat16, whatever MMA_TYPE is; and numbers as such.
template <bool HALF>
__device__ inline void mma_of(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define MMA(TYPE)                                                                                                            \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                                      \
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (HALF) MMA("f16");
    else MMA("bf16");
#undef MMA
}
// The product of TF32: float32 of which 11 bits are read.
__device__ inline void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The product of bytes, those of B with a sign. UNSIGNED: those of A have none.
template <bool UNSIGNED>
__device__ inline void mma_int8(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#define MMA(TYPE)                                                                                                            \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." TYPE ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (UNSIGNED) MMA("u8");
    else MMA("s8");
#undef MMA
}
template <bool HALF>
__device__ inline u32 pack_as(float low, float high) {
    u32 packed;
    if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ inline u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn." MMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// a * b + c of pairs of bfloat16.
__device__ inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}

// a * b + c of pairs of float16; subnormal numbers count.
__device__ inline u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 x;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}
// The two e4m3 in the lower half of a word as float16, from compute capability 8.9 on.
__device__ inline u32 e4m3x2_to_f16x2(u32 codes) {
    u32 x = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x) : "h"((u16)codes));
#endif
    return x;
}

// (a ^ b) & c in one instruction: the compiler takes a ^ b apart where it occurs twice.
__device__ inline u32 xor_and(u32 a, u32 b, u32 c) {
    u32 x;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(x) : "r"(a), "r"(b), "r"(c));
    return x;
}

// sum + the products of four bytes each.
__device__ inline u32 dp4a(u32 a, u32 b, u32 sum) {
    asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ inline void cp_async(Elem* to, const Elem* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
__device__ inline void cp_async(u32 to, const Elem* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
// BYTES (4, 8 or 16), zeros where `inside` is false.
template <int BYTES>
__device__ inline void cp_async_zfill(u32 to, const void* from, bool inside) {
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(inside ? BYTES : 0));
    }
}
// BYTES (4 or 8), of which the first `inside` are read and the others are zeros.
template <int BYTES>
__device__ inline void cp_async_part(u32 to, const void* from, int inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(inside));
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Barriers in shared memory. (Named ones, by bar.arrive, would do where only threads arrive; compute-sanitizer does not track them.)
__device__ inline void mbarrier_init(u64& barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
__device__ inline void mbarrier_arrive(u64& barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(&barrier)) : "memory");
}
// This thread arrives when what it has begun to copy so far is there.
__device__ inline void mbarrier_arrive_behind_copies(u64& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Without a branch: ptxas takes a warp that parts for one as diverged from then on, and uses no uniform registers.
__device__ inline void mbarrier_arrive_if(u64& barrier, bool is) {
    asm volatile(
        "{\n.reg .pred is;\n.reg .b64 state;\nsetp.ne.u32 is, %1, 0;\n@is mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
            shared_address(&barrier)
        ),
        "r"((u32)is)
        : "memory"
    );
}
__device__ inline bool mbarrier_test_wait(u64& barrier, u32 phase) {
    u32 passed;
    asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(passed)
                 : "r"(shared_address(&barrier)), "r"(phase)
                 : "memory");
    return passed != 0;
}
__device__ inline void mbarrier_wait(u64& barrier, u32 phase) {
#if __CUDA_ARCH__ >= 900
#define ASK "mbarrier.try_wait"
#else
#define ASK "mbarrier.test_wait"
#endif
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n" ASK ".parity.shared.b64 done, [%0], %1;\n@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(
            shared_address(&barrier)
        ),
        "r"(phase)
        : "memory"
    );
#undef ASK
}

// The next launch of the stream, if it is one that waits of itself, may take its place on the device now.
__device__ inline void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the launches before this one have ended and what they wrote is to be seen.
__device__ inline void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A count in device memory that blocks hand on: what was written before it was set is to be seen after it was read.
__device__ inline u32 load_acquire(const u32* at) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
}
__device__ inline void store_release(u32* at, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory"); }

__device__ inline void nanosleep(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

// The count so far, which is one more then.
__device__ inline u32 take_number(u32* count) {
    u32 x;
    asm volatile("atom.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(count) : "memory");
    return x;
}

// Barriers of the block by number; every thread of `threads` takes part, once.
__device__ inline void bar_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// The same; whether any of them brings `any`.
__device__ inline bool bar_any(int number, int threads, bool any) {
    u32 result;
    asm volatile(
        "{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n bar.red.or.pred q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
        : "=r"(result)
        : "r"(number), "r"(threads), "r"((u32)any)
        : "memory"
    );
    return result != 0;
}
__device__ inline void bar_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// A number that all lanes have, known to the compiler as such: what follows from it takes uniform registers.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
// The same number, opaque to the compiler: what depends on it is computed again here, and takes no register meanwhile.
template <class T>
__device__ inline T opaque(T x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The thread's number, read again, for the same reason.
__device__ inline int reread_tid() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// --- compute capability 9.0 alone --------------------------------------------------------------------------------------------

// A warp's four 8 x 8 matrices of 16-bit elements to shared memory: lane l holds in word i columns 2*(l%4).. of row l/4 of
// matrix i, and names where row l%8 of matrix l/8 goes.
__device__ inline void stmatrix_trans(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ inline void stmatrix(u32 to, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

template <int REGISTERS>
__device__ inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
