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
constexpr int MOST = 12;  // rows of x at once: with two sums each, two weights and a pair they fill the registers
constexpr int64_t GROUP_BYTES = 112 << 10;  // of panels that stay in the second cache while all rows pass
constexpr int64_t PARTS_PER_THREAD = 4, LEAST_PART = 96;  // rows are parted where there are few groups for the threads

// Which weight rows make a panel: HALF of them from panel * step on, and HALF that lie `apart` behind those.
struct Order {
  int64_t step, apart;
};

// What becomes of two sums, those of one row and one panel.
template <typename Out>
struct Stored {
  static constexpr bool CALLS = false;  // whether it calls functions, which may use every register
  const float* bias_N;
  Out* out_RN;
  int64_t outputs;

  void operator()(int64_t row, int64_t panel, vec first, vec second) const {
    if (bias_N) first += load(bias_N + panel * OUTPUTS), second += load(bias_N + panel * OUTPUTS + HALF);
    store(out_RN + row * outputs + panel * OUTPUTS, first);
    store(out_RN + row * outputs + panel * OUTPUTS + HALF, second);
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

// The panel's weight rows as [inputs / 2][half][HALF] pairs. Meanwhile those of panel `next` are fetched.
void pack(const Linear<bf16>& layer, Order order, int64_t number, int64_t next, int32_t* panel) {
  const int64_t stride = layer.inputs / 2;
  const auto* weights = (const int32_t*)layer.weight_NK;
  for (int half = 0; half < 2; half++) {
    const int32_t* from = weights + (number * order.step + half * order.apart) * stride;
    const int32_t* ahead = weights + (next * order.step + half * order.apart) * stride;
    for (int64_t k = 0; k < stride; k += 16) {
      for (int i = 0; i < HALF; i++) __builtin_prefetch(ahead + i * stride + k, 0, 2);
      transpose(from + k, stride, HALF, panel + (2 * k + half) * HALF, OUTPUTS);
    }
  }
}

// x: the first of ROWS rows, which is number `row`.
template <int ROWS, typename Finish>
void multiply(const int32_t* weights, int64_t panel, const int32_t* x, int64_t stride, int64_t row,
              const Finish& finish) {
  vec firsts[ROWS] = {}, seconds[ROWS] = {};
  for (int64_t k = 0; k < stride; k++, weights += OUTPUTS) {
    const auto first = (__m512bh)_mm512_load_si512(weights), second = (__m512bh)_mm512_load_si512(weights + HALF);
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

// The same for a number of rows that is not known beforehand, 1 .. MOST.
template <int ROWS = MOST, typename Finish>
void multiply_some(int64_t rows, const int32_t* weights, int64_t panel, const int32_t* x, int64_t stride, int64_t row,
                   const Finish& finish) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return multiply_some<ROWS - 1>(rows, weights, panel, x, stride, row, finish);
  multiply<ROWS>(weights, panel, x, stride, row, finish);
}

// Panels in groups and rows in parts: an item of work is one of each.
struct Plan {
  int64_t rows, at_once, groups, parts;  // at_once: panels of a group

  Plan(const Linear<bf16>& layer, int64_t num_rows, int64_t threads) : rows(num_rows) {
    const int64_t panels = layer.outputs / OUTPUTS, bytes = OUTPUTS * layer.inputs * int64_t(sizeof(bf16));
    at_once = std::max<int64_t>(1, GROUP_BYTES / bytes);
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

template <typename Finish>
void in_panels(Pool& pool, Scratch& scratch, const Linear<bf16>& layer, Order order, const bf16* x_RK, int64_t rows,
               const Finish& finish) {
  const Plan plan(layer, rows, pool.num_threads());
  const int64_t stride = layer.inputs / 2, words = stride * OUTPUTS, items = plan.items();
  auto* memory = (int32_t*)scratch.get(pool.num_threads() * plan.at_once * words * sizeof(int32_t));
  std::atomic<int64_t> unclaimed{0};
  auto claim = [&] { return unclaimed.fetch_add(1, std::memory_order_relaxed); };
  pool.run(int(std::min<int64_t>(pool.num_threads(), items)), [&](int index) {
    int32_t* group = memory + index * plan.at_once * words;
    for (int64_t item = claim(), then; item < items; item = then) {
      then = claim();  // beforehand, to know what to fetch
      const int64_t first = plan.first_panel(item), next = plan.first_panel(std::min(then, items - 1));
      for (int64_t i = 0; i < plan.at_once; i++) pack(layer, order, first + i, next + i, group + i * words);
      const int64_t begin = plan.begin(item), count = plan.end(item) - begin, blocks = (count + MOST - 1) / MOST;
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = begin + b * count / blocks, end = begin + (b + 1) * count / blocks;  // as equal as can be
        const auto* x = (const int32_t*)x_RK + row * stride;
        for (int64_t i = 0; i < plan.at_once; i++)
          multiply_some(end - row, group + i * words, first + i, x, stride, row, finish);
      }
    }
  });
}

}  // namespace

bool panels_fit(const Linear<bf16>& layer) {
  const bool has_shape = layer.outputs && layer.outputs % OUTPUTS == 0 && layer.inputs && layer.inputs % 32 == 0;
  return has_shape && !allow_tiles();
}

template <typename Out>
void linear_in_panels(Pool& pool, Scratch& scratch, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows,
                      Out* out_RN) {
  const Stored<Out> finish{layer.bias_N, out_RN, layer.outputs};
  in_panels(pool, scratch, layer, {OUTPUTS, HALF}, x_RK, rows, finish);
}

void gated_in_panels(Pool& pool, Scratch& scratch, const Linear<bf16>& gate_up, Activation kind, const bf16* x_RK,
                     int64_t rows, bf16* out_RI) {
  const int64_t inner = gate_up.outputs / 2;
  auto run = [&](auto finish) { in_panels(pool, scratch, gate_up, {HALF, inner}, x_RK, rows, finish); };
  if (kind == SILU) run(Gated<true>{gate_up.bias_N, out_RI, inner, kind});
  else run(Gated<false>{gate_up.bias_N, out_RI, inner, kind});
}

#else

bool panels_fit(const Linear<bf16>&) { return false; }
template <typename Out>
void linear_in_panels(Pool&, Scratch&, const Linear<bf16>&, const bf16*, int64_t, Out*) { std::abort(); }
void gated_in_panels(Pool&, Scratch&, const Linear<bf16>&, Activation, const bf16*, int64_t, bf16*) { std::abort(); }

#endif

template void linear_in_panels(Pool&, Scratch&, const Linear<bf16>&, const bf16*, int64_t, float*);
template void linear_in_panels(Pool&, Scratch&, const Linear<bf16>&, const bf16*, int64_t, bf16*);

}  // namespace pluglm
