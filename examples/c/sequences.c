/* A cache that Rapt owns: a prompt is read once, forked into two continuations that share its pages, and one of them is taken back. */
#include "formula.h"

#include <rapt.h>
#include <string.h>

enum { HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16, PAGE_SIZE = 4, NUM_PAGES = 8, PROMPT = 10, STEPS = 3, BRANCHES = 2 };
enum { Q_ROW = HEADS * HEAD_DIM, KV_ROW = KV_HEADS * HEAD_DIM, MOST = PROMPT + STEPS };

/* What a model would compute for each branch; the first PROMPT keys of both are the same. */
static float q[BRANCHES][Q_ROW], k[BRANCHES][MOST][KV_ROW], v[BRANCHES][MOST][KV_ROW], out[BRANCHES][Q_ROW];

static void check(rapt_error error) {
  if (error != RAPT_OK) {
    fprintf(stderr, "%s: %s\n", rapt_error_name(error), rapt_last_error());
    exit(1);
  }
}

/* A row-major tensor of float; its strides have a place in `strides`. */
static rapt_tensor tensor(float *data, int32_t ndim, const int64_t *shape, int64_t *strides) {
  const rapt_tensor made = {.data = data, .dtype = RAPT_DTYPE_F32, .device = RAPT_DEVICE_CPU, .ndim = ndim, .shape = shape, .strides = strides};
  check(rapt_contiguous_strides(ndim, shape, strides));
  return made;
}

/* Attention of the queries of both branches to their first `length` keys, against the formula. */
static void attend(const rapt_engine *engine, const rapt_kv_cache *cache, const uint64_t *ids, int length) {
  const int64_t shape[4] = {BRANCHES, 1, HEADS, HEAD_DIM};
  int64_t strides[4];
  const rapt_tensor of_q = tensor(q[0], 4, shape, strides), of_out = tensor(out[0], 4, shape, strides);
  const formula_sizes sizes = {1, length, HEAD_DIM, Q_ROW, KV_ROW, KV_ROW, HEAD_DIM, NULL};
  check(rapt_kv_cache_attention(engine, cache, &of_q, ids, BRANCHES, &of_out, NULL));
  for (int branch = 0; branch < BRANCHES; branch++)
    for (int head = 0; head < HEADS; head++) {
      double expected[HEAD_DIM], score[MOST];
      const int at = head * HEAD_DIM, of_kv = head / (HEADS / KV_HEADS) * HEAD_DIM;
      formula(&sizes, &q[branch][at], k[branch][0] + of_kv, v[branch][0] + of_kv, expected, score);
      for (int d = 0; d < HEAD_DIM; d++)
        expect_near("out", out[branch][at + d], expected[d]);
    }
}

int main(void) {
  fill(q[0], BRANCHES * Q_ROW, 1);
  fill(k[0][0], BRANCHES * MOST * KV_ROW, 2);
  fill(v[0][0], BRANCHES * MOST * KV_ROW, 3);
  memcpy(k[1], k[0], sizeof k[0][0] * PROMPT);
  memcpy(v[1], v[0], sizeof v[0][0] * PROMPT);

  rapt_engine *engine = rapt_engine_create(2);
  if (!engine) {
    fprintf(stderr, "rapt_engine_create: %s\n", rapt_last_error());
    return 1;
  }
  const rapt_kv_cache_form form = {.size = sizeof form, .num_pages = NUM_PAGES, .page_size = PAGE_SIZE, .num_kv_heads = KV_HEADS,
                                   .head_dim = HEAD_DIM, .dtype = RAPT_DTYPE_F32};
  rapt_kv_cache *cache;
  check(rapt_kv_cache_create(&form, &cache));

  /* The prompt: 10 keys in 3 pages. */
  uint64_t ids[BRANCHES];
  const int64_t of_prompt[3] = {PROMPT, KV_HEADS, HEAD_DIM};
  int64_t prompt_strides[3];
  const rapt_tensor prompt_k = tensor(k[0][0], 3, of_prompt, prompt_strides), prompt_v = tensor(v[0][0], 3, of_prompt, prompt_strides);
  check(rapt_kv_cache_new_sequence(cache, &ids[0]));
  check(rapt_kv_cache_append(cache, ids[0], &prompt_k, &prompt_v));

  /* Both branches have them; no page is taken before one of the two writes. */
  check(rapt_kv_cache_fork(cache, ids[0], &ids[1]));
  if (rapt_kv_cache_free_pages(cache) != NUM_PAGES - 3) {
    fprintf(stderr, "a fork took a page\n");
    return 1;
  }
  attend(engine, cache, ids, PROMPT);

  /* A key of each branch a step: the branches lie MOST rows apart. */
  for (int step = PROMPT; step < MOST; step++) {
    const int64_t shape[4] = {BRANCHES, 1, KV_HEADS, HEAD_DIM}, strides[4] = {MOST * KV_ROW, KV_ROW, HEAD_DIM, 1};
    int64_t unused[4];
    rapt_tensor new_k = tensor(k[0][step], 4, shape, unused), new_v = tensor(v[0][step], 4, shape, unused);
    new_k.strides = new_v.strides = strides;
    check(rapt_kv_cache_append_batch(cache, ids, BRANCHES, &new_k, &new_v));
    attend(engine, cache, ids, step + 1);
  }

  /* Back to the prompt, which both share again but for the page that was copied. */
  for (int branch = 0; branch < BRANCHES; branch++)
    check(rapt_kv_cache_truncate(cache, ids[branch], PROMPT));
  attend(engine, cache, ids, PROMPT);

  /* What was freed is refused, and the cache serves on. */
  size_t length;
  check(rapt_kv_cache_free(cache, ids[1]));
  if (rapt_kv_cache_append(cache, ids[1], &prompt_k, &prompt_v) != RAPT_ERROR_INDEX)
    return 1;
  check(rapt_kv_cache_length(cache, ids[0], &length));
  check(rapt_kv_cache_free(cache, ids[0]));
  const size_t free_pages = rapt_kv_cache_free_pages(cache);
  rapt_kv_cache_destroy(cache);
  rapt_engine_destroy(engine);
  printf("sequences: %d keys and two continuations of %d, each result as the formula gives it\n", (int)length, STEPS);
  return free_pages == NUM_PAGES ? 0 : 1;
}
