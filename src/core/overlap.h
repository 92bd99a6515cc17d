#pragma once

// Exact questions about the memory that strided views cover.

#include <cstdint>
#include <optional>

#include "kda/tensor.h"

namespace kda {

// Bytes that a view touches, relative to its data pointer: from `low` (<= 0) up to but not including `high`.
struct ByteRange {
  std::int64_t low = 0;
  std::int64_t high = 0;
};

// Empty for a view without elements. No value when an element's address, or the range's length, leaves 64 bits.
[[nodiscard]] std::optional<ByteRange> byte_range(const TensorView& view) noexcept;

// Whether two different indices of the view reach the same element.
[[nodiscard]] bool overlaps_itself(const TensorView& view) noexcept;

// Whether two views share a byte. Interleaved views, like heads cut from one buffer, are told apart. Neither function
// allocates; both answer true when byte_range has no value or the search exceeds its (large) bound.
[[nodiscard]] bool overlap(const TensorView& a, const TensorView& b) noexcept;

}  // namespace kda
