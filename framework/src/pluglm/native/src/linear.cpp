#include "linear.h"

#include <algorithm>

#include "tiles.h"

namespace pluglm {

namespace {

constexpr int64_t PREFETCH_BYTES = 2048;  // ahead in the weights; 1-4 KiB read alike, none costs a quarter of the rate
constexpr int64_t CHUNK_BYTES = 256 << 10;  // shorter runs of weights read more slowly, longer ones share out badly

// One step along K: how many elements of a weight row and of a row of x it takes, and the sums it adds to.
template <typename T>
struct Step {
  static constexpr int64_t SIZE = LANES;
  static vec add(const T* w, const T* x, vec sums) { return load(w) * load(x) + sums; }
};

#if defined(__AVX512BF16__)
template <>
struct Step<bf16> {
  static constexpr int64_t SIZE = 32;
  static vec add(const bf16* w, const bf16* x, vec sums) {
    return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(x));
  }
};
#endif

// Products of OUT weight rows and ROWS rows of x. CHAINS sums in turn along K hide the latency of an addition.
template <typename T, int OUT, int ROWS, int CHAINS>
void block(const Linear<T>& layer, int64_t first, const T* x_RK, float* out_RN) {
  const int64_t k_end = layer.inputs, step = Step<T>::SIZE, stride = layer.inputs;
  const T* w = layer.weight_NK + first * stride;
  vec sums[OUT][ROWS][CHAINS] = {};
  auto add = [&](int64_t k, int c) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int n = 0; n < OUT; n++) {
      const T* at = w + n * stride + k;
      prefetch((const char*)at + PREFETCH_BYTES);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sums[n][r][c] = Step<T>::add(at, x_RK + r * stride + k, sums[n][r][c]);
    }
  };
  int64_t k = 0;
  for (; k + CHAINS * step <= k_end; k += CHAINS * step)
#pragma GCC unroll 4
    for (int c = 0; c < CHAINS; c++) add(k + c * step, c);
#pragma GCC unroll 4
  for (int c = 0; c < CHAINS - 1; c++)  // constant indices only, or the sums would live in memory
    if (k + step <= k_end) add(k, c), k += step;
  for (int n = 0; n < OUT; n++)
    for (int r = 0; r < ROWS; r++) {
      vec all = sums[n][r][0];
      for (int c = 1; c < CHAINS; c++) all += sums[n][r][c];
      float total = sum(all);
      for (int64_t i = k; i < k_end; i++) total += widen(w[n * stride + i]) * widen(x_RK[r * stride + i]);
      out_RN[r * layer.outputs + first + n] = total + (layer.bias_N ? layer.bias_N[first + n] : 0.0f);
    }
}

// Every block computes a product in the same order, so which blocks cover the outputs and rows changes no bit.
template <typename T, int OUT, int ROWS, int CHAINS>
void outputs(const Linear<T>& layer, int64_t begin, int64_t end, const T* x_RK, float* out_RN) {
  int64_t n = begin;
  for (; n + OUT <= end; n += OUT) block<T, OUT, ROWS, CHAINS>(layer, n, x_RK, out_RN);
  for (; n < end; n++) block<T, 1, ROWS, CHAINS>(layer, n, x_RK, out_RN);
}

#if defined(__AVX512F__)
constexpr int OUT = 2, ROWS = 4;
#else
constexpr int OUT = 1, ROWS = 2;
#endif
constexpr int CHAINS = 2;

template <typename T>
void chunk(const Linear<T>& layer, int64_t begin, int64_t end, const T* x_RK, int64_t rows, float* out_RN) {
  constexpr int64_t GROUP = 16;  // outputs whose weights stay in the first cache while all rows of x pass
  if (rows == 1) return outputs<T, 1, 1, std::is_same_v<T, bf16> ? 4 : CHAINS>(layer, begin, end, x_RK, out_RN);
  for (int64_t n = begin; n < end; n += GROUP) {
    const int64_t stop = std::min(end, n + GROUP);
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS)
      outputs<T, OUT, ROWS, CHAINS>(layer, n, stop, x_RK + r * layer.inputs, out_RN + r * layer.outputs);
    for (; r < rows; r++) outputs<T, OUT, 1, CHAINS>(layer, n, stop, x_RK + r * layer.inputs, out_RN + r * layer.outputs);
  }
}

template <typename T>
void in_chunks(Pool& pool, const Linear<T>& layer, const T* x_RK, int64_t rows, float* out_RN) {
  const int64_t threads = pool.num_threads(), bytes = layer.outputs * layer.inputs * int64_t(sizeof(T));
  const int64_t turns = std::max<int64_t>(1, (bytes + threads * CHUNK_BYTES / 2) / (threads * CHUNK_BYTES));
  const int64_t size = std::max<int64_t>(16, (layer.outputs / (threads * turns) + 15) / 16 * 16);  // equal shares
  pool.run(int((layer.outputs + size - 1) / size), [&](int index) {
    chunk(layer, index * size, std::min(layer.outputs, (index + 1) * size), x_RK, rows, out_RN);
  });
}

}  // namespace

void linear(Pool& pool, Scratch&, const Linear<float>& layer, const float* x_RK, int64_t rows, float* out_RN) {
  in_chunks(pool, layer, x_RK, rows, out_RN);
}

void linear(Pool& pool, Scratch& tiles, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows, float* out_RN) {
  if (rows > 1 && tiles_fit(layer)) return tiled_linear(pool, tiles, layer, x_RK, rows, out_RN);
  in_chunks(pool, layer, x_RK, rows, out_RN);
}

}  // namespace pluglm
