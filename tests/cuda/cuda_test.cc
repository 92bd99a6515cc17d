// What only a GPU can get wrong: graphs, streams, many blocks of threads.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "cuda/device_call.h"
#include "support/case_inputs.h"
#include "support/compare.h"
#include "support/expect.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

OpCase packed_case() {
  OpCase c;
  c.name = "graph";
  c.T = 200;
  c.H = 2;
  c.HV = 4;
  c.cu_seqlens = std::vector<std::int64_t>{0, 70, 70, 200};
  c.initial_state = true;
  return c;
}

TEST(CudaGraph, CapturesAndReplaysWithNewData) {
  const OpCase c = packed_case();
  OpCase other = c;
  other.seed = 99;
  const CaseInputs inputs = make_inputs(c);
  const CaseInputs new_inputs = make_inputs(other);
  RunResult result = run(inputs, all_outputs());
  const RunResult expected = run(new_inputs, all_outputs());

  const DeviceCall call(inputs.tensors, result.views);
  const DeviceCall new_call(new_inputs.tensors, result.views);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  {
    // The plan may go before the graph does.
    const ChunkKdaFwdPlan plan(call.inputs, call.outputs, inputs.attributes);
    std::byte* workspace = DeviceArena::instance().take(plan.workspace_bytes());
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    plan.execute(call.inputs, call.outputs, {workspace, plan.workspace_bytes()}, stream);
    check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  }
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  const auto overwrite = [](const TensorView& to, const TensorView& from) {
    check_cuda(cudaMemcpy(to.data, from.data, static_cast<std::size_t>(to.numel()) * size_of(to.dtype),
                          cudaMemcpyDeviceToDevice),
               "new data");
  };
  overwrite(call.inputs.q, new_call.inputs.q);
  overwrite(call.inputs.k, new_call.inputs.k);
  overwrite(call.inputs.v, new_call.inputs.v);
  overwrite(call.inputs.g, new_call.inputs.g);
  overwrite(call.inputs.beta, new_call.inputs.beta);
  overwrite(call.inputs.initial_state, new_call.inputs.initial_state);
  // The copies are on another stream.
  check_cuda(cudaDeviceSynchronize(), "new data");
  for (int replay = 0; replay < 2; ++replay) check_cuda(cudaGraphLaunch(executable, stream), "launch");
  check_cuda(cudaStreamSynchronize(stream), "replay");
  call.fetch(result.views);
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    EXPECT_TRUE(result.bytes(output) == expected.bytes(output)) << kChunkKdaFwdOutputNames[output];
  }
  check_cuda(cudaGraphExecDestroy(executable), "destroy");
  check_cuda(cudaGraphDestroy(graph), "destroy");
  check_cuda(cudaStreamDestroy(stream), "destroy");
  EXPECT_TRUE(DeviceArena::instance().reset());
}

// More sequences times heads than a grid's second axis holds, each told apart by its initial state.
TEST(CudaGrid, MoreStatesThan65535) {
  OpCase c;
  c.name = "wide";
  c.B = 600;
  c.T = 1;
  c.H = c.HV = 128;
  c.K = c.V = 16;
  c.initial_state = true;
  const CaseInputs inputs = make_inputs(c);
  const RunResult result = run(inputs, OutputSet().set(kAttnOut).set(kFinalState));
  const auto expected = reference::chunk_kda_fwd(inputs.tensors, inputs.attributes, /*intermediates=*/false);
  EXPECT_LE(relative_error(result.values(kFinalState), expected.final_state), 2e-3);
  EXPECT_LE(relative_error(result.values(kAttnOut), expected.attn_out), 4e-3);
}

// More blocks of tokens than warps prepare at the same time, and more states than there are multiprocessors.
TEST(CudaGrid, MoreBlocksThanWarps) {
  OpCase c;
  c.name = "states";
  c.dtype = Dtype::kBFloat16;
  c.B = 3;
  c.T = 150;
  c.H = c.HV = 64;
  c.initial_state = true;
  expect_case_within_bounds(c, all_outputs());
  c.B = 1;
  c.cu_seqlens = std::vector<std::int64_t>{0, 70, 70, 150};
  expect_case_within_bounds(c, OutputSet().set(kAttnOut).set(kFinalState));
}

TEST(CudaPlan, RefusesADeviceThatIsNotThere) {
  const CaseInputs inputs = make_inputs(packed_case());
  const RunResult result = run(inputs, OutputSet().set(kAttnOut));
  DeviceCall call(inputs.tensors, result.views);
  for (TensorView* view : {&call.inputs.q, &call.inputs.k, &call.inputs.v, &call.inputs.g, &call.inputs.beta,
                           &call.inputs.initial_state, &call.outputs.attn_out}) {
    view->device.index = 77;
  }
  try {
    const ChunkKdaFwdPlan plan(call.inputs, call.outputs, inputs.attributes);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable) << error.what();
  }
  EXPECT_TRUE(DeviceArena::instance().reset());
}

TEST(CudaConvenience, PlansAllocatesAndExecutes) {
  const CaseInputs inputs = make_inputs(packed_case());
  RunResult result = run(inputs, OutputSet().set(kAttnOut));
  const auto expected = result.bytes(kAttnOut);
  std::memset(result.views.attn_out.data, 0xff, expected.size());
  const DeviceCall call(inputs.tensors, result.views);
  chunk_kda_fwd(call.inputs, call.outputs, inputs.attributes);
  call.fetch(result.views);
  EXPECT_TRUE(result.bytes(kAttnOut) == expected);
  EXPECT_TRUE(DeviceArena::instance().reset());
}

}  // namespace
}  // namespace kda::testing
