// x times a weight, for few rows: the weights are read from memory once, whatever the number of rows.
#pragma once
#include <new>

#include "pool.h"
#include "vec.h"

namespace pluglm {

// weight_NK [outputs, inputs] row-major, or as pack_weight of panels.h leaves it; bias_N float32 or null.
template <typename T>
struct Linear {
  const T* weight_NK;
  const float* bias_N;
  int64_t outputs;
  int64_t inputs;
  int64_t is_packed;
};

// Reusable memory of one caller, grown and never shrunk.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  // At least `bytes`, aligned to 64, contents undefined; the memory of earlier calls is lost. Throws std::bad_alloc.
  void* get(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = 0;
      const size_t whole = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(64, whole);
      if (!memory_) throw std::bad_alloc();
      size_ = whole;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// out_RN float32 = x_RK weight_NK' + bias_N. In float32, and of packed weights, the bits of a row do not depend on the number of rows, nor on the threads.
void linear(Pool& pool, const Linear<float>& layer, const float* x_RK, int64_t rows, float* out_RN);
void linear(Pool& pool, const Linear<bf16>& layer, const bf16* x_RK, int64_t rows, float* out_RN);

}  // namespace pluglm
