// PlanOptions::state_products. What holds for every call of the operator is in the other files' tests, which
// tests/CMakeLists.txt runs again with bf16 products.

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "kda/kda.h"
#include "support/allocations.h"
#include "support/case_inputs.h"
#include "support/compare.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

// Relative Frobenius norm, as the header states it.
constexpr double kStatedError = 5e-3;
constexpr double kStatedErrorOfRepeatedKeys = 4e-2;

OpCase small_case() {
  OpCase c;
  c.seed = 9;
  c.T = 150;
  c.H = 1;
  c.HV = 2;
  c.initial_state = true;
  return c;
}

RunOptions with(StateProducts products) {
  RunOptions options;
  options.plan.state_products = products;
  return options;
}

ChunkKdaFwdPlan plan_for(const CaseInputs& inputs, const PlanOptions& options) {
  return {inputs.tensors, chunk_kda_fwd_outputs(inputs.tensors, inputs.attributes), inputs.attributes, options};
}

bool kernel_says_bf16_dot() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  const std::string text((std::istreambuf_iterator<char>(cpuinfo)), std::istreambuf_iterator<char>());
  return text.find(" avx512_bf16") != std::string::npos;
}

bool expects_pairs() { return cpu_instruction_set() == "AVX3" && kernel_says_bf16_dot(); }

void expect_same_bits(const RunResult& a, const RunResult& b) {
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    EXPECT_TRUE(a.bytes(output) == b.bytes(output)) << kChunkKdaFwdOutputNames[output] << " differs";
  }
}

TEST(StateProducts, AreBFloat16OnlyWhereAskedForAndWhereTheCpuCan) {
  const CaseInputs inputs = make_inputs(small_case());
  EXPECT_EQ(plan_for(inputs, {}).state_products(), StateProducts::kFloat32);
  EXPECT_EQ(plan_for(inputs, with(StateProducts::kFloat32).plan).state_products(), StateProducts::kFloat32);
  EXPECT_EQ(plan_for(inputs, with(StateProducts::kBFloat16).plan).state_products(),
            expects_pairs() ? StateProducts::kBFloat16 : StateProducts::kFloat32);
}

TEST(StateProducts, LeaveTheDefaultAlone) {
  const CaseInputs inputs = make_inputs(small_case());
  const RunResult before = run(inputs, all_outputs(), with(StateProducts::kFloat32));
  const RunResult pairs = run(inputs, all_outputs(), with(StateProducts::kBFloat16));
  expect_same_bits(run(inputs, all_outputs(), with(StateProducts::kFloat32)), before);
  // The outputs that do not come from the state are the same in both; all are where there are no bf16 products.
  for (const int output : {kGk, kAqk, kAkk, kW, kU, kQg, kKg}) EXPECT_TRUE(pairs.bytes(output) == before.bytes(output));
  EXPECT_EQ(pairs.bytes(kFinalState) == before.bytes(kFinalState), !expects_pairs());
  if (!expects_pairs()) expect_same_bits(pairs, before);
  EXPECT_EQ(plan_for(inputs, {}).workspace_bytes(),
            plan_for(inputs, with(StateProducts::kFloat32).plan).workspace_bytes());
}

TEST(StateProducts, RefusesWhatIsNone) {
  const CaseInputs inputs = make_inputs(small_case());
  try {
    static_cast<void>(plan_for(inputs, with(static_cast<StateProducts>(2)).plan));
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    EXPECT_STREQ(error.what(), "chunk_kda_fwd: state_products: expected kFloat32 or kBFloat16, got 2");
  }
}

void expect_near_float32(const OpCase& c, double bound) {
  const CaseInputs inputs = make_inputs(c);
  const RunResult expected = run(inputs, all_outputs(), with(StateProducts::kFloat32));
  const RunResult actual = run(inputs, all_outputs(), with(StateProducts::kBFloat16));
  EXPECT_TRUE(actual.untouched);
  for (const int output : {kAttnOut, kFinalState, kVNew, kH}) {
    EXPECT_LE(relative_error(actual.values(output), expected.values(output)), bound) << kChunkKdaFwdOutputNames[output];
  }
}

TEST(StateProducts, MeetTheStatedErrorForEverySize) {
  OpCase c = small_case();
  c.T = 37;
  for (std::int64_t dim = 16; dim <= 256; dim += 16) {
    SCOPED_TRACE(dim);
    c.K = dim;
    c.V = 272 - dim;
    c.state_v_first = dim % 32 == 0;
    expect_near_float32(c, kStatedError);
  }
}

TEST(StateProducts, MeetTheStatedErrorForEveryTail) {
  OpCase c = small_case();
  for (std::int64_t tokens = 1; tokens <= 66; ++tokens) {
    SCOPED_TRACE(tokens);
    c.T = tokens;
    c.initial_state = tokens % 2 == 0;
    expect_near_float32(c, kStatedError);
  }
}

TEST(StateProducts, MeetTheStatedErrorForPackedSequences) {
  OpCase c = small_case();
  c.cu_seqlens = std::vector<std::int64_t>{0, 1, 1, 18, 83, 150};
  c.V = 80;
  expect_near_float32(c, kStatedError);
}

TEST(StateProducts, MeetTheStatedErrorForCorrelatedKeys) {
  OpCase c = small_case();
  c.T = 2048;
  c.keys = Keys::kCorrelated;
  expect_near_float32(c, kStatedError);
}

// The same key for every token, next to no decay: what is rounded off is never corrected.
TEST(StateProducts, MeetTheStatedErrorForRepeatedKeys) {
  OpCase c = small_case();
  c.T = 1024;
  c.keys = Keys::kRepeated;
  for (const double beta : {0.5, 0.9997}) {
    c.fixed_beta = beta;
    c.fixed_gate = FixedGate{-1e-4, Where::kAll};
    expect_near_float32(c, kStatedErrorOfRepeatedKeys);
  }
}

TEST(StateProducts, OnePlanServesSeveralThreadsAndAllocatesNothing) {
  const CaseInputs inputs = make_inputs(small_case());
  const RunResult alone = run(inputs, all_outputs(), with(StateProducts::kBFloat16));
  std::vector<RunResult> results;
  for (int i = 0; i < 3; ++i) results.push_back(run(inputs, all_outputs()));
  const PlanOptions options{.num_threads = 2, .state_products = StateProducts::kBFloat16};
  const ChunkKdaFwdPlan plan(inputs.tensors, results[0].views, inputs.attributes, options);
  std::vector<std::vector<std::byte>> workspaces(results.size(), std::vector<std::byte>(plan.workspace_bytes()));
  const auto execute = [&](std::size_t i) {
    plan.execute(inputs.tensors, results[i].views, {workspaces[i].data(), workspaces[i].size()});
  };
  std::vector<std::thread> callers;
  for (std::size_t i = 0; i < results.size(); ++i) callers.emplace_back(execute, i);
  for (std::thread& caller : callers) caller.join();
  for (const RunResult& result : results) expect_same_bits(result, alone);
  const std::int64_t before = allocations();
  execute(0);
  EXPECT_EQ(allocations() - before, 0);
}

}  // namespace
}  // namespace kda::testing
