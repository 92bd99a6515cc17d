#pragma once

// The cases of tests/op_cases/*.json; README.md there describes the format.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "kda/chunk_kda_fwd.h"

namespace kda::testing {

enum class Keys : std::uint8_t { kRandom, kRepeated, kCorrelated };
enum class Where : std::uint8_t { kAll, kHalf, kSingle };
enum class Strides : std::uint8_t { kContiguous, kPadded, kFused, kReversed, kInner };

struct FixedGate {
  double value = 0;
  Where where = Where::kAll;
};

struct OpCase {
  std::string name;
  std::uint64_t seed = 1;
  Dtype dtype = Dtype::kBFloat16;
  Dtype g_dtype = Dtype::kFloat32;
  Dtype beta_dtype = Dtype::kFloat32;
  Layout layout = Layout::kBSND;
  std::int64_t B = 1;
  std::int64_t T = 0;
  std::int64_t H = 1;
  std::int64_t HV = 1;
  std::int64_t K = 128;
  std::int64_t V = 128;
  std::int64_t chunk_size = 64;
  std::optional<double> scale;  // K ** -0.5 when absent
  std::optional<std::vector<std::int64_t>> cu_seqlens;
  bool chunk_indices = false;
  bool use_gate_in_kernel = false;
  bool safe_gate = false;
  double lower_bound = -5.0;
  bool dt_bias = false;
  bool initial_state = false;
  bool state_v_first = false;
  bool output_final_state = false;
  bool disable_recompute = false;
  bool return_intermediate_states = false;
  Keys keys = Keys::kRandom;
  std::optional<FixedGate> fixed_gate;
  bool linear_gate = false;
  double gate_scale = 1.0;
  std::optional<double> fixed_beta;
  Strides strides = Strides::kContiguous;

  // Sequences: what N is in the operator's header.
  [[nodiscard]] std::int64_t N() const { return cu_seqlens ? static_cast<std::int64_t>(cu_seqlens->size()) - 1 : B; }
  [[nodiscard]] bool is_rank3() const { return layout == Layout::kTND || layout == Layout::kNTD; }
};

// Lets gtest show a case by its name.
inline void PrintTo(const OpCase& c, std::ostream* stream) { *stream << c.name; }

// Throws std::runtime_error, naming file and case, for anything that the format does not know.
[[nodiscard]] std::vector<OpCase> load_op_cases(const std::filesystem::path& file);

}  // namespace kda::testing
