// The C API as a door to kda_gate and kda_gate_cumsum.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "aclnnop/aclnn_kda_gate.h"
#include "aclnnop/aclnn_kda_gate_cumsum.h"
#include "kda/kda_gate.h"
#include "kda/kda_gate_cumsum.h"
#include "support/c_door.h"
#include "support/dtypes.h"
#include "support/run_case.h"

namespace kda::testing {
namespace {

constexpr int kNullPointer = 161001;
constexpr int kInvalid = 161002;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A tensor with memory of its own.
class Tensor {
 public:
  Tensor(Dtype dtype, std::initializer_list<std::int64_t> shape)
      : view_(TensorView::contiguous(nullptr, dtype, shape)) {
    memory_ = GuardedMemory(static_cast<std::size_t>(view_.numel()) * size_of(dtype));
    view_.data = memory_.data();
  }
  // Filled with smooth numbers in [low, high].
  Tensor(Dtype dtype, std::initializer_list<std::int64_t> shape, double low, double high) : Tensor(dtype, shape) {
    for (std::int64_t i = 0; i < view_.numel(); ++i) {
      const double wave = 0.5 + 0.5 * std::sin(1.7 * static_cast<double>(i + 1));
      store(view_.data, dtype, i, static_cast<float>(low + (high - low) * wave));
    }
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  [[nodiscard]] const TensorView& view() const { return view_; }
  [[nodiscard]] std::vector<std::byte> bytes() const { return packed_bytes(view_); }
  [[nodiscard]] bool guards_intact() const { return memory_.guards_intact(); }

 private:
  TensorView view_;
  GuardedMemory memory_;
};

// What a refusal may change of a legal call of either operator.
struct Arguments {
  CTensor g;
  CTensor A_log;
  CTensor dt_bias;
  CTensor out;
  CIntArray cu_seqlens;
  std::int64_t chunk_size = 64;
  bool use_gate = true;
  bool safe_gate = true;
  bool use_lower_bound = false;
  double lower_bound = -5;
};

using Phase1 = aclnnStatus (*)(const Arguments&, std::uint64_t*, aclOpExecutor**);

aclnnStatus plan_gate(const Arguments& a, std::uint64_t* workspace_size, aclOpExecutor** executor) {
  return aclnnKdaGateGetWorkspaceSize(a.g.get(), a.A_log.get(), a.dt_bias.get(), a.use_lower_bound, a.lower_bound,
                                      a.out.get(), workspace_size, executor);
}

aclnnStatus plan_cumsum(const Arguments& a, std::uint64_t* workspace_size, aclOpExecutor** executor) {
  return aclnnKdaGateCumsumGetWorkspaceSize(a.g.get(), a.A_log.get(), a.dt_bias.get(), a.cu_seqlens.get(), a.chunk_size,
                                            a.use_gate, a.safe_gate, a.lower_bound, a.out.get(), workspace_size,
                                            executor);
}

aclnnStatus run_gate(const Arguments& a) {
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  const aclnnStatus status = plan_gate(a, &workspace_size, &executor);
  std::vector<std::byte> workspace(workspace_size);
  return status != ACL_SUCCESS ? status : aclnnKdaGate(workspace.data(), workspace_size, executor, nullptr);
}

aclnnStatus run_cumsum(const Arguments& a) {
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  const aclnnStatus status = plan_cumsum(a, &workspace_size, &executor);
  std::vector<std::byte> workspace(workspace_size);
  return status != ACL_SUCCESS ? status : aclnnKdaGateCumsum(workspace.data(), workspace_size, executor, nullptr);
}

TEST(CKdaGate, GivesTheBitsOfTheCppDoor) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBFloat16}) {
    for (const bool bounded : {false, true}) {
      const Tensor g(dtype, {3, 5, 4, 24}, -30, 10);
      const Tensor A_log(Dtype::kFloat32, {4}, -1, 2);
      const Tensor dt_bias(Dtype::kFloat32, {4, 24}, -1, 1);
      const Tensor expected(dtype, {3, 5, 4, 24});
      const Tensor actual(dtype, {3, 5, 4, 24});
      KdaGateAttributes attributes;
      if (bounded) attributes.lower_bound = -7.5;
      kda_gate({.g = g.view(), .A_log = A_log.view(), .dt_bias = dt_bias.view()}, expected.view(), attributes);
      Arguments arguments;
      arguments.g = make_c_tensor(g.view(), {.data_type = {}, .offset = 3});
      arguments.A_log = make_c_tensor(A_log.view());
      arguments.dt_bias = make_c_tensor(dt_bias.view());
      arguments.out = make_c_tensor(actual.view());
      arguments.use_lower_bound = bounded;
      arguments.lower_bound = bounded ? -7.5 : kNan;
      ASSERT_EQ(run_gate(arguments), ACL_SUCCESS) << take_error();
      EXPECT_EQ(actual.bytes(), expected.bytes());
      EXPECT_TRUE(actual.guards_intact());
    }
  }
}

TEST(CKdaGate, TakesNoElements) {
  const TensorView nothing = TensorView::contiguous(nullptr, Dtype::kFloat32, {0, 4, 8});
  const Tensor A_log(Dtype::kFloat32, {4}, -1, 2);
  Arguments arguments;
  arguments.g = make_c_tensor(nothing);
  arguments.A_log = make_c_tensor(A_log.view());
  arguments.out = make_c_tensor(nothing);
  EXPECT_EQ(run_gate(arguments), ACL_SUCCESS) << take_error();
}

TEST(CKdaGateCumsum, GivesTheBitsOfTheCppDoor) {
  const std::vector<std::int64_t> cu_seqlens = {0, 0, 65, 100};
  for (const bool packed : {false, true}) {
    for (const bool use_gate : {false, true}) {
      const Tensor g(Dtype::kBFloat16, {1, 4, 100, 24}, -3, 0);
      const Tensor A_log(Dtype::kFloat32, {4}, -1, 2);
      const Tensor dt_bias(Dtype::kFloat32, {4 * 24}, -1, 1);
      const Tensor expected(Dtype::kFloat32, {1, 4, 100, 24});
      const Tensor actual(Dtype::kFloat32, {1, 4, 100, 24});
      KdaGateCumsumAttributes attributes;
      attributes.chunk_size = 32;
      attributes.use_gate_in_kernel = use_gate;
      if (packed) attributes.cu_seqlens = cu_seqlens;
      kda_gate_cumsum({.g = g.view(), .A_log = A_log.view(), .dt_bias = dt_bias.view()}, expected.view(), attributes);
      Arguments arguments;
      arguments.g = make_c_tensor(g.view());
      arguments.A_log = make_c_tensor(A_log.view());
      arguments.dt_bias = make_c_tensor(dt_bias.view());
      arguments.out = make_c_tensor(actual.view(), {.data_type = {}, .offset = -3});
      if (packed) arguments.cu_seqlens = make_c_int_array(cu_seqlens);
      arguments.chunk_size = 32;
      arguments.use_gate = use_gate;
      arguments.safe_gate = false;
      ASSERT_EQ(run_cumsum(arguments), ACL_SUCCESS) << take_error();
      EXPECT_EQ(actual.bytes(), expected.bytes());
      EXPECT_TRUE(actual.guards_intact());
    }
  }
}

TEST(CGates, ExecutorsAreOfTheirOperator) {
  const Tensor g(Dtype::kFloat32, {1, 4, 100, 24}, -3, 0);
  const Tensor gk(Dtype::kFloat32, {1, 4, 100, 24});
  Arguments arguments;
  arguments.g = make_c_tensor(g.view());
  arguments.out = make_c_tensor(gk.view());
  arguments.use_gate = false;
  std::uint64_t workspace_size = 0;
  aclOpExecutor* executor = nullptr;
  ASSERT_EQ(plan_cumsum(arguments, &workspace_size, &executor), ACL_SUCCESS) << take_error();
  EXPECT_EQ(aclnnKdaGate(nullptr, 0, executor, nullptr), kInvalid);
  EXPECT_EQ(take_error(), "kda_gate: executor: expected an executor of kda_gate, got one of kda_gate_cumsum");
  std::vector<std::byte> workspace(workspace_size);
  EXPECT_EQ(aclnnKdaGateCumsum(workspace.data(), workspace_size, executor, nullptr), ACL_SUCCESS);
  EXPECT_EQ(aclnnKdaGateCumsum(workspace.data(), workspace_size, executor, nullptr), kInvalid);
}

// Refusals.

struct Refusal {
  std::string name;
  std::function<void(Arguments&)> change;
  int status;
  std::string message;
};

void PrintTo(const Refusal& refusal, std::ostream* stream) { *stream << refusal.name; }

std::string name_of_param(const ::testing::TestParamInfo<Refusal>& info) { return info.param.name; }

// Tensors without data do: it is looked at last.
CTensor shaped(Dtype dtype, std::initializer_list<std::int64_t> shape) {
  return make_c_tensor(TensorView::contiguous(nullptr, dtype, shape));
}
CTensor typed(aclDataType type, std::initializer_list<std::int64_t> shape) {
  return make_c_tensor(TensorView::contiguous(nullptr, Dtype::kFloat32, shape), {.data_type = type});
}

void expect_refused(const Refusal& refusal, Arguments& arguments, Phase1 phase1) {
  refusal.change(arguments);
  std::uint64_t workspace_size = 77;
  aclOpExecutor* executor = nullptr;
  (void)aclGetRecentErrMsg();
  EXPECT_EQ(phase1(arguments, &workspace_size, &executor), refusal.status);
  EXPECT_EQ(take_error(), refusal.message);
  EXPECT_EQ(workspace_size, 77U);
  EXPECT_EQ(executor, nullptr);
}

class CKdaGateRefusals : public ::testing::TestWithParam<Refusal> {};
class CKdaGateCumsumRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(CKdaGateRefusals, HaveStatusAndMessage) {
  const Tensor g(Dtype::kFloat32, {5, 4, 24}, -3, 0);
  const Tensor A_log(Dtype::kFloat32, {4}, -1, 2);
  const Tensor out(Dtype::kFloat32, {5, 4, 24});
  Arguments arguments;
  arguments.g = make_c_tensor(g.view());
  arguments.A_log = make_c_tensor(A_log.view());
  arguments.out = make_c_tensor(out.view());
  expect_refused(GetParam(), arguments, plan_gate);
}

TEST_P(CKdaGateCumsumRefusals, HaveStatusAndMessage) {
  const Tensor g(Dtype::kFloat32, {1, 4, 100, 24}, -3, 0);
  const Tensor A_log(Dtype::kFloat32, {4}, -1, 2);
  const Tensor gk(Dtype::kFloat32, {1, 4, 100, 24});
  Arguments arguments;
  arguments.g = make_c_tensor(g.view());
  arguments.A_log = make_c_tensor(A_log.view());
  arguments.out = make_c_tensor(gk.view());
  expect_refused(GetParam(), arguments, plan_cumsum);
}

constexpr auto kF32 = Dtype::kFloat32;
const std::string kGate = "kda_gate: ";
const std::string kCumsum = "kda_gate_cumsum: ";
const std::string kAnyFloat = "dtype float32 or float16 or bfloat16";

INSTANTIATE_TEST_SUITE_P(
    All, CKdaGateRefusals,
    ::testing::Values(Refusal{"NoG", [](Arguments& a) { a.g = nullptr; }, kNullPointer,
                              kGate + "g: expected a tensor, got none"},
                      Refusal{"NoOut", [](Arguments& a) { a.out = nullptr; }, kNullPointer,
                              kGate + "out: expected a tensor, got none"},
                      Refusal{"NoALog", [](Arguments& a) { a.A_log = nullptr; }, kNullPointer,
                              kGate + "A_log: expected a tensor, as lower_bound is absent, got none"},
                      Refusal{"LowerBoundNan",
                              [](Arguments& a) {
                                a.use_lower_bound = true;
                                a.lower_bound = kNan;
                              },
                              kInvalid, kGate + "lower_bound: expected a finite number, got nan"},
                      Refusal{"GInt8",
                              [](Arguments& a) {
                                a.g = typed(ACL_INT8, {5, 4, 24});
                              },
                              kInvalid, kGate + "g: expected " + kAnyFloat + ", got int8"},
                      Refusal{"GDouble",
                              [](Arguments& a) {
                                a.g = typed(ACL_DOUBLE, {5, 4, 24});
                              },
                              kInvalid, kGate + "g: expected " + kAnyFloat + ", got float64"},
                      Refusal{"ALogHalf", [](Arguments& a) { a.A_log = typed(ACL_FLOAT16, {4}); }, kInvalid,
                              kGate + "A_log: expected dtype float32, got float16"},
                      Refusal{"OutInt32",
                              [](Arguments& a) {
                                a.out = typed(ACL_INT32, {5, 4, 24});
                              },
                              kInvalid, kGate + "out: expected " + kAnyFloat + ", got int32"},
                      Refusal{"GRank", [](Arguments& a) { a.g = shaped(kF32, {24}); }, kInvalid,
                              kGate + "g: expected rank 2..8, [...,H,D], got rank 1, [24]"},
                      Refusal{"ALogShape", [](Arguments& a) { a.A_log = shaped(kF32, {5}); }, kInvalid,
                              kGate + "A_log: expected shape [H] = [4], got [5]"},
                      Refusal{"DtBiasShape",
                              [](Arguments& a) {
                                a.dt_bias = shaped(kF32, {24, 4});
                              },
                              kInvalid, kGate + "dt_bias: expected shape [H*D] = [96] or [H,D] = [4,24], got [24,4]"},
                      Refusal{"OutShape",
                              [](Arguments& a) {
                                a.out = shaped(kF32, {5, 24, 4});
                              },
                              kInvalid, kGate + "out: expected shape of g = [5,4,24], got [5,24,4]"},
                      Refusal{"Format",
                              [](Arguments& a) {
                                a.g = make_c_tensor(TensorView::contiguous(nullptr, kF32, {5, 4, 24}),
                                                    {.data_type = {}, .format = ACL_FORMAT_NHWC});
                              },
                              kInvalid, kGate + "g: expected format ACL_FORMAT_ND (2), got 1"},
                      Refusal{"NullData",
                              [](Arguments& a) {
                                a.out = shaped(kF32, {5, 4, 24});
                              },
                              kNullPointer, kGate + "out: expected data, got a null pointer"},
                      Refusal{"OutOnG", [](Arguments& a) { a.out = a.g; }, kInvalid,
                              kGate + "out: expected memory of its own, got memory shared with g"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    All, CKdaGateCumsumRefusals,
    ::testing::Values(
        Refusal{"NoG", [](Arguments& a) { a.g = nullptr; }, kNullPointer, kCumsum + "g: expected a tensor, got none"},
        Refusal{"NoGk", [](Arguments& a) { a.out = nullptr; }, kNullPointer,
                kCumsum + "gk: expected a tensor, got none"},
        Refusal{"NoALog", [](Arguments& a) { a.A_log = nullptr; }, kNullPointer,
                kCumsum + "A_log: expected a tensor, as use_gate_in_kernel is set, got none"},
        Refusal{"ChunkSize", [](Arguments& a) { a.chunk_size = 16; }, kInvalid,
                kCumsum + "chunk_size: expected 32, 64 or 128, got 16"},
        Refusal{"LowerBound", [](Arguments& a) { a.lower_bound = 0.5; }, kInvalid,
                kCumsum + "lower_bound: expected a number in [-5, 0), got 0.5"},
        Refusal{"GkHalf",
                [](Arguments& a) {
                  a.out = typed(ACL_FLOAT16, {1, 4, 100, 24});
                },
                kInvalid, kCumsum + "gk: expected dtype float32, got float16"},
        Refusal{"GBool",
                [](Arguments& a) {
                  a.g = typed(ACL_BOOL, {1, 4, 100, 24});
                },
                kInvalid, kCumsum + "g: expected " + kAnyFloat + ", got bool"},
        Refusal{"GRank",
                [](Arguments& a) {
                  a.g = shaped(kF32, {100, 24});
                },
                kInvalid, kCumsum + "g: expected rank 4, [B,HV,T,K], or rank 3, [HV,T,K], got rank 2, [100,24]"},
        Refusal{"K",
                [](Arguments& a) {
                  a.g = shaped(kF32, {1, 4, 100, 257});
                },
                kInvalid, kCumsum + "g: expected K in 1..256, got K = 257"},
        Refusal{"GkShape",
                [](Arguments& a) {
                  a.out = shaped(kF32, {1, 100, 4, 24});
                },
                kInvalid, kCumsum + "gk: expected shape [B,HV,T,K] = [1,4,100,24], got [1,100,4,24]"},
        Refusal{"CuSeqlens",
                [](Arguments& a) {
                  a.cu_seqlens = make_c_int_array(std::vector<std::int64_t>{0, 99});
                },
                kInvalid, kCumsum + "cu_seqlens: expected cu_seqlens[1] = T = 100, got 99"},
        Refusal{"GkOnG", [](Arguments& a) { a.out = a.g; }, kInvalid,
                kCumsum + "gk: expected memory of its own, got memory shared with g"}),
    name_of_param);

}  // namespace
}  // namespace kda::testing
