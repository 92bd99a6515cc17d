#include "kda/tensor.h"

#include <algorithm>

#include "core/checked.h"
#include "core/error.h"

namespace kda {
namespace {

constexpr Argument kView{"kda", "TensorView"};

void check_shape(std::span<const std::int64_t> shape) {
  if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
    fail(ErrorKind::kValue, kView, "rank 0.." + std::to_string(kMaxRank), std::to_string(shape.size()));
  }
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t extent) { return extent < 0; })) {
    fail(ErrorKind::kValue, kView, "extents >= 0", format_shape(shape));
  }
}

TensorView make_view(const void* data, Dtype dtype, std::span<const std::int64_t> shape, Device device) {
  check_shape(shape);
  TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  return view;
}

}  // namespace

std::string_view name_of(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kBFloat16:
      return "bfloat16";
    case Dtype::kFloat64:
      return "float64";
    case Dtype::kInt32:
      return "int32";
    case Dtype::kInt64:
      return "int64";
  }
  return "unknown dtype";
}

std::string name_of(const Device& device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return "cuda:" + std::to_string(device.index);
  }
  return "unknown device";
}

std::int64_t TensorView::numel() const noexcept {
  if (rank < 0) return 0;
  std::int64_t count = 1;
  for (int axis = 0; axis < std::min(rank, kMaxRank); ++axis) {
    const std::int64_t extent = shape[static_cast<std::size_t>(axis)];
    if (extent <= 0) return 0;
    count = saturating_mul(count, extent);
  }
  return count;
}

TensorView TensorView::contiguous(const void* data, Dtype dtype, std::span<const std::int64_t> shape, Device device) {
  TensorView view = make_view(data, dtype, shape, device);
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    view.strides[axis] = stride;
    stride = saturating_mul(stride, std::max<std::int64_t>(shape[axis], 1));
  }
  return view;
}

TensorView TensorView::strided(const void* data, Dtype dtype, std::span<const std::int64_t> shape,
                               std::span<const std::int64_t> strides, Device device) {
  if (shape.size() != strides.size()) {
    fail(ErrorKind::kValue, kView, "as many strides as extents (" + std::to_string(shape.size()) + ")",
         std::to_string(strides.size()));
  }
  TensorView view = make_view(data, dtype, shape, device);
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

}  // namespace kda
