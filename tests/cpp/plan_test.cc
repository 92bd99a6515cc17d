#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "core/workspace.h"
#include "kda/kda.h"
#include "support/allocations.h"
#include "support/call.h"

namespace kda {
namespace {

using testing::Call;
using testing::make_dense;
using testing::make_packed;

constexpr std::size_t kGuard = 64;

// A legal call with numbers in it, and outputs and workspace full of NaN.
struct Trial {
  Call call;
  std::vector<std::byte> memory;

  explicit Trial(void (*make)(Call&, Layout) = make_dense, Layout layout = Layout::kBSND) {
    make(call, layout);
    call.give_data();
    fill<std::uint16_t>(call.inputs.q, [](std::size_t i) { return static_cast<std::uint16_t>(0x3D00 + i % 97); });
    fill<std::uint16_t>(call.inputs.k, [](std::size_t i) { return static_cast<std::uint16_t>(0x3D80 + i % 89); });
    fill<std::uint16_t>(call.inputs.v, [](std::size_t i) { return static_cast<std::uint16_t>(0xBF00 + i % 127); });
    fill<float>(call.inputs.g, [](std::size_t i) { return static_cast<float>(i % 13) * 0.1F - 1.0F; });
    fill<float>(call.inputs.beta, [](std::size_t i) { return static_cast<float>(i % 7) * 0.1F + 0.2F; });
    fill<float>(call.inputs.initial_state, [](std::size_t i) { return static_cast<float>(i % 11) * 0.1F - 0.5F; });
    poison();
  }

  template <typename Element, typename Function>
  static void fill(const TensorView& view, Function element) {
    auto* data = static_cast<Element*>(view.data);
    for (std::size_t i = 0; i < static_cast<std::size_t>(view.numel()); ++i) data[i] = element(i);
  }

  [[nodiscard]] std::vector<TensorView> outputs() const {
    const ChunkKdaFwdOutputs& o = call.outputs;
    return {o.attn_out, o.final_state, o.gk, o.Aqk, o.Akk, o.w, o.u, o.qg, o.kg, o.v_new, o.h};
  }

  static std::size_t bytes_of(const TensorView& view) {
    return static_cast<std::size_t>(view.numel()) * size_of(view.dtype);
  }

  void poison() const {
    for (const TensorView& view : outputs()) {
      if (view.data != nullptr) std::memset(view.data, 0xFF, bytes_of(view));
    }
  }

  [[nodiscard]] ChunkKdaFwdPlan plan(int num_threads = 1) const {
    return {call.inputs, call.outputs, call.attributes, {.num_threads = num_threads}};
  }

  // With a workspace at an odd address, exactly as large as the plan asks, between guards.
  void execute(const ChunkKdaFwdPlan& plan) {
    const std::size_t bytes = plan.workspace_bytes();
    memory.assign(bytes + 2 * kGuard + 1, std::byte{0xFF});
    plan.execute(call.inputs, call.outputs, {memory.data() + kGuard + 1, bytes});
    for (std::size_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(memory[i], std::byte{0xFF});
      ASSERT_EQ(memory[kGuard + 1 + bytes + i], std::byte{0xFF});
    }
  }

  [[nodiscard]] std::vector<std::byte> result() const {
    std::vector<std::byte> bytes;
    for (const TensorView& view : outputs()) {
      const auto* data = static_cast<const std::byte*>(view.data);
      bytes.insert(bytes.end(), data, data + bytes_of(view));
    }
    return bytes;
  }
};

template <typename Function>
void expect_error(ErrorKind kind, const std::string& message, Function function) {
  try {
    function();
    FAIL() << "not refused: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
  }
}

TEST(Plan, RepeatedExecutionsGiveTheSameBits) {
  Trial trial;
  const ChunkKdaFwdPlan plan = trial.plan();
  trial.execute(plan);
  const auto first = trial.result();
  trial.poison();
  trial.execute(plan);
  EXPECT_EQ(trial.result(), first);
  Trial again;
  chunk_kda_fwd(again.call.inputs, again.call.outputs, again.call.attributes);
  EXPECT_EQ(again.result(), first);
}

TEST(Plan, ServesSeveralThreadsAtOnce) {
  std::list<Trial> trials(4);
  const ChunkKdaFwdPlan plan = trials.front().plan(2);
  Trial expected;
  expected.execute(plan);
  std::vector<std::thread> threads;
  for (Trial& trial : trials) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        trial.poison();
        trial.execute(plan);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Trial& trial : trials) EXPECT_EQ(trial.result(), expected.result());
}

TEST(Plan, ExecutionsAllocateNothing) {
  for (const auto make : {make_dense, make_packed}) {
    for (const int num_threads : {1, 2}) {
      Trial trial(make);
      const ChunkKdaFwdPlan plan = trial.plan(num_threads);
      std::vector<std::byte> memory(plan.workspace_bytes());
      const Workspace workspace{memory.data(), memory.size()};
      plan.execute(trial.call.inputs, trial.call.outputs, workspace);
      const std::int64_t before = testing::allocations();
      plan.execute(trial.call.inputs, trial.call.outputs, workspace);
      EXPECT_EQ(testing::allocations() - before, 0) << num_threads << " threads";
    }
  }
}

TEST(Plan, MovesAndReports) {
  Trial trial(make_packed);
  ChunkKdaFwdPlan first = trial.plan(2);
  const ChunkKdaFwdPlan plan = std::move(first);
  EXPECT_EQ(plan.backend(), "cpu");
  EXPECT_EQ(plan.variant(), 1);
  EXPECT_EQ(plan.dims().NC, 3);
  EXPECT_GE(plan.launches(), 1);
  EXPECT_GE(plan.num_threads(), 1);
  EXPECT_LE(plan.num_threads(), 2);
  trial.execute(plan);
}

template <typename Plan>
void expect_refuses_when_moved_from(Plan& plan, const std::string& op) {
  const Plan taken = std::move(plan);
  EXPECT_EQ(taken.backend(), "cpu");
  const std::string message = op + ": plan: expected one that holds a call, got one that was moved from";
  expect_error(ErrorKind::kValue, message, [&] { plan.execute({}, {}, {}); });
  expect_error(ErrorKind::kValue, message, [&] { (void)plan.launches(); });
  expect_error(ErrorKind::kValue, message, [&] { (void)plan.backend(); });
  expect_error(ErrorKind::kValue, message, [&] { (void)plan.num_threads(); });
}

TEST(Plan, RefusesToBeUsedWhenMovedFrom) {
  Trial trial;
  ChunkKdaFwdPlan plan = trial.plan();
  expect_refuses_when_moved_from(plan, "chunk_kda_fwd");
  const std::string message = "chunk_kda_fwd: plan: expected one that holds a call, got one that was moved from";
  expect_error(ErrorKind::kValue, message, [&] { (void)plan.dims(); });
  expect_error(ErrorKind::kValue, message, [&] { (void)plan.variant(); });
  expect_error(ErrorKind::kValue, message, [&] { (void)plan.workspace_bytes(); });
  expect_error(ErrorKind::kValue, message, [&] { (void)plan.workspace_regions(); });
  plan = trial.plan();
  trial.execute(plan);

  const TensorView g = TensorView::contiguous(nullptr, Dtype::kFloat32, {2, 3, 4});
  KdaGatePlan gate({.g = g}, g, {.lower_bound = -5});
  expect_refuses_when_moved_from(gate, "kda_gate");
  KdaGateCumsumPlan cumsum({.g = g}, g, {});
  expect_refuses_when_moved_from(cumsum, "kda_gate_cumsum");
}

TEST(Plan, VariantTwoIsForTheUsualSizes) {
  const auto bf16 = [](std::int64_t heads, std::int64_t dim) {
    return TensorView::contiguous(nullptr, Dtype::kBFloat16, {1, 1, heads, dim});
  };
  const ChunkKdaFwdInputs inputs{.q = bf16(1, 128),
                                 .k = bf16(1, 128),
                                 .v = bf16(1, 128),
                                 .g = bf16(1, 128),
                                 .beta = TensorView::contiguous(nullptr, Dtype::kFloat32, {1, 1, 1})};
  ChunkKdaFwdAttributes attributes{.scale = 1.0};
  EXPECT_EQ(ChunkKdaFwdPlan(inputs, chunk_kda_fwd_outputs(inputs, attributes), attributes).variant(), 2);
  attributes.chunk_size = 128;
  EXPECT_EQ(ChunkKdaFwdPlan(inputs, chunk_kda_fwd_outputs(inputs, attributes), attributes).variant(), 1);
}

TEST(Plan, WorkspaceRegionsAreAlignedDisjointAndAddUp) {
  for (const auto make : {make_dense, make_packed}) {
    Trial trial(make);
    const ChunkKdaFwdPlan plan = trial.plan(2);
    std::size_t end = 0;
    for (const WorkspaceRegion& region : plan.workspace_regions()) {
      EXPECT_FALSE(region.name.empty());
      EXPECT_EQ(region.offset % 512, 0U);
      EXPECT_GE(region.offset, end);
      EXPECT_LT(region.offset - end, 512U);
      EXPECT_GT(region.bytes, 0U);
      end = region.offset + region.bytes;
    }
    EXPECT_EQ(plan.workspace_bytes(), end == 0 ? 0 : end + 511);
  }
}

TEST(Plan, RefusesAnInsufficientWorkspace) {
  Trial trial;
  const ChunkKdaFwdPlan plan = trial.plan();
  const std::size_t bytes = plan.workspace_bytes();
  if (bytes == 0) GTEST_SKIP() << "this backend needs no workspace";
  const auto before = trial.result();
  const std::string needed = "chunk_kda_fwd: workspace: expected " + std::to_string(bytes) + " bytes, got ";
  expect_error(ErrorKind::kUnavailable, needed + "a null pointer", [&] {
    plan.execute(trial.call.inputs, trial.call.outputs, {nullptr, bytes});
  });
  std::vector<std::byte> memory(bytes);
  expect_error(ErrorKind::kUnavailable, needed + std::to_string(bytes - 1) + " bytes", [&] {
    plan.execute(trial.call.inputs, trial.call.outputs, {memory.data(), bytes - 1});
  });
  EXPECT_EQ(trial.result(), before);
}

TEST(Plan, RefusesAWorkspaceThatOverlapsATensor) {
  Trial trial;
  const ChunkKdaFwdPlan plan = trial.plan();
  const std::size_t bytes = plan.workspace_bytes();
  if (bytes == 0) GTEST_SKIP() << "this backend needs no workspace";
  const auto before = trial.result();
  const auto elements = static_cast<std::size_t>(trial.call.outputs.attn_out.numel());
  std::vector<std::byte> memory(bytes + elements * sizeof(float));
  const auto refuses = [&](const std::string& name, TensorView ChunkKdaFwdInputs::*input, std::size_t offset) {
    ChunkKdaFwdInputs inputs = trial.call.inputs;
    (inputs.*input).data = memory.data() + offset;
    expect_error(ErrorKind::kValue,
                 "chunk_kda_fwd: workspace: expected memory of its own, got memory shared with " + name, [&] {
                   plan.execute(inputs, trial.call.outputs, {memory.data(), bytes});
                 });
  };
  refuses("beta", &ChunkKdaFwdInputs::beta, 0);
  refuses("beta", &ChunkKdaFwdInputs::beta, (bytes - 2) / sizeof(float) * sizeof(float));
  expect_error(ErrorKind::kValue, "workspace: expected memory of its own, got memory shared with attn_out", [&] {
    ChunkKdaFwdOutputs outputs = trial.call.outputs;
    outputs.attn_out.data = memory.data();
    plan.execute(trial.call.inputs, outputs, {memory.data(), bytes});
  });
  EXPECT_EQ(trial.result(), before);
}

TEST(Plan, RefusesViewsThatWereNotPlanned) {
  Trial trial;
  const ChunkKdaFwdPlan plan = trial.plan();
  const auto refuses = [&](ErrorKind kind, const std::string& message, auto change) {
    ChunkKdaFwdInputs inputs = trial.call.inputs;
    ChunkKdaFwdOutputs outputs = trial.call.outputs;
    change(inputs, outputs);
    expect_error(kind, message, [&] { plan.execute(inputs, outputs, {}); });
  };
  refuses(ErrorKind::kValue, "q: expected as planned bfloat16 [2,100,2,32] strides [6400,64,32,1] on cpu, got",
          [](auto& in, auto&) { in.q.strides[1] = 65; });
  refuses(ErrorKind::kValue, "v: expected as planned", [](auto& in, auto&) { in.v.dtype = Dtype::kFloat16; });
  refuses(ErrorKind::kValue, "g: expected as planned", [](auto& in, auto&) { in.g.shape[1] = 99; });
  refuses(ErrorKind::kValue, "beta: expected as planned", [](auto& in, auto&) { in.beta.rank = 200; });
  refuses(ErrorKind::kMissing, "A_log: expected as planned float32 [4] strides [1] on cpu, got no tensor",
          [](auto& in, auto&) { in.A_log = {}; });
  refuses(ErrorKind::kMissing, "h: expected as planned", [](auto&, auto& out) { out.h = {}; });
  refuses(ErrorKind::kMissing, "q: expected data, got a null pointer", [](auto& in, auto&) { in.q.data = nullptr; });
  refuses(ErrorKind::kValue, "attn_out: expected memory of its own, got memory shared with v",
          [](auto& in, auto& out) { out.attn_out.data = in.v.data; });
}

TEST(Plan, RefusesAnUnplannedOutput) {
  Trial trial;
  const TensorView gk = trial.call.outputs.gk;
  trial.call.outputs.gk = {};
  const ChunkKdaFwdPlan plan = trial.plan();
  trial.call.outputs.gk = gk;
  expect_error(ErrorKind::kValue, "gk: expected as planned no tensor, got float32",
               [&] { plan.execute(trial.call.inputs, trial.call.outputs, {}); });
}

TEST(Plan, RefusesDevicesWithoutABackend) {
  for (const BackendInfo& backend : backends()) {
    if (backend.name == "cuda" && backend.available) GTEST_SKIP() << "this machine has every backend";
  }
  Trial trial;
  ChunkKdaFwdInputs& in = trial.call.inputs;
  for (TensorView* view : {&in.q, &in.k, &in.v, &in.g, &in.beta, &in.A_log, &in.dt_bias, &in.initial_state}) {
    view->device = {DeviceType::kCuda, 1};
  }
  trial.call.outputs = chunk_kda_fwd_outputs(in, trial.call.attributes);
  expect_error(ErrorKind::kUnavailable, "cuda", [&] { (void)trial.plan(); });
}

TEST(Plan, RefusesNegativeThreads) {
  Trial trial;
  expect_error(ErrorKind::kValue, "chunk_kda_fwd: num_threads: expected 0 or more, got -1",
               [&] { (void)trial.plan(-1); });
}

TEST(Plan, ActivatedGateReadsNoGateParameters) {
  Trial trial;
  trial.call.attributes.use_gate_in_kernel = false;
  trial.call.inputs.A_log.data = nullptr;
  trial.call.inputs.dt_bias = TensorView::contiguous(trial.call.outputs.attn_out.data, Dtype::kFloat32, {1});
  const ChunkKdaFwdPlan plan = trial.plan();
  trial.execute(plan);
  trial.call.inputs.A_log = {};
  trial.execute(plan);
}

TEST(Plan, NothingToWriteNeedsNothing) {
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  const auto view = [](Dtype dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView::contiguous(nullptr, dtype, shape);
  };
  const ChunkKdaFwdInputs inputs{.q = view(Dtype::kFloat16, {kMany, 0, 1, 16}),
                                 .k = view(Dtype::kFloat16, {kMany, 0, 1, 16}),
                                 .v = view(Dtype::kFloat16, {kMany, 0, 1, 16}),
                                 .g = view(Dtype::kFloat32, {kMany, 0, 1, 16}),
                                 .beta = view(Dtype::kFloat32, {kMany, 0, 1})};
  const ChunkKdaFwdAttributes attributes{.scale = 1.0};
  ChunkKdaFwdOutputs outputs = chunk_kda_fwd_outputs(inputs, attributes);
  outputs.final_state = {};
  const ChunkKdaFwdPlan plan(inputs, outputs, attributes);
  EXPECT_EQ(plan.workspace_bytes(), 0U);
  EXPECT_TRUE(plan.workspace_regions().empty());
  EXPECT_EQ(plan.launches(), 0);
  plan.execute(inputs, outputs, {});
}

TEST(Plan, EmptySequencesPassTheirStateOn) {
  Trial trial;
  ChunkKdaFwdInputs& in = trial.call.inputs;
  for (TensorView* view : {&in.q, &in.k, &in.v, &in.g, &in.beta}) {
    view->shape[1] = 0;
    view->data = nullptr;
  }
  const TensorView final_state = trial.call.outputs.final_state;
  trial.call.outputs = chunk_kda_fwd_outputs(in, trial.call.attributes);
  trial.call.outputs.final_state = final_state;
  trial.execute(trial.plan());
  EXPECT_EQ(std::memcmp(final_state.data, in.initial_state.data, Trial::bytes_of(final_state)), 0);
}

TEST(Plan, MemoryThatCannotBeHadIsAnError) {
  WorkspaceBuilder builder;
  EXPECT_EQ(builder.add("first", {3, 5}, 4), 0U);
  EXPECT_EQ(builder.add("empty", {std::int64_t{1} << 62, std::int64_t{1} << 62, 0}, 4), 512U);
  EXPECT_EQ(builder.add("second", {100}, 8), 512U);
  EXPECT_EQ(builder.regions().size(), 2U);
  EXPECT_EQ(workspace_bytes_for(builder.regions()), 512U + 800 + 511);
  expect_error(ErrorKind::kOutOfMemory, "region third", [&] { builder.add("third", {1LL << 62}, 4); });
  expect_error(ErrorKind::kOutOfMemory, "region third", [&] { builder.add("third", {1LL << 40, 1LL << 40}, 1); });
  builder.add("large", {1LL << 61}, 2);
  expect_error(ErrorKind::kOutOfMemory, "region fourth", [&] { builder.add("fourth", {1LL << 61}, 2); });
}

TEST(Info, VersionAndBackends) {
  EXPECT_EQ(std::string(version()), KDA_VERSION);
  const auto all = backends();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(all[0].name, "cpu");
  EXPECT_TRUE(all[0].available);
  EXPECT_NE(all[0].detail.find(cpu_instruction_set()), std::string::npos);
  EXPECT_FALSE(cpu_instruction_sets().empty());
  EXPECT_GE(default_num_threads(), 1);
}

}  // namespace
}  // namespace kda
