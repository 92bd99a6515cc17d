#ifndef KDA_ACLNNOP_ACLNN_KDA_GATE_H_
#define KDA_ACLNNOP_ACLNN_KDA_GATE_H_

/* Gates from raw gates, elementwise; formulas are those of kda/kda_gate.h. */

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks every argument, and says how much workspace the second phase needs. On failure neither *workspaceSize nor
   *executor is written.

     g               [...,H,D]        fp32, fp16 or bf16
     aLogOptional    [H]              fp32; required unless useLowerBound
     dtBiasOptional  [H*D] or [H,D]   fp32
     lowerBound      any finite number; looked at only when useLowerBound
     out             [...,H,D]        fp32, fp16 or bf16 */
KDA_API aclnnStatus aclnnKdaGateGetWorkspaceSize(const aclTensor* g, const aclTensor* aLogOptional,
                                                 const aclTensor* dtBiasOptional, bool useLowerBound, double lowerBound,
                                                 const aclTensor* out, uint64_t* workspaceSize,
                                                 aclOpExecutor** executor);

/* Computes on the tensors' device. The stream is one of that device, or null; on a GPU the call does not wait. */
KDA_API aclnnStatus aclnnKdaGate(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACLNNOP_ACLNN_KDA_GATE_H_ */
