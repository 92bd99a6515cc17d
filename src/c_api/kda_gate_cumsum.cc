#include "aclnnop/aclnn_kda_gate_cumsum.h"

#include <utility>

#include "c_api/calls.h"
#include "c_api/executor.h"
#include "c_api/meta.h"
#include "kda_gate_cumsum/problem.h"

namespace kda::c_api {
namespace {

constexpr ArgumentReader kArguments(kKdaGateCumsumName);
constexpr std::string_view kAnyFloat = "float32 or float16 or bfloat16";
constexpr std::string_view kFloat = "float32";

}  // namespace
}  // namespace kda::c_api

using namespace kda::c_api;

aclnnStatus aclnnKdaGateCumsumGetWorkspaceSize(const aclTensor* g, const aclTensor* aLogOptional,
                                               const aclTensor* dtBiasOptional, const aclIntArray* cuSeqlensOptional,
                                               int64_t chunkSize, bool useGateInKernel, bool safeGate,
                                               double lowerBound, const aclTensor* gkOut, uint64_t* workspaceSize,
                                               aclOpExecutor** executor) {
  return operator_call([&] {
    kArguments.require_pointer("workspaceSize", workspaceSize);
    kArguments.require_pointer("executor", executor);
    kda::KdaGateCumsumInputs inputs;
    inputs.g = kArguments.required("g", g, kAnyFloat);
    inputs.A_log = kArguments.tensor("A_log", aLogOptional, kFloat);
    inputs.dt_bias = kArguments.tensor("dt_bias", dtBiasOptional, kFloat);
    const kda::TensorView gk = kArguments.required("gk", gkOut, kFloat);
    const auto cu_seqlens = kArguments.int_array("cu_seqlens", cuSeqlensOptional);
    kda::KdaGateCumsumAttributes attributes;
    attributes.chunk_size = chunkSize;
    attributes.use_gate_in_kernel = useGateInKernel;
    attributes.safe_gate = safeGate;
    attributes.lower_bound = lowerBound;
    attributes.cu_seqlens = span_of(cu_seqlens);

    kda::KdaGateCumsumPlan plan(inputs, gk, attributes);
    const auto gate = useGateInKernel ? kda::GateMode::kSoftplus : kda::GateMode::kActivated;
    check_pointers(inputs_read(inputs, gate), gk);
    publish(kda::kKdaGateCumsumName, inputs.g.device, std::move(plan), inputs, gk, workspaceSize, executor);
  });
}

aclnnStatus aclnnKdaGateCumsum(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
  return execute(kda::kKdaGateCumsumName, workspace, workspaceSize, executor, stream);
}
