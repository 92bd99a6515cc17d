#pragma once

// Division by a number that is known beforehand, on the device and on the host.

#include <cstdint>

namespace kda {

// Dividends are below 2^31.
struct Divisor {
  std::uint32_t divisor = 1;
  std::uint32_t multiplier = 0x80000000u;  // 2^(31 + shift) / divisor, rounded up
  std::uint32_t shift = 0;                 // 2^shift is at least divisor
};

// For numbers up to 2^31; below 1 there is nothing to divide.
constexpr Divisor divisor(std::int64_t by) {
  Divisor d;
  if (by < 1) return d;
  d.divisor = static_cast<std::uint32_t>(by);
  while ((std::uint64_t{1} << d.shift) < d.divisor) ++d.shift;
  d.multiplier = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + d.shift)) + d.divisor - 1) / d.divisor);
  return d;
}

constexpr std::uint32_t divide(std::uint32_t x, const Divisor& by) {
  return static_cast<std::uint32_t>(std::uint64_t{x << 1} * by.multiplier >> 32) >> by.shift;
}

}  // namespace kda
