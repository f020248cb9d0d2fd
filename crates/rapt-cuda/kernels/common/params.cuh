// A request as the host passes it: rows of a task, and the keys that they see.
//
//   rows      A task is a run of heads that share K and V, its rows the queries of those heads, head by head.
//   keys      Query i sees keys clamp(i + lo_shift, 0, kv_len) .. clamp(i + hi_shift, 0, kv_len): the host's BlockRange.
//   scores    s = softcap(q.k * scale) - slope*|i + diagonal - j| + bias;  -inf where masked
//
// Strides are in elements. Deliberately absent: any choice of a kernel, and any read outside the operands.

#pragma once
#include "common/codes.cuh"
#include "common/dtype.cuh"
#include "common/fragment.cuh"

// A number n that is divided by, as the host has prepared it: x / n = x * magic >> 32 + shift for x < 2^31; magic 0: n is 1.
// A division of its own takes a block some 100 cycles, and a block begins with five.
struct Divisor {
    u32 magic, shift;
};
__device__ inline u32 divide(u32 x, const Divisor& by) { return by.magic == 0 ? x : __umulhi(x, by.magic) >> by.shift; }

// Sequences with lengths of their own, and the pages that their keys lie in: RaggedParams of params.rs.
struct Ragged {
    const int *lengths, *page_table;  // lengths null: every sequence has p.kv_len keys
    i64 lengths_stride, page_table_stride[2];
    int batch, added;                 // keys of a sequence behind those that its length says
    int num_pages, page_size;
    Divisor by_page_size;
    int log2_chunk[3], long_from[2];  // keys of a chunk: of the first where there are fewer keys than long_from[0], and so on
    int blocks;                       // that the items of decode.cu are dealt to
};

// What a launch works off of sequences that lie one after another, as varlen.cu has dealt them: an entry for each unit of a head, those of a
// sequence side by side. Of the units of all heads those of the first head come first, then those of the second, sequence by sequence.
struct __align__(16) VarlenEntry {
    int q0, q_len, k0, kv_len;                   // rows of q and of k
    int lag, log2_chunk, is_bad, first;          // first: the unit that is the first of the sequence
    int units, blocks, short_items, number;      // of a head: units, items of rows, those at the beginning that have 64 rows less
    Divisor by_units;
    u32 padding[2];
};
struct __align__(16) VarlenTable {
    int units, unused[15];  // units of one head, of all sequences
    VarlenEntry entries[1];
};

// Which weights are dropped (common/dropout.cuh), and what sums of those kept are scaled by: DroppingParams of params.rs.
struct Dropping {
    u32 seed[2], offset[2];  // low halves first
    u32 first_batch, last;   // last: the largest word at which a weight is dropped
    double scale;
    const u64* draw;  // seed and offset in memory, in place of those above; null: none
};

// Byte for byte as much of LaunchParams of params.rs as a variant reads, or its DroppedParams; the host passes the same size.
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
#if SAYS_DROPPED
    Dropping dropping;
#endif
#if CODES || RAGGED
    Codes q_codes, k_codes, v_codes;
#endif
#if RAGGED
    Ragged ragged;
#endif
};
static_assert(sizeof(Params) == PARAMS_BYTES, "params.rs and common/params.cuh disagree on Params");

// What a batch entry attends to: p.kv_len keys in chunks that the host chose; where RAGGED, as many as it has, in chunks that follow from
// them. A length that the cache does not hold counts as none, and makes the rows NaN.
struct Sequence {
#if VARLEN
    int q0, queries, k0, keys, behind, log2_chunk, number;
    bool is_bad;
    __device__ Sequence() : q0(0), queries(0), k0(0), keys(0), behind(0), log2_chunk(0), number(0), is_bad(false) {}
    __device__ Sequence(const Params&, int) : Sequence() {}
    __device__ Sequence(const VarlenEntry& of)
        : q0(of.q0), queries(of.q_len), k0(of.k0), keys(of.kv_len), behind(of.lag), log2_chunk(of.log2_chunk), number(of.number),
          is_bad(of.is_bad) {}
    __device__ int kv_len(const Params&) const { return keys; }
    __device__ int num_splits(const Params&) const { return max(1, (keys + (1 << log2_chunk) - 1) >> log2_chunk); }
    __device__ int chunk(const Params&) const { return 1 << log2_chunk; }
    __device__ int lag(const Params&) const { return behind; }
#elif RAGGED
    int keys, log2_chunk;
    bool is_bad;
    __device__ Sequence() : keys(0), log2_chunk(0), is_bad(false) {}
    __device__ Sequence(const Params& p, int batch) {
        keys = p.kv_len;
        if (p.ragged.lengths != nullptr) keys = p.ragged.lengths[batch * p.ragged.lengths_stride] + p.ragged.added;
        is_bad = (u32)keys > (u32)p.kv_len || keys < p.ragged.added;
        if (is_bad) keys = 0;
        log2_chunk = p.ragged.log2_chunk[keys < p.ragged.long_from[0] ? 0 : keys < p.ragged.long_from[1] ? 1 : 2];
    }
    __device__ int kv_len(const Params&) const { return keys; }
    __device__ int num_splits(const Params&) const { return max(1, (keys + (1 << log2_chunk) - 1) >> log2_chunk); }
    __device__ int chunk(const Params&) const { return 1 << log2_chunk; }
    // By how much the diagonal, which is at the last key, lies before that of p.kv_len keys.
    __device__ int lag(const Params& p) const { return p.kv_len - keys; }
#else
    __device__ Sequence(const Params&, int) {}
    __device__ int kv_len(const Params& p) const { return p.kv_len; }
    __device__ int num_splits(const Params& p) const { return p.num_splits; }
    __device__ int chunk(const Params& p) const { return p.chunk; }
    __device__ int lag(const Params&) const { return 0; }
#endif
    // Its queries, and the rows of q and of k that are its first.
#if VARLEN
    __device__ int q_len(const Params&) const { return queries; }
    __device__ int first_query() const { return q0; }
    __device__ int first_key() const { return k0; }
#else
    __device__ int q_len(const Params& p) const { return p.q_len; }
    __device__ int first_query() const { return 0; }
    __device__ int first_key() const { return 0; }
#endif
};

#if VARLEN
__device__ inline const VarlenTable& varlen_table(const Params& p) { return *(const VarlenTable*)p.partials; }
// Whether there are fewer units of all heads.
__device__ inline bool is_beyond(const Params& p, u32 unit) { return divide(unit, p.by_tasks) >= varlen_table(p).units; }
__device__ inline const VarlenEntry& varlen_entry(const Params& p, u32 unit) {
    return varlen_table(p).entries[divide(unit, p.by_tasks)];
}
#endif

// Where a task begins.
struct Task {
    int batch, head;
    Sequence sequence;
    __device__ Task(int batch, int head, const Sequence& sequence) : batch(batch), head(head), sequence(sequence) {}
#if VARLEN
    // Of a unit.
    __device__ Task(const Params& p, int unit) : Task(p, unit, varlen_entry(p, unit)) {}
    __device__ int rows(const Params& p) const { return VARLEN == ROWS_OF_HEAD ? sequence.queries : p.task_heads * sequence.queries; }
    __device__ int dropping_batch() const { return sequence.number; }

  private:
    __device__ Task(const Params& p, int unit, const VarlenEntry& of)
        : Task(0, divide(unit - of.first, of.by_units) * (VARLEN == ROWS_OF_HEAD ? 1 : p.task_heads), Sequence(of)) {}
#else
    __device__ Task(const Params& p, int task) : Task(p, task, divide(task, p.by_tasks)) {}
    __device__ int rows(const Params& p) const { return p.rows; }
    // What dropout numbers it by.
    __device__ int dropping_batch() const { return batch; }

  private:
    __device__ Task(const Params& p, int task, int batch) : Task(batch, task * p.task_heads - batch * p.heads, Sequence(p, batch)) {}
#endif
};

// The rows that a block takes which takes one item alone: BM of a task, late ones first, as they see the most keys. Blocks of one task run
// side by side and share its K and V in L2.
template <int BM>
struct RowBlock {
    int r0;
    Task task;
#if VARLEN
    __device__ RowBlock(const Params& p, u32 unit) : RowBlock(p, unit, varlen_entry(p, unit)) {}

  private:
    __device__ RowBlock(const Params& p, u32 unit, const VarlenEntry& of) : task(p, unit) {
        const u32 own = unit - of.first;
        r0 = (of.blocks - 1 - (int)(own - divide(own, of.by_units) * of.units)) * BM;
    }
#else
    __device__ RowBlock(const Params& p, u32 item) : RowBlock(p, item, divide(item, p.by_row_blocks)) {}

  private:
    __device__ RowBlock(const Params& p, u32 item, u32 of)
        : r0((p.row_blocks - 1 - (int)(item - of * p.row_blocks)) * BM), task(p, of) {}
#endif
};

// One query of one head.
struct Row {
    int batch, head, i;
#if VARLEN
    int at;  // in the tensor
    bool is_bad;
    __device__ Row(const Params& p, const Task& task, int r) {
        const Sequence& of = task.sequence;
        const int beyond = VARLEN == ROWS_OF_HEAD ? 0 : (u32)r / (u32)of.queries;
        batch = task.batch, head = task.head + beyond, i = r - beyond * of.queries;
        at = of.q0 + i, is_bad = of.is_bad;
    }
    __device__ int place() const { return at; }
#else
    __device__ Row(const Params& p, const Task& task, int r) {
        int beyond = divide(r, p.by_q_len);
        batch = task.batch;
        head = task.head + beyond;
        i = r - beyond * p.q_len;
    }
    __device__ int place() const { return i; }
#endif
    __device__ i64 offset(const i64 (&stride)[4]) const { return batch * stride[0] + head * stride[1] + place() * stride[2]; }
};

// The head of K and V that belongs to a task.
__device__ inline int kv_head(const Params& p, const Task& task) { return divide(task.head, p.by_group); }

__device__ inline int clamp(int x, int lo, int hi) { return min(max(x, lo), hi); }
// The keys lo..hi that query i sees, of those of a sequence and of p.kv_len.
__device__ inline int keys_lo(const Params& p, const Sequence& of, int i) { return clamp(i + p.lo_shift - of.lag(p), 0, of.kv_len(p)); }
__device__ inline int keys_hi(const Params& p, const Sequence& of, int i) { return clamp(i + p.hi_shift - of.lag(p), 0, of.kv_len(p)); }

// What rows r0..r1 of a task see together (lo..hi), and each on its own (all_lo..all_hi; empty if there is no such key).
struct Seen {
    int lo, hi, all_lo, all_hi;
    __device__ Seen(const Params& p, const Task& task, int r0, int r1) {
        Row first(p, task, r0), last(p, task, r1 - 1);
        // Rows of several heads: any query may be among them.
        int i0 = first.head == last.head ? first.i : 0;
        int i1 = first.head == last.head ? last.i : task.sequence.q_len(p) - 1;
        const Sequence& of = task.sequence;
        lo = keys_lo(p, of, i0), hi = keys_hi(p, of, i1);
        all_lo = keys_lo(p, of, i1), all_hi = keys_hi(p, of, i0);
    }
};

// Partial results of one row and split: head_dim_v sums, then m, then l.
__device__ inline Acc* partial(const Params& p, int task, int row, int split) {
    i64 at = ((i64)task * p.rows + row) * p.num_splits + split;
    return (Acc*)p.partials + at * (p.head_dim_v + 2);
}

// The two rows g, g+8 of each fragment of a warp, computed where they are needed: registers are for sums.
struct Queries {
    const Params& p;
    const Task task;
    int r0;
    __device__ Row row(int mt, int h) const {
        return Row(p, task, min(r0 + mt * 16 + (int)lane_row(threadIdx.x) + h * 8, task.rows(p) - 1));
    }
};
