#include "support/safetensors.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace kda::testing {
namespace {

using nlohmann::json;

Dtype parse_dtype(const std::string& name) {
  if (name == "F32") return Dtype::kFloat32;
  if (name == "F16") return Dtype::kFloat16;
  if (name == "BF16") return Dtype::kBFloat16;
  throw std::runtime_error("dtype " + name);
}

// The JSON library itself would convert negative numbers and fractions.
std::vector<std::int64_t> parse_naturals(const json& values) {
  std::vector<std::int64_t> numbers;
  for (const json& value : values) {
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMost) {
      throw std::runtime_error("expected natural numbers");
    }
    numbers.push_back(value.get<std::int64_t>());
  }
  return numbers;
}

TensorView parse_tensor(const json& entry, std::vector<std::byte>& memory) {
  const std::vector<std::int64_t> offsets = parse_naturals(entry.at("data_offsets"));
  if (offsets.size() != 2) throw std::runtime_error("expected 2 data_offsets");
  const std::int64_t begin = offsets[0];
  const std::int64_t end = offsets[1];
  TensorView view = TensorView::contiguous(nullptr, parse_dtype(entry.at("dtype").get<std::string>()),
                                           parse_naturals(entry.at("shape")));
  const auto element = static_cast<std::int64_t>(size_of(view.dtype));
  const bool is_inside = begin <= end && end <= static_cast<std::int64_t>(memory.size());
  if (!is_inside || (end - begin) % element != 0 || (end - begin) / element != view.numel()) {
    throw std::runtime_error("data_offsets do not fit the shape or the file");
  }
  if (begin % element != 0) throw std::runtime_error("expected aligned elements");
  view.data = memory.data() + begin;
  return view;
}

void parse_entry(const std::string& name, const json& entry, SafeTensors& result) {
  if (name == "__metadata__") {
    result.metadata = entry.get<std::map<std::string, std::string>>();
  } else {
    result.tensors.emplace(name, parse_tensor(entry, result.memory));
  }
}

}  // namespace

SafeTensors parse_safetensors(std::span<const std::byte> file, const std::string& name) {
  std::uint64_t header_bytes = 0;
  if (file.size() < sizeof header_bytes) throw std::runtime_error(name + " is truncated");
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  const std::span<const std::byte> rest = file.subspan(sizeof header_bytes);
  if (header_bytes > rest.size()) throw std::runtime_error(name + " is truncated");
  const std::span<const std::byte> header = rest.first(header_bytes);
  const std::span<const std::byte> data = rest.subspan(header_bytes);
  SafeTensors result;
  result.memory.assign(data.begin(), data.end());
  try {
    const auto* text = reinterpret_cast<const char*>(header.data());
    const json entries = json::parse(text, text + header.size());
    if (!entries.is_object()) throw std::runtime_error("expected an object of tensors");
    for (const auto& [key, entry] : entries.items()) parse_entry(key, entry, result);
  } catch (const std::exception& error) {
    throw std::runtime_error(name + ": " + error.what());
  }
  return result;
}

SafeTensors load_safetensors(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot read " + file.string());
  std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  return parse_safetensors(std::as_bytes(std::span(bytes)), file.string());
}

}  // namespace kda::testing
