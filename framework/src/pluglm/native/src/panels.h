// Products with sixteen outputs side by side, so that a register of weights meets one pair of x and no sum has to be
// added across its lanes. Weights are packed that way when they are loaded; it is what matrix tiles want, too. For CPUs
// that multiply pairs of bfloat16.
#pragma once
#include "linear.h"
#include "rows.h"

namespace pluglm {

// Whether this build has them, and the layer the shape: multiples of 32 outputs and inputs.
bool panels_fit(const Linear<bf16>& layer);

// In place, from row-major: sixteen rows after sixteen, each as [inputs / 2][16] pairs. For layers that fit.
void pack_weight(Pool& pool, Scratch& scratch, bf16* weight_NK, int64_t outputs, int64_t inputs);

// A row of a packed weight as it was given.
inline void packed_row(const void* weight, int64_t inputs, int64_t number, void* out_K) {
  constexpr int64_t GROUP = 16;
  const int64_t stride = inputs / 2;
  const auto* from = (const int32_t*)weight + number / GROUP * GROUP * stride + number % GROUP;
  for (int64_t k = 0; k < stride; k++) ((int32_t*)out_K)[k] = from[k * GROUP];
}

// Of packed weights: out_RN = x weight' + bias, added up in float32. A row's bits do not depend on the others. Out: float
// or bf16.
template <typename Out>
void linear_in_panels(Pool& pool, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows, Out* out_RN);

// Of packed weights: out_RI = activation(x gate') * (x up'), I half of the outputs: gate and up are the two halves of the
// weight rows. What the two give never leaves the first cache, and is not rounded.
void gated_in_panels(Pool& pool, const Linear<bf16>& gate_up, Activation kind, const bf16* x_RK, int64_t rows,
                     bf16* out_RI);

}  // namespace pluglm
