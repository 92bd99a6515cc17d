#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "kda/export.h"

namespace kda {

enum class Dtype : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kInt32, kInt64 };

// Bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kFloat16:
    case Dtype::kBFloat16:
      return 2;
    case Dtype::kFloat64:
    case Dtype::kInt64:
      return 8;
    case Dtype::kFloat32:
    case Dtype::kInt32:
      break;
  }
  return 4;
}

// "float32", "float16", "bfloat16", ...
[[nodiscard]] KDA_API std::string_view name_of(Dtype dtype) noexcept;

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:0", ...
[[nodiscard]] KDA_API std::string name_of(const Device& device);

// The largest rank of any tensor in this library.
inline constexpr int kMaxRank = 8;

// A strided window on memory that somebody else owns. A default-constructed view means "no tensor": that is how
// optional inputs and outputs are left out. Strides count elements, may be 0 or negative for inputs, and address
// element (i0, i1, ...) at data + sum(i_d * stride_d). A view without elements may have null data.
struct KDA_API TensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  Device device{};
  int rank = -1;  // -1: no tensor
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  [[nodiscard]] bool present() const noexcept { return rank >= 0; }

  // Elements; 0 when any extent is 0, and for an absent view. Saturates at INT64_MAX.
  [[nodiscard]] std::int64_t numel() const noexcept;

  [[nodiscard]] std::span<const std::int64_t> sizes() const noexcept {
    return {shape.data(), static_cast<std::size_t>(rank < 0 ? 0 : rank)};
  }

  // A row-major view. Throws Error (kValue) when the rank exceeds kMaxRank or an extent is negative. Operators take
  // their inputs as TensorView too and never write them, so a const pointer is accepted.
  [[nodiscard]] static TensorView contiguous(const void* data, Dtype dtype, std::span<const std::int64_t> shape,
                                             Device device = {});
  [[nodiscard]] static TensorView contiguous(const void* data, Dtype dtype, std::initializer_list<std::int64_t> shape,
                                             Device device = {}) {
    return contiguous(data, dtype, std::span<const std::int64_t>(shape.begin(), shape.size()), device);
  }

  // A view with any strides (in elements). Throws as contiguous() does, and when the ranks of shape and strides differ.
  [[nodiscard]] static TensorView strided(const void* data, Dtype dtype, std::span<const std::int64_t> shape,
                                          std::span<const std::int64_t> strides, Device device = {});
  [[nodiscard]] static TensorView strided(const void* data, Dtype dtype, std::initializer_list<std::int64_t> shape,
                                          std::initializer_list<std::int64_t> strides, Device device = {}) {
    return strided(data, dtype, std::span<const std::int64_t>(shape.begin(), shape.size()),
                   std::span<const std::int64_t>(strides.begin(), strides.size()), device);
  }
};

}  // namespace kda
