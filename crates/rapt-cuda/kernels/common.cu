// What every kernel shares: the request as the host passes it, dtypes at load and store, masks, and the end of a row.
//
//   rows      A task is a run of heads that share K and V, its rows the queries of those heads, head by head.
//   keys      Query i sees keys clamp(i + lo_shift, 0, kv_len) .. clamp(i + hi_shift, 0, kv_len): the host's BlockRange.
//   scores    s = softcap(q.k * scale) - slope*|i + diagonal - j| + bias;  -inf where masked
//   sums      m = max s,  l = sum exp(s - m),  acc = sum exp(s - m) * v
//
// Strides are in elements. Nothing is included: NVRTC bundles no headers. Deliberately absent: any choice of a kernel, and
// any read outside the operands.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// PyTorch's export codes, as rapt_core::DType numbers them.
#define F16 6
#define F32 7
#define F64 8
#define BF16 13
// rapt_core::MaskClass.
#define NO_MASK 0
#define BOOL_MASK 1
#define ADDITIVE_MASK 2

// A number n that is divided by, as the host has prepared it: x / n = x * magic >> 32 + shift for x < 2^31; magic 0: n is 1.
// A division of its own takes a block some 100 cycles, and a block begins with five.
struct Divisor {
    u32 magic, shift;
};
__device__ inline u32 divide(u32 x, const Divisor& by) { return by.magic == 0 ? x : __umulhi(x, by.magic) >> by.shift; }

// Laid out as params.rs lays it out; the host passes its own size.
struct Params {
    const void *q, *k, *v, *mask, *sinks, *alibi;
    void *out, *lse, *partials;
    i64 q_stride[4], k_stride[4], v_stride[4], out_stride[4], mask_stride[4], lse_stride[3];
    i64 sinks_stride, alibi_stride;
    double scale, softcap, inverse_softcap;  // softcap 0: none
    int out_dtype, sinks_dtype, alibi_dtype;
    int heads, group, task_heads, q_len, kv_len, head_dim, head_dim_v;
    int rows, row_blocks, num_splits, chunk, dv_blocks;
    int lo_shift, hi_shift, diagonal;
    int out_vector;  // rows of out can be written 16 bytes at a time, in the storage dtype
    int mask_pairs;  // rows of the mask can be read two keys at a time
    int items;       // of decode.cu: chunks of all rows
    int is_cut;      // decode.cu: blocks take chunks, not whole rows
    Divisor by_q_len, by_row_blocks, by_num_splits, by_group, by_tasks;  // tasks of one batch
};
static_assert(sizeof(Params) == PARAMS_BYTES, "params.rs and common.cu disagree on Params");

#if STORAGE == F64
typedef double Acc;
#else
typedef float Acc;
#endif

#if STORAGE == F64
typedef double Elem;
#elif STORAGE == F32
typedef float Elem;
#else
typedef u16 Elem;
#endif

__device__ inline float f16_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ inline float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }
__device__ inline u16 float_to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
__device__ inline u16 double_to_f16(double x) {
    u16 bits;
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(x));
    return bits;
}
__device__ inline u16 float_to_bf16(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// An element of q, k or v.
__device__ inline Acc widen(Elem x) {
#if STORAGE == F16
    return f16_to_float(x);
#elif STORAGE == BF16
    return bf16_to_float(x);
#else
    return x;
#endif
}

// A number of a dtype known at run time: sinks, slopes, biases.
__device__ inline Acc load_as(const void* base, int dtype, i64 at) {
    switch (dtype) {
        case F16: return f16_to_float(((const u16*)base)[at]);
        case BF16: return bf16_to_float(((const u16*)base)[at]);
        case F32: return ((const float*)base)[at];
        default: return (Acc)((const double*)base)[at];
    }
}

__device__ inline void store_as(void* base, int dtype, i64 at, Acc x) {
    switch (dtype) {
        case F16:
#if STORAGE == F64
            ((u16*)base)[at] = double_to_f16(x);
#else
            ((u16*)base)[at] = float_to_f16(x);
#endif
            break;
        case BF16: ((u16*)base)[at] = float_to_bf16((float)x); break;
        case F32: ((float*)base)[at] = (float)x; break;
        default: ((double*)base)[at] = x;
    }
}

__device__ inline Acc negative_infinity() {
#if STORAGE == F64
    return __longlong_as_double(0xfff0000000000000ll);
#else
    return __uint_as_float(0xff800000u);
#endif
}

__device__ inline Acc maximum(Acc a, Acc b) {  // passes over NaN
#if STORAGE == F64
    return fmax(a, b);
#else
    return fmaxf(a, b);
#endif
}
__device__ inline Acc exponential(Acc x) {
#if STORAGE == F64
    return exp(x);
#else
    return expf(x);
#endif
}
__device__ inline Acc logarithm(Acc x) {
#if STORAGE == F64
    return log(x);
#else
    return logf(x);
#endif
}
__device__ inline Acc hyperbolic_tangent(Acc x) {
#if STORAGE == F64
    return tanh(x);
#else
    return tanhf(x);
#endif
}
__device__ inline bool is_finite(Acc x) { return x - x == (Acc)0; }
// a * b + c rounded once, and a * b rounded by itself whatever is added to it later: where one sum is reached in two ways, the
// compiler must not fuse in one of them alone.
#if STORAGE == F64
__device__ inline Acc fused(Acc a, Acc b, Acc c) { return __fma_rn(a, b, c); }
__device__ inline Acc product(Acc a, Acc b) { return __dmul_rn(a, b); }
#else
__device__ inline Acc fused(Acc a, Acc b, Acc c) { return __fmaf_rn(a, b, c); }
__device__ inline Acc product(Acc a, Acc b) { return __fmul_rn(a, b); }
#endif
// weight * x for a weight that is above 0 even where it has sunk below the least number: an attended infinity stays one.
__device__ inline bool outweighs(Acc weight, Acc x) { return weight == 0 && !is_finite(x); }
__device__ inline Acc weighed(Acc weight, Acc x) { return outweighs(weight, x) ? x : product(weight, x); }

// Rounded as written, in every kernel: what two of them compute of the same numbers is the same.
__device__ inline Acc times(Acc a, Acc b) {
#if STORAGE == F64
    return __dmul_rn(a, b);
#else
    return __fmul_rn(a, b);
#endif
}
__device__ inline Acc plus(Acc a, Acc b) {
#if STORAGE == F64
    return __dadd_rn(a, b);
#else
    return __fadd_rn(a, b);
#endif
}

// Split after split of a row: m, l and sums so far, and the next split's. A split without an attended key has l = 0 and
// sums of 0. decode.cu does this where a block sees all of a row, combine.cu elsewhere, with the same bits.
struct Fold {
    Acc before, next;  // weights
    // m_next is -inf where l_next is 0; m moves on.
    __device__ Fold(Acc& m, Acc m_next) {
        const Acc top = maximum(m, m_next);
        before = m == top ? (Acc)1 : exponential(m - top);
        next = m_next == negative_infinity() ? (Acc)0 : exponential(m_next - top);
        m = top;
    }
    __device__ Fold() {}
    __device__ Acc weigh(Acc x) const { return next == 0 && !is_finite(x) ? x : times(next, x); }
    __device__ Acc add_weighed(Acc sum, Acc x) const {
        return plus(before == 0 && !is_finite(sum) ? sum : times(before, sum), x);
    }
    __device__ Acc add(Acc sum, Acc x) const { return add_weighed(sum, weigh(x)); }
};

// Where a task begins.
struct Task {
    int batch, head;
    __device__ Task(int batch, int head) : batch(batch), head(head) {}
    __device__ Task(const Params& p, int task) {
        batch = divide(task, p.by_tasks);
        head = task * p.task_heads - batch * p.heads;
    }
};

// One query of one head.
struct Row {
    int batch, head, i;
    __device__ Row(const Params& p, const Task& task, int r) {
        int beyond = divide(r, p.by_q_len);
        batch = task.batch;
        head = task.head + beyond;
        i = r - beyond * p.q_len;
    }
    __device__ i64 offset(const i64 (&stride)[4]) const { return batch * stride[0] + head * stride[1] + i * stride[2]; }
};

// The head of K and V that belongs to a task.
__device__ inline int kv_head(const Params& p, const Task& task) { return divide(task.head, p.by_group); }

__device__ inline int clamp(int x, int lo, int hi) { return min(max(x, lo), hi); }
// The keys lo..hi that query i sees.
__device__ inline int keys_lo(const Params& p, int i) { return clamp(i + p.lo_shift, 0, p.kv_len); }
__device__ inline int keys_hi(const Params& p, int i) { return clamp(i + p.hi_shift, 0, p.kv_len); }

// What rows r0..r1 of a task see together (lo..hi), and each on its own (all_lo..all_hi; empty if there is no such key).
struct Seen {
    int lo, hi, all_lo, all_hi;
    __device__ Seen(const Params& p, const Task& task, int r0, int r1) {
        Row first(p, task, r0), last(p, task, r1 - 1);
        // Rows of several heads: any query may be among them.
        int i0 = first.head == last.head ? first.i : 0;
        int i1 = first.head == last.head ? last.i : p.q_len - 1;
        lo = keys_lo(p, i0), hi = keys_hi(p, i1);
        all_lo = keys_lo(p, i1), all_hi = keys_hi(p, i0);
    }
};

// The one place where a mask tensor is read: whether key j is masked, and what is added where it is not.
__device__ inline bool is_masked(const Params& p, i64 row, int j, Acc& bias) {
    bias = 0;
#if MASK == BOOL_MASK
    return ((const u8*)p.mask)[row + j * p.mask_stride[3]] == 0;
#elif MASK == ADDITIVE_MASK
    bias = load_as(p.mask, MASK_DTYPE, row + j * p.mask_stride[3]);
    return bias == negative_infinity();
#else
    return false;
#endif
}

// The end of a row: what its sums are multiplied with, and its lse.
struct Finished {
    Acc factor, top, total;
    // m in natural units; l = 0 means that every key was masked.
    __device__ Finished(const Params& p, const Row& row, Acc m, Acc l) {
        if (l == 0) {
            factor = 0, top = negative_infinity(), total = 1;
        } else if (p.sinks == nullptr) {
            factor = 1 / l, top = m, total = l;
        } else {
            Acc sink = load_as(p.sinks, p.sinks_dtype, row.head * p.sinks_stride);
            top = sink > m ? sink : m;
            Acc weight = exponential(m - top);
            total = fused(l, weight, exponential(sink - top)), factor = weight / total;
        }
    }
    __device__ Acc lse() const { return top + logarithm(total); }
};

__device__ inline void store_lse(const Params& p, const Row& row, const Finished& finished) {
    if (p.lse != nullptr) {
        const i64 at = row.batch * p.lse_stride[0] + row.head * p.lse_stride[1] + row.i * p.lse_stride[2];
        ((Acc*)p.lse)[at] = finished.lse();
    }
}

// The next launch of the stream, if it is one that waits of itself, may take its place on the device now.
__device__ inline void begin_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until the launches before this one have ended and what they wrote is to be seen.
__device__ inline void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Partial results of one row and split: head_dim_v sums, then m, then l.
__device__ inline Acc* partial(const Params& p, int task, int row, int split) {
    i64 at = ((i64)task * p.rows + row) * p.num_splits + split;
    return (Acc*)p.partials + at * (p.head_dim_v + 2);
}
