#pragma once

// Reads safetensors files: an 8-byte length, a JSON header, then the tensors' bytes.

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kda/tensor.h"

namespace kda::testing {

struct SafeTensors {
  std::vector<std::byte> memory;
  std::map<std::string, TensorView> tensors;  // into memory
  std::map<std::string, std::string> metadata;

  SafeTensors() = default;
  SafeTensors(SafeTensors&&) = default;
  SafeTensors& operator=(SafeTensors&&) = default;
  SafeTensors(const SafeTensors&) = delete;
  SafeTensors& operator=(const SafeTensors&) = delete;
};

// Throws std::runtime_error for what is no such file, or has tensors that are not aligned or of other dtypes than F32,
// F16 and BF16. `name` is how messages call it.
[[nodiscard]] SafeTensors parse_safetensors(std::span<const std::byte> file, const std::string& name);
[[nodiscard]] SafeTensors load_safetensors(const std::filesystem::path& file);

}  // namespace kda::testing
