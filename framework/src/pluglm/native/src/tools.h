// What one backend keeps between calls: its threads and its scratch memory. One call at a time.
#pragma once
#include "linear.h"
#include "pool.h"

namespace pluglm {

struct Tools {
  Pool pool;
  Scratch tiles;      // of linear
  Scratch work;       // of a layer
  Scratch attention;  // of attention

  Tools(int num_threads, int spin_us) : pool(num_threads, spin_us) {}
};

}  // namespace pluglm
