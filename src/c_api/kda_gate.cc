#include "aclnnop/aclnn_kda_gate.h"

#include <utility>

#include "c_api/calls.h"
#include "c_api/executor.h"
#include "c_api/meta.h"
#include "kda_gate/problem.h"

namespace kda::c_api {
namespace {

constexpr ArgumentReader kArguments(kKdaGateName);
constexpr std::string_view kAnyFloat = "float32 or float16 or bfloat16";
constexpr std::string_view kFloat = "float32";

}  // namespace
}  // namespace kda::c_api

using namespace kda::c_api;

aclnnStatus aclnnKdaGateGetWorkspaceSize(const aclTensor* g, const aclTensor* aLogOptional,
                                         const aclTensor* dtBiasOptional, bool useLowerBound, double lowerBound,
                                         const aclTensor* out, uint64_t* workspaceSize, aclOpExecutor** executor) {
  return operator_call([&] {
    kArguments.require_pointer("workspaceSize", workspaceSize);
    kArguments.require_pointer("executor", executor);
    kda::KdaGateInputs inputs;
    inputs.g = kArguments.required("g", g, kAnyFloat);
    inputs.A_log = kArguments.tensor("A_log", aLogOptional, kFloat);
    inputs.dt_bias = kArguments.tensor("dt_bias", dtBiasOptional, kFloat);
    const kda::TensorView output = kArguments.required("out", out, kAnyFloat);
    kda::KdaGateAttributes attributes;
    if (useLowerBound) attributes.lower_bound = lowerBound;

    kda::KdaGatePlan plan(inputs, output, attributes);
    check_pointers(inputs, output);
    publish(kda::kKdaGateName, inputs.g.device, std::move(plan), inputs, output, workspaceSize, executor);
  });
}

aclnnStatus aclnnKdaGate(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream) {
  return execute(kda::kKdaGateName, workspace, workspaceSize, executor, stream);
}
