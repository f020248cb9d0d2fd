// One row of a deviation: what is added up of its keys, and what follows of it. rapt-reference (quantization.rs) has the equations, and
// kernels/decode/deviation.rs of rapt-cpu computes the same.
//
//   of a key   p its weight, a and b the errors of key and value over their largest, r how far the value may be from the mean, v its length
//   sums       Σp Σp·a Σp·a·r Σp·b Σp·v                  rescaled as weights are
//              Σ(p·b)² Σw Σw·v² Σ(p·v)²   w = (p·a)²     rescaled by the square
//
// Sums of a block of keys are float32, of blocks float64. Deliberately absent: which threads have a row.

#pragma once
#include "common/params.cuh"

// What was measured of K or V when it was quantized, as rapt_quant::Measured has it: [matrices][rows] of `error`, then of `spread`,
// [matrices][columns] of `mean`, then of `share`, [matrices] of `bias`, then of `coherence`. Null where it is not quantized.
struct Errors {
    const float* numbers;
    i64 matrices;
    int rows, columns;

    __device__ const float* error(i64 matrix) const { return numbers + matrix * rows; }
    __device__ const float* spread(i64 matrix) const { return numbers + (matrices + matrix) * rows; }
    __device__ const float* mean(i64 matrix) const { return numbers + 2 * matrices * rows + matrix * columns; }
    __device__ const float* share(i64 matrix) const { return numbers + 2 * matrices * rows + (matrices + matrix) * columns; }
    __device__ float bias(i64 matrix) const { return numbers[2 * matrices * (rows + columns) + matrix]; }
    __device__ float coherence(i64 matrix) const { return numbers[2 * matrices * (rows + columns) + matrices + matrix]; }
};

// What is known of a row, in squares but for epsilon: `RowDeviation` of rapt-cpu. Of a head: the largest epsilon, sums of squares.
struct Deviation {
    double epsilon, estimate, before, after, norm;
};

// Byte for byte DeviationParams of deviation.rs.
struct DeviationParams {
    Errors k, v;
    Deviation* rows;       // [batch, heads, q_len], where keys are not split
    u8* partials;          // the same of PartialRow, where they are
    Deviation* heads;      // [batch, heads]
    double weight_rounding;  // of what weights are rounded to by the kernel that is judged, relative to each
    i64 partial_bytes;
    Params all;
};
static_assert(sizeof(DeviationParams) == DEVIATION_BYTES, "deviation.rs and deviation/row.cuh disagree on DeviationParams");

enum Sum { P, PA, PAR, PB, PV, SQUARES, PB2 = SQUARES, W, WV, PV2, SUMS };
enum Most { A, B, R, MOST };

// Of some keys of a row, with columns o, then g, behind it: Σp·v and Σw·v by columns.
struct PartialRow {
    double sums[SUMS];
    float most[MOST], row_max;
    __device__ float* columns() { return (float*)(this + 1); }
};
__device__ inline PartialRow& partial_row(const DeviationParams& of, i64 row, int split) {
    return *(PartialRow*)(of.partials + (row * of.all.num_splits + split) * of.partial_bytes);
}
__device__ inline i64 row_index(const Params& p, const Row& row) { return ((i64)row.batch * p.heads + row.head) * p.q_len + row.i; }
__device__ inline i64 matrix_index(const Params& p, int batch, int head) { return (i64)batch * divide(p.heads, p.by_group) + divide(head, p.by_group); }

// The larger, or NaN.
__device__ inline float larger(float x, float most) { return x > most || x != x ? x : most; }
__device__ inline double larger(double x, double most) { return x > most || x != x ? x : most; }
__device__ inline double infinity() { return __uint_as_float(0x7f800000u); }

// The largest finite error of a matrix, 1 where there is none above 0: each thread's part of it.
__device__ inline float largest_of(const Errors& of, i64 matrix, int thread, int threads) {
    float most = 0;
    if (of.numbers == nullptr) return most;
    const float* error = of.error(matrix);
    for (int j = thread; j < of.rows; j += threads) {
        if (is_finite(error[j])) most = fmaxf(most, error[j]);
    }
    return most;
}

// What sums are multiplied with once all keys were seen; 0 where there was none.
__device__ inline double row_factor(const Params& p, int head, double sum, float row_max) {
    if (sum == 0) return 0;
    if (p.sinks == nullptr) return 1 / sum;
    const double m = row_max, sink = load_as(p.sinks, p.sinks_dtype, head * p.sinks_stride);
    const double top = sink > m ? sink : m, weight = exp(m - top);
    return weight / (sum * weight + exp(sink - top));
}

// What is added up over the columns of a row: of sums o and g, of o times the row's factor and the mean c, of q and its shares.
struct ColumnSums {
    double along, squares, from_mean, mean;  // o·g  o·o  |o·factor − c|²  |c|²
    double q, q_shares;                      // |q|²  Σq²·share
    __device__ ColumnSums() : along(0), squares(0), from_mean(0), mean(0), q(0), q_shares(0) {}
    __device__ void add(float o, float g, double factor, float c) {
        const double away = o * factor - c;
        along += (double)o * g, squares += (double)o * o, from_mean += away * away, mean += (double)c * c;
    }
    __device__ void add_query(float x, float share) { q += (double)x * x, q_shares += (double)x * x * share; }
    template <int LANES>
    __device__ void over_lanes() {
        along = sum_of<LANES>(along), squares = sum_of<LANES>(squares), from_mean = sum_of<LANES>(from_mean);
        mean = sum_of<LANES>(mean), q = sum_of<LANES>(q), q_shares = sum_of<LANES>(q_shares);
    }

  private:
    template <int LANES>
    __device__ static double sum_of(double x) {
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        return x;
    }
};

// A row whose keys have all been seen: its sums, relative to the largest errors of K and V.
struct SeenRow {
    i64 matrix;
    double factor;
    const double (&seen)[SUMS];
    const float (&most)[MOST];
    const float (&largest)[2];
};
__device__ inline Deviation deviation_of(const DeviationParams& of, const SeenRow& row, const ColumnSums& columns) {
    const auto& [matrix, factor, seen, most, largest] = row;
    if (factor == 0) return {0, 0, 0, 0, 0};
    const double most_a = largest[0], most_b = largest[1];
    double sums[SUMS];
#pragma unroll
    for (int n = 0; n < SUMS; n++) sums[n] = seen[n] * (n < SQUARES ? factor : factor * factor);
    const double along = columns.along * factor * factor * factor, norm = columns.squares * factor * factor;
    // What float32 may have lost of the difference is added.
    const double apart = fmax(sums[WV] - 2 * along + norm * sums[W], 0) + 1e-6 * (sums[WV] + norm * sums[W]);
    const double scale = fabs(of.all.scale), slope = scale * sqrt(columns.q);
    const double a = slope * most_a * sums[PA], ar = slope * most_a * sums[PAR], b = most_b * sums[PB];
    const double epsilon = slope * most_a * most[A];
    const double phi = epsilon == 0 ? 1 : expm1(epsilon) / epsilon, left = 1 - phi * a;
    const double rounded = of.weight_rounding * sums[PV];
    double after = infinity();
    if (left > 0 || left != left) after = b + phi * (ar + a * (sqrt(columns.from_mean) + b)) / left + rounded;
    const double most_r = of.all.sinks == nullptr ? most[R] : larger((double)most[R], sqrt(columns.mean));
    const double before = 2 * tanh(epsilon / 2) * most_r + most_b * most[B] + rounded;
    double estimate = of.weight_rounding * of.weight_rounding / 3 * sums[PV2];
    if (of.k.numbers != nullptr) {
        estimate += scale * scale * columns.q_shares * of.k.coherence(matrix) * apart * most_a * most_a;
    }
    if (of.v.numbers != nullptr) {
        const double bias = of.v.bias(matrix) * sums[P];
        estimate += of.v.coherence(matrix) * sums[PB2] * most_b * most_b + bias * bias;
    }
    return {epsilon, estimate, before * before, after * after, norm};
}
