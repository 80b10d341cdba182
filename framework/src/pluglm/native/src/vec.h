// Vectors of float32 in the widest registers of the target, and what all kernels do with them.
// GCC and Clang vector extensions carry every CPU; intrinsics stand only where they say what extensions cannot.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pluglm {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));

struct bf16 {
  uint16_t bits;
};

inline float widen(float value) { return value; }
inline float widen(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// Round to nearest, ties to even; NaN stays NaN, as torch rounds.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return {0x7fc0};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline void store(float* out, float value) { *out = value; }
inline void store(bf16* out, float value) { *out = to_bf16(value); }

inline vec splat(float value) { return value - vec{}; }

inline vec load(const float* from) {
  vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline vec load(const bf16* from) {
  hvec half;
  std::memcpy(&half, from, sizeof half);
  return (vec)(__builtin_convertvector(half, ivec) << 16);
}

inline void store(float* out, vec value) { std::memcpy(out, &value, sizeof value); }
inline void store(bf16* out, vec value) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#else
  ivec bits = (ivec)value;
  ivec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  ivec is_nan = value != value;
  rounded = (rounded & ~is_nan) | (is_nan & 0x7fc0);
  hvec half = __builtin_convertvector(rounded, hvec);
#endif
  std::memcpy(out, &half, sizeof half);
}

#if defined(__AVX512F__)
#define PLUGLM_HALVES(STEP)                                            \
  STEP(8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15)      \
  STEP(4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7)                  \
  STEP(2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3)                  \
  STEP(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
#elif defined(__AVX2__)
#define PLUGLM_HALVES(STEP)       \
  STEP(4, 5, 6, 7, 4, 5, 6, 7)    \
  STEP(2, 3, 2, 3, 2, 3, 2, 3)    \
  STEP(1, 1, 1, 1, 1, 1, 1, 1)
#else
#define PLUGLM_HALVES(STEP) STEP(2, 3, 2, 3) STEP(1, 1, 1, 1)
#endif

// Lanes added in one fixed order, halves onto halves, so that a result has the same bits wherever it is computed.
inline float sum(vec value) {
#define PLUGLM_ADD(...) value += __builtin_shufflevector(value, value, __VA_ARGS__);
  PLUGLM_HALVES(PLUGLM_ADD)
#undef PLUGLM_ADD
  return value[0];
}

// totals[i] = sum(values[i]), with the same bits; the values are lost. Sixteen of sixteen lanes are turned around as
// they are added, which takes a third of the instructions.
template <int COUNT>
inline void each_sum(vec* values, float* totals) {
#if defined(__AVX512F__)
#define PLUGLM_FOLD(PAIRS, LOW, HIGH)                                                                     \
  _Pragma("GCC unroll 8") for (int i = 0; i < PAIRS; i++) {                                               \
    const vec a = values[2 * i], b = values[2 * i + 1];                                                   \
    values[i] = __builtin_shufflevector(a, b, LOW) + __builtin_shufflevector(a, b, HIGH);                 \
  }
#define PLUGLM_LIST(...) __VA_ARGS__
  if constexpr (COUNT == 16) {
    PLUGLM_FOLD(8, PLUGLM_LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                PLUGLM_LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    PLUGLM_FOLD(4, PLUGLM_LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                PLUGLM_LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
    PLUGLM_FOLD(2, PLUGLM_LIST(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                PLUGLM_LIST(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
    PLUGLM_FOLD(1, PLUGLM_LIST(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                PLUGLM_LIST(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
    store(totals, values[0]);
    return;
  }
#undef PLUGLM_FOLD
#undef PLUGLM_LIST
#endif
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; i++) totals[i] = sum(values[i]);  // constant indices only, or values would live in memory
}

inline vec select(ivec mask, vec yes, vec no) { return mask ? yes : no; }
inline vec smaller(vec a, vec b) { return select(a < b, a, b); }
inline vec larger(vec a, vec b) { return select(a > b, a, b); }

inline float largest(vec value) {
#define PLUGLM_LARGER(...) value = larger(value, __builtin_shufflevector(value, value, __VA_ARGS__));
  PLUGLM_HALVES(PLUGLM_LARGER)
#undef PLUGLM_LARGER
  return value[0];
}

// e^x to about 2 units in the last place: x = n ln 2 + r, |r| <= ln 2 / 2, and a polynomial of degree 6 in r
// (Cody and Waite's reduction; coefficients of the Cephes library's expf). Below -87.3 it is 0, above 88 infinite.
inline vec exponential(vec x) {
  vec clamped = smaller(larger(x, splat(-87.33654f)), splat(88.0f));
  vec scaled = clamped * 1.44269504f;
  ivec n = __builtin_convertvector(scaled + select(scaled < 0.0f, splat(-0.5f), splat(0.5f)), ivec);
  vec whole = __builtin_convertvector(n, vec);
  vec r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  vec result = p * (vec)((n + 127) << 23);
  result = select(x < -87.33654f, splat(0.0f), result);
  result = select(x > 88.0f, splat(INFINITY), result);
  return select(x != x, x, result);
}

inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

}  // namespace pluglm
