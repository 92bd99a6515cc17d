// Every case of tests/op_cases/kda_gate.json and kda_gate_cumsum.json through the C++ door, against float64.

#include <gtest/gtest.h>

#include "kda/reference.h"
#include "support/compare.h"
#include "support/gate_cases.h"

namespace kda::testing {
namespace {

class GateCases : public ::testing::TestWithParam<GateCase> {};
class GateCumsumCases : public ::testing::TestWithParam<GateCumsumCase> {};

TEST_P(GateCases, MeetsItsBounds) {
  const GateCall call(GetParam());
  execute_gate(call.inputs, call.out, call.attributes, {});
  for (const GateScore& score : score(call.out, reference::kda_gate(call.inputs, call.attributes))) {
    EXPECT_TRUE(score.ok()) << score.name << ": error " << score.error << ", bound " << score.bound;
  }
}

TEST_P(GateCumsumCases, MeetsItsBounds) {
  const GateCumsumCall call(GetParam());
  execute_gate_cumsum(call.inputs, call.gk, call.attributes, {});
  const std::vector<double> actual(call.output.begin(), call.output.end());
  EXPECT_LE(relative_error(actual, reference::kda_gate_cumsum(call.inputs, call.attributes)), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(KdaGate, GateCases, ::testing::ValuesIn(load_gate_cases(KDA_OP_CASES_DIR "/kda_gate.json")),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(KdaGateCumsum, GateCumsumCases,
                         ::testing::ValuesIn(load_gate_cumsum_cases(KDA_OP_CASES_DIR "/kda_gate_cumsum.json")),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace kda::testing
