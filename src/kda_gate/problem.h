#pragma once

// A checked call of kda_gate in the form that backends and the reference read.

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kda/kda_gate.h"

namespace kda {

inline constexpr std::string_view kKdaGateName = "kda_gate";

// An axis of g and out; strides in elements.
struct GateAxis {
  std::int64_t extent = 1;
  std::int64_t g = 0;
  std::int64_t out = 0;
};

struct KdaGateProblem {
  Dtype g_dtype = Dtype::kFloat32;
  Dtype out_dtype = Dtype::kFloat32;
  Device device{};
  std::optional<double> lower_bound;

  // The axes before H and D, outermost first: `lead_axes` of them, at least 1. Axes that are one in memory, in both
  // tensors, are one here, and there are none of extent 1 beside others.
  std::array<GateAxis, kMaxRank> lead{};
  int lead_axes = 1;
  std::int64_t rows = 0;  // product of their extents
  GateAxis head;
  GateAxis channel;

  bool has_A_log = false;
  bool has_dt_bias = false;
  std::int64_t A_log_stride = 0;
  std::int64_t dt_bias_head = 0;  // strides
  std::int64_t dt_bias_channel = 0;
};

// The data pointers of one execution; null where a tensor is absent or has no elements.
struct KdaGatePointers {
  const void* g;
  const float* A_log;
  const float* dt_bias;
  void* out;
};

// exp(A_log) in double, at most FLT_MAX, and above 0 unless A_log is -inf; 1 when there is no A_log.
[[nodiscard]] double gate_rate(const KdaGateProblem& problem, const float* A_log, std::int64_t head) noexcept;

// Checks everything that can be checked without data and throws Error. out may be null: then it is not checked.
[[nodiscard]] KdaGateProblem make_problem(const KdaGateInputs& inputs, const TensorView* out,
                                          const KdaGateAttributes& attributes);

// Checks the data pointers and throws Error: only a tensor without elements may have null data, and out overlaps no
// input.
void check_pointers(const KdaGateInputs& inputs, const TensorView& out);

[[nodiscard]] KdaGatePointers pointers_of(const KdaGateInputs& inputs, const TensorView& out);

}  // namespace kda
