// The device code's maps, compiled for the host: which thread holds which element, and where elements stand in shared memory.
// Prints one of them, named by the first argument, as numbers; tests/fragments.rs compares them with rapt-layout's atlas.

#include <cmath>
#include <cstdio>
#include <cstring>

#include "common/mask_bits.cuh"
#include "common/swizzle.cuh"
#include "common/tile.cuh"
#include "decode/codes.cuh"
#include "mma/numbers.cuh"

namespace {

constexpr int KEYS = 32, ROWS = 16;

void print(std::initializer_list<i64> numbers) {
    for (i64 number : numbers) std::printf("%lld ", number);
    std::putchar('\n');
}
void print_events() {
    for (int n = 0; n < event_count; n++) {
        print({threadIdx.x, events[n].what, (i64)events[n].a, (i64)events[n].b, (i64)events[n].c});
    }
}
void begin(int lane) { threadIdx.x = lane, event_count = ldmatrix_count = 0; }

// thread, its row of the warp's 16, its column of each tile
void accumulator() {
    for (u32 thread = 0; thread < 128; thread++) print({thread, lane_row(thread), lane_column(thread)});
}
// nt, r, tile, word
void operand() {
    for (int nt = 0; nt < 16; nt++)
        for (int r = 0; r < 2; r++) print({nt, r, operand_tile(nt), operand_word(nt, r)});
}
// row, column, byte
void box() {
    for (int r = 0; r < 64; r++)
        for (int c = 0; c < 64; c++) print({r, c, swizzle_128b(r, c)});
}
// lane, nt, first box, byte
void stmatrix() {
    for (int lane = 0; lane < 32; lane++)
        for (int nt = 0; nt < 32; nt += 2)
            for (int first = 0; first <= nt / 8; first++) {
                print({lane, nt, first, stmatrix_unit(stmatrix_row(lane), lane, nt, first)});
            }
}
// warp, lane, byte
void turned() {
    for (int warp = 0; warp < 4; warp++)
        for (int lane = 0; lane < 32; lane++) print({warp, lane, stmatrix_turned(warp, lane)});
}
// lane, i, row, column, the lane that has the row's address
void out() {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) print({lane, i, out_row(lane, i), out_column(lane), out_owner(lane, i)});
}
// nt, e, bit
void bits() {
    for (int nt = 0; nt < 16; nt++)
        for (int e = 0; e < 2; e++) print({nt, e, key_bit(nt, e)});
}
// n, how many keys come before it
void before() {
    for (int n = 0; n < 200; n++) print({n, keys_before(n)});
}
// units of a box, row, unit, byte, the byte by way of the row's first two units
template <int UNITS>
void biases_of() {
    for (int r = 0; r < 128; r++)
        for (int u = 0; u < 2 * UNITS; u++) {
            const u64 first = bias_unit<UNITS, 128>(r, u % 2) * 16;
            const i64 beyond = (first ^ bias_unit_turn<UNITS>(u & ~1)) + bias_unit_step<UNITS, 128>(u & ~1);
            print({UNITS, r, u, bias_unit<UNITS, 128>(r, u) * 16, beyond});
        }
}
void biases() { biases_of<2>(), biases_of<4>(), biases_of<8>(); }
// For each of some rows of booleans: 128 bytes of keys, then 128 bits: lane by lane of a quad, tile by tile, e by e
void seen() {
    u32 random = 1;
    for (int n = 0; n < 16; n++) {
        alignas(16) u8 keys[128], row[16];
        for (u8& key : keys) random = random * 1664525u + 1013904223u, key = random >> 31 ? random >> 16 | 1 : 0;
        for (int pair = 0; pair < 4; pair++) {
            uint4 x[2];
            std::memcpy(x, keys + 32 * pair, sizeof(x));
            for (uint4& four : x) four = {ones(four.x), ones(four.y), ones(four.z), ones(four.w)};
            store_seen_keys(row, pair, seen_keys(x[0], x[1]));
        }
        for (u8 key : keys) std::printf("%d ", key);
        for (int lane = 0; lane < 4; lane++)
            for (int nt = 0; nt < 16; nt++)
                for (int e = 0; e < 2; e++) {
                    u32 word;
                    std::memcpy(&word, row + lane * 4, sizeof(word));
                    std::printf("%d ", bits_of_tile(word, nt) >> key_bit(nt % 8, e) & 1);
                }
        std::putchar('\n');
    }
}
// tiles in a row of them, row, column, place of a factor that lies swizzled
void swizzled() {
    for (u32 tiles : {1, 2, 5})
        for (u32 r = 0; r < 300; r++)
            for (u32 c = 0; c < 4 * tiles; c++) print({tiles, r, c, swizzled_row(r, tiles) + along_swizzled_row(c)});
}
// row, column, byte of an element of q or k in its tile
void tile() {
    for (int r = 0; r < KEYS; r++)
        for (int c = 0; c < D; c++) print({r, c, 2 * (place<D>(r, c & ~7) + c % 8)});
}
// What each lane of a warp does in q.k: lane and event; q's tile begins at byte 0, k's behind its 16 rows
void multiply() {
    static Elem tiles[(ROWS + KEYS) * K_ROW];
    for (int lane = 0; lane < 32; lane++) {
        Accumulator<KEYS / 8> s[1];
        shared_base = tiles, sums_base = &s[0][0][0];
        begin(lane);
        multiply_keys<1, KEYS / 8>(s, tiles, tiles + ROWS * K_ROW);
        print_events();
    }
}
// How each lane loads a tile of whole rows that are 1000 elements apart: lane and event
void load() {
    static Elem tile[KEYS * K_ROW], source[1];
    shared_base = tile;
    for (int lane = 0; lane < 32; lane++) {
        begin(lane);
        load_even_tile<KEYS, D, 32>(tile, {source, 1, 1000, KEYS, D}, lane);
        for (int n = 0; n < event_count; n++) events[n].b -= (u64)source;
        print_events();
    }
}

// A tile of 16 rows of pseudo-random codes under its places, and code `column` of row `row`.
template <class Rows, int KIND, int DIM>
struct CodeTile {
    alignas(16) u8 bytes[16 * Rows::PITCH] = {};
    u8 code(int row, int column) const {
        const u32 x = (u32)(row * 1021 + column * 37 + 11) * 2654435761u >> 16;
        if (is_packed(KIND)) return x & 0xf;
        const bool odd = (KIND == E4M3FN && (x & 0x7f) == 0x7f) || (KIND == E5M2 && (x & 0x7c) == 0x7c);
        return odd ? 1 : x & 0xff;
    }
    CodeTile() {
        for (int r = 0; r < 16; r++)
            for (int c = 0; c < DIM; c++) {
                if (is_packed(KIND)) bytes[Rows::place(r, c / 2)] |= code(r, c) << c % 2 * 4;
                else bytes[Rows::place(r, c)] = code(r, c);
            }
    }
};
// Half `e` of the pair that is number `pair` of a word, less its bias and in units of codes, as bits of a float.
template <class Operand, bool HALF>
i64 number_of(u32 x, int pair, int e) {
    const auto of = [&](u32 both) { return HALF ? float_of_f16(both >> e * 16) : float_of_bits(both >> e * 16 << 16); };
    const double bias = Operand::BIASED ? of(Operand::bias(pair)) : 0, widened = Operand::WIDENED && pair % 2 == 1 ? 16 : 1;
    return bits_of_float((float)std::ldexp((of(x) - bias) / widened, Operand::EXPONENT));
}
// 0 for keys and 1 for values, what is multiplied (1: float16, 2: without a bias), kind, dim, codes of a run, row, column, code, its number
template <int KIND, int DIM, int RUN, bool HALF, bool CENTERED>
void keys_of() {
    using Rows = KeyRows<KIND, DIM, RUN>;
    using Operand = CodeOperand<KIND, HALF, CENTERED>;
    const CodeTile<Rows, KIND, DIM> tile;
    for (int lane = 0; lane < 32; lane++)
        for (int at = 0; at < 2 * Rows::RUNS; at++) {
            const int h = at % 2, run = at / 2, row = h * 8 + lane / 4;
            alignas(16) u32 words[Rows::WORDS];
            Rows::load(words, tile.bytes + Rows::place(lane / 4, (4 * run + lane % 4) * Rows::RUN_BYTES) + h * 8 * Rows::PITCH);
            for (int step = 0; step < Rows::STEPS; step++) {
                u32 pairs[Operand::PAIRS];
                Operand(0).template split<true, true>(words[step / Rows::WORD_STEPS], pairs);
                for (int e = 0; e < 4; e++) {
                    const int column = Rows::q_column(run, step, lane % 4, e, Operand::CONVERTED);
                    const int pair = step % Rows::WORD_STEPS * 2 + e / 2;
                    const i64 number = number_of<Operand, HALF>(pairs[pair], pair, e % 2);
                    print({0, HALF + 2 * CENTERED, KIND, DIM, RUN, row, column, tile.code(row, column), number});
                }
            }
        }
}
template <int KIND, int DIM, bool HALF, bool CENTERED>
void values_of() {
    using Rows = ValueRows<KIND, DIM>;
    using Operand = CodeOperand<KIND, HALF, CENTERED>;
    const CodeTile<Rows, KIND, DIM> tile;
    for (int lane = 0; lane < 32; lane++)
        for (int at = 0; at < 2 * Rows::UNITS; at++) {
            const int h = at % 2, unit = at / 2, g = lane / 4;
            u32 word = 0;
            for (int n = 0; n < 2; n++) {
                const int row = h * 8 + lane % 4 * 2 + n;
                u16 of_row;
                std::memcpy(&of_row, tile.bytes + row * Rows::PITCH + ((unit * 16) ^ Rows::turn(row)) + g * 2, 2);
                word |= (u32)of_row << n * 16;
            }
            u32 pairs[Operand::PAIRS];
            Operand(0).template split<false, true>(word, pairs);
            for (int n = 0; n < Operand::PAIRS * 2; n++) {
                const int pair = n / 2, row = h * 8 + lane % 4 * 2 + n % 2;
                const int column = Rows::column(unit * Rows::UNIT_TILES + pair / 2, pair % 2, g);
                if (column >= DIM) continue;
                const i64 number = number_of<Operand, HALF>(pairs[pair], pair, n % 2);
                print({1, HALF + 2 * CENTERED, KIND, DIM, 0, row, column, tile.code(row, column), number});
            }
        }
}
template <int KIND, bool HALF, bool CENTERED>
void codes_of() {
    if constexpr (is_packed(KIND)) keys_of<KIND, 128, 32, HALF, CENTERED>();
    keys_of<KIND, 128, 16, HALF, CENTERED>(), keys_of<KIND, 96, 8, HALF, CENTERED>();
    keys_of<KIND, 80, 4, HALF, CENTERED>(), keys_of<KIND, 256, 16, HALF, CENTERED>();
    values_of<KIND, 128, HALF, CENTERED>(), values_of<KIND, 64, HALF, CENTERED>(), values_of<KIND, 96, HALF, CENTERED>();
    values_of<KIND, 80, HALF, CENTERED>(), values_of<KIND, 16, HALF, CENTERED>();
}
template <int KIND>
void codes_of_kind() {
    codes_of<KIND, false, false>(), codes_of<KIND, true, false>(), codes_of<KIND, true, true>();
}
void codes() {
    codes_of_kind<INT8>(), codes_of_kind<UINT8>(), codes_of_kind<INT4>();
    codes_of_kind<E4M3FN>(), codes_of_kind<E5M2>(), codes_of_kind<E2M1>();
}

// Kind, whether as float16, zero point, column of eight, code, its number
template <int KIND, bool HALF>
void numbers_of() {
    for (u32 zero_point : {0, 1, 127, 128, 201, 255}) {
        if (KIND != UINT8 && zero_point > 0) break;
        for (u32 code = 0; code < (is_packed(KIND) ? 16 : 256); code++) {
            // Eight codes in a row, this one among the others.
            alignas(8) u8 bytes[8] = {};
            u8 codes[8];
            for (u32 n = 0; n < 8; n++) {
                codes[n] = is_packed(KIND) ? (code + n * 5) & 0xf : code + n * 37;
                if (is_packed(KIND)) bytes[n / 2] |= codes[n] << n % 2 * 4;
                else bytes[n] = codes[n];
            }
            u32 pairs[4];
            u32 words[words_of(KIND)];
            std::memcpy(words, bytes, sizeof(words));
            pairs_of_codes<KIND, HALF>(pairs, words, zero_point);
            for (int n = 0; n < 8; n++) {
                const u32 half = pairs[n / 2] >> n % 2 * 16 & 0xffff;
                const float number = HALF ? f16_to_float(half) : float_of_bits(half << 16);
                print({KIND, HALF, zero_point, n, codes[n], bits_of_float(std::isnan(number) ? NAN : number)});
            }
        }
    }
}
template <int KIND>
void numbers_of_kind() {
    numbers_of<KIND, false>(), numbers_of<KIND, true>();
}
void numbers() {
    numbers_of_kind<INT8>(), numbers_of_kind<UINT8>(), numbers_of_kind<INT4>();
    numbers_of_kind<E4M3FN>(), numbers_of_kind<E5M2>(), numbers_of_kind<E2M1>();
}

}  // namespace

int main(int count, char** arguments) {
    const struct {
        const char* name;
        void (*print)();
    } maps[] = {{"accumulator", accumulator}, {"operand", operand}, {"box", box},       {"stmatrix", stmatrix}, {"turned", turned}, {"out", out},
                {"bits", bits},               {"before", before},   {"biases", biases}, {"seen", seen},         {"tile", tile},
                {"multiply", multiply},       {"load", load},     {"codes", codes}, {"numbers", numbers}, {"swizzled", swizzled}};
    for (const auto& map : maps) {
        if (count == 2 && std::strcmp(map.name, arguments[1]) == 0) return map.print(), 0;
    }
    return 2;
}
