// Keys and values of a span of one sequence, gathered from their slots into the layout that both products read:
// panels of columns, one row after the other, so that a product walks strictly forward.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "vec.h"

namespace pluglm {

// Two bfloat16 values that follow one another along a sum: what a 32-bit lane multiplies in one instruction.
struct Pair {
  bf16 first, second;
};

// A unit is 32 bits of a row: a Pair where the CPU multiplies them, otherwise a float.
#if defined(__AVX512BF16__)
template <typename T>
using UnitOf = std::conditional_t<std::is_same_v<T, bf16>, Pair, float>;
#else
template <typename T>
using UnitOf = float;
#endif

template <typename Unit>
constexpr int PER_UNIT = std::is_same_v<Unit, Pair> ? 2 : 1;

constexpr int PANEL = LANES == 8 ? 16 : LANES * 4;  // columns; as many sums as registers can hold for several rows

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// depth rows of `columns` columns, a multiple of LANES; the last panel may be narrower than PANEL.
template <typename Unit>
struct Panels {
  Unit* memory;
  int depth, columns;

  Unit* row(int column, int row) const {
    return memory + int64_t(column / PANEL) * PANEL * depth + row * width(column) + column % PANEL;
  }
  int width(int column) const { return std::min(PANEL, columns - column / PANEL * PANEL); }
};

constexpr int AHEAD = 32;  // rows

// Rows of one head in the store: row(i) is at slots[i]. known: slots there are, also behind the `count` rows.
template <typename T>
struct Rows {
  const T* head;
  int64_t stride;
  const int32_t* slots;
  int count, head_dim, known;

  const T* row(int i) const { return head + slots[i] * stride; }

  Rows part(int i, int num) const { return {head, stride, slots + i, std::min(num, count - i), head_dim, known - i}; }

  // Asks for `num` rows from row i on.
  void fetch(int i, int num) const {
    const int bytes = head_dim * sizeof(T);
    for (num = std::min(num, known - i); num > 0; i++, num--)
      for (int byte = 0; byte < bytes; byte += 64) prefetch((const char*)row(i) + byte);
  }
};

// LANES units that begin at value `first` of a row, zeros behind its end.
template <typename Unit, typename T>
vec load_units(const T* row, int first, int head_dim) {
  constexpr int COUNT = LANES * PER_UNIT<Unit>;
  T padded[COUNT];
  if (first + COUNT > head_dim) {
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, row + first, std::max(0, head_dim - first) * sizeof(T));
    row = padded;
    first = 0;
  }
  if constexpr (std::is_same_v<Unit, Pair>) return load((const float*)(row + first));
  else return load(row + first);
}

template <int HALF, bool UPPER, size_t... I>
vec exchange(vec a, vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I & HALF ? LANES + int(I) - HALF : int(I)) + (UPPER ? HALF : 0)...);
}

// Swaps bit HALF of the row's number with that of the lane's; all of them together turn the square around.
template <int HALF>
inline void transpose_step(vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    if (i & HALF) continue;
    const vec a = rows[i], b = rows[i + HALF];
    rows[i] = exchange<HALF, false>(a, b, std::make_index_sequence<LANES>());
    rows[i + HALF] = exchange<HALF, true>(a, b, std::make_index_sequence<LANES>());
  }
  if constexpr (HALF > 1) transpose_step<HALF / 2>(rows);
}

// Keys as columns: row u of the panels is unit u of every key. Depth beyond the head is filled with zeros.
template <typename Unit, typename T>
void pack_keys(const Rows<T>& keys, const Panels<Unit>& panels) {
  for (int key = 0; key < keys.count; key += LANES) {
    const T* rows[LANES];
    keys.fetch(key + AHEAD, LANES);
    for (int i = 0; i < LANES; i++) rows[i] = keys.row(std::min(key + i, keys.count - 1));
    for (int unit = 0; unit < panels.depth; unit += LANES) {
      vec block[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) block[i] = load_units<Unit>(rows[i], unit * PER_UNIT<Unit>, keys.head_dim);
      transpose_step<LANES / 2>(block);
      float* to = (float*)panels.row(key, unit);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(to + i * panels.width(key), block[i]);
    }
  }
}

// Values as rows, one for each key.
template <typename T>
void pack_values(const Rows<T>& values, const Panels<float>& panels) {
  for (int key = 0; key < values.count; key++) {
    const T* row = values.row(key);
    for (int column = 0; column < panels.columns; column += LANES)
      store(panels.row(column, key), load_units<float>(row, column, values.head_dim));
  }
}

#if defined(__AVX512BF16__)
// A row for every two keys, zeros up to `depth` rows. Interleaving works within 128 bits, so that columns change places
// in each 32 of them; natural_columns puts them back.
inline void pack_values(const Rows<bf16>& values, const Panels<Pair>& panels) {
  auto interleave = [&](int pair, __m512i a, __m512i b, int column) __attribute__((always_inline)) {
    Pair* to = panels.row(column, pair);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(a, b));
  };
  auto load_row = [&](const bf16* row, int column) { return (__m512i)load_units<Pair>(row, column, values.head_dim); };
  const int whole = values.count / 2;
  for (int column = 0; column < panels.columns; column += 32) {
    for (int pair = 0; pair < whole; pair++) {
      if (column == 0) values.fetch(2 * pair + AHEAD, 2);
      interleave(pair, load_row(values.row(2 * pair), column), load_row(values.row(2 * pair + 1), column), column);
    }
    for (int pair = whole; pair < panels.depth; pair++) {
      const bool has_first = 2 * pair < values.count;
      const __m512i zero = _mm512_setzero_si512();
      interleave(pair, has_first ? load_row(values.row(2 * pair), column) : zero, zero, column);
    }
  }
}

inline void natural_columns(vec& low, vec& high) {
  const vec a = low, b = high;
  low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  high = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}
#endif

}  // namespace pluglm
