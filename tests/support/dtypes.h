#pragma once

// Conversions between the 16-bit dtypes and float, in integer arithmetic: independent of the library's own.

#include <cstdint>

#include "kda/tensor.h"

namespace kda::testing {

// Round to nearest, ties to even; NaN stays NaN.
[[nodiscard]] std::uint16_t to_bfloat16(float value);
[[nodiscard]] std::uint16_t to_float16(float value);
[[nodiscard]] float from_bfloat16(std::uint16_t bits);
[[nodiscard]] float from_float16(std::uint16_t bits);

// Element `index` of float32, float16 or bfloat16 data.
[[nodiscard]] float load(const void* data, Dtype dtype, std::int64_t index);
void store(void* data, Dtype dtype, std::int64_t index, float value);

// What is left of a value that was stored as dtype.
[[nodiscard]] double round_to(Dtype dtype, double value);

}  // namespace kda::testing
