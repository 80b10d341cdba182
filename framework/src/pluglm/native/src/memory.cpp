// Memory in huge pages, and how fast it is read.
#include <sys/mman.h>

#include <atomic>
#include <cstdio>

#include "tools.h"

namespace pluglm {

namespace {

constexpr size_t HUGE = 2 << 20;

uint64_t mixed(const char* from, size_t bytes, bool ahead) {
  typedef uint64_t words __attribute__((vector_size(64)));
  words sums[4] = {};
  for (size_t at = 0; at + 256 <= bytes; at += 256)
    for (int i = 0; i < 4; i++) {
      words value;
      std::memcpy(&value, from + at + 64 * i, 64);
      if (ahead) __builtin_prefetch(from + at + 64 * i + 4096);
      sums[i] ^= value;
    }
  words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  uint64_t result = 0;
  for (int i = 0; i < 8; i++) result ^= all[i];
  return result;
}

}  // namespace

extern "C" {

// Zeroed memory aligned to 2 MiB, in huge pages where the system grants them; null when there is none.
void* pluglm_map(size_t bytes) {
  const size_t whole = (bytes + HUGE - 1) / HUGE * HUGE;
  constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* raw = (char*)mmap(nullptr, whole + HUGE, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* start = (char*)(((uintptr_t)raw + HUGE - 1) / HUGE * HUGE);
  if (start > raw) munmap(raw, start - raw);
  if (raw + HUGE > start) munmap(start + whole, raw + HUGE - start);
#if defined(MADV_HUGEPAGE)
  madvise(start, whole, MADV_HUGEPAGE);
#endif
  return start;
}

void pluglm_unmap(void* start, size_t bytes) { munmap(start, (bytes + HUGE - 1) / HUGE * HUGE); }

// Reads every whole MiB of it once, on all threads. ahead: with a prefetch, which some CPUs need for their best and
// others lose by.
// The result keeps the compiler from leaving the reads out.
uint64_t pluglm_read(Tools* tools, const char* from, size_t bytes, int32_t ahead) {
  constexpr size_t CHUNK = 1 << 20;
  std::atomic<uint64_t> all{0};
  const auto turn = tools->pool.turn();
  tools->pool.run(int(bytes / CHUNK), [&](int chunk) { all ^= mixed(from + chunk * CHUNK, CHUNK, ahead); });
  return all;
}
}

}  // namespace pluglm
