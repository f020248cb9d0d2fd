// What the tensor-core kernels share: tiles in shared memory, fragments of mma.sync m16n8k16, and the streaming softmax on
// them. f16 and bf16 in, f32 sums.
//
//   lane = 4*g + t     A (16x16): rows g, g+8; columns 2t, 2t+1, +8        B (16x8): rows 2t, 2t+1, +8; column g
//                      C (16x8):  rows g, g+8; columns 2t, 2t+1
//
// The 8 rows of an ldmatrix fall into distinct banks: where a row is whole lines of 128 bytes, its 16-byte units stand at
// unit ^ row % 8, within their line; else it is padded by a unit, and their number is odd. (Padded rows of whole lines cost
// a tenth of the bandwidth: a line that lies across two of shared memory is asked of L2 twice; H200, 2026-11.)
// p is rounded to the storage dtype between the two products; its sum l is of the unrounded p.
// Scores are compared raw where they may be (NATURAL 0) and the scale goes into the exponent:
//
//   raw       p = 2^(s*c - m*c)       c = scale * log2(e)
//   natural   p = 2^((s - m)*c)       c = log2(e), s with scale, softcap, slope and bias in it
//
// Values that nobody attends: a block first multiplies every p, 0 where masked. If a sum is not finite in the end, it runs
// again as CAREFUL: a masked p is -0 there, and values that are not finite reach only rows that attend them. Finite sums
// have the same bits both ways.
// Deliberately absent: which keys belong to whom.

constexpr int D = HEAD_DIM, DV = HEAD_DIM_V;      // multiples of 16, zero-filled beyond head_dim
__device__ constexpr bool is_swizzled(int width) { return width % 64 == 0; }
__device__ constexpr int row_of(int width) { return is_swizzled(width) ? width : width + 8; }
constexpr int K_ROW = row_of(D), V_ROW = row_of(DV);  // elements
constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.69314718055994530942f;
// Beyond this m*c is off by more than a unit in the exponent: s - m is taken first then.
constexpr float EXACT = 4194304.f;
// By how many powers of 2 a row's maximum may rise before its sums are rescaled: weights are at most 2^SLACK.
constexpr float SLACK = 8;

#if STORAGE == F16 || STORAGE == F32  // float32.cu
#define MMA_TYPE "f16"
#else
#define MMA_TYPE "bf16"
#endif

__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Where the unit of 8 elements at column c of row r stands.
template <int WIDTH>
__device__ inline int place(int r, int c) {
    return r * row_of(WIDTH) + (is_swizzled(WIDTH) ? c ^ r % 8 * 8 : c);
}
// The address `column` columns, a multiple of 16, beyond that of one of a row's first two units.
template <int WIDTH>
__device__ inline u32 beyond(u32 at, int column) {
    return is_swizzled(WIDTH) ? (at ^ column % 64 * 2) + column / 64 * 128 : at + column * 2;
}

__device__ inline void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ inline void load_matrices_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
}
__device__ inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE
                 ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn." MMA_TYPE "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ inline float not_a_number() { return __uint_as_float(0x7fffffffu); }
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline void copy_async(Elem* to, const Elem* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes));
}
__device__ inline void copy_async(u32 to, const Elem* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Barriers in shared memory. (Named ones, arrived at by bar.arrive, would do where threads alone meet; compute-sanitizer does not
// follow them.)
__device__ inline void init_barrier(u64& barrier, u32 count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
__device__ inline void arrive(u64& barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(&barrier)) : "memory");
}
// Without a branch: threads that part for one are taken to be apart from then on (uniform registers are not used).
__device__ inline void arrive_if(u64& barrier, bool is) {
    asm volatile(
        "{\n.reg .pred is;\n.reg .b64 state;\nsetp.ne.u32 is, %1, 0;\n@is mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(
            shared_address(&barrier)
        ),
        "r"((u32)is)
        : "memory"
    );
}
__device__ inline bool has_passed(u64& barrier, u32 phase) {
    u32 passed;
    asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(passed)
                 : "r"(shared_address(&barrier)), "r"(phase)
                 : "memory");
    return passed != 0;
}
__device__ inline void wait(u64& barrier, u32 phase) {
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

// ROWS rows of dim elements, zero beyond `rows` and `dim`, to a tile of WIDTH columns; `lane` of LANES threads takes part.
// `offset(r)` is where row r begins, in elements. VECTOR: every row of q, k and v can be moved 16 bytes at a time.
template <int ROWS, int WIDTH, int LANES, class Offset>
__device__ inline void load_tile(
    Elem* tile, const Elem* base, Offset offset, i64 step, i64 row_step, int rows, int dim, int lane
) {
    if constexpr (VECTOR) {
        constexpr int UNITS = WIDTH / 8;
#pragma unroll 2
        for (int at = lane; at < ROWS * UNITS; at += LANES) {
            int r = at / UNITS, c = at % UNITS * 8;
            bool inside = r < rows && c < dim;
            copy_async(tile + place<WIDTH>(r, c), inside ? base + offset(r) + c : base, inside ? 16 : 0);
        }
    } else if (row_step == 1 && step != 1) {
        // Rows lie side by side: neighbouring threads take neighbouring rows.
        for (int at = lane; at < ROWS * WIDTH; at += LANES) {
            int r = at % ROWS, c = at / ROWS;
            tile[place<WIDTH>(r, c & ~7) + c % 8] = r < rows && c < dim ? base[offset(r) + c * step] : (Elem)0;
        }
    } else {
        for (int at = lane; at < ROWS * WIDTH; at += LANES) {
            int r = at / WIDTH, c = at % WIDTH;
            tile[place<WIDTH>(r, c & ~7) + c % 8] = r < rows && c < dim ? base[offset(r) + c * step] : (Elem)0;
        }
    }
}

struct Copy16 {
    __device__ void operator()(u32 to, const Elem* from) const { copy_async(to, from); }
};

// The same for evenly spaced rows from `base` on: one pointer that steps. `copy` moves 16 bytes of a whole tile.
template <int ROWS, int WIDTH, int LANES, class Copy = Copy16>
__device__ inline void load_even_tile(
    Elem* tile, const Elem* base, i64 step, i64 row_step, int rows, int dim, int lane, Copy copy = Copy()
) {
    constexpr int UNITS = WIDTH / 8;
    if constexpr (VECTOR && LANES % UNITS == 0 && ROWS * UNITS % LANES == 0) {
        constexpr int STEP = LANES / UNITS;
        const int c = lane % UNITS * 8, first = lane / UNITS;
        const Elem* from = base + first * row_step + c;
        if (rows >= ROWS && dim == WIDTH) {
            // A whole tile, as nearly all are: no question per row.
            const u32 to = shared_address(tile + place<WIDTH>(first, c));
#pragma unroll
            for (int n = 0; n < ROWS / STEP; n++) {
                const int r = n * STEP;
                copy((is_swizzled(WIDTH) ? to ^ r % 8 * 16 : to) + r * row_of(WIDTH) * 2, from);
                from += STEP * row_step;
            }
        } else {
            if (c >= dim) rows = 0;
#pragma unroll 1
            for (int r = first; r < ROWS; r += STEP) {
                copy_async(tile + place<WIDTH>(r, c), r < rows ? from : base, r < rows ? 16 : 0);
                from += STEP * row_step;
            }
        }
    } else {
        load_tile<ROWS, WIDTH, LANES>(
            tile, base, [&](int r) { return r * row_step; }, step, row_step, rows, dim, lane
        );
    }
}

// The two rows g, g+8 of each fragment of a warp, found anew where they are needed: registers are for sums.
struct Queries {
    const Params& p;
    const Task task;
    int r0;
    __device__ Row row(int mt, int h) const {
        return Row(p, task, min(r0 + mt * 16 + (int)(threadIdx.x % 32 / 4) + h * 8, p.rows - 1));
    }
};

// s = q.k of a tile of NT*8 keys.
template <int MT, int NT>
__device__ inline void multiply_keys(float (&s)[MT][NT][4], const Elem* q_tile, const Elem* k_tile) {
    const int lane = threadIdx.x % 32;
    const u32 q_at = shared_address(q_tile + place<D>(lane % 16, lane / 16 * 8));
    const u32 k_at = shared_address(k_tile + place<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8));
    constexpr int ROWS_16 = 16 * K_ROW * 2;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[mt][nt][e] = 0;
    // Fragments are loaded one product ahead of their use.
    constexpr int PAIRS = NT / 2, STEPS = D / 16;
    u32 a[2][MT][4], b[2][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) load_matrices(a[0][mt], q_at + mt * ROWS_16);
    load_matrices(b[0], k_at);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            const int now = (step * PAIRS + pair) % 2;
            if (pair + 1 < PAIRS) {
                load_matrices(b[1 - now], beyond<D>(k_at, step * 16) + (pair + 1) * ROWS_16);
            } else if (step + 1 < STEPS) {
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    load_matrices(a[(step + 1) % 2][mt], beyond<D>(q_at, (step + 1) * 16) + mt * ROWS_16);
                }
                load_matrices(b[1 - now], beyond<D>(k_at, (step + 1) * 16));
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                mma(s[mt][pair * 2], a[step % 2][mt], b[now][0], b[now][1]);
                mma(s[mt][pair * 2 + 1], a[step % 2][mt], b[now][2], b[now][3]);
            }
        }
    }
}

// What the mask says of a thread's pairs of keys in a tile.
template <int MT, int NT>
struct MaskTile {
    u32 hidden[MT][2];  // bool: two bits for each pair

    // Before the product that is masked: the loads are under way while it runs.
    __device__ void fetch(const Params& p, const Queries& queries, int n0) {
#if MASK == BOOL_MASK
        const int j0 = n0 + threadIdx.x % 4 * 2;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i64 mask_row = queries.row(mt, h).offset(p.mask_stride);
                u32 bits = 0;
                if (p.mask_pairs) {
                    const u16* at = (const u16*)((const u8*)p.mask + mask_row + j0);
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) {
                        const int left = p.kv_len - j0 - nt * 8;
                        const u32 pair = left >= 2 ? at[nt * 4] : left == 1 ? *(const u8*)(at + nt * 4) : 0;
                        bits |= ((pair & 0xffu) == 0 ? 1u : 0u) << nt * 2 | (pair >> 8 == 0 ? 2u : 0u) << nt * 2;
                    }
                } else {
#pragma unroll
                    for (int e = 0; e < NT * 2; e++) {
                        const int j = j0 + e / 2 * 8 + e % 2;
                        float bias;
                        if (j < p.kv_len && is_masked(p, mask_row, j, bias)) bits |= 1u << e;
                    }
                }
                hidden[mt][h] = bits;
            }
#endif
    }

    // Whether keys j and j+1, the pair `nt` of a row, are masked, and what is added where they are not.
    __device__ void read(
        const Params& p, i64 row, int mt, int h, int nt, int j, bool (&masked)[2], float (&bias)[2]
    ) const {
        bias[0] = bias[1] = 0;
#if MASK == BOOL_MASK
        masked[0] |= hidden[mt][h] >> nt * 2 & 1, masked[1] |= hidden[mt][h] >> (nt * 2 + 1) & 1;
#elif MASK == ADDITIVE_MASK
        if (p.mask_pairs && j + 1 < p.kv_len) {
#if MASK_DTYPE == F32
            const float2 pair = *(const float2*)((const float*)p.mask + row + j);
            bias[0] = pair.x, bias[1] = pair.y;
#else
            const u32 pair = *(const u32*)((const u16*)p.mask + row + j);
            bias[0] = MASK_DTYPE == F16 ? f16_to_float(pair) : bf16_to_float(pair);
            bias[1] = MASK_DTYPE == F16 ? f16_to_float(pair >> 16) : bf16_to_float(pair >> 16);
#endif
        } else {
            for (int e = 0; e < 2; e++) {
                if (j + e < p.kv_len) bias[e] = load_as(p.mask, MASK_DTYPE, row + (j + e) * p.mask_stride[3]);
            }
        }
        masked[0] |= bias[0] == negative_infinity(), masked[1] |= bias[1] == negative_infinity();
#endif
    }
};

// Scale, softcap, slopes, biases and masks, for keys n0.. of which those below `end` count.
template <int MT, int NT>
__device__ inline void modify_scores(
    float (&s)[MT][NT][4], const Params& p, const Queries& queries, const MaskTile<MT, NT>& mask, int n0, int end,
    bool positions
) {
    const float scale = (float)p.scale, cap = (float)p.softcap;
    const float inverse_cap = (float)p.inverse_softcap;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Row row = queries.row(mt, h);
            const i64 mask_row = MASK == ADDITIVE_MASK ? row.offset(p.mask_stride) : 0;
            const float slope =
                NATURAL && p.alibi != nullptr ? load_as(p.alibi, p.alibi_dtype, row.head * p.alibi_stride) : 0.f;
            const int i = row.i;
            // Counted from the thread's first key, so that what an element is compared with is a constant.
            const int first = n0 + threadIdx.x % 4 * 2;
            const int lo = positions ? keys_lo(p, i) - first : 0;
            const int hi = positions ? min(keys_hi(p, i), end) - first : NT * 8;
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                const int j0 = first + nt * 8;
                bool masked[2] = {nt * 8 < lo || nt * 8 >= hi, nt * 8 + 1 < lo || nt * 8 + 1 >= hi};
                float bias[2];
                mask.read(p, mask_row, mt, h, nt, j0, masked, bias);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[mt][nt][h * 2 + e];
                    if (NATURAL) {
                        x *= scale;
                        if (p.softcap != 0) x = cap * tanhf(x * inverse_cap);
                        if (p.alibi != nullptr) x -= slope * (float)abs(i + p.diagonal - j0 - e);
                        if (MASK == ADDITIVE_MASK) x += bias[e];
                    }
                    if (masked[e]) x = negative_infinity();
                }
            }
        }
}

// The running state of MT*16 rows: two per fragment and thread; l is the thread's own share until `reduce`.
template <int MT>
struct Sums {
    float m[MT][2], l[MT][2], acc[MT][DV / 8][4];

    __device__ void clear() {
#pragma unroll
        for (int mt = 0; mt < MT; mt++) {
            m[mt][0] = m[mt][1] = negative_infinity(), l[mt][0] = l[mt][1] = 0;
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[mt][nt][e] = 0;
        }
    }

    // Scores become p, packed as A operands; m and l move on, acc is rescaled. m, what a row's scores are compared with,
    // follows their maximum only when that has risen by more than `slack` powers of 2: at 8, p stays below 256, and sums are
    // seldom rescaled; at 0 the greatest p is 1 and not rounded. What is rare stands apart, so that the rest is
    // one run of instructions in which exponentials and products overlap.
    template <bool CAREFUL, int NT>
    __device__ void weigh(u32 (&a)[MT][NT / 2][4], float (&s)[MT][NT][4], float c, float slack) {
        float top[MT][2], reference[MT][2];
        bool moved = false, big = NATURAL;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float& x = top[mt][h];
                x = m[mt][h];
#pragma unroll
                for (int nt = 0; nt < NT; nt++) x = fmaxf(x, fmaxf(s[mt][nt][h * 2], s[mt][nt][h * 2 + 1]));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
                moved |= (x - m[mt][h]) * c > slack;
            }
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++) {
                float fall[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float rise = (top[mt][h] - m[mt][h]) * c;
                    fall[h] = rise > slack ? exp2_fast(-rise) : 1.f;
                    m[mt][h] = rise > slack ? top[mt][h] : m[mt][h];
                    l[mt][h] *= fall[h];
                }
#pragma unroll
                for (int nt = 0; nt < DV / 8; nt++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& sum = acc[mt][nt][e];
                        sum = CAREFUL ? weighed(fall[e / 2], sum) : sum * fall[e / 2];
                    }
            }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // A row without a key yet keeps m at -inf and compares with 0.
                const float base = m[mt][h] == negative_infinity() ? 0.f : m[mt][h];
                reference[mt][h] = NATURAL ? base : base * c;
                if (!NATURAL) big |= fabsf(reference[mt][h]) > EXACT;
            }
        if (NATURAL || __any_sync(~0u, big)) {
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    // Each row by itself: its bits are its own.
                    const bool far = NATURAL || fabsf(reference[mt][h]) > EXACT;
                    const float base = far && m[mt][h] != negative_infinity() ? m[mt][h] : 0.f;
                    if (far) reference[mt][h] = 0;
#pragma unroll
                    for (int nt = 0; nt < NT; nt++)
#pragma unroll
                        for (int e = 0; e < 2; e++) s[mt][nt][h * 2 + e] -= base;
                }
        }
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float sum = l[mt][h];
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float& x = s[mt][nt][h * 2 + e];
                        const bool masked = x == negative_infinity();
                        x = exp2_fast(NATURAL ? x * c : __fmaf_rn(x, c, -reference[mt][h]));
                        sum += x;
                        if (CAREFUL && masked) x = -0.f;
                    }
                    a[mt][nt / 2][nt % 2 * 2 + h] = pack(s[mt][nt][h * 2], s[mt][nt][h * 2 + 1]);
                }
                l[mt][h] = sum;
            }
    }

    // acc += p.v
    template <bool CAREFUL, int KT>
    __device__ void add_values(const u32 (&a)[MT][KT][4], const Elem* v_tile) {
        if constexpr (CAREFUL) {
            add_values_carefully<KT>(a, v_tile);
        } else {
            add_finite_values<KT>(a, v_tile);
        }
    }

    template <int KT>
    __device__ void add_finite_values(const u32 (&a)[MT][KT][4], const Elem* v_tile) {
        const int lane = threadIdx.x % 32;
        const u32 v_at = shared_address(v_tile + place<DV>(lane % 16, lane / 16 * 8));
#pragma unroll
        for (int kt = 0; kt < KT; kt++)
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt += 2) {
                u32 b[4];
                load_matrices_transposed(b, beyond<DV>(v_at, nt * 8) + kt * 16 * V_ROW * 2);
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    mma(acc[mt][nt], a[mt][kt], b[0], b[1]);
                    mma(acc[mt][nt + 1], a[mt][kt], b[2], b[3]);
                }
            }
    }

    // The same with values that are not finite told apart: they are left out of the product, and counted per row among
    // the keys that it attends (1 for +inf, 2^7 for -inf, 2^14 for NaN: at most 64 keys at a time).
    template <int KT>
    __device__ void add_values_carefully(const u32 (&a)[MT][KT][4], const Elem* v_tile) {
        const int lane = threadIdx.x % 32;
        const u32 v_at = shared_address(v_tile + place<DV>(lane % 16, lane / 16 * 8));
#pragma unroll
        for (int n0 = 0; n0 < DV / 8 * ((KT + 3) / 4); n0 += 2) {
            const int nt = n0 % (DV / 8), first = n0 / (DV / 8) * 4;
            float count[MT][2][4] = {};
#pragma unroll
            for (int kt = first; kt < (first + 4 < KT ? first + 4 : KT); kt++) {
                u32 b[4], finite[4], kind[4];
                load_matrices_transposed(b, beyond<DV>(v_at, nt * 8) + kt * 16 * V_ROW * 2);
#pragma unroll
                for (int n = 0; n < 4; n++) split_finite(b[n], finite[n], kind[n]);
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    u32 attends[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        attends[e] = (a[mt][kt][e] & 0x8000u ? 0 : ONE) | (a[mt][kt][e] >> 31 ? 0 : ONE << 16);
                    }
                    mma(acc[mt][nt], a[mt][kt], finite[0], finite[1]);
                    mma(acc[mt][nt + 1], a[mt][kt], finite[2], finite[3]);
                    mma(count[mt][0], attends, kind[0], kind[1]);
                    mma(count[mt][1], attends, kind[2], kind[3]);
                }
            }
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int found = (int)count[mt][n][e];
                        const float nan = not_a_number();
                        if (found >= 1 << 14 || (found % 128 != 0 && found >= 128)) {
                            acc[mt][nt + n][e] = nan;
                        } else if (found != 0) {
                            acc[mt][nt + n][e] += found >= 128 ? negative_infinity() : -negative_infinity();
                        }
                    }
        }
    }

    static constexpr u32 ONE = STORAGE == F16 ? 0x3c00u : 0x3f80u;

    __device__ static void split_finite(u32 pair, u32& finite, u32& kind) {
        constexpr u32 EXPONENT = STORAGE == F16 ? 0x7c00u : 0x7f80u;
        constexpr u32 NEGATIVE = STORAGE == F16 ? 0x5800u : 0x4300u, NAN_KIND = STORAGE == F16 ? 0x7400u : 0x4680u;
        finite = kind = 0;
#pragma unroll
        for (int shift = 0; shift < 32; shift += 16) {
            const u32 x = pair >> shift & 0xffffu;
            if ((x & EXPONENT) != EXPONENT) {
                finite |= x << shift;
            } else {
                kind |= ((x & 0x7fffu) != EXPONENT ? NAN_KIND : x >> 15 ? NEGATIVE : ONE) << shift;
            }
        }
    }

    __device__ bool has_non_finite() const {
        u32 most = 0;
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int nt = 0; nt < DV / 8; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) most = max(most, __float_as_uint(acc[mt][nt][e]) & 0x7fffffffu);
        return most >= 0x7f800000u;
    }

    // l of the whole row.
    __device__ void reduce() {
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                l[mt][h] += __shfl_xor_sync(~0u, l[mt][h], 1);
                l[mt][h] += __shfl_xor_sync(~0u, l[mt][h], 2);
            }
    }
};

// The factor of an exponent of 2, and of m to be in natural units.
__device__ inline float exponent_factor(const Params& p) { return NATURAL ? LOG2_E : (float)(p.scale * 1.4426950408889634); }
__device__ inline float natural_max(const Params& p, float m) { return NATURAL ? m : m * (float)p.scale; }
