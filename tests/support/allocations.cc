#include "support/allocations.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

using kda::testing::FailingAllocations;

std::atomic<std::int64_t> count = 0;

thread_local bool fails = false;
thread_local FailingAllocations::Mode mode = FailingAllocations::Mode::kOnce;
thread_local std::int64_t allowed = 0;

void count_one() {
  count.fetch_add(1, std::memory_order_relaxed);
  if (!fails) return;
  const bool is_due = mode == FailingAllocations::Mode::kOnce ? allowed == 0 : allowed <= 0;
  --allowed;
  if (is_due) throw std::bad_alloc();
}

void* counted_malloc(std::size_t bytes) {
  count_one();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}

void* counted_aligned_alloc(std::size_t bytes, std::align_val_t alignment) {
  count_one();
  const auto step = static_cast<std::size_t>(alignment);
  if (bytes > SIZE_MAX - step) throw std::bad_alloc();
  if (void* memory = std::aligned_alloc(step, (bytes + step - 1) / step * step)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t bytes) { return counted_malloc(bytes); }
// The library's own would not match the deletes below: std::stable_sort uses it.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return counted_malloc(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t bytes, std::align_val_t alignment) { return counted_aligned_alloc(bytes, alignment); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

std::int64_t kda::testing::allocations() noexcept { return count.load(); }

namespace kda::testing {

FailingAllocations::FailingAllocations(std::int64_t after, Mode how) noexcept {
  mode = how;
  allowed = after;
  fails = true;
}

FailingAllocations::~FailingAllocations() { fails = false; }

bool FailingAllocations::happened() const noexcept { return allowed < 0; }

}  // namespace kda::testing
