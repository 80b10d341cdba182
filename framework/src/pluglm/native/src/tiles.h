// Products in matrix tiles (AMX): 16 weight rows are one operand as they lie, the rows of x are the other, transposed.
#pragma once
#include "linear.h"

namespace pluglm {

// Whether this build and process can multiply this layer in tiles: outputs a multiple of 16, inputs of 32.
bool tiles_fit(const Linear<bf16>& layer);

void tiled_linear(Pool& pool, Scratch& scratch, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows,
                  float* out_RN);

}  // namespace pluglm
