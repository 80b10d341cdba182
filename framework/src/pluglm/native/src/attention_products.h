// The two products of attention, in registers, and the softmax between them.
#pragma once
#include "attention_panels.h"

namespace pluglm {

inline vec multiply_add(float left, vec right, vec sums) { return right * left + sums; }
#if defined(__AVX512BF16__)
inline vec multiply_add(Pair left, vec right, vec sums) {
  int32_t word;
  std::memcpy(&word, &left, 4);
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(word), (__m512bh)right);
}
#endif

// What a product reads and where it goes: out[r][column] = sum over k_begin <= k < k_end of left[r][k] right[k][column]
// for column_begin (a multiple of PANEL) <= column < column_end (of LANES).
template <typename Unit>
struct Product {
  const Unit* left;
  int64_t left_stride;
  int rows;
  Panels<Unit> right;
  int k_begin, k_end, column_begin, column_end;
  float* out;
  int64_t out_stride;
  bool goes_on = false;  // from the sums in out, instead of zero
};

template <typename Unit, int ROWS, int VECTORS>
void product_block(const Product<Unit>& job, int row, int column) {
  const Unit* left = job.left + row * job.left_stride;
  const Unit* right = job.right.row(column, job.k_begin);
  const int width = job.right.width(column);
  float* out = job.out + row * job.out_stride + column;
  vec sums[ROWS][VECTORS] = {};
  if (job.goes_on)
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sums[r][v] = load(out + r * job.out_stride + v * LANES);
  for (int k = job.k_begin; k < job.k_end; k++, right += width) {
    vec columns[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) columns[v] = load((const float*)right + v * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        sums[r][v] = multiply_add(left[r * job.left_stride + k], columns[v], sums[r][v]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(out + r * job.out_stride + v * LANES, sums[r][v]);
}

template <typename Unit, int VECTORS>
void product_rows(const Product<Unit>& job, int column) {
  int row = 0;
  for (; row + 4 <= job.rows; row += 4) product_block<Unit, 4, VECTORS>(job, row, column);
  if (job.rows - row == 3) product_block<Unit, 3, VECTORS>(job, row, column);
  if (job.rows - row == 2) product_block<Unit, 2, VECTORS>(job, row, column);
  if (job.rows - row == 1) product_block<Unit, 1, VECTORS>(job, row, column);
}

// Every sum runs through k in order, one multiply-add after the other, whatever the block it is computed in.
template <typename Unit>
void multiply(const Product<Unit>& job) {
  for (int column = job.column_begin; column < job.column_end; column += PANEL) {
    const int vectors = std::min(PANEL, job.column_end - column) / LANES;
    if (vectors == 4) product_rows<Unit, std::min(4, PANEL / LANES)>(job, column);
    if (vectors == 3) product_rows<Unit, std::min(3, PANEL / LANES)>(job, column);
    if (vectors == 2) product_rows<Unit, 2>(job, column);
    if (vectors == 1) product_rows<Unit, 1>(job, column);
  }
}

inline vec maximum(vec a, vec b) {  // b when either is NaN
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

// 2^x for x <= 0 or a little above, and 0 below -126: a polynomial in what rounding leaves of x, with the coefficients
// of the Cephes library's exp2f.
template <typename Unit>
vec power_of_two(vec x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const vec clamped = maximum(splat(-127.0f), x);
  const vec shifted = clamped + ROUND;
  const vec r = clamped - (shifted - ROUND);
  vec p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  p = p * r + 1.0f;
  const vec result = (vec)((ivec)p + ((ivec)shifted << 23));
  return clamped < -126.0f ? splat(0.0f) : result;
}

#if defined(__AVX512BF16__)
// For weights that are rounded to bfloat16: the polynomial of degree 3 that is off by the least, 7.5e-5.
template <>
inline vec power_of_two<Pair>(vec x) {
  const vec r = (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  const vec p = ((r * 7.80245217e-2f + 2.26067157e-1f) * r + 6.9583354e-1f) * r + 9.99925219e-1f;
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
}
#endif

// Of one row over some keys: its largest score, in powers of two, and the sum of its weights 2^(score - top).
struct Summary {
  float top, total;
};
constexpr Summary NOTHING = {-1e30f, 0.0f};  // below every score and finite, so that it merges without a trace

// Weights of so many keys are stored at once.
template <typename Unit>
constexpr int WEIGHTS = LANES * PER_UNIT<Unit>;

inline void store_weights(float* weights, const vec* values) { store(weights, values[0]); }
#if defined(__AVX512BF16__)
inline void store_weights(Pair* weights, const vec* values) {
  _mm512_storeu_si512(weights, (__m512i)_mm512_cvtne2ps_pbh((__m512)values[1], (__m512)values[0]));
}
#endif

template <size_t... I>
vec lane_numbers(std::index_sequence<I...>) {
  return vec{float(I)...};
}

// Keys from `count` on, up to `stop`, become ones that no row sees.
inline void hide_after(float* scores, int count, int stop) {
  int key = count / LANES * LANES;
  if (key < count) {
    const vec lanes = lane_numbers(std::make_index_sequence<LANES>());
    store(scores + key, lanes < float(count - key) ? load(scores + key) : splat(-INFINITY));
    key += LANES;
  }
  for (; key < stop; key += LANES) store(scores + key, splat(-INFINITY));
}

inline float largest_of(const float* scores, int count) {
  vec tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};  // hide a maximum's latency
  const float* end = scores + count;
  for (; scores + 4 * LANES <= end; scores += 4 * LANES)
    for (int k = 0; k < 4; k++) tops[k] = maximum(tops[k], load(scores + k * LANES));
  for (; scores < end; scores += LANES) tops[0] = maximum(tops[0], load(scores));
  vec top = maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3]));
#define PLUGLM_MAXIMUM(...) top = maximum(top, __builtin_shufflevector(top, top, __VA_ARGS__));
  PLUGLM_HALVES(PLUGLM_MAXIMUM)
#undef PLUGLM_MAXIMUM
  return top[0];
}

// Turns a row's products into weights in the same memory, where Pairs take half of it: those of keys from .. until
// (multiples of WEIGHTS), of which the row sees begin .. end. factor: from products to powers of two.
template <typename Unit>
Summary weigh(float* scores, int begin, int end, float factor, int from, int until) {
  constexpr int STEP = WEIGHTS<Unit>;
  auto* weights = (Unit*)scores;
  auto clear = [&](int start, int stop) {
    if (stop > start) std::memset(weights + start / PER_UNIT<Unit>, 0, (stop - start) / PER_UNIT<Unit> * sizeof(Unit));
  };
  if (begin >= end) return clear(from, until), NOTHING;
  const int first = begin / STEP * STEP, last = round_up(end, STEP);
  for (int key = first; key < begin; key++) scores[key] = -INFINITY;
  hide_after(scores, end, last);
  const float top = largest_of(scores + first, last - first) * factor;
  vec total = splat(0.0f);
  Unit* to = weights + first / PER_UNIT<Unit>;
  for (const float *at = scores + first, *stop = scores + last; at < stop; at += STEP, to += LANES) {
    vec values[STEP / LANES];
    for (int i = 0; i < STEP / LANES; i++) {
      values[i] = power_of_two<Unit>(load(at + i * LANES) * factor - top);
      total += values[i];
    }
    store_weights(to, values);
  }
  clear(from, first);
  clear(last, until);
  return {top, sum(total)};
}

}  // namespace pluglm
