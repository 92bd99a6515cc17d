#pragma once

// The one place where error messages get their form: "chunk_kda_fwd: q: expected rank 4, got 3".

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kda/status.h"
#include "kda/tensor.h"

namespace kda {

// An argument as messages name it.
struct Argument {
  std::string_view op;
  std::string_view name;
};

[[noreturn]] void fail(ErrorKind kind, Argument argument, std::string_view expected, std::string_view got);

// "[1,128,4,64]"
[[nodiscard]] std::string format_shape(std::span<const std::int64_t> extents);

// The shortest text that reads back as the same number.
[[nodiscard]] std::string format_number(double value);

}  // namespace kda
