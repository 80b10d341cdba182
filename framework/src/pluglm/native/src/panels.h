// A feed-forward part's first product and its gated activation at once, for many rows: what the two products of a value
// give never leaves the registers. For CPUs that multiply pairs of bfloat16 and have no matrix tiles.
#pragma once
#include "linear.h"
#include "rows.h"

namespace pluglm {

// Whether this build has them, and the layer the shape for them: outputs a multiple of 32, inputs of 32, no bias.
bool panels_fit(const Linear<bf16>& gate_up);

// out_RI = activation(x gate') * (x up'), I half of the outputs: gate and up are the two halves of the weight rows.
// All is float32 but for what goes in and comes out. A row's bits do not depend on the others.
void gated_panels(Pool& pool, Scratch& scratch, const Linear<bf16>& gate_up, Activation kind, const bf16* x_RK,
                  int64_t rows, bf16* out_RI);

}  // namespace pluglm
