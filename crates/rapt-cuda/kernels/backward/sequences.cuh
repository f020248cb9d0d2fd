// Which rows a block has, of a dense tensor or of sequences that lie one after another, whose offsets only the device reads.
//
//   part      n = 0: rows before the first sequence; 1 .. sequences: those of sequence n - 1; sequences + 1: rows behind the last
//   block     of ROWS rows: those of part n begin at block begin(n) / ROWS + n. As begin(n + 1) / ROWS + 1 - begin(n) / ROWS is at least what
//             part n needs, no two parts share a block, and total / ROWS + sequences + 2 blocks are enough: the host knows that without offsets
//
// A warp looks a block's part up, 32 parts at a time. Rows of no sequence attend nothing: their gradients are zeros. Offsets that decrease or leave
// their tensor give parts that are skipped, or that have nothing to attend: nothing outside is read or written.
// Deliberately absent: a table in memory, but of tiles of keys where backward_hopper.cu takes them (key_tile.cuh).

#pragma once
#include "backward/request.cuh"

#if VARLEN
// Where the parts of the rows of one tensor begin.
struct Parts {
    const int* offsets;
    i64 step;
    int sequences, total;
    __device__ int begin(int n) const { return n == 0 ? 0 : n > sequences + 1 ? total : offsets[(n - 1) * step]; }
    // Whether each part begins in its tensor, and none before another: of the whole warp.
    __device__ bool are_in_order() const {
        bool is_any_not = false;
        for (int n = threadIdx.x % 32; n < sequences + 2; n += 32) is_any_not |= begin(n) < 0 || begin(n + 1) < begin(n) || total < begin(n + 1);
        return !__any_sync(~0u, is_any_not);
    }
    // The last part that `is_before` says yes of, where it does of none behind one of which it says no, and of the first.
    template <class IsBefore>
    __device__ int last(IsBefore is_before) const {
        const int parts = sequences + 2, lane = threadIdx.x % 32;
        int step = 1, found = 0;
        while (step * 32 < parts) step *= 32;
        for (; step > 0; step /= 32) {
            const int n = found + lane * step;
            const u32 before = __ballot_sync(~0u, n < parts && is_before(n));
            found += max(__popc(before) - 1, 0) * step;
        }
        return found;
    }
};
__device__ inline Parts parts_of_queries(const BackwardParams& b) { return {b.offsets_q, b.offsets_q_step, b.sequences, b.all.q_len}; }
__device__ inline Parts parts_of_keys(const BackwardParams& b) { return {b.offsets_kv, b.offsets_kv_step, b.sequences, b.all.kv_len}; }

// Part n as a sequence: with no queries where these do not lie in q, and no keys where these do not lie in k.
__device__ inline Sequence sequence_of(const BackwardParams& b, int n) {
    const auto lies = [](const Parts& of, int n, int& begin, int& len) {
        const int end = of.begin(n + 1);
        begin = of.begin(n);
        if (begin < 0 || end < begin || end > of.total) begin = len = 0;
        else len = end - begin;
    };
    Sequence of;
    lies(parts_of_queries(b), n, of.q0, of.queries), lies(parts_of_keys(b), n, of.k0, of.keys);
    of.number = n - 1;
    if (b.bottom_right) of.behind = (b.all.kv_len - of.keys) - (b.all.q_len - of.queries);
    return of;
}
#endif

// The sequence of a query, or of a whole batch entry.
__device__ inline Sequence sequence_of_row(const BackwardParams& b, int batch, int row) {
#if VARLEN
    const Parts parts = parts_of_queries(b);
    return sequence_of(b, parts.last([&](int n) { return parts.begin(n) <= row; }));
#else
    return Sequence(b.all, batch);
#endif
}

// Block `at` of the keys or queries of a head: its own rows are first .. first + rows of a sequence; none where rows is not above 0.
template <int ROWS, bool OF_KEYS>
struct OwnRows {
    Sequence sequence;
    int first, rows;
#if VARLEN
    __device__ OwnRows(const BackwardParams& b, int, int at) {
        const Parts parts = OF_KEYS ? parts_of_keys(b) : parts_of_queries(b);
        const auto begin = [&](int n) { return clamp(parts.begin(n), 0, parts.total) / ROWS + n; };
        const int n = parts.last([&](int n) { return begin(n) <= at; });
        sequence = sequence_of(b, n);
        // Before the first sequence and behind the last keys and queries do not belong together.
        const bool attends = n > 0 && n <= b.sequences;
        if (!attends) (OF_KEYS ? sequence.queries : sequence.keys) = 0;
        first = (at - begin(n)) * ROWS;
        rows = first < 0 ? 0 : min(ROWS, (OF_KEYS ? sequence.keys : sequence.queries) - first);
    }
#else
    __device__ OwnRows(const BackwardParams& b, int batch, int at)
        : sequence(b.all, batch), first(at * ROWS), rows(min(ROWS, (OF_KEYS ? b.all.kv_len : b.all.q_len) - first)) {}
#endif
};
