// What one backend keeps between calls: its threads and its scratch memory. One call at a time.
#pragma once
#include "linear.h"
#include "pool.h"

namespace pluglm {

struct Tools {
  Pool pool;
  Scratch work;       // of a layer
  Scratch attention;  // of attention

  Tools(int num_threads, int spin_us) : pool(num_threads, spin_us) {}
};

// What the functions that Python calls return, if not 0: there is no memory for it; a number is asked for that is no row.
constexpr int32_t NO_MEMORY = 1, NO_ROW = 2;

// Runs `call` when nobody else uses the tools. 0, or NO_MEMORY.
template <typename Call>
int32_t in_turn(Tools* tools, Call&& call) {
  const auto turn = tools->pool.turn();
  try {
    call();
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  return 0;
}

}  // namespace pluglm
