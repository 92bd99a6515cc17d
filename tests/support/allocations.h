#pragma once

#include <cstdint>

namespace kda::testing {

// Calls of operator new in this program, by any thread.
[[nodiscard]] std::int64_t allocations() noexcept;

// While it lives, operator new fails in this thread: after `allowed` calls, once or from then on.
class FailingAllocations {
 public:
  enum class Mode : std::uint8_t { kOnce, kFromThenOn };

  FailingAllocations(std::int64_t allowed, Mode mode) noexcept;
  ~FailingAllocations();
  FailingAllocations(const FailingAllocations&) = delete;
  FailingAllocations& operator=(const FailingAllocations&) = delete;

  // Whether one has failed.
  [[nodiscard]] bool happened() const noexcept;
};

}  // namespace kda::testing
