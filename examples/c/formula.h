/* The formula, in double: what the examples hold the library's results against (docs/reference/definition.md).
 *
 * One head at a time; element (i, d) of q lies at q[i * q_row + d], and so on. `attends` says which key a query sees. */
#ifndef FORMULA_H
#define FORMULA_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
  int q_len, kv_len, head_dim;
  long q_row, k_row, v_row, out_row; /* strides from one row to the next, in elements */
  int (*attends)(int i, int j);      /* NULL: every query sees every key */
} formula_sizes;

/* softmax(q k^T / sqrt(head_dim)) v of one head; `score` holds kv_len numbers. */
static inline void formula(const formula_sizes *sizes, const float *q, const float *k, const float *v, double *out, double *score) {
  for (int i = 0; i < sizes->q_len; i++) {
    double max = -INFINITY, sum = 0;
    for (int j = 0; j < sizes->kv_len; j++) {
      score[j] = 0;
      for (int d = 0; d < sizes->head_dim; d++)
        score[j] += (double)q[i * sizes->q_row + d] * (double)k[j * sizes->k_row + d];
      score[j] /= sqrt((double)sizes->head_dim);
      if (sizes->attends && !sizes->attends(i, j))
        score[j] = -INFINITY;
      max = score[j] > max ? score[j] : max;
    }
    for (int j = 0; j < sizes->kv_len; j++)
      sum += score[j] = exp(score[j] - max);
    for (int d = 0; d < sizes->head_dim; d++) {
      double value = 0;
      for (int j = 0; j < sizes->kv_len; j++)
        value += score[j] * (double)v[j * sizes->v_row + d];
      out[i * sizes->out_row + d] = value / sum;
    }
  }
}

/* Numbers in -1..1 that are the same on every machine. */
static inline void fill(float *numbers, int count, unsigned seed) {
  unsigned state = seed;
  for (int at = 0; at < count; at++) {
    state = state * 1664525u + 1013904223u;
    numbers[at] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
}

/* Ends the program unless `got` is `expected` but for float32's roundings. */
static inline void expect_near(const char *what, double got, double expected) {
  if (!(fabs(got - expected) <= 1e-6 * (1 + fabs(expected)))) {
    fprintf(stderr, "%s: got %.9g, the formula gives %.9g\n", what, got, expected);
    exit(1);
  }
}

#endif
