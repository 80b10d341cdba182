#include "rows.h"

namespace pluglm {

namespace {

vec silu(vec x) { return x / (exponential(-x) + 1.0f); }

// x / 2 (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (arXiv:1606.08415, section 2).
vec gelu_tanh(vec x) {
  vec u = (x + x * x * x * 0.044715f) * 0.7978845608f;
  return x / (exponential(u * -2.0f) + 1.0f);
}

vec gelu(vec x) {
  for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  return x;
}

}  // namespace

vec activate(Activation kind, vec x) {
  switch (kind) {
    case SILU: return silu(x);
    case GELU_TANH: return gelu_tanh(x);
    case GELU: return gelu(x);
    default: return select(x > 0.0f, x, select(x != x, x, splat(0.0f)));
  }
}

template <typename In, typename Out>
void gated(Activation kind, const In* gate, const In* up, int64_t width, Out* out) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(out + i, activate(kind, load(gate + i)) * load(up + i));
  for (; i < width; i++) store(out + i, activate(kind, splat(widen(gate[i])))[0] * widen(up[i]));
}

template void gated(Activation, const float*, const float*, int64_t, float*);
template void gated(Activation, const float*, const float*, int64_t, bf16*);
template void gated(Activation, const bf16*, const bf16*, int64_t, bf16*);

}  // namespace pluglm
