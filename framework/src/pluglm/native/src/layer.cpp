#include "layer.h"

#include <type_traits>
#include <vector>

#include "panels.h"

namespace pluglm {

namespace {

// Pieces of one block of scratch memory, each aligned to a cache line.
class Pieces {
 public:
  Pieces(Scratch& scratch, size_t bytes) : next_((char*)scratch.get(bytes)) {}
  template <typename T>
  T* take(int64_t count) {
    T* piece = (T*)next_;
    next_ += size_of<T>(count);
    return piece;
  }
  template <typename T>
  static size_t size_of(int64_t count) {
    return (size_t(count) * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* next_;
};

// sum_TD = x + change, the change normalised first where the family does.
template <typename T>
void add(const T* x, float* change, const float* norm, float eps, int64_t width, float* sum_D) {
  if (norm) normalise(change, norm, eps, width, change);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(sum_D + i, load(x + i) + load(change + i));
  for (; i < width; i++) sum_D[i] = widen(x[i]) + change[i];
}

// From either type to either type.
template <typename In, typename Out>
void copy_row(const In* from, int64_t width, Out* to) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, load(from + i));
  for (; i < width; i++) store(to + i, widen(from[i]));
}

}  // namespace

template <typename T, typename In>
void turn_heads(Pool& pool, const Layer<T>& layer, const In* projected, const T* cos_TH, const T* sin_TH, int64_t rows,
                T* heads_TCH) {
  const int64_t H = layer.head_dim, rotated = layer.heads + layer.kv_heads, all = rotated + layer.kv_heads;
  each_row(pool, rows, all * H, [&](int64_t row) {
    std::vector<float> normed(layer.head_norm ? H : 0);
    for (int64_t head = 0; head < all; head++) {
      const In* from = projected + (row * all + head) * H;
      T* to = heads_TCH + (row * all + head) * H;
      if (head >= rotated) {
        copy_row(from, H, to);
      } else if (layer.head_norm) {
        normalise(from, layer.head_norm + head * H, layer.eps, H, normed.data());
        rotate(normed.data(), cos_TH + row * H, sin_TH + row * H, H, to);
      } else {
        rotate(from, cos_TH + row * H, sin_TH + row * H, H, to);
      }
    }
  });
}

template <typename T>
void add_and_norm(Pool& pool, const T* x_TD, const T* change_TD, const float* out_norm, const float* norm, float eps,
                  int64_t rows, int64_t width, T* sum_TD, T* normed_TD) {
  each_row(pool, rows, width, [&](int64_t row) {
    thread_local std::vector<float> change, sum;
    change.resize(width), sum.resize(width);
    copy_row(change_TD + row * width, width, change.data());
    add(x_TD + row * width, change.data(), out_norm, eps, width, sum.data());
    copy_row(sum.data(), width, sum_TD + row * width);
    if (norm) normalise(sum.data(), norm, eps, width, normed_TD + row * width);
  });
}

template <typename T>
void pre_attention(Tools& tools, const Layer<T>& layer, const T* x_TD, const T* cos_TH, const T* sin_TH, int64_t rows,
                   T* heads_TCH) {
  const int64_t width = layer.qkv.inputs, projected = layer.qkv.outputs;
  Pieces pieces(tools.work, Pieces::size_of<T>(rows * width) + Pieces::size_of<float>(rows * projected));
  T* normed_TD = pieces.take<T>(rows * width);
  float* qkv = pieces.take<float>(rows * projected);
  each_row(tools.pool, rows, width, [&](int64_t row) {
    normalise(x_TD + row * width, layer.attention_norm, layer.eps, width, normed_TD + row * width);
  });
  linear(tools.pool, layer.qkv, normed_TD, rows, qkv);
  turn_heads(tools.pool, layer, qkv, cos_TH, sin_TH, rows, heads_TCH);
}

namespace {

// active_TI = activation(normed gate') * (normed up'). In panels both become one pass, and nothing wide leaves the cache.
template <typename T>
void activate_rows(Tools& tools, const Layer<T>& layer, const T* normed_TD, int64_t rows, float* both, T* active_TI) {
  if constexpr (std::is_same_v<T, bf16>)
    if (layer.gate_up.is_packed)
      return gated_in_panels(tools.pool, layer.gate_up, layer.activation, normed_TD, rows, active_TI);
  const int64_t inner = layer.down.inputs;
  linear(tools.pool, layer.gate_up, normed_TD, rows, both);
  each_row(tools.pool, rows, inner, [&](int64_t row) {
    const float* gate = both + row * 2 * inner;
    gated(layer.activation, gate, gate + inner, inner, active_TI + row * inner);
  });
}

}  // namespace

template <typename T>
void post_attention(Tools& tools, const Layer<T>& layer, const T* x_TD, const T* attended, int64_t rows, T* out_TD) {
  const int64_t D = layer.output.outputs, inner = layer.down.inputs;
  const int64_t wide = layer.gate_up.is_packed ? 0 : rows * 2 * inner;
  Pieces pieces(tools.work, 2 * Pieces::size_of<float>(rows * D) + Pieces::size_of<T>(rows * D) +
                                Pieces::size_of<float>(wide) + Pieces::size_of<T>(rows * inner));
  float *change = pieces.take<float>(rows * D), *sum_TD = pieces.take<float>(rows * D);
  T* normed = pieces.take<T>(rows * D);
  float* both = pieces.take<float>(wide);
  T* active = pieces.take<T>(rows * inner);

  linear(tools.pool, layer.output, attended, rows, change);
  each_row(tools.pool, rows, D, [&](int64_t row) {
    float* sum_D = sum_TD + row * D;
    add(x_TD + row * D, change + row * D, layer.attention_out_norm, layer.eps, D, sum_D);
    normalise(sum_D, layer.mlp_norm, layer.eps, D, normed + row * D);
  });
  activate_rows(tools, layer, normed, rows, both, active);
  linear(tools.pool, layer.down, active, rows, change);
  each_row(tools.pool, rows, D, [&](int64_t row) {
    float* sum_D = sum_TD + row * D;
    add(sum_D, change + row * D, layer.mlp_out_norm, layer.eps, D, sum_D);
    copy_row(sum_D, D, out_TD + row * D);
  });
}

#define PLUGLM_LAYER(T)                                                                                       \
  template void pre_attention(Tools&, const Layer<T>&, const T*, const T*, const T*, int64_t, T*);             \
  template void post_attention(Tools&, const Layer<T>&, const T*, const T*, int64_t, T*);                      \
  template void add_and_norm(Pool&, const T*, const T*, const float*, const float*, float, int64_t, int64_t, T*, T*); \
  template void turn_heads(Pool&, const Layer<T>&, const T*, const T*, const T*, int64_t, T*);
PLUGLM_LAYER(float)
PLUGLM_LAYER(bf16)
#undef PLUGLM_LAYER

}  // namespace pluglm
