// What chunk_kda and chunk_kda_fwd_direct let the operator do on the way in, against the float64 reference and against
// the same done by hand beforehand.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kda/chunk_kda_fwd.h"
#include "kda/reference.h"
#include "support/case_inputs.h"
#include "support/compare.h"
#include "support/op_cases.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

OpCase small_case() {
  OpCase c;
  c.name = "fusions";
  c.T = 150;
  c.H = 1;
  c.HV = 2;
  c.V = 64;
  c.initial_state = true;
  return c;
}

// Every output within its bound.
void expect_exact(const OpCase& c, const CaseInputs& inputs) {
  const RunResult result = run(inputs, all_outputs());
  const reference::ChunkKdaFwdResult expected = reference::chunk_kda_fwd(inputs.tensors, inputs.attributes);
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    const auto i = static_cast<std::size_t>(output);
    const Comparison comparison = compare(c, output, result.values(output), expected.*kReferenceOutputs[i]);
    EXPECT_TRUE(comparison.ok()) << kChunkKdaFwdOutputNames[i] << ": " << comparison.error << " > " << comparison.bound;
  }
}

TEST(Fusions, L2NormOfUnnormalisedKeys) {
  const OpCase c = small_case();
  CaseValues values = generate(c);
  for (std::size_t i = 0; i < values.q.size(); ++i) values.q[i] *= 3.0f + static_cast<float>(i % 7);
  for (std::size_t i = 0; i < values.k.size(); ++i) values.k[i] *= 5.0f;
  CaseInputs inputs = make_inputs(c, values);
  inputs.attributes.fusions.qk_l2norm = true;
  expect_exact(c, inputs);
}

TEST(Fusions, L2NormOfZeroRowsIsZero) {
  const OpCase c = small_case();
  CaseValues values = generate(c);
  std::fill(values.q.begin(), values.q.end(), 0.0f);
  std::fill(values.k.begin(), values.k.end(), 0.0f);
  CaseInputs inputs = make_inputs(c, values);
  inputs.attributes.fusions.qk_l2norm = true;
  expect_exact(c, inputs);
}

TEST(Fusions, SigmoidAndTwiceSigmoidOfBeta) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
    OpCase c = small_case();
    c.beta_dtype = dtype;
    CaseValues values = generate(c);
    for (float& beta : values.beta) beta = 12.0f * beta - 6.0f;
    for (const BetaActivation activation : {BetaActivation::kSigmoid, BetaActivation::kTwiceSigmoid}) {
      CaseInputs inputs = make_inputs(c, values);
      inputs.attributes.fusions.beta = activation;
      expect_exact(c, inputs);
    }
  }
}

TEST(Fusions, LowerBoundOutsideTheContractAndNoALog) {
  OpCase c = small_case();
  c.use_gate_in_kernel = true;
  c.safe_gate = true;
  CaseInputs inputs = make_inputs(c);
  inputs.attributes.lower_bound = -20.0;
  EXPECT_THROW(static_cast<void>(run(inputs, all_outputs())), Error);
  inputs.attributes.fusions.any_lower_bound = true;
  expect_exact(c, inputs);
  inputs.tensors.A_log = {};
  expect_exact(c, inputs);
}

TEST(Fusions, GkInsteadOfGates) {
  for (const std::int64_t chunk_size : {64, 128}) {
    OpCase c = small_case();
    c.chunk_size = chunk_size;
    c.layout = Layout::kBNSD;
    const CaseInputs by_gate = make_inputs(c);
    const RunResult expected = run(by_gate, all_outputs());

    CaseInputs by_gk = make_inputs(c);
    by_gk.tensors.g = expected.views.gk;
    by_gk.attributes.fusions.g_is_gk = true;
    expect_exact(c, by_gk);

    // Steps that come back from fp32 sums are good to some 1e-6.
    const RunResult actual = run(by_gk, all_outputs());
    EXPECT_LE(relative_error(actual.values(kFinalState), expected.values(kFinalState)), 1e-5 + device_tolerance);
  }
}

TEST(Fusions, GkThatStaysAtMinusInfinityDecaysNoFurther) {
  OpCase c = small_case();
  c.layout = Layout::kBNSD;
  c.T = 64;
  std::vector<float> gk(static_cast<std::size_t>(c.HV * c.T * c.K), 0.0f);
  for (std::int64_t row = 0; row < c.HV * c.T; ++row) {
    if (row % c.T < 20) continue;
    std::fill_n(gk.begin() + row * c.K, c.K, -std::numeric_limits<float>::infinity());
  }
  CaseInputs inputs = make_inputs(c);
  inputs.tensors.g = TensorView::contiguous(gk.data(), Dtype::kFloat32, {1, c.HV, c.T, c.K});
  inputs.attributes.fusions.g_is_gk = true;
  expect_exact(c, inputs);
}

TEST(Fusions, GkIsRefusedTogetherWithAGateInTheKernel) {
  OpCase c = small_case();
  c.use_gate_in_kernel = true;
  CaseInputs inputs = make_inputs(c);
  inputs.attributes.fusions.g_is_gk = true;
  try {
    static_cast<void>(run(inputs, all_outputs()));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    EXPECT_NE(std::string(error.what()).find("use_gate_in_kernel"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace kda::testing
