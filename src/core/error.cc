#include "core/error.h"

#include <array>
#include <charconv>

namespace kda {

void fail(ErrorKind kind, Argument argument, std::string_view expected, std::string_view got) {
  std::string message;
  message.append(argument.op).append(": ").append(argument.name);
  message.append(": expected ").append(expected).append(", got ").append(got);
  throw Error(kind, message);
}

std::string format_shape(std::span<const std::int64_t> extents) {
  std::string text = "[";
  for (std::size_t i = 0; i < extents.size(); ++i) {
    if (i != 0) text += ',';
    text += std::to_string(extents[i]);
  }
  return text + ']';
}

std::string format_number(double value) {
  std::array<char, 32> buffer{};
  char* const end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

}  // namespace kda
