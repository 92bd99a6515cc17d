// Many threads, forked processes and other thread pools around one library.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kda/kda.h"
#include "support/fork.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

using Bytes = std::vector<std::byte>;

// Long enough for several windows of shared work.
OpCase long_case() {
  OpCase c;
  c.name = "long";
  c.T = 700;
  c.H = 1;
  c.HV = 3;
  c.K = 32;
  c.V = 48;
  c.use_gate_in_kernel = true;
  c.initial_state = true;
  return c;
}

Bytes attn_out_of(const CaseInputs& inputs, int num_threads) {
  OutputSet outputs;
  outputs.set(kAttnOut).set(kFinalState);
  const RunResult result = run(inputs, outputs, {.plan = {.num_threads = num_threads}});
  Bytes bytes = result.bytes(kAttnOut);
  const Bytes state = result.bytes(kFinalState);
  bytes.insert(bytes.end(), state.begin(), state.end());
  return bytes;
}

TEST(Concurrency, EightThreadsWithTheirOwnWorkspacesOnOnePlan) {
  const CaseInputs inputs = make_inputs(long_case());
  ChunkKdaFwdOutputs described;
  described.attn_out = chunk_kda_fwd_outputs(inputs.tensors, inputs.attributes).attn_out;
  const ChunkKdaFwdPlan plan(inputs.tensors, described, inputs.attributes, {.num_threads = 3});
  const auto size = static_cast<std::size_t>(described.attn_out.numel()) * size_of(described.attn_out.dtype);
  const auto execute = [&](Bytes& result) {
    Bytes workspace(plan.workspace_bytes(), std::byte{0xff});
    ChunkKdaFwdOutputs outputs = described;
    outputs.attn_out.data = result.data();
    plan.execute(inputs.tensors, outputs, {workspace.data(), workspace.size()});
  };
  Bytes expected(size);
  execute(expected);
  std::vector<Bytes> results(8, Bytes(size));
  std::vector<std::thread> threads;
  for (Bytes& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        std::fill(result.begin(), result.end(), std::byte{0xff});
        execute(result);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Bytes& result : results) EXPECT_TRUE(result == expected);
}

TEST(Concurrency, TheNumberOfThreadsMayChangeBetweenCalls) {
  const CaseInputs inputs = make_inputs(long_case());
  const Bytes expected = attn_out_of(inputs, 1);
  for (const int num_threads : {2, 7, 1, 16, 3, 0, 5}) {
    EXPECT_TRUE(attn_out_of(inputs, num_threads) == expected) << num_threads;
  }
}

TEST(Concurrency, PlansOfDifferentSizesRunAtOnce) {
  const CaseInputs inputs = make_inputs(long_case());
  const Bytes expected = attn_out_of(inputs, 1);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int caller = 0; caller < 8; ++caller) {
    threads.emplace_back([&, caller] {
      for (int i = 0; i < 4; ++i) wrong += attn_out_of(inputs, 1 + (caller + i) % 5) == expected ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(Fork, AChildUsesPlansOfItsParentAndMakesItsOwn) {
  const CaseInputs inputs = make_inputs(long_case());
  const Bytes expected = attn_out_of(inputs, 4);
  ChunkKdaFwdOutputs outputs;
  outputs.attn_out = chunk_kda_fwd_outputs(inputs.tensors, inputs.attributes).attn_out;
  const ChunkKdaFwdPlan plan(inputs.tensors, outputs, inputs.attributes, {.num_threads = 4});
  const auto use = [&] {
    Bytes workspace(plan.workspace_bytes());
    Bytes result(static_cast<std::size_t>(outputs.attn_out.numel()) * size_of(outputs.attn_out.dtype));
    ChunkKdaFwdOutputs mine = outputs;
    mine.attn_out.data = result.data();
    plan.execute(inputs.tensors, mine, {workspace.data(), workspace.size()});
    if (std::memcmp(result.data(), expected.data(), result.size()) != 0) return 1;
    return attn_out_of(inputs, 4) == expected ? 0 : 2;
  };
  EXPECT_TRUE(child_succeeds(use));
  EXPECT_TRUE(child_succeeds([&] { return use() == 0 && child_succeeds(use) ? 0 : 1; })) << "a child's child";
  EXPECT_EQ(use(), 0) << "the parent, afterwards";
}

TEST(Fork, AChildMayComeWhileOtherThreadsCompute) {
  const CaseInputs inputs = make_inputs(long_case());
  const Bytes expected = attn_out_of(inputs, 2);
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!done) static_cast<void>(attn_out_of(inputs, 3));
    });
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(child_succeeds([&] { return attn_out_of(inputs, 3) == expected ? 0 : 1; }));
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace kda::testing
