#pragma once

// A checked call of kda_gate_cumsum in the form that backends and the reference read.

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/checked.h"
#include "core/gate_mode.h"
#include "core/sequences.h"
#include "kda/kda_gate_cumsum.h"

namespace kda {

inline constexpr std::string_view kKdaGateCumsumName = "kda_gate_cumsum";

struct KdaGateCumsumProblem {
  std::int64_t B = 1;
  std::int64_t T = 0;
  std::int64_t HV = 0;
  std::int64_t K = 0;
  std::int64_t C = 64;
  Dtype g_dtype = Dtype::kFloat32;
  Device device{};
  GateMode gate_mode = GateMode::kActivated;
  float lower_bound = -5;
  std::vector<std::int64_t> cu_seqlens;   // empty when dense
  std::vector<std::int64_t> first_chunk;  // per packed sequence, and the number of all chunks

  RowStrides g, gk;
  std::int64_t A_log_stride = 0;
  std::int64_t dt_bias_stride = 0;
  // Only where the gate mode reads it.
  bool has_dt_bias = false;

  [[nodiscard]] bool is_packed() const noexcept { return !cu_seqlens.empty(); }
  [[nodiscard]] std::int64_t sequences() const noexcept {
    return is_packed() ? static_cast<std::int64_t>(cu_seqlens.size()) - 1 : B;
  }
  // Chunks of one head, of all sequences together.
  [[nodiscard]] std::int64_t chunks() const noexcept { return is_packed() ? first_chunk.back() : B * ceil_div(T, C); }
};

// One chunk of one head: tokens [token, token + rows) of a sequence.
struct GateChunk {
  Sequence sequence;
  std::int64_t token = 0;
  int rows = 0;
};

// 0 <= index < problem.chunks().
[[nodiscard]] GateChunk chunk_of(const KdaGateCumsumProblem& problem, std::int64_t index) noexcept;

// The data pointers of one execution; null where a tensor is absent or has no elements.
struct KdaGateCumsumPointers {
  const void* g;
  const float* A_log;
  const float* dt_bias;
  float* gk;
};

// Checks everything that can be checked without data and throws Error. gk may be null: then it is not checked.
[[nodiscard]] KdaGateCumsumProblem make_problem(const KdaGateCumsumInputs& inputs, const TensorView* gk,
                                                const KdaGateCumsumAttributes& attributes);

// The inputs that a call with this gate mode reads: without A_log and dt_bias when the gate is already activated.
[[nodiscard]] KdaGateCumsumInputs inputs_read(const KdaGateCumsumInputs& inputs, GateMode gate_mode) noexcept;

// Checks the data pointers and throws Error: only a tensor without elements may have null data, and gk overlaps no
// input.
void check_pointers(const KdaGateCumsumInputs& inputs, const TensorView& gk);

[[nodiscard]] KdaGateCumsumPointers pointers_of(const KdaGateCumsumInputs& inputs, const TensorView& gk);

}  // namespace kda
