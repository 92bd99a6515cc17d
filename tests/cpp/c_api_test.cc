// The C API as a door to chunk_kda_fwd: the same bits as the C++ door, and handles that survive every misuse.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "aclnnop/aclnn_kda_gate.h"
#include "kda/acl_cuda.h"
#include "support/c_door.h"
#include "support/call.h"
#include "support/dtypes.h"

namespace kda::testing {
namespace {

constexpr int kNullPointer = 161001;
constexpr int kInvalid = 161002;
constexpr int kRuntime = 361001;
constexpr int kExecutorNull = 561103;

// Runs a case through the C API into outputs laid out as C++ lays them out, with all tensors at an offset.
RunResult run_c(const CaseInputs& inputs, OutputSet outputs, std::int64_t offset = 0) {
  RunResult result;
  result.views = chunk_kda_fwd_outputs(inputs.tensors, inputs.attributes);
  for (std::size_t i = 0; i < kOutputViews.size(); ++i) {
    TensorView& view = result.views.*kOutputViews[i];
    if (!outputs[i]) {
      view = {};
      continue;
    }
    result.memory[i] = GuardedMemory(static_cast<std::size_t>(view.numel()) * size_of(view.dtype));
    view.data = result.memory[i].data();
  }
  std::map<std::string, CTensorOptions> options;
  for (const char* name : {"q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"}) {
    options[name].offset = offset;
  }
  for (const std::string_view name : kChunkKdaFwdOutputNames) options[std::string(name)].offset = -offset;
  const std::vector<std::vector<std::byte>> before = inputs.memory;
  EXPECT_EQ(call(make_c_arguments(inputs.tensors, result.views, inputs.attributes, options)), ACL_SUCCESS)
      << take_error();
  result.untouched = before == inputs.memory;
  for (std::size_t i = 0; i < kOutputViews.size(); ++i) {
    if (outputs[i]) result.untouched = result.untouched && result.memory[i].guards_intact();
  }
  return result;
}

OutputSet mandatory_outputs() {
  OutputSet outputs;
  for (const int output : {kAttnOut, kAqk, kAkk}) outputs.set(static_cast<std::size_t>(output));
  return outputs;
}

void expect_same_bits(const RunResult& actual, const RunResult& expected) {
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    if (!actual.has(output)) continue;
    EXPECT_EQ(actual.bytes(output), expected.bytes(output))
        << kChunkKdaFwdOutputNames[static_cast<std::size_t>(output)];
  }
}

OpCase small_case() {
  OpCase c;
  c.name = "small";
  c.B = 2;
  c.T = 100;
  c.H = 2;
  c.HV = 4;
  c.K = 32;
  c.V = 48;
  c.use_gate_in_kernel = true;
  c.dt_bias = true;
  c.initial_state = true;
  return c;
}

OpCase small_packed_case() {
  OpCase c = small_case();
  c.B = 1;
  c.cu_seqlens = {0, 0, 65, 100};
  c.chunk_indices = true;
  c.state_v_first = true;
  return c;
}

// Every case of the list gives the same bits through C and through C++.

class COpCases : public ::testing::TestWithParam<OpCase> {};

TEST_P(COpCases, GiveTheBitsOfTheCppDoor) {
  const OpCase& c = GetParam();
  const CaseInputs inputs = make_inputs(c);
  const OutputSet outputs = kept_outputs(c);
  const RunResult actual = run_c(inputs, outputs, 5);
  EXPECT_TRUE(actual.untouched);
  expect_same_bits(actual, run(inputs, outputs));
}

INSTANTIATE_TEST_SUITE_P(ChunkKdaFwd, COpCases,
                         ::testing::ValuesIn(load_op_cases(KDA_OP_CASES_DIR "/chunk_kda_fwd.json")),
                         [](const auto& test) { return test.param.name; });

// Outputs.

void expect_subsets_agree(const OpCase& c) {
  const CaseInputs inputs = make_inputs(c);
  const RunResult all = run_c(inputs, all_outputs());
  constexpr std::array kOptional = {kFinalState, kGk, kW, kU, kQg, kKg, kVNew, kH};
  for (unsigned subset = 0; subset < 1U << kOptional.size(); ++subset) {
    OutputSet outputs = mandatory_outputs();
    for (std::size_t i = 0; i < kOptional.size(); ++i) {
      outputs.set(static_cast<std::size_t>(kOptional[i]), (subset >> i & 1U) != 0);
    }
    SCOPED_TRACE(outputs.to_string());
    const RunResult some = run_c(inputs, outputs);
    EXPECT_TRUE(some.untouched);
    expect_same_bits(some, all);
  }
}

TEST(COutputs, AreTheSameBitsWhicheverOthersAreAskedFor) { expect_subsets_agree(small_case()); }

TEST(COutputs, AreTheSameBitsWhicheverOthersAreAskedForWhenPacked) { expect_subsets_agree(small_packed_case()); }

TEST(COutputs, MayHaveStrides) {
  const CaseInputs inputs = make_inputs(small_case());
  const RunResult expected = run_c(inputs, all_outputs());
  ChunkKdaFwdOutputs views = expected.views;
  std::array<GuardedMemory, kChunkKdaFwdOutputCount> memory;
  for (std::size_t i = 0; i < kOutputViews.size(); ++i) {
    TensorView& view = views.*kOutputViews[i];
    const auto rank = static_cast<std::size_t>(view.rank);
    for (std::size_t axis = 0; axis < rank; ++axis) view.strides[axis] *= 3;
    memory[i] = GuardedMemory(static_cast<std::size_t>(view.numel()) * size_of(view.dtype) * 3);
    view.data = memory[i].data();
  }
  ASSERT_EQ(call(make_c_arguments(inputs.tensors, views, inputs.attributes)), ACL_SUCCESS) << take_error();
  for (std::size_t i = 0; i < kOutputViews.size(); ++i) {
    EXPECT_EQ(packed_bytes(views.*kOutputViews[i]), expected.bytes(static_cast<int>(i)));
    EXPECT_TRUE(memory[i].guards_intact());
  }
}

TEST(COutputs, HOfPackedRank4MayHaveABatchAxis) {
  const CaseInputs inputs = make_inputs(small_packed_case());
  const RunResult expected = run_c(inputs, all_outputs());
  RunResult actual = run_c(inputs, all_outputs());
  TensorView& h = actual.views.h;
  std::memset(h.data, 0xff, static_cast<std::size_t>(h.numel()) * size_of(h.dtype));
  h = TensorView::contiguous(h.data, h.dtype, {1, h.shape[0], h.shape[1], h.shape[2], h.shape[3]});
  ASSERT_EQ(call(make_c_arguments(inputs.tensors, actual.views, inputs.attributes)), ACL_SUCCESS) << take_error();
  EXPECT_EQ(actual.bytes(kH), expected.bytes(kH));
}

TEST(CInputs, NullStridesAreRowMajor) {
  const CaseInputs inputs = make_inputs(small_case());
  const RunResult result = run_c(inputs, mandatory_outputs());
  const RunResult expected = run_c(inputs, mandatory_outputs());
  CArguments arguments = make_c_arguments(inputs.tensors, result.views, inputs.attributes);
  const TensorView& q = inputs.tensors.q;
  arguments.tensors["q"] = {
      aclCreateTensor(q.shape.data(), 4, acl_type(q.dtype), nullptr, 0, ACL_FORMAT_ND, nullptr, 0, q.data),
      aclDestroyTensor};
  ASSERT_EQ(call(arguments), ACL_SUCCESS) << take_error();
  expect_same_bits(result, expected);
}

TEST(CInputs, MayBeEmptyAndNull) {
  for (const bool no_tokens : {true, false}) {
    OpCase c = small_case();
    (no_tokens ? c.T : c.B) = 0;
    const CaseInputs inputs = make_inputs(c);
    ChunkKdaFwdInputs tensors = inputs.tensors;
    for (TensorView* view : {&tensors.q, &tensors.k, &tensors.v, &tensors.g, &tensors.beta}) view->data = nullptr;
    ChunkKdaFwdOutputs outputs = chunk_kda_fwd_outputs(tensors, inputs.attributes);
    GuardedMemory state(static_cast<std::size_t>(outputs.final_state.numel()) * sizeof(float));
    outputs.final_state.data = state.data();
    ASSERT_EQ(call(make_c_arguments(tensors, outputs, inputs.attributes)), ACL_SUCCESS) << take_error();
    if (no_tokens) {
      EXPECT_EQ(packed_bytes(outputs.final_state), packed_bytes(tensors.initial_state));
    }
    EXPECT_TRUE(state.guards_intact());
  }
}

TEST(CInputs, ALogAndDtBiasAreNotReadWhenTheGateIsActivated) {
  OpCase c = small_case();
  c.use_gate_in_kernel = false;
  const CaseInputs inputs = make_inputs(c);
  RunResult result = run_c(inputs, mandatory_outputs());
  CArguments arguments = make_c_arguments(inputs.tensors, result.views, inputs.attributes);
  // Neither shape nor data of it would do.
  arguments.tensors["A_log"] = make_c_tensor(TensorView::contiguous(nullptr, Dtype::kFloat32, {1, 2, 3}));
  EXPECT_EQ(call(arguments), ACL_SUCCESS) << take_error();
}

// Executors.

class CExecutors : public ::testing::Test {
 protected:
  CExecutors() : inputs_(make_inputs(small_case())), result_(run_c(inputs_, all_outputs())) {
    expected_ = result_.bytes(kAttnOut);
    (void)aclGetRecentErrMsg();
  }

  CArguments arguments() { return make_c_arguments(inputs_.tensors, result_.views, inputs_.attributes); }

  void make() {
    const CArguments call_arguments = arguments();
    ASSERT_EQ(plan(call_arguments, &workspace_size_, &executor_), ACL_SUCCESS) << take_error();
    workspace_ = std::vector<std::byte>(workspace_size_);
    std::memset(result_.views.attn_out.data, 0xff, expected_.size());
  }

  aclnnStatus execute() { return aclnnChunkKdaFwd(workspace_.data(), workspace_size_, executor_, nullptr); }

  bool is_computed() { return result_.bytes(kAttnOut) == expected_; }

  void expect_refused(aclnnStatus status, int code, const std::string& message) {
    EXPECT_EQ(status, code);
    EXPECT_EQ(take_error(), message);
  }

  CaseInputs inputs_;
  RunResult result_;
  std::vector<std::byte> expected_;
  std::vector<std::byte> workspace_;
  std::uint64_t workspace_size_ = 0;
  aclOpExecutor* executor_ = nullptr;
};

const std::string kUsedUp = "executor: expected a live executor, got one that is used up, destroyed or unknown";

TEST_F(CExecutors, OutliveTheHandlesOfTheirTensors) {
  make();  // which destroys them
  EXPECT_EQ(execute(), ACL_SUCCESS) << take_error();
  EXPECT_TRUE(is_computed());
}

TEST_F(CExecutors, ServeOneCall) {
  make();
  EXPECT_EQ(execute(), ACL_SUCCESS);
  std::memset(result_.views.attn_out.data, 0xff, expected_.size());
  expect_refused(execute(), kInvalid, "chunk_kda_fwd: " + kUsedUp);
  EXPECT_FALSE(is_computed());
  expect_refused(aclDestroyAclOpExecutor(executor_), kInvalid, "aclDestroyAclOpExecutor: " + kUsedUp);
  expect_refused(aclSetAclOpExecutorRepeatable(executor_), kInvalid, "aclSetAclOpExecutorRepeatable: " + kUsedUp);
}

TEST_F(CExecutors, ServeAnyNumberOfCallsWhenRepeatable) {
  make();
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(executor_), ACL_SUCCESS);
  for (int i = 0; i < 3; ++i) {
    std::memset(result_.views.attn_out.data, 0xff, expected_.size());
    EXPECT_EQ(execute(), ACL_SUCCESS);
    EXPECT_TRUE(is_computed());
  }
  EXPECT_EQ(aclDestroyAclOpExecutor(executor_), ACL_SUCCESS);
  expect_refused(execute(), kInvalid, "chunk_kda_fwd: " + kUsedUp);
  expect_refused(aclDestroyAclOpExecutor(executor_), kInvalid, "aclDestroyAclOpExecutor: " + kUsedUp);
}

TEST_F(CExecutors, MayBeDestroyedUnused) {
  make();
  EXPECT_EQ(aclDestroyAclOpExecutor(executor_), ACL_SUCCESS);
  expect_refused(execute(), kInvalid, "chunk_kda_fwd: " + kUsedUp);
}

TEST_F(CExecutors, AreNeverMistakenForLaterOnes) {
  make();
  aclOpExecutor* const stale = executor_;
  ASSERT_EQ(aclDestroyAclOpExecutor(stale), ACL_SUCCESS);
  make();
  EXPECT_NE(executor_, stale);
  EXPECT_EQ(aclnnChunkKdaFwd(workspace_.data(), workspace_size_, stale, nullptr), kInvalid);
  EXPECT_EQ(execute(), ACL_SUCCESS);
}

TEST_F(CExecutors, MustNotBeNull) {
  const std::string message = "executor: expected a live executor, got a null pointer";
  expect_refused(aclnnChunkKdaFwd(nullptr, 0, nullptr, nullptr), kExecutorNull, "chunk_kda_fwd: " + message);
  expect_refused(aclDestroyAclOpExecutor(nullptr), kExecutorNull, "aclDestroyAclOpExecutor: " + message);
  expect_refused(aclSetAclOpExecutorRepeatable(nullptr), kExecutorNull, "aclSetAclOpExecutorRepeatable: " + message);
}

TEST_F(CExecutors, MustBeOurs) {
  int object = 0;
  for (void* made_up : {static_cast<void*>(&object), reinterpret_cast<void*>(8)}) {
    executor_ = static_cast<aclOpExecutor*>(made_up);
    expect_refused(execute(), kInvalid, "chunk_kda_fwd: " + kUsedUp);
    expect_refused(aclDestroyAclOpExecutor(executor_), kInvalid, "aclDestroyAclOpExecutor: " + kUsedUp);
  }
  const CTensor tensor = make_c_tensor(inputs_.tensors.q);
  executor_ = reinterpret_cast<aclOpExecutor*>(tensor.get());
  expect_refused(execute(), kInvalid, "chunk_kda_fwd: " + kUsedUp);
}

TEST_F(CExecutors, MustBeOfTheOperator) {
  make();
  expect_refused(aclnnKdaGate(workspace_.data(), workspace_size_, executor_, nullptr), kInvalid,
                 "kda_gate: executor: expected an executor of kda_gate, got one of chunk_kda_fwd");
  EXPECT_EQ(execute(), ACL_SUCCESS);
}

TEST_F(CExecutors, NeedTheirWorkspace) {
  make();
  ASSERT_GT(workspace_size_, 0U);
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(executor_), ACL_SUCCESS);
  const std::string needed = std::to_string(workspace_size_) + " bytes";
  expect_refused(aclnnChunkKdaFwd(nullptr, workspace_size_, executor_, nullptr), kRuntime,
                 "chunk_kda_fwd: workspace: expected " + needed + ", got a null pointer");
  expect_refused(
      aclnnChunkKdaFwd(workspace_.data(), workspace_size_ - 1, executor_, nullptr), kRuntime,
      "chunk_kda_fwd: workspace: expected " + needed + ", got " + std::to_string(workspace_size_ - 1) + " bytes");
  EXPECT_FALSE(is_computed());
  EXPECT_EQ(execute(), ACL_SUCCESS);
  EXPECT_EQ(aclDestroyAclOpExecutor(executor_), ACL_SUCCESS);
}

TEST_F(CExecutors, AreFreedByAFailingCallToo) {
  make();
  EXPECT_EQ(aclnnChunkKdaFwd(nullptr, 0, executor_, nullptr), kRuntime);
  EXPECT_EQ(execute(), kInvalid);
}

TEST_F(CExecutors, TakeLiveStreamsAndNull) {
  aclrtStream stream = nullptr;
  ASSERT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
  make();
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(executor_), ACL_SUCCESS);
  EXPECT_EQ(aclnnChunkKdaFwd(workspace_.data(), workspace_size_, executor_, stream), ACL_SUCCESS);
  EXPECT_TRUE(is_computed());
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
  expect_refused(aclnnChunkKdaFwd(workspace_.data(), workspace_size_, executor_, stream), kInvalid,
                 "chunk_kda_fwd: stream: expected a live aclrtStream, got one that is destroyed or unknown");
  EXPECT_EQ(aclDestroyAclOpExecutor(executor_), ACL_SUCCESS);
}

// Threads.

TEST_F(CExecutors, ServeOneOfTwoThreads) {
  for (int round = 0; round < 20; ++round) {
    make();
    std::atomic<int> succeeded = 0;
    std::atomic<int> refused = 0;
    const auto call_once = [&] {
      std::vector<std::byte> workspace(workspace_size_);
      const aclnnStatus status = aclnnChunkKdaFwd(workspace.data(), workspace_size_, executor_, nullptr);
      ++(status == ACL_SUCCESS ? succeeded : refused);
    };
    std::thread other(call_once);
    call_once();
    other.join();
    EXPECT_EQ(succeeded, 1);
    EXPECT_EQ(refused, 1);
    EXPECT_TRUE(is_computed());
  }
}

TEST(CThreads, WorkSideBySide) {
  const std::array cases = {small_case(), small_packed_case()};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const CaseInputs inputs = make_inputs(cases[t % 2]);
      const RunResult expected = run(inputs, all_outputs());
      for (int round = 0; round < 5; ++round) expect_same_bits(run_c(inputs, all_outputs()), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CThreads, HaveTheirOwnMessages) {
  ASSERT_EQ(aclDestroyTensor(nullptr), kNullPointer);
  std::thread([] { EXPECT_EQ(aclGetRecentErrMsg(), nullptr); }).join();
  EXPECT_EQ(take_error(), "aclDestroyTensor: tensor: expected a live aclTensor, got a null pointer");
}

// Messages.

TEST(CMessages, AreReturnedOnce) {
  (void)aclGetRecentErrMsg();
  EXPECT_EQ(aclGetRecentErrMsg(), nullptr);
  ASSERT_EQ(aclDestroyTensor(nullptr), kNullPointer);
  ASSERT_EQ(aclDestroyIntArray(nullptr), kNullPointer);
  const char* const message = aclGetRecentErrMsg();
  ASSERT_NE(message, nullptr);
  ASSERT_EQ(aclDestroyTensor(nullptr), kNullPointer);  // leaves the returned text alone
  EXPECT_STREQ(message, "aclDestroyIntArray: array: expected a live aclIntArray, got a null pointer");
  EXPECT_NE(aclGetRecentErrMsg(), nullptr);
  EXPECT_EQ(aclGetRecentErrMsg(), nullptr);
}

// Tensors and arrays.

TEST(CTensors, AreDestroyedOnce) {
  const std::int64_t dims[] = {1};
  aclTensor* const tensor = aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, dims, 1, nullptr);
  ASSERT_NE(tensor, nullptr);
  EXPECT_EQ(aclDestroyTensor(tensor), ACL_SUCCESS);
  EXPECT_EQ(aclDestroyTensor(tensor), kInvalid);
  EXPECT_EQ(take_error(), "aclDestroyTensor: tensor: expected a live aclTensor, got one that is destroyed or unknown");
  EXPECT_EQ(aclDestroyTensor(reinterpret_cast<const aclTensor*>(dims)), kInvalid);
}

TEST(CTensors, NeedExtents) {
  (void)aclGetRecentErrMsg();
  EXPECT_EQ(aclCreateTensor(nullptr, 2, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr), nullptr);
  EXPECT_EQ(take_error(), "aclCreateTensor: viewDims: expected 2 extents, got a null pointer");
  aclTensor* const scalar = aclCreateTensor(nullptr, 0, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, nullptr, 0, nullptr);
  EXPECT_NE(scalar, nullptr);
  EXPECT_EQ(aclDestroyTensor(scalar), ACL_SUCCESS);
}

TEST(CIntArrays, AreDestroyedOnce) {
  const std::int64_t values[] = {0, 4};
  aclIntArray* const array = aclCreateIntArray(values, 2);
  ASSERT_NE(array, nullptr);
  EXPECT_EQ(aclDestroyIntArray(array), ACL_SUCCESS);
  EXPECT_EQ(aclDestroyIntArray(array), kInvalid);
  EXPECT_EQ(take_error(),
            "aclDestroyIntArray: array: expected a live aclIntArray, got one that is destroyed or unknown");
}

TEST(CIntArrays, NeedValues) {
  (void)aclGetRecentErrMsg();
  EXPECT_EQ(aclCreateIntArray(nullptr, 3), nullptr);
  EXPECT_EQ(take_error(), "aclCreateIntArray: value: expected 3 values, got a null pointer");
  const std::int64_t value = 0;
  EXPECT_EQ(aclCreateIntArray(&value, std::numeric_limits<std::uint64_t>::max()), nullptr);
  EXPECT_EQ(take_error(),
            "aclCreateIntArray: size: expected a number of values that memory can hold, got 18446744073709551615");
}

TEST(CIntArrays, AreCopied) {
  const CaseInputs inputs = make_inputs(small_packed_case());
  const RunResult expected = run_c(inputs, mandatory_outputs());
  RunResult actual = run_c(inputs, mandatory_outputs());
  std::memset(actual.views.attn_out.data, 0xff, actual.bytes(kAttnOut).size());
  CArguments arguments = make_c_arguments(inputs.tensors, actual.views, inputs.attributes);
  std::vector<std::int64_t> values(inputs.cu_seqlens);
  arguments.cu_seqlens = make_c_int_array(values);
  std::fill(values.begin(), values.end(), -1);
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(plan(arguments, &workspace_size, &executor), ACL_SUCCESS) << take_error();
  arguments.cu_seqlens = nullptr;
  arguments.chunk_indices = nullptr;
  std::vector<std::byte> workspace(workspace_size);
  EXPECT_EQ(aclnnChunkKdaFwd(workspace.data(), workspace_size, executor, nullptr), ACL_SUCCESS);
  expect_same_bits(actual, expected);
}

// The acl subset.

TEST(CRuntime, InitAndFinalizePairUp) {
  EXPECT_EQ(aclFinalize(), ACL_ERROR_UNINITIALIZE);
  EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclInit(nullptr), ACL_ERROR_REPEAT_INITIALIZE);
  EXPECT_EQ(aclFinalize(), ACL_SUCCESS);
  EXPECT_EQ(aclInit(nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclFinalize(), ACL_SUCCESS);
  EXPECT_EQ(aclnnInit(nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclnnFinalize(), ACL_SUCCESS);
}

TEST(CRuntime, TheCpuIsDevice0) {
  std::uint32_t count = 0;
  std::int32_t device = -1;
  EXPECT_EQ(aclrtGetDeviceCount(&count), ACL_SUCCESS);
  EXPECT_GE(count, 1U);
  EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
  EXPECT_EQ(aclrtGetDevice(&device), ACL_SUCCESS);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(aclrtSynchronizeDevice(), ACL_SUCCESS);
  EXPECT_EQ(aclrtResetDevice(0), ACL_SUCCESS);
  const std::string expected = count == 1 ? "0" : "0.." + std::to_string(count - 1);
  EXPECT_EQ(aclrtSetDevice(static_cast<std::int32_t>(count)), ACL_ERROR_RT_INVALID_DEVICEID);
  EXPECT_EQ(take_error(), "aclrtSetDevice: deviceId: expected " + expected + ", got " + std::to_string(count));
  aclrtStream stream = nullptr;
  EXPECT_EQ(kdaStreamFromCuda(&stream, 0, nullptr), ACL_ERROR_RT_INVALID_DEVICEID);
  EXPECT_EQ(take_error(), "kdaStreamFromCuda: deviceId: expected a GPU, 1 or above, got 0, the CPU");
  EXPECT_EQ(kdaStreamFromCuda(&stream, static_cast<std::int32_t>(count), nullptr), ACL_ERROR_RT_INVALID_DEVICEID);
  EXPECT_EQ(kdaStreamFromCuda(nullptr, 0, nullptr), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtResetDevice(-1), ACL_ERROR_RT_INVALID_DEVICEID);
  EXPECT_EQ(aclrtGetDevice(nullptr), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtGetDeviceCount(nullptr), ACL_ERROR_INVALID_PARAM);
}

TEST(CRuntime, ContextsAndStreamsAreDestroyedOnce) {
  aclrtContext context = nullptr;
  ASSERT_EQ(aclrtCreateContext(&context, 0), ACL_SUCCESS);
  EXPECT_EQ(aclrtSetCurrentContext(context), ACL_SUCCESS);
  EXPECT_EQ(aclrtDestroyContext(context), ACL_SUCCESS);
  EXPECT_EQ(aclrtDestroyContext(context), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtSetCurrentContext(context), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtCreateContext(&context, 99), ACL_ERROR_RT_INVALID_DEVICEID);
  aclrtStream stream = nullptr;
  ASSERT_EQ(aclrtCreateStream(&stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtDestroyStream(stream), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtDestroyStream(nullptr), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtCreateStream(nullptr), ACL_ERROR_INVALID_PARAM);
}

TEST(CRuntime, MemoryIsAlignedAndFreedOnce) {
  void* memory = nullptr;
  ASSERT_EQ(aclrtMalloc(&memory, 1, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 512, 0U);
  EXPECT_EQ(aclrtFreeHost(memory), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS);
  EXPECT_EQ(aclrtFree(memory), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(take_error(), "aclrtFree: devPtr: expected memory from aclrtMalloc, got another pointer");
  EXPECT_EQ(aclrtFree(nullptr), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMalloc(nullptr, 1, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMalloc(&memory, 0, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMalloc(&memory, std::numeric_limits<std::size_t>::max(), ACL_MEM_MALLOC_NORMAL_ONLY),
            ACL_ERROR_BAD_ALLOC);
  ASSERT_EQ(aclrtMallocHost(&memory, 100), ACL_SUCCESS);
  EXPECT_EQ(aclrtFreeHost(memory), ACL_SUCCESS);
}

TEST(CRuntime, CopiesAndFillsStayWithinTheDestination) {
  const std::array<int, 4> from = {1, 2, 3, 4};
  std::array<int, 4> to = {};
  EXPECT_EQ(aclrtMemcpy(to.data(), sizeof(to), from.data(), sizeof(from), ACL_MEMCPY_HOST_TO_DEVICE), ACL_SUCCESS);
  EXPECT_EQ(to, from);
  EXPECT_EQ(aclrtMemcpy(to.data(), 8, from.data(), 16, ACL_MEMCPY_DEVICE_TO_HOST), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(take_error(), "aclrtMemcpy: destMax: expected 16 bytes or more, got 8");
  EXPECT_EQ(aclrtMemcpy(nullptr, 16, from.data(), 16, ACL_MEMCPY_DEVICE_TO_HOST), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMemcpy(to.data(), 16, nullptr, 16, ACL_MEMCPY_DEVICE_TO_HOST), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMemcpy(to.data(), 16, from.data(), 16, static_cast<aclrtMemcpyKind>(7)), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMemcpyAsync(to.data(), 16, from.data(), 16, ACL_MEMCPY_DEVICE_TO_DEVICE, nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclrtMemcpyAsync(to.data(), 16, from.data(), 16, ACL_MEMCPY_DEVICE_TO_DEVICE, &to),
            ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMemset(to.data(), 16, 0, 4), ACL_SUCCESS);
  EXPECT_EQ(to, (std::array<int, 4>{0, 2, 3, 4}));
  EXPECT_EQ(aclrtMemset(to.data(), 3, 0, 4), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMemset(nullptr, 16, 0, 4), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtMemsetAsync(to.data(), 16, 0, 16, nullptr), ACL_SUCCESS);
  EXPECT_EQ(to, (std::array<int, 4>{}));
}

TEST(CNumbers, Float16ToFloatIsExact) {
  for (unsigned bits = 0; bits <= 0xffff; ++bits) {
    const float expected = from_float16(static_cast<std::uint16_t>(bits));
    const float actual = aclFloat16ToFloat(static_cast<aclFloat16>(bits));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(actual)) << bits;
    } else {
      EXPECT_EQ(actual, expected) << bits;
      EXPECT_EQ(std::signbit(actual), std::signbit(expected)) << bits;
    }
  }
}

TEST(CNumbers, FloatToFloat16RoundsToNearestEven) {
  for (std::uint64_t bits = 0; bits <= 0xffffffff; bits += 1021) {
    const auto word = static_cast<std::uint32_t>(bits);
    float value = 0;
    std::memcpy(&value, &word, sizeof(value));
    if (std::isnan(value)) continue;
    ASSERT_EQ(aclFloatToFloat16(value), to_float16(value)) << value;
  }
  for (const float value : {0.0F, -0.0F, 65519.996F, 65520.0F, 0x1p-14F, 0x1.ffcp-15F, 0x1.ffep-15F, 0x1p-24F, 0x1p-25F,
                            0x1.8p-25F, 0x1.000002p-25F, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(aclFloatToFloat16(value), to_float16(value)) << value;
    EXPECT_EQ(aclFloatToFloat16(-value), to_float16(-value)) << value;
  }
  const float nan = aclFloat16ToFloat(aclFloatToFloat16(std::numeric_limits<float>::quiet_NaN()));
  EXPECT_TRUE(std::isnan(nan));
}

TEST(CNumbers, DataTypesHaveTheirSizes) {
  EXPECT_EQ(aclDataTypeSize(ACL_FLOAT), 4U);
  EXPECT_EQ(aclDataTypeSize(ACL_FLOAT16), 2U);
  EXPECT_EQ(aclDataTypeSize(ACL_BF16), 2U);
  EXPECT_EQ(aclDataTypeSize(ACL_INT64), 8U);
  EXPECT_EQ(aclDataTypeSize(ACL_STRING), 0U);
  EXPECT_EQ(aclDataTypeSize(ACL_DT_UNDEFINED), 0U);
}

}  // namespace
}  // namespace kda::testing
