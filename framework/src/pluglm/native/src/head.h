// Final norm and head.
#pragma once
#include "rows.h"
#include "tools.h"

namespace pluglm {

// logits_RV float32 = norm(x_RD) weight_VD' + bias_V.
template <typename T>
void head(Tools& tools, const Linear<T>& layer, const float* norm_D, float eps, const T* x_RD, int64_t rows,
          float* logits_RV) {
  const int64_t width = layer.inputs;
  auto* normed_RD = (T*)tools.work.get(rows * width * sizeof(T));
  each_row(tools.pool, rows, width, [&](int64_t row) {
    normalise(x_RD + row * width, norm_D, eps, width, normed_RD + row * width);
  });
  linear(tools.pool, layer, normed_RD, rows, logits_RV);
}

}  // namespace pluglm
