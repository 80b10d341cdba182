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
};

template <typename Unit, int ROWS, int VECTORS>
void product_block(const Product<Unit>& job, int row, int column) {
  const Unit* left = job.left + row * job.left_stride;
  const Unit* right = job.right.row(column, job.k_begin);
  const int width = job.right.width(column);
  vec sums[ROWS][VECTORS] = {};
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
    for (int v = 0; v < VECTORS; v++) store(job.out + (row + r) * job.out_stride + column + v * LANES, sums[r][v]);
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

// 2^x for x <= 0 or a little above, 0 below -126: a polynomial in what is left of x after rounding, its coefficients
// those of the Cephes library's exp2f, or fitted to 2^x in four terms (7.5e-5 off at most) where bfloat16 follows.
template <typename Unit>
vec power_of_two(vec x) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const vec clamped = maximum(splat(-127.0f), x);
  const vec shifted = clamped + ROUND;
  const vec r = clamped - (shifted - ROUND);
  vec p;
  if constexpr (std::is_same_v<Unit, Pair>) {
    p = r * 5.51716672e-2f + 2.42611122e-1f;
    p = p * r + 6.93260986e-1f;
    p = p * r + 9.99928074e-1f;
  } else {
    p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
  }
  const vec result = (vec)((ivec)p + ((ivec)shifted << 23));
  return clamped < -126.0f ? splat(0.0f) : result;
}

// Of one row over some keys: its largest score, in powers of two, and the sum of its weights 2^(score - top).
struct Summary {
  float top, total;
};
constexpr Summary NOTHING = {-1e30f, 0.0f};  // below every score and finite, so that it merges without a trace

inline void store_weights(float* weights, vec value) { store(weights, value); }
#if defined(__AVX512BF16__)
inline void store_weights(Pair* weights, vec value) {
  _mm256_storeu_si256((__m256i*)weights, (__m256i)_mm512_cvtneps_pbh((__m512)value));
}
#endif

// The weights of keys from .. to (multiples of LANES) of a row that sees keys begin .. end of them. scores: products,
// overwritten; weights may be the same memory. factor: of scores to powers of two.
template <typename Unit>
Summary weigh(float* scores, int begin, int end, float factor, Unit* weights, int from, int to) {
  const int first = begin / LANES * LANES, last = round_up(end, LANES);
  auto clear = [&](int start, int stop) {
    for (int key = start; key < stop; key += LANES) store_weights(weights + key / PER_UNIT<Unit>, splat(0.0f));
  };
  if (begin >= end) return clear(from, to), NOTHING;
  for (int key = first; key < begin; key++) scores[key] = -INFINITY;
  for (int key = end; key < last; key++) scores[key] = -INFINITY;
  vec tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  int key = first;
  for (; key + 4 * LANES <= last; key += 4 * LANES)
    for (int i = 0; i < 4; i++) tops[i] = maximum(tops[i], load(scores + key + i * LANES));
  for (; key < last; key += LANES) tops[0] = maximum(tops[0], load(scores + key));
  const float top = largest(maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3]))) * factor;
  vec total = splat(0.0f);
  clear(from, first);
  for (key = first; key < last; key += LANES) {
    const vec weight = power_of_two<Unit>(load(scores + key) * factor - top);
    total += weight;
    store_weights(weights + key / PER_UNIT<Unit>, weight);
  }
  clear(last, to);
  return {top, sum(total)};
}

}  // namespace pluglm
