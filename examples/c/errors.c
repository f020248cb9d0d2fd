/* What is refused, and that it costs nothing: an error code, a message that names the offender, outputs as before, and an
 * engine that serves the next call. */
#include <rapt.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEN = 4, DIM = 8 };

static float q[LEN * DIM], k[LEN * DIM], v[LEN * DIM], out[LEN * DIM];

static void expect(rapt_error got, rapt_error expected, const char *says) {
  if (got != expected || !strstr(rapt_last_error(), says)) {
    fprintf(stderr, "expected %s and `%s`, got %s: %s\n", rapt_error_name(expected), says, rapt_error_name(got),
            rapt_last_error());
    exit(1);
  }
  printf("%-29s %s\n", rapt_error_name(got), rapt_last_error());
  for (int at = 0; at < LEN * DIM; at++)
    if (out[at] != -1.0f) {
      fprintf(stderr, "out was written\n");
      exit(1);
    }
}

int main(void) {
  const int64_t shape[2] = {LEN, DIM}, strides[2] = {DIM, 1}, half[2] = {LEN / 2, DIM}, same[2] = {0, 1};
  const rapt_tensor tensor = {.data = q, .dtype = RAPT_DTYPE_F32, .device = RAPT_DEVICE_CPU, .ndim = 2,
                              .shape = shape, .strides = strides, .storage_bytes = sizeof q};
  rapt_tensor tq = tensor, tk = tensor, tv = tensor, tout = tensor, bad;
  tk.data = k, tv.data = v, tout.data = out;
  for (int at = 0; at < LEN * DIM; at++)
    q[at] = k[at] = v[at] = (float)at / 8, out[at] = -1.0f;

  rapt_engine *engine = rapt_engine_create(1);
  if (!engine)
    return 1;

  expect(rapt_attention(NULL, &tq, &tk, &tv, &tout, NULL), RAPT_ERROR_POINTER, "engine is NULL");
  expect(rapt_attention(engine, NULL, &tk, &tv, &tout, NULL), RAPT_ERROR_POINTER, "q is NULL");
  expect(rapt_attention(engine, &tq, NULL, &tv, &tout, NULL), RAPT_ERROR_POINTER, "k is NULL");
  expect(rapt_attention(engine, &tq, &tk, NULL, &tout, NULL), RAPT_ERROR_POINTER, "v is NULL");
  expect(rapt_attention(engine, &tq, &tk, &tv, NULL, NULL), RAPT_ERROR_POINTER, "out is NULL");
  expect(rapt_explain(engine, &tq, &tk, &tv, &tout, NULL, NULL), RAPT_ERROR_POINTER, "text is NULL");
  bad = tk, bad.shape = NULL;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, NULL), RAPT_ERROR_POINTER, "k->shape is NULL");
  bad = tk, bad.data = NULL;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, NULL), RAPT_ERROR_LAYOUT, "null data");

  bad = tk, bad.dtype = 14;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, NULL), RAPT_ERROR_UNSUPPORTED_DTYPE, "code 14");
  bad = tk, bad.dtype = RAPT_DTYPE_BF16;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, NULL), RAPT_ERROR_DTYPE_MISMATCH, "bfloat16");
  bad = tv, bad.shape = half;
  expect(rapt_attention(engine, &tq, &tk, &bad, &tout, NULL), RAPT_ERROR_SHAPE, "kv_len 2");
  bad = tk, bad.data = k + 1, bad.storage = k;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, NULL), RAPT_ERROR_LAYOUT, "its storage holds");
  bad = tout, bad.data = out + DIM, bad.storage = out;
  expect(rapt_attention(engine, &tq, &tk, &tv, &bad, NULL), RAPT_ERROR_LAYOUT, "its storage holds");
  bad = tout, bad.data = q;
  expect(rapt_attention(engine, &tq, &tk, &tv, &bad, NULL), RAPT_ERROR_LAYOUT, "out shares memory with q");
  bad = tout, bad.strides = same;
  expect(rapt_attention(engine, &tq, &tk, &tv, &bad, NULL), RAPT_ERROR_LAYOUT, "from two places");
  bad = tk, bad.device = RAPT_DEVICE_CUDA;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, NULL), RAPT_ERROR_DEVICE, "cuda:0");

  rapt_options options = {.size = sizeof options, .causal = 7};
  expect(rapt_attention(engine, &tq, &tk, &tv, &tout, &options), RAPT_ERROR_OPTION, "causal = 7");
  options.causal = RAPT_CAUSAL_NONE, options.softmax_scale = 0.5;
  expect(rapt_attention(engine, &tq, &tk, &tv, &tout, &options), RAPT_ERROR_OPTION, "softmax_scale = 0.5");
  options.given = RAPT_GIVEN_SOFTMAX_SCALE, options.size = sizeof options - 1;
  expect(rapt_attention(engine, &tq, &tk, &tv, &tout, &options), RAPT_ERROR_OPTION, "options.size");
  options.size = sizeof options;

  /* Codes are no numbers without their factors: nothing is assumed for a part that is missing. */
  static int8_t codes[LEN * DIM];
  static float factors[LEN];
  const int64_t per_row[1] = {LEN}, step[1] = {1};
  const rapt_tensor descale = {.data = factors, .dtype = RAPT_DTYPE_F32, .device = RAPT_DEVICE_CPU, .ndim = 1,
                               .shape = per_row, .strides = step, .storage_bytes = sizeof factors};
  rapt_tensor other = descale;
  rapt_codes k_codes = {.size = sizeof k_codes, .format = RAPT_FORMAT_INT8};
  rapt_options quantized = {.size = sizeof quantized};
  bad = tk, bad.data = codes, bad.dtype = RAPT_DTYPE_I8, bad.storage_bytes = sizeof codes;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, &quantized), RAPT_ERROR_UNSUPPORTED_DTYPE, "without k_descale");
  quantized.k_codes = &k_codes;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, &quantized), RAPT_ERROR_UNSUPPORTED_DTYPE, "k_codes->descale");
  k_codes.descale = &descale, k_codes.zero_point = &descale;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, &quantized), RAPT_ERROR_OPTION, "int8 codes have none");
  k_codes.zero_point = NULL, k_codes.descale = &other, other.shape = half, other.storage_bytes = 0;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, &quantized), RAPT_ERROR_SHAPE, "k_descale has shape [2]");
  other = descale, other.dtype = RAPT_DTYPE_F16;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, &quantized), RAPT_ERROR_DTYPE_MISMATCH, "RAPT_DTYPE_F32");
  other = descale, k_codes.format = RAPT_FORMAT_E4M3FN;
  expect(rapt_attention(engine, &tq, &bad, &tv, &tout, &quantized), RAPT_ERROR_DTYPE_MISMATCH, "float8_e4m3fn");

  rapt_capabilities capabilities = {.size = sizeof capabilities};
  if (rapt_attention(engine, &tq, &tk, &tv, &tout, &options) != RAPT_OK || out[0] == -1.0f ||
      rapt_engine_capabilities(engine, &capabilities) != RAPT_OK) {
    fprintf(stderr, "the engine serves no more: %s\n", rapt_last_error());
    return 1;
  }
  printf("errors: all refused, and the next call was served on %s (of %s)\n", capabilities.isa, capabilities.isas);
  rapt_engine_destroy(engine);
  rapt_engine_destroy(NULL);
  rapt_string_free(NULL);
  return 0;
}
