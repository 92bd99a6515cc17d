// Sizes beyond memory and beyond 64 bits, and memory that runs out: always an error, through every door.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "acl/acl.h"
#include "aclnnop/aclnn_kda_gate.h"
#include "aclnnop/aclnn_kda_gate_cumsum.h"
#include "kda/kda.h"
#include "kda/reference.h"
#include "support/allocations.h"
#include "support/c_door.h"
#include "support/call.h"
#include "support/fork.h"

namespace kda::testing {
namespace {

using Mode = FailingAllocations::Mode;

constexpr std::array kModes{Mode::kOnce, Mode::kFromThenOn};
constexpr std::int64_t kMany = std::int64_t{1} << 40;

// A call of any size in no memory at all: every input is one element, seen again and again.
struct Boundless {
  ChunkKdaFwdInputs inputs;
  ChunkKdaFwdAttributes attributes{.scale = 1.0};

  Boundless(std::int64_t B, std::int64_t T) {
    const auto view = [&](Dtype dtype, std::initializer_list<std::int64_t> shape) {
      TensorView made = TensorView::contiguous(&element, dtype, shape);
      made.strides = {};
      return made;
    };
    inputs.q = inputs.k = inputs.v = view(Dtype::kBFloat16, {B, T, 1, 16});
    inputs.g = view(Dtype::kFloat32, {B, T, 1, 16});
    inputs.beta = view(Dtype::kFloat32, {B, T, 1});
  }
  Boundless(const Boundless&) = delete;
  Boundless& operator=(const Boundless&) = delete;

  [[nodiscard]] ChunkKdaFwdPlan plan(int num_threads) const {
    ChunkKdaFwdOutputs outputs;
    outputs.attn_out = chunk_kda_fwd_outputs(inputs, attributes).attn_out;
    return {inputs, outputs, attributes, {.num_threads = num_threads}};
  }

  float element = 0;
};

// What a function throws, if anything.
template <typename Function>
std::string thrown_by(ErrorKind kind, Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.kind() == kind ? error.what() : "another kind of error: " + std::string(error.what());
  }
  return "nothing";
}

TEST(Sizes, WorkspaceDoesNotGrowWithTokens) {
  for (const int num_threads : {1, 3}) {
    const std::size_t bytes = Boundless(1, 1 << 16).plan(num_threads).workspace_bytes();
    for (const std::int64_t T : {std::int64_t{1'000'000}, kMany}) {
      EXPECT_EQ(Boundless(1, T).plan(num_threads).workspace_bytes(), bytes) << T;
    }
    EXPECT_LE(Boundless(kMany, 64).plan(num_threads).workspace_bytes(), bytes);
  }
}

TEST(Sizes, AMillionTokens) {
  constexpr std::int64_t kTokens = 1'000'000;
  std::vector<std::uint16_t> q(kTokens * 16);
  std::vector<std::uint16_t> attn_out(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<std::uint16_t>(0x3E00 + i % 97);
  Boundless call(1, kTokens);
  call.element = 0.5F;  // of g and beta: a growing state, but for the minus sign
  const float gate = -0.5F;
  call.inputs.g.data = const_cast<float*>(&gate);
  call.inputs.q = call.inputs.k = call.inputs.v =
      TensorView::contiguous(q.data(), Dtype::kBFloat16, {1, kTokens, 1, 16});
  ChunkKdaFwdOutputs outputs;
  outputs.attn_out = TensorView::contiguous(attn_out.data(), Dtype::kBFloat16, {1, kTokens, 1, 16});
  chunk_kda_fwd(call.inputs, outputs, call.attributes, {.num_threads = 2});
  // The state forgets: tokens that follow the same 1,000 tokens have the same output.
  constexpr std::size_t kPeriod = 64 * 97 * 16;
  const std::size_t late = attn_out.size() / kPeriod * kPeriod - kPeriod;
  EXPECT_EQ(std::vector(attn_out.begin() + late, attn_out.begin() + late + 16 * 1000),
            std::vector(attn_out.begin() + kPeriod, attn_out.begin() + kPeriod + 16 * 1000));
}

TEST(Sizes, ThreadsAreBounded) {
  constexpr int kMost = std::numeric_limits<int>::max();
  EXPECT_LE(Boundless(1, kMany).plan(kMost).num_threads(), 1024);
  EXPECT_GE(Boundless(1, kMany).plan(kMost).launches(), 1);

  const std::vector<float> A_log(1);
  const TensorView g = TensorView::contiguous(nullptr, Dtype::kFloat32, {kMany, 1, 16});
  const KdaGateInputs gate{.g = g, .A_log = TensorView::contiguous(A_log.data(), Dtype::kFloat32, {1})};
  EXPECT_LE(KdaGatePlan(gate, g, {}, {.num_threads = kMost}).num_threads(), 1024);
  const TensorView head_major = TensorView::contiguous(nullptr, Dtype::kFloat32, {1, kMany, 16});
  EXPECT_LE(KdaGateCumsumPlan({.g = head_major}, head_major, {}, {.num_threads = kMost}).num_threads(), 1024);
}

TEST(Sizes, OutputsBeyond64BitsAreRefused) {
  const auto refusal = [](const Boundless& call, bool with_h) {
    const ChunkKdaFwdOutputs all = chunk_kda_fwd_outputs(call.inputs, call.attributes);
    const ChunkKdaFwdOutputs outputs{.attn_out = all.attn_out, .h = with_h ? all.h : TensorView()};
    return thrown_by(ErrorKind::kValue,
                     [&] { static_cast<void>(ChunkKdaFwdPlan(call.inputs, outputs, call.attributes)); });
  };
  const Boundless wide(std::int64_t{1} << 53, 64);
  EXPECT_EQ(refusal(wide, false).find("chunk_kda_fwd: attn_out: expected addresses within 64 bits"), 0U);
  const Boundless short_ones(std::int64_t{1} << 55, 1);
  EXPECT_EQ(refusal(short_ones, false), "nothing");
  EXPECT_EQ(refusal(short_ones, true).find("chunk_kda_fwd: h: expected addresses within 64 bits"), 0U);
}

TEST(Sizes, TheReferenceRefusesWhatMemoryCannotHold) {
  for (const std::int64_t size : {kMany, std::int64_t{1} << 50}) {
    const Boundless call(size, 1 << 10);
    EXPECT_EQ(thrown_by(ErrorKind::kOutOfMemory,
                        [&] { static_cast<void>(reference::chunk_kda_fwd(call.inputs, call.attributes)); }),
              "chunk_kda_fwd: float64 reference: expected enough memory, got less");
  }
  const float A_log = 0;
  TensorView g = TensorView::contiguous(&A_log, Dtype::kFloat32, {std::int64_t{1} << 50, 16, 16});
  g.strides = {};
  const TensorView heads = TensorView::strided(&A_log, Dtype::kFloat32, {16}, {0});
  EXPECT_EQ(
      thrown_by(ErrorKind::kOutOfMemory, [&] { static_cast<void>(reference::kda_gate({.g = g, .A_log = heads}, {})); }),
      "kda_gate: float64 reference: expected enough memory, got less");
  EXPECT_EQ(thrown_by(ErrorKind::kOutOfMemory, [&] { static_cast<void>(reference::kda_gate_cumsum({.g = g}, {})); }),
            "kda_gate_cumsum: float64 reference: expected enough memory, got less");
}

// Memory that runs out: function() is called with ever more allocations allowed, until it needs no more.

template <typename Function>
void expect_errors_without_memory(Function function) {
  function();
  for (const Mode mode : kModes) {
    for (std::int64_t allowed = 0;; ++allowed) {
      ErrorKind kind = ErrorKind::kOutOfMemory;
      bool failed = false;
      bool happened = false;
      {
        const FailingAllocations failing(allowed, mode);
        try {
          function();
        } catch (const Error& error) {
          failed = true;
          kind = error.kind();
        } catch (const std::bad_alloc&) {
          failed = true;
          // Where not even a message can be had.
          if (mode == Mode::kOnce) kind = ErrorKind::kInternal;
        }
        happened = failing.happened();
      }
      EXPECT_EQ(kind, ErrorKind::kOutOfMemory) << "allocation " << allowed;
      EXPECT_TRUE(happened || !failed);
      if (!happened) break;
      ASSERT_LT(allowed, 10'000);
    }
  }
}

TEST(MemoryRunsOut, InTheCppDoor) {
  Call call;
  make_packed(call);
  call.give_data();
  expect_errors_without_memory([&] {
    static_cast<void>(chunk_kda_fwd_dims(call.inputs, call.attributes));
    static_cast<void>(chunk_kda_fwd_outputs(call.inputs, call.attributes));
    chunk_kda_fwd(call.inputs, call.outputs, call.attributes, {.num_threads = 3});
  });
  const TensorView g = TensorView::contiguous(call.inputs.g.data, Dtype::kFloat32, {4, Call::kT, Call::kK});
  const TensorView out = TensorView::contiguous(call.outputs.gk.data, Dtype::kFloat32, {4, Call::kT, Call::kK});
  expect_errors_without_memory([&] { kda_gate({.g = g}, out, {.lower_bound = -5}, {.num_threads = 4}); });
  expect_errors_without_memory([&] {
    KdaGateCumsumAttributes attributes;
    attributes.cu_seqlens = call.cu_seqlens;
    kda_gate_cumsum({.g = g}, out, attributes, {.num_threads = 4});
  });
}

// In children, whose pools have no threads yet.
TEST(Fork, AChildWithoutMemoryForThreadsDoesWithout) {
  std::vector<float> g(std::size_t{4} * 256 * 16);
  std::vector<float> gk(g.size());
  const TensorView in = TensorView::contiguous(g.data(), Dtype::kFloat32, {4, 256, 16});
  const TensorView out = TensorView::contiguous(gk.data(), Dtype::kFloat32, {4, 256, 16});
  for (const Mode mode : kModes) {
    for (std::int64_t allowed = 0; allowed < 20; ++allowed) {
      EXPECT_TRUE(child_succeeds([&] {
        const FailingAllocations failing(allowed, mode);
        try {
          kda_gate_cumsum({.g = in}, out, {}, {.num_threads = 8});
        } catch (const Error&) {
        } catch (const std::bad_alloc&) {
        }
        return 0;
      })) << allowed;
    }
  }
}

TEST(MemoryRunsOut, InAnExecutionWithoutAllocations) {
  Call call;
  make_packed(call);
  call.give_data();
  const ChunkKdaFwdPlan plan(call.inputs, call.outputs, call.attributes, {.num_threads = 2});
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const FailingAllocations failing(0, Mode::kFromThenOn);
  plan.execute(call.inputs, call.outputs, {workspace.data(), workspace.size()});
  EXPECT_FALSE(failing.happened());
}

// A sequence of C calls with what it made, freed whatever happened.
struct CSession {
  aclTensor* g = nullptr;
  aclTensor* gk = nullptr;
  aclIntArray* cu_seqlens = nullptr;
  aclOpExecutor* gate = nullptr;
  aclOpExecutor* cumsum = nullptr;
  void* memory = nullptr;
  aclrtStream stream = nullptr;

  CSession() = default;
  CSession(const CSession&) = delete;
  CSession& operator=(const CSession&) = delete;
  ~CSession() {
    for (const aclTensor* tensor : {g, gk}) static_cast<void>(aclDestroyTensor(tensor));
    static_cast<void>(aclDestroyIntArray(cu_seqlens));
    for (aclOpExecutor* executor : {gate, cumsum}) static_cast<void>(aclDestroyAclOpExecutor(executor));
    static_cast<void>(aclrtFree(memory));
    static_cast<void>(aclrtDestroyStream(stream));
  }

  // The status of the first call that fails, or 0.
  int run(std::vector<float>& g_data, std::vector<float>& gk_data) {
    constexpr std::array<std::int64_t, 3> kDims{2, 70, 16};
    constexpr std::array<std::int64_t, 3> kEnds{0, 5, 70};
    const auto tensor = [&](std::vector<float>& data) {
      return aclCreateTensor(kDims.data(), 3, ACL_FLOAT, nullptr, 0, ACL_FORMAT_ND, kDims.data(), 3, data.data());
    };
    if ((g = tensor(g_data)) == nullptr || (gk = tensor(gk_data)) == nullptr) return -1;
    if ((cu_seqlens = aclCreateIntArray(kEnds.data(), kEnds.size())) == nullptr) return -1;
    std::uint64_t bytes = 0;
    if (const int status = aclnnKdaGateGetWorkspaceSize(g, nullptr, nullptr, true, -5, gk, &bytes, &gate))
      return status;
    if (const int status = aclnnKdaGateCumsumGetWorkspaceSize(g, nullptr, nullptr, cu_seqlens, 64, false, false, -5, gk,
                                                              &bytes, &cumsum)) {
      return status;
    }
    if (const int status = aclrtMalloc(&memory, 100, ACL_MEM_MALLOC_HUGE_FIRST)) return status;
    if (const int status = aclrtCreateStream(&stream)) return status;
    if (const int status = aclnnKdaGate(nullptr, 0, gate, stream)) return status;
    return aclnnKdaGateCumsum(nullptr, 0, cumsum, stream);
  }
};

bool is_out_of_memory(int status) {
  constexpr int kFailedToCreate = -1;
  return status == kFailedToCreate || status == 361001 || status == 561101 || status == ACL_ERROR_BAD_ALLOC;
}

TEST(MemoryRunsOut, InTheCDoor) {
  std::vector<float> g(2 * 70 * 16);
  std::vector<float> gk(g.size());
  const auto run = [&] { return CSession().run(g, gk); };
  ASSERT_EQ(run(), 0) << take_error();
  for (const Mode mode : kModes) {
    for (std::int64_t allowed = 0;; ++allowed) {
      int status = 0;
      bool happened = false;
      bool has_message = false;
      {
        const FailingAllocations failing(allowed, mode);
        CSession session;
        status = session.run(g, gk);
        happened = failing.happened();
        has_message = aclGetRecentErrMsg() != nullptr;
      }
      static_cast<void>(take_error());
      EXPECT_TRUE(status == 0 || is_out_of_memory(status)) << status << " at allocation " << allowed;
      EXPECT_EQ(has_message, status != 0);
      if (!happened) break;
      ASSERT_LT(allowed, 10'000);
    }
  }
}

TEST(MemoryRunsOut, InTheOperatorOfTheCDoor) {
  Call call;
  make_packed(call);
  call.give_data();
  const CArguments arguments = make_c_arguments(call.inputs, call.outputs, call.attributes);
  for (const Mode mode : kModes) {
    for (std::int64_t allowed = 0;; ++allowed) {
      std::uint64_t bytes = 0;
      aclOpExecutor* executor = nullptr;
      int status = 0;
      bool happened = false;
      {
        const FailingAllocations failing(allowed, mode);
        status = plan(arguments, &bytes, &executor);
        happened = failing.happened();
      }
      EXPECT_TRUE(status == 0 || is_out_of_memory(status)) << status << " at allocation " << allowed;
      EXPECT_EQ(executor != nullptr, status == 0);
      if (executor != nullptr) {
        EXPECT_EQ(aclDestroyAclOpExecutor(executor), 0);
      }
      if (!happened) break;
      ASSERT_LT(allowed, 10'000);
    }
  }
}

}  // namespace
}  // namespace kda::testing
