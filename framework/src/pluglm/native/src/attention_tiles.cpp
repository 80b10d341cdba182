#include "attention_tiles.h"

#include <cstdlib>

namespace pluglm {

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

namespace {

// A constant in memory: of a local one GCC 12 would keep only the first bytes, which is all that the instruction's
// wrapper says it reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constinit const TileConfig CONFIG;

// 16 rows x COUNT * 16 columns: the sums stay in tiles 0 to 3, each tile of `left` serves all of them.
template <int COUNT>
void tiles_block(const Product<Pair>& job, int column) {
  const int64_t left_bytes = job.left_stride * sizeof(Pair), right_bytes = job.right.width(column) * sizeof(Pair);
  const int64_t out_bytes = job.out_stride * sizeof(float);
  _tile_zero(0);
  if (COUNT > 1) _tile_zero(1);
  if (COUNT > 2) _tile_zero(2);
  if (COUNT > 3) _tile_zero(3);
  for (int k = job.k_begin; k < job.k_end; k += TILE_UNITS) {
    const Pair* right = job.right.row(column, k);
    _tile_loadd(4, job.left + k, left_bytes);
    _tile_loadd(5, right, right_bytes);
    _tile_dpbf16ps(0, 4, 5);
    if (COUNT > 1) {
      _tile_loadd(6, right + 16, right_bytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (COUNT > 2) {
      _tile_loadd(7, right + 32, right_bytes);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (COUNT > 3) {
      _tile_loadd(5, right + 48, right_bytes);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  float* out = job.out + column;
  _tile_stored(0, out, out_bytes);
  if (COUNT > 1) _tile_stored(1, out + 16, out_bytes);
  if (COUNT > 2) _tile_stored(2, out + 32, out_bytes);
  if (COUNT > 3) _tile_stored(3, out + 48, out_bytes);
}

}  // namespace

void begin_tiles() { _tile_loadconfig(&CONFIG); }

void end_tiles() { _tile_release(); }

void multiply_tiles(const Product<Pair>& job) {
  for (int column = job.column_begin; column < job.column_end; column += PANEL) {
    const int tiles = std::min(PANEL, job.column_end - column) / 16;
    if (tiles == 4) tiles_block<4>(job, column);
    if (tiles == 3) tiles_block<3>(job, column);
    if (tiles == 2) tiles_block<2>(job, column);
    if (tiles == 1) tiles_block<1>(job, column);
  }
}

#else

void begin_tiles() {}
void end_tiles() {}
void multiply_tiles(const Product<Pair>&) { std::abort(); }  // allow_tiles() said no

#endif

}  // namespace pluglm
