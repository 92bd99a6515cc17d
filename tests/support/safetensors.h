#pragma once

// Reads safetensors files: an 8-byte length, a JSON header, then the tensors' bytes.

#include <cstddef>
#include <filesystem>
#include <map>
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

[[nodiscard]] SafeTensors load_safetensors(const std::filesystem::path& file);

}  // namespace kda::testing
