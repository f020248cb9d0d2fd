// From C++: an engine that gives itself back, tensors of std::vector, errors as exceptions, and one engine for many threads.
#include <rapt.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Engine = std::unique_ptr<rapt_engine, decltype(&rapt_engine_destroy)>;

void check(rapt_error error) {
  if (error != RAPT_OK)
    throw std::runtime_error(std::string(rapt_error_name(error)) + ": " + rapt_last_error());
}

// [heads, len, head_dim] in a vector, from `offset` on with the given strides.
struct Tensor {
  std::vector<float> data;
  std::array<std::int64_t, 3> shape, strides;
  std::ptrdiff_t offset;

  Tensor(std::int64_t heads, std::int64_t len, std::int64_t dim)
      : data(static_cast<std::size_t>(heads * len * dim)), shape{{heads, len, dim}}, strides{{len * dim, dim, 1}},
        offset(0) {}

  float &at(std::int64_t head, std::int64_t row, std::int64_t d) {
    return *(data.data() + offset + head * strides[0] + row * strides[1] + d * strides[2]);
  }

  rapt_tensor view() {
    rapt_tensor tensor = {};
    tensor.data = data.data() + offset;
    tensor.dtype = RAPT_DTYPE_F32;
    tensor.device = RAPT_DEVICE_CPU;
    tensor.ndim = 3;
    tensor.shape = shape.data();
    tensor.strides = strides.data();
    tensor.storage = data.data();
    tensor.storage_bytes = static_cast<std::int64_t>(data.size() * sizeof(float));
    return tensor;
  }
};

constexpr std::int64_t HEADS = 2, LEN = 5, DIM = 8;

void attention(rapt_engine *engine, Tensor &q, Tensor &k, Tensor &v, Tensor &out) {
  const rapt_tensor tq = q.view(), tk = k.view(), tv = v.view(), tout = out.view();
  check(rapt_attention(engine, &tq, &tk, &tv, &tout, nullptr));
}

float largest_error(Tensor &q, Tensor &k, Tensor &v, Tensor &out) {
  float largest = 0;
  for (std::int64_t head = 0; head < HEADS; head++)
    for (std::int64_t i = 0; i < LEN; i++) {
      std::array<double, LEN> weight;
      double sum = 0;
      for (std::int64_t j = 0; j < LEN; j++) {
        double score = 0;
        for (std::int64_t d = 0; d < DIM; d++)
          score += static_cast<double>(q.at(head, i, d)) * static_cast<double>(k.at(head, j, d));
        sum += weight[static_cast<std::size_t>(j)] = std::exp(score / std::sqrt(static_cast<double>(DIM)));
      }
      for (std::int64_t d = 0; d < DIM; d++) {
        double expected = 0;
        for (std::int64_t j = 0; j < LEN; j++)
          expected += weight[static_cast<std::size_t>(j)] / sum * static_cast<double>(v.at(head, j, d));
        largest = std::fmax(largest, std::fabs(out.at(head, i, d) - static_cast<float>(expected)));
      }
    }
  return largest;
}

// The rows of each head from the last to the first: a negative stride, and data that begins at the last row.
void turn(Tensor &tensor) {
  tensor.offset = (LEN - 1) * DIM;
  tensor.strides[1] = -DIM;
}

} // namespace

int main() {
  const Engine engine(rapt_engine_create(2), rapt_engine_destroy);
  if (!engine)
    throw std::runtime_error(rapt_last_error());

  std::vector<float> errors(8, 1.0f);
  std::vector<std::thread> threads;
  for (std::size_t n = 0; n < errors.size(); n++)
    threads.emplace_back([&engine, &errors, n] {
      Tensor q(HEADS, LEN, DIM), k(HEADS, LEN, DIM), v(HEADS, LEN, DIM), out(HEADS, LEN, DIM);
      for (std::size_t at = 0; at < q.data.size(); at++) {
        q.data[at] = std::sin(static_cast<float>(at + n));
        k.data[at] = std::cos(static_cast<float>(at * 2 + n));
        v.data[at] = static_cast<float>(at % 7) - 3.0f;
      }
      if (n % 2 == 1)
        for (Tensor *tensor : {&q, &k, &v, &out})
          turn(*tensor);
      attention(engine.get(), q, k, v, out);
      errors[n] = largest_error(q, k, v, out);
    });
  for (std::thread &thread : threads)
    thread.join();
  for (float error : errors)
    if (!(error < 1e-5f)) {
      std::fprintf(stderr, "off by %g\n", static_cast<double>(error));
      return 1;
    }

  Tensor q(HEADS, LEN, DIM);
  try {
    attention(engine.get(), q, q, q, q);
    std::fprintf(stderr, "an output that is an input was accepted\n");
    return 1;
  } catch (const std::runtime_error &error) {
    std::printf("refused: %s\n", error.what());
  }
  std::printf("c++: %zu threads on one engine, contiguous and strided, all as the formula gives them\n", errors.size());
  return 0;
}
