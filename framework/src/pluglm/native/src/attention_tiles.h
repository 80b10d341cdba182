// The products of attention in matrix tiles (AMX), on the same panels: Pairs are what the tiles multiply.
#pragma once
#include "attention_products.h"

namespace pluglm {

constexpr int TILE_ROWS = 16;
constexpr int TILE_UNITS = 16;  // units along the sum in a tile, a multiple of which `right` has as rows

// Between these two a thread multiplies in tiles. rows: of the products; with fewer than TILE_ROWS, tiles have no more.
void begin_tiles(int rows);
void end_tiles();

// multiply() of up to 32 rows, of which memory has a multiple of TILE_ROWS if there are more than so many. k_begin and
// k_end are multiples of TILE_UNITS.
void multiply_tiles(const Product<Pair>& job);

template <typename Unit>
void multiply(const Product<Unit>& job, bool in_tiles) {
  if constexpr (std::is_same_v<Unit, Pair>) {
    if (in_tiles) return multiply_tiles(job);
  }
  multiply(job);
}

}  // namespace pluglm
