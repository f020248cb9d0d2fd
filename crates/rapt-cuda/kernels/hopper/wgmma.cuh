// wgmma of compute capability 9.0: products of 64 rows by the four warps of a group.
//
//   wgmma     D (64 x N, f32, registers of four warps) += A (64 x 16) * B (16 x N)
//   D         element e of tile nt: row = 16*warp + lane/4 + 8*(e/2), column = 8*nt + 2*(lane%4) + e%2
//   A         in registers as mma.sync's; or a K-major tile      B       a K-major tile (keys: QK) or an MN-major one (PV)
//   tile      boxes of 64 columns; a row of a box is 128 bytes, its 16-byte chunk c lies at c ^ (row % 8); 8 rows are 1024
//             bytes, which is also what a box is aligned to
//
// N of a product is a multiple of 16 up to 256 and known when this is compiled, which is why operand lists are macros.
// Source: PTX ISA, "wgmma.mma_async". tests/fragments.rs compares the maps with rapt-layout's atlas.

#pragma once
#include "common/fragment.cuh"
#include "common/ptx.cuh"

// Registers and shared memory that wgmma reads from here on hold what was written to them before.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// The high word of a tile's descriptor: 8 rows are 1024 bytes, 128-byte swizzle; the low word is its address / 16, and above
// that the distance of boxes / 16, which only an MN-major tile has.
constexpr u32 TILE_HIGH = 1024 / 16 | 1u << 30;
__device__ inline u32 tile_low(const void* tile, u32 box_bytes) {
    return (shared_address(tile) & 0x3ffff) >> 4 | (box_bytes >> 4) << 16;
}

#define PASTE(a, b) a##b
#define EXPAND(a, b) PASTE(a, b)
#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)

// Operands of an accumulator, from %6 on in both products, and their constraints, 16 columns more a line.
#define REGISTERS_16 "%6,%7,%8,%9,%10,%11,%12,%13"
#define REGISTERS_32 REGISTERS_16 "," "%14,%15,%16,%17,%18,%19,%20,%21"
#define REGISTERS_48 REGISTERS_32 "," "%22,%23,%24,%25,%26,%27,%28,%29"
#define REGISTERS_64 REGISTERS_48 "," "%30,%31,%32,%33,%34,%35,%36,%37"
#define REGISTERS_80 REGISTERS_64 "," "%38,%39,%40,%41,%42,%43,%44,%45"
#define REGISTERS_96 REGISTERS_80 "," "%46,%47,%48,%49,%50,%51,%52,%53"
#define REGISTERS_112 REGISTERS_96 "," "%54,%55,%56,%57,%58,%59,%60,%61"
#define REGISTERS_128 REGISTERS_112 "," "%62,%63,%64,%65,%66,%67,%68,%69"
#define REGISTERS_144 REGISTERS_128 "," "%70,%71,%72,%73,%74,%75,%76,%77"
#define REGISTERS_160 REGISTERS_144 "," "%78,%79,%80,%81,%82,%83,%84,%85"
#define REGISTERS_176 REGISTERS_160 "," "%86,%87,%88,%89,%90,%91,%92,%93"
#define REGISTERS_192 REGISTERS_176 "," "%94,%95,%96,%97,%98,%99,%100,%101"
#define REGISTERS_208 REGISTERS_192 "," "%102,%103,%104,%105,%106,%107,%108,%109"
#define REGISTERS_224 REGISTERS_208 "," "%110,%111,%112,%113,%114,%115,%116,%117"
#define REGISTERS_240 REGISTERS_224 "," "%118,%119,%120,%121,%122,%123,%124,%125"
#define REGISTERS_256 REGISTERS_240 "," "%126,%127,%128,%129,%130,%131,%132,%133"
#define TILE_OF(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SUMS_16(d) TILE_OF(d, 0), TILE_OF(d, 1)
#define SUMS_32(d) SUMS_16(d), TILE_OF(d, 2), TILE_OF(d, 3)
#define SUMS_48(d) SUMS_32(d), TILE_OF(d, 4), TILE_OF(d, 5)
#define SUMS_64(d) SUMS_48(d), TILE_OF(d, 6), TILE_OF(d, 7)
#define SUMS_80(d) SUMS_64(d), TILE_OF(d, 8), TILE_OF(d, 9)
#define SUMS_96(d) SUMS_80(d), TILE_OF(d, 10), TILE_OF(d, 11)
#define SUMS_112(d) SUMS_96(d), TILE_OF(d, 12), TILE_OF(d, 13)
#define SUMS_128(d) SUMS_112(d), TILE_OF(d, 14), TILE_OF(d, 15)
#define SUMS_144(d) SUMS_128(d), TILE_OF(d, 16), TILE_OF(d, 17)
#define SUMS_160(d) SUMS_144(d), TILE_OF(d, 18), TILE_OF(d, 19)
#define SUMS_176(d) SUMS_160(d), TILE_OF(d, 20), TILE_OF(d, 21)
#define SUMS_192(d) SUMS_176(d), TILE_OF(d, 22), TILE_OF(d, 23)
#define SUMS_208(d) SUMS_192(d), TILE_OF(d, 24), TILE_OF(d, 25)
#define SUMS_224(d) SUMS_208(d), TILE_OF(d, 26), TILE_OF(d, 27)
#define SUMS_240(d) SUMS_224(d), TILE_OF(d, 28), TILE_OF(d, 29)
#define SUMS_256(d) SUMS_240(d), TILE_OF(d, 30), TILE_OF(d, 31)
#define REGISTERS_OF(n) EXPAND(REGISTERS_, n)
#define SUMS_OF(n, d) EXPAND(SUMS_, n)(d)

// s (64 x N) = or += 16 columns of a tile of queries times 16 columns of a tile of keys.
#define DEFINE_WGMMA_QK(NAME, N) \
    __device__ inline void NAME(Accumulator<N / 8>& s, u32 queries, u32 keys, int add) {                                 \
        u32 high = TILE_HIGH, high_again = TILE_HIGH, none = 0; /* %5 */                                                  \
        asm volatile(                                                                                                     \
            "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %4, 0;\nmov.b64 a, {%0, %1};\nmov.b64 b, {%2, %3};\n"  \
            "wgmma.mma_async.sync.aligned.m64n" TEXT_OF(N) "k16.f32." MMA_TYPE "." MMA_TYPE                               \
            " {" REGISTERS_OF(N) "}, a, b, add, 1, 1, 0, 0;\n}"                                                           \
            : "+r"(queries), "+r"(high), "+r"(keys), "+r"(high_again), "+r"(add), "+r"(none), SUMS_OF(N, s)               \
        );                                                                                                                \
    }

// acc (64 x N) = or += 16 columns of p, in registers, times 16 rows of a tile of values.
#define DEFINE_WGMMA_PV(NAME, N) \
    __device__ inline void NAME(Accumulator<N / 8>& acc_o, u32 (&p)[4], u32 values, int add) {                           \
        u64 tile = (u64)TILE_HIGH << 32 | values;                                                                         \
        asm volatile(                                                                                                     \
            "{\n.reg .pred add;\nsetp.ne.b32 add, %5, 0;\n"                                                               \
            "wgmma.mma_async.sync.aligned.m64n" TEXT_OF(N) "k16.f32." MMA_TYPE "." MMA_TYPE                               \
            " {" REGISTERS_OF(N) "}, {%0, %1, %2, %3}, %4, add, 1, 1, 1;\n}"                                                   \
            : "+r"(p[0]), "+r"(p[1]), "+r"(p[2]), "+r"(p[3]), "+l"(tile), "+r"(add), SUMS_OF(N, acc_o)                    \
        );                                                                                                                \
    }

// x (64 x N) = or += 16 columns of A times 16 rows of B. A is K-major (0), or MN-major (1) with 64 columns of which 16 rows are taken; B is MN-major, or
// K-major with N rows of which 16 columns are taken.
#define DEFINE_WGMMA(NAME, N, A_MAJOR, B_MAJOR)                                                                              \
    __device__ inline void NAME(Accumulator<N / 8>& x, u32 rows, u32 others, int add) {                                  \
        u32 high = TILE_HIGH, high_again = TILE_HIGH, none = 0; /* %5 */                                                  \
        asm volatile(                                                                                                     \
            "{\n.reg .pred add;\n.reg .b64 a, b;\nsetp.ne.b32 add, %4, 0;\nmov.b64 a, {%0, %1};\nmov.b64 b, {%2, %3};\n"  \
            "wgmma.mma_async.sync.aligned.m64n" TEXT_OF(N) "k16.f32." MMA_TYPE "." MMA_TYPE                               \
            " {" REGISTERS_OF(N) "}, a, b, add, 1, 1, " #A_MAJOR ", " #B_MAJOR ";\n}"                                    \
            : "+r"(rows), "+r"(high), "+r"(others), "+r"(high_again), "+r"(add), "+r"(none), SUMS_OF(N, x)                \
        );                                                                                                                \
    }
#define DEFINE_WGMMA_KM(NAME, N) DEFINE_WGMMA(NAME, N, 0, 1)
#define DEFINE_WGMMA_TT(NAME, N) DEFINE_WGMMA(NAME, N, 1, 1)
#define DEFINE_WGMMA_TK(NAME, N) DEFINE_WGMMA(NAME, N, 1, 0)

// Waits until at most PENDING groups of products are under way; these sums may be read then.
template <int PENDING, int TILES>
__device__ inline void wgmma_wait(Accumulator<TILES>& sums) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int nt = 0; nt < TILES; nt++) {
        asm volatile("" : "+f"(sums[nt][0]), "+f"(sums[nt][1]), "+f"(sums[nt][2]), "+f"(sums[nt][3])::"memory");
    }
}
