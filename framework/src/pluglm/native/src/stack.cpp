// All layers of a model in one call. The attention between is whichever function the caller brings.
#include "layer.h"

using namespace pluglm;

namespace {

// As attention components offer theirs: 0, or 1 when it found no memory.
typedef int32_t (*Attend)(void* tools, int32_t type, const void* call);

// Arrays have one entry a layer. x_TD is read and written in place; heads_TCH and attended_TNH are room for one layer.
struct Stack {
  const void* const* layers;
  const void *const *cosines_TH, *const *sines_TH, *const *attention_calls;
  Attend attend;
  int64_t num_layers, rows;
  void *x_TD, *heads_TCH, *attended_TNH;
};

// Each part takes its own turn with the tools, since the attention does; nothing in their scratch memory stays between.
template <typename T>
int32_t run(Tools* tools, int32_t type, const Stack& stack) {
  T *x_TD = (T*)stack.x_TD, *heads_TCH = (T*)stack.heads_TCH, *attended = (T*)stack.attended_TNH;
  for (int64_t i = 0; i < stack.num_layers; i++) {
    const auto& layer = *(const Layer<T>*)stack.layers[i];
    const T *cos_TH = (const T*)stack.cosines_TH[i], *sin_TH = (const T*)stack.sines_TH[i];
    if (in_turn(tools, [&] { pre_attention(*tools, layer, x_TD, cos_TH, sin_TH, stack.rows, heads_TCH); })) return 1;
    if (stack.attend(tools, type, stack.attention_calls[i])) return 1;
    if (in_turn(tools, [&] { post_attention(*tools, layer, x_TD, attended, stack.rows, x_TD); })) return 1;
  }
  return 0;
}

}  // namespace

extern "C" int32_t pluglm_stack(Tools* tools, int32_t type, const void* stack) {
  return type == 1 ? run<bf16>(tools, type, *(const Stack*)stack) : run<float>(tools, type, *(const Stack*)stack);
}
