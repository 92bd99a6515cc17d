#pragma once

// Numbers of every dtype in float64, and the functions that gates are made of.

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "kda/tensor.h"

namespace kda::reference {

// What messages call the memory of the results.
inline constexpr std::string_view kMemory = "float64 reference";

[[nodiscard]] inline double from_half(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

[[nodiscard]] inline double load(const void* data, Dtype dtype, std::int64_t index) {
  switch (dtype) {
    case Dtype::kFloat16:
      return from_half(static_cast<const std::uint16_t*>(data)[index]);
    case Dtype::kBFloat16:
      return std::bit_cast<float>(std::uint32_t{static_cast<const std::uint16_t*>(data)[index]} << 16);
    default:
      return static_cast<const float*>(data)[index];
  }
}

[[nodiscard]] inline double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

[[nodiscard]] inline double sigmoid(double x) {
  return x > 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

// exp(A_log), bounded as the contract says, and above 0 unless A_log is -inf, so that inf * 0 never arises.
[[nodiscard]] inline double gate_rate(float A_log) {
  constexpr double kMax = std::numeric_limits<float>::max();
  const double rate = std::exp(static_cast<double>(A_log));
  if (rate == 0 && std::isfinite(A_log)) return std::numeric_limits<double>::denorm_min();
  return rate > kMax ? kMax : rate;
}

}  // namespace kda::reference
