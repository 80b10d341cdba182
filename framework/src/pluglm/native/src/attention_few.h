// Few rows against the keys and values as they lie, nothing packed: one query, or the few of a verified draft.
#pragma once
#include "attention_products.h"

namespace pluglm {

// With more rows packed keys are worth it; the second where packed ones are multiplied in tiles (tried on Emerald Rapids).
constexpr int FEW_ROWS = 16, FEW_BESIDE_TILES = 6;

#if defined(__AVX512BF16__)
constexpr int PAIRS = 16;  // in a register
constexpr int PIECE = 16;  // values of a key that are half a register
constexpr int COLUMNS_AT_ONCE = 64;  // of four rows: sixteen sums in registers

inline bool suits_few(int rows, int head_dim, bool has_tiles) {
  return rows <= (has_tiles ? FEW_BESIDE_TILES : FEW_ROWS) && head_dim % COLUMNS_AT_ONCE == 0;
}

inline vec multiply_pairs(vec a, vec b, vec sums) {
  return (vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

// Which rows are to be fetched into the second cache while others are worked on: those some way behind them in their
// stream or in the one that follows it. Rows of one head lie between those of others, which no CPU's own prefetching
// follows, and it is lines in an order of no stride that keep the most reads in flight. A core that has too many drops
// a fetch, so every row is asked for twice, far ahead and again nearer; what has arrived costs little (tried on Zen 4).
class Fetcher {
  static constexpr int GROUP = 16, FAR = 96, NEAR = 32;

 public:
  Fetcher(const Rows<bf16>& rows, const Rows<bf16>& after) : rows_(rows), after_(after) {}

  // The group of rows that is worked on begins at row i.
  void begin(int i) { far_ = behind(i, FAR), near_ = behind(i, NEAR); }

  // One line of every fourth row of both groups, from row `first` on. The empty statement keeps GCC from dropping the
  // call: for it, what only fetches has no effect.
  void lines(int byte, int first) const {
    asm volatile("");
    for (const Group& group : {far_, near_})
#pragma GCC unroll 4
      for (int i = first; i < GROUP; i += 4) __builtin_prefetch(group.head + byte + group.places[i], 0, 2);
  }

 private:
  struct Group {
    const char* head;
    const int64_t* places;
  };

  Group behind(int i, int distance) const {
    const int known = round_up(rows_.known, GROUP);
    i += std::min(distance, known);
    if (i < rows_.known) return {(const char*)rows_.head, rows_.places + i};
    i -= known;
    if (i < after_.known) return {(const char*)after_.head, after_.places + i};
    return {(const char*)rows_.head, rows_.places};
  }

  const Rows<bf16>&rows_, &after_;
  Group far_{}, near_{};
};

// work(row, ROWS) for all rows, up to four at a time, their number a constant.
template <typename Work>
inline void by_rows(int rows, Work&& work) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) work(row, std::integral_constant<int, 4>());
  if (rows - row == 3) work(row, std::integral_constant<int, 3>());
  if (rows - row == 2) work(row, std::integral_constant<int, 2>());
  if (rows - row == 1) work(row, std::integral_constant<int, 1>());
}

// The same piece of two keys in one register, or of a query twice.
inline vec two_pieces(const void* a, const void* b) {
  const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps((const float*)a));
  return (vec)_mm512_insertf32x8(low, _mm256_loadu_ps((const float*)b), 1);
}
inline vec one_piece(const void* a) { return (vec)_mm512_broadcast_f32x8(_mm256_loadu_ps((const float*)a)); }

#define PLUGLM_FOLD(A, B, LOW, HIGH) (__builtin_shufflevector(A, B, LOW) + __builtin_shufflevector(A, B, HIGH))
#define PLUGLM_LIST(...) __VA_ARGS__

// scores[row] = queries[row] . each of 16 keys. As a register holds pieces of two keys, half as many sums of lanes are
// left to be made. They come out in order for keys that are taken by fours.
template <int PIECES, int ROWS>
inline void score_group(const Pair* queries, int64_t depth, const Rows<bf16>& keys, int key, const Fetcher* fetcher,
                        int byte, vec* scores) {
  vec halves[2][ROWS];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    vec sums[4][ROWS];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const int place = half * 8 + i * 2;
      if (fetcher)
        for (int line = 0; line < PIECES / 4; line++) fetcher->lines(byte + half * PIECES * PIECE + line * 64, i);
      const bf16* a = keys.row(key + place % 4 * 4 + place / 4);
      const bf16* b = keys.row(key + (place + 1) % 4 * 4 + place / 4);
#pragma GCC unroll 8
      for (int p = 0; p < PIECES; p++) {
        const vec pieces = two_pieces(a + p * PIECE, b + p * PIECE);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
          sums[i][r] = multiply_pairs(one_piece(queries + r * depth + p * PIECE / 2), pieces, p ? sums[i][r] : vec{});
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      vec quarters[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++)
        quarters[i] = PLUGLM_FOLD(sums[2 * i][r], sums[2 * i + 1][r],
                                  PLUGLM_LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                                  PLUGLM_LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
      halves[half][r] = PLUGLM_FOLD(quarters[0], quarters[1],
                                    PLUGLM_LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                                    PLUGLM_LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; r++)
    scores[r] = PLUGLM_FOLD(halves[0][r], halves[1][r],
                            PLUGLM_LIST(0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
                            PLUGLM_LIST(1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
}
#undef PLUGLM_FOLD
#undef PLUGLM_LIST

// scores[row][key] = queries[row] . key, for keys up to a multiple of 16, those beyond the last being the last again.
template <int PIECES>
void few_scores(const Pair* queries, int64_t depth, int rows, const Rows<bf16>& keys, const Rows<bf16>& after,
                float* scores, int64_t stride) {
  Fetcher fetcher(keys, after);
  for (int key = 0; key < keys.count; key += 16) {
    fetcher.begin(key);
    for (int first = 0; first < keys.head_dim; first += PIECES * PIECE) {
      Rows<bf16> some = keys;
      some.head += first;
      by_rows(rows, [&](int row, auto count) {
        vec sums[count];
        score_group<PIECES, count>(queries + row * depth + first / 2, depth, some, key, row ? nullptr : &fetcher,
                                   first * 2, sums);
        for (int r = 0; r < count; r++) {
          float* to = scores + (row + r) * stride + key;
          store(to, first ? load(to) + sums[r] : sums[r]);
        }
      });
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
      if (asks) fetcher.lines(column * int(sizeof(bf16)) + (i < 8 ? 64 : 0), i % 8 / 2);
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
  const bool in_longer = keys.head_dim % (8 * PIECE) == 0;
  (in_longer ? few_scores<8> : few_scores<4>)(queries, depth, rows, keys, after, scores, stride);
}

inline void few_values(const Pair* weights, int64_t stride, int rows, const Rows<bf16>& values, const Rows<bf16>& after,
                       float* out, int64_t out_stride) {
  for (int column = 0; column < values.head_dim; column += COLUMNS_AT_ONCE)
    by_rows(rows, [&](int row, auto count) {
      few_values<count>(weights + row * stride, stride, values, after, column, row == 0,
                        out + row * out_stride, out_stride);
    });
}

#else

inline bool suits_few(int, int, bool) { return false; }
using ManyRows = const Rows<bf16>&;
inline void few_scores(const Pair*, int64_t, int, ManyRows, ManyRows, float*, int64_t) { std::abort(); }
inline void few_values(const Pair*, int64_t, int, ManyRows, ManyRows, float*, int64_t) { std::abort(); }

#endif

}  // namespace pluglm
