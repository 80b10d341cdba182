#include "panels.h"

#include <algorithm>
#include <atomic>

#include "tiles.h"

#if defined(__AVX512BF16__)
#include "attention_products.h"
#include "transpose.h"
#endif

namespace pluglm {

#if defined(__AVX512BF16__)

namespace {

constexpr int HALF = 16;  // outputs in a register; a panel is two such halves
constexpr int OUTPUTS = 2 * HALF;
constexpr int FEW = 4;    // up to so many rows the hardware's own prefetching keeps up, and ours is in the way
constexpr int64_t FEW_BYTES = 256 << 10;    // of weights in an item of work for as many rows as pass at once
constexpr int64_t PARTS_PER_THREAD = 4, LEAST_PART = 96;  // rows are parted where there are few groups for the threads

// The packed halves of a panel. One is of the first half of all outputs and one of the second: two long runs through the
// memory, which the hardware follows; and a gate meets what it gates.
struct Panel {
  const int32_t *first, *second;

  Panel next(int64_t stride) const { return {first + HALF * stride, second + HALF * stride}; }
};

// What becomes of two sums, those of one row and one panel.
template <typename Out>
struct Stored {
  static constexpr bool CALLS = false;  // whether it calls functions, which may use every register
  const float* bias_N;
  Out* out_RN;
  int64_t outputs;

  void operator()(int64_t row, int64_t panel, vec first, vec second) const {
    const int64_t half = outputs / 2, at = panel * HALF;
    if (bias_N) first += load(bias_N + at), second += load(bias_N + half + at);
    store(out_RN + row * outputs + at, first);
    store(out_RN + row * outputs + half + at, second);
  }
};

// x / (1 + e^-x), off by 2^-12 of it at most: it is rounded to 2^-9.
inline vec narrow_silu(vec x) {
  const vec power = power_of_two<Pair>(x * -1.44269504f);
  return x * (vec)_mm512_rcp14_ps((__m512)(power + 1.0f));
}

template <bool IS_SILU>
struct Gated {
  static constexpr bool CALLS = !IS_SILU;
  const float* bias_N;
  bf16* out_RI;
  int64_t inner;
  Activation kind;

  void operator()(int64_t row, int64_t panel, vec gate, vec up) const {
    if (bias_N) gate += load(bias_N + panel * HALF), up += load(bias_N + inner + panel * HALF);
    const vec active = IS_SILU ? narrow_silu(gate) : activate(kind, gate);
    store(out_RI + row * inner + panel * HALF, active * up);
  }
};

// x: the first of ROWS rows, which is number `row`. ahead: what is to be read next, fetched meanwhile if FETCH.
template <int ROWS, bool FETCH, typename Finish>
void multiply(Panel weights, Panel ahead, int64_t panel, const int32_t* x, int64_t stride, int64_t row,
              const Finish& finish) {
  vec firsts[ROWS] = {}, seconds[ROWS] = {};
  for (int64_t k = 0; k < stride; k++) {
    const auto first = (__m512bh)_mm512_load_si512(weights.first + k * HALF);
    const auto second = (__m512bh)_mm512_load_si512(weights.second + k * HALF);
    if (FETCH) __builtin_prefetch(ahead.first + k * HALF, 0, 2), __builtin_prefetch(ahead.second + k * HALF, 0, 2);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const auto pair = (__m512bh)_mm512_set1_epi32(x[r * stride + k]);
      firsts[r] = (vec)_mm512_dpbf16_ps((__m512)firsts[r], first, pair);
      seconds[r] = (vec)_mm512_dpbf16_ps((__m512)seconds[r], second, pair);
    }
  }
  if constexpr (Finish::CALLS) {  // from memory, or the sums would be there in the loop above already
    alignas(64) float sums[ROWS][OUTPUTS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) store(sums[r], firsts[r]), store(sums[r] + HALF, seconds[r]);
#pragma GCC unroll 1
    for (int r = 0; r < ROWS; r++) finish(row + r, panel, load(sums[r]), load(sums[r] + HALF));
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) finish(row + r, panel, firsts[r], seconds[r]);
  }
}

// Panels of a group, one after the other, and what is read after them.
struct Group {
  Panel weights, ahead;
  int64_t first, count;  // by their numbers

  template <typename Each>
  void each(int64_t stride, Each&& multiply) const {
    Panel now = weights;
    for (int64_t i = 0; i < count; i++) {
      const Panel next = now.next(stride);
      multiply(now, i + 1 < count ? next : ahead, first + i);
      now = next;
    }
  }
};

// Products in registers. MOST: rows of x at once; with two sums each, two weights and a pair they fill the registers.
// GROUP_BYTES: of panels that stay in the second cache while more rows pass.
struct Registers {
  static constexpr int MOST = 12;
  static constexpr int64_t GROUP_BYTES = 112 << 10;

  template <bool FETCH, int ROWS = MOST, typename Finish>
  static void run(int64_t rows, const Group& group, const int32_t* x, int64_t stride, int64_t row,
                  const Finish& finish) {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return run<FETCH, ROWS - 1>(rows, group, x, stride, row, finish);
    group.each(stride, [&](Panel weights, Panel ahead, int64_t panel) {
      multiply<ROWS, FETCH && (ROWS > FEW)>(weights, ahead, panel, x, stride, row, finish);
    });
  }
};

#if defined(__AMX_BF16__)

// Products in matrix tiles: a half of a panel and 32 inputs are one, and so are 16 rows of x as they lie. Those come from
// a third cache that is slow for one core, so they meet a large group.
struct Tiles {
  static constexpr int TILE = 16, MOST = 2 * TILE;
  static constexpr int64_t GROUP_BYTES = 1 << 20;

  template <bool FETCH, typename Finish>
  static void run(int64_t rows, const Group& group, const int32_t* x, int64_t stride, int64_t row,
                  const Finish& finish) {
    TileConfig config;
    for (int tile : {0, 1, 4}) config.rows[tile] = uint8_t(std::min<int64_t>(rows, TILE));
    for (int tile : {2, 3, 5}) config.rows[tile] = uint8_t(std::max<int64_t>(rows - TILE, 1));
    load_config(config);
    alignas(64) float sums[4][TILE][HALF];
    group.each(stride, [&](Panel weights, Panel ahead, int64_t panel) {
      if (rows > TILE) multiply<FETCH, true>(weights, ahead, x, stride, sums);
      else multiply<FETCH, false>(weights, ahead, x, stride, sums);
      for (int r = 0; r < rows; r++) {
        const auto* both = sums + r / TILE * 2;
        finish(row + r, panel, load(both[0][r % TILE]), load(both[1][r % TILE]));
      }
    });
    _tile_release();
  }

 private:
  template <bool FETCH, bool TWO>
  static void multiply(Panel weights, Panel ahead, const int32_t* x, int64_t stride, float (*sums)[TILE][HALF]) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < stride; k += TILE) {
      if (FETCH)
        for (int64_t i = k; i < k + TILE; i++)
          __builtin_prefetch(ahead.first + i * HALF, 0, 2), __builtin_prefetch(ahead.second + i * HALF, 0, 2);
      _tile_loadd(6, weights.first + k * HALF, 64);
      _tile_loadd(4, x + k, stride * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights.second + k * HALF, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (TWO) {
        _tile_loadd(5, x + TILE * stride + k, stride * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (TWO) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    }
  }
};

#endif

// Panels in groups and rows in parts: an item of work is one of each.
struct Plan {
  int64_t rows, at_once, groups, parts;  // at_once: panels of a group

  Plan(const Linear<bf16>& layer, int64_t num_rows, int64_t group_bytes, int64_t threads) : rows(num_rows) {
    const int64_t panels = layer.outputs / OUTPUTS, bytes = OUTPUTS * layer.inputs * int64_t(sizeof(bf16));
    at_once = std::max<int64_t>(1, group_bytes / bytes);
    while (at_once > 1 && panels % (at_once * threads)) at_once--;  // the same for every thread, or one panel at a time
    groups = panels / at_once;
    const int64_t wanted = threads == 1 ? 1 : (PARTS_PER_THREAD * threads + groups - 1) / groups;
    parts = std::clamp<int64_t>(rows / LEAST_PART, 1, wanted);
  }
  int64_t items() const { return groups * parts; }
  int64_t first_panel(int64_t item) const { return item % groups * at_once; }
  int64_t begin(int64_t item) const { return item / groups * rows / parts; }
  int64_t end(int64_t item) const { return (item / groups + 1) * rows / parts; }
};

template <typename Products, typename Finish>
void by(Pool& pool, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows, const Finish& finish) {
  constexpr int MOST = Products::MOST;
  const Plan plan(layer, rows, rows <= MOST ? FEW_BYTES : Products::GROUP_BYTES, pool.num_threads());
  const int64_t stride = layer.inputs / 2, items = plan.items();
  auto at = [&](int64_t panel) {
    const int32_t* first = (const int32_t*)layer.weight_NK + panel * HALF * stride;
    return Panel{first, first + layer.outputs / 2 * stride};
  };
  std::atomic<int64_t> unclaimed{0};
  auto claim = [&] { return unclaimed.fetch_add(1, std::memory_order_relaxed); };
  pool.run(int(std::min<int64_t>(pool.num_threads(), items)), [&](int) {
    for (int64_t item = claim(), then; item < items; item = then) {
      then = claim();  // beforehand, to know what to fetch
      const int64_t first = plan.first_panel(item), next = plan.first_panel(std::min(then, items - 1));
      const int64_t begin = plan.begin(item), count = plan.end(item) - begin, blocks = (count + MOST - 1) / MOST;
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = begin + b * count / blocks, end = begin + (b + 1) * count / blocks;  // as equal as can be
        const auto* x = (const int32_t*)x_RK + row * stride;
        const Group group{at(first), at(next), first, plan.at_once};
        if (b) Products::template run<false>(end - row, group, x, stride, row, finish);
        else Products::template run<true>(end - row, group, x, stride, row, finish);
      }
    }
  });
}

template <typename Finish>
void in_panels(Pool& pool, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows, const Finish& finish) {
#if defined(__AMX_BF16__)
  if (allow_tiles()) return by<Tiles>(pool, layer, x_RK, rows, finish);
#endif
  by<Registers>(pool, layer, x_RK, rows, finish);
}

}  // namespace

bool panels_fit(const Linear<bf16>& layer) {
  return layer.outputs && layer.outputs % OUTPUTS == 0 && layer.inputs && layer.inputs % 32 == 0;
}

void pack_weight(Pool& pool, Scratch& scratch, bf16* weight_NK, int64_t outputs, int64_t inputs) {
  const int64_t stride = inputs / 2, words = HALF * stride, halves = outputs / HALF, threads = pool.num_threads();
  auto* memory = (int32_t*)scratch.get(threads * words * sizeof(int32_t));
  pool.run(int(threads), [&](int index) {
    int32_t* copy = memory + index * words;
    for (int64_t half = index; half < halves; half += threads) {
      auto* rows = (int32_t*)weight_NK + half * words;
      std::memcpy(copy, rows, words * sizeof(int32_t));
      for (int64_t k = 0; k < stride; k += 16) transpose(copy + k, stride, HALF, rows + k * HALF, HALF);
    }
  });
}

template <typename Out>
void linear_in_panels(Pool& pool, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows, Out* out_RN) {
  in_panels(pool, layer, x_RK, rows, Stored<Out>{layer.bias_N, out_RN, layer.outputs});
}

void gated_in_panels(Pool& pool, const Linear<bf16>& gate_up, Activation kind, const bf16* x_RK, int64_t rows,
                     bf16* out_RI) {
  const int64_t inner = gate_up.outputs / 2;
  auto run = [&](auto finish) { in_panels(pool, gate_up, x_RK, rows, finish); };
  if (kind == SILU) run(Gated<true>{gate_up.bias_N, out_RI, inner, kind});
  else run(Gated<false>{gate_up.bias_N, out_RI, inner, kind});
}

#else

bool panels_fit(const Linear<bf16>&) { return false; }
void pack_weight(Pool&, Scratch&, bf16*, int64_t, int64_t) { std::abort(); }
template <typename Out>
void linear_in_panels(Pool&, const Linear<bf16>&, const bf16*, int64_t, Out*) { std::abort(); }
void gated_in_panels(Pool&, const Linear<bf16>&, Activation, const bf16*, int64_t, bf16*) { std::abort(); }

#endif

template void linear_in_panels(Pool&, const Linear<bf16>&, const bf16*, int64_t, float*);
template void linear_in_panels(Pool&, const Linear<bf16>&, const bf16*, int64_t, bf16*);

}  // namespace pluglm
