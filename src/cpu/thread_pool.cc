#include "cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>

#include "kda/info.h"

namespace kda::cpu {
namespace {

// How often an idle worker looks for a new job before it sleeps: some tens of microseconds, about what waking it costs.
constexpr int kSpins = 2000;

inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct ThreadPool::Job {
  Task task;
  const void* context;
  std::int64_t units;
  int threads;
  std::atomic<std::int64_t> next{0};
  int slots = 1;   // handed out; the caller has slot 0
  int active = 0;  // workers inside
  Job* following = nullptr;

  void work(int slot) noexcept {
    for (;;) {
      const std::int64_t unit = next.fetch_add(1, std::memory_order_relaxed);
      if (unit >= units) return;
      task(context, unit, slot);
    }
  }
};

namespace {

// Storage that a forked child can fill anew: the parent's pool may be locked in the child, its workers are gone.
alignas(ThreadPool) unsigned char pool_storage[sizeof(ThreadPool)];

}  // namespace

void ThreadPool::replace_after_fork() noexcept { new (pool_storage) ThreadPool(); }

ThreadPool& ThreadPool::instance() {
  static ThreadPool* const pool = [] {
    auto* made = new (pool_storage) ThreadPool();
    pthread_atfork(nullptr, nullptr, &ThreadPool::replace_after_fork);
    return made;
  }();
  return *pool;
}

void ThreadPool::reserve(int threads) noexcept {
  const std::lock_guard lock(mutex_);
  try {
    while (workers_ < threads - 1) {
      std::thread([this] { work(); }).detach();
      ++workers_;
    }
  } catch (const std::system_error&) {  // the threads there are will do the work
  } catch (const std::bad_alloc&) {
  }
}

ThreadPool::Job* ThreadPool::open_job() noexcept {
  for (Job* job = jobs_; job != nullptr; job = job->following) {
    if (job->slots < job->threads && job->next.load(std::memory_order_relaxed) < job->units) return job;
  }
  return nullptr;
}

void ThreadPool::work() noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    Job* job = open_job();
    if (job == nullptr) {
      const std::uint32_t seen = added_.load(std::memory_order_relaxed);
      lock.unlock();
      for (int i = 0; i < kSpins && added_.load(std::memory_order_relaxed) == seen; ++i) relax();
      lock.lock();
      wake_.wait(lock, [&] { return added_.load(std::memory_order_relaxed) != seen; });
      continue;
    }
    const int slot = job->slots++;
    ++job->active;
    lock.unlock();
    job->work(slot);
    lock.lock();
    if (--job->active == 0) done_.notify_all();
  }
}

void ThreadPool::run(std::int64_t units, int threads, Task task, const void* context) noexcept {
  const int useful = static_cast<int>(std::min<std::int64_t>(units, threads));
  Job job{task, context, units, useful};
  if (useful <= 1) return job.work(0);
  {
    const std::lock_guard lock(mutex_);
    job.following = jobs_;
    jobs_ = &job;
    added_.fetch_add(1, std::memory_order_relaxed);
  }
  for (int i = 1; i < useful; ++i) wake_.notify_one();
  job.work(0);
  std::unique_lock lock(mutex_);
  Job** link = &jobs_;
  while (*link != &job) link = &(*link)->following;
  *link = job.following;
  done_.wait(lock, [&] { return job.active == 0; });
}

int threads_for(const PlanOptions& options) noexcept {
  return options.num_threads > 0 ? std::min(options.num_threads, kMaxThreads) : default_num_threads();
}

}  // namespace kda::cpu

namespace kda {

int default_num_threads() noexcept {
  if (const char* wanted = std::getenv("KDA_NUM_THREADS"); wanted != nullptr) {
    const long threads = std::strtol(wanted, nullptr, 10);
    if (threads > 0) return static_cast<int>(std::min<long>(threads, cpu::kMaxThreads));
  }
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return std::clamp(CPU_COUNT(&cpus), 1, cpu::kMaxThreads);
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, cpu::kMaxThreads);
}

}  // namespace kda
