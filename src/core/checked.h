#pragma once

// Integer arithmetic on sizes and strides that callers control.

#include <cstdint>
#include <limits>
#include <optional>

namespace kda {

__extension__ using Int128 = __int128;

[[nodiscard]] inline std::optional<std::int64_t> checked_mul(std::int64_t a, std::int64_t b) noexcept {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// For factors that are not negative.
[[nodiscard]] inline std::int64_t saturating_mul(std::int64_t a, std::int64_t b) noexcept {
  return checked_mul(a, b).value_or(std::numeric_limits<std::int64_t>::max());
}

[[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
  return a / b + (a % b != 0 ? 1 : 0);
}

}  // namespace kda
