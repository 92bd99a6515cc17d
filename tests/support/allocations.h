#pragma once

#include <cstdint>

namespace kda::testing {

// How often this process has called operator new, in any thread.
[[nodiscard]] std::int64_t allocations() noexcept;

}  // namespace kda::testing
