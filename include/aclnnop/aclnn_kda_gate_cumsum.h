#ifndef KDA_ACLNNOP_ACLNN_KDA_GATE_CUMSUM_H_
#define KDA_ACLNNOP_ACLNN_KDA_GATE_CUMSUM_H_

/* The gate of chunk_kda_fwd, summed within every chunk and divided by ln 2; formulas are those of
   kda/kda_gate_cumsum.h. */

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks every argument, and says how much workspace the second phase needs. On failure neither *workspaceSize nor
   *executor is written.

     g                  [B,HV,T,K] or [HV,T,K]  fp32, fp16 or bf16; K in 1..256
     aLogOptional       [HV]                    fp32; required when useGateInKernel
     dtBiasOptional     [HV*K]                  fp32
     cuSeqlensOptional  [N+1]; needs B = 1
     chunkSize          32, 64 or 128
     lowerBound         in [-5, 0); looked at only when safeGate and useGateInKernel
     gkOut              g's shape               fp32 */
KDA_API aclnnStatus aclnnKdaGateCumsumGetWorkspaceSize(const aclTensor* g, const aclTensor* aLogOptional,
                                                       const aclTensor* dtBiasOptional,
                                                       const aclIntArray* cuSeqlensOptional, int64_t chunkSize,
                                                       bool useGateInKernel, bool safeGate, double lowerBound,
                                                       const aclTensor* gkOut, uint64_t* workspaceSize,
                                                       aclOpExecutor** executor);

/* Computes on the tensors' device. The stream is one of that device, or null; on a GPU the call does not wait. */
KDA_API aclnnStatus aclnnKdaGateCumsum(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                       aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACLNNOP_ACLNN_KDA_GATE_CUMSUM_H_ */
