#pragma once

// Random tensors, and memory that shows what was done to it.

#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kda/status.h"
#include "kda/tensor.h"
#include "support/dtypes.h"
#include "support/generator.h"

namespace kda::fuzz {

// A broken promise ends the run, as a sanitizer's finding does.
inline void require(bool holds, const std::string& promise) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", promise.c_str());
  std::abort();
}

// Refusals say what was expected.
inline void require_message(const Error& error) {
  const std::string message = error.what();
  const bool is_whole = message.find(": expected ") != std::string::npos && message.find(", got ") != std::string::npos;
  require(is_whole || error.kind() == ErrorKind::kOutOfMemory, "an error says what was expected: " + message);
}

// Once in a while; not when the input has run out, which leaves a call as it should be.
inline bool rarely(FuzzedDataProvider& draw) { return draw.ConsumeIntegralInRange(0, 15) == 15; }

inline constexpr std::array kDtypes{Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16,
                                    Dtype::kFloat64, Dtype::kInt32,   Dtype::kInt64};

// Extents and strides around which arithmetic goes wrong.
inline std::int64_t draw_wild(FuzzedDataProvider& draw) {
  constexpr std::array<std::int64_t, 14> kNotable{0,
                                                  1,
                                                  -1,
                                                  2,
                                                  -2,
                                                  16,
                                                  17,
                                                  1 << 16,
                                                  std::int64_t{1} << 31,
                                                  std::int64_t{1} << 32,
                                                  -(std::int64_t{1} << 33),
                                                  std::int64_t{1} << 62,
                                                  std::numeric_limits<std::int64_t>::max(),
                                                  std::numeric_limits<std::int64_t>::min()};
  return draw.ConsumeBool() ? draw.PickValueInArray(kNotable) : draw.ConsumeIntegral<std::int64_t>();
}

// Strides for these extents: any order of axes, gaps, negative ones, and 0 where elements may coincide.
inline TensorView draw_strided(FuzzedDataProvider& draw, Dtype dtype, const std::vector<std::int64_t>& shape,
                               bool may_coincide) {
  TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  if (!draw.ConsumeBool()) return view;
  std::vector<std::size_t> axes(shape.size());
  for (std::size_t i = 0; i < axes.size(); ++i) axes[i] = i;
  for (std::size_t i = axes.size(); i > 1; --i) {
    std::swap(axes[i - 1], axes[draw.ConsumeIntegralInRange<std::size_t>(0, i - 1)]);
  }
  std::int64_t step = draw.ConsumeIntegralInRange<std::int64_t>(1, 3);
  for (const std::size_t axis : axes) {
    const int kind = draw.ConsumeIntegralInRange(0, 7);
    view.strides[axis] = kind == 4 && may_coincide ? 0 : kind == 5 ? -step : step;
    const std::int64_t extent = std::max<std::int64_t>(shape[axis], 1);
    if (__builtin_mul_overflow(step, extent, &step)) step = std::numeric_limits<std::int64_t>::max() / 2;
    if (kind >= 6) step += std::min<std::int64_t>(kind, std::numeric_limits<std::int64_t>::max() - step);
  }
  return view;
}

// Changes one thing about a view.
inline void spoil_view(FuzzedDataProvider& draw, TensorView& view) {
  const auto axis = draw.ConsumeIntegralInRange<std::size_t>(0, static_cast<std::size_t>(kMaxRank) - 1);
  switch (draw.ConsumeIntegralInRange(0, 7)) {
    case 0:
      view = {};
      break;
    case 1:
      view.dtype = draw.PickValueInArray(kDtypes);
      break;
    case 2:
      view.rank = draw.ConsumeBool() ? draw.ConsumeIntegralInRange(-2, kMaxRank + 1) : draw.ConsumeIntegral<int>();
      break;
    case 3:
      view.device = {draw.ConsumeBool() ? DeviceType::kCuda : DeviceType::kCpu, draw.ConsumeIntegralInRange(-1, 2)};
      break;
    case 4:
      view.shape[axis] = draw_wild(draw);
      break;
    case 5:
      view.shape[axis] += draw.ConsumeIntegralInRange(-1, 1);
      break;
    default:
      view.strides[axis] = draw_wild(draw);
      break;
  }
}

// Elements from the lowest to the highest that a view reaches, relative to its data; nothing when they are more than
// `most`.
struct Extent {
  std::int64_t low = 0;
  std::int64_t count = 0;
};

inline bool extent_of(const TensorView& view, std::int64_t most, Extent& extent) {
  extent = {};
  if (view.numel() == 0) return true;
  if (view.numel() > most) return false;
  __extension__ __int128 low = 0;
  __extension__ __int128 high = 0;
  for (std::size_t axis = 0; axis < view.sizes().size(); ++axis) {
    __extension__ const __int128 reach = static_cast<__int128>(view.shape[axis] - 1) * view.strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  if (high - low >= most) return false;
  extent = {static_cast<std::int64_t>(low), static_cast<std::int64_t>(high - low) + 1};
  return true;
}

// f(index of an element relative to the view's data) for every element.
template <typename Function>
void for_each_element(const TensorView& view, const Function& function) {
  std::array<std::int64_t, static_cast<std::size_t>(kMaxRank)> index{};
  for (std::int64_t count = view.numel(); count > 0; --count) {
    std::int64_t at = 0;
    for (std::size_t axis = 0; axis < view.sizes().size(); ++axis) at += index[axis] * view.strides[axis];
    function(at);
    for (std::size_t axis = view.sizes().size(); axis-- > 0;) {
      if (++index[axis] < view.shape[axis]) break;
      index[axis] = 0;
    }
  }
}

// Exactly the memory that a view needs, so that one byte beside it is the address sanitizer's. All NaN at first.
class Memory {
 public:
  Memory(TensorView& view, const Extent& extent)
      : low_(extent.low),
        bytes_(static_cast<std::size_t>(extent.count) * size_of(view.dtype)),
        data_(new std::byte[bytes_]) {
    std::memset(data_.get(), 0xff, bytes_);
    if (bytes_ != 0) view.data = data_.get() - low_ * static_cast<std::int64_t>(size_of(view.dtype));
  }

  // element(i) for the i-th element of the memory.
  template <typename Element>
  void fill(Dtype dtype, const Element& element) {
    const auto count = static_cast<std::int64_t>(bytes_ / size_of(dtype));
    for (std::int64_t i = 0; i < count; ++i) testing::store(data_.get(), dtype, i, static_cast<float>(element(i)));
  }

  void remember() { copy_.assign(data_.get(), data_.get() + bytes_); }
  [[nodiscard]] bool is_unchanged() const { return std::equal(copy_.begin(), copy_.end(), data_.get()); }

  // Whether all that is no element of the view is still as it was made.
  [[nodiscard]] bool gaps_are_intact(const TensorView& view) const {
    const std::size_t bytes = size_of(view.dtype);
    std::vector<bool> is_element(bytes_ / bytes);
    for_each_element(view, [&](std::int64_t at) { is_element[static_cast<std::size_t>(at - low_)] = true; });
    for (std::size_t i = 0; i < bytes_; ++i) {
      if (!is_element[i / bytes] && data_[i] != std::byte{0xff}) return false;
    }
    return true;
  }

 private:
  std::int64_t low_;
  std::size_t bytes_;
  std::unique_ptr<std::byte[]> data_;
  std::vector<std::byte> copy_;
};

// Elements in row-major order.
inline std::vector<double> values_of(const TensorView& view) {
  std::vector<double> values;
  for_each_element(
      view, [&](std::int64_t at) { values.push_back(static_cast<double>(testing::load(view.data, view.dtype, at))); });
  return values;
}

inline bool has_nan(const std::vector<double>& values) {
  return std::any_of(values.begin(), values.end(), [](double value) { return std::isnan(value); });
}

// A coarse comparison: any wrong element beyond rounding to 16 bits shows.
inline bool are_close(const std::vector<double>& actual, const std::vector<double>& expected) {
  double difference = 0;
  double size = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (actual[i] == expected[i]) continue;
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(difference) <= 0.02 * std::sqrt(size) + 1e-4 * std::sqrt(static_cast<double>(actual.size()));
}

}  // namespace kda::fuzz
