#include "core/checks.h"

#include <algorithm>

#include "core/checked.h"
#include "core/overlap.h"

namespace kda {
namespace {

bool same_device(const Device& a, const Device& b) noexcept {
  return a.type == b.type && (a.type == DeviceType::kCpu || a.index == b.index);
}

bool rank_is_legal(const TensorView& view) noexcept { return view.rank >= -1 && view.rank <= kMaxRank; }

std::span<const std::int64_t> strides_of(const TensorView& view) noexcept {
  return {view.strides.data(), view.sizes().size()};
}

std::string names_of(std::initializer_list<Dtype> dtypes) {
  std::string text;
  for (const Dtype dtype : dtypes) {
    if (!text.empty()) text += " or ";
    text += name_of(dtype);
  }
  return text;
}

}  // namespace

Shape::Shape(std::initializer_list<Extent> extents) : rank_(static_cast<int>(extents.size())) {
  std::copy(extents.begin(), extents.end(), extents_.begin());
}

Shape Shape::without_last() const noexcept {
  Shape shorter = *this;
  --shorter.rank_;
  return shorter;
}

bool Shape::matches(const TensorView& view) const noexcept {
  return view.rank == rank_ && std::equal(view.sizes().begin(), view.sizes().end(), extents().begin(),
                                          [](std::int64_t got, const Extent& extent) { return got == extent.value; });
}

TensorView Shape::contiguous_view(Dtype dtype, Device device) const {
  std::array<std::int64_t, 5> values{};
  std::transform(extents_.begin(), extents_.end(), values.begin(), [](const Extent& extent) { return extent.value; });
  return TensorView::contiguous(nullptr, dtype, std::span(values).first(extents().size()), device);
}

std::string Shape::symbols() const {
  std::string text = "[";
  for (const Extent& extent : extents()) {
    if (text.size() > 1) text += ',';
    text += extent.symbol;
  }
  return text + ']';
}

std::string Shape::values() const {
  std::array<std::int64_t, 5> values{};
  std::transform(extents_.begin(), extents_.end(), values.begin(), [](const Extent& extent) { return extent.value; });
  return format_shape(std::span(values).first(extents().size()));
}

std::string describe(const TensorView& view) {
  if (!is_given(view)) return "no tensor";
  if (!rank_is_legal(view)) return "rank " + std::to_string(view.rank);
  return std::string(name_of(view.dtype)) + ' ' + format_shape(view.sizes()) + " strides " +
         format_shape(strides_of(view)) + " on " + name_of(view.device);
}

void require_given(Argument argument, const TensorView& view) {
  if (!is_given(view)) fail(ErrorKind::kMissing, argument, "a tensor", "none");
}

void require_view(Argument argument, const TensorView& view) {
  if (!rank_is_legal(view)) {
    fail(ErrorKind::kValue, argument, "rank 0.." + std::to_string(kMaxRank), "rank " + std::to_string(view.rank));
  }
  const auto sizes = view.sizes();
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t extent) { return extent < 0; })) {
    fail(ErrorKind::kValue, argument, "extents >= 0", format_shape(sizes));
  }
  if (!byte_range(view)) fail(ErrorKind::kValue, argument, "addresses within 64 bits", describe(view));
}

void require_dtype(Argument argument, const TensorView& view, std::initializer_list<Dtype> allowed) {
  if (std::find(allowed.begin(), allowed.end(), view.dtype) == allowed.end()) {
    fail(ErrorKind::kDtype, argument, "dtype " + names_of(allowed), name_of(view.dtype));
  }
}

void require_device(Argument argument, const TensorView& view, const Device& expected) {
  if (!same_device(view.device, expected)) {
    fail(ErrorKind::kValue, argument, "device " + name_of(expected), name_of(view.device));
  }
}

void require_rank(Argument argument, const TensorView& view, const Shape& expected) {
  if (view.rank != expected.rank()) {
    fail(ErrorKind::kValue, argument, "rank " + std::to_string(expected.rank()) + ", " + expected.symbols(),
         "rank " + std::to_string(view.rank) + ", " + format_shape(view.sizes()));
  }
}

void require_shape(Argument argument, const TensorView& view, const Shape& expected) {
  require_rank(argument, view, expected);
  if (!expected.matches(view)) {
    fail(ErrorKind::kValue, argument, "shape " + expected.symbols() + " = " + expected.values(),
         format_shape(view.sizes()));
  }
}

void require_own_elements(Argument argument, const TensorView& view) {
  if (overlaps_itself(view)) {
    fail(ErrorKind::kValue, argument, "strides that give every element memory of its own", describe(view));
  }
}

void require_data(Argument argument, const TensorView& view) {
  if (view.numel() == 0) return;
  if (view.data == nullptr) fail(ErrorKind::kMissing, argument, "data", "a null pointer");
  const auto range = byte_range(view).value_or(ByteRange{});
  const auto address = static_cast<Int128>(reinterpret_cast<std::uintptr_t>(view.data));
  if (address + range.low < 0 || address + range.high > Int128{1} << 64) {
    fail(ErrorKind::kValue, argument, "addresses within 64 bits", describe(view));
  }
}

void require_no_overlap(Argument output, const TensorView& view, std::string_view other_name, const TensorView& other) {
  if (!overlap(view, other)) return;
  fail(ErrorKind::kValue, output, "memory of its own", "memory shared with " + std::string(other_name));
}

bool same_metadata(const TensorView& a, const TensorView& b) noexcept {
  if (!is_given(a) && !is_given(b)) return true;
  if (a.rank != b.rank || a.dtype != b.dtype || !same_device(a.device, b.device)) return false;
  for (int axis = 0; axis < a.rank; ++axis) {
    const auto i = static_cast<std::size_t>(axis);
    if (a.shape[i] != b.shape[i] || used_stride(a, axis) != used_stride(b, axis)) return false;
  }
  return true;
}

std::int64_t used_stride(const TensorView& view, int axis) noexcept {
  const auto i = static_cast<std::size_t>(axis);
  return view.shape[i] > 1 && view.numel() > 0 ? view.strides[i] : 0;
}

}  // namespace kda
