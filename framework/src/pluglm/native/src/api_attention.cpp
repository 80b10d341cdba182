// The attention functions that Python calls. They give 0, or 1 when there is no memory for it.
#include "attention.h"
#include "tools.h"

using namespace pluglm;

extern "C" {

// call: struct Attention of the type (0 float32, 1 bfloat16).
int32_t pluglm_attention(Tools* tools, int32_t type, const void* call) {
  return in_turn(tools, [&] {
    if (type == 1) attention(tools->pool, tools->attention, *(const Attention<bf16>*)call);
    else attention(tools->pool, tools->attention, *(const Attention<float>*)call);
  });
}
}
