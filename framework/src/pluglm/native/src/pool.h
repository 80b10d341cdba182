// Threads that share the chunks of one job at a time. Waiting is bounded: a short spin, then sleep, so that a process
// that is descheduled never holds up a spinning one, and two busy processes share the cores fairly.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pluglm {

class Pool {
 public:
  // num_threads counts the caller. spin_us: how long a waiting thread spins before it sleeps. Throws std::system_error
  // when the system starts no more threads.
  Pool(int num_threads, int spin_us);
  ~Pool();
  Pool(const Pool&) = delete;

  int num_threads() const { return int(workers_.size()) + 1; }

  // Held by whoever uses the pool and the scratch memory that goes with it: a call that its caller gave up on may still
  // run when the next one comes.
  [[nodiscard]] std::unique_lock<std::mutex> turn() { return std::unique_lock(callers_); }

  // Whether the threads are there: a child process has a copy of the pool, and works alone.
  bool has_threads() const;

  // work(chunk) for every chunk, each exactly once, on any thread; returns when all are done. One caller at a time. It
  // must not throw: other threads would go on with what the caller unwinds.
  template <typename Work>
  void run(int num_chunks, Work&& work) {
    using Callable = std::remove_reference_t<Work>;
    auto call = [](void* context, int chunk) noexcept { (*static_cast<Callable*>(context))(chunk); };
    run_job(num_chunks, call, (void*)&work);
  }

 private:
  using Function = void (*)(void*, int) noexcept;
  void run_job(int num_chunks, Function function, void* context);
  bool take_one();
  void work_loop();
  void stop();

  // One word says it all, so that a late worker cannot mistake one job for another: serial | chunks | next chunk.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<Function> function_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int> remaining_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex callers_;
  int spin_us_;
  int process_;
  std::vector<std::thread> workers_;
};

}  // namespace pluglm
