// Row-wise arithmetic between the products of a layer: normalisation, rotation, gated activation. Inside it is float32.
#pragma once
#include <algorithm>

#include "pool.h"
#include "vec.h"

namespace pluglm {

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3 };

// work(row) for every row, several rows a chunk; on the calling thread alone where that is less trouble.
template <typename Work>
void each_row(Pool& pool, int64_t rows, int64_t width, Work&& work) {
  constexpr int64_t CHUNK_VALUES = 8192;
  const int64_t size = std::max<int64_t>(1, CHUNK_VALUES / std::max<int64_t>(1, width));
  pool.run(int((rows + size - 1) / size), [&](int chunk) {
    for (int64_t row = chunk * size; row < std::min(rows, (chunk + 1) * size); row++) work(row);
  });
}

// out = x / sqrt(mean(x^2) + eps) * weight (RMSNorm, arXiv:1910.07467). out may be x.
template <typename In, typename Out>
void normalise(const In* x, const float* weight, float eps, int64_t width, Out* out) {
  vec squares{};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum(squares);
  for (; i < width; i++) total += widen(x[i]) * widen(x[i]);
  const float factor = 1.0f / std::sqrt(total / float(width) + eps);
  for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < width; i++) store(out + i, widen(x[i]) * factor * weight[i]);
}

// out[i] = x[i] cos[i] + x[i +- H/2] sin[i], the sine of the first half negated beforehand. out is not x.
template <typename In, typename Angle, typename Out>
void rotate(const In* x, const Angle* cosine, const Angle* sine, int64_t head_dim, Out* out) {
  const int64_t half = head_dim / 2;
  for (int64_t start = 0; start < head_dim; start += half) {
    const In *own = x + start, *other = x + half - start;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES)
      store(out + start + i, load(own + i) * load(cosine + start + i) + load(other + i) * load(sine + start + i));
    for (; i < half; i++)
      store(out + start + i,
            widen(own[i]) * widen(cosine[start + i]) + widen(other[i]) * widen(sine[start + i]));
  }
}

// activation(x) of each lane.
vec activate(Activation kind, vec x);

// out = activation(gate) * up over `width` values.
template <typename In, typename Out>
void gated(Activation kind, const In* gate, const In* up, int64_t width, Out* out);

}  // namespace pluglm
