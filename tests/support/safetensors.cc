#include "support/safetensors.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace kda::testing {
namespace {

Dtype parse_dtype(const std::string& name) {
  if (name == "F32") return Dtype::kFloat32;
  if (name == "F16") return Dtype::kFloat16;
  if (name == "BF16") return Dtype::kBFloat16;
  throw std::runtime_error("safetensors: dtype " + name);
}

}  // namespace

SafeTensors load_safetensors(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  std::uint64_t header_bytes = 0;
  stream.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  if (!stream) throw std::runtime_error("cannot read " + file.string());
  std::string header(header_bytes, '\0');
  stream.read(header.data(), static_cast<std::streamsize>(header.size()));
  SafeTensors result;
  result.memory.resize(std::filesystem::file_size(file) - sizeof header_bytes - header_bytes);
  stream.read(reinterpret_cast<char*>(result.memory.data()), static_cast<std::streamsize>(result.memory.size()));
  if (!stream) throw std::runtime_error(file.string() + " is truncated");
  const nlohmann::json entries = nlohmann::json::parse(header);
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") {
      result.metadata = entry.get<std::map<std::string, std::string>>();
      continue;
    }
    const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto offsets = entry.at("data_offsets").get<std::vector<std::size_t>>();
    const TensorView view =
        TensorView::contiguous(result.memory.data() + offsets.at(0), parse_dtype(entry.at("dtype")), shape);
    if (offsets.at(1) > result.memory.size() ||
        offsets.at(0) + static_cast<std::size_t>(view.numel()) * size_of(view.dtype) != offsets.at(1)) {
      throw std::runtime_error(file.string() + ": the extent of " + name);
    }
    result.tensors.emplace(name, view);
  }
  return result;
}

}  // namespace kda::testing
