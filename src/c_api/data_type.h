#pragma once

// aclDataType in terms of this library, as an int: callers may pass numbers that are no enumerator.

#include <optional>
#include <string>

#include "kda/tensor.h"

namespace kda::c_api {

// Nothing for a type that no tensor of this library has.
[[nodiscard]] std::optional<Dtype> dtype_of(int data_type) noexcept;

// "float32", "int8", ..., or the number.
[[nodiscard]] std::string data_type_name(int data_type);

}  // namespace kda::c_api
