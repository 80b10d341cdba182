// One decoder layer around its attention, in two calls, nothing but row-wise work between the products.
#pragma once
#include "rows.h"
#include "tools.h"

namespace pluglm {

// Norm weights are float32, a family's offset added; null where a layer has no such norm.
template <typename T>
struct Layer {
  Activation activation;
  float eps;
  int64_t heads, kv_heads, head_dim;
  const float *attention_norm, *head_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
  Linear<T> qkv, output, gate_up, down;
};

// heads_TCH: the rotated query heads, the rotated key heads, the value heads of each row.
template <typename T>
void pre_attention(Tools& tools, const Layer<T>& layer, const T* x_TD, const T* cos_TH, const T* sin_TH, int64_t rows,
                   T* heads_TCH);

// out_TD may be x_TD.
template <typename T>
void post_attention(Tools& tools, const Layer<T>& layer, const T* x_TD, const T* attended, int64_t rows, T* out_TD);

// The row-wise part of pre_attention: projected_TC.. [rows, (heads + 2 kv_heads) * head_dim] to heads_TCH.
template <typename T, typename In>
void turn_heads(Pool& pool, const Layer<T>& layer, const In* projected, const T* cos_TH, const T* sin_TH, int64_t rows,
                T* heads_TCH);

// sum_TD = x + change, the change normalised by out_norm first unless that is null; then normed_TD = its norm by
// `norm`, unless that is null. sum_TD may be x_TD or change_TD.
template <typename T>
void add_and_norm(Pool& pool, const T* x_TD, const T* change_TD, const float* out_norm, const float* norm, float eps,
                  int64_t rows, int64_t width, T* sum_TD, T* normed_TD);

}  // namespace pluglm
