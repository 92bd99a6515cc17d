#include "support/op_cases.h"

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>

namespace kda::testing {
namespace {

using nlohmann::json;

template <typename T>
T pick(const json& value, const std::map<std::string_view, T>& names) {
  const auto found = names.find(value.get_ref<const std::string&>());
  if (found == names.end()) throw std::runtime_error("unknown value " + value.dump());
  return found->second;
}

Dtype parse_dtype(const json& value, bool wide) {
  return pick<Dtype>(value, {{"bfloat16", Dtype::kBFloat16},
                             wide ? std::pair<const std::string_view, Dtype>{"float32", Dtype::kFloat32}
                                  : std::pair<const std::string_view, Dtype>{"float16", Dtype::kFloat16}});
}

void parse_gate(const json& value, OpCase& c) {
  if (value == "random") return;
  if (value == "linear") {
    c.linear_gate = true;
    return;
  }
  if (value.size() != 2) throw std::runtime_error("gate wants value and where, not " + value.dump());
  FixedGate gate;
  const json& number = value.at("value");
  gate.value = number == "-inf" ? -std::numeric_limits<double>::infinity() : number.get<double>();
  gate.where =
      pick<Where>(value.at("where"), {{"all", Where::kAll}, {"half", Where::kHalf}, {"single", Where::kSingle}});
  c.fixed_gate = gate;
}

void parse_field(std::string_view key, const json& value, OpCase& c) {
  const std::map<std::string_view, bool*> flags = {
      {"chunk_indices", &c.chunk_indices},
      {"use_gate_in_kernel", &c.use_gate_in_kernel},
      {"safe_gate", &c.safe_gate},
      {"dt_bias", &c.dt_bias},
      {"initial_state", &c.initial_state},
      {"state_v_first", &c.state_v_first},
      {"output_final_state", &c.output_final_state},
      {"disable_recompute", &c.disable_recompute},
      {"return_intermediate_states", &c.return_intermediate_states},
  };
  const std::map<std::string_view, std::int64_t*> sizes = {
      {"B", &c.B}, {"T", &c.T}, {"H", &c.H}, {"HV", &c.HV}, {"K", &c.K}, {"V", &c.V}, {"chunk_size", &c.chunk_size}};
  const std::map<std::string_view, std::function<void()>> others = {
      {"name", [&] { c.name = value.get<std::string>(); }},
      {"seed", [&] { c.seed = value.get<std::uint64_t>(); }},
      {"dtype", [&] { c.dtype = parse_dtype(value, false); }},
      {"g_dtype", [&] { c.g_dtype = parse_dtype(value, true); }},
      {"beta_dtype", [&] { c.beta_dtype = parse_dtype(value, true); }},
      {"layout", [&] { c.layout = parse_layout(value.get_ref<const std::string&>()); }},
      {"scale",
       [&] {
         if (!value.is_null()) c.scale = value.get<double>();
       }},
      {"cu_seqlens",
       [&] {
         if (!value.is_null()) c.cu_seqlens = value.get<std::vector<std::int64_t>>();
       }},
      {"lower_bound", [&] { c.lower_bound = value.get<double>(); }},
      {"keys",
       [&] {
         c.keys = pick<Keys>(
             value, {{"random", Keys::kRandom}, {"repeated", Keys::kRepeated}, {"correlated", Keys::kCorrelated}});
       }},
      {"gate", [&] { parse_gate(value, c); }},
      {"gate_scale", [&] { c.gate_scale = value.get<double>(); }},
      {"beta",
       [&] {
         if (value != "random") c.fixed_beta = value.get<double>();
       }},
      {"strides",
       [&] {
         c.strides = pick<Strides>(value, {{"contiguous", Strides::kContiguous},
                                           {"padded", Strides::kPadded},
                                           {"fused", Strides::kFused},
                                           {"reversed", Strides::kReversed},
                                           {"inner", Strides::kInner}});
       }},
  };
  if (const auto flag = flags.find(key); flag != flags.end()) {
    *flag->second = value.get<bool>();
  } else if (const auto size = sizes.find(key); size != sizes.end()) {
    *size->second = value.get<std::int64_t>();
  } else if (const auto other = others.find(key); other != others.end()) {
    other->second();
  } else {
    throw std::runtime_error("unknown field " + std::string(key));
  }
}

OpCase parse_case(const json& object) {
  OpCase c;
  for (const auto& [key, value] : object.items()) parse_field(key, value, c);
  if (!object.contains("name") || !object.contains("T")) throw std::runtime_error("name and T are required");
  if (!object.contains("HV")) c.HV = c.H;
  return c;
}

}  // namespace

std::vector<OpCase> load_op_cases(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) throw std::runtime_error("cannot read " + file.string());
  std::vector<OpCase> cases;
  std::set<std::string> names;
  for (const json& object : json::parse(stream)) {
    try {
      cases.push_back(parse_case(object));
    } catch (const std::exception& error) {
      throw std::runtime_error(file.string() + ": " + object.dump() + ": " + error.what());
    }
    if (!names.insert(cases.back().name).second) {
      throw std::runtime_error(file.string() + ": the name " + cases.back().name + " is not unique");
    }
  }
  return cases;
}

}  // namespace kda::testing
