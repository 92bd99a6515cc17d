#ifndef KDA_ACLNNOP_ACLNN_CHUNK_KDA_FWD_H_
#define KDA_ACLNNOP_ACLNN_CHUNK_KDA_FWD_H_

/* The chunked forward pass of Kimi Delta Attention. Formulas, shapes and the meaning of every argument are those of
   kda/chunk_kda_fwd.h. */

#include "aclnn/aclnn_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checks every argument, and says how much workspace the second phase needs. On failure neither *workspaceSize nor
   *executor is written.

   Shapes for layout "BSND"; "BNSD" swaps the middle two axes, "TND" and "NTD" drop B:

     q, k                  [B,T,H,K]   fp16 or bf16
     v                     [B,T,HV,V]  q's type
     g                     [B,T,HV,K]  fp32 or bf16
     beta                  [B,T,HV]    fp32 or bf16
     aLogOptional          [HV]        fp32; required when useGateInKernel
     dtBiasOptional        [HV*K]      fp32
     initialStateOptional  [N,HV,K,V], or [N,HV,V,K] when stateVFirst; fp32
     cuSeqlensOptional     [N+1]; rank-4 layouts then need B = 1
     chunkIndicesOptional  [2*NC]; only with cuSeqlensOptional
     scale                 finite, usually K**-0.5
     chunkSize             64 or 128
     lowerBound            in [-5, 0); looked at only when safeGate and useGateInKernel

   attnOut, aqkOut and akkOut are mandatory; any other output may be null and is then not written:

     attnOut                [B,T,HV,V]  q's type
     finalStateOut          as initialStateOptional
     gkOut                  [B,HV,T,K]  fp32
     aqkOut, akkOut         [B,HV,T,chunkSize]  q's type, as all that follow
     wOut, qgOut, kgOut     [B,HV,T,K]
     uOut, vNewOut          [B,HV,T,V]
     hOut                   [B,NC,HV,K,V]; [NC,HV,K,V] or [1,NC,HV,K,V] with cuSeqlensOptional; last two axes swapped
                            when stateVFirst */
KDA_API aclnnStatus aclnnChunkKdaFwdGetWorkspaceSize(
    const aclTensor* q, const aclTensor* k, const aclTensor* v, const aclTensor* g, const aclTensor* beta,
    const aclTensor* aLogOptional, const aclTensor* dtBiasOptional, const aclTensor* initialStateOptional,
    const aclIntArray* cuSeqlensOptional, const aclIntArray* chunkIndicesOptional, const char* layout, double scale,
    int64_t chunkSize, bool safeGate, double lowerBound, bool useGateInKernel, bool stateVFirst,
    const aclTensor* attnOut, const aclTensor* finalStateOut, const aclTensor* gkOut, const aclTensor* aqkOut,
    const aclTensor* akkOut, const aclTensor* wOut, const aclTensor* uOut, const aclTensor* qgOut,
    const aclTensor* kgOut, const aclTensor* vNewOut, const aclTensor* hOut, uint64_t* workspaceSize,
    aclOpExecutor** executor);

/* Computes on the tensors' device. The stream is one of that device, or null; on a GPU the call does not wait. */
KDA_API aclnnStatus aclnnChunkKdaFwd(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                     aclrtStream stream);

#ifdef __cplusplus
}
#endif

#endif /* KDA_ACLNNOP_ACLNN_CHUNK_KDA_FWD_H_ */
