#include "support/gate_cases.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <string_view>

#include "support/dtypes.h"
#include "support/generator.h"

namespace kda::testing {
namespace {

using nlohmann::json;
using Parsers = std::map<std::string_view, std::function<void(const json&)>>;

template <typename T>
T pick(const json& value, const std::map<std::string_view, T>& names) {
  const auto found = names.find(value.get_ref<const std::string&>());
  if (found == names.end()) throw std::runtime_error("unknown value " + value.dump());
  return found->second;
}

Dtype parse_dtype(const json& value) {
  return pick<Dtype>(value,
                     {{"bfloat16", Dtype::kBFloat16}, {"float16", Dtype::kFloat16}, {"float32", Dtype::kFloat32}});
}

template <typename T>
std::function<void(const json&)> set(T& field) {
  return [&field](const json& value) { field = value.get<T>(); };
}

template <typename T>
std::function<void(const json&)> set(std::optional<T>& field) {
  return [&field](const json& value) {
    if (!value.is_null()) field = value.get<T>();
  };
}

std::function<void(const json&)> set(Dtype& field) {
  return [&field](const json& value) { field = parse_dtype(value); };
}

Parsers parsers(GateCase& c) {
  return {{"name", set(c.name)},
          {"seed", set(c.seed)},
          {"shape", set(c.shape)},
          {"dtype", set(c.dtype)},
          {"output_dtype", set(c.output_dtype)},
          {"A_log", set(c.A_log)},
          {"dt_bias",
           [&c](const json& value) {
             c.dt_bias = pick<Bias>(value, {{"none", Bias::kNone}, {"flat", Bias::kFlat}, {"matrix", Bias::kMatrix}});
           }},
          {"lower_bound", set(c.lower_bound)},
          {"gate",
           [&c](const json& value) {
             c.wide = pick<bool>(value, {{"random", false}, {"wide", true}});
           }},
          {"gate_scale", set(c.gate_scale)}};
}

Parsers parsers(GateCumsumCase& c) {
  return {{"name", set(c.name)},
          {"seed", set(c.seed)},
          {"shape", set(c.shape)},
          {"dtype", set(c.dtype)},
          {"chunk_size", set(c.chunk_size)},
          {"cu_seqlens", set(c.cu_seqlens)},
          {"use_gate_in_kernel", set(c.use_gate_in_kernel)},
          {"safe_gate", set(c.safe_gate)},
          {"lower_bound", set(c.lower_bound)},
          {"dt_bias", set(c.dt_bias)},
          {"gate_scale", set(c.gate_scale)}};
}

template <typename Case>
Case parse_case(const json& object) {
  Case c;
  const Parsers fields = parsers(c);
  for (const auto& [key, value] : object.items()) {
    const auto field = fields.find(key);
    if (field == fields.end()) throw std::runtime_error("unknown field " + key);
    field->second(value);
  }
  if (c.name.empty() || c.shape.size() < 2) throw std::runtime_error("name and shape are required");
  return c;
}

template <typename Case>
std::vector<Case> load_cases(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::vector<Case> cases;
  for (const json& object : json::parse(stream)) {
    try {
      cases.push_back(parse_case<Case>(object));
    } catch (const std::exception& error) {
      throw std::runtime_error(file.string() + ": " + object.dump() + ": " + error.what());
    }
  }
  return cases;
}

std::int64_t product(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// -1 or 1 times 1..2 times 2^-24 to 2^7.
double wide(std::uint64_t bits) {
  const double magnitude = 1 + static_cast<double>(bits >> 40) * 0x1p-24;
  return ((bits & 1) != 0 ? -1 : 1) * std::ldexp(magnitude, static_cast<int>((bits >> 8) & 31) - 24);
}

template <typename ValueAt>
std::vector<std::byte> make_tensor(Dtype dtype, std::int64_t count, ValueAt value_at) {
  std::vector<std::byte> memory(static_cast<std::size_t>(count) * size_of(dtype));
  for (std::int64_t e = 0; e < count; ++e) store(memory.data(), dtype, e, static_cast<float>(value_at(e)));
  return memory;
}

std::vector<float> make_A_log(std::uint64_t seed, std::int64_t heads) {
  const Generator random(seed, kALog);
  std::vector<float> values(static_cast<std::size_t>(heads));
  for (std::int64_t e = 0; e < heads; ++e)
    values[static_cast<std::size_t>(e)] = static_cast<float>(1.5 * random.uniform(e) - 0.5);
  return values;
}

std::vector<float> make_dt_bias(std::uint64_t seed, std::int64_t count) {
  const Generator random(seed, kDtBias);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::int64_t e = 0; e < count; ++e)
    values[static_cast<std::size_t>(e)] = static_cast<float>(0.5 * random.normal(e));
  return values;
}

}  // namespace

ExecuteGate* execute_gate = kda_gate;
ExecuteGateCumsum* execute_gate_cumsum = kda_gate_cumsum;
double gate_ulps = 0;

std::vector<GateCase> load_gate_cases(const std::filesystem::path& file) { return load_cases<GateCase>(file); }

std::vector<GateCumsumCase> load_gate_cumsum_cases(const std::filesystem::path& file) {
  return load_cases<GateCumsumCase>(file);
}

GateCall::GateCall(const GateCase& c) {
  const Generator random(c.seed, kG);
  const std::int64_t D = c.shape.back();
  const std::int64_t H = c.shape[c.shape.size() - 2];
  g = make_tensor(c.dtype, product(c.shape), [&](std::int64_t e) {
    return c.gate_scale * (c.wide ? wide(random.bits(e)) : 2 * random.normal(e));
  });
  output.assign(static_cast<std::size_t>(product(c.shape)) * size_of(c.output_dtype), std::byte{0xff});
  inputs.g = TensorView::contiguous(g.data(), c.dtype, c.shape);
  out = TensorView::contiguous(output.data(), c.output_dtype, c.shape);
  attributes.lower_bound = c.lower_bound;
  if (c.A_log) {
    A_log = make_A_log(c.seed, H);
    inputs.A_log = TensorView::contiguous(A_log.data(), Dtype::kFloat32, {H});
  }
  if (c.dt_bias == Bias::kNone) return;
  dt_bias = make_dt_bias(c.seed, H * D);
  inputs.dt_bias = c.dt_bias == Bias::kFlat ? TensorView::contiguous(dt_bias.data(), Dtype::kFloat32, {H * D})
                                            : TensorView::contiguous(dt_bias.data(), Dtype::kFloat32, {H, D});
}

GateCumsumCall::GateCumsumCall(const GateCumsumCase& c) {
  const Generator random(c.seed, kG);
  const std::int64_t K = c.shape.back();
  const std::int64_t HV = c.shape[c.shape.size() - 3];
  g = make_tensor(c.dtype, product(c.shape), [&](std::int64_t e) {
    if (c.use_gate_in_kernel) return c.gate_scale * 2 * random.normal(e);
    return c.gate_scale * -(random.uniform(e) * random.uniform(e));
  });
  output.assign(static_cast<std::size_t>(product(c.shape)), std::numeric_limits<float>::quiet_NaN());
  inputs.g = TensorView::contiguous(g.data(), c.dtype, c.shape);
  gk = TensorView::contiguous(output.data(), Dtype::kFloat32, c.shape);
  attributes.chunk_size = c.chunk_size;
  attributes.use_gate_in_kernel = c.use_gate_in_kernel;
  attributes.safe_gate = c.safe_gate;
  attributes.lower_bound = c.lower_bound;
  if (c.cu_seqlens) attributes.cu_seqlens = *c.cu_seqlens;
  if (c.use_gate_in_kernel) {
    A_log = make_A_log(c.seed, HV);
    inputs.A_log = TensorView::contiguous(A_log.data(), Dtype::kFloat32, {HV});
  }
  if (c.dt_bias) {
    dt_bias = make_dt_bias(c.seed, HV * K);
    inputs.dt_bias = TensorView::contiguous(dt_bias.data(), Dtype::kFloat32, {HV * K});
  }
}

namespace {

// One comparison's scores.
struct Errors {
  double largest = 0;
  double sum = 0;
  double relative = 0;

  void add(double actual, double expected) {
    double error = std::abs(actual - expected);
    if (std::isinf(expected) && actual == expected) error = 0;
    if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
    largest = std::max(largest, error);
    sum += error;
    relative = std::max(relative, error / std::max(std::abs(expected), 1e-37));
  }
};

}  // namespace

std::vector<GateScore> score(const TensorView& out, const std::vector<double>& expected) {
  Errors errors, rounding;
  double largest = 0;
  double sum = 0;
  for (std::size_t e = 0; e < expected.size(); ++e) {
    errors.add(load(out.data, out.dtype, static_cast<std::int64_t>(e)), expected[e]);
    rounding.add(round_to(out.dtype, expected[e]), expected[e]);
    if (std::isfinite(expected[e])) {
      largest = std::max(largest, std::abs(expected[e]));
      sum += std::abs(expected[e]);
    }
  }
  const double count = std::max(static_cast<double>(expected.size()), 1.0);
  return {{"max abs", errors.largest, 1.001 * rounding.largest + 0x1p-22 * largest},
          {"mean abs", errors.sum / count, (1.001 * rounding.sum + 0x1p-22 * sum) / count},
          {"max rel", errors.relative, 1.001 * rounding.relative + 0x1p-22}};
}

}  // namespace kda::testing
