#pragma once

// Python arrays as tensor views, without copies.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kda/tensor.h"

namespace kda::python {

namespace nb = nanobind;

// Where an array comes from and what it may be, for messages.
struct Argument {
  std::string_view op;
  std::string_view name;
  std::string_view dtypes;  // "float16 or bfloat16"
};

// A view of an array and a reference that keeps its memory alive. Made from, and absent for None:
//   - (object with the buffer protocol, None): NumPy,
//   - (object with the buffer protocol, dtype name): its memory as that dtype (bfloat16, which buffers cannot name),
//   - (owner, address, dtype name, shape, strides in elements, device type, device index),
//   - any other object: through __dlpack__.
// Throws Error, naming the argument. Needs the GIL, to be destroyed too.
class ArrayView {
 public:
  ArrayView() = default;
  ArrayView(nb::handle array, const Argument& argument);

  [[nodiscard]] const TensorView& view() const noexcept { return view_; }

 private:
  TensorView view_;
  nb::object owner_;
  nb::ndarray<nb::ro> dlpack_;
};

[[noreturn]] void refuse_dtype(const Argument& argument, std::string_view given);

// Integers from None (no value), a list of ints (or pairs of ints, when pairs is true), or an int32 or int64 array of
// rank 1 ([n, 2] too, when pairs is true). Throws Error.
[[nodiscard]] std::optional<std::vector<std::int64_t>> integers(nb::handle values, const Argument& argument,
                                                                bool pairs);

// The same, but an array on a GPU stays there: it is moved to `on_gpu`, and there is no value.
[[nodiscard]] std::optional<std::vector<std::int64_t>> integers(nb::handle values, const Argument& argument, bool pairs,
                                                                ArrayView& on_gpu);

// A new NumPy array, float64, that owns the numbers.
[[nodiscard]] nb::object to_numpy(std::vector<double> numbers, std::span<const std::int64_t> shape);

// Bytes that are no UTF-8, from the environment or a path, are spelled out.
[[nodiscard]] nb::str to_str(std::string_view text);
[[nodiscard]] nb::tuple to_tuple(std::span<const std::int64_t> sizes);

// (shape, dtype name)
[[nodiscard]] nb::tuple to_spec(const TensorView& view);

// The name of a dtype, for results. Throws Error, naming the argument, when it is none of this library.
[[nodiscard]] Dtype dtype_named(std::string_view name, const Argument& argument);

void bind_array(nb::module_& module);

}  // namespace kda::python
