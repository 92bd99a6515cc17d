#include "c_api/registry.h"

#include <pthread.h>

#include <atomic>

namespace kda::c_api {
namespace {

constinit std::mutex mutex;

void lock() { mutex.lock(); }
void unlock() { mutex.unlock(); }

}  // namespace

std::mutex& registry_mutex() noexcept {
  [[maybe_unused]] static const int registered = pthread_atfork(lock, unlock, unlock);
  return mutex;
}

std::uintptr_t next_handle() noexcept {
  // Neither user nor kernel space on any 64-bit system: not an address by accident, and a fault when used as one.
  constexpr std::uintptr_t kFirst = 0x4b44'4100'0000'0010;
  constexpr std::uintptr_t kStep = 16;  // looks aligned
  static std::atomic<std::uintptr_t> next = kFirst;
  return next.fetch_add(kStep, std::memory_order_relaxed);
}

}  // namespace kda::c_api
