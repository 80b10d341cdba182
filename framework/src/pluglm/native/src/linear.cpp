#include "linear.h"

#include <algorithm>
#include <type_traits>

#include "panels.h"

namespace pluglm {

namespace {

constexpr int64_t CHUNK_BYTES = 256 << 10;  // shorter runs of weights read more slowly, longer ones share out badly

// How weights are read, by what keeps the most of memory's reads in flight. With tiles (tried on Sapphire Rapids) it is
// one run of weight rows with a prefetch. Elsewhere (tried on Zen 4) it is two runs side by side, which the hardware
// follows by itself; a prefetch only slows it down. With so many rows of x that the weights pass slowly the hardware no
// longer runs ahead, and a prefetch far ahead into the second cache does.
// ROWS rows of x and OUT weight rows are what the registers hold the sums of.
#if defined(__AMX_TILE__)
constexpr int RUNS = 1, OUT = 2, ROWS = 4;
constexpr int64_t NEAR_BYTES = 2048, FAR_BYTES = 0;
#elif defined(__AVX512F__)
constexpr int RUNS = 2, OUT = 2, ROWS = 8;
constexpr int64_t NEAR_BYTES = 0, FAR_BYTES = 32 << 10;
#else
constexpr int RUNS = 2, OUT = 2, ROWS = 4;
constexpr int64_t NEAR_BYTES = 0, FAR_BYTES = 32 << 10;
#endif

// Sums in turn along K hide the latency of an addition where the other sums do not. Of float32 one number for all rows,
// which fixes the order of additions.
template <typename T, int NUM>
constexpr int CHAINS = RUNS > 1 ? 1 : std::is_same_v<T, bf16> && NUM == 1 ? 4 : 2;

// One step along K: how many elements of a weight row and of a row of x it takes, and the sums it adds to.
template <typename T>
struct Step {
  static constexpr int64_t SIZE = LANES;
  typedef vec part;
  static part take(const T* from) { return load(from); }
  static vec add(part w, part x, vec sums) { return w * x + sums; }
};

#if defined(__AVX512BF16__)
template <>
struct Step<bf16> {
  static constexpr int64_t SIZE = 32;
  typedef __m512bh part;
  static part take(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static vec add(part w, part x, vec sums) { return (vec)_mm512_dpbf16_ps((__m512)sums, w, x); }
};
#endif

// Products of WEIGHTS weight rows, `apart` rows from each other, and NUM rows of x. In float32 each is added up in
// one order whatever WEIGHTS and NUM are, so which blocks cover the outputs and rows changes no bit.
template <typename T, int WEIGHTS, int NUM>
void block(const Linear<T>& layer, int64_t first, int64_t apart, const T* x_RK, float* out_RN) {
  constexpr int TURNS = CHAINS<T, NUM>;
  const int64_t k_end = layer.inputs, step = Step<T>::SIZE, x_stride = layer.inputs, stride = apart * x_stride;
  const T* w = layer.weight_NK + first * x_stride;
  vec sums[TURNS][NUM * WEIGHTS] = {};
  auto add = [&](int64_t k, int turn) __attribute__((always_inline)) {
    typename Step<T>::part parts[WEIGHTS];
#pragma GCC unroll 4
    for (int n = 0; n < WEIGHTS; n++) {
      const T* at = w + n * stride + k;
      parts[n] = Step<T>::take(at);
      if (NEAR_BYTES) __builtin_prefetch((const char*)at + NEAR_BYTES, 0, 3);
      if (FAR_BYTES && NUM == ROWS) __builtin_prefetch((const char*)at + FAR_BYTES, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < NUM; r++) {
      const auto x = Step<T>::take(x_RK + r * x_stride + k);
#pragma GCC unroll 4
      for (int n = 0; n < WEIGHTS; n++) {
        vec& total = sums[turn][r * WEIGHTS + n];
        total = Step<T>::add(parts[n], x, total);
      }
    }
  };
  int64_t k = 0;
  for (; k + TURNS * step <= k_end; k += TURNS * step)
#pragma GCC unroll 4
    for (int turn = 0; turn < TURNS; turn++) add(k + turn * step, turn);
#pragma GCC unroll 4
  for (int turn = 0; turn < TURNS - 1; turn++)  // constant indices only, or the sums would live in memory
    if (k + step <= k_end) add(k, turn), k += step;
#pragma GCC unroll 4
  for (int turn = 1; turn < TURNS; turn++)
#pragma GCC unroll 16
    for (int i = 0; i < NUM * WEIGHTS; i++) sums[0][i] += sums[turn][i];
  alignas(64) float totals[NUM * WEIGHTS];
  each_sum<NUM * WEIGHTS>(sums[0], totals);
  for (; k < k_end; k++)
    for (int i = 0; i < NUM * WEIGHTS; i++) {
      const float weight = widen(w[i % WEIGHTS * stride + k]), x = widen(x_RK[i / WEIGHTS * x_stride + k]);
      totals[i] = std::fma(weight, x, totals[i]);  // said outright: what the compiler fuses differs by block
    }
  if (layer.bias_N)
    for (int i = 0; i < NUM * WEIGHTS; i++) totals[i] += layer.bias_N[first + i % WEIGHTS * apart];
  float* out = out_RN + first;
  const int64_t out_stride = layer.outputs;
#pragma GCC unroll 8
  for (int r = 0; r < NUM; r++, out += out_stride) {
    if (apart == 1) {
      std::memcpy(out, totals + r * WEIGHTS, WEIGHTS * sizeof(float));
      continue;
    }
    for (int n = 0; n < WEIGHTS; n++) out[n * apart] = totals[r * WEIGHTS + n];
  }
}

// NUM rows of x against outputs begin .. end, in whichever way the weights are read best.
template <typename T, int NUM>
void rows_of(const Linear<T>& layer, int64_t begin, int64_t end, const T* x_RK, float* out_RN) {
  int64_t n = begin;
  if (NUM == ROWS) {
    for (; n + OUT <= end; n += OUT) block<T, OUT, NUM>(layer, n, 1, x_RK, out_RN);
  } else {
    const int64_t run = (end - begin) / RUNS;
    for (; n < begin + run; n++) block<T, RUNS, NUM>(layer, n, run, x_RK, out_RN);
    n = begin + run * RUNS;
  }
  for (; n < end; n++) block<T, 1, NUM>(layer, n, 1, x_RK, out_RN);
}

// The weights of a chunk are read from memory for the first rows of x, and stay in the second cache for the others.
template <typename T>
void chunk(const Linear<T>& layer, int64_t begin, int64_t end, const T* x_RK, int64_t rows, float* out_RN) {
  auto from = [&](int64_t row) { return x_RK + row * layer.inputs; };
  auto to = [&](int64_t row) { return out_RN + row * layer.outputs; };
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) rows_of<T, ROWS>(layer, begin, end, from(r), to(r));
  if (ROWS > 4 && r + 4 <= rows) rows_of<T, 4>(layer, begin, end, from(r), to(r)), r += 4;
  if (r + 2 <= rows) rows_of<T, 2>(layer, begin, end, from(r), to(r)), r += 2;
  if (r < rows) rows_of<T, 1>(layer, begin, end, from(r), to(r));
}

template <typename T>
void in_chunks(Pool& pool, const Linear<T>& layer, const T* x_RK, int64_t rows, float* out_RN) {
  const int64_t threads = pool.num_threads(), bytes = layer.outputs * layer.inputs * int64_t(sizeof(T));
  // Whoever works alone on one row needs no chunks: nothing is shared out, and nothing is read twice.
  const int64_t some = std::max<int64_t>(1, (bytes + threads * CHUNK_BYTES / 2) / (threads * CHUNK_BYTES));
  const int64_t turns = threads == 1 && rows == 1 ? 1 : some;
  const int64_t size = std::max<int64_t>(16, (layer.outputs / (threads * turns) + 15) / 16 * 16);  // equal shares
  pool.run(int((layer.outputs + size - 1) / size), [&](int index) {
    chunk(layer, index * size, std::min(layer.outputs, (index + 1) * size), x_RK, rows, out_RN);
  });
}

}  // namespace

void linear(Pool& pool, const Linear<float>& layer, const float* x_RK, int64_t rows, float* out_RN) {
  in_chunks(pool, layer, x_RK, rows, out_RN);
}

void linear(Pool& pool, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows, float* out_RN) {
  if (layer.is_packed) return linear_in_panels(pool, layer, x_RK, rows, out_RN);
  in_chunks(pool, layer, x_RK, rows, out_RN);
}

}  // namespace pluglm
