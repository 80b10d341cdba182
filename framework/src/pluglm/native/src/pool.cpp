#include "pool.h"

#include <unistd.h>

#include <chrono>

namespace pluglm {

namespace {

constexpr int FIELD_BITS = 20;
constexpr uint64_t FIELD = (1u << FIELD_BITS) - 1;
constexpr int MOST_CHUNKS = int(FIELD) - 64;  // threads may each add one beyond the last
constexpr int PAUSES = 32;  // between two looks at the clock

int next_chunk(uint64_t ticket) { return int(ticket & FIELD); }
int num_chunks(uint64_t ticket) { return int(ticket >> FIELD_BITS & FIELD); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True once condition() holds; false when it did not within spin_us.
template <typename Condition>
bool spin_until(int spin_us, Condition&& condition) {
  auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < PAUSES; i++) {
      if (condition()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(spin_us));
  return condition();
}

}  // namespace

Pool::Pool(int num_threads, int spin_us) : spin_us_(spin_us), process_(getpid()) {
  try {
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this] { work_loop(); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

bool Pool::has_threads() const { return getpid() == process_; }

void Pool::stop() {
  stopping_ = true;
  ticket_.fetch_add(uint64_t(1) << 2 * FIELD_BITS);
  ticket_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run_job(int count, Function function, void* context) {
  if (workers_.empty() || count <= 1 || count > MOST_CHUNKS) {
    for (int chunk = 0; chunk < count; chunk++) function(context, chunk);
    return;
  }
  function_.store(function, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  remaining_.store(count, std::memory_order_relaxed);
  uint64_t serial = (ticket_.load(std::memory_order_relaxed) >> 2 * FIELD_BITS) + 1;
  ticket_.store(serial << 2 * FIELD_BITS | uint64_t(count) << FIELD_BITS);
  if (sleepers_.load()) ticket_.notify_all();
  while (take_one()) {
  }
  auto done = [this] { return remaining_.load(std::memory_order_acquire) == 0; };
  // A worker that was descheduled inside its chunk gets the core of whoever waits for it.
  while (!spin_until(spin_us_, done)) std::this_thread::yield();
}

// The word is read before the function and the context, and taken by compare-and-swap after: what was read then
// belongs to this job, for the next one cannot begin while a chunk of this one is open.
bool Pool::take_one() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (next_chunk(ticket) < num_chunks(ticket)) {
    Function function = function_.load(std::memory_order_relaxed);
    void* context = context_.load(std::memory_order_relaxed);
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    function(context, next_chunk(ticket));
    remaining_.fetch_sub(1, std::memory_order_release);
    return true;
  }
  return false;
}

void Pool::work_loop() {
  while (true) {
    while (take_one()) {
    }
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    // Asked after the ticket: who has seen the destructor's, which nothing follows, must not wait for another.
    if (stopping_.load(std::memory_order_relaxed)) return;
    if (next_chunk(seen) < num_chunks(seen)) continue;
    if (spin_until(spin_us_, [this, seen] { return ticket_.load(std::memory_order_acquire) != seen; })) continue;
    sleepers_.fetch_add(1);
    ticket_.wait(seen);
    sleepers_.fetch_sub(1);
  }
}

}  // namespace pluglm
