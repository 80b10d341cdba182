#include "panels.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#if defined(__AVX512BF16__)
#include "transpose.h"
#endif

namespace pluglm {

#if defined(__AVX512BF16__)

namespace {

constexpr int OUTPUTS = 16;  // of a panel: so many rows of gate and as many of up
constexpr int MOST = 12;     // rows of x at once: with two sums each, two weights and a pair they fill the registers
constexpr int64_t CHUNK_BYTES = 256 << 10;

// The panel's weight rows as [inputs / 2][gate, up][OUTPUTS] pairs. Meanwhile those of the next panel are fetched.
void pack(const Linear<bf16>& layer, int64_t first, int32_t* panel) {
  const int64_t stride = layer.inputs / 2, up = layer.outputs / 2 * stride;
  const auto* gate = (const int32_t*)(layer.weight_NK + first * layer.inputs);
  for (const auto* from : {gate, gate + up}) {
    for (int64_t k = 0; k < stride; k += 16) {
      for (int i = OUTPUTS; i < 2 * OUTPUTS; i++) __builtin_prefetch(from + i * stride + k, 0, 2);
      transpose(from + k, stride, OUTPUTS, panel + k * 2 * OUTPUTS, 2 * OUTPUTS);
    }
    panel += OUTPUTS;
  }
}

template <int ROWS>
void multiply(const Linear<bf16>& layer, int64_t first, Activation kind, const int32_t* panel, const bf16* x_RK,
              bf16* out_RI) {
  const int64_t stride = layer.inputs / 2;
  const auto* x = (const int32_t*)x_RK;
  __m512 gates[ROWS] = {}, ups[ROWS] = {};
  for (int64_t k = 0; k < stride; k++, panel += 2 * OUTPUTS) {
    const auto gate = (__m512bh)_mm512_load_si512(panel), up = (__m512bh)_mm512_load_si512(panel + OUTPUTS);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const auto pair = (__m512bh)_mm512_set1_epi32(x[r * stride + k]);
      gates[r] = _mm512_dpbf16_ps(gates[r], gate, pair);
      ups[r] = _mm512_dpbf16_ps(ups[r], up, pair);
    }
  }
  alignas(64) float both[ROWS][2 * OUTPUTS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; r++) _mm512_store_ps(both[r], gates[r]), _mm512_store_ps(both[r] + OUTPUTS, ups[r]);
  for (int r = 0; r < ROWS; r++)
    gated(kind, both[r], both[r] + OUTPUTS, OUTPUTS, out_RI + r * (layer.outputs / 2) + first);
}

void all_rows(const Linear<bf16>& layer, int64_t first, Activation kind, const int32_t* panel, const bf16* x_RK,
              int64_t rows, bf16* out_RI) {
  int64_t r = 0;
  auto next = [&](auto count) {
    multiply<count>(layer, first, kind, panel, x_RK + r * layer.inputs, out_RI + r * (layer.outputs / 2));
    r += count;
  };
  while (r + MOST <= rows) next(std::integral_constant<int, MOST>());
  if (r + 8 <= rows) next(std::integral_constant<int, 8>());
  if (r + 4 <= rows) next(std::integral_constant<int, 4>());
  if (r + 2 <= rows) next(std::integral_constant<int, 2>());
  if (r < rows) next(std::integral_constant<int, 1>());
}

}  // namespace

bool panels_fit(const Linear<bf16>& gate_up) {
  return gate_up.outputs % (2 * OUTPUTS) == 0 && gate_up.inputs && gate_up.inputs % 32 == 0 && !gate_up.bias_N;
}

void gated_panels(Pool& pool, Scratch& scratch, const Linear<bf16>& gate_up, Activation kind, const bf16* x_RK,
                  int64_t rows, bf16* out_RI) {
  const int64_t words = gate_up.inputs * OUTPUTS, panels = gate_up.outputs / 2 / OUTPUTS;
  const int64_t at_once = std::max<int64_t>(1, CHUNK_BYTES / (words * 4)), chunks = (panels + at_once - 1) / at_once;
  auto* memory = (int32_t*)scratch.get(pool.num_threads() * words * 4);
  std::atomic<int64_t> next{0};
  pool.run(int(std::min<int64_t>(pool.num_threads(), chunks)), [&](int index) {
    int32_t* panel = memory + index * words;
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;)
      for (int64_t i = chunk * at_once; i < std::min(panels, (chunk + 1) * at_once); i++) {
        pack(gate_up, i * OUTPUTS, panel);
        all_rows(gate_up, i * OUTPUTS, kind, panel, x_RK, rows, out_RI);
      }
  });
}

#else

bool panels_fit(const Linear<bf16>&) { return false; }
void gated_panels(Pool&, Scratch&, const Linear<bf16>&, Activation, const bf16*, int64_t, bf16*) { std::abort(); }

#endif

}  // namespace pluglm
