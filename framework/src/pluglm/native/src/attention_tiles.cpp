#include "attention_tiles.h"

#include <cstdlib>

#include "tiles.h"

namespace pluglm {

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

namespace {

// Where a block of a product reads and writes.
struct Place {
  const Pair *left, *right;
  float* out;
  int64_t left_bytes, right_bytes, out_bytes;

  Place(const Product<Pair>& job, int column)
      : left(job.left + job.k_begin),
        right(job.right.row(column, job.k_begin)),
        out(job.out + column),
        left_bytes(job.left_stride * sizeof(Pair)),
        right_bytes(job.right.width(column) * sizeof(Pair)),
        out_bytes(job.out_stride * sizeof(float)) {}
};

// 16 rows x COUNT * 16 columns, the sums in tiles 0 to 3.
template <int COUNT>
void one_row_of_tiles(Place at, int units, bool goes_on) {
  if (goes_on) {
    _tile_loadd(0, at.out, at.out_bytes);
    if (COUNT > 1) _tile_loadd(1, at.out + 16, at.out_bytes);
    if (COUNT > 2) _tile_loadd(2, at.out + 32, at.out_bytes);
    if (COUNT > 3) _tile_loadd(3, at.out + 48, at.out_bytes);
  } else {
    _tile_zero(0);
    if (COUNT > 1) _tile_zero(1);
    if (COUNT > 2) _tile_zero(2);
    if (COUNT > 3) _tile_zero(3);
  }
  for (; units > 0; units -= TILE_UNITS, at.left += TILE_UNITS, at.right += TILE_UNITS * at.right_bytes / 4) {
    _tile_loadd(4, at.left, at.left_bytes);
    _tile_loadd(5, at.right, at.right_bytes);
    _tile_dpbf16ps(0, 4, 5);
    if (COUNT > 1) {
      _tile_loadd(6, at.right + 16, at.right_bytes);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (COUNT > 2) {
      _tile_loadd(7, at.right + 32, at.right_bytes);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (COUNT > 3) {
      _tile_loadd(5, at.right + 48, at.right_bytes);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, at.out, at.out_bytes);
  if (COUNT > 1) _tile_stored(1, at.out + 16, at.out_bytes);
  if (COUNT > 2) _tile_stored(2, at.out + 32, at.out_bytes);
  if (COUNT > 3) _tile_stored(3, at.out + 48, at.out_bytes);
}

// 32 rows x COUNT * 16 columns: every tile of `right`, which comes from the second cache, serves twice.
template <int COUNT>
void two_rows_of_tiles(Place at, int units, bool goes_on) {
  const Pair* lower = at.left + TILE_ROWS * at.left_bytes / 4;
  float* under = at.out + TILE_ROWS * at.out_bytes / 4;
  if (goes_on) {
    _tile_loadd(0, at.out, at.out_bytes);
    _tile_loadd(2, under, at.out_bytes);
    if (COUNT > 1) _tile_loadd(1, at.out + 16, at.out_bytes);
    if (COUNT > 1) _tile_loadd(3, under + 16, at.out_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(2);
    if (COUNT > 1) _tile_zero(1);
    if (COUNT > 1) _tile_zero(3);
  }
  for (; units > 0; units -= TILE_UNITS, at.left += TILE_UNITS, lower += TILE_UNITS) {
    _tile_loadd(6, at.right, at.right_bytes);
    _tile_loadd(4, at.left, at.left_bytes);
    _tile_loadd(5, lower, at.left_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (COUNT > 1) {
      _tile_loadd(7, at.right + 16, at.right_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    at.right += TILE_UNITS * at.right_bytes / 4;
  }
  _tile_stored(0, at.out, at.out_bytes);
  _tile_stored(2, under, at.out_bytes);
  if (COUNT > 1) _tile_stored(1, at.out + 16, at.out_bytes);
  if (COUNT > 1) _tile_stored(3, under + 16, at.out_bytes);
}

}  // namespace

void begin_tiles(int rows) {
  TileConfig config;
  if (rows < TILE_ROWS)
    for (int tile = 0; tile < 5; tile++) config.rows[tile] = uint8_t(rows);  // sums and `left` of one_row_of_tiles
  load_config(config);
}

void end_tiles() { _tile_release(); }

void multiply_tiles(const Product<Pair>& job) {
  const int units = job.k_end - job.k_begin, step = job.rows > TILE_ROWS ? 32 : PANEL;
  for (int column = job.column_begin; column < job.column_end; column += step) {
    const int tiles = std::min(step, job.column_end - column) / 16;
    const Place at(job, column);
    if (step == 32 && tiles == 2) two_rows_of_tiles<2>(at, units, job.goes_on);
    else if (step == 32) two_rows_of_tiles<1>(at, units, job.goes_on);
    else if (tiles == 4) one_row_of_tiles<4>(at, units, job.goes_on);
    else if (tiles == 3) one_row_of_tiles<3>(at, units, job.goes_on);
    else if (tiles == 2) one_row_of_tiles<2>(at, units, job.goes_on);
    else if (tiles == 1) one_row_of_tiles<1>(at, units, job.goes_on);
  }
}

#else

void begin_tiles(int) {}
void end_tiles() {}
void multiply_tiles(const Product<Pair>&) { std::abort(); }  // allow_tiles() said no

#endif

}  // namespace pluglm
