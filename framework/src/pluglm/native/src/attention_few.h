// Few rows against the keys and values as they lie, nothing packed: one query, or the few of a verified draft.
#pragma once
#include "attention_products.h"

namespace pluglm {

constexpr int FEW_ROWS = 8;  // with more of them packed keys are worth it

#if defined(__AVX512BF16__)
constexpr int PAIRS = 16;  // in a register
constexpr int ROWS_AT_ONCE = 4, COLUMNS_AT_ONCE = 64;  // sixteen sums in registers

inline bool suits_few(int rows, int head_dim) { return rows <= FEW_ROWS && head_dim % COLUMNS_AT_ONCE == 0; }

inline vec multiply_pairs(vec a, vec b, vec sums) {
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

// Which rows are to be fetched into the second cache while others are worked on: some way behind them in their stream
// or in the one that follows it. Rows of one head lie between those of others, which no CPU's own prefetching
// follows, and it is a burst of lines in an order of no stride that keeps the most reads in flight (tried on Zen 4).
class Fetcher {
  static constexpr int GROUP = 16, DISTANCE = 192;

 public:
  Fetcher(const Rows<bf16>& rows, const Rows<bf16>& after)
      : rows_(rows), after_(after), distance_(std::min(DISTANCE, round_up(rows.known, GROUP))) {}

  // The group of rows that is worked on begins at row i.
  void begin(int i) {
    i += distance_;
    const bool has_more = i < rows_.known;
    if (!has_more) i -= round_up(rows_.known, GROUP);
    const Rows<bf16>& from = has_more || i >= after_.known ? rows_ : after_;
    slots_ = from.slots + (has_more || i < after_.known ? i : 0);
    head_ = (const char*)from.head;
    stride_ = from.stride * int64_t(sizeof(bf16));
  }

  // One line of every STEP-th row of the group, from row `first` on. The empty statement keeps GCC from dropping the
  // call: for it, what only fetches has no effect.
  template <int STEP>
  void line(int byte, int first) const {
    asm volatile("");
#pragma GCC unroll 16
    for (int i = 0; i < GROUP / STEP; i++)
      __builtin_prefetch(head_ + slots_[first + i * STEP] * stride_ + byte, 0, 2);
  }

 private:
  const Rows<bf16>&rows_, &after_;
  int distance_;
  int64_t stride_ = 0;
  const int32_t* slots_ = nullptr;
  const char* head_ = nullptr;
};

// scores[row][key] = queries[row] . key, for keys up to a multiple of 16, those beyond the last being the last again.
template <int CHUNKS>
void few_scores(const Pair* queries, int64_t depth, int rows, const Rows<bf16>& keys, const Rows<bf16>& after,
                float* scores, int64_t stride) {
  Fetcher fetcher(keys, after);
  for (int key = 0; key < keys.count; key += 16) {
    fetcher.begin(key);
    const float* at[16];
    for (int i = 0; i < 16; i++) at[i] = (const float*)keys.row(std::min(key + i, keys.count - 1));
    for (int row = 0; row < rows; row++) {
      vec query[CHUNKS], sums[16];
      for (int c = 0; c < CHUNKS; c++) query[c] = load((const float*)(queries + row * depth) + c * PAIRS);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        sums[i] = multiply_pairs(query[0], load(at[i]), vec{});
#pragma GCC unroll 8
        for (int c = 1; c < CHUNKS; c++) sums[i] = multiply_pairs(query[c], load(at[i] + c * PAIRS), sums[i]);
      }
      for (int line = row * CHUNKS / rows; line < (row + 1) * CHUNKS / rows; line++) fetcher.line<1>(line * 64, 0);
      each_sum<16>(sums, scores + row * stride + key);
    }
  }
}

// out[row][column] = sum over keys of weights[row][key] * values[key][column], columns in the order of pack_values.
template <int ROWS>
void few_values(const Pair* weights, int64_t stride, const Rows<bf16>& values, const Rows<bf16>& after, int column,
                bool asks, float* out, int64_t out_stride) {
  vec sums[ROWS][4] = {};
  Fetcher fetcher(values, after);
  auto add = [&](int key) __attribute__((always_inline)) {
    const auto* a = (const float*)(values.row(key) + column);
    const auto* b = (const float*)(values.row(std::min(key + 1, values.count - 1)) + column);
    vec pairs[4];
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const auto one = (__m512i)load(a + v * PAIRS), other = (__m512i)load(b + v * PAIRS);
      pairs[2 * v] = (vec)_mm512_unpacklo_epi16(one, other);
      pairs[2 * v + 1] = (vec)_mm512_unpackhi_epi16(one, other);
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sums[row][v] = multiply_add(weights[row * stride + key / 2], pairs[v], sums[row][v]);
  };
  int key = 0;
  for (; key + 16 <= values.count; key += 16) {
    if (asks) fetcher.begin(key);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      if (asks) fetcher.line<4>(column * int(sizeof(bf16)) + (i < 8 ? 64 : 0), i % 8 / 2);
      add(key + i);
    }
  }
  for (; key < values.count; key += 2) add(key);
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) store(out + row * out_stride + column + v * LANES, sums[row][v]);
}

inline void few_scores(const Pair* queries, int64_t depth, int rows, const Rows<bf16>& keys,
                       const Rows<bf16>& after, float* scores, int64_t stride) {
  if (keys.head_dim == 64) return few_scores<2>(queries, depth, rows, keys, after, scores, stride);
  if (keys.head_dim == 128) return few_scores<4>(queries, depth, rows, keys, after, scores, stride);
  for (int row = 0; row < rows; row++) std::memset(scores + row * stride, 0, round_up(keys.count, 16) * sizeof(float));
  alignas(64) float part[FEW_ROWS * 16];
  for (int first = 0; first < keys.head_dim; first += 64)
    for (int key = 0; key < keys.count; key += 16) {
      Rows<bf16> some = keys.part(key, 16), then = after;
      some.head += first, then.head += first;
      few_scores<2>(queries + first / 2, depth, rows, some, then, part, 16);
      for (int row = 0; row < rows; row++) {
        float* to = scores + row * stride + key;
        store(to, load(to) + load(part + row * 16));
      }
    }
}

inline void few_values(const Pair* weights, int64_t stride, int rows, const Rows<bf16>& values, const Rows<bf16>& after,
                       float* out, int64_t out_stride) {
  for (int row = 0; row < rows; row += ROWS_AT_ONCE)
    for (int column = 0; column < values.head_dim; column += COLUMNS_AT_ONCE) {
      const Pair* some = weights + row * stride;
      float* to = out + row * out_stride;
      const bool asks = row == 0;
      switch (std::min(rows - row, ROWS_AT_ONCE)) {
        case 1: few_values<1>(some, stride, values, after, column, asks, to, out_stride); break;
        case 2: few_values<2>(some, stride, values, after, column, asks, to, out_stride); break;
        case 3: few_values<3>(some, stride, values, after, column, asks, to, out_stride); break;
        default: few_values<4>(some, stride, values, after, column, asks, to, out_stride);
      }
    }
}

#else

inline bool suits_few(int, int) { return false; }
using ManyRows = const Rows<bf16>&;
inline void few_scores(const Pair*, int64_t, int, ManyRows, ManyRows, float*, int64_t) { std::abort(); }
inline void few_values(const Pair*, int64_t, int, ManyRows, ManyRows, float*, int64_t) { std::abort(); }

#endif

}  // namespace pluglm
