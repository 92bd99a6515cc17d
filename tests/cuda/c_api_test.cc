// The C API with tensors on a GPU: the numbers and errors of the C++ one, on the caller's stream.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "aclnnop/aclnn_kda_gate.h"
#include "aclnnop/aclnn_kda_gate_cumsum.h"
#include "cuda/device_call.h"
#include "kda/acl_cuda.h"
#include "support/c_door.h"
#include "support/case_inputs.h"
#include "support/gate_cases.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

constexpr std::int32_t kGpu = 1;

// The GPU is the thread's device, with a stream of its own.
class CudaCApi : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(aclrtSetDevice(kGpu), ACL_SUCCESS) << take_error();
    ASSERT_EQ(aclrtCreateStream(&stream_), ACL_SUCCESS) << take_error();
  }
  void TearDown() override {
    EXPECT_EQ(aclrtDestroyStream(stream_), ACL_SUCCESS);
    EXPECT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
    EXPECT_TRUE(DeviceArena::instance().reset());
  }

  // The second phase, with workspace from aclrtMalloc.
  template <typename Function>
  void execute(Function* function, std::uint64_t workspace_size, aclOpExecutor* executor) const {
    void* workspace = nullptr;
    if (workspace_size > 0) {
      ASSERT_EQ(aclrtMalloc(&workspace, workspace_size, ACL_MEM_MALLOC_NORMAL_ONLY), ACL_SUCCESS) << take_error();
    }
    EXPECT_EQ(function(workspace, workspace_size, executor, stream_), ACL_SUCCESS) << take_error();
    EXPECT_EQ(aclrtSynchronizeStream(stream_), ACL_SUCCESS) << take_error();
    if (workspace != nullptr) {
      EXPECT_EQ(aclrtFree(workspace), ACL_SUCCESS) << take_error();
    }
  }

  // Both phases of a call, for what `output` holds, the memory of `host`: it is cleared, and made anew on the GPU.
  template <typename Plan, typename Function, typename Output>
  void expect_same_again(const Plan& plan_for, Function* function, const TensorView& host, Output& output) const {
    const Output expected = output;
    std::memset(output.data(), 0xff, output.size() * sizeof(output[0]));
    const TensorView device = to_device(host);
    const CTensor c_output = make_c_tensor(device);
    std::uint64_t workspace_size = 0;
    aclOpExecutor* executor = nullptr;
    ASSERT_EQ(plan_for(c_output.get(), &workspace_size, &executor), ACL_SUCCESS) << take_error();
    execute(function, workspace_size, executor);
    to_host(device, host);
    EXPECT_TRUE(output == expected);
  }

  aclrtStream stream_ = nullptr;
};

CaseInputs small_inputs() {
  OpCase c;
  c.name = "c";
  c.dtype = Dtype::kBFloat16;
  c.T = 150;
  c.H = c.HV = 2;
  c.initial_state = true;
  return make_inputs(c);
}

TEST_F(CudaCApi, ChunkKdaFwdGivesTheBitsOfTheCppDoor) {
  const CaseInputs inputs = small_inputs();
  RunResult result = run(inputs, all_outputs());
  std::vector<std::vector<std::byte>> expected;
  for (int output = kAttnOut; output <= kH; ++output) {
    expected.push_back(result.bytes(output));
    std::memset((result.views.*kOutputViews[static_cast<std::size_t>(output)]).data, 0xff, expected.back().size());
  }
  const DeviceCall call(inputs.tensors, result.views);
  const CArguments arguments = make_c_arguments(call.inputs, call.outputs, inputs.attributes);
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(plan(arguments, &workspace_size, &executor), ACL_SUCCESS) << take_error();
  execute(aclnnChunkKdaFwd, workspace_size, executor);
  call.fetch(result.views);
  for (int output = kAttnOut; output <= kH; ++output) {
    EXPECT_TRUE(result.bytes(output) == expected[static_cast<std::size_t>(output)]) << kChunkKdaFwdOutputNames[output];
  }
}

TEST_F(CudaCApi, GatesGiveTheBitsOfTheCppDoor) {
  GateCase c;
  c.shape = {37, 3, 40};
  c.dt_bias = Bias::kFlat;
  c.lower_bound = -5.0;
  GateCall call(c);
  execute_gate(call.inputs, call.out, call.attributes, {});
  const CTensor g = make_c_tensor(to_device(call.inputs.g));
  const CTensor A_log = make_c_tensor(to_device(call.inputs.A_log));
  const CTensor dt_bias = make_c_tensor(to_device(call.inputs.dt_bias));
  const auto plan_for = [&](const aclTensor* out, std::uint64_t* size, aclOpExecutor** executor) {
    return aclnnKdaGateGetWorkspaceSize(g.get(), A_log.get(), dt_bias.get(), true, -5.0, out, size, executor);
  };
  expect_same_again(plan_for, aclnnKdaGate, call.out, call.output);
}

TEST_F(CudaCApi, GateSumsGiveTheBitsOfTheCppDoor) {
  GateCumsumCase c;
  c.shape = {1, 2, 100, 24};
  c.use_gate_in_kernel = true;
  c.cu_seqlens = std::vector<std::int64_t>{0, 33, 33, 100};
  GateCumsumCall call(c);
  execute_gate_cumsum(call.inputs, call.gk, call.attributes, {});
  const CTensor g = make_c_tensor(to_device(call.inputs.g));
  const CTensor A_log = make_c_tensor(to_device(call.inputs.A_log));
  const CIntArray cu_seqlens = make_c_int_array(*c.cu_seqlens);
  const auto plan_for = [&](const aclTensor* gk, std::uint64_t* size, aclOpExecutor** executor) {
    return aclnnKdaGateCumsumGetWorkspaceSize(g.get(), A_log.get(), nullptr, cu_seqlens.get(), c.chunk_size, true,
                                              false, -5.0, gk, size, executor);
  };
  expect_same_again(plan_for, aclnnKdaGateCumsum, call.gk, call.output);
}

TEST_F(CudaCApi, AStreamOfCudaTakesTheLaunches) {
  cudaStream_t queue = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&queue, cudaStreamNonBlocking), "stream");
  aclrtStream stream = nullptr;
  ASSERT_EQ(kdaStreamFromCuda(&stream, kGpu, queue), ACL_SUCCESS) << take_error();
  GateCase c;
  c.shape = {5, 2, 16};
  GateCall call(c);
  execute_gate(call.inputs, call.out, call.attributes, {});
  const std::vector<std::byte> expected = call.output;
  const CTensor g = make_c_tensor(to_device(call.inputs.g));
  const CTensor A_log = make_c_tensor(to_device(call.inputs.A_log));
  const TensorView out = to_device(call.out);
  const CTensor c_out = make_c_tensor(out);
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(
      aclnnKdaGateGetWorkspaceSize(g.get(), A_log.get(), nullptr, false, 0, c_out.get(), &workspace_size, &executor),
      ACL_SUCCESS)
      << take_error();
  // A launch on any other stream would not be captured.
  check_cuda(cudaMemset(out.data, 0xff, expected.size()), "clear");
  // Which that stream does not wait for.
  check_cuda(cudaDeviceSynchronize(), "clear");
  check_cuda(cudaStreamBeginCapture(queue, cudaStreamCaptureModeGlobal), "capture");
  EXPECT_EQ(aclnnKdaGate(nullptr, 0, executor, stream), ACL_SUCCESS) << take_error();
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(queue, &graph), "capture");
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  check_cuda(cudaGraphLaunch(executable, queue), "launch");
  EXPECT_EQ(aclrtSynchronizeStream(stream), ACL_SUCCESS) << take_error();
  to_host(out, call.out);
  EXPECT_TRUE(call.output == expected);
  EXPECT_EQ(aclrtDestroyStream(stream), ACL_SUCCESS);
  check_cuda(cudaStreamSynchronize(queue), "the stream lives on");
  check_cuda(cudaGraphExecDestroy(executable), "destroy");
  check_cuda(cudaGraphDestroy(graph), "destroy");
  check_cuda(cudaStreamDestroy(queue), "destroy");
}

TEST_F(CudaCApi, TensorsAndStreamsAreOfOneDevice) {
  GateCase c;
  c.shape = {5, 2, 16};
  GateCall call(c);
  const CTensor g = make_c_tensor(to_device(call.inputs.g));
  const CTensor A_log = make_c_tensor(to_device(call.inputs.A_log));
  const CTensor out = make_c_tensor(to_device(call.out));
  ASSERT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
  aclrtStream host_stream = nullptr;
  ASSERT_EQ(aclrtCreateStream(&host_stream), ACL_SUCCESS);
  const CTensor host_A_log = make_c_tensor(call.inputs.A_log);
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  EXPECT_EQ(
      aclnnKdaGateGetWorkspaceSize(g.get(), host_A_log.get(), nullptr, false, 0, out.get(), &workspace_size, &executor),
      ACLNN_ERR_PARAM_INVALID);
  EXPECT_EQ(take_error(), "kda_gate: A_log: expected device cuda:0, got cpu");
  ASSERT_EQ(
      aclnnKdaGateGetWorkspaceSize(g.get(), A_log.get(), nullptr, false, 0, out.get(), &workspace_size, &executor),
      ACL_SUCCESS)
      << take_error();
  ASSERT_EQ(aclSetAclOpExecutorRepeatable(executor), ACL_SUCCESS);
  EXPECT_EQ(aclnnKdaGate(nullptr, 0, executor, host_stream), ACLNN_ERR_PARAM_INVALID);
  EXPECT_EQ(take_error(), "kda_gate: stream: expected a stream of device cuda:0, got one of cpu");
  EXPECT_EQ(aclnnKdaGate(nullptr, 0, executor, nullptr), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclnnKdaGate(nullptr, 0, executor, stream_), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclDestroyAclOpExecutor(executor), ACL_SUCCESS);

  const CTensor host_g = make_c_tensor(call.inputs.g);
  const CTensor host_out = make_c_tensor(call.out);
  ASSERT_EQ(aclnnKdaGateGetWorkspaceSize(host_g.get(), host_A_log.get(), nullptr, false, 0, host_out.get(),
                                         &workspace_size, &executor),
            ACL_SUCCESS)
      << take_error();
  EXPECT_EQ(aclnnKdaGate(nullptr, 0, executor, stream_), ACLNN_ERR_PARAM_INVALID);
  EXPECT_EQ(take_error(), "kda_gate: stream: expected a stream of device cpu, got one of cuda:0");
  EXPECT_EQ(aclrtDestroyStream(host_stream), ACL_SUCCESS);
  check_cuda(cudaDeviceSynchronize(), "execution");
}

TEST_F(CudaCApi, MemoryIsFilledCopiedAndFreed) {
  constexpr std::size_t kBytes = 1000;
  std::vector<unsigned char> host(kBytes), back(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) host[i] = static_cast<unsigned char>(i % 251);
  void* memory = nullptr;
  void* other = nullptr;
  ASSERT_EQ(aclrtMalloc(&memory, kBytes, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS) << take_error();
  ASSERT_EQ(aclrtMalloc(&other, kBytes, ACL_MEM_MALLOC_HUGE_FIRST), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclrtMemcpy(memory, kBytes, host.data(), kBytes, ACL_MEMCPY_HOST_TO_DEVICE), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclrtMemcpyAsync(other, kBytes, memory, kBytes, ACL_MEMCPY_DEVICE_TO_DEVICE, stream_), ACL_SUCCESS);
  EXPECT_EQ(aclrtMemsetAsync(other, kBytes, 7, 10, stream_), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclrtMemcpyAsync(back.data(), kBytes, other, kBytes, ACL_MEMCPY_DEVICE_TO_HOST, stream_), ACL_SUCCESS);
  EXPECT_EQ(aclrtSynchronizeStream(stream_), ACL_SUCCESS);
  std::fill_n(host.begin(), 10, static_cast<unsigned char>(7));
  EXPECT_EQ(back, host);
  EXPECT_EQ(aclrtMemset(memory, kBytes, 1, kBytes), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclrtMemcpy(back.data(), kBytes, memory, kBytes, ACL_MEMCPY_DEVICE_TO_HOST), ACL_SUCCESS);
  EXPECT_EQ(back, std::vector<unsigned char>(kBytes, 1));
  EXPECT_EQ(aclrtSynchronizeDevice(), ACL_SUCCESS);
  EXPECT_EQ(aclrtMemcpy(memory, 10, host.data(), kBytes, ACL_MEMCPY_HOST_TO_DEVICE), ACL_ERROR_INVALID_PARAM);
  // Memory is freed wherever the thread is.
  ASSERT_EQ(aclrtSetDevice(0), ACL_SUCCESS);
  EXPECT_EQ(aclrtFreeHost(memory), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtFree(memory), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclrtFree(memory), ACL_ERROR_INVALID_PARAM);
  EXPECT_EQ(aclrtFree(other), ACL_SUCCESS) << take_error();
  ASSERT_EQ(aclrtSetDevice(kGpu), ACL_SUCCESS);
  EXPECT_EQ(aclrtMalloc(&memory, std::size_t{1} << 60, ACL_MEM_MALLOC_HUGE_FIRST), ACL_ERROR_BAD_ALLOC);
}

TEST_F(CudaCApi, DevicesAreCountedAndKeptByThread) {
  int gpus = 0;
  check_cuda(cudaGetDeviceCount(&gpus), "count");
  std::uint32_t count = 0;
  EXPECT_EQ(aclrtGetDeviceCount(&count), ACL_SUCCESS);
  EXPECT_EQ(count, 1 + static_cast<std::uint32_t>(gpus));
  std::int32_t device = 0;
  EXPECT_EQ(aclrtGetDevice(&device), ACL_SUCCESS);
  EXPECT_EQ(device, kGpu);
  EXPECT_EQ(aclrtSetDevice(gpus + 1), ACL_ERROR_RT_INVALID_DEVICEID);
  EXPECT_EQ(take_error(),
            "aclrtSetDevice: deviceId: expected 0.." + std::to_string(gpus) + ", got " + std::to_string(gpus + 1));
  aclrtContext context = nullptr;
  EXPECT_EQ(aclrtCreateContext(&context, 0), ACL_SUCCESS);
  EXPECT_EQ(aclrtGetDevice(&device), ACL_SUCCESS);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(aclrtSetDevice(kGpu), ACL_SUCCESS);
  EXPECT_EQ(aclrtSetCurrentContext(context), ACL_SUCCESS);
  EXPECT_EQ(aclrtGetDevice(&device), ACL_SUCCESS);
  EXPECT_EQ(device, 0);
  EXPECT_EQ(aclrtDestroyContext(context), ACL_SUCCESS);
}

}  // namespace
}  // namespace kda::testing
