// What the processor is told about its matrix tiles (AMX), and whether it may be.
#pragma once
#include <cstdint>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace pluglm {

// Eight tiles of up to 16 rows of 64 bytes. Loading it clears them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if defined(__AMX_BF16__)
inline void load_config(const TileConfig& config) {
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 thinks that only 8 bytes of it are read
  _tile_loadconfig(&config);
}
#endif

// Asks the system for the use of matrix tiles where the build has them; false when it refuses.
bool allow_tiles();

}  // namespace pluglm
