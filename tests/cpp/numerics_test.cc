// Numerical promises, on what is known to break them: all outputs against float64.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "kda/reference.h"
#include "support/compare.h"
#include "support/dtypes.h"
#include "support/expect.h"
#include "support/safetensors.h"

namespace kda::testing {
namespace {

OpCase base_case(Dtype dtype, std::int64_t chunk_size) {
  OpCase c;
  c.seed = 77;
  c.dtype = dtype;
  c.chunk_size = chunk_size;
  c.T = 211;
  c.initial_state = true;
  return c;
}

void expect_all_within_bounds(const OpCase& c) { expect_case_within_bounds(c, all_outputs()); }

class Numerics : public ::testing::TestWithParam<std::tuple<Dtype, std::int64_t>> {
 protected:
  [[nodiscard]] static OpCase base() { return base_case(std::get<0>(GetParam()), std::get<1>(GetParam())); }
};

TEST_P(Numerics, Random) { expect_all_within_bounds(base()); }

TEST_P(Numerics, GroupedValueHeads) {
  OpCase c = base();
  c.H = 2;
  c.HV = 6;
  c.V = 64;
  c.state_v_first = true;
  expect_all_within_bounds(c);
}

TEST_P(Numerics, SoftplusGate) {
  OpCase c = base();
  c.use_gate_in_kernel = true;
  c.dt_bias = true;
  expect_all_within_bounds(c);
}

TEST_P(Numerics, BoundedGate) {
  OpCase c = base();
  c.use_gate_in_kernel = true;
  c.safe_gate = true;
  expect_all_within_bounds(c);
}

TEST_P(Numerics, RepeatedKey) {
  OpCase c = base();
  c.T = 1024;
  c.keys = Keys::kRepeated;
  c.fixed_beta = 0.9997;
  c.gate_scale = 1e-4;
  expect_all_within_bounds(c);
}

TEST_P(Numerics, RepeatedKeyWithoutDecay) {
  OpCase c = base();
  c.T = 1024;
  c.keys = Keys::kRepeated;
  c.fixed_beta = 0.9997;
  c.fixed_gate = FixedGate{0, Where::kAll};
  expect_all_within_bounds(c);
}

TEST_P(Numerics, CorrelatedKeys) {
  OpCase c = base();
  c.T = 512;
  c.keys = Keys::kCorrelated;
  expect_all_within_bounds(c);
}

TEST_P(Numerics, BetaZero) {
  OpCase c = base();
  c.fixed_beta = 0;
  expect_all_within_bounds(c);
}

TEST_P(Numerics, BetaOne) {
  OpCase c = base();
  c.fixed_beta = 1;
  expect_all_within_bounds(c);
}

INSTANTIATE_TEST_SUITE_P(, Numerics,
                         ::testing::Combine(::testing::Values(Dtype::kBFloat16, Dtype::kFloat16),
                                            ::testing::Values(std::int64_t{64}, std::int64_t{128})),
                         [](const auto& test) {
                           return std::string(name_of(std::get<0>(test.param))) + "_C" +
                                  std::to_string(std::get<1>(test.param));
                         });

class Gates : public ::testing::TestWithParam<std::tuple<double, Where, std::int64_t>> {};

TEST_P(Gates, AreExact) {
  const auto [value, where, chunk_size] = GetParam();
  OpCase c = base_case(chunk_size == 64 ? Dtype::kBFloat16 : Dtype::kFloat16, chunk_size);
  c.fixed_gate = FixedGate{value, where};
  expect_all_within_bounds(c);
}

INSTANTIATE_TEST_SUITE_P(, Gates,
                         ::testing::Combine(::testing::Values(0.0, -1e-4, -5.0, -12.0, -24.0, -1000.0, -1e4,
                                                              -std::numeric_limits<double>::infinity()),
                                            ::testing::Values(Where::kAll, Where::kHalf, Where::kSingle),
                                            ::testing::Values(std::int64_t{64}, std::int64_t{128})));

// exp(A_log) overflows fp32 in head 0, and nearly vanishes in head 1.
TEST(ExtremeALog, IsBounded) {
  for (const bool safe : {false, true}) {
    OpCase c = base_case(Dtype::kBFloat16, 64);
    c.HV = 2;
    c.use_gate_in_kernel = true;
    c.safe_gate = safe;
    CaseValues values = generate(c);
    values.A_log = {200.0f, -20.0f};
    // Where inf * 0 would arise: x = 0, and x so low that softplus(x) is 0 in fp32.
    for (std::size_t i = 0; i < values.g.size(); i += 3) values.g[i] = i % 2 == 0 ? 0.0f : -200.0f;
    const CaseInputs inputs = make_inputs(c, values);
    expect_within_bounds(c, inputs, run(inputs, all_outputs()));
  }
}

// softplus(x) is exp(x) there, and sigmoid(x) too: not 0.
TEST(VeryNegativeRawGate, KeepsItsRelativeAccuracy) {
  for (const bool safe : {false, true}) {
    OpCase c = base_case(Dtype::kBFloat16, 64);
    c.use_gate_in_kernel = true;
    c.safe_gate = safe;
    CaseValues values = generate(c);
    values.A_log = {0.0f};
    for (std::size_t i = 0; i < values.g.size(); ++i) values.g[i] = -20.0f - 0.1f * static_cast<float>(i % 400);
    const CaseInputs inputs = make_inputs(c, values);
    const RunResult result = run(inputs, all_outputs());
    expect_within_bounds(c, inputs, result);
    // The norm over everything would only see the largest.
    const auto gk = result.values(kGk);
    const auto expected = reference::chunk_kda_fwd(inputs.tensors, inputs.attributes).gk;
    for (std::size_t i = 0; i < gk.size(); ++i) {
      ASSERT_NEAR(gk[i] / expected[i], 1, 2e-6) << "element " << i << " of gk, " << expected[i];
    }
  }
}

TEST(TinyInputs, DenormalsAndNegativeZeros) {
  OpCase c = base_case(Dtype::kFloat16, 64);
  CaseValues values = generate(c);
  for (std::size_t i = 0; i < values.v.size(); ++i) {
    if (i % 3 == 0) values.v[i] = -0.0f;
    if (i % 3 == 1) values.v[i] = (i % 2 == 0 ? 3.0f : -5.0f) * 0x1p-24f;
  }
  for (std::size_t i = 0; i < values.q.size(); ++i) {
    if (i % 5 == 0) values.q[i] = -0.0f;
    if (i % 5 == 1) values.k[i] = 7 * 0x1p-24f;
    if (i % 5 == 2) values.g[i] = -0.0f;
    if (i % 5 == 3) values.g[i] = -1e-41f;
  }
  const CaseInputs inputs = make_inputs(c, values);
  expect_within_bounds(c, inputs, run(inputs, all_outputs()));
}

// A slice of a layer of a trained model: correlated keys, gates from -1e-4 down to -12.8 per token.
class RealLayer : public ::testing::Test {
 protected:
  void SetUp() override {
    file_ = load_safetensors(KDA_EXAMPLES_DATA_DIR "/kda_layer.safetensors");
    const TensorView& q = file_.tensors.at("q");
    const TensorView& v = file_.tensors.at("v");
    case_.T = q.shape[1];
    case_.H = q.shape[2];
    case_.HV = v.shape[2];
    case_.use_gate_in_kernel = true;
    inputs_.tensors.q = q;
    inputs_.tensors.k = file_.tensors.at("k");
    inputs_.tensors.v = v;
    inputs_.tensors.g = file_.tensors.at("g");
    inputs_.tensors.beta = file_.tensors.at("beta");
    inputs_.tensors.A_log = file_.tensors.at("A_log");
    inputs_.tensors.dt_bias = file_.tensors.at("dt_bias");
    inputs_.attributes.scale = std::stod(file_.metadata.at("scale"));
    inputs_.attributes.use_gate_in_kernel = true;
  }

  SafeTensors file_;
  OpCase case_;
  CaseInputs inputs_;
};

TEST_F(RealLayer, ChunksOf64) { expect_within_bounds(case_, inputs_, run(inputs_, all_outputs())); }

TEST_F(RealLayer, ChunksOf128) {
  case_.chunk_size = inputs_.attributes.chunk_size = 128;
  expect_within_bounds(case_, inputs_, run(inputs_, all_outputs()));
}

TEST_F(RealLayer, FileAgreesWithTheReference) {
  const TensorView& stored = file_.tensors.at("expected_attn_out_f32");
  std::vector<double> expected(static_cast<std::size_t>(stored.numel()));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] = load(stored.data, stored.dtype, static_cast<std::int64_t>(i));
  }
  const auto result = reference::chunk_kda_fwd(inputs_.tensors, inputs_.attributes, /*intermediates=*/false);
  EXPECT_LE(relative_error(result.attn_out, expected), 1e-7);
}

}  // namespace
}  // namespace kda::testing
