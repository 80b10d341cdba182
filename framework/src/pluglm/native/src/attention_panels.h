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

constexpr int AHEAD = 64;  // rows that are asked for before they are read

// Rows of one head in the store: row(i) lies places[i] bytes behind it. known: places there are, also behind `count`.
template <typename T>
struct Rows {
  const T* head;
  const int64_t* places;
  int count, head_dim, known;

  const T* row(int i) const { return (const T*)((const char*)head + places[i]); }

  Rows part(int i, int num) const { return {head, places + i, std::min(num, count - i), head_dim, known - i}; }

  // Asks for `num` rows from row i on. The empty statement keeps GCC from dropping the call: for it, what only fetches
  // has no effect.
  void fetch(int i, int num) const {
    asm volatile("");
    const int end = std::min(i + num, known), bytes = head_dim * sizeof(T);
    for (int byte = 0; byte < bytes; byte += 64)
      for (int k = i; k < end; k++) __builtin_prefetch((const char*)row(k) + byte, 0, 2);
  }
};

// LANES units of a row, all there.
template <typename Unit, typename T>
vec load_units(const T* values) {
  if constexpr (std::is_same_v<Unit, Pair>) return load((const float*)values);
  else return load(values);
}

// The same of a row that ends after `count` values, zeros behind.
template <typename Unit, typename T>
vec load_units(const T* values, int count) {
  T padded[LANES * PER_UNIT<Unit>] = {};
  std::memcpy(padded, values, std::clamp(count, 0, LANES * PER_UNIT<Unit>) * sizeof(T));
  return load_units<Unit>(padded);
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

// Keys as columns: row u of the panels is unit u of every key. Depth beyond the head is filled with zeros, columns
// beyond the keys with the last one.
template <typename Unit, typename T>
void pack_keys(const Rows<T>& keys, const Panels<Unit>& panels) {
  constexpr int STEP = LANES * PER_UNIT<Unit>;
  for (int key = 0; key < keys.count; key += LANES) {
    keys.fetch(key + AHEAD, LANES);
    const int width = panels.width(key), last = keys.count - 1;
    auto turn = [&](int first, auto&& load_row) __attribute__((always_inline)) {
      vec block[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) block[i] = load_row(keys.row(std::min(key + i, last)) + first);
      transpose_step<LANES / 2>(block);
      float* to = (float*)panels.row(key, first / PER_UNIT<Unit>);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(to + i * width, block[i]);
    };
    int first = 0;
    for (; first + STEP <= keys.head_dim; first += STEP) turn(first, [](const T* at) { return load_units<Unit>(at); });
    for (; first < panels.depth * PER_UNIT<Unit>; first += STEP)
      turn(first, [&](const T* at) { return load_units<Unit>(at, keys.head_dim - first); });
  }
}

// Values as rows, one for each key.
template <typename T>
void pack_values(const Rows<T>& values, const Panels<float>& panels) {
  for (int key = 0; key < values.count; key++) {
    if (key % LANES == 0) values.fetch(key + AHEAD, LANES);
    const T* row = values.row(key);
    int column = 0;
    for (; column + LANES <= values.head_dim; column += LANES)
      store((float*)panels.row(column, key), load_units<float>(row + column));
    if (column < panels.columns)
      store((float*)panels.row(column, key), load_units<float>(row + column, values.head_dim - column));
  }
}

// As many columns of a result as pack_values packs at a time.
template <typename T>
void store_columns(T* out, const vec* columns) {
  store(out, columns[0]);
}

#if defined(__AVX512BF16__)
// A row for every two keys, zeros up to `depth` rows. Interleaving works within 128 bits, so that columns change places
// in each 32 of them; store_columns puts them back.
inline void pack_values(const Rows<bf16>& values, const Panels<Pair>& panels) {
  const int whole = values.head_dim / 32 * 32;
  for (int pair = 0; pair < panels.depth; pair++) {
    if (pair % 8 == 0) values.fetch(2 * pair + AHEAD, 16);
    const int num = std::clamp(values.count - 2 * pair, 0, 2);
    const bf16 *first = values.row(num ? 2 * pair : 0), *second = values.row(num == 2 ? 2 * pair + 1 : 0);
    auto interleave = [&](int column, auto&& load_row) __attribute__((always_inline)) {
      const vec a = load_row(first + column, num > 0), b = load_row(second + column, num > 1);
      Pair* to = panels.row(column, pair);
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16((__m512i)a, (__m512i)b));
      _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16((__m512i)a, (__m512i)b));
    };
    int column = 0;
    auto load_whole = [](const bf16* at, bool) { return load_units<Pair>(at); };
    for (; num == 2 && column < whole; column += 32) interleave(column, load_whole);
    for (; column < panels.columns; column += 32)
      interleave(column, [&](const bf16* at, bool is_there) {
        return is_there ? load_units<Pair>(at, values.head_dim - column) : vec{};
      });
  }
}

template <>
inline void store_columns(bf16* out, const vec* columns) {
  const vec a = columns[0], b = columns[1];
  const vec low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const vec high = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#endif

}  // namespace pluglm
