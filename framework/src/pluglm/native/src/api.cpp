// The functions that Python calls: plain C, one structure of pointers for what stays, the rest as arguments. Those that
// return int32_t give 0, or a code of tools.h.
#include <exception>

#include "head.h"
#include "layer.h"
#include "panels.h"
#include "tiles.h"

using namespace pluglm;

namespace {

enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1 };

template <typename T>
void linear_to(Tools& tools, const Linear<T>& layer, const T* x_RK, int64_t rows, int32_t out_type, void* out_RN) {
  if (out_type == FLOAT32) return linear(tools.pool, layer, x_RK, rows, (float*)out_RN);
  if constexpr (std::is_same_v<T, bf16>)
    if (layer.is_packed) return linear_in_panels(tools.pool, layer, x_RK, rows, (bf16*)out_RN);
  auto* wide = (float*)tools.work.get(rows * layer.outputs * sizeof(float));
  linear(tools.pool, layer, x_RK, rows, wide);
  each_row(tools.pool, rows, layer.outputs, [&](int64_t row) {
    const float* from = wide + row * layer.outputs;
    bf16* to = (bf16*)out_RN + row * layer.outputs;
    int64_t i = 0;
    for (; i + LANES <= layer.outputs; i += LANES) store(to + i, load(from + i));
    for (; i < layer.outputs; i++) to[i] = to_bf16(from[i]);
  });
}

}  // namespace

// Runs CALL, in turn, with T of `type`, which the caller has checked to be one of the two.
#define PLUGLM_BY_TYPE(type, CALL)   \
  return in_turn(tools, [&] {        \
    if ((type) == BFLOAT16) {        \
      using T = bf16;                \
      CALL;                          \
    } else {                         \
      using T = float;               \
      CALL;                          \
    }                                \
  });

extern "C" {

// Null when the system starts no more threads.
void* pluglm_open(int32_t num_threads, int32_t spin_us) {
  try {
    return new Tools(num_threads, spin_us);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// A child process leaves its copy alone: there are no threads to wait for, and its lock may have been held.
void pluglm_close(Tools* tools) {
  if (!tools->pool.has_threads()) return;
  tools->pool.turn().unlock();  // after a call that still runs
  delete tools;
}

int32_t pluglm_allow_tiles() { return allow_tiles(); }

int32_t pluglm_linear(Tools* tools, int32_t type, const void* layer, const void* x_RK, int64_t rows, int32_t out_type,
                      void* out_RN) {
  PLUGLM_BY_TYPE(type, linear_to(*tools, *(const Linear<T>*)layer, (const T*)x_RK, rows, out_type, out_RN))
}

int32_t pluglm_head(Tools* tools, int32_t type, const void* layer, const float* norm_D, float eps, const void* x_RD,
                    int64_t rows, float* logits_RV) {
  PLUGLM_BY_TYPE(type, head(*tools, *(const Linear<T>*)layer, norm_D, eps, (const T*)x_RD, rows, logits_RV))
}

int32_t pluglm_norm(Tools* tools, int32_t type, const void* x_TD, const float* weight_D, float eps, int64_t rows,
                    int64_t width, void* out_TD) {
  PLUGLM_BY_TYPE(type, each_row(tools->pool, rows, width, [&](int64_t row) {
                   normalise((const T*)x_TD + row * width, weight_D, eps, width, (T*)out_TD + row * width);
                 }))
}

int32_t pluglm_add_and_norm(Tools* tools, int32_t type, const void* x_TD, const void* change_TD, const float* out_norm,
                            const float* norm, float eps, int64_t rows, int64_t width, void* sum_TD, void* normed_TD) {
  PLUGLM_BY_TYPE(type, add_and_norm(tools->pool, (const T*)x_TD, (const T*)change_TD, out_norm, norm, eps, rows, width,
                                    (T*)sum_TD, (T*)normed_TD))
}

int32_t pluglm_turn_heads(Tools* tools, int32_t type, const void* layer, const void* projected, const void* cos_TH,
                          const void* sin_TH, int64_t rows, void* heads_TCH) {
  PLUGLM_BY_TYPE(type, turn_heads(tools->pool, *(const Layer<T>*)layer, (const T*)projected, (const T*)cos_TH,
                                  (const T*)sin_TH, rows, (T*)heads_TCH))
}

int32_t pluglm_gated(Tools* tools, int32_t type, int32_t activation, const void* gate_up, int64_t rows, int64_t width,
                     void* out) {
  PLUGLM_BY_TYPE(type, each_row(tools->pool, rows, width, [&](int64_t row) {
                   const T* gate = (const T*)gate_up + row * 2 * width;
                   gated(Activation(activation), gate, gate + width, width, (T*)out + row * width);
                 }))
}

// Whether a Linear<bf16> can be multiplied in panels.
int32_t pluglm_panels_fit(const void* layer) { return panels_fit(*(const Linear<bf16>*)layer); }

// NO_ROW when a number is none of the weight's rows; then nothing is written.
int32_t pluglm_packed_rows(Tools* tools, const void* layer, const int64_t* numbers_T, int64_t count, void* out_TK) {
  const auto& packed = *(const Linear<bf16>*)layer;
  for (int64_t i = 0; i < count; i++)
    if (numbers_T[i] < 0 || numbers_T[i] >= packed.outputs) return NO_ROW;
  return in_turn(tools, [&] {
    each_row(tools->pool, count, packed.inputs, [&](int64_t i) {
      packed_row(packed.weight_NK, packed.inputs, numbers_T[i], (bf16*)out_TK + i * packed.inputs);
    });
  });
}

int32_t pluglm_pack_weight(Tools* tools, void* weight_NK, int64_t outputs, int64_t inputs) {
  return in_turn(tools, [&] { pack_weight(tools->pool, tools->work, (bf16*)weight_NK, outputs, inputs); });
}

int32_t pluglm_pre_attention(Tools* tools, int32_t type, const void* layer, const void* x_TD, const void* cos_TH,
                             const void* sin_TH, int64_t rows, void* heads_TCH) {
  PLUGLM_BY_TYPE(type, pre_attention(*tools, *(const Layer<T>*)layer, (const T*)x_TD, (const T*)cos_TH,
                                     (const T*)sin_TH, rows, (T*)heads_TCH))
}

int32_t pluglm_post_attention(Tools* tools, int32_t type, const void* layer, const void* x_TD, const void* attended,
                              int64_t rows, void* out_TD) {
  PLUGLM_BY_TYPE(type, post_attention(*tools, *(const Layer<T>*)layer, (const T*)x_TD, (const T*)attended, rows,
                                      (T*)out_TD))
}
}
