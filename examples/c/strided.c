/* Tensors where they lie: q, k and v are views of one packed buffer [batch, len, 3, heads, head_dim], as a projection
 * writes it; grouped heads, a causal mask, lse, and an output with padding between its rows that stays as it is. */
#include "formula.h"

#include <rapt.h>

enum { BATCH = 2, LEN = 67, HEADS = 8, KV_HEADS = 2, HEAD_DIM = 32, ROW = (HEADS + 2 * KV_HEADS) * HEAD_DIM, PAD = 3 };

static float packed[BATCH * LEN * ROW];
static float out[BATCH * LEN * (HEADS * HEAD_DIM + PAD)];
static float lse[BATCH * HEADS * LEN];

static int causal(int i, int j) { return j <= i; }

static void check(rapt_error error) {
  if (error != RAPT_OK) {
    fprintf(stderr, "%s: %s\n", rapt_error_name(error), rapt_last_error());
    exit(1);
  }
}

int main(void) {
  const float untouched = -77.25f;
  const int out_row = HEADS * HEAD_DIM + PAD, out_count = sizeof out / sizeof *out;
  fill(packed, sizeof packed / sizeof *packed, 4);
  for (int at = 0; at < out_count; at++)
    out[at] = untouched;

  /* [batch, len, heads, head_dim], read in place: the strides say where each row lies. */
  const int64_t q_shape[4] = {BATCH, LEN, HEADS, HEAD_DIM}, kv_shape[4] = {BATCH, LEN, KV_HEADS, HEAD_DIM};
  const int64_t strides[4] = {LEN * ROW, ROW, HEAD_DIM, 1};
  const int64_t out_strides[4] = {(int64_t)LEN * out_row, out_row, HEAD_DIM, 1};
  const int64_t lse_shape[3] = {BATCH, HEADS, LEN}, lse_strides[3] = {HEADS * LEN, LEN, 1};

  /* With its storage size given, no call reads a byte outside the buffer, whatever shape and strides say. */
  rapt_tensor q = {.data = packed, .dtype = RAPT_DTYPE_F32, .device = RAPT_DEVICE_CPU, .ndim = 4, .shape = q_shape,
                   .strides = strides, .storage = packed, .storage_bytes = sizeof packed};
  rapt_tensor k = q, v, o = q, l = q;
  k.data = packed + HEADS * HEAD_DIM, k.shape = kv_shape;
  v = k, v.data = packed + (HEADS + KV_HEADS) * HEAD_DIM;
  o.data = out, o.strides = out_strides, o.storage = out, o.storage_bytes = sizeof out;
  l.data = lse, l.ndim = 3, l.shape = lse_shape, l.strides = lse_strides, l.storage = lse, l.storage_bytes = sizeof lse;

  const rapt_options options = {
      .size = sizeof options, .causal = RAPT_CAUSAL_TOP_LEFT, .layout = RAPT_LAYOUT_BSHD, .lse = &l};

  rapt_engine *engine = rapt_engine_create(2);
  if (!engine) {
    fprintf(stderr, "rapt_engine_create: %s\n", rapt_last_error());
    return 1;
  }
  check(rapt_attention(engine, &q, &k, &v, &o, &options));

  /* What ran, in words. */
  char *text = NULL;
  check(rapt_explain(engine, &q, &k, &v, &o, &options, &text));
  fputs(text, stdout);
  rapt_string_free(text);
  rapt_engine_destroy(engine);

  const formula_sizes sizes = {LEN, LEN, HEAD_DIM, ROW, ROW, ROW, HEAD_DIM, causal};
  for (int batch = 0; batch < BATCH; batch++) {
    for (int head = 0; head < HEADS; head++) {
      double expected[LEN * HEAD_DIM], score[LEN];
      const float *row = packed + batch * LEN * ROW;
      const int kv_head = head / (HEADS / KV_HEADS);
      formula(&sizes, row + head * HEAD_DIM, row + (HEADS + kv_head) * HEAD_DIM,
          row + (HEADS + KV_HEADS + kv_head) * HEAD_DIM, expected, score);
      for (int i = 0; i < LEN; i++)
        for (int d = 0; d < HEAD_DIM; d++)
          expect_near("out", out[(batch * LEN + i) * out_row + head * HEAD_DIM + d], expected[i * HEAD_DIM + d]);
      /* The first query sees one key: its lse is that key's score. */
      double first = 0;
      for (int d = 0; d < HEAD_DIM; d++)
        first += (double)row[head * HEAD_DIM + d] * (double)row[(HEADS + kv_head) * HEAD_DIM + d];
      expect_near("lse", lse[(batch * HEADS + head) * LEN], first / sqrt((double)HEAD_DIM));
    }
  }
  for (int row = 0; row < BATCH * LEN; row++)
    for (int at = HEADS * HEAD_DIM; at < out_row; at++)
      if (out[row * out_row + at] != untouched) {
        fprintf(stderr, "padding of row %d was written\n", row);
        return 1;
      }
  puts("strided: out and lse as the formula gives them, the padding is as it was");
  return 0;
}
