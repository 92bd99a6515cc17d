#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "chunk_kda_fwd/problem.h"
#include "support/call.h"

namespace kda {
namespace {

using testing::Call;
using testing::make_dense;
using testing::make_packed;

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TensorView view(Dtype dtype, std::initializer_list<std::int64_t> shape) {
  return TensorView::contiguous(nullptr, dtype, shape);
}
TensorView f32(std::initializer_list<std::int64_t> shape) { return view(Dtype::kFloat32, shape); }
TensorView bf16(std::initializer_list<std::int64_t> shape) { return view(Dtype::kBFloat16, shape); }

// One illegal call: how it comes about, and the whole message that refuses it.
struct Refusal {
  std::string name;
  std::function<void(Call&)> change;
  ErrorKind kind;
  std::string argument;
  std::string expected;
  std::string got;
};

void PrintTo(const Refusal& refusal, std::ostream* stream) { *stream << refusal.name; }

constexpr auto kMissing = ErrorKind::kMissing;
constexpr auto kDtype = ErrorKind::kDtype;
constexpr auto kValue = ErrorKind::kValue;

void expect_refused(const Refusal& refusal, const std::function<void()>& function) {
  try {
    function();
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), refusal.kind);
    EXPECT_EQ(error.what(),
              "chunk_kda_fwd: " + refusal.argument + ": expected " + refusal.expected + ", got " + refusal.got);
  }
}

class DenseRefusals : public ::testing::TestWithParam<Refusal> {};
class PackedRefusals : public ::testing::TestWithParam<Refusal> {};
class PointerRefusals : public ::testing::TestWithParam<Refusal> {};

std::string name_of_param(const ::testing::TestParamInfo<Refusal>& info) { return info.param.name; }

TEST_P(DenseRefusals, NameArgumentExpectedAndGot) {
  Call call;
  make_dense(call);
  ASSERT_NO_THROW((void)make_problem(call.inputs, &call.outputs, call.attributes));
  GetParam().change(call);
  expect_refused(GetParam(), [&] { (void)make_problem(call.inputs, &call.outputs, call.attributes); });
}

TEST_P(PackedRefusals, NameArgumentExpectedAndGot) {
  Call call;
  make_packed(call);
  ASSERT_NO_THROW((void)make_problem(call.inputs, &call.outputs, call.attributes));
  GetParam().change(call);
  expect_refused(GetParam(), [&] { (void)make_problem(call.inputs, &call.outputs, call.attributes); });
}

TEST_P(PointerRefusals, NameArgumentExpectedAndGot) {
  Call call;
  make_dense(call);
  call.give_data();
  ASSERT_NO_THROW(check_pointers(call.inputs, call.outputs));
  GetParam().change(call);
  expect_refused(GetParam(), [&] { check_pointers(call.inputs, call.outputs); });
}

INSTANTIATE_TEST_SUITE_P(
    Presence, DenseRefusals,
    ::testing::Values(
        Refusal{"NoQ", [](Call& c) { c.inputs.q = {}; }, kMissing, "q", "a tensor", "none"},
        Refusal{"NoK", [](Call& c) { c.inputs.k = {}; }, kMissing, "k", "a tensor", "none"},
        Refusal{"NoV", [](Call& c) { c.inputs.v = {}; }, kMissing, "v", "a tensor", "none"},
        Refusal{"NoG", [](Call& c) { c.inputs.g = {}; }, kMissing, "g", "a tensor", "none"},
        Refusal{"NoBeta", [](Call& c) { c.inputs.beta = {}; }, kMissing, "beta", "a tensor", "none"},
        Refusal{"NoALog", [](Call& c) { c.inputs.A_log = {}; }, kMissing, "A_log",
                "a tensor, as use_gate_in_kernel is set", "none"},
        Refusal{"NoAttnOut", [](Call& c) { c.outputs.attn_out = {}; }, kMissing, "attn_out", "a tensor", "none"},
        Refusal{"NoScale", [](Call& c) { c.attributes.scale.reset(); }, kMissing, "scale", "a number", "none"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Attributes, DenseRefusals,
    ::testing::Values(
        Refusal{"UnknownLayout", [](Call& c) { c.attributes.layout = static_cast<Layout>(9); }, kValue, "layout",
                "BSND, BNSD, TND or NTD", "9"},
        Refusal{"ChunkSize32", [](Call& c) { c.attributes.chunk_size = 32; }, kValue, "chunk_size", "64 or 128", "32"},
        Refusal{"ChunkSize0", [](Call& c) { c.attributes.chunk_size = 0; }, kValue, "chunk_size", "64 or 128", "0"},
        Refusal{"ChunkSizeNegative", [](Call& c) { c.attributes.chunk_size = -64; }, kValue, "chunk_size", "64 or 128",
                "-64"},
        Refusal{"ScaleNan", [](Call& c) { c.attributes.scale = kNan; }, kValue, "scale", "a finite number", "nan"},
        Refusal{"ScaleInf", [](Call& c) { c.attributes.scale = -kInf; }, kValue, "scale", "a finite number", "-inf"},
        Refusal{"ScaleTooLarge", [](Call& c) { c.attributes.scale = 3.5e38; }, kValue, "scale",
                "a number that float32 can hold", "3.5e+38"},
        Refusal{"LowerBoundZero", [](Call& c) { c.attributes.lower_bound = 0; }, kValue, "lower_bound",
                "a number in [-5, 0)", "0"},
        Refusal{"LowerBoundLow", [](Call& c) { c.attributes.lower_bound = -5.5; }, kValue, "lower_bound",
                "a number in [-5, 0)", "-5.5"},
        Refusal{"LowerBoundNan", [](Call& c) { c.attributes.lower_bound = kNan; }, kValue, "lower_bound",
                "a number in [-5, 0)", "nan"},
        Refusal{"ChunkIndicesAlone",
                [](Call& c) {
                  c.chunk_indices = {0, 0, 0, 1};
                  c.attributes.chunk_indices = c.chunk_indices;
                },
                kValue, "chunk_indices", "none, as cu_seqlens is absent", "some"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Dtypes, DenseRefusals,
    ::testing::Values(
        Refusal{"Q", [](Call& c) { c.inputs.q.dtype = Dtype::kFloat32; }, kDtype, "q", "dtype float16 or bfloat16",
                "float32"},
        Refusal{"K", [](Call& c) { c.inputs.k.dtype = Dtype::kFloat16; }, kDtype, "k", "dtype bfloat16", "float16"},
        Refusal{"V", [](Call& c) { c.inputs.v.dtype = Dtype::kFloat32; }, kDtype, "v", "dtype bfloat16", "float32"},
        Refusal{"G", [](Call& c) { c.inputs.g.dtype = Dtype::kFloat16; }, kDtype, "g", "dtype float32 or bfloat16",
                "float16"},
        Refusal{"Beta", [](Call& c) { c.inputs.beta.dtype = Dtype::kInt64; }, kDtype, "beta",
                "dtype float32 or bfloat16", "int64"},
        Refusal{"ALog", [](Call& c) { c.inputs.A_log.dtype = Dtype::kBFloat16; }, kDtype, "A_log", "dtype float32",
                "bfloat16"},
        Refusal{"DtBias", [](Call& c) { c.inputs.dt_bias.dtype = Dtype::kFloat64; }, kDtype, "dt_bias", "dtype float32",
                "float64"},
        Refusal{"InitialState", [](Call& c) { c.inputs.initial_state.dtype = Dtype::kBFloat16; }, kDtype,
                "initial_state", "dtype float32", "bfloat16"},
        Refusal{"Unknown", [](Call& c) { c.inputs.beta.dtype = static_cast<Dtype>(77); }, kDtype, "beta",
                "dtype float32 or bfloat16", "unknown dtype"},
        Refusal{"UnreadALog",
                [](Call& c) {
                  c.attributes.use_gate_in_kernel = false;
                  c.inputs.A_log.dtype = Dtype::kInt32;
                },
                kDtype, "A_log", "dtype float32", "int32"},
        Refusal{"UnreadDtBias",
                [](Call& c) {
                  c.attributes.use_gate_in_kernel = false;
                  c.inputs.dt_bias.dtype = Dtype::kInt32;
                },
                kDtype, "dt_bias", "dtype float32", "int32"},
        Refusal{"AttnOut", [](Call& c) { c.outputs.attn_out.dtype = Dtype::kFloat32; }, kDtype, "attn_out",
                "dtype bfloat16", "float32"},
        Refusal{"FinalState", [](Call& c) { c.outputs.final_state.dtype = Dtype::kBFloat16; }, kDtype, "final_state",
                "dtype float32", "bfloat16"},
        Refusal{"Gk", [](Call& c) { c.outputs.gk.dtype = Dtype::kBFloat16; }, kDtype, "gk", "dtype float32",
                "bfloat16"},
        Refusal{"Aqk", [](Call& c) { c.outputs.Aqk.dtype = Dtype::kFloat32; }, kDtype, "Aqk", "dtype bfloat16",
                "float32"},
        Refusal{"H", [](Call& c) { c.outputs.h.dtype = Dtype::kFloat16; }, kDtype, "h", "dtype bfloat16", "float16"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Views, DenseRefusals,
    ::testing::Values(
        Refusal{"RankTooLarge", [](Call& c) { c.inputs.g.rank = 9; }, kValue, "g", "rank 0..8", "rank 9"},
        Refusal{"RankGarbage", [](Call& c) { c.inputs.q.rank = 1 << 30; }, kValue, "q", "rank 0..8", "rank 1073741824"},
        Refusal{"RankNegative", [](Call& c) { c.outputs.h.rank = -7; }, kValue, "h", "rank 0..8", "rank -7"},
        Refusal{"NegativeExtent", [](Call& c) { c.inputs.k.shape[1] = -1; }, kValue, "k", "extents >= 0",
                "[2,-1,2,32]"},
        Refusal{"LowestExtent", [](Call& c) { c.inputs.beta.shape[0] = kLowest; }, kValue, "beta", "extents >= 0",
                "[-9223372036854775808,100,4]"},
        Refusal{"HugeStride", [](Call& c) { c.inputs.q.strides[0] = kHuge; }, kValue, "q", "addresses within 64 bits",
                "bfloat16 [2,100,2,32] strides [9223372036854775807,64,32,1] on cpu"},
        Refusal{"LowestStride", [](Call& c) { c.inputs.v.strides[1] = kLowest; }, kValue, "v",
                "addresses within 64 bits", "bfloat16 [2,100,4,64] strides [25600,-9223372036854775808,64,1] on cpu"},
        Refusal{"HugeShape",
                [](Call& c) {
                  c.inputs.g = TensorView::contiguous(nullptr, Dtype::kFloat32, {kHuge, kHuge, 4, 32});
                },
                kValue, "g", "addresses within 64 bits",
                "float32 [9223372036854775807,9223372036854775807,4,32] strides "
                "[9223372036854775807,128,32,1] on cpu"},
        Refusal{"OtherDevice",
                [](Call& c) {
                  c.inputs.k.device = {DeviceType::kCuda, 1};
                },
                kValue, "k", "device cpu", "cuda:1"},
        Refusal{"OutputOnOtherDevice",
                [](Call& c) {
                  c.outputs.attn_out.device = {DeviceType::kCuda, 0};
                },
                kValue, "attn_out", "device cpu", "cuda:0"},
        Refusal{"OverlappingAttnOut", [](Call& c) { c.outputs.attn_out.strides[1] = 0; }, kValue, "attn_out",
                "strides that give every element memory of its own",
                "bfloat16 [2,100,4,64] strides [25600,0,64,1] on cpu"},
        Refusal{"OverlappingGk", [](Call& c) { c.outputs.gk.strides[1] = 3199; }, kValue, "gk",
                "strides that give every element memory of its own",
                "float32 [2,4,100,32] strides [12800,3199,32,1] on cpu"},
        Refusal{"OverlappingFinalState", [](Call& c) { c.outputs.final_state.strides[3] = 2; }, kValue, "final_state",
                "strides that give every element memory of its own",
                "float32 [2,4,32,64] strides [8192,2048,64,2] on cpu"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(Sizes, DenseRefusals,
                         ::testing::Values(Refusal{"QRank",
                                                   [](Call& c) {
                                                     c.inputs.q = bf16({100, 2, 32});
                                                   },
                                                   kValue, "q", "rank 4, [B,T,H,K]", "rank 3, [100,2,32]"},
                                           Refusal{"VRank", [](Call& c) { c.inputs.v = bf16({}); }, kValue, "v",
                                                   "rank 4, [B,T,HV,V]", "rank 0, []"},
                                           Refusal{"KTooSmall", [](Call& c) { c.inputs.q.shape[3] = 0; }, kValue, "q",
                                                   "K a multiple of 16 in 16..256", "K = 0"},
                                           Refusal{"KNoMultiple", [](Call& c) { c.inputs.q.shape[3] = 24; }, kValue,
                                                   "q", "K a multiple of 16 in 16..256", "K = 24"},
                                           Refusal{"KTooLarge", [](Call& c) { c.inputs.q.shape[3] = 272; }, kValue, "q",
                                                   "K a multiple of 16 in 16..256", "K = 272"},
                                           Refusal{"VNoMultiple", [](Call& c) { c.inputs.v.shape[3] = 65; }, kValue,
                                                   "v", "V a multiple of 16 in 16..256", "V = 65"},
                                           Refusal{"VTooLarge", [](Call& c) { c.inputs.v.shape[3] = 512; }, kValue, "v",
                                                   "V a multiple of 16 in 16..256", "V = 512"},
                                           Refusal{"NoHeads", [](Call& c) { c.inputs.q.shape[2] = 0; }, kValue, "q",
                                                   "H in 1..128", "H = 0"},
                                           Refusal{"TooManyHeads", [](Call& c) { c.inputs.q.shape[2] = 129; }, kValue,
                                                   "q", "H in 1..128", "H = 129"},
                                           Refusal{"FewerValueHeads", [](Call& c) { c.inputs.v.shape[2] = 1; }, kValue,
                                                   "v", "HV in H..128 with H = 2", "HV = 1"},
                                           Refusal{"TooManyValueHeads", [](Call& c) { c.inputs.v.shape[2] = 130; },
                                                   kValue, "v", "HV in H..128 with H = 2", "HV = 130"},
                                           Refusal{"ValueHeadsNoMultiple", [](Call& c) { c.inputs.v.shape[2] = 5; },
                                                   kValue, "v", "HV a multiple of H = 2", "HV = 5"}),
                         name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Shapes, DenseRefusals,
    ::testing::Values(Refusal{"K",
                              [](Call& c) {
                                c.inputs.k = bf16({2, 100, 2, 48});
                              },
                              kValue, "k", "shape [B,T,H,K] = [2,100,2,32]", "[2,100,2,48]"},
                      Refusal{"KRank",
                              [](Call& c) {
                                c.inputs.k = bf16({2, 100, 64});
                              },
                              kValue, "k", "rank 4, [B,T,H,K]", "rank 3, [2,100,64]"},
                      Refusal{"VBatch",
                              [](Call& c) {
                                c.inputs.v = bf16({3, 100, 4, 64});
                              },
                              kValue, "v", "shape [B,T,HV,V] = [2,100,4,64]", "[3,100,4,64]"},
                      Refusal{"VTokens",
                              [](Call& c) {
                                c.inputs.v = bf16({2, 99, 4, 64});
                              },
                              kValue, "v", "shape [B,T,HV,V] = [2,100,4,64]", "[2,99,4,64]"},
                      Refusal{"GHeads",
                              [](Call& c) {
                                c.inputs.g = f32({2, 100, 2, 32});
                              },
                              kValue, "g", "shape [B,T,HV,K] = [2,100,4,32]", "[2,100,2,32]"},
                      Refusal{"BetaRank",
                              [](Call& c) {
                                c.inputs.beta = f32({2, 100, 4, 1});
                              },
                              kValue, "beta", "rank 3, [B,T,HV]", "rank 4, [2,100,4,1]"},
                      Refusal{"BetaSwapped",
                              [](Call& c) {
                                c.inputs.beta = f32({2, 4, 100});
                              },
                              kValue, "beta", "shape [B,T,HV] = [2,100,4]", "[2,4,100]"},
                      Refusal{"ALog", [](Call& c) { c.inputs.A_log = f32({2}); }, kValue, "A_log", "shape [HV] = [4]",
                              "[2]"},
                      Refusal{"DtBias", [](Call& c) { c.inputs.dt_bias = f32({32}); }, kValue, "dt_bias",
                              "shape [HV*K] = [128]", "[32]"},
                      Refusal{"DtBiasRank",
                              [](Call& c) {
                                c.inputs.dt_bias = f32({4, 32});
                              },
                              kValue, "dt_bias", "rank 1, [HV*K]", "rank 2, [4,32]"},
                      Refusal{"InitialState",
                              [](Call& c) {
                                c.inputs.initial_state = f32({1, 4, 32, 64});
                              },
                              kValue, "initial_state", "shape [N,HV,K,V] = [2,4,32,64]", "[1,4,32,64]"},
                      Refusal{"InitialStateSwapped",
                              [](Call& c) {
                                c.inputs.initial_state = f32({2, 4, 64, 32});
                              },
                              kValue, "initial_state", "shape [N,HV,K,V] = [2,4,32,64]", "[2,4,64,32]"},
                      Refusal{"InitialStateVFirst", [](Call& c) { c.attributes.state_v_first = true; }, kValue,
                              "initial_state", "shape [N,HV,V,K] = [2,4,64,32]", "[2,4,32,64]"},
                      Refusal{"OtherLayout", [](Call& c) { c.attributes.layout = Layout::kBNSD; }, kValue, "v",
                              "shape [B,HV,T,V] = [2,100,2,64]", "[2,100,4,64]"},
                      Refusal{"AttnOutHeadMajor",
                              [](Call& c) {
                                c.outputs.attn_out = bf16({2, 4, 100, 64});
                              },
                              kValue, "attn_out", "shape [B,T,HV,V] = [2,100,4,64]", "[2,4,100,64]"},
                      Refusal{"FinalState",
                              [](Call& c) {
                                c.outputs.final_state = f32({2, 4, 64, 32});
                              },
                              kValue, "final_state", "shape [N,HV,K,V] = [2,4,32,64]", "[2,4,64,32]"},
                      Refusal{"GkTokenMajor",
                              [](Call& c) {
                                c.outputs.gk = f32({2, 100, 4, 32});
                              },
                              kValue, "gk", "shape [B,HV,T,K] = [2,4,100,32]", "[2,100,4,32]"},
                      Refusal{"AqkColumns",
                              [](Call& c) {
                                c.outputs.Aqk = bf16({2, 4, 100, 128});
                              },
                              kValue, "Aqk", "shape [B,HV,T,C] = [2,4,100,64]", "[2,4,100,128]"},
                      Refusal{"AkkRank",
                              [](Call& c) {
                                c.outputs.Akk = bf16({4, 100, 64});
                              },
                              kValue, "Akk", "rank 4, [B,HV,T,C]", "rank 3, [4,100,64]"},
                      Refusal{"W",
                              [](Call& c) {
                                c.outputs.w = bf16({2, 4, 100, 64});
                              },
                              kValue, "w", "shape [B,HV,T,K] = [2,4,100,32]", "[2,4,100,64]"},
                      Refusal{"U", [](Call& c) { c.outputs.u = bf16({2, 4, 100, 32}); }, kValue, "u",
                              "shape [B,HV,T,V] = [2,4,100,64]", "[2,4,100,32]"},
                      Refusal{
                          "Qg",
                          [](Call& c) {
                            c.outputs.qg = bf16({2, 2, 100, 32});
                          },
                          kValue, "qg", "shape [B,HV,T,K] = [2,4,100,32]", "[2,2,100,32]"},
                      Refusal{"Kg", [](Call& c) { c.outputs.kg = bf16({2, 4, 128, 32}); }, kValue, "kg",
                              "shape [B,HV,T,K] = [2,4,100,32]", "[2,4,128,32]"},
                      Refusal{"VNew", [](Call& c) { c.outputs.v_new = bf16({1, 4, 100, 64}); }, kValue, "v_new",
                              "shape [B,HV,T,V] = [2,4,100,64]", "[1,4,100,64]"},
                      Refusal{"HChunks", [](Call& c) { c.outputs.h = bf16({2, 3, 4, 32, 64}); }, kValue, "h",
                              "shape [B,NC,HV,K,V] = [2,2,4,32,64]", "[2,3,4,32,64]"},
                      Refusal{"HRank", [](Call& c) { c.outputs.h = bf16({4, 4, 32, 64}); }, kValue, "h",
                              "rank 5, [B,NC,HV,K,V]", "rank 4, [4,4,32,64]"}),
    name_of_param);

// cu_seqlens on a GPU, beside a dense call's tensors there.
void move_to_gpu(Call& call) {
  constexpr Device kGpu{DeviceType::kCuda, 0};
  ChunkKdaFwdInputs& in = call.inputs;
  in.initial_state = {};
  for (TensorView* view : {&in.q, &in.k, &in.v, &in.g, &in.beta, &in.A_log, &in.dt_bias}) {
    if (view->rank == 4) view->shape[0] = 1;
    if (view == &in.beta) view->shape[0] = 1;
    view->device = kGpu;
  }
  in.cu_seqlens = TensorView::contiguous(nullptr, Dtype::kInt32, {4}, kGpu);
}

TEST(DeviceSequences, AreCountedByTheirMost) {
  Call call;
  make_dense(call);
  move_to_gpu(call);
  const ChunkKdaFwdDims dims = chunk_kda_fwd_dims(call.inputs, call.attributes);
  EXPECT_EQ(dims.N, 3);
  EXPECT_EQ(dims.NC, 4);  // 64 + 35 + 1 tokens have 3, 1 + 1 + 98 have 4
  const ChunkKdaFwdOutputs outputs = chunk_kda_fwd_outputs(call.inputs, call.attributes);
  EXPECT_EQ(outputs.h.rank, 4);
  EXPECT_EQ(outputs.h.shape[0], 4);
  EXPECT_EQ(outputs.final_state.shape[0], 3);
  call.attributes.max_chunks = 7;
  EXPECT_EQ(chunk_kda_fwd_outputs(call.inputs, call.attributes).h.shape[0], 7);
}

class DeviceSequenceRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(DeviceSequenceRefusals, NameArgumentExpectedAndGot) {
  Call call;
  make_dense(call);
  move_to_gpu(call);
  ASSERT_NO_THROW((void)make_problem(call.inputs, nullptr, call.attributes));
  GetParam().change(call);
  expect_refused(GetParam(), [&] { (void)make_problem(call.inputs, nullptr, call.attributes); });
}

void set_cu_seqlens(Call& call, std::vector<std::int64_t> values) {
  call.cu_seqlens = std::move(values);
  call.attributes.cu_seqlens = call.cu_seqlens;
}

void set_chunk_indices(Call& call, std::vector<std::int64_t> values) {
  call.chunk_indices = std::move(values);
  call.attributes.chunk_indices = call.chunk_indices;
}

INSTANTIATE_TEST_SUITE_P(
    Check, DeviceSequenceRefusals,
    ::testing::Values(
        Refusal{"Both",
                [](Call& c) {
                  set_cu_seqlens(c, {0, 100});
                },
                kValue, "cu_seqlens", "an attribute or an input", "both"},
        Refusal{"Dtype", [](Call& c) { c.inputs.cu_seqlens.dtype = Dtype::kFloat32; }, kDtype, "cu_seqlens",
                "dtype int32 or int64", "float32"},
        Refusal{"OtherDevice", [](Call& c) { c.inputs.cu_seqlens.device.index = 1; }, kValue, "cu_seqlens",
                "device cuda:0", "cuda:1"},
        Refusal{"Rank", [](Call& c) { c.inputs.cu_seqlens.rank = 2; }, kValue, "cu_seqlens", "rank 1, [N+1]",
                "rank 2, [4,0]"},
        Refusal{"OneValue", [](Call& c) { c.inputs.cu_seqlens.shape[0] = 1; }, kValue, "cu_seqlens",
                "N + 1 values with N in 1..1024", "1 values"},
        Refusal{"TooMany", [](Call& c) { c.inputs.cu_seqlens.shape[0] = 1026; }, kValue, "cu_seqlens",
                "N + 1 values with N in 1..1024", "1026 values"},
        Refusal{"Batch",
                [](Call& c) {
                  for (TensorView* view : {&c.inputs.q, &c.inputs.k, &c.inputs.v, &c.inputs.g, &c.inputs.beta}) {
                    view->shape[0] = 2;
                  }
                },
                kValue, "q", "B = 1, as cu_seqlens is given", "B = 2"},
        Refusal{"ChunkIndices",
                [](Call& c) {
                  c.chunk_indices = {0, 0};
                  c.attributes.chunk_indices = c.chunk_indices;
                },
                kValue, "chunk_indices", "none, as cu_seqlens is on the device", "some"},
        Refusal{"NegativeChunks", [](Call& c) { c.attributes.max_chunks = -1; }, kValue, "max_chunks", "0 or more",
                "-1"},
        Refusal{"NoDeviceSequences",
                [](Call& c) {
                  c.inputs.cu_seqlens = {};
                  c.attributes.max_chunks = 3;
                },
                kValue, "max_chunks", "none, as cu_seqlens is not on the device", "3"}),
    name_of_param);

TEST(DeviceSequences, AreRefusedOnTheCpu) {
  Call call;
  make_packed(call);
  call.attributes.cu_seqlens.reset();
  call.attributes.chunk_indices.reset();
  call.inputs.initial_state = {};
  call.inputs.cu_seqlens = TensorView::contiguous(nullptr, Dtype::kInt64, {4});
  expect_refused(
      {"", {}, kValue, "cu_seqlens", "numbers among the attributes, or a tensor on a GPU", "a tensor on the CPU"},
      [&] { (void)make_problem(call.inputs, nullptr, call.attributes); });
}

INSTANTIATE_TEST_SUITE_P(
    Metadata, PackedRefusals,
    ::testing::Values(Refusal{"Empty", [](Call& c) { set_cu_seqlens(c, {}); }, kValue, "cu_seqlens",
                              "N + 1 values with N in 1..1024", "0 values"},
                      Refusal{"OneValue", [](Call& c) { set_cu_seqlens(c, {0}); }, kValue, "cu_seqlens",
                              "N + 1 values with N in 1..1024", "1 values"},
                      Refusal{"TooMany", [](Call& c) { set_cu_seqlens(c, std::vector<std::int64_t>(1026, 0)); }, kValue,
                              "cu_seqlens", "N + 1 values with N in 1..1024", "1026 values"},
                      Refusal{"NullData",
                              [](Call& c) {
                                c.attributes.cu_seqlens =
                                    std::span<const std::int64_t>(static_cast<std::int64_t*>(nullptr), 3);
                              },
                              kMissing, "cu_seqlens", "data", "a null pointer"},
                      Refusal{"NotFromZero",
                              [](Call& c) {
                                set_cu_seqlens(c, {1, 65, 65, 100});
                              },
                              kValue, "cu_seqlens", "cu_seqlens[0] = 0", "1"},
                      Refusal{"NotToT",
                              [](Call& c) {
                                set_cu_seqlens(c, {0, 0, 65, 99});
                              },
                              kValue, "cu_seqlens", "cu_seqlens[3] = T = 100", "99"},
                      Refusal{"BeyondT",
                              [](Call& c) {
                                set_cu_seqlens(c, {0, 0, 65, kHuge});
                              },
                              kValue, "cu_seqlens", "cu_seqlens[3] = T = 100", "9223372036854775807"},
                      Refusal{"Decreasing",
                              [](Call& c) {
                                set_cu_seqlens(c, {0, 66, 65, 100});
                              },
                              kValue, "cu_seqlens", "cu_seqlens[2] >= cu_seqlens[1] = 66", "65"},
                      Refusal{"Negative",
                              [](Call& c) {
                                set_cu_seqlens(c, {0, kLowest, 65, 100});
                              },
                              kValue, "cu_seqlens", "cu_seqlens[1] >= cu_seqlens[0] = 0", "-9223372036854775808"},
                      Refusal{"BatchOfTwo",
                              [](Call& c) {
                                c.inputs.q = bf16({2, 100, 2, 32});
                              },
                              kValue, "q", "B = 1, as cu_seqlens is given", "B = 2"},
                      Refusal{"NoBatch",
                              [](Call& c) {
                                c.inputs.q = bf16({0, 100, 2, 32});
                              },
                              kValue, "q", "B = 1, as cu_seqlens is given", "B = 0"},
                      Refusal{"ChunkIndicesShort",
                              [](Call& c) {
                                set_chunk_indices(c, {1, 0, 1, 1});
                              },
                              kValue, "chunk_indices", "2*NC = 6 values", "4 values"},
                      Refusal{"ChunkIndicesEmpty", [](Call& c) { set_chunk_indices(c, {}); }, kValue, "chunk_indices",
                              "2*NC = 6 values", "0 values"},
                      Refusal{"ChunkIndicesNull",
                              [](Call& c) {
                                c.attributes.chunk_indices =
                                    std::span<const std::int64_t>(static_cast<std::int64_t*>(nullptr), 6);
                              },
                              kMissing, "chunk_indices", "data", "a null pointer"},
                      Refusal{"ChunkIndicesSequence",
                              [](Call& c) {
                                set_chunk_indices(c, {1, 0, 0, 1, 2, 0});
                              },
                              kValue, "chunk_indices", "chunk_indices[2] = 1 (sequence)", "0"},
                      Refusal{"ChunkIndicesChunk",
                              [](Call& c) {
                                set_chunk_indices(c, {1, 0, 1, 1, 2, 1});
                              },
                              kValue, "chunk_indices", "chunk_indices[5] = 0 (chunk within its sequence)", "1"},
                      Refusal{"InitialStateOfDense",
                              [](Call& c) {
                                c.inputs.initial_state = f32({1, 4, 32, 64});
                              },
                              kValue, "initial_state", "shape [N,HV,K,V] = [3,4,32,64]", "[1,4,32,64]"},
                      Refusal{"HRank3Chunks",
                              [](Call& c) {
                                c.outputs.h = bf16({2, 4, 32, 64});
                              },
                              kValue, "h", "shape [NC,HV,K,V] = [3,4,32,64]", "[2,4,32,64]"},
                      Refusal{"HWithWrongBatch",
                              [](Call& c) {
                                c.outputs.h = bf16({3, 3, 4, 32, 64});
                              },
                              kValue, "h", "rank 4, [NC,HV,K,V]", "rank 5, [3,3,4,32,64]"}),
    name_of_param);

// A view of the memory of another one.
TensorView on_memory_of(TensorView view, const TensorView& other, std::size_t bytes = 0) {
  view.data = static_cast<std::byte*>(other.data) + bytes;
  return view;
}

INSTANTIATE_TEST_SUITE_P(
    Data, PointerRefusals,
    ::testing::Values(
        Refusal{"NullQ", [](Call& c) { c.inputs.q.data = nullptr; }, kMissing, "q", "data", "a null pointer"},
        Refusal{"NullBeta", [](Call& c) { c.inputs.beta.data = nullptr; }, kMissing, "beta", "data", "a null pointer"},
        Refusal{"NullInitialState", [](Call& c) { c.inputs.initial_state.data = nullptr; }, kMissing, "initial_state",
                "data", "a null pointer"},
        Refusal{"NullAttnOut", [](Call& c) { c.outputs.attn_out.data = nullptr; }, kMissing, "attn_out", "data",
                "a null pointer"},
        Refusal{"NullH", [](Call& c) { c.outputs.h.data = nullptr; }, kMissing, "h", "data", "a null pointer"},
        Refusal{"BeyondTheAddressSpace",
                [](Call& c) { c.inputs.A_log.data = reinterpret_cast<void*>(~std::uintptr_t{0} - 7); }, kValue, "A_log",
                "addresses within 64 bits", "float32 [4] strides [1] on cpu"},
        Refusal{"OutputOnInput", [](Call& c) { c.outputs.attn_out = on_memory_of(c.outputs.attn_out, c.inputs.v); },
                kValue, "attn_out", "memory of its own", "memory shared with v"},
        Refusal{"OutputOnTheEndOfInput",
                [](Call& c) {
                  const std::size_t bytes = std::size_t{2} * 100 * 4 * 32 * 4;
                  c.memory.emplace_back(2 * bytes);
                  c.inputs.g.data = c.memory.back().data();
                  c.outputs.w = on_memory_of(c.outputs.w, c.inputs.g, bytes - 2);
                },
                kValue, "w", "memory of its own", "memory shared with g"},
        Refusal{"FinalStateOnInitialState",
                [](Call& c) { c.outputs.final_state = on_memory_of(c.outputs.final_state, c.inputs.initial_state); },
                kValue, "final_state", "memory of its own", "memory shared with initial_state"},
        Refusal{"TwoOutputs", [](Call& c) { c.outputs.v_new = on_memory_of(c.outputs.v_new, c.outputs.u); }, kValue,
                "u", "memory of its own", "memory shared with v_new"}),
    name_of_param);

TEST(Check, MessagesHaveTheStatusOfTheirKind) {
  EXPECT_EQ(Error(kMissing, "").status(), Status::kNullPointer);
  EXPECT_EQ(Error(kDtype, "").status(), Status::kInvalidArgument);
  EXPECT_EQ(Error(kValue, "").status(), Status::kInvalidArgument);
  EXPECT_EQ(Error(ErrorKind::kUnavailable, "").status(), Status::kRuntimeFailure);
  EXPECT_EQ(Error(ErrorKind::kOutOfMemory, "").status(), Status::kRuntimeFailure);
  EXPECT_EQ(Error(ErrorKind::kInternal, "").status(), Status::kInternal);
}

class LegalLayouts : public ::testing::TestWithParam<Layout> {};

TEST_P(LegalLayouts, DenseSizesAndStrides) {
  Call call;
  make_dense(call, GetParam());
  const ChunkKdaFwdProblem problem = make_problem(call.inputs, &call.outputs, call.attributes);
  const bool has_batch = call.inputs.q.rank == 4;
  EXPECT_EQ(problem.dims.B, has_batch ? 2 : 1);
  EXPECT_EQ(problem.dims.N, has_batch ? 2 : 1);
  EXPECT_EQ(problem.dims.T, 100);
  EXPECT_EQ(problem.dims.H, 2);
  EXPECT_EQ(problem.dims.HV, 4);
  EXPECT_EQ(problem.dims.K, 32);
  EXPECT_EQ(problem.dims.V, 64);
  EXPECT_EQ(problem.dims.NC, 2);
  const bool by_head = GetParam() == Layout::kBNSD || GetParam() == Layout::kNTD;
  EXPECT_EQ(problem.q.offset(0, 1, 0), by_head ? 32 : 64);
  EXPECT_EQ(problem.q.offset(0, 0, 1), by_head ? 3200 : 32);
  EXPECT_EQ(problem.beta.offset(0, 1, 0), by_head ? 1 : 4);
  EXPECT_EQ(problem.gk.offset(0, 1, 0), 32);
  EXPECT_EQ(problem.attn_out.offset(0, 1, 0), 256);
  EXPECT_EQ(problem.h.chunk, 4 * 32 * 64);
  EXPECT_EQ(problem.h.seq, has_batch ? 2 * 4 * 32 * 64 : 0);
  EXPECT_EQ(problem.group(), 2);
}

TEST_P(LegalLayouts, PackedSequences) {
  Call call;
  make_packed(call, GetParam());
  const ChunkKdaFwdProblem problem = make_problem(call.inputs, &call.outputs, call.attributes);
  EXPECT_EQ(problem.dims.N, 3);
  EXPECT_EQ(problem.dims.NC, 3);
  EXPECT_EQ(problem.h.seq, 0);
  const Sequence second = problem.sequence(1);
  EXPECT_EQ(second.first_token, 0);
  EXPECT_EQ(second.tokens, 65);
  EXPECT_EQ(second.first_chunk, 0);
  const Sequence third = problem.sequence(2);
  EXPECT_EQ(third.first_token, 65);
  EXPECT_EQ(third.tokens, 35);
  EXPECT_EQ(third.first_chunk, 2);
}

INSTANTIATE_TEST_SUITE_P(All, LegalLayouts, ::testing::Values(Layout::kBSND, Layout::kBNSD, Layout::kTND, Layout::kNTD),
                         [](const auto& param) { return std::string(name_of(param.param)); });

TEST(Check, PackedHMayHaveABatchAxis) {
  Call call;
  make_packed(call);
  call.outputs.h = bf16({1, 3, 4, 32, 64});
  EXPECT_EQ(make_problem(call.inputs, &call.outputs, call.attributes).h.chunk, 4 * 32 * 64);
  call.attributes.layout = Layout::kTND;
  Call rank3;
  make_packed(rank3, Layout::kTND);
  rank3.outputs.h = bf16({1, 3, 4, 32, 64});
  EXPECT_THROW((void)make_problem(rank3.inputs, &rank3.outputs, rank3.attributes), Error);
}

TEST(Check, StateVFirstSwapsStrides) {
  Call call;
  call.attributes.state_v_first = true;
  make_dense(call);
  const ChunkKdaFwdProblem problem = make_problem(call.inputs, &call.outputs, call.attributes);
  for (const StateStrides& strides : {problem.initial_state, problem.final_state, problem.h}) {
    EXPECT_EQ(strides.k, 1);
    EXPECT_EQ(strides.v, 32);
  }
}

TEST(Check, OptionalTensorsMayBeAbsent) {
  Call call;
  make_dense(call);
  call.inputs.dt_bias = {};
  call.inputs.initial_state = {};
  const TensorView attn_out = call.outputs.attn_out;
  call.outputs = {};
  call.outputs.attn_out = attn_out;
  const ChunkKdaFwdProblem problem = make_problem(call.inputs, &call.outputs, call.attributes);
  EXPECT_TRUE(problem.has_A_log);
  EXPECT_FALSE(problem.has_dt_bias || problem.has_initial_state || problem.has_final_state || problem.has_gk);
  EXPECT_FALSE(problem.has_Aqk || problem.has_Akk || problem.has_w || problem.has_u || problem.has_qg ||
               problem.has_kg);
  EXPECT_FALSE(problem.has_v_new || problem.has_h);
}

TEST(Check, ActivatedGateNeitherNeedsNorReadsGateParameters) {
  Call call;
  make_dense(call);
  call.attributes.use_gate_in_kernel = false;
  call.attributes.lower_bound = kNan;
  call.inputs.A_log = f32({7, 7});
  call.inputs.A_log.device = {DeviceType::kCuda, 3};
  call.inputs.dt_bias = f32({});
  call.inputs.dt_bias.rank = 99;
  const ChunkKdaFwdProblem problem = make_problem(call.inputs, &call.outputs, call.attributes);
  EXPECT_EQ(problem.gate_mode, GateMode::kActivated);
  EXPECT_FALSE(problem.has_A_log || problem.has_dt_bias);
}

TEST(Check, LowerBoundCountsOnlyWithSafeGateInKernel) {
  Call call;
  make_dense(call);
  call.attributes.safe_gate = false;
  call.attributes.lower_bound = 17;
  EXPECT_EQ(make_problem(call.inputs, &call.outputs, call.attributes).gate_mode, GateMode::kSoftplus);
  call.attributes.safe_gate = true;
  call.attributes.lower_bound = -5;
  EXPECT_EQ(make_problem(call.inputs, &call.outputs, call.attributes).lower_bound, -5.0F);
}

TEST(Check, InputsMayHaveAnyStrides) {
  Call call;
  make_dense(call);
  call.inputs.q.strides = {0, -64, 0, -1};
  call.inputs.g.strides = {1, 1, 1, 1};
  call.inputs.initial_state.strides = {0, 0, 0, 0};
  const ChunkKdaFwdProblem problem = make_problem(call.inputs, &call.outputs, call.attributes);
  EXPECT_EQ(problem.q.token, -64);
  EXPECT_EQ(problem.q.inner, -1);
}

TEST(Check, StridesThatNothingUsesMayBeGarbage) {
  Call call;
  make_packed(call);
  call.inputs.q.strides[0] = kHuge;
  call.inputs.k.strides[0] = kLowest;
  call.outputs.attn_out.strides[0] = kHuge;
  const ChunkKdaFwdProblem problem = make_problem(call.inputs, &call.outputs, call.attributes);
  EXPECT_EQ(problem.q.batch, 0);
  EXPECT_EQ(problem.k.batch, 0);
  EXPECT_EQ(problem.attn_out.batch, 0);
}

TEST(Check, NoTokensAndNoBatch) {
  ChunkKdaFwdInputs inputs{.q = bf16({2, 0, 2, 32}),
                           .k = bf16({2, 0, 2, 32}),
                           .v = bf16({2, 0, 4, 64}),
                           .g = f32({2, 0, 4, 32}),
                           .beta = f32({2, 0, 4})};
  const ChunkKdaFwdAttributes attributes{.scale = 1.0};
  EXPECT_EQ(chunk_kda_fwd_dims(inputs, attributes).NC, 0);
  const ChunkKdaFwdOutputs outputs = chunk_kda_fwd_outputs(inputs, attributes);
  EXPECT_EQ(outputs.final_state.numel(), 2 * 4 * 32 * 64);
  EXPECT_EQ(outputs.h.numel(), 0);
  inputs = {.q = bf16({0, 5, 2, 32}),
            .k = bf16({0, 5, 2, 32}),
            .v = bf16({0, 5, 4, 64}),
            .g = f32({0, 5, 4, 32}),
            .beta = f32({0, 5, 4})};
  EXPECT_EQ(chunk_kda_fwd_dims(inputs, attributes).N, 0);
  EXPECT_EQ(chunk_kda_fwd_dims(inputs, attributes).NC, 1);
}

TEST(Check, DenseBatchCostsNothing) {
  constexpr std::int64_t kMany = std::int64_t{1} << 40;
  const ChunkKdaFwdInputs inputs{.q = bf16({kMany, 0, 2, 32}),
                                 .k = bf16({kMany, 0, 2, 32}),
                                 .v = bf16({kMany, 0, 4, 64}),
                                 .g = f32({kMany, 0, 4, 32}),
                                 .beta = f32({kMany, 0, 4})};
  const ChunkKdaFwdAttributes attributes{.scale = 1.0};
  EXPECT_EQ(chunk_kda_fwd_dims(inputs, attributes).N, kMany);
  const ChunkKdaFwdProblem problem = make_problem(inputs, nullptr, attributes);
  EXPECT_EQ(problem.sequence(kMany - 1).batch, kMany - 1);
}

TEST(Check, OutputsOfAStridedBufferMayInterleave) {
  Call call;
  make_dense(call);
  call.give_data();
  // u and v_new as the two halves of rows of 2 V.
  call.memory.emplace_back(std::size_t{2} * 4 * 100 * 128 * 2);
  for (TensorView* view : {&call.outputs.u, &call.outputs.v_new}) {
    view->strides = {4 * 100 * 128, 100 * 128, 128, 1};
    view->data = call.memory.back().data() + (view == &call.outputs.u ? 0 : 128);
  }
  ASSERT_NO_THROW((void)make_problem(call.inputs, &call.outputs, call.attributes));
  EXPECT_NO_THROW(check_pointers(call.inputs, call.outputs));
}

TEST(Check, InputsMayShareMemory) {
  Call call;
  make_dense(call);
  call.give_data();
  call.inputs.k.data = call.inputs.q.data;
  EXPECT_NO_THROW(check_pointers(call.inputs, call.outputs));
}

TEST(Check, LayoutNames) {
  for (const Layout layout : {Layout::kBSND, Layout::kBNSD, Layout::kTND, Layout::kNTD}) {
    EXPECT_EQ(parse_layout(name_of(layout)), layout);
  }
  for (const char* name : {"", "bsnd", "BSND ", "BSH"}) EXPECT_THROW((void)parse_layout(name), Error) << name;
}

TEST(Tensor, MakersCheckTheirArguments) {
  EXPECT_THROW((void)TensorView::contiguous(nullptr, Dtype::kFloat32, {1, 1, 1, 1, 1, 1, 1, 1, 1}), Error);
  EXPECT_THROW((void)TensorView::contiguous(nullptr, Dtype::kFloat32, {2, -1}), Error);
  EXPECT_THROW((void)TensorView::strided(nullptr, Dtype::kFloat32, {2, 1}, {1}), Error);
  const TensorView view = TensorView::contiguous(nullptr, Dtype::kFloat32, {2, 3, 4});
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(TensorView{}.numel(), 0);
  EXPECT_EQ(TensorView::contiguous(nullptr, Dtype::kFloat32, {kHuge, kHuge, 0}).numel(), 0);
  EXPECT_EQ(TensorView::contiguous(nullptr, Dtype::kFloat32, {}).numel(), 1);
}

TEST(Tensor, Names) {
  EXPECT_EQ(name_of(Dtype::kFloat32), "float32");
  EXPECT_EQ(name_of(Dtype::kBFloat16), "bfloat16");
  EXPECT_EQ(name_of(Dtype::kInt64), "int64");
  EXPECT_EQ(name_of(Device{}), "cpu");
  EXPECT_EQ(name_of(Device{DeviceType::kCuda, 2}), "cuda:2");
}

}  // namespace
}  // namespace kda
