#pragma once

// Checks of one tensor that every operator needs. Each throws Error with a message that names the argument.

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"
#include "kda/tensor.h"

namespace kda {

// An extent and how documentation calls it: {"HV", 4}.
struct Extent {
  std::string_view symbol;
  std::int64_t value = 0;
};

// A shape that can explain itself: [B,T,HV] = [2,128,4].
class Shape {
 public:
  Shape(std::initializer_list<Extent> extents);

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] std::span<const Extent> extents() const noexcept {
    return {extents_.data(), static_cast<std::size_t>(rank_)};
  }
  [[nodiscard]] Shape without_last() const noexcept;
  [[nodiscard]] bool matches(const TensorView& view) const noexcept;
  [[nodiscard]] TensorView contiguous_view(Dtype dtype, Device device) const;
  [[nodiscard]] std::string symbols() const;  // "[B,T,HV]"
  [[nodiscard]] std::string values() const;   // "[2,128,4]"

 private:
  std::array<Extent, 5> extents_{};
  int rank_ = 0;
};

// Anything but the canonical "no tensor" counts as given; what is wrong with it, require_view says.
[[nodiscard]] inline bool is_given(const TensorView& view) noexcept { return view.rank != -1; }

// "float32 [2,3] strides [3,1] on cpu", or "no tensor".
[[nodiscard]] std::string describe(const TensorView& view);

void require_given(Argument argument, const TensorView& view);
// Rank 0..kMaxRank, extents >= 0, addresses within 64 bits.
void require_view(Argument argument, const TensorView& view);
void require_dtype(Argument argument, const TensorView& view, std::initializer_list<Dtype> allowed);
void require_device(Argument argument, const TensorView& view, const Device& expected);
void require_rank(Argument argument, const TensorView& view, const Shape& expected);
void require_shape(Argument argument, const TensorView& view, const Shape& expected);
void require_own_elements(Argument argument, const TensorView& view);
// Data unless the view has no elements, and no element beyond the end of the address space.
void require_data(Argument argument, const TensorView& view);

// An output shares no byte with another tensor, which the message calls `other_name`.
void require_no_overlap(Argument output, const TensorView& view, std::string_view other_name, const TensorView& other);

// Equal in everything that addresses of elements depend on, the data pointer excepted: strides of axes with fewer than
// two indices do not count.
[[nodiscard]] bool same_metadata(const TensorView& a, const TensorView& b) noexcept;

// The stride of an axis, 0 where nothing is ever multiplied by it, so that no caller's number is trusted there.
[[nodiscard]] std::int64_t used_stride(const TensorView& view, int axis) noexcept;

}  // namespace kda
