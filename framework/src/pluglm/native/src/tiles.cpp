#include "tiles.h"

#include <algorithm>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include "transpose.h"
#endif

namespace pluglm {

#if defined(__AMX_BF16__) && defined(__linux__)

namespace {

constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
constexpr int TILE = 16;        // rows of a tile, and float32 sums in one of its rows
constexpr int TILE_K = 32;      // bfloat16 values in one of its rows
constexpr int BLOCK_ROWS = 32;  // rows of x that pass for one reading of the weights
constexpr int64_t CHUNK_BYTES = 128 << 10;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

// Not a local: GCC 12 declares only eight bytes of it as read, and leaves out stores to the rest.
const TileConfig CONFIG;

// x of 16 rows as tiles: for every 32 inputs, 16 rows of input pairs with the 16 rows of x side by side.
void pack(const bf16* x_RK, int64_t inputs, int rows, int32_t* packed) {
  for (int64_t k = 0; k < inputs; k += TILE_K)
    transpose((const int32_t*)(x_RK + k), inputs / 2, rows, packed + k / TILE_K * 256, TILE);
}

// Sums of 16 outputs x 16 rows, turned around and written with the bias added.
void write(const Linear<bf16>& layer, const float* sums, int64_t first, int rows, float* out_RN) {
  alignas(64) int32_t turned[256];
  transpose((const int32_t*)sums, TILE, TILE, turned, TILE);
  __m512 bias = layer.bias_N ? _mm512_loadu_ps(layer.bias_N + first) : _mm512_setzero_ps();
  for (int r = 0; r < rows; r++)
    _mm512_storeu_ps(out_RN + r * layer.outputs + first,
                     _mm512_add_ps(_mm512_load_ps((float*)turned + r * TILE), bias));
}

// 32 outputs (or 16, when not `two`) x up to 32 rows. Meanwhile the weights of the next block are fetched.
template <bool TWO_OUTPUTS, bool TWO_ROWS>
void block(const Linear<bf16>& layer, int64_t first, const int32_t* packed, int rows, const char* ahead,
           float* out_RN) {
  const int64_t stride = layer.inputs * 2, steps = layer.inputs / TILE_K;
  const char* weights = (const char*)(layer.weight_NK + first * layer.inputs);
  const int64_t ahead_step = ahead ? (TWO_OUTPUTS ? 2 : 1) * TILE * 64 : 0;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; s++) {
    for (int64_t i = 0; i < ahead_step; i += 64) __builtin_prefetch(ahead + s * ahead_step + i, 0, 2);
    _tile_loadd(4, weights + s * 64, stride);
    _tile_loadd(6, packed + s * 256, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (TWO_OUTPUTS) {
      _tile_loadd(5, weights + TILE * stride + s * 64, stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (TWO_ROWS) {
      _tile_loadd(7, packed + (steps + s) * 256, 64);
      _tile_dpbf16ps(2, 4, 7);
      if (TWO_OUTPUTS) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[4][256];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int r = 0; r <= TWO_ROWS; r++)
    for (int n = 0; n <= TWO_OUTPUTS; n++)
      write(layer, sums[2 * r + n], first + n * TILE, std::min(rows - r * TILE, TILE),
            out_RN + r * TILE * layer.outputs);
}

void outputs(const Linear<bf16>& layer, int64_t begin, int64_t end, const int32_t* packed, int rows, bool fetch,
             float* out_RN) {
  for (int64_t n = begin; n < end;) {
    const bool two = n + 2 * TILE <= end;
    const int64_t next = n + (two ? 2 : 1) * TILE;
    const bool has_next = fetch && next + 2 * TILE <= layer.outputs;
    const char* ahead = has_next ? (const char*)(layer.weight_NK + next * layer.inputs) : nullptr;
    if (two && rows > TILE) block<true, true>(layer, n, packed, rows, ahead, out_RN);
    else if (two) block<true, false>(layer, n, packed, rows, ahead, out_RN);
    else if (rows > TILE) block<false, true>(layer, n, packed, rows, ahead, out_RN);
    else block<false, false>(layer, n, packed, rows, ahead, out_RN);
    n = next;
  }
}

}  // namespace

bool allow_tiles() {
  static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return allowed;
}

bool tiles_fit(const Linear<bf16>& layer) {
  return layer.outputs % TILE == 0 && layer.inputs && layer.inputs % TILE_K == 0 && allow_tiles();
}

void tiled_linear(Pool& pool, Scratch& scratch, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows,
                  float* out_RN) {
  const int64_t groups = (rows + TILE - 1) / TILE, group_words = layer.inputs / TILE_K * 256;
  auto* packed = (int32_t*)scratch.get(groups * group_words * 4);
  auto pack_group = [&](int g) {
    const int count = int(std::min<int64_t>(TILE, rows - g * TILE));
    pack(x_RK + g * TILE * layer.inputs, layer.inputs, count, packed + g * group_words);
  };
  if (groups > 2) pool.run(int(groups), pack_group);
  else for (int g = 0; g < groups; g++) pack_group(g);
  const int64_t size = std::max<int64_t>(2 * TILE, CHUNK_BYTES / (layer.inputs * 2) / (2 * TILE) * (2 * TILE));
  pool.run(int((layer.outputs + size - 1) / size), [&](int index) {
    _tile_loadconfig(&CONFIG);
    const int64_t begin = index * size, end = std::min(layer.outputs, begin + size);
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS)
      outputs(layer, begin, end, packed + r / TILE * group_words, int(std::min<int64_t>(BLOCK_ROWS, rows - r)), r == 0,
              out_RN + r * layer.outputs);
    _tile_release();
  });
}

#else

bool allow_tiles() { return false; }
bool tiles_fit(const Linear<bf16>&) { return false; }
void tiled_linear(Pool&, Scratch&, const Linear<bf16>&, const bf16*, int64_t, float*) { std::abort(); }

#endif

}  // namespace pluglm
