#pragma once

// The cases of tests/op_cases/kda_gate.json and kda_gate_cumsum.json, and calls made from them.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "kda/kda_gate.h"
#include "kda/kda_gate_cumsum.h"

namespace kda::testing {

enum class Bias : std::uint8_t { kNone, kFlat, kMatrix };

struct GateCase {
  std::string name;
  std::uint64_t seed = 1;
  std::vector<std::int64_t> shape;
  Dtype dtype = Dtype::kBFloat16;
  Dtype output_dtype = Dtype::kFloat32;
  bool A_log = true;
  Bias dt_bias = Bias::kNone;
  std::optional<double> lower_bound;
  bool wide = false;
  double gate_scale = 1;
};

struct GateCumsumCase {
  std::string name;
  std::uint64_t seed = 1;
  std::vector<std::int64_t> shape;
  Dtype dtype = Dtype::kFloat32;
  std::int64_t chunk_size = 64;
  std::optional<std::vector<std::int64_t>> cu_seqlens;
  bool use_gate_in_kernel = false;
  bool safe_gate = false;
  double lower_bound = -5;
  bool dt_bias = false;
  double gate_scale = 1;
};

// Let gtest show a case by its name.
inline void PrintTo(const GateCase& c, std::ostream* stream) { *stream << c.name; }
inline void PrintTo(const GateCumsumCase& c, std::ostream* stream) { *stream << c.name; }

// Throw std::runtime_error, naming file and case, for anything that the format does not know.
[[nodiscard]] std::vector<GateCase> load_gate_cases(const std::filesystem::path& file);
[[nodiscard]] std::vector<GateCumsumCase> load_gate_cumsum_cases(const std::filesystem::path& file);

// A call with the memory that its tensors point to; the output is full of NaN.
struct GateCall {
  KdaGateInputs inputs;
  KdaGateAttributes attributes;
  TensorView out;
  std::vector<std::byte> g, output;
  std::vector<float> A_log, dt_bias;

  explicit GateCall(const GateCase& c);
  GateCall(const GateCall&) = delete;
  GateCall& operator=(const GateCall&) = delete;
};

struct GateCumsumCall {
  KdaGateCumsumInputs inputs;
  KdaGateCumsumAttributes attributes;
  TensorView gk;
  std::vector<std::byte> g;
  std::vector<float> A_log, dt_bias, output;

  explicit GateCumsumCall(const GateCumsumCase& c);
  GateCumsumCall(const GateCumsumCall&) = delete;
  GateCumsumCall& operator=(const GateCumsumCall&) = delete;
};

// What tests of results call. On the CPU the operators themselves; the tests of another device put their own here.
using ExecuteGate = void(const KdaGateInputs& inputs, const TensorView& out, const KdaGateAttributes& attributes,
                         const PlanOptions& options);
using ExecuteGateCumsum = void(const KdaGateCumsumInputs& inputs, const TensorView& gk,
                               const KdaGateCumsumAttributes& attributes, const PlanOptions& options);
extern ExecuteGate* execute_gate;
extern ExecuteGateCumsum* execute_gate_cumsum;

// How many ulp a gate may be off on that device.
extern double gate_ulps;

// A score of kda_gate and its bound.
struct GateScore {
  const char* name;
  double error;
  double bound;

  [[nodiscard]] bool ok() const { return error <= bound; }
};

// Largest absolute, mean absolute and largest relative error of the contiguous output, and what they may be. All are
// infinite if a number is NaN, or infinite where the other one is not.
[[nodiscard]] std::vector<GateScore> score(const TensorView& out, const std::vector<double>& expected);

}  // namespace kda::testing
