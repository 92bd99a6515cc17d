// What only a GPU can get wrong: graphs, streams, many blocks of threads.

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <optional>
#include <string>
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

// Launches of one execution, captured, to be replayed on a stream of its own.
class CapturedCall {
 public:
  CapturedCall(const ChunkKdaFwdPlan& plan, const ChunkKdaFwdInputs& inputs, const ChunkKdaFwdOutputs& outputs) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    std::byte* workspace = DeviceArena::instance().take(plan.workspace_bytes());
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
    plan.execute(inputs, outputs, {workspace, plan.workspace_bytes()}, stream_);
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamEndCapture(stream_, &graph), "capture");
    check_cuda(cudaGraphInstantiate(&executable_, graph, 0), "instantiate");
    check_cuda(cudaGraphDestroy(graph), "destroy");
  }
  ~CapturedCall() {
    cudaGraphExecDestroy(executable_);
    cudaStreamDestroy(stream_);
  }
  CapturedCall(const CapturedCall&) = delete;
  CapturedCall& operator=(const CapturedCall&) = delete;

  void replay() const {
    // Copies are on another stream.
    check_cuda(cudaDeviceSynchronize(), "before a replay");
    check_cuda(cudaGraphLaunch(executable_, stream_), "launch");
    check_cuda(cudaStreamSynchronize(stream_), "replay");
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

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
  std::optional<CapturedCall> captured;
  {
    // The plan may go before the graph does.
    const ChunkKdaFwdPlan plan(call.inputs, call.outputs, inputs.attributes);
    captured.emplace(plan, call.inputs, call.outputs);
  }
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
  for (int replay = 0; replay < 2; ++replay) captured->replay();
  call.fetch(result.views);
  for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
    EXPECT_TRUE(result.bytes(output) == expected.bytes(output)) << kChunkKdaFwdOutputNames[output];
  }
  EXPECT_TRUE(DeviceArena::instance().reset());
}

// A call of 300 tokens in five sequences whose lengths lie on the device.
struct DeviceSequencesCall {
  OpCase c;
  CaseInputs inputs;
  RunResult result;
  ChunkKdaFwdInputs on_device;
  std::vector<std::byte> numbers;

  DeviceSequencesCall(Dtype dtype, std::int64_t K) {
    c.name = "device sequences";
    c.T = 300;
    c.H = 2;
    c.HV = 4;
    c.K = c.V = K;
    c.initial_state = true;
    c.cu_seqlens = std::vector<std::int64_t>{0, 60, 120, 180, 240, 300};
    inputs = make_inputs(c);
    numbers.resize(6 * size_of(dtype));
    on_device.cu_seqlens = TensorView::contiguous(numbers.data(), dtype, {6});
  }

  void set(const std::vector<std::int64_t>& cu_seqlens) {
    for (std::size_t i = 0; i < cu_seqlens.size(); ++i) {
      if (on_device.cu_seqlens.dtype == Dtype::kInt32) {
        reinterpret_cast<std::int32_t*>(numbers.data())[i] = static_cast<std::int32_t>(cu_seqlens[i]);
      } else {
        reinterpret_cast<std::int64_t*>(numbers.data())[i] = cu_seqlens[i];
      }
    }
  }
};

void overwrite_with(const TensorView& to, const std::vector<std::byte>& from) {
  check_cuda(cudaMemcpy(to.data, from.data(), from.size(), cudaMemcpyHostToDevice), "new lengths");
}

TEST(CudaSequences, OnTheDeviceGiveTheBitsOfThoseOnTheHost) {
  const std::vector<std::vector<std::int64_t>> lengths = {
      {0, 60, 120, 180, 240, 300}, {0, 0, 1, 65, 65, 300}, {0, 300, 300, 300, 300, 300}, {0, 17, 33, 161, 299, 300}};
  for (const std::int64_t K : {128, 64}) {
    for (const Dtype dtype : {Dtype::kInt32, Dtype::kInt64}) {
      DeviceSequencesCall call(dtype, K);
      std::vector<RunResult> expected;
      for (const auto& cu_seqlens : lengths) {
        call.inputs.attributes.cu_seqlens = cu_seqlens;
        expected.push_back(run(call.inputs, all_outputs()));
      }
      // Every output but h, whose shape follows the numbers, lies as it does on the host's call.
      OutputSet outputs = all_outputs();
      outputs.reset(kH);
      RunResult result = run(call.inputs, outputs);
      call.set(lengths[0]);
      ChunkKdaFwdInputs inputs = call.inputs.tensors;
      inputs.cu_seqlens = call.on_device.cu_seqlens;
      ChunkKdaFwdAttributes attributes = call.inputs.attributes;
      attributes.cu_seqlens.reset();
      const DeviceCall device(inputs, result.views);
      const ChunkKdaFwdPlan plan(device.inputs, device.outputs, attributes);
      const CapturedCall captured(plan, device.inputs, device.outputs);
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        call.set(lengths[i]);
        overwrite_with(device.inputs.cu_seqlens, call.numbers);
        captured.replay();
        device.fetch(result.views);
        for (int output = 0; output < kH; ++output) {
          EXPECT_TRUE(result.bytes(output) == expected[i].bytes(output)) << kChunkKdaFwdOutputNames[output] << i;
        }
      }
      EXPECT_TRUE(DeviceArena::instance().reset());
    }
  }
}

TEST(CudaSequences, NothingElseIsTouchedWhateverTheNumbersAre) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t K : {128, 64}) {
    DeviceSequencesCall call(Dtype::kInt64, K);
    ChunkKdaFwdInputs inputs = call.inputs.tensors;
    inputs.cu_seqlens = call.on_device.cu_seqlens;
    ChunkKdaFwdAttributes attributes = call.inputs.attributes;
    attributes.cu_seqlens.reset();
    attributes.max_chunks = 6;  // four fewer than there may be
    call.set({0, 60, 120, 180, 240, 300});
    ChunkKdaFwdOutputs views;
    const DeviceCall on_device(inputs, {});
    views = chunk_kda_fwd_outputs(on_device.inputs, attributes);
    for (const auto view : kOutputViews) {
      (views.*view).data =
          DeviceArena::instance().take(static_cast<std::size_t>((views.*view).numel()) * size_of((views.*view).dtype));
    }
    const ChunkKdaFwdPlan plan(on_device.inputs, views, attributes);
    const CapturedCall captured(plan, on_device.inputs, views);
    for (const std::vector<std::int64_t>& numbers :
         std::vector<std::vector<std::int64_t>>{{0, 60, 120, 180, 240, 300},
                                                {-5, -7, 1000, 3, 2, 1},
                                                {kMost, kMost, -kMost - 1, kMost, 0, kMost},
                                                {0, 400, 0, 400, 0, 400},
                                                {250, 100, 299, 301, -1, 300},
                                                {0, 1, 2, 3, 4, 5}}) {
      call.set(numbers);
      overwrite_with(on_device.inputs.cu_seqlens, call.numbers);
      captured.replay();
    }
    EXPECT_TRUE(DeviceArena::instance().reset());
  }
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

// Blocks of threads own 64 columns of a state: any number of them, the last one's partly beyond V. Whatever else is
// asked for, wherever it lies, the bits are the same.
TEST(CudaColumns, OfAnyNumber) {
  const OutputSet outputs = OutputSet().set(kAttnOut).set(kFinalState).set(kVNew).set(kH);
  for (const std::int64_t V : {16, 48, 64, 80, 128, 208, 256}) {
    for (const bool is_packed : {false, true}) {
      OpCase c;
      c.name = "columns";
      c.B = is_packed ? 1 : 2;
      c.T = 150;
      c.H = 1;
      c.HV = 2;
      c.V = V;
      c.chunk_size = is_packed ? 64 : 128;
      c.state_v_first = is_packed;
      c.initial_state = true;
      if (is_packed) c.cu_seqlens = std::vector<std::int64_t>{0, 3, 3, 70, 150};
      SCOPED_TRACE("V " + std::to_string(V) + (is_packed ? ", packed" : ""));
      const CaseInputs inputs = make_inputs(c);
      const RunResult all = run(inputs, outputs);
      expect_within_bounds(c, inputs, all);
      const auto expect_same = [&](const CaseInputs& other_inputs, OutputSet other_outputs, OutputStrides strides) {
        const RunResult other = run(other_inputs, other_outputs, {.plan = {}, .output_strides = strides});
        EXPECT_TRUE(other.untouched);
        for (int output = 0; output < kChunkKdaFwdOutputCount; ++output) {
          if (!other.has(output)) continue;
          EXPECT_TRUE(other.bytes(output) == all.bytes(output)) << kChunkKdaFwdOutputNames[output];
        }
      };
      for (const OutputStrides strides :
           {OutputStrides::kContiguous, OutputStrides::kPadded, OutputStrides::kInner, OutputStrides::kReversedAxes}) {
        for (const OutputSet some : {OutputSet(outputs).reset(kVNew).reset(kH), OutputSet(outputs).reset(kVNew),
                                     OutputSet(outputs).reset(kH), outputs}) {
          expect_same(inputs, some, strides);
        }
      }
      for (const Strides strides : {Strides::kPadded, Strides::kFused, Strides::kReversed, Strides::kInner}) {
        c.strides = strides;
        expect_same(make_inputs(c), outputs, OutputStrides::kContiguous);
      }
    }
  }
}

class PathSetting {
 public:
  explicit PathSetting(const char* path) { setenv("KDA_CUDA_PATH", path, 1); }
  ~PathSetting() { unsetenv("KDA_CUDA_PATH"); }
  PathSetting(const PathSetting&) = delete;
  PathSetting& operator=(const PathSetting&) = delete;
};

RunResult run_on_path(const char* path, const CaseInputs& inputs) {
  const PathSetting setting(path);
  return run(inputs, OutputSet().set(kAttnOut).set(kFinalState));
}

void expect_same_bits_on_both_paths(const CaseInputs& inputs) {
  const RunResult apart = run_on_path("apart", inputs);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const RunResult overlapped = run_on_path("overlapped", inputs);
    EXPECT_TRUE(overlapped.untouched);
    for (const int output : {kAttnOut, kFinalState}) {
      EXPECT_TRUE(overlapped.bytes(output) == apart.bytes(output)) << kChunkKdaFwdOutputNames[output];
    }
  }
}

// Images that are made while states advance are those that are made before.
TEST(CudaOverlap, GivesTheBitsOfImagesMadeBefore) {
  struct Shape {
    std::int64_t B, T, HV, V;
    bool is_packed;
  };
  // One group of columns on a multiprocessor or two; all images but a few late, or few.
  for (const Shape& shape :
       {Shape{1, 33, 1, 128, false}, Shape{2, 150, 4, 48, false}, Shape{1, 1000, 4, 256, true},
        Shape{1, 600, 96, 128, false}, Shape{3, 400, 40, 128, false}, Shape{1, 17, 2, 128, true}}) {
    for (const Dtype g_dtype : {Dtype::kFloat32, Dtype::kBFloat16}) {
      OpCase c;
      c.name = "overlap";
      c.g_dtype = g_dtype;
      c.B = shape.B;
      c.T = shape.T;
      c.H = c.HV = shape.HV;
      c.V = shape.V;
      c.initial_state = true;
      c.gate_scale = 20;
      if (shape.is_packed) c.cu_seqlens = std::vector<std::int64_t>{0, shape.T};
      SCOPED_TRACE("T " + std::to_string(shape.T) + ", HV " + std::to_string(shape.HV));
      expect_same_bits_on_both_paths(make_inputs(c));
      c.use_gate_in_kernel = true;
      expect_same_bits_on_both_paths(make_inputs(c));
      c.safe_gate = true;
      expect_same_bits_on_both_paths(make_inputs(c));
    }
  }
}

// Every width that the chain of the generic path is compiled for, full and padded, with V on either side of K.
TEST(CudaShapes, EveryKAndV) {
  for (std::int64_t K = 16; K <= 256; K += 16) {
    OpCase c;
    c.name = std::to_string(K);
    c.dtype = Dtype::kFloat16;
    c.T = 40;
    c.H = 1;
    c.HV = 2;
    c.K = K;
    c.V = 272 - K;
    c.initial_state = true;
    c.state_v_first = K % 32 == 0;
    expect_case_within_bounds(c, OutputSet().set(kAttnOut).set(kFinalState).set(kVNew).set(kH));
  }
}

// tf32 products keep fp16 about as well as its own rounding does.
TEST(CudaShapes, Float16IsKeptTo5e_4) {
  for (const std::int64_t K : {64, 128, 256}) {
    OpCase c;
    c.name = "fp16";
    c.dtype = Dtype::kFloat16;
    c.T = 512;
    c.H = c.HV = 1;
    c.K = c.V = K;
    c.initial_state = true;
    const CaseInputs inputs = make_inputs(c);
    const RunResult result = run(inputs, OutputSet().set(kAttnOut).set(kFinalState));
    const auto expected = reference::chunk_kda_fwd(inputs.tensors, inputs.attributes, /*intermediates=*/false);
    const double attn_out = relative_error(result.values(kAttnOut), expected.attn_out);
    const double final_state = relative_error(result.values(kFinalState), expected.final_state);
    RecordProperty("attn_out", std::to_string(attn_out));
    EXPECT_LE(attn_out, 5e-4) << K;
    EXPECT_LE(final_state, 5e-4) << K;
  }
}

// A sequence of one token has no other row: none of what lies a stride away is read.
TEST(CudaShapes, OneTokenIsReadAlone) {
  for (const std::int64_t K : {64, 128}) {
    for (const bool g_is_gk : {false, true}) {
      OpCase c;
      c.name = "one token";
      c.dtype = Dtype::kBFloat16;
      c.T = 1;
      c.H = c.HV = 2;
      c.K = c.V = K;
      CaseInputs inputs = make_inputs(c);
      inputs.attributes.fusions.g_is_gk = g_is_gk;
      const OutputSet outputs = OutputSet().set(kAttnOut).set(kFinalState);
      const RunResult expected = run(inputs, outputs);
      ChunkKdaFwdInputs& tensors = inputs.tensors;
      for (TensorView* view : {&tensors.q, &tensors.k, &tensors.v, &tensors.g, &tensors.beta}) {
        ASSERT_EQ(view->shape[1], 1);
        view->strides[1] = std::int64_t{1} << 40;
      }
      const RunResult result = run(inputs, outputs);
      EXPECT_TRUE(result.bytes(kAttnOut) == expected.bytes(kAttnOut)) << K << g_is_gk;
      EXPECT_TRUE(result.bytes(kFinalState) == expected.bytes(kFinalState)) << K << g_is_gk;
    }
  }
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
