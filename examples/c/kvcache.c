/* Decoding with a cache in pages: prompts of different lengths are read one by one, then all sequences take a step at a time.
 * Each call appends its keys and values to the pages and attends to all of them. The prompts once more, as one call. */
#include "formula.h"

#include <rapt.h>
#include <string.h>

enum { BATCH = 3, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 32, PAGE_SIZE = 4, ENTRIES = 8, NUM_PAGES = BATCH * ENTRIES, STEPS = 9 };
enum { Q_ROW = HEADS * HEAD_DIM, KV_ROW = KV_HEADS * HEAD_DIM, MOST = PAGE_SIZE * ENTRIES, TOTAL = 5 + 12 + 1 };

static const int prompt[BATCH] = {5, 12, 1};

/* What a model would compute: the queries, keys and values of every position. */
static float q[BATCH][MOST][Q_ROW], k[BATCH][MOST][KV_ROW], v[BATCH][MOST][KV_ROW];

/* The cache: pages, and the next one that is free. */
static float k_pages[NUM_PAGES * PAGE_SIZE * KV_ROW], v_pages[NUM_PAGES * PAGE_SIZE * KV_ROW];
static int32_t page_table[BATCH][ENTRIES], lengths[BATCH], next_page;

static rapt_engine *engine;

static void check(rapt_error error) {
  if (error != RAPT_OK) {
    fprintf(stderr, "%s: %s\n", rapt_error_name(error), rapt_last_error());
    exit(1);
  }
}

typedef struct {
  rapt_tensor tensor;
  int64_t shape[4], strides[4];
} held;

/* A row-major tensor [n0, n1, n2, n3], or less dimensions. */
static const rapt_tensor *hold(held *of, void *data, int32_t dtype, int32_t ndim, int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
  const int64_t shape[4] = {n0, n1, n2, n3};
  const rapt_tensor made = {.data = data, .dtype = dtype, .device = RAPT_DEVICE_CPU, .ndim = ndim, .shape = of->shape, .strides = of->strides};
  memcpy(of->shape, shape, sizeof shape);
  check(rapt_contiguous_strides(ndim, of->shape, of->strides));
  of->tensor = made;
  return &of->tensor;
}

/* Room for `count` more keys of a sequence: pages are taken as they are needed. */
static void reserve(int sequence, int count) {
  const int held_pages = (lengths[sequence] + PAGE_SIZE - 1) / PAGE_SIZE;
  for (int entry = held_pages; entry * PAGE_SIZE < lengths[sequence] + count; entry++)
    page_table[sequence][entry] = next_page++;
}

/* `count` positions of `batch` sequences from `first` on: their keys go into the cache, their results to `out`. */
static void attend(int first, int batch, int count, float *new_q, float *new_k, float *new_v, float *out) {
  held tensors[8];
  for (int sequence = first; sequence < first + batch; sequence++)
    reserve(sequence, count);
  const rapt_kvcache cache = {
      .size = sizeof cache,
      .k_cache = hold(&tensors[0], k_pages, RAPT_DTYPE_F32, 4, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM),
      .v_cache = hold(&tensors[1], v_pages, RAPT_DTYPE_F32, 4, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM),
      .cache_seqlens = hold(&tensors[2], &lengths[first], RAPT_DTYPE_I32, 1, batch, 0, 0, 0),
      .page_table = hold(&tensors[3], page_table[first], RAPT_DTYPE_I32, 2, batch, ENTRIES, 0, 0),
      .k = hold(&tensors[4], new_k, RAPT_DTYPE_F32, 4, batch, count, KV_HEADS, HEAD_DIM),
      .v = hold(&tensors[5], new_v, RAPT_DTYPE_F32, 4, batch, count, KV_HEADS, HEAD_DIM)};
  const rapt_options options = {.size = sizeof options, .causal = RAPT_CAUSAL_BOTTOM_RIGHT};
  check(rapt_attention_with_kvcache(engine, hold(&tensors[6], new_q, RAPT_DTYPE_F32, 4, batch, count, HEADS, HEAD_DIM), &cache,
      hold(&tensors[7], out, RAPT_DTYPE_F32, 4, batch, count, HEADS, HEAD_DIM), &options));
  /* The lengths are the caller's. */
  for (int sequence = first; sequence < first + batch; sequence++)
    lengths[sequence] += count;
}

static int before;
static int causal(int i, int j) { return j <= before + i; }

/* Results of `count` positions from `begin` on, against the formula. */
static void expect_formula(int sequence, int begin, int count, const float *out) {
  const formula_sizes sizes = {count, begin + count, HEAD_DIM, Q_ROW, KV_ROW, KV_ROW, HEAD_DIM, causal};
  before = begin;
  for (int head = 0; head < HEADS; head++) {
    double expected[MOST * HEAD_DIM], score[MOST];
    const int of_kv = head / (HEADS / KV_HEADS) * HEAD_DIM;
    formula(&sizes, &q[sequence][begin][head * HEAD_DIM], k[sequence][0] + of_kv, v[sequence][0] + of_kv, expected, score);
    for (int i = 0; i < count; i++)
      for (int d = 0; d < HEAD_DIM; d++)
        expect_near("out", out[i * Q_ROW + head * HEAD_DIM + d], expected[i * HEAD_DIM + d]);
  }
}

int main(void) {
  static float prompts[TOTAL * Q_ROW], together[TOTAL * Q_ROW], out[BATCH * Q_ROW];
  static float all_q[TOTAL * Q_ROW], all_k[TOTAL * KV_ROW], all_v[TOTAL * KV_ROW];
  fill(q[0][0], BATCH * MOST * Q_ROW, 1);
  fill(k[0][0], BATCH * MOST * KV_ROW, 2);
  fill(v[0][0], BATCH * MOST * KV_ROW, 3);
  engine = rapt_engine_create(2);
  if (!engine) {
    fprintf(stderr, "rapt_engine_create: %s\n", rapt_last_error());
    return 1;
  }

  /* Each prompt, into its own pages. */
  int32_t begins[BATCH + 1] = {0};
  for (int b = 0; b < BATCH; b++) {
    const int begin = begins[b];
    attend(b, 1, prompt[b], q[b][0], k[b][0], v[b][0], prompts + begin * Q_ROW);
    expect_formula(b, 0, prompt[b], prompts + begin * Q_ROW);
    memcpy(all_q + begin * Q_ROW, q[b][0], sizeof *q[b] * (size_t)prompt[b]);
    memcpy(all_k + begin * KV_ROW, k[b][0], sizeof *k[b] * (size_t)prompt[b]);
    memcpy(all_v + begin * KV_ROW, v[b][0], sizeof *v[b] * (size_t)prompt[b]);
    begins[b + 1] = begin + prompt[b];
  }

  /* The same without a cache: prompts one after another, in one call. A sequence has the bits of a call alone. */
  held tensors[5];
  const rapt_tensor *cu_seqlens = hold(&tensors[0], begins, RAPT_DTYPE_I32, 1, BATCH + 1, 0, 0, 0);
  const rapt_options options = {.size = sizeof options, .causal = RAPT_CAUSAL_BOTTOM_RIGHT};
  check(rapt_varlen_attention(engine, hold(&tensors[1], all_q, RAPT_DTYPE_F32, 3, TOTAL, HEADS, HEAD_DIM, 0),
      hold(&tensors[2], all_k, RAPT_DTYPE_F32, 3, TOTAL, KV_HEADS, HEAD_DIM, 0),
      hold(&tensors[3], all_v, RAPT_DTYPE_F32, 3, TOTAL, KV_HEADS, HEAD_DIM, 0), cu_seqlens, cu_seqlens,
      hold(&tensors[4], together, RAPT_DTYPE_F32, 3, TOTAL, HEADS, HEAD_DIM, 0), &options));
  if (memcmp(prompts, together, sizeof prompts) != 0) {
    fprintf(stderr, "prompts in a cache and prompts one after another differ\n");
    return 1;
  }

  /* Then one position of every sequence a step. */
  for (int step = 0; step < STEPS; step++) {
    float new_q[BATCH][Q_ROW], new_k[BATCH][KV_ROW], new_v[BATCH][KV_ROW];
    for (int b = 0; b < BATCH; b++) {
      memcpy(new_q[b], q[b][lengths[b]], sizeof new_q[b]);
      memcpy(new_k[b], k[b][lengths[b]], sizeof new_k[b]);
      memcpy(new_v[b], v[b][lengths[b]], sizeof new_v[b]);
    }
    attend(0, BATCH, 1, new_q[0], new_k[0], new_v[0], out);
    for (int b = 0; b < BATCH; b++)
      expect_formula(b, lengths[b] - 1, 1, out + b * Q_ROW);
  }
  rapt_engine_destroy(engine);
  printf("kvcache: %d, %d and %d keys in %d pages of %d, each result as the formula gives it\n", (int)lengths[0], (int)lengths[1],
      (int)lengths[2], (int)next_page, PAGE_SIZE);
  return 0;
}
