/* Gradients: those of the loss sum(out * d_o), against differences of the formula.
 *
 *   cc backward.c $(pkg-config --cflags --libs rapt) -lm */
#include "formula.h"

#include <rapt.h>

enum { HEADS = 2, Q_LEN = 5, KV_LEN = 7, HEAD_DIM = 8 };

static float q[HEADS * Q_LEN * HEAD_DIM], out[HEADS * Q_LEN * HEAD_DIM], d_o[HEADS * Q_LEN * HEAD_DIM], dq[HEADS * Q_LEN * HEAD_DIM];
static float k[HEADS * KV_LEN * HEAD_DIM], v[HEADS * KV_LEN * HEAD_DIM], dk[HEADS * KV_LEN * HEAD_DIM], dv[HEADS * KV_LEN * HEAD_DIM];
static float lse[HEADS * Q_LEN];

static double loss(void) {
  const formula_sizes sizes = {Q_LEN, KV_LEN, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, HEAD_DIM, NULL};
  double sum = 0, expected[Q_LEN * HEAD_DIM], score[KV_LEN];
  for (int head = 0; head < HEADS; head++) {
    const int q_head = head * Q_LEN * HEAD_DIM, kv_head = head * KV_LEN * HEAD_DIM;
    formula(&sizes, q + q_head, k + kv_head, v + kv_head, expected, score);
    for (int at = 0; at < Q_LEN * HEAD_DIM; at++)
      sum += expected[at] * (double)d_o[q_head + at];
  }
  return sum;
}

/* Central differences, by steps that float32 holds exactly enough: what was stepped is measured. */
static void expect_gradient(const char *what, float *of, const float *gradient, int count) {
  for (int at = 0; at < count; at++) {
    const float here = of[at];
    of[at] = here + 0.00390625f;
    const double above = loss(), up = (double)of[at];
    of[at] = here - 0.00390625f;
    const double below = loss(), down = (double)of[at];
    of[at] = here;
    const double difference = (above - below) / (up - down);
    if (!(fabs((double)gradient[at] - difference) <= 1e-4)) {
      fprintf(stderr, "%s: got %.9g, differences give %.9g\n", what, (double)gradient[at], difference);
      exit(1);
    }
  }
}

int main(void) {
  fill(q, HEADS * Q_LEN * HEAD_DIM, 1);
  fill(k, HEADS * KV_LEN * HEAD_DIM, 2);
  fill(v, HEADS * KV_LEN * HEAD_DIM, 3);
  fill(d_o, HEADS * Q_LEN * HEAD_DIM, 4);

  const int64_t q_shape[3] = {HEADS, Q_LEN, HEAD_DIM}, kv_shape[3] = {HEADS, KV_LEN, HEAD_DIM}, lse_shape[2] = {HEADS, Q_LEN};
  int64_t q_strides[3], kv_strides[3], lse_strides[2];
  rapt_contiguous_strides(3, q_shape, q_strides);
  rapt_contiguous_strides(3, kv_shape, kv_strides);
  rapt_contiguous_strides(2, lse_shape, lse_strides);
  const rapt_tensor tq = {.data = q, .dtype = RAPT_DTYPE_F32, .device = RAPT_DEVICE_CPU, .ndim = 3, .shape = q_shape,
                          .strides = q_strides, .storage_bytes = sizeof q};
  rapt_tensor tout = tq, td_o = tq, tdq = tq, tk = tq, tlse = tq;
  tout.data = out, td_o.data = d_o, tdq.data = dq;
  tk.data = k, tk.shape = kv_shape, tk.strides = kv_strides, tk.storage_bytes = sizeof k;
  tlse.data = lse, tlse.ndim = 2, tlse.shape = lse_shape, tlse.strides = lse_strides, tlse.storage_bytes = sizeof lse;
  rapt_tensor tv = tk, tdk = tk, tdv = tk;
  tv.data = v, tdk.data = dk, tdv.data = dv;

  rapt_engine *engine = rapt_engine_create(0);
  if (!engine) {
    fprintf(stderr, "rapt_engine_create: %s\n", rapt_last_error());
    return 1;
  }
  /* The forward call writes out and lse, the backward one reads them. */
  const rapt_options options = {.size = sizeof options, .lse = &tlse};
  rapt_error error = rapt_attention(engine, &tq, &tk, &tv, &tout, &options);
  if (error == RAPT_OK) {
    const rapt_gradients gradients = {.size = sizeof gradients, .dq = &tdq, .dk = &tdk, .dv = &tdv};
    error = rapt_attention_backward(engine, &tq, &tk, &tv, &tout, &td_o, &gradients, &options);
  }
  if (error != RAPT_OK) {
    fprintf(stderr, "%s: %s\n", rapt_error_name(error), rapt_last_error());
    return 1;
  }
  rapt_engine_destroy(engine);

  expect_gradient("dq", q, dq, HEADS * Q_LEN * HEAD_DIM);
  expect_gradient("dk", k, dk, HEADS * KV_LEN * HEAD_DIM);
  expect_gradient("dv", v, dv, HEADS * KV_LEN * HEAD_DIM);
  printf("backward: %d numbers as differences of the formula give them\n", (int)((sizeof dq + sizeof dk + sizeof dv) / sizeof *dq));
  return 0;
}
