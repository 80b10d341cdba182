// All layers of a model in one call, from token ids and up to logits if need be. The attention between is whichever
// function the caller brings.
#include <cstring>

#include "head.h"
#include "layer.h"
#include "panels.h"

using namespace pluglm;

namespace {

// As attention components offer theirs: 0, or NO_MEMORY.
typedef int32_t (*Attend)(void* tools, int32_t type, const void* call);

// Rows of a table, each of `bytes`, by their numbers: one for each row of the batch. is_packed: as weights are.
struct Gather {
  const char* table;
  int64_t bytes, table_rows;
  const int64_t* ids;
  char* to;
  int64_t is_packed;
};

// Arrays have one entry a layer. x_TD comes out; heads_TCH and attended_TNH are room for one layer. What goes in is
// from_TD, or is gathered into x_TD and to wherever the angles lie. Without a head there are no logits.
struct Stack {
  const void* const* layers;
  const void *const *cosines_TH, *const *sines_TH, *const *attention_calls;
  Attend attend;
  int64_t num_layers, rows;
  void *x_TD, *heads_TCH, *attended_TNH;
  const void* from_TD;
  const Gather* gathers;
  int64_t num_gathers;
  const void* head;
  const float* norm_D;
  float* logits_TV;
  float eps;
};

bool gather(const Gather& wanted, int64_t rows) {
  for (int64_t i = 0; i < rows; i++) {
    if (uint64_t(wanted.ids[i]) >= uint64_t(wanted.table_rows)) return false;
    char* to = wanted.to + i * wanted.bytes;
    if (wanted.is_packed) packed_row(wanted.table, wanted.bytes / sizeof(bf16), wanted.ids[i], to);
    else std::memcpy(to, wanted.table + wanted.ids[i] * wanted.bytes, wanted.bytes);
  }
  return true;
}

// Each part takes its own turn with the tools, since the attention does; nothing in their scratch memory stays between.
template <typename T>
int32_t run(Tools* tools, int32_t type, const Stack& stack) {
  T *x_TD = (T*)stack.x_TD, *heads_TCH = (T*)stack.heads_TCH, *attended = (T*)stack.attended_TNH;
  const int64_t rows = stack.rows;
  for (int64_t i = 0; i < stack.num_gathers; i++)
    if (!gather(stack.gathers[i], rows)) return NO_ROW;
  if (stack.from_TD) std::memcpy(x_TD, stack.from_TD, rows * ((const Layer<T>*)stack.layers[0])->qkv.inputs * sizeof(T));
  for (int64_t i = 0; i < stack.num_layers; i++) {
    const auto& layer = *(const Layer<T>*)stack.layers[i];
    const T *cos_TH = (const T*)stack.cosines_TH[i], *sin_TH = (const T*)stack.sines_TH[i];
    if (in_turn(tools, [&] { pre_attention(*tools, layer, x_TD, cos_TH, sin_TH, rows, heads_TCH); })) return NO_MEMORY;
    if (stack.attend(tools, type, stack.attention_calls[i])) return NO_MEMORY;
    if (in_turn(tools, [&] { post_attention(*tools, layer, x_TD, attended, rows, x_TD); })) return NO_MEMORY;
  }
  if (!stack.head) return 0;
  return in_turn(tools, [&] {
    head(*tools, *(const Linear<T>*)stack.head, stack.norm_D, stack.eps, x_TD, rows, stack.logits_TV);
  });
}

}  // namespace

extern "C" int32_t pluglm_stack(Tools* tools, int32_t type, const void* stack) {
  return type == 1 ? run<bf16>(tools, type, *(const Stack*)stack) : run<float>(tools, type, *(const Stack*)stack);
}
