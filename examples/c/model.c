/* An exported program: what it takes and gives, the sizes of its results before the run, and a session that keeps what the
 * program writes.
 *
 *     ./model FILE.pt2 [THREADS]
 *
 * Every size that varies is 4 here, and every input is ones. */
#include <rapt.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 16, SIZE = 4 };

static void expect(rapt_error error) {
  if (error != RAPT_OK) {
    fprintf(stderr, "%s: %s\n", rapt_error_name(error), rapt_last_error());
    exit(1);
  }
}

static void print(const char *what, const rapt_port *port) {
  printf("%-7s %-24s %s [", what, port->name, port->dtype ? rapt_dtype_name(port->dtype) : "a number or None");
  for (int dim = 0; dim < port->ndim; dim++)
    printf("%s%s", dim ? ", " : "", port->sizes[dim]);
  printf("]%s\n", port->is_written ? ", written" : "");
}

/* One as a number of this dtype. Half precision is left at zero. */
static void one(int dtype, void *at) {
  switch (dtype) {
  case RAPT_DTYPE_F32: *(float *)at = 1; break;
  case RAPT_DTYPE_F64: *(double *)at = 1; break;
  case RAPT_DTYPE_I64: *(int64_t *)at = 1; break;
  case RAPT_DTYPE_I32: *(int32_t *)at = 1; break;
  case RAPT_DTYPE_BOOL: *(uint8_t *)at = 1; break;
  default: break;
  }
}

int main(int argc, char **argv) {
  rapt_engine *engine = rapt_engine_create(argc > 2 ? atoi(argv[2]) : 0);
  rapt_model *model = NULL;
  rapt_bound *bound = NULL;
  rapt_session *session = NULL;
  rapt_tensor inputs[MOST], outputs[MOST];
  int64_t shapes[MOST][RAPT_MAX_NDIM], strides[MOST][RAPT_MAX_NDIM];

  if (!engine)
    expect(rapt_last_error_code());
  expect(rapt_model_open(engine, argc > 1 ? argv[1] : "model.pt2", &model));
  const size_t num_inputs = rapt_model_num_inputs(model), num_outputs = rapt_model_num_outputs(model);
  if (num_inputs > MOST || num_outputs > MOST)
    return 1;

  /* A zeroed rapt_tensor is None; a program of tensors alone needs none. */
  memset(inputs, 0, sizeof inputs);
  for (size_t at = 0; at < num_inputs; at++) {
    rapt_port port = {.size = sizeof port};
    expect(rapt_model_input(model, at, &port));
    print("input", &port);
    if (!port.dtype || port.ndim > RAPT_MAX_NDIM)
      continue;
    size_t count = 1;
    const size_t bytes = rapt_dtype_bits(port.dtype) / 8;
    for (int dim = 0; dim < port.ndim; dim++) {
      shapes[at][dim] = port.shape[dim] < 0 ? SIZE : port.shape[dim];
      count *= (size_t)shapes[at][dim];
    }
    expect(rapt_contiguous_strides(port.ndim, shapes[at], strides[at]));
    char *data = calloc(count + 1, bytes);
    if (!data)
      return 1;
    for (size_t n = 0; n < count; n++)
      one(port.dtype, data + n * bytes);
    inputs[at] = (rapt_tensor){.data = data, .dtype = port.dtype, .device = RAPT_DEVICE_CPU, .ndim = port.ndim,
                               .shape = shapes[at], .strides = strides[at], .storage_bytes = (int64_t)(count * bytes)};
  }

  /* The sizes of the results follow from those of the inputs. Each is a row-major tensor that wants memory. */
  expect(rapt_model_bind(model, inputs, num_inputs, &bound));
  for (size_t at = 0; at < num_outputs; at++) {
    rapt_port port = {.size = sizeof port};
    expect(rapt_model_output(model, at, &port));
    print("output", &port);
    expect(rapt_bound_output(bound, at, &outputs[at]));
    outputs[at].data = calloc((size_t)outputs[at].storage_bytes + 1, 1);
    if (!outputs[at].data)
      return 1;
  }

  /* A session keeps what the program writes, such as a cache: a second call may give other results. */
  expect(rapt_session_create(model, &session));
  for (int call = 0; call < 2; call++) {
    expect(rapt_session_run(session, inputs, num_inputs, outputs, num_outputs));
    printf("call %d, %zu bytes held:", call, rapt_session_held_bytes(session));
    for (size_t at = 0; at < num_outputs; at++)
      if (outputs[at].dtype == RAPT_DTYPE_F32 && outputs[at].storage_bytes > 0)
        printf(" %g", (double)*(float *)outputs[at].data);
    printf("\n");
  }
  expect(rapt_session_reset(session));

  /* Another dtype is refused before any work; nothing is converted. */
  if (num_inputs > 0 && inputs[0].dtype == RAPT_DTYPE_F32) {
    inputs[0].dtype = RAPT_DTYPE_F64, inputs[0].storage_bytes = 0;
    if (rapt_session_run(session, inputs, num_inputs, outputs, num_outputs) != RAPT_ERROR_DTYPE_BOUNDARY)
      return 1;
    printf("%s\n", rapt_last_error());
  }

  for (size_t at = 0; at < num_inputs; at++)
    free(inputs[at].data);
  for (size_t at = 0; at < num_outputs; at++)
    free(outputs[at].data);
  rapt_session_destroy(session);
  rapt_bound_destroy(bound);
  rapt_model_destroy(model);
  rapt_engine_destroy(engine);
  return 0;
}
