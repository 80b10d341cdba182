// Turning a square of 32-bit words around in registers.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace pluglm {

// 16 x 16 words of 32 bits, rows `from_stride` and `to_stride` words apart.
inline void transpose(const int32_t* from, int64_t from_stride, int rows, int32_t* to, int64_t to_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = i < rows ? _mm512_loadu_si512(from + i * from_stride) : _mm512_setzero_si512();
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; i++)
    for (int half = 0; half < 16; half += 8) {
      b[half + i] = _mm512_shuffle_i32x4(a[half + i], a[half + i + 4], 0x88);
      b[half + i + 4] = _mm512_shuffle_i32x4(a[half + i], a[half + i + 4], 0xdd);
    }
  for (int i = 0; i < 8; i++) {
    _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
  }
}

}  // namespace pluglm
