/* Row-major tensors: the whole of what a first call needs.
 *
 *   cc contiguous.c $(pkg-config --cflags --libs rapt) -lm */
#include "formula.h"

#include <rapt.h>

enum { BATCH = 2, HEADS = 3, Q_LEN = 5, KV_LEN = 7, HEAD_DIM = 16 };

static float q[BATCH * HEADS * Q_LEN * HEAD_DIM], out[BATCH * HEADS * Q_LEN * HEAD_DIM];
static float k[BATCH * HEADS * KV_LEN * HEAD_DIM], v[BATCH * HEADS * KV_LEN * HEAD_DIM];

int main(void) {
  fill(q, sizeof q / sizeof *q, 1);
  fill(k, sizeof k / sizeof *k, 2);
  fill(v, sizeof v / sizeof *v, 3);

  /* Shapes and strides (in elements) belong to the caller; a tensor only points to them. */
  const int64_t q_shape[4] = {BATCH, HEADS, Q_LEN, HEAD_DIM}, kv_shape[4] = {BATCH, HEADS, KV_LEN, HEAD_DIM};
  int64_t q_strides[4], kv_strides[4];
  rapt_contiguous_strides(4, q_shape, q_strides);
  rapt_contiguous_strides(4, kv_shape, kv_strides);

  rapt_tensor tq = {.data = q, .dtype = RAPT_DTYPE_F32, .device = RAPT_DEVICE_CPU, .ndim = 4, .shape = q_shape,
                    .strides = q_strides, .storage_bytes = sizeof q};
  rapt_tensor tout = tq, tk = tq, tv;
  tout.data = out;
  tk.data = k, tk.shape = kv_shape, tk.strides = kv_strides, tk.storage_bytes = sizeof k;
  tv = tk, tv.data = v;

  rapt_engine *engine = rapt_engine_create(0); /* RAPT_NUM_THREADS, else all cores */
  if (!engine) {
    fprintf(stderr, "rapt_engine_create: %s\n", rapt_last_error());
    return 1;
  }
  rapt_error error = rapt_attention(engine, &tq, &tk, &tv, &tout, NULL);
  if (error != RAPT_OK) {
    fprintf(stderr, "%s: %s\n", rapt_error_name(error), rapt_last_error());
    return 1;
  }
  rapt_engine_destroy(engine);

  const formula_sizes sizes = {Q_LEN, KV_LEN, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, NULL};
  for (int head = 0; head < BATCH * HEADS; head++) {
    double expected[Q_LEN * HEAD_DIM], score[KV_LEN];
    const int q_head = head * Q_LEN * HEAD_DIM, kv_head = head * KV_LEN * HEAD_DIM;
    formula(&sizes, q + q_head, k + kv_head, v + kv_head, expected, score);
    for (int at = 0; at < Q_LEN * HEAD_DIM; at++)
      expect_near("out", out[q_head + at], expected[at]);
  }
  printf("contiguous: %d numbers as the formula gives them, rapt %s\n", (int)(sizeof out / sizeof *out), rapt_version());
  return 0;
}
