#include "support/dtypes.h"

#include <bit>
#include <stdexcept>

namespace kda::testing {

std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float from_bfloat16(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

std::uint16_t to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const auto finish = [sign](std::uint32_t half) { return static_cast<std::uint16_t>(sign | half); };
  if (magnitude > 0x7f800000u) return finish(0x7e00u);
  if (magnitude >= 0x47800000u) return finish(0x7c00u);  // 2^16 and up
  // The significand is a multiple of 2^(exponent - 23); a half counts in units of 2^(max(exponent, -14) - 10).
  const int exponent = static_cast<int>(magnitude >> 23) - 127;
  if (exponent < -25) return finish(0);
  const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  const int shift = exponent < -14 ? -1 - exponent : 13;
  const std::uint32_t kept = significand >> shift;
  const std::uint32_t rest = significand & ((1u << shift) - 1u);
  const std::uint32_t middle = 1u << (shift - 1);
  const std::uint32_t rounded = kept + ((rest > middle || (rest == middle && (kept & 1u) != 0)) ? 1u : 0u);
  // For a normal number `kept` has the leading one at bit 10, which adds 1 to the exponent field; so does a carry.
  return finish(exponent < -14 ? rounded : (static_cast<std::uint32_t>(exponent + 14) << 10) + rounded);
}

float from_float16(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 31u;
  const std::uint32_t mantissa = bits & 1023u;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

float load(const void* data, Dtype dtype, std::int64_t index) {
  switch (dtype) {
    case Dtype::kFloat32:
      return static_cast<const float*>(data)[index];
    case Dtype::kFloat16:
      return from_float16(static_cast<const std::uint16_t*>(data)[index]);
    case Dtype::kBFloat16:
      return from_bfloat16(static_cast<const std::uint16_t*>(data)[index]);
    default:
      throw std::logic_error("load: dtype");
  }
}

void store(void* data, Dtype dtype, std::int64_t index, float value) {
  switch (dtype) {
    case Dtype::kFloat32:
      static_cast<float*>(data)[index] = value;
      return;
    case Dtype::kFloat16:
      static_cast<std::uint16_t*>(data)[index] = to_float16(value);
      return;
    case Dtype::kBFloat16:
      static_cast<std::uint16_t*>(data)[index] = to_bfloat16(value);
      return;
    default:
      throw std::logic_error("store: dtype");
  }
}

double round_to(Dtype dtype, double value) {
  const auto narrow = static_cast<float>(value);
  switch (dtype) {
    case Dtype::kFloat32:
      return narrow;
    case Dtype::kFloat16:
      return from_float16(to_float16(narrow));
    case Dtype::kBFloat16:
      return from_bfloat16(to_bfloat16(narrow));
    default:
      return value;
  }
}

}  // namespace kda::testing
