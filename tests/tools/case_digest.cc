// Prints, for every case of a file, hashes of its inputs and of the outputs that the C++ door makes of them: how doors
// are compared bit for bit. The file's name tells the operator: kda_gate.json, kda_gate_cumsum.json, or
// chunk_kda_fwd.json and any other.
//
//     case_digest FILE.json [--filter SUBSTRING] [--bfloat16_products]
//
// One JSON object per line: {"name": ..., "inputs": {"q": "8 hex digits", ...}, "outputs": {"attn_out": ..., ...}}. A
// hash is zlib's CRC-32 over the bytes of the elements in row-major order of the tensor's shape, whatever its strides.
// Tensors that the case does not have, and outputs that its flags do not keep, are left out.

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "support/case_inputs.h"
#include "support/gate_cases.h"
#include "support/op_cases.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

using Json = nlohmann::ordered_json;
using NamedViews = std::vector<std::pair<const char*, const TensorView*>>;

// Of every byte, with the polynomial 0x04c11db7, bits reversed.
constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value & 1u) != 0 ? 0xedb88320u ^ (value >> 1) : value >> 1;
    table[byte] = value;
  }
  return table;
}

std::string digest(const std::vector<std::byte>& bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = crc_table();
  std::uint32_t hash = 0xffffffffu;
  for (const std::byte b : bytes) hash = kTable[(hash ^ std::to_integer<std::uint32_t>(b)) & 0xffu] ^ (hash >> 8);
  std::string text(9, '\0');
  std::snprintf(text.data(), text.size(), "%08x", static_cast<unsigned>(hash ^ 0xffffffffu));
  text.pop_back();
  return text;
}

Json digests(const NamedViews& views) {
  Json result = Json::object();
  for (const auto& [name, view] : views) {
    if (view->present()) result[name] = digest(packed_bytes(*view));
  }
  return result;
}

Json line_of(const std::string& name, const NamedViews& inputs, Json outputs) {
  return {{"name", name}, {"inputs", digests(inputs)}, {"outputs", std::move(outputs)}};
}

Json line(const OpCase& c, const PlanOptions& options) {
  const CaseInputs inputs = make_inputs(c);
  const ChunkKdaFwdInputs& t = inputs.tensors;
  const RunResult result = run(inputs, kept_outputs(c), {.plan = options});
  Json outputs = Json::object();
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    if (result.has(output)) outputs[std::string(kChunkKdaFwdOutputNames[output])] = digest(result.bytes(output));
  }
  return line_of(c.name,
                 {{"q", &t.q},
                  {"k", &t.k},
                  {"v", &t.v},
                  {"g", &t.g},
                  {"beta", &t.beta},
                  {"A_log", &t.A_log},
                  {"dt_bias", &t.dt_bias},
                  {"initial_state", &t.initial_state}},
                 std::move(outputs));
}

Json line(const GateCase& c, const PlanOptions& options) {
  const GateCall call(c);
  kda_gate(call.inputs, call.out, call.attributes, options);
  return line_of(c.name, {{"g", &call.inputs.g}, {"A_log", &call.inputs.A_log}, {"dt_bias", &call.inputs.dt_bias}},
                 digests({{"out", &call.out}}));
}

Json line(const GateCumsumCase& c, const PlanOptions& options) {
  const GateCumsumCall call(c);
  kda_gate_cumsum(call.inputs, call.gk, call.attributes, options);
  return line_of(c.name, {{"g", &call.inputs.g}, {"A_log", &call.inputs.A_log}, {"dt_bias", &call.inputs.dt_bias}},
                 digests({{"gk", &call.gk}}));
}

template <typename Case>
void print(const std::vector<Case>& cases, const std::string& filter, const PlanOptions& options) {
  for (const Case& c : cases) {
    if (c.name.find(filter) != std::string::npos) std::cout << line(c, options).dump() << '\n';
  }
}

int main_with(std::vector<std::string> arguments) {
  PlanOptions options;
  if (std::erase(arguments, "--bfloat16_products") > 0) options.state_products = StateProducts::kBFloat16;
  if (arguments.size() != 1 && !(arguments.size() == 3 && arguments[1] == "--filter")) {
    std::cerr << "usage: case_digest FILE.json [--filter SUBSTRING] [--bfloat16_products]\n";
    return 2;
  }
  const std::string filter = arguments.size() == 3 ? arguments[2] : "";
  const std::filesystem::path file = arguments[0];
  if (file.stem() == "kda_gate") {
    print(load_gate_cases(file), filter, options);
  } else if (file.stem() == "kda_gate_cumsum") {
    print(load_gate_cumsum_cases(file), filter, options);
  } else {
    print(load_op_cases(file), filter, options);
  }
  return 0;
}

}  // namespace
}  // namespace kda::testing

int main(int argc, char** argv) {
  try {
    return kda::testing::main_with({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "case_digest: " << error.what() << '\n';
    return 1;
  }
}
