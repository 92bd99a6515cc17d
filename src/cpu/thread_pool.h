#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "kda/plan.h"

namespace kda::cpu {

// As many as any plan gets. Each has a thread and a part of the workspace: a number that is out of the world must cost
// neither.
inline constexpr int kMaxThreads = 1024;

// What these options ask for, or the default: in 1..kMaxThreads.
[[nodiscard]] int threads_for(const PlanOptions& options) noexcept;

// Threads that the whole process shares. Our own instead of OpenMP, because a library inside somebody's process may
// neither clash with that process's OpenMP runtime (torch brings its own), nor hang after fork(), nor allocate while a
// plan is executed, and because several callers must be able to run at once. oneTBB would be a heavy dependency for one
// loop.
//
// The caller of run() works too, so every run ends even when no worker is free. Never destroyed: workers outlive main's
// statics.
class ThreadPool {
 public:
  // Of this process; a forked child gets an empty one.
  [[nodiscard]] static ThreadPool& instance();

  // Starts workers until `threads` of them and callers could work at once. Does less when the system refuses a thread.
  void reserve(int threads) noexcept;

  // Calls task(context, unit, slot) once for each unit in [0, units), on at most `threads` threads, and returns when
  // all are done. A slot in [0, threads) belongs to one thread at a time. task must not throw. Allocates nothing.
  using Task = void (*)(const void* context, std::int64_t unit, int slot) noexcept;
  void run(std::int64_t units, int threads, Task task, const void* context) noexcept;

  // The same for a callable f(unit, slot).
  template <class F>
  void for_each(std::int64_t units, int threads, const F& f) noexcept {
    run(
        units, threads,
        [](const void* context, std::int64_t unit, int slot) noexcept {
          (*static_cast<const F*>(context))(unit, slot);
        },
        &f);
  }

 private:
  struct Job;

  ThreadPool() = default;
  static void replace_after_fork() noexcept;
  void work() noexcept;
  Job* open_job() noexcept;

  std::mutex mutex_;
  std::condition_variable wake_;  // workers: a job was added
  std::condition_variable done_;  // callers: a worker left a job
  Job* jobs_ = nullptr;           // a list of the running callers' jobs
  std::atomic<std::uint32_t> added_{0};
  int workers_ = 0;
};

}  // namespace kda::cpu
