#include "aclnnop/aclnn_chunk_kda_fwd.h"

#include <utility>

#include "c_api/calls.h"
#include "c_api/executor.h"
#include "c_api/meta.h"
#include "chunk_kda_fwd/arguments.h"
#include "chunk_kda_fwd/problem.h"

namespace kda::c_api {
namespace {

constexpr std::string_view kOp = kChunkKdaFwdName;
constexpr ArgumentReader kArguments(kOp);

// What the arguments may be, where their aclDataType has no counterpart in this library.
constexpr std::string_view kHalf = "float16 or bfloat16";
constexpr std::string_view kFloatOrBFloat16 = "float32 or bfloat16";
constexpr std::string_view kFloat = "float32";

Layout read_layout(const char* layout) {
  if (layout == nullptr) fail(ErrorKind::kValue, {kOp, "layout"}, "BSND, BNSD, TND or NTD", "a null pointer");
  return parse_layout(layout);
}

}  // namespace
}  // namespace kda::c_api

using namespace kda::c_api;

aclnnStatus aclnnChunkKdaFwdGetWorkspaceSize(const aclTensor* q, const aclTensor* k, const aclTensor* v,
                                             const aclTensor* g, const aclTensor* beta, const aclTensor* aLogOptional,
                                             const aclTensor* dtBiasOptional, const aclTensor* initialStateOptional,
                                             const aclIntArray* cuSeqlensOptional,
                                             const aclIntArray* chunkIndicesOptional, const char* layout, double scale,
                                             int64_t chunkSize, bool safeGate, double lowerBound, bool useGateInKernel,
                                             bool stateVFirst, const aclTensor* attnOut, const aclTensor* finalStateOut,
                                             const aclTensor* gkOut, const aclTensor* aqkOut, const aclTensor* akkOut,
                                             const aclTensor* wOut, const aclTensor* uOut, const aclTensor* qgOut,
                                             const aclTensor* kgOut, const aclTensor* vNewOut, const aclTensor* hOut,
                                             uint64_t* workspaceSize, aclOpExecutor** executor) {
  return operator_call([&] {
    kArguments.require_pointer("workspaceSize", workspaceSize);
    kArguments.require_pointer("executor", executor);

    kda::ChunkKdaFwdInputs inputs;
    inputs.q = kArguments.required("q", q, kHalf);
    inputs.k = kArguments.required("k", k, kHalf);
    inputs.v = kArguments.required("v", v, kHalf);
    inputs.g = kArguments.required("g", g, kFloatOrBFloat16);
    inputs.beta = kArguments.required("beta", beta, kFloatOrBFloat16);
    inputs.A_log = kArguments.tensor("A_log", aLogOptional, kFloat);
    inputs.dt_bias = kArguments.tensor("dt_bias", dtBiasOptional, kFloat);
    inputs.initial_state = kArguments.tensor("initial_state", initialStateOptional, kFloat);

    kda::ChunkKdaFwdOutputs outputs;
    outputs.attn_out = kArguments.required("attn_out", attnOut, kHalf);
    outputs.final_state = kArguments.tensor("final_state", finalStateOut, kFloat);
    outputs.gk = kArguments.tensor("gk", gkOut, kFloat);
    outputs.Aqk = kArguments.required("Aqk", aqkOut, kHalf);
    outputs.Akk = kArguments.required("Akk", akkOut, kHalf);
    outputs.w = kArguments.tensor("w", wOut, kHalf);
    outputs.u = kArguments.tensor("u", uOut, kHalf);
    outputs.qg = kArguments.tensor("qg", qgOut, kHalf);
    outputs.kg = kArguments.tensor("kg", kgOut, kHalf);
    outputs.v_new = kArguments.tensor("v_new", vNewOut, kHalf);
    outputs.h = kArguments.tensor("h", hOut, kHalf);

    const auto cu_seqlens = kArguments.int_array("cu_seqlens", cuSeqlensOptional);
    const auto chunk_indices = kArguments.int_array("chunk_indices", chunkIndicesOptional);
    kda::ChunkKdaFwdAttributes attributes;
    attributes.layout = read_layout(layout);
    attributes.scale = scale;
    attributes.chunk_size = chunkSize;
    attributes.use_gate_in_kernel = useGateInKernel;
    attributes.safe_gate = safeGate;
    attributes.lower_bound = lowerBound;
    attributes.state_v_first = stateVFirst;
    attributes.cu_seqlens = span_of(cu_seqlens);
    attributes.chunk_indices = span_of(chunk_indices);

    kda::ChunkKdaFwdPlan plan(inputs, outputs, attributes);
    const auto gate = useGateInKernel ? kda::GateMode::kSoftplus : kda::GateMode::kActivated;
    check_pointers(inputs_read(inputs, gate), outputs);
    publish(kOp, inputs.q.device, std::move(plan), inputs, outputs, workspaceSize, executor);
  });
}

aclnnStatus aclnnChunkKdaFwd(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
  return execute(kOp, workspace, workspaceSize, executor, stream);
}
