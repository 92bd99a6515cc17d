// The safetensors reader of the tests: any bytes are a file, or refused.

#include "support/safetensors.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>

namespace {

// Reads every element, so that the address sanitizer sees where it lies.
std::uint32_t sum(const kda::TensorView& view) {
  std::uint32_t total = 0;
  const std::size_t bytes = kda::size_of(view.dtype);
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    std::uint32_t element = 0;
    std::memcpy(&element, static_cast<const std::byte*>(view.data) + static_cast<std::size_t>(i) * bytes, bytes);
    total += element;
  }
  return total;
}

volatile std::uint32_t sink;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto file = kda::testing::parse_safetensors(std::as_bytes(std::span(data, size)), "input");
    for (const auto& [name, view] : file.tensors) sink = sum(view);
  } catch (const std::runtime_error&) {
  }
  return 0;
}
