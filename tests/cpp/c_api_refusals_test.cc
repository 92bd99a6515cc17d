// Every illegal input of the contract through the C API: the right status, and a message that names the argument, what
// was expected and what was given. Nothing is written.

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/c_door.h"
#include "support/call.h"

namespace kda::testing {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int kNullPointer = 161001;
constexpr int kInvalid = 161002;

// What a refusal may change: the C++ description from which the C arguments are made, and then those.
struct Arguments {
  Call call;
  std::map<std::string, CTensorOptions> options;
  std::function<void(CArguments&)> finish = [](CArguments&) {};
  bool has_workspace_size = true;
  bool has_executor = true;
};

struct Refusal {
  std::string name;
  std::function<void(Arguments&)> change;
  int status;
  std::string argument;
  std::string expected;
  std::string got;
};

void PrintTo(const Refusal& refusal, std::ostream* stream) { *stream << refusal.name; }

using Shape = std::initializer_list<std::int64_t>;
using Change = std::function<void(Arguments&)>;

TensorView shaped(Dtype dtype, Shape shape) { return TensorView::contiguous(nullptr, dtype, shape); }

Change finish(std::function<void(CArguments&)> change) {
  return [change](Arguments& a) { a.finish = change; };
}
Change without(std::string name) {
  return finish([name](CArguments& c) { c.tensors[name] = nullptr; });
}
Change destroyed(std::string name) {
  return finish([name](CArguments& c) {
    aclTensor* stale = c.tensors[name].get();
    c.tensors[name] = nullptr;
    c.tensors[name] = {stale, [](aclTensor*) {}};
  });
}
Change with_type(std::string name, aclDataType type) {
  return [name, type](Arguments& a) { a.options[name].data_type = type; };
}
Change with_format(std::string name, aclFormat format) {
  return [name, format](Arguments& a) { a.options[name].format = format; };
}
Change input(TensorView ChunkKdaFwdInputs::*member, Dtype dtype, Shape shape) {
  return [member, view = shaped(dtype, shape)](Arguments& a) { a.call.inputs.*member = view; };
}
Change output(TensorView ChunkKdaFwdOutputs::*member, Dtype dtype, Shape shape) {
  return [member, view = shaped(dtype, shape)](Arguments& a) { a.call.outputs.*member = view; };
}
Change extent(TensorView ChunkKdaFwdInputs::*member, std::size_t axis, std::int64_t value) {
  return [member, axis, value](Arguments& a) { (a.call.inputs.*member).shape[axis] = value; };
}
Change cu_seqlens(std::vector<std::int64_t> values) {
  return finish([values](CArguments& c) { c.cu_seqlens = make_c_int_array(values); });
}
Change chunk_indices(std::vector<std::int64_t> values) {
  return finish([values](CArguments& c) { c.chunk_indices = make_c_int_array(values); });
}

void expect_refused(const Refusal& refusal, Arguments& arguments) {
  refusal.change(arguments);
  CArguments c =
      make_c_arguments(arguments.call.inputs, arguments.call.outputs, arguments.call.attributes, arguments.options);
  arguments.finish(c);
  std::uint64_t workspace_size = 77;
  aclOpExecutor* const untouched = reinterpret_cast<aclOpExecutor*>(88);
  aclOpExecutor* executor = untouched;
  (void)aclGetRecentErrMsg();
  EXPECT_EQ(
      plan(c, arguments.has_workspace_size ? &workspace_size : nullptr, arguments.has_executor ? &executor : nullptr),
      refusal.status);
  EXPECT_EQ(take_error(),
            "chunk_kda_fwd: " + refusal.argument + ": expected " + refusal.expected + ", got " + refusal.got);
  EXPECT_EQ(workspace_size, 77U);
  EXPECT_EQ(executor, untouched);
}

class CDenseRefusals : public ::testing::TestWithParam<Refusal> {};
class CPackedRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(CDenseRefusals, HaveStatusAndMessage) {
  Arguments arguments;
  make_dense(arguments.call);
  arguments.call.give_data();
  expect_refused(GetParam(), arguments);
}

TEST_P(CPackedRefusals, HaveStatusAndMessage) {
  Arguments arguments;
  make_packed(arguments.call);
  arguments.call.give_data();
  expect_refused(GetParam(), arguments);
}

TEST(CRefusals, WhatTheyChangeIsLegal) {
  for (const auto make : {make_dense, make_packed}) {
    Call legal;
    make(legal, Layout::kBSND);
    legal.give_data();
    EXPECT_EQ(call(make_c_arguments(legal.inputs, legal.outputs, legal.attributes)), ACL_SUCCESS) << take_error();
  }
}

std::string name_of_param(const ::testing::TestParamInfo<Refusal>& info) { return info.param.name; }

constexpr auto kF32 = Dtype::kFloat32;
constexpr auto kBf16 = Dtype::kBFloat16;
using In = ChunkKdaFwdInputs;
using Out = ChunkKdaFwdOutputs;

INSTANTIATE_TEST_SUITE_P(
    Presence, CDenseRefusals,
    ::testing::Values(Refusal{"NoQ", without("q"), kNullPointer, "q", "a tensor", "none"},
                      Refusal{"NoK", without("k"), kNullPointer, "k", "a tensor", "none"},
                      Refusal{"NoV", without("v"), kNullPointer, "v", "a tensor", "none"},
                      Refusal{"NoG", without("g"), kNullPointer, "g", "a tensor", "none"},
                      Refusal{"NoBeta", without("beta"), kNullPointer, "beta", "a tensor", "none"},
                      Refusal{"NoALog", without("A_log"), kNullPointer, "A_log",
                              "a tensor, as use_gate_in_kernel is set", "none"},
                      Refusal{"NoAttnOut", without("attn_out"), kNullPointer, "attn_out", "a tensor", "none"},
                      Refusal{"NoAqk", without("Aqk"), kNullPointer, "Aqk", "a tensor", "none"},
                      Refusal{"NoAkk", without("Akk"), kNullPointer, "Akk", "a tensor", "none"},
                      Refusal{"NoWorkspaceSize", [](Arguments& a) { a.has_workspace_size = false; }, kNullPointer,
                              "workspaceSize", "where to store it", "a null pointer"},
                      Refusal{"NoExecutor", [](Arguments& a) { a.has_executor = false; }, kNullPointer, "executor",
                              "where to store it", "a null pointer"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Handles, CDenseRefusals,
    ::testing::Values(
        Refusal{"DestroyedQ", destroyed("q"), kInvalid, "q", "a live aclTensor", "one that is destroyed or unknown"},
        Refusal{"DestroyedH", destroyed("h"), kInvalid, "h", "a live aclTensor", "one that is destroyed or unknown"},
        Refusal{"MadeUp", finish([](CArguments& c) {
                  c.tensors["beta"] = {reinterpret_cast<aclTensor*>(0x1234), [](aclTensor*) {}};
                }),
                kInvalid, "beta", "a live aclTensor", "one that is destroyed or unknown"},
        Refusal{"ArrayAsTensor", finish([](CArguments& c) {
                  static const CIntArray array = make_c_int_array({});
                  c.tensors["g"] = {reinterpret_cast<aclTensor*>(array.get()), [](aclTensor*) {}};
                }),
                kInvalid, "g", "a live aclTensor", "one that is destroyed or unknown"},
        Refusal{"UnknownCuSeqlens", finish([](CArguments& c) {
                  c.cu_seqlens = {reinterpret_cast<aclIntArray*>(&c), [](aclIntArray*) {}};
                }),
                kInvalid, "cu_seqlens", "a live aclIntArray", "one that is destroyed or unknown"},
        Refusal{"UnknownChunkIndices", finish([](CArguments& c) {
                  c.chunk_indices = {reinterpret_cast<aclIntArray*>(&c), [](aclIntArray*) {}};
                }),
                kInvalid, "chunk_indices", "a live aclIntArray", "one that is destroyed or unknown"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(Attributes, CDenseRefusals,
                         ::testing::Values(Refusal{"NullLayout", finish([](CArguments& c) { c.layout = nullptr; }),
                                                   kInvalid, "layout", "BSND, BNSD, TND or NTD", "a null pointer"},
                                           Refusal{"EmptyLayout", finish([](CArguments& c) { c.layout = ""; }),
                                                   kInvalid, "layout", "BSND, BNSD, TND or NTD", "\"\""},
                                           Refusal{"LowerCaseLayout", finish([](CArguments& c) { c.layout = "bsnd"; }),
                                                   kInvalid, "layout", "BSND, BNSD, TND or NTD", "\"bsnd\""},
                                           Refusal{"OtherLayout", finish([](CArguments& c) { c.layout = "BSH"; }),
                                                   kInvalid, "layout", "BSND, BNSD, TND or NTD", "\"BSH\""},
                                           Refusal{"ChunkSize32", finish([](CArguments& c) { c.chunk_size = 32; }),
                                                   kInvalid, "chunk_size", "64 or 128", "32"},
                                           Refusal{"ChunkSize0", finish([](CArguments& c) { c.chunk_size = 0; }),
                                                   kInvalid, "chunk_size", "64 or 128", "0"},
                                           Refusal{"ChunkSizeHuge", finish([](CArguments& c) { c.chunk_size = kHuge; }),
                                                   kInvalid, "chunk_size", "64 or 128", "9223372036854775807"},
                                           Refusal{"ScaleNan", finish([](CArguments& c) { c.scale = kNan; }), kInvalid,
                                                   "scale", "a finite number", "nan"},
                                           Refusal{"ScaleInf", finish([](CArguments& c) { c.scale = -kInf; }), kInvalid,
                                                   "scale", "a finite number", "-inf"},
                                           Refusal{"ScaleTooLarge", finish([](CArguments& c) { c.scale = 3.5e38; }),
                                                   kInvalid, "scale", "a number that float32 can hold", "3.5e+38"},
                                           Refusal{"LowerBoundZero", finish([](CArguments& c) { c.lower_bound = 0; }),
                                                   kInvalid, "lower_bound", "a number in [-5, 0)", "0"},
                                           Refusal{"LowerBoundLow", finish([](CArguments& c) { c.lower_bound = -5.5; }),
                                                   kInvalid, "lower_bound", "a number in [-5, 0)", "-5.5"},
                                           Refusal{"LowerBoundNan", finish([](CArguments& c) { c.lower_bound = kNan; }),
                                                   kInvalid, "lower_bound", "a number in [-5, 0)", "nan"},
                                           Refusal{"ChunkIndicesAlone", chunk_indices({0, 0, 0, 1}), kInvalid,
                                                   "chunk_indices", "none, as cu_seqlens is absent", "some"}),
                         name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Dtypes, CDenseRefusals,
    ::testing::Values(
        Refusal{"QFloat", with_type("q", ACL_FLOAT), kInvalid, "q", "dtype float16 or bfloat16", "float32"},
        Refusal{"QInt8", with_type("q", ACL_INT8), kInvalid, "q", "dtype float16 or bfloat16", "int8"},
        Refusal{"QUnnamed", with_type("q", static_cast<aclDataType>(5)), kInvalid, "q", "dtype float16 or bfloat16",
                "aclDataType 5"},
        Refusal{"QUndefined", with_type("q", ACL_DT_UNDEFINED), kInvalid, "q", "dtype float16 or bfloat16",
                "aclDataType -1"},
        Refusal{"K", with_type("k", ACL_FLOAT16), kInvalid, "k", "dtype bfloat16", "float16"},
        Refusal{"V", with_type("v", ACL_FLOAT), kInvalid, "v", "dtype bfloat16", "float32"},
        Refusal{"VBool", with_type("v", ACL_BOOL), kInvalid, "v", "dtype float16 or bfloat16", "bool"},
        Refusal{"GHalf", with_type("g", ACL_FLOAT16), kInvalid, "g", "dtype float32 or bfloat16", "float16"},
        Refusal{"GUint16", with_type("g", ACL_UINT16), kInvalid, "g", "dtype float32 or bfloat16", "uint16"},
        Refusal{"BetaInt64", with_type("beta", ACL_INT64), kInvalid, "beta", "dtype float32 or bfloat16", "int64"},
        Refusal{"BetaComplex", with_type("beta", ACL_COMPLEX64), kInvalid, "beta", "dtype float32 or bfloat16",
                "complex64"},
        Refusal{"ALog", with_type("A_log", ACL_BF16), kInvalid, "A_log", "dtype float32", "bfloat16"},
        Refusal{"ALogFloat8", with_type("A_log", ACL_FLOAT8_E5M2), kInvalid, "A_log", "dtype float32", "float8_e5m2"},
        Refusal{"DtBias", with_type("dt_bias", ACL_DOUBLE), kInvalid, "dt_bias", "dtype float32", "float64"},
        Refusal{"InitialState", with_type("initial_state", ACL_BF16), kInvalid, "initial_state", "dtype float32",
                "bfloat16"},
        Refusal{"UnreadALog",
                [](Arguments& a) {
                  a.options["A_log"].data_type = ACL_INT32;
                  a.finish = [](CArguments& c) { c.use_gate_in_kernel = false; };
                },
                kInvalid, "A_log", "dtype float32", "int32"},
        Refusal{"AttnOut", with_type("attn_out", ACL_FLOAT), kInvalid, "attn_out", "dtype bfloat16", "float32"},
        Refusal{"FinalState", with_type("final_state", ACL_BF16), kInvalid, "final_state", "dtype float32", "bfloat16"},
        Refusal{"Gk", with_type("gk", ACL_BF16), kInvalid, "gk", "dtype float32", "bfloat16"},
        Refusal{"Aqk", with_type("Aqk", ACL_FLOAT), kInvalid, "Aqk", "dtype bfloat16", "float32"},
        Refusal{"VNew", with_type("v_new", ACL_UINT8), kInvalid, "v_new", "dtype float16 or bfloat16", "uint8"},
        Refusal{"H", with_type("h", ACL_FLOAT16), kInvalid, "h", "dtype bfloat16", "float16"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Views, CDenseRefusals,
    ::testing::Values(
        Refusal{"FormatNz", with_format("q", ACL_FORMAT_FRACTAL_NZ), kInvalid, "q", "format ACL_FORMAT_ND (2)", "29"},
        Refusal{"FormatNchw", with_format("initial_state", ACL_FORMAT_NCHW), kInvalid, "initial_state",
                "format ACL_FORMAT_ND (2)", "0"},
        Refusal{"FormatOfOutput", with_format("h", ACL_FORMAT_UNDEFINED), kInvalid, "h", "format ACL_FORMAT_ND (2)",
                "-1"},
        Refusal{"Rank9", [](Arguments& a) { a.call.inputs.g.rank = 9; }, kInvalid, "g", "rank 0..8", "rank 9"},
        Refusal{"NegativeExtent", extent(&In::k, 1, -1), kInvalid, "k", "extents >= 0", "[2,-1,2,32]"},
        Refusal{"LowestExtent", extent(&In::beta, 0, kLowest), kInvalid, "beta", "extents >= 0",
                "[-9223372036854775808,100,4]"},
        Refusal{"HugeStride", [](Arguments& a) { a.call.inputs.q.strides[0] = kHuge; }, kInvalid, "q",
                "addresses within 64 bits", "bfloat16 [2,100,2,32] strides [9223372036854775807,64,32,1] on cpu"},
        Refusal{"HugeOffset", finish([](CArguments& c) {
                  static float memory[4];
                  const std::int64_t dims[] = {4};
                  c.tensors["A_log"] = {
                      aclCreateTensor(dims, 1, ACL_FLOAT, nullptr, kHuge, ACL_FORMAT_ND, dims, 1, memory),
                      aclDestroyTensor};
                }),
                kInvalid, "A_log", "addresses within 64 bits", "offset 9223372036854775807"},
        Refusal{"AttnOutOverlapsItself", [](Arguments& a) { a.call.outputs.attn_out.strides[1] = 0; }, kInvalid,
                "attn_out", "strides that give every element memory of its own",
                "bfloat16 [2,100,4,64] strides [25600,0,64,1] on cpu"},
        Refusal{"GkOverlapsItself", [](Arguments& a) { a.call.outputs.gk.strides[1] = 3199; }, kInvalid, "gk",
                "strides that give every element memory of its own",
                "float32 [2,4,100,32] strides [12800,3199,32,1] on cpu"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Sizes, CDenseRefusals,
    ::testing::Values(
        Refusal{"QRank", input(&In::q, kBf16, {100, 2, 32}), kInvalid, "q", "rank 4, [B,T,H,K]", "rank 3, [100,2,32]"},
        Refusal{"QRank0", input(&In::q, kBf16, {}), kInvalid, "q", "rank 4, [B,T,H,K]", "rank 0, []"},
        Refusal{"Rank3Layout", finish([](CArguments& c) { c.layout = "TND"; }), kInvalid, "q", "rank 3, [T,H,K]",
                "rank 4, [2,100,2,32]"},
        Refusal{"KZero", extent(&In::q, 3, 0), kInvalid, "q", "K a multiple of 16 in 16..256", "K = 0"},
        Refusal{"KNoMultiple", extent(&In::q, 3, 24), kInvalid, "q", "K a multiple of 16 in 16..256", "K = 24"},
        Refusal{"KTooLarge", extent(&In::q, 3, 272), kInvalid, "q", "K a multiple of 16 in 16..256", "K = 272"},
        Refusal{"VNoMultiple", extent(&In::v, 3, 65), kInvalid, "v", "V a multiple of 16 in 16..256", "V = 65"},
        Refusal{"VTooLarge", extent(&In::v, 3, 512), kInvalid, "v", "V a multiple of 16 in 16..256", "V = 512"},
        Refusal{"NoHeads", extent(&In::q, 2, 0), kInvalid, "q", "H in 1..128", "H = 0"},
        Refusal{"TooManyHeads", extent(&In::q, 2, 129), kInvalid, "q", "H in 1..128", "H = 129"},
        Refusal{"FewerValueHeads", extent(&In::v, 2, 1), kInvalid, "v", "HV in H..128 with H = 2", "HV = 1"},
        Refusal{"TooManyValueHeads", extent(&In::v, 2, 130), kInvalid, "v", "HV in H..128 with H = 2", "HV = 130"},
        Refusal{"ValueHeadsNoMultiple", extent(&In::v, 2, 5), kInvalid, "v", "HV a multiple of H = 2", "HV = 5"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Shapes, CDenseRefusals,
    ::testing::Values(Refusal{"K", input(&In::k, kBf16, {2, 100, 2, 48}), kInvalid, "k",
                              "shape [B,T,H,K] = [2,100,2,32]", "[2,100,2,48]"},
                      Refusal{"VTokens", input(&In::v, kBf16, {2, 99, 4, 64}), kInvalid, "v",
                              "shape [B,T,HV,V] = [2,100,4,64]", "[2,99,4,64]"},
                      Refusal{"VBatch", input(&In::v, kBf16, {3, 100, 4, 64}), kInvalid, "v",
                              "shape [B,T,HV,V] = [2,100,4,64]", "[3,100,4,64]"},
                      Refusal{"G", input(&In::g, kF32, {2, 100, 2, 32}), kInvalid, "g",
                              "shape [B,T,HV,K] = [2,100,4,32]", "[2,100,2,32]"},
                      Refusal{"BetaRank", input(&In::beta, kF32, {2, 100, 4, 1}), kInvalid, "beta", "rank 3, [B,T,HV]",
                              "rank 4, [2,100,4,1]"},
                      Refusal{"Beta", input(&In::beta, kF32, {2, 4, 100}), kInvalid, "beta",
                              "shape [B,T,HV] = [2,100,4]", "[2,4,100]"},
                      Refusal{"ALog", input(&In::A_log, kF32, {2}), kInvalid, "A_log", "shape [HV] = [4]", "[2]"},
                      Refusal{"DtBias", input(&In::dt_bias, kF32, {32}), kInvalid, "dt_bias", "shape [HV*K] = [128]",
                              "[32]"},
                      Refusal{"InitialState", input(&In::initial_state, kF32, {1, 4, 32, 64}), kInvalid,
                              "initial_state", "shape [N,HV,K,V] = [2,4,32,64]", "[1,4,32,64]"},
                      Refusal{"InitialStateVFirst", finish([](CArguments& c) { c.state_v_first = true; }), kInvalid,
                              "initial_state", "shape [N,HV,V,K] = [2,4,64,32]", "[2,4,32,64]"},
                      Refusal{"AttnOut", output(&Out::attn_out, kBf16, {2, 4, 100, 64}), kInvalid, "attn_out",
                              "shape [B,T,HV,V] = [2,100,4,64]", "[2,4,100,64]"},
                      Refusal{"FinalState", output(&Out::final_state, kF32, {2, 4, 64, 32}), kInvalid, "final_state",
                              "shape [N,HV,K,V] = [2,4,32,64]", "[2,4,64,32]"},
                      Refusal{"Gk", output(&Out::gk, kF32, {2, 100, 4, 32}), kInvalid, "gk",
                              "shape [B,HV,T,K] = [2,4,100,32]", "[2,100,4,32]"},
                      Refusal{"Aqk", output(&Out::Aqk, kBf16, {2, 4, 100, 128}), kInvalid, "Aqk",
                              "shape [B,HV,T,C] = [2,4,100,64]", "[2,4,100,128]"},
                      Refusal{"Akk", output(&Out::Akk, kBf16, {4, 100, 64}), kInvalid, "Akk", "rank 4, [B,HV,T,C]",
                              "rank 3, [4,100,64]"},
                      Refusal{"W", output(&Out::w, kBf16, {2, 4, 100, 64}), kInvalid, "w",
                              "shape [B,HV,T,K] = [2,4,100,32]", "[2,4,100,64]"},
                      Refusal{"U", output(&Out::u, kBf16, {2, 4, 100, 32}), kInvalid, "u",
                              "shape [B,HV,T,V] = [2,4,100,64]", "[2,4,100,32]"},
                      Refusal{"Qg", output(&Out::qg, kBf16, {2, 2, 100, 32}), kInvalid, "qg",
                              "shape [B,HV,T,K] = [2,4,100,32]", "[2,2,100,32]"},
                      Refusal{"Kg", output(&Out::kg, kBf16, {2, 4, 128, 32}), kInvalid, "kg",
                              "shape [B,HV,T,K] = [2,4,100,32]", "[2,4,128,32]"},
                      Refusal{"VNew", output(&Out::v_new, kBf16, {1, 4, 100, 64}), kInvalid, "v_new",
                              "shape [B,HV,T,V] = [2,4,100,64]", "[1,4,100,64]"},
                      Refusal{"H", output(&Out::h, kBf16, {2, 3, 4, 32, 64}), kInvalid, "h",
                              "shape [B,NC,HV,K,V] = [2,2,4,32,64]", "[2,3,4,32,64]"},
                      Refusal{"HRank", output(&Out::h, kBf16, {4, 4, 32, 64}), kInvalid, "h", "rank 5, [B,NC,HV,K,V]",
                              "rank 4, [4,4,32,64]"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Metadata, CPackedRefusals,
    ::testing::Values(
        Refusal{"Empty", cu_seqlens({}), kInvalid, "cu_seqlens", "N + 1 values with N in 1..1024", "0 values"},
        Refusal{"OneValue", cu_seqlens({0}), kInvalid, "cu_seqlens", "N + 1 values with N in 1..1024", "1 values"},
        Refusal{"TooMany", cu_seqlens(std::vector<std::int64_t>(1026, 0)), kInvalid, "cu_seqlens",
                "N + 1 values with N in 1..1024", "1026 values"},
        Refusal{"NotFromZero", cu_seqlens({1, 65, 65, 100}), kInvalid, "cu_seqlens", "cu_seqlens[0] = 0", "1"},
        Refusal{"NotToT", cu_seqlens({0, 0, 65, 99}), kInvalid, "cu_seqlens", "cu_seqlens[3] = T = 100", "99"},
        Refusal{"Decreasing", cu_seqlens({0, 66, 65, 100}), kInvalid, "cu_seqlens",
                "cu_seqlens[2] >= cu_seqlens[1] = 66", "65"},
        Refusal{"Negative", cu_seqlens({0, kLowest, 65, 100}), kInvalid, "cu_seqlens",
                "cu_seqlens[1] >= cu_seqlens[0] = 0", "-9223372036854775808"},
        Refusal{"BatchOfTwo", input(&In::q, kBf16, {2, 100, 2, 32}), kInvalid, "q", "B = 1, as cu_seqlens is given",
                "B = 2"},
        Refusal{"ChunkIndicesShort", chunk_indices({1, 0, 1, 1}), kInvalid, "chunk_indices", "2*NC = 6 values",
                "4 values"},
        Refusal{"ChunkIndicesEmpty", chunk_indices({}), kInvalid, "chunk_indices", "2*NC = 6 values", "0 values"},
        Refusal{"ChunkIndicesSequence", chunk_indices({1, 0, 0, 1, 2, 0}), kInvalid, "chunk_indices",
                "chunk_indices[2] = 1 (sequence)", "0"},
        Refusal{"ChunkIndicesChunk", chunk_indices({1, 0, 1, 1, 2, 1}), kInvalid, "chunk_indices",
                "chunk_indices[5] = 0 (chunk within its sequence)", "1"},
        Refusal{"InitialStateOfDense", input(&In::initial_state, kF32, {1, 4, 32, 64}), kInvalid, "initial_state",
                "shape [N,HV,K,V] = [3,4,32,64]", "[1,4,32,64]"},
        Refusal{"HChunks", output(&Out::h, kBf16, {2, 4, 32, 64}), kInvalid, "h", "shape [NC,HV,K,V] = [3,4,32,64]",
                "[2,4,32,64]"}),
    name_of_param);

INSTANTIATE_TEST_SUITE_P(
    Data, CDenseRefusals,
    ::testing::Values(Refusal{"NullQ", [](Arguments& a) { a.call.inputs.q.data = nullptr; }, kNullPointer, "q", "data",
                              "a null pointer"},
                      Refusal{"NullInitialState", [](Arguments& a) { a.call.inputs.initial_state.data = nullptr; },
                              kNullPointer, "initial_state", "data", "a null pointer"},
                      Refusal{"NullH", [](Arguments& a) { a.call.outputs.h.data = nullptr; }, kNullPointer, "h", "data",
                              "a null pointer"},
                      Refusal{"OutputOnInput",
                              [](Arguments& a) { a.call.outputs.attn_out.data = a.call.inputs.v.data; }, kInvalid,
                              "attn_out", "memory of its own", "memory shared with v"},
                      Refusal{"FinalStateOnInitialState",
                              [](Arguments& a) { a.call.outputs.final_state.data = a.call.inputs.initial_state.data; },
                              kInvalid, "final_state", "memory of its own", "memory shared with initial_state"},
                      Refusal{"TwoOutputs", [](Arguments& a) { a.call.outputs.v_new.data = a.call.outputs.u.data; },
                              kInvalid, "u", "memory of its own", "memory shared with v_new"}),
    name_of_param);

}  // namespace
}  // namespace kda::testing
