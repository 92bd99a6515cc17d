// Callers that round otherwise, or trap what kernels do on purpose: the same bits for them, and their environment as it
// was. Flushing subnormal numbers, which <cfenv> cannot ask for, is tested from Python.

#include <fenv.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <limits>
#include <vector>

#include "kda/reference.h"
#include "support/gate_cases.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

using Bytes = std::vector<std::byte>;

template <typename T>
void append(Bytes& bytes, const std::vector<T>& values) {
  const auto* first = reinterpret_cast<const std::byte*>(values.data());
  bytes.insert(bytes.end(), first, first + values.size() * sizeof(T));
}

OpCase full_case() {
  OpCase c;
  c.name = "full";
  c.T = 300;
  c.H = 1;
  c.HV = 3;
  c.K = 32;
  c.V = 48;
  c.scale = 0.1;
  c.use_gate_in_kernel = true;
  c.initial_state = true;
  return c;
}

GateCase gate_case() {
  GateCase c;
  c.name = "gate";
  c.shape = {70, 3, 40};
  c.lower_bound = -0.1;
  return c;
}

GateCumsumCase gate_cumsum_case() {
  GateCumsumCase c;
  c.name = "gate_cumsum";
  c.shape = {1, 3, 70, 40};
  c.use_gate_in_kernel = true;
  return c;
}

// Every operator, and its reference, on inputs that were made before.
class FloatEnvironment : public ::testing::Test {
 protected:
  [[nodiscard]] Bytes compute(int num_threads) {
    const PlanOptions plan{.num_threads = num_threads};
    const RunResult result = run(inputs_, all_outputs(), {.plan = plan});
    Bytes bytes;
    for (int output = 0; output < static_cast<int>(kChunkKdaFwdOutputCount); ++output) {
      append(bytes, result.bytes(output));
    }
    execute_gate(gate_.inputs, gate_.out, gate_.attributes, plan);
    append(bytes, gate_.output);
    execute_gate_cumsum(cumsum_.inputs, cumsum_.gk, cumsum_.attributes, plan);
    append(bytes, cumsum_.output);
    append(bytes, reference::chunk_kda_fwd(inputs_.tensors, inputs_.attributes).attn_out);
    append(bytes, reference::kda_gate(gate_.inputs, gate_.attributes));
    append(bytes, reference::kda_gate_cumsum(cumsum_.inputs, cumsum_.attributes));
    return bytes;
  }

  CaseInputs inputs_ = make_inputs(full_case());
  GateCall gate_{gate_case()};
  GateCumsumCall cumsum_{gate_cumsum_case()};
};

TEST_F(FloatEnvironment, RoundsToNearestWhateverTheCallerDoes) {
  const Bytes expected = compute(1);
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    for (const int num_threads : {1, 4}) {
      ASSERT_EQ(fesetround(mode), 0);
      const Bytes bytes = compute(num_threads);
      const int after = fegetround();
      fesetround(FE_TONEAREST);
      EXPECT_TRUE(bytes == expected) << "mode " << mode << ", threads " << num_threads;
      EXPECT_EQ(after, mode);
    }
  }
}

TEST_F(FloatEnvironment, ExceptionsAreNeitherTrappedNorLeftBehind) {
  gate_.A_log.assign(gate_.A_log.size(), std::numeric_limits<float>::infinity());
  const Bytes expected = compute(1);
  feclearexcept(FE_ALL_EXCEPT);
  feraiseexcept(FE_UNDERFLOW);
  const int trapped = FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW;
  const bool traps = feenableexcept(trapped) != -1;  // not every CPU can
  const Bytes bytes = compute(4);
  EXPECT_EQ(fegetexcept(), traps ? trapped : 0);
  fedisableexcept(trapped);
  EXPECT_EQ(fetestexcept(trapped | FE_UNDERFLOW), FE_UNDERFLOW);
  EXPECT_TRUE(bytes == expected);
}

}  // namespace
}  // namespace kda::testing
